"""
Tiny GGUF models with random weights, for tests of targets and drafters.

Each factory writes one complete file of a few hundred kilobytes that llama.cpp loads and decodes: own
byte-level tokenizer (any text can be encoded), end-of-generation ids, a chat template. The same
arguments give the same bytes. Four kinds of target memory are covered:

========================  ===========  ==========================================================
factory                   architecture  memory
========================  ===========  ==========================================================
`tiny_llama`              llama        attention; any suffix can be dropped
`tiny_gemma3`             gemma3       sliding-window layers alternating with full ones
`tiny_recurrent`          mamba        recurrent only; llama.cpp keeps no snapshots of it
`tiny_hybrid`             qwen35       recurrent and attention layers; bounded snapshots
========================  ===========  ==========================================================

The weights are scaled so that greedy text wanders, and the output rows of the control ids are zero: a
greedy run never ends on its own, so its length is the test's choice. Needs the `gguf` package
(`pip install "power-core[testing]"`), imported when a factory is called.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice, product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

__all__ = ["CHAT_TEMPLATE", "MetadataValue", "tiny_gemma3", "tiny_hybrid", "tiny_llama", "tiny_recurrent"]

MetadataValue: TypeAlias = "int | float | bool | str | list[int] | list[float] | list[bool] | list[str]"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat template the factories write by default (ChatML)."""

_CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
_NORMAL, _CONTROL = 1, 3  # gguf's token types
_MERGE_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"  # by frequency in English, so that small vocabularies merge often


def tiny_llama(
    path: Path,
    *,
    seed: int = 0,
    vocab_size: int = 320,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 2048,
    weights: str = "F32",
    chat_template: str | None = CHAT_TEMPLATE,
    overrides: Mapping[str, MetadataValue | None] | None = None,
    omit: Collection[str] = (),
) -> Path:
    """
    Write a random model of architecture `llama`: grouped-query attention, memory that can be cut anywhere.

    Args:
        path: The file to write.
        seed: Seed of the weights.
        vocab_size: Ids, 259 (three control ids and one id a byte) or more; the rest are merges.
        hidden_size: Width of the residual stream, a multiple of `heads`.
        layers: Blocks.
        heads: Query heads.
        kv_heads: Key and value heads, a divisor of `heads`.
        context: The context length the file declares.
        weights: ggml type of the matrices: "F32", "F16", "BF16" or a block type the `gguf` package can
            quantize to, such as "Q8_0"; norms stay F32.
        chat_template: Jinja template to store, or None for a file without one.
        overrides: Metadata keys to replace or add; None leaves a key out. For tests of refusals.
        omit: Tensors to leave out. For tests of refusals.

    Returns:
        *path*.
    """
    file = _File("llama", seed, weights)
    _common_metadata(file, vocab_size, hidden_size, layers, context, chat_template)
    _attention_metadata(file, heads, kv_heads, hidden_size // heads)
    file.set("rope.dimension_count", hidden_size // heads)
    _embeddings(file, vocab_size, hidden_size)
    for i in range(layers):
        _attention(file, i, hidden_size, heads, kv_heads, hidden_size // heads)
        _feed_forward(file, i, hidden_size)
        file.norms(f"blk.{i}", ("attn_norm", "ffn_norm"), hidden_size)
    return file.write(path, overrides, omit)


def tiny_gemma3(
    path: Path,
    *,
    seed: int = 0,
    vocab_size: int = 320,
    hidden_size: int = 64,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    sliding_window: int = 32,
    context: int = 2048,
    weights: str = "F32",
    chat_template: str | None = CHAT_TEMPLATE,
    overrides: Mapping[str, MetadataValue | None] | None = None,
    omit: Collection[str] = (),
) -> Path:
    """
    Write a random model of architecture `gemma3`: even blocks attend to a window, odd blocks to everything.

    Args:
        path: The file to write.
        seed: Seed of the weights.
        vocab_size: As for `tiny_llama`.
        hidden_size: As for `tiny_llama`.
        layers: Blocks; at least 2 for both kinds to occur.
        heads: Query heads.
        kv_heads: Key and value heads.
        sliding_window: Positions the even blocks see.
        context: The context length the file declares.
        weights: As for `tiny_llama`.
        chat_template: As for `tiny_llama`.
        overrides: As for `tiny_llama`.
        omit: As for `tiny_llama`.

    Returns:
        *path*.
    """
    file = _File("gemma3", seed, weights)
    _common_metadata(file, vocab_size, hidden_size, layers, context, chat_template)
    _attention_metadata(file, heads, kv_heads, hidden_size // heads)
    file.set("attention.sliding_window", sliding_window)
    file.set("attention.sliding_window_pattern", 2)
    _embeddings(file, vocab_size, hidden_size, gain=3.0)  # block outputs are normalized here, the embedding must match
    for i in range(layers):
        _attention(file, i, hidden_size, heads, kv_heads, hidden_size // heads)
        _feed_forward(file, i, hidden_size)
        file.norms(f"blk.{i}", ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), hidden_size)
        file.norms(f"blk.{i}", ("attn_q_norm", "attn_k_norm"), hidden_size // heads)
    return file.write(path, overrides, omit)


def tiny_recurrent(
    path: Path,
    *,
    seed: int = 0,
    vocab_size: int = 320,
    hidden_size: int = 64,
    layers: int = 2,
    state_size: int = 16,
    context: int = 2048,
    weights: str = "F32",
    chat_template: str | None = CHAT_TEMPLATE,
    overrides: Mapping[str, MetadataValue | None] | None = None,
    omit: Collection[str] = (),
) -> Path:
    """
    Write a random model of architecture `mamba`: recurrent state only, which llama.cpp cannot roll back.

    Args:
        path: The file to write.
        seed: Seed of the weights.
        vocab_size: As for `tiny_llama`.
        hidden_size: Width of the residual stream; the inner width is twice that.
        layers: Blocks.
        state_size: State values per inner channel.
        context: The context length the file declares.
        weights: As for `tiny_llama`.
        chat_template: As for `tiny_llama`.
        overrides: As for `tiny_llama`.
        omit: As for `tiny_llama`.

    Returns:
        *path*.
    """
    file = _File("mamba", seed, weights)
    inner, rank, kernel = 2 * hidden_size, max(1, hidden_size // 16), 4
    _common_metadata(file, vocab_size, hidden_size, layers, context, chat_template)
    for key, value in (("conv_kernel", kernel), ("inner_size", inner), ("state_size", state_size)):
        file.set(f"ssm.{key}", value)
    file.set("ssm.time_step_rank", rank)
    _embeddings(file, vocab_size, hidden_size)
    for i in range(layers):
        block = f"blk.{i}"
        file.norms(block, ("attn_norm",), hidden_size)
        file.matrix(f"{block}.ssm_in.weight", (2 * inner, hidden_size))
        file.plain(f"{block}.ssm_conv1d.weight", file.random((inner, kernel), 0.5))
        file.plain(f"{block}.ssm_conv1d.bias", file.random((inner,), 0.1))
        file.matrix(f"{block}.ssm_x.weight", (rank + 2 * state_size, inner))
        file.plain(f"{block}.ssm_dt.weight", file.random((inner, rank), 1.0))
        file.plain(f"{block}.ssm_dt.bias", file.random((inner,), 1.0) - 2)
        file.plain(f"{block}.ssm_a", -np.exp(file.random((inner, state_size), 1.0)))  # negative: the state decays
        file.plain(f"{block}.ssm_d", file.random((inner,), 1.0))
        file.matrix(f"{block}.ssm_out.weight", (hidden_size, inner))
    return file.write(path, overrides, omit)


def tiny_hybrid(
    path: Path,
    *,
    seed: int = 0,
    vocab_size: int = 320,
    hidden_size: int = 64,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 2048,
    weights: str = "F32",
    chat_template: str | None = CHAT_TEMPLATE,
    overrides: Mapping[str, MetadataValue | None] | None = None,
    omit: Collection[str] = (),
) -> Path:
    """
    Write a random model of architecture `qwen35`: even blocks are a gated delta net, odd blocks full attention.

    llama.cpp keeps snapshots of its recurrent state (`n_rs_seq`), so a bounded suffix can be dropped.

    Args:
        path: The file to write.
        seed: Seed of the weights.
        vocab_size: As for `tiny_llama`.
        hidden_size: As for `tiny_llama`.
        layers: Blocks; at least 2 for both kinds to occur.
        heads: Query heads of the attention blocks, 4 or more (llama.cpp aborts on 2); also the delta
            net's value heads.
        kv_heads: Key and value heads; also the delta net's key heads.
        context: The context length the file declares.
        weights: As for `tiny_llama`.
        chat_template: As for `tiny_llama`.
        overrides: As for `tiny_llama`.
        omit: As for `tiny_llama`.

    Returns:
        *path*.
    """
    file = _File("qwen35", seed, weights)
    head = hidden_size // heads
    _common_metadata(file, vocab_size, hidden_size, layers, context, chat_template)
    _attention_metadata(file, heads, kv_heads, head)
    file.set("rope.dimension_count", head // 2)
    file.set("rope.dimension_sections", [head // 4, 0, 0, 0])  # all zero would abort in the rope kernel
    file.set("full_attention_interval", 2)
    for key, value in (("conv_kernel", 4), ("inner_size", head * heads), ("state_size", head)):
        file.set(f"ssm.{key}", value)
    file.set("ssm.time_step_rank", heads)
    file.set("ssm.group_count", kv_heads)
    _embeddings(file, vocab_size, hidden_size)
    for i in range(layers):
        file.norms(f"blk.{i}", ("attn_norm", "post_attention_norm"), hidden_size)
        _feed_forward(file, i, hidden_size)
        if i % 2:
            _attention(file, i, hidden_size, heads, kv_heads, head, gated=True)
            file.norms(f"blk.{i}", ("attn_q_norm", "attn_k_norm"), head)
        else:
            _delta_net(file, i, hidden_size, heads, kv_heads, head)
    return file.write(path, overrides, omit)


@define
class _File:
    """Metadata and tensors of one file, collected before anything is written."""

    architecture: str
    seed: int
    weights: str
    metadata: dict[str, MetadataValue] = field(factory=dict)
    tensors: dict[str, tuple[NDArray[np.float32], str]] = field(factory=dict)  # array in numpy's axis order, type
    _rng: np.random.Generator = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def set(self, key: str, value: MetadataValue) -> None:
        """Set a key of the architecture's own name space."""
        self.metadata[f"{self.architecture}.{key}"] = value

    def random(self, shape: tuple[int, ...], scale: float) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self._rng.standard_normal(shape, np.float32) * np.float32(scale)
        return values

    def plain(self, name: str, values: NDArray[np.float32]) -> None:
        """Add a tensor that llama.cpp's kernels want in F32."""
        self.tensors[name] = (values.astype(np.float32), "F32")

    def matrix(self, name: str, shape: tuple[int, int], gain: float = 1.5) -> None:
        """
        Add a random matrix of the file's weight type; *shape* is (outputs, inputs).

        A gain above 1 keeps block outputs as large as the residual stream: with small blocks each token would
        depend on its predecessor only, and greedy text would fall into a short loop.
        """
        self.tensors[name] = (self.random(shape, gain / np.sqrt(shape[1])), self.weights)

    def norms(self, block: str, names: tuple[str, ...], size: int) -> None:
        """Add norm weights spread around 1."""
        for name in names:
            self.plain(f"{block}.{name}.weight", 1 + self.random((size,), 0.1))

    def write(self, path: Path, overrides: Mapping[str, MetadataValue | None] | None, omit: Collection[str]) -> Path:
        from gguf import GGMLQuantizationType, GGUFWriter, quants

        writer = GGUFWriter(path, self.architecture)
        writer.kv_data[0].clear()  # the architecture is one of our own keys, so that it can be overridden
        for key, value in {**self.metadata, **(overrides or {})}.items():
            if value is not None:
                _add_key(writer, key, value)
        for name, (values, type_name) in self.tensors.items():
            if name not in omit:
                kind = GGMLQuantizationType[type_name]
                writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add_key(writer: Any, key: str, value: MetadataValue) -> None:
    """Write one key with the type llama.cpp expects of it: integers u32, floats f32."""
    if isinstance(value, bool):  # before int: a bool is one
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _common_metadata(
    file: _File, vocab_size: int, hidden_size: int, layers: int, context: int, chat_template: str | None
) -> None:
    file.metadata["general.architecture"] = file.architecture
    file.metadata["general.name"] = f"tiny {file.architecture} {file.seed}"
    file.set("context_length", context)
    file.set("embedding_length", hidden_size)
    file.set("block_count", layers)
    file.set("feed_forward_length", 2 * hidden_size)
    file.set("attention.layer_norm_rms_epsilon", 1e-6)
    tokens, merges = _vocabulary(vocab_size)
    end_of_text, _, end_of_turn = range(len(_CONTROL_TOKENS))
    file.metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL if token in _CONTROL_TOKENS else _NORMAL for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": end_of_text,
        "tokenizer.ggml.eos_token_id": end_of_text,
        "tokenizer.ggml.eot_token_id": end_of_turn,
        "tokenizer.ggml.add_bos_token": False,
    }
    if chat_template is not None:
        file.metadata["tokenizer.chat_template"] = chat_template


def _attention_metadata(file: _File, heads: int, kv_heads: int, head_size: int) -> None:
    file.set("attention.head_count", heads)
    file.set("attention.head_count_kv", kv_heads)
    file.set("attention.key_length", head_size)
    file.set("attention.value_length", head_size)
    file.set("rope.freq_base", 10000.0)


def _embeddings(file: _File, vocab_size: int, hidden_size: int, *, gain: float = 1.5) -> None:
    file.matrix("token_embd.weight", (vocab_size, hidden_size), gain)
    file.plain("output_norm.weight", 1 + file.random((hidden_size,), 0.1))
    # An output matrix of its own: tied to the embedding, a random model mostly repeats its input token.
    file.matrix("output.weight", (vocab_size, hidden_size), gain=4.0)
    file.tensors["output.weight"][0][: len(_CONTROL_TOKENS)] = 0  # greedy text never ends by itself


def _attention(
    file: _File, i: int, hidden_size: int, heads: int, kv_heads: int, head_size: int, *, gated: bool = False
) -> None:
    queries = heads * head_size * (2 if gated else 1)  # a gated block projects query and gate together
    file.matrix(f"blk.{i}.attn_q.weight", (queries, hidden_size))
    file.matrix(f"blk.{i}.attn_k.weight", (kv_heads * head_size, hidden_size))
    file.matrix(f"blk.{i}.attn_v.weight", (kv_heads * head_size, hidden_size))
    file.matrix(f"blk.{i}.attn_output.weight", (hidden_size, heads * head_size))


def _feed_forward(file: _File, i: int, hidden_size: int) -> None:
    file.matrix(f"blk.{i}.ffn_gate.weight", (2 * hidden_size, hidden_size))
    file.matrix(f"blk.{i}.ffn_up.weight", (2 * hidden_size, hidden_size))
    file.matrix(f"blk.{i}.ffn_down.weight", (hidden_size, 2 * hidden_size))


def _delta_net(file: _File, i: int, hidden_size: int, value_heads: int, key_heads: int, head_size: int) -> None:
    block, values = f"blk.{i}", value_heads * head_size
    channels = 2 * key_heads * head_size + values  # query, key and value pass one convolution together
    file.matrix(f"{block}.attn_qkv.weight", (channels, hidden_size))
    file.matrix(f"{block}.attn_gate.weight", (values, hidden_size))
    file.plain(f"{block}.ssm_conv1d.weight", file.random((channels, 4), 0.5))
    file.plain(f"{block}.ssm_dt.bias", file.random((value_heads,), 1.0) - 2)
    file.plain(f"{block}.ssm_a", -np.exp(file.random((value_heads,), 0.5)))  # negative: the state decays
    file.matrix(f"{block}.ssm_beta.weight", (value_heads, hidden_size))
    file.matrix(f"{block}.ssm_alpha.weight", (value_heads, hidden_size))
    file.plain(f"{block}.ssm_norm.weight", 1 + file.random((head_size,), 0.1))
    file.matrix(f"{block}.ssm_out.weight", (hidden_size, values))


def _vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level vocabulary: control ids, one id a byte, then merges of letters."""
    base = [*_CONTROL_TOKENS, *_byte_symbols()]
    if size < len(base):
        raise ValueError(f"vocab_size is {size}, expected {len(base)} or more: every byte needs an id")
    merges = list(islice(_merges(), size - len(base)))
    if len(base) + len(merges) < size:
        raise ValueError(f"vocab_size is {size}, expected {len(base) + len(merges)} or less")
    return [*base, *("".join(pair) for pair in merges)], [" ".join(pair) for pair in merges]


def _byte_symbols() -> list[str]:
    """The printable stand-in of each byte in GPT-2's byte-level vocabularies, by byte value."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(code) for code in range(0x100, 0x200))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def _merges() -> Iterator[tuple[str, str]]:
    pairs = list(product(_MERGE_LETTERS, _MERGE_LETTERS))
    yield from pairs
    for (first, second), third in product(pairs, _MERGE_LETTERS):
        yield first + second, third
