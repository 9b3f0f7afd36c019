"""
Drafters in numpy, float64, straight from their papers' formulas: what llama.cpp's answers are compared with.

Whole sequences are computed anew each time; nothing is cached, and rotary angles are those of absolute positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from power_core.artifacts.gguf import GgufFile

__all__ = ["BlockReference", "LayerReference"]

Array: TypeAlias = NDArray[np.float64]


def _norm(values: Array, weight: Array | float, epsilon: float) -> Array:
    normed: Array = values / np.sqrt((values**2).mean(axis=-1, keepdims=True) + epsilon) * weight
    return normed


def _silu(values: Array) -> Array:
    return values * _sigmoid(values)


def _sigmoid(values: Array) -> Array:
    chances: Array = 1 / (1 + np.exp(-values))
    return chances


def _rope(heads: Array, positions: Array, rotated: int, base: float, sections: Sequence[int] = ()) -> Array:
    """
    NeoX rotary embedding of float[rows, heads, size]: dimension i turns with i + rotated / 2.

    With the *sections* of an interleaved multi-dimensional rope, dimension i belongs to coordinate i mod 3; text has
    one position for those coordinates, and 0 for dimensions that are in no section.
    """
    half = rotated // 2
    angles = positions[:, None] * base ** (-np.arange(half) * 2 / rotated)
    if sections:
        angles = angles * [i < 3 * sections[i % 3] for i in range(half)]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = heads[..., :half], heads[..., half:rotated]
    turned = np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return np.concatenate([turned, heads[..., rotated:]], axis=-1)


def _attend(queries: Array, keys: Array, values: Array, mask: NDArray[np.bool_]) -> Array:
    """Grouped-query attention of float[rows, heads, size]; *mask* is [rows, keys]."""
    groups = queries.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, groups, axis=1), np.repeat(values, groups, axis=1)
    scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(queries.shape[2])
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Array = np.einsum("hqk,khd->qhd", weights, values).reshape(len(queries), -1)
    return mixed


class _Weights:
    """Tensors and keys of a file, wide and by name."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile.open(path)
        self.tensors = {name: self.file.read(name) for name in self.file.tensors}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str) -> Array:
        return self.tensors[name].astype(np.float64)

    def key(self, name: str) -> float:
        return float(self.file.metadata[f"{self.file.architecture}.{name}"])

    def heads(self, values: Array) -> Array:
        return values.reshape(len(values), -1, int(self.key("attention.key_length")))


class BlockReference:
    """
    DFlash v1, DFlash2 and DSpark.

    Args:
        path: The drafter's file.
        target: The target's file: embedding and output matrix where the drafter has none.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self.own, self.shared = _Weights(path), _Weights(target)
        self.layers = int(self.own.key("block_count"))
        self.epsilon = self.own.key("attention.layer_norm_rms_epsilon")

    def _matrix(self, name: str) -> Array:
        return (self.own if name in self.own else self.shared).get(name)

    def _turned(self, heads: Array, norm: str, positions: Array) -> Array:
        heads = _norm(heads, self.own.get(norm), self.epsilon)
        return _rope(heads, positions, int(self.own.key("rope.dimension_count")), self.own.key("rope.freq_base"))

    def _conv(self, values: Array, dynamic: Array, i: int, side: str, where: int) -> Array:
        """out[t] = sum over taps of (base[tap] + coefficient[t, tap]) * in[t - tap]; taps before the block are zero."""
        base = self.own.get(f"blk.{i}.{side}_conv_base")[where]  # [taps, hidden]
        groups = values.shape[1] // int(self.own.key("conv_group_size"))
        coefficients = dynamic.reshape(len(values), 2, len(base), groups)[:, where]
        out = np.zeros_like(values)
        for tap in range(min(len(base), len(values))):
            weight = base[tap] + np.repeat(coefficients[:, tap], values.shape[1] // groups, axis=1)
            out[tap:] += weight[tap:] * values[: len(values) - tap]
        return out

    def hidden(self, features: Array, start: int, tokens: Sequence[int], position: int) -> Array:
        """float[rows, hidden] of a block at *position*, over *features* injected from *start* on."""
        own, eps = self.own, self.epsilon
        context = _norm(features @ own.get("fc.weight").T, own.get("enc.output_norm.weight"), eps)
        before = start + np.arange(len(features), dtype=float)
        at = position + np.arange(len(tokens), dtype=float)
        rows = self._matrix("token_embd.weight")[np.array(tokens)]
        for i in range(self.layers):
            block = f"blk.{i}"
            normed = _norm(rows, own.get(f"{block}.attn_norm.weight"), eps)
            dynamic = None
            if f"{block}.attn_conv_proj.weight" in own:
                dynamic = normed @ own.get(f"{block}.attn_conv_proj.weight").T
                normed = self._conv(normed, dynamic, i, "attn", 0)
            q, k, v = (own.get(f"{block}.attn_{name}.weight").T for name in "qkv")
            keys = [self._turned(own.heads(x @ k), f"{block}.attn_k_norm.weight", p)
                    for x, p in ((context, before), (normed, at))]  # fmt: skip
            queries = self._turned(own.heads(normed @ q), f"{block}.attn_q_norm.weight", at)
            values = own.heads(np.concatenate([context @ v, normed @ v]))
            everything = np.ones((len(rows), len(values)), bool)
            mixed = _attend(queries, np.concatenate(keys), values, everything)
            mixed = mixed @ own.get(f"{block}.attn_output.weight").T
            if dynamic is not None:
                mixed = self._conv(mixed, dynamic, i, "attn", 1)
            rows = rows + mixed
            normed = _norm(rows, own.get(f"{block}.ffn_norm.weight"), eps)
            if f"{block}.ffn_conv_proj.weight" in own:
                dynamic = normed @ own.get(f"{block}.ffn_conv_proj.weight").T
                normed = self._conv(normed, dynamic, i, "ffn", 0)
            gate, up, down = (own.get(f"{block}.ffn_{name}.weight").T for name in ("gate", "up", "down"))
            fed = (_silu(normed @ gate) * (normed @ up)) @ down
            if dynamic is not None:
                fed = self._conv(fed, dynamic, i, "ffn", 1)
            rows = rows + fed
        return _norm(rows, own.get("output_norm.weight"), eps)

    def logits(self, hidden: Array) -> Array:
        """float[rows, vocab]; -inf outside a reduced vocabulary."""
        found = hidden @ self._matrix("output.weight").T
        if "d2t" not in self.own:
            return found
        full = np.full((len(hidden), int(self.own.key("vocab_size"))), -np.inf)
        full[:, self.own.tensors["d2t"]] = found
        return full

    def lattice(self, hidden: Array, logits: Array, anchor: int, ids: Sequence[Sequence[int]]) -> list[Array]:
        """
        Scores [predecessor][candidate] of rows 1 .., for the candidates *ids* of each row:
        logit(c) + (predecessor(p) * gate) . successor(c).
        """
        before, after = self.own.get("selector_predecessor.weight"), self.own.get("selector_successor.weight")
        gates = hidden @ self.own.get("selector_hidden.weight").T
        scores = []
        for row in range(1, len(hidden)):
            previous = [anchor] * len(ids[row]) if row == 1 else list(ids[row - 1])
            pairs = (before[previous] * gates[row]) @ after[list(ids[row])].T
            scores.append(logits[row][list(ids[row])] + pairs)
        return scores

    def markov(self, hidden: Array, logits: Array, anchor: int, first: int) -> tuple[Array, Array]:
        """Logits with the Markov bias along their own greedy chain from row *first* on, and each row's confidence."""
        w1, w2 = self.own.get("markov_w1.weight"), self.own.get("markov_w2.weight")
        biased, confidences = logits.copy(), np.zeros(len(logits))
        previous = anchor
        for row in range(first, len(logits)):
            bias = w2 @ w1[previous]
            if "d2t" in self.own:
                biased[row, self.own.tensors["d2t"]] += bias
            else:
                biased[row] += bias
            if "conf_proj.weight" in self.own:
                joined = np.concatenate([hidden[row], w1[previous]])
                score = self.own.get("conf_proj.weight").reshape(-1) @ joined + self.own.get("conf_proj.bias")[0]
                confidences[row] = _sigmoid(score)
            previous = int(biased[row].argmax())
        return biased, confidences


class LayerReference:
    """
    A prediction (NextN) layer of Qwen3.5.

    Args:
        path: Its file, or the whole model's.
    """

    def __init__(self, path: Path) -> None:
        self.own = _Weights(path)
        self.block = f"blk.{int(self.own.key('block_count')) - 1}"
        self.epsilon = self.own.key("attention.layer_norm_rms_epsilon")

    def _of(self, name: str) -> Array:
        return self.own.get(f"{self.block}.{name}.weight")

    def run(self, tokens: Sequence[int], hidden: Array) -> tuple[Array, Array]:
        """Logits and states of a sequence of pairs (token, state) at positions 0, 1, ..."""
        own, eps, positions = self.own, self.epsilon, np.arange(len(tokens), dtype=float)
        embedded = own.get("token_embd.weight")[np.array(tokens)]
        joined = [_norm(embedded, self._of("nextn.enorm"), eps), _norm(hidden, self._of("nextn.hnorm"), eps)]
        rows = np.concatenate(joined, axis=1) @ self._of("nextn.eh_proj").T
        normed = _norm(rows, self._of("attn_norm"), eps)
        both = own.heads(normed @ self._of("attn_q").T)  # a head's query, then its gate
        rotated, base = int(own.key("rope.dimension_count")), own.key("rope.freq_base")
        sections = own.file.metadata["qwen35.rope.dimension_sections"].tolist()
        queries = _rope(_norm(both[:, 0::2], self._of("attn_q_norm"), eps), positions, rotated, base, sections)
        keys = _norm(own.heads(normed @ self._of("attn_k").T), self._of("attn_k_norm"), eps)
        keys = _rope(keys, positions, rotated, base, sections)
        values = own.heads(normed @ self._of("attn_v").T)
        mixed = _attend(queries, keys, values, positions[:, None] >= positions)
        mixed = mixed * _sigmoid(both[:, 1::2].reshape(len(tokens), -1))
        rows = rows + mixed @ self._of("attn_output").T
        normed = _norm(rows, self._of("post_attention_norm"), eps)
        gate, up, down = (self._of(f"ffn_{name}").T for name in ("gate", "up", "down"))
        rows = rows + (_silu(normed @ gate) * (normed @ up)) @ down
        states = _norm(rows, self._of("nextn.shared_head_norm"), eps)
        return states @ own.get("output.weight").T, states
