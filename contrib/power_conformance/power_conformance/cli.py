"""``power conformance``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from power_core.cli.options import json_option
from power_core.cli.output import print_json, print_table

if TYPE_CHECKING:
    from power_conformance.registry import Rule
    from power_conformance.report import PluginReport

__all__ = ["conformance"]


@click.command()
@click.argument("plugins", nargs=-1, metavar="[PLUGIN ...]")
@click.option("--rule", "rules", multiple=True, metavar="ID", help="Run this rule only; may be repeated.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of the texts.")
@click.option("--reasons", is_flag=True, help="Say why rules are not applicable.")
@click.option(
    "--durations", type=click.IntRange(min=0), default=0, metavar="N", help="Show the N rules that took longest."
)
@json_option
@click.pass_context
def conformance(
    ctx: click.Context,
    plugins: tuple[str, ...],
    rules: tuple[str, ...],
    seed: int,
    reasons: bool,
    durations: int,
    as_json: bool,
) -> None:
    """
    Check that installed plugins keep their promises; all of them, or those named.

    A plugin is checked as a package, with each zero-weight strategy on a scripted target, and with the
    fixtures it offers. Exits with 1 where a rule is broken. `power receipt verify` checks what --json prints.
    --durations counts seconds of processor time, which other programs on the machine do not change.
    """
    from power_conformance.registry import find_rule
    from power_conformance.report import document
    from power_conformance.runner import check_plugin, installed

    _silence_logs()
    selected = [find_rule(rule).id for rule in rules]
    progress = _progress if sys.stderr.isatty() else None
    reports = [check_plugin(point, rules=selected, seed=seed, progress=progress) for point in installed(plugins)]
    if progress is not None:
        click.echo("\r\x1b[K", nl=False, err=True)
    if as_json:
        print_json(document(reports, seed=seed, selected=selected))
    else:
        _print(reports, reasons=reasons, durations=durations)
    ctx.exit(1 if any(report.has_failed for report in reports) else 0)


def _progress(subject: str, rule: Rule) -> None:
    click.echo(f"\r\x1b[K{subject}: {rule.id}", nl=False, err=True)


def _silence_logs() -> None:
    """The engine logs every request that fails; here failing is what some rules are about."""
    import logging

    import structlog

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _print(reports: Sequence[PluginReport], *, reasons: bool, durations: int) -> None:
    from power_conformance.report import slowest, table

    print_table(table(reports))
    if durations:
        click.echo()
        print_table(slowest(reports, durations))
    for report in reports:
        for subject in report.subjects:
            for outcome in subject.outcomes:
                if outcome.failure is not None:
                    click.echo(f"\n{report.name}, {subject.name}: {outcome.failure}")
                elif outcome.reason is not None and reasons:
                    click.echo(f"{report.name}, {subject.name}: {outcome.rule.id} not applicable: {outcome.reason}")
