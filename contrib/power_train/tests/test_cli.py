"""The command from prompts to manifests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import fields
from click.testing import CliRunner, Result
from power_train.cli import train
from power_train.pipeline import Plan, run
from power_train.watch import Watch

from power_core.artifacts.admission import load_artifact
from power_core.artifacts.contract import Provenance
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
    ("option", "found"),
    [
        (("--name", "no name"), "is no artifact name"),
        (("--name", "n" * 95), "is no artifact name"),  # with `-q8_0.gguf` it is too long
        (("--license", ""), "the license is"),
        (("--start-from", "nowhere"), r"nowhere: no checkpoint\.pt"),
    ],
)
def test_what_the_files_cannot_have_is_refused_first(
    target: Path, prompts: Path, tmp_path: Path, option: tuple[str, str], found: str
) -> None:
    """Nothing is written, generated or trained for a name, a licence or a start that the files could not have."""
    with pytest.raises(ArtifactError, match=found):
        ran(target, prompts, tmp_path / "run", *option)
    assert not (tmp_path / "run").exists()


def test_a_kind_that_no_plugin_knows_is_refused_first(tmp_path: Path) -> None:
    """The manifest could not be written: without the plugin of its kind nobody can say what the file is."""
    names = {each.name: None for each in fields(Plan)}
    plan = Plan(**{
        **names, "kind": "mtp-head", "out": tmp_path / "run", "name": "x", "quantizations": (),
        "provenance": Provenance("a", "b", "c"),
    })  # fmt: skip
    with pytest.raises(ArtifactError, match="no installed plugin knows drafters of kind 'mtp-head'"):
        run(plan, None, {}, Watch())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("minutes", ["nan", "inf", "1e308", "0", "-1"])
def test_a_time_that_is_none_is_bad_usage(target: Path, prompts: Path, tmp_path: Path, minutes: str) -> None:
    """NaN is neither above nor below any bound; a time without end has no number of steps."""
    result = ran(target, prompts, tmp_path / "run", "--minutes", minutes)
    assert (result.exit_code, "is not in the range" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("text", "found"),
    [("", "no prompt in the files"), ("word " * 900, "0 of 1 prompts have 1 to 256 tokens"), ("One.", "1 of 1")],
)
def test_prompts_that_are_too_few_claim_no_folder(target: Path, tmp_path: Path, text: str, found: str) -> None:
    """They are refused before a process is started, and leave the folder to the run with other ones."""
    wrong = tmp_path / "wrong.txt"
    wrong.write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match=found):
        ran(target, wrong, tmp_path / "run", "--tokens", "300")
    assert not (tmp_path / "run" / "text").exists()


@pytest.mark.parametrize(
    ("line", "found"), [("{not json", "no JSON"), ('{"text": "x"}', "no prompt"), ("", "no prompt in the files")]
)
def test_prompts_that_are_none_are_named(target: Path, tmp_path: Path, line: str, found: str) -> None:
    """The error names file and line."""
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(ArtifactError, match=found):
        ran(target, path, tmp_path / "run")


@pytest.mark.parametrize(
    ("content", "found"),
    [(None, "cannot be read: No such file or directory$"), (b"a\xff", r"not UTF-8 text \(byte 1\)$")],
)
def test_a_text_that_cannot_be_read_is_named(target: Path, tmp_path: Path, content: bytes | None, found: str) -> None:
    """In words; nothing is written."""
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArtifactError, match=f"^power-train: {path}: {found}"):
        ran(target, path, tmp_path / "run")
    assert not (tmp_path / "run" / "text").exists()


def test_progress_is_told_by_tenths_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A log of an hour's training has a line for each tenth of it, not one for each step, and not none."""
    with Watch() as watch:
        for tokens in range(0, 1001, 5):
            watch.generating(tokens, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert (len(lines), lines[0], lines[-1]) == (11, "text: 0 of 1000, tokens", "text: 1000 of 1000, tokens")
