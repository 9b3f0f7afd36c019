"""Models in Hugging Face's layout: `config.json` beside one or several safetensors files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from power_torch.assemble import Source, assemble
from power_torch.hf_config import HfConfig
from power_torch.hparams import GEMMA3
from power_torch.refusal import refuse
from power_torch.weights import ModelWeights

__all__ = ["load", "weight_files"]

_INDEX = "model.safetensors.index.json"
_FLOATS = frozenset({"F32", "F16", "BF16"})
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")  # the longest first
_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.|.*\.rotary_emb\.inv_freq$")
_TOP = {"embed_tokens": "token_embd", "norm": "output_norm"}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# What stands before the feed-forward is called after what it follows, except where four norms need four names.
_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def load(path: Path, dtype: torch.dtype) -> ModelWeights:
    """
    The weights of a folder or of one safetensors file in it; see `power_torch.weights.load_weights`.

    Raises:
        ArtifactError: A file is damaged, of another architecture, incomplete, or holds a number that is not finite.
    """
    files = weight_files(path)
    folder = files[0].parent
    config = HfConfig(folder / "config.json")
    hparams = config.hyper_parameters()
    is_gemma = config.architecture == GEMMA3
    with ExitStack() as stack:
        places: dict[str, tuple[Any, str]] = {}  # GGUF's name -> opened file and its own name
        for file in files:
            for name, handle in _tensors(file, stack):
                places[_gguf_name(name, is_gemma=is_gemma) or name] = (handle, name)
        if config.is_tied:
            places.pop("output.weight", None)
        elif "output.weight" not in places:
            refuse(folder, "the tensor lm_head.weight is missing", expected="one where embeddings are not tied")

        def read(name: str) -> torch.Tensor:
            handle, own_name = places[name]
            values: torch.Tensor = handle.get_tensor(own_name)
            return values.float() + 1 if is_gemma and values.ndim == 1 else values  # Gemma's norms store weight - 1

        shapes = {name: tuple(handle.get_slice(own).get_shape()) for name, (handle, own) in places.items()}
        source = Source(folder, shapes, read)
        for name in shapes:
            if _OTHER_PARTS.match(name):
                source.skip(name)
        return assemble(source, hparams, dtype)


def weight_files(path: Path) -> list[Path]:
    """
    The safetensors files of the model at *path*: a folder, or one file.

    Raises:
        ArtifactError: There are none, or the index names one that is absent.
    """
    if path.is_file():
        return [path]
    index = path / _INDEX
    if not index.is_file():
        if files := sorted(path.glob("*.safetensors")):
            return files
        refuse(path, "there is no model here", expected="a GGUF file, or a folder with *.safetensors and config.json")
    try:
        names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        refuse(index, f"it cannot be read: {exc}", expected="a weight_map of file names")
    for name in sorted(names):
        if Path(name).name != name or not (path / name).is_file():
            refuse(index, f"it names {name!r}", got=name, expected="a file beside it", fix="download the file again")
    return [path / name for name in sorted(names)]


def _tensors(file: Path, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """Name and opened file of each tensor of *file*."""
    try:
        handle = stack.enter_context(safe_open(file, "pt"))
    except (OSError, SafetensorError) as exc:
        refuse(file, f"it cannot be read: {exc}", expected="a safetensors file", fix="download the file again")
    for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
        kind = handle.get_slice(name).get_dtype()
        if kind not in _FLOATS and not _OTHER_PARTS.match(name):
            refuse(file, f"tensor {name} is {kind}", got=kind, expected="F32, F16 or BF16")
        yield name, handle


def _gguf_name(name: str, *, is_gemma: bool) -> str | None:
    """What *name* is called in a GGUF file; None for tensors without a place there."""
    if name in ("lm_head.weight", "language_model.lm_head.weight"):
        return "output.weight"
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    if prefix is None or not name.endswith(".weight"):
        return None
    part = name.removeprefix(prefix).removesuffix(".weight")
    if part in _TOP:
        return f"{_TOP[part]}.weight"
    block = re.fullmatch(r"layers\.(\d+)\.(.+)", part)
    place = (_BLOCK | (_GEMMA_NORMS if is_gemma else _NORMS)).get(block[2]) if block else None
    return f"blk.{int(block[1])}.{place}.weight" if block and place else None
