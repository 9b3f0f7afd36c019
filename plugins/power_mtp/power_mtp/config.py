"""Options of the strategy `mtp`, checked when they are set."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from attrs import Attribute, field, frozen

from power_core.errors import ConfigError

__all__ = ["DTYPES", "EXECUTORS", "MtpConfig"]

EXECUTORS = ("auto", "native", "torch")
DTYPES = ("auto", "fp32", "bf16")
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def _one_of(*words: str) -> Callable[[Any, Attribute[str], str], None]:
    def check(_config: Any, attribute: Attribute[str], value: str) -> None:
        if value not in words:
            raise _refuse(attribute.name, value, "one of " + ", ".join(words))

    return check


def _is_threshold(_config: MtpConfig, attribute: Attribute[float], value: float) -> None:
    # Above 1 everything is cut: a margin meant for another strategy's scale may be inherited, and is no error.
    if type(value) not in (int, float) or not 0.0 <= value < math.inf:  # NaN compares false
        raise _refuse(attribute.name, value, "a number of at least 0")


def _is_device(_config: MtpConfig, attribute: Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise _refuse(attribute.name, value, "cpu, cuda or cuda:N")


def _is_count(_config: MtpConfig, attribute: Attribute[int], value: int) -> None:
    if type(value) is not int or value < 0:  # a bool is no count
        raise _refuse(attribute.name, value, "a whole number of at least 0")


def _refuse(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(
        f"{name} is {value!r:.80}", who="strategy 'mtp'", where=name, got=value, expected=expected,
        fix=f"set {name} to {expected}", plugin="mtp",
    )  # fmt: skip


@frozen
class MtpConfig:
    """
    Options of `mtp`.

    Args:
        executor: `native`, `torch`, or `auto`: what the head at hand needs.
        draft_margin: A draft ends before a token whose probability exceeds the second one's by less than this.
            0 never cuts.
        draft_p_min: A draft ends before a token of a smaller probability than this. 0 never cuts.
        fr_vocab_size: Rows of the output matrix that are projected, from the first on: token ids, or the most
            frequent tokens of a head with `d2t`. 0 projects all.
        ring: Context positions the head's own K/V ring keeps (torch executor); 0 keeps all.
        device: Where the torch executor computes: `cpu`, `cuda` or `cuda:N`.
        dtype: Its matrices and ring: `fp32`, `bf16`, or `auto`: bf16 where the device multiplies it natively.
    """

    executor: str = field(default="auto", validator=_one_of(*EXECUTORS))
    draft_margin: float = field(default=0.0, validator=_is_threshold, metadata={"inherits": "spec_draft_margin"})
    draft_p_min: float = field(default=0.0, validator=_is_threshold, metadata={"inherits": "spec_draft_p_min"})
    fr_vocab_size: int = field(default=0, validator=_is_count, metadata={"inherits": "spec_mtp_fr_vocab_size"})
    ring: int = field(default=512, validator=_is_count)
    device: str = field(default="cpu", validator=_is_device)
    dtype: str = field(default="auto", validator=_one_of(*DTYPES))
