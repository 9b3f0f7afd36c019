"""The body of a conformance report: which promises a plugin was found to keep, by whatever kit ran them."""

from __future__ import annotations

from attrs import frozen

from power_core.types import JSON

__all__ = ["CONFORMANCE_SCHEMA", "ConformanceBody", "FailureRecord", "PluginRecord", "RuleRecord", "SubjectRecord"]

CONFORMANCE_SCHEMA = "power.conformance/1"


@frozen
class FailureRecord:
    """A broken rule: what the plugin did, what was expected, and where the promise is written down."""

    did: str
    expected: str
    look: str


@frozen
class RuleRecord:
    """
    One rule on one subject.

    Args:
        outcome: ``passed``, ``failed`` or ``not applicable``.
        reason: Why the rule does not concern the subject, else None.
        failure: What was found, else None.
    """

    id: str
    outcome: str
    reason: str | None
    failure: FailureRecord | None


@frozen
class SubjectRecord:
    """What was checked, ``strategy suffix`` for example, and every rule that was run on it."""

    name: str
    rules: list[RuleRecord]


@frozen
class PluginRecord:
    """A plugin by its entry point, distribution and version."""

    name: str
    distribution: str
    version: str
    subjects: list[SubjectRecord]


@frozen
class ConformanceBody:
    """
    Everything a conformance report says.

    Args:
        kit: Distribution and version that checked.
        seed: Of the texts, in decimal: JSON numbers end at 2**53.
        selected: Ids of the rules that were asked for; empty where all were.
        environment: Interpreter, machine and package versions.
    """

    kit: str
    seed: str
    selected: list[str]
    plugins: list[PluginRecord]
    environment: dict[str, JSON]

    @property
    def summary(self) -> str:
        """One line for a reader."""
        outcomes = [rule.outcome for plugin in self.plugins for subject in plugin.subjects for rule in subject.rules]
        names = ", ".join(f"{plugin.distribution} {plugin.version}" for plugin in self.plugins)
        counts = ", ".join(f"{outcomes.count(word)} {word}" for word in ("passed", "failed", "not applicable"))
        return f"conformance of {names}: {counts}"
