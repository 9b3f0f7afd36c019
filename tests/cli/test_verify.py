"""`power verify` and `power receipt verify`: they say yes only where it is so."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from power_core.testing import ScriptedDrafter

Power = Callable[..., Result]


def test_identical_strategies_are_said_to_be(power: Power) -> None:
    """By default every zero-weight strategy is compared, on each prompt; the exit code is 0."""
    result = power("verify", "abc", "bcd", "--max-tokens", "16")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "prompt 1, other", "prompt 2, other", "prompt 1, random", "prompt 2, random"
    ]  # fmt: skip
    assert all(": identical (16 tokens, " in line for line in lines)


def test_named_strategies_files_and_sampling(power: Power, tmp_path: Path) -> None:
    """Only what is named is compared; without a seed both sides still draw the same stream."""
    (tmp_path / "prompt.txt").write_text("abc")
    result = power(
        "verify", "-f", "prompt.txt", "--spec", "random", "--temperature", "1.0", "--max-tokens", "16", "--json"
    )
    (only,) = json.loads(result.stdout)["comparisons"]
    assert (result.exit_code, only["strategy"], only["identical"], only["first_difference"]) == (
        0,
        "random",
        True,
        None,
    )


@pytest.fixture
def cheated(toy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A target that decodes otherwise once a drafter has spoken: after ten tokens 2 instead of 1."""
    monkeypatch.setattr("power_core.testing.numerics._CACHED_ROWS", 0)
    drafted = []

    def propose(tokens: Sequence[int], wanted: int, round_: int) -> Any:
        drafted.append(round_)
        return ScriptedDrafter([[0]])._propose(tokens, wanted, round_)

    def logits(tokens: Sequence[int]) -> Any:
        row = np.zeros(105, np.float32)
        row[1], row[2] = 3.0, 2.5
        if drafted and len(tokens) >= 10:
            row[2] = 3.5
        return row

    toy.strategies = {"cheat": ScriptedDrafter(propose)}
    toy.target_options["logits"] = logits
    return drafted


def test_a_difference_is_shown_and_is_exit_1(power: Power, cheated: Any) -> None:
    """The first index that differs, both tokens, and how close the two best logits were."""
    result = power("verify", "abc", "--max-tokens", "16")
    assert result.exit_code == 1
    assert "cheat: DIFFERS at token 4: off 1 'b', cheat 2 'c'; top-2 logit gap there 0.5" in result.stdout
    cheated.clear()
    document = json.loads(power("verify", "abc", "--max-tokens", "16", "--json").stdout)
    assert document["identical"] is False
    found = document["comparisons"][0]["first_difference"]
    assert found.pop("top2_logit_gap") == pytest.approx(0.5)
    assert found == {"index": 4, "off": 1, "off_text": "b", "strategy": 2, "strategy_text": "c"}


def test_nothing_to_compare_is_an_error(power: Power, toy: Any) -> None:
    """Without a strategy nothing was verified, and saying "identical" would be a lie."""
    toy.strategies = {}
    result = power("verify", "abc")
    assert result.exit_code == 2
    assert "no installed plugin provides a zero-weight strategy" in result.stderr


def test_changed_receipt_is_exit_1(power: Power, tmp_path: Path) -> None:
    """A document that was edited does not verify, and with --json says so in one."""
    file = tmp_path / "out.json"
    file.write_bytes(power("generate", "abc", "--max-tokens", "5", "--json").stdout_bytes)
    assert power("receipt", "verify", file).exit_code == 0
    intact = json.loads(power("receipt", "verify", file, "--json").stdout)
    assert (intact["verified"], intact["covers_output"], intact["problem"]) == (True, True, None)
    file.write_bytes(file.read_bytes().replace(b'"completion_tokens":5', b'"completion_tokens":6'))
    changed = power("receipt", "verify", file)
    assert (changed.exit_code, changed.stdout, changed.stderr.count("\n")) == (1, "", 1)
    document = json.loads(power("receipt", "verify", file, "--json").stdout)
    assert document["verified"] is False
    assert "out.json" in document["problem"]
