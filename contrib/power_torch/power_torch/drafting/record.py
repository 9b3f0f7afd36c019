"""A block drafter's sizes and weights, whatever file they came from."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

__all__ = ["BackboneShape", "BackboneWeights", "ConvWeights", "LayerWeights"]


@frozen
class BackboneShape:
    """
    Sizes of a block backbone.

    Args:
        hidden_size: Width of the residual stream: the target's.
        layers: Decoder layers.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Size of a head.
        eps: Of every RMSNorm.
        rope_base: Frequency base.
        rope_dims: Leading dimensions of a head that rotate.
        windows: For each layer the attention window in positions, or None.
        conv_group: Channels that share a dynamic convolution coefficient (DFlash2), 0 without convolutions.
    """

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_base: float
    rope_dims: int
    windows: tuple[int | None, ...]
    conv_group: int = 0


@frozen(eq=False)
class ConvWeights:
    """
    A grouped dynamic convolution around one sublayer.

    Args:
        base: [2, kernel, hidden]; side 0 acts on the sublayer's input, side 1 on its output.
        projection: [2 * kernel * groups, hidden], gives the coefficients that are added to `base`.
    """

    base: Tensor
    projection: Tensor


@frozen(eq=False)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]; `v` None takes the keys before their norm, normalized without gain."""

    attn_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor | None
    o: Tensor
    q_norm: Tensor
    k_norm: Tensor
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    attn_conv: ConvWeights | None = None
    ffn_conv: ConvWeights | None = None


@frozen(eq=False)
class BackboneWeights:
    """
    Everything but embedding and output matrix.

    Args:
        shape: The sizes.
        fc: [hidden, features], fuses the target's features.
        hidden_norm: [hidden], of the fused features.
        norm: [hidden], before the output matrix.
        layers: The decoder layers.
    """

    shape: BackboneShape
    fc: Tensor
    hidden_norm: Tensor
    norm: Tensor
    layers: tuple[LayerWeights, ...]

    @property
    def feature_size(self) -> int:
        """Width of one row of target features."""
        return self.fc.shape[1]
