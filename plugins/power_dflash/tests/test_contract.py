"""The contracts: what is accepted, and that everything else is refused in Python with what was found and expected."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from power_dflash.artifact import BlockContract
from power_dflash.header import DFLASH2, DFLASH_V1

from power_core.artifacts import open_tensors
from power_core.artifacts.matching import installed_contracts, match_contract
from power_core.errors import ArtifactError
from power_core.plugins import load_plugins
from power_core.testing.gguf_drafts import tiny_dspark
from power_core.types import TargetIdentity

KINDS = (DFLASH_V1, DFLASH2)
NAN = np.full(64, np.nan, np.float32)


_NONE = (-1.0, float("nan"), float("inf"), 1e-30, 1e13)
FLOATS = {
    "attention.layer_norm_rms_epsilon": (0.0, 0.5, 1e9, *_NONE),
    "rope.freq_base": (0.0, 1.0, *_NONE),
    "embedding_scale": (0.0, 1e9, *_NONE),
    "logit_scale": (0.0, 1e9, *_NONE),
    "final_logit_softcapping": (1e9, *_NONE),
}


def refusal(path, kind, *, payload=False):
    """The error of checking *path* as *kind*."""
    contract = BlockContract(kind)
    with pytest.raises(ArtifactError) as caught:
        (contract.check_payload if payload else contract.check)(open_tensors(path))
    error = caught.value
    assert error.fix
    assert error.where == str(path)
    return str(error)


def fake_target(**changes):
    """A target by identity and tokenizer alone."""
    identity = TargetIdentity("t", "llama", "0" * 64, "a" * 64, 320, 64, 5)
    return SimpleNamespace(
        identity=attrs.evolve(identity, **changes), tokenizer=SimpleNamespace(token_name=lambda i: f"t{i}")
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_both_containers_of_one_drafter_say_the_same(kind, prefix, make_gguf, published, tmp_path):
    """Facts do not depend on the container, and layer ids are mapped to block outputs."""
    gguf = make_gguf(kind)
    files = [open_tensors(gguf), open_tensors(published(gguf, tmp_path / "st", prefix=prefix))]
    facts = [BlockContract(kind).check(file) for file in files]
    assert facts[0] == facts[1]
    assert facts[0].hidden_layers == (0, 3)
    assert facts[0].block_size == 7
    for file in files:
        BlockContract(kind).check_payload(file)
        BlockContract(kind).check_target(file, facts[0], fake_target())


def test_no_kind_is_mistaken_for_another(make_gguf, published, tmp_path):
    """Metadata and tensors together name one kind, in each container; a DSpark file is neither of these two."""
    contracts = installed_contracts(load_plugins().registry)
    for kind in KINDS:
        gguf = make_gguf(kind)
        for path in (gguf, published(gguf, tmp_path / kind)):
            assert match_contract(open_tensors(path), contracts).kind == kind
    spark = open_tensors(tiny_dspark(tmp_path / "spark.gguf"))
    named = open_tensors(make_gguf(DFLASH_V1, overrides={"dflash.has_confidence_head": False}))
    assert not any(BlockContract(kind).matches(file) for kind in KINDS for file in (spark, named))
    with pytest.raises(ArtifactError, match="not those of a dflash-v1 drafter"):
        BlockContract(DFLASH_V1).check(spark)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("block_count", 0, "block_count is 0"),
        ("block_count", 600, "block_count is 600"),
        ("block_count", 3, "blk.2.attn_norm.weight is missing"),
        ("block_count", 1, "blk.1"),
        ("nextn_predict_layers", 3, "nextn_predict_layers is 3"),
        ("expert_count", 4, "expert_count is 4"),
        ("expert_used_count", 4, "expert_used_count is 4"),
        ("rope.scaling.type", "spiral", "rope.scaling.type is 'spiral'"),
        ("attention.head_count_kv", 3, "4 query and 3 key/value heads"),
        ("attention.value_length", 8, "value_length is 8"),
        ("attention.sliding_window", 16, "sliding_window_pattern"),
        ("rope.dimension_count", 15, "dimension_count is 15"),
        ("rope.dimension_sections", [0, 0, 0, 0], "dimension_sections"),
        ("attention.layer_norm_rms_epsilon", -1.0, "epsilon is -1"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "epsilon is nan"),
        ("target_layers", [0, 3], "target_layers is [0, 3]"),
        ("target_layers", [-1, 3], "target_layers is [-1, 3]"),
        ("target_layers", None, "target_layers is missing"),
        ("vocab_size", None, "vocab_size is missing"),
        ("block_size", 0, "block_size is 0"),
        ("block_size", 1, "a block of one row"),
        ("block_size", None, "block_size is missing"),
        ("attention.causal", True, "attention.causal is True"),
        ("context_length", None, "context_length is missing"),
        ("embedding_length", 32, "has shape"),
        ("feed_forward_length", 64, "has shape"),
        ("hidden_activation", "gelu", "hidden_activation is 'gelu'"),
        ("hidden_act", "silu", "hidden_act is unknown"),
        ("pooling_type", 0, "pooling_type is unknown"),
        ("rope.scaling.factor", 4.0, "rope.scaling.factor is 4.0"),
        ("attention.causal", 0, "causal has type u32 (expected bool)"),
        ("attention.sliding_window", "0", "sliding_window has type str (expected u32)"),
        ("target_layers", [1.0, 3.0], "target_layers has type arr[f32]"),
        *((key, value, f"{key} is") for key, values in FLOATS.items() for value in values),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_llama_cpp_would_die_of_or_misread_is_refused(kind, key, value, found, make_gguf):
    """Each of these ends the process, fails the load, or drafts nonsense in silence natively."""
    assert found in refusal(make_gguf(kind, overrides={f"dflash.{key}": value}), kind)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("selector_top_k", 2**32 - 1, "selector_top_k is 4294967295"),
        ("selector_top_k", 8, "a lattice of 8 candidates does not fit 64"),
        ("selector_top_k", 0, "selector_top_k is 0"),
        ("selector_rank", 4, "has shape"),
        ("conv_group_size", 48, "do not divide 64"),
        ("conv_kernel_size", 2, "has shape"),
    ],
)
def test_a_lattice_that_does_not_fit_is_refused(key, value, found, make_gguf):
    """Sizes of selector and convolution agree with the tensors, and the lattice with the row it is packed in."""
    assert found in refusal(make_gguf(DFLASH2, overrides={f"dflash.{key}": value}), DFLASH2)


def test_selector_keys_without_a_selector_are_refused(make_gguf):
    """They would make llama.cpp draft token 0 from a lattice of zeros."""
    keys = {f"dflash.{key}": 4 for key in ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")}
    assert "selector_rank is 4" in refusal(make_gguf(DFLASH_V1, overrides=keys), DFLASH_V1)
    lost = ["selector_hidden.weight"]
    assert "selector_rank is 8" in refusal(make_gguf(DFLASH2, omit=lost), DFLASH_V1)
    assert "no part of this kind" in refusal(make_gguf(DFLASH2, omit=lost, overrides=dict.fromkeys(keys)), DFLASH_V1)


@pytest.mark.parametrize(
    ("replace", "found"),
    [
        ({"blk.0.attn_norm.weight": np.ones(64, np.float16)}, "is of type F16 (expected F32)"),
        ({"enc.output_norm.weight": np.ones(63, np.float32)}, "has shape [63] (expected [64])"),
        ({"fc.weight": np.ones((64, 128), np.int32)}, "is of type I32"),
        ({"fc.weight": np.ones((64, 64), np.float32)}, "has shape [64, 64]"),
        ({"extra.weight": np.ones(4, np.float32)}, "extra.weight is no part"),
        ({"d2t": np.arange(16)}, "output.weight is missing"),
        ({"d2t": np.arange(16, dtype=np.int32)}, "is I32 [16]"),
        ({"d2t": np.arange(400)}, "is I64 [400]"),
        ({"d2t": np.arange(16), "output.weight": np.ones((17, 64), np.float32)}, "has shape [17, 64]"),
        ({"token_embd.weight": np.ones((100, 64), np.float32)}, "has shape [100, 64]"),
    ],
)
def test_a_tensor_of_another_type_or_shape_is_refused(replace, found, make_gguf):
    """Norms must be F32 and matrices no integers: the kernels do not look."""
    assert found in refusal(make_gguf(DFLASH_V1, replace=replace), DFLASH_V1)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"replace": {"blk.1.ffn_norm.weight": NAN}}, "blk.1.ffn_norm.weight holds NaN or infinity at index 0"),
        ({"replace": {"output_norm.weight": np.r_[np.ones(63), np.inf].astype(np.float32)}}, "at index 63"),
        ({"draft_vocab": [5, 6, 320]}, "d2t[2] is 320 (expected an id below 320)"),
        ({"draft_vocab": [5, -1, 7]}, "d2t[1] is -1"),
        ({"draft_vocab": [5, 6, 5]}, "d2t names an id twice"),
    ],
)
def test_bad_values_are_found_when_the_payload_is_read(changes, found, make_gguf):
    """The header is good, the values are not."""
    path = make_gguf(DFLASH_V1, **changes)
    BlockContract(DFLASH_V1).check(open_tensors(path))
    assert found in refusal(path, DFLASH_V1, payload=True)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"is_causal": True}, "is_causal is True"),
        ({"dflash_config": 7}, "dflash_config is 7"),
        ({"dflash_config": {"target_layer_ids": [1, 1], "mask_token_id": 0}}, "different numbers"),
        ({"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 320}}, "the mask id is 320"),
        ({"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 0, "selector_rank": 8}}, "selector_rank is 8"),
        ({"architectures": ["DFlash2DraftModel"]}, "says DFlash2 and has no selector"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        *(({"rms_norm_eps": value}, "rms_norm_eps is") for value in (0, -1e-6, 1e-30, 1, 1e9, 10**400, "1e-6")),
        *(({"rope_theta": value}, "rope_theta is") for value in (0, -1e4, 1.0, 1e13, True)),
        *(({"output_multiplier": value}, "output_multiplier is") for value in (0, -1.0, 1e9, False)),
        *(({"input_embedding_scale": value}, "input_embedding_scale is") for value in (0.0, 1e-30, 1e9)),
        *(({"final_logit_softcapping": value}, "final_logit_softcapping is") for value in (-30.0, 1e9, "", [])),
        ({"num_target_layers": 0}, "num_target_layers is 0"),
        ({"use_sliding_window": "no"}, "use_sliding_window is 'no'"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "chunked_attention"]},
            "layer_types",
        ),
        ({"head_dim": 15}, "cannot rotate"),
    ],
)
def test_a_published_config_that_is_not_computed_here_is_refused(changes, found, make_gguf, published, tmp_path):
    """What would be drafted with other mathematics than the file was trained with is an error, not an approximation."""
    path = published(make_gguf(DFLASH_V1), tmp_path / "st", **changes)
    assert found in refusal(path, DFLASH_V1)


def test_speculators_ids_are_offsets_and_its_layers_inputs(make_gguf, published, tmp_path):
    """`d2t` stores id - row there, and auxiliary layer i is the output of block i - 1."""
    path = published(
        make_gguf(DFLASH_V1, draft_vocab=[3, 5, 9]), tmp_path / "st", speculators_model_type="dflash",
        aux_hidden_state_layer_ids=[1, 4], mask_token_id=0, dflash_config=None,
    )  # fmt: skip
    facts = BlockContract(DFLASH_V1).check(open_tensors(path))
    assert facts.hidden_layers == (0, 3)
    BlockContract(DFLASH_V1).check_payload(open_tensors(path))  # 3, 5 + 1, 9 + 2: different ids
    late = published(make_gguf(DFLASH_V1, draft_vocab=[3, 5, 318]), tmp_path / "late", speculators_model_type="dflash")
    assert "d2t[2] is 320" in refusal(late, DFLASH_V1, payload=True)


def test_deepspecs_dflash_drafts_from_the_anchors_row_too(make_gguf, published, tmp_path):
    """Its trainer uses the DSpark class with a Markov head of rank 0, a flat config, and one more token a block."""
    path = published(
        make_gguf(DFLASH_V1), tmp_path / "st", architectures=["Qwen3DSparkModel"], markov_rank=0, num_anchors=512,
        target_layer_ids=[0, 3], mask_token_id=0, dflash_config=None, enable_confidence_head=False,
    )  # fmt: skip
    file = open_tensors(path)
    assert BlockContract(DFLASH_V1).matches(file)
    assert BlockContract(DFLASH_V1).check(file).block_size == 8
    spark = attrs.evolve(file, metadata={**file.metadata, "markov_rank": 256})
    assert not BlockContract(DFLASH_V1).matches(spark)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"hidden_size": 32}, "the hidden size is 64 (expected the target's, 32)"),
        ({"vocab_size": 400}, "the vocabulary size is 320 (expected the target's, 400)"),
        ({"num_layers": 4}, "block 3's output (expected blocks 0 to 2 of a target with 4)"),
        ({"tokenizer_sha256": "b" * 64}, "the drafter's tokenizer is aaaa"),
    ],
)
def test_a_drafter_of_another_target_is_refused(changes, found, make_gguf):
    """Sizes, layers and the tokenizer's content bind a file to its target."""
    file = open_tensors(make_gguf(DFLASH_V1, overrides={"power.tokenizer_sha256": "a" * 64}))
    contract = BlockContract(DFLASH_V1)
    contract.check_target(file, contract.check(file), fake_target())
    with pytest.raises(ArtifactError) as caught:
        contract.check_target(file, contract.check(file), fake_target(**changes))
    assert found in str(caught.value)


def test_tokens_in_the_file_must_be_the_targets(make_gguf):
    """Two vocabularies of one size are told apart by their words."""
    tokens = [f"t{i}" for i in range(320)]
    contract = BlockContract(DFLASH_V1)
    for changed, expectation in ((None, None), (17, "token 17 of the drafter's vocabulary is 'other'")):
        words = ["other" if i == changed else token for i, token in enumerate(tokens)]
        keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": words}
        file = open_tensors(make_gguf(DFLASH_V1, overrides=keys))
        if expectation is None:
            contract.check_target(file, contract.check(file), fake_target())
        else:
            with pytest.raises(ArtifactError, match=expectation):
                contract.check_target(file, contract.check(file), fake_target())
    for keys in ({"tokenizer.ggml.tokens": tokens}, {"tokenizer.ggml.model": "gpt2"}, {"tokenizer.ggml.model": None}):
        assert "tokenizer.ggml.model is" in refusal(make_gguf(DFLASH_V1, overrides=keys), DFLASH_V1)


VALUES = st.one_of(
    st.integers(-(2**40), 2**40), st.floats(), st.text(max_size=4), st.booleans(), st.none(),
    st.lists(st.integers(-5, 600), max_size=4), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@pytest.mark.parametrize("container", ["gguf", "safetensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_value_under_any_key_is_accepted_or_refused_by_name(kind, container, make_gguf, published, tmp_path):
    """Whatever a header holds, the answer is facts or an `ArtifactError`, never another exception."""
    path = make_gguf(kind)
    file = open_tensors(path if container == "gguf" else published(path, tmp_path / "st"))
    keys = sorted(file.metadata)

    @given(st.dictionaries(st.sampled_from(keys), VALUES, min_size=1, max_size=3))
    def check(changes):
        damaged = attrs.evolve(file, metadata={**file.metadata, **changes})
        for each in KINDS:
            try:
                facts = BlockContract(each).check(damaged)
                BlockContract(each).check_target(damaged, facts, fake_target())
            except ArtifactError as error:
                assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right
            else:
                assert facts.hidden_size == 64

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_lost_its_name_shape_or_type_is_refused(kind, make_gguf):
    """Every tensor of the table matters: each alone is dropped, renamed, transposed or retyped."""
    file = open_tensors(make_gguf(kind))
    for name, info in file.tensors.items():
        rest = {other: each for other, each in file.tensors.items() if other != name}
        damages = [
            rest,
            {**rest, name + "x": info},
            {**rest, name: attrs.evolve(info, shape=(*info.shape, 2))},
            {**rest, name: attrs.evolve(info, dtype="I32")},
        ]
        for tensors in damages:
            with pytest.raises(ArtifactError):
                BlockContract(kind).check(attrs.evolve(file, tensors=tensors))


def test_a_truncated_file_is_refused_before_its_contract_sees_it(make_gguf, published, tmp_path):
    """A cut anywhere is noticed by the container's reader."""
    gguf = make_gguf(DFLASH2)
    for path in (gguf, published(gguf, tmp_path / "st")):
        data = path.read_bytes()
        for share in (0.0, 0.001, 0.3, 0.9, 0.9999):
            cut = path.with_name("cut" + path.suffix)
            cut.write_bytes(data[: int(len(data) * share)])
            with pytest.raises(ArtifactError):
                BlockContract(DFLASH2).check(open_tensors(cut))


def test_checking_loads_neither_torch_nor_native_code(make_gguf):
    """A file is refused before anything that could die of it is in the process."""
    script = (
        "import sys; from pathlib import Path; from power_core.artifacts import open_tensors;"
        "from power_dflash.artifact import BlockContract;"
        "file = open_tensors(Path(sys.argv[1])); BlockContract('dflash2').check(file);"
        "BlockContract('dflash2').check_payload(file); import json;"
        "print(json.dumps([m for m in ('torch', 'llama_cpp') if m in sys.modules]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(make_gguf(DFLASH2))], capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == []
