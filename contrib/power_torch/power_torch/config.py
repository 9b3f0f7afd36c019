"""The plugin's section of power.toml."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Any

from attrs import field, frozen
from attrs.converters import optional

from power_core.errors import ConfigError

__all__ = ["Precision", "TorchConfig"]

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


class Precision(StrEnum):
    """Element type of matrices, activations and the key/value cache."""

    AUTO = "auto"  # bf16 where the device multiplies it natively, else fp32
    BF16 = "bf16"
    FP32 = "fp32"


def _device(_obj: object, attribute: Any, value: str) -> None:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise ConfigError(
            f"{attribute.name} is {value!r}",
            plugin="torch",
            where=attribute.name,
            got=value,
            expected="cpu, cuda or cuda:N",
        )


def _rows(_obj: object, attribute: Any, value: int) -> None:
    if isinstance(value, bool) or not 16 <= value <= 4096:
        raise ConfigError(
            f"{attribute.name} is {value}", plugin="torch", where=attribute.name, got=value, expected="16 to 4096"
        )


@frozen
class TorchConfig:
    """
    How this backend runs a model.

    Args:
        dtype: `auto`, `bf16` or `fp32`.
        device: `cpu`, `cuda` or `cuda:N`.
        prefill_rows: Prompt rows of one forward.
        probe_cache_dir: Where probe results are kept; the user's cache directory by default.
    """

    dtype: Precision = field(default=Precision.AUTO, converter=Precision)
    device: str = field(default="cpu", validator=_device)
    prefill_rows: int = field(default=128, validator=_rows)
    probe_cache_dir: Path | None = field(default=None, converter=optional(Path))
