"""Ends inside a block: end ids, stop strings, limits, the context (cases 3, 5, 7, 8)."""

import pytest

from power_core.errors import RequestError
from power_core.request import GenerationRequest
from power_core.testing import (
    AdversarialDrafter,
    OracleDrafter,
    PatternDrafter,
    RandomDrafter,
    ScriptedTarget,
    ScriptedTokenizer,
    ZeroDrafter,
    next_table,
    small_vocabulary,
)
from power_core.types import FinishReason

VOCAB = 24
PROMPT = (3, 1, 4, 1, 5)


def strategies_for(target):
    right, vocab = target.greedy, target.identity.vocab_size
    return {
        "oracle": OracleDrafter(right, vocab),
        "zero": ZeroDrafter(right, vocab),
        "wrong-at-1": AdversarialDrafter(right, vocab, wrong_at=1),
        "mixed": PatternDrafter(right, vocab, ["RRRW", "", "R", "RRRRRRRR"]),
        "random": RandomDrafter(vocab),
    }


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("capacity", [None, 2, 0])
def test_an_end_id_ends_the_output_wherever_it_falls_in_a_block(make_lab, k, capacity):
    """With the id at position p made an end id, output ends at its first occurrence for every p (case 3)."""
    target = ScriptedTarget(VOCAB, rollback_capacity=capacity)
    lab = make_lab(target, strategies_for(target), draft_max=k)
    [free] = lab.run(GenerationRequest(PROMPT, max_tokens=24))
    for p, end in enumerate(free.token_ids):
        for spec in lab.strategies:
            request = GenerationRequest(PROMPT, max_tokens=24, stop_ids=frozenset({end}), spec=spec)
            [result] = lab.run(request)
            lab.check_same(request, result)
            assert result.finish_reason is FinishReason.STOP
            assert result.token_ids == free.token_ids[: free.token_ids.index(end) + 1], p


def test_every_end_id_of_the_file_counts(make_lab):
    """All end-of-generation ids end the output, not one of them only; their text is not released."""
    tokenizer = ScriptedTokenizer(small_vocabulary(VOCAB), end_ids=set(range(12, VOCAB)))
    for seed in range(12):
        target = ScriptedTarget(tokenizer=tokenizer, seed=seed)
        lab = make_lab(target, strategies_for(target))
        for spec in lab.strategies:
            request = GenerationRequest(PROMPT, spec=spec)
            [result] = lab.run(request)
            lab.check_same(request, result)
            assert result.token_ids[-1] in tokenizer.end_ids
            assert len(result.text) == len(result.token_ids) - 1


def test_a_follow_up_turn_after_an_end_in_a_block(make_lab):
    """Nothing of the accepted tokens behind the end is left in the target: the next turn equals plain decoding."""
    target = ScriptedTarget(VOCAB)
    lab = make_lab(target, strategies_for(target))
    first = GenerationRequest(PROMPT, max_tokens=24, spec="oracle")
    end = lab.plain(first)[0][4]
    [result] = lab.run(first.with_(stop_ids=frozenset({end})))
    second = GenerationRequest((*PROMPT, *result.token_ids, 7), max_tokens=12, spec="oracle")
    lab.check_same(second, *lab.run(second))


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 7, 8, 9, None])
@pytest.mark.parametrize("k", [1, 3, 8, 32])
def test_max_tokens_is_exact(make_lab, max_tokens, k):
    """A limit gives exactly that many tokens; the last block is shortened, not decoded and thrown away (case 7)."""
    target = ScriptedTarget(VOCAB, context_size=40)
    lab = make_lab(target, strategies_for(target), draft_max=k)
    expected = 40 + 1 - len(PROMPT) if max_tokens is None else max_tokens
    for spec in (*lab.strategies, "off"):
        lab.session.history.clear()
        request = GenerationRequest(PROMPT, max_tokens=max_tokens, spec=spec)
        [result] = lab.run(request)
        lab.check_same(request, result)
        assert (len(result.token_ids), result.finish_reason) == (expected, FinishReason.LENGTH)
        ends = [chain.start + len(chain.tokens) for record in lab.session.history for chain in record.chains]
        assert max(ends, default=0) <= len(PROMPT) + max(expected - 1, 0)


def test_a_negative_limit_is_refused(make_lab):
    """max_tokens -1 is no hidden "unlimited": it is one clear error (case 7)."""
    lab = make_lab(ScriptedTarget(VOCAB))
    with pytest.raises(RequestError, match="max_tokens is -1"):
        lab.submit(GenerationRequest(PROMPT, max_tokens=-1))


@pytest.mark.parametrize("length", [1, 40, 48, 56, 60, 62, 63, 64])
@pytest.mark.parametrize("k", [4, 16, 64, 256])
def test_a_draft_at_the_end_of_the_context(make_lab, length, k):
    """The last legal token is emitted and none beyond it, however long the draft (case 8)."""
    target = ScriptedTarget(VOCAB, context_size=64)
    lab = make_lab(target, strategies_for(target), draft_max=k)
    for spec in (*lab.strategies, "off"):
        request = GenerationRequest([i % VOCAB for i in range(length)], max_tokens=100, spec=spec)
        [result] = lab.run(request)
        lab.check_same(request, result)
        assert (len(result.token_ids), result.finish_reason) == (64 + 1 - length, FinishReason.LENGTH)
    short = GenerationRequest(PROMPT, max_tokens=5, spec="oracle")
    lab.check_same(short, *lab.run(short))


def test_a_prompt_longer_than_the_context_is_refused(make_lab):
    """One token too many is refused at submission; the next request is served (case 8)."""
    lab = make_lab(ScriptedTarget(VOCAB, context_size=64))
    with pytest.raises(RequestError, match="65 tokens"):
        lab.submit(GenerationRequest([1] * 65))
    request = GenerationRequest(PROMPT, max_tokens=5)
    lab.check_same(request, *lab.run(request))


def alphabet_target(**options):
    """A target that goes through the alphabet, over and over."""
    return ScriptedTarget(26, logits=next_table([(i + 1) % 26 for i in range(26)]), **options)


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (("ghij",), "def"),
        (("d",), ""),
        (("ghijk", "ij"), "defgh"),  # the later-listed one completes first
        (("hij", "ij"), "defg"),  # two complete together: the longest cuts
        (("ghijX",), None),  # a near miss: what was held back is released
        (("za", "yz"), "defghijklmnopqrstuvwx"),
        (("zab",), "defghijklmnopqrstuvwxy"),
    ],
    ids=str,
)
def test_stop_strings_over_blocks(make_lab, k, stops, text):
    """The text ends before the stop that completes first; ids and usage end with the completing token (case 5)."""
    target = alphabet_target()
    lab = make_lab(target, strategies_for(target), draft_max=k)
    for spec in (*lab.strategies, "off"):
        lab.events.clear()
        request = GenerationRequest(target.tokenizer.encode("abc"), max_tokens=30, stop=stops, spec=spec)
        [result] = lab.run(request)
        lab.check_same(request, result)
        assert result.finish_reason is (FinishReason.LENGTH if text is None else FinishReason.STOP)
        assert text is None or result.text == text
        streamed = ""
        for event in lab.events:
            streamed += event.text
            assert result.text.startswith(streamed), "a text was sent that the result does not hold"


def test_bytes_of_one_character_over_tokens_and_blocks(make_lab):
    """A character cut into tokens is released whole, and one that never completes becomes U+FFFD at the end."""
    pieces = [bytes([byte]) for byte in "é€😀".encode()]
    target = ScriptedTarget(
        tokenizer=ScriptedTokenizer(pieces), logits=next_table([(i + 1) % len(pieces) for i in range(len(pieces))])
    )
    lab = make_lab(target, strategies_for(target))
    for max_tokens in range(1, 20):
        for spec in lab.strategies:
            request = GenerationRequest([len(pieces) - 1], max_tokens=max_tokens, spec=spec)
            [result] = lab.run(request)
            lab.check_same(request, result)
            assert "�" not in result.text[:-1]
