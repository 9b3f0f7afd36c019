"""`power artifacts`: from a file to a strategy that uses it, and every refusal one line with exit code 2."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from artifacts.toy import ORIGIN, VOCAB, ToyPlugin, head, write_safetensors
from power_core.artifacts.admission import write_manifest
from power_core.artifacts.matching import installed_contracts
from power_core.evidence.canonical import canonical, digest
from power_core.plugins import load_plugins
from power_core.testing import ScriptedTarget, inline_plugin

Power = Callable[..., Result]
SAID = ("--source", "https://example.org", "--revision", "r1", "--license", "MIT")


@pytest.fixture
def plugin(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyPlugin:
    """The toy kinds are installed, the model is small, and admitted artifacts have a folder of their own."""
    monkeypatch.setenv("POWER_ARTIFACTS_DIR", str(tmp_path / "store"))
    toy.target_options = {"vocab_size": VOCAB}
    made = ToyPlugin(ScriptedTarget(VOCAB))
    toy.more = [inline_plugin("toys", made)]
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "given" / "my-head.safetensors")


def test_admit_use_verify_and_remove(power: Power, plugin: ToyPlugin, file: Path) -> None:
    """The whole life of an artifact; the text is that of plain decoding all along."""
    admitted = power("artifacts", "admit", file, "--target", "toy", *SAID)
    assert (admitted.exit_code, admitted.stdout) == (0, "admitted my-head: toy-head for scripted-0\n")
    plain = power("generate", "abc", "--spec", "off", "--max-tokens", "9")
    drafted = power("generate", "abc", "--spec", "head", "--max-tokens", "9", "--json", "--width-policy", "fixed")
    document = json.loads(drafted.stdout)
    assert document["text"] + "\n" == plain.stdout
    assert document["receipt"]["body"]["artifacts"][0]["name"] == "my-head"
    Path("r.json").write_text(drafted.stdout)
    assert power("receipt", "verify", "r.json").exit_code == 0
    assert power("artifacts", "verify").stdout == "my-head: verified\n"
    assert power("artifacts", "remove", "my-head").stdout == "removed my-head\n"
    assert power("artifacts", "list").stdout.startswith("no artifacts; `power artifacts admit FILE")
    refused = power("generate", "abc", "--spec", "head")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "needs an artifact of kind 'toy-head'" in refused.stderr


def test_inspect_needs_no_target(power: Power, plugin: ToyPlugin, file: Path) -> None:
    """Kind, facts, tensors and digests, as lines and as one document."""
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    document = json.loads(power("artifacts", "inspect", file.parent, "--json").stdout)
    assert (document["kind"], document["format"], document["tensors"]) == ("toy-head", "safetensors", {"F32": [1, 768]})
    assert document["facts"]["hidden_layers"] == [1, 2]
    assert document["facts"]["details"] == {"rows": VOCAB}
    assert document["files"][0] == {"name": "my-head.safetensors", "nbytes": file.stat().st_size, "sha256": sha256}
    lines = power("artifacts", "inspect", file).stdout.splitlines()
    assert {"kind: toy-head", "hidden layers: 1, 2", "block size: any", "tensors F32: 1, 768 bytes"} <= set(lines)
    assert f"my-head.safetensors: {file.stat().st_size:,} bytes, sha256 {sha256}" in lines


def test_list_shows_where_each_is_from(power: Power, plugin: ToyPlugin, file: Path, tmp_path: Path) -> None:
    """Admitted, shipped and unusable ones; a shipped name cannot be admitted again."""
    folder = write_safetensors(tmp_path / "ours" / "m.safetensors").parent
    registry = load_plugins([inline_plugin("toys", plugin)], {}).registry
    manifest = write_manifest(
        folder, name="ours", target=plugin.target, provenance=ORIGIN, contracts=installed_contracts(registry)
    )
    plugin.shipped = {"ours": manifest}
    power("artifacts", "admit", file, "--target", "toy", *SAID, "--name", "mine")
    power("artifacts", "admit", file, "--target", "toy", *SAID, "--name", "torn")
    (tmp_path / "store" / "torn" / "manifest.json").unlink()
    listed = json.loads(power("artifacts", "list", "--json").stdout)["artifacts"]
    assert [(item["name"], item["from"], item["problem"] is None) for item in listed] == [
        ("mine", "admitted", True), ("torn", "admitted", False), ("ours", listed[2]["from"], True)
    ]  # fmt: skip
    assert listed[0]["manifest"]["provenance"] == {"source": "https://example.org", "revision": "r1", "license": "MIT"}
    lines = power("artifacts", "list").stdout.splitlines()
    assert "UNUSABLE" in lines[2]
    assert lines[3].endswith("ships ours")
    taken = power("artifacts", "admit", file, "--target", "toy", *SAID, "--name", "ours")
    assert (taken.exit_code, taken.stderr.count("\n")) == (2, 1)
    assert "'ours' is already shipped by" in taken.stderr


def test_verify_finds_what_changed(power: Power, plugin: ToyPlugin, file: Path, tmp_path: Path) -> None:
    """One damaged artifact is named and the exit code is 1; the others are verified all the same."""
    for name in ("a", "b"):
        power("artifacts", "admit", file, "--target", "toy", *SAID, "--name", name)
    (tmp_path / "store" / "a" / "config.json").write_text("{}")
    result = power("artifacts", "verify")
    assert (result.exit_code, result.stdout) == (1, "b: verified\n")
    assert "config.json: the file of artifact 'a' changed: it has 2 bytes" in result.stderr
    assert power("artifacts", "verify", "b").exit_code == 0
    found = json.loads(power("artifacts", "verify", "--json").stdout)["artifacts"]
    assert [(item["name"], item["problem"] is None) for item in found] == [("a", False), ("b", True)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("inspect", "nowhere.gguf"), "the file cannot be read: No such file"),
        (("inspect", "toy.scripted"), "this is a file that starts with b'toy'"),
        (("admit", "given", "--target", "nobody", *SAID), "no model and no file is named 'nobody'"),
        (("admit", "given", "--target", "toy", *SAID, "--name", "a/b"), "'a/b' is no artifact name"),
        (("admit", "given", "--target", "toy"), "Missing option '--source'"),
        (("verify", "nobody"), "no artifact is named 'nobody'"),
        (("remove", "nobody"), "no artifact 'nobody' was admitted"),
        (("remove", "../store"), "'../store' is no artifact name"),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], expected: str, power: Power, plugin: ToyPlugin, file: Path, tmp_path: Path
) -> None:
    """Each is one line and exit code 2, and nothing was written."""
    result = power("artifacts", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "store").exists()


def test_choosing_among_several(power: Power, plugin: ToyPlugin, file: Path) -> None:
    """`--artifact` picks by name; without it two that fit are an error."""
    for name in ("a", "b"):
        power("artifacts", "admit", file, "--target", "toy", *SAID, "--name", name)
    refused = power("generate", "abc", "--spec", "head", "--max-tokens", "2")
    assert "2 artifacts of kind 'toy-head' are there for scripted-0: a, b" in refused.stderr
    chosen = power("generate", "abc", "--spec", "head", "--artifact", "b", "--max-tokens", "2", "--json")
    assert json.loads(chosen.stdout)["receipt"]["body"]["artifacts"][0]["name"] == "b"
    assert power("verify", "abc", "--spec", "head", "--artifact", "a", "--max-tokens", "4").exit_code == 0


def test_an_artifact_that_nothing_loads_is_refused(power: Power, plugin: ToyPlugin, file: Path) -> None:
    """Who names one for this command wants it used; one that is configured is for the strategies that do."""
    assert power("artifacts", "admit", file, "--target", "toy", *SAID, "--name", "mine").exit_code == 0
    for spec in ("random", "off"):
        result = power("generate", "abc", "--spec", spec, "--artifact", "mine")
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert f"--artifact: mine is of kind toy-head; {spec} loads none such" in result.stderr
        assert power("generate", "abc", "--spec", spec, env={"POWER_SPEC_ARTIFACT": "mine"}).exit_code == 0


def test_a_drafter_of_another_kind_of_model(power: Power, plugin: ToyPlugin, tmp_path: Path) -> None:
    """What the target contradicts is said before anything is kept."""
    narrow = write_safetensors(tmp_path / "n.safetensors", {"head.weight": head()[:, :4].copy()})
    refused = power("artifacts", "admit", narrow, "--target", "toy", *SAID)
    assert refused.exit_code == 2
    assert "hidden size 4 (expected 8)" in refused.stderr


def test_a_list_shows_what_a_manifest_says_and_no_terminal_obeys_it(
    power: Power, plugin: ToyPlugin, file: Path, tmp_path: Path
) -> None:
    """A manifest that somebody else wrote may hold escapes; they are printed as such."""
    power("artifacts", "admit", file, "--target", "toy", *SAID, "--name", "mine")
    manifest = next(tmp_path.rglob("mine/manifest.json"))
    document = json.loads(manifest.read_bytes())
    document["body"]["provenance"]["source"] = "\x1b[2Jgone"
    document["digest"] = digest({"schema": document["schema"], "body": document["body"]})
    manifest.write_bytes(canonical(document))
    assert "\\x1b[2Jgone" in power("artifacts", "list").stdout
