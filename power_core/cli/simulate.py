"""``power simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from power_core.cli.options import file_path, json_option
from power_core.cli.output import print_json, print_table, shown
from power_core.errors import ConfigError

if TYPE_CHECKING:
    from power_core.scheduler.simulate import Comparison

__all__ = ["simulate"]


@click.command()
@click.argument("traces", metavar="TRACE...", type=file_path(), nargs=-1, required=True)
@click.option(
    "--cost-curve",
    metavar="FILE",
    type=file_path(),
    required=True,
    help="What a step of n rows costs.",
)
@click.option("--rollback", type=click.IntRange(min=0), metavar="S", help="Resident rollback rows of the target.")
@json_option
def simulate(traces: tuple[Path, ...], cost_curve: Path, rollback: int | None, as_json: bool) -> None:
    """
    Replay recorded acceptance against another machine's costs.

    A TRACE is what a `RecordingPolicy` wrote: docs/policies.md shows how, and the form of both files.

    Prints each width policy's speed over plain decoding, one row a workload, and the oracle: the best
    length of every round in hindsight.
    """
    from power_core.scheduler.simulate import compare, read_curve
    from power_core.scheduler.traces import Trace, read_traces

    curve = read_curve(cost_curve)
    workloads: dict[str, list[Trace]] = {}
    for file in traces:
        for trace in read_traces(file):
            if trace.points:
                workloads.setdefault(f"{trace.workload or file.stem} ({trace.strategy})", []).append(trace)
            else:
                _note(f"a trace of {trace.strategy} in {file} has no rounds and is left out")
    if not workloads:
        raise ConfigError("no trace has a round", who="simulate", fix="record one while tokens are decoded")
    for strategy in dict.fromkeys(group[0].strategy for group in workloads.values()):
        if curve.drafts and strategy not in curve.drafts:
            _note(f"the cost curve has no draft costs of {strategy}, only of {', '.join(curve.drafts)}: taken as 0")
    results = [compare(name, group, curve, rollback=rollback) for name, group in workloads.items()]
    if as_json:
        print_json({"curve": curve.to_json(), "workloads": [_document(result) for result in results]})
    else:
        _print(results)


def _note(text: str) -> None:
    click.echo(shown(f"power: {text}"), err=True)


def _document(result: Comparison) -> dict[str, object]:
    length, speed = result.best_fixed
    return {
        "workload": result.workload,
        "tokens": result.tokens,
        "speeds": {name: round(value, 4) for name, value in result.speeds.items()},
        "best_fixed": {"length": length, "speed": round(speed, 4)},
        "oracle": round(result.oracle, 4),
    }


def _print(results: list[Comparison]) -> None:
    """A row a workload, a column a policy; where lengths differ between workloads, a dash."""
    names = list(dict.fromkeys(name for result in results for name in result.speeds))
    rows = [("WORKLOAD", "TOKENS", *(name.upper() for name in names), "ORACLE")]
    for result in results:
        speeds = (f"{result.speeds[name]:.2f}" if name in result.speeds else "-" for name in names)
        rows.append((result.workload, str(result.tokens), *speeds, f"{result.oracle:.2f}"))
    print_table(rows)
    click.echo(
        "Speeds over plain decoding. The oracle knows the text; no policy can reach it where acceptance is chance."
    )
