"""The tutorial's drafter: what it proposes, and that it keeps every rule."""

from __future__ import annotations

from pathlib import Path

import pytest
from power_conformance import DrafterConformance, PluginConformance
from power_example_drafter import plugin
from power_example_drafter.config import PhrasesConfig
from power_example_drafter.drafter import PhrasesSession, phrase_table

from power_core.config import PowerConfig
from power_core.drafter import Drafter, DraftRequest
from power_core.request import GenerationRequest
from power_core.runtime import Runtime
from power_core.target import TargetModel
from power_core.testing import (
    ScriptedBackend,
    ScriptedTarget,
    inline_plugin,
    next_table,
    plain_decode,
    scripted_plugins,
)

ROOT = Path(__file__).resolve().parents[3]


class TestPhrases(DrafterConformance):
    """Every rule of drafters, on the variant that always proposes."""

    @pytest.fixture
    def letters(self, tmp_path: Path) -> tuple[Drafter, TargetModel]:
        return plugin.make_letters(tmp_path)

    @pytest.fixture
    def drafter(self, letters: tuple[Drafter, TargetModel]) -> Drafter:
        return letters[0]

    @pytest.fixture
    def target(self, letters: tuple[Drafter, TargetModel]) -> TargetModel:
        return letters[1]


class TestPlugin(PluginConformance):
    """Every rule of packaging."""

    plugin = "example-drafter"


def session(*phrases: str, match: int = 2) -> PhrasesSession:
    table = phrase_table(ScriptedTarget(26).tokenizer, PhrasesConfig(phrases, match))
    return PhrasesSession(table, match)


def test_completes_a_phrase_wherever_it_stands_in_it() -> None:
    """Two tokens of a phrase are enough, in its middle too; at its end there is nothing to say."""
    drafts = session("bcdef")
    drafts.begin(0, [0, 1, 2])
    assert drafts.propose([DraftRequest(0, 2, 8)])[0].token_ids == (3, 4, 5)
    drafts.observe(0, [3, 4], None)
    assert drafts.propose([DraftRequest(0, 4, 8)])[0].token_ids == (5,)
    drafts.observe(0, [5], None)
    assert drafts.propose([DraftRequest(0, 5, 8)])[0].token_ids == ()


def test_the_first_phrase_wins() -> None:
    """Where two phrases go on differently, the one listed first is proposed."""
    drafts = session("abc", "abd")
    drafts.begin(0, [0, 1])
    assert drafts.propose([DraftRequest(0, 1, 8)])[0].token_ids == (2,)


def test_phrases_that_cannot_be_written_are_passed_over() -> None:
    """A phrase with characters the vocabulary lacks is no error."""
    assert session("A B C").propose([]) == []


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


@pytest.mark.parametrize("file", ["config.py", "drafter.py", "plugin.py"])
def test_the_tutorial_shows_this_code(file: str) -> None:
    """docs/plugin-authors.md holds the module as it is."""
    source = (Path(plugin.__file__).parent / file).read_text()
    assert f"```python\n{source}```\n" in (ROOT / "docs" / "plugin-authors.md").read_text()
