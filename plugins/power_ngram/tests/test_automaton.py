"""The automaton against a brute-force count of every substring."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from power_ngram.automaton import NONE, ROOT, SuffixAutomaton

texts = st.lists(st.integers(0, 3), max_size=40)


def occurrences(text: Sequence[int], part: Sequence[int]) -> int:
    return sum(list(text[i : i + len(part)]) == list(part) for i in range(len(text) - len(part) + 1))


def state_of(automaton: SuffixAutomaton, part: Sequence[int]) -> int | None:
    state = ROOT
    for token in part:
        if token not in automaton.next[state]:
            return None
        state = automaton.next[state][token]
    return state


def substrings(text: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)}


def favourite(text: Sequence[int], context: Sequence[int]) -> int:
    """The most frequent continuation of *context*, the latest on a tie; -1 for none."""
    n = len(context)
    followers = [text[i + n] for i in range(len(text) - n) if tuple(text[i : i + n]) == tuple(context)]
    latest_first = list(dict.fromkeys(reversed(followers)))
    return max(latest_first, key=followers.count, default=NONE)


@given(texts)
def test_counts_are_exact_while_no_chain_is_cut(text: list[int]) -> None:
    """With a depth beyond the text's length, each substring's count is how often it occurs."""
    automaton = SuffixAutomaton(count_depth=100)
    automaton.extend(text)
    for part in substrings(text):
        state = state_of(automaton, part)
        assert state is not None
        assert automaton.count[state] == occurrences(text, part), part


@given(texts, st.integers(1, 4))
def test_cut_counts_are_never_too_high(text: list[int], depth: int) -> None:
    """A cut chain loses occurrences of short contexts and invents none."""
    automaton = SuffixAutomaton(count_depth=depth)
    automaton.extend(text)
    for part in substrings(text):
        state = state_of(automaton, part)
        assert state is not None
        assert 0 <= automaton.count[state] <= occurrences(text, part), part


@given(texts)
def test_best_is_the_most_frequent_continuation(text: list[int]) -> None:
    """`best` follows the counts, the latest continuation on a tie, -1 where nothing follows."""
    automaton = SuffixAutomaton(count_depth=100)
    automaton.extend(text)
    for part in substrings(text):
        state = state_of(automaton, part)
        assert state is not None
        assert automaton.best[state] == favourite(text, part), part


@given(texts)
def test_link_of_the_text_is_its_longest_repeated_suffix(text: list[int]) -> None:
    """The longest suffix that occurred before is one link away, at every length of the text."""
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, 1):
        automaton.extend([token])
        longest = max((n for n in range(end) if occurrences(text[:end], text[end - n : end]) > 1), default=0)
        assert automaton.length[automaton.link[automaton.last]] == (longest if end > 0 else 0)


@given(texts, texts)
def test_match_finds_the_longest_suffix_of_another_text(text: list[int], other: list[int]) -> None:
    """`match` gives the longest suffix of *other* that occurs in the text, and a state that stands for it."""
    automaton = SuffixAutomaton()
    automaton.extend(text)
    state, matched = automaton.match(other)
    longest = max(n for n in range(len(other) + 1) if n == 0 or tuple(other[-n:]) in substrings(text))
    assert matched == longest
    assert state == state_of(automaton, other[len(other) - longest :])


@given(texts)
def test_nothing_but_continuations_of_the_text_is_accepted(text: list[int]) -> None:
    """A sequence that does not occur has no state."""
    automaton = SuffixAutomaton()
    automaton.extend(text)
    present = substrings(text)
    for part in present:
        for token in range(5):
            assert ((*part, token) in present) == (state_of(automaton, (*part, token)) is not None)


@given(st.lists(st.integers(0, 2), min_size=3, max_size=200))
def test_size_is_linear(text: list[int]) -> None:
    """At most 2n - 1 states and 3n - 4 transitions (Blumer et al.), whatever the text."""
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert len(automaton.length) <= 2 * len(text)
    assert sum(map(len, automaton.next)) <= 3 * len(text)
    assert len(automaton) == len(text)
