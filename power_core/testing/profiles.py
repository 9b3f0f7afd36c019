"""Shape profiles a scripted target can declare: the three situations measured on real builds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from power_core.shapes import ExactnessLevel, ShapeIdentity, ShapeProfile, WidthClass
from power_core.target import SessionOptions

__all__ = ["ProfileFactory", "one_class", "padded_class", "two_classes"]

ProfileFactory = Callable[[SessionOptions], ShapeProfile]

_ROW_COST = 0.3  # a further row costs about this much of a single-row step on CPUs


def _width_class(name: str, widths: Iterable[int]) -> WidthClass:
    rows = tuple(widths)
    costs = tuple(1 + _ROW_COST * (width - rows[0]) for width in rows)
    return WidthClass(ShapeIdentity.of({"scripted": name}), rows, costs)


def one_class(prefill_rows: int = 32) -> ProfileFactory:
    """
    Every width is bit-identical, prompt chunks of up to *prefill_rows* rows included.

    >>> one_class()(SessionOptions(max_rows=4)).decode.widths
    (1, 2, 3, 4)
    """

    def profile(options: SessionOptions) -> ShapeProfile:
        decode = _width_class("all", range(1, options.max_rows + 1))
        return ShapeProfile(ExactnessLevel.BITWISE, decode, _width_class("all", range(1, prefill_rows + 1)))

    return profile


def padded_class(prefill_rows: int = 32) -> ProfileFactory:
    """
    Width 1 is alone, so single rows are padded to width 2.

    >>> padded_class()(SessionOptions(max_rows=4)).decode.cover(1)
    2
    """

    def profile(options: SessionOptions) -> ShapeProfile:
        decode = _width_class("padded", range(2, max(options.max_rows, 2) + 1))
        return ShapeProfile(ExactnessLevel.PADDED, decode, _width_class("padded", range(2, prefill_rows + 1)))

    return profile


def two_classes(at: int = 8, prefill_rows: int = 32) -> ProfileFactory:
    """
    Decode steps of fewer than *at* rows are one class and prompt chunks of at least *at* another: never mixable.

    >>> two_classes(8)(SessionOptions()).mixable
    False
    """

    def profile(options: SessionOptions) -> ShapeProfile:
        decode = _width_class("narrow", range(1, min(options.max_rows, at - 1) + 1))
        return ShapeProfile(ExactnessLevel.BITWISE, decode, _width_class("wide", range(at, prefill_rows + 1)))

    return profile
