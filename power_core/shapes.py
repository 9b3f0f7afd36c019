"""
Shapes: which row counts a target computes bit-identically, as opaque identities with bounds.

A target's logits for one row can change in the last bits with the number of rows computed beside
it, because another kernel with another summation order is chosen. Row counts whose logits agree
bit for bit form a *width class*. A backend measures its classes and declares them here; the core
compares identities and bounds and never interprets what is behind a digest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from bisect import bisect_left
from collections.abc import Mapping
from enum import StrEnum

from attrs import field, frozen

from power_core.errors import ShapeError
from power_core.types import JSON

__all__ = ["ExactnessLevel", "ShapeIdentity", "ShapeProfile", "WidthClass"]


class ExactnessLevel(StrEnum):
    """What a session promises about speculative against plain decoding."""

    BITWISE = "bitwise"  # width 1 and the verify widths are one class
    PADDED = "padded"  # held by padding narrow steps into the verify class
    UNVERIFIED = "unverified"  # nothing can be promised


@frozen
class ShapeIdentity:
    """The digest of everything that decides a numeric path. Compared, never read."""

    digest: str

    @classmethod
    def of(cls, facts: Mapping[str, JSON]) -> ShapeIdentity:
        """
        Digest *facts*: model digest, library build, settings, thread count, width class.

        >>> ShapeIdentity.of({"b": 1, "a": 2}) == ShapeIdentity.of({"a": 2, "b": 1})
        True
        """
        canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
        return cls("sha256:" + hashlib.sha256(canonical.encode()).hexdigest())


def _ascending(_obj: object, _attr: object, widths: tuple[int, ...]) -> None:
    if not widths or widths[0] < 1 or any(a >= b for a, b in itertools.pairwise(widths)):
        raise ShapeError("widths must be positive and ascending", who="WidthClass", got=widths)


@frozen
class WidthClass:
    """
    Row counts that compute any row bit-identically, and what each costs.

    Args:
        identity: Opaque identity of the numeric path.
        widths: Row counts of one forward, ascending. A step of n rows runs at the smallest width >= n.
        costs: Cost of a forward at each of `widths`, or at the first few: those that were measured; in units of
            the cheapest single-row step.
        apart: Whether rows of a sequence beyond its first, where other sequences have rows in the step, too, take a
            pass of their own over the weights.
    """

    identity: ShapeIdentity
    widths: tuple[int, ...] = field(validator=_ascending)
    costs: tuple[float, ...] = ()
    apart: bool = False

    @property
    def max_rows(self) -> int:
        return self.widths[-1]

    def cover(self, rows: int) -> int | None:
        """
        The row count a step of *rows* rows is computed at, pad rows included, or None if uncovered.

        >>> WidthClass(ShapeIdentity("x"), (2, 4, 8)).cover(3)
        4
        """
        index = bisect_left(self.widths, rows)
        return self.widths[index] if index < len(self.widths) else None

    def cost(self, rows: int) -> float | None:
        """Relative cost of a step of *rows* rows; None where it was not measured."""
        index = bisect_left(self.widths, rows)
        return self.costs[index] if index < len(self.costs) else None


@frozen
class ShapeProfile:
    """
    What one session measured about itself.

    Args:
        level: The promise.
        decode: Class of every forward that holds a generated token.
        prefill: Class of every forward that holds prompt tokens only.
        evidence: Facts for doctor and receipts; never read by the scheduler.
    """

    level: ExactnessLevel
    decode: WidthClass
    prefill: WidthClass
    evidence: Mapping[str, JSON] = field(factory=dict)

    @property
    def mixable(self) -> bool:
        """Whether prompt rows and generated rows may share one forward."""
        return self.decode.identity == self.prefill.identity

    @property
    def identity(self) -> ShapeIdentity:
        return ShapeIdentity.of({"decode": self.decode.identity.digest, "prefill": self.prefill.identity.digest})

    def to_json(self) -> dict[str, JSON]:
        """A document that `from_json` reads, for backends that keep what they measured."""
        return {
            "level": str(self.level),
            "decode": _class_document(self.decode),
            "prefill": _class_document(self.prefill),
            "evidence": dict(self.evidence),
        }

    @classmethod
    def from_json(cls, document: JSON) -> ShapeProfile:
        """
        The profile in *document*; other members of it are left alone.

        Raises:
            ShapeError: It holds none.
        """
        try:
            decode, prefill = (_width_class(document[name]) for name in ("decode", "prefill"))
            return cls(ExactnessLevel(document["level"]), decode, prefill, dict(document["evidence"]))
        except (KeyError, TypeError, ValueError) as exc:
            raise ShapeError("this is no profile", who="ShapeProfile", got=document) from exc


def _class_document(shape: WidthClass) -> dict[str, JSON]:
    facts = {"widths": list(shape.widths), "costs": list(shape.costs), "apart": shape.apart}
    return {"identity": shape.identity.digest, **facts}


def _width_class(document: JSON) -> WidthClass:
    widths, costs = tuple(document["widths"]), tuple(document["costs"])
    return WidthClass(ShapeIdentity(document["identity"]), widths, costs, bool(document["apart"]))
