"""The default number of threads: all cores, unless that is a cliff (R27)."""

import pytest
from power_llamacpp import threads
from power_llamacpp.threads import ThreadChoice, choose_threads


@pytest.mark.parametrize(("slower", "expected"), [(1.0, 4), (1.9, 4), (2.1, 3), (50.0, 3)])
def test_a_cliff_costs_a_thread_and_nothing_else_does(bench, monkeypatch, slower, expected):
    """One thread fewer where all of them are more than twice as slow; then the reader is told."""
    monkeypatch.setattr(threads, "_milliseconds", lambda _context, n: 10.0 * slower if n == 4 else 10.0)
    choice = choose_threads(bench.model("llama"), 4)
    assert choice.threads == expected
    assert (choice.advice is None) == (expected == 4)


def test_one_core_has_nothing_to_choose(bench):
    assert choose_threads(bench.model("llama"), 1) == ThreadChoice(1)


@pytest.mark.parametrize("kind", ["llama", "recurrent"])
def test_the_trial_runs_on_any_memory(bench, kind):
    """Two numbers of threads, each timed; the sessions that follow are not touched."""
    choice = choose_threads(bench.model(kind), 2)
    assert set(choice.milliseconds) == {1, 2}
    assert all(value > 0 for value in choice.milliseconds.values())
