"""
The draft K/V ring against a cache of the whole context: ``python bench/bench_ring.py [MODEL [STRATEGY...]]``.

For every drafter that torch computes for the model: whether ring and full cache propose the same, confidences
included, while a text fits the ring, and beyond it the same as a full cache masked to the ring's window; how many
proposals the window itself leaves alone; bytes, and time of a draft round, ring / full, by context size. Texts are
given, so that all see the same states. Exits 1 where the first two are not all alike.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from attrs import frozen
from numpy.typing import NDArray
from power_torch.drafting import KvRing

from power_core.config import PowerConfig
from power_core.drafter import DraftRequest, HiddenRows, Proposal
from power_core.errors import CapabilityError
from power_core.runtime import Runtime
from power_core.strategies import StrategyResolver
from power_core.target import RowBatch, SessionOptions, TargetModel, TargetSession

STRATEGIES = ("mtp", "dflash", "dflash2", "dspark")
RING, SMALL = 512, 128  # the default, and one that the texts go beyond
CONTEXTS = (512, 2_048, 8_192)
TOKENS, PROMPT, STEP, DRAFTS, ROUNDS = 320, 32, 8, 7, 12
TEXTS = (
    "The keeper wound the clockwork, trimmed the wick and wrote the hour, the wind and the passing ships in his log. "
    "On the third night of the storm the lamp failed, and he carried oil up the stairs until morning came. ",
    "def merge(left, right):\n    result = []\n    while left and right:\n        if left[0] <= right[0]:\n            "
    "result.append(left.pop(0))\n        else:\n            result.append(right.pop(0))\n    return result + left\n\n",
    "Q: A baker has 12 trays of 8 rolls and sells 57 of them. How many are left? A: 12 * 8 = 96, and 96 - 57 = 39. ",
)


@frozen
class Text:
    """Ids of a text and the block outputs at each, which drafters read in the place of a target's rows."""

    ids: Sequence[int]
    layers: Mapping[int, NDArray[np.float32]]

    def hidden(self, i: int | slice, layer: int) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self.layers[layer][i]
        return values


@frozen
class Place:
    """What a drafter asks of a target session: sequences, and how long they may be."""

    context_size: int
    max_sequences: int = 1
    capabilities: frozenset[str] = frozenset()


class Draft:
    """
    A strategy's draft session over a cache of its own.

    Args:
        name: The strategy.
        runtime: Knows its plugin and artifact.
        model: The target.
        ring: Positions kept; 0 keeps the whole context.
        context: The context size.
        window: Positions shown of those kept; None shows all.
    """

    def __init__(
        self, name: str, runtime: Runtime, model: TargetModel, *, ring: int, context: int, window: int | None = None
    ) -> None:
        config = PowerConfig(sections={name: {"executor": "torch", "ring": ring}})
        self.drafter = StrategyResolver(runtime.registry, config, model).resolve(name).drafter
        self._session = self.drafter.open(model, cast("TargetSession", Place(context)))
        executor: Any = self._session._executor  # type: ignore[attr-defined]  # noqa: SLF001 - what is measured is inside
        self.ring = next(value for value in vars(executor).values() if isinstance(value, KvRing))
        if window is not None:
            self.ring.cap = window
            if hasattr(executor, "_window"):  # the MTP head shows no more than that to its draft rows
                executor._window = window  # noqa: SLF001 - as above
        self.times: list[float] = []

    def walk(self, text: Text, end: int) -> list[Proposal]:
        """Proposals at every few positions of *text* up to *end*, as if the target had chosen it."""
        self._session.begin(0, text.ids[:PROMPT])
        self._session.observe(0, text.ids[PROMPT : PROMPT + 1], HiddenRows(text, 0, PROMPT, 0))
        proposals: list[Proposal] = []
        for at in range(PROMPT, end - STEP, STEP):
            began = time.thread_time()
            proposals += self._session.propose([DraftRequest(0, text.ids[at], DRAFTS)])
            self._session.observe(0, text.ids[at + 1 : at + 1 + STEP], HiddenRows(text, at, STEP, at))
            self.times.append(time.thread_time() - began)
        self._session.end(0)
        return proposals


def read(model: TargetModel, layers: tuple[int, ...]) -> list[Text]:
    """The texts, each as long as wanted, with the model's states."""
    session = model.open_session(SessionOptions(context_size=512, max_rows=8, hidden_layers=layers, threads=1))
    shape, texts = session.profile.prefill, []
    batch = RowBatch(shape.max_rows)
    for text in TEXTS:
        ids = model.tokenizer.encode(text * 20)[:TOKENS]
        parts: dict[int, list[NDArray[np.float32]]] = {layer: [] for layer in layers}
        session.open(0)
        for start in range(0, len(ids), shape.max_rows):
            chunk = ids[start : start + shape.max_rows]
            batch.clear()
            batch.add_chain(0, start, chunk, 0)
            rows = session.forward(batch, shape)
            for layer, found in parts.items():
                found.append(rows.hidden(slice(0, len(chunk)), layer).copy())
        session.close(0)
        texts.append(Text(ids, {layer: np.concatenate(found) for layer, found in parts.items()}))
    session.shutdown()
    return texts


def round_ratio(one: Draft, other: Draft, text: Text) -> float:
    """Median time of a round of *one* over that of *other*, taken in turns; the first rounds of each do not count."""
    for count in (1, ROUNDS, ROUNDS):
        for draft in (one, other):
            draft.walk(text, PROMPT + (count + 1) * STEP)
            if count == 1:
                draft.times.clear()
    return statistics.median(one.times) / statistics.median(other.times)


def main() -> int:
    wrong = 0
    with Runtime(PowerConfig(backend="torch")) as runtime:
        model = runtime.load_target(sys.argv[1] if len(sys.argv) > 1 else None)
        resolver = StrategyResolver(runtime.registry, PowerConfig(), model)
        strategies = [name for name in sys.argv[2:] or STRATEGIES if is_there(resolver, name)]
        layers = {layer for name in strategies for layer in resolver.hidden_layers(name)}
        texts = read(model, tuple(sorted(layers)))
        for name in strategies:
            wrong += compare(name, runtime, model, texts)
        model.close()
    return min(wrong, 1)


def is_there(resolver: StrategyResolver, name: str) -> bool:
    try:
        return resolver.resolve(name).artifact is not None
    except CapabilityError:
        return False


def compare(name: str, runtime: Runtime, model: TargetModel, texts: Sequence[Text]) -> int:
    """Print what is found of one strategy; returns how many proposals differ that should not."""

    def draft(ring: int, context: int, window: int | None = None) -> Draft:
        return Draft(name, runtime, model, ring=ring, context=context, window=window)

    def walk(ring: int, window: int | None = None) -> list[Proposal]:
        walker = draft(ring, 1_024, window)
        return [proposal for text in texts for proposal in walker.walk(text, TOKENS)]

    full, all_of_it, window = walk(0), walk(RING), walk(SMALL)
    total, fits, beyond = len(full), same(all_of_it, full), same(window, walk(0, SMALL))
    print(
        f"{name:8} ring {RING} = full cache: {fits}/{total}; ring {SMALL} = full cache masked to {SMALL}: "
        f"{beyond}/{total}, = full cache: {same(window, full)}/{total}",
        flush=True,
    )
    for context in CONTEXTS:
        ring, whole = draft(RING, context), draft(0, context)
        ratio = round_ratio(ring, whole, texts[0])
        print(
            f"{name:8} context {context}: bytes {ring.ring.nbytes} / {whole.ring.nbytes} = "
            f"{ring.ring.nbytes / whole.ring.nbytes:.3f}, round {ratio:.2f}",
            flush=True,
        )
    return 2 * total - fits - beyond


def same(some: Sequence[Proposal], others: Sequence[Proposal]) -> int:
    """How many are alike, confidences included."""
    return sum(one == other for one, other in zip(some, others, strict=True))


if __name__ == "__main__":
    sys.exit(main())
