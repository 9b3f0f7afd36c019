"""Both drafters keep every rule of drafters, natively and in torch, and the package those of plugins."""

from __future__ import annotations

import pytest
from power_conformance import DrafterConformance, PluginConformance
from power_dflash.header import DFLASH2, DFLASH_V1


class TestPlugin(PluginConformance):
    plugin = "dflash"


@pytest.mark.parametrize("executor", ["native", "torch"])
@pytest.mark.parametrize("kind", [DFLASH_V1, DFLASH2])
class TestDrafter(DrafterConformance):
    @pytest.fixture
    def drafter(self, kind, executor, make_gguf, target, admitted, drafter_of):
        if executor == "torch":
            pytest.importorskip("power_torch", reason="pip install power-torch")
        return drafter_of(admitted(make_gguf(kind), target), executor=executor)

    @pytest.fixture
    def target(self, tiny_target):
        return tiny_target
