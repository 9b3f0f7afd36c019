"""Rules of targets: what `Rows` answers."""

from __future__ import annotations

import numpy as np
from attrs import evolve

from power_conformance.failures import fail, refuse
from power_conformance.probing import PROMPT, Probe, Reference, expect_same, is_same
from power_conformance.registry import rule
from power_conformance.subjects import TargetSubject
from power_core.errors import PowerError
from power_core.target import RowBatch, SessionOptions
from power_core.types import Capability

_ROWS = "Rows in power_core/target.py"
_HEX = frozenset("0123456789abcdef")


@rule("T-IDENTITY-01", look="TargetIdentity in power_core/types.py")
def check_identity(subject: TargetSubject) -> None:
    """The identity names content: two SHA-256 digests and the sizes that rows and tokenizer really have."""
    identity, tokenizer = subject.model.identity, subject.model.tokenizer
    for name in ("file_sha256", "tokenizer_sha256"):
        value = getattr(identity, name)
        if len(value) != 64 or not _HEX.issuperset(value):
            fail(f"has {name} {value!r}", "64 hex digits")
    if identity.vocab_size != tokenizer.vocab_size:
        fail(f"declared {identity.vocab_size} ids, its tokenizer {tokenizer.vocab_size}", "one number")
    for name in ("name", "architecture", "hidden_size", "num_layers"):
        if not getattr(identity, name):
            fail(f"has {name} {getattr(identity, name)!r}", "what the model has")


@rule("T-LOGITS-01", look=_ROWS)
def check_logits(subject: TargetSubject) -> None:
    """Logits are float32[vocab] and finite, because the sampler takes their exponentials."""
    for options in subject.options:
        with subject.session(options) as session:
            probe = Probe(session)
            for row in [probe.open(0, subject.text(PROMPT)), *probe.decode(0, subject.text(3, stream=1))]:
                if row.dtype != np.float32 or row.shape != (subject.model.tokenizer.vocab_size,):
                    fail(f"answered {row.dtype}{list(row.shape)}", f"float32[{subject.model.tokenizer.vocab_size}]")
                if not np.isfinite(row).all():
                    fail(f"answered {int((~np.isfinite(row)).sum())} logits that are not finite", "finite logits")


@rule("T-LOGITS-02", look=_ROWS)
def check_rows_are_distinct(subject: TargetSubject) -> None:
    """Reading one row leaves the others as they were, because rows are compared in any order."""
    for options in subject.options:
        with subject.session(options) as session:
            probe = Probe(session)
            probe.open(0, subject.text(PROMPT))
            count = min(4, session.profile.decode.max_rows)
            rows = probe.forward((0, subject.text(count, stream=1))).rows
            copies = [rows.logits(i).copy() for i in range(count)]
            views = [rows.logits(i) for i in reversed(range(count))][::-1]
            for i in range(count):
                if not is_same(views[i], copies[i]):
                    fail(f"row {i} changed when other rows were read", "an answer of its own for each row")


@rule("T-LOGITS-03", look=_ROWS)
def check_selected_rows(subject: TargetSubject) -> None:
    """Rows are numbered as in the batch, whichever of them were asked for, because most prompt rows are not."""
    for options in subject.options:
        prompt, text = subject.text(PROMPT), subject.text(4, stream=1)
        reference = Reference(subject, options, prompt)
        with subject.session(options) as session:
            probe = Probe(session)
            count = min(4, session.profile.decode.max_rows)
            for outputs in range(1, count + 1):
                probe.open(0, prompt)
                rows = probe.forward((0, text[:count]), outputs=outputs).rows
                for i in range(count - outputs, count):
                    did = f"row {i} of {count}, with the last {outputs} read back,"
                    expect_same(rows.logits(i), reference.after(text[: i + 1]), did)
                session.close(0)


@rule("T-GREEDY-01", look=_ROWS)
def check_greedy(subject: TargetSubject) -> None:
    """`greedy(i)` is the lowest id of the largest logit of row i, because greedy requests read nothing else."""
    for options in subject.options:
        with subject.session(options) as session:
            probe, shape = Probe(session), session.profile.decode
            probe.open(0, subject.text(PROMPT))
            for stream in range(8):
                count = min(4, shape.max_rows, session.context_size - session.length(0))
                if count < 1:
                    break
                rows = probe.forward((0, subject.text(count, stream=stream))).rows
                for i in range(count):
                    got, expected = rows.greedy(i), int(np.argmax(rows.logits(i)))
                    if type(got) is not int or got != expected:
                        fail(f"greedy({i}) is {got!r}", f"the int {expected}, argmax of logits({i})")


@rule("T-ROWS-01", look=_ROWS)
def check_rows_stay_valid(subject: TargetSubject) -> None:
    """
    Rows answer until the next forward, whatever is cut or restored meanwhile, because a commit cuts before a
    drafter reads.
    """
    for options in subject.options:
        text = subject.text(3, stream=1)
        with subject.session(options) as session:
            probe = Probe(session)
            probe.open(0, subject.text(PROMPT))
            count = min(3, session.profile.decode.max_rows)
            mark = session.checkpoint(0, count)
            rows = probe.forward((0, text[:count])).rows
            before = [(rows.logits(i).copy(), rows.greedy(i)) for i in range(count)]
            if session.can_truncate(0, PROMPT + 1):
                session.truncate(0, PROMPT + 1)
            if session.can_restore(0, mark):
                session.restore(0, mark)
            for i, (logits, greedy) in enumerate(before):
                expect_same(rows.logits(i), logits, f"row {i}, read after a truncate and a restore,")
                if rows.greedy(i) != greedy:
                    fail(f"greedy({i}) became {rows.greedy(i)} after a truncate and a restore", f"still {greedy}")


@rule("T-ARGS-01", look="RowBatch in power_core/target.py")
def check_batch_is_left_alone(subject: TargetSubject) -> None:
    """A forward leaves its batch as it was, because the scheduler reads it again to find its rows."""
    for options in subject.options:
        with subject.session(options) as session:
            probe = Probe(session)
            session.open(0)
            count = min(3, session.profile.decode.max_rows)
            probe.batch.add_chain(0, 0, subject.text(count), 1)
            before = _contents(probe.batch)
            session.forward(probe.batch, session.profile.decode)
            if _contents(probe.batch) != before:
                fail("changed the batch it was given", "a batch that still holds the rows the caller put there")


@rule("T-HIDDEN-01", look="Rows.hidden and SessionOptions.hidden_layers in power_core/target.py")
def check_hidden_states(subject: TargetSubject) -> None:
    """
    Hidden states are float32[hidden_size], finite, and there for every row of the batch, because drafters read
    prompts too.
    """
    options = _with_hidden(subject)
    size = subject.model.identity.hidden_size
    with subject.session(options) as session:
        probe = Probe(session)
        session.open(0)
        prompt = subject.text(PROMPT)
        rows = probe.forward((0, prompt), shape=session.profile.prefill, outputs=1).rows
        for layer in options.hidden_layers:
            for i in range(len(prompt)):
                state = rows.hidden(i, layer)
                if state.dtype != np.float32 or state.shape != (size,) or not np.isfinite(state).all():
                    fail(f"hidden({i}, {layer}) is {state.dtype}{list(state.shape)}", f"finite float32[{size}]")


@rule("T-HIDDEN-02", look="Rows.hidden and SessionOptions.hidden_layers in power_core/target.py")
def check_hidden_states_are_the_rows_own(subject: TargetSubject) -> None:
    """
    A row's hidden state is that of plain decoding, bit for bit and layer by layer, because drafters are trained on
    it.
    """
    options = _with_hidden(subject)
    prompt, text = subject.text(PROMPT), subject.text(3, stream=1)
    with subject.session(options) as session:
        probe = Probe(session)
        count = min(3, session.profile.decode.max_rows)
        probe.open(0, prompt)
        plain = []
        for token in text[:count]:
            rows = probe.forward((0, [token])).rows
            plain.append([rows.hidden(0, layer).copy() for layer in options.hidden_layers])
        session.close(0)
        probe.open(0, prompt)
        rows = probe.forward((0, text[:count])).rows
        for i, states in enumerate(plain):
            for layer, expected in zip(options.hidden_layers, states, strict=True):
                if not is_same(rows.hidden(i, layer).copy(), expected):
                    fail(f"hidden({i}, {layer}) of {count} rows is not that of a single row", "the same bits")


def _with_hidden(subject: TargetSubject) -> SessionOptions:
    """
    Options that ask for the layers the subject names, else for the first and the last block; or a refusal where the
    target has no hidden states.
    """
    last = subject.model.identity.num_layers - 1
    layers = subject.options[0].hidden_layers or tuple(sorted({0, last}))
    options = evolve(subject.options[0], hidden_layers=layers)
    try:
        with subject.session(options) as session:
            offered = Capability.HIDDEN_STATES in session.capabilities
    except PowerError as exc:
        refuse(f"no hidden states: {exc}")
    if not offered:
        refuse("the session does not declare `hidden-states`")
    return options


def _contents(batch: RowBatch) -> tuple[int, bytes]:
    arrays = (batch.tokens, batch.positions, batch.seqs, batch.parents, batch.outputs)
    return batch.n, b"".join(array[: batch.n].tobytes() for array in arrays)
