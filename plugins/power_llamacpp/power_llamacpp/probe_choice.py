"""
From what the probe's children measured to a setting and its width classes. Nothing here runs native code.

Time never decides which rows agree. It decides only between settings that are equally exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attrs import field, frozen

from power_core.shapes import ExactnessLevel
from power_core.types import JSON

__all__ = ["Choice", "Measurement", "ProbeSettings", "choose", "is_faster", "width_classes"]

_USEFUL_WIDTH = 4  # a class of fewer widths leaves too little to verify with
_CLEARLY_FASTER = 0.95  # repacked weights take memory and loading time: they must be worth 5 %


@frozen
class ProbeSettings:
    """
    The settings that the probe decides.

    Args:
        extra_buffers: Whether weights are repacked for this processor.
        flash_attention: Whether attention is the fused kernel.
    """

    extra_buffers: bool
    flash_attention: bool


@frozen
class Measurement:
    """
    What a child measured of one setting.

    Args:
        settings: The setting.
        rows: Digest of each position's logits, by width.
        stable: Whether a width gave the same rows again, at another place among the rows too.
        milliseconds: Time of a forward, by width: the shortest of a few, as other processes only ever lengthen it.
        difference: Largest difference of a logit from the single-row run, by width.
        companions: Whether rows beside rows of another sequence are those of each alone, by rows of both.
        is_recurrent: Whether the memory is one that pad rows cannot be cut from.
        failure: Why there is no measurement: the signal a child died of, or an error.
    """

    settings: ProbeSettings
    rows: Mapping[int, Mapping[str, str]] = field(factory=dict)
    stable: Mapping[int, bool] = field(factory=dict)
    milliseconds: Mapping[int, float] = field(factory=dict)
    difference: Mapping[int, float] = field(factory=dict)
    companions: Mapping[int, bool] = field(factory=dict)
    is_recurrent: bool = False
    failure: str | None = None

    @classmethod
    def of(cls, settings: ProbeSettings, result: Mapping[str, JSON]) -> Measurement:
        """From a child's answer."""
        if "error" in result:
            return cls(settings, failure=result["error"])
        if not result["finite"]:
            return cls(settings, failure="the logits are not finite numbers")
        widths = {int(width): facts for width, facts in result["widths"].items()}
        return cls(
            settings,
            rows={width: facts["rows"] for width, facts in widths.items()},
            stable={width: facts["stable"] for width, facts in widths.items()},
            milliseconds={width: facts["ms"] for width, facts in widths.items()},
            difference={width: facts["difference"] for width, facts in widths.items()},
            companions={int(rows): same for rows, same in result["companions"].items()},
            is_recurrent=result["recurrent"],
        )

    def is_complete(self, widest: int) -> bool:
        """Whether every width up to *widest* was measured."""
        return self.failure is None and len(self.rows) == widest

    def summary(self) -> dict[str, JSON]:
        """What doctor and receipts show of it."""
        shown: dict[str, JSON] = {
            "extra_buffers": self.settings.extra_buffers,
            "flash_attention": self.settings.flash_attention,
        }
        if self.failure is not None:
            return {**shown, "failure": self.failure}
        return {
            **shown,
            "classes": [list(widths) for widths in width_classes(self)],
            "unstable": sorted(width for width, same in self.stable.items() if not same),
            "companions": sorted(rows for rows, same in self.companions.items() if same),
            "max_logit_difference": max(self.difference.values(), default=0.0),
            "single_row_ms": self.milliseconds[1],
        }


def width_classes(measured: Measurement) -> list[tuple[int, ...]]:
    """
    The widths of *measured* in classes of equal rows, ordered by their smallest; unstable widths are in none.

    Two widths are compared at every position both have computed.
    """
    classes: list[tuple[list[int], dict[str, str]]] = []
    for width in sorted(measured.rows):
        if not measured.stable[width]:
            continue
        rows = measured.rows[width]
        for members, known in classes:
            if all(known[position] == digest for position, digest in rows.items() if position in known):
                members.append(width)
                known.update(rows)
                break
        else:
            classes.append(([width], dict(rows)))
    return [tuple(members) for members, _ in classes]


@frozen
class Choice:
    """
    The setting taken and what it promises.

    Args:
        measured: The measurement of the setting.
        level: The promise.
        widths: Decode class.
    """

    measured: Measurement
    level: ExactnessLevel
    widths: tuple[int, ...]


def choose(measurements: Sequence[Measurement], widest: int) -> Choice | None:
    """
    The best setting: exact first, then fast. None where no setting is alive.

    In order: one class of all widths; a class of single rows that verifies at least a few; a class that
    verifies a few with the least padding of single rows; single rows alone, where rows cannot be padded;
    and, for a library that does not give the same rows twice, no promise.

    Args:
        measurements: One a setting, plain settings last.
        widest: The largest width measured.
    """
    alive = [measured for measured in measurements if measured.is_complete(widest)]
    options = [option for measured in alive for option in _options(measured)]
    best: Choice | None = None
    for option in options:
        better = best is None or _rank(option, widest) > _rank(best, widest)
        if better or (
            best and _rank(option, widest) == _rank(best, widest) and is_faster(option.measured, best.measured)
        ):
            best = option
    return best


def _options(measured: Measurement) -> list[Choice]:
    """What one setting can promise."""
    classes = width_classes(measured)
    if not measured.stable[1] or not classes:
        return [Choice(measured, ExactnessLevel.UNVERIFIED, tuple(sorted(measured.rows)))]
    options = [_single_rows(measured, classes[0])]  # the first class has the smallest width
    if not measured.is_recurrent:  # pad rows would stay in the state
        options += [Choice(measured, ExactnessLevel.PADDED, widths) for widths in classes[1:]]
    return options


def _single_rows(measured: Measurement, widths: Sequence[int]) -> Choice:
    """
    The class of single rows as far as it has no gap and sequences do not disturb each other in it.

    Within it a step of any row count, of any sequences, runs as it is.
    """
    gapless = [width for index, width in enumerate(widths) if width == index + 1]
    disturbed = [rows for rows, same in measured.companions.items() if not same and rows <= len(gapless)]
    return Choice(measured, ExactnessLevel.BITWISE, tuple(gapless[: min(disturbed, default=len(gapless) + 1) - 1]))


def _rank(option: Choice, widest: int) -> tuple[int, int, int]:
    """Larger is better: the kind of promise, how little padding a single row needs, the widths covered."""
    useful = len(option.widths) >= min(_USEFUL_WIDTH, widest)
    kind = {
        ExactnessLevel.BITWISE: 4 if useful else 2,
        ExactnessLevel.PADDED: 3 if useful else 1,
        ExactnessLevel.UNVERIFIED: 0,
    }
    return (kind[option.level], -option.widths[0], len(option.widths))


def is_faster(measured: Measurement, other: Measurement) -> bool:
    """
    Whether *measured* should replace *other*, which promises as much.

    The setting with more switched on must be clearly faster, whichever of the two is asked for.
    """
    ratios = [time / other.milliseconds[w] for w, time in measured.milliseconds.items() if w in other.milliseconds]
    ratio = math.exp(sum(math.log(value) for value in ratios) / len(ratios)) if ratios else 1.0
    mine, theirs = _extras(measured.settings), _extras(other.settings)
    return ratio < (_CLEARLY_FASTER if mine > theirs else 1.0 / _CLEARLY_FASTER if mine < theirs else 1.0)


def _extras(settings: ProbeSettings) -> int:
    return int(settings.extra_buffers) + int(settings.flash_attention)
