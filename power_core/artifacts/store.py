"""The folder of admitted artifacts: one subfolder each, put there and taken away whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from power_core.artifacts.manifest import MANIFEST_FILE, checked_name
from power_core.errors import ArtifactError

__all__ = ["admitted", "artifacts_dir", "remove", "staged"]

_HIDDEN = "."  # names that begin so are folders being filled or emptied


def artifacts_dir() -> Path:
    """`POWER_ARTIFACTS_DIR`, or `artifacts` in the platform's user data folder of "power"."""
    if override := os.environ.get("POWER_ARTIFACTS_DIR"):
        return Path(override).expanduser()
    return platformdirs.user_data_path("power") / "artifacts"


def admitted() -> dict[str, Path]:
    """
    Paths of the manifests of admitted artifacts by name; whether they can be read is not asked.

    Raises:
        ArtifactError: The folder cannot be listed.
    """
    root = artifacts_dir()
    try:
        folders = sorted(each for each in root.iterdir() if not each.name.startswith(_HIDDEN) and each.is_dir())
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise _failed(root, "read", exc) from exc
    return {folder.name: folder / MANIFEST_FILE for folder in folders}


@contextmanager
def staged(name: str) -> Iterator[Path]:
    """
    An empty folder that becomes the artifact *name* where the block ends, and vanishes where it raises.

    Raises:
        ArtifactError: The name is taken, or nothing can be written.
    """
    root = artifacts_dir()
    folder = root / checked_name(name)
    _check_free(folder)
    staging: Path | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=root, prefix=f"{_HIDDEN}admitting-"))
        yield staging
        staging.chmod(0o755)  # mkdtemp's own is for secrets
        _check_free(folder)
        staging.rename(folder)  # fails where another process was faster: its folder is not empty
    except OSError as exc:
        _check_free(folder)
        raise _failed(root, "written to", exc) from exc
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


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
            f"no artifact {name!r} was admitted",
            who="artifacts",
            got=name,
            expected="one of " + (", ".join(known) or "none, nothing was admitted"),
        )
    try:
        if folder.is_symlink():  # somebody else's folder: only the link is ours
            folder.unlink()
            return
        grave = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{_HIDDEN}removing-"))
        folder.rename(grave / name)  # gone at once, whatever happens while its files are deleted
        shutil.rmtree(grave)
    except OSError as exc:
        raise _failed(folder, "deleted", exc) from exc


def _check_free(folder: Path) -> None:
    if folder.exists() or folder.is_symlink():
        raise ArtifactError(
            f"artifact {folder.name!r} is already admitted",
            who="artifacts",
            where=str(folder),
            got=folder.name,
            fix=f"choose another with --name, or `power artifacts remove {folder.name}`",
        )


def _failed(path: Path, what: str, exc: OSError) -> ArtifactError:
    return ArtifactError(f"cannot be {what}: {exc.strerror or exc}", who="artifacts", where=str(path), got=path)
