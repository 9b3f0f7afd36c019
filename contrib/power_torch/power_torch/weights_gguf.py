"""
Models in GGUF files, dequantized.

Key and tensor names are llama.cpp's (src/llama-arch.cpp); defaults are those of its loader (src/llama-model.cpp,
src/models/gemma3.cpp).
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from power_core.artifacts.gguf import GgufFile, StringArray
from power_torch.assemble import Source, assemble
from power_torch.hparams import ARCHITECTURES, GEMMA3, LLAMA, HyperParameters, RopeScaling
from power_torch.refusal import refuse
from power_torch.weights import ModelWeights

__all__ = ["GgufKeys", "has_magic", "hyper_parameters", "load"]

_GEMMA3_27B_LAYERS = 62  # the one Gemma 3 whose attention is scaled by hidden / heads instead of the head's width


def has_magic(path: Path) -> bool:
    """Whether *path* is a file that begins as GGUF does."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def load(path: Path, dtype: torch.dtype) -> ModelWeights:
    """
    The weights of a GGUF file; see `power_torch.weights.load_weights`.

    Raises:
        ArtifactError: The file is damaged, of another architecture, incomplete, or holds a number that is not finite.
    """
    file = GgufFile.open(path)
    hparams = hyper_parameters(file)

    def read(name: str) -> torch.Tensor:
        values = torch.from_numpy(file.read(name))
        if hparams.architecture == LLAMA and name.endswith((".attn_q.weight", ".attn_k.weight")):
            return half_split(values, hparams.head_dim)
        return values

    source = Source(path, {name: tensor.shape for name, tensor in file.tensors.items()}, read)
    source.skip("rope_freqs.weight")  # read with the hyper-parameters
    return assemble(source, hparams, dtype)


def half_split(matrix: torch.Tensor, head_dim: int) -> torch.Tensor:
    """
    [heads * head_dim, in] from GGUF's `llama` order, where the two halves of each rotated pair are neighbours.

    The inverse of `permute` in llama.cpp's conversion/llama.py.
    """
    rows, columns = matrix.shape
    return matrix.reshape(rows // head_dim, head_dim // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


class GgufKeys:
    """
    Typed reads of one architecture's own keys.

    Args:
        file: An opened file.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def name(self, key: str) -> str:
        return f"{self.file.architecture}.{key}"

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """
        The integer *key*; an array with one number a block must hold only equal ones.

        Raises:
            ArtifactError: It is missing and has no default, is no integer, or below *least*.
        """
        full = self.name(key)
        value = self.file.metadata.get(full, default)
        if isinstance(value, np.ndarray) and value.size and np.issubdtype(value.dtype, np.integer):
            if (value != value[0]).any():
                refuse(self.file.path, f"{full} differs between blocks", got=value.tolist(), expected="one value")
            value = int(value[0])
        if value is None:
            refuse(self.file.path, f"the key {full} is missing", expected="an integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            refuse(self.file.path, f"{full} is {value!r}", got=value, expected=f"an integer of {least} or more")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """
        The float *key*.

        Raises:
            ArtifactError: It is missing and has no default, is no finite number, or not positive where it must be.
        """
        full = self.name(key)
        value = self.file.metadata.get(full, default)
        if value is None:
            refuse(self.file.path, f"the key {full} is missing", expected="a number")
        if not isinstance(value, float) or not math.isfinite(value) or value < 0 or (positive and value == 0):
            refuse(self.file.path, f"{full} is {value!r}", got=value, expected="a positive number")
        return value


def hyper_parameters(file: GgufFile) -> HyperParameters:
    """
    What the header of *file* says.

    Raises:
        ArtifactError: Another architecture, or a key that is missing or out of range.
    """
    architecture = file.architecture
    if architecture not in ARCHITECTURES:
        refuse(
            file.path,
            f"architecture {architecture!r} is not supported in torch",
            got=architecture,
            expected=" or ".join(ARCHITECTURES),
            fix="use power-llamacpp for this model",
        )
    keys = GgufKeys(file)
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    _check_head(keys, head_dim)
    layers = keys.integer("block_count") - keys.integer("nextn_predict_layers", 0, least=0)
    window = keys.integer("attention.sliding_window", 0, least=0) if architecture == GEMMA3 else 0
    is_largest = architecture == GEMMA3 and layers == _GEMMA3_27B_LAYERS
    return HyperParameters(
        architecture=architecture,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_kv_heads(keys, heads),
        head_dim=head_dim,
        ffn_size=keys.integer("feed_forward_length"),
        trained_context=keys.integer("context_length"),
        norm_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
        rope_base=keys.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(keys, head_dim),
        rope_base_window=keys.number("rope.freq_base_swa", 10000.0),
        sliding_window=window,
        windowed=_windowed(keys, layers) if window else (),
        attention_scale=(hidden / heads if is_largest else head_dim) ** -0.5,
        embedding_scale=hidden**0.5 if architecture == GEMMA3 else 1.0,
        logit_softcap=keys.number("final_logit_softcapping", 0.0, positive=False) if architecture == GEMMA3 else 0.0,
        activation="gelu" if architecture == GEMMA3 else "silu",
    )


def _vocab_size(file: GgufFile) -> int:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray) or not tokens:
        refuse(file.path, "tokenizer.ggml.tokens is missing or empty", expected="an array of strings")
    return len(tokens)


def _check_head(keys: GgufKeys, head_dim: int) -> None:
    path = keys.file.path
    if head_dim % 2:
        refuse(path, f"a head is {head_dim} wide", got=head_dim, expected="an even number")
    for key in ("attention.value_length", "rope.dimension_count"):
        value = keys.integer(key, head_dim)
        if value != head_dim:
            refuse(path, f"{keys.name(key)} is {value}", got=value, expected=f"the width of a head, {head_dim}")
    for key in ("expert_count", "expert_used_count"):
        if keys.integer(key, 0, least=0):
            refuse(path, "this is a mixture of experts", expected="a dense model", fix="use power-llamacpp for it")


def _kv_heads(keys: GgufKeys, heads: int) -> int:
    kv_heads = keys.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        refuse(
            keys.file.path, f"{heads} query heads on {kv_heads} key heads", got=(heads, kv_heads), expected="a multiple"
        )
    return kv_heads


def _rope_scaling(keys: GgufKeys, head_dim: int) -> RopeScaling:
    file = keys.file
    kind = file.metadata.get(keys.name("rope.scaling.type"), "linear")
    if kind not in ("none", "linear"):
        what = f"{keys.name('rope.scaling.type')} is {kind!r}"
        refuse(file.path, what, got=kind, expected="none or linear", fix="use power-llamacpp for this model")
    key = "rope.scaling.factor" if keys.name("rope.scaling.factor") in file.metadata else "rope.scale_linear"
    factor = keys.number(key, 1.0) if kind == "linear" else 1.0
    table = file.tensors.get("rope_freqs.weight")
    if table is None:
        return RopeScaling(factor)
    if table.shape != (head_dim // 2,):
        refuse(file.path, f"rope_freqs.weight has shape {table.shape}", got=table.shape, expected=(head_dim // 2,))
    values = file.read("rope_freqs.weight").astype(np.float64)
    if not np.isfinite(values).all() or not (values > 0).all():
        refuse(file.path, "rope_freqs.weight holds a number that is not positive and finite")
    return RopeScaling(factor, tuple(values.tolist()))


def _windowed(keys: GgufKeys, layers: int) -> tuple[bool, ...]:
    """Blocks with a window: a flag a block, or every n-th without one."""
    pattern = keys.file.metadata.get(keys.name("attention.sliding_window_pattern"), 6)
    if isinstance(pattern, np.ndarray):
        if len(pattern) < layers:
            what = f"{keys.name('attention.sliding_window_pattern')} has {len(pattern)} elements"
            refuse(keys.file.path, what, got=len(pattern), expected=f"{layers}, one a block")
        return tuple(bool(flag) for flag in pattern[:layers])
    period = keys.integer("attention.sliding_window_pattern", 6, least=0)
    return tuple(period == 0 or block % period < period - 1 for block in range(layers))
