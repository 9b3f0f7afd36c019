"""Cost in executed lines, which is the same on every machine: O(1) a token, whatever came before."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
from power_ngram.config import SuffixConfig
from power_ngram.drafter import Config, open_history

from power_core.drafter import DraftRequest


def lines(work: Callable[[], object]) -> int:
    """Python lines executed by *work*."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous)
    return count


def text(length: int) -> list[int]:
    """Random words of some hundred kinds in which a passage of 40 tokens recurs at the end."""
    draw = random.Random(11)
    passage = list(range(900, 940))
    words = [draw.randrange(400) for _ in range(length - 60)]
    return [*passage, *words, *passage[:20]]


def step_lines(config: Config, length: int) -> int:
    """Lines of one `propose` after a committed block, with *length* tokens of history."""
    session = open_history(config)
    session.begin(0, text(length))
    session.checkpoint(0)
    session.observe(0, [920, 921, 922, 923], None)
    proposal = []
    spent = lines(lambda: proposal.extend(session.propose([DraftRequest(0, 923, 8)])))
    assert list(proposal[0].token_ids) == list(range(924, 932))
    return spent


def test_propose_does_not_grow_with_the_history(default: Config) -> None:
    """A step at 50,000 tokens of history executes at most twice the lines of one at 1,000."""
    assert step_lines(default, 50_000) <= 2 * step_lines(default, 1_000)


def test_observe_and_checkpoint_index_nothing(default: Config) -> None:
    """Neither looks at the history, so that a step may be undone for free."""
    session = open_history(default)
    session.begin(0, text(1_000))
    assert lines(lambda: session.observe(0, [1] * 500, None)) < 20
    assert lines(lambda: session.checkpoint(0)) < 20


@pytest.mark.parametrize("make", [text, lambda n: [7] * n, lambda n: [1, 2, 3] * (n // 3)], ids=["text", "a", "abc"])
def test_begin_is_linear(default: Config, make: Callable[[int], list[int]]) -> None:
    """Four times the prompt costs at most about four times the lines, in text and in runs."""
    small, large = (lines(partial(open_history(default).begin, 0, make(n))) for n in (1_500, 6_000))
    assert large <= 4.6 * small + 100


def test_no_step_of_a_run_costs_more_than_the_count_depth() -> None:
    """In a run of one token the suffix chain is as long as the run; the walk over it is cut."""
    session = open_history(SuffixConfig(count_depth=8))
    session.begin(0, [7] * 3_000)
    session.observe(0, [7], None)
    assert lines(lambda: session.propose([DraftRequest(0, 7, 4)])) < 250


def test_begin_with_50_000_tokens_takes_under_a_second(default: Config) -> None:
    """The bound users feel, as CPU time, so that a busy machine does not fail it."""
    tokens = text(50_000)
    seconds = []
    for _ in range(3):
        started = time.thread_time()
        open_history(default).begin(0, tokens)
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 1.0
