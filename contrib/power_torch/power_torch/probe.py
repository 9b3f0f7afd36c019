"""
Which row counts give a row the same bits on this machine, and what each costs.

Forwards of one row count run the same kernels. That these treat every row alike, whatever its index and its
companions, that attention does not depend on how much masked cache it reads, and which other row counts agree,
is measured with the model's own weights before a session is used. Nothing is believed of a kernel library: a
width or span that disagrees is not used, and where rows of one width disagree among themselves nothing is promised.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from attrs import field, frozen

from power_core.shapes import ExactnessLevel, ShapeIdentity, ShapeProfile, WidthClass
from power_core.types import JSON
from power_torch.cache import KvCache
from power_torch.kernels import KernelProbe
from power_torch.network import Network
from power_torch.step import Chain, Step, make_step

__all__ = ["PROMPT_ROWS", "fingerprint", "measure"]

PROMPT_ROWS = 8
"""Rows that the probe puts before those it compares."""

_REPEATS = 5  # timed forwards a width
_CHEAPER = 0.95  # a wider forward that takes at most this part of a narrower one's time is taken in its place
_LEAST_PREFILL = 16


def measure(
    network: Network, cache: KvCache, *, max_rows: int, prefill_rows: int, sequences: int, facts: Mapping[str, JSON]
) -> ShapeProfile:
    """
    Measure the classes of decode and prompt forwards.

    Args:
        network: The model.
        cache: Room for `PROMPT_ROWS + max(max_rows, prefill_rows)` positions of each sequence; its rows are
            overwritten, and its spans cut down to those that agree.
        max_rows: Most rows of a decode step.
        prefill_rows: Most rows of a prompt step.
        sequences: Sequences of the session.
        facts: What else decides the numbers: for the identity.
    """
    kernels = KernelProbe(network.hparams, network.dtype, network.device, max(max_rows, prefill_rows))
    probe = _Probe(network, cache, kernels)
    decode, prefill = probe.settle(_ladder(1, max_rows), _ladder(min(_LEAST_PREFILL, prefill_rows), prefill_rows))
    is_stable = all(probe.is_consistent(width) for width in {max_rows, prefill_rows})
    is_stable = is_stable and (sequences < 2 or probe.ignores_companions(max_rows))
    level = ExactnessLevel.BITWISE if decode[0] == 1 else ExactnessLevel.PADDED
    if not is_stable:
        level, decode, prefill = ExactnessLevel.UNVERIFIED, (max_rows,), (prefill_rows,)
    decode, costs = probe.worth_using(decode)
    mark = {**facts, "spans": cache.spans[-1:], "bits": probe.digest(max_rows)}
    is_one_class = is_stable and probe.agree(max_rows, prefill_rows)
    if is_one_class:  # prompt chunks may then be as narrow as decode steps
        prefill = tuple(sorted({*decode, *prefill}))
    else:
        mark_prefill = {**facts, "kind": "prompt", "spans": cache.spans[-1:], "bits": probe.digest(prefill_rows)}
    identity = ShapeIdentity.of(mark)
    return ShapeProfile(
        level=level,
        decode=WidthClass(identity, decode, costs),
        prefill=WidthClass(identity if is_one_class else ShapeIdentity.of(mark_prefill), prefill),
        evidence={
            "decode_widths": list(decode),
            "prefill_widths": list(prefill),
            "attention_spans": list(cache.spans),
            "kv_bytes": cache.nbytes,
            **facts,
        },
    )


def fingerprint(network: Network, cache: KvCache, widths: Iterable[int]) -> dict[str, JSON]:
    """
    Digests of a few forwards: where they are those of another time, so are the kernels.

    Args:
        network: The model.
        cache: As of `measure`, its spans as they were cut down then.
        widths: Row counts of the forwards.
    """
    most = max(widths := sorted(widths))
    probe = _Probe(network, cache, KernelProbe(network.hparams, network.dtype, network.device, most))
    return {str(width): probe.digest(width) for width in widths}


def _ladder(least: int, most: int) -> list[int]:
    """Powers of two from *least* on, and *most*."""
    return [*itertools.takewhile(lambda width: width < most, (least << i for i in itertools.count())), most]


@frozen(eq=False)
class _Probe:
    """Forwards of made-up text, at any width and in any chunks."""

    network: Network
    cache: KvCache
    kernels: KernelProbe
    _known: dict[int, torch.Tensor] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._rows([PROMPT_ROWS], PROMPT_ROWS, start=0)

    def settle(self, *ladders: Sequence[int]) -> list[tuple[int, ...]]:
        """
        Cut the cache's spans down to those that agree, and each ladder to the widths that agree with its last.

        Forwards are only compared once the spans they use are known to agree with each other.
        """
        self.cache.spans = self._agreeing_spans([ladder[-1:] for ladder in ladders])
        classes = [self._agreeing_widths(ladder) for ladder in ladders]
        spans = self._agreeing_spans(classes)
        if spans != self.cache.spans:  # a narrower width does not agree in some span
            self.cache.spans = spans
            self._known.clear()
            classes = [self._agreeing_widths(widths) for widths in classes]
        return classes

    # Whole forwards

    def _agreeing_widths(self, candidates: Sequence[int]) -> tuple[int, ...]:
        """Those of *candidates*, ascending, that agree with the last, and that one."""
        *narrower, widest = candidates
        return (*(width for width in narrower if self.agree(width, widest)), widest)

    def agree(self, width: int, other: int) -> bool:
        """Whether the rows that two row counts have in common are the same."""
        if not self.kernels.agree(width, other):
            return False
        least = min(width, other)
        return torch.equal(self._full(width)[:least], self._full(other)[:least])

    def is_consistent(self, width: int) -> bool:
        """Whether a row's bits depend neither on its index in a forward of *width* rows nor on what follows it."""
        if not self.kernels.agree(width, width):
            return False
        expected = self._full(width)
        cuts = {1, width // 2, width - 1} - {0, width}
        return all(torch.equal(self._rows([cut, width - cut], width), expected) for cut in sorted(cuts))

    def ignores_companions(self, width: int) -> bool:
        """Whether rows of another sequence, before a row or after it, leave it alone."""
        if width < 2:
            return True
        row, expected = Chain(0, 0, 1, PROMPT_ROWS), self._full(width)[:1]
        after = self._forward([row, Chain(1, 1, width - 1, 0)], width)
        last = row._replace(first=width - 1)
        before = self._forward([last, Chain(1, 0, width - 1, 0)], width)
        return torch.equal(before, expected) and torch.equal(after, expected)

    def digest(self, width: int) -> str:
        """Of a row at *width*: the same where two widths, sessions or processes compute alike."""
        return hashlib.sha256(self._full(width)[0].cpu().numpy().tobytes()).hexdigest()

    def worth_using(self, widths: Sequence[int]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """
        Those of *widths* that no wider one is faster than, and the cost of each.

        Kernels for few rows may be slower than those for more; pad rows are then time saved.

        Returns:
            Widths, and times of a forward in units of the first, never less for a wider one.
        """
        times = self._times(widths)
        kept = [i for i, time_ in enumerate(times) if min(times[i:]) > _CHEAPER * time_]
        costs = list(itertools.accumulate((times[i] for i in kept), max))
        return tuple(widths[i] for i in kept), tuple(round(cost / costs[0], 3) for cost in costs)

    def _times(self, widths: Sequence[int]) -> list[float]:
        """Seconds of a forward at each of *widths*: the least of a few, taken by turns since machines drift."""
        # Beside busy neighbours a thread's own time is what the work takes; it tells nothing of other threads.
        is_alone = self.network.device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.thread_time if is_alone else time.perf_counter
        steps = [self._step([Chain(0, 0, width, PROMPT_ROWS)], width) for width in widths]
        return [min(times) for times in zip(*(self._seconds(steps, clock) for _ in range(_REPEATS)), strict=True)]

    def _seconds(self, steps: Iterable[Step], clock: Callable[[], float]) -> Iterator[float]:
        for step in steps:
            began = clock()
            logits = self.network.forward(step, self.cache).logits
            if logits is not None:
                logits[0, 0].item()  # waits for an accelerator
            yield clock() - began

    def _full(self, width: int) -> torch.Tensor:
        """The rows of one chain that fills a forward."""
        known = self._known.get(width)
        if known is None:
            known = self._known[width] = self._rows([width], width)
        return known

    def _rows(self, chunks: Sequence[int], width: int, start: int = PROMPT_ROWS) -> torch.Tensor:
        """A text evaluated in *chunks*, each in a forward of *width* rows."""
        results = []
        for chunk in chunks:
            results.append(self._forward([Chain(0, 0, chunk, start)], width))
            start += chunk
        return torch.cat(results)

    def _forward(self, chains: Sequence[Chain], width: int) -> torch.Tensor:
        """
        float32: what is known of the first chain's rows, side by side.

        Logits, keys and values of each layer, and whatever the network computed in float32 before rounding it.
        """
        chain = chains[0]
        last = chain.first + chain.rows
        seen: list[torch.Tensor] = []

        def keep(rows: torch.Tensor, first: int) -> None:
            if first <= chain.first and last <= first + len(rows):
                seen.append(rows[chain.first - first : last - first].flatten(1))

        self.network.watch = keep
        try:
            logits = self.network.forward(self._step(chains, width), self.cache).logits
        finally:
            self.network.watch = None
        if logits is None:
            raise RuntimeError("a forward without logits was probed")
        kept = self.cache.rows(chain.seq, chain.position, chain.rows)
        return torch.cat([logits[chain.first : last].float(), kept, *seen], dim=1)

    def _step(self, chains: Sequence[Chain], width: int, spans: Sequence[int] = ()) -> Step:
        """A forward of *width* rows in which nothing is narrower than that."""
        ordered = sorted(chains, key=lambda chain: chain.first)
        vocab = self.network.hparams.vocab_size
        # A token is decided by its sequence and position: the text is the same however it is cut.
        tokens = [(7919 * (c.position + i) + 104729 * c.seq + 13) % vocab for c in ordered for i in range(c.rows)]
        return make_step(
            tokens,
            ordered,
            np.arange(len(tokens)),
            width=width,
            tiles=WidthClass(ShapeIdentity(""), (width,)),
            spans=spans or self.cache.spans,
            group=self.network.group,
            window=self.network.hparams.sliding_window,
            device=self.network.device,
        )

    # Attention alone, as a whole forward at every span would take too long

    def _agreeing_spans(self, classes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The cache's spans in which every width of *classes* gives the bits that its widest gives in the longest."""
        *shorter, longest = self.cache.spans
        generator = torch.Generator().manual_seed(0)
        hparams = self.network.hparams
        rows = torch.randn((longest, 2 * hparams.num_kv_heads, hparams.head_dim), generator=generator)
        self.cache.write(0, 0, 0, rows.to(self.network.device))
        agreeing = [span for span in shorter if all(self._span_agrees(span, longest, widths) for widths in classes)]
        self._rows([PROMPT_ROWS], PROMPT_ROWS, start=0)  # puts back what the random rows took the place of
        return (*agreeing, longest)

    def _span_agrees(self, span: int, longest: int, widths: Sequence[int]) -> bool:
        fitting = [width for width in widths if width <= span]
        if not fitting:
            return True  # no chain that wide ends in this span
        start = span - fitting[-1]
        expected = self._attention(fitting[-1], longest, start)
        return all(torch.equal(self._attention(width, span, start), expected[:width]) for width in fitting)

    def _attention(self, width: int, span: int, start: int) -> torch.Tensor:
        network = self.network
        generator = torch.Generator().manual_seed(1)
        heads = network.hparams.num_heads + 2 * network.hparams.num_kv_heads
        # Drawn row after row: narrower forwards get the first rows of wider ones.
        qkv = torch.randn((width, heads, network.hparams.head_dim), generator=generator).to(network.device)
        mixed = torch.zeros((width, network.hparams.query_size), device=network.device)
        tile = self._step([Chain(0, 0, width, start)], width, spans=(span,)).tiles[0]
        network.attend(tile, qkv, self.cache.views(0, span)[0], mixed, is_windowed=False)
        return mixed
