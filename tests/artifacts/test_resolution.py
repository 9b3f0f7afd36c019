"""Which artifact a strategy gets on a loaded target, what `auto` makes of it, and what receipts say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import attrs
import pytest

from artifacts.conftest import Admit
from artifacts.toy import CONTRACTS, ORIGIN, VOCAB, ToyPlugin, head, write_safetensors
from power_core.artifacts.admission import write_manifest
from power_core.config import PowerConfig
from power_core.errors import ArtifactError, CapabilityError, ConfigError, DrafterError
from power_core.evidence import ReceiptBody, verify_document
from power_core.request import GenerationRequest
from power_core.runtime import Runtime
from power_core.shapes import ExactnessLevel, ShapeIdentity, ShapeProfile, WidthClass
from power_core.target import SessionOptions
from power_core.testing import (
    RandomDrafter,
    ScriptedBackend,
    ScriptedTarget,
    inline_plugin,
    plain_decode,
    scripted_plugins,
)

REQUEST = GenerationRequest((3, 1, 4), max_tokens=12)


@pytest.fixture
def plugin(target: ScriptedTarget) -> ToyPlugin:
    return ToyPlugin(target)


@pytest.fixture
def runtime(store: Path, target: ScriptedTarget, plugin: ToyPlugin, tmp_path: Path) -> Iterator[Runtime]:
    """The toy strategies, a zero-weight one, and a scripted model; plugins load when the test asks for it first."""
    model = tmp_path / "toy.scripted"
    model.write_bytes(b"toy")
    plugins = scripted_plugins(
        targets={"scripted": ScriptedBackend(lambda _path: target)},
        strategies={"random": RandomDrafter(VOCAB)},
        models={"toy": model},
        more=[inline_plugin("toys", plugin)],
    )
    assert plugins.failures == []
    with Runtime(PowerConfig(), plugins) as made:
        yield made


def tree(folder: Path) -> Path:
    return write_safetensors(folder / "t.safetensors", {"head.weight": head(), "tree.weight": head()})


def ship(plugin: ToyPlugin, folder: Path, name: str) -> None:
    """Have the plugin ship a toy head; before the runtime is made."""
    write_safetensors(folder / "drafter.safetensors")
    path = write_manifest(folder, name=name, target=plugin.target, provenance=ORIGIN, contracts=CONTRACTS)
    plugin.shipped = {**plugin.shipped, name: path}


def used(plugin: ToyPlugin) -> list[str | None]:
    return [None if artifact is None else artifact.manifest.name for _, artifact in plugin.given]


def test_a_strategy_gets_its_admitted_artifact(
    runtime: Runtime, plugin: ToyPlugin, admit_toy: Admit, target: ScriptedTarget
) -> None:
    """The factory is given it, the session the layers it names; tokens are those of plain decoding."""
    manifest = admit_toy()
    with runtime.open("toy", spec="head", width_policy="fixed") as engine:
        result = engine.complete(REQUEST)
    assert used(plugin) == ["toy"]
    assert result.token_ids == plain_decode(target, REQUEST).token_ids
    assert result.counts.accepted > 0
    body = verify_document(result.receipt).body
    assert isinstance(body, ReceiptBody)
    (record,) = body.artifacts
    assert (record.name, record.kind, record.source, record.license) == ("toy", "toy-head", ORIGIN.source, "MIT")
    assert [(f.name, f.nbytes, f.sha256) for f in record.files] == [attrs.astuple(f) for f in manifest.files]


def test_receipts_without_an_artifact_are_as_they_were(runtime: Runtime) -> None:
    """Nothing is said where nothing was loaded: receipts from before there were artifacts read the same."""
    with runtime.open("toy", spec="random") as engine:
        receipt = engine.complete(REQUEST).receipt
    assert "artifacts" not in receipt["body"]
    assert verify_document(receipt).body.artifacts == []


def test_without_an_artifact_a_strategy_says_what_would_provide_it(
    runtime: Runtime, admit_toy: Admit, store: Path
) -> None:
    """One line with the kind, the target, the commands, and the near misses."""
    with pytest.raises(CapabilityError, match=r"'head' needs an artifact of kind 'toy-head' for scripted-0") as caught:
        runtime.open("toy", spec="head")
    assert "power artifacts admit FILE --target MODEL" in str(caught.value)
    admit_toy("foreign", target=ScriptedTarget(VOCAB, seed=9))
    (store / "torn").mkdir()
    with pytest.raises(CapabilityError, match=r"\(foreign drafts for scripted-9; torn cannot be used\)"):
        runtime.open("toy", spec="head")


def test_optional_artifacts(runtime: Runtime, plugin: ToyPlugin, admit_toy: Admit, tmp_path: Path) -> None:
    """The factory is given None where there is none, and the artifact as soon as there is one."""
    with runtime.open("toy", spec="either", width_policy="fixed") as engine:
        assert engine.complete(REQUEST).counts.drafted > 0
    admit_toy("mine", tree(tmp_path / "tree"))
    with runtime.open("toy", spec="either"):
        assert used(plugin) == [None, "mine"]


def test_a_target_that_cannot_do_without(
    runtime: Runtime, target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no artifact and the target refuses, the error says both: what was missing, and how to bring it."""

    def refuse(_options: SessionOptions) -> NoReturn:
        raise CapabilityError("no prediction layers")

    monkeypatch.setattr(target, "open_session", refuse)
    wanted = r"'either' needs an artifact .*; without one: no prediction layers; admit one with `power artifacts admit"
    with pytest.raises(CapabilityError, match=wanted):
        runtime.open("toy", spec="either")


def test_admitted_before_shipped_and_chosen_before_both(
    plugin: ToyPlugin, admit_toy: Admit, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Several of one rank are an error that names them and the key; a name picks one of any rank."""
    ship(plugin, tmp_path / "a", "ours")
    runtime: Runtime = request.getfixturevalue("runtime")
    for admit_first, choice, expected in ((None, None, "ours"), ("mine", None, "mine"), (None, "ours", "ours")):
        if admit_first:
            admit_toy(admit_first)
        runtime.open("toy", spec="head", artifact=choice).close()
        assert used(plugin)[-1] == expected
    admit_toy("other")
    with pytest.raises(CapabilityError, match=r"2 artifacts of kind 'toy-head' are there .*: mine, other") as caught:
        runtime.open("toy", spec="head")
    assert str(caught.value).endswith("choose with --artifact NAME or spec_artifact")
    runtime.open("toy", spec="head", artifact="other").close()
    assert used(plugin)[-1] == "other"
    with pytest.raises(CapabilityError, match="2 artifacts of kind"):
        runtime.open("toy", spec="head", artifact="other,mine")


def test_what_artifact_may_name(runtime: Runtime, admit_toy: Admit) -> None:
    """Unknown names, no list, and an artifact of another target: each is refused, and none falls back."""
    admit_toy("mine")
    admit_toy("foreign", target=ScriptedTarget(VOCAB, seed=9))
    with pytest.raises(CapabilityError, match=r"open\(artifact=\): no artifact is named 'mind' \(expected one of"):
        runtime.open("toy", artifact="mind")
    with pytest.raises(ConfigError, match="spec_artifact is 'mine,,'"):
        runtime.open("toy", artifact="mine,,")
    for spec in ("head", "auto"):
        with pytest.raises(ArtifactError, match="'foreign' drafts for scripted-9"):
            runtime.open("toy", spec=spec, artifact="foreign")


def test_auto_prefers_artifacts_by_rank(runtime: Runtime, plugin: ToyPlugin, admit_toy: Admit, tmp_path: Path) -> None:
    """
    Artifact first, then what can do without, then zero-weight; a chosen artifact before a better rank.

    A zero-weight strategy is asked before the model: lookup copies better, and costs next to nothing.
    """
    found = []

    def opened(**options: Any) -> str:
        with runtime.open("toy", spec="auto", **options) as engine:
            return engine.strategy

    found.append(opened())
    admit_toy("mine")
    found.append(opened())
    admit_toy("big", tree(tmp_path / "tree"))
    found += [opened(), opened(artifact="mine")]
    assert found == ["random,either", "random,head", "random,tree", "random,head"]


def test_auto_stays_with_lookup_where_rows_are_dear(
    runtime: Runtime, admit_toy: Admit, target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter whose rounds cost more than they earn is taken by name, or by the name of its artifact."""
    admit_toy("mine")
    dear = WidthClass(ShapeIdentity.of({"dear": 1}), (1, 2, 3, 4, 5, 6, 7, 8, 9), tuple(float(n) for n in range(1, 10)))
    monkeypatch.setattr(target, "_make_profile", lambda _options: ShapeProfile(ExactnessLevel.BITWISE, dear, dear))
    for options, taken in (({}, "random"), ({"artifact": "mine"}, "random,head"), ({"spec": "head"}, "head")):
        with runtime.open("toy", **options) as engine:
            assert engine.strategy == taken


def test_auto_passes_over_what_cannot_be_opened(
    runtime: Runtime, plugin: ToyPlugin, admit_toy: Admit, target: ScriptedTarget
) -> None:
    """A capability that is not there is the next one's turn; damage and a choice of the user's are not."""
    admit_toy("mine")
    plugin.refuses = CapabilityError("no executor")
    with runtime.open("toy", spec="auto") as engine:
        assert engine.strategy == "random,either"
    with pytest.raises(CapabilityError, match="no executor"):
        runtime.open("toy", spec="auto", artifact="mine")
    plugin.refuses = DrafterError("broken")
    with pytest.raises(DrafterError, match="broken"):
        runtime.open("toy", spec="auto")
    target.sessions[-1].assert_all_closed()


def test_auto_does_not_hide_damage(runtime: Runtime, admit_toy: Admit, store: Path) -> None:
    """A drafter file that changed is an error under `auto` as well, with the way out."""
    admit_toy("mine")
    (store / "mine" / "drafter.safetensors").write_bytes(b"abcd")
    with pytest.raises(ArtifactError, match=r"changed: it has 4 bytes .* `power artifacts remove mine`"):
        runtime.open("toy")


def test_chains_of_several_artifacts(
    runtime: Runtime, plugin: ToyPlugin, admit_toy: Admit, tmp_path: Path, target: ScriptedTarget
) -> None:
    """Each member gets its own; the session gives the layers of all; the receipt names both."""
    admit_toy("one")
    path = tree(tmp_path / "tree")
    admit_toy("two", write_safetensors(path, {"head.weight": head(), "tree.weight": head()}, {"target_layers": [0, 3]}))
    with runtime.open("toy", spec="random, head, tree", width_policy="fixed") as engine:
        result = engine.complete(REQUEST)
    assert target.sessions[-1]._layers == (0, 1, 2, 3)
    assert result.token_ids == plain_decode(target, REQUEST).token_ids
    body = verify_document(result.receipt).body
    assert isinstance(body, ReceiptBody)
    assert [record.name for record in body.artifacts] == used(plugin) == ["one", "two"]


def test_a_request_for_layers_the_session_does_not_give(runtime: Runtime, admit_toy: Admit) -> None:
    """One line that says how to open the model; the engine goes on."""
    admit_toy("mine")
    with runtime.open("toy", spec="random") as engine:
        with pytest.raises(CapabilityError, match=r"not opened with: 1, 2; open the model with --spec head"):
            engine.complete(REQUEST.with_(spec="head"))
        assert len(engine.complete(REQUEST).token_ids) == 12


def test_shipped_artifacts_that_cannot_be_located(
    plugin: ToyPlugin, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A package without its file, and one whose manifest has another name, are listed as unusable."""
    ship(plugin, tmp_path / "a", "ours")
    plugin.shipped = {"theirs": plugin.shipped["ours"], "gone": tmp_path / "gone.json"}
    runtime: Runtime = request.getfixturevalue("runtime")
    with pytest.raises(CapabilityError, match=r"\(gone cannot be used; theirs cannot be used\)"):
        runtime.open("toy", spec="head")
    with pytest.raises(ArtifactError, match=r"the manifest is that of artifact 'ours' \(expected theirs\)"):
        runtime.open("toy", spec="head", artifact="theirs")
