"""The rules of stopping: what they see, and whom they do not concern."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from broken import drafters, targets
from power_conformance import ConformanceFailure, NotApplicable, find_rule
from power_conformance.subjects import DrafterSubject

from power_core.drafter import Drafter, Proposal
from power_core.testing import ScriptedDrafter

RULES = ["D-STOP-01", "D-STOP-02", "D-STOP-03"]
Stop = Callable[[drafters.StoppingSession, list[float], float], int]
right = drafters.StoppingSession.stop
WRONG: dict[str, Stop] = {
    "never": lambda _session, confidences, _below: len(confidences),
    "a token early": lambda session, confidences, below: right(session, confidences, below) - 1,
    "a token late": lambda session, confidences, below: right(session, confidences, below) + 1,
    "at once": lambda _session, confidences, below: 1 if below else len(confidences),
    "with nothing above 1": lambda session, confidences, below: 0 if below > 1 else right(session, confidences, below),
}


def copies(tokens: Sequence[int], wanted: int, _round: int) -> Proposal:
    """What followed the anchor before."""
    before = [i for i in range(len(tokens) - 1) if tokens[i] == tokens[-1]]
    return Proposal(tokens[before[-1] + 1 :][:wanted] if before else [])


def check(rule_id: str, drafter: Drafter, seed: int = 0) -> None:
    find_rule(rule_id).run(DrafterSubject(drafter, targets.good(order=2), seed=seed))


@pytest.mark.parametrize("stop", WRONG.values(), ids=WRONG)
def test_every_way_to_stop_elsewhere_is_seen(stop: Stop) -> None:
    """Each is a beginning of the whole proposal, and not the one that was asked for."""
    session_class = type("Session", (drafters.StoppingSession,), {"stop": stop})
    drafter = type("Drafter", (drafters.StoppingDrafter,), {"session_class": session_class})()
    with pytest.raises(ConformanceFailure, match="told to stop below"):
        check("D-STOP-02", drafter)


@pytest.mark.parametrize("confidence", [1.0, 0.999, 0.5, 1e-9, 0.0])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rule_id", RULES)
def test_the_scripted_drafter_stops_where_it_is_told(rule_id: str, confidence: float, seed: int) -> None:
    """The rules concern `ScriptedDrafter(sequential=True)`, however sure it is, and it keeps them."""
    check(rule_id, ScriptedDrafter(copies, confidences=confidence, sequential=True), seed)


@pytest.mark.parametrize(
    ("drafter", "unconcerned", "reason"),
    [
        (ScriptedDrafter(copies, confidences=0.5), ["D-STOP-02"], "does not declare `sequential`"),
        (ScriptedDrafter(copies, sequential=True), ["D-STOP-02"], "gives no confidences"),
        (ScriptedDrafter([], sequential=True), RULES, "proposes nothing"),
    ],
    ids=["another kind", "no confidences", "silent"],
)
def test_the_rules_say_whom_they_do_not_concern(drafter: Drafter, unconcerned: list[str], reason: str) -> None:
    """What shows nothing is not called a pass."""
    for rule_id in RULES:
        if rule_id in unconcerned:
            with pytest.raises(NotApplicable, match=reason):
                check(rule_id, drafter)
        else:
            check(rule_id, drafter)
