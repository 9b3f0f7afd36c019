"""Admitting and loading: whole or not at all, and nothing that changed since."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE
from typing import Any
from unittest.mock import Mock

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from artifacts.conftest import Admit
from artifacts.toy import CONTRACTS, ORIGIN, VOCAB, ToyContract, head, write_gguf, write_safetensors
from power_core.artifacts import ArtifactFacts, open_tensors
from power_core.artifacts.admission import load_artifact, write_manifest
from power_core.artifacts.manifest import manifest_bytes, manifest_json, read_manifest
from power_core.artifacts.store import admitted, remove
from power_core.errors import ArtifactError, PluginError
from power_core.evidence.canonical import canonical, digest
from power_core.testing import ScriptedTarget, ScriptedTokenizer

NAN = head()
NAN[3, 4] = np.nan
TREE = {"head.weight": head(), "tree.weight": head()}


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The one line *call* is refused with."""
    with pytest.raises(ArtifactError) as caught:
        call(*args, **kwargs)
    line = str(caught.value)
    assert "\n" not in line
    return line


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("format_", ["safetensors", "gguf"])
def test_an_admitted_drafter_is_loaded_as_it_was(
    format_: str, admit_toy: Admit, store: Path, target: ScriptedTarget, tmp_path: Path
) -> None:
    """Kind, facts, digests, target and provenance are recorded; the copy stands alone."""
    write = write_gguf if format_ == "gguf" else write_safetensors
    path = write(tmp_path / f"my drafter (1).{format_}")
    manifest = admit_toy("mine", path)
    path.unlink()
    assert (manifest.kind, manifest.target, manifest.provenance) == ("toy-head", target.identity, ORIGIN)
    assert manifest.facts == ArtifactFacts((1, 2), 8, VOCAB, VOCAB, details={"rows": VOCAB})
    names = ["drafter.gguf"] if format_ == "gguf" else ["drafter.safetensors", "config.json"]
    assert [file.name for file in manifest.files] == names
    artifact = load_artifact(store / "mine" / "manifest.json", CONTRACTS, target)
    assert artifact.manifest == manifest
    assert artifact.path == store / "mine" / names[0]
    assert np.array_equal(artifact.file.read("head.weight"), head())
    assert names_in(store) == ["mine"]


@pytest.mark.parametrize(
    ("name", "tensors", "config", "expected"),
    [
        ("toy", {"head.weight": NAN}, {}, "head.weight is not finite at index 28 (expected finite numbers)"),
        ("toy", {"other": head()}, {}, "plugin knows this kind of drafter (toy-head: the tensors are other;"),
        ("toy", None, {"model_type": "llama"}, "expected a file of kind toy-head or toy-tree"),
        ("toy", {"head.weight": head()[:, :4].copy()}, {}, "hidden size 4 (expected 8)"),
        ("../toy", None, {}, "'../toy' is no artifact name"),
        (".toy", None, {}, "'.toy' is no artifact name"),
        ("a,b", None, {}, "'a,b' is no artifact name"),
        ("", None, {}, "'' is no artifact name"),
    ],
)  # fmt: skip
def test_what_is_not_admitted(
    name: str, tensors: Any, config: Any, expected: str, admit_toy: Admit, store: Path, tmp_path: Path
) -> None:
    """Each is refused with what was found, and leaves nothing behind."""
    path = write_safetensors(tmp_path / "bad" / "m.safetensors", tensors, config)
    line = refused(admit_toy, name, path)
    assert expected in line
    assert "admitting-" not in line  # the user's path is named, not the copy's
    assert not store.exists() or names_in(store) == []


def test_provenance_is_asked_for(admit_toy: Admit) -> None:
    """An empty licence is none."""
    for licence in (" ", "a\nb", "\x1b[2J", "\udcff", "x" * 501):
        assert "the license is '" in refused(admit_toy, provenance=attrs.evolve(ORIGIN, license=licence))


def test_two_contracts_that_claim_one_file(admit_toy: Admit) -> None:
    """Two plugins that disagree about a file are both named."""
    greedy = ToyContract("greedy")
    with pytest.raises(PluginError, match="kinds greedy and toy-head at once"):
        admit_toy(contracts={**CONTRACTS, "greedy": greedy})
    with pytest.raises(PluginError, match=r"contract 'greedy': .*raised ZeroDivisionError: oh"):
        admit_toy(contracts={"greedy": Mock(kind="greedy", matches=Mock(side_effect=ZeroDivisionError("oh")))})
    with pytest.raises(PluginError, match="check returned None"):
        admit_toy(contracts={"lazy": Mock(kind="lazy", check=Mock(return_value=None))})


def test_a_name_is_taken_until_it_is_removed(admit_toy: Admit, store: Path) -> None:
    """A second artifact of one name is refused, and both ways out are named."""
    admit_toy("mine")
    line = refused(admit_toy, "mine")
    assert "artifact 'mine' is already admitted" in line
    assert line.endswith("choose another with --name, or `power artifacts remove mine`")
    remove("mine")
    assert names_in(store) == []
    assert admit_toy("mine").name == "mine"
    assert "no artifact 'yours' was admitted (expected one of mine)" in refused(remove, "yours")


def test_concurrent_admissions_of_one_name(admit_toy: Admit, store: Path, target: ScriptedTarget) -> None:
    """One wins whole, the others are told that the name is taken."""

    def run(_number: int) -> str:
        try:
            return admit_toy("mine").name
        except ArtifactError as exc:
            return exc.what

    with ThreadPoolExecutor(8) as pool:
        outcomes = sorted(pool.map(run, range(8)))
    assert outcomes == ["artifact 'mine' is already admitted"] * 7 + ["mine"]
    assert names_in(store) == ["mine"]
    assert load_artifact(store / "mine" / "manifest.json", CONTRACTS, target).manifest.name == "mine"


def test_a_store_that_cannot_be_written(admit_toy: Admit, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is none, a read-only one and a full disk: one line with the path, nothing half there."""
    store.write_bytes(b"")
    assert f"{store}: cannot be written to: File exists" in refused(admit_toy)
    assert f"{store}: cannot be read: Not a directory" in refused(admitted)
    store.unlink()
    with monkeypatch.context() as patch:
        patch.setattr("power_core.artifacts.staging.tempfile.mkdtemp", Mock(side_effect=PermissionError(13, "Denied")))
        assert "cannot be written to: Denied" in refused(admit_toy)
    with monkeypatch.context() as patch:
        patch.setattr(
            "power_core.artifacts.admission.shutil.copyfileobj", Mock(side_effect=OSError(28, "No space left"))
        )
        assert "cannot be written to: No space left" in refused(admit_toy)
    assert names_in(store) == []


def _swap_header(folder: Path) -> None:
    write_safetensors(folder / "drafter.safetensors", TREE)


def _rewrite(folder: Path, **changes: Any) -> None:
    """An edit that makes the digest hold again, as somebody who means it would."""
    document = json.loads((folder / "manifest.json").read_bytes())
    for path, value in changes.items():
        place = document["body"]
        *outer, last = path.split("__")
        for key in outer:
            place = place[int(key) if key.isdigit() else key]
        if value is None:
            del place[last]
        else:
            place[last] = value
    document["digest"] = digest({"schema": document["schema"], "body": document["body"]})
    (folder / "manifest.json").write_bytes(canonical(document))


def _flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "safetensors: the file of artifact 'mine' changed: it has SHA-256": lambda f: _flip(f / "drafter.safetensors"),
    "config.json: the file of artifact 'mine' changed: it has SHA-256": lambda f: _flip(f / "config.json", 2),
    "changed: it has 4 bytes": lambda f: (f / "drafter.safetensors").write_bytes(b"abcd"),
    "changed: it has 1": _swap_header,
    "drafter.safetensors: the file cannot be read: No such file": lambda f: (f / "drafter.safetensors").unlink(),
    "config.json: the file cannot be read: No such file": lambda f: (f / "config.json").unlink(),
    "drafter.safetensors: this is a symbolic link": lambda f: _link(f / "drafter.safetensors"),
    "config.json: this is a symbolic link": lambda f: _link(f / "config.json"),
    "manifest.json: this is a symbolic link": lambda f: _link(f / "manifest.json"),
    "manifest.json: the file cannot be read: No such file": lambda f: (f / "manifest.json").unlink(),
    "manifest.json: not JSON": lambda f: (f / "manifest.json").write_bytes(b"{"),
    "manifest.json: not in canonical form": lambda f: (f / "manifest.json").write_text(
        json.dumps(json.loads((f / "manifest.json").read_bytes()), indent=1)
    ),
    "the digest does not match the content": lambda f: (f / "manifest.json").write_bytes(
        (f / "manifest.json").read_bytes().replace(b"MIT", b"BSD")
    ),
    "not a manifest": lambda f: (f / "manifest.json").write_bytes(b"[]"),
    "too many for a manifest": lambda f: (f / "manifest.json").write_bytes(b" " * (2 << 20)),
    "the body is none of power.artifact/1": lambda f: _rewrite(f, more=1),
    "the body misses keys": lambda f: _rewrite(f, facts__block_size=None),
    "the body is none of power.artifact/1: ": lambda f: _rewrite(f, kind=None),
    "has values of other types": lambda f: _rewrite(f, files__0__nbytes="12"),
    "artifact 'mine' is of kind toy-head (expected toy-tree": lambda f: _rewrite(f, kind="toy-tree"),
    "facts are not those of the file": lambda f: _rewrite(f, facts__hidden_layers=[0]),
    "'../drafter.safetensors' is no file name": lambda f: _rewrite(f, files__0__name="../drafter.safetensors"),
    "'manifest.json' is no file name": lambda f: _rewrite(f, files__1__name="manifest.json"),
    "'/etc/passwd' is no file name": lambda f: _rewrite(f, files__0__name="/etc/passwd"),
    "the files are []": lambda f: _rewrite(f, files=[]),
    "expected 64 hex digits": lambda f: _rewrite(f, files__0__sha256="00"),
    "'../mine' is no artifact name": lambda f: _rewrite(f, name="../mine"),
    "has the files drafter.safetensors, config.json (expected drafter.safetensors)": lambda f: _rewrite(
        f, files=json.loads((f / "manifest.json").read_bytes())["body"]["files"][:1]
    ),
    "drafts for scripted-0, target 000000000000": lambda f: _rewrite(f, target__file_sha256="0" * 64),
}  # fmt: skip


@pytest.mark.parametrize("expected", DAMAGES)
def test_what_changed_is_not_loaded(expected: str, admit_toy: Admit, store: Path, target: ScriptedTarget) -> None:
    """A byte, a file, a key, a name or a kind that is not what was admitted: one line that says which."""
    admit_toy("mine")
    DAMAGES[expected](store / "mine")
    assert expected in refused(load_artifact, store / "mine" / "manifest.json", CONTRACTS, target)


def test_another_target_and_another_tokenizer(admit_toy: Admit, store: Path, target: ScriptedTarget) -> None:
    """The same sizes are not enough: the files and the vocabulary must be the very ones."""
    admit_toy("mine")
    path = store / "mine" / "manifest.json"
    line = refused(load_artifact, path, CONTRACTS, ScriptedTarget(VOCAB, seed=1))
    assert f"artifact 'mine' drafts for scripted-0, target {target.identity.file_sha256[:12]}" in line
    pieces = list(target.tokenizer.pieces)
    other = ScriptedTarget(tokenizer=ScriptedTokenizer([*pieces[:-2], pieces[-1], pieces[-2]]))
    assert other.identity.file_sha256 == target.identity.file_sha256
    assert "artifact 'mine' drafts for scripted-0, tokenizer" in refused(load_artifact, path, CONTRACTS, other)
    shutil.copytree(store / "mine", store / "yours")  # the whole folder under another name is still that artifact
    assert load_artifact(store / "yours" / "manifest.json", CONTRACTS, target).manifest.name == "mine"


def test_values_are_checked_again_on_demand(store: Path, target: ScriptedTarget, tmp_path: Path) -> None:
    """A manifest written without looking at the values is found out by `payload=True`."""
    folder = write_safetensors(tmp_path / "m" / "drafter.safetensors").parent
    manifest = write_manifest(folder, name="mine", target=target, provenance=ORIGIN, contracts=CONTRACTS)
    write_safetensors(folder / "drafter.safetensors", {"head.weight": NAN})
    _rewrite(folder, files__0__sha256=_sha256(folder / "drafter.safetensors"))
    assert load_artifact(manifest, CONTRACTS, None).manifest.name == "mine"
    assert "not finite at index 28" in refused(load_artifact, manifest, CONTRACTS, None, payload=True)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_package_writes_manifests_beside_its_files(target: ScriptedTarget, tmp_path: Path) -> None:
    """One drafter a folder, or several GGUF files with a manifest each; checks are those of an admission."""
    arguments: dict[str, Any] = {"name": "mine", "target": target, "provenance": ORIGIN, "contracts": CONTRACTS}
    folder = write_gguf(tmp_path / "one.gguf").parent
    assert write_manifest(folder, **arguments) == folder / "manifest.json"
    write_gguf(folder / "two.gguf", {"head.weight": head(2)})
    assert "the folder has 2 GGUF and safetensors files" in refused(write_manifest, folder, **arguments)
    path = write_manifest(folder, weights="two.gguf", **arguments)
    assert path == folder / "two.gguf.json"
    assert load_artifact(path, CONTRACTS, target).file.read("head.weight").max() == 2
    write_gguf(folder / "two.gguf", {"head.weight": NAN})
    assert "not finite" in refused(write_manifest, folder, weights="two.gguf", **arguments)
    assert names_in(folder) == ["manifest.json", "one.gguf", "two.gguf", "two.gguf.json"]
    write_gguf(folder / "three (3).gguf")
    assert "'three (3).gguf' is no artifact name" in refused(
        write_manifest, folder, weights="three (3).gguf", **arguments
    )


def test_a_manifest_has_one_byte_form(admit_toy: Admit, store: Path) -> None:
    """What is read writes back the same bytes, and the digest covers schema and body."""
    admit_toy("mine")
    path = store / "mine" / "manifest.json"
    manifest = read_manifest(path)
    assert manifest_bytes(manifest) == path.read_bytes()
    document = manifest_json(manifest)
    assert document["schema"] == "power.artifact/1"
    assert document["digest"] == digest({"schema": document["schema"], "body": document["body"]})


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(1, 255), name=st.sampled_from(["manifest", "config"]))
def test_no_changed_byte_is_overlooked(
    place: float, byte: int, name: str, tmp_path: Path, target: ScriptedTarget
) -> None:
    """Whichever byte of a manifest or of a file changes, to whatever: refused in one line, by nothing else."""
    folder = write_safetensors(tmp_path / "m" / "drafter.safetensors").parent
    manifest = write_manifest(folder, name="mine", target=target, provenance=ORIGIN, contracts=CONTRACTS)
    path = folder / f"{name}.json"
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= byte  # all but the newline at the end
    path.write_bytes(data)
    refused(load_artifact, manifest, CONTRACTS, target)


KILLED = """
import os, sys
from pathlib import Path
from power_core.artifacts import store
with store.staged("mine") as folder:
    (folder / "drafter.gguf").write_bytes(b"half")
    print(folder.name, flush=True)
    sys.stdin.read()
    os._exit(9)  # as a kill would end it
"""


def test_what_a_killed_admission_left_is_swept_and_what_another_one_fills_is_not(
    admit_toy: Admit, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leftovers vanish with the next admission; a folder whose process lives stays, however old it looks."""
    monkeypatch.setattr("power_core.artifacts.staging._YOUNG_S", -1.0)
    with subprocess.Popen([sys.executable, "-c", KILLED], stdin=PIPE, stdout=PIPE, text=True) as child:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        os.utime(store / name, (0, 0))
        admit_toy("one")
        assert names_in(store) == [name, "one"]
        child.communicate("")
    assert child.returncode == 9
    assert names_in(store) == [name, "one"]
    grave = store / ".removing-x"
    grave.mkdir()
    (store / ".admitting-link").symlink_to(grave)
    remove("one")
    assert names_in(store) == [".admitting-link"]  # somebody else's


def test_a_young_folder_is_let_be(admit_toy: Admit, store: Path) -> None:
    """Between the making of a folder and its lock another admission may look."""
    (store / ".admitting-young").mkdir(parents=True)
    admit_toy("one")
    assert names_in(store) == [".admitting-young", "one"]


def test_a_file_that_cannot_be_read_is_not_the_stores_fault(
    admit_toy: Admit, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that vanishes or turns into a pipe while it is admitted is named itself."""
    opened = open_tensors(source)
    monkeypatch.setattr("power_core.artifacts.admission.open_tensors", lambda _path: opened)
    source.unlink()
    assert f"{source}: the file cannot be read: No such file" in refused(admit_toy)
    os.mkfifo(source)
    assert f"{source}: this is not a regular file" in refused(admit_toy)


def test_a_folder_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that does not exist is the variable's fault."""
    monkeypatch.setenv("POWER_ARTIFACTS_DIR", "~no-such-user/x")
    assert "POWER_ARTIFACTS_DIR: ~no-such-user/x" in refused(admitted)


def test_what_lies_among_the_admitted_ones_is_passed_over(admit_toy: Admit, store: Path) -> None:
    """Folders that no admission could have made, files, pipes and links to nothing are nobody's artifacts."""
    admit_toy("one")
    for name in ("b\udcffad", "a b", "esc\x1b[2J", ".hidden"):
        (store / name).mkdir()
    (store / "file").write_bytes(b"")
    (store / "loop").symlink_to("loop")
    os.mkfifo(store / "pipe")
    assert list(admitted()) == ["one"]
