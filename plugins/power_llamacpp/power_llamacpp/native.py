"""
Loading libllama: environment first, then the library, then its log.

Everything here happens once a process. Only this module imports `llama_cpp`; other modules ask
`library()` for it, so that importing them costs nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import MutableMapping
from functools import cache
from types import ModuleType
from typing import Any

import structlog

from power_core.errors import BackendError

__all__ = ["LogBridge", "find_symbol", "library", "log_bridge", "set_wait_policy"]

# What makes OpenMP workers sleep instead of spinning at a barrier. A spinning worker starves the one
# that the scheduler has not given a core: on a shared machine a step then takes twenty times as long.
# libgomp (GCC) reads the first; libomp (clang) reads both.
WAIT_POLICY = {"OMP_WAIT_POLICY": "PASSIVE"}
_OVERRIDES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")

# ggml_log_level -> name of the structlog method
_LEVELS = {1: "debug", 2: "info", 3: "warning", 4: "error"}
_CONTINUES = 5
_ON_PURPOSE = ("using full-size SWA cache",)  # warnings about what this plugin asks for
_SEVERITY = {"debug": 0, "info": 1, "warning": 2, "error": 3}


def set_wait_policy(environ: MutableMapping[str, str]) -> None:
    """Ask for sleeping OpenMP workers, unless *environ* says anything about it already."""
    if not any(name in environ for name in _OVERRIDES):
        environ.update(WAIT_POLICY)


class LogBridge:
    """
    Receives llama.cpp's log and passes whole lines to structlog.

    Args:
        threshold: Least severe level passed on: `debug`, `info`, `warning` or `error`.

    Attributes:
        recent: The last lines of level warning or error, whatever the threshold, for error messages.
    """

    def __init__(self, threshold: str = "warning") -> None:
        self.threshold = threshold
        self.recent: deque[str] = deque(maxlen=8)
        self._logger = structlog.get_logger("llama.cpp")
        self._level = "info"
        self._partial = ""

    def write(self, level: int, text: bytes) -> None:
        """One call of llama.cpp's log callback: part of a line, a line or several."""
        if level != _CONTINUES:
            self._level = _LEVELS.get(level, "info")
        *lines, self._partial = (self._partial + text.decode("utf-8", "replace")).split("\n")
        for line in lines:
            if line.strip(". \r\t"):  # dots are the progress bar
                self._emit(line.rstrip())

    def _emit(self, line: str) -> None:
        if self._level in ("warning", "error"):
            self.recent.append(line)
        if any(phrase in line for phrase in _ON_PURPOSE):
            return
        if _SEVERITY[self._level] >= _SEVERITY[self.threshold]:
            getattr(self._logger, self._level)(line)

    def last_complaint(self) -> str:
        """The most recent warning or error line, or an empty string; forgets what it has seen."""
        line = self.recent[-1] if self.recent else ""
        self.recent.clear()
        return line


@cache
def log_bridge() -> LogBridge:
    """The process's bridge; llama.cpp has one log callback a process."""
    return LogBridge()


@cache
def library() -> ModuleType:
    """
    The low-level binding with libllama loaded and initialised.

    Raises:
        BackendError: The binding or its shared library cannot be loaded.
    """
    set_wait_policy(os.environ)
    try:
        from llama_cpp import llama_cpp as lib
    except Exception as exc:
        raise BackendError(
            f"llama.cpp's library cannot be loaded: {exc}",
            plugin="llamacpp",
            fix="reinstall llama-cpp-python for this machine; `power doctor` says how",
        ) from exc
    bridge = log_bridge()
    callback = lib.llama_log_callback(lambda level, text, _user: bridge.write(level, text or b""))
    lib.llama_log_set(callback, ctypes.c_void_p(0))
    _keep_alive.append(callback)
    lib.llama_backend_init()
    return lib  # type: ignore[no-any-return]  # the binding ships no types


_keep_alive: list[Any] = []  # llama.cpp holds a raw pointer to the callback until the process ends


def find_symbol(name: str, restype: Any, argtypes: list[Any]) -> Any:
    """
    A function exported by libllama that the binding does not declare.

    Raises:
        BackendError: This build of libllama does not export *name*.
    """
    shared = library()._lib  # noqa: SLF001 - the only handle the binding keeps on its shared library
    try:
        function = getattr(shared, name)
    except AttributeError:
        raise BackendError(
            f"libllama does not export {name!r}",
            plugin="llamacpp",
            got=name,
            fix="install the llama-cpp-python version this plugin names",
        ) from None
    function.restype, function.argtypes = restype, argtypes
    return function
