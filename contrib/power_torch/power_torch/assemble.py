"""From named tensors of one file to `ModelWeights`: what both formats share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from power_torch.hparams import GEMMA3, LLAMA, HyperParameters
from power_torch.refusal import refuse
from power_torch.weights import BlockWeights, ModelWeights

__all__ = ["Source", "assemble"]


class Source:
    """
    A file's tensors under GGUF's names.

    Args:
        path: For messages.
        shapes: Shape of every tensor of the file, outermost dimension first.
        read: Values of a tensor, float32, or bfloat16 or float16 where they are stored so.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], torch.Tensor]) -> None:
        self.path = path
        self._shapes = shapes
        self._read = read
        self._unused = set(shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """
        The tensor *name*, which must have *shape* and be finite.

        Raises:
            ArtifactError: It is missing, of another shape, or holds NaN or an infinity.
        """
        if name not in self._shapes:
            refuse(self.path, f"the tensor {name} is missing", expected="a whole model", fix="download the file again")
        if self._shapes[name] != shape:
            refuse(self.path, f"tensor {name} has shape {self._shapes[name]}", got=self._shapes[name], expected=shape)
        self._unused.discard(name)
        values = self._read(name).to(dtype)
        # A sum is not finite where an element is not; where a sum of finite ones overflows, each is looked at.
        if not torch.isfinite(values.sum(dtype=torch.float32)) and not torch.isfinite(values).all():
            bad = int(torch.isfinite(values).flatten().int().argmin())
            refuse(
                self.path,
                f"tensor {name} holds a number that is not finite, at index {bad}",
                got=bad,
                fix="download the file again",
            )
        return values

    def skip(self, name: str) -> None:
        """*name* is known and not needed."""
        self._unused.discard(name)

    def finish(self) -> None:
        """
        Refuse what nobody asked for: a model with more tensors than its architecture computes another function.

        Raises:
            ArtifactError: A tensor was left.
        """
        if self._unused:
            name = min(self._unused)
            refuse(
                self.path,
                f"the tensor {name} is not one of a dense model of this architecture",
                got=sorted(self._unused),
                expected="no biases, experts or adapters",
                fix="use power-llamacpp for this model",
            )


def assemble(source: Source, hparams: HyperParameters, dtype: torch.dtype) -> ModelWeights:
    """
    Take every tensor of the architecture from *source*.

    Raises:
        ArtifactError: One is missing, of another shape or not finite; or one is left.
    """
    table = (hparams.vocab_size, hparams.hidden_size)
    embedding = source.take("token_embd.weight", table, dtype)
    output = source.take("output.weight", table, dtype) if "output.weight" in source else embedding
    norm = source.take("output_norm.weight", (hparams.hidden_size,), torch.float32)
    blocks = tuple(_block(source, hparams, i, dtype) for i in range(hparams.num_layers))
    source.finish()
    return ModelWeights(hparams, dtype, embedding, output, norm, blocks)


def _block(source: Source, hparams: HyperParameters, index: int, dtype: torch.dtype) -> BlockWeights:
    hidden, ffn = hparams.hidden_size, hparams.ffn_size
    queries, keys = hparams.query_size, hparams.kv_size
    matrix = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    taken = {name: source.take(f"blk.{index}.{name}.weight", shape, dtype) for name, shape in matrix.items()}

    def norm(name: str, size: int) -> torch.Tensor:
        return source.take(f"blk.{index}.{name}.weight", (size,), torch.float32)

    has_head_norms, has_post_norms = hparams.architecture != LLAMA, hparams.architecture == GEMMA3
    return BlockWeights(
        attn_norm=norm("attn_norm", hidden),
        attn_qkv=torch.cat([taken["attn_q"], taken["attn_k"], taken["attn_v"]]),
        attn_output=taken["attn_output"],
        ffn_norm=norm("ffn_norm", hidden),
        ffn_gate_up=torch.cat([taken["ffn_gate"], taken["ffn_up"]]),
        ffn_down=taken["ffn_down"],
        attn_q_norm=norm("attn_q_norm", hparams.head_dim) if has_head_norms else None,
        attn_k_norm=norm("attn_k_norm", hparams.head_dim) if has_head_norms else None,
        post_attention_norm=norm("post_attention_norm", hidden) if has_post_norms else None,
        post_ffn_norm=norm("post_ffw_norm", hidden) if has_post_norms else None,
    )
