"""
The width probe's child process: `python -m power_llamacpp.probe_child`, one task as JSON in, one result out.

A setting can end the process (an instruction the machine lacks, an assertion), so the parent tries each in a
child. The child compares logits bit for bit, as digests of rows, and times forwards; it decides nothing.

Kernels are chosen by the length of the attended cache too, which llama.cpp lengthens in steps of 256 positions:
the fused attention kernel, for one, splits the work of a single row from 512 on. So rows are compared across such
a step, where those of one forward attend further than those of several.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from attrs import asdict, define, field, frozen
from numpy.typing import NDArray

from power_core.errors import BackendError
from power_core.types import JSON
from power_llamacpp.config import KvType
from power_llamacpp.context import ContextSettings, NativeContext, NativeModel
from power_llamacpp.native import library

__all__ = ["ProbeTask", "main", "run_task"]

_CACHE_STEP = 256
_PREFIX = _CACHE_STEP - 6  # positions of sequence 0 before its first compared row
_SHORT_PREFIX = 8  # of its companion, and before prompt chunks
_SAMPLES = 3  # timings a width, at most: as many for narrow widths as for wide ones
_SOAK = 3  # times the largest width: rows that the setting taken is tried on once more
_MIN_ROWS = 8  # rows each width computes: several forwards of a narrow width, one of a wide one

# A text with a real continuation; the numbers keep its repetitions from being copies.
_TEXT = """\
Station {n} of the coastal line stands where the river meets the old harbour, {n} miles from the border. In the
winter of 18{n:02d} the keeper, a former clockmaker, wrote down the tide twice a day; his figures differ from the
modern tables by less than a hand's breadth. "If the bell rings before noon," he told visitors, "take the inland
road." def average(values): return sum(values) / len(values) if values else {n}.0  # empty lists are common here
"""


@frozen
class ProbeTask:
    """
    What to measure, under which settings.

    Args:
        path: The model file; checked by the parent.
        extra_buffers: See `NativeModel`.
        flash_attention: See `ContextSettings`; the following four as well.
        kv_type: Element type of the cache.
        swa_full: Whether windowed layers keep everything.
        rollback_rows: Recurrent states kept.
        threads: Compute threads.
        batch_rows: Most rows of a forward.
        widest: The largest width.
        widths: Row counts to compare, 1 and `widest` among them.
        chunks: Prompt chunk sizes to compare with forwards of `widest` rows, ascending; `widths` is then the
            decode class, and only its smallest and largest member are used.
        whole: Whether a partition of all widths is wanted, or only whether they are one class.
        adapters: Files and scales of LoRA adapters; checked by the parent.
    """

    path: str
    extra_buffers: bool
    flash_attention: bool
    kv_type: str
    swa_full: bool
    rollback_rows: int
    threads: int
    batch_rows: int
    widest: int
    widths: list[int]
    chunks: list[int] = field(factory=list)
    whole: bool = True
    adapters: list[tuple[str, float]] = field(factory=list)

    def to_json(self) -> dict[str, JSON]:
        return asdict(self)


@define
class _Width:
    """What one row count gave: a digest of each position's logits, and times."""

    digests: dict[int, str] = field(factory=dict)
    is_stable: bool = True
    times: list[float] = field(factory=list)
    difference: float = 0.0  # largest difference of a logit from the single-row run
    logits: list[NDArray[np.float32]] = field(factory=list)  # of the single-row run, to take differences from

    def keep(self, digests: Mapping[int, str]) -> None:
        """Record rows; a row seen before must be the same again."""
        self.is_stable &= all(self.digests.get(position, digest) == digest for position, digest in digests.items())
        self.digests.update(digests)


class _Prober:
    """One context with two sequences, and the runs over it."""

    def __init__(self, task: ProbeTask) -> None:
        self.task = task
        self.width = task.widest
        self.starts: tuple[int, ...] = (_SHORT_PREFIX,) if task.chunks else (_PREFIX, _SHORT_PREFIX)
        reach = max(_SHORT_PREFIX + max(task.chunks, default=0), _CACHE_STEP) + (1 + _SOAK) * self.width
        adapters = [(Path(file), scale) for file, scale in task.adapters]
        self.model = NativeModel(Path(task.path), extra_buffers=task.extra_buffers, adapters=adapters)
        self.context = NativeContext(
            self.model,
            ContextSettings(
                context_size=reach,
                max_sequences=len(self.starts),
                batch_rows=task.batch_rows,
                max_outputs=2 * self.width,
                threads=task.threads,
                flash_attention=task.flash_attention,
                kv_type=KvType(task.kv_type),
                swa_full=task.swa_full,
                rollback_rows=task.rollback_rows,
            ),
        )
        # Memory that rows cannot be cut from at will is brought back from a copy instead.
        self.is_cuttable = not self.model.is_recurrent and (task.swa_full or not self.model.window)
        self.tokens = _tokenize(self.model, reach + 1)
        self._states: list[NDArray[np.uint8] | None] = []
        for seq, length in enumerate(self.starts):
            self._fill(seq, 0, length)
            self._states.append(None if self.is_cuttable else self.context.snapshot(seq))

    def _fill(self, seq: int, start: int, end: int) -> None:
        """Evaluate the text from *start* to *end*, in as few forwards as possible."""
        for first in range(start, end, self.context.batch_rows):
            self.forward([(seq, first, min(self.context.batch_rows, end - first))], outputs=())

    def rewind(self, seq: int = 0) -> None:
        """Bring *seq* back to its prefix."""
        state, length = self._states[seq], self.starts[seq]
        done = self.context.remove(seq, length) if state is None else self.context.restore(seq, state, length)
        if not done:
            raise BackendError("llama.cpp would not go back to the probe's prefix", plugin="llamacpp")

    def forward(
        self, parts: Sequence[tuple[int, int, int]], outputs: Iterable[int] | None = None
    ) -> tuple[NDArray[np.float32], float]:
        """
        Evaluate *parts*, each (sequence, first position, rows), in one decode.

        Returns:
            Logits of the *outputs* (row indices; all by default), and milliseconds.
        """
        batch, n = self.context.batch, 0
        for seq, start, rows in parts:
            batch.tokens[n : n + rows] = self.tokens[start : start + rows]
            batch.positions[n : n + rows] = np.arange(start, start + rows)
            batch.seqs[n : n + rows] = seq
            n += rows
        batch.outputs[:n] = outputs is None
        if outputs is not None:
            batch.outputs[list(outputs)] = 1
        started = time.perf_counter()
        logits = self.context.decode(n)
        return logits, 1e3 * (time.perf_counter() - started)

    def go_to(self, length: int) -> None:
        """Bring sequence 0 to *length* positions: cut it, or evaluate it again."""
        if self.is_cuttable and self.context.last_position(0) + 1 >= length:
            self.context.remove(0, length)
        else:
            self.rewind()
            self._fill(0, self.starts[0], length)

    def run(self, width: int, serial: _Width | None = None) -> _Width:
        """
        Rows from the prefix on at *width*; then some of them again, at another place among the rows.

        The second pass is what follows a rejected proposal. A single row has one place only, and where
        memory cannot be cut nothing moves: there, the second pass repeats the first.
        """
        result, begin = _Width(), self.starts[0]
        count = _MIN_ROWS if serial else self.width
        self.rewind()
        for start in range(begin, begin + max(width, count), width):
            logits = self._step(result, start, width)
            if serial is None:
                result.logits.append(logits[0].copy())
            else:
                known = np.stack(serial.logits[start - begin : start - begin + width])
                result.difference = max(result.difference, float(np.abs(logits[: len(known)] - known).max()))
        if self.is_cuttable and width > 1:
            self.go_to(begin + 1)
            self._step(result, begin + 1, width)
        else:
            self.rewind()
            self._step(result, begin, width)
        return result

    def _step(self, result: _Width, start: int, width: int) -> NDArray[np.float32]:
        logits, elapsed = self.forward([(0, start, width)])
        result.times.append(elapsed)
        result.keep(_digests(logits, range(start, start + width)))
        return logits

    def compare_companions(self, serial: _Width) -> dict[int, bool]:
        """
        Whether rows of two sequences computed together are those of each computed alone, one at a time.

        Returns:
            The answer by number of rows of both.
        """
        most = self.width // 2
        alone: list[dict[int, str]] = [dict(serial.digests), {}]
        self.rewind(1)
        for position in range(self.starts[1], self.starts[1] + most):
            alone[1] |= _digests(self.forward([(1, position, 1)])[0], [position])
        answers = {}
        for counts in ((1, 1), (1, 3), (most, 1), (most, most)):
            for seq in (0, 1):
                self.rewind(seq)
            logits, _ = self.forward([(seq, self.starts[seq], rows) for seq, rows in enumerate(counts)])
            parts = np.split(logits, [counts[0]])
            answers[sum(counts)] = all(
                _agree(_digests(part, range(start, start + len(part))), known)
                for part, start, known in zip(parts, self.starts, alone, strict=True)
            )
        return answers

    def wide(self, start: int, width: int) -> dict[int, str]:
        """Digests of one forward of *width* rows at *start*."""
        self.go_to(start)
        logits, _ = self.forward([(0, start, width)])
        return _digests(logits, range(start, start + width))

    def is_chunk_equal(self, chunk: int, reference: Mapping[int, str]) -> bool:
        """
        Whether a prompt chunk's first and last rows are those of forwards of the largest width.

        As many rows are read as the largest width has: their number decides the output matrix's kernel.
        """
        start, ends = self.starts[0], self.width // 2
        picked = [*range(self.width - ends), *range(chunk - ends, chunk)]
        self.rewind()
        logits, _ = self.forward([(0, start, chunk)], picked)
        mine = _digests(logits, [start + index for index in picked])
        return _agree(mine, reference) and _agree(mine, self.wide(start + chunk - self.width, self.width))

    def is_steady(self) -> bool:
        """
        Whether the class holds over more rows, where the cache is lengthened, as deep as the chunks reached.

        Kernels for repacked weights take rows by fours and quantize the rest by other code, which rounds
        differently for some inputs only. A few rows do not show that: such weights are given three times as many,
        and the widths that leave the largest rest.
        """
        widths = self.task.widths
        narrow, width = min(widths), max(widths)
        reached = max(self.task.chunks) // _CACHE_STEP * _CACHE_STEP
        start = max(reached, _CACHE_STEP) - max(width // 2, 1)
        count = _SOAK * width if self.task.extra_buffers else width
        rests = [member for member in widths if member > 4 and member % 4 == 3] if self.task.extra_buffers else []
        known = self._over(start, count, narrow)
        return all(_agree(self._over(start, count, other), known) for other in (*rests, width))

    def _over(self, start: int, count: int, width: int) -> dict[int, str]:
        """Digests of at least *count* rows from *start* on, *width* at a time."""
        digests: dict[int, str] = {}
        for first in range(start, start + count, width):
            digests |= self.wide(first, width)
        return digests


def run_task(task: ProbeTask) -> dict[str, JSON]:
    """
    Measure *task* in this process.

    Raises:
        BackendError: llama.cpp refuses the model or the settings.
    """
    prober = _Prober(task)
    return _compare_chunks(prober) if task.chunks else _compare_widths(prober)


def _compare_chunks(prober: _Prober) -> dict[str, JSON]:
    reference = prober.wide(prober.starts[0], prober.width)
    agreeing = 0
    for chunk in prober.task.chunks:
        if not prober.is_chunk_equal(chunk, reference):
            break
        agreeing = chunk
    return {"agreeing": agreeing, "steady": prober.is_steady()}


def _compare_widths(prober: _Prober) -> dict[str, JSON]:
    task, serial = prober.task, prober.run(1)
    results = {1: serial}
    # The first pair and the widest come first: they tell most settings apart.
    for width in sorted(set(task.widths) - {1}, key=lambda w: (w not in (2, prober.width), w)):
        results[width] = prober.run(width, serial)
        if not task.whole and not _agree(results[width].digests, serial.digests):
            break
    is_complete = len(results) == prober.width
    return {
        "finite": bool(np.isfinite(serial.logits).all()),
        "companions": prober.compare_companions(serial) if is_complete else {},
        "recurrent": prober.model.is_recurrent,
        "widths": {
            str(width): {
                "rows": {str(key): value for key, value in result.digests.items()},
                "stable": result.is_stable,
                "ms": round(min(result.times[-_SAMPLES:]), 4),  # others' work only ever adds to a time
                "difference": result.difference,
            }
            for width, result in sorted(results.items())
        },
    }


def _agree(rows: Mapping[int, str], others: Mapping[int, str]) -> bool:
    """Whether digests are equal at every position that both have, of which there must be one."""
    common = rows.keys() & others.keys()
    return bool(common) and all(rows[position] == others[position] for position in common)


def _digests(logits: NDArray[np.float32], positions: Iterable[int]) -> dict[int, str]:
    """A digest of each row's bits, by position."""
    return {
        position: hashlib.blake2b(row.tobytes(), digest_size=12).hexdigest()
        for position, row in zip(positions, logits, strict=True)
    }


def _tokenize(model: NativeModel, count: int) -> NDArray[np.int32]:
    """The first *count* ids of the text; a vocabulary that covers none of it gives ids in turn."""
    lib = library()
    data = "".join(_TEXT.format(n=n) for n in range(3 + count // 40)).encode()
    ids = np.zeros(len(data) + 16, np.int32)
    found = lib.llama_tokenize(
        model.vocab, data, len(data), ids.ctypes.data_as(lib.llama_token_p), len(ids), True, False
    )
    ids = ids[: max(found, 0)]
    return ids[:count] if len(ids) >= count else np.arange(count, dtype=np.int32) % model.vocab_size


def main() -> None:
    """Read a task from standard input, write its result to standard output; everything else goes to standard error."""
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # dying is a normal answer here, it leaves no core file
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    task = ProbeTask(**json.load(sys.stdin))
    try:
        result = run_task(task)
    except BackendError as error:
        result = {"error": str(error)}
    json.dump(result, answer)
    answer.close()


if __name__ == "__main__":
    main()
