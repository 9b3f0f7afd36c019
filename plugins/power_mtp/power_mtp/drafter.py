"""The strategy `mtp`: which head, which executor, and what the target must offer for it."""

from __future__ import annotations

from power_core.artifacts import Artifact
from power_core.draft_context import NEXTN_STATE, DraftContextHost
from power_core.drafter import DrafterRequirements, DraftSession
from power_core.errors import CapabilityError
from power_core.target import SharedWeights, TargetModel, TargetSession
from power_core.types import Capability
from power_mtp import nextn_file
from power_mtp.config import MtpConfig
from power_mtp.executor import HeadExecutor
from power_mtp.layout import KIND
from power_mtp.native import NativeHead
from power_mtp.session import MtpSession

__all__ = ["MtpDrafter"]


class MtpDrafter:
    """
    Drafts with one prediction layer applied to its own output (EAGLE, arXiv 2401.15077; DeepSeek-V3's MTP,
    arXiv 2412.19437, section 2.2).

    Args:
        config: Options.
        artifact: The admitted head, or None for the target's own NextN layer.
    """

    def __init__(self, config: MtpConfig, artifact: Artifact | None) -> None:
        self._config = config
        self._artifact = artifact
        self._is_native = artifact is None or nextn_file.matches(artifact.file)
        facts = artifact.manifest.facts if artifact is not None else None
        self._layers = (facts.hidden_layers if facts is not None else ()) or (NEXTN_STATE,)
        self._check_executor()

    def requirements(self) -> DrafterRequirements:
        needed = {Capability.HIDDEN_STATES, *([Capability.DRAFT_CONTEXT] if self._is_native else [])}
        if self._layers == (NEXTN_STATE,):
            needed.add(Capability.NEXTN)
        kind = KIND if self._artifact is not None else None
        return DrafterRequirements(frozenset(needed), artifact_kind=kind, hidden_layers=self._layers, sequential=True)

    def open(self, model: TargetModel, session: TargetSession) -> DraftSession:
        executor = self._open_native(session) if self._is_native else self._open_torch(model, session)
        return MtpSession(executor, self._layers, self._config, session.context_size)

    def _check_executor(self) -> None:
        """Refuse a configured executor that cannot compute the head at hand."""
        wanted, can = self._config.executor, "native" if self._is_native else "torch"
        if wanted in ("auto", can):
            return
        head = "the target's own NextN layer" if self._artifact is None else f"head {self._artifact.manifest.name!r}"
        raise CapabilityError(
            f"{head} has no {wanted} executor", who="strategy 'mtp'", where="executor", got=wanted,
            expected=f"auto or {can}", fix=f"set executor to {can}, or admit a head of the other form", plugin="mtp",
        )  # fmt: skip

    def _open_native(self, session: TargetSession) -> HeadExecutor:
        if not isinstance(session, DraftContextHost):
            raise CapabilityError(
                "this target's backend opens no draft contexts", who="strategy 'mtp'",
                fix="use a target of power-llamacpp, or an attached head with power-torch", plugin="mtp",
            )  # fmt: skip
        return NativeHead(session.open_draft_context(self._artifact.path if self._artifact is not None else None))

    def _open_torch(self, model: TargetModel, session: TargetSession) -> HeadExecutor:
        if self._artifact is None or not isinstance(model, SharedWeights):
            raise CapabilityError(
                "this target's backend shares no embedding, which an attached head reads", who="strategy 'mtp'",
                fix="use a target of power-llamacpp or power-torch", plugin="mtp",
            )  # fmt: skip
        try:
            from power_mtp.torch_head import open_torch_head
        except ImportError as exc:
            raise CapabilityError(
                "an attached MTP head is computed by power-torch, which cannot be imported", who="strategy 'mtp'",
                got=str(exc), fix="pip install power-torch", plugin="mtp",
            ) from exc  # fmt: skip
        return open_torch_head(self._artifact.file, model, session, self._config)
