"""
Drafter files of llama.cpp's architecture `dflash`: DFlash v1, DFlash2 and DSpark.

Which of the three a file is, its tensors decide: `selector_hidden.weight` makes it DFlash2, `markov_w1.weight` DSpark.
Keys that belong to another kind than the tensors are refused, since llama.cpp would believe the tensors and compute
something else in silence. Measured against llama-cpp-python 0.3.36, read in its src/models/dflash.cpp.
"""

from __future__ import annotations

import numpy as np

from power_llamacpp.draft_facts import FIX, DraftFacts, DraftKind, Spec, check_vocabulary, matrix, vector
from power_llamacpp.gguf_check import check_tokenizer
from power_llamacpp.gguf_file import GgufInfo, refuse
from power_llamacpp.gguf_hparams import check_finite_numbers, check_rope, check_sizes, unsigned
from power_llamacpp.taps import available_layers

__all__ = ["MASK_KEY", "dflash_facts", "dflash_ids", "dflash_tensors"]

MASK_KEY = "tokenizer.ggml.mask_token_id"
_MAX_BLOCK = 256  # rows of a round; more than any drafter was trained for, and they must fit one native batch
_DFLASH2_KEYS = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
_DSPARK_KEYS = ("sample_from_anchor", "has_confidence_head")
_FLOAT_KEYS = (
    "embedding_scale", "attention.scale", "attention.value_scale", "logit_scale", "final_logit_softcapping",
    "rope.freq_base", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.alpha",
    "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier", "attention.layer_norm_rms_epsilon",
)  # fmt: skip
_KEYS = frozenset(
    [
        "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "block_size",
        "target_layers", "hidden_activation", "nextn_predict_layers", "expert_count", "expert_used_count",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.causal", "attention.sliding_window", "attention.sliding_window_pattern", "rope.dimension_count",
        "rope.dimension_sections", "rope.scaling.type", "rope.scaling.finetuned",
        "rope.scaling.original_context_length", *_FLOAT_KEYS, *_DFLASH2_KEYS, *_DSPARK_KEYS,
    ]
)  # fmt: skip


def dflash_facts(info: GgufInfo, target: GgufInfo) -> DraftFacts:
    """
    Check the keys of *info*.

    Raises:
        ArtifactError: The first thing found wrong.
    """
    _check_keys(info)
    check_sizes(info)
    check_finite_numbers(info)
    _check_dense(info)
    _check_heads(info)
    check_rope(info)
    has_sections = _check_sections(info)
    _check_window(info)
    _check_activation(info)
    if info.hidden_size != target.hidden_size:
        what = f"the drafter's embedding_length is {info.hidden_size}"
        refuse(info.path, what, got=info.hidden_size, expected=f"the target's {target.hidden_size}", fix=FIX)
    if info.metadata.get("tokenizer.ggml.model") == "none":
        unsigned(info, "vocab_size", least=1, most=2**31 - 1, required=True)
    else:
        check_tokenizer(info)
    check_vocabulary(info, target)
    kind = _kind(info)
    block = unsigned(info, "block_size", least=1 if kind is DraftKind.DSPARK else 2, most=_MAX_BLOCK, required=True)
    return DraftFacts(
        kind=kind,
        hidden_size=info.hidden_size,
        vocab_size=target.vocab_size,
        block_size=block,
        hidden_layers=_hidden_layers(info, target),
        mask_id=_mask_id(info, target.vocab_size),
        top_k=_selector(info) if kind is DraftKind.DFLASH2 else 0,
        has_confidence="conf_proj.weight" in info.tensors,
        has_sections=has_sections,
    )


def dflash_tensors(info: GgufInfo, facts: DraftFacts) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """The tensors that a file of these facts must have, and those it may."""
    hidden, vocab = facts.hidden_size, facts.vocab_size
    rows = info.tensors["d2t"].shape[-1] if "d2t" in info.tensors else vocab
    required = {
        "fc.weight": matrix(hidden, facts.feature_size),
        "enc.output_norm.weight": vector(hidden),
        "output_norm.weight": vector(hidden),
    }
    optional = {
        "token_embd.weight": matrix(vocab, hidden),
        "output.weight": matrix(rows, hidden),
        "rope_freqs.weight": vector(_head_size(info) // 2),
    }
    for i in range(info.num_layers):
        _add_block(info, i, required, optional)
    if "d2t" in info.tensors:
        required["d2t"] = Spec((rows,), frozenset(["I64"]))
        required["output.weight"] = optional["output.weight"]
    if facts.kind is DraftKind.DFLASH2:
        _add_dflash2(info, facts, required)
    if facts.kind is DraftKind.DSPARK:
        _add_dspark(info, facts, rows, required, optional)
    return required, optional


def dflash_ids(info: GgufInfo, facts: DraftFacts) -> None:
    """
    The ids of a reduced vocabulary are distinct ids of the target.

    Raises:
        ArtifactError: One is not.
    """
    if "d2t" not in info.tensors:
        return
    ids = info.read("d2t").astype(np.int64)
    outside = np.flatnonzero((ids < 0) | (ids >= facts.vocab_size))
    if outside.size:
        index = int(outside[0])
        what = f"d2t maps row {index} to id {int(ids[index])}"
        refuse(info.path, what, got=int(ids[index]), expected=f"an id below {facts.vocab_size}")
    if np.unique(ids).size < ids.size:
        refuse(info.path, "d2t maps two rows to one id", got=ids.size - np.unique(ids).size, expected="distinct ids")
    if facts.top_k > ids.size:
        what = f"the reduced vocabulary has {ids.size} ids"
        refuse(info.path, what, got=ids.size, expected=f"at least selector_top_k, which is {facts.top_k}")


def _check_keys(info: GgufInfo) -> None:
    """Only keys whose effect is known: others could switch on what the checks do not look at."""
    for key, kind in info.value_types.items():
        name = key.removeprefix("dflash.")
        if name == key:
            continue
        if name not in _KEYS:
            fix = "convert a drafter of the Qwen3 kind"
            refuse(info.path, f"the key {key} is unknown", got=key, expected="the keys of a dense drafter", fix=fix)
        if name in _FLOAT_KEYS and kind != "f32":
            refuse(info.path, f"{key} is of type {kind}", got=kind, expected="f32")
    for key in (*_FLOAT_KEYS[:5], "rope.scaling.factor"):
        value = info.metadata.get(f"dflash.{key}", 0.0)
        if isinstance(value, float) and value < 0:
            refuse(info.path, f"dflash.{key} is {value}", got=value, expected="0 or more")
    if "dflash.attention.layer_norm_rms_epsilon" not in info.metadata:
        refuse(info.path, "the key dflash.attention.layer_norm_rms_epsilon is missing", expected="an f32")
    if info.metadata.get("dflash.attention.causal", False) is not False:
        refuse(info.path, "dflash.attention.causal is not false", expected="false: a block's rows see each other")


def _check_dense(info: GgufInfo) -> None:
    """No experts and no prediction layers: the graph would ignore them."""
    for key in ("expert_count", "expert_used_count", "nextn_predict_layers"):
        if info.integer(key):
            refuse(info.path, f"dflash.{key} is {info.integer(key)}", got=info.integer(key), expected="0")
    unsigned(info, "feed_forward_length", least=1, required=True)


def _check_heads(info: GgufInfo) -> None:
    """One number of heads for all blocks; keys and values of one length."""
    heads = unsigned(info, "attention.head_count", least=1, most=info.hidden_size, required=True) or 1
    kv_heads = unsigned(info, "attention.head_count_kv", least=1, most=heads, required=True) or 1
    if heads % kv_heads:
        what = f"there are {heads} query heads on {kv_heads} key heads"
        refuse(info.path, what, got=(heads, kv_heads), expected="a multiple")
    key = unsigned(info, "attention.key_length", least=2, most=1 << 16)
    value = unsigned(info, "attention.value_length", least=2, most=1 << 16)
    if _head_size(info) != info.integer("attention.value_length", info.hidden_size // heads):
        refuse(info.path, f"key length {key} differs from value length {value}", got=(key, value), expected="equal")


def _head_size(info: GgufInfo) -> int:
    default = info.hidden_size // max(info.integer("attention.head_count"), 1)
    return info.integer("attention.key_length", default)


def _check_sections(info: GgufInfo) -> bool:
    """Whether the rope is multi-dimensional; llama.cpp then expects text positions in its first section only."""
    sections = info.metadata.get("dflash.rope.dimension_sections")
    if sections is None:
        return False
    values = [int(value) for value in np.atleast_1d(sections)]
    rotated = info.integer("rope.dimension_count", _head_size(info))
    if len(values) != 4 or values[1:] != [0, 0, 0] or values[0] != rotated // 2:
        what = f"dflash.rope.dimension_sections is {values}"
        refuse(info.path, what, got=values, expected=[rotated // 2, 0, 0, 0])
    return True


def _check_window(info: GgufInfo) -> None:
    """A sliding window comes with one flag a block, some of them set."""
    window = unsigned(info, "attention.sliding_window", most=2**31 - 1)
    key = "dflash.attention.sliding_window_pattern"
    pattern, kind = info.metadata.get(key), info.value_types.get(key)
    if not window:
        return
    if not isinstance(pattern, np.ndarray) or kind not in ("arr[bool]", "arr[u32]", "arr[i32]"):
        refuse(info.path, f"{key} is of type {kind}", got=kind, expected="an array with one flag a block")
    if len(pattern) != info.num_layers or not pattern.any():
        refuse(info.path, f"{key} is {pattern.tolist()}", got=pattern.tolist(), expected="a flag a block, not all off")


def _check_activation(info: GgufInfo) -> None:
    known = ("silu", "gelu", "gelu_pytorch_tanh")
    value = info.metadata.get("dflash.hidden_activation", "silu")
    if not isinstance(value, str) or value not in known:
        refuse(info.path, f"dflash.hidden_activation is {value!r:.80}", got=value, expected=" or ".join(known))


def _kind(info: GgufInfo) -> DraftKind:
    """What the tensors make of the file; keys of another kind are refused."""
    selector, markov = "selector_hidden.weight" in info.tensors, "markov_w1.weight" in info.tensors
    if selector and markov:
        refuse(info.path, "the file has a selector and a Markov head", expected="DFlash2 or DSpark, not both")
    for present, keys, what in ((selector, _DFLASH2_KEYS, "a selector"), (markov, _DSPARK_KEYS, "a Markov head")):
        found = next((key for key in keys if f"dflash.{key}" in info.metadata), None)
        if found is not None and not present:
            refuse(info.path, f"the key dflash.{found} is there, but no tensor of {what}", got=found, expected=what)
    if markov:
        for key in _DSPARK_KEYS:
            kind = info.value_types.get(f"dflash.{key}", "bool")
            if kind != "bool":
                refuse(info.path, f"dflash.{key} is of type {kind}", got=kind, expected="bool")
        claimed = info.metadata.get("dflash.has_confidence_head", "conf_proj.weight" in info.tensors)
        if claimed != ("conf_proj.weight" in info.tensors):
            what = f"dflash.has_confidence_head is {claimed}, and conf_proj.weight is " + (
                "missing" if claimed else "there"
            )
            refuse(info.path, what, got=claimed, expected="both or neither")
    return DraftKind.DFLASH2 if selector else DraftKind.DSPARK if markov else DraftKind.DFLASH


def _selector(info: GgufInfo) -> int:
    """Candidates of a position; the lattice must fit where llama.cpp puts it."""
    hidden = info.hidden_size
    unsigned(info, "selector_rank", least=1, most=1 << 20, required=True)
    unsigned(info, "conv_kernel_size", least=1, most=1 << 10, required=True)
    group = unsigned(info, "conv_group_size", least=1, most=hidden, required=True) or 1
    if hidden % group:
        refuse(info.path, f"conv_group_size {group} does not divide {hidden}", got=group, expected="a divisor")
    top_k = unsigned(
        info, "selector_top_k", least=1, most=min(hidden, info.integer("vocab_size", hidden)), required=True
    )
    if (top_k or 0) * ((top_k or 0) + 1) > hidden:
        what = f"selector_top_k is {top_k}"
        refuse(info.path, what, got=top_k, expected=f"k (k + 1) of {hidden} or less, the hidden size")
    return top_k or 0


def _hidden_layers(info: GgufInfo, target: GgufInfo) -> tuple[int, ...]:
    """The target blocks whose outputs are read: id i of the file is the input of block i."""
    key = "dflash.target_layers"
    values, kind = info.metadata.get(key), info.value_types.get(key)
    if not isinstance(values, np.ndarray) or kind not in ("arr[i32]", "arr[u32]") or not len(values):
        refuse(info.path, f"{key} is {'missing' if kind is None else kind}", got=kind, expected="an array of layer ids")
    ids = [int(value) for value in values]
    last = max(available_layers(target), default=-1) + 1
    bad = next((i for i in ids if not 1 <= i <= last), None)
    if bad is not None:
        expected = f"1 to {last}, inputs of the target's later blocks"
        refuse(info.path, f"{key} holds {bad}", got=ids, expected=expected, fix=FIX)
    if len(set(ids)) < len(ids):
        refuse(info.path, f"{key} holds a layer twice", got=ids, expected="distinct ids")
    return tuple(i - 1 for i in ids)


def _mask_id(info: GgufInfo, vocab_size: int) -> int | None:
    value = info.metadata.get(MASK_KEY)
    if value is None:
        return None
    if info.value_types[MASK_KEY] != "u32" or not isinstance(value, int) or not 0 <= value < vocab_size:
        refuse(info.path, f"{MASK_KEY} is {value}", got=value, expected=f"a u32 below {vocab_size}")
    return value


def _add_block(info: GgufInfo, i: int, required: dict[str, Spec], optional: dict[str, Spec]) -> None:
    hidden, ffn, head = info.hidden_size, info.integer("feed_forward_length"), _head_size(info)
    queries = info.integer("attention.head_count") * head
    keys = info.integer("attention.head_count_kv") * head
    block = f"blk.{i}"
    required |= {
        f"{block}.attn_norm.weight": vector(hidden),
        f"{block}.ffn_norm.weight": vector(hidden),
        f"{block}.attn_q_norm.weight": vector(head),
        f"{block}.attn_k_norm.weight": vector(head),
        f"{block}.attn_q.weight": matrix(queries, hidden),
        f"{block}.attn_k.weight": matrix(keys, hidden),
        f"{block}.attn_output.weight": matrix(hidden, queries),
        f"{block}.ffn_gate.weight": matrix(ffn, hidden),
        f"{block}.ffn_up.weight": matrix(ffn, hidden),
        f"{block}.ffn_down.weight": matrix(hidden, ffn),
    }
    optional |= {
        f"{block}.attn_v.weight": matrix(keys, hidden),
        f"{block}.post_attention_norm.weight": vector(hidden),
        f"{block}.post_ffw_norm.weight": vector(hidden),
        f"{block}.layer_output_scale.weight": vector(1),
        f"{block}.attn_sinks.weight": vector(info.integer("attention.head_count")),
    }


def _add_dflash2(info: GgufInfo, facts: DraftFacts, required: dict[str, Spec]) -> None:
    hidden, rank = facts.hidden_size, info.integer("selector_rank")
    kernel, groups = info.integer("conv_kernel_size"), facts.hidden_size // info.integer("conv_group_size", 1)
    required |= {
        "selector_predecessor.weight": matrix(facts.vocab_size, rank),
        "selector_successor.weight": matrix(facts.vocab_size, rank),
        "selector_hidden.weight": matrix(rank, hidden),
    }
    for i in range(info.num_layers):
        for side in ("attn", "ffn"):
            required[f"blk.{i}.{side}_conv_base"] = vector(2, kernel, hidden)
            required[f"blk.{i}.{side}_conv_proj.weight"] = matrix(2 * kernel * groups, hidden)


def _add_dspark(
    info: GgufInfo, facts: DraftFacts, rows: int, required: dict[str, Spec], optional: dict[str, Spec]
) -> None:
    rank = info.tensors["markov_w1.weight"].shape[-1]
    required |= {"markov_w1.weight": matrix(facts.vocab_size, rank), "markov_w2.weight": matrix(rows, rank)}
    if facts.has_confidence:
        required["conf_proj.weight"] = matrix(1, facts.hidden_size + rank)
        optional["conf_proj.bias"] = vector(1)
