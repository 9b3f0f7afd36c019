"""The torch executor: reads either container, keeps draft K/V in a ring, walks the Markov chain itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from power_torch.drafting import (
    BackboneShape,
    BlockBackbone,
    KvRing,
    ReducedHead,
    load_backbone,
    matrix_dtype,
    read_tensor,
)
from torch import Tensor

from power_core.artifacts import TensorFile
from power_core.errors import BackendError, CapabilityError
from power_core.target import SharedWeights, TargetModel, TargetSession
from power_core.types import SeqId
from power_dspark.artifact import draft_ids
from power_dspark.config import DsparkConfig
from power_dspark.executor import Chance, Drafted, Round
from power_dspark.header import Header, tensor_names

__all__ = ["TorchExecutor"]


class TorchExecutor:
    """
    A DSpark drafter in torch.

    Args:
        config: Ring size, device and element type.
        file: A checked file of either format.
        header: Of that file.
        model: Shares its embedding and output matrices where the file has none.
        session: Its sequences are those drafted for.

    Raises:
        CapabilityError: The file has no matrices of its own and the target cannot share them, or the device is absent.
    """

    def __init__(
        self, config: DsparkConfig, file: TensorFile, header: Header, model: TargetModel, session: TargetSession
    ) -> None:
        self._header = header
        self._device = _device(config.device)
        self._dtype = matrix_dtype(config.dtype, self._device)
        dims = header.dims
        self._ring = KvRing(
            layers=dims.blocks, kv_heads=dims.kv_heads, head_dim=dims.head_dim, cap=config.ring or session.context_size,
            max_sequences=session.max_sequences, dtype=self._dtype, device=self._device,
        )  # fmt: skip
        weights = load_backbone(file, _shape(header), dtype=self._dtype, device=self._device)
        self._backbone = BlockBackbone(weights, self._ring, compiled=config.compiled)
        self._load_heads(file, model)

    def _load_heads(self, file: TensorFile, model: TargetModel) -> None:
        names = tensor_names(file)

        def read(name: str, dtype: torch.dtype) -> Tensor:
            return read_tensor(file, names[name], dtype=dtype, device=self._device)

        def own_or_shared(name: str, which: Literal["token_embd", "output"]) -> Tensor:
            if name in names:
                return read(name, self._dtype)
            return self._shared(model, which)

        self._embedding = own_or_shared("token_embd.weight", "token_embd")
        ids = draft_ids(file)
        on_device = None if ids is None else torch.from_numpy(ids).to(self._device)
        self._head = ReducedHead(own_or_shared("output.weight", "output"), on_device)
        self._w1, self._w2 = read("markov_w1.weight", self._dtype), read("markov_w2.weight", self._dtype)
        self._confidence: tuple[Tensor, Tensor] | None = None
        if self._header.dims.confidence:  # one row: kept wide, for it decides cuts
            weight = read("conf_proj.weight", torch.float32).reshape(-1)
            has_bias = "conf_proj.bias" in names
            bias = read("conf_proj.bias", torch.float32) if has_bias else torch.zeros(1, device=self._device)
            self._confidence = weight, bias

    def _shared(self, model: TargetModel, which: Literal["token_embd", "output"]) -> Tensor:
        if not isinstance(model, SharedWeights):
            raise CapabilityError(
                f"the drafter has no {which} matrix and the target does not share its own", who="strategy 'dspark'",
                expected="a target with shared weights", fix="use a drafter with matrices of its own", plugin="dspark",
            )  # fmt: skip
        matrix = torch.from_numpy(np.array(model.matrix(which)))  # copied: torch wants memory it may write to
        return matrix.to(device=self._device, dtype=self._dtype)

    @property
    def max_sequences(self) -> int:
        return self._ring.max_sequences

    @property
    def nbytes(self) -> int:
        """Bytes of draft K/V."""
        return self._ring.nbytes

    def open(self, seq: SeqId) -> None:
        self._ring.open(seq)

    def close(self, seq: SeqId) -> None:
        self._ring.close(seq)

    def end_position(self, seq: SeqId) -> int | None:
        return self._ring.end(seq)

    def inject(self, seq: SeqId, position: int, features: NDArray[np.float32]) -> None:
        self._backbone.fold(seq, position, features)

    def truncate(self, seq: SeqId, length: int) -> None:
        self._ring.rollback(seq, length)

    def draft(self, rounds: Sequence[Round], rows: int, *, chances: bool) -> list[Drafted]:
        with torch.inference_mode():
            anchors = torch.tensor([r.anchor for r in rounds], device=self._device)
            tokens = torch.full((len(rounds), rows), self._header.mask_id, device=self._device)
            tokens[:, 0] = anchors
            hidden = self._backbone.forward(
                [r.seq for r in rounds], [r.position for r in rounds], self._embedding[tokens]
            )[:, self._header.first_row :]
            return self._walk(hidden, anchors, chances=chances)

    def _walk(self, hidden: Tensor, previous: Tensor, *, chances: bool) -> list[Drafted]:
        """The greedy chain: row j's logits plus W2 W1[x_(j-1)], for all sequences at once."""
        base = self._head.logits(hidden)  # [n, rows, drafted vocabulary]
        tokens, confidences, tops = [], [], []
        for j in range(hidden.shape[1]):
            state = self._w1[previous]  # [n, rank]
            logits = base[:, j] + (state @ self._w2.T).float()
            if self._confidence is not None:
                confidences.append(_confidence(hidden[:, j], state, *self._confidence))
            if chances:
                tops.append(torch.topk(logits.softmax(-1), min(2, logits.shape[-1]), dim=-1).values)
            previous = self._head.target_ids(logits.argmax(-1))
            tokens.append(previous)
        if not bool(logits.isfinite().all()):  # one row tells: NaN spreads through a bidirectional block
            raise BackendError("the drafter's logits are not finite", who="strategy 'dspark'", plugin="dspark")
        return _drafted(tokens, confidences, tops)

    def shutdown(self) -> None:
        """Nothing is held that Python does not free."""


def _confidence(hidden: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """sigmoid(w [h; W1[x]] + b), float32[n]; a head without the Markov part has fewer columns."""
    both = torch.cat([hidden.float(), state.float()], dim=-1)[:, : len(weight)]
    return torch.sigmoid(both @ weight + bias)


def _drafted(tokens: list[Tensor], confidences: list[Tensor], tops: list[Tensor]) -> list[Drafted]:
    """Per sequence, on the host: one transfer for each kind of number."""
    ids = torch.stack(tokens, dim=1).tolist()
    heads = torch.stack(confidences, dim=1).tolist() if confidences else [None] * len(ids)
    pairs = torch.stack(tops, dim=1).tolist() if tops else [None] * len(ids)
    return [
        Drafted(row, head, [Chance(pair[0], pair[0] - sum(pair[1:])) for pair in top] if top else None)
        for row, head, top in zip(ids, heads, pairs, strict=True)
    ]


def _shape(header: Header) -> BackboneShape:
    dims = header.dims
    return BackboneShape(
        hidden_size=dims.hidden, layers=dims.blocks, heads=dims.heads, kv_heads=dims.kv_heads, head_dim=dims.head_dim,
        eps=header.epsilon, rope_base=header.rope_base, rope_dims=dims.head_dim, windows=(None,) * dims.blocks,
    )  # fmt: skip


def _device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise CapabilityError(
            f"device is {name!r} and torch sees no GPU", who="strategy 'dspark'", got=name, expected="cpu",
            fix="set device to cpu", plugin="dspark",
        )  # fmt: skip
    return torch.device(name)
