"""The torch executor of attached heads: one decoder layer over a ring of its own K/V."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from power_torch.drafting import KvRing, ReducedHead, Rope, attend, matrix_dtype, read_tensor, rms_norm
from torch import Tensor
from torch.nn.functional import linear, silu

from power_core.artifacts import TensorFile
from power_core.errors import CapabilityError
from power_core.target import SharedWeights, TargetModel, TargetSession
from power_core.types import SeqId, TokenId
from power_mtp.artifact import head_shape
from power_mtp.config import MtpConfig
from power_mtp.executor import HeadBlock
from power_mtp.layout import HeadShape, tensor_name

__all__ = ["HeadWeights", "TorchHead", "load_weights", "open_torch_head"]

_CHUNK = 64  # context rows a forward; a rollback of as many is exact in a ring that has wrapped
_FIRST_STEPS = 8  # draft steps there is room for before the chain's memory grows


@frozen(eq=False)
class HeadWeights:
    """
    A head's tensors, matrices that read the same input joined into one.

    Args:
        feature_fc: [H, n*H], or None.
        fc: [H, 2*H].
        qkv: [(A + 2*B)*D, H].
        o: [H, A*D].
        gate_up: [2*F, H].
        down: [H, F].
        norms: Gains by short name, float32.
        output: Own or the target's output matrix, its first rows only where fewer are projected.
    """

    feature_fc: Tensor | None
    fc: Tensor
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    norms: dict[str, Tensor]
    output: ReducedHead


def open_torch_head(file: TensorFile, model: TargetModel, session: TargetSession, config: MtpConfig) -> TorchHead:
    """
    An executor of the head *file* for *session*.

    Raises:
        CapabilityError: The target shares no embedding, or torch has no such device.
    """
    if not isinstance(model, SharedWeights):
        raise CapabilityError("this target's backend shares no embedding", who="strategy 'mtp'", plugin="mtp")
    shape = head_shape(file)
    device = _device(config.device)
    dtype = matrix_dtype(config.dtype, device)
    weights = load_weights(file, shape, model, rows=config.fr_vocab_size, dtype=dtype, device=device)
    return TorchHead(
        shape, weights, model.matrix("token_embd"),
        cap=min(config.ring or session.context_size, session.context_size),
        max_sequences=session.max_sequences,
    )  # fmt: skip


def load_weights(
    file: TensorFile,
    shape: HeadShape,
    model: SharedWeights,
    *,
    rows: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> HeadWeights:
    """
    Read a checked head.

    Args:
        file: Its contract has approved it.
        shape: Its sizes.
        model: Whose output matrix is taken where the file has none.
        rows: Rows of the output matrix that are kept; 0 keeps all.
        dtype: Of the matrices.
        device: Where they go.
    """

    def read(short: str) -> Tensor:
        return read_tensor(file, tensor_name(short, file.format), dtype=dtype, device=device)

    def output() -> ReducedHead:
        end = rows or shape.draft_vocab
        if not shape.has_output:
            return ReducedHead(torch.tensor(model.matrix("output")[:end], dtype=dtype, device=device))
        ids = None
        if shape.is_reduced:
            ids = read_tensor(file, tensor_name("d2t", file.format), dtype=None, device=device)[:end]
        return ReducedHead(read("output")[:end], ids)

    gains = [short for short, dims in shape.tensors().items() if len(dims) == 1 and short != "d2t"]
    return HeadWeights(
        feature_fc=read("feature_fc") if shape.fuses else None,
        fc=read("fc"),
        qkv=torch.cat([read("q"), read("k"), read("v")]),
        o=read("o"),
        gate_up=torch.cat([read("gate"), read("up")]),
        down=read("down"),
        norms={short: read(short).float() for short in gains},
        output=output(),
    )


class TorchHead:
    """
    Computes an attached head; see `power_mtp.artifact` for the equations.

    Context rows, which rest on target features, go into the ring. Draft rows stay outside it, in the chain, and are
    forgotten when the next round starts.

    Args:
        shape: Sizes.
        weights: Tensors.
        embedding: float32[V, H], the target's.
        cap: Context rows attention sees.
        max_sequences: Sequence ids are 0 .. max_sequences - 1.
    """

    def __init__(
        self, shape: HeadShape, weights: HeadWeights, embedding: NDArray[np.float32], *, cap: int, max_sequences: int
    ) -> None:
        self._shape = shape
        self._weights = weights
        self._embedding = embedding
        self._dtype, self._device = weights.fc.dtype, weights.fc.device
        self._rope = Rope(shape.rope_theta, shape.head_dim, self._device)
        self._window = cap
        self._ring = KvRing(
            layers=1, kv_heads=shape.kv_heads, head_dim=shape.head_dim, cap=cap, max_sequences=max_sequences,
            dtype=self._dtype, device=self._device,
        )  # fmt: skip
        self._states = torch.zeros(max_sequences, shape.hidden, dtype=self._dtype, device=self._device)
        self._chain = self._chain_memory(_FIRST_STEPS)
        self._steps: dict[SeqId, int] = {}  # rows of the chain
        ids = weights.output.ids
        self.ids: NDArray[np.int64] | None = None if ids is None else ids.cpu().numpy()

    @property
    def nbytes(self) -> int:
        """Bytes of the ring."""
        return self._ring.nbytes

    def open(self, seq: SeqId) -> None:
        self._ring.open(seq)
        self._steps[seq] = 0

    def close(self, seq: SeqId) -> None:
        self._ring.close(seq)
        del self._steps[seq]

    def extend(self, block: HeadBlock) -> None:
        self._context([block], _CHUNK)

    @torch.inference_mode()
    def start(self, blocks: Sequence[HeadBlock]) -> NDArray[np.float32]:
        self._context(blocks, _CHUNK)
        return self._logits(self._states[[block.seq for block in blocks]])

    @torch.inference_mode()
    def step(self, seqs: Sequence[SeqId], tokens: Sequence[TokenId]) -> NDArray[np.float32]:
        done = self._steps[seqs[0]]
        if done == self._chain.shape[3]:
            old, self._chain = self._chain, self._chain_memory(2 * done)
            self._chain[:, :, :, :done] = old
        index = torch.tensor(list(seqs), device=self._device)
        ends = [[(self._ring.end(seq) or 0) + done] for seq in seqs]
        positions = torch.tensor(ends, device=self._device)
        x = self._join(self._states[index][:, None], np.asarray(tokens, np.int64)[:, None])
        q, k, v = self._project(x, positions)
        self._chain[0, index, :, done], self._chain[1, index, :, done] = k[:, 0], v[:, 0]
        chain = self._chain[:, index, :, : done + 1].transpose(2, 3)
        y = self._layer(x, q, seqs, (chain[0], chain[1]), positions, None)
        self._states[index] = y[:, 0]
        for seq in seqs:
            self._steps[seq] = done + 1
        return self._logits(y[:, 0])

    def truncate(self, seq: SeqId, length: int) -> None:
        self._steps[seq] = 0
        self._ring.rollback(seq, length)

    def shutdown(self) -> None:
        self._steps.clear()

    @torch.inference_mode()
    def _context(self, blocks: Sequence[HeadBlock], chunk: int) -> None:
        """Add the rows of *blocks* to the ring, *chunk* of each sequence at a time; keeps each last state."""
        chunk = min(chunk, self._ring.cap)
        longest = max(len(block.tokens) for block in blocks)
        for first in range(0, longest, chunk):
            self._rows([_part(block, first, chunk) for block in blocks if first < len(block.tokens)])

    def _rows(self, blocks: Sequence[HeadBlock]) -> None:
        """One forward of context rows; shorter blocks are padded at their end, where no row looks."""
        counts = [len(block.tokens) for block in blocks]
        seqs, most = [block.seq for block in blocks], max(counts)
        tokens = np.zeros((len(blocks), most), np.int64)
        features = np.zeros((len(blocks), most, blocks[0].features.shape[1]), np.float32)
        for i, block in enumerate(blocks):
            tokens[i, : counts[i]], features[i, : counts[i]] = block.tokens, block.features
            self._steps[block.seq] = 0
        hidden = torch.from_numpy(features).to(self._device, self._dtype)
        if self._weights.feature_fc is not None:
            hidden = linear(hidden, self._weights.feature_fc)
        starts = torch.tensor([[block.position] for block in blocks], device=self._device)
        positions = starts + torch.arange(most, device=self._device)
        x = self._join(hidden, tokens)
        q, k, v = self._project(x, positions)
        causal = torch.ones(most, most, dtype=torch.bool, device=self._device).tril()
        y = self._layer(x, q, seqs, (k, v), positions, causal)
        for i, block in enumerate(blocks):
            slots = self._ring.place(block.seq, block.position, counts[i], most)
            self._ring.write(0, block.seq, slots, k[i].transpose(0, 1), v[i].transpose(0, 1))
            self._states[block.seq] = y[i, counts[i] - 1]

    def _join(self, hidden: Tensor, tokens: NDArray[np.int64]) -> Tensor:
        """X of states [n, rows, H] and their tokens."""
        norms, eps = self._weights.norms, self._shape.eps
        embedded = torch.from_numpy(self._embedding[tokens]).to(self._device)
        parts = rms_norm(hidden, norms["hidden_norm"], eps), rms_norm(embedded, norms["embed_norm"], eps)
        return linear(torch.cat([parts[0], parts[1].to(self._dtype)], dim=-1), self._weights.fc)

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [n, rows, A, D] and keys, and values [n, rows, B, D]."""
        shape, norms = self._shape, self._weights.norms
        joined = linear(rms_norm(x, norms["attn_norm"], shape.eps), self._weights.qkv)
        heads = joined.view(*x.shape[:2], shape.heads + 2 * shape.kv_heads, shape.head_dim)
        q, k, v = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], dim=2)
        tables = self._rope.tables(positions)
        q = self._rope.rotate(rms_norm(q, norms["q_norm"], shape.eps), tables)
        return q, self._rope.rotate(rms_norm(k, norms["k_norm"], shape.eps), tables), v

    def _layer(
        self,
        x: Tensor,
        q: Tensor,
        seqs: Sequence[SeqId],
        own: tuple[Tensor, Tensor],
        positions: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """Y of x: attention over ring and *own* rows, then the feed-forward."""
        norms, eps = self._weights.norms, self._shape.eps
        mixed = attend(
            q, self._ring, 0, self._ring.view(seqs), own, positions=positions, scale=self._shape.head_dim**-0.5,
            window=self._window, own_mask=mask,
        )  # fmt: skip
        x = x + linear(mixed, self._weights.o)
        gate, up = linear(rms_norm(x, norms["ffn_norm"], eps), self._weights.gate_up).chunk(2, dim=-1)
        return x + linear(silu(gate) * up, self._weights.down)

    def _logits(self, y: Tensor) -> NDArray[np.float32]:
        logits = self._weights.output.logits(rms_norm(y, self._weights.norms["norm"], self._shape.eps))
        values: NDArray[np.float32] = logits.cpu().numpy()
        return values

    def _chain_memory(self, steps: int) -> Tensor:
        shape = (2, self._ring.max_sequences, self._shape.kv_heads, steps, self._shape.head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


def _part(block: HeadBlock, first: int, count: int) -> HeadBlock:
    end = first + count
    return HeadBlock(block.seq, block.position + first, block.tokens[first:end], block.features[first:end])


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as exc:  # torch asserts that a build has CUDA
        raise CapabilityError(
            f"torch has no device {name!r:.40}: {str(exc).splitlines()[0]:.120}", who="strategy 'mtp'",
            where="device", got=name, fix="set device to cpu", plugin="mtp",
        ) from exc  # fmt: skip
    return device
