"""Small random models in each element type, for conformance runs: nothing has to be downloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from power_core.errors import CapabilityError
from power_torch.config import Precision, TorchConfig

if TYPE_CHECKING:
    from power_core.target import TargetModel

__all__ = ["tiny_bf16", "tiny_fp32", "tiny_window"]


def tiny_fp32(folder: Path) -> TargetModel:
    """Attention over everything, in float32."""
    from power_core.testing import gguf

    return _loaded(folder, gguf.tiny_llama, Precision.FP32)


def tiny_bf16(folder: Path) -> TargetModel:
    """Attention over everything, in bfloat16."""
    from power_core.testing import gguf

    return _loaded(folder, partial(gguf.tiny_llama, seed=1), Precision.BF16)


def tiny_window(folder: Path) -> TargetModel:
    """Windowed blocks between full ones, in float32."""
    from power_core.testing import gguf

    return _loaded(folder, gguf.tiny_gemma3, Precision.FP32)


def _loaded(folder: Path, write: Callable[[Path], Path], dtype: Precision) -> TargetModel:
    if find_spec("torch") is None:
        raise CapabilityError("the package torch is missing", plugin="torch", fix="pip install torch==2.13.0")
    from power_torch.target import TorchBackend

    return TorchBackend(TorchConfig(dtype=dtype, prefill_rows=32)).load(write(folder / "tiny.gguf"))
