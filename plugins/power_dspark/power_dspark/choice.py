"""Which executor evaluates a drafter: what was asked for, else what target, file and installation allow."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NoReturn

from power_core.artifacts import TensorFile
from power_core.draft_context import DraftContextHost
from power_core.errors import CapabilityError
from power_core.target import TargetModel, TargetSession
from power_core.types import Capability
from power_dspark.config import DsparkConfig
from power_dspark.executor import Executor
from power_dspark.header import Header

__all__ = ["open_executor"]


def open_executor(
    config: DsparkConfig, file: TensorFile, header: Header, model: TargetModel, session: TargetSession
) -> Executor:
    """
    The executor for *file* beside *session*.

    Raises:
        CapabilityError: Neither executor is possible, or not the one that was asked for; says what would make it so.
    """
    is_gguf = file.format == "gguf"
    can_host = Capability.DRAFT_CONTEXT in session.capabilities and isinstance(session, DraftContextHost)
    if config.executor == "native" or (config.executor == "auto" and is_gguf and can_host):
        if not is_gguf:
            _refuse(f"{file.path.name} is a {file.format} file", "a GGUF", "convert it with `power convert-drafter`")
        if not can_host or not isinstance(session, DraftContextHost):
            _refuse("this target cannot evaluate drafters", "a target with draft-context", "set executor to torch")
        from power_dspark.native import NativeExecutor

        return NativeExecutor(session.open_draft_context(file.path), file, header)
    if find_spec("power_torch") is None:
        why = "this target cannot evaluate drafters" if is_gguf else f"{file.path.name} is a {file.format} file"
        _refuse(f"{why} and power-torch is not installed", "an executor", "pip install power-torch, or give a GGUF")
    from power_dspark.torch_executor import TorchExecutor

    return TorchExecutor(config, file, header, model, session)


def _refuse(what: str, expected: str, fix: str) -> NoReturn:
    raise CapabilityError(what, who="strategy 'dspark'", expected=expected, fix=fix, plugin="dspark")
