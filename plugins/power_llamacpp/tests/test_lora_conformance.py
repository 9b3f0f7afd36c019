"""A target with an adapter keeps every rule of targets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from power_conformance import TargetConformance
from power_llamacpp.config import LlamaCppConfig, LoraFile
from power_llamacpp.gguf_check import check_gguf
from power_llamacpp.target import LlamaCppBackend, LlamaCppModel

from power_core.target import SessionOptions
from power_core.testing.gguf import tiny_hybrid, tiny_llama

pytestmark = pytest.mark.slow  # each rule loads and measures a model of its own
pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")


@pytest.mark.parametrize("factory", [tiny_llama, tiny_hybrid])
class TestAdapted(TargetConformance):
    @pytest.fixture
    def target(self, factory: Any, tmp_path: Path, adapt: Callable[..., LoraFile]) -> LlamaCppModel:
        path = factory(tmp_path / "m.gguf", layers=4)
        config = LlamaCppConfig(lora=[adapt(tmp_path, check_gguf(path))])
        return LlamaCppBackend(config).load(path)

    @pytest.fixture
    def options(self) -> tuple[SessionOptions, ...]:
        return (
            SessionOptions(
                context_size=64, max_sequences=3, max_rows=8, rollback_rows=4, hidden_layers=(0,), threads=1
            ),
        )
