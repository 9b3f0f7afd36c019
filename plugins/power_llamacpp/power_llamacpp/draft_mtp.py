"""
Prediction (NextN) layers of architecture `qwen35`: inside a target's file, or in a file of their own.

A file of its own says that there is a trunk before its layer and does not hold it. It can draft for a target of any
architecture whose hidden size and vocabulary are the same: what state it is fed is the drafter's choice.
"""

from __future__ import annotations

from power_llamacpp.draft_facts import FIX, DraftFacts, DraftKind, Spec, check_vocabulary, matrix, vector
from power_llamacpp.gguf_check import check_tokenizer
from power_llamacpp.gguf_file import GgufInfo, refuse
from power_llamacpp.gguf_hparams import (
    check_finite_numbers,
    check_heads,
    check_recurrent,
    check_rope,
    check_sizes,
    check_window,
    unsigned,
)

__all__ = ["layer_tensors", "mtp_facts", "mtp_tensors"]

_LEAST_HEADS = 4  # llama.cpp asserts on 2


def mtp_facts(info: GgufInfo, target: GgufInfo) -> DraftFacts:
    """
    Check the keys of *info*, the target's own file or one of its own.

    Raises:
        ArtifactError: The first thing found wrong.
    """
    for check in (check_sizes, check_finite_numbers, check_heads, check_window, check_rope, check_recurrent):
        check(info)
    layers = unsigned(info, "nextn_predict_layers", required=True)
    if layers != 1:
        refuse(info.path, f"the file has {layers} prediction layers", got=layers, expected="1, all that llama.cpp runs")
    heads = unsigned(info, "attention.head_count", required=True) or 0
    kv_heads = unsigned(info, "attention.head_count_kv", required=True) or 0
    if heads < _LEAST_HEADS or not kv_heads:
        what = f"there are {heads} query heads on {kv_heads} key heads"
        refuse(info.path, what, got=(heads, kv_heads), expected=f"{_LEAST_HEADS} or more on 1 or more")
    lengths = info.integer("attention.key_length"), info.integer("attention.value_length")
    if lengths[0] != lengths[1] or not lengths[0]:
        what = f"key length {lengths[0]} differs from value length {lengths[1]}"
        refuse(info.path, what, got=lengths, expected="equal lengths, both in the file")
    unsigned(info, "feed_forward_length", least=1, required=True)
    key = "qwen35.attention.layer_norm_rms_epsilon"
    if info.value_types.get(key) != "f32":
        refuse(info.path, f"{key} is {info.value_types.get(key, 'missing')}", expected="an f32")
    sections = info.metadata.get("qwen35.rope.dimension_sections")
    if sections is None:
        refuse(info.path, "the key qwen35.rope.dimension_sections is missing", expected="four sizes")
    if info.hidden_size != target.hidden_size:
        what = f"the drafter's embedding_length is {info.hidden_size}"
        refuse(info.path, what, got=info.hidden_size, expected=f"the target's {target.hidden_size}", fix=FIX)
    check_tokenizer(info)
    check_vocabulary(info, target)
    return DraftFacts(DraftKind.MTP, info.hidden_size, target.vocab_size)


def mtp_tensors(info: GgufInfo, facts: DraftFacts) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """The tensors that a file without a trunk must have, and those it may."""
    required, optional = layer_tensors(info, facts)
    required |= {
        "token_embd.weight": matrix(facts.vocab_size, facts.hidden_size),
        "output_norm.weight": vector(facts.hidden_size),
    }
    optional["output.weight"] = matrix(facts.vocab_size, facts.hidden_size)
    return required, optional


def layer_tensors(info: GgufInfo, facts: DraftFacts) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """The same for the prediction layer alone."""
    hidden, vocab, ffn = facts.hidden_size, facts.vocab_size, info.integer("feed_forward_length")
    head, block = info.integer("attention.key_length"), f"blk.{info.num_layers}"
    queries, keys = info.integer("attention.head_count") * head, info.integer("attention.head_count_kv") * head
    required = {
        f"{block}.attn_norm.weight": vector(hidden),
        f"{block}.post_attention_norm.weight": vector(hidden),
        f"{block}.attn_q.weight": matrix(2 * queries, hidden),
        f"{block}.attn_k.weight": matrix(keys, hidden),
        f"{block}.attn_v.weight": matrix(keys, hidden),
        f"{block}.attn_output.weight": matrix(hidden, queries),
        f"{block}.attn_q_norm.weight": vector(head),
        f"{block}.attn_k_norm.weight": vector(head),
        f"{block}.ffn_gate.weight": matrix(ffn, hidden),
        f"{block}.ffn_up.weight": matrix(ffn, hidden),
        f"{block}.ffn_down.weight": matrix(hidden, ffn),
        f"{block}.nextn.eh_proj.weight": matrix(hidden, 2 * hidden),
        f"{block}.nextn.enorm.weight": vector(hidden),
        f"{block}.nextn.hnorm.weight": vector(hidden),
    }
    optional = {
        f"{block}.nextn.embed_tokens.weight": matrix(vocab, hidden),
        f"{block}.nextn.shared_head_head.weight": matrix(vocab, hidden),
        f"{block}.nextn.shared_head_norm.weight": vector(hidden),
    }
    return required, optional
