"""The drafter evaluated in torch, from either container, over a ring of draft K/V."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from attrs import frozen
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
from power_core.errors import CapabilityError
from power_core.target import SharedWeights, TargetModel, TargetSession
from power_core.types import SeqId
from power_dflash.chains import Chain, walk
from power_dflash.config import DFlash2Config, DFlashConfig
from power_dflash.executor import Round
from power_dflash.header import Header
from power_dflash.tensors import EMBEDDING, OUTPUT, draft_ids, spelled

__all__ = ["TorchExecutor"]


@frozen(eq=False)
class _Selector:
    """DFlash2's codebooks [vocab, rank] and the gate [rank, hidden]."""

    predecessor: Tensor
    successor: Tensor
    hidden: Tensor


class TorchExecutor:
    """
    Backbone, ring and heads of one file.

    Args:
        config: Ring, device and element type.
        header: Of the file.
        file: The weights.
        model: Gives embedding and output matrix where the file has none.
        session: Says how many sequences there are and how long they may be.

    Raises:
        CapabilityError: The file needs the target's matrices, and this target shares none.
    """

    def __init__(
        self,
        config: DFlashConfig | DFlash2Config,
        header: Header,
        file: TensorFile,
        model: TargetModel,
        session: TargetSession,
    ) -> None:
        self._header = header
        self._device = torch.device(config.device)
        self._dtype = matrix_dtype(config.dtype, self._device)
        weights = load_backbone(file, _shape(header), dtype=self._dtype, device=self._device)
        self.ring = KvRing(
            layers=header.layers, kv_heads=header.kv_heads, head_dim=header.head_dim,
            cap=min(config.ring or session.context_size, session.context_size), max_sequences=session.max_sequences,
            dtype=self._dtype, device=self._device,
        )  # fmt: skip
        self._backbone = BlockBackbone(weights, self.ring, compiled=config.compiled)
        self._embedding = _matrix(file, EMBEDDING, model, "token_embd")
        self._head = self._make_head(file, model)
        self._selector = self._load_selector(file) if header.selector is not None else None

    def open(self, seq: SeqId) -> None:
        self.ring.open(seq)

    def close(self, seq: SeqId) -> None:
        self.ring.close(seq)

    def end(self, seq: SeqId) -> int | None:
        return self.ring.end(seq)

    def extend(self, seq: SeqId, position: int, features: NDArray[np.float32]) -> None:
        self._backbone.fold(seq, position, features)

    def rollback(self, seq: SeqId, length: int | None) -> None:
        self.ring.rollback(seq, length)

    def draft(self, rounds: Sequence[Round]) -> list[Chain]:
        lengths = {len(each.tokens) for each in rounds}
        if len(lengths) > 1:  # short blocks of different lengths: one forward each length
            chains: dict[int, Chain] = {}
            for length in lengths:
                alike = [i for i, each in enumerate(rounds) if len(each.tokens) == length]
                chains.update(zip(alike, self._draft([rounds[i] for i in alike]), strict=True))
            return [chains[i] for i in range(len(rounds))]
        return self._draft(rounds)

    def shutdown(self) -> None:
        """Nothing to free but memory, which goes with the object."""

    @torch.inference_mode()
    def _draft(self, rounds: Sequence[Round]) -> list[Chain]:
        tokens = np.array([each.tokens for each in rounds])
        embedded = torch.from_numpy(self._embedding[tokens] * np.float32(self._header.embedding_scale))
        hidden = self._backbone.forward(
            [each.seq for each in rounds],
            [each.position for each in rounds],
            embedded.to(device=self._device, dtype=self._dtype),
        )
        start = 0 if self._header.anchor_drafts else 1
        drafted = hidden[:, start : start + max(each.wanted for each in rounds)]
        logits = self._head.logits(drafted)
        if self._selector is not None:
            return self._walk(self._selector, drafted, logits, tokens[:, 0])
        return self._likeliest(logits)

    def _likeliest(self, logits: Tensor) -> list[Chain]:
        """DFlash v1: each row's own best, with its chance and its margin over the second."""
        ids, best = self._head.top(logits, min(2, logits.shape[-1]))
        chances = torch.exp(best - torch.logsumexp(logits, dim=-1, keepdim=True))
        margins = chances[..., 0] - chances[..., 1] if chances.shape[-1] > 1 else chances[..., 0]
        parts = (ids[..., 0].tolist(), chances[..., 0].tolist(), margins.tolist())
        return [Chain(*each) for each in zip(*parts, strict=True)]

    def _walk(self, selector: _Selector, hidden: Tensor, logits: Tensor, anchors: NDArray[np.int64]) -> list[Chain]:
        """
        DFlash2: the path through the best successors.

        With u the candidate's logit, h the row's hidden state, P and S the codebooks and W the gate, the score of
        candidate c after predecessor p is u[c] + sum_r P[p, r] * (W h)[r] * S[c, r].
        """
        top_k = self._header.selector.top_k if self._header.selector is not None else 0
        candidates, unary = self._head.top(logits, top_k)
        first = torch.from_numpy(anchors).to(self._device)[:, None, None].expand(-1, 1, top_k)
        before = torch.cat([first, candidates[:, :-1]], dim=1)
        gate = (hidden @ selector.hidden.T).float()[:, :, None]
        pairs = (selector.predecessor[before].float() * gate) @ selector.successor[candidates].float().transpose(-1, -2)
        scores = (pairs + unary[:, :, None]).cpu().numpy()
        return [walk(*each) for each in zip(candidates.cpu().numpy(), scores, strict=True)]

    def _make_head(self, file: TensorFile, model: TargetModel) -> ReducedHead:
        header = self._header
        matrix = torch.from_numpy(np.array(_matrix(file, OUTPUT, model, "output")))
        ids = draft_ids(file, header)
        is_scored = header.selector is not None  # v1 reads argmax and chances of the raw logits, as llama.cpp does
        return ReducedHead(
            matrix.to(device=self._device, dtype=self._dtype),
            None if ids is None else torch.from_numpy(ids).to(self._device),
            logit_scale=header.logit_scale if is_scored else 1.0,
            softcap=header.softcap if is_scored else 0.0,
        )

    def _load_selector(self, file: TensorFile) -> _Selector:
        names = (
            ("candidate_selector.predecessor_codebook", "selector_predecessor.weight"),
            ("candidate_selector.successor_codebook", "selector_successor.weight"),
            ("candidate_selector.hidden_projection.weight", "selector_hidden.weight"),
        )
        which = 1 if file.format == "gguf" else 0
        return _Selector(*(read_tensor(file, pair[which], dtype=self._dtype, device=self._device) for pair in names))


def _shape(header: Header) -> BackboneShape:
    return BackboneShape(
        hidden_size=header.hidden_size,
        layers=header.layers,
        heads=header.heads,
        kv_heads=header.kv_heads,
        head_dim=header.head_dim,
        eps=header.eps,
        rope_base=header.rope_base,
        rope_dims=header.head_dim,
        windows=header.windows,
        conv_group=header.selector.conv_group if header.selector is not None else 0,
    )


def _matrix(
    file: TensorFile, names: tuple[str, str], model: TargetModel, which: Literal["token_embd", "output"]
) -> NDArray[np.float32]:
    """The file's own matrix, or the target's; an output matrix falls back on the file's embedding, as in llama.cpp."""
    own = spelled(file, names)
    if own not in file.tensors and which == "output":
        own = spelled(file, EMBEDDING)
    if own in file.tensors:
        return file.read(own).astype(np.float32, copy=False)
    if not isinstance(model, SharedWeights):
        raise CapabilityError(
            f"the drafter needs the target's {which} matrix, which this target does not share",
            where=str(file.path), got=which, fix="use a drafter with matrices of its own", plugin="dflash",
        )  # fmt: skip
    return model.matrix(which)
