"""
Checks that a plugin keeps the promises of Power's protocols.

Subclass a suite and give it one fixture, or run ``power conformance``::

    class TestMine(DrafterConformance):
        @pytest.fixture
        def drafter(self):
            return MineDrafter(MineConfig())

The suites need pytest and are imported when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from power_conformance.failures import ConformanceFailure, NotApplicable
from power_conformance.registry import Kind, Rule, all_rules, find_rule, rules_of

if TYPE_CHECKING:
    from power_conformance.suites import (
        ArtifactContractConformance,
        DrafterConformance,
        PluginConformance,
        TargetConformance,
    )

__all__ = [
    "ArtifactContractConformance",
    "ConformanceFailure",
    "DrafterConformance",
    "Kind",
    "NotApplicable",
    "PluginConformance",
    "Rule",
    "TargetConformance",
    "all_rules",
    "find_rule",
    "rules_of",
]


def __getattr__(name: str) -> Any:
    if name.endswith("Conformance") and name in __all__:
        from power_conformance import suites  # pytest, and through the rules numpy

        return getattr(suites, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
