"""``power receipt verify``."""

from __future__ import annotations

from pathlib import Path

import click

from power_core.cli.options import file_path, json_option
from power_core.cli.output import print_json
from power_core.errors import ReceiptError

__all__ = ["receipt"]


@click.group()
def receipt() -> None:
    """Check receipts."""


@receipt.command()
@click.argument("file", type=file_path())
@json_option
@click.pass_context
def verify(ctx: click.Context, file: Path, as_json: bool) -> None:
    """
    Check that no byte of FILE changed: a receipt, or the output of `power generate --json`.

    A report of `power conformance --json` is checked the same way. Exits with 1 where something changed.
    """
    from power_core.evidence import verify_file

    try:
        verified = verify_file(file)
    except ReceiptError as exc:
        if as_json:
            print_json({"verified": False, "digest": None, "covers_output": False, "problem": str(exc)})
        else:
            click.echo(str(exc), err=True)
        ctx.exit(1)
    if as_json:
        document = {"verified": True, "digest": verified.digest, "covers_output": verified.covers_output}
        print_json({**document, "problem": None})
        return
    output = "the output matches it" if verified.covers_output else "the document alone; no output is in this file"
    click.echo(f"verified: {verified.digest} ({output})")
    click.echo(verified.body.summary)
