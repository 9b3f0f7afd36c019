"""``power doctor``: what was measured here, and what would help. It reports failures, it does not fail."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click
from attrs import Factory, define

from power_core import user_cache
from power_core.cli.options import json_option
from power_core.cli.output import print_json, print_table
from power_core.cli.progress import open_engine
from power_core.cli.state import State
from power_core.errors import PowerError

if TYPE_CHECKING:
    from power_core.shapes import WidthClass

__all__ = ["break_even", "doctor"]


@define
class Report:
    """What doctor found. A part that could not be found out is None, and its reason is among the problems."""

    environment: dict[str, Any] = Factory(dict)
    plugins: list[str] = Factory(list)
    problems: list[str] = Factory(list)
    model: dict[str, Any] | None = None
    exactness: dict[str, Any] | None = None
    serving: dict[str, Any] | None = None
    host: dict[str, Any] | None = None
    advice: list[str] = Factory(list)

    def document(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if not name.startswith("__")}


@click.command()
@click.option("--model", metavar="NAME|PATH", help="Model name or file.")
@click.option("--backend", metavar="NAME", help="Target backend to load the model with: see `power plugins`.")
@click.option("--threads", type=int, metavar="N", help="Compute threads.")
@click.option("--reprobe", is_flag=True, help="Measure width classes again, and keep the new ones.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, /, reprobe: bool, as_json: bool, **flags: Any) -> None:
    """
    Say what this machine, build and model can do, and what would help.

    Exits with 1 where the model could not be opened.
    """
    report = Report()
    state = ctx.ensure_object(State)
    _look_around(report, state)
    try:
        with user_cache.found_again(user_cache.PROBES) if reprobe else nullcontext():
            _look_at_model(report, state, flags)
    except PowerError as exc:
        report.problems.append(str(exc))
    except Exception as exc:  # noqa: BLE001 - whatever a backend raises is a finding here
        report.problems.append(f"opening the model: {type(exc).__name__}: {exc}")
    if as_json:
        from power_core.evidence.canonical import plain

        print_json(plain(report.document()))
    else:
        _print(report)
    ctx.exit(0 if report.model is not None else 1)


def break_even(width: int, cost: float | None) -> float | None:
    """
    The share of proposed tokens that must be accepted for a step of *width* rows to pay.

    A step of n rows costs c(n) plain tokens and emits 1 + a(n-1): it pays where a > (c(n) - 1)/(n - 1).

    >>> break_even(8, 3.8)
    0.4
    """
    return None if width < 2 or cost is None else round((cost - 1) / (width - 1), 4)


def _look_around(report: Report, state: State) -> None:
    from power_core.evidence.environment import process_environment, source_revision

    report.environment = {**process_environment(), "source": source_revision()}
    found = state.plugins
    report.plugins = [f"{item.name} ({item.distribution} {item.version})" for item in found.loaded]
    for failure in found.failures:
        report.problems.append(f"plugin {failure.name!r} failed to load: {failure.cause}")
    for name in found.blocked:
        report.problems.append(f"plugin {name!r} is blocked by POWER_BLOCK_PLUGINS")
    for name in found.blocked_in_vain:
        report.problems.append(f"POWER_BLOCK_PLUGINS names {name!r}, and no installed plugin has that name")


def _look_at_model(report: Report, state: State, flags: Mapping[str, Any]) -> None:
    from power_core.capabilities import AUTO

    with state.runtime(flags) as runtime, open_engine(runtime, AUTO) as engine:
        profile = engine.profile
        facts, evidence = dict(engine.model.facts()), dict(profile.evidence)
        advice = [*facts.pop("advice", ()), *evidence.pop("advice", ())]  # the backend knows its builds, we do not
        report.model = {"name": engine.name, "sha256": engine.model.identity.file_sha256, **facts}
        report.exactness = {
            "level": profile.level.value,
            "mixable": profile.mixable,
            "auto": engine.strategy,
            "width_policy": runtime.config.width_policy,
            "decode": _class_document(profile.decode),
            "prefill": _class_document(profile.prefill),
            "evidence": evidence,
        }
        stats = engine.stats().to_json()
        report.serving = {name: stats[name] for name in ("strategy", "policy", "queue", "cache", "replicas")}
        report.host = engine.host
        report.advice = [*advice, *_general_advice(report)]


def _class_document(width_class: WidthClass) -> dict[str, Any]:
    return {
        "identity": width_class.identity.digest,
        "widths": list(width_class.widths),
        "costs": list(width_class.costs),
        "break_even": [break_even(n, width_class.cost(n)) for n in width_class.widths],
    }


def _general_advice(report: Report) -> list[str]:
    exactness = report.exactness or {}
    advice = []
    if exactness["level"] == "padded":
        advice.append(
            "single rows are padded to stay exact, which costs speed; docs/exactness.md names builds that need not"
        )
    if exactness["level"] == "unverified":
        advice.append("nothing can be promised on this target: speculation stays off unless allow_unverified is set")
    if report.serving is not None and report.serving["cache"] is None:
        advice.append("prompts cannot be kept here: requests with a prompt_cache_key are refused")
    if exactness["auto"] == "off":
        advice.append("no zero-weight strategy is installed: pip install power-ngram")
    rates = [rate for rate in exactness["decode"]["break_even"] if rate is not None]
    if rates and min(rates) >= 1:
        advice.append("no width pays even when every proposal is accepted: decode with --spec off on this build")
    return advice


def _print(report: Report) -> None:
    _section("environment", report.environment)
    click.echo("plugins: " + (", ".join(report.plugins) or "none"))
    if report.model is not None:
        _section("model", report.model)
    if report.host is not None:
        _section("host", report.host)
    if report.exactness is not None:
        _print_exactness(report.exactness)
    if report.serving is not None:
        _print_serving(report.serving)
    for title, lines in (("problem", report.problems), ("advice", report.advice)):
        for line in lines:
            click.echo(f"{title}: {line}")
    if not report.problems and not report.advice:
        click.echo("nothing to improve")


def _print_exactness(exactness: Mapping[str, Any]) -> None:
    click.echo(f"exactness: {exactness['level']}")
    click.echo(f"strategy of `auto`: {exactness['auto']}")
    click.echo(f"width policy: {exactness['width_policy']}")
    click.echo(f"prompt and generated rows in one pass: {'yes' if exactness['mixable'] else 'no'}")
    decode = exactness["decode"]
    rows = [("rows", "cost in plain tokens", "break-even acceptance")]
    for width, cost, rate in zip(decode["widths"], decode["costs"], decode["break_even"], strict=False):
        rows.append((str(width), f"{cost:.2f}", "-" if rate is None else f"{rate:.0%}"))
    if len(rows) == 1:
        click.echo("decode widths, costs not measured: " + ", ".join(map(str, decode["widths"])))
    else:
        print_table(rows)


def _print_serving(serving: Mapping[str, Any]) -> None:
    queue, cache, replicas = serving["queue"], serving["cache"], serving["replicas"]
    click.echo(f"queue: at most {queue['most_active']} active, {queue['most_waiting']} waiting")
    click.echo("prompt cache: " + (f"at most {cache['most_bytes']} bytes" if cache else "none"))
    click.echo("replicas: " + (f"at most {replicas['size']}" if replicas else "none, one session decodes together"))


def _section(title: str, facts: Mapping[str, Any]) -> None:
    click.echo(f"{title}:")
    for name, value in facts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        click.echo(f"  {name}: {value}")
