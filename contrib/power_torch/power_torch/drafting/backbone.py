"""
The block-diffusion backbone of DFlash, DFlash2 and DSpark: one forward denoises a whole block.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036. Target features are fused once
(`fc`, norm) and give every layer its K and V of the committed positions; the block's rows (anchor and masks) are the
queries and see each other in both directions. DFlash2 wraps both sublayers in a dynamic convolution over the block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from numpy.typing import NDArray
from torch import Tensor

from power_core.errors import ShapeError
from power_torch.drafting.attention import attend
from power_torch.drafting.record import BackboneWeights, ConvWeights, LayerWeights
from power_torch.drafting.ring import KvRing, RingView
from power_torch.drafting.rope import Rope, rms_norm

__all__ = ["BlockBackbone"]

FOLD_ROWS = (16, 128)


class BlockBackbone:
    """
    Weights, ring and the two calls of a round.

    Args:
        weights: The record.
        ring: Of the same layers and heads.
        fold_rows: Row counts at which new features are folded in, ascending: a step's, and a prompt chunk's.
        compiled: Compile the forward; for devices where one graph launch beats many small ones.
    """

    def __init__(
        self,
        weights: BackboneWeights,
        ring: KvRing,
        *,
        fold_rows: Sequence[int] = FOLD_ROWS,
        compiled: bool = False,
    ) -> None:
        self.weights = weights
        self.ring = ring
        self._fold_rows = tuple(min(rows, ring.cap) for rows in fold_rows)
        self._device = weights.fc.device
        self._rope = Rope(weights.shape.rope_base, weights.shape.rope_dims, self._device)
        self._run = torch.compile(self._denoise, dynamic=False, fullgraph=True) if compiled else self._denoise
        self._is_static = compiled

    def fold(self, seq: int, position: int, features: NDArray[np.float32] | Tensor) -> None:
        """
        Compute K and V of new committed rows and put them into the ring.

        Args:
            seq: The sequence, open in the ring.
            position: Absolute position of the first row.
            features: [rows, features], the target's block outputs side by side.

        Raises:
            ShapeError: Width or position do not fit; the ring is unchanged.
        """
        rows = torch.as_tensor(features)
        if rows.ndim != 2 or rows.shape[1] != self.weights.feature_size:
            raise ShapeError(
                f"features are {list(rows.shape)}", who="BlockBackbone", got=list(rows.shape),
                expected=f"[rows, {self.weights.feature_size}]",
            )  # fmt: skip
        most = self._fold_rows[-1]
        with torch.inference_mode():
            for start in range(0, len(rows), most):
                self._fold(seq, position + start, rows[start : start + most])

    def _fold(self, seq: int, position: int, features: Tensor) -> None:
        count = len(features)
        width = next(rows for rows in self._fold_rows if rows >= count)
        slots = self.ring.place(seq, position, count, width)
        padded = torch.zeros((width, features.shape[1]), dtype=self.weights.fc.dtype, device=self._device)
        padded[:count] = features.to(padded)
        shape = self.weights.shape
        fused = rms_norm(padded @ self.weights.fc.T, self.weights.hidden_norm, shape.eps)
        tables = self._rope.tables(torch.arange(width, device=self._device) + position)
        for index, layer in enumerate(self.weights.layers):
            keys, values = self._keys_values(layer, fused, tables)
            self.ring.write(index, seq, slots, keys.transpose(0, 1), values.transpose(0, 1))

    def forward(self, seqs: Sequence[int], positions: Sequence[int], embedded: Tensor) -> Tensor:
        """
        Denoise one block a sequence.

        Args:
            seqs: The sequences.
            positions: Absolute position of each block's first row.
            embedded: [n, block, hidden], embeddings of the block's tokens.

        Returns:
            [n, block, hidden], normalized: what the output matrix takes.
        """
        n = len(seqs)
        with torch.inference_mode():
            if self._is_static:  # one shape whatever the batch: unused places repeat the first sequence
                spare = self.ring.max_sequences - n
                seqs, positions = [*seqs, *[seqs[0]] * spare], [*positions, *[positions[0]] * spare]
                embedded = torch.cat([embedded, embedded[:1].expand(spare, -1, -1)])
            first = torch.tensor(positions, device=self._device)[:, None]
            rows = first + torch.arange(embedded.shape[1], device=self._device)
            view = self.ring.view(seqs)
            out: Tensor = self._run(embedded, rows, view)
            return out[:n]

    def _denoise(self, x: Tensor, positions: Tensor, view: RingView) -> Tensor:
        shape = self.weights.shape
        tables = self._rope.tables(positions)
        for index, layer in enumerate(self.weights.layers):
            normed, finish = self._conv_in(rms_norm(x, layer.attn_norm, shape.eps), layer.attn_conv)
            x = x + self._conv_out(self._attention(index, layer, normed, positions, tables, view), finish)
            normed, finish = self._conv_in(rms_norm(x, layer.ffn_norm, shape.eps), layer.ffn_conv)
            hidden = F.silu(normed @ layer.gate.T) * (normed @ layer.up.T)
            x = x + self._conv_out(hidden @ layer.down.T, finish)
        return rms_norm(x, self.weights.norm, shape.eps)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        positions: Tensor,
        tables: tuple[Tensor, Tensor],
        view: RingView,
    ) -> Tensor:
        shape = self.weights.shape
        queries = (x @ layer.q.T).view(*x.shape[:2], shape.heads, shape.head_dim)
        queries = self._rope.rotate(rms_norm(queries, layer.q_norm, shape.eps), tables)
        mixed = attend(
            queries, self.ring, index, view, self._keys_values(layer, x, tables),
            positions=positions, scale=shape.head_dim**-0.5, window=shape.windows[index],
        )  # fmt: skip
        return mixed @ layer.o.T

    def _keys_values(self, layer: LayerWeights, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., rows, kv_heads, head_dim] of fused features or of the block's rows."""
        shape = self.weights.shape
        heads = (*x.shape[:-1], shape.kv_heads, shape.head_dim)
        raw = (x @ layer.k.T).view(heads)
        keys = self._rope.rotate(rms_norm(raw, layer.k_norm, shape.eps), tables)
        values = rms_norm(raw, None, shape.eps) if layer.v is None else (x @ layer.v.T).view(heads)
        return keys, values

    def _conv_in(self, x: Tensor, conv: ConvWeights | None) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The sublayer's input after side 0, and what side 1 needs: coefficients [n, rows, kernel, groups] and base."""
        if conv is None:
            return x, None
        kernel = conv.base.shape[1]
        both = (x @ conv.projection.T).view(*x.shape[:2], 2, kernel, -1)
        return self._convolve(x, both[:, :, 0], conv.base[0]), (both[:, :, 1], conv.base[1])

    def _conv_out(self, x: Tensor, finish: tuple[Tensor, Tensor] | None) -> Tensor:
        return x if finish is None else self._convolve(x, *finish)

    def _convolve(self, x: Tensor, dynamic: Tensor, base: Tensor) -> Tensor:
        """Sum over taps of (base + dynamic) * x shifted down by the tap; rows before the block are zero."""
        out = torch.zeros_like(x)
        coefficients = dynamic.repeat_interleave(self.weights.shape.conv_group, dim=-1)
        for tap in range(min(base.shape[0], x.shape[1])):
            shifted = F.pad(x, (0, 0, tap, 0))[:, : x.shape[1]]
            out = out + (coefficients[:, :, tap] + base[tap].to(x.dtype)) * shifted
        return out
