"""Hidden states: every row of the batch, the block's own output, and nothing else changed by reading them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray
from power_llamacpp.config import LlamaCppConfig
from power_llamacpp.context import NativeModel
from power_llamacpp.gguf_check import check_gguf
from power_llamacpp.session import LlamaCppSession
from power_llamacpp.target import LlamaCppBackend, LlamaCppModel

from power_core.artifacts.gguf import GgufFile
from power_core.draft_context import NEXTN_STATE
from power_core.errors import BackendError, CapabilityError
from power_core.shapes import ExactnessLevel, ShapeIdentity, ShapeProfile, WidthClass
from power_core.target import RowBatch, SessionOptions, SharedWeights
from power_core.testing.gguf import tiny_gemma3, tiny_hybrid, tiny_llama

pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")

Opened: TypeAlias = "Callable[..., LlamaCppSession]"
TOKENS = np.random.default_rng(6).integers(3, 320, 64).tolist()


def profile_of(low: int) -> ShapeProfile:
    shape = WidthClass(ShapeIdentity("measured elsewhere"), tuple(range(low, 65)))
    return ShapeProfile(ExactnessLevel.PADDED, shape, shape)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("m") / "llama.gguf", layers=4)


@pytest.fixture(scope="module")
def nextn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hybrid(tmp_path_factory.mktemp("m") / "nextn.gguf", nextn_layers=1)


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Makes sessions with three open sequences; *low* is the narrowest width their rows may be computed at."""
    models: list[LlamaCppModel] = []

    def make(path: Path, layers: tuple[int, ...], *, low: int = 1, **options: Any) -> LlamaCppSession:
        models.append(LlamaCppModel(path, check_gguf(path), LlamaCppConfig(), profile=profile_of(low)))
        options = {"context_size": 128, "max_sequences": 3, "threads": 1, "hidden_layers": layers, **options}
        session = models[-1].open_session(SessionOptions(**options))
        for seq in range(session.max_sequences):
            session.open(seq)
        return session

    yield make
    for model in models:
        model.close()


def run(session: LlamaCppSession, chains: dict[int, list[int]], outputs: int = 1) -> Any:
    batch = RowBatch(256)
    for seq, tokens in chains.items():
        batch.add_chain(seq, session.length(seq), tokens, outputs)
    return session.forward(batch, session.profile.decode)


@pytest.mark.parametrize("kind", ["llama", "nextn"])
def test_reading_hidden_states_changes_no_bit(kind: str, request: pytest.FixtureRequest, opened: Opened) -> None:
    """Logits with every available tap on are those without: the profile measured without them holds with them."""
    path = request.getfixturevalue(kind)
    layers = (0, 1, 2) if kind == "llama" else (NEXTN_STATE, 0, 1, 2)
    plain, tapped = opened(path, ()), opened(path, layers)
    assert plain.profile == tapped.profile
    for start, count in ((0, 20), (20, 1), (21, 1), (22, 8), (30, 5)):
        pair = [run(session, {0: TOKENS[start : start + count]}, count) for session in (plain, tapped)]
        for i in range(count):
            assert np.array_equal(pair[0].logits(i), pair[1].logits(i))


@pytest.mark.model
def test_reading_hidden_states_of_a_real_model_changes_no_bit(smollm2: Path) -> None:
    """The same on SmolLM2, for the blocks its drafters read."""
    weights, info = NativeModel(smollm2), check_gguf(smollm2)
    sessions = [
        LlamaCppSession(
            weights, SessionOptions(context_size=64, threads=1, hidden_layers=layers), profile=profile_of(1),
            config=LlamaCppConfig(), info=info,
        )
        for layers in ((), (1, 10, 19, 28))
    ]  # fmt: skip
    for session in sessions:
        session.open(0)
    for tokens in ([504, 3575, 282, 4649, 314], [260], [1, 2, 3, 4]):
        rows = [run(session, {0: tokens}, len(tokens)) for session in sessions]
        for i in range(len(tokens)):
            assert np.array_equal(rows[0].logits(i), rows[1].logits(i))
    assert np.isfinite(rows[1].hidden(slice(0, 4), 28)).all()
    weights.close()


class Blocks:
    """The blocks of a Llama in numpy: outputs of every block for one sequence from position 0 on."""

    def __init__(self, path: Path) -> None:
        file = GgufFile.open(path)
        self.weights = {name: file.read(name).astype(np.float64) for name in file.tensors}
        self.heads, self.kv_heads = (int(file.metadata[f"llama.attention.head_count{end}"]) for end in ("", "_kv"))

    def norm(self, values: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-6) * self.weights[f"{name}.weight"]

    def turned(self, values: NDArray[np.float64], heads: int) -> NDArray[np.float64]:
        """Llama's rotary embedding in GGUF order: neighbouring dimensions are a pair."""
        pairs = values.reshape(len(values), heads, -1, 2)
        size = pairs.shape[2]
        angles = np.arange(len(values))[:, None, None] * 10000.0 ** (-np.arange(size) / size)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(len(values), heads, -1)

    def outputs(self, tokens: list[int], count: int) -> list[NDArray[np.float64]]:
        rows, found = self.weights["token_embd.weight"][tokens], []
        causal = np.tri(len(tokens), dtype=bool)
        for i in range(count):
            q, k, v, out = (self.weights[f"blk.{i}.attn_{name}.weight"].T for name in ("q", "k", "v", "output"))
            normed = self.norm(rows, f"blk.{i}.attn_norm")
            groups = self.heads // self.kv_heads
            keys = np.repeat(self.turned(normed @ k, self.kv_heads), groups, axis=1)
            values = np.repeat((normed @ v).reshape(len(rows), self.kv_heads, -1), groups, axis=1)
            queries = self.turned(normed @ q, self.heads)
            scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(keys.shape[2])
            weights = np.exp(np.where(causal, scores, -np.inf))
            mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values)
            rows = rows + mixed.reshape(len(rows), -1) @ out
            normed = self.norm(rows, f"blk.{i}.ffn_norm")
            gate, up, down = (self.weights[f"blk.{i}.ffn_{name}.weight"].T for name in ("gate", "up", "down"))
            gated = normed @ gate
            rows = rows + (gated / (1 + np.exp(-gated)) * (normed @ up)) @ down
            found.append(rows)
        return found


def test_a_state_is_the_output_of_its_block(llama: Path, opened: Opened) -> None:
    """Block l's number is its place in the file, counted from 0; the states are those of a forward in numpy."""
    session = opened(llama, (0, 1, 2))
    rows = run(session, {0: TOKENS[:16]})
    for layer, expected in enumerate(Blocks(llama).outputs(TOKENS[:16], 3)):
        np.testing.assert_allclose(rows.hidden(slice(0, 16), layer), expected, rtol=2e-2, atol=2e-2)  # f16 cache


@pytest.mark.parametrize("low", [1, 8])
@pytest.mark.parametrize("kind", ["llama", "nextn"])
def test_every_row_has_the_state_it_has_alone(
    kind: str, low: int, request: pytest.FixtureRequest, opened: Opened
) -> None:
    """Prompt rows without outputs, pad rows and rows of other sequences: row i of the batch is row i of the states."""
    path = request.getfixturevalue(kind)
    layer = 1 if kind == "llama" else NEXTN_STATE
    together, apart = opened(path, (layer,), low=low), opened(path, (layer,), low=low)
    chains = {0: TOKENS[:4], 1: TOKENS[10:14], 2: TOKENS[20:24]}
    for _ in range(2):
        rows = run(together, chains)
        states = [run(apart, {seq: tokens}).hidden(slice(0, 4), layer).copy() for seq, tokens in chains.items()]
        np.testing.assert_allclose(rows.hidden(slice(0, 12), layer), np.concatenate(states), rtol=1e-5, atol=1e-5)
        assert np.array_equal(rows.hidden(5, layer), rows.hidden(slice(0, 12), layer)[5])
        with pytest.raises(BackendError, match="there is no row 12"):
            rows.hidden(12, layer)


def test_states_are_views_that_end_with_the_forward(llama: Path, opened: Opened) -> None:
    """They survive cuts, cannot be written to, and are an error after the next forward, as logits are."""
    session = opened(llama, (2,))
    rows = run(session, {0: TOKENS[:6]})
    kept = rows.hidden(slice(0, 6), 2).copy()
    session.truncate(0, 3)
    assert np.array_equal(kept, rows.hidden(slice(0, 6), 2))
    assert not rows.hidden(0, 2).flags.writeable
    with pytest.raises(CapabilityError, match=r"no hidden states of layer 1 .expected one of .2.."):
        rows.hidden(0, 1)
    run(session, {0: TOKENS[:1]})
    with pytest.raises(BackendError, match="these rows are gone"):
        rows.hidden(0, 2)


def test_outputs_of_all_sizes_keep_the_states_apart(llama: Path, opened: Opened) -> None:
    """llama.cpp moves its output memory with the number of outputs; states stay those of their own forward."""
    session, other = opened(llama, (0,)), opened(llama, (0,))
    for count, outputs in ((8, 0), (8, 8), (3, 1), (40, 2), (1, 1)):
        start = session.length(0)
        tokens = TOKENS[start : start + count]
        rows, expected = run(session, {0: tokens}, outputs), run(other, {0: tokens}, count)
        assert np.array_equal(rows.hidden(slice(0, count), 0), expected.hidden(slice(0, count), 0))


def test_architectures_without_hidden_states_are_refused(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp would abort at the next decode; the refusal comes before weights are loaded."""
    path = tiny_gemma3(tmp_path / "g.gguf")
    model = LlamaCppBackend(LlamaCppConfig()).load(path)
    monkeypatch.setattr("power_llamacpp.target.NativeModel", lambda *_a, **_k: pytest.fail("loaded"))
    with pytest.raises(CapabilityError, match="no hidden states of architecture 'gemma3'") as caught:
        model.open_session(SessionOptions(hidden_layers=(1,), threads=1))
    assert "\n" not in str(caught.value)
    model.close()


def test_last_block_is_refused_with_the_blocks_there_are(llama: Path, opened: Opened) -> None:
    """The last block's output is the input of none."""
    with pytest.raises(CapabilityError, match=r"does not give the output of block 3 .expected blocks 0 to 2"):
        opened(llama, (0, 3))


def test_capabilities_are_what_was_asked_for(llama: Path, nextn: Path, opened: Opened) -> None:
    """A session offers states and draft contexts only where it was opened with layers to read."""
    names = {"hidden-states", "nextn", "draft-context"}
    assert not names & opened(llama, ()).capabilities
    assert names & opened(llama, (0,)).capabilities == {"hidden-states", "draft-context"}
    assert names & opened(nextn, (NEXTN_STATE,)).capabilities == names


@pytest.mark.parametrize("kept", [1, 3, 7, 8])
def test_hybrid_targets_undo_more_rows_than_they_keep_states(kept: int, nextn: Path, opened: Opened) -> None:
    """With 8 proposals over 2 resident states: any number accepted gives what a straight run gives, states too."""
    session, straight = opened(nextn, (NEXTN_STATE,), rollback_rows=2), opened(nextn, (NEXTN_STATE,))
    for one in (session, straight):
        run(one, {0: TOKENS[:4]})
    point = session.checkpoint(0, 9)
    run(session, {0: [TOKENS[4], *TOKENS[40:48]]}, 9)
    assert session.can_truncate(0, 4 + kept) == (9 - kept <= 2)
    session.restore(0, point)
    for one in (session, straight):
        run(one, {0: TOKENS[4 : 4 + kept]})
    pair = [run(one, {0: TOKENS[20:24]}, 4) for one in (session, straight)]
    for i in range(4):
        assert np.array_equal(pair[0].logits(i), pair[1].logits(i))
        assert np.array_equal(pair[0].hidden(i, NEXTN_STATE), pair[1].hidden(i, NEXTN_STATE))


def test_shared_matrices_are_those_of_the_file(llama: Path, tmp_path: Path) -> None:
    """Dequantized once and kept, read-only; tied weights are one array for both names."""
    model = LlamaCppBackend(LlamaCppConfig()).load(llama)
    assert isinstance(model, SharedWeights)
    for which in ("token_embd", "output"):
        matrix = model.matrix(which)
        assert np.array_equal(matrix, GgufFile.open(llama).read(f"{which}.weight"))
        assert matrix is model.matrix(which)
        assert not matrix.flags.writeable
    model.close()
    tied = LlamaCppBackend(LlamaCppConfig()).load(
        tiny_llama(tmp_path / "t.gguf", weights="Q8_0", omit={"output.weight"})
    )
    assert tied.matrix("output") is tied.matrix("token_embd")
    assert tied.matrix("output").shape == (320, 64)
    assert tied.matrix("output").dtype == np.float32
    tied.close()
