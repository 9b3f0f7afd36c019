"""``--trace``: each token in the colour of its origin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from power_core.types import Origin

if TYPE_CHECKING:
    from power_core.request import Event, Result

__all__ = ["legend", "summary", "write_event"]

COLOURS: dict[Origin, str | None] = {
    Origin.PLAIN: None,
    Origin.ACCEPTED: "green",
    Origin.CORRECTION: "yellow",
    Origin.BONUS: "cyan",
    Origin.END: None,
}


def write_event(event: Event, *, trace: bool) -> None:
    """Write the text an event releases. Text that was held back has the colour of the token that released it."""
    if event.text:
        text = click.style(event.text, fg=COLOURS[event.origin]) if trace else event.text
        # Without a trace the text goes out as it is; click would strip escapes where there is no terminal.
        click.echo(text, nl=False, color=None if trace else True)


def legend() -> str:
    """What the colours mean."""
    names = [click.style(origin.value, fg=colour) for origin, colour in COLOURS.items() if origin is not Origin.END]
    return "tokens: " + ", ".join(names)


def summary(result: Result) -> str:
    """One line: where the tokens came from and what they cost."""
    origins = [f"{result.origins.count(o)} {o.value}" for o in COLOURS if o in result.origins]
    counts, body = result.counts, result.receipt.get("body", {})
    parts = [f"{len(result.token_ids)} tokens ({', '.join(origins) or 'none'})", f"{counts.target_passes} passes"]
    if counts.drafted:
        rate = counts.accepted / counts.drafted
        parts.append(f"accepted {counts.accepted} of {counts.drafted} proposed ({rate:.0%})")
    speed = body.get("timings", {}).get("steady_tokens_per_s")
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if body:
        parts.append(f"{body['strategy']}, exactness {body['shape']['level']}")
    return "; ".join(parts)
