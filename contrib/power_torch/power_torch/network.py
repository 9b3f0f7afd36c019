"""
The forward pass of the llama family over a static cache.

Residual stream, norms, rotation and attention are float32; matrix products are in the weights' dtype. The
same kernels run in the same order for every step: a row's bits depend on the step's row count alone, and
on that only where the probe finds that they do (`power_torch.probe`).

Llama: Touvron et al. 2023 (arXiv:2302.13971); grouped queries: Ainslie et al. 2023 (arXiv:2305.13245); head
norms of Qwen3: arXiv:2505.09388; windows and the four norms of Gemma 3: arXiv:2503.19786.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import frozen
from torch.nn import functional

from power_torch.cache import KvCache
from power_torch.hparams import HyperParameters
from power_torch.linear import Linear, make_linear
from power_torch.rotary import interleave, rotation_table
from power_torch.step import Step, Tile
from power_torch.weights import BlockWeights, ModelWeights

__all__ = ["Network", "Outputs", "PreparedWeights"]


@frozen(eq=False)
class Outputs:
    """
    Results of one forward.

    Args:
        logits: [outputs, vocab] in the network's dtype, one row for each of the step's outputs or for every row;
            None where no output was asked for.
        hidden: float32[layers asked for, width, hidden].
    """

    logits: torch.Tensor | None
    hidden: torch.Tensor


@frozen(eq=False)
class _Norm:
    """
    RMSNorm over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467): x * w / sqrt(mean(x^2) + eps).

    Args:
        gain: w * sqrt(n), so that the sum of squares need not be divided by n.
        floor: [1]; eps * n.
    """

    gain: torch.Tensor
    floor: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, epsilon: float, device: torch.device) -> _Norm:
        size = weight.shape[-1]
        return cls((weight * size**0.5).to(device), torch.full((1,), epsilon * size, device=device))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, 2, -1, True)
        return (x * torch.addcmul(self.floor, length, length).rsqrt_()).mul_(self.gain)


@frozen(eq=False)
class _Block:
    """One block, ready to compute; `head_norm` is over queries and keys together."""

    attn_norm: _Norm
    qkv: Linear
    head_norm: _Norm | None
    attn_output: Linear
    post_attention_norm: _Norm | None
    ffn_norm: _Norm
    gate_up: Linear
    down: Linear
    post_ffn_norm: _Norm | None
    is_windowed: bool


@frozen(eq=False)
class PreparedWeights:
    """
    A model's weights in the layout of a device's kernels; shared by all sessions of a model.

    Args:
        dtype: Of matrices and their inputs.
        device: Where.
        embedding: [vocab, hidden].
        blocks: In order.
        final_norm: Before the output matrix.
        head: The output matrix.
    """

    dtype: torch.dtype
    device: torch.device
    embedding: torch.Tensor
    blocks: tuple[_Block, ...]
    final_norm: _Norm
    head: Linear

    @classmethod
    def of(cls, weights: ModelWeights, device: torch.device) -> PreparedWeights:
        """Copy *weights* to *device*."""
        hparams = weights.hparams
        return cls(
            weights.dtype,
            device,
            weights.token_embd.to(device),
            tuple(_prepared(block, hparams, i, device) for i, block in enumerate(weights.blocks)),
            _Norm.of(weights.output_norm, hparams.norm_epsilon, device),
            make_linear(weights.output.to(device)),
        )


class Network:
    """
    The forward pass of a model.

    Args:
        hparams: Its sizes and constants.
        weights: Its weights.
        positions: Most positions of a sequence.
        hidden_layers: Blocks whose outputs are kept.

    Attributes:
        watch: Called with float32 rows that are about to be rounded, and the index of the first: for the probe,
            since in bf16 most differences would vanish there. None otherwise.
    """

    def __init__(
        self, hparams: HyperParameters, weights: PreparedWeights, positions: int, hidden_layers: Sequence[int] = ()
    ) -> None:
        self.hparams = hparams
        self.device, self.dtype = weights.device, weights.dtype
        self.hidden_layers = tuple(hidden_layers)
        self.group = hparams.num_heads // hparams.num_kv_heads
        self._weights = weights
        self._rotations = {
            windowed: rotation_table(hparams, positions, windowed=windowed).to(self.device)
            for windowed in {block.is_windowed for block in weights.blocks}
        }
        self.watch: Callable[[torch.Tensor, int], None] | None = None
        self._slots = {layer: slot for slot, layer in enumerate(self.hidden_layers)}
        self._gate = functional.silu if hparams.activation == "silu" else _gelu
        self._shape = (hparams.num_heads + 2 * hparams.num_kv_heads, hparams.head_dim)
        self._rotated = hparams.num_heads + hparams.num_kv_heads

    @torch.inference_mode()
    def forward(self, step: Step, cache: KvCache, *, has_outputs: bool = True) -> Outputs:
        """Compute *step*, storing its keys and values in *cache*."""
        x = self._weights.embedding[step.tokens].float()
        if self.hparams.embedding_scale != 1:
            x.mul_(self.hparams.embedding_scale)
        rotations = {windowed: table[step.positions] for windowed, table in self._rotations.items()}
        views = [cache.views(tile.chain.seq, tile.span) for tile in step.tiles]
        hidden = torch.empty((len(self._slots), step.width, x.shape[1]), device=self.device)
        mixed = torch.zeros((step.width, self.hparams.query_size), dtype=self.dtype, device=self.device)
        for index, block in enumerate(self._weights.blocks):
            qkv = self._projected(block, x, rotations[block.is_windowed])
            for tile, layers in zip(step.tiles, views, strict=True):
                chain = tile.chain
                rows = qkv[chain.first : chain.first + chain.rows, self.hparams.num_heads :]
                cache.write(index, chain.seq, chain.position, rows)
                self.attend(tile, qkv, layers[index], mixed, is_windowed=block.is_windowed)
            self._finish(block, x, mixed)
            if index in self._slots:
                hidden[self._slots[index]] = x
        return Outputs(self._logits(x, step) if has_outputs else None, hidden)

    def _projected(self, block: _Block, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """float32[width, heads + 2 * kv_heads, head_dim]: queries and keys, normed and rotated, then values."""
        qkv = block.qkv(self._rounded(block.attn_norm(x))).float().view(-1, *self._shape)
        rotated = qkv[:, : self._rotated]
        if block.head_norm is not None:
            rotated.copy_(block.head_norm(rotated))
        pairs = torch.view_as_complex(qkv.view(*qkv.shape[:2], -1, 2))
        pairs[:, : self._rotated].mul_(rotation)
        return qkv

    def attend(
        self,
        tile: Tile,
        qkv: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        mixed: torch.Tensor,
        *,
        is_windowed: bool,
    ) -> None:
        """
        Attention of one chain, written to its rows of *mixed*.

        Rows are padded to the tile's width and positions to its span, masked: both are added zeros, in fixed
        numbers of rows, so that neither the chain's length nor the sequence's can choose another kernel.
        """
        heads, (chain, group, width) = self.hparams.num_heads, (tile.chain, self.group, tile.width)
        queries = qkv[:, :heads] if tile.rows is None else qkv[tile.rows, :heads]
        grouped = queries.view(width, -1, group, self.hparams.head_dim).permute(1, 2, 0, 3)
        mask = tile.window_mask if is_windowed else tile.mask
        keys, values = kv
        kv_heads = keys.shape[0]
        scores = torch.baddbmm(
            mask.expand(kv_heads, -1, -1),
            grouped.reshape(kv_heads, group * width, -1),
            keys,
            alpha=self.hparams.attention_scale,
        )
        result = torch.bmm(torch.softmax(scores, -1), values)  # [kv_heads, group * width, head_dim]
        rows = result.view(kv_heads, group, width, -1)[:, :, : chain.rows].permute(2, 0, 1, 3)
        if self.watch is not None:
            self.watch(rows, chain.first)
        mixed[chain.first : chain.first + chain.rows].view(rows.shape).copy_(rows)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        """float32 values in the element type of the matrices."""
        if self.watch is not None:
            self.watch(x, 0)
        return x.to(self.dtype)

    def _finish(self, block: _Block, x: torch.Tensor, mixed: torch.Tensor) -> None:
        """Add the attention's projection and the feed-forward to the residual stream *x*."""
        attended = block.attn_output(mixed)
        x.add_(attended if block.post_attention_norm is None else block.post_attention_norm(attended.float()))
        gate_up = block.gate_up(self._rounded(block.ffn_norm(x)))
        gate, up = gate_up.chunk(2, dim=-1)
        down = block.down(self._gate(gate).mul_(up))
        x.add_(down if block.post_ffn_norm is None else block.post_ffn_norm(down.float()))

    def _logits(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        rows = x if step.outputs is None else x[step.outputs]
        logits = self._weights.head(self._rounded(self._weights.final_norm(rows)))
        cap = self.hparams.logit_softcap
        return logits.float().div_(cap).tanh_().mul_(cap) if cap else logits


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _prepared(block: BlockWeights, hparams: HyperParameters, index: int, device: torch.device) -> _Block:
    def norm(weight: torch.Tensor) -> _Norm:
        return _Norm.of(weight, hparams.norm_epsilon, device)

    def optional(weight: torch.Tensor | None) -> _Norm | None:
        return None if weight is None else norm(weight)

    rotated = hparams.query_size + hparams.kv_size
    pairs, values = block.attn_qkv[:rotated], block.attn_qkv[rotated:]
    head_norm = None
    if block.attn_q_norm is not None and block.attn_k_norm is not None:
        counts = (hparams.num_heads, hparams.num_kv_heads)
        parts = zip((block.attn_q_norm, block.attn_k_norm), counts, strict=True)
        head_norm = norm(torch.cat([interleave(weight, hparams.head_dim).expand(n, -1) for weight, n in parts]))
    return _Block(
        attn_norm=norm(block.attn_norm),
        qkv=make_linear(torch.cat([interleave(pairs, hparams.head_dim), values]).to(device)),
        head_norm=head_norm,
        attn_output=make_linear(block.attn_output.to(device)),
        post_attention_norm=optional(block.post_attention_norm),
        ffn_norm=norm(block.ffn_norm),
        gate_up=make_linear(block.ffn_gate_up.to(device)),
        down=make_linear(block.ffn_down.to(device)),
        post_ffn_norm=optional(block.post_ffn_norm),
        is_windowed=hparams.is_windowed(index),
    )
