"""Models that the user added by name: a small JSON file in the user's configuration folder."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import platformdirs

from power_core.errors import ArtifactError, ConfigError
from power_core.hookspecs import ModelSource

__all__ = ["add_model", "added_models", "models_file", "remove_model"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def models_file() -> Path:
    """Where added models are recorded."""
    return platformdirs.user_config_path("power") / "models.json"


def added_models() -> dict[str, ModelSource]:
    """
    Added models by name.

    Raises:
        ConfigError: The record is damaged.
    """
    return {
        name: ModelSource(partial(_locate, name, Path(path)), description=f"added by the user: {path}")
        for name, path in _read().items()
    }


def add_model(name: str, path: str | Path, taken: Mapping[str, str]) -> Path:
    """
    Record the file *path* as model *name*.

    Args:
        name: Letters, digits, `.`, `_`, `-`; must be free.
        path: An existing file.
        taken: Names plugins registered -> their owner.

    Returns:
        The absolute path that was recorded.

    Raises:
        ArtifactError: There is no such file.
        ConfigError: The name is taken or is no name, or the record cannot be written.
    """
    file = Path(path).expanduser().absolute()
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no model name", who="models", got=name, expected="letters, digits, '.', '_' and '-'"
        )
    known = _read()
    owner = taken.get(name) or (f"the user, for {known[name]}" if name in known else None)
    if owner is not None:
        raise ConfigError(
            f"model {name!r} is already registered by {owner}", who="models", got=name, fix="choose another name"
        )
    if not file.is_file():
        raise ArtifactError("no such file", who="models", where=str(file), got=path, expected="a model file")
    _write({**known, name: str(file)})
    return file


def remove_model(name: str) -> None:
    """
    Forget an added model; its file stays.

    Raises:
        ConfigError: No model of that name was added, or the record cannot be written.
    """
    known = _read()
    if name not in known:
        raise ConfigError(
            f"no model {name!r} was added",
            who="models",
            got=name,
            expected="one of " + (", ".join(sorted(known)) or "none, nothing was added"),
        )
    _write({key: path for key, path in known.items() if key != name})


def _locate(name: str, path: Path) -> Path:
    if not path.is_file():
        raise ArtifactError(
            f"the file of model {name!r} is gone",
            who="models",
            where=str(path),
            got=path,
            fix=f"put it back, or `power models remove {name}`",
        )
    return path


def _read() -> dict[str, str]:
    file = models_file()
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise ConfigError(f"cannot be read: {exc.strerror}", who="models", where=str(file)) from exc
    except (ValueError, RecursionError) as exc:  # broken UTF-8 and broken JSON
        raise ConfigError(f"not JSON: {exc}", who="models", where=str(file), fix="mend or delete it") from exc
    if not isinstance(table, dict) or not all(isinstance(path, str) for path in table.values()):
        raise ConfigError(
            "not a table of names and paths", who="models", where=str(file), got=table, fix="mend or delete it"
        )
    return table


def _write(table: Mapping[str, str]) -> None:
    file = models_file()
    try:
        _replace(file, json.dumps(table, indent=2, sort_keys=True) + "\n")
    except OSError as exc:
        raise ConfigError(f"cannot be written: {exc.strerror}", who="models", where=str(file), got=file) from exc


def _replace(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        Path(temporary).replace(file)  # readers see the old file or the new one, never half of it
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
