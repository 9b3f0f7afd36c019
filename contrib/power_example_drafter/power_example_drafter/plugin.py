"""Hook implementations and factories. Every `power` command imports this: nothing heavy belongs here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from power_core.hookspecs import RegisterFixture, RegisterStrategy, hookimpl
from power_example_drafter.config import PhrasesConfig

if TYPE_CHECKING:
    from power_core.drafter import Drafter
    from power_core.target import TargetModel

__all__ = ["make_letters", "make_phrases", "power_register_fixtures", "power_register_strategies"]


def make_phrases(config: PhrasesConfig) -> Drafter:
    """The drafter for these options."""
    from power_example_drafter.drafter import PhrasesDrafter

    return PhrasesDrafter(config)


def make_letters(_folder: Path) -> tuple[Drafter, TargetModel]:
    """A drafter that always has something to say, and a target of single letters: for conformance runs."""
    from power_core.testing import ScriptedTarget

    letters = PhrasesConfig(phrases=("abcdefghijklmnopqrstuvwxyzabc", "aebfcgdh"), match=1)
    return make_phrases(letters), ScriptedTarget(26, order=2)


@hookimpl
def power_register_strategies(register: RegisterStrategy) -> None:
    """Offer the strategy `phrases`."""
    register(
        "phrases",
        make_phrases,
        config=PhrasesConfig,
        zero_weight=True,
        description="Completes phrases from power.toml: headers, keys, greetings.",
    )


@hookimpl
def power_register_fixtures(register: RegisterFixture) -> None:
    """Offer a talkative variant to ``power conformance``."""
    register("letters", make_letters, kind="drafter")
