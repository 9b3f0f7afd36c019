"""What is exported is what was trained: by contract, by the torch toolkit and by llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from power_torch.drafting import BackboneShape, BlockBackbone, KvRing, load_backbone
from power_torch.weights import ModelWeights
from power_train.batches import load_batch
from power_train.cli import convert
from power_train.dataset import Dataset
from power_train.evaluate import drafts_of
from power_train.export import exported
from power_train.read import read_drafter
from power_train.setup import KINDS, Trainable
from power_train.write import Quantization, write_gguf, write_safetensors

from power_core.artifacts import open_tensors
from power_core.artifacts.matching import checked_facts, installed_contracts, match_contract
from power_core.cli.state import State
from power_core.draft_context import DraftBlock, DraftContextHost, DraftRows
from power_core.runtime import Runtime
from power_core.target import SessionOptions

LAYERS, VOCAB = (0, 2), 320
Made = Callable[[str], Trainable]
BLOCK_KINDS = ("dflash-v1", "dflash2", "dspark")


def written(trainable: Trainable, folder: Path, quantization: Quantization = Quantization.F32) -> Path:
    drafter = exported(trainable, context=512, tokenizer_sha256="")
    return write_gguf(folder / f"{trainable.module.shape.kind}.gguf", drafter, quantization)


@pytest.mark.parametrize("kind", KINDS)
def test_files_keep_their_contracts_and_their_content(kind: str, made: Made, tmp_path: Path) -> None:
    """Either container is recognised as its kind and read back with the same settings and numbers."""
    trainable = made(kind)
    drafter = exported(trainable, context=512, tokenizer_sha256="ab" * 32)
    contracts = installed_contracts(State().plugins.registry)
    paths = [write_gguf(tmp_path / f"{q}.gguf", drafter, q) for q in Quantization]
    for path in [*paths, write_safetensors(tmp_path / "published", drafter)]:
        file = open_tensors(path)
        contract = match_contract(file, contracts)
        facts = checked_facts(file, contract, payload=True)
        assert (contract.kind, facts.hidden_layers, facts.draft_vocab_size) == (kind, LAYERS, 96)
        back = read_drafter(file, kind, facts)
        assert set(back.tensors) == set(drafter.tensors)
        for name, value in drafter.tensors.items():
            room = 0.13 if "q4" in path.name else 0.01
            assert np.abs(back.tensors[name] - value).max() <= room * max(1e-6, np.abs(value).max()), name
        assert back.settings.epsilon == pytest.approx(drafter.settings.epsilon)
        for name in ("layers", "block_size", "mask_id", "tokenizer_sha256", "rank", "top_k", "from_anchor", "context"):
            assert getattr(back.settings, name) == getattr(drafter.settings, name), name


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_training_computes_what_the_executor_computes(
    kind: str, made: Made, weights: ModelWeights, dataset: Dataset, tmp_path: Path
) -> None:
    """The hidden states of a block are those of the toolkit's backbone over the exported file, up to bfloat16."""
    trainable = made(kind)
    module, batch = trainable.module, load_batch(dataset, dataset.sequences[:1])
    anchor = int(batch.answers[0]) + 3
    with torch.no_grad():
        expected = module.hidden(batch.features, batch.tokens, torch.tensor([[anchor]]), 4)[0, 0]
    shape = module.shape
    backbone_shape = BackboneShape(
        shape.hidden, 1, shape.heads, shape.kv_heads, shape.head_dim, shape.epsilon, shape.rope_base, shape.head_dim,
        (None,), shape.group,
    )  # fmt: skip
    backbone = BlockBackbone(
        load_backbone(open_tensors(written(trainable, tmp_path)), backbone_shape),
        KvRing(layers=1, kv_heads=shape.kv_heads, head_dim=shape.head_dim, cap=64, max_sequences=1),
    )
    backbone.ring.open(0)
    backbone.fold(0, 0, batch.features[0, :anchor].float())
    tokens = torch.tensor([int(batch.tokens[0, anchor]), *[shape.mask_id] * 3])
    found = backbone.forward([0], [anchor], weights.token_embd[tokens].float()[None])[0]
    assert torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_llama_cpp_proposes_what_training_measured(
    kind: str, target: Path, made: Made, dataset: Dataset, tmp_path: Path
) -> None:
    """Native rounds over the text's own features propose the tokens that the offline measure counts."""
    trainable = made(kind)
    path, drafts = written(trainable, tmp_path), drafts_of(trainable.module, trainable.vocabulary, trainable.matrix)
    agreed = total = 0
    with Runtime() as runtime:
        model = runtime.load_target(target)
        session = model.open_session(SessionOptions(context_size=128, hidden_layers=LAYERS, threads=1))
        assert isinstance(session, DraftContextHost)
        context = session.open_draft_context(path)
        context.open(0)
        for item in dataset.sequences[:6]:
            batch = load_batch(dataset, [item])
            anchor = int(batch.answers[0]) + 2
            if anchor >= item.length - 1:
                continue
            with torch.no_grad():
                expected = drafts(batch, torch.tensor([[anchor]]), 1)[0, 0, 0]
            context.truncate(0, 0)
            context.inject(0, 0, batch.features[0, :anchor].float().numpy())
            tokens = [int(batch.tokens[0, anchor]), *[trainable.module.shape.mask_id] * 3]
            rows = context.forward([DraftBlock(0, anchor, tokens)], logits=kind != "dflash2")
            agreed += first_proposal(kind, trainable, rows) == int(expected)
            total += 1
        context.shutdown()
        session.shutdown()
        model.close()
    assert total >= 4
    assert agreed >= total - 1  # bfloat16 may turn a near tie


def first_proposal(kind: str, trainable: Trainable, rows: DraftRows) -> int:
    """The first token a plugin would propose from the rows of a block."""
    if kind == "dflash2":
        k = trainable.module.shape.top_k
        lattice = rows.extra(1)
        return int(lattice[int(np.argmax(lattice[k : 2 * k]))])
    logits = rows.logits(trainable.module.first_row)
    assert len(logits) == VOCAB
    return int(np.argmax(logits))


def test_conversion_goes_both_ways(made: Made, tmp_path: Path) -> None:
    """GGUF to safetensors and back holds the same tensors; a DST that exists or a wrong --quant exits with 2."""
    source = written(made("dspark"), tmp_path, Quantization.F16)

    def converted(*arguments: str) -> int:
        return CliRunner().invoke(convert, [*map(str, arguments)], obj=State()).exit_code

    assert converted(source, tmp_path / "folder") == 0
    assert converted(tmp_path / "folder", tmp_path / "back.gguf") == 0
    one, two = open_tensors(source), open_tensors(tmp_path / "back.gguf")
    assert all(np.array_equal(one.read(name), two.read(name)) for name in one.tensors)
    assert {k: v for k, v in one.metadata.items() if not isinstance(v, np.ndarray)} == {
        k: v for k, v in two.metadata.items() if not isinstance(v, np.ndarray)
    }
    assert converted(source, tmp_path / "folder") == 2
    assert converted(source, tmp_path / "other", "--quant", "q8_0") == 2
