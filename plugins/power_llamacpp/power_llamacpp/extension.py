"""
Functions of llama.cpp that its C header does not declare: hidden states and draft contexts need them.

They are exported from libllama under C++ names, which differ by compiler and may vanish with any build. One that
is missing is a missing capability, found out before anything calls it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

from power_core.errors import CapabilityError
from power_llamacpp.native import library

__all__ = ["HIDDEN_STATES", "NEXTN", "function", "missing", "require"]


class _Symbol(NamedTuple):
    """Exported names (C, Itanium C++, Microsoft C++) and signature; the context pointer is always the first."""

    names: tuple[str, ...]
    arguments: tuple[Any, ...]
    result: Any


_FLOATS = ctypes.POINTER(ctypes.c_float)
_SYMBOLS = {
    "set_layer_input": _Symbol(
        (
            "llama_set_embeddings_layer_inp",
            "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
            "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
        ),
        (ctypes.c_uint32, ctypes.c_bool),
        None,
    ),
    "get_layer_input": _Symbol(
        (
            "llama_get_embeddings_layer_inp",
            "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
            "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
        ),
        (ctypes.c_uint32,),
        _FLOATS,
    ),
    "set_nextn": _Symbol(
        (
            "llama_set_embeddings_nextn",
            "_Z26llama_set_embeddings_nextnP13llama_contextbb",
            "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
        ),
        (ctypes.c_bool, ctypes.c_bool),
        None,
    ),
    "get_nextn": _Symbol(
        (
            "llama_get_embeddings_nextn",
            "_Z26llama_get_embeddings_nextnP13llama_context",
            "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
        ),
        (),
        _FLOATS,
    ),
}

HIDDEN_STATES = ("set_layer_input", "get_layer_input")
"""What block outputs need."""
NEXTN = ("set_nextn", "get_nextn")
"""What prediction layers, DSpark's confidences and DFlash2's lattices need."""


@cache
def _lookup(name: str) -> Any | None:
    """The exported function, or None where this build has it under none of its names."""
    symbol, lib = _SYMBOLS[name], library()
    exports = lib._lib  # noqa: SLF001 - the binding's handle of libllama, which it does not hand out otherwise
    for exported in symbol.names:
        found = getattr(exports, exported, None)
        if found is not None:
            found.argtypes = [lib.llama_context_p_ctypes, *symbol.arguments]
            found.restype = symbol.result
            return found
    return None


def missing(names: tuple[str, ...]) -> list[str]:
    """C names of those of *names* that this build lacks."""
    return [_SYMBOLS[name].names[0] for name in names if _lookup(name) is None]


def require(names: tuple[str, ...], what: str) -> None:
    """
    Check that this build has *names*.

    Raises:
        CapabilityError: It lacks one; *what* says what cannot be had.
    """
    absent = missing(names)
    if absent:
        raise CapabilityError(
            f"this build of llama.cpp exports no {absent[0]}, so there are no {what}",
            plugin="llamacpp",
            got=absent,
            fix="install llama-cpp-python 0.3.36 as it is published, or build it with its symbols visible",
        )


def function(name: str) -> Any:
    """
    One function, by its key in this module.

    Raises:
        CapabilityError: This build lacks it.
    """
    require((name,), "hidden states and draft contexts")
    return _lookup(name)
