"""Completing phrases: where a text ends as a known phrase begins or goes on, the rest of the phrase is proposed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import cast

from power_core.drafter import DrafterRequirements, DraftRequest, DraftSession, HiddenRows, Proposal
from power_core.errors import RequestError
from power_core.target import TargetModel, TargetSession, Tokenizer
from power_core.types import SeqId, TokenId
from power_example_drafter.config import PhrasesConfig

__all__ = ["PhrasesDrafter", "PhrasesSession", "phrase_table"]

Tail = tuple[TokenId, ...]


def phrase_table(tokenizer: Tokenizer, config: PhrasesConfig) -> dict[Tail, Tail]:
    """
    What follows each `match` tokens of a phrase. Where phrases disagree, the first one wins.

    Args:
        tokenizer: Of the target: phrases are looked up by its ids.
        config: The phrases, and how many tokens of one must be there.
    """
    table: dict[Tail, Tail] = {}
    for ids in _encoded(tokenizer, config.phrases):
        for end in range(config.match, len(ids)):
            table.setdefault(ids[end - config.match : end], ids[end:])
    return table


def _encoded(tokenizer: Tokenizer, phrases: Sequence[str]) -> Iterator[Tail]:
    for phrase in phrases:
        for text in (phrase, f" {phrase}"):  # a word's id depends on whether a space comes before it
            with suppress(RequestError):  # a small vocabulary may have no way to write it
                yield tuple(tokenizer.encode(text, add_special=False))


class PhrasesSession:
    """
    Draft state of the open sequences: the last few tokens of each, as tuples.

    A tuple never changes, so it is its own checkpoint.

    Args:
        table: See `phrase_table`.
        match: Tokens of a phrase that must be there.
    """

    def __init__(self, table: Mapping[Tail, Tail], match: int) -> None:
        self._table = table
        self._match = match
        self._tails: dict[SeqId, Tail] = {}

    def begin(self, seq: SeqId, tokens: Sequence[TokenId]) -> None:
        self._tails[seq] = tuple(tokens[-self._match :])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [Proposal(self._table.get(self._tails[r.seq], ())[: r.max_tokens]) for r in requests]

    def observe(self, seq: SeqId, committed: Sequence[TokenId], rows: HiddenRows | None) -> None:  # noqa: ARG002 - the protocol's
        self._tails[seq] = (*self._tails[seq], *committed)[-self._match :]

    def checkpoint(self, seq: SeqId) -> object:
        return self._tails[seq]

    def restore(self, seq: SeqId, checkpoint: object) -> None:
        self._tails[seq] = cast("Tail", checkpoint)

    def end(self, seq: SeqId) -> None:
        del self._tails[seq]

    def close(self) -> None:
        self._tails.clear()


class PhrasesDrafter:
    """
    Makes draft sessions; needs the target's tokenizer and nothing else.

    Args:
        config: Options.
    """

    def __init__(self, config: PhrasesConfig) -> None:
        self._config = config

    def requirements(self) -> DrafterRequirements:
        return DrafterRequirements()

    def open(self, model: TargetModel, session: TargetSession) -> DraftSession:  # noqa: ARG002 - the protocol's
        return PhrasesSession(phrase_table(model.tokenizer, self._config), self._config.match)
