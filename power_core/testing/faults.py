"""Failure at a chosen call, and the error the scripted parts raise where a protocol is broken."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from attrs import frozen

from power_core.errors import BackendError

__all__ = ["Call", "Faults", "ProtocolViolation", "Strict", "guarded"]

P = ParamSpec("P")
R = TypeVar("R")


class ProtocolViolation(AssertionError):
    """A caller broke one of the protocols: the bug is in the engine, not in the scripted part."""


@frozen
class Call:
    """
    One call of a scripted part, as a fault hook sees it.

    Args:
        name: The method: `forward`, `propose`, `rows.greedy`, `token_bytes`, ...
        number: 1-based count of calls of that method.
        done: Whether the method's work is done.
    """

    name: str
    number: int
    done: bool


class Faults:
    """
    Raises at chosen calls of the part it is given to.

    Args:
        at: Method name -> number of the call that fails, counted from 1.
        after: Fail at the end of the method rather than before it. A failed `open`, `forward`, `begin`, `propose` or
            `checkpoint` has no effect even then; every other method has had its effect.
        error: Makes the exception; the default is a `BackendError`.
        hook: Called at the start and the end of every call; may raise, cancel a request, or count.

    Attributes:
        calls: How often each method was called.
        fired: The calls that failed because of `at`.

    >>> faults = Faults({"forward": 2})
    >>> faults.enter("forward"); faults.leave("forward"); faults.enter("forward")
    Traceback (most recent call last):
    power_core.errors.BackendError: scripted fault: forward: call 2 was told to fail
    >>> faults.fired
    [Call(name='forward', number=2, done=False)]
    """

    def __init__(
        self,
        at: Mapping[str, int] | None = None,
        *,
        after: bool = False,
        error: Callable[[Call], BaseException] | None = None,
        hook: Callable[[Call], None] | None = None,
    ) -> None:
        self.at = dict(at or {})
        self.after = after
        self.error = error or _default_error
        self.hook = hook
        self.calls: Counter[str] = Counter()
        self.fired: list[Call] = []

    def enter(self, name: str) -> None:
        """Count a call of *name* and fail it if it was chosen."""
        self.calls[name] += 1
        self._check(name, done=False)

    def leave(self, name: str) -> None:
        """The same at the end of the current call of *name*."""
        self._check(name, done=True)

    def _check(self, name: str, *, done: bool) -> None:
        number = self.calls[name]
        if self.hook is not None:
            self.hook(Call(name, number, done))
        if done is self.after and self.at.get(name) == number:
            call = Call(name, number, done)
            self.fired.append(call)
            raise self.error(call)


def _default_error(call: Call) -> BaseException:
    return BackendError(f"call {call.number} was told to fail", who="scripted fault", where=call.name)


class Strict:
    """
    Base of the scripted sessions: every broken rule is raised and kept.

    An engine has to contain what a plugin raises, so a raised violation alone could be swallowed:
    `assert_clean` raises again.

    Args:
        faults: Where to fail on purpose.
    """

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.violations: list[str] = []
        self._busy = threading.Lock()

    def require(self, condition: bool, message: str) -> None:
        """Raise and record `ProtocolViolation` unless *condition*."""
        if not condition:
            self.violations.append(message)
            raise ProtocolViolation(message)

    @contextmanager
    def exclusive(self, name: str) -> Iterator[None]:
        """Count a call of *name*, fail it where it was told to, and refuse a second caller meanwhile."""
        self.require(self._busy.acquire(blocking=False), f"{name} was called while another call was running")
        try:
            self.faults.enter(name)
            yield
        finally:
            self._busy.release()

    def assert_clean(self) -> None:
        """Raise `ProtocolViolation` with every violation so far, if there was one."""
        if self.violations:
            raise ProtocolViolation("; ".join(self.violations))


def guarded(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method of a `Strict` class run under `Strict.exclusive`."""
    name = method.__name__

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]
        with owner.exclusive(name):
            result = method(*args, **kwargs)
            owner.faults.leave(name)
            return result

    return call
