"""The plugin's section of power.toml."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import field, frozen

from power_core.errors import ConfigError
from power_core.structuring import structured

__all__ = ["Choice", "KvType", "LlamaCppConfig", "LogLevel", "LoraFile"]

# llama.cpp adds the deltas of a matrix in the order of a hash table of addresses: two always the same way round,
# more in an order that differs from process to process, and so in the last bits.
_MOST_ADAPTERS = 2
_LORA_FORM = 'a list of tables such as {file = "x.gguf", scale = 1.0}'


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


def _scale(_obj: object, attribute: Any, value: float) -> None:
    try:
        is_float = math.isfinite(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        is_float = False
    if not is_float:
        expected = "a finite number of single precision"
        raise ConfigError(
            f"{attribute.name} is {value}", plugin="llamacpp", where=attribute.name, got=value, expected=expected
        )


@frozen
class LoraFile:
    """
    A LoRA adapter: a change to some of the model's matrices.

    Args:
        file: A GGUF adapter, as llama.cpp's `convert_lora_to_gguf.py` writes it.
        scale: What its changes are multiplied with; 0 leaves the model as it is.
    """

    file: Path = field(converter=Path)
    scale: float = field(default=1.0, validator=_scale)

    @property
    def is_active(self) -> bool:
        """Whether it changes anything; llama.cpp calculates with scales in single precision."""
        return bool(struct.unpack("f", struct.pack("f", self.scale))[0])


def _lora_files(value: Sequence[LoraFile | Mapping[str, Any]]) -> tuple[LoraFile, ...]:
    """From what power.toml holds, with errors that say which entry is wrong."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"lora is {value!r:.120}", plugin="llamacpp", got=value, expected=_LORA_FORM)
    files = tuple(_lora_file(index, entry) for index, entry in enumerate(value))
    active = sum(file.is_active for file in files)
    if active > _MOST_ADAPTERS:
        raise ConfigError(
            f"lora has {active} adapters with a scale other than 0",
            plugin="llamacpp",
            got=active,
            expected=f"at most {_MOST_ADAPTERS}: llama.cpp adds more in an order that is not always the same",
            fix="merge them into the model with llama-export-lora",
        )
    return files


def _lora_file(index: int, entry: LoraFile | Mapping[str, Any]) -> LoraFile:
    if isinstance(entry, LoraFile):
        return entry
    if not isinstance(entry, Mapping) or "file" not in entry:
        raise ConfigError(f"lora[{index}] is {entry!r:.120}", plugin="llamacpp", got=entry, expected=_LORA_FORM)
    try:
        return LoraFile(**structured(LoraFile, entry, lambda key: f"lora[{index}] {key}"))
    except ConfigError as exc:
        exc.what = f"lora[{index}]: {exc.what}"
        raise


if TYPE_CHECKING:
    LoraFiles: TypeAlias = tuple[LoraFile, ...]
else:
    LoraFiles = Any  # taken as it is, so that `_lora_files` can say what is wrong with it


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
        lora: LoRA adapters of every model that is opened, at most two with a scale other than 0.
    """

    flash_attention: Choice = field(default=Choice.AUTO, converter=Choice)
    extra_buffers: Choice = field(default=Choice.AUTO, converter=Choice)
    kv_type: KvType = field(default=KvType.F16, converter=KvType)
    swa_full: bool = True
    prefill_rows: int = field(default=512, validator=_rows)
    probe_cache_dir: Path | None = None
    log_level: LogLevel = field(default=LogLevel.WARNING, converter=LogLevel)
    lora: LoraFiles = field(default=(), converter=_lora_files)
