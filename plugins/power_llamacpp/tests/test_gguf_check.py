"""Refusing bad GGUF files: one clear error, before llama.cpp sees the file."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from power_llamacpp.gguf_check import check_finite, check_gguf

from power_core.errors import ArtifactError
from power_core.testing.gguf import tiny_gemma3, tiny_hybrid, tiny_llama, tiny_recurrent

pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")

FACTORIES = [tiny_llama, tiny_gemma3, tiny_recurrent, tiny_hybrid]

# Loads the file and decodes three steps. Exit status 3: llama.cpp refused; negative: a signal.
CHILD = """
import ctypes, sys
from llama_cpp import llama_cpp as c
silent = c.llama_log_callback(lambda level, text, user: None)
c.llama_log_set(silent, ctypes.c_void_p(0))
model = c.llama_model_load_from_file(sys.argv[1].encode(), c.llama_model_default_params())
if not model:
    sys.exit(3)
vocab = c.llama_model_get_vocab(model)
ids = (c.llama_token * 64)()
count = c.llama_tokenize(vocab, b"Hello there", 11, ids, 64, True, True)
params = c.llama_context_default_params()
params.n_ctx = params.n_batch = params.n_ubatch = 64
params.n_threads = params.n_threads_batch = 1
context = c.llama_init_from_model(model, params)
if not context or count < 1:
    sys.exit(3)
for length in (count, 1, 1):
    if c.llama_decode(context, c.llama_batch_get_one(ids, length)):
        sys.exit(3)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "t.gguf", layers=1, hidden_size=32).read_bytes()


def refusal(path: Path, data: bytes | None = None) -> ArtifactError:
    """The error *path* is refused with; it names the file, is one line and tells what to do."""
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ArtifactError) as caught:
        check_gguf(path)
    error = caught.value
    assert str(path) in str(error)
    assert "\n" not in str(error)
    assert error.fix
    assert error.plugin == "llamacpp"
    return error


@pytest.mark.parametrize("factory", FACTORIES)
def test_sound_files_pass(factory, tmp_path: Path) -> None:
    """The header of a sound file is read whole, and says what the file was made with."""
    info = check_gguf(factory(tmp_path / "t.gguf", hidden_size=64, vocab_size=300, context=777))
    assert (info.hidden_size, info.vocab_size, info.context_length) == (64, 300, 777)
    assert info.num_layers == info.metadata[f"{info.architecture}.block_count"]
    assert info.sliding_window == (32 if factory is tiny_gemma3 else 0)
    assert info.tensors["token_embd.weight"].shape == (300, 64)
    check_finite(info)


def test_header_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    """Our reader and ggml's own Python reader see the same tensors and values in one file."""
    import gguf

    path = tiny_hybrid(tmp_path / "t.gguf", weights="Q8_0")
    info, other = check_gguf(path), gguf.GGUFReader(path)
    for tensor in other.tensors:
        mine = info.tensors[tensor.name]
        assert (mine.shape[::-1], mine.dtype) == (tuple(tensor.shape.tolist()), tensor.tensor_type.name)
        assert (mine.offset, mine.nbytes) == (tensor.data_offset, tensor.n_bytes)
    for key in info.metadata:
        mine = info.metadata[key]
        value = mine.tolist() if isinstance(mine, np.ndarray) else mine
        assert (list(value) if value is not mine or hasattr(value, "raw") else value) == other.fields[key].contents()


def test_foreign_files(tmp_path: Path, tiny: bytes) -> None:
    """What is not a GGUF file is called by what it is."""
    archive = tmp_path / "model.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("model.gguf", tiny[:100])
    assert "empty file" in str(refusal(tmp_path / "e.gguf", b""))
    assert refusal(tmp_path / "s.gguf", b"GG").got == b"GG"
    assert "expected b'GGUF'" in str(refusal(tmp_path / "t.gguf", b"hello world, this is a text"))
    assert "PK" in str(refusal(archive))
    assert "not a regular file" in str(refusal(tmp_path))
    assert "No such file" in str(refusal(tmp_path / "absent.gguf"))


@pytest.mark.parametrize(
    ("version", "words"), [(1, "version 1"), (4, "version 4"), (0, "version 0"), (3 << 24, "big-endian")]
)
def test_versions(version: int, words: str, tmp_path: Path, tiny: bytes) -> None:
    """Only versions 2 and 3 are read, and the other byte order is named."""
    assert words in str(refusal(tmp_path / "t.gguf", tiny[:4] + struct.pack("<I", version) + tiny[8:]))


@pytest.mark.parametrize("field", [8, 16], ids=["tensors", "keys"])
@pytest.mark.parametrize("count", [2**63, 2**64 - 1, 10**6])
def test_absurd_counts(field: int, count: int, tmp_path: Path, tiny: bytes) -> None:
    """A count that the file cannot hold is refused before anything is allocated for it."""
    error = refusal(tmp_path / "t.gguf", tiny[:field] + struct.pack("<Q", count) + tiny[field + 8 :])
    assert error.got == count


BAD_KEYS = {
    "block_count": [0, 513, None, "two", 2.0, 2**32 - 1],
    "context_length": [0, None],
    "embedding_length": [0, 63, None],
    "nextn_predict_layers": [2, 2**32 - 1],
    "expert_count": [4, 5000],
    "expert_used_count": [2],
    "attention.head_count": [0, 3, 65, [4, 4, 4], [-4, 4], "x"],
    "attention.head_count_kv": [3, 2.0],
    "attention.key_length": [0],
    "attention.layer_norm_rms_epsilon": [-1.0, float("nan"), float("inf")],
    "attention.causal": [False],
    "rope.dimension_count": [0, 7, 17],
    "rope.freq_base": [0.0, -1.0, float("nan")],
    "rope.scaling.type": ["su", 1, [1, 1]],
    "rope.scaling.factor": [float("nan")],
    "ssm.inner_size": [0],
    "full_attention_interval": [0],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD_KEYS.items() for value in values])
def test_bad_hyperparameters(key: str, value, tmp_path: Path) -> None:
    """Each value that would abort llama.cpp, or make it compute nonsense, is refused by the name of its key."""
    path = tiny_llama(tmp_path / "t.gguf", overrides={f"llama.{key}": value})
    error = refusal(path)
    assert key.split(".")[-1].split("_")[0] in str(error)


@pytest.mark.parametrize(
    ("factory", "key", "value"),
    [
        (tiny_gemma3, "gemma3.attention.sliding_window_pattern", 1),
        (tiny_gemma3, "gemma3.attention.sliding_window_pattern", [False] * 4),
        (tiny_gemma3, "gemma3.rope.dimension_count_swa", 3),
        (tiny_recurrent, "mamba.ssm.inner_size", 64),
        (tiny_recurrent, "mamba.ssm.time_step_rank", 0),
        (tiny_hybrid, "qwen35.full_attention_interval", 0),
        (tiny_hybrid, "qwen35.rope.dimension_sections", [0, 0, 0, 0]),
        (tiny_hybrid, "qwen35.rope.dimension_sections", [2**30, 0, 0, 0]),
        (tiny_hybrid, "qwen35.ssm.group_count", 0),
        (tiny_hybrid, "qwen35.ssm.group_count", 3),
        (tiny_hybrid, "qwen35.ssm.state_size", 8),
    ],
)
def test_bad_hyperparameters_of_one_family(factory, key: str, value, tmp_path: Path) -> None:
    """Windows, rope sections and recurrent state sizes that llama.cpp asserts on."""
    refusal(factory(tmp_path / "t.gguf", overrides={key: value}))


BAD_TOKENIZERS = {
    "tokenizer.ggml.model": [None, "none", "bert", "llama"],  # "llama" needs a token for each byte
    "tokenizer.ggml.tokens": [None, ["a", "b"], [1, 2, 3], ["same"] * 320],
    "tokenizer.ggml.token_type": [[1, 1], ["normal"], [1.0] * 320],
    "tokenizer.ggml.scores": [[0.0] * 7],
    "tokenizer.ggml.merges": [None, 5],
    "tokenizer.ggml.eos_token_id": [320, 2**32 - 1],
    "tokenizer.ggml.bos_token_id": ["zero"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD_TOKENIZERS.items() for value in values])
def test_bad_vocabularies(key: str, value, tmp_path: Path) -> None:
    """A vocabulary that is absent, ambiguous or out of step with the embedding is refused."""
    refusal(tiny_llama(tmp_path / "t.gguf", overrides={key: value}))


@pytest.mark.parametrize(
    ("architecture", "words"),
    [(None, "general.architecture"), ("bert", "embedding model"), ("dflash", "drafter"), ("nonsense", "unknown")],
)
def test_architectures(architecture: str | None, words: str, tmp_path: Path) -> None:
    """Only causal text models are targets; the refusal says what the file is instead."""
    path = tiny_llama(tmp_path / "t.gguf", overrides={"general.architecture": architecture})
    assert words in str(refusal(path))


def test_part_of_a_split_model(tmp_path: Path) -> None:
    """A part of a split model is refused with the command that merges it."""
    error = refusal(tiny_llama(tmp_path / "t.gguf", overrides={"split.count": 3}))
    assert "llama-gguf-split --merge" in str(error)


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "output_norm.weight", "blk.1.attn_q.weight", "blk.0.ffn_down.weight"]
)
def test_missing_tensors_are_named(name: str, tmp_path: Path) -> None:
    """A missing tensor of the commonest family is named in the refusal."""
    assert name in str(refusal(tiny_llama(tmp_path / "t.gguf", omit={name})))


def test_missing_projection_of_a_delta_net(tmp_path: Path) -> None:
    """llama.cpp would read through a null pointer here."""
    assert "attn_qkv" in str(refusal(tiny_hybrid(tmp_path / "t.gguf", omit={"blk.0.attn_qkv.weight"})))


def patch_tensor_type(data: bytes, name: str, number: int) -> bytes:
    """*data* with another type number for one tensor; sizes are left as they were."""
    encoded = struct.pack("<Q", len(name)) + name.encode()
    at = data.index(encoded) + len(encoded)
    at += 4 + 8 * struct.unpack_from("<I", data, at)[0]
    return data[:at] + struct.pack("<I", number) + data[at + 4 :]


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("output_norm.weight", 26, "expected F32"),
        ("output.weight", 26, "type for weights"),
        ("output.weight", 4, "unknown type 4"),
    ],
)
def test_tensor_types(name: str, number: int, words: str, tmp_path: Path, tiny: bytes) -> None:
    """Withdrawn types, integer matrices and vectors that are not F32 are refused."""
    assert words in str(refusal(tmp_path / "t.gguf", patch_tensor_type(tiny, name, number)))


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_cut_in_the_weights(cut: int, tmp_path: Path, tiny: bytes) -> None:
    """A download that stopped early is refused, and the fix is to download again."""
    error = refusal(tmp_path / "t.gguf", tiny[: -cut - 32])
    assert "cut" in str(error)
    assert error.fix == "download the file again"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_truncation_is_refused(data: st.DataObject, tmp_path: Path, tiny: bytes) -> None:
    """Wherever a file ends, it is refused with an `ArtifactError` and nothing else."""
    refusal(tmp_path / "t.gguf", tiny[: data.draw(st.integers(0, len(tiny) - 64))])


def header_size(path: Path) -> int:
    return min(tensor.offset for tensor in check_gguf(path).tensors.values())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=4))
def test_flipped_bits_never_escape(flips: list[tuple[float, int]], tmp_path: Path, tiny: bytes) -> None:
    """Flipped bits anywhere in the header are accepted or refused with an `ArtifactError`, never another error."""
    path = tmp_path / "t.gguf"
    path.write_bytes(tiny)
    mutant = bytearray(tiny)
    for where, bit in flips:
        mutant[int(where * header_size(path))] ^= 1 << bit
    path.write_bytes(mutant)
    with suppress(ArtifactError):
        check_gguf(path)


def accepted_mutants(factory, path: Path, count: int) -> list[bytes]:
    """Mutants of a file, one flipped bit each outside its token list, that the check lets pass."""
    data = factory(path).read_bytes()
    end, generator, accepted = header_size(path), random.Random(5), []
    tokens, after = data.index(b"tokenizer.ggml.tokens"), data.index(b"tokenizer.ggml.bos_token_id")
    while len(accepted) < count:
        where = generator.choice([generator.randrange(0, tokens), generator.randrange(after, end)])
        mutant = data[:where] + bytes([data[where] ^ 1 << generator.randrange(8)]) + data[where + 1 :]
        path.write_bytes(mutant)
        try:
            check_gguf(path)
        except ArtifactError:
            continue
        accepted.append(mutant)
    return accepted


@pytest.mark.parametrize("factory", FACTORIES)
def test_accepted_mutants_do_not_end_the_process(factory, tmp_path: Path) -> None:
    """What the check lets pass, llama.cpp decodes or refuses; it never dies of a signal."""
    path = tmp_path / "t.gguf"
    for mutant in accepted_mutants(factory, path, 4):
        path.write_bytes(mutant)
        command = [sys.executable, "-c", CHILD, str(path)]
        child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert child.returncode in (0, 3), child.stderr


@pytest.mark.parametrize("weights", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(weights: str, value: float, tmp_path: Path) -> None:
    """A NaN or an infinity in an unquantized tensor is found, with the tensor's name."""
    path = tiny_llama(tmp_path / "t.gguf", weights=weights)
    tensor = check_gguf(path).tensors["blk.1.ffn_up.weight"]
    bits = np.float32(value).view(np.uint32)
    raw = {
        "F32": np.float32(value).tobytes(),
        "F16": np.float16(value).tobytes(),
        "BF16": (bits >> 16).astype("<u2").tobytes(),
    }
    with path.open("r+b") as file:
        file.seek(tensor.offset + 6 * len(raw[weights]))
        file.write(raw[weights])
    with pytest.raises(ArtifactError, match=r"blk\.1\.ffn_up\.weight .* index 6"):
        check_finite(check_gguf(path))
