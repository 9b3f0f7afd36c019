"""Writing results: one JSON document, or lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from power_core.types import JSON

__all__ = ["print_json", "print_table"]


def print_json(document: JSON) -> None:
    """Print *document* in canonical form, so that its bytes can be verified."""
    from power_core.evidence.canonical import canonical

    click.echo(canonical(document))


def print_table(rows: Iterable[Sequence[str]]) -> None:
    """Print *rows* in aligned columns; the last column is free."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        click.echo("  ".join([*cells, row[-1]]).rstrip())
