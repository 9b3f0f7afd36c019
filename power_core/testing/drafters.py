"""
Drafters that are right, wrong or lying on purpose.

Each is a `power_core.drafter.Drafter` whose sessions check the protocol (see `ScriptedDraftSession`)
and are kept in `.sessions`. What they propose never changes a request's tokens: that is the claim
they are made to test.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from itertools import cycle, islice
from typing import Any, cast

from power_core.drafter import DrafterRequirements, Proposal
from power_core.target import TargetModel, TargetSession
from power_core.testing.drafting import DraftRecord, Propose, ScriptedDraftSession
from power_core.testing.faults import Faults
from power_core.types import Capability, TokenId

__all__ = [
    "AdversarialDrafter",
    "LiarDrafter",
    "OracleDrafter",
    "PatternDrafter",
    "RandomDrafter",
    "Reference",
    "ScriptedDrafter",
    "ZeroDrafter",
    "lies_about",
    "recorded",
]

Reference = Callable[[Sequence[TokenId]], TokenId | None]
"""The next token after those given, or None where it is not known. `ScriptedTarget.greedy` is one."""


def recorded(*texts: Sequence[TokenId]) -> Reference:
    """
    A reference that knows whole texts, prompt and output, by their ids.

    >>> following = recorded([1, 2, 3], [1, 5])
    >>> following([1, 2]), following([1, 5])
    (3, None)
    """
    known = [tuple(text) for text in texts]

    def following(tokens: Sequence[TokenId]) -> TokenId | None:
        prefix = tuple(tokens)
        for text in known:
            if len(text) > len(prefix) and text[: len(prefix)] == prefix:
                return text[len(prefix)]
        return None

    return following


class ScriptedDrafter:
    """
    Proposes from a script: one entry a round of each sequence, nothing once it is used up.

    The base of all scripted drafters. A restored sequence goes back in the script.

    Args:
        script: Proposals by round, or a function (tokens so far, most wanted, round) -> `Proposal`.
        confidences: Put beside every proposed token, or None.
        hidden_layers: Target block outputs to require and read.
        fixed_shape: Claimed among the requirements.
        sequential: Claimed among the requirements and kept to: proposals with confidences heed `stop_below`.
        faults: Where sessions, `requirements` and `open` fail on purpose.

    >>> from power_core.drafter import DraftRequest
    >>> drafter = ScriptedDrafter([[7, 8], [9]])
    >>> session = drafter.open(model=None, session=None)
    >>> session.begin(0, [1]); _ = session.checkpoint(0)
    >>> session.propose([DraftRequest(seq=0, anchor=1, max_tokens=8)])
    [Proposal(token_ids=[7, 8], confidences=None)]
    >>> session.end(0); session.assert_all_ended()
    """

    def __init__(
        self,
        script: Sequence[Sequence[TokenId]] | Propose,
        *,
        confidences: float | None = None,
        hidden_layers: Collection[int] = (),
        fixed_shape: bool = False,
        sequential: bool = False,
        faults: Faults | None = None,
    ) -> None:
        self._propose = script if callable(script) else _from_script(script)
        self._confidence = confidences
        self._layers = tuple(hidden_layers)
        self._fixed_shape = fixed_shape
        self._sequential = sequential
        self.faults = faults or Faults()
        self.sessions: list[ScriptedDraftSession] = []

    def requirements(self) -> DrafterRequirements:
        self.faults.enter("requirements")
        names = frozenset({str(Capability.HIDDEN_STATES)}) if self._layers else frozenset[str]()
        return DrafterRequirements(
            capabilities=names, hidden_layers=self._layers, fixed_shape=self._fixed_shape, sequential=self._sequential
        )

    def open(self, model: TargetModel | None, session: TargetSession | None) -> ScriptedDraftSession:  # noqa: ARG002 - the protocol's
        self.faults.enter("open")
        made = ScriptedDraftSession(self._answer, layers=self._layers, sequential=self._sequential, faults=self.faults)
        self.sessions.append(made)
        return made

    def _answer(self, tokens: Sequence[TokenId], wanted: int, round_: int) -> Proposal:
        proposal = self._propose(tokens, wanted, round_)
        if self._confidence is None:
            return proposal
        return Proposal(proposal.token_ids, [self._confidence] * len(proposal.token_ids))

    @property
    def history(self) -> list[DraftRecord]:
        """Every proposal of every session, in order."""
        return [record for session in self.sessions for record in session.history]

    def assert_all_ended(self) -> None:
        """Raise `ProtocolViolation` if a session of this drafter leaked a sequence or saw a broken rule."""
        for session in self.sessions:
            session.assert_all_ended()


def _from_script(script: Sequence[Sequence[TokenId]]) -> Propose:
    def propose(_tokens: Sequence[TokenId], wanted: int, round_: int) -> Proposal:
        return Proposal(list(script[round_][:wanted]) if round_ < len(script) else [])

    return propose


class PatternDrafter(ScriptedDrafter):
    """
    Right and wrong tokens in a chosen order.

    A wrong token is the right one plus 1, modulo the vocabulary; what follows it is the reference's text
    again, so that a verifier which overlooks the mismatch goes on accepting.

    Args:
        reference: Knows the right tokens; a proposal ends where it does not.
        vocab_size: Number of ids.
        patterns: A string a round, over and over: `R` for right, `W` for wrong, empty for no proposal.
        options: As for `ScriptedDrafter`.

    >>> drafter = PatternDrafter(recorded([1, 2, 3, 4]), 10, ["RW", ""])
    >>> [drafter.proposal([1], 8, round_).token_ids for round_ in range(3)]
    [[2, 4], [], [2, 4]]
    """

    def __init__(self, reference: Reference, vocab_size: int, patterns: Sequence[str], **options: Any) -> None:
        super().__init__(self.proposal, **options)
        self._reference = reference
        self._vocab_size = vocab_size
        self._patterns = patterns

    def pattern(self, round_: int, wanted: int) -> str:  # noqa: ARG002 - for those that follow the wish
        """The pattern of a round."""
        return self._patterns[round_ % len(self._patterns)]

    def proposal(self, tokens: Sequence[TokenId], wanted: int, round_: int) -> Proposal:
        """The proposal after *tokens*: at most *wanted* ids."""
        text, ids = list(tokens), []
        for letter in self.pattern(round_, wanted)[:wanted]:
            right = self._reference(text)
            if right is None:
                break
            text.append(right)
            ids.append(right if letter == "R" else (right + 1) % self._vocab_size)
        return Proposal(ids)


class OracleDrafter(PatternDrafter):
    """
    Always right: proposes as many tokens as it is asked for.

    >>> OracleDrafter(recorded([1, 2, 3, 4]), 10).proposal([1], 2, 0).token_ids
    [2, 3]
    """

    def __init__(self, reference: Reference, vocab_size: int, **options: Any) -> None:
        super().__init__(reference, vocab_size, [""], **options)

    def pattern(self, round_: int, wanted: int) -> str:  # noqa: ARG002 - the same in every round
        return "R" * wanted


class AdversarialDrafter(PatternDrafter):
    """
    Right but for position *wrong_at*.

    >>> AdversarialDrafter(recorded([1, 2, 3, 4]), 10, wrong_at=1).proposal([1], 3, 0).token_ids
    [2, 4, 4]
    """

    def __init__(self, reference: Reference, vocab_size: int, *, wrong_at: int, **options: Any) -> None:
        super().__init__(reference, vocab_size, [""], **options)
        self._wrong_at = wrong_at

    def pattern(self, round_: int, wanted: int) -> str:  # noqa: ARG002 - the same in every round
        return "".join("W" if i == self._wrong_at else "R" for i in range(wanted))


class ZeroDrafter(PatternDrafter):
    """
    Never right at any position.

    >>> ZeroDrafter(recorded([1, 2, 3, 4]), 10).proposal([1], 2, 0).token_ids
    [3, 4]
    """

    def __init__(self, reference: Reference, vocab_size: int, **options: Any) -> None:
        super().__init__(reference, vocab_size, [""], **options)

    def pattern(self, round_: int, wanted: int) -> str:  # noqa: ARG002 - the same in every round
        return "W" * wanted


class RandomDrafter(ScriptedDrafter):
    """
    Any number of any tokens: a pure function of the seed and the tokens so far.

    >>> one, two = (RandomDrafter(10, seed=3).proposal([1], 8, 0) for _ in range(2))
    >>> one == two
    True
    """

    def __init__(self, vocab_size: int, *, seed: int = 0, **options: Any) -> None:
        super().__init__(self.proposal, **options)
        self._vocab_size = vocab_size
        self._seed = seed

    def proposal(self, tokens: Sequence[TokenId], wanted: int, round_: int) -> Proposal:  # noqa: ARG002 - a restored round repeats itself
        """0 to *wanted* ids."""
        draw = random.Random(f"{self._seed}:{list(tokens)}")  # noqa: S311 - a test's dice, not a secret's
        return Proposal([draw.randrange(self._vocab_size) for _ in range(draw.randint(0, wanted))])


class LiarDrafter(ScriptedDrafter):
    """
    Proposes what is no token at all: ids out of the vocabulary, floats, words, nothing, or far too many.

    Args:
        vocab_size: Number of ids.
        lies: What to answer, a round each, over and over; the default goes through `lies_about`.
        options: As for `ScriptedDrafter`.

    >>> LiarDrafter(10).proposal([1], 2, 0).token_ids
    [10]
    """

    def __init__(self, vocab_size: int, lies: Sequence[Sequence[object]] | None = None, **options: Any) -> None:
        super().__init__(self.proposal, **options)
        self._lies = lies_about(vocab_size) if lies is None else lies

    def proposal(self, tokens: Sequence[TokenId], wanted: int, round_: int) -> Proposal:  # noqa: ARG002 - a liar does not listen
        """The lie of a round, whatever was wanted."""
        return Proposal(cast("Sequence[TokenId]", self._lies[round_ % len(self._lies)]))


def lies_about(vocab_size: int) -> list[list[object]]:
    """
    Every way of not naming a token of a vocabulary of *vocab_size*.

    >>> len(lies_about(4))
    10
    """
    too_many: list[object] = list(islice(cycle(range(vocab_size)), 10_000))
    numbers: list[object] = [vocab_size, vocab_size + 5, -1, 2**31 - 1, 2**31, -(2**63), 1.0, float("nan"), "1"]
    return [[number] for number in numbers] + [too_many]
