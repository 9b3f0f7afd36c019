"""The scripted parts: they do what a real backend does, and catch an engine that breaks a rule."""

import subprocess
import sys
from itertools import product
from threading import Thread

import numpy as np
import pytest

from power_core.drafter import Drafter, DraftRequest, HiddenRows, Proposal
from power_core.errors import BackendError, RequestError
from power_core.request import GenerationRequest, SamplingSpec
from power_core.target import ChatMessage, RowBatch, SessionOptions, TargetBackend
from power_core.testing import (
    Faults,
    LiarDrafter,
    OracleDrafter,
    ProtocolViolation,
    ScriptedBackend,
    ScriptedDrafter,
    ScriptedTarget,
    ScriptedTokenizer,
    next_table,
    padded_class,
    plain_choice,
    plain_decode,
    scripted_plugins,
    two_classes,
)
from power_core.types import Capability, FinishReason


def test_importable_without_pytest_and_native_libraries():
    """Plugin authors get it without a test runner, llama.cpp or torch being imported."""
    code = (
        "import sys; sys.modules['pytest'] = None; import power_core.testing;"
        "print(sorted({'llama_cpp', 'torch', 'gguf'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def session():
    """A free session of two sequences, sequence 0 open."""
    made = ScriptedTarget(8, context_size=16).open_session(SessionOptions(max_sequences=2, hidden_layers=(1,)))
    made.open(0)
    return made


def forward(session, tokens, *, seq=0, at=None, outputs=1):
    batch = RowBatch(32)
    batch.add_chain(seq, session.length(seq) if at is None else at, tokens, outputs)
    return session.forward(batch, session.profile.decode)


def test_logits_depend_on_the_tokens_alone(session):
    """One forward or several, after a rollback or not: the same prefix gives the same bits; another gives others."""
    target = ScriptedTarget(8)
    together = forward(session, [1, 2, 3], outputs=3)
    rows = [together.logits(i).copy() for i in range(3)]
    session.truncate(0, 1)
    assert np.array_equal(forward(session, [2]).logits(0), rows[1])
    assert np.array_equal(forward(session, [3]).logits(0), rows[2])
    assert not np.array_equal(target.logits([2, 1, 3]), rows[2])
    assert not np.array_equal(ScriptedTarget(8, seed=1).logits([1, 2, 3]), rows[2])


def test_order_makes_texts_repeat():
    """With an order of two, what came before the last two tokens does not count."""
    target = ScriptedTarget(8, order=2)
    assert np.array_equal(target.logits([5, 6, 1, 2]), target.logits([7, 1, 2]))
    assert not np.array_equal(target.logits([5, 6, 1, 2]), target.logits([5, 6, 2, 2]))


BROKEN_FORWARDS = {
    "gap": lambda s: forward(s, [1], at=3),
    "closed sequence": lambda s: forward(s, [1], seq=1, at=0),
    "beyond the context": lambda s: forward(s, [1] * 17, outputs=0),
    "no token": lambda s: forward(s, [8]),
    "no rows": lambda s: s.forward(RowBatch(1), s.profile.decode),
    "too wide": lambda s: (s.open(1), _two_chains(s, 9, 8)),
    "two chains of one sequence": lambda s: _two_chains(s, 1, 1, second=0),
    "foreign class": lambda s: _with_shape(s, two_classes()(SessionOptions()).prefill),
}


def _two_chains(session, first, second_rows, *, second=1):
    batch = RowBatch(32)
    batch.add_chain(0, 0, [1] * first, 0)
    batch.add_chain(second, 0, [1] * second_rows, 0)
    return session.forward(batch, session.profile.decode)


def _with_shape(session, shape):
    batch = RowBatch(8)
    batch.add_chain(0, 0, [1], 1)
    return session.forward(batch, shape)


@pytest.mark.parametrize("broken", BROKEN_FORWARDS.values(), ids=BROKEN_FORWARDS)
def test_a_broken_forward_is_a_violation_and_changes_nothing(session, broken):
    """Each rule of `RowBatch` is checked; the violation is kept, so that an engine cannot swallow it."""
    with pytest.raises(ProtocolViolation):
        broken(session)
    assert (session.length(0), session.history) == (0, [])
    with pytest.raises(ProtocolViolation):
        session.assert_clean()


BROKEN_CALLS = {
    "opened twice": lambda s, rows: s.open(0),
    "no such sequence": lambda s, rows: s.open(2),
    "closed twice": lambda s, rows: (s.close(0), s.close(0)),
    "cut to more": lambda s, rows: s.truncate(0, 5),
    "row without outputs": lambda s, rows: rows.logits(0),
    "row out of range": lambda s, rows: rows.greedy(3),
    "late question": lambda s, rows: (forward(s, [1]), rows.greedy(2)),
    "layer not ordered": lambda s, rows: rows.hidden(0, 2),
    "foreign checkpoint": lambda s, rows: s.can_restore(0, object()),
    "open after shutdown": lambda s, rows: (s.shutdown(), s.open(0)),
}


@pytest.mark.parametrize("broken", BROKEN_CALLS.values(), ids=BROKEN_CALLS)
def test_a_broken_call_is_a_violation(session, broken):
    """What a real backend might let pass, or answer wrongly, is refused."""
    rows = forward(session, [1, 2, 3], outputs=1)
    with pytest.raises(ProtocolViolation):
        broken(session, rows)


def test_rows_survive_truncation_but_cannot_be_written(session):
    """Rows are valid until the next forward, truncations in between included, and are no one's to change."""
    rows = forward(session, [1, 2, 3], outputs=3)
    before = rows.logits(2).copy()
    session.truncate(0, 1)
    assert np.array_equal(rows.logits(2), before)
    assert rows.greedy(2) == before.argmax()
    with pytest.raises(ValueError, match="read-only"):
        rows.logits(2)[0] = 1
    assert not np.array_equal(rows.hidden(1, 1), rows.hidden(2, 1))


def test_a_leak_is_found(session):
    """A sequence that nobody closed fails `assert_all_closed`."""
    with pytest.raises(ProtocolViolation, match="never closed"):
        session.assert_all_closed()


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("capacity", [0, 1, 2, 8])
def test_a_bounded_window(capacity, rows):
    """Depth is min(S, rows of the last forward - 1), once a forward; a refusal leaves the state untouched."""
    session = ScriptedTarget(8, rollback_capacity=capacity, snapshots=False).open_session(SessionOptions())
    session.open(0)
    forward(session, [1, 2, 3])
    forward(session, [4, 5, 6, 7][:rows])
    depth = min(capacity, rows - 1)
    assert [session.can_truncate(0, 3 + rows - d) for d in range(3 + rows)] == [d <= depth for d in range(3 + rows)]
    with pytest.raises(BackendError):
        session.truncate(0, 3 + rows - depth - 1)
    assert session.length(0) == 3 + rows
    session.truncate(0, 3 + rows - depth)
    assert session.can_truncate(0, session.length(0) - 1) is (depth == 0 and capacity > 0 and rows > 1)
    assert session.can_truncate(0, 0)


def test_checkpoints_of_a_bounded_memory():
    """With snapshots a checkpoint can be restored again and again, for the rows it was asked to cover."""
    session = ScriptedTarget(8, rollback_capacity=1).open_session(SessionOptions())
    session.open(0)
    forward(session, [1, 2])
    checkpoint = session.checkpoint(0, 3)
    for _ in range(2):
        forward(session, [3, 4, 5])
        assert not session.can_truncate(0, 2)
        session.restore(0, checkpoint)
        assert session.tokens(0) == (1, 2)
    forward(session, [3, 4, 5, 6])
    assert not session.can_restore(0, checkpoint)
    session.close(0)
    session.open(0)
    forward(session, [1, 2])
    assert not session.can_restore(0, checkpoint), "it belongs to an earlier sequence of that number"


def test_without_snapshots_only_the_window_can_be_restored():
    """A memory that keeps none refuses to restore beyond its window, and says so when asked."""
    session = ScriptedTarget(8, rollback_capacity=1, snapshots=False).open_session(SessionOptions())
    assert Capability.STATE_SNAPSHOT not in session.capabilities
    session.open(0)
    forward(session, [1, 2])
    checkpoint = session.checkpoint(0, 3)
    forward(session, [3])
    assert not session.can_restore(0, checkpoint)
    with pytest.raises(BackendError):
        session.restore(0, checkpoint)
    assert session.length(0) == 3


def test_what_was_evaluated_outside_the_class_stays_disturbed():
    """Logits tell in which class each token of the prefix was evaluated, as a real cache does."""
    target = ScriptedTarget(8, profile=two_classes(4))

    def logits(*in_prefill):
        session = target.open_session(SessionOptions())
        session.open(0)
        batch = RowBatch(1)
        for position, wide in enumerate(in_prefill):
            batch.clear()
            batch.add_chain(0, position, [position], 1)
            rows = session.forward(batch, session.profile.prefill if wide else session.profile.decode)
        return tuple(rows.logits(0))

    distinct = {logits(*classes) for classes in product([False, True], repeat=3)}
    assert len(distinct) == 8
    assert logits(False, False, False) == tuple(target.logits([0, 1, 2]))


def test_pad_rows_are_recorded_and_nothing_else():
    """A padded step computes more rows than it was given, and the history says both."""
    session = ScriptedTarget(8, profile=padded_class()).open_session(SessionOptions())
    session.open(0)
    assert forward(session, [1]).width == 2
    [record] = session.history
    assert (record.rows, record.width, session.length(0)) == (1, 2, 1)
    [chain] = record.chains
    assert (chain.seq, chain.start, chain.tokens, chain.outputs) == (0, 0, (1,), 1)


@pytest.mark.parametrize("after", [False, True])
def test_a_failed_forward_has_no_effect(after):
    """Told to fail before or after: the sequence is as it was, and the next forward succeeds."""
    faults = Faults({"forward": 1}, after=after)
    session = ScriptedTarget(8, faults=faults).open_session(SessionOptions())
    session.open(0)
    with pytest.raises(BackendError, match="told to fail"):
        forward(session, [1])
    assert (session.length(0), len(faults.fired)) == (0, 1)
    forward(session, [1])


def test_two_threads_in_one_session_are_a_violation():
    """A session belongs to one thread at a time; a second caller is caught in the act."""
    sessions = []

    def intruder():
        with pytest.raises(ProtocolViolation):
            sessions[0].open(1)

    def intrude(call):
        if call.name == "length" and not call.done:
            thread = Thread(target=intruder)
            thread.start()
            thread.join()

    session = ScriptedTarget(8, faults=Faults(hook=intrude)).open_session(SessionOptions(max_sequences=2))
    sessions.append(session)
    session.open(0)
    session.length(0)
    assert "another call" in session.violations[0]


@pytest.fixture
def draft():
    """A draft session that has begun sequence 0 with the tokens 1, 2."""
    drafter = ScriptedDrafter([[3], [4, 5]])
    made = drafter.open(None, None)
    made.begin(0, [1, 2])
    return made


def ask(seq=0, anchor=2, most=4):
    return [DraftRequest(seq, anchor, most)]


BROKEN_DRAFTING = {
    "begun twice": lambda d: d.begin(0, [1]),
    "begun empty": lambda d: d.begin(1, []),
    "not begun": lambda d: d.observe(1, [1], None),
    "no checkpoint": lambda d: d.propose(ask()),
    "wrong anchor": lambda d: (d.checkpoint(0), d.propose(ask(anchor=1))),
    "nothing wanted": lambda d: (d.checkpoint(0), d.propose(ask(most=0))),
    "asked twice": lambda d: (d.checkpoint(0), d.propose(ask() + ask())),
    "proposal not observed": lambda d: (d.checkpoint(0), d.propose(ask()), d.checkpoint(0)),
    "nothing observed": lambda d: d.observe(0, [], None),
    "unasked rows": lambda d: d.observe(0, [3], HiddenRows(None, 0, 1, 0)),
    "ended twice": lambda d: (d.end(0), d.end(0)),
    "foreign checkpoint": lambda d: d.restore(0, object()),
    "earlier life's checkpoint": lambda d: _restore_across_lives(d),
    "used after close": lambda d: (d.close(), d.checkpoint(0)),
}


def _restore_across_lives(draft):
    old = draft.checkpoint(0)
    draft.end(0)
    draft.begin(0, [1, 2])
    draft.restore(0, old)


@pytest.mark.parametrize("broken", BROKEN_DRAFTING.values(), ids=BROKEN_DRAFTING)
def test_a_broken_rule_of_drafting_is_a_violation(draft, broken):
    """Every rule of `DraftSession` is checked and the violation kept."""
    with pytest.raises(ProtocolViolation):
        broken(draft)
    with pytest.raises(ProtocolViolation):
        draft.assert_all_ended()


def test_a_restored_draft_repeats_its_round(draft):
    """Restore forgets the proposal and what was observed; the script goes back with it."""
    checkpoint = draft.checkpoint(0)
    [first] = draft.propose(ask())
    draft.observe(0, [3], None)
    draft.restore(0, checkpoint)
    draft.checkpoint(0)
    [again] = draft.propose(ask())
    assert again == first
    draft.observe(0, [3, 4], None)
    draft.end(0)
    [ended] = draft.ended
    assert (ended.prompt, ended.committed) == ((1, 2), (3, 4))
    assert [record.max_tokens for record in draft.history] == [4, 4]


@pytest.mark.parametrize(("stop_below", "count"), [(0.0, 3), (0.25, 3), (0.3, 2), (0.5, 2), (0.6, 1), (2.0, 1)])
@pytest.mark.parametrize("sequential", [True, False])
def test_a_sequential_draft_stops_where_it_is_told(sequential, stop_below, count):
    """With the first token at which the product of confidences is below; one of another kind does not listen."""
    drafter = ScriptedDrafter([[3, 4, 5]], confidences=0.5, sequential=sequential)
    assert drafter.requirements().sequential is sequential
    draft = drafter.open(None, None)
    draft.begin(0, [1, 2])
    draft.checkpoint(0)
    [proposal] = draft.propose([DraftRequest(0, 2, 3, stop_below)])
    kept = count if sequential else 3
    assert proposal == Proposal([3, 4, 5][:kept], [0.5] * kept)


def test_a_draft_that_never_ended_is_a_leak(draft):
    """A sequence that was begun and not ended fails `assert_all_ended`."""
    with pytest.raises(ProtocolViolation, match="never ended"):
        draft.assert_all_ended()


def test_scripted_parts_satisfy_the_protocols():
    """The runtime's own checks accept them, and plugins made of them load like installed ones."""
    backend, drafter = ScriptedBackend(), LiarDrafter(8)
    assert isinstance(backend, TargetBackend)
    assert isinstance(drafter, Drafter)
    plugins = scripted_plugins(targets={"scripted": backend}, strategies={"liar": drafter, "new": LiarDrafter})
    assert plugins.failures == []
    assert plugins.registry.strategies.get("liar").value(None) is drafter


def test_tokenizer_round_trip():
    """Special ids come from the template only: a marker inside a message stays text, or is refused."""
    tokenizer = ScriptedTokenizer.chat()
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("hé €😀"))).decode() == "hé €😀"
    with pytest.raises(RequestError, match="no token for the byte 0x3c"):
        tokenizer.encode_chat([ChatMessage("user", "<|assistant|>")])
    with pytest.raises(RequestError, match="unknown role"):
        tokenizer.encode_chat([ChatMessage("wizard", "a")])
    with pytest.raises(RequestError, match="no chat template"):
        ScriptedTokenizer([b"a"]).encode_chat([])


def test_plain_decoding_of_a_known_text():
    """The reference itself, against answers worked out by hand."""
    cycle = ScriptedTarget(4, logits=next_table([1, 2, 3, 0]), context_size=6)
    ask = GenerationRequest((0,))
    assert plain_decode(cycle, ask).token_ids == (1, 2, 3, 0, 1, 2)
    assert plain_decode(cycle, ask.with_(max_tokens=2)).text == "bc"
    assert plain_decode(cycle, ask.with_(max_tokens=0)).token_ids == ()
    stopped = plain_decode(cycle, ask.with_(stop=("da", "d")))
    assert (stopped.text, stopped.token_ids, stopped.finish_reason) == ("bc", (1, 2, 3), FinishReason.STOP)
    ended = plain_decode(cycle, ask.with_(stop_ids=frozenset({3})))
    assert (ended.text, ended.token_ids, ended.finish_reason) == ("bc", (1, 2, 3), FinishReason.STOP)
    biased = SamplingSpec(logit_bias={1: -5.0}, presence_penalty=2.0, penalty_window=1)
    assert plain_decode(cycle, ask.with_(sampling=biased, max_tokens=4)).token_ids == (2, 3, 0, 2)


def test_plain_choice_refuses_what_it_does_not_cover():
    """No silent approximation: a grammar or an unseeded draw is an error."""
    for spec in (SamplingSpec(regex="a"), SamplingSpec(temperature=1.0)):
        with pytest.raises(ValueError, match="no grammar and no unseeded draw"):
            plain_choice(GenerationRequest((0,), sampling=spec))


def test_oracle_is_right_about_the_target():
    """What the oracle proposes is what greedy decoding gives."""
    target = ScriptedTarget(8)
    expected = plain_decode(target, GenerationRequest((1, 2), max_tokens=6)).token_ids
    assert tuple(OracleDrafter(target.greedy, 8).proposal([1, 2], 6, 0).token_ids) == expected
