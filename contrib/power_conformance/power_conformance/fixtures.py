"""What the factories of the hook ``power_register_fixtures`` return, as subjects."""

from __future__ import annotations

from typing import Any

from power_conformance.subjects import DEFAULT_OPTIONS, DrafterSubject, TargetSubject

__all__ = ["drafter_subject", "target_subject"]


def target_subject(made: Any, *, seed: int = 0, again: str | None = None) -> TargetSubject:
    """The subject of a target fixture: a model, or a model and the options to try it with."""
    model, options = made if isinstance(made, tuple) else (made, [DEFAULT_OPTIONS])
    return TargetSubject(model, tuple(options), seed=seed, again=again)


def drafter_subject(made: Any, *, seed: int = 0) -> DrafterSubject:
    """The subject of a drafter fixture: a drafter and a target it can draft for."""
    drafter, model = made
    return DrafterSubject(drafter, model, seed=seed)
