"""The folder of admitted artifacts: one subfolder each, put there and taken away whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from power_core.artifacts.manifest import MANIFEST_FILE, checked_name
from power_core.artifacts.staging import hidden_folder, sweep
from power_core.errors import ArtifactError
from power_core.names import is_name, one_of

__all__ = ["admitted", "artifacts_dir", "remove", "staged"]

_VARIABLE = "POWER_ARTIFACTS_DIR"


def artifacts_dir() -> Path:
    """
    `POWER_ARTIFACTS_DIR`, or `artifacts` in the platform's user data folder of "power".

    Raises:
        ArtifactError: The variable names the home of a user who is not there.
    """
    if override := os.environ.get(_VARIABLE):
        try:
            return Path(override).expanduser()
        except RuntimeError as exc:
            raise ArtifactError(
                f"{override:.120}: {exc}", who="artifacts", where=_VARIABLE, got=override, expected="a folder"
            ) from exc
    return platformdirs.user_data_path("power") / "artifacts"


def admitted() -> dict[str, Path]:
    """
    Paths of the manifests of admitted artifacts by name; whether they can be read is not asked.

    A folder of another name was not admitted, and is passed over.

    Raises:
        ArtifactError: The folder cannot be listed.
    """
    root = artifacts_dir()
    try:
        folders = sorted(each for each in root.iterdir() if is_name(each.name) and each.is_dir())
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise _failed(root, "read", exc) from exc
    return {folder.name: folder / MANIFEST_FILE for folder in folders}


@contextmanager
def staged(name: str) -> Iterator[Path]:
    """
    An empty folder that becomes the artifact *name* where the block ends, and vanishes where it raises.

    What a killed process left of such a folder is deleted first.

    Raises:
        ArtifactError: The name is taken, or nothing can be written.
    """
    root = artifacts_dir()
    folder = root / checked_name(name)
    _check_free(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        sweep(root)
        with hidden_folder(root, "admitting") as staging:
            yield staging
            staging.chmod(0o755)  # a temporary folder's own is for secrets
            _check_free(folder)
            staging.rename(folder)  # fails where another process was faster: its folder is not empty
    except OSError as exc:
        _check_free(folder)
        raise _failed(root, "written to", exc) from exc


def remove(name: str) -> None:
    """
    Delete the admitted artifact *name* and its files.

    Raises:
        ArtifactError: There is none, or it cannot be deleted.
    """
    folder = artifacts_dir() / checked_name(name)
    known = admitted()
    if name not in known:
        raise ArtifactError(
            f"no artifact {name!r} was admitted" + ("" if known else ", nor any other"),
            who="artifacts",
            got=name,
            expected=one_of(known),
        )
    try:
        if folder.is_symlink():  # somebody else's folder: only the link is ours
            folder.unlink()
            return
        sweep(folder.parent)
        with hidden_folder(folder.parent, "removing") as grave:
            folder.rename(grave / name)  # gone at once, whatever happens while its files are deleted
    except OSError as exc:
        raise _failed(folder, "deleted", exc) from exc


def _check_free(folder: Path) -> None:
    try:
        is_taken = folder.exists() or folder.is_symlink()
    except OSError as exc:
        raise _failed(folder.parent, "read", exc) from exc
    if is_taken:
        raise ArtifactError(
            f"artifact {folder.name!r} is already admitted",
            who="artifacts",
            where=str(folder),
            got=folder.name,
            fix=f"choose another with --name, or `power artifacts remove {folder.name}`",
        )


def _failed(path: Path, what: str, exc: OSError) -> ArtifactError:
    return ArtifactError(f"cannot be {what}: {exc.strerror or exc}", who="artifacts", where=str(path), got=path)
