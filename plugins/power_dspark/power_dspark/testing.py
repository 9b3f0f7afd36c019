"""
For tests of executors and converters: an independent DSpark in numpy, and published files from GGUFs.

The reference computes in float64 without cache or batch, from the paper's equations alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from power_core.artifacts import TensorFile
from power_core.testing.safetensors_writer import save_tensors
from power_dspark.artifact import draft_ids, read_header
from power_dspark.executor import Drafted
from power_dspark.header import Header, tensor_names
from power_dspark.layout import published_name

__all__ = ["NumpyDspark", "Reference", "assert_follows", "published_config", "save_published"]

Array = NDArray[np.float64]


class Reference(NamedTuple):
    """Chain, confidences (None without a head), and each row's logits over the drafter's vocabulary."""

    tokens: list[int]
    confidences: list[float] | None
    logits: list[Array]


class NumpyDspark:
    """
    One drafter; `draft` computes a round from all features so far.

    Args:
        file: Where the weights are.
        header: Of that file.
        shared: The target's matrices, by `token_embd` and `output`.
    """

    def __init__(self, file: TensorFile, header: Header, shared: Mapping[str, NDArray[Any]]) -> None:
        self.header = header
        self.w = {name: np.asarray(file.read(spelled), np.float64) for name, spelled in tensor_names(file).items()}
        self.w.setdefault("token_embd.weight", shared["token_embd"].astype(np.float64))
        self.w.setdefault("output.weight", shared["output"].astype(np.float64))
        ids = draft_ids(file)
        self.ids = np.arange(header.dims.vocab) if ids is None else ids

    def draft(self, features: NDArray[Any], start: int, anchor: int, rows: int) -> Reference:
        """
        A round.

        Args:
            features: [committed rows, k * hidden], of positions *start* on.
            start: Position of the first of them.
            anchor: The last committed token, one position after the last of them.
            rows: Of the block.
        """
        tokens = [anchor] + [self.header.mask_id] * (rows - 1)
        x = self.w["token_embd.weight"][tokens]
        context = self._norm(features.astype(np.float64) @ self.w["fc.weight"].T, "enc.output_norm.weight")
        positions = start + np.arange(len(features) + rows)
        for i in range(self.header.dims.blocks):
            x = x + self._attend(i, self._norm(x, f"blk.{i}.attn_norm.weight"), context, positions)
            y = self._norm(x, f"blk.{i}.ffn_norm.weight")
            gate = y @ self.w[f"blk.{i}.ffn_gate.weight"].T
            up = y @ self.w[f"blk.{i}.ffn_up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.w[f"blk.{i}.ffn_down.weight"].T
        hidden = self._norm(x, "output_norm.weight")[self.header.first_row :]
        return self._walk(hidden, anchor)

    def _walk(self, hidden: Array, previous: int) -> Reference:
        tokens: list[int] = []
        confidences: list[float] = []
        logits: list[Array] = []
        for h in hidden:
            state = self.w["markov_w1.weight"][previous]
            row = self.w["output.weight"] @ h + self.w["markov_w2.weight"] @ state
            if self.header.dims.confidence:
                weight = self.w["conf_proj.weight"].reshape(-1)
                score = np.concatenate([h, state])[: len(weight)] @ weight + self.w.get("conf_proj.bias", np.zeros(1))
                confidences.append(float(1 / (1 + np.exp(-score[0]))))
            previous = int(self.ids[np.argmax(row)])
            tokens.append(previous)
            logits.append(row)
        return Reference(tokens, confidences if self.header.dims.confidence else None, logits)

    def _attend(self, i: int, x: Array, context: Array, positions: NDArray[Any]) -> Array:
        """Queries are the block's rows; keys are all committed rows and all rows of the block, in either direction."""
        dims, both = self.header.dims, np.concatenate([context, x])
        queries = (x @ self.w[f"blk.{i}.attn_q.weight"].T).reshape(len(x), dims.heads, dims.head_dim)
        keys = (both @ self.w[f"blk.{i}.attn_k.weight"].T).reshape(len(both), dims.kv_heads, dims.head_dim)
        values = (both @ self.w[f"blk.{i}.attn_v.weight"].T).reshape(len(both), dims.kv_heads, dims.head_dim)
        queries = self._rotate(self._norm(queries, f"blk.{i}.attn_q_norm.weight"), positions[-len(x) :])
        keys = self._rotate(self._norm(keys, f"blk.{i}.attn_k_norm.weight"), positions)
        out = np.empty_like(queries)
        for head in range(dims.heads):
            shared = head // (dims.heads // dims.kv_heads)
            scores = queries[:, head] @ keys[:, shared].T / np.sqrt(dims.head_dim)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ values[:, shared]
        return out.reshape(len(x), -1) @ self.w[f"blk.{i}.attn_output.weight"].T

    def _norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.header.epsilon)
        normed: Array = x / scale * self.w[name]
        return normed

    def _rotate(self, x: Array, positions: NDArray[Any]) -> Array:
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.header.rope_base ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def assert_follows(drafted: Drafted, expected: Reference, *, atol: float = 2e-5, decided: float = 0.0) -> None:
    """
    Assert that an executor's answer is that of the reference.

    Args:
        drafted: The answer.
        expected: The reference's.
        atol: What confidences and chances may differ by.
        decided: Compare up to the first token that leads the second by less than this: rounding may swap the two.
    """
    leads = [np.diff(np.sort(row)[-2:])[0] for row in expected.logits]
    count = next((i for i, lead in enumerate(leads) if lead < decided), len(leads))
    assert list(drafted.tokens[:count]) == expected.tokens[:count]
    assert (drafted.confidences is None) == (expected.confidences is None)
    if drafted.confidences is not None and expected.confidences is not None:
        np.testing.assert_allclose(drafted.confidences[:count], expected.confidences[:count], atol=atol)
    for chance, row in zip((drafted.chances or ())[:count], expected.logits[:count], strict=bool(drafted.chances)):
        second, first = np.sort(np.exp(row - row.max()) / np.exp(row - row.max()).sum())[-2:]
        np.testing.assert_allclose([chance.top, chance.gap], [first, first - second], atol=atol)


def published_config(header: Header) -> dict[str, Any]:
    """The config.json of a drafter with *header*, as DeepSpec writes it."""
    dims = header.dims
    reduced = {"draft_vocab_size": dims.draft_vocab} if dims.draft_vocab != dims.vocab else {}
    return {
        "architectures": ["Qwen3DSparkModel"],
        "attention_bias": False,
        "block_size": header.block_size,
        "confidence_head_with_markov": True,
        "enable_confidence_head": bool(dims.confidence),
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "hidden_size": dims.hidden,
        "intermediate_size": dims.feed_forward,
        "layer_types": ["full_attention"] * dims.blocks,
        "markov_head_type": "vanilla",
        "markov_rank": dims.rank,
        "mask_token_id": header.mask_id,
        "max_position_embeddings": header.context,
        "num_attention_heads": dims.heads,
        "num_hidden_layers": dims.blocks,
        "num_key_value_heads": dims.kv_heads,
        "rms_norm_eps": header.epsilon,
        "rope_theta": header.rope_base,
        "sample_from_anchor": header.sample_from_anchor,
        "target_layer_ids": list(header.hidden_layers),
        "vocab_size": dims.vocab,
        **reduced,
    }


def save_published(
    file: TensorFile,
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    replace: Mapping[str, NDArray[Any] | None] | None = None,
    prefix: str = "",
) -> Path:
    """
    Write the GGUF drafter *file* as safetensors with a config.json, float32.

    Args:
        file: A good GGUF.
        folder: Where the two files go.
        config: Keys to replace or add; None leaves a key out.
        replace: Tensors by published name to replace or add; None leaves one out.
        prefix: Put before every name.

    Returns:
        The path of the safetensors file.
    """
    tensors: dict[str, NDArray[Any] | None] = {}
    for name in file.tensors:
        tensors[published_name(name)] = np.asarray(file.read(name))
    tensors |= replace or {}
    keys = {**published_config(read_header(file)), **(config or {})}
    weights = {prefix + name: array for name, array in tensors.items() if array is not None}
    return save_tensors(folder, weights, {key: value for key, value in keys.items() if value is not None})
