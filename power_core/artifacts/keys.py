"""Which keys a contract knows of a GGUF header, and the types it takes them in."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from power_core.artifacts.files import refuse
from power_core.artifacts.gguf import GgufFile
from power_core.artifacts.tensors import TensorFile

__all__ = ["check_keys"]


def check_keys(
    file: TensorFile,
    prefix: str,
    types: Mapping[str, Collection[str]],
    *,
    plugin: str,
    others: bool = False,
) -> None:
    """
    Check that every key of a GGUF header that begins with *prefix* is known, of a type its readers take, and finite.

    llama.cpp ignores what it does not know, and a key that it knows and a contract does not may switch on arithmetic
    that nothing was checked for. A number of another type than its own it refuses, or takes for absent.

    Args:
        file: Of another container it passes: JSON has no types, and its keys are their makers' own.
        prefix: With its dot, as in ``dflash.``.
        types: Key without the prefix -> GGUF types: "u32", "arr[i32]", ...
        plugin: Whose contract asks.
        others: Whether keys that are not in *types* may be there.

    Raises:
        ArtifactError: Names the first key that is unknown, of another type or no number.
    """
    if not isinstance(file, GgufFile):
        return
    for key, found in file.value_types.items():
        name = key.removeprefix(prefix)
        if name == key:
            continue
        value = file.metadata[key]
        if isinstance(value, float) and not math.isfinite(value):
            refuse(
                file.path, f"the key {key:.120} is {value}", got=value, expected="a finite number",
                fix="convert the drafter again", plugin=plugin,
            )  # fmt: skip
        if others and name not in types:
            continue
        if name not in types:
            fix = "convert the drafter again without it: nothing here computes what it may stand for"
            refuse(
                file.path, f"the key {key:.120} is unknown", got=key, expected="the keys of its kind", fix=fix,
                plugin=plugin,
            )  # fmt: skip
        if found not in types[name]:
            expected = " or ".join(sorted(types[name]))
            refuse(
                file.path, f"the key {key} has type {found}", got=found, expected=expected,
                fix="convert the drafter again", plugin=plugin,
            )  # fmt: skip
