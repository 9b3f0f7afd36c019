"""Registration of the n-gram strategies. What they need is imported when one is first opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from power_core.hookspecs import RegisterStrategy, hookimpl
from power_ngram.config import (
    NgramContextConfig,
    NgramMapConfig,
    NgramModConfig,
    PromptLookupConfig,
    SuffixConfig,
)

if TYPE_CHECKING:
    from power_core.drafter import Drafter

_STRATEGIES: tuple[tuple[type, int | None, str], ...] = (
    # `suffix` is what `auto` takes: the others are kept for comparison and for their smaller indexes.
    (SuffixConfig, 10, "longest suffix seen before, continued by counts"),
    (PromptLookupConfig, None, "latest occurrence of the longest matching n-gram"),
    (NgramContextConfig, None, "n-gram lookup in the request's own output first, then in its prompt"),
    (NgramModConfig, None, "chain of next tokens from a hashed n-gram pool"),
    (NgramMapConfig, None, "n-gram map with up to four continuations per key, chosen by hits"),
)


def _make(config: Any) -> Drafter:
    from power_ngram.drafter import HistoryDrafter  # numpy comes with it, through the core's protocols

    return HistoryDrafter(config)


@hookimpl
def power_register_strategies(register: RegisterStrategy) -> None:
    """Register every strategy of this package under the name its config class carries."""
    for config, auto_rank, description in _STRATEGIES:
        register(
            config.strategy,  # type: ignore[attr-defined]  # every class of the table has it
            _make, config=config, zero_weight=True, auto_rank=auto_rank, description=description,
        )  # fmt: skip
