"""The plugin's section of power.toml."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from attrs import field, frozen

from power_core.errors import ConfigError

__all__ = ["Choice", "KvType", "LlamaCppConfig", "LogLevel"]


class Choice(StrEnum):
    """A setting that the probe may decide."""

    AUTO = "auto"  # on where it is alive, exact and faster
    ON = "on"
    OFF = "off"


class KvType(StrEnum):
    """Element types of the key/value cache that llama.cpp computes with."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q5_1 = "q5_1"
    Q5_0 = "q5_0"
    Q4_1 = "q4_1"
    Q4_0 = "q4_0"
    IQ4_NL = "iq4_nl"


class LogLevel(StrEnum):
    """Least severe of llama.cpp's own messages that are passed on."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _rows(_obj: object, attribute: Any, value: int) -> None:
    if not 32 <= value <= 8192:
        raise ConfigError(
            f"{attribute.name} is {value}", plugin="llamacpp", where=attribute.name, got=value, expected="32 to 8192"
        )


@frozen
class LlamaCppConfig:
    """
    How this backend runs a model. The defaults are exact wherever the machine can be.

    Args:
        flash_attention: The fused attention kernel; `auto` takes it only where the probe finds it exact.
        extra_buffers: Weights repacked for this processor; `auto` takes them where the probe finds them
            alive, exact and fast.
        kv_type: Element type of the key/value cache; a quantized one needs flash attention.
        swa_full: Keep every position of sliding-window layers, so that any rollback is exact; off saves
            memory and leaves only the last step's rows to roll back.
        prefill_rows: Most prompt rows of one forward.
        probe_cache_dir: Where probe results are kept; the user's cache directory by default.
        log_level: Which of llama.cpp's messages are logged.
    """

    flash_attention: Choice = field(default=Choice.AUTO, converter=Choice)
    extra_buffers: Choice = field(default=Choice.AUTO, converter=Choice)
    kv_type: KvType = field(default=KvType.F16, converter=KvType)
    swa_full: bool = True
    prefill_rows: int = field(default=512, validator=_rows)
    probe_cache_dir: Path | None = None
    log_level: LogLevel = field(default=LogLevel.WARNING, converter=LogLevel)
