"""The contract `mtp-head`: good files pass, and no wrong one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from power_mtp.artifact import MtpHeadContract
from power_mtp.testing import head_config, random_tensors, tiny_shape, write_gguf, write_safetensors

from power_core.artifacts import ArtifactFacts, TensorFile, open_tensors
from power_core.errors import ArtifactError
from power_core.testing import ScriptedTarget
from power_core.testing.gguf import tiny_hybrid
from power_core.testing.gguf_drafts import tiny_dspark, tiny_mtp

CONTRACT = MtpHeadContract()
REDUCED = tiny_shape(has_output=True, is_reduced=True, draft_vocab=40, fuses=True, target_layers=(0, 1))
GOOD = (tiny_shape(), tiny_shape(has_output=True), tiny_shape(fuses=True), REDUCED)


def written(folder: Path, container: str, tensors: dict[str, Any], config: dict[str, Any]) -> TensorFile:
    if container == "gguf":
        return open_tensors(write_gguf(folder / "head.gguf", tensors, config))
    return open_tensors(write_safetensors(folder / "head", tensors, config))


def checked(file: TensorFile) -> ArtifactFacts:
    facts = CONTRACT.check(file)
    CONTRACT.check_payload(file)
    return facts


def refused(file: TensorFile) -> ArtifactError:
    """The error that a check of *file* ends with: one line with its data."""
    with pytest.raises(ArtifactError) as caught:
        checked(file)
    assert "\n" not in str(caught.value)
    assert caught.value.expected is not None
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize("container", ["safetensors", "gguf"])
@pytest.mark.parametrize("shape", GOOD)
def test_good_heads_pass(tmp_path: Path, shape: Any, container: str) -> None:
    """Every form of a head is recognised in both containers, and its facts are right."""
    file = written(tmp_path, container, random_tensors(shape), head_config(shape))
    assert CONTRACT.matches(file)
    facts = checked(file)
    assert (facts.hidden_layers, facts.hidden_size, facts.vocab_size) == (shape.target_layers, 64, 320)
    assert facts.draft_vocab_size == shape.draft_vocab


@pytest.mark.parametrize("weights", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_quantized_matrices_pass(tmp_path: Path, weights: str) -> None:
    """Matrices of a GGUF may be of any type that kernels take."""
    shape = tiny_shape(has_output=True)
    file = open_tensors(write_gguf(tmp_path / "head.gguf", random_tensors(shape), head_config(shape), weights))
    CONTRACT.check(file)
    CONTRACT.check_payload(file)


def test_mtp_only_files_are_heads_for_the_native_executor(tmp_path: Path) -> None:
    """A qwen35 file without a trunk is one; the whole model, and a drafter of another kind, are not."""
    file = open_tensors(tiny_mtp(tmp_path / "mtp.gguf"))
    assert CONTRACT.matches(file)
    facts = checked(file)
    assert (facts.hidden_layers, facts.details["executor"]) == ((), "native")
    assert not CONTRACT.matches(open_tensors(tiny_hybrid(tmp_path / "whole.gguf", nextn_layers=1)))
    assert not CONTRACT.matches(open_tensors(tiny_dspark(tmp_path / "dspark.gguf")))


def test_a_renamed_drafter_of_another_kind_is_none(tmp_path: Path) -> None:
    """The table decides with the metadata: a DSpark file that calls itself an MTP head is claimed by nobody."""
    path = tiny_dspark(tmp_path / "dspark.gguf", overrides={"general.architecture": "mtp-head"})
    file = open_tensors(path)
    assert not CONTRACT.matches(file)
    refused(file)


TENSOR_FAULTS = {
    "missing": lambda t, name: t.pop(name),
    "one row more": lambda t, name: t.update({name: np.concatenate([t[name], t[name][:1]])}),
    "transposed": lambda t, name: t.update({name: np.ascontiguousarray(t[name][..., None].repeat(2, -1))}),
    "integers": lambda t, name: t.update({name: np.zeros(t[name].shape, np.int64)}),
    "nan": lambda t, name: t[name].reshape(-1).__setitem__(-1, np.nan),
    "inf": lambda t, name: t[name].reshape(-1).__setitem__(0, -np.inf),
}


@pytest.mark.parametrize("container", ["safetensors", "gguf"])
@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_each_tensor_is_checked(tmp_path: Path, container: str, fault: str) -> None:
    """Whatever tensor is wrong, the message names it."""
    for name in random_tensors(REDUCED):
        if name in ("d2t", "feature_fc") or (name == "output" and fault in ("missing", "one row more")):
            continue  # these decide sizes; they have their own tests
        tensors = random_tensors(REDUCED)
        TENSOR_FAULTS[fault](tensors, name)
        if not (container == "gguf" and fault == "integers"):
            folder = tmp_path / name
            folder.mkdir()
            refused(written(folder, container, tensors, head_config(REDUCED)))


KEY_FAULTS: dict[str, tuple[Any, ...]] = {
    "hidden_size": (None, 0, -1, 63, 2**40, "64", 64.0, True),
    "intermediate_size": (None, 0, 95, [96]),
    "num_attention_heads": (None, 0, 3, 8),
    "num_key_value_heads": (None, 0, 3, 8),
    "head_dim": (None, 0, 15, 32, 2**20),
    "rms_norm_eps": (None, 0.0, -1e-5, 1e-30, 1.0, 1e9, 10**400, "1e-5"),
    "rope_theta": (None, 0.0, 1.0, -1.0, 1e13, 10**400),
    "vocab_size": (None, 0, 39, 2**31, 320.5),
    "target_layer_ids": (None, [], [0], [0, 0], [-1, 0], [0, 1, 2], [0, 1.5], "01", [0, True], 1),
    "trained_steps": (0, -1, "7", 2.5),
    "draft_vocab_size": (39, 320, "40"),
}


@pytest.mark.parametrize("key", KEY_FAULTS)
def test_each_key_is_checked(tmp_path: Path, key: str) -> None:
    """A key that is missing, of another type or out of range is refused."""
    tensors = random_tensors(REDUCED)
    for i, value in enumerate(KEY_FAULTS[key]):
        config = head_config(REDUCED) | {key: value}
        if value is None:
            del config[key]
        folder = tmp_path / str(i)
        error = refused(written(folder, "safetensors", tensors, config))
        assert error.plugin == "mtp"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"d2t": None}, "there is no d2t"),
        ({"output": None}, "d2t without"),
        ({"feature_fc": None}, "2 features"),
        ({"d2t": np.arange(40, dtype=np.int32)}, "is I32"),
        ({"d2t": np.arange(41, dtype=np.int64)}, "d2t has shape"),
        ({"d2t": np.arange(281, 321, dtype=np.int64)}, "d2t holds 320 at row 39"),
        ({"d2t": np.arange(-1, 39, dtype=np.int64)}, "d2t holds -1"),
        ({"d2t": np.zeros(40, np.int64)}, "0 twice"),
        ({"output": np.zeros((321, 64), np.float32)}, "has 321 rows"),
        ({"extra.weight": np.zeros(3, np.float32)}, "no part of an MTP head"),
    ],
)
def test_parts_that_depend_on_each_other(tmp_path: Path, change: dict[str, Any], found: str) -> None:
    """Reduced vocabulary and fused features need their partners, and ids inside the vocabulary."""
    tensors = {name: values for name, values in (random_tensors(REDUCED) | change).items() if values is not None}
    assert found in str(refused(written(tmp_path, "safetensors", tensors, head_config(REDUCED))))


MTP_FAULTS: tuple[dict[str, Any], ...] = (
    {"nextn_predict_layers": 2}, {"block_count": 1}, {"block_count": None}, {"embedding_length": 32},
    {"attention.head_count": 2}, {"attention.head_count": 5}, {"attention.head_count_kv": 3},
    {"attention.key_length": 8}, {"attention.value_length": 8}, {"feed_forward_length": 1},
    {"attention.layer_norm_rms_epsilon": -1.0}, {"attention.layer_norm_rms_epsilon": float("nan")},
    {"attention.layer_norm_rms_epsilon": 1e9}, {"attention.layer_norm_rms_epsilon": 1}, {"rope.freq_base": 0.0},
    {"block_count": "5"}, {"expert_count": 4}, {"attention.sliding_window": 16}, {"rope.scaling.type": "spiral"},
    {"rope.scaling.factor": float("nan")}, {"rope.dimension_sections": [1.0, 1.0, 1.0, 0.0]},
    {"rope.dimension_count": 7}, {"rope.dimension_count": 64}, {"rope.dimension_sections": [0, 0, 0, 0]},
    {"rope.dimension_sections": None}, {"full_attention_interval": 0}, {"ssm.inner_size": 5}, {"ssm.state_size": 0},
    {"ssm.conv_kernel": None}, {"ssm.group_count": 3}, {"ssm.time_step_rank": 0}, {"context_length": 0},
)  # fmt: skip


@pytest.mark.parametrize("fault", MTP_FAULTS, ids=str)
def test_mtp_only_files_that_would_end_the_process_are_refused(tmp_path: Path, fault: dict[str, Any]) -> None:
    """Keys that llama.cpp divides by or asserts on."""
    overrides = {f"qwen35.{key}": value for key, value in fault.items()}
    refused(open_tensors(tiny_mtp(tmp_path / "mtp.gguf", overrides=overrides)))


@pytest.mark.parametrize("part", ["nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "attn_q", "attn_q_norm", "ffn_down"])
def test_mtp_only_files_with_a_part_missing_or_damaged(tmp_path: Path, part: str) -> None:
    """Every tensor of the prediction layer is needed, in its shape and finite."""
    name = f"blk.4.{part}.weight"
    refused(open_tensors(tiny_mtp(tmp_path / "a.gguf", omit=(name,))))
    values = open_tensors(tiny_mtp(tmp_path / "b.gguf")).read(name).copy()
    wider = np.concatenate([values, values], axis=0)
    refused(open_tensors(tiny_mtp(tmp_path / "c.gguf", replace={name: wider})))
    values.reshape(-1)[3] = np.nan
    refused(open_tensors(tiny_mtp(tmp_path / "d.gguf", replace={name: values})))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"hidden_size": 63}, "hidden size"),
        ({"vocab_size": 319}, "vocabulary size"),
        ({"num_layers": 1}, "reads block 1"),
        ({"tokenizer_sha256": "0" * 64}, "made for tokenizer"),
    ],
)
def test_another_target_is_refused(tmp_path: Path, changes: dict[str, Any], found: str) -> None:
    """Sizes, layers and the tokenizer's digest must be the target's."""
    target = ScriptedTarget()
    identity = evolve(target.identity, hidden_size=64, vocab_size=320, num_layers=2, tokenizer_sha256="a" * 64)
    config = head_config(REDUCED) | {"tokenizer_sha256": "a" * 64}
    file = written(tmp_path, "safetensors", random_tensors(REDUCED), config)
    facts = CONTRACT.check(file)
    target.identity = identity  # type: ignore[misc]  # a scripted target's is what the test says it is
    CONTRACT.check_target(file, facts, target)
    target.identity = evolve(identity, **changes)  # type: ignore[misc]  # the same
    with pytest.raises(ArtifactError, match=found):
        CONTRACT.check_target(file, facts, target)


@pytest.fixture(scope="module")
def good_bytes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("good")
    tensors, config = random_tensors(REDUCED), head_config(REDUCED)
    return {name: written(folder, name, tensors, config).path.read_bytes() for name in ("safetensors", "gguf")}


FLIPS = st.lists(st.tuples(st.integers(0, 1999), st.integers(0, 255)), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=FLIPS, container=st.sampled_from(["safetensors", "gguf"]))
def test_flipped_bytes_of_a_header_never_escape(
    tmp_path: Path, good_bytes: dict[str, bytes], flips: list[tuple[int, int]], container: str
) -> None:
    """A damaged header is refused with one line or still describes a good head; nothing else is raised."""
    blob = bytearray(good_bytes[container])
    for at, value in flips:
        blob[at % (2000 if container == "gguf" else 1600)] = value
    (tmp_path / "config.json").write_text(json.dumps(head_config(REDUCED)))
    damaged = tmp_path / f"model.{container}"
    damaged.write_bytes(blob)
    error = None
    try:
        file = open_tensors(damaged)
        if CONTRACT.matches(file):
            CONTRACT.check(file)
            CONTRACT.check_payload(file)
    except ArtifactError as exc:
        error = exc
    assert "\n" not in str(error)
