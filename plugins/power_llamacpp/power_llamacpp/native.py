"""
Loading libllama: environment first, then the library, then its log.

Everything here happens once a process. Only this module imports `llama_cpp`; other modules ask
`library()` for it, so that importing them costs nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import structlog

from power_core.errors import BackendError

__all__ = ["LogBridge", "interrupts_deferred", "library", "log_bridge", "set_wait_policy"]

# How long an OpenMP worker spins at a barrier before it sleeps. A forward has hundreds of barriers: one that spins
# for long starves the worker that has no core on a shared machine, one that sleeps at once pays for waking up each
# time. Measured for one row, 2 threads on 2 cores, quiet / beside two busy processes: libgomp 27 / 16 ms passive and
# 9 / 17 ms with 1,000 spins; libomp 49 / 86 ms without spinning and 9 / 19 ms with 1 ms of it. libgomp (GCC) obeys
# the first, libomp (clang) the second.
WAIT_POLICY = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
_OVERRIDES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")

# ggml_log_level -> name of the structlog method
_LEVELS = {1: "debug", 2: "info", 3: "warning", 4: "error"}
_CONTINUES = 5
_KEPT_LINES = 8
# Warnings about what is as it should be: what this plugin asks for, drafters, which need no tokenizer, and adapters,
# which are never repacked.
_ON_PURPOSE = ("using full-size SWA cache", "dummy tokens", "cannot use buft")
_SEVERITY = {"debug": 0, "info": 1, "warning": 2, "error": 3}


def set_wait_policy(environ: MutableMapping[str, str]) -> None:
    """Ask OpenMP workers to spin for a short while only, unless *environ* says anything about it already."""
    if not any(name in environ for name in _OVERRIDES):
        environ.update(WAIT_POLICY)


class LogBridge:
    """
    Receives llama.cpp's log and passes whole lines to structlog.

    Args:
        threshold: Least severe level passed on: `debug`, `info`, `warning` or `error`.

    Attributes:
        recent: Level and text of the first warnings and errors since `forget`, whatever the threshold.
    """

    def __init__(self, threshold: str = "warning") -> None:
        self.threshold = threshold
        self.recent: list[tuple[str, str]] = []
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
        if any(phrase in line for phrase in _ON_PURPOSE):
            return
        if self._level in ("warning", "error") and len(self.recent) < _KEPT_LINES:
            self.recent.append((self._level, line))
        if _SEVERITY[self._level] >= _SEVERITY[self.threshold]:
            getattr(self._logger, self._level)(line)

    def forget(self) -> None:
        """Drop what was kept for error messages; called before a native call whose failure would quote it."""
        self.recent.clear()

    def reason(self) -> str:
        """The first error since `forget`, else the first warning, after a colon; empty where there was none."""
        line = next((line for level, line in self.recent if level == "error"), self.recent[0][1] if self.recent else "")
        return f": {line}" if line else ""


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


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """
    Let Ctrl-C take effect when the block is left.

    For native calls that log much: an exception that a signal raises in the log callback cannot pass through C, so
    ctypes would print and drop it.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield  # signals are the main thread's; without a handler nothing is raised
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if received:
            previous(received[0], None)


_keep_alive: list[Any] = []  # llama.cpp holds a raw pointer to the callback until the process ends
