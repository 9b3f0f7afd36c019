"""The tiny GGUF factories: reproducible files that llama.cpp loads, and that decode like models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from power_core.testing.gguf import tiny_gemma3, tiny_hybrid, tiny_llama, tiny_recurrent

gguf = pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")

FACTORIES = [tiny_llama, tiny_gemma3, tiny_recurrent, tiny_hybrid]

# Greedy text of 50 ids by raw calls, one id per line after the ids of a text and that text detokenized.
# In a child process, because the library under test ends the process on a model it dislikes.
DECODE = """
import ctypes, sys
import numpy as np
from llama_cpp import llama_cpp as c
silent = c.llama_log_callback(lambda level, text, user: None)
c.llama_log_set(silent, ctypes.c_void_p(0))
model = c.llama_model_load_from_file(sys.argv[1].encode(), c.llama_model_default_params())
vocab = c.llama_model_get_vocab(model)
params = c.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch = 128, 1, 1
context = c.llama_init_from_model(model, params)
text, ids = sys.argv[2].encode(), (c.llama_token * 64)()
count = c.llama_tokenize(vocab, text, len(text), ids, 64, False, False)
piece = ctypes.create_string_buffer(64)
decoded = b""
for token in ids[:count]:
    size = c.llama_token_to_piece(vocab, token, piece, 64, 0, True)
    decoded += piece.raw[:size]
print(decoded.hex())
row = list(ids[:count])
for _ in range(50):
    tokens = (c.llama_token * len(row))(*row)  # a name, because the batch holds no reference
    batch = c.llama_batch_get_one(tokens, len(row))
    assert c.llama_decode(context, batch) == 0
    logits = np.ctypeslib.as_array(c.llama_get_logits_ith(context, -1), shape=(c.llama_vocab_n_tokens(vocab),))
    assert np.isfinite(logits).all()
    row = [int(logits.argmax())]
    assert not c.llama_vocab_is_eog(vocab, row[0])
    print(row[0])
"""


@pytest.mark.parametrize("factory", FACTORIES)
def test_same_arguments_same_bytes(factory, tmp_path: Path) -> None:
    """A seed names one file; another seed names another."""
    first = factory(tmp_path / "a.gguf", seed=3).read_bytes()
    assert factory(tmp_path / "b.gguf", seed=3).read_bytes() == first
    assert factory(tmp_path / "c.gguf", seed=4).read_bytes() != first


@pytest.mark.parametrize("weights", ["F32", "Q8_0"])
@pytest.mark.parametrize("factory", FACTORIES)
def test_decodes_text_that_wanders(factory, weights: str, tmp_path: Path) -> None:
    """llama.cpp decodes each file to finite logits, and greedy text neither ends nor gets stuck."""
    pytest.importorskip("llama_cpp", reason="pip install power-llamacpp")
    path = factory(tmp_path / "t.gguf", weights=weights)
    text = "Hëllo, the \U0001f600 world\n"
    child = subprocess.run(
        [sys.executable, "-c", DECODE, str(path), text], capture_output=True, text=True, timeout=60, check=False
    )
    assert child.returncode == 0, child.stderr
    round_trip, *greedy = child.stdout.split()
    assert bytes.fromhex(round_trip).decode() == text
    assert len(set(greedy)) > 20


def test_overrides_and_omissions(tmp_path: Path) -> None:
    """A key can be replaced, added or left out, and a tensor left out; the rest of the file stays."""
    path = tiny_llama(
        tmp_path / "t.gguf",
        overrides={"llama.block_count": 9, "llama.context_length": None, "mine.flag": True},
        omit={"output.weight"},
    )
    reader = gguf.GGUFReader(path)
    assert reader.fields["llama.block_count"].contents() == 9
    assert reader.fields["mine.flag"].contents() is True
    assert "llama.context_length" not in reader.fields
    assert "output.weight" not in {tensor.name for tensor in reader.tensors}
    assert "output_norm.weight" in {tensor.name for tensor in reader.tensors}


def test_quantized_matrices_keep_plain_norms(tmp_path: Path) -> None:
    """Only matrices take the weight type: llama.cpp's kernels want norms in F32."""
    reader = gguf.GGUFReader(tiny_llama(tmp_path / "t.gguf", weights="Q8_0"))
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.attn_q.weight"] == "Q8_0"
    assert {kind for name, kind in types.items() if "norm" in name} == {"F32"}


def test_control_ids_have_no_weight_of_their_own(tmp_path: Path) -> None:
    """The output rows of the control ids are zero, so that no greedy run ends by accident."""
    reader = gguf.GGUFReader(tiny_llama(tmp_path / "t.gguf"))
    output = next(tensor.data for tensor in reader.tensors if tensor.name == "output.weight")
    assert not output[:3].any()
    assert np.all(np.abs(output[3:]).max(axis=1) > 0)


@pytest.mark.parametrize("size", [258, 100_000])
def test_impossible_vocabulary_is_refused(size: int, tmp_path: Path) -> None:
    """A vocabulary too small for the bytes, or larger than the merges reach, is an error before anything is written."""
    with pytest.raises(ValueError, match=f"vocab_size is {size}"):
        tiny_llama(tmp_path / "t.gguf", vocab_size=size)
    assert not (tmp_path / "t.gguf").exists()
