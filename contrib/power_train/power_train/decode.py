"""Batched decoding in torch, one token a sequence and step, with the features drafters learn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from power_torch.weights import BlockWeights, ModelWeights
from torch.nn.functional import linear, rms_norm, silu

from power_core.errors import CapabilityError
from power_train.attention import decode_attention

__all__ = ["BatchDecoder"]

_ARCHITECTURES = ("llama", "qwen3")


class BatchDecoder:
    """
    A target that decodes a fixed number of slots, each with its own sequence, in bfloat16.

    A slot is reset by stepping it at position 0. Prompt tokens are stepped like generated ones: the matrix
    products are bound by arithmetic at this width, so that a prefill of its own would gain nothing.

    Args:
        weights: The target, in bfloat16.
        layers: Block outputs that `features` hold, in this order.
        slots: Sequences decoded together.
        capacity: Positions of a sequence.
    """

    def __init__(self, weights: ModelWeights, layers: Sequence[int], *, slots: int, capacity: int) -> None:
        hparams = weights.hparams
        if hparams.architecture not in _ARCHITECTURES:
            raise CapabilityError(
                f"text cannot be generated in batches with architecture {hparams.architecture!r}",
                who="power-train",
                got=hparams.architecture,
                expected=" or ".join(_ARCHITECTURES),
            )
        self.weights = weights
        self.layers = tuple(layers)
        self.slots, self.capacity = slots, capacity
        self._scale = hparams.attention_scale or hparams.head_dim**-0.5
        self._attend = decode_attention(hparams.head_dim, self._scale)
        shape = (hparams.num_layers, slots, hparams.num_kv_heads, capacity, hparams.head_dim)
        self._keys = torch.zeros(shape, dtype=torch.bfloat16)
        self._values = torch.zeros(shape, dtype=torch.bfloat16)
        self._cos, self._sin = _rotary(hparams.rope_base, hparams.head_dim, capacity)
        self._rows = torch.arange(slots)

    @torch.no_grad()
    def step(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Evaluate one token of every slot.

        Args:
            tokens: int64[slots].
            positions: int64[slots].

        Returns:
            bfloat16[slots, layers, hidden], the outputs of `layers`, and bfloat16[slots, hidden], the state
            after the final norm, from which `logits` makes logits.
        """
        weights, epsilon = self.weights, self.weights.hparams.norm_epsilon
        hidden = weights.hparams.hidden_size
        features = torch.empty(self.slots, len(self.layers), hidden, dtype=torch.bfloat16)
        lengths = (positions + 1).to(torch.int32)
        rotary = self._cos[positions][:, None, None, :], self._sin[positions][:, None, None, :]
        x = weights.token_embd[tokens].float() * weights.hparams.embedding_scale
        for index, block in enumerate(weights.blocks):
            x = x + self._attention(index, block, x, positions, lengths, rotary)
            y = rms_norm(x, (hidden,), block.ffn_norm, epsilon).bfloat16()
            gate, up = linear(y, block.ffn_gate_up).chunk(2, -1)
            x = x + linear(silu(gate) * up, block.ffn_down)
            if index in self.layers:
                features[:, self.layers.index(index)] = x
        return features, rms_norm(x, (hidden,), weights.output_norm, epsilon).bfloat16()

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """bfloat16[rows, vocab] of final states [rows, hidden]."""
        return linear(final, self.weights.output)

    def _attention(
        self,
        index: int,
        block: BlockWeights,
        x: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        hparams = self.weights.hparams
        y = rms_norm(x, (hparams.hidden_size,), block.attn_norm, hparams.norm_epsilon).bfloat16()
        qkv = linear(y, block.attn_qkv).float()
        q, k, v = torch.split(qkv, [hparams.query_size, hparams.kv_size, hparams.kv_size], -1)
        heads, dim = hparams.num_kv_heads, hparams.head_dim
        q = q.view(self.slots, heads, -1, dim)
        k = k.view(self.slots, heads, 1, dim)
        if block.attn_q_norm is not None:
            q = rms_norm(q, (dim,), block.attn_q_norm, hparams.norm_epsilon)
        if block.attn_k_norm is not None:
            k = rms_norm(k, (dim,), block.attn_k_norm, hparams.norm_epsilon)
        q, k = _rotate(q, rotary).contiguous(), _rotate(k, rotary)
        keys, values = self._keys[index], self._values[index]
        keys[self._rows, :, positions] = k.squeeze(2).bfloat16()
        values[self._rows, :, positions] = v.view(self.slots, heads, dim).bfloat16()
        out = self._attend(q, keys, values, lengths)
        return linear(out.view(self.slots, -1).bfloat16(), block.attn_output)


def _rotary(base: float, dim: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(capacity, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def _rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rotary
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
