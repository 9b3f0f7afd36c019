"""Options are refused where they are set, with what would be accepted."""

from __future__ import annotations

from typing import Any

import pytest
from power_ngram.config import NgramContextConfig, NgramMapConfig, NgramModConfig, PromptLookupConfig, SuffixConfig

from power_core.errors import ConfigError

BAD: list[tuple[type, str, Any]] = [
    (PromptLookupConfig, "n_min", 0),
    (PromptLookupConfig, "n_max", "3"),
    (PromptLookupConfig, "n_max", 2),  # below the default n_min
    (NgramContextConfig, "n_min", -1),
    (NgramContextConfig, "n_max", 2),
    (NgramModConfig, "n_match", 0),
    (NgramModConfig, "n_match", True),
    (NgramModConfig, "n_max", 0),
    (NgramModConfig, "pool_size", 0),
    (NgramModConfig, "shared_store", "yes"),
    (NgramMapConfig, "key_size", 0),
    (NgramMapConfig, "value_size", 1.5),
    (NgramMapConfig, "min_hits", 0),
    (NgramMapConfig, "min_share", 1.1),
    (SuffixConfig, "min_confidence", -0.1),
    (SuffixConfig, "min_confidence", float("nan")),
    (SuffixConfig, "min_confidence", True),
    (SuffixConfig, "novelty", -1.0),
    (SuffixConfig, "contexts", 0),
    (SuffixConfig, "count_depth", 0),
    (SuffixConfig, "shared_store", 1),
    (SuffixConfig, "store_tokens", 1),
    (SuffixConfig, "store_match", 0),
]


@pytest.mark.parametrize(("config", "name", "value"), BAD, ids=lambda part: getattr(part, "strategy", repr(part)))
def test_a_bad_value_is_one_clear_error(config: Any, name: str, value: Any) -> None:
    """The error names strategy and option, holds the value, and says what would do."""
    with pytest.raises(ConfigError) as caught:
        config(**{name: value})
    error = caught.value
    assert error.who == f"strategy {config.strategy!r}"
    assert error.where == name
    assert error.got is value
    assert str(error.expected) in str(error)
    assert error.fix is not None
    assert name in error.fix


@pytest.mark.parametrize("config", [PromptLookupConfig, NgramContextConfig, NgramModConfig])
def test_equal_bounds_are_a_length(config: Any) -> None:
    """n_min = n_max is one length, not a contradiction."""
    assert config(n_min=2, n_max=2).n_max == 2
