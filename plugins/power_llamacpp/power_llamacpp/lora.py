"""
What a LoRA adapter must satisfy before llama.cpp may see it, and what is recorded of it.

llama.cpp throws where a tensor is missing or its first two sizes are wrong. Other mistakes end the process (a key or
a tensor of another type, a further size, an adapted embedding that is the output matrix, too) or are answered with
silence (a NaN, a norm, a matrix whose graph has no place for adapters). Found by feeding it malformed adapters and
read in its sources (src/llama-adapter.cpp, src/llama-graph.cpp). Measured against llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from attrs import frozen

from power_core.artifacts.tensors import TensorInfo
from power_core.errors import ConfigError
from power_core.types import AdapterIdentity
from power_llamacpp.config import LoraFile
from power_llamacpp.draft_facts import check_values
from power_llamacpp.gguf_file import GgufInfo, read_gguf, refuse

__all__ = ["ADAPTABLE", "LoraAdapter", "check_lora", "is_adaptable", "open_adapters"]

FIX = "use an adapter made for this model"
# Architectures whose graphs multiply all of these matrices through `build_lora_mm` (src/models).
ADAPTABLE = frozenset(
    """
    apertus arcee exaone4 gemma gemma2 gemma3 granite internlm2 lfm2 llama mamba mistral3 nemotron olmo olmo2 phi3
    qwen2 qwen2moe qwen3 qwen3moe qwen35 seed_oss smollm3 stablelm starcoder2
    """.split()  # noqa: SIM905 - names are read and compared more easily as a block
)
_MATRIX = re.compile(
    r"blk\.(?P<block>0|[1-9]\d*)\.(attn_q|attn_k|attn_v|attn_qkv|attn_gate|attn_output|ffn_gate|ffn_up|ffn_down|ssm_in|ssm_x|"
    r"ssm_dt|ssm_out|ssm_alpha|ssm_beta|shortconv\.in_proj|shortconv\.out_proj)\.weight"
)
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_TYPES = ("F32", "F16", "BF16", "Q8_0")  # what convert_lora_to_gguf.py writes
_ALPHA = "adapter.lora.alpha"
_KEYS = frozenset(["adapter.type", _ALPHA, "adapter.lora.task_name", "adapter.lora.prompt_prefix"])  # two inform only
_LARGEST = float(np.finfo(np.float32).max)


@frozen
class LoraAdapter:
    """
    An adapter that was checked against its target.

    Args:
        info: What its header says.
        scale: What its changes are multiplied with, not 0.
        sha256: Digest of the file.
    """

    info: GgufInfo
    scale: float
    sha256: str

    @property
    def path(self) -> Path:
        return self.info.path

    @property
    def widest(self) -> int:
        """Outputs of the widest matrix it changes, the output matrix aside."""
        last = {name: tensor for name, tensor in self.info.tensors.items() if name.endswith(".lora_b")}
        return max((b.shape[0] for name, b in last.items() if not name.startswith(_OUTPUT)), default=0)

    @property
    def has_output(self) -> bool:
        """Whether it changes the output matrix."""
        return f"{_OUTPUT}.lora_b" in self.info.tensors

    @property
    def identity(self) -> AdapterIdentity:
        """What it is, by content."""
        return AdapterIdentity(self.sha256, self.scale)


def open_adapters(files: Sequence[LoraFile], target: GgufInfo) -> tuple[LoraAdapter, ...]:
    """
    Check *files* for *target* without calling llama.cpp; their tensors are read, too.

    Args:
        files: In the order they are added; each is checked, those with a scale of 0 are then left out.
        target: What `check_gguf` returned.

    Raises:
        ArtifactError: The first thing found wrong: the file, what was found, what was expected, what to do.
        ConfigError: Two files are the same adapter.
    """
    adapters: dict[str, LoraAdapter] = {}
    for file in files:
        info = read_gguf(file.file)
        check_lora(info, target, file.scale)
        if not file.is_active:
            continue
        digest = info.sha256()
        if digest in adapters:
            raise ConfigError(
                f"lora names one adapter twice: {adapters[digest].path} and {file.file}",
                plugin="llamacpp", got=str(file.file), expected="each adapter once", fix="add up its scales",
            )  # fmt: skip
        adapters[digest] = LoraAdapter(info, file.scale, digest)
    return tuple(adapters.values())


def check_lora(info: GgufInfo, target: GgufInfo, scale: float) -> None:
    """
    Check that the file can be added to *target*.

    Raises:
        ArtifactError: It cannot.
    """
    _check_keys(info, target)
    _check_alpha(info, scale)
    for name, (a, b) in _pairs(info).items():
        _check_matrix(info, name, target)
        _check_pair(info, name, a, b, target.tensors[name])
    check_values(info)


def is_adaptable(name: str) -> bool:
    """Whether the graphs of `ADAPTABLE` architectures have a place for changes of the matrix *name*."""
    return name in (_EMBEDDING, _OUTPUT) or _MATRIX.fullmatch(name) is not None


def _check_keys(info: GgufInfo, target: GgufInfo) -> None:
    """A LoRA adapter of the target's architecture, with keys of the types that llama.cpp asserts."""
    parts = info.metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts > 1:
        refuse(info.path, f"the file is one of {parts} parts", got=parts, expected="a single file")
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        found = info.metadata.get(key)
        if not isinstance(found, str) or found != expected:
            what = f"{key} is {found!r:.80}" if key in info.metadata else f"the key {key} is missing"
            refuse(info.path, what, got=found, expected=f"{expected!r}: a LoRA adapter", fix="give a GGUF adapter")
    if info.architecture != target.architecture:
        what = f"the adapter is for architecture {info.architecture!r}"
        refuse(info.path, what, got=info.architecture, expected=f"the target's {target.architecture!r}", fix=FIX)
    if target.architecture not in ADAPTABLE:
        what = f"llama.cpp may leave out adapters of architecture {target.architecture!r} without a word"
        fix = "merge it into the model with llama-export-lora"
        refuse(info.path, what, got=target.architecture, expected=" ".join(sorted(ADAPTABLE)), fix=fix)
    for key in info.metadata:
        if key.startswith("adapter.alora."):
            what = f"the key {key} makes it an activated LoRA, which starts to work in the middle of a prompt"
            refuse(info.path, what, got=key, expected="a LoRA adapter that always works", fix="use one of those")
        if key.startswith("adapter.") and key not in _KEYS:
            refuse(info.path, f"the key {key} is unknown", got=key, expected=" ".join(sorted(_KEYS)))


def _check_alpha(info: GgufInfo, scale: float) -> None:
    """
    Present, because llama.cpp takes 0 where it is not, and then leaves out the division by the rank.

    It multiplies scale and alpha in single precision before it divides.
    """
    kind, alpha = info.value_types.get(_ALPHA), info.metadata.get(_ALPHA)
    if kind != "f32" or not isinstance(alpha, float):
        what = f"the key {_ALPHA} is missing" if kind is None else f"{_ALPHA} is of type {kind}"
        refuse(info.path, what, got=kind, expected="an f32")
    if not math.isfinite(alpha) or alpha <= 0:
        refuse(info.path, f"{_ALPHA} is {alpha}", got=alpha, expected="a finite number above 0")
    if abs(scale * alpha) > _LARGEST:
        what = f"a scale of {scale} with {_ALPHA} = {alpha} is no finite factor"
        refuse(info.path, what, got=scale, expected="a number of single precision", fix="lower its scale")


def _pairs(info: GgufInfo) -> Mapping[str, tuple[TensorInfo, TensorInfo]]:
    """Both factors by the name of the matrix they change."""
    bases = dict.fromkeys(name[:-7] if name.endswith((".lora_a", ".lora_b")) else name for name in info.tensors)
    for name in bases:
        if name in info.tensors:
            is_norm = name.endswith("_norm.weight")
            what = f"tensor {name} replaces a norm, which llama.cpp ignores" if is_norm else f"tensor {name} is unknown"
            refuse(info.path, what, got=name, expected="pairs x.lora_a and x.lora_b only")
        for part in ("lora_a", "lora_b"):
            if f"{name}.{part}" not in info.tensors:
                refuse(info.path, f"the tensor {name}.{part} is missing", got=name, expected="both factors")
    if not bases:
        refuse(info.path, "the file has no tensors", got=0, expected="pairs x.lora_a and x.lora_b")
    return {name: (info.tensors[f"{name}.lora_a"], info.tensors[f"{name}.lora_b"]) for name in bases}


def _check_matrix(info: GgufInfo, name: str, target: GgufInfo) -> None:
    """A matrix of the target that llama.cpp adapts."""
    if name not in target.tensors:
        refuse(info.path, f"the target has no tensor {name}", got=name, expected="the target's tensors", fix=FIX)
    block = _MATRIX.fullmatch(name)
    if name == _EMBEDDING and _OUTPUT not in target.tensors:
        what = f"{name} is the target's output matrix as well, which llama.cpp cannot adapt"
        refuse(info.path, what, got=name, expected="other tensors", fix="train an adapter without the embedding")
    if not is_adaptable(name):
        what = f"whether llama.cpp adapts {name} is unknown"
        refuse(info.path, what, got=name, expected="matrices of attention and feed-forward blocks")
    if block is not None and int(block["block"]) >= target.num_layers:
        what = f"{name} belongs to a prediction layer"
        refuse(info.path, what, got=name, expected=f"blocks 0 to {target.num_layers - 1}")
    if len(target.tensors[name].shape) != 2:
        refuse(info.path, f"{name} is no matrix in the target", got=target.tensors[name].shape, expected="a matrix")
    if target.tensors[name].dtype == "NVFP4":
        refuse(info.path, f"{name} is NVFP4 in the target", got="NVFP4", expected="another type", fix="requantize it")


def _check_pair(info: GgufInfo, name: str, a: TensorInfo, b: TensorInfo, matrix: TensorInfo) -> None:
    """Factors of the right shapes, of a type that kernels multiply with."""
    for factor in (a, b):
        if factor.dtype not in _TYPES:
            refuse(info.path, f"tensor {factor.name} is {factor.dtype}", got=factor.dtype, expected=" or ".join(_TYPES))
    rank, (outputs, inputs) = _rank(name, a), matrix.shape
    shapes = ((outputs, rank), (inputs, rank)) if name == _EMBEDDING else ((rank, inputs), (outputs, rank))
    for factor, expected in zip((a, b), shapes, strict=True):
        if factor.shape != expected:
            what = f"tensor {factor.name} has shape {factor.shape}"
            refuse(info.path, what, got=factor.shape, expected=expected, fix=FIX)


def _rank(name: str, a: TensorInfo) -> int:
    return a.shape[-1 if name == _EMBEDDING else 0]
