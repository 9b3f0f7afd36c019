"""
Manifests: what an artifact is and which target it may draft for, as a JSON document bound by its digest.

The form is that of receipts: ``{"schema", "body", "digest"}`` in canonical JSON (RFC 8785), the digest over
schema and body. It is no signature: what it says about files is compared with the files at every load.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import cattrs
from attrs import evolve
from cattrs.gen import make_dict_unstructure_fn, override

from power_core.artifacts.contract import ArtifactManifest
from power_core.artifacts.files import FileStamp
from power_core.errors import ArtifactError, ReceiptError
from power_core.evidence.canonical import canonical, digest, parse, plain
from power_core.names import NAME_RULE, is_name
from power_core.types import JSON, TargetIdentity

__all__ = [
    "MANIFEST_FILE",
    "MANIFEST_SCHEMA",
    "checked_name",
    "manifest_bytes",
    "manifest_json",
    "read_manifest",
]

MANIFEST_FILE = "manifest.json"
MANIFEST_SCHEMA = "power.artifact/1"
_FIELDS = frozenset({"schema", "body", "digest"})
_MAX_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ADMIT_AGAIN = "admit the file again, or reinstall the package that ships it"
_converter = cattrs.Converter(forbid_extra_keys=True)
# Drafters are bound to a file, whatever is added to its weights.
_converter.register_unstructure_hook(
    TargetIdentity, make_dict_unstructure_fn(TargetIdentity, _converter, adapters=override(omit=True))
)


def checked_name(name: str) -> str:
    """
    *name*, which a folder may have: it keeps to `NAME_RULE`.

    Raises:
        ArtifactError: It is none.
    """
    if is_name(name):
        return name
    raise ArtifactError(
        f"{name!r:.120} is no artifact name",
        who="artifacts",
        got=name,
        expected=NAME_RULE,
        fix="choose another name",
    )


def manifest_json(manifest: ArtifactManifest) -> dict[str, JSON]:
    """
    The document.

    Raises:
        ArtifactError: The contract's facts have no JSON form.
    """
    facts = evolve(manifest.facts, details=plain(manifest.facts.details))
    body = _converter.unstructure(evolve(manifest, facts=facts))
    content = {"schema": MANIFEST_SCHEMA, "body": body}
    try:
        return {**content, "digest": digest(content)}
    except ReceiptError as exc:
        raise ArtifactError(f"artifact {manifest.name!r}: {exc.what}", who="artifacts", got=body) from exc


def manifest_bytes(manifest: ArtifactManifest) -> bytes:
    """The document's one byte form, with a newline after it."""
    return canonical(manifest_json(manifest)) + b"\n"


def read_manifest(path: Path) -> ArtifactManifest:
    """
    Read a manifest strictly: canonical bytes, no key missing or unknown, plain file names.

    Raises:
        ArtifactError: It cannot be read, was changed, or is something else.
    """
    stamp = FileStamp.of(path, follow=False)
    if stamp.size > _MAX_BYTES:
        raise _damaged(path, f"the file has {stamp.size} bytes, too many for a manifest")
    try:
        data = path.read_bytes()
        document = parse(data)
        if data.removesuffix(b"\n") != canonical(document):
            raise _damaged(path, "not in canonical form: it was changed, or written by something else")
    except OSError as exc:
        raise _damaged(path, f"the file cannot be read: {exc.strerror or exc}") from exc
    except ReceiptError as exc:
        raise _damaged(path, exc.what) from exc
    return _structured(path, document)


def _structured(path: Path, document: JSON) -> ArtifactManifest:
    if not isinstance(document, Mapping) or set(document) != _FIELDS:
        raise _damaged(path, "not a manifest", expected=f"an object of {', '.join(sorted(_FIELDS))}")
    if document["schema"] != MANIFEST_SCHEMA:
        raise _damaged(path, f"unknown schema {document['schema']!r:.40}", expected=MANIFEST_SCHEMA)
    if document["digest"] != digest({"schema": document["schema"], "body": document["body"]}):
        raise _damaged(path, "the digest does not match the content: it was changed")
    try:
        manifest = _converter.structure(document["body"], ArtifactManifest)
        # cattrs turns "1" into 1 where a number is due: what does not write back was of another type, or is missing.
        is_same = canonical(_converter.unstructure(manifest)) == canonical(document["body"])
    except Exception as exc:
        raise _damaged(path, f"the body is none of {MANIFEST_SCHEMA}: {exc}") from exc
    if not is_same:
        raise _damaged(path, f"the body misses keys of {MANIFEST_SCHEMA} or has values of other types")
    _check_values(path, manifest)
    return manifest


def _check_values(path: Path, manifest: ArtifactManifest) -> None:
    """Names that stay in the folder, digests that are some."""
    names = [file.name for file in manifest.files]
    if not is_name(manifest.name):
        raise _damaged(path, f"{manifest.name!r:.120} is no artifact name")
    if not names or len({name.lower() for name in names}) != len(names):
        raise _damaged(path, f"the files are {names!r:.120}", expected="one or more, each once")
    for file in manifest.files:
        if not is_name(file.name) or file.name.lower() == path.name.lower():
            raise _damaged(path, f"{file.name!r:.120} is no file name", expected="a plain name in the same folder")
        if not _SHA256.fullmatch(file.sha256) or file.nbytes < 0:
            raise _damaged(path, f"{file.name} has the digest {file.sha256!r:.80}", expected="64 hex digits")


def _damaged(path: Path, what: str, *, expected: str | None = None) -> ArtifactError:
    return ArtifactError(what, who="artifacts", where=str(path), expected=expected, fix=_ADMIT_AGAIN)
