"""The drafter keeps every rule of drafters, natively and in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from power_conformance import DrafterConformance
from power_dspark.config import DsparkConfig
from power_dspark.drafter import DsparkDrafter

from power_core.artifacts import TensorFile
from power_core.runtime import Runtime
from power_core.target import TargetModel
from power_core.testing.gguf import tiny_llama

pytest.importorskip("power_llamacpp")


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetModel]:
    path = tiny_llama(tmp_path_factory.mktemp("target") / "target.gguf", layers=4)
    with Runtime() as runtime:
        model = runtime.load_target(str(path))
        yield model
        model.close()


@pytest.mark.parametrize("executor", ["native", "torch"])
class TestDrafter(DrafterConformance):
    @pytest.fixture
    def drafter(self, executor: str, make: Callable[..., TensorFile]) -> DsparkDrafter:
        if executor == "torch":
            pytest.importorskip("power_torch", reason="pip install power-torch")
        return DsparkDrafter(DsparkConfig(executor=executor), make())

    @pytest.fixture
    def target(self, tiny_target: TargetModel) -> TargetModel:
        return tiny_target
