"""Where a receipt was made: collected once a process."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from power_core.types import JSON

__all__ = ["process_environment", "source_revision"]

# Besides Power's own distributions: what decides numbers and masks.
_LIBRARIES = frozenset({"llama-cpp-python", "llguidance", "numpy", "torch"})


@cache
def process_environment() -> dict[str, JSON]:
    """Interpreter, machine and versions of the packages that can change a result. Do not write to it."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": _processor(),
        "cpu_count": os.cpu_count(),
        "packages": _packages(),
    }


@cache
def source_revision() -> str:
    """``git describe`` where the package runs from a checkout, else distribution and version."""
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--tags", "--long"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            pass  # no git, or a checkout it will not read: the version below is still true
        else:
            return done.stdout.strip()
    try:
        return f"power-core {version('power-core')}"
    except PackageNotFoundError:
        return "power-core, not installed"


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in _LIBRARIES or name.startswith("power-"):
            found.setdefault(name, distribution.version)  # the first on the path is the one that is imported
    return dict(sorted(found.items()))


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or "unknown"
