"""The command from prompts to manifests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from power_train.cli import train
from power_train.watch import Watch

from power_core.artifacts.admission import load_artifact
from power_core.artifacts.matching import installed_contracts
from power_core.cli.state import State
from power_core.errors import ArtifactError
from power_core.runtime import Runtime

PROMPTS = [
    {"turns": ["Say something."]}, {"turns": ["And more?", "ignored"]}, {"opening": "Tell", "closing": " me."},
    *({"turns": [f"Prompt number {i} of this file."]} for i in range(30)),
]  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, PROMPTS)), encoding="utf-8")
    return path


def ran(target: Path, prompts: Path, out: Path, *more: str) -> Result:
    arguments = ["mtp-head", "--target", target, "--text", prompts, "--out", out, "--steps", 8, "--slots", 8,
                 "--processes", 1, "--draft-vocab", 64, "--sequences", 4, *more]  # fmt: skip
    return CliRunner().invoke(train, [*map(str, arguments)], obj=State(), catch_exceptions=False)


def test_a_run_ends_in_files_that_can_be_loaded(target: Path, prompts: Path, tmp_path: Path) -> None:
    """Safetensors and GGUFs with manifests bound to the target, a receipt and a curve; a second run changes none."""
    result = ran(target, prompts, tmp_path / "run", "--tokens", "2500")
    assert result.exit_code == 0
    manifests = [Path(line) for line in result.stdout.splitlines()]
    assert len(manifests) == 3
    with Runtime() as runtime:
        model = runtime.load_target(target)
        contracts = installed_contracts(runtime.registry)
        kinds = {load_artifact(path, contracts, model, payload=True).manifest.kind for path in manifests}
        model.close()
    assert kinds == {"mtp-head"}
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text(encoding="utf-8"))
    assert receipt["held_out"]["3"]["tokens_per_pass"] >= 1
    assert receipt["data"]["tokens"] >= 1000
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")

    weights = next((tmp_path / "run").glob("*q8_0.gguf")).read_bytes()
    assert ran(target, prompts, tmp_path / "run", "--tokens", "2500").exit_code == 0
    assert next((tmp_path / "run").glob("*q8_0.gguf")).read_bytes() == weights


@pytest.mark.parametrize(
    ("line", "found"), [("{not json", "no JSON"), ('{"text": "x"}', "no prompt"), ("", "no prompt in the files")]
)
def test_prompts_that_are_none_are_named(target: Path, tmp_path: Path, line: str, found: str) -> None:
    """The error names file and line."""
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(ArtifactError, match=found):
        ran(target, path, tmp_path / "run")


def test_progress_is_told_by_tenths_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A log of an hour's training has a line for each tenth of it, not one for each step, and not none."""
    with Watch() as watch:
        for tokens in range(0, 1001, 5):
            watch.generating(tokens, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert (len(lines), lines[0], lines[-1]) == (11, "text: 0 of 1000, tokens", "text: 1000 of 1000, tokens")
