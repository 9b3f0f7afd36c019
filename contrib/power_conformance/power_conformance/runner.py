"""Running the rules on installed plugins."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import EntryPoint, entry_points

from power_conformance.failures import ConformanceFailure, NotApplicable
from power_conformance.registry import Rule, rules_of
from power_conformance.report import Outcome, PluginReport, SubjectReport
from power_conformance.subjects import PluginSubject
from power_conformance.trials import Stage, package, trials
from power_core.errors import PluginError
from power_core.hookspecs import ENTRY_POINT_GROUP

__all__ = ["check_plugin", "installed"]

Progress = Callable[[str, Rule], None]


def installed(names: Sequence[str]) -> list[EntryPoint]:
    """
    Entry points of the plugins of these names, of all installed ones where there is none.

    Raises:
        PluginError: One is not installed.
    """
    found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    for name in names:
        if name not in found:
            raise PluginError(
                f"no installed distribution has the entry point {name!r}", who="conformance", got=name,
                expected="one of " + ", ".join(sorted(found)), fix="pip install it first", plugin=name,
            )  # fmt: skip
    return [found[name] for name in (names or sorted(found))]


def check_plugin(
    point: EntryPoint, *, rules: Collection[str] = (), seed: int = 0, progress: Progress | None = None
) -> PluginReport:
    """
    Run every rule that concerns the plugin.

    Args:
        point: Its entry point.
        rules: Ids of the rules to run; empty for all.
        seed: Chooses the texts.
        progress: Told the subject and the rule before each check.
    """
    subject = PluginSubject(point)
    reports = []
    for trial in (package(subject), *trials(subject.registry(), seed)):
        wanted = [rule for rule in rules_of(trial.kind) if not rules or rule.id in rules]
        outcomes = []
        with Stage(trial) as stage:
            for rule in wanted:
                if progress is not None:
                    progress(trial.name, rule)
                outcomes.append(_outcome(stage, rule))
        if outcomes:
            reports.append(SubjectReport(trial.name, tuple(outcomes)))
    distribution, version = ("unknown", "unknown") if point.dist is None else (point.dist.name, point.dist.version)
    return PluginReport(point.name, distribution, version, tuple(reports))


def _outcome(stage: Stage, rule: Rule) -> Outcome:
    start = _processor_seconds()
    failure: ConformanceFailure | None = None
    reason: str | None = None
    try:
        stage.run(rule)
    except ConformanceFailure as exc:
        failure = exc
    except NotApplicable as exc:
        reason = str(exc)
    return Outcome(rule, failure, reason, _processor_seconds() - start)


def _processor_seconds() -> float:
    """Of this process and of those it started and waited for: what a busy machine does not change."""
    return sum(os.times()[:4])
