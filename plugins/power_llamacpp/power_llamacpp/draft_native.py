"""The native context of a drafter: how it is made and the two kinds of batches it takes beside tokens."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from power_core.errors import BackendError
from power_llamacpp import extension
from power_llamacpp.context import ContextSettings, NativeContext, NativeModel
from power_llamacpp.draft_facts import DraftFacts, DraftKind

__all__ = ["DraftNative"]

_MTP = 1  # LLAMA_CONTEXT_TYPE_MTP
_SECTIONS = 4  # positions a row of a batch of embeddings has under a multi-dimensional rope


class DraftNative(NativeContext):
    """
    A context whose embedding and output matrices may be the target's.

    Args:
        model: The drafter's weights; for a target's own prediction layer the target's.
        settings: How to make it.
        target: The target's context, which must live longer: llama.cpp keeps a raw pointer.
        facts: What the drafter is.

    Raises:
        BackendError: llama.cpp cannot make the context.
        CapabilityError: This build lacks a function that is needed.
    """

    def __init__(self, model: NativeModel, settings: ContextSettings, target: NativeContext, facts: DraftFacts) -> None:
        extension.require(extension.NEXTN, "draft contexts")
        self._target = target
        self._facts = facts
        super().__init__(model, settings)
        if facts.kind is not DraftKind.DFLASH:
            # masked: rows of outputs only. DSpark's confidences are made for those; the others answer for all rows.
            extension.function("set_nextn")(self.handle, True, facts.kind is DraftKind.DSPARK)
        if facts.kind is not DraftKind.MTP:
            self._lib.llama_set_causal_attn(self.handle, False)
        self._types = dict(self._lib.llama_batch._fields_)
        self._sections: NDArray[np.int32] = np.zeros(_SECTIONS * self.batch_rows, np.int32)

    def _params(self, settings: ContextSettings) -> Any:
        params = super()._params(settings)
        params.ctx_other = self._target.handle
        if self._facts.kind is DraftKind.MTP:
            params.ctx_type = _MTP
        return params

    def decode_features(self, features: NDArray[np.float32]) -> None:
        """
        Evaluate target features, float32[rows, width], C-contiguous, instead of tokens; nothing is read back.

        Raises:
            BackendError: As `decode`.
        """
        rows, native = len(features), self.batch.native
        self.batch.outputs[:rows] = 0
        native.token = self._types["token"]()
        native.embd = ctypes.cast(features.ctypes.data, self._types["embd"])
        if self._facts.has_sections:
            self._sections[: _SECTIONS * rows] = np.tile(self.batch.positions[:rows], _SECTIONS)
            native.pos = ctypes.cast(self._sections.ctypes.data, self._types["pos"])
        try:
            self.decode(rows)
        finally:
            native.token = ctypes.cast(self.batch.tokens.ctypes.data, self._types["token"])
            native.pos = ctypes.cast(self.batch.positions.ctypes.data, self._types["pos"])
            native.embd = self._types["embd"]()

    def decode_pairs(self, rows: int, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """
        Evaluate rows 0..rows-1 of `batch`, each with a state of *hidden*, float32[rows, hidden], C-contiguous.

        Returns:
            As `decode`.

        Raises:
            BackendError: As `decode`.
        """
        native = self.batch.native
        native.embd = ctypes.cast(hidden.ctypes.data, self._types["embd"])
        try:
            return self.decode(rows)
        finally:
            native.embd = self._types["embd"]()

    def states(self, rows: int) -> NDArray[np.float32]:
        """
        float32[rows, hidden]: what the last decode gave beside logits; a read-only view, dead with the next decode.

        Raises:
            BackendError: llama.cpp has none.
        """
        pointer = extension.function("get_nextn")(self.handle)
        if not pointer:
            raise BackendError("llama.cpp has no states for the rows it drafted", plugin="llamacpp")
        view = np.ctypeslib.as_array(pointer, shape=(rows, self._facts.hidden_size))
        view.flags.writeable = False
        return view
