"""
How many threads to compute with where nobody says: all cores, unless that is a cliff here and now.

With as many threads as cores, a neighbour that keeps one core busy makes all others wait for it at every barrier;
with some OpenMP runtimes a forward then takes tens of times as long. Two short forwards tell.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median

from attrs import field, frozen

from power_llamacpp.context import ContextSettings, NativeContext, NativeModel

__all__ = ["ThreadChoice", "choose_threads"]

CLIFF = 2.0  # times slower than with one thread fewer: a quiet machine is never
_ROWS, _REPEATS, _ENOUGH_S = 8, 3, 0.5


@frozen
class ThreadChoice:
    """
    Threads to compute with, and why.

    Args:
        threads: The choice.
        milliseconds: Threads tried -> median time of a forward of 8 rows; empty where there was nothing to choose.
    """

    threads: int
    milliseconds: Mapping[int, float] = field(factory=dict)

    @property
    def advice(self) -> str | None:
        """What to tell a reader where fewer threads than cores were taken."""
        if not self.milliseconds or self.threads == max(self.milliseconds):
            return None
        most, taken = max(self.milliseconds), self.milliseconds[self.threads]
        return (
            f"a forward took {self.milliseconds[most]:.0f} ms with {most} threads and {taken:.0f} with {self.threads}: "
            "something else keeps a core busy; set threads to choose yourself"
        )


def choose_threads(weights: NativeModel, cores: int) -> ThreadChoice:
    """
    Try *cores* threads and one fewer on *weights*, about half a second in all.

    Raises:
        BackendError: llama.cpp cannot make a context.
    """
    if cores < 2:
        return ThreadChoice(1)
    settings = ContextSettings(context_size=_ROWS * (_REPEATS + 2), batch_rows=_ROWS, max_outputs=1, threads=cores)
    with NativeContext(weights, settings) as context:
        times = {threads: _milliseconds(context, threads) for threads in (cores, cores - 1)}
    chosen = cores - 1 if times[cores] > CLIFF * times[cores - 1] else cores
    return ThreadChoice(chosen, times)


def _milliseconds(context: NativeContext, threads: int) -> float:
    """Median time of a forward; the first warms up, and is all there is where it takes long."""
    context.set_threads(threads)
    times: list[float] = []
    while len(times) < _REPEATS + 1 and sum(times) < _ENOUGH_S:
        context.remove(0, 0)
        batch = context.batch
        batch.tokens[:_ROWS] = 1
        batch.positions[:_ROWS] = range(_ROWS)
        batch.seqs[:_ROWS] = 0
        batch.outputs[:_ROWS] = [0] * (_ROWS - 1) + [1]
        started = time.perf_counter()
        context.decode(_ROWS)
        times.append(time.perf_counter() - started)
    return round(1000 * median(times[1:] or times), 2)
