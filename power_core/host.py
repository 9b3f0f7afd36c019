"""
The host profile: cores, priority and threads a process decodes with. Set only where asked for, always recorded.

The numbers say how fast a run could be, so receipts carry them.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from power_core.errors import ConfigError

__all__ = ["apply_host", "host_facts", "parse_cores", "processor", "usable_cores"]

_WAIT_POLICIES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "OMP_PROC_BIND", "KMP_BLOCKTIME", "GOMP_SPINCOUNT")
_DIGITS = 4  # of a core's number: no system has ten thousand


def parse_cores(text: str) -> frozenset[int]:
    """
    The cores that *text* names.

    Raises:
        ConfigError: It is no list of numbers and ranges.

    >>> sorted(parse_cores("0-2,5"))
    [0, 1, 2, 5]
    """
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        are_numbers = all(each.isdecimal() and len(each) <= _DIGITS for each in (first, last))
        if not are_numbers or int(first) > int(last):
            raise ConfigError(f"affinity is {text!r:.80}", who="config", got=text, expected="cores as in 0-3,6")
        cores.update(range(int(first), int(last) + 1))
    return frozenset(cores)


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """Model and flags of the processor, which decide kernels; where the system does not tell, the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    return " ".join(facts[name] for name in ("model name", "model", "stepping", "flags") if name in facts)


def apply_host(affinity: str | None, priority: int | None) -> None:
    """
    Set what is given, for this process and the threads it starts from now on.

    Raises:
        ConfigError: The system cannot, or does not let this user.
    """
    if affinity is not None:
        if not hasattr(os, "sched_setaffinity"):
            raise ConfigError("affinity cannot be set on this system", who="config", fix="leave affinity out")
        expected = f"cores of this machine, 0 to {(os.cpu_count() or 1) - 1}"
        _attempt("affinity", affinity, lambda: os.sched_setaffinity(0, parse_cores(affinity)), expected)
    if priority is not None:
        if not hasattr(os, "setpriority"):
            raise ConfigError("priority cannot be set on this system", who="config", fix="leave priority out")
        expected = f"{os.getpriority(os.PRIO_PROCESS, 0)} to 19, or a user who may ask for more"
        _attempt("priority", priority, lambda: os.setpriority(os.PRIO_PROCESS, 0, priority), expected)


def host_facts(threads: int | None) -> dict[str, Any]:
    """
    What the process runs with now.

    Args:
        threads: Compute threads that were asked for; None left them to the backend.
    """
    facts: dict[str, Any] = {"threads": threads, "usable_cores": usable_cores(), "cores": os.cpu_count()}
    if hasattr(os, "sched_getaffinity"):
        facts["affinity"] = sorted(os.sched_getaffinity(0))
    if hasattr(os, "getpriority"):
        facts["priority"] = os.getpriority(os.PRIO_PROCESS, 0)
    facts["environment"] = {name: os.environ[name] for name in _WAIT_POLICIES if name in os.environ}
    return facts


def _attempt(key: str, value: object, action: Callable[[], object], expected: str) -> None:
    try:
        action()
    except OSError as exc:
        raise ConfigError(
            f"{key} {value} cannot be set: {exc.strerror}", who="config", got=value, expected=expected
        ) from exc
