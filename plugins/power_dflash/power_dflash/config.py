"""Options of both strategies, checked when they are set."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

from attrs import Attribute, field, frozen

from power_core.errors import ConfigError

__all__ = ["DFlash2Config", "DFlashConfig"]

Check = Callable[[Any, "Attribute[Any]", Any], None]
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_LARGE = 1e9  # a log-score margin has no largest value that means anything


def _refuse(instance: Any, name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(
        f"{name} is {value!r}", who=f"strategy {instance.strategy!r}", where=name, got=value, expected=expected,
        fix=f"set {name} to {expected}", plugin="dflash",
    )  # fmt: skip


def _number(low: float, high: float) -> Check:
    def check(instance: Any, attribute: Attribute[Any], value: Any) -> None:
        if type(value) not in (int, float) or not low <= value <= high:  # NaN compares false, a bool is no number
            raise _refuse(instance, attribute.name, value, f"a number from {low:g} to {high:g}")

    return check


def _one_of(*names: str) -> Check:
    def check(instance: Any, attribute: Attribute[Any], value: Any) -> None:
        if value not in names:
            raise _refuse(instance, attribute.name, value, "one of " + ", ".join(names))

    return check


def _switch(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if type(value) is not bool:
        raise _refuse(instance, attribute.name, value, "true or false")


def _cap(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if type(value) is not int or value < 0:
        raise _refuse(instance, attribute.name, value, "a whole number: 0 for a full cache, else at least 1")


def _device(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise _refuse(instance, attribute.name, value, "cpu, cuda or cuda:N")


@frozen
class _Shared:
    """Options that both strategies have; the two classes describe them."""

    strategy: ClassVar[str] = ""
    executor: str = field(default="auto", validator=_one_of("auto", "native", "torch"), kw_only=True)
    draft_p_min: float = field(
        default=0.0, validator=_number(0, 1), kw_only=True, metadata={"inherits": "spec_draft_p_min"}
    )
    ring: int = field(default=512, validator=_cap, kw_only=True)
    device: str = field(default="cpu", validator=_device, kw_only=True)
    dtype: str = field(default="auto", validator=_one_of("auto", "fp32", "bf16"), kw_only=True)
    compiled: bool = field(default=False, validator=_switch, kw_only=True)


@frozen
class DFlashConfig(_Shared):
    """
    Options of `dflash`.

    Args:
        executor: `native` evaluates a GGUF beside the target in the target's own library, `torch` any file in torch;
            `auto` is native where the target can and the file is a GGUF, else torch.
        draft_p_min: The proposal ends before the first token whose own chance is below this. 0 never cuts.
        ring: Committed positions the torch executor keeps; 0 keeps the whole context.
        device: Where the torch executor computes: `cpu`, `cuda` or `cuda:N`.
        dtype: Element type of its matrices and of the ring: `fp32`, `bf16`, or `auto`: bf16 where the device
            multiplies it natively.
        compiled: Whether its forward is compiled; pays on devices where launching small kernels dominates.
        draft_margin: The proposal ends before the first token whose chance is less than this above the runner-up's.
        full_block: Denoise all rows of the block even where fewer tokens are asked for: the first tokens then do not
            depend on how many were asked for, as in training, and a short proposal costs as much as a long one.
    """

    strategy: ClassVar[str] = "dflash"
    draft_margin: float = field(
        default=0.0, validator=_number(0, 1), kw_only=True, metadata={"inherits": "spec_draft_margin"}
    )
    full_block: bool = field(default=True, validator=_switch, kw_only=True)


@frozen
class DFlash2Config(_Shared):
    """
    Options of `dflash2`.

    Args:
        executor: `native` evaluates a GGUF beside the target in the target's own library, `torch` any file in torch;
            `auto` is native where the target can and the file is a GGUF, else torch.
        draft_p_min: The proposal ends before the first token whose own chance is below this. 0 never cuts.
        ring: Committed positions the torch executor keeps; 0 keeps the whole context.
        device: Where the torch executor computes: `cpu`, `cuda` or `cuda:N`.
        dtype: Element type of its matrices and of the ring: `fp32`, `bf16`, or `auto`: bf16 where the device
            multiplies it natively.
        compiled: Whether its forward is compiled; pays on devices where launching small kernels dominates.
        draft_margin: The proposal ends before the first token whose log score, under the token chosen before it, is
            less than this above the runner-up's.
    """

    strategy: ClassVar[str] = "dflash2"
    draft_margin: float = field(
        default=0.0, validator=_number(0, _LARGE), kw_only=True, metadata={"inherits": "spec_draft_margin"}
    )
