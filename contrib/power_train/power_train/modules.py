"""
The drafters as they are trained: float32 master weights, bfloat16 matrix products.

What is computed here is what the plugins and llama.cpp's `src/models/dflash.cpp` compute: NeoX rotary positions,
RMSNorm on query and key heads, SwiGLU, rows of a block that see each other in both directions, and features that
enter every layer as keys and values only. Per-dimension feature scales are a buffer here and are folded into the
first matrix at export.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.functional import linear, pad, rms_norm, silu

__all__ = ["BlockDrafter", "DrafterShape", "MtpDrafter", "block_drafter_parts"]


@frozen
class DrafterShape:
    """
    Sizes of a drafter.

    Args:
        kind: `dflash-v1`, `dflash2`, `dspark` or `mtp-head`.
        hidden: Width, the target's.
        ffn: Width of the feed-forward.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        epsilon: Of every norm.
        rope_base: Rotary base.
        layers: Target block outputs read, numbered from 0.
        block: Rows of a draft round; for MTP the recurrent passes trained.
        blocks: Decoder layers; MTP has one.
        rank: Of the Markov head or the selector; 0 where there is none.
        kernel: Taps of the dynamic convolution; 0 where there is none.
        group: Channels that share a dynamic coefficient.
        top_k: Candidates of the selector's lattice.
        mask_id: Token of the rows after the anchor.
    """

    kind: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    rope_base: float
    layers: tuple[int, ...]
    block: int
    blocks: int = 1
    rank: int = 0
    kernel: int = 0
    group: int = 0
    top_k: int = 0
    mask_id: int = 0


def block_drafter_parts(kind: str) -> tuple[bool, bool, bool]:
    """Whether *kind* predicts from the anchor's own row, has a Markov term, and convolves."""
    return kind == "dspark", kind in ("dspark", "dflash2"), kind == "dflash2"


def matrix(rows: int, columns: int, generator: torch.Generator, gain: float = 1.0) -> nn.Parameter:
    """A weight with the usual 1/sqrt(fan-in) start."""
    return nn.Parameter(torch.randn(rows, columns, generator=generator) * (gain * columns**-0.5))


def apply(x: Tensor, weight: Tensor) -> Tensor:
    """*x* times the transposed *weight*, in bfloat16."""
    return linear(x.bfloat16(), weight.bfloat16())


class Rotary:
    """NeoX rotation at absolute positions, from a table that grows as needed."""

    def __init__(self, base: float, dim: int) -> None:
        self._frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [*positions, 1, dim / 2]."""
        angles = positions.double()[..., None, None] * self._frequencies
        return angles.cos().float(), angles.sin().float()

    @staticmethod
    def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate x [..., heads, dim]; float32 in, bfloat16 out."""
        cos, sin = tables
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).bfloat16()


def split_heads(x: Tensor, heads: int, dim: int) -> Tensor:
    """[..., heads * dim] as [..., heads, dim]."""
    return x.view(*x.shape[:-1], heads, dim)


class Layer(nn.Module):
    """One decoder layer's weights and its parts; how rows attend is the drafter's affair."""

    def __init__(self, shape: DrafterShape, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.attn_norm = nn.Parameter(torch.ones(shape.hidden))
        self.q = matrix(queries, shape.hidden, generator)
        self.k = matrix(keys, shape.hidden, generator)
        self.v = matrix(keys, shape.hidden, generator)
        self.o = matrix(shape.hidden, queries, generator)
        self.q_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.k_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.ffn_norm = nn.Parameter(torch.ones(shape.hidden))
        self.gate = matrix(shape.ffn, shape.hidden, generator)
        self.up = matrix(shape.ffn, shape.hidden, generator)
        self.down = matrix(shape.hidden, shape.ffn, generator)

    def queries(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated [..., heads, dim] of normalized rows."""
        q = split_heads(apply(x, self.q).float(), self.shape.heads, self.shape.head_dim)
        return Rotary.rotate(rms_norm(q, (self.shape.head_dim,), self.q_norm, self.shape.epsilon), tables)

    def keys_values(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., kv_heads, dim] of normalized rows."""
        heads = self.shape.kv_heads, self.shape.head_dim
        k = split_heads(apply(x, self.k).float(), *heads)
        k = Rotary.rotate(rms_norm(k, (self.shape.head_dim,), self.k_norm, self.shape.epsilon), tables)
        return k, split_heads(apply(x, self.v), *heads)

    def feed_forward(self, x: Tensor) -> Tensor:
        return apply(silu(apply(x, self.gate)) * apply(x, self.up), self.down)

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return rms_norm(x, (self.shape.hidden,), gain, self.shape.epsilon)


class Convolution(nn.Module):
    """
    DFlash2's dynamic convolution around a sublayer: base plus input-dependent taps over the rows of a block.

    Side 0 acts on the sublayer's input, side 1 on its output; both take their coefficients from the input. Rows
    before the block count as zero.
    """

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.kernel, self.group = shape.kernel, shape.group
        base = torch.zeros(2, shape.kernel, shape.hidden)
        base[:, 0] = 1.0  # starts as the identity
        self.base = nn.Parameter(base)
        self.projection = nn.Parameter(torch.zeros(2 * shape.kernel * (shape.hidden // shape.group), shape.hidden))

    def coefficients(self, x: Tensor) -> Tensor:
        """[..., rows, 2, kernel, groups]."""
        taps = apply(x, self.projection).float()
        return taps.view(*x.shape[:-1], 2, self.kernel, -1)

    def convolve(self, x: Tensor, coefficients: Tensor, side: int) -> Tensor:
        rows = x.shape[-2]
        out = torch.zeros_like(x)
        for tap in range(min(self.kernel, rows)):
            dynamic = coefficients[..., side, tap, :].repeat_interleave(self.group, -1)
            out = out + (self.base[side, tap] + dynamic) * pad(x, (0, 0, tap, 0))[..., :rows, :]
        return out


def attend(
    q: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], visible: Tensor, own_visible: Tensor | None
) -> Tensor:
    """
    Softmax over context rows and a block's own rows.

    Args:
        q: [n, blocks, rows, heads, dim].
        context: Keys and values [n, length, kv_heads, dim].
        own: Keys and values [n, blocks, own rows, kv_heads, dim].
        visible: bool[n, blocks, length]: context rows each block may see.
        own_visible: bool[rows, own rows], or None where all are.

    Returns:
        [n, blocks, rows, heads * dim], bfloat16.
    """
    n, blocks, rows, heads, dim = q.shape
    kv_heads, length = context[0].shape[2], context[0].shape[1]
    group = heads // kv_heads
    scale = dim**-0.5
    grouped = q.view(n, blocks, rows, kv_heads, group, dim).permute(
        0, 3, 1, 4, 2, 5
    )  # [n, kv, blocks, group, rows, dim]
    flat = grouped.reshape(n, kv_heads, blocks * group * rows, dim)
    keys, values = (part.permute(0, 2, 1, 3) for part in context)
    far = (flat @ keys.transpose(-1, -2)).view(n, kv_heads, blocks, group * rows, length).float() * scale
    far = far.masked_fill(~visible[:, None, :, None, :], -torch.inf)
    own_keys, own_values = (part.permute(0, 3, 1, 2, 4) for part in own)  # [n, kv, blocks, own, dim]
    own_rows = own_keys.shape[3]
    near = (grouped.reshape(n, kv_heads, blocks, group * rows, dim) @ own_keys.transpose(-1, -2)).float() * scale
    if own_visible is not None:
        near = near.masked_fill(~own_visible.repeat(group, 1), -torch.inf)
    weights = torch.cat((far, near), -1).softmax(-1).bfloat16()
    mixed = (weights[..., :length].reshape(n, kv_heads, -1, length) @ values).view(
        n, kv_heads, blocks, group * rows, dim
    )
    mixed = mixed + weights[..., length : length + own_rows] @ own_values
    return mixed.view(n, kv_heads, blocks, group, rows, dim).permute(0, 2, 4, 1, 3, 5).reshape(n, blocks, rows, -1)


class BlockLayer(Layer):
    """A block drafter's layer: rows see the context and each other; DFlash2 convolves around both parts."""

    def __init__(self, shape: DrafterShape, generator: torch.Generator) -> None:
        super().__init__(shape, generator)
        self.has_convolutions = shape.kernel > 0
        if self.has_convolutions:
            self.attn_conv, self.ffn_conv = Convolution(shape), Convolution(shape)

    def forward(
        self, x: Tensor, context: tuple[Tensor, Tensor], visible: Tensor, tables: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The rows after this layer; *context* are its keys and values of the target's features."""
        y = self.norm(x, self.attn_norm)
        if not self.has_convolutions:
            x = x + self._attention(y, context, visible, tables)
            return x + self.feed_forward(self.norm(x, self.ffn_norm))
        taps = self.attn_conv.coefficients(y)
        y = self._attention(self.attn_conv.convolve(y, taps, 0), context, visible, tables).float()
        x = x + self.attn_conv.convolve(y, taps, 1)
        y = self.norm(x, self.ffn_norm)
        taps = self.ffn_conv.coefficients(y)
        return x + self.ffn_conv.convolve(self.feed_forward(self.ffn_conv.convolve(y, taps, 0)).float(), taps, 1)

    def _attention(
        self, y: Tensor, context: tuple[Tensor, Tensor], visible: Tensor, tables: tuple[Tensor, Tensor]
    ) -> Tensor:
        own = self.keys_values(y, tables)
        return apply(attend(self.queries(y, tables), context, own, visible, None), self.o)


class BlockDrafter(nn.Module):
    """
    DFlash v1, DFlash2 and DSpark: a few layers that denoise a block after an anchor.

    Args:
        shape: Sizes.
        embedding: bfloat16[vocab, hidden], the target's; frozen.
        feature_scale: float32[features * hidden], multiplied into the features.
        norm_gain: Start of the last norm's gain.
        generator: Of the first weights.
    """

    def __init__(
        self,
        shape: DrafterShape,
        embedding: Tensor,
        feature_scale: Tensor,
        norm_gain: Tensor,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = embedding
        self.rotary = Rotary(shape.rope_base, shape.head_dim)
        self.feature_scale: Tensor
        self.register_buffer("feature_scale", feature_scale)
        count = len(shape.layers)
        self.fc = nn.ParameterList([matrix(shape.hidden, shape.hidden, generator, count**-0.5) for _ in range(count)])
        self.hidden_norm = nn.Parameter(torch.ones(shape.hidden))
        self.layers = nn.ModuleList([BlockLayer(shape, generator) for _ in range(shape.blocks)])
        self.norm = nn.Parameter(norm_gain.clone())
        from_anchor, has_markov, convolves = block_drafter_parts(shape.kind)
        self.first_row = 0 if from_anchor else 1
        if has_markov:
            self.previous = nn.Parameter(torch.randn(shape.rank, shape.hidden, generator=generator) * 0.5)
            self.bias = nn.Parameter(torch.zeros(shape.hidden, shape.rank))
        if from_anchor:
            self.confidence = nn.Parameter(torch.zeros(1, shape.hidden + shape.rank))
            self.confidence_bias = nn.Parameter(torch.zeros(1))
        if convolves:
            self.gate = nn.Parameter(torch.randn(shape.rank, shape.hidden, generator=generator) * 0.02)

    def hidden(self, features: Tensor, tokens: Tensor, anchors: Tensor, rows: int) -> Tensor:
        """
        Denoise blocks of *rows* rows after *anchors*.

        Args:
            features: bfloat16[n, length, features * hidden].
            tokens: int64[n, length].
            anchors: int64[n, blocks]; index of each block's anchor: it sees the features before it.
            rows: Of a block.

        Returns:
            float32[n, blocks, rows, hidden], normalized.
        """
        n, length = tokens.shape
        scaled = features * self.feature_scale.bfloat16()
        fused = self._norm(apply(scaled, torch.cat(list(self.fc), 1)).float(), self.hidden_norm)
        context = self.rotary.tables(torch.arange(length).expand(n, -1))
        visible = torch.arange(length) < anchors[..., None]
        masks = self.embedding[self.shape.mask_id].float().expand(n, anchors.shape[1], rows - 1, -1)
        first = self.embedding[tokens.gather(1, anchors)].float()[:, :, None]
        x = torch.cat((first, masks), 2)
        tables = self.rotary.tables(anchors[..., None] + torch.arange(rows))
        for layer in self.stack:
            x = layer.forward(x, layer.keys_values(fused, context), visible, tables)
        return self._norm(x, self.norm)

    @property
    def stack(self) -> list[BlockLayer]:
        """The layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return rms_norm(x, (self.shape.hidden,), gain, self.shape.epsilon)

    def markov(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """
        The state that gives logits conditioned on the token before.

        The head adds ``W2 . W1[prev]`` (DSpark) or ``successor . (predecessor[prev] * gate)`` (DFlash2) to the
        logits ``W h``. Both matrices are trained factored through the target's own, W2 = W . bias and
        W1 = E . previous^T, which says something about tokens never seen, and are multiplied out at export.

        Args:
            hidden: float32[..., hidden].
            previous: int64[...], the token before each row's prediction.
        """
        return hidden + apply(self.predecessor(hidden, previous), self.bias).float()

    def predecessor(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """float32[..., rank] of the token before, gated by the row's state in DFlash2."""
        rows = apply(self.embedding[previous], self.previous).float()
        return rows * apply(hidden, self.gate).float() if hasattr(self, "gate") else rows

    def confidence_logit(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """float32[...], the confidence head before its sigmoid."""
        rows = torch.cat((hidden, self.predecessor(hidden, previous)), -1)
        return (rows @ self.confidence.T).squeeze(-1) + self.confidence_bias


class MtpDrafter(nn.Module):
    """
    One layer on the target's features and the next token's embedding, applied to its own output again and again.

    Args:
        shape: Sizes.
        embedding: bfloat16[vocab, hidden], the target's; frozen.
        feature_scale: float32[features * hidden], multiplied into the features.
        norm_gain: Start of the last norm's gain.
        generator: Of the first weights.
    """

    def __init__(
        self,
        shape: DrafterShape,
        embedding: Tensor,
        feature_scale: Tensor,
        norm_gain: Tensor,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = embedding
        self.rotary = Rotary(shape.rope_base, shape.head_dim)
        self.feature_scale: Tensor
        self.register_buffer("feature_scale", feature_scale)
        count = len(shape.layers)
        self.feature_fc = nn.ParameterList(
            [matrix(shape.hidden, shape.hidden, generator, count**-0.5) for _ in range(count)]
        )
        self.hidden_norm = nn.Parameter(torch.ones(shape.hidden))
        self.embed_norm = nn.Parameter(torch.ones(shape.hidden))
        self.fc = nn.ParameterList([matrix(shape.hidden, shape.hidden, generator, 2**-0.5) for _ in range(2)])
        self.layer = Layer(shape, generator)
        self.norm = nn.Parameter(norm_gain.clone())

    def fuse(self, features: Tensor) -> Tensor:
        """float32[..., hidden]: the state that stands for the target's row."""
        return apply(features * self.feature_scale.bfloat16(), torch.cat(list(self.feature_fc), 1)).float()

    def join(self, state: Tensor, tokens: Tensor) -> Tensor:
        """The layer's input: a state and the embedding of the token after it."""
        embedded = self.layer.norm(self.embedding[tokens].float(), self.embed_norm)
        both = torch.cat((self.layer.norm(state, self.hidden_norm), embedded), -1)
        return apply(both, torch.cat(list(self.fc), 1)).float()

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output: the state of the next pass."""
        x = x + apply(mixed, self.layer.o)
        return x + self.layer.feed_forward(self.layer.norm(x, self.layer.ffn_norm))

    def passes(self, features: Tensor, tokens: Tensor, anchors: Tensor, steps: int) -> list[Tensor]:
        """
        The states after each of *steps* passes that start at *anchors*, teacher-forced.

        Pass 1 of anchor a joins the target's row a - 1 with token a and predicts token a + 1; pass k joins the
        state of pass k - 1 with token a + k - 1. All see the first passes' keys and values up to a (training-time
        test of Li et al., "EAGLE-3", arXiv 2503.01840) and their own chain.

        Args:
            features: bfloat16[n, length, features * hidden].
            tokens: int64[n, length].
            anchors: int64[n, blocks], at least 1.
            steps: Passes.

        Returns:
            For each pass float32[n, blocks, hidden], normalized for the output matrix.
        """
        layer, n, length = self.layer, *tokens.shape
        before = pad(features, (0, 0, 1, 0))[:, :length]  # row p holds the features of token p - 1
        x = self.join(self.fuse(before), tokens)
        y = layer.norm(x, layer.attn_norm)
        context = layer.keys_values(y, self.rotary.tables(torch.arange(length).expand(n, -1)))
        visible = (torch.arange(length) <= anchors[..., None]) & (torch.arange(length) > 0)
        index = anchors[..., None].expand(-1, -1, x.shape[-1])
        x, y = x.gather(1, index), y.gather(1, index)
        states: list[Tensor] = []
        chain: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            tables = self.rotary.tables(anchors + step)
            if step:
                x = self.join(states[-1], tokens.gather(1, (anchors + step).clamp(max=length - 1)))
                y = layer.norm(x, layer.attn_norm)
                chain.append(layer.keys_values(y, tables))
            own = _stacked(chain, context)
            mixed = attend(layer.queries(y, tables)[:, :, None], context, own, visible, None).squeeze(2)
            states.append(self.finish(x, mixed))
        return [layer.norm(state, self.norm) for state in states]


def _stacked(chain: Sequence[tuple[Tensor, Tensor]], context: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values [n, blocks, passes, kv_heads, dim] of the chain so far; none in the first pass."""
    if not chain:
        n, _, kv_heads, dim = context[0].shape
        empty = context[0].new_empty(n, 1, 0, kv_heads, dim)
        return empty, empty
    return torch.stack([k for k, _ in chain], 2), torch.stack([v for _, v in chain], 2)
