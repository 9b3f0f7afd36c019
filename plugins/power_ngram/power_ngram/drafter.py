"""The drafter that a strategy's config stands for."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from power_core.drafter import DrafterRequirements, DraftSession
from power_core.target import TargetModel, TargetSession
from power_ngram.config import (
    NgramContextConfig,
    NgramMapConfig,
    NgramModConfig,
    PromptLookupConfig,
    SuffixConfig,
)
from power_ngram.history import Strategy
from power_ngram.lookup import ContextStrategy, LookupStrategy
from power_ngram.pool import PoolStrategy
from power_ngram.session import HistorySession
from power_ngram.suffix import SuffixStrategy
from power_ngram.valuemap import ValueMapStrategy

__all__ = ["Config", "HistoryDrafter", "open_history"]

Config = PromptLookupConfig | NgramContextConfig | NgramModConfig | NgramMapConfig | SuffixConfig


@singledispatch
def _strategy(config: Any) -> Strategy:
    raise TypeError(f"{type(config).__name__} is no config of an n-gram strategy")


@_strategy.register
def _(config: PromptLookupConfig) -> Strategy:
    return LookupStrategy(config)


@_strategy.register
def _(config: NgramContextConfig) -> Strategy:
    return ContextStrategy(config)


@_strategy.register
def _(config: NgramModConfig) -> Strategy:
    return PoolStrategy(config)


@_strategy.register
def _(config: NgramMapConfig) -> Strategy:
    return ValueMapStrategy(config)


@_strategy.register
def _(config: SuffixConfig) -> Strategy:
    return SuffixStrategy(config)


def open_history(config: Config) -> HistorySession:
    """A session of *config*'s strategy; it needs nothing of a target."""
    return HistorySession(config.strategy, _strategy(config))


class HistoryDrafter:
    """
    Drafts from the tokens alone, for any target.

    Args:
        config: Options of one strategy; their class says which.
    """

    def __init__(self, config: Config) -> None:
        self._config = config

    def requirements(self) -> DrafterRequirements:
        return DrafterRequirements()

    def open(self, model: TargetModel, session: TargetSession) -> DraftSession:  # noqa: ARG002 - tokens are all it reads
        return open_history(self._config)
