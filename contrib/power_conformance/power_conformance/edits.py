"""Changes of a good file, each with the words that say what was done to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from attrs import frozen

from power_conformance.containers import JSON_VALUE, Container, Key, Tensor, Value

__all__ = [
    "Edit",
    "added_tensors",
    "bad_ids",
    "bad_numbers",
    "dropped_keys",
    "huge_numbers",
    "missing_tensors",
    "not_finite",
    "odd_values",
    "reshaped_tensors",
    "retyped_keys",
    "retyped_tensors",
    "spelled",
]

UNKNOWN = "power.conformance.unknown"
_NAN = {"F32": b"\x00\x00\xc0\x7f", "F16": b"\x00\x7e", "BF16": b"\xc0\x7f"}
_INFINITY = {"F32": b"\x00\x00\x80\xff", "F16": b"\x00\x7c", "BF16": b"\x80\x7f"}
_WIDE_INTEGERS = {"I32": "<i4", "I64": "<i8", "U32": "<u4", "U64": "<u8"}


@frozen
class Edit:
    """
    One change.

    Args:
        did: What is done, as a clause: "tensor 'fc.weight' is missing".
        apply: Makes it; does nothing where an earlier change took away what it is about.
    """

    did: str
    apply: Callable[[Container], Container]


def spelled(key: Key) -> str:
    """A key as users know it."""
    return ".".join(key)


def missing_tensors(good: Container) -> Iterator[Edit]:
    """Each tensor left out, and each under another name."""
    for name in good.tensors:
        yield Edit(f"tensor {name!r} is missing", partial(_dropped, name))
        yield Edit(f"tensor {name!r} is called {name + '_'!r}", partial(_renamed, name))


def reshaped_tensors(good: Container) -> Iterator[Edit]:
    """Each tensor with twice as much along each dimension, transposed, and flattened."""
    for name, tensor in good.tensors.items():
        for axis, size in enumerate(tensor.shape):
            yield _shaped(name, tensor, (*tensor.shape[:axis], 2 * size, *tensor.shape[axis + 1 :]))
        for shape in (tensor.shape[::-1], (math.prod(tensor.shape),)):
            if _without_ones(shape) != _without_ones(tensor.shape):
                yield _shaped(name, tensor, shape)


def retyped_tensors(good: Container) -> Iterator[Edit]:
    """Floats as integers, integers as floats."""
    for name, tensor in good.tensors.items():
        is_whole = tensor.dtype[0] in "IU" and tensor.dtype[1:].isdigit()
        for dtype in ("F32", "F16") if is_whole else ("I32", "I8"):
            yield Edit(
                f"tensor {name!r} is {dtype} instead of {tensor.dtype}",
                partial(_with, name, dtype=dtype),
            )


def added_tensors(good: Container) -> Iterator[Edit]:
    """A tensor more, of a name nobody knows; and one that looks like another layer's."""
    first = next(iter(good.tensors.values()))
    names = [f"{UNKNOWN}.weight"]
    names += [name.replace(".0.", ".99.", 1) for name in good.tensors if ".0." in name][:1]
    for name in names:
        yield Edit(f"there is a tensor {name!r}", partial(_added, name, first))


def dropped_keys(good: Container) -> Iterator[tuple[Key, Edit]]:
    """Each key left out."""
    for key in good.keys:
        yield key, Edit(f"key {spelled(key)} is missing", partial(_keyless, key))


def retyped_keys(key: Key, value: Value) -> Iterator[Edit]:
    """*key* with a value of another type, one that no reader takes for the right one."""
    if value.kind == JSON_VALUE:
        others: list[Any] = [None, {}, [[]], *([7] if isinstance(value.value, str) else ["seven"])]
        replaced = [Value(JSON_VALUE, other) for other in others]
    else:
        replaced = [Value("u32", 7) if value.kind == "str" else Value("str", "seven"), Value("arr[str]", ["seven"])]
        replaced = [other for other in replaced if other.kind != value.kind]
    for other in replaced:
        yield _valued(key, other)


def bad_numbers(key: Key, value: Value) -> Iterator[Edit]:
    """*key*, a number, as one that counts nothing: negative where it was whole, not finite where it was not."""
    number = _number(value)
    if number is None:
        return
    if isinstance(number, float):
        for bad in (math.nan, math.inf):
            if value.kind != JSON_VALUE or math.isinf(bad):  # JSON has no NaN, but numbers that are too large
                yield _valued(key, Value(value.kind, bad))
    else:
        yield _valued(key, Value(JSON_VALUE if value.kind == JSON_VALUE else "i32", -1))


def huge_numbers(good: Container) -> Iterator[Edit]:
    """Each whole number of the header as the largest that fits: whoever loops or allocates by it is lost."""
    for key, value in good.keys.items():
        number = _number(value)
        if isinstance(number, int):
            largest = {"u32": 2**32 - 1, "u64": 2**48, "i64": 2**48, JSON_VALUE: 2**48}.get(value.kind, 2**31 - 1)
            kind = value.kind if value.kind in ("u32", "u64", "i32", "i64", JSON_VALUE) else "u32"
            yield _valued(key, Value(kind, largest))


def odd_values(key: Key, value: Value) -> Iterator[Edit]:
    """*key* with values that may be legal, and that careless arithmetic stumbles over."""
    number = _number(value)
    if number is not None:
        odd = [0.0, -1.0, 1e-30, 1e30] if isinstance(number, float) else [0, 1, number + 1, 2 * number, 4095]
        for other in odd:
            if not value.kind.endswith("8") or 0 <= other < 128:  # what one byte holds
                yield _valued(key, Value(value.kind, other))
    elif isinstance(value.value, str):
        yield _valued(key, Value(value.kind, ""))
        yield _valued(key, Value(value.kind, "x\n" * 200))
    elif isinstance(value.value, list | np.ndarray):
        items = list(value.value)
        for changed in ([], items[:1] * 2, items[::-1], items + items):
            yield _valued(key, Value(value.kind, changed))
        if value.kind == JSON_VALUE:
            for element in ("seven", None, -1, 1.5, True, 2**48):
                yield _valued(key, Value(JSON_VALUE, [element]))


def not_finite(good: Container) -> Iterator[Edit]:
    """A NaN or an infinity in each tensor of plain floats: at its start, in its middle, at its end."""
    for name, tensor in good.tensors.items():
        if tensor.dtype not in _NAN:
            continue
        width = len(_NAN[tensor.dtype])
        count = len(tensor.data) // width
        for what, bits, index in (("NaN", _NAN, 0), ("-inf" if width == 4 else "inf", _INFINITY, count // 2),
                                  ("NaN", _NAN, count - 1)):  # fmt: skip
            yield _patched(name, index * width, bits[tensor.dtype], f"tensor {name!r} holds {what} at index {index}")


def bad_ids(good: Container, vocab_size: int) -> Iterator[Edit]:
    """Ids far outside the vocabulary in each tensor of whole numbers."""
    for name, tensor in good.tensors.items():
        if tensor.dtype not in _WIDE_INTEGERS:
            continue
        dtype = np.dtype(_WIDE_INTEGERS[tensor.dtype])
        last = len(tensor.data) // dtype.itemsize - 1
        for index, bad in ((0, -2 * vocab_size), (last, 2 * vocab_size), (last, int(np.iinfo(dtype).max))):
            if bad >= 0 or dtype.kind == "i":
                did = f"tensor {name!r} holds {bad} at index {index}"
                yield _patched(name, index * dtype.itemsize, np.array(bad, dtype).tobytes(), did)


def _number(value: Value) -> int | float | None:
    """The value where it is one number, no switch."""
    found = value.value.item() if isinstance(value.value, np.generic) else value.value
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def _valued(key: Key, value: Value) -> Edit:
    shown = value.value if value.value is not None else "null"
    kind = "" if value.kind == JSON_VALUE else f" ({value.kind})"
    return Edit(f"key {spelled(key)} is {shown!r:.40}{kind}", lambda c: c.with_key(key, value))


def _shaped(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Edit:
    did = f"tensor {name!r} has shape {list(shape)} instead of {list(tensor.shape)}"
    return Edit(did, partial(_with, name, shape=shape))


def _with(
    name: str, container: Container, *, dtype: str | None = None, shape: tuple[int, ...] | None = None
) -> Container:
    tensor = container.tensors.get(name)
    return container if tensor is None else container.with_tensor(name, tensor.changed(dtype=dtype, shape=shape))


def _dropped(name: str, container: Container) -> Container:
    return container.without_tensor(name)


def _added(name: str, tensor: Tensor, container: Container) -> Container:
    return container.with_tensor(name, tensor)


def _keyless(key: Key, container: Container) -> Container:
    return container.without_key(key)


def _renamed(name: str, container: Container) -> Container:
    tensor = container.tensors.get(name)
    return container if tensor is None else container.without_tensor(name).with_tensor(f"{name}_", tensor)


def _patched(name: str, at: int, data: bytes, did: str) -> Edit:
    def apply(container: Container) -> Container:
        tensor = container.tensors.get(name)
        if tensor is None or len(tensor.data) < at + len(data):
            return container
        patched = tensor.data[:at] + data + tensor.data[at + len(data) :]
        return container.with_tensor(name, Tensor(tensor.dtype, tensor.shape, patched))

    return Edit(did, apply)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """GGUF may leave out dimensions of one."""
    return tuple(size for size in shape if size != 1)
