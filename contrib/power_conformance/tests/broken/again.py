"""Broken targets by name for a second process: ``broken.again:T_SHAPE_01`` makes the one that breaks T-SHAPE-01."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from broken import states
from broken.targets import BROKEN
from power_core.testing import ScriptedTarget

assert states  # registers its targets


def __getattr__(name: str) -> Callable[[Path], ScriptedTarget]:
    make = BROKEN[name.replace("_", "-")]
    return lambda _folder: make(3)
