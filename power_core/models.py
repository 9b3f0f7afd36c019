"""Models that the user added by name: a small JSON file in the user's configuration folder."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from power_core.errors import ArtifactError, CapabilityError, ConfigError
from power_core.hookspecs import ModelSource
from power_core.locks import locked
from power_core.names import NAME_RULE, is_address, is_name, one_of

if TYPE_CHECKING:  # models are listed without numpy, which it needs
    from power_core.target import TargetBackend

__all__ = ["add_model", "added_models", "models_file", "remove_model"]


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
        name: ModelSource(partial(_locate, name, Path(path)), description="added by the user")
        for name, path in _read().items()
    }


def add_model(
    name: str, path: str | Path, taken: Mapping[str, str], backends: Iterable[tuple[str, TargetBackend]]
) -> Path:
    """
    Record the file, or the folder, *path* as model *name*.

    Args:
        name: Keeps to `NAME_RULE`, and is free.
        path: What one of *backends* claims; it is not loaded.
        taken: Names plugins registered -> their owner.
        backends: Names and target backends; none is made after one that claims the file.

    Returns:
        The absolute path that was recorded.

    Raises:
        ArtifactError: There is no such file.
        CapabilityError: No backend claims it.
        ConfigError: The name is taken or is no name, or the record cannot be written.
    """
    if not is_name(name):
        raise ConfigError(f"{name!r:.120} is no model name", who="models", got=name, expected=NAME_RULE)
    file = _existing(path)
    asked = []
    for backend_name, backend in backends:
        if backend.claims(file):
            break
        asked.append(backend_name)
    else:
        raise CapabilityError(
            f"no target backend knows this format; asked: {', '.join(asked) or 'none is installed'}",
            who="models",
            where=str(file),
            got=path,
            expected="a model file",
            fix="pip install power-llamacpp for GGUF files; see `power plugins`",
        )
    with _changing() as known:
        owner = taken.get(name) or (f"the user, for {known[name]}" if name in known else None)
        if owner is not None:
            raise ConfigError(
                f"model {name!r} is already registered by {owner}", who="models", got=name, fix="choose another name"
            )
        known[name] = str(file)
    return file


def remove_model(name: str) -> None:
    """
    Forget an added model; its file stays.

    Raises:
        ConfigError: No model of that name was added, or the record cannot be written.
    """
    with _changing() as known:
        if name not in known:
            raise ConfigError(
                f"no model {name!r:.120} was added" + ("" if known else ", nor any other"),
                who="models",
                got=name,
                expected=one_of(known),
            )
        del known[name]


def _existing(path: str | Path) -> Path:
    """The absolute path of a file or folder that is there; a pipe or a device is none."""
    try:
        file = Path(path).expanduser().absolute()
        kind = file.stat().st_mode
    except (OSError, RuntimeError, ValueError) as exc:  # no such user; a NUL in it
        cause = "no such file" if isinstance(exc, FileNotFoundError) else getattr(exc, "strerror", None) or exc
        raise ArtifactError(
            f"{cause}",
            who="models",
            where=f"{path!s:.200}",
            got=path,
            expected="a model file",
            fix="nothing is fetched here: download it first" if is_address(str(path)) else None,
        ) from exc
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise ArtifactError("not a regular file", who="models", where=str(file), got=path, expected="a model file")
    return file


def _locate(name: str, path: Path) -> Path:
    if not path.is_file() and not path.is_dir():
        raise ArtifactError(
            f"the file of model {name!r} is gone",
            who="models",
            where=str(path),
            got=path,
            fix=f"put it back, or `power models remove {name}`",
        )
    return path


@contextmanager
def _changing() -> Iterator[dict[str, str]]:
    """
    The record, written back where the block ends; another process that changes it waits, so that nothing is lost.

    Raises:
        ConfigError: It cannot be read or written.
    """
    file = models_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"cannot be written: {exc.strerror}", who="models", where=str(file), got=file) from exc
    with locked(file.parent):
        table = _read()
        yield table
        _write(table)


def _read() -> dict[str, str]:
    file = models_file()
    if file.exists() and not file.is_file():  # a pipe would be waited for
        raise ConfigError("not a regular file", who="models", where=str(file), fix="delete it")
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
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        Path(temporary).replace(file)  # readers see the old file or the new one, never half of it
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
