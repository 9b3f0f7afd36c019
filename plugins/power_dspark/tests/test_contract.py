"""The contract: what it takes, and that whatever aborts or misleads native code is refused in one line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from power_dspark.artifact import DsparkContract, draft_ids, read_header
from power_dspark.testing import save_published

from power_core.artifacts import TensorFile, open_tensors
from power_core.errors import ArtifactError
from power_core.testing.gguf_drafts import tiny_dflash, tiny_dflash2, tiny_dspark
from power_core.types import TargetIdentity

CONTRACT = DsparkContract()
Make = Callable[..., TensorFile]
NAN = np.full((320, 8), np.nan, np.float32)


def refused(call: Callable[[], object]) -> str:
    """The one line *call* is refused with."""
    with pytest.raises(ArtifactError) as caught:
        call()
    error = caught.value
    assert error.plugin == "dspark"
    assert error.expected is not None
    assert error.fix
    assert "\n" not in str(error)
    return str(error)


def target(**changes: Any) -> Any:
    """A target that the tiny drafters fit, but for *changes* of its identity."""
    facts = {"vocab_size": 320, "hidden_size": 64, "num_layers": 6, "tokenizer_sha256": "a" * 64} | changes
    identity = TargetIdentity(name="t", architecture="llama", file_sha256="b" * 64, **facts)
    return SimpleNamespace(identity=identity, tokenizer=SimpleNamespace(token_name=lambda i: f"token {i}"))


def test_a_good_file_passes_and_says_what_it_is(make: Make, shape: dict[str, Any], container: str) -> None:
    """Every layout in both containers: matched, checked, bound to its target; the facts are those it was made with."""
    file = make(container, **shape)
    assert CONTRACT.matches(file)
    facts = CONTRACT.check(file)
    CONTRACT.check_payload(file)
    CONTRACT.check_target(file, facts, target())
    assert facts.hidden_layers == (0, 2)  # llama.cpp's (1, 3): the inputs of the blocks behind them
    assert (facts.hidden_size, facts.vocab_size) == (64, 320)
    assert facts.draft_vocab_size == len(shape.get("draft_vocab", range(320)))
    assert facts.block_size == (8 if shape.get("anchor_first", True) else 7)
    assert facts.details["confidence_head"] == shape.get("confidence", True)


def test_both_containers_give_one_header_and_one_vocabulary(make: Make, shape: dict[str, Any]) -> None:
    """The same weights in either container are the same drafter."""
    one, other = make("gguf", **shape), make("safetensors", **shape)
    assert read_header(one) == read_header(other)
    np.testing.assert_array_equal(draft_ids(one), draft_ids(other))
    wanted = shape.get("draft_vocab")
    assert draft_ids(one) is None if wanted is None else list(draft_ids(one)) == wanted


def test_a_markov_rank_of_zero_is_another_kind(tmp_path: Path, make: Make) -> None:
    """DeepSpec's DFlash drafters carry DSpark's class name: only one contract may claim them."""
    gone = {"markov_head.markov_w1.weight": None, "markov_head.markov_w2.weight": None,
            "confidence_head.proj.weight": None, "confidence_head.proj.bias": None}  # fmt: skip
    path = save_published(make(), tmp_path / "dflash", config={"markov_rank": 0}, replace=gone)
    assert not CONTRACT.matches(open_tensors(path))


def test_names_may_begin_with_model(tmp_path: Path, make: Make) -> None:
    """Some exports put ``model.`` before every name."""
    path = save_published(make(), tmp_path / "prefixed", prefix="model.")
    assert CONTRACT.check(open_tensors(path)).hidden_size == 64


def test_speculators_configs_count_hidden_states_and_keep_the_anchor_row(tmp_path: Path, make: Make) -> None:
    """Layer ids begin with the embedding, blocks are bonus-anchor unless they say otherwise, `d2t` holds distances."""
    config = {
        "architectures": ["DSparkSpeculator"], "target_layer_ids": None, "sample_from_anchor": None,
        "aux_hidden_state_layer_ids": [1, 3],
    }  # fmt: skip
    ids = [2, 7, 11]
    replace = {"d2t": np.array(ids) - np.arange(3)}
    file = open_tensors(save_published(make(draft_vocab=ids), tmp_path / "other", config=config, replace=replace))
    header = read_header(file)
    assert header.hidden_layers == (0, 2)
    assert not header.sample_from_anchor
    np.testing.assert_array_equal(draft_ids(file), ids)


def test_ids_read_in_the_wrong_convention_are_refused(tmp_path: Path, make: Make) -> None:
    """Distances taken for ids repeat themselves: a file of the other convention is never silently misread."""
    ids = np.array([2, 3, 4, 319])
    path = save_published(make(draft_vocab=ids.tolist()), tmp_path / "wrong", replace={"d2t": ids - np.arange(4)})
    assert "two rows to token 2" in refused(lambda: CONTRACT.check_payload(open_tensors(path)))


@pytest.mark.parametrize("factory", [tiny_dflash, tiny_dflash2])
def test_other_kinds_of_the_family_are_not_matched(tmp_path: Path, factory: Callable[..., Path]) -> None:
    """A DFlash or DFlash2 file is not a DSpark file."""
    assert not CONTRACT.matches(open_tensors(factory(tmp_path / "other.gguf")))


def test_a_mixture_with_dflash2_is_matched_by_nobody(tmp_path: Path) -> None:
    """Selector tensors beside a Markov head: neither kind."""
    extra = {"selector_hidden.weight": np.zeros((8, 64), np.float32)}
    assert not CONTRACT.matches(open_tensors(tiny_dspark(tmp_path / "mixed.gguf", replace=extra)))


def test_a_dflash_file_renamed_in_its_metadata_is_refused(tmp_path: Path) -> None:
    """DSpark's keys without DSpark's tensors: claimed, and refused for what is missing."""
    keys = {"dflash.sample_from_anchor": True, "dflash.has_confidence_head": False}
    file = open_tensors(tiny_dflash(tmp_path / "renamed.gguf", overrides=keys))
    assert CONTRACT.matches(file)
    assert "markov_w1.weight is missing" in refused(lambda: CONTRACT.check(file))


def test_published_files_of_another_kind_are_refused(tmp_path: Path, make: Make) -> None:
    """Markov tensors under a DFlash architecture, and a DSpark architecture without them."""
    good = make()
    renamed = open_tensors(save_published(good, tmp_path / "a", config={"architectures": ["DFlashDraftModel"]}))
    assert CONTRACT.matches(renamed)
    assert "DFlashDraftModel" in refused(lambda: CONTRACT.check(renamed))
    bare = {"markov_head.markov_w1.weight": None, "markov_head.markov_w2.weight": None}
    stripped = open_tensors(save_published(good, tmp_path / "b", replace=bare))
    assert CONTRACT.matches(stripped)
    assert "markov_w1.weight is missing" in refused(lambda: CONTRACT.check(stripped))


KEYS: list[tuple[Mapping[str, Any], str]] = [
    ({"dflash.block_size": None}, "block_size is missing"),
    ({"dflash.block_size": 0}, "block_size is 0"),
    ({"dflash.block_size": 300}, "block_size is 300"),
    ({"dflash.block_size": "8"}, "block_size has type str (expected u32)"),
    ({"dflash.block_size": 1, "dflash.sample_from_anchor": False}, "drafts nothing"),
    ({"dflash.sample_from_anchor": 1}, "sample_from_anchor has type u32 (expected bool)"),
    ({"dflash.has_confidence_head": False}, "conf_proj.weight is there"),
    ({"dflash.block_count": 0}, "block_count is 0"),
    ({"dflash.block_count": 600}, "block_count is 600"),
    ({"dflash.block_count": 3}, "blk.2"),
    ({"dflash.block_count": 1}, "blk.1"),
    ({"dflash.embedding_length": 32}, "shape"),
    ({"dflash.feed_forward_length": 64}, "ffn_gate"),
    ({"dflash.attention.head_count": 3}, "query heads"),
    ({"dflash.attention.head_count_kv": 0}, "head_count_kv is 0"),
    ({"dflash.attention.key_length": 15}, "a head of 15"),
    ({"dflash.attention.value_length": 8}, "value_length is 8"),
    ({"dflash.rope.dimension_count": 8}, "dimension_count is 8"),
    ({"dflash.rope.freq_base": None}, "freq_base is missing"),
    ({"dflash.rope.freq_base": 0.0}, "freq_base is 0"),
    ({"dflash.rope.scaling.type": "yarn"}, "yarn"),
    ({"dflash.attention.layer_norm_rms_epsilon": -1e-6}, "epsilon"),
    ({"dflash.attention.layer_norm_rms_epsilon": float("nan")}, "nan"),
    *(({"dflash.attention.layer_norm_rms_epsilon": v}, "rms_epsilon is") for v in (0.0, 1e-30, 0.5, 1e9, float("inf"))),
    *(({"dflash.rope.freq_base": v}, "freq_base is") for v in (-1.0, 1.0, 1e13, float("nan"), float("inf"))),
    ({"dflash.attention.causal": True}, "causal is True"),
    ({"dflash.attention.sliding_window": 64}, "sliding_window"),
    ({"dflash.hidden_activation": "gelu"}, "gelu"),
    ({"dflash.hidden_act": "silu"}, "hidden_act is unknown"),  # what llama.cpp does not read under this name
    ({"dflash.pooling_type": 0}, "pooling_type is unknown"),
    ({"dflash.selector_top_k": 0}, "selector_top_k is unknown"),
    ({"dflash.logit_scale": 1}, "logit_scale has type u32 (expected f32)"),
    ({"dflash.attention.causal": 0}, "causal has type u32 (expected bool)"),
    ({"dflash.rope.dimension_sections": [8, 0, 0, 0]}, "dimension_sections is unknown"),
    ({"dflash.hyper_connection_count": [4, 4]}, "hyper_connection_count is unknown"),
    ({"dflash.embedding_scale": 2.0}, "embedding_scale"),
    ({"dflash.expert_count": 4}, "expert_count"),
    ({"dflash.nextn_predict_layers": 9}, "nextn_predict_layers"),
    ({"dflash.selector_top_k": 2**32 - 1}, "selector_top_k"),
    ({"dflash.target_layers": None}, "target_layers is missing"),
    ({"dflash.target_layers": [0, 3]}, "target_layers"),
    ({"dflash.target_layers": [-1, 3]}, "target_layers"),
    ({"dflash.target_layers": [3, 3]}, "target_layers"),
    ({"dflash.target_layers": [1, 2, 3]}, "fc.weight has shape"),
    ({"dflash.target_layers": 3}, "target_layers"),
    ({"dflash.vocab_size": None}, "vocab_size is missing"),
    ({"dflash.vocab_size": 319}, "shape"),
    ({"dflash.context_length": 0}, "context_length is 0"),
    ({"dflash.mask_token_id": 5}, "dflash.mask_token_id is unknown"),
    ({"tokenizer.ggml.mask_token_id": None}, "mask_token_id is missing"),
    ({"tokenizer.ggml.mask_token_id": 320}, "mask_token_id is 320"),
    ({"tokenizer.ggml.model": "gpt2"}, "no tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "found"), KEYS, ids=[str(dict(keys)) for keys, _ in KEYS])
def test_keys_of_a_gguf_that_abort_or_mislead_are_refused(make: Make, keys: Mapping[str, Any], found: str) -> None:
    """Missing, mistyped, out of range, or at odds with the tensors."""
    file = make(overrides=keys)
    assert CONTRACT.matches(file)
    assert found in refused(lambda: CONTRACT.check(file))


CONFIG: list[tuple[Mapping[str, Any], str]] = [
    ({"block_size": None}, "block_size is missing"),
    ({"block_size": True}, "block_size is True"),
    ({"mask_token_id": None}, "mask_token_id is missing"),
    ({"mask_token_id": -1}, "mask_token_id is -1"),
    ({"target_layer_ids": []}, "target_layer_ids"),
    ({"target_layer_ids": [-1, 2]}, "target_layer_ids"),  # the embedding: no block's output
    ({"target_layer_ids": "12"}, "target_layer_ids"),
    ({"enable_confidence_head": False}, "conf_proj.weight is there"),
    ({"confidence_head_with_markov": False}, "confidence_head.proj.weight has shape"),
    ({"markov_rank": 16}, "markov_rank is 16"),
    ({"markov_head_type": "gated"}, "gated"),
    ({"draft_vocab_size": 100}, "draft_vocab_size is 100"),
    ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
    ({"attention_bias": True}, "attention_bias"),
    ({"rope_theta": None}, "rope_theta is missing"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
    ({"num_attention_heads": 2.5}, "num_attention_heads"),
    *(({"rms_norm_eps": v}, "rms_norm_eps is") for v in (0, -1e-6, 1e-30, 1, 1e9, 10**400, "1e-6", True)),
    *(({"rope_theta": v}, "rope_theta is") for v in (0, -1e4, 1, 1e13, 10**400, False)),
    ({"layer_types": 7}, "layer_types is 7"),
    ({"attention_bias": 0}, "attention_bias is 0"),
    ({"architectures": None}, "architectures is None"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "found"), CONFIG, ids=[str(dict(keys)) for keys, _ in CONFIG])
def test_keys_of_a_config_that_mislead_are_refused(
    tmp_path: Path, make: Make, keys: Mapping[str, Any], found: str
) -> None:
    """The same for a published config.json."""
    file = open_tensors(save_published(make(), tmp_path / "changed", config=keys))
    assert CONTRACT.matches(file)
    assert found in refused(lambda: CONTRACT.check(file))


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"omit": ["conf_proj.weight"]}, "conf_proj.weight is missing"),
    ({"omit": ["conf_proj.weight"], "confidence": False, "replace": {"conf_proj.bias": floats(1)}}, "conf_proj.bias"),
    ({"replace": {"conf_proj.weight": floats(1, 64)}}, "conf_proj.weight has shape (1, 64)"),
    ({"replace": {"conf_proj.weight": floats(72, 1)}}, "conf_proj.weight has shape (72, 1)"),
    ({"replace": {"conf_proj.bias": floats(2)}}, "conf_proj.bias has shape"),
    ({"replace": {"t2d": floats(320)}}, "t2d is unknown"),  # published files have it; llama.cpp counts tensors
    ({"replace": {"markov_w1.weight": floats(8, 320)}}, "markov_w1.weight has shape"),
    ({"replace": {"markov_w2.weight": floats(320, 9)}}, "markov_w2.weight has shape"),
    ({"replace": {"markov_w1.weight": floats(2560)}}, "markov_w1.weight has shape"),
    ({"omit": ["markov_w2.weight"]}, "markov_w2.weight is missing"),
    ({"omit": ["fc.weight"]}, "fc.weight is missing"),
    ({"omit": ["blk.1.attn_q_norm.weight"]}, "blk.1.attn_q_norm.weight is missing"),
    ({"replace": {"blk.0.attn_norm.weight": np.ones(64, np.float16)}}, "is of type F16"),
    ({"replace": {"fc.weight": np.ones((64, 128), np.int32)}}, "is of type I32"),
    ({"replace": {"surprise.weight": floats(4)}}, "surprise.weight is unknown"),
    ({"replace": {"d2t": np.arange(100)}}, "d2t without an output matrix"),
    ({"draft_vocab": [1, 2, 3], "replace": {"d2t": np.arange(3, dtype=np.int32)}}, "d2t is of type I32"),
    ({"draft_vocab": [1, 2, 3], "replace": {"output.weight": floats(4, 64)}}, "output.weight has shape"),
    ({"draft_vocab": [1, 2, 3], "replace": {"markov_w2.weight": floats(320, 8)}}, "markov_w2.weight has shape"),
    ({"draft_vocab": list(range(320))}, "d2t has shape"),
    ({"replace": {"token_embd.weight": floats(319, 64)}}, "token_embd.weight has shape"),
]


@pytest.mark.parametrize(("options", "found"), TENSORS, ids=[found for _, found in TENSORS])
def test_tensor_tables_that_abort_or_mislead_are_refused(make: Make, options: dict[str, Any], found: str) -> None:
    """Missing, superfluous, of another shape or type."""
    file = make(**options)
    assert found in refused(lambda: CONTRACT.check(file))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"replace": {"markov_w1.weight": NAN}}, "markov_w1.weight holds nan at index 0"),
        ({"replace": {"output_norm.weight": np.append(floats(63), np.float32(np.inf))}}, "inf at index 63"),
        ({"draft_vocab": [4, 320]}, "row 1 to token 320"),
        ({"draft_vocab": [-1, 5]}, "row 0 to token -1"),
        ({"draft_vocab": [9, 3, 9]}, "two rows to token 9"),
    ],
)
def test_values_that_native_code_would_not_notice_are_refused(make: Make, options: dict[str, Any], found: str) -> None:
    """NaN, infinities, ids outside the vocabulary and twice the same id; the header is good each time."""
    file = make(**options)
    CONTRACT.check(file)
    assert found in refused(lambda: CONTRACT.check_payload(file))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"hidden_size": 128}, "hidden size 64"),
        ({"vocab_size": 512}, "a vocabulary of 320"),
        ({"num_layers": 3}, "target layers [0, 2]"),
        ({"tokenizer_sha256": "c" * 64}, "tokenizer aaaa"),
    ],
)
def test_another_target_is_refused(make: Make, changes: dict[str, Any], found: str) -> None:
    """Hidden size, vocabulary, block count, and a tokenizer of the same size but other content."""
    file = make(overrides={"power.tokenizer_sha256": "a" * 64})
    facts = CONTRACT.check(file)
    CONTRACT.check_target(file, facts, target())
    assert found in refused(lambda: CONTRACT.check_target(file, facts, target(**changes)))


def test_a_tokenizer_in_the_file_is_compared_token_by_token(make: Make) -> None:
    """Equal sizes mean nothing: the first token that differs is named."""
    tokens = [f"token {i}" for i in range(320)]
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
    file = make(overrides=keys)
    facts = CONTRACT.check(file)
    CONTRACT.check_target(file, facts, target())
    tokens[77] = "another"
    other = make(overrides=keys)
    assert "'another' as token 77" in refused(lambda: CONTRACT.check_target(other, facts, target()))


def test_a_safetensors_drafter_may_read_the_last_block(make: Make) -> None:
    """llama.cpp has no tap after the last block, a torch target has."""
    file = make("safetensors")
    CONTRACT.check_target(file, CONTRACT.check(file), target(num_layers=3))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_refused_or_means_the_same(make: Make, data: st.DataObject) -> None:
    """One byte changed anywhere before the values: an ArtifactError, or a file with the same facts; never a crash."""
    path = make().path
    good, raw = CONTRACT.check(open_tensors(path)), bytearray(path.read_bytes())
    end = min(info.offset for info in open_tensors(path).tensors.values())
    at = data.draw(st.integers(0, end - 1))
    raw[at] = data.draw(st.integers(0, 255).filter(lambda value: value != raw[at]))
    damaged = path.with_name(hashlib.sha256(raw).hexdigest()[:8] + ".gguf")
    damaged.write_bytes(raw)
    try:
        file = open_tensors(damaged)
        if not CONTRACT.matches(file):
            return
        facts = CONTRACT.check(file)
        CONTRACT.check_payload(file)
    except ArtifactError:
        return
    finally:
        damaged.unlink()
    assert (facts.hidden_size, facts.vocab_size, facts.draft_vocab_size) == (
        good.hidden_size, good.vocab_size, good.draft_vocab_size,
    )  # fmt: skip
