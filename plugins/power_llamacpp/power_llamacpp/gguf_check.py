"""
What a GGUF file must satisfy before llama.cpp may see it as a target.

llama.cpp throws on most damage, but an assertion or an exception of its own C++ code ends the process, and some
values make it compute nonsense in silence. Each check stands for one of those, found by feeding it malformed
files, or for a mistake whose message would otherwise be hard to read. Measured against llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from power_llamacpp.gguf_file import DOWNLOAD_AGAIN, TENSOR_TYPES, GgufInfo, StringArray, read_gguf, refuse
from power_llamacpp.gguf_hparams import (
    check_finite_numbers,
    check_heads,
    check_recurrent,
    check_rope,
    check_sizes,
    check_window,
)

__all__ = ["ARCHITECTURES", "WEIGHT_TYPES", "GgufInfo", "check_finite", "check_gguf", "check_tokenizer"]

ARCHITECTURES = frozenset(
    """
    afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bitnet bloom chameleon chatglm
    codeshell cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4
    dots1 dots3note ernie4_5 ernie4_5-moe exaone exaone-moe exaone4 falcon falcon-h1 gemma gemma2 gemma3 gemma3n
    gemma4 glm-dsa glm4 glm4moe glm5-next gpt-oss gpt2 gptj gptneox granite granite_swa granitehybrid granitemoe
    graniteswitch grok grovemoe hrm_text hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 hy_v4 internlm2 jais jais2 jamba
    kimi-k3 kimi-linear laguna lfm2 lfm2moe llama llama4 maincoder mamba mamba2 maple mellum mimo2 minicpm minicpm3
    minimax-01 minimax-m2 minimax-m3 mistral3 mistral4 mpt muse-glimmer nanbeige nemotron nemotron_h nemotron_h_moe
    olmo olmo2 olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 plm qwen qwen2
    qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen3vl qwen3vlmoe qwen4exp refact rwkv6 rwkv6qwen2
    rwkv7 seed_oss smallthinker smollm3 spark2_5 stablelm starcoder starcoder2 step35 talkie xverse
    """.split()  # noqa: SIM905 - a hundred names are read and compared more easily as a block
)
"""Architectures of llama.cpp that decode text one token after the other."""

_OTHERS = {
    **dict.fromkeys(["dflash", "eagle3", "gemma4-assistant"], "a drafter, not a target"),
    **dict.fromkeys(["dream", "llada", "llada-moe", "rnd1"], "a diffusion model, which has no next token"),
    **dict.fromkeys(["t5", "t5encoder"], "an encoder-decoder"),
    **dict.fromkeys(["clip"], "the image part of a model"),
    **dict.fromkeys(["pockettts", "qwen3tts", "wavtokenizer-dec"], "a speech model"),
    **dict.fromkeys(
        ["bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert",
         "neo-bert", "nomic-bert", "nomic-bert-moe"],
        "an embedding model",
    ),
}  # fmt: skip

# Architectures whose blocks have the tensors of a Llama block, as far as `_check_llama_blocks` looks.
_LLAMA_LIKE = frozenset(["gemma", "gemma2", "gemma3", "llama", "mistral3", "qwen2", "qwen3", "smollm3"])
_BPE_MODELS = frozenset(["gpt2", "hybriddna", "whitespace", "gemma4"])
_BYTE_FALLBACK_MODELS = frozenset(["llama", "plamo2"])
_TOKENIZER_MODELS = frozenset(["rwkv"]) | _BPE_MODELS | _BYTE_FALLBACK_MODELS
_PLAIN_MATRICES = ("ssm_a", "ssm_conv1d.weight", "shortconv.conv.weight")  # their kernels take F32 only
WEIGHT_TYPES = frozenset(kind.name for kind in TENSOR_TYPES.values() if kind.weight)


def check_gguf(path: Path) -> GgufInfo:
    """
    Read *path* and check that it is a model llama.cpp can decode with, without calling llama.cpp.

    Returns:
        What the header says. The weights have not been read.

    Raises:
        ArtifactError: The first thing found wrong: the file, what was found, what was expected, what to do.
    """
    info = read_gguf(path)
    for check in _CHECKS:
        check(info)
    return info


def check_finite(info: GgufInfo) -> None:
    """
    Scan the unquantized tensors for NaN and infinities, which llama.cpp turns into token 0 without a word.

    Raises:
        ArtifactError: A tensor holds one.
    """
    for name, tensor in info.tensors.items():
        dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(tensor.dtype)
        if dtype is None:
            continue
        values = np.fromfile(info.path, dtype, count=math.prod(tensor.shape), offset=tensor.offset)
        # A bf16 number is not finite where all eight bits of its exponent are set.
        finite = np.isfinite(values) if tensor.dtype != "BF16" else (values & 0x7F80) != 0x7F80
        if not finite.all():
            bad = int(np.argmin(finite))
            refuse(
                info.path,
                f"tensor {name} holds a number that is not finite, at index {bad}",
                got=bad,
                fix=DOWNLOAD_AGAIN,
            )


def _check_kind(info: GgufInfo) -> None:
    """A whole file, of an architecture that decodes text."""
    parts = info.metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        fix = "merge the parts with llama-gguf-split --merge"
        refuse(info.path, f"the file is one of {parts} parts", got=parts, expected="a single file", fix=fix)
    if info.metadata.get("general.type") == "adapter":
        fix = "give the model it was made for, and the adapter under lora in [plugin.llamacpp]"
        refuse(info.path, "the file is an adapter", got="adapter", expected="a model", fix=fix)
    name = info.architecture
    if reason := _OTHERS.get(name):
        expected = "a causal language model"
        refuse(info.path, f"architecture {name!r} is {reason}", got=name, expected=expected, fix="give a target model")
    if name not in ARCHITECTURES:
        fix = "convert to an architecture that llama.cpp supports"
        refuse(info.path, f"architecture {name!r} is unknown", got=name, expected="one of llama.cpp's", fix=fix)
    if info.metadata.get(f"{name}.attention.causal", True) is not True:
        refuse(info.path, f"{name}.attention.causal is not true", expected="a causal model", fix="give a causal model")


def check_tokenizer(info: GgufInfo) -> None:
    """A vocabulary that llama.cpp loads: distinct tokens, and what the tokenizer's kind needs beside them."""
    model = info.metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in _TOKENIZER_MODELS:
        expected = " or ".join(sorted(_TOKENIZER_MODELS))
        refuse(info.path, f"tokenizer.ggml.model is {model!r}", got=model, expected=expected)
    tokens = info.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray) or not tokens:
        refuse(info.path, "tokenizer.ggml.tokens is missing or empty", expected="an array of strings")
    distinct = set(tokens.iter_bytes())
    if len(distinct) != len(tokens):
        refuse(info.path, "tokenizer.ggml.tokens holds a token twice", got=len(tokens), expected="distinct tokens")
    if model in _BPE_MODELS and not isinstance(info.metadata.get("tokenizer.ggml.merges"), StringArray):
        refuse(info.path, "tokenizer.ggml.merges is missing", expected=f"merges, for tokenizer model {model!r}")
    if model in _BYTE_FALLBACK_MODELS:
        missing = [b for b in range(256) if f"<0x{b:02X}>".encode() not in distinct and bytes([b]) not in distinct]
        if missing:
            what = f"the vocabulary has no token for byte 0x{missing[0]:02X}"
            refuse(info.path, what, got=missing[0], expected=f"all 256, for tokenizer model {model!r}")
    _check_token_arrays(info, len(tokens))


def _check_token_arrays(info: GgufInfo, count: int) -> None:
    """One type and one score a token; end and begin ids inside the vocabulary."""
    for key, kinds in (("token_type", ("arr[i32]",)), ("scores", ("arr[f32]", "arr[i32]"))):
        full = f"tokenizer.ggml.{key}"
        values = info.metadata.get(full)
        if values is None:
            continue
        kind = info.value_types[full]
        if kind not in kinds or not isinstance(values, np.ndarray):
            refuse(info.path, f"{full} is of type {kind}", got=kind, expected=kinds[0])
        if len(values) != count:
            refuse(info.path, f"{full} has {len(values)} elements", got=len(values), expected=f"{count}, one a token")
    for name in ("bos", "eos", "eot", "eom"):
        full = f"tokenizer.ggml.{name}_token_id"
        value = info.metadata.get(full, 0)
        if not isinstance(value, int) or not 0 <= value < count:
            refuse(info.path, f"{full} is {value}", got=value, expected=f"an id below {count}")


def _check_tensors(info: GgufInfo) -> None:
    """The embedding fits the vocabulary; vectors are F32 and matrices of a type that kernels multiply with."""
    embedding = info.tensors.get("token_embd.weight")
    expected = (info.vocab_size, info.hidden_size)
    if embedding is None:
        refuse(info.path, "the tensor token_embd.weight is missing", expected="a whole model")
    if embedding.shape != expected:
        what = f"token_embd.weight has shape {embedding.shape}"
        refuse(info.path, what, got=embedding.shape, expected=f"(tokens, embedding_length) = {expected}")
    for name, tensor in info.tensors.items():
        if "tid2eid" in name:
            continue  # a table of expert ids, integers on purpose
        plain = len(tensor.shape) == 1 or name.endswith(_PLAIN_MATRICES)
        if tensor.dtype not in (("F32",) if plain else WEIGHT_TYPES):
            wanted = "F32" if plain else "a type for weights"
            refuse(info.path, f"tensor {name} is {tensor.dtype}", got=tensor.dtype, expected=wanted)


def _check_llama_blocks(info: GgufInfo) -> None:
    """The tensors of every block of the commonest family, so that a missing one is named here."""
    if info.architecture not in _LLAMA_LIKE:
        return
    if info.integer("attention.head_count") == 0:
        refuse(info.path, f"{info.architecture}.attention.head_count is missing or 0", expected="1 or more")
    needed: dict[str, tuple[str, ...]] = {name: (name,) for name in ("attn_norm", "attn_output", "ffn_norm")}
    needed |= {name: (name, "attn_qkv") for name in ("attn_q", "attn_k", "attn_v")}
    needed |= {name: (name, f"{name}_exps", "ffn_gate_up_exps") for name in ("ffn_gate", "ffn_up", "ffn_down")}
    _require_tensors(info, needed, range(info.num_layers))
    if "output_norm.weight" not in info.tensors:
        refuse(info.path, "the tensor output_norm.weight is missing", expected="a whole model")


def _check_delta_blocks(info: GgufInfo) -> None:
    """Projections of linear-attention blocks: llama.cpp takes them for optional, and reads through null."""
    if info.architecture in ("qwen35", "qwen35moe"):
        linear = [i for i in range(info.num_layers) if f"blk.{i}.ssm_conv1d.weight" in info.tensors]
        _require_tensors(info, {name: (name,) for name in ("attn_qkv", "attn_gate")}, linear)


def _require_tensors(info: GgufInfo, needed: Mapping[str, Sequence[str]], blocks: Iterable[int]) -> None:
    """Each of *blocks* has one of the choices for each needed name."""
    for i in blocks:
        for name, choices in needed.items():
            if not any(f"blk.{i}.{choice}.weight" in info.tensors for choice in choices):
                what = f"the tensor blk.{i}.{name}.weight is missing"
                refuse(info.path, what, got=name, expected=f"{info.num_layers} whole blocks", fix=DOWNLOAD_AGAIN)


_CHECKS: tuple[Callable[[GgufInfo], None], ...] = (
    _check_kind,
    check_sizes,
    check_finite_numbers,
    check_heads,
    check_window,
    check_rope,
    check_recurrent,
    check_tokenizer,
    _check_tensors,
    _check_llama_blocks,
    _check_delta_blocks,
)
