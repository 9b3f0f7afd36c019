"""
The contract of artifact kind `dspark`: which files it takes, in which layout, and what it refuses.

Two containers hold the same tensors in the same shapes (outermost dimension first). H hidden size of target
and drafter, F feed-forward size, N/M query/key heads, D head size, k target layers read, V target vocabulary,
Vd rows of the output matrix (V without a reduced vocabulary), R rank of the Markov head, i block.

==========================  ====================================================  ===========  =======================
GGUF                        safetensors (published by DeepSpec)                   shape        type in a GGUF
==========================  ====================================================  ===========  =======================
fc.weight                   fc.weight                                             H, k*H       float or quantized
enc.output_norm.weight      hidden_norm.weight                                    H            F32
output_norm.weight          norm.weight                                           H            F32
token_embd.weight           embed_tokens.weight                                   V, H         optional: the target's
output.weight               lm_head.weight                                        Vd, H        optional: the target's
blk.i.attn_norm.weight      layers.i.input_layernorm.weight                       H            F32
blk.i.attn_q.weight         layers.i.self_attn.q_proj.weight                      N*D, H       float or quantized
blk.i.attn_k.weight         layers.i.self_attn.k_proj.weight                      M*D, H       float or quantized
blk.i.attn_v.weight         layers.i.self_attn.v_proj.weight                      M*D, H       float or quantized
blk.i.attn_output.weight    layers.i.self_attn.o_proj.weight                      H, N*D       float or quantized
blk.i.attn_q_norm.weight    layers.i.self_attn.q_norm.weight                      D            F32
blk.i.attn_k_norm.weight    layers.i.self_attn.k_norm.weight                      D            F32
blk.i.ffn_norm.weight       layers.i.post_attention_layernorm.weight              H            F32
blk.i.ffn_gate/up.weight    layers.i.mlp.gate_proj/up_proj.weight                 F, H         float or quantized
blk.i.ffn_down.weight       layers.i.mlp.down_proj.weight                         H, F         float or quantized
markov_w1.weight            markov_head.markov_w1.weight                          V, R         float or quantized
markov_w2.weight            markov_head.markov_w2.weight                          Vd, R        float or quantized
conf_proj.weight            confidence_head.proj.weight                           1, H+R       optional; as the others
conf_proj.bias              confidence_head.proj.bias                             1            optional; F32
d2t                         d2t                                                   Vd           I64; with Vd < V only
==========================  ====================================================  ===========  =======================

Safetensors hold F32, F16 or BF16; names may begin with ``model.``; a ``t2d`` is ignored there. ``d2t`` holds the target
id of each output row, distinct; in files of the speculators library (``transformer_layer_config``, ``speculators_*`` or
``aux_hidden_state_layer_ids`` in the config) id - row instead. Rotary pairs are NeoX (first half with second half),
so no matrix is permuted on conversion. A factored Markov head is exported multiplied out. Everything is optional that
says so, the rest must be there, and any other tensor is refused.

GGUF keys: ``general.architecture`` "dflash"; under ``dflash.``: context_length, embedding_length, block_count,
feed_forward_length, attention.head_count, attention.head_count_kv, attention.key_length = attention.value_length,
attention.layer_norm_rms_epsilon, attention.causal false, rope.freq_base, vocab_size, block_size, target_layers
(the block whose INPUT is read: output of block l is l + 1), sample_from_anchor, has_confidence_head; any other key
there is refused, but for a few that change nothing at the value they have;
``tokenizer.ggml.model`` "none" (or a whole tokenizer, compared with the target's) and
``tokenizer.ggml.mask_token_id``. Integers are u32, fractions f32, the two switches bool. An epsilon is 1e-12 to 0.1,
a rotation base 2 to 1e12.

config.json: architectures ["Qwen3DSparkModel"], hidden_size, intermediate_size, num_hidden_layers,
num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps, rope_theta (or rope_parameters.rope_theta),
max_position_embeddings, vocab_size, draft_vocab_size (with d2t), block_size, mask_token_id, target_layer_ids (the
block whose OUTPUT is read, from 0), markov_rank, markov_head_type "vanilla", enable_confidence_head,
confidence_head_with_markov (false: conf_proj has H columns), sample_from_anchor (default true).

Either may name its target's tokenizer under ``tokenizer_sha256`` (in a GGUF ``power.tokenizer_sha256``): 64 hex
digits, compared with the target's identity. All other keys are
those of the DFlash kinds wherever the two families share one.

Sources: deepspec/modeling/dspark of deepseek-ai/DeepSpec; src/models/dflash.cpp and conversion/qwen.py of llama.cpp.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from power_core.artifacts import ArtifactFacts, TensorFile
from power_core.target import TargetModel
from power_dspark.fields import refuse
from power_dspark.header import Header, tensor_names
from power_dspark.header_gguf import read_gguf_header
from power_dspark.header_published import ARCHITECTURES, is_speculators, read_published_header
from power_dspark.layout import DSPARK_TENSORS, UNUSED_TENSORS, canonical_name, shapes

__all__ = ["KIND", "DsparkContract", "draft_ids", "read_header"]

KIND = "dspark"

_FLOATS = frozenset({"F32", "F16", "BF16"})
_QUANTIZED = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})
_OPTIONAL = frozenset({"token_embd.weight", "output.weight", "conf_proj.bias"})
_VECTORS = ("_norm.weight", ".bias")
_SELECTOR = ("selector_", "candidate_selector.", "model.candidate_selector.")


def read_header(file: TensorFile) -> Header:
    """
    The header of *file*.

    Raises:
        ArtifactError: A key is missing, of the wrong type, out of range, or contradicts the tensor table.
    """
    names = tensor_names(file)
    for name in ("markov_w1.weight", "markov_w2.weight"):
        if name not in names:
            refuse(file.path, f"the tensor {name} is missing", got=name, expected="both Markov matrices")
    return read_gguf_header(file) if file.format == "gguf" else read_published_header(file)


def draft_ids(file: TensorFile) -> NDArray[np.int64] | None:
    """int64[Vd]: the token of each output row, from either form of `d2t`; None without a reduced vocabulary."""
    name = tensor_names(file).get("d2t")
    if name is None:
        return None
    stored = np.asarray(file.read(name)).astype(np.int64)
    is_offset = file.format != "gguf" and is_speculators(file.metadata)
    return stored + np.arange(len(stored), dtype=np.int64) if is_offset else stored


class DsparkContract:
    """DSpark drafters: a DFlash backbone with a Markov head and, optionally, a confidence head."""

    kind = KIND

    def matches(self, file: TensorFile) -> bool:
        """Whether metadata or tensor table claim a DSpark drafter, whatever `check` may find wrong with it."""
        table = {name if file.format == "gguf" else canonical_name(name) for name in file.tensors}
        if any(name.startswith(_SELECTOR) for name in table):
            return False  # DFlash2, or a mixture that no contract takes
        if file.format == "gguf":
            keys = {"dflash.sample_from_anchor", "dflash.has_confidence_head"}
            is_named = bool(keys & set(file.metadata)) or bool(table & DSPARK_TENSORS)
            return is_named and file.metadata.get("general.architecture") == "dflash"
        named = file.metadata.get("architectures")
        is_named = isinstance(named, list | tuple) and any(name in ARCHITECTURES for name in named)
        # DeepSpec's trainer makes DFlash drafters of the same class, with a Markov head of rank 0.
        return (is_named and file.metadata.get("markov_rank") != 0) or bool(table & DSPARK_TENSORS)

    def check(self, file: TensorFile) -> ArtifactFacts:
        header = read_header(file)
        _check_table(file, header)
        dims = header.dims
        return ArtifactFacts(
            hidden_layers=header.hidden_layers, hidden_size=dims.hidden, vocab_size=dims.vocab,
            draft_vocab_size=dims.draft_vocab, block_size=header.max_drafts,
            details={
                "rows": header.block_size, "sample_from_anchor": header.sample_from_anchor,
                "confidence_head": bool(dims.confidence), "markov_rank": dims.rank, "blocks": dims.blocks,
                "mask_token_id": header.mask_id, "context": header.context,
            },
        )  # fmt: skip

    def check_payload(self, file: TensorFile) -> None:
        vocab = read_header(file).dims.vocab
        for canonical, name in tensor_names(file).items():
            if canonical == "d2t":
                _check_ids(file, vocab)
            elif canonical not in UNUSED_TENSORS:
                _check_finite(file, name)

    def check_target(self, file: TensorFile, facts: ArtifactFacts, target: TargetModel) -> None:
        identity = target.identity
        if facts.hidden_size != identity.hidden_size:
            _unfit(file, f"hidden size {facts.hidden_size}", identity.hidden_size)
        if facts.vocab_size != identity.vocab_size:
            _unfit(file, f"a vocabulary of {facts.vocab_size}", identity.vocab_size)
        # A GGUF's layers are tapped natively, and llama.cpp has no tap after the last block.
        last = identity.num_layers - (2 if file.format == "gguf" else 1)
        if max(facts.hidden_layers) > last:
            _unfit(file, f"target layers {list(facts.hidden_layers)}", f"at most {last}, of {identity.num_layers}")
        _check_tokenizer(file, target)


def _check_table(file: TensorFile, header: Header) -> None:
    """Every tensor that must be there, of its shape and type; none besides."""
    names, expected = tensor_names(file), shapes(header.dims)
    for name, shape in expected.items():
        if name not in names:
            if name in _OPTIONAL:
                continue
            refuse(file.path, f"the tensor {name} is missing", got=name, expected=f"shape {shape}")
        info = file.tensors[names[name]]
        # A GGUF may leave out dimensions of one.
        if info.shape != shape and not (file.format == "gguf" and (1, *info.shape) == shape):
            refuse(file.path, f"{info.name} has shape {info.shape}", got=info.shape, expected=str(shape))
        _check_type(file, name, info.dtype, info.name)
    # llama.cpp counts: a tensor too many is a file it does not load.
    unknown = set(names) - set(expected) - (UNUSED_TENSORS if file.format != "gguf" else set())
    if unknown:
        name = min(unknown)
        refuse(file.path, f"the tensor {names[name]} is unknown", got=name, expected="the tensors of a DSpark drafter")


def _check_type(file: TensorFile, name: str, dtype: str, spelled: str) -> None:
    if name == "d2t":
        allowed = frozenset({"I64"})
    elif file.format != "gguf":
        allowed = _FLOATS
    elif name.endswith(_VECTORS):
        allowed = frozenset({"F32"})
    else:
        allowed = _FLOATS | _QUANTIZED
    if dtype not in allowed:
        refuse(file.path, f"{spelled} is of type {dtype}", got=dtype, expected=" or ".join(sorted(allowed)))


def _check_finite(file: TensorFile, name: str) -> None:
    values = np.asarray(file.read(name), np.float32).reshape(-1)
    finite = np.isfinite(values)
    if not finite.all():
        index = int(np.argmin(finite))
        refuse(file.path, f"{name} holds {values[index]} at index {index}", got=index, expected="finite numbers")


def _check_ids(file: TensorFile, vocab: int) -> None:
    ids = draft_ids(file)
    if ids is None:
        return
    outside = (ids < 0) | (ids >= vocab)
    if outside.any():
        index = int(np.argmax(outside))
        refuse(file.path, f"d2t maps row {index} to token {ids[index]}", got=index, expected=f"0 to {vocab - 1}")
    if len(np.unique(ids)) != len(ids):
        values, counts = np.unique(ids, return_counts=True)
        token = int(values[np.argmax(counts)])
        refuse(file.path, f"d2t maps two rows to token {token}", got=token, expected="a row a token")


def _unfit(file: TensorFile, found: str, expected: object) -> None:
    fix = "give the target this drafter was trained for, or a drafter of this target"
    refuse(file.path, f"the drafter has {found}", got=found, expected=f"the target's {expected}", fix=fix)


def _check_tokenizer(file: TensorFile, target: TargetModel) -> None:
    """By content, where the file says anything: equal sizes mean nothing."""
    stated = file.metadata.get("power.tokenizer_sha256" if file.format == "gguf" else "tokenizer_sha256")
    if stated is not None and stated != target.identity.tokenizer_sha256:
        _unfit(file, f"tokenizer {str(stated)[:16]}", f"tokenizer {target.identity.tokenizer_sha256[:16]}")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if file.format != "gguf" or tokens is None:
        return
    for i, token in enumerate(tokens):
        name = token.decode("utf-8", "replace") if isinstance(token, bytes) else token
        if name != target.tokenizer.token_name(i):
            _unfit(file, f"{name!r:.40} as token {i}", f"{target.tokenizer.token_name(i)!r:.40}")
