"""From a drafter's file to a draft context: checked, loaded, and made with settings of its own."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from power_core.errors import CapabilityError
from power_llamacpp import extension
from power_llamacpp.config import KvType
from power_llamacpp.context import ContextSettings, NativeContext, NativeModel
from power_llamacpp.draft_check import DraftFacts, DraftKind, check_draft, check_own_layer
from power_llamacpp.draft_context import LlamaCppDraftContext
from power_llamacpp.gguf_file import GgufInfo

__all__ = ["open_draft"]

_BATCH_ROWS = 128  # rows of a native decode, at least: prompts are injected in parts of this size
_PLAIN_KV_TYPES = (KvType.F32, KvType.F16, KvType.BF16)  # without flash attention, values cannot be quantized


def open_draft(
    path: Path | None,
    info: GgufInfo,
    weights: NativeModel,
    target: NativeContext,
    *,
    context_size: int,
    max_sequences: int,
) -> LlamaCppDraftContext:
    """
    Open *path*, or with None the prediction layer inside the target's own file.

    Args:
        path: The drafter's file.
        info: What the target's header says.
        weights: The target's weights.
        target: The target's context.
        context_size: Positions of the target's sequences.
        max_sequences: Sequences of the target.

    Raises:
        ArtifactError: The file would abort or be misread by llama.cpp, which has not seen it.
        BackendError: llama.cpp cannot load it or make its context.
        CapabilityError: This target, this session or this build of llama.cpp cannot.
    """
    target.handle  # noqa: B018 - says so where the session is closed
    facts = check_own_layer(info) if path is None else check_draft(path, info)
    extension.require(extension.NEXTN, "draft contexts")
    settings = _settings(target.settings, facts, context_size, max_sequences)
    if path is not None:
        own = NativeModel(path, prediction_layers=facts.kind is DraftKind.MTP)
        return LlamaCppDraftContext(own, target, settings, facts, owns_weights=True)
    if not weights.has_prediction_layers:
        raise CapabilityError(
            "the session was opened without the model's prediction layer",
            plugin="llamacpp",
            fix="name NEXTN_STATE in SessionOptions.hidden_layers",
        )
    return LlamaCppDraftContext(weights, target, settings, facts, owns_weights=False)


def _settings(target: ContextSettings, facts: DraftFacts, context_size: int, max_sequences: int) -> ContextSettings:
    """Threads are the target's; a drafter only advises, so nothing else has to be as exact."""
    block = facts.block_size or 0
    return evolve(
        target,
        context_size=context_size + block,  # a block reaches past the last position
        max_sequences=max_sequences,
        batch_rows=max(_BATCH_ROWS, block),
        max_outputs=max(_BATCH_ROWS, block),
        flash_attention=False,
        kv_type=target.kv_type if target.kv_type in _PLAIN_KV_TYPES else KvType.F16,
        swa_full=True,
        rollback_rows=0,
        hidden_layers=(),
    )
