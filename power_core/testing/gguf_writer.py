"""What the factories of tiny GGUF files share: a file collected in memory, and the parts of models."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice, product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

__all__ = [
    "CHAT_TEMPLATE",
    "CONTROL_TOKENS",
    "GgufFile",
    "MetadataValue",
    "add_attention",
    "add_attention_metadata",
    "add_delta_net",
    "add_embeddings",
    "add_feed_forward",
    "add_hybrid_metadata",
    "add_nextn",
    "add_sizes",
    "add_vocabulary",
]

MetadataValue: TypeAlias = "int | float | bool | str | list[int] | list[float] | list[bool] | list[str]"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat template the factories write by default (ChatML)."""

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
_NORMAL, _CONTROL = 1, 3  # gguf's token types
_MERGE_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"  # by frequency in English, so that small vocabularies merge often


@define
class GgufFile:
    """
    Metadata and tensors of one file, collected before anything is written.

    Args:
        architecture: `general.architecture`.
        seed: Seed of the weights.
        weights: ggml type of the matrices.
    """

    architecture: str
    seed: int
    weights: str
    metadata: dict[str, MetadataValue] = field(factory=dict)
    tensors: dict[str, tuple[NDArray[np.float32], str]] = field(factory=dict)  # array in numpy's axis order, type
    tables: dict[str, NDArray[np.int64]] = field(factory=dict)
    _rng: np.random.Generator = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def set(self, key: str, value: MetadataValue) -> None:
        """Set a key of the architecture's own name space."""
        self.metadata[f"{self.architecture}.{key}"] = value

    def random(self, shape: tuple[int, ...], scale: float) -> NDArray[np.float32]:
        """Normal deviates."""
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

    def integers(self, name: str, values: NDArray[np.int64]) -> None:
        """Add a table of ids."""
        self.tables[name] = values

    def norms(self, block: str, names: tuple[str, ...], size: int) -> None:
        """Add norm weights spread around 1."""
        for name in names:
            self.plain(f"{block}.{name}.weight", 1 + self.random((size,), 0.1))

    def write(
        self,
        path: Path,
        overrides: Mapping[str, MetadataValue | None] | None,
        omit: Collection[str],
        replace: Mapping[str, NDArray[np.generic]] | None = None,
    ) -> Path:
        """
        Write the file.

        Args:
            path: Where to.
            overrides: Keys to replace or add; None leaves a key out.
            omit: Tensors to leave out.
            replace: Tensors to replace or add, in their numpy type.
        """
        from gguf import GGMLQuantizationType, GGUFWriter, quants

        writer = GGUFWriter(path, self.architecture)
        writer.kv_data[0].clear()  # the architecture is one of our own keys, so that it can be overridden
        for key, value in {**self.metadata, **(overrides or {})}.items():
            if value is not None:
                _add_key(writer, key, value)
        raw = {**self.tables, **(replace or {})}
        for name, (values, type_name) in self.tensors.items():
            if name not in omit and name not in raw:
                kind = GGMLQuantizationType[type_name]
                writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
        for name, array in raw.items():
            if name in omit:
                continue
            writer.add_tensor(name, np.ascontiguousarray(array))
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


def add_sizes(file: GgufFile, hidden_size: int, layers: int, context: int) -> None:
    """The keys every architecture has."""
    file.metadata["general.architecture"] = file.architecture
    file.metadata["general.name"] = f"tiny {file.architecture} {file.seed}"
    file.set("context_length", context)
    file.set("embedding_length", hidden_size)
    file.set("block_count", layers)
    file.set("feed_forward_length", 2 * hidden_size)
    file.set("attention.layer_norm_rms_epsilon", 1e-6)


def add_vocabulary(file: GgufFile, size: int, chat_template: str | None) -> None:
    """A byte-level vocabulary of *size* ids that encodes any text."""
    tokens, merges = _vocabulary(size)
    end_of_text, _, end_of_turn = range(len(CONTROL_TOKENS))
    file.metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL if token in CONTROL_TOKENS else _NORMAL for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": end_of_text,
        "tokenizer.ggml.eos_token_id": end_of_text,
        "tokenizer.ggml.eot_token_id": end_of_turn,
        "tokenizer.ggml.add_bos_token": False,
    }
    if chat_template is not None:
        file.metadata["tokenizer.chat_template"] = chat_template


def add_attention_metadata(file: GgufFile, heads: int, kv_heads: int, head_size: int) -> None:
    """Head counts and sizes."""
    file.set("attention.head_count", heads)
    file.set("attention.head_count_kv", kv_heads)
    file.set("attention.key_length", head_size)
    file.set("attention.value_length", head_size)
    file.set("rope.freq_base", 10000.0)


def add_embeddings(file: GgufFile, vocab_size: int, hidden_size: int, *, gain: float = 1.5) -> None:
    """Embedding, final norm and an untied output matrix."""
    file.matrix("token_embd.weight", (vocab_size, hidden_size), gain)
    file.plain("output_norm.weight", 1 + file.random((hidden_size,), 0.1))
    # An output matrix of its own: tied to the embedding, a random model mostly repeats its input token.
    file.matrix("output.weight", (vocab_size, hidden_size), gain=4.0)
    file.tensors["output.weight"][0][: len(CONTROL_TOKENS)] = 0  # greedy text never ends by itself


def add_attention(
    file: GgufFile, i: int, hidden_size: int, heads: int, kv_heads: int, head_size: int, *, gated: bool = False
) -> None:
    """The four projections of block *i*; with *gated*, Qwen3.5's query matrix that holds a gate beside each head."""
    queries = heads * head_size * (2 if gated else 1)  # a gated block projects query and gate together
    file.matrix(f"blk.{i}.attn_q.weight", (queries, hidden_size))
    file.matrix(f"blk.{i}.attn_k.weight", (kv_heads * head_size, hidden_size))
    file.matrix(f"blk.{i}.attn_v.weight", (kv_heads * head_size, hidden_size))
    file.matrix(f"blk.{i}.attn_output.weight", (hidden_size, heads * head_size))


def add_feed_forward(file: GgufFile, i: int, hidden_size: int) -> None:
    """A SwiGLU of twice the hidden size."""
    file.matrix(f"blk.{i}.ffn_gate.weight", (2 * hidden_size, hidden_size))
    file.matrix(f"blk.{i}.ffn_up.weight", (2 * hidden_size, hidden_size))
    file.matrix(f"blk.{i}.ffn_down.weight", (hidden_size, 2 * hidden_size))


def add_delta_net(file: GgufFile, i: int, hidden_size: int, value_heads: int, key_heads: int, head_size: int) -> None:
    """A gated delta net, Qwen3.5's linear attention."""
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


def add_hybrid_metadata(file: GgufFile, heads: int, kv_heads: int, head_size: int, nextn_layers: int) -> None:
    """Qwen3.5's keys: even blocks are a delta net with as many value heads as there are query heads."""
    add_attention_metadata(file, heads, kv_heads, head_size)
    file.set("rope.dimension_count", head_size // 2)
    file.set("rope.dimension_sections", [head_size // 4, 0, 0, 0])  # all zero would abort in the rope kernel
    file.set("full_attention_interval", 2)
    for key, value in (("conv_kernel", 4), ("inner_size", head_size * heads), ("state_size", head_size)):
        file.set(f"ssm.{key}", value)
    file.set("ssm.time_step_rank", heads)
    file.set("ssm.group_count", kv_heads)
    if nextn_layers:
        file.set("nextn_predict_layers", nextn_layers)


def add_nextn(file: GgufFile, i: int, hidden_size: int, heads: int, kv_heads: int, head_size: int) -> None:
    """A prediction block: a gated attention block over embedding and state, joined by a projection."""
    file.norms(f"blk.{i}", ("attn_norm", "post_attention_norm", "nextn.enorm", "nextn.hnorm"), hidden_size)
    add_attention(file, i, hidden_size, heads, kv_heads, head_size, gated=True)
    file.norms(f"blk.{i}", ("attn_q_norm", "attn_k_norm"), head_size)
    add_feed_forward(file, i, hidden_size)
    file.matrix(f"blk.{i}.nextn.eh_proj.weight", (hidden_size, 2 * hidden_size))
    file.norms(f"blk.{i}", ("nextn.shared_head_norm",), hidden_size)


def _vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level vocabulary: control ids, one id a byte, then merges of letters."""
    base = [*CONTROL_TOKENS, *_byte_symbols()]
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
