"""The plugin keeps Power's promises, and the drafter proposes what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from power_conformance import DrafterConformance, PluginConformance
from power_example_drafter import plugin
from power_example_drafter.config import PhrasesConfig
from power_example_drafter.drafter import PhrasesSession, phrase_table

from power_core.drafter import Drafter, DraftRequest
from power_core.target import TargetModel
from power_core.testing import ScriptedTarget


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
