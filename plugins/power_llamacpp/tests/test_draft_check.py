"""Refusing bad drafter files: one clear error, and never a dead process, a hang or nonsense."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from power_llamacpp.draft_check import DraftKind, check_draft
from power_llamacpp.gguf_check import check_gguf

from power_core.errors import ArtifactError, CapabilityError
from power_core.testing.gguf import tiny_gemma3, tiny_llama
from power_core.testing.gguf_drafts import MASK_KEY, tiny_dflash, tiny_dflash2, tiny_dspark, tiny_mtp

pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")

# Opens each file as a drafter of the first, injects and drafts, each in a child of its own: what happened, by name.
CHILD = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
from power_core.draft_context import DraftBlock
from power_core.errors import ArtifactError
from power_core.shapes import ExactnessLevel, ShapeIdentity, ShapeProfile, WidthClass
from power_core.target import SessionOptions
from power_llamacpp.config import LlamaCppConfig
from power_llamacpp.gguf_check import check_gguf
from power_llamacpp.target import LlamaCppModel

target = Path(sys.argv[1])
widths = WidthClass(ShapeIdentity("x"), tuple(range(1, 17)))
model = LlamaCppModel(target, check_gguf(target), LlamaCppConfig(log_level="error"),
                      profile=ShapeProfile(ExactnessLevel.BITWISE, widths, widths))
session = model.open_session(SessionOptions(context_size=256, hidden_layers=(0, 2), threads=1))

def draft(path):
    context = session.open_draft_context(path)
    context.open(0)
    noise = np.random.default_rng(0).standard_normal((4, 128), np.float32)
    if context.facts.kind == "mtp-head":
        rows = context.forward([DraftBlock(0, 0, [1, 2, 3, 4], noise[:, :64])])
    else:
        context.inject(0, 0, noise[:, : context.facts.feature_size])
        rows = context.forward([DraftBlock(0, 4, [5] + [0] * (context.facts.block_size - 1))])
    rows.logits(1).max()

for path in map(Path, sys.stdin.read().split("\\n")):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            draft(path)
        except ArtifactError:
            os._exit(10)
        except BaseException:
            os._exit(11)
        os._exit(0)
    print(json.dumps([path.name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]), flush=True)
"""
ACCEPTED, REFUSED = 0, 10


class Case(NamedTuple):
    """A factory with what is wrong about the file it writes."""

    make: Callable[..., Path]
    wrong: dict[str, Any]


def keys(make: Callable[..., Path], architecture: str, table: dict[str, list[Any]]) -> Iterator[Case]:
    for key, values in table.items():
        full = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{architecture}.{key}"
        for value in values:
            yield Case(make, {"overrides": {full: value}})


NAN, TOP = math.nan, 2**32 - 1
COMMON_KEYS = {
    "general.architecture": [None, "llama", "eagle3", "nonsense"],
    "split.count": [2, "two"],
    "tokenizer.ggml.model": [None, "gpt2", "bert"],
    MASK_KEY: [320, TOP, "mask", -1.0],
    "block_count": [None, 0, 1, 3, 513, TOP, "two", 2.0],
    "context_length": [None, 0],
    "embedding_length": [None, 0, 32, 128],
    "feed_forward_length": [None, 0, 64, [128, 128]],
    "attention.head_count": [None, 0, 3, 5, 65, "x", [4, 4], TOP],
    "attention.head_count_kv": [None, 0, 3, 8, 2.0],
    "attention.key_length": [0, 1, 8, 32, 2**31],
    "attention.value_length": [0, 8, 32],
    "attention.layer_norm_rms_epsilon": [None, -1.0, NAN, math.inf, 1],
    "attention.causal": [True, 1],
    "attention.sliding_window": [16, TOP],
    "attention.key_length_swa": [8],
    "attention.scale": [-1.0, NAN],
    "rope.dimension_count": [0, 7, 17, 2**20],
    "rope.dimension_sections": [[1, 1, 1, 1], [0, 0, 0, 0], [8], [2**30, 0, 0, 0]],
    "rope.freq_base": [0.0, -1.0, NAN, "x", 10000],
    "rope.scaling.type": ["su", 1],
    "rope.scaling.factor": [NAN, -1.0],
    "vocab_size": [None, 0, 1, 319, 321, 2**31, TOP],
    "block_size": [None, 0, 257, TOP, 8.0],
    "target_layers": [None, 3, [0, 3], [-1, 3], [1, 4], [1, 400], [3, 3], [1], [1, 2, 3], ["a", "b"], [1.0, 3.0]],
    "hidden_activation": ["relu", 1, ["silu", "silu"]],
    "hidden_act": ["silu", "gelu"],  # read by nobody
    "nextn_predict_layers": [1, 3],
    "expert_count": [4],
    "expert_used_count": [2],
    "hyper_connection_count": [1],
    "pooling_type": [1],
    "embedding_length_out": [32],
    "embedding_scale": [NAN, 1, -2.0],
}
SELECTOR_KEYS = {
    "selector_rank": [None, 0, 9, TOP],
    "selector_top_k": [None, 0, 8, 320, TOP],
    "conv_kernel_size": [None, 0, 2, 5, TOP],
    "conv_group_size": [None, 0, 3, 32, 65, TOP],
    "sample_from_anchor": [True],
}
MARKOV_KEYS = {
    "sample_from_anchor": [1, "true"],
    "has_confidence_head": [False, 1],
    "block_size": [None, 0, TOP],
    "selector_rank": [8],
}
LAYER_KEYS = {
    "block_count": [None, 0, 1, 4, 6, 513],
    "nextn_predict_layers": [None, 0, 2, 5, TOP],
    "embedding_length": [0, 32, 128],
    "attention.head_count": [None, 0, 2, 3, 8],
    "attention.head_count_kv": [None, 0, 3],
    "attention.key_length": [None, 0, 8],
    "attention.value_length": [8],
    "attention.layer_norm_rms_epsilon": [None, -1.0, NAN],
    "rope.dimension_count": [0, 7, 17],
    "rope.dimension_sections": [None, [0, 0, 0, 0], [-1, 1, 1, 1]],
    "full_attention_interval": [0],
    "ssm.state_size": [None, 0, 8],
    "ssm.group_count": [0, 3],
    "ssm.conv_kernel": [0],
    "tokenizer.ggml.tokens": [None, ["a", "b"]],
    "tokenizer.ggml.model": ["none"],
    "expert_count": [4],
}


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def replaced(make: Callable[..., Path], tensors: dict[str, np.ndarray], **more: Any) -> list[Case]:
    return [Case(make, {"replace": {name: values}, **more}) for name, values in tensors.items()]


def key_cases() -> Iterator[Case]:
    yield from keys(tiny_dflash, "dflash", COMMON_KEYS)
    yield from keys(tiny_dflash, "dflash", {key: [1] for key in (*SELECTOR_KEYS, *MARKOV_KEYS) if key != "block_size"})
    yield from keys(tiny_dflash2, "dflash", SELECTOR_KEYS)
    yield from keys(tiny_dspark, "dflash", MARKOV_KEYS)
    yield from keys(tiny_mtp, "qwen35", LAYER_KEYS)
    for pattern in ([False, False], [True], 1, "all"):
        overrides = {"dflash.attention.sliding_window": 16, "dflash.attention.sliding_window_pattern": pattern}
        yield Case(tiny_dflash, {"overrides": overrides})


def tensor_cases() -> Iterator[Case]:
    needed = {
        tiny_dflash: ("fc.weight", "enc.output_norm.weight", "output_norm.weight", "blk.0.attn_norm.weight",
                      "blk.1.attn_q.weight", "blk.0.attn_q_norm.weight", "blk.1.ffn_down.weight"),
        tiny_dflash2: ("selector_predecessor.weight", "selector_successor.weight", "selector_hidden.weight",
                       "blk.0.attn_conv_base", "blk.1.ffn_conv_proj.weight"),
        tiny_dspark: ("markov_w1.weight", "markov_w2.weight", "conf_proj.weight"),
        tiny_mtp: ("token_embd.weight", "output_norm.weight", "blk.4.nextn.eh_proj.weight",
                   "blk.4.nextn.hnorm.weight", "blk.4.attn_k.weight", "blk.4.post_attention_norm.weight"),
    }  # fmt: skip
    for make, names in needed.items():
        yield from (Case(make, {"omit": {name}}) for name in names)
    yield from replaced(tiny_dflash, {
        "fc.weight": zeros(64, 64), "output_norm.weight": zeros(32), "blk.0.attn_q.weight": zeros(32, 64),
        "blk.0.attn_k_norm.weight": zeros(8), "blk.1.ffn_up.weight": zeros(64, 64), "output.weight": zeros(300, 64),
        "token_embd.weight": zeros(64, 320), "rope_freqs.weight": zeros(4), "blk.0.attn_sinks.weight": zeros(2),
        "blk.2.attn_norm.weight": zeros(64), "fc.bias": zeros(64), "fc.scale": zeros(1), "nonsense": zeros(1),
        "blk.0.layer_output_scale.weight": zeros(2), "conf_proj.weight": zeros(1, 72),
    })  # fmt: skip
    for name, shape in (("enc.output_norm.weight", (64,)), ("blk.0.attn_norm.weight", (64,)),
                        ("blk.1.attn_q_norm.weight", (16,)), ("fc.weight", (64, 128))):  # fmt: skip
        kinds = (np.int8, np.int32, np.float64) if name == "fc.weight" else (np.float16, np.int32, np.float64)
        yield from (Case(tiny_dflash, {"replace": {name: zeros(*shape, dtype=kind)}}) for kind in kinds)
    yield from replaced(tiny_dflash2, {
        "blk.0.attn_conv_base": zeros(2, 3, 64, dtype=np.float16), "blk.1.ffn_conv_base": zeros(3, 2, 64),
        "blk.0.ffn_conv_proj.weight": zeros(12, 64), "selector_hidden.weight": zeros(9, 64),
        "selector_successor.weight": zeros(319, 8), "markov_w1.weight": zeros(320, 8),
    })  # fmt: skip
    yield from replaced(tiny_dspark, {
        "markov_w1.weight": zeros(300, 8), "markov_w2.weight": zeros(320, 9), "conf_proj.weight": zeros(1, 64),
        "conf_proj.bias": zeros(2), "selector_hidden.weight": zeros(8, 64),
    })  # fmt: skip
    yield from replaced(tiny_mtp, {
        "blk.4.nextn.eh_proj.weight": zeros(64, 64), "blk.4.attn_q.weight": zeros(64, 64), "token_embd.weight":
        zeros(300, 64), "blk.4.nextn.enorm.weight": zeros(64, dtype=np.float16), "blk.0.attn_norm.weight": zeros(64),
        "blk.4.nextn.embed_tokens.weight": zeros(300, 64), "blk.4.attn_q.bias": zeros(128),
    })  # fmt: skip


def value_cases() -> Iterator[Case]:
    reduced = {"draft_vocab": range(3, 103)}
    for ids in (
        np.arange(3, 103, dtype=np.int32), np.arange(3, 103, dtype=np.float32), np.arange(3, 102, dtype=np.int64),
        np.arange(230, 330, dtype=np.int64), np.arange(-1, 99, dtype=np.int64), np.full(100, 7, np.int64),
        np.array([2**62, *range(99)]), np.arange(100, dtype=np.int64).reshape(10, 10),
    ):  # fmt: skip
        yield from (Case(make, {"replace": {"d2t": ids}, **reduced}) for make in (tiny_dflash, tiny_dspark))
    yield from (Case(make, {"omit": {"output.weight"}, **reduced}) for make in (tiny_dflash, tiny_dspark))
    yield Case(tiny_dflash, {"omit": {"d2t"}, **reduced})
    for bad in (NAN, math.inf, -math.inf):
        for make, name, shape in (
            (tiny_dflash, "fc.weight", (64, 128)), (tiny_dflash, "blk.1.ffn_norm.weight", (64,)),
            (tiny_dflash2, "selector_hidden.weight", (8, 64)), (tiny_dspark, "markov_w2.weight", (320, 8)),
            (tiny_dspark, "conf_proj.bias", (1,)), (tiny_mtp, "blk.4.nextn.hnorm.weight", (64,)),
        ):  # fmt: skip
            values = zeros(*shape)
            values.flat[-1] = bad
            yield Case(make, {"replace": {name: values}})
    half = np.full((64, 128), 1.0, np.float16)
    half[3, 3] = NAN
    yield Case(tiny_dflash, {"replace": {"fc.weight": half}})


CASES = [*key_cases(), *tensor_cases(), *value_cases()]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target") / "t.gguf", layers=4)


def outcomes(target: Path, files: list[Path]) -> dict[str, int]:
    """What opening each of *files* and drafting with it came to: an exit status, negative for a signal."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(target)], input="\n".join(map(str, files)), capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(found) == len(files), done.stderr[-2000:]
    return found


def damaged(folder: Path, make: Callable[..., Path], seed: int, count: int) -> list[Path]:
    """Copies of a drafter with a bit of the header flipped."""
    data = make(folder / "whole.gguf").read_bytes()
    end = min(tensor.offset for tensor in check_header(folder / "whole.gguf").values())
    rng, files = np.random.default_rng(seed), []
    for number in range(count):
        copy, at = bytearray(data), int(rng.integers(end))
        copy[at] ^= 1 << int(rng.integers(8))
        files.append(folder / f"{make.__name__}-{number}.gguf")
        files[-1].write_bytes(copy)
    return files


def check_header(path: Path) -> Any:
    from power_core.artifacts.gguf import GgufFile

    return GgufFile.open(path).tensors


def test_sound_files_pass_and_draft(target: Path, tmp_path: Path) -> None:
    """Drafters of every kind are what they are, and draft; so do those with a reduced vocabulary or q8_0 weights."""
    files = {
        tiny_dflash(tmp_path / "v1.gguf"): DraftKind.DFLASH,
        tiny_dflash(tmp_path / "q8.gguf", weights="Q8_0"): DraftKind.DFLASH,
        tiny_dflash(tmp_path / "own.gguf", own_matrices=True): DraftKind.DFLASH,
        tiny_dflash(tmp_path / "v1r.gguf", draft_vocab=range(3, 99)): DraftKind.DFLASH,
        tiny_dflash2(tmp_path / "v2.gguf"): DraftKind.DFLASH2,
        tiny_dspark(tmp_path / "ds.gguf"): DraftKind.DSPARK,
        tiny_dspark(
            tmp_path / "dsb.gguf", anchor_first=False, confidence=False, draft_vocab=range(9)
        ): DraftKind.DSPARK,
        tiny_mtp(tmp_path / "mtp.gguf"): DraftKind.MTP,
    }
    info = check_gguf(target)
    facts = {path: check_draft(path, info) for path in files}
    assert {path: fact.kind for path, fact in facts.items()} == files
    assert facts[tmp_path / "v1.gguf"].hidden_layers == (0, 2)  # ids 1 and 3 are inputs of blocks 1 and 3
    assert set(outcomes(target, list(files)).values()) == {ACCEPTED}


def test_malformed_files_are_refused(target: Path, tmp_path: Path) -> None:
    """Each of some 300 files is refused by an error that names it and says what to do; none reaches native code."""
    info = check_gguf(target)
    assert len(CASES) > 250
    for number, case in enumerate(CASES):
        path = case.make(tmp_path / f"{number}.gguf", **case.wrong)
        with pytest.raises(ArtifactError) as caught:
            pytest.fail(f"{case} is accepted as {check_draft(path, info)}")
        error = caught.value
        assert str(path) in str(error), case
        assert "\n" not in str(error)
        assert error.fix
        assert error.plugin == "llamacpp"


def test_opening_malformed_files_ends_no_process(target: Path, tmp_path: Path) -> None:
    """The same through `open_draft_context`, each in a process of its own, for a sample of the files."""
    sample = CASES[::6]
    files = [case.make(tmp_path / f"{number}.gguf", **case.wrong) for number, case in enumerate(sample)]
    found = outcomes(target, files)
    assert {name: status for name, status in found.items() if status != REFUSED} == {}


@pytest.mark.slow
def test_opening_every_malformed_file_ends_no_process(target: Path, tmp_path: Path) -> None:
    """The same for all of them."""
    files = [case.make(tmp_path / f"{number}.gguf", **case.wrong) for number, case in enumerate(CASES)]
    found = outcomes(target, files)
    assert {name: status for name, status in found.items() if status != REFUSED} == {}


@pytest.mark.parametrize("count", [12, pytest.param(150, marks=pytest.mark.slow)])
def test_damaged_headers_end_no_process(count: int, target: Path, tmp_path: Path) -> None:
    """A file with one bit of its header flipped is refused, or drafts as if nothing had been."""
    makers = (tiny_dflash, tiny_dflash2, tiny_dspark, tiny_mtp)
    files = list(chain.from_iterable(damaged(tmp_path, make, 7, count) for make in makers))
    found = outcomes(target, files)
    assert {name: status for name, status in found.items() if status not in (ACCEPTED, REFUSED)} == {}


@pytest.mark.parametrize("make", [tiny_dflash, tiny_mtp])
def test_cut_files_are_refused(make: Callable[..., Path], target: Path, tmp_path: Path) -> None:
    """A file that ends anywhere before its end is refused."""
    data = make(tmp_path / "whole.gguf").read_bytes()
    for size in (0, 3, 8, 100, len(data) // 2, len(data) - 33):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(ArtifactError):
            check_draft(tmp_path / "cut.gguf", check_gguf(target))


def test_not_finite_scale_of_a_quantized_block(target: Path, tmp_path: Path) -> None:
    """A NaN can hide in the scale of a block, where no value is a float."""
    path = tiny_dflash(tmp_path / "t.gguf", weights="Q8_0")
    tensor = check_header(path)["fc.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.offset + 34)
        file.write(np.float16(NAN).tobytes())
    with pytest.raises(ArtifactError, match=r"fc.weight holds a number that is not finite, at index 32"):
        check_draft(path, check_gguf(target))


def test_targets_that_cannot_be_drafted_for(tmp_path: Path) -> None:
    """No hidden states, other sizes, or another vocabulary of the same size: refused with the reason."""
    draft = tiny_dflash(tmp_path / "d.gguf")
    with pytest.raises(CapabilityError, match="no hidden states of architecture 'gemma3'"):
        check_draft(draft, check_gguf(tiny_gemma3(tmp_path / "g.gguf")))
    wide = check_gguf(tiny_llama(tmp_path / "w.gguf", hidden_size=128, layers=4))
    with pytest.raises(ArtifactError, match=r"embedding_length is 64 .expected the target's 128"):
        check_draft(draft, wide)
    short = check_gguf(tiny_llama(tmp_path / "s.gguf", layers=3))
    with pytest.raises(ArtifactError, match=r"target_layers holds 3 .expected 1 to 2"):
        check_draft(draft, short)
    layer = tiny_mtp(tmp_path / "m.gguf")
    tokens = list(check_gguf(layer).metadata["tokenizer.ggml.tokens"])
    tokens[300] = "zzzz"
    other = check_gguf(tiny_llama(tmp_path / "o.gguf", overrides={"tokenizer.ggml.tokens": tokens}))
    with pytest.raises(ArtifactError, match="token 300 is"):
        check_draft(layer, other)
