"""What the strategies are worth on recorded texts: accepted tokens, counted by replay."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
from power_ngram.config import SuffixConfig
from power_ngram.drafter import Config, open_history
from power_ngram.replay import ReplayCounts, replay

STREAMS = json.loads((Path(__file__).parent / "data" / "streams.json").read_text())["streams"]


def words(text: str, ids: dict[str, int]) -> list[int]:
    """Ids of words, numbers, single signs and runs of blanks."""
    return [ids.setdefault(word, len(ids)) for word in re.findall(r"\w+|\s+|.", text)]


def code(edit: bool) -> tuple[list[int], list[int]]:
    """Prompt and answer: a standard library module, repeated or with `self` renamed throughout."""
    source = inspect.getsource(shlex)
    ids: dict[str, int] = {}
    return words(source, ids), words(re.sub(r"\bself\b", "this", source) if edit else source, ids)


def test_a_copy_is_accepted_nearly_whole(default: Config) -> None:
    """Copying a prompt accepts more than half of the most that 8 tokens a step allow, `suffix` nearly all of it."""
    prompt, answer = code(edit=False)
    counts = replay(open_history(default), prompt, answer, 8)
    assert counts.accepted + counts.steps == len(answer)
    assert counts.accepted_per_step >= (0.95 if default.strategy == "suffix" else 0.5) * 8


def test_an_edited_copy_is_found_again_after_each_edit(default: Config) -> None:
    """With a word replaced everywhere, most tokens of the copy are still accepted."""
    prompt, answer = code(edit=True)
    counts = replay(open_history(default), prompt, answer, 8)
    assert counts.accepted >= 0.4 * len(answer)


def test_suffix_beats_the_others_on_an_edited_copy(default: Config) -> None:
    """The default of `auto` accepts at least as many tokens a step as every other strategy."""
    prompt, answer = code(edit=True)
    suffix = replay(open_history(SuffixConfig()), prompt, answer, 8)
    other = replay(open_history(default), prompt, answer, 8)
    assert suffix.accepted_per_step >= other.accepted_per_step


def recorded(config: Config) -> ReplayCounts:
    """All recorded answers of the model, each in a new request of one session."""
    session, counts = open_history(config), ReplayCounts()
    for stream in STREAMS.values():
        counts.add(replay(session, stream["prompt"], stream["answer"], 15))
    return counts


def test_recorded_answers(default: Config) -> None:
    """On a model's own greedy answers every strategy accepts a useful part of what it proposes."""
    counts = recorded(default)
    assert counts.accepted_per_step > 0.2
    assert counts.precision > 0.2


def test_suffix_confidences_can_be_believed() -> None:
    """Over the recorded answers, proposals end where they should: raising the threshold raises the precision."""
    precisions = [recorded(SuffixConfig(min_confidence=x)).precision for x in (0.05, 0.15, 0.4, 0.7)]
    assert precisions == sorted(precisions)
    assert precisions[-1] > 0.85


def test_replay_counts_what_was_accepted() -> None:
    """A text without repetitions is replayed one token a step, with nothing proposed."""
    counts = replay(open_history(SuffixConfig()), [1, 2], list(range(10, 60)), 8)
    assert (counts.steps, counts.drafted, counts.accepted, counts.rounds) == (50, 0, 0, 0)
    assert (counts.precision, counts.accepted_per_round, counts.accepted_per_step) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_replay_never_asks_past_the_end(k: int) -> None:
    """The last recorded token is never proposed for: a step emits one token of its own."""
    counts = replay(open_history(SuffixConfig(min_confidence=0.0)), [5] * 40, [5] * 21, k)
    assert counts.accepted + counts.steps == 21
