"""
The contract `mtp-head`: which files are MTP heads, and what must hold before one is used.

An attached head is ONE decoder layer applied recurrently (Hugging Face names, then GGUF names):

========================================  ========================  =======  =====================================
safetensors                               GGUF                      shape    meaning
========================================  ========================  =======  =====================================
``feature_fc.weight``                     ``feature_fc.weight``     H, n*H   fuses the features of n target blocks
``hidden_norm.weight``                    ``hidden_norm.weight``    H        RMSNorm gain of h
``embed_norm.weight``                     ``embed_norm.weight``     H        RMSNorm gain of the token's embedding
``fc.weight``                             ``fc.weight``             H, 2*H   columns: H of h, then H of the embedding
``layers.0.input_layernorm.weight``       ``blk.0.attn_norm``       H        before attention
``layers.0.self_attn.q_proj.weight``      ``blk.0.attn_q``          A*D, H   A query heads of size D
``layers.0.self_attn.k_proj.weight``      ``blk.0.attn_k``          B*D, H   B key and value heads, a divisor of A
``layers.0.self_attn.v_proj.weight``      ``blk.0.attn_v``          B*D, H
``layers.0.self_attn.o_proj.weight``      ``blk.0.attn_output``     H, A*D
``layers.0.self_attn.q_norm.weight``      ``blk.0.attn_q_norm``     D        RMSNorm of each query head, before rope
``layers.0.self_attn.k_norm.weight``      ``blk.0.attn_k_norm``     D        RMSNorm of each key head, before rope
``layers.0.post_attention_layernorm.weight``  ``blk.0.ffn_norm``    H        before the feed-forward
``layers.0.mlp.gate_proj.weight``         ``blk.0.ffn_gate``        F, H     SwiGLU: down(silu(gate) * up)
``layers.0.mlp.up_proj.weight``           ``blk.0.ffn_up``          F, H
``layers.0.mlp.down_proj.weight``         ``blk.0.ffn_down``        H, F
``norm.weight``                           ``output_norm.weight``    H        before the output matrix
``lm_head.weight``                        ``output.weight``         V', H    own output matrix; absent: the target's
``d2t``                                   ``d2t``                   V'       I64, absolute target id of each row
========================================  ========================  =======  =====================================

(GGUF block names end in ``.weight``.) ``feature_fc.weight`` is required for more than one feature and allowed
for one. ``d2t`` is required where V' is less than the target's vocabulary V, lists distinct ids in order of
frequency, and needs ``lm_head.weight``. The embedding is the target's. No tensor has a bias; every other name is
refused. Matrices are F32, F16, BF16 (in GGUF also a quantized type), norms likewise, without quantized types.

The step, at position p, of token x_p with the hidden state h_(p-1)::

    g      = features of the target's row p-1, side by side in the order of target_layer_ids
    h      = feature_fc g   (or g itself without feature_fc);  after the first draft step: y of the step before
    x      = fc [hidden_norm(h), embed_norm(embedding[x_p])]
    y      = decoder layer(x)       causal over the head's own K/V of all positions <= p, NeoX rope at position p
    logits = lm_head norm(y)        row r is the logit of token d2t[r] at position p+1

Metadata: ``config.json`` beside a safetensors file, keys with the prefix ``mtp-head.`` in a GGUF file:

==========================  =========================================  =============================================
config.json                 GGUF key (after ``mtp-head.``)             value
==========================  =========================================  =============================================
``model_type``              ``general.architecture`` (no prefix)       ``mtp-head``
``hidden_size``             ``embedding_length``                       H, the target's too
``intermediate_size``       ``feed_forward_length``                    F
``num_attention_heads``     ``attention.head_count``                   A
``num_key_value_heads``     ``attention.head_count_kv``                B
``head_dim``                ``attention.key_length``                   D, even
``rms_norm_eps``            ``attention.layer_norm_rms_epsilon``       of every norm
``rope_theta``              ``rope.freq_base``                         rotation base
``vocab_size``              ``vocab_size``                             V
``target_layer_ids``        ``target_layer_ids``                       blocks whose OUTPUT is read, numbered from 0
``trained_steps``           ``trained_steps``                          optional: recurrent steps seen in training
``tokenizer_sha256``        ``tokenizer_sha256``                       optional: tokenizer digest of the target
==========================  =========================================  =============================================

``draft_vocab_size`` may be in either as well and must then equal V'. Other keys are ignored.

A GGUF file of architecture ``qwen35`` that holds prediction layers and no trunk (``nextn_predict_layers`` > 0,
no ``blk.0.attn_norm.weight``) is of this kind too: the native executor's form, see `power_mtp.nextn_file`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from power_core.artifacts import ArtifactFacts, TensorFile
from power_core.artifacts.files import refuse
from power_core.artifacts.gguf import TENSOR_TYPES
from power_core.target import TargetModel
from power_mtp import nextn_file
from power_mtp.layout import GGUF_KEYS, KIND, MODEL_TYPE_KEYS, TENSORS, HeadShape, tensor_name
from power_mtp.metadata import EPSILONS, PLUGIN, ROPE_BASES, Metadata

__all__ = ["MtpHeadContract", "head_shape"]

_FLOATS = frozenset({"F32", "F16", "BF16"})
_WEIGHTS = frozenset(kind.name for kind in TENSOR_TYPES.values() if kind.weight)
_MARKERS = ("hidden_norm", "embed_norm")  # no other kind of drafter has these two together
_FOREIGN = ("markov", "selector", "conv")  # parts of DSpark and DFlash2 files
_LARGEST = 2**20  # bound of a width: a mistyped size is refused before anything is multiplied by it
_MOST_IDS = 2**31 - 1
_MOST_LAYERS = 64
_EXPORT_AGAIN = "export the head again"


class MtpHeadContract:
    """The contract of kind `mtp-head`; the module says what the files hold."""

    kind = KIND

    def matches(self, file: TensorFile) -> bool:
        """Whether *file* says it is an MTP head and its tensor table does not say otherwise."""
        if nextn_file.matches(file):
            return True
        if file.metadata.get(MODEL_TYPE_KEYS[file.format]) != KIND:
            return False
        has_part = any(tensor_name(short, file.format) in file.tensors for short in _MARKERS)
        return has_part and not any(part in name for name in file.tensors for part in _FOREIGN)

    def check(self, file: TensorFile) -> ArtifactFacts:
        if nextn_file.matches(file):
            return nextn_file.check(file)
        shape = head_shape(file)
        _check_table(file, shape)
        return ArtifactFacts(
            hidden_layers=shape.target_layers,
            hidden_size=shape.hidden,
            vocab_size=shape.vocab,
            draft_vocab_size=shape.draft_vocab,
            details=_details(file, shape),
        )

    def check_payload(self, file: TensorFile) -> None:
        for name, tensor in file.tensors.items():
            if tensor.dtype != "I64":
                _check_finite(file, name, file.read(name))
        if not nextn_file.matches(file) and "d2t" in file.tensors:
            _check_ids(file, head_shape(file).vocab)

    def check_target(self, file: TensorFile, facts: ArtifactFacts, target: TargetModel) -> None:
        identity = target.identity
        for what, found, expected in (
            ("hidden size", facts.hidden_size, identity.hidden_size),
            ("vocabulary size", facts.vocab_size, identity.vocab_size),
        ):
            if found != expected:
                _refuse_target(file, f"the head's {what} is {found}", found, f"{expected}, the target's")
        if facts.hidden_layers and max(facts.hidden_layers) >= identity.num_layers:
            found, last = max(facts.hidden_layers), identity.num_layers - 1
            _refuse_target(file, f"the head reads block {found}", found, f"a block from 0 to {last}, the target's last")
        if nextn_file.matches(file):
            nextn_file.check_architecture(file, facts, identity)
        _check_tokenizer(file, target)


def head_shape(file: TensorFile) -> HeadShape:
    """
    The sizes of the attached head *file*; each is in range and they fit each other.

    Raises:
        ArtifactError: A key is missing or out of range, or what the table tells contradicts it.
    """
    keys = metadata_of(file)
    type_key = MODEL_TYPE_KEYS[file.format]
    if file.metadata.get(type_key) != KIND:
        found = file.metadata.get(type_key)
        _refuse(file, f"{type_key} is {found!r:.40}", found, f"{KIND!r}, or an MTP-only {nextn_file.ARCHITECTURE} GGUF")
    heads = keys.whole("num_attention_heads", 1, _LARGEST)
    kv_heads = keys.whole("num_key_value_heads", 1, heads)
    if heads % kv_heads:
        _refuse(
            file, f"{heads} query heads do not share {kv_heads} key heads evenly", kv_heads, f"a divisor of {heads}"
        )
    head_dim = keys.whole("head_dim", 2, 4096)
    if head_dim % 2:
        _refuse(file, f"{keys.spelled('head_dim')} is {head_dim}", head_dim, "an even number: rope turns pairs")
    vocab = keys.whole("vocab_size", 1, _MOST_IDS)
    layers = keys.wholes("target_layer_ids", 0, _LARGEST, longest=_MOST_LAYERS)
    if len(set(layers)) < len(layers):
        _refuse(file, f"{keys.spelled('target_layer_ids')} is {list(layers)}", layers, "each block once")
    keys.whole("trained_steps", 1, _LARGEST, default=1)
    has = {short: tensor_name(short, file.format) in file.tensors for short in TENSORS}
    if len(layers) > 1 and not has["feature_fc"]:
        _refuse(file, f"{len(layers)} features and no tensor feature_fc.weight", layers, "a tensor that fuses them")
    shape = HeadShape(
        hidden=keys.whole("hidden_size", 1, _LARGEST),
        feed_forward=keys.whole("intermediate_size", 1, _LARGEST),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=keys.real("rms_norm_eps", *EPSILONS),
        rope_theta=keys.real("rope_theta", *ROPE_BASES),
        vocab=vocab,
        draft_vocab=_draft_vocab(file, has, vocab),
        target_layers=layers,
        fuses=has["feature_fc"],
        has_output=has["output"],
        is_reduced=has["d2t"],
    )
    keys.whole("draft_vocab_size", shape.draft_vocab, shape.draft_vocab, default=shape.draft_vocab)
    return shape


def metadata_of(file: TensorFile) -> Metadata:
    """The keys of an attached head, by their name in config.json."""
    return Metadata(file, f"{KIND}.", GGUF_KEYS) if file.format == "gguf" else Metadata(file)


def _draft_vocab(file: TensorFile, has: Mapping[str, bool], vocab: int) -> int:
    output = tensor_name("output", file.format)
    if has["d2t"] and not has["output"]:
        _refuse(file, f"d2t without {output}", "d2t", "an output matrix with a row for each of its ids")
    if not has["output"]:
        return vocab
    rows = file.tensors[output].shape[0]
    if rows > vocab:
        _refuse(file, f"{output} has {rows} rows", rows, f"at most {vocab}, the vocabulary")
    if rows < vocab and not has["d2t"]:
        _refuse(file, f"{output} has {rows} rows of {vocab} and there is no d2t", rows, "a tensor d2t with their ids")
    return rows


def _check_table(file: TensorFile, shape: HeadShape) -> None:
    expected = {tensor_name(short, file.format): dims for short, dims in shape.tensors().items()}
    for name, dims in expected.items():
        if name not in file.tensors:
            _refuse(file, f"the tensor {name} is missing", name, f"shape {list(dims)}")
        tensor = file.tensors[name]
        if tensor.shape != dims:
            _refuse(file, f"tensor {name} has shape {list(tensor.shape)}", tensor.shape, list(dims))
        allowed = _allowed_types(file, name, dims)
        if tensor.dtype not in allowed:
            _refuse(file, f"tensor {name} is {tensor.dtype}", tensor.dtype, ", ".join(sorted(allowed)))
    for name in file.tensors:
        if name not in expected:
            _refuse(file, f"tensor {name!r:.80} is no part of an MTP head", name, "only the tensors of the layout")


def _allowed_types(file: TensorFile, name: str, dims: tuple[int, ...]) -> frozenset[str]:
    if name == "d2t":
        return frozenset({"I64"})
    return _WEIGHTS if file.format == "gguf" and len(dims) == 2 else _FLOATS


def _check_finite(file: TensorFile, name: str, values: NDArray[np.generic]) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        at = [int(i) for i in np.unravel_index(int(np.argmin(finite)), values.shape)]
        _refuse(file, f"tensor {name} holds {values[tuple(at)]} at {at}", at, "finite numbers")


def _check_ids(file: TensorFile, vocab: int) -> None:
    ids = file.read("d2t").astype(np.int64)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(outside):
        row = int(outside[0])
        _refuse(file, f"d2t holds {ids[row]} at row {row}", int(ids[row]), f"ids from 0 to {vocab - 1}")
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        twice = int(values[np.argmax(counts > 1)])
        _refuse(file, f"d2t holds the id {twice} twice", twice, "each id at most once")


def _check_tokenizer(file: TensorFile, target: TargetModel) -> None:
    """What the file carries of a tokenizer must be the target's, by content: the size proves nothing."""
    digest = None if nextn_file.matches(file) else metadata_of(file).text("tokenizer_sha256")
    if digest is not None and digest != target.identity.tokenizer_sha256:
        found = f"the head was made for tokenizer {digest:.16}"
        _refuse_target(file, found, digest, f"the target's, {target.identity.tokenizer_sha256:.16}")
    tokens = Metadata(file).strings("tokenizer.ggml.tokens")
    if tokens is None:
        return
    size = target.identity.vocab_size
    if len(tokens) != size:
        _refuse_target(file, f"the head's tokenizer has {len(tokens)} tokens", len(tokens), f"{size}, the target's")
    for token_id, spelling in enumerate(tokens):
        if spelling != target.tokenizer.token_name(token_id):
            name = target.tokenizer.token_name(token_id)
            _refuse_target(file, f"token {token_id} of the head is {spelling!r:.40}", spelling, f"{name!r:.40}")


def _details(file: TensorFile, shape: HeadShape) -> dict[str, object]:
    steps = metadata_of(file).get("trained_steps")
    return {
        "executor": "torch",
        "feed_forward": shape.feed_forward,
        "heads": [shape.heads, shape.kv_heads, shape.head_dim],
        "own_output": shape.has_output,
        **({} if steps is None else {"trained_steps": int(steps)}),
    }


def _refuse(file: TensorFile, what: str, got: object, expected: object) -> NoReturn:
    refuse(file.path, what, got=got, expected=expected, fix=_EXPORT_AGAIN, plugin=PLUGIN)


def _refuse_target(file: TensorFile, what: str, got: object, expected: object) -> NoReturn:
    refuse(file.path, what, got=got, expected=expected, fix="use a head trained for this target", plugin=PLUGIN)
