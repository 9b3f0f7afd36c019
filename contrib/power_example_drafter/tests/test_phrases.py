"""The tutorial's drafter in an engine and at the edges of its phrases, and the page that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from power_example_drafter import plugin
from power_example_drafter.config import PhrasesConfig
from power_example_drafter.drafter import phrase_table

from power_core.config import PowerConfig
from power_core.request import GenerationRequest
from power_core.runtime import Runtime
from power_core.testing import (
    ScriptedBackend,
    ScriptedTarget,
    inline_plugin,
    next_table,
    plain_decode,
    scripted_plugins,
)

ROOT = Path(__file__).resolve().parents[3]
FILES = ("power_example_drafter/config.py", "power_example_drafter/drafter.py", "power_example_drafter/plugin.py",
         "tests/test_conformance.py")  # fmt: skip


def table(*phrases: str) -> dict[tuple[int, ...], tuple[int, ...]]:
    return phrase_table(ScriptedTarget(26).tokenizer, PhrasesConfig(phrases))


def test_the_first_phrase_wins() -> None:
    """Where two phrases go on differently, the one listed first is proposed."""
    assert table("abc", "abd") == {(0, 1): (2,)}


def test_phrases_that_cannot_be_written_are_passed_over() -> None:
    """A phrase with characters the vocabulary lacks is no error."""
    assert table("A B C", "abc") == {(0, 1): (2,)}


def test_it_saves_target_passes(tmp_path: Path) -> None:
    """A text that holds the phrase takes fewer forwards, and is the same text."""
    target = ScriptedTarget(26, logits=next_table([*range(1, 26), 0]))
    model = tmp_path / "toy.scripted"
    model.touch()
    plugins = scripted_plugins(
        targets={"scripted": ScriptedBackend(lambda _path: target)}, models={"toy": model},
        more=[inline_plugin("phrases", plugin)],
    )  # fmt: skip
    config = PowerConfig(spec_width_policy="fixed", sections={"phrases": {"phrases": ["abcdefghijklmnop"]}})
    request = GenerationRequest([0, 1], max_tokens=14)
    with Runtime(config, plugins) as runtime, runtime.open("toy", spec="phrases") as engine:
        result = engine.complete(request)
    assert result.token_ids == plain_decode(target, request).token_ids
    assert result.counts.target_passes <= 4


@pytest.mark.parametrize("file", FILES)
def test_the_tutorial_shows_this_code(file: str) -> None:
    """docs/plugin-authors.md holds the file as it is."""
    source = (Path(__file__).parents[1] / file).read_text()
    assert f"```python\n{source}```\n" in (ROOT / "docs" / "plugin-authors.md").read_text()
