"""
Exact speculative decoding. The names below are the API; they load what they need when first used.

>>> import power_core
>>> power_core.SamplingSpec(temperature=0.8, seed=7).seed
7
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from power_core.config import PowerConfig, load_config
    from power_core.engine import Engine, Generation
    from power_core.errors import PowerError
    from power_core.request import Event, GenerationRequest, Result, SamplingSpec
    from power_core.runtime import Runtime
    from power_core.target import ChatMessage
    from power_core.types import FinishReason, Origin

__all__ = [
    "ChatMessage",
    "Engine",
    "Event",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "Origin",
    "PowerConfig",
    "PowerError",
    "Result",
    "Runtime",
    "SamplingSpec",
    "load_config",
]

_HOMES = {
    "power_core.config": ("PowerConfig", "load_config"),
    "power_core.errors": ("PowerError",),
    "power_core.request": ("Event", "GenerationRequest", "Result", "SamplingSpec"),
    "power_core.engine": ("Engine", "Generation"),
    "power_core.runtime": ("Runtime",),
    "power_core.target": ("ChatMessage",),
    "power_core.types": ("FinishReason", "Origin"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the module that holds *name*: ``power --help`` must not pay for numpy."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'power_core' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
