"""
An online suffix automaton with occurrence counts.

Construction: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985). A state
stands for all substrings that end at the same positions; its suffix link leads to the state of the
longest proper suffix that also ends elsewhere. Two facts make it a drafter's index:

- the link of the state of the whole text is the longest suffix that occurred before, so the longest
  match costs nothing to maintain;
- a state's count (how often its substrings occur) divided by its parent's count is the empirical
  chance of a continuation.
"""

from __future__ import annotations

from collections.abc import Iterable

from power_core.types import TokenId

__all__ = ["ROOT", "SuffixAutomaton"]

ROOT = 0
NONE = -1


class SuffixAutomaton:
    """
    States are indices into parallel lists.

    An appended token adds one occurrence to every suffix of the text, which are the states on one chain
    of suffix links. In text that chain is short; in a run of one token it is as long as the run, so the
    walk is cut after *count_depth* states, longest contexts first. `count` is therefore exact unless a
    chain was cut, and then never too high. Everything else is amortised O(1) a token.

    Args:
        count_depth: Most states that one appended token counts for.

    Attributes:
        length: Tokens in the longest substring of a state.
        link: Suffix link; -1 for the root.
        next: Transitions by token.
        count: Occurrences of a state's substrings.
        best: The continuation token that occurred most often (the latest on a tie), or -1 for none.
        last: State of the whole text.
    """

    def __init__(self, count_depth: int = 32) -> None:
        self.count_depth = count_depth
        self.length = [0]
        self.link = [NONE]
        self.next: list[dict[TokenId, int]] = [{}]
        self.count = [0]
        self.best = [NONE]
        self.last = ROOT

    def __len__(self) -> int:
        """Tokens in the text."""
        return self.length[self.last]

    def extend(self, tokens: Iterable[TokenId]) -> None:
        """Append *tokens* to the text."""
        for token in tokens:
            self._append(token)

    def match(self, tokens: Iterable[TokenId]) -> tuple[int, int]:
        """
        The longest suffix of *tokens* that occurs in the text.

        Returns:
            Its state and its length; (0, 0) where even the last token never occurred.
        """
        state = matched = 0
        for token in tokens:
            while state != ROOT and token not in self.next[state]:
                state = self.link[state]
                matched = self.length[state]
            if token in self.next[state]:
                state = self.next[state][token]
                matched += 1
        return state, matched

    def _append(self, token: TokenId) -> None:
        link, transitions = self.link, self.next
        previous, new = self.last, len(self.length)
        self._add_state(self.length[previous] + 1, ROOT, {}, 0, NONE)
        state = previous
        while state != NONE and token not in transitions[state]:
            transitions[state][token] = new
            state = link[state]
        if state != NONE:
            link[new] = self._split(state, token)
        self.last = new
        self._count(previous, token)

    def _split(self, state: int, token: TokenId) -> int:
        """The state of exactly the longest substring of *state* plus *token*, split off where it must be."""
        length, link, transitions = self.length, self.link, self.next
        target = transitions[state][token]
        if length[target] == length[state] + 1:
            return target
        clone = len(length)
        self._add_state(
            length[state] + 1, link[target], transitions[target].copy(), self.count[target], self.best[target]
        )
        link[target] = clone
        while state != NONE and transitions[state].get(token) == target:
            transitions[state][token] = clone
            state = link[state]
        return clone

    def _add_state(self, length: int, link: int, transitions: dict[TokenId, int], count: int, best: int) -> None:
        self.length.append(length)
        self.link.append(link)
        self.next.append(transitions)
        self.count.append(count)
        self.best.append(best)

    def _count(self, state: int, token: TokenId) -> None:
        """One more occurrence of *token* after every context on the suffix chain of *state*."""
        link, transitions, count, best = self.link, self.next, self.count, self.best
        counted = NONE
        for _ in range(self.count_depth):
            followers = transitions[state]
            target = followers[token]
            if target != counted:  # neighbours on the chain can share a target: one occurrence all the same
                count[target] += 1
                counted = target
            favourite = best[state]
            if favourite != token and (favourite == NONE or count[target] >= count[followers[favourite]]):
                best[state] = token
            state = link[state]
            if state == NONE:
                return
