"""Hidden states are told late, and a drafter cannot tell the difference from being told at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_core.drafter import DraftRequest, HiddenRows, Proposal
from power_core.errors import DrafterError
from power_core.scheduler.backlog import BacklogDrafter, BacklogSession
from power_core.testing import Faults, ScriptedDrafter, ZeroDrafter

LAYERS = (1, 3)


class States:
    """The state of the row at position p in layer l is [p, l]."""

    def __init__(self, position, count):
        self.values = {
            layer: np.array([[p, layer] for p in range(position, position + count)], np.float32) for layer in LAYERS
        }

    def hidden(self, i, layer):
        return self.values[layer][i]


class Recorder:
    """A drafter's session whose state is all it was told, and whose proposals say what that is."""

    def __init__(self):
        self.state, self.observed = {}, 0

    def begin(self, seq, tokens):
        self.state[seq] = [*tokens]

    def observe(self, seq, committed, rows):
        self.observed += 1
        features = [] if rows is None else [tuple(map(float, row)) for row in rows.features(LAYERS)]
        self.state[seq] += [*features, *committed]

    def propose(self, requests):
        for request in requests:
            self.state[request.seq].append("proposed")
        return [Proposal([len(self.state[request.seq])]) for request in requests]

    def checkpoint(self, seq):
        return [*self.state[seq]]

    def restore(self, seq, checkpoint):
        self.state[seq] = [*checkpoint]

    def end(self, seq):
        del self.state[seq]

    def close(self):
        self.state.clear()


def told(state):
    """Rows and tokens each in their order; how they were mixed is nobody's business."""
    known = [each for each in state if each != "proposed"]
    return [e for e in known if isinstance(e, tuple)], [e for e in known if not isinstance(e, tuple)]


@given(steps=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=30))
@settings(max_examples=200, deadline=None)
def test_what_a_drafter_knows_when_it_proposes_is_all_that_was_committed(steps):
    """Steps that ask or not, commit 0 to 3 tokens, and are undone or not, against a drafter that is told at once."""
    eager, late = Recorder(), Recorder()
    session = BacklogSession(late, LAYERS)
    eager.begin(0, [7, 8]), session.begin(0, [7, 8])
    position = 0
    for tokens, asks, is_undone in steps:
        marks = eager.checkpoint(0), session.checkpoint(0)
        if asks:
            eager.propose([DraftRequest(0, 1, 4)]), session.propose([DraftRequest(0, 1, 4)])
            assert told(late.state[0]) == told(eager.state[0])
            assert session.backlog(0) == 0
        committed = [*range(position, position + tokens)]
        rows = HiddenRows(States(position, tokens), 0, tokens, position) if tokens else None
        if tokens:
            eager.observe(0, committed, rows), session.observe(0, committed, rows)
        if is_undone:
            eager.restore(0, marks[0]), session.restore(0, marks[1])
        else:
            position += tokens
    session.catch_up(0)
    assert told(late.state[0]) == told(eager.state[0])


def test_a_drafter_that_is_not_asked_is_told_nothing():
    inner = Recorder()
    session = BacklogSession(inner, LAYERS)
    session.begin(0, [1])
    for position in range(100):
        session.checkpoint(0)
        session.observe(0, [position], HiddenRows(States(position, 1), 0, 1, position))
    assert (inner.observed, session.backlog(0)) == (0, 100)


def test_what_is_kept_is_bounded():
    """After 1,024 rows the drafter is told all the same, so a long context costs no more memory than that."""
    inner = Recorder()
    session = BacklogSession(inner, LAYERS)
    session.begin(0, [1])
    for position in range(0, 5120, 256):
        session.checkpoint(0)
        session.observe(0, [], HiddenRows(States(position, 256), 0, 256, position))
        assert session.backlog(0) <= 1024
    assert inner.observed == 4


def test_states_are_copied():
    """The forward's memory is the next forward's."""
    inner, states = Recorder(), States(0, 2)
    session = BacklogSession(inner, LAYERS)
    session.begin(0, [1])
    session.observe(0, [5], HiddenRows(states, 0, 2, 0))
    for values in states.values.values():
        values[:] = np.nan
    session.catch_up(0)
    assert told(inner.state[0])[0] == [(0.0, 1.0, 0.0, 3.0), (1.0, 1.0, 1.0, 3.0)]


def test_a_drafter_that_fails_to_take_rows_in_can_be_told_again():
    """The states it failed at are still due, and the drafter is where it was."""
    drafter = ZeroDrafter(lambda _tokens: 0, 8, hidden_layers=LAYERS, faults=Faults({"observe": 1}))
    session = BacklogDrafter(drafter).open(None, None)
    session.begin(0, [1, 2])
    session.checkpoint(0)
    session.observe(0, [3], HiddenRows(States(0, 2), 0, 2, 0))
    with pytest.raises(Exception, match="observe"):
        session.catch_up(0)
    assert session.backlog(0) == 2
    session.catch_up(0)
    session.propose([DraftRequest(0, 3, 2)])
    session.end(0)
    drafter.assert_all_ended()


def test_a_checkpoint_of_the_past_is_refused():
    session = BacklogSession(Recorder(), LAYERS)
    session.begin(0, [1])
    early = session.checkpoint(0)
    session.observe(0, [2], HiddenRows(States(0, 1), 0, 1, 0))
    session.catch_up(0)
    for bad in (early, 5, "mark"):
        with pytest.raises(DrafterError):
            session.restore(0, bad)


def test_a_drafter_that_reads_no_states_is_left_as_it_is():
    session = BacklogDrafter(ScriptedDrafter([])).open(None, None)
    assert not isinstance(session, BacklogSession)
