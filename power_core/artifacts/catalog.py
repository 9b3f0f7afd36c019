"""The artifacts there are: those the user admitted, then those that installed packages ship."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from power_core.artifacts import store
from power_core.artifacts.contract import ArtifactManifest
from power_core.artifacts.manifest import read_manifest
from power_core.errors import ArtifactError, CapabilityError, PluginError, PowerError
from power_core.names import one_of
from power_core.types import TargetIdentity

if TYPE_CHECKING:
    from power_core.capabilities import Registry

__all__ = ["ADMITTED", "ArtifactEntry", "catalog", "choose", "find"]

ADMITTED = "admitted"


@frozen
class ArtifactEntry:
    """
    One artifact as it is listed. Its files have not been looked at.

    Args:
        name: Its name.
        origin: `ADMITTED`, or the distribution and version that ship it.
        description: What the package says about it.
        path: Its manifest, None where that could not be located.
        manifest: What the manifest says, None where it cannot be used.
        problem: Why not.
    """

    name: str
    origin: str
    description: str = ""
    path: Path | None = None
    manifest: ArtifactManifest | None = None
    problem: PowerError | None = None

    @property
    def is_admitted(self) -> bool:
        return self.origin == ADMITTED

    def fits(self, kind: str, target: TargetIdentity) -> bool:
        """Whether it is a drafter of *kind* for *target*, as its manifest says."""
        return (
            self.manifest is not None
            and self.manifest.kind == kind
            and self.manifest.target.file_sha256 == target.file_sha256
            and self.manifest.target.tokenizer_sha256 == target.tokenizer_sha256
        )

    def located(self) -> Path:
        """
        The path of a manifest that was read.

        Raises:
            PowerError: It could not be.
        """
        if self.problem is not None:
            raise self.problem
        if self.path is None:
            raise ArtifactError(f"artifact {self.name!r} has no manifest", who="artifacts")
        return self.path


def catalog(registry: Registry) -> list[ArtifactEntry]:
    """
    Every artifact: admitted ones by name, then shipped ones by name. A damaged one is listed with its problem.

    Raises:
        ArtifactError: The folder of admitted ones cannot be listed.
    """
    admitted = [_entry(name, ADMITTED, "", partial(Path, path)) for name, path in store.admitted().items()]
    shipped = registry.artifacts
    return admitted + [_entry(each.name, each.owner, each.value.description, each.value.locate) for each in shipped]


def find(entries: Iterable[ArtifactEntry], name: str, *, where: str | None = None) -> ArtifactEntry:
    """
    The entry *name*; an admitted one hides a shipped one.

    Raises:
        CapabilityError: There is none.
    """
    entries = list(entries)
    found = next((entry for entry in entries if entry.name == name), None)
    if found is not None:
        return found
    raise CapabilityError(
        f"no artifact is named {name!r:.120}",
        who="artifacts",
        where=where,
        got=name,
        expected=one_of({entry.name for entry in entries}),
        fix="see `power artifacts list`, or admit a file with `power artifacts admit`",
    )


def choose(
    entries: Sequence[ArtifactEntry], kind: str, target: TargetIdentity, wanted: Sequence[str] = ()
) -> ArtifactEntry | None:
    """
    The artifact of *kind* to use for *target*: the one that was asked for, else an admitted one, else a shipped one.

    Args:
        entries: See `catalog`.
        kind: The kind a strategy loads.
        target: The loaded target.
        wanted: Names the user chose, of any kind.

    Returns:
        None where nothing fits. A chosen one need not fit: loading it says why it does not.

    Raises:
        CapabilityError: Several fit alike.
        PowerError: A chosen one is damaged.
    """
    chosen = [find(entries, name) for name in wanted]
    for entry in chosen:
        entry.located()
    of_kind = [entry for entry in chosen if entry.manifest is not None and entry.manifest.kind == kind]
    fitting = [entry for entry in entries if entry.fits(kind, target)]
    admitted = [entry for entry in fitting if entry.is_admitted]
    best = of_kind or admitted or fitting
    if len(best) > 1:
        names = ", ".join(entry.name for entry in best)
        raise CapabilityError(
            f"{len(best)} artifacts of kind {kind!r} are there for {target.name}: {names}",
            who="artifacts",
            got=[entry.name for entry in best],
            expected="one",
            fix="choose with --artifact NAME or spec_artifact",
        )
    return best[0] if best else None


def _entry(name: str, origin: str, description: str, locate: Callable[[], Path]) -> ArtifactEntry:
    path = None
    try:
        path = _located(name, origin, locate)
        manifest = read_manifest(path)
        if manifest.name != name:
            raise ArtifactError(
                f"the manifest is that of artifact {manifest.name!r}",
                who="artifacts",
                where=str(path),
                got=manifest.name,
                expected=name,
                fix="put it back where it was, or admit the file again",
            )
    except PowerError as exc:
        return ArtifactEntry(name, origin, description, path, problem=exc)
    return ArtifactEntry(name, origin, description, path, manifest)


def _located(name: str, origin: str, locate: Callable[[], Path]) -> Path:
    try:
        return Path(locate())
    except PowerError:
        raise
    except Exception as exc:  # plugin code may raise anything
        raise PluginError(
            f"locating artifact {name!r} raised {type(exc).__name__}: {exc}",
            who=origin,
            got=exc,
            fix="report it to the package's author",
        ) from exc
