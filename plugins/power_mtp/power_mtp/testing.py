"""
Tiny random heads in both containers, and the head's equations in plain numpy, for tests of executors.

Needs `gguf` or `safetensors` for the container it is asked to write, imported when it is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, evolve, field
from numpy.typing import NDArray

from power_core.types import SeqId, TokenId
from power_mtp.executor import HeadBlock
from power_mtp.layout import GGUF_KEYS, KIND, HeadShape, tensor_name

__all__ = ["ReferenceHead", "head_config", "random_tensors", "tiny_shape", "write_gguf", "write_safetensors"]

Array = NDArray[Any]


def tiny_shape(**changes: Any) -> HeadShape:
    """Sizes of a head for the targets of `power_core.testing.gguf`; *changes* replace some."""
    shape = HeadShape(
        hidden=64, feed_forward=96, heads=4, kv_heads=2, head_dim=16, eps=1e-5, rope_theta=10000.0, vocab=320,
        draft_vocab=320, target_layers=(1,), fuses=False, has_output=False, is_reduced=False,
    )  # fmt: skip
    return evolve(shape, **changes)


def random_tensors(shape: HeadShape, seed: int = 0) -> dict[str, Array]:
    """Random tensors by short name, float32 and int64; the same seed gives the same head."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for short, dims in shape.tensors().items():
        if short == "d2t":
            tensors[short] = rng.permutation(shape.vocab)[: shape.draft_vocab].astype(np.int64)
        elif len(dims) == 1:
            tensors[short] = (1 + 0.1 * rng.standard_normal(dims)).astype(np.float32)
        else:
            gain = 4.0 if short == "output" else 1.5  # so that drafts wander, and the two likeliest rows differ
            tensors[short] = (gain / np.sqrt(dims[1]) * rng.standard_normal(dims)).astype(np.float32)
    return tensors


def head_config(shape: HeadShape) -> dict[str, Any]:
    """The keys of config.json."""
    return {
        "model_type": KIND,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "vocab_size": shape.vocab,
        "target_layer_ids": list(shape.target_layers),
    }


def write_safetensors(folder: Path, tensors: Mapping[str, Array], config: Mapping[str, Any]) -> Path:
    """
    Write `model.safetensors` and `config.json`.

    Args:
        folder: Where to; it is made.
        tensors: By short name, or by any other name as it is.
        config: Of `head_config`.

    Returns:
        The weight file.
    """
    from power_core.testing.safetensors_writer import save_tensors

    named = {_spelled(short, "safetensors"): values for short, values in tensors.items()}
    return save_tensors(folder, named, config)


def write_gguf(path: Path, tensors: Mapping[str, Array], config: Mapping[str, Any], weights: str = "F32") -> Path:
    """
    Write the head as one GGUF file.

    Args:
        path: The file to write.
        tensors: By short name, or by any other name as it is.
        config: Of `head_config`; a value None leaves its key out.
        weights: ggml type of the matrices.
    """
    from power_core.testing.gguf_writer import GgufFile

    file = GgufFile(KIND, 0, weights)
    for key, value in config.items():
        if key == "model_type":
            file.metadata["general.architecture"] = value
        elif value is not None:
            file.set(GGUF_KEYS.get(key, key), value)
    for short, values in tensors.items():
        name = _spelled(short, "gguf")
        if values.dtype == np.int64:
            file.integers(name, values)
        else:
            file.tensors[name] = (values, weights if values.ndim == 2 else "F32")
    return file.write(path, None, ())


def _spelled(short: str, container: str) -> str:
    try:
        return tensor_name(short, container)
    except KeyError:
        return short


@define
class _Rows:
    """K, V and positions of one sequence, and its last state."""

    positions: list[int] = field(factory=list)
    keys: list[Array] = field(factory=list)
    values: list[Array] = field(factory=list)
    state: Array | None = None


class ReferenceHead:
    """
    The equations of `power_mtp.artifact`, row by row in float64: a `HeadExecutor` to compare others with.

    Args:
        shape: Sizes.
        tensors: By short name.
        embedding: The target's, [V, H].
        output: The target's output matrix, [V, H], for heads without their own.
        window: Positions attention sees, the row's own included; None for all.
    """

    def __init__(
        self,
        shape: HeadShape,
        tensors: Mapping[str, Array],
        embedding: Array,
        output: Array | None = None,
        window: int | None = None,
    ) -> None:
        self._shape = shape
        self._tensors = {name: values.astype(np.float64) for name, values in tensors.items() if name != "d2t"}
        self._embedding = embedding.astype(np.float64)
        own = self._tensors.get("output")
        self._output = own if own is not None else np.asarray(output, np.float64)
        self._window = window
        self._rows: dict[SeqId, _Rows] = {}
        self.ids: NDArray[np.int64] | None = tensors.get("d2t")
        self.calls: list[tuple[str, int]] = []  # method, rows
        self.is_shut_down = False

    def open(self, seq: SeqId) -> None:
        self._rows[seq] = _Rows()

    def close(self, seq: SeqId) -> None:
        del self._rows[seq]

    def extend(self, block: HeadBlock) -> None:
        self.calls.append(("extend", len(block.tokens)))
        self._context(block)

    def start(self, blocks: Sequence[HeadBlock]) -> NDArray[np.float32]:
        self.calls.append(("start", sum(len(block.tokens) for block in blocks)))
        return np.stack([self._logits(self._context(block)) for block in blocks])

    def step(self, seqs: Sequence[SeqId], tokens: Sequence[TokenId]) -> NDArray[np.float32]:
        self.calls.append(("step", len(seqs)))
        found = []
        for seq, token in zip(seqs, tokens, strict=True):
            rows = self._rows[seq]
            assert rows.state is not None
            found.append(self._logits(self._row(rows, rows.positions[-1] + 1, token, rows.state)))
        return np.stack(found)

    def truncate(self, seq: SeqId, length: int) -> None:
        rows = self._rows[seq]
        kept = sum(position < length for position in rows.positions)
        del rows.positions[kept:], rows.keys[kept:], rows.values[kept:]

    def shutdown(self) -> None:
        self.is_shut_down = True

    def positions(self, seq: SeqId) -> list[int]:
        """Positions of the rows held for *seq*."""
        return self._rows[seq].positions

    def _context(self, block: HeadBlock) -> Array:
        state = np.zeros(self._shape.hidden)
        for i, token in enumerate(block.tokens):
            hidden = block.features[i].astype(np.float64)
            if "feature_fc" in self._tensors:
                hidden = self._tensors["feature_fc"] @ hidden
            state = self._row(self._rows[block.seq], block.position + i, token, hidden)
        return state

    def _row(self, rows: _Rows, position: int, token: int, hidden: Array) -> Array:
        """Y of one row; its K and V are kept."""
        shape, t = self._shape, self._tensors
        if rows.positions and position != rows.positions[-1] + 1:
            raise ValueError(f"row {position} after row {rows.positions[-1]}")
        pair = np.concatenate([self._norm(hidden, "hidden_norm"), self._norm(self._embedding[token], "embed_norm")])
        x = t["fc"] @ pair
        inner = self._norm(x, "attn_norm")
        q = self._turned(self._norm((t["q"] @ inner).reshape(shape.heads, -1), "q_norm"), position)
        k = self._turned(self._norm((t["k"] @ inner).reshape(shape.kv_heads, -1), "k_norm"), position)
        rows.positions.append(position)
        rows.keys.append(k)
        rows.values.append((t["v"] @ inner).reshape(shape.kv_heads, -1))
        x = x + t["o"] @ self._attend(rows, q)
        inner = self._norm(x, "ffn_norm")
        gate = t["gate"] @ inner
        rows.state = x + t["down"] @ (gate / (1 + np.exp(-gate)) * (t["up"] @ inner))
        return rows.state

    def _attend(self, rows: _Rows, q: Array) -> Array:
        """[A * D] of queries [A, D] over the rows in the window."""
        shape = self._shape
        first = 0 if self._window is None else max(0, len(rows.keys) - self._window)
        keys, values = np.stack(rows.keys[first:]), np.stack(rows.values[first:])
        mixed = []
        for head in range(shape.heads):
            shared = head // (shape.heads // shape.kv_heads)
            scores = keys[:, shared] @ q[head] / np.sqrt(shape.head_dim)
            weights = np.exp(scores - scores.max())
            mixed.append(weights @ values[:, shared] / weights.sum())
        return np.concatenate(mixed)

    def _norm(self, x: Array, gain: str) -> Array:
        scaled: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + self._shape.eps) * self._tensors[gain]
        return scaled

    def _turned(self, x: Array, position: int) -> Array:
        """Heads [n, D] rotated to *position*: pairs (i, i + D/2)."""
        half = self._shape.head_dim // 2
        angles = position * self._shape.rope_theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angles), np.sin(angles)
        first, second = x[:, :half], x[:, half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)

    def _logits(self, y: Array) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = (self._output @ self._norm(y, "norm")).astype(np.float32)
        return logits
