"""Text that the target writes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from power_torch.weights import ModelWeights
from power_train.attention import _compiled, _torch_attention, decode_attention
from power_train.dataset import Dataset, open_dataset, write_header
from power_train.decode import BatchDecoder

from power_core.errors import ArtifactError


def test_compiled_attention_leaves_the_process_its_subnormals() -> None:
    """A target decoded in the same process computes what it computed before: nothing is flushed to zero."""
    code = (
        "import numpy as np; from power_train.attention import _compiled; _compiled(16);"
        "assert np.float32(1e-30) * np.float32(1e-10) != 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_both_attentions_agree() -> None:
    """The C loop and torch's function compute the same; sequences have different lengths."""
    if _compiled(16) is None:
        pytest.skip("needs a C compiler")
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 2, 3, 16, generator=generator)
    k, v = (torch.randn(5, 2, 9, 16, generator=generator).bfloat16() for _ in range(2))
    lengths = torch.tensor([1, 9, 4, 2, 7], dtype=torch.int32)
    out = decode_attention(16, 0.25)(q, k, v, lengths)
    assert torch.allclose(out, _torch_attention(0.25)(q, k, v, lengths), atol=1e-5)


def test_a_slot_does_not_see_its_neighbours(weights: ModelWeights) -> None:
    """The same tokens give the same states in any slot, whatever the others hold; a reset slot forgets."""
    decoder = BatchDecoder(weights, (0, 2), slots=3, capacity=8)
    states = []
    for others in (5, 200):
        for position, token in enumerate((1, 40, 60)):
            tokens = torch.tensor([others + position, token, others])
            features, final = decoder.step(tokens, torch.full((3,), position))
        states.append((features[1], final[1]))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])


def test_sequences_are_what_the_features_say(weights: ModelWeights, dataset: Dataset) -> None:
    """Every greedy token of an answer is the likeliest under the final state kept for the row before it."""
    greedy = [item for item in dataset.sequences if not item.is_sampled]
    for item in greedy:
        tokens = dataset.tokens(item)
        final = torch.from_numpy(np.array(dataset.final(item)).view(np.int16)).view(torch.bfloat16)
        likeliest = (final @ weights.output.T).float().argmax(-1).numpy()
        answer = slice(item.prompt_length, item.length)
        assert np.array_equal(tokens[answer], likeliest[item.prompt_length - 1 : item.length - 1])
    assert any(item.is_sampled for item in dataset.sequences)


def test_an_interrupted_run_continues(generated: Callable[..., Dataset], tmp_path: Path) -> None:
    """What was finished stays, a torn sequence is cut off, and every prompt is answered once."""
    first = generated(tmp_path, tokens=40)
    kept = [first.tokens(item).tolist() for item in first.sequences]
    with (tmp_path / "shard-0" / "features.bin").open("ab") as file:
        file.write(b"torn")
    whole = generated(tmp_path)
    assert [whole.tokens(item).tolist() for item in whole.sequences][: len(kept)] == kept
    assert sorted(item.prompt for item in whole.sequences) == list(range(1, 25))
    assert whole.features(whole.sequences[-1]).shape[0] == whole.sequences[-1].length


def test_a_runs_own_folder_is_known_again(tmp_path: Path) -> None:
    """A header is compared as JSON reads it back: a target's adapters are a tuple here and a list there."""
    header = {"seed": 1, "target": {"adapters": (), "layers": (0, 2), "temperature": 0.7}}
    write_header(tmp_path, header)
    write_header(tmp_path, header)
    with pytest.raises(ArtifactError, match="another target"):
        write_header(tmp_path, {**header, "target": {**header["target"], "adapters": ({"scale": 1.0},)}})


def test_another_runs_folder_is_refused(tmp_path: Path) -> None:
    """A folder of text belongs to one seed, text and target; the error names what differs."""
    write_header(tmp_path, {"seed": 1, "hidden_size": 4})
    with pytest.raises(ArtifactError, match="another seed"):
        write_header(tmp_path, {"seed": 2, "hidden_size": 4})
    (tmp_path / "dataset.json").unlink()
    with pytest.raises(ArtifactError, match=r"no dataset\.json"):
        open_dataset(tmp_path)
