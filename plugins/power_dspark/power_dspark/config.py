"""Options of the strategy `dspark`, checked when they are set."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

from attrs import Attribute, field, frozen

from power_core.errors import ConfigError

__all__ = ["DsparkConfig"]

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def _refuse(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(
        f"{name} is {value!r}", who="strategy 'dspark'", where=name, got=value, expected=expected,
        fix=f"set {name} to {expected}", plugin="dspark",
    )  # fmt: skip


def _chance(_instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if type(value) not in (int, float) or not 0.0 <= value <= 1.0:  # NaN compares false, a bool is no number
        raise _refuse(attribute.name, value, "a number from 0 to 1")


def _switch(_instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if type(value) is not bool:
        raise _refuse(attribute.name, value, "true or false")


def _one_of(*names: str) -> Callable[[Any, Attribute[Any], Any], None]:
    def check(_instance: Any, attribute: Attribute[Any], value: Any) -> None:
        if value not in names:
            raise _refuse(attribute.name, value, "one of " + ", ".join(names))

    return check


def _cap(_instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if type(value) is not int or value < 0:
        raise _refuse(attribute.name, value, "a whole number: 0 for a full cache, else at least 1")


def _device(_instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise _refuse(attribute.name, value, "cpu, cuda or cuda:N")


@frozen
class DsparkConfig:
    """
    Options of `dspark`.

    Args:
        executor: `native` evaluates a GGUF beside the target in the target's own library, `torch` any file in torch;
            `auto` is native where the target can and the file is a GGUF, else torch.
        draft_margin: The chain ends before the first token whose margin is below this: the confidence head's
            number where there is one, else the gap between the chances of the first and the second token. 0 never
            cuts.
        draft_p_min: The chain ends before the first token whose own softmax chance is below this. 0 never cuts.
        full_block: Denoise all rows of the block even where fewer tokens are asked for: the first tokens then do not
            depend on how many were asked for, as in training, and a short proposal costs as much as a long one.
        ring: Committed positions the torch executor keeps (R13); 0 keeps the whole context.
        device: Where the torch executor computes: `cpu`, `cuda` or `cuda:N`.
        dtype: Element type of its matrices and of the ring: `fp32`, `bf16`, or `auto`: bf16 where the device
            multiplies it natively.
        compiled: Whether its forward is compiled; pays on devices where launching small kernels dominates.
    """

    strategy: ClassVar[str] = "dspark"
    executor: str = field(default="auto", validator=_one_of("auto", "native", "torch"))
    draft_margin: float = field(default=0.0, validator=_chance, metadata={"inherits": "spec_draft_margin"})
    draft_p_min: float = field(default=0.0, validator=_chance, metadata={"inherits": "spec_draft_p_min"})
    full_block: bool = field(default=True, validator=_switch)
    ring: int = field(default=512, validator=_cap)
    device: str = field(default="cpu", validator=_device)
    dtype: str = field(default="auto", validator=_one_of("auto", "fp32", "bf16"))
    compiled: bool = field(default=False, validator=_switch)
