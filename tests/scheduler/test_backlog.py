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
        self.state, self.observed, self.restored = {}, 0, 0

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
        self.restored += 1
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


@pytest.mark.parametrize(("block", "told_at"), [(1, 1024), (256, 1024), (300, 1200)])
def test_what_is_kept_is_bounded(block, told_at):
    """From 1,024 rows on the drafter is told all the same, so a long context costs no more memory than that."""
    inner = Recorder()
    session = BacklogSession(inner, LAYERS)
    session.begin(0, [1])
    for position in range(0, 2 * told_at, block):
        session.checkpoint(0)
        assert inner.observed == position // told_at
        assert session.backlog(0) == position % told_at
        session.observe(0, [], HiddenRows(States(position, block), 0, block, position))


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


def test_rows_are_told_of_with_their_place():
    """Of two commits at once, neither of which begins at the first row of its forward, and one without rows."""
    inner, seen = Recorder(), []
    inner.observe = lambda seq, committed, rows: seen.append((seq, [*committed], rows))
    session = BacklogSession(inner, LAYERS)
    session.begin(0, [1])
    session.observe(0, [5, 6, 7], HiddenRows(States(9, 6), 1, 3, 10))
    session.observe(0, [8], None)
    session.observe(0, [9, 4], HiddenRows(States(11, 4), 2, 2, 13))
    session.catch_up(0)
    ((seq, committed, rows),) = seen
    assert (seq, committed) == (0, [5, 6, 7, 8, 9, 4])
    assert (rows.start, rows.count, rows.position) == (0, 5, 10)
    assert [*rows.rows.hidden(slice(0, 5), 3)[:, 0]] == [10, 11, 12, 13, 14]
    assert [*rows.rows.hidden(4, 1)] == [14, 1]
    session.observe(0, [3], None)
    session.catch_up(0)
    session.catch_up(0)
    assert seen[1:] == [(0, [3], None)]


def test_an_undone_step_undoes_the_proposal():
    """Only that: where nothing was proposed since, the drafter is left alone."""
    inner = Recorder()
    session = BacklogSession(inner, LAYERS)
    session.begin(0, [1])
    for _ in range(2):
        session.observe(0, [2], HiddenRows(States(0, 1), 0, 1, 0))
        session.catch_up(0)
        known = [*inner.state[0]]
        session.restore(0, session.checkpoint(0))
        mark = session.checkpoint(0)
        restored = inner.restored
        session.propose([DraftRequest(0, 2, 4)])
        session.restore(0, mark)
        session.restore(0, mark)
        assert (inner.state[0], inner.restored) == (known, restored + 1)


def test_a_kept_step_keeps_the_proposal_until_the_drafter_is_told_more():
    """Undoing the step after it takes back what that one brought, and no more."""
    inner = Recorder()
    session = BacklogSession(inner, LAYERS)
    session.begin(0, [1])
    session.propose([DraftRequest(0, 1, 4)])
    session.observe(0, [2, 3], HiddenRows(States(0, 2), 0, 2, 0))
    session.observe(0, [9], None)
    mark = session.checkpoint(0)
    session.observe(0, [4, 5, 6], HiddenRows(States(2, 3), 0, 3, 2))
    session.restore(0, mark)
    assert (session.backlog(0), inner.restored, inner.observed) == (2, 0, 0)
    session.catch_up(0)
    assert told(inner.state[0])[1] == [1, 2, 3, 9]


def test_sequences_are_told_apart():
    """One is ended and the other goes on; a closed session is closed inside as well."""
    inner = Recorder()
    session = BacklogSession(inner, LAYERS)
    for seq in (0, 1):
        session.begin(seq, [seq])
        session.observe(seq, [7], HiddenRows(States(0, 1 + seq), 0, 1 + seq, 0))
    assert session.propose([DraftRequest(1, 7, 4)]) == [Proposal([5])]
    assert (session.backlog(0), session.backlog(1)) == (1, 0)
    session.end(0)
    assert [*inner.state] == [1]
    with pytest.raises(KeyError):
        session.backlog(0)
    session.close()
    assert not inner.state


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


def test_a_failure_to_take_rows_in_undoes_the_proposal_as_well():
    """The drafter is brought back once: undoing the step then has nothing more to undo."""
    inner = Recorder()
    session = BacklogSession(inner, LAYERS)
    session.begin(0, [1])
    session.propose([DraftRequest(0, 1, 4)])
    mark = session.checkpoint(0)
    session.observe(0, [2], HiddenRows(States(0, 1), 0, 1, 0))
    inner.observe = lambda *_args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        session.catch_up(0)
    assert (inner.state[0], session.backlog(0)) == ([1], 1)
    session.restore(0, mark)
    assert (inner.restored, session.backlog(0)) == (1, 0)


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
