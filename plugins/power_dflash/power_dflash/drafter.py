"""The drafters behind the strategies `dflash` and `dflash2`."""

from __future__ import annotations

from importlib.util import find_spec

from power_core.artifacts import Artifact
from power_core.draft_context import DraftContextHost
from power_core.drafter import DrafterRequirements, DraftSession
from power_core.errors import CapabilityError
from power_core.target import TargetModel, TargetSession
from power_core.types import Capability
from power_dflash.config import DFlash2Config, DFlashConfig
from power_dflash.executor import Executor
from power_dflash.header import DFLASH2, read_header
from power_dflash.session import BlockSession
from power_dflash.tensors import draft_ids

__all__ = ["BlockDrafter"]


class BlockDrafter:
    """
    A drafter of one admitted file.

    Args:
        config: Of the strategy.
        artifact: The file, checked against its target.
    """

    def __init__(self, config: DFlashConfig | DFlash2Config, artifact: Artifact) -> None:
        self._config = config
        self._artifact = artifact
        self._kind = artifact.manifest.kind
        self._header = read_header(artifact.file, self._kind)

    def requirements(self) -> DrafterRequirements:
        """DFlash2 is asked for a whole block or for none: its convolutions and lattice were trained on one length."""
        needs = {Capability.HIDDEN_STATES}
        if self._config.executor == "native":
            needs.add(Capability.DRAFT_CONTEXT)
        return DrafterRequirements(
            capabilities=frozenset(needs),
            artifact_kind=self._kind,
            hidden_layers=self._header.target_blocks,
            fixed_shape=self._kind == DFLASH2,
        )

    def open(self, model: TargetModel, session: TargetSession) -> DraftSession:
        """See `Drafter.open`."""
        return BlockSession(self._config, self._header, self._executor(model, session), session.context_size)

    def _executor(self, model: TargetModel, session: TargetSession) -> Executor:
        choice, is_gguf = self._config.executor, self._artifact.file.format == "gguf"
        can_native = isinstance(session, DraftContextHost) and Capability.DRAFT_CONTEXT in session.capabilities
        if choice == "native" or (choice == "auto" and is_gguf and can_native):
            if not is_gguf:
                raise self._missing("a safetensors file cannot be drafted with natively", "convert it to GGUF")
            if not isinstance(session, DraftContextHost):
                raise self._missing("the target offers no draft context", "set executor = 'torch'")
            from power_dflash.native import NativeExecutor

            context = session.open_draft_context(self._artifact.path)
            return NativeExecutor(context, self._header, draft_ids(self._artifact.file, self._header))
        if find_spec("power_torch") is None:
            raise self._missing("neither a draft context nor torch is there to draft with", "pip install power-torch")
        from power_dflash.torch_executor import TorchExecutor

        return TorchExecutor(self._config, self._header, self._artifact.file, model, session)

    def _missing(self, what: str, fix: str) -> CapabilityError:
        return CapabilityError(
            what, who=f"strategy {self._config.strategy!r}", where=str(self._artifact.path),
            got=self._config.executor, fix=fix, plugin="dflash",
        )  # fmt: skip
