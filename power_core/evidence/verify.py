"""Checking receipts, offline: any changed byte of a file is found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from power_core.errors import ReceiptError
from power_core.evidence.canonical import canonical, digest, parse
from power_core.evidence.conformance import CONFORMANCE_SCHEMA, ConformanceBody
from power_core.evidence.schema import SCHEMA, ReceiptBody, converter
from power_core.types import JSON

__all__ = ["VerifiedReceipt", "verify_document", "verify_file", "verify_generation"]

Body = ReceiptBody | ConformanceBody
_BODIES: Mapping[str, type[Body]] = {SCHEMA: ReceiptBody, CONFORMANCE_SCHEMA: ConformanceBody}
_DOCUMENT_FIELDS = frozenset({"schema", "body", "digest"})
_GENERATION_FIELDS = frozenset(
    {"text", "token_ids", "prompt_token_ids", "finish_reason", "usage", "logprobs", "receipt"}
)


@frozen
class VerifiedReceipt:
    """
    A receipt or a conformance report whose digest holds.

    Args:
        body: Its content.
        digest: The digest that was checked.
        covers_output: Whether text and ids stood beside the receipt and match it too.
    """

    body: Body
    digest: str
    covers_output: bool = False


def verify_document(document: JSON) -> VerifiedReceipt:
    """
    Check a receipt document, or a conformance report.

    Raises:
        ReceiptError: Its digest does not hold, or its body is none of its schema.
    """
    _require_fields(document, _DOCUMENT_FIELDS, "receipt")
    schema = document["schema"]
    if not isinstance(schema, str) or schema not in _BODIES:
        raise ReceiptError(f"unknown schema {schema!r:.40}", who="receipt", got=schema, expected=" or ".join(_BODIES))
    computed = digest({"schema": document["schema"], "body": document["body"]})
    if document["digest"] != computed:
        raise ReceiptError(
            "the digest does not match the content: it was changed",
            who="receipt",
            got=document["digest"],
            expected=computed,
        )
    return VerifiedReceipt(_structured(document["body"], schema), computed)


def verify_generation(document: JSON) -> VerifiedReceipt:
    """
    Check a document of ``power generate --json``: its receipt, and the output against it.

    Raises:
        ReceiptError: Names the first field that does not match.
    """
    _require_fields(document, _GENERATION_FIELDS, "generation")
    verified = verify_document(document["receipt"])
    if not isinstance(verified.body, ReceiptBody):
        raise ReceiptError("the receipt of a generation is none", who="receipt", where="receipt", expected=SCHEMA)
    output, request = verified.body.output, verified.body.request
    found = {
        "text": (digest(document["text"]), output.text_sha256),
        "token_ids": (digest(document["token_ids"]), output.token_ids_sha256),
        "prompt_token_ids": (digest(document["prompt_token_ids"]), request.prompt_sha256),
        "finish_reason": (document["finish_reason"], output.finish_reason),
        "usage": (canonical(document["usage"]), canonical(converter.unstructure(output.usage))),
        "logprobs": (None if document["logprobs"] is None else digest(document["logprobs"]), output.logprobs_sha256),
    }
    for name, (got, expected) in found.items():
        if got != expected:
            raise ReceiptError(
                f"{name} is not what the receipt was made for", who="receipt", where=name, got=got, expected=expected
            )
    return VerifiedReceipt(verified.body, verified.digest, covers_output=True)


def verify_file(path: str | Path) -> VerifiedReceipt:
    """
    Check a file that holds a receipt, a generation with its receipt, or a conformance report.

    The file must be the canonical bytes, with at most one newline after them, so that no byte of it
    can change unseen.

    Raises:
        ReceiptError: Says what is wrong with the file.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as exc:
        raise ReceiptError(f"cannot be read: {exc.strerror}", who="receipt", where=str(path)) from exc
    try:
        return _verified(data)
    except ReceiptError as exc:
        exc.where = f"{path}: {exc.where}" if exc.where else str(path)
        raise


def _verified(data: bytes) -> VerifiedReceipt:
    document = parse(data)
    if data.removesuffix(b"\n") != canonical(document):
        raise ReceiptError(
            "not in canonical form: it was changed, or written by something else",
            who="receipt",
            expected="canonical JSON (RFC 8785)",
        )
    is_generation = isinstance(document, dict) and "receipt" in document
    return verify_generation(document) if is_generation else verify_document(document)


def _structured(body: JSON, schema: str) -> Body:
    try:
        record: Body = converter.structure(body, _BODIES[schema])
    except Exception as exc:
        raise ReceiptError(f"body is not one of {schema}: {exc}", who="receipt", got=body) from exc
    # cattrs turns "1" into 1 where a number is due: what does not write back was of another type.
    if canonical(converter.unstructure(record)) != canonical(body):
        raise ReceiptError(f"body has values of types that {schema} does not have", who="receipt", got=body)
    return record


def _require_fields(document: JSON, fields: frozenset[str], kind: str) -> None:
    if not isinstance(document, Mapping):
        raise ReceiptError("not a receipt", who="receipt", got=document, expected=f"an object of {sorted(fields)}")
    if set(document) != fields:
        wrong = ", ".join(sorted(set(document) ^ fields))
        raise ReceiptError(
            f"{kind} fields missing or unknown: {wrong}", who="receipt", got=sorted(document), expected=sorted(fields)
        )
