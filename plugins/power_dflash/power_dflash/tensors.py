"""The tensor table a DFlash file must have: names, shapes and types, nothing missing and nothing more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.artifacts import TensorFile, TensorInfo
from power_core.artifacts.gguf import TENSOR_TYPES
from power_dflash.header import Header
from power_dflash.keys import deny

__all__ = ["EMBEDDING", "OUTPUT", "check_payload", "check_tensors", "draft_ids", "is_selector", "spelled"]

_FLOATS = frozenset({"F32", "F16", "BF16"})
_MATRICES = frozenset(kind.name for kind in TENSOR_TYPES.values() if kind.weight)
_IDS = frozenset({"I64"})
EMBEDDING = ("embed_tokens.weight", "token_embd.weight")
OUTPUT = ("lm_head.weight", "output.weight")
MAP = ("d2t", "d2t")
_SELECTOR = ("candidate_selector.hidden_projection.weight", "selector_hidden.weight")
# Speculators store the reverse map and parts of the target beside the drafter's own weights.
_IGNORED = frozenset({"t2d", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq"})


@frozen
class _Wanted:
    """
    One tensor: its safetensors and GGUF names, its shape, and what it may be made of.

    Args:
        names: Both names.
        shape: Rows out first.
        plain: Whether kernels read it as F32 whatever it is: GGUF must then store it so.
        optional: Whether it may be absent.
    """

    names: tuple[str, str]
    shape: tuple[int, ...]
    plain: bool = False
    optional: bool = False


def spelled(file: TensorFile, names: tuple[str, str]) -> str:
    """The name of the pair that *file* uses, with its prefix."""
    if file.format == "gguf":
        return names[1]
    prefixed = f"model.{names[0]}"
    return prefixed if names[0] not in file.tensors and prefixed in file.tensors else names[0]


def is_selector(file: TensorFile) -> bool:
    """Whether *file* has DFlash2's selector: the tensor by which llama.cpp tells the two kinds apart."""
    return spelled(file, _SELECTOR) in file.tensors


def check_tensors(file: TensorFile, header: Header) -> int:
    """
    Check the table against the sizes of *header*.

    Returns:
        Rows of the output matrix.

    Raises:
        ArtifactError: The first tensor found missing, foreign, or of another shape or type.
    """
    rows = _draft_rows(file, header)
    known = set()
    for wanted in _wanted(header, rows):
        name = spelled(file, wanted.names)
        known.add(name)
        info = file.tensors.get(name)
        if info is not None:
            _check_tensor(file, info, wanted)
        elif not wanted.optional:
            deny(file, f"the tensor {name} is missing", got=name, expected=list(wanted.shape))
    for name in file.tensors:
        if name not in known and (file.format == "gguf" or name.removeprefix("model.") not in _IGNORED):
            deny(file, f"the tensor {name} is no part of this kind", got=name, expected="the tensors of its contract")
    return rows


def check_payload(file: TensorFile, header: Header) -> None:
    """
    Read every value: floats are finite, and ids are different ids of the vocabulary.

    Raises:
        ArtifactError: With the tensor and the index.
    """
    for name, info in file.tensors.items():
        if info.dtype in _IDS or name.removeprefix("model.") in _IGNORED:
            continue
        bad = np.flatnonzero(~np.isfinite(file.read(name)))
        if len(bad):
            deny(file, f"the tensor {name} holds NaN or infinity at index {bad[0]}", got=name, expected="finite values")
    draft_ids(file, header)


def draft_ids(file: TensorFile, header: Header) -> NDArray[np.int64] | None:
    """
    The target id of each output row, or None where the file has no reduced vocabulary.

    Raises:
        ArtifactError: An id is outside the vocabulary, or there twice.
    """
    name = spelled(file, MAP)
    if name not in file.tensors:
        return None
    ids = file.read(name).astype(np.int64)
    if header.has_offsets:
        ids = ids + np.arange(len(ids))
    bad = np.flatnonzero((ids < 0) | (ids >= header.vocab_size))
    if len(bad):
        found = int(ids[bad[0]])
        deny(file, f"{name}[{bad[0]}] is {found}", got=found, expected=f"an id below {header.vocab_size}")
    _, counts = np.unique(ids, return_counts=True)
    if counts.max() > 1:
        deny(file, f"{name} names an id twice", got=int(counts.max()), expected="different ids")
    return ids


def _draft_rows(file: TensorFile, header: Header) -> int:
    """V', by the map; without one the vocabulary is not reduced."""
    info = file.tensors.get(spelled(file, MAP))
    if info is None:
        return header.vocab_size
    if info.dtype != "I64" or len(info.shape) != 1 or not 1 <= info.shape[0] <= header.vocab_size:
        deny(
            file, f"the tensor {info.name} is {info.dtype} {list(info.shape)}",
            got=info.dtype, expected=f"I64 [1 to {header.vocab_size}]",
        )  # fmt: skip
    output = spelled(file, OUTPUT)
    if output not in file.tensors:
        deny(file, f"the tensor {output} is missing", got=output, expected=f"with {info.name}, an output matrix")
    return info.shape[0]


def _check_tensor(file: TensorFile, info: TensorInfo, wanted: _Wanted) -> None:
    if info.shape != wanted.shape:
        shape, expected = list(info.shape), list(wanted.shape)
        deny(file, f"the tensor {info.name} has shape {shape}", got=shape, expected=expected)
    allowed = _FLOATS if file.format != "gguf" else frozenset({"F32"}) if wanted.plain else _MATRICES
    if wanted.names == MAP:
        allowed = _IDS
    if info.dtype not in allowed:
        names = "a float or quantized type" if allowed is _MATRICES else " or ".join(sorted(allowed))
        deny(file, f"the tensor {info.name} is of type {info.dtype}", got=info.dtype, expected=names)


def _wanted(header: Header, rows: int) -> Iterator[_Wanted]:
    hidden = header.hidden_size
    yield _Wanted(("fc.weight", "fc.weight"), (hidden, hidden * len(header.target_blocks)))
    yield _Wanted(("hidden_norm.weight", "enc.output_norm.weight"), (hidden,), plain=True)
    yield _Wanted(("norm.weight", "output_norm.weight"), (hidden,), plain=True)
    yield _Wanted(EMBEDDING, (header.vocab_size, hidden), optional=True)
    yield _Wanted(OUTPUT, (rows, hidden), optional=True)
    yield _Wanted(MAP, (rows,), optional=True)
    for layer in range(header.layers):
        yield from _layer(header, layer)
    if header.selector is not None:
        codes = (header.vocab_size, header.selector.rank)
        yield _Wanted(("candidate_selector.predecessor_codebook", "selector_predecessor.weight"), codes)
        yield _Wanted(("candidate_selector.successor_codebook", "selector_successor.weight"), codes)
        yield _Wanted(_SELECTOR, (header.selector.rank, hidden))


def _layer(header: Header, layer: int) -> Iterator[_Wanted]:
    hidden, ffn = header.hidden_size, header.ffn_size
    queries, keys = header.heads * header.head_dim, header.kv_heads * header.head_dim
    shapes: Mapping[tuple[str, str], tuple[int, ...]] = {
        ("input_layernorm", "attn_norm"): (hidden,),
        ("self_attn.q_norm", "attn_q_norm"): (header.head_dim,),
        ("self_attn.k_norm", "attn_k_norm"): (header.head_dim,),
        ("post_attention_layernorm", "ffn_norm"): (hidden,),
        ("self_attn.q_proj", "attn_q"): (queries, hidden),
        ("self_attn.k_proj", "attn_k"): (keys, hidden),
        ("self_attn.v_proj", "attn_v"): (keys, hidden),
        ("self_attn.o_proj", "attn_output"): (hidden, queries),
        ("mlp.gate_proj", "ffn_gate"): (ffn, hidden),
        ("mlp.up_proj", "ffn_up"): (ffn, hidden),
        ("mlp.down_proj", "ffn_down"): (hidden, ffn),
    }
    for (published, gguf), shape in shapes.items():
        names = (f"layers.{layer}.{published}.weight", f"blk.{layer}.{gguf}.weight")
        yield _Wanted(names, shape, plain=len(shape) == 1)
    if header.selector is None:
        return
    taps, groups = header.selector.conv_kernel, hidden // header.selector.conv_group
    for published, gguf in (("attention_conv", "attn_conv"), ("mlp_conv", "ffn_conv")):
        base = (f"layers.{layer}.{published}.base_kernel", f"blk.{layer}.{gguf}_base")
        projection = (f"layers.{layer}.{published}.kernel_projection.weight", f"blk.{layer}.{gguf}_proj.weight")
        yield _Wanted(base, (2, taps, hidden), plain=True)
        yield _Wanted(projection, (2 * taps * groups, hidden))
