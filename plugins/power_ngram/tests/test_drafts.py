"""Each strategy's proposals against a brute-force statement of what it should propose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from power_ngram.config import NgramContextConfig, NgramMapConfig, NgramModConfig, PromptLookupConfig, SuffixConfig
from power_ngram.drafter import Config, open_history

from power_core.drafter import DraftRequest, Proposal

texts = st.lists(st.integers(0, 3), min_size=1, max_size=30)
Draft = Callable[[Config, Sequence[int], int], Proposal]


def continued(text: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from *start* on, token by token, reading back what was just written."""
    extended = list(text)
    for position in range(start, start + count):
        extended.append(extended[position])
    return extended[len(text) :]


def naive_lookup(text: Sequence[int], n_max: int, n_min: int, where: range) -> int | None:
    """The latest position in *where* that the longest suffix n-gram of *text* comes before."""
    for n in range(n_max, n_min - 1, -1):
        if n <= len(text):
            for end in reversed(where):
                if end >= n and list(text[end - n : end]) == list(text[len(text) - n :]):
                    return end
    return None


def run(config: Config, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Proposal:
    """Propose after *prompt* and *output*, which is committed one token a step."""
    session = open_history(config)
    session.begin(0, prompt)
    for token in output:
        session.checkpoint(0)
        session.observe(0, [token], None)
    return session.propose([DraftRequest(0, [*prompt, *output][-1], max_tokens)])[0]


@given(texts, texts, st.integers(1, 3), st.integers(0, 2), st.integers(1, 8))
def test_prompt_lookup(prompt: list[int], output: list[int], n_min: int, more: int, k: int) -> None:
    """The continuation of the latest occurrence of the longest n-gram, prompt and output alike."""
    text = prompt + output
    start = naive_lookup(text, n_min + more, n_min, range(1, len(text)))
    proposal = run(PromptLookupConfig(n_max=n_min + more, n_min=n_min), prompt, output, k)
    assert list(proposal.token_ids) == ([] if start is None else continued(text, start, k))


@given(texts, texts, st.integers(1, 3), st.integers(0, 2), st.integers(1, 8))
@example([1, 2, 3, 5, 9], [3, 7, 1, 2, 3], 1, 2, 2)  # a long match in the prompt, a short one in the output
def test_ngram_context(prompt: list[int], output: list[int], n_min: int, more: int, k: int) -> None:
    """Any match that an output token follows comes before any match inside the prompt."""
    text, n_max = prompt + output, n_min + more
    start = naive_lookup(text, n_max, n_min, range(len(prompt), len(text)))
    if start is None:
        start = naive_lookup(text, n_max, n_min, range(1, len(prompt)))
    proposal = run(NgramContextConfig(n_max=n_max, n_min=n_min), prompt, output, k)
    assert list(proposal.token_ids) == ([] if start is None else continued(text, start, k))


@given(texts, texts, st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_ngram_mod(prompt: list[int], output: list[int], n: int, n_min: int, k: int) -> None:
    """A chain of the latest token after each n-gram, dropped whole where it is shorter than n_min."""
    text = prompt + output
    pool = {tuple(text[i - n : i]): text[i] for i in range(n, len(text))}
    chain = list(text)
    while len(chain) < len(text) + k and len(text) >= n and tuple(chain[-n:]) in pool:
        chain.append(pool[tuple(chain[-n:])])
    expected = chain[len(text) :]
    proposal = run(NgramModConfig(n_match=n, n_min=n_min), prompt, output, k)
    assert list(proposal.token_ids) == (expected if len(expected) >= min(n_min, k) else [])


def naive_values(text: Sequence[int], n: int, m: int, key: Sequence[int]) -> list[tuple[list[int], int]]:
    """Up to four (continuation, hits) of *key*, least recently hit first."""
    values: list[tuple[list[int], int]] = []
    for i in range(n, len(text) - m + 1):
        if list(text[i - n : i]) == list(key):
            tokens = list(text[i : i + m])
            hits = next((h for t, h in values if t == tokens), 0)
            values = [(t, h) for t, h in values if t != tokens]
            if len(values) == 4:
                values.remove(min(values, key=lambda value: value[1]))
            values.append((tokens, hits + 1))
    return values


@given(texts, texts, st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 8))
@example([0, 1, 0, 2, 0, 2, 0], [1, 0], 1, 1, 1, 1)  # two values with two hits each
@example([0, 1, 0, 1, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5], [0], 1, 1, 1, 1)  # a fifth value
def test_ngram_map(prompt: list[int], output: list[int], n: int, m: int, min_hits: int, k: int) -> None:
    """The value with the most hits, position by position while half of the hits agree, then the next key."""
    text = prompt + output
    expected: list[int] = []
    confidences: list[float] = []
    while len(expected) < k and len(text) >= n:
        values = naive_values(text, n, m, (text + expected)[-n:])
        if not values or sum(hits for _, hits in values) < min_hits:
            break
        chosen = max(reversed(values), key=lambda value: value[1])[0]
        took = 0
        for i in range(min(m, k - len(expected))):
            before = sum(hits for tokens, hits in values if tokens[:i] == chosen[:i])
            agreeing = sum(hits for tokens, hits in values if tokens[: i + 1] == chosen[: i + 1])
            if agreeing / before < 0.5:
                break
            expected.append(chosen[i])
            confidences.append(agreeing / before)
            took += 1
        if took < m:
            break
    proposal = run(NgramMapConfig(key_size=n, value_size=m, min_hits=min_hits, min_share=0.5), prompt, output, k)
    assert (list(proposal.token_ids), proposal.confidences) == (expected, confidences)


class NaiveSuffix:
    """`suffix` by counting substrings of the whole text for every question asked."""

    def __init__(self, text: Sequence[int], novelty: float) -> None:
        self.text, self.novelty = list(text), novelty

    def followers(self, part: Sequence[int]) -> list[int]:
        n = len(part)
        return [self.text[i + n] for i in range(len(self.text) - n) if self.text[i : i + n] == list(part)]

    def longest(self, part: Sequence[int], more_than: int) -> list[int]:
        """The longest proper suffix of *part* that more than *more_than* tokens follow."""
        return next((list(part[i:]) for i in range(1, len(part)) if len(self.followers(part[i:])) > more_than), [])

    def path(self, context: list[int], limit: int) -> tuple[float, list[int], list[float]]:
        tokens: list[int] = []
        confidences: list[float] = []
        chance, expected, seen, matched = 1.0, 0.0, len(self.followers(context)), len(context)
        while len(tokens) < limit:
            followers = self.followers(context)
            if not followers:
                context = self.longest(self.text, 0)
                matched, seen = max(matched, len(context)), len(self.followers(context))
                continue
            token = max(dict.fromkeys(reversed(followers)), key=followers.count)
            hits = followers.count(token)
            confidences.append(hits / (max(seen, hits) + len(set(followers)) - 1 + self.novelty / matched))
            tokens.append(token)
            chance *= confidences[-1]
            expected += chance
            context, seen, matched = [*context, token], hits, matched + 1
        return expected, tokens, confidences


@given(texts, st.integers(1, 6), st.sampled_from([0.0, 1.0, 3.0]))
def test_suffix_follows_the_longest_match(text: list[int], k: int, novelty: float) -> None:
    """One context: the favourite continuations of the longest repeated suffix, with their PPM-like confidences."""
    naive = NaiveSuffix(text, novelty)
    context = naive.longest(text, 0)
    _, tokens, confidences = naive.path(context, k) if context else (0.0, [], [])
    config = SuffixConfig(min_confidence=0.0, novelty=novelty, contexts=1, count_depth=100)
    proposal = run(config, text[:1], text[1:], k)
    assert list(proposal.token_ids) == tokens
    assert proposal.confidences == pytest.approx(confidences)


@given(texts, st.integers(1, 3))
def test_cut_counts_still_give_confidences(text: list[int], depth: int) -> None:
    """Where contexts were counted less often than their continuations, confidences stay within (0, 1]."""
    config = SuffixConfig(min_confidence=0.0, novelty=0.0, count_depth=depth)
    confidences = run(config, text[:1], text[1:] * 2, 8).confidences if len(text) > 1 else ()
    assert confidences is not None
    assert all(0 < confidence <= 1 for confidence in confidences)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_cut_run_is_still_continued(depth: int) -> None:
    """A run that is counted in few contexts only is proposed all the same."""
    config = SuffixConfig(min_confidence=0.0, count_depth=depth)
    assert list(run(config, [1], [1] * 30, 8).token_ids) == [1] * 8


def test_suffix_prefers_the_context_that_promises_more(draft: Draft) -> None:
    """After a match of three that went two ways, the shorter context that went one way ten times is followed."""
    text = [9, 1, 2, 5, 6, 6, 9, 1, 2, 7, 6, 6, *[8, 2, 4, 4, 4] * 10, 9, 1, 2]
    longest = draft(SuffixConfig(min_confidence=0.0, contexts=1), text, 3)
    assert list(longest.token_ids) == [7, 6, 6]
    assert list(draft(SuffixConfig(min_confidence=0.0, contexts=2), text, 3).token_ids) == [4, 4, 4]


def test_suffix_ends_where_the_chance_gets_small(draft: Draft) -> None:
    """The proposal's length comes from the counts: a higher threshold gives a shorter prefix of the same path."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    whole = draft(SuffixConfig(min_confidence=0.0), text, 8)
    cut = draft(SuffixConfig(min_confidence=0.2), text, 8)
    assert 0 < len(cut.token_ids) < len(whole.token_ids) == 8
    assert list(cut.token_ids) == list(whole.token_ids)[: len(cut.token_ids)]
    assert list(draft(SuffixConfig(min_confidence=1.0), text, 8).token_ids) == []
