"""``power artifacts``: inspect, admit, list, verify and remove drafter files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from power_core.cli.options import json_option
from power_core.cli.output import print_json, print_table, refuse_shipped
from power_core.cli.state import State
from power_core.errors import PowerError
from power_core.names import NAME_RULE, is_name

if TYPE_CHECKING:
    from power_core.artifacts import TensorFile
    from power_core.artifacts.catalog import ArtifactEntry
    from power_core.artifacts.contract import ArtifactManifest

__all__ = ["artifacts"]

_GIVEN_BY = "Where it came from; recorded in its manifest and in receipts."
_file = click.argument("file", type=click.Path(path_type=Path))


@click.group()
def artifacts() -> None:
    """Inspect, admit, list, verify and remove drafter files."""


@artifacts.command()
@_file
@json_option
@click.pass_obj
def inspect(state: State, file: Path, as_json: bool) -> None:
    """
    Say what the drafter FILE is: its kind, its facts, its tensors and its digests.

    FILE is GGUF or safetensors, or a folder with one *.safetensors and its config.json. Nothing is changed.
    """
    from power_core.artifacts import open_tensors
    from power_core.artifacts.matching import checked_facts, installed_contracts, match_contract

    tensors = open_tensors(file)
    contract = match_contract(tensors, installed_contracts(state.plugins.registry))
    facts = checked_facts(tensors, contract, payload=True)
    document = {"kind": contract.kind, "facts": _facts(facts), **_contents(tensors)}
    if as_json:
        print_json(document)
        return
    click.echo(f"kind: {contract.kind}")
    for name, value in document["facts"].items():
        click.echo(f"{name.replace('_', ' ')}: {_text(value)}")
    for dtype, (count, nbytes) in document["tensors"].items():
        click.echo(f"tensors {dtype}: {count}, {nbytes:,} bytes")
    for each in document["files"]:
        click.echo(f"{each['name']}: {each['nbytes']:,} bytes, sha256 {each['sha256']}")


@artifacts.command()
@_file
@click.option("--target", required=True, metavar="NAME|PATH", help="The one model it may draft for.")
@click.option("--source", required=True, metavar="S", help=_GIVEN_BY)
@click.option("--revision", required=True, metavar="R", help="Which version of the source it is.")
@click.option("--license", "license_", required=True, metavar="L", help="The licence it is under.")
@click.option("--name", metavar="N", help="Name to admit it under. [default: the file's]")
@json_option
@click.pass_context
def admit(
    ctx: click.Context,
    /,
    *,
    file: Path,
    target: str,
    source: str,
    revision: str,
    license_: str,
    name: str | None,
    as_json: bool,
) -> None:
    """
    Check the drafter FILE for a target and keep a copy of it; the target's strategies find it from then on.

    Its kind is decided from its content, its digests are computed, and both are checked again at every load.
    """
    from power_core.artifacts.admission import admit as admit_file
    from power_core.artifacts.contract import Provenance
    from power_core.artifacts.matching import installed_contracts

    state = ctx.ensure_object(State)
    name = _name_of(file) if name is None else name
    if not is_name(name):
        raise click.UsageError(f"{name!r:.120} is no artifact name: {NAME_RULE}; choose one with --name")
    if owner := next((item.owner for item in state.plugins.registry.artifacts if item.name == name), None):
        raise click.UsageError(f"artifact {name!r} is already shipped by {owner}; choose another with --name")
    with state.runtime({}) as runtime:
        model = runtime.load_target(target)
        try:
            manifest = admit_file(
                file,
                name=name,
                target=model,
                provenance=Provenance(source, revision, license_),
                contracts=installed_contracts(state.plugins.registry),
            )
        finally:
            model.close()
    if as_json:
        print_json({"admitted": name, "kind": manifest.kind, "target": manifest.target.name})
    else:
        click.echo(f"admitted {name}: {manifest.kind} for {manifest.target.name}")


@artifacts.command("list")
@json_option
@click.pass_obj
def list_(state: State, as_json: bool) -> None:
    """List the artifacts that were admitted and those that packages ship."""
    from power_core.artifacts.catalog import catalog

    entries = catalog(state.plugins.registry)
    if as_json:
        print_json({"artifacts": [_entry(entry) for entry in entries]})
    elif entries:
        print_table([("ARTIFACT", "KIND", "TARGET", "FROM", "ABOUT"), *(_row(entry) for entry in entries)])
    else:
        click.echo("no artifacts; `power artifacts admit FILE --target MODEL ...` admits one")


@artifacts.command()
@click.argument("name", required=False)
@json_option
@click.pass_context
def verify(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """
    Compute the digests of the artifact NAME, or of all, again, and repeat every check of its contract.

    Exits with 1 where one cannot be used.
    """
    from power_core.artifacts.catalog import catalog, find

    state = ctx.ensure_object(State)
    entries = catalog(state.plugins.registry)
    entries = entries if name is None else [find(entries, name)]
    findings = {entry.name: _problem(state, entry) for entry in entries}
    if as_json:
        print_json({"artifacts": [{"name": key, "problem": problem} for key, problem in findings.items()]})
    else:
        for key, problem in findings.items():
            click.echo(f"{key}: {problem or 'verified'}", err=problem is not None)
    ctx.exit(1 if any(findings.values()) else 0)


@artifacts.command()
@click.argument("name")
@json_option
@click.pass_obj
def remove(state: State, name: str, as_json: bool) -> None:
    """Delete the copy of the artifact NAME that was admitted."""
    from power_core.artifacts import store

    refuse_shipped(state.plugins.registry.artifacts, name, store.admitted())
    store.remove(name)
    if as_json:
        print_json({"removed": name})
    else:
        click.echo(f"removed {name}")


def _contents(file: TensorFile) -> dict[str, Any]:
    from power_core.artifacts.files import FileStamp, file_sha256

    sums: dict[str, list[int]] = {}
    for tensor in file.tensors.values():
        count_and_bytes = sums.setdefault(tensor.dtype, [0, 0])
        count_and_bytes[0] += 1
        count_and_bytes[1] += tensor.nbytes
    digests = [{"name": f.name, "nbytes": FileStamp.of(f).size, "sha256": file_sha256(f)} for f in file.files]
    return {"format": file.format, "tensors": sums, "files": digests}


def _facts(facts: Any) -> dict[str, Any]:
    import attrs

    from power_core.evidence.canonical import plain

    table: Mapping[str, Any] = attrs.asdict(facts, recurse=False)
    return {name: plain(value) for name, value in table.items()}


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return "any" if value is None else str(value)


def _name_of(file: Path) -> str:
    path = file.absolute()
    return path.name if path.is_dir() else path.stem


def _problem(state: State, entry: ArtifactEntry) -> str | None:
    from power_core.artifacts.admission import load_artifact
    from power_core.artifacts.matching import installed_contracts

    try:
        load_artifact(entry.located(), installed_contracts(state.plugins.registry), None, payload=True)
    except PowerError as exc:
        return str(exc)
    return None


def _entry(entry: ArtifactEntry) -> dict[str, Any]:
    from power_core.artifacts.manifest import manifest_json

    manifest: ArtifactManifest | None = entry.manifest
    return {
        "name": entry.name,
        "from": entry.origin,
        "description": entry.description,
        "path": None if entry.path is None else str(entry.path),
        "manifest": None if manifest is None else manifest_json(manifest)["body"],
        "problem": None if entry.problem is None else str(entry.problem),
    }


def _row(entry: ArtifactEntry) -> tuple[str, str, str, str, str]:
    manifest = entry.manifest
    if manifest is None:
        return entry.name, "?", "?", entry.origin, f"UNUSABLE: {entry.problem}"
    about = entry.description or f"{manifest.provenance.source}, {manifest.provenance.license}"
    return entry.name, manifest.kind, manifest.target.name, entry.origin, about
