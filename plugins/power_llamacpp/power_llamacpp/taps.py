"""
Hidden states of a target: which blocks llama.cpp can be asked for, and where it puts them.

llama.cpp copies the *input* of a block (`embeddings_layer_inp`), for every row of the batch in batch order; the output
of block l is the input of block l + 1. The last block's output is the input of none. It also copies the state
that the prediction layers of a model read (`embeddings_nextn`). Where a model's graph offers no such copies, asking
for one ends the process at the next decode, so architectures are listed here (from llama.cpp's sources, src/models).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from power_core.draft_context import NEXTN_STATE
from power_core.errors import BackendError, CapabilityError
from power_llamacpp import extension
from power_llamacpp.gguf_file import GgufInfo

__all__ = ["NEXTN_ARCHITECTURES", "Taps", "available_layers", "check_hidden_layers", "has_nextn"]

# Left out: architectures with several residual streams (deepseek4, qwen4exp), where a block's input is no hidden state.
_TAPPED = frozenset(
    """
    bailingmoe3 gemma4 gpt-oss hunyuan_vl lfm2 lfm2moe llama mimo2 minimax-01 minimax-m2 muse-glimmer nanbeige
    nemotron_h nemotron_h_moe qwen3 qwen35 qwen35moe qwen3moe qwen3next
    """.split()  # noqa: SIM905 - names are read and compared more easily as a block
)
NEXTN_ARCHITECTURES = frozenset(["qwen35"])
"""Architectures whose prediction layers this plugin runs; llama.cpp has graphs for more, which were not tried."""
_CACHED_VIEWS = 64


def available_layers(info: GgufInfo) -> range:
    """Blocks whose outputs llama.cpp can be asked for; empty where the architecture has no such copies."""
    return range(info.num_layers - 1 if info.architecture in _TAPPED else 0)


def has_nextn(info: GgufInfo) -> bool:
    """Whether the file's own prediction layer can be run: one, of an architecture that was tried."""
    return info.architecture in NEXTN_ARCHITECTURES and info.nextn_layers == 1


def check_hidden_layers(info: GgufInfo, layers: tuple[int, ...]) -> None:
    """
    Check that every one of *layers* can be had, without calling llama.cpp on the model.

    Raises:
        CapabilityError: One cannot; says which can.
    """
    blocks = available_layers(info)
    if NEXTN_STATE in layers:
        _check_nextn(info)
    outside = [layer for layer in layers if layer not in blocks and layer != NEXTN_STATE]
    if outside and not blocks:
        raise CapabilityError(
            f"llama.cpp gives no hidden states of architecture {info.architecture!r}",
            plugin="llamacpp", where=str(info.path), got=outside, fix="use a strategy that needs none",
        )  # fmt: skip
    if outside:
        raise CapabilityError(
            f"llama.cpp does not give the output of block {outside[0]}",
            plugin="llamacpp", where=str(info.path), got=outside,
            expected=f"blocks 0 to {blocks[-1]}: the last one's output is no block's input",
            fix="use a drafter that reads earlier blocks",
        )  # fmt: skip
    if any(layer in blocks for layer in layers):
        extension.require(extension.HIDDEN_STATES, "hidden states")


def _check_nextn(info: GgufInfo) -> None:
    if not has_nextn(info):
        found = f"{info.nextn_layers} prediction layers of architecture {info.architecture!r}"
        raise CapabilityError(
            f"the file has {found}",
            plugin="llamacpp", where=str(info.path), got=(info.architecture, info.nextn_layers),
            expected="one prediction (NextN) layer, of architecture " + " or ".join(sorted(NEXTN_ARCHITECTURES)),
            fix="use a target with one, or give a drafter file",
        )  # fmt: skip
    extension.require(extension.NEXTN, "states for prediction layers")


class Taps:
    """
    The hidden states of one context.

    Args:
        handle: The native context; states are switched on here.
        layers: Block outputs, and `NEXTN_STATE`; checked by `check_hidden_layers`.
        rows: Most rows of a decode.
        hidden_size: Values a row.
    """

    def __init__(self, handle: Any, layers: tuple[int, ...], rows: int, hidden_size: int) -> None:
        self._handle = handle
        self._layers = layers
        self._shape = (rows, hidden_size)
        self._views: dict[int, NDArray[np.float32]] = {}
        for layer in layers:
            if layer == NEXTN_STATE:
                extension.function("set_nextn")(handle, True, False)  # unmasked: every row, not only outputs
            else:
                extension.function("set_layer_input")(handle, layer + 1, True)

    def read(self, rows: int) -> Mapping[int, NDArray[np.float32]]:
        """
        float32[rows, hidden] by layer, after a decode of *rows* rows or more: read-only views of llama.cpp's memory.

        Raises:
            BackendError: llama.cpp has no such memory.
        """
        return {layer: self._view(layer)[:rows] for layer in self._layers}

    def _view(self, layer: int) -> NDArray[np.float32]:
        """llama.cpp lays its output memory out anew for each decode: addresses are asked for each time."""
        if layer == NEXTN_STATE:
            pointer = extension.function("get_nextn")(self._handle)
        else:
            pointer = extension.function("get_layer_input")(self._handle, layer + 1)
        if not pointer:
            raise BackendError(f"llama.cpp has no hidden states of layer {layer}", plugin="llamacpp", got=layer)
        address = ctypes.addressof(pointer.contents)
        view = self._views.get(address)
        if view is None:
            if len(self._views) >= _CACHED_VIEWS:
                self._views.clear()
            view = self._views[address] = np.ctypeslib.as_array(pointer, shape=self._shape)
            view.flags.writeable = False
        return view
