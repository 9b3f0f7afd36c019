"""Writing results: one JSON document, or lines of text."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from power_core.types import JSON

if TYPE_CHECKING:
    from power_core.capabilities import Table

__all__ = ["print_json", "print_table", "refuse_shipped", "shown"]


def print_json(document: JSON) -> None:
    """Print *document* in canonical form, so that its bytes can be verified."""
    from power_core.evidence.canonical import canonical

    click.echo(canonical(document))


def shown(line: str) -> str:
    r"""
    *line* for a terminal: what one would obey, or no encoding has, as its escapes.

    >>> shown("a\x1b[2J b")
    'a\\x1b[2J b'
    """
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def print_table(rows: Iterable[Sequence[str]]) -> None:
    """Print *rows* in aligned columns; the last column is free."""
    rows = [[shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        click.echo("  ".join([*cells, row[-1]]).rstrip())


def refuse_shipped(shipped: Table[Any], name: str, own: Container[str]) -> None:
    """
    Say whose *name* is before it is removed, where a package brought it and the user has none of that name.

    Raises:
        click.UsageError: It is *shipped*, and not among the user's *own*.
    """
    if name in shipped and name not in own:
        item = shipped.get(name)
        package = item.owner.partition(" ")[0]
        raise click.UsageError(
            f"{shipped.kind} {name!r} is shipped by {item.owner}; `pip uninstall {package}` removes it"
        )
