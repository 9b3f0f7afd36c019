"""
`suffix`: the likeliest path after the longest suffix that occurred before.

The idea is SuffixDecoding (Oliaro et al., arXiv 2411.04975), whose reference keeps a suffix tree of
bounded depth. Here an online suffix automaton holds every suffix whole, and a continuation's chance is
estimated as in PPM (escape method C, Moffat 1990): other continuations seen count against it.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import Factory, define

from power_core.drafter import Proposal
from power_core.types import TokenId
from power_ngram.automaton import NONE, ROOT, SuffixAutomaton
from power_ngram.config import SuffixConfig
from power_ngram.history import HistoryIndex, Strategy

__all__ = ["Path", "SuffixIndex", "SuffixStore", "SuffixStrategy"]


@define
class Path:
    """
    Tokens along the most counted continuations.

    Attributes:
        expected: Expected number of accepted tokens: the sum over positions of the chance to get there.
    """

    tokens: list[TokenId] = Factory(list)
    confidences: list[float] = Factory(list)
    expected: float = 0.0


class _Follower:
    """Follows paths of one automaton under the strategy's options."""

    def __init__(self, automaton: SuffixAutomaton, config: SuffixConfig) -> None:
        self.automaton = automaton
        self._min_confidence = config.min_confidence
        self._novelty = config.novelty
        self._contexts = config.contexts

    def best(self, state: int, matched: int, limit: int, unfinished: int) -> Path:
        """
        The path that promises most, from *state* or from one of the shorter contexts on its suffix chain.

        Args:
            state: Where the match ended.
            matched: Tokens of the match.
            limit: Most tokens of the path.
            unfinished: Occurrences of the contexts that nothing follows yet: 1 where the text ends with them.
        """
        best = Path()
        for _ in range(self._contexts):
            if state == ROOT:
                break
            path = self._follow(state, matched, limit, unfinished)
            if path.expected > best.expected:
                best = path
            if best.expected > limit - 1:  # less than one token could be gained
                break
            state = self.automaton.link[state]
            matched = self.automaton.length[state]
        return best

    def _follow(self, state: int, matched: int, limit: int, unfinished: int) -> Path:
        automaton = self.automaton
        best, count, transitions = automaton.best, automaton.count, automaton.next
        tokens: list[TokenId] = []
        confidences: list[float] = []
        chance, expected, seen = 1.0, 0.0, count[state] - unfinished
        while len(tokens) < limit:
            token = best[state]
            if token == NONE:
                # The end of the text: go on as if the path had been appended to it. That continues a
                # match with its own tail, however short the period.
                state = automaton.link[state]
                if state == ROOT:
                    break
                matched, seen = max(matched, automaton.length[state]), count[state] - unfinished
                continue
            if token < 0:  # a separator of the store
                break
            followers = transitions[state]
            state = followers[token]
            hits = count[state]
            # Every other continuation seen is a reason to expect yet another one, and so is a short match.
            confidence = hits / (max(seen, hits) + len(followers) - 1 + self._novelty / matched)
            chance *= confidence
            if chance < self._min_confidence:
                break
            tokens.append(token)
            confidences.append(confidence)
            expected += chance
            matched += 1
            seen = hits
        return Path(tokens, confidences, expected)


class SuffixStore:
    """
    Answers of ended requests, in two automata of at most half the store's tokens each.

    The younger one grows; when it is full it becomes the older one and the older one is dropped: the
    store is bounded and a token still costs amortised O(1). Answers are kept apart by separators, each
    used once, so that no match spans two of them.
    """

    def __init__(self, config: SuffixConfig) -> None:
        self._config = config
        self._half = config.store_tokens // 2
        self._separator = NONE
        self._young = _Follower(SuffixAutomaton(config.count_depth), config)
        self._old = _Follower(SuffixAutomaton(config.count_depth), config)

    def __len__(self) -> int:
        """Tokens held, separators included."""
        return len(self._young.automaton) + len(self._old.automaton)

    def add(self, answer: Sequence[TokenId]) -> None:
        """Add an answer; of one longer than half the store, the end."""
        answer = answer[-(self._half - 1) :] if self._half > 1 else ()
        if not answer:
            return
        if len(self._young.automaton) + len(answer) + 1 > self._half:
            self._old = self._young
            self._young = _Follower(SuffixAutomaton(self._config.count_depth), self._config)
        self._separator -= 1
        self._young.automaton.extend([*answer, self._separator])

    def best(self, history: Sequence[TokenId], limit: int) -> Path:
        """The path that promises most after the end of *history*."""
        tail = history[-self._config.store_match :]
        paths = []
        for follower in (self._young, self._old):
            state, matched = follower.automaton.match(tail)
            paths.append(follower.best(state, matched, limit, 0))
        return max(paths, key=lambda path: path.expected)


class SuffixIndex(HistoryIndex):
    """The suffix automaton of one request, and the store if there is one."""

    def __init__(self, history: Sequence[TokenId], config: SuffixConfig, store: SuffixStore | None) -> None:
        super().__init__(history)
        self._follower = _Follower(SuffixAutomaton(config.count_depth), config)
        self._store = store

    def _extend(self, start: int, stop: int) -> None:
        self._follower.automaton.extend(self.history[start:stop])

    def draft(self, max_tokens: int) -> Proposal:
        automaton = self._follower.automaton
        if automaton.last == ROOT:
            return Proposal()
        state = automaton.link[automaton.last]  # the longest suffix that occurred before
        path = self._follower.best(state, automaton.length[state], max_tokens, 1)
        if self._store is not None:
            shared = self._store.best(self.history, max_tokens)
            if shared.expected > path.expected:
                path = shared
        return Proposal(path.tokens, path.confidences)


class SuffixStrategy(Strategy):
    """`suffix`. With the shared store on, an answer enters it when its request ends; prompts never do."""

    def __init__(self, config: SuffixConfig) -> None:
        self._config = config
        self.store = SuffixStore(config) if config.shared_store else None

    def index(self, history: Sequence[TokenId], num_prompt: int) -> HistoryIndex:  # noqa: ARG002 - one text for all
        return SuffixIndex(history, self._config, self.store)

    def retire(self, index: HistoryIndex, num_prompt: int) -> None:
        if self.store is not None:
            self.store.add(index.history[num_prompt:])
