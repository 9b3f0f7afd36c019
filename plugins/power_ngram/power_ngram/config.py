"""Options of each strategy, checked when they are set. Defaults are measured: see docs/strategies/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from attrs import Attribute, field, frozen

from power_core.errors import ConfigError

__all__ = [
    "NgramContextConfig",
    "NgramMapConfig",
    "NgramModConfig",
    "PromptLookupConfig",
    "SuffixConfig",
]

Check = Callable[[Any, "Attribute[Any]", Any], None]


def _refuse(instance: Any, name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(
        f"{name} is {value!r}", who=f"strategy {instance.strategy!r}", where=name, got=value, expected=expected,
        fix=f"set {name} to {expected}", plugin="ngram",
    )  # fmt: skip


def _whole(low: int) -> Check:
    def check(instance: Any, attribute: Attribute[Any], value: Any) -> None:
        if type(value) is not int or value < low:  # a bool is no length
            raise _refuse(instance, attribute.name, value, f"a whole number of at least {low}")

    return check


def _number(low: float, high: float) -> Check:
    def check(instance: Any, attribute: Attribute[Any], value: Any) -> None:
        if type(value) not in (int, float) or not low <= value <= high:  # NaN compares false
            raise _refuse(instance, attribute.name, value, f"a number from {low:g} to {high:g}")

    return check


def _switch(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if type(value) is not bool:
        raise _refuse(instance, attribute.name, value, "true or false")


def _ordered(instance: Any) -> None:
    """`n_min` and `n_max` of one class: the bounds must leave a length to use."""
    if instance.n_max < instance.n_min:
        raise _refuse(instance, "n_max", instance.n_max, f"a whole number of at least n_min = {instance.n_min}")


@frozen
class PromptLookupConfig:
    """
    Options of `prompt-lookup`.

    Args:
        n_max: Longest n-gram looked up, tried first.
        n_min: Shortest n-gram looked up; shorter ones match more often and mean less. Of more than 8 lengths
            from here to `n_max`, 8 in even ratios are used.
    """

    strategy: ClassVar[str] = "prompt-lookup"
    n_max: int = field(default=5, validator=_whole(1))
    n_min: int = field(default=3, validator=_whole(1))

    def __attrs_post_init__(self) -> None:
        _ordered(self)


@frozen
class NgramContextConfig:
    """
    Options of `ngram-context`.

    Args:
        n_max: Longest n-gram looked up, tried first.
        n_min: Shortest n-gram looked up. Of more than 8 lengths from here to `n_max`, 8 in even ratios are used.
    """

    strategy: ClassVar[str] = "ngram-context"
    n_max: int = field(default=5, validator=_whole(1))
    n_min: int = field(default=3, validator=_whole(1))

    def __attrs_post_init__(self) -> None:
        _ordered(self)


@frozen
class NgramModConfig:
    """
    Options of `ngram-mod`.

    Args:
        n_match: Tokens that are hashed to look up the next one.
        n_min: Chains shorter than this are not proposed (or shorter than what was asked for, if that is less).
        n_max: Longest chain proposed.
        pool_size: Slots of the pool; a slot keeps the latest token that was hashed to it.
        shared_store: Whether what ended requests left is used by later ones of the same session.
    """

    strategy: ClassVar[str] = "ngram-mod"
    n_match: int = field(default=8, validator=_whole(1))
    n_min: int = field(default=1, validator=_whole(1))
    n_max: int = field(default=64, validator=_whole(1))
    pool_size: int = field(default=1 << 20, validator=_whole(1))
    shared_store: bool = field(default=False, validator=_switch)

    def __attrs_post_init__(self) -> None:
        _ordered(self)


@frozen
class NgramMapConfig:
    """
    Options of `ngram-map-k4v`.

    Args:
        key_size: Tokens of a key.
        value_size: Tokens of a continuation; longer proposals chain several.
        min_hits: Times a key must have been seen before it is used.
        min_share: A continuation is followed only while this share of the hits agrees with it.
    """

    strategy: ClassVar[str] = "ngram-map-k4v"
    key_size: int = field(default=6, validator=_whole(1))
    value_size: int = field(default=4, validator=_whole(1))
    min_hits: int = field(default=1, validator=_whole(1))
    min_share: float = field(default=0.6, validator=_number(0.0, 1.0))


@frozen
class SuffixConfig:
    """
    Options of `suffix`.

    Args:
        min_confidence: A proposal ends where the chance that all of it up to there is accepted falls below this.
            Raise it where one more row is dear, lower it where rows are nearly free.
        novelty: Doubt about short matches, in occurrences: a context of n tokens is trusted as if `novelty / n`
            other continuations had been seen once.
        contexts: Matching contexts that are followed, longest first; the one that promises most is proposed.
        count_depth: Most contexts that one token is counted in; counts are exact until it is exceeded.
        shared_store: Whether the answers of ended requests are used by later ones of the same session.
        store_tokens: Most tokens the shared store holds.
        store_match: Longest match looked up in the shared store.
    """

    strategy: ClassVar[str] = "suffix"
    min_confidence: float = field(default=0.15, validator=_number(0.0, 1.0))
    novelty: float = field(default=3.0, validator=_number(0.0, 1e6))
    contexts: int = field(default=2, validator=_whole(1))
    count_depth: int = field(default=32, validator=_whole(1))
    shared_store: bool = field(default=False, validator=_switch)
    store_tokens: int = field(default=100_000, validator=_whole(2))
    store_match: int = field(default=32, validator=_whole(1))
