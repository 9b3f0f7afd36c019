"""From a drafter file, GGUF or safetensors, to one weight record."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from power_core.artifacts import TensorFile
from power_torch.config import Precision
from power_torch.device import compute_dtype, find_device
from power_torch.drafting.record import BackboneShape, BackboneWeights, ConvWeights, LayerWeights

__all__ = ["load_backbone", "matrix_dtype", "read_tensor"]

# Field -> (safetensors, GGUF). The published names and those of llama.cpp's `dflash` architecture.
_TOP = {
    "fc": ("fc.weight", "fc.weight"),
    "hidden_norm": ("hidden_norm.weight", "enc.output_norm.weight"),
    "norm": ("norm.weight", "output_norm.weight"),
}
_LAYER = {
    "attn_norm": ("input_layernorm.weight", "attn_norm.weight"),
    "q": ("self_attn.q_proj.weight", "attn_q.weight"),
    "k": ("self_attn.k_proj.weight", "attn_k.weight"),
    "v": ("self_attn.v_proj.weight", "attn_v.weight"),
    "o": ("self_attn.o_proj.weight", "attn_output.weight"),
    "q_norm": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "ffn_norm": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "gate": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "up": ("mlp.up_proj.weight", "ffn_up.weight"),
    "down": ("mlp.down_proj.weight", "ffn_down.weight"),
}
_CONV = {
    "attn_conv": (("attention_conv.base_kernel", "attention_conv.kernel_projection.weight"),
                  ("attn_conv_base", "attn_conv_proj.weight")),
    "ffn_conv": (("mlp_conv.base_kernel", "mlp_conv.kernel_projection.weight"),
                 ("ffn_conv_base", "ffn_conv_proj.weight")),
}  # fmt: skip
_NORMS = frozenset({"attn_norm", "q_norm", "k_norm", "ffn_norm"})


def matrix_dtype(name: str, device: torch.device) -> torch.dtype:
    """What a drafter's `dtype` stands for: `fp32`, `bf16`, or `auto`: bf16 where *device* multiplies it natively."""
    return compute_dtype(Precision(name), device)


def load_backbone(
    file: TensorFile, shape: BackboneShape, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> BackboneWeights:
    """
    Read the backbone of a checked file.

    Args:
        file: Its contract has approved names and shapes.
        shape: The sizes its metadata states.
        dtype: Of the matrices; norms and convolution bases stay float32.
        device: Where the weights go.

    Raises:
        ArtifactError: A tensor is missing.
        ConfigError: There is no such device.
    """
    device = find_device(str(device))

    def read(name: str, kind: torch.dtype) -> Tensor:
        return read_tensor(file, name, dtype=kind, device=device)

    which = 1 if file.format == "gguf" else 0
    return BackboneWeights(
        shape=shape,
        fc=read(_TOP["fc"][which], dtype),
        hidden_norm=read(_TOP["hidden_norm"][which], torch.float32),
        norm=read(_TOP["norm"][which], torch.float32),
        layers=tuple(_load_layer(file, index, dtype, device) for index in range(shape.layers)),
    )


def read_tensor(
    file: TensorFile, name: str, *, dtype: torch.dtype | None = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """
    A tensor of *file* on *device*; safetensors names may carry the prefix ``model.``.

    Args:
        file: The file.
        name: Without the prefix.
        dtype: What floats become; None keeps the type that was read (for integers).
        device: Where it goes.

    Raises:
        ArtifactError: No such tensor.
    """
    values = np.ascontiguousarray(file.read(_spelled(file, name)))
    if not values.flags.writeable:  # a view of the mapped file: torch wants memory of its own
        values = values.copy()
    return torch.from_numpy(values).to(device=device, dtype=dtype)


def _load_layer(file: TensorFile, index: int, dtype: torch.dtype, device: torch.device | str) -> LayerWeights:
    which = 1 if file.format == "gguf" else 0
    prefix = f"blk.{index}." if which else f"layers.{index}."

    def read(name: str, kind: torch.dtype) -> Tensor:
        return read_tensor(file, prefix + name, dtype=kind, device=device)

    plain: dict[str, Tensor | None] = {}
    for field, names in _LAYER.items():
        present = field != "v" or _spelled(file, prefix + names[which]) in file.tensors
        kind = torch.float32 if field in _NORMS else dtype
        plain[field] = read(names[which], kind) if present else None
    convs = {
        field: ConvWeights(read(names[which][0], torch.float32), read(names[which][1], dtype))
        for field, names in _CONV.items()
        if _spelled(file, prefix + names[which][0]) in file.tensors
    }
    return LayerWeights(**plain, **convs)  # type: ignore[arg-type]  # only `v` can be None, and may be


def _spelled(file: TensorFile, name: str) -> str:
    """*name* as the file spells it."""
    prefixed = f"model.{name}"
    return prefixed if file.format != "gguf" and name not in file.tensors and prefixed in file.tensors else name
