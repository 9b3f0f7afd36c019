"""Driving a target session as the engine does, and remembering what it answered bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from power_conformance.failures import fail
from power_conformance.subjects import TargetSubject
from power_core.shapes import WidthClass
from power_core.target import RowBatch, Rows, SessionOptions, TargetSession
from power_core.types import SeqId, TokenId

__all__ = ["PROMPT", "Answer", "Probe", "Reference", "expect_refusal", "expect_same", "is_same"]

Row = NDArray[np.float32]
PROMPT = 5  # prompt rows of every scenario: where prompts have a class of their own, this must not vary


@frozen
class Answer:
    """A forward's rows, while they are valid, and where each chain of the batch began."""

    rows: Rows
    starts: tuple[int, ...]


@define
class Probe:
    """A session with its reusable batch; positions are the session's own lengths."""

    session: TargetSession
    batch: RowBatch = field(init=False)

    def __attrs_post_init__(self) -> None:
        profile = self.session.profile
        room = max(profile.decode.max_rows, profile.prefill.max_rows, self.session.context_size)
        self.batch = RowBatch(room + 8)  # a few rows more than may be asked for, to be refused

    def forward(
        self, *chains: tuple[SeqId, Sequence[TokenId]], shape: WidthClass | None = None, outputs: int | None = None
    ) -> Answer:
        """One forward of *chains* (sequence, tokens); the last *outputs* rows of each, or all, are read back."""
        self.batch.clear()
        starts = [
            self.batch.add_chain(seq, self.session.length(seq), tokens, len(tokens) if outputs is None else outputs)
            for seq, tokens in chains
        ]
        rows = self.session.forward(self.batch, shape or self.session.profile.decode)
        return Answer(rows, tuple(starts))

    def open(self, seq: SeqId, prompt: Sequence[TokenId], *, chunk: int | None = None) -> Row:
        """Open *seq* and evaluate *prompt* in the prefill class; logits of its last row."""
        self.session.open(seq)
        return self.prompt(seq, prompt, chunk=chunk)

    def prompt(self, seq: SeqId, prompt: Sequence[TokenId], *, chunk: int | None = None) -> Row:
        """Evaluate *prompt* in chunks of *chunk* rows; logits of its last row."""
        shape = self.session.profile.prefill
        size = min(chunk or shape.max_rows, shape.max_rows)
        row: Row = np.empty(0, np.float32)
        for start in range(0, len(prompt), size):
            part = prompt[start : start + size]
            row = self.forward((seq, part), shape=shape, outputs=1).rows.logits(len(part) - 1).copy()
        return row

    def decode(self, seq: SeqId, tokens: Sequence[TokenId]) -> list[Row]:
        """Evaluate *tokens* as one chain of the decode class; logits of every row."""
        answer = self.forward((seq, tokens))
        return [answer.rows.logits(i).copy() for i in range(len(tokens))]

    def step(self, seq: SeqId, tokens: Sequence[TokenId]) -> list[Row]:
        """Evaluate *tokens* one a forward; logits of every row."""
        return [self.decode(seq, [token])[0] for token in tokens]


class Reference:
    """
    Plain decoding of a prompt and any text after it: one token a forward, in sessions of its own.

    Args:
        subject: The target.
        options: Of the sessions.
        prompt: Evaluated in the prefill class, in as few forwards as it takes.
    """

    def __init__(self, subject: TargetSubject, options: SessionOptions, prompt: Sequence[TokenId]) -> None:
        self._subject = subject
        self._options = options
        self._prompt = prompt
        self._known: dict[tuple[TokenId, ...], Row] = {}

    def after(self, text: Sequence[TokenId]) -> Row:
        """Logits after the prompt and *text*, float32[vocab]."""
        wanted = tuple(text)
        if wanted not in self._known:
            with self._subject.session(self._options) as session:
                probe = Probe(session)
                self._known[()] = probe.open(0, self._prompt)
                for end, row in enumerate(probe.step(0, wanted), 1):
                    self._known[wanted[:end]] = row
        return self._known[wanted]

    def rows(self, text: Sequence[TokenId]) -> list[Row]:
        """Logits after the prompt and each token of *text*."""
        self.after(text)
        return [self.after(text[: end + 1]) for end in range(len(text))]


def is_same(a: Row, b: Row) -> bool:
    """Whether two rows are the same bit for bit."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def expect_same(got: Row, expected: Row, did: str) -> None:
    """Fail unless the rows are the same bit for bit; *did* says what was done before."""
    if is_same(got, expected):
        return
    if got.shape != expected.shape:
        fail(f"{did} gave logits of shape {got.shape}", f"shape {expected.shape}, as plain decoding gives")
    gap = float(np.max(np.abs(got - expected)))
    ids = f"its argmax is {int(np.argmax(got))}, plain decoding's is {int(np.argmax(expected))}"
    fail(f"{did} gave other logits: {gap:.3g} apart; {ids}", "the logits of plain decoding, bit for bit")


def expect_refusal(probe: Probe, seq: SeqId, tokens: Sequence[TokenId], *, at: int, did: str) -> None:
    """Fail unless a forward of *tokens* at position *at* raises."""
    batch = probe.batch
    batch.clear()
    batch.add_chain(seq, at, tokens, 1)
    refused = True
    with suppress(Exception):  # the protocol names BackendError; what matters is that nothing went through
        probe.session.forward(batch, probe.session.profile.decode)
        refused = False
    if not refused:
        fail(f"evaluated {did}", "an exception, and no sequence changed")
