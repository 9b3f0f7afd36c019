"""Rules of drafters: where a proposal ends that is told to stop, and what that leaves behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import mul

from attrs import frozen

from power_conformance.drafting import Draft, DraftRun, drafting, parts
from power_conformance.failures import fail, refuse
from power_conformance.registry import rule
from power_conformance.subjects import DrafterSubject

_STOP = "DraftRequest.stop_below in power_core/drafter.py; When a draft stops, in docs/policies.md"
_TEXT = 40
_LIMIT = 6


@rule("D-STOP-01", look=_STOP)
def check_stops_within_the_proposal(subject: DrafterSubject) -> None:
    """
    A proposal that is told to stop is the beginning of the one that is not, or all of it, because a bound on time has
    no say in which tokens are likely.
    """
    for trial in _trials(subject):
        if trial.got != _beginning(trial.whole, len(trial.got[0])):
            fail(f"proposed {trial.got}, told to stop below {trial.bound:.4g}", f"a beginning of {trial.whole}")


@rule("D-STOP-02", look=_STOP)
def check_stops_where_it_is_told(subject: DrafterSubject) -> None:
    """
    A drafter that declares `sequential` ends a proposal with the first token at which the product of its confidences
    is below `stop_below`, because each token before that is worth its time, and none after.
    """
    if not subject.drafter.requirements().sequential:
        refuse("the drafter does not declare `sequential`")
    trials = [trial for trial in _trials(subject) if trial.whole[1]]
    if not trials:
        refuse("the drafter gives no confidences")
    for trial in trials:
        chances = list(accumulate(trial.whole[1] or (), mul))
        count = next((i for i, chance in enumerate(chances, 1) if chance < trial.bound), len(chances))
        if len(trial.got[0]) != count:
            fail(
                f"ended after {len(trial.got[0])} tokens, told to stop below {trial.bound:.4g}",
                f"the first {count} of {len(chances)} tokens whose products of confidences are {chances}",
            )


@rule("D-STOP-03", look=_STOP)
def check_stopping_leaves_no_trace(subject: DrafterSubject) -> None:
    """
    Where a proposal stopped changes no later one, because the bound comes of measured times and a draft of the text
    alone.
    """
    text = subject.text(_TEXT)
    with drafting(subject) as run:
        expected = run.follow(0, text, limit=_LIMIT)
    _expect_any(expected)
    for told in (0, 1):
        with drafting(subject) as run:
            run.begin(0, text[:10], text[10])
            for number, part in enumerate(parts(text[11:])):
                bounds = _bounds(expected[number][1])
                is_told = number % 2 == told
                got = run.round(0, part, _LIMIT, bounds[number // 2 % len(bounds)] if is_told else 0.0)
                if not is_told and got != expected[number]:
                    fail(f"proposed {got} in round {number}, having been told to stop before", f"{expected[number]}")


@frozen
class _Trial:
    """The proposals of one state: *whole* where it is told nothing, *got* where it is to stop below *bound*."""

    whole: Draft
    bound: float
    got: Draft


def _trials(subject: DrafterSubject) -> list[_Trial]:
    """Every bound worth trying in each state along a text."""
    text = subject.text(_TEXT)
    trials = []
    with drafting(subject) as run:
        run.begin(0, text[:11], text[11])
        for part in parts(text[12:]):
            whole = _undone(run, 0.0)
            trials += [_Trial(whole, bound, _undone(run, bound)) for bound in _bounds(whole[1])]
            run.round(0, part, _LIMIT)
    _expect_any(trial.whole for trial in trials)
    return trials


def _undone(run: DraftRun, stop_below: float) -> Draft:
    """A proposal that is taken back."""
    mark = run.draft.checkpoint(0)
    draft = run.propose(0, _LIMIT, stop_below)
    run.draft.restore(0, mark)
    return draft


def _bounds(confidences: Sequence[float] | None) -> list[float]:
    """
    Above 1, and half-way from each product of *confidences* to the next, from the last one to 0.

    A drafter may multiply in another precision: products that are close to each other have no bound between them.
    """
    products = [1.0, *accumulate(confidences or (), mul), 0.0]
    return [2.0, *((high + low) / 2 for high, low in pairwise(products) if low < 0.99 * high)]


def _beginning(whole: Draft, count: int) -> Draft:
    ids, confidences = whole
    return ids[:count], None if confidences is None else confidences[:count]


def _expect_any(drafts: Iterable[Draft]) -> None:
    if not any(ids for ids, _ in drafts):
        refuse("the drafter proposes nothing for these texts")
