"""Outcomes of a conformance run, as a table and as a document that ``power receipt verify`` checks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from attrs import frozen

from power_conformance.failures import ConformanceFailure
from power_conformance.registry import Rule
from power_core.evidence.canonical import digest
from power_core.evidence.conformance import (
    CONFORMANCE_SCHEMA,
    ConformanceBody,
    FailureRecord,
    PluginRecord,
    RuleRecord,
    SubjectRecord,
)
from power_core.evidence.environment import process_environment
from power_core.evidence.schema import converter
from power_core.types import JSON

__all__ = ["Outcome", "PluginReport", "SubjectReport", "document", "slowest", "table"]


@frozen
class Outcome:
    """
    A rule, and how it ended: kept, broken, or not applicable for a reason.

    Args:
        rule: The rule.
        failure: Where it is broken.
        reason: Why it is not applicable.
        seconds: Of processor time, models and child processes included. No part of the document: two runs are to agree.
    """

    rule: Rule
    failure: ConformanceFailure | None = None
    reason: str | None = None
    seconds: float = 0.0

    @property
    def word(self) -> str:
        if self.failure is not None:
            return "failed"
        return "passed" if self.reason is None else "not applicable"


@frozen
class SubjectReport:
    """All outcomes of one subject: ``plugin``, ``strategy suffix``, ``target tiny-llama``."""

    name: str
    outcomes: tuple[Outcome, ...]

    def count(self, word: str) -> int:
        """Outcomes of that word."""
        return sum(outcome.word == word for outcome in self.outcomes)


@frozen
class PluginReport:
    """All subjects of one plugin."""

    name: str
    distribution: str
    version: str
    subjects: tuple[SubjectReport, ...]

    @property
    def has_failed(self) -> bool:
        return any(subject.count("failed") for subject in self.subjects)


def table(reports: Sequence[PluginReport]) -> list[tuple[str, ...]]:
    """Rows of text: a head, and one row a subject."""
    rows: list[tuple[str, ...]] = [("PLUGIN", "SUBJECT", "PASSED", "FAILED", "N/A")]
    for report in reports:
        for subject in report.subjects:
            counts = (str(subject.count(word)) for word in ("passed", "failed", "not applicable"))
            rows.append((f"{report.name} {report.version}", subject.name, *counts))
    return rows


def slowest(reports: Sequence[PluginReport], count: int) -> list[tuple[str, ...]]:
    """Rows of text: a head, the *count* checks that took most processor time, and the sum over all checks."""
    checks = [(each.seconds, f"{report.name} {report.version}", subject.name, each.rule.id)
              for report in reports for subject in report.subjects for each in subject.outcomes]  # fmt: skip
    found = sorted(checks, key=lambda check: -check[0])[:count]
    rows = [(plugin, subject, rule, f"{seconds:.2f}") for seconds, plugin, subject, rule in found]
    total = sum(seconds for seconds, *_ in checks)
    return [("PLUGIN", "SUBJECT", "RULE", "SECONDS"), *rows, ("all", "", str(len(checks)), f"{total:.2f}")]


def document(reports: Sequence[PluginReport], *, seed: int, selected: Sequence[str]) -> JSON:
    """
    The run as a document bound by its digest.

    Args:
        reports: What was found.
        seed: Of the texts.
        selected: Ids of the rules that were asked for; empty where all were.
    """
    body = ConformanceBody(
        kit=f"power-conformance {version('power-conformance')}",
        seed=str(seed),
        selected=list(selected),
        plugins=[_plugin_record(report) for report in reports],
        environment=process_environment(),
    )
    content = {"schema": CONFORMANCE_SCHEMA, "body": converter.unstructure(body)}
    return {**content, "digest": digest(content)}


def _plugin_record(report: PluginReport) -> PluginRecord:
    subjects = [
        SubjectRecord(subject.name, [_rule_record(outcome) for outcome in subject.outcomes])
        for subject in report.subjects
    ]
    return PluginRecord(report.name, report.distribution, report.version, subjects)


def _rule_record(outcome: Outcome) -> RuleRecord:
    failure = outcome.failure
    record = None if failure is None else FailureRecord(failure.did, failure.expected, failure.look)
    return RuleRecord(outcome.rule.id, outcome.word, outcome.reason, record)
