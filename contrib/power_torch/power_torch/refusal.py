"""The one form of error for model files that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from power_core.errors import ArtifactError

__all__ = ["refuse"]


def refuse(path: Path, what: str, *, got: object = None, expected: object = None, fix: str | None = None) -> NoReturn:
    """Raise the `ArtifactError` for *path*: one line, with its data attributes filled."""
    raise ArtifactError(
        what, plugin="torch", where=str(path), got=got, expected=expected, fix=fix or "convert the model again"
    )
