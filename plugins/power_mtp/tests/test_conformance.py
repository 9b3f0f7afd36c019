"""The drafter keeps every rule of drafters with each form of a head, the contract those of contracts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from power_conformance import ArtifactContractConformance, DrafterConformance, PluginConformance
from power_mtp import fixtures, nextn_file
from power_mtp.config import MtpConfig
from power_mtp.drafter import MtpDrafter

from power_core.artifacts import Artifact, Provenance, open_tensors
from power_core.artifacts.admission import manifest_of
from power_core.runtime import Runtime
from power_core.testing.gguf import tiny_hybrid

pytest.importorskip("power_llamacpp")
FORMS = {
    "attached gguf": fixtures.tiny_gguf,
    "attached safetensors": fixtures.tiny_attached,
    "own file": fixtures.tiny_nextn,
}


def own_layer(folder: Path) -> tuple[None, None, Any]:
    """No file: a target with a prediction layer of its own."""
    with Runtime() as runtime:
        return None, None, runtime.load_target(tiny_hybrid(folder / "target.gguf", nextn_layers=1))


@pytest.fixture(scope="module", params=[*FORMS.values(), own_layer], ids=[*FORMS, "own layer"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Contract, file and target of a form."""
    contract, path, target = request.param(tmp_path_factory.mktemp("form"))
    yield contract, path, target
    target.close()


class TestPlugin(PluginConformance):
    plugin = "mtp"


class TestDrafter(DrafterConformance):
    @pytest.fixture
    def drafter(self, made: Any) -> MtpDrafter:
        contract, path, target = made
        if path is None:
            return MtpDrafter(MtpConfig(), None)
        if not nextn_file.matches(open_tensors(path)):
            pytest.importorskip("power_torch", reason="pip install power-torch")
        provenance = Provenance("the plugin's own", "1", "CC0")
        contracts = {contract.kind: contract}
        manifest = manifest_of(path, name="tiny", target=target, provenance=provenance, contracts=contracts)
        return MtpDrafter(MtpConfig(), Artifact(manifest, open_tensors(path)))

    @pytest.fixture
    def target(self, made: Any) -> Any:
        return made[2]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
class TestContract(ArtifactContractConformance):
    @pytest.fixture
    def good(self, form: Callable[[Path], Any], tmp_path: Path) -> Iterator[Any]:
        made = form(tmp_path)
        yield made
        made[2].close()
