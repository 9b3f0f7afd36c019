"""The native executor: the prediction layer of a generated qwen35 target, and one in a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from power_mtp.config import MtpConfig
from power_mtp.drafter import MtpDrafter
from power_mtp.executor import HeadBlock
from power_mtp.native import NativeHead

from power_core.artifacts import Provenance
from power_core.artifacts.admission import admit
from power_core.artifacts.matching import installed_contracts
from power_core.config import PowerConfig
from power_core.engine import Engine
from power_core.errors import CapabilityError, PowerError
from power_core.request import Result
from power_core.runtime import Runtime
from power_core.testing.gguf import tiny_hybrid, tiny_llama
from power_core.testing.gguf_drafts import tiny_mtp

pytest.importorskip("power_llamacpp")
PROMPTS = ("Once upon a time there was", "x", "alpha beta gamma " * 20)
SECTIONS = {"llamacpp": {"flash_attention": "off"}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "nextn": tiny_hybrid(folder / "nextn.gguf", nextn_layers=1),
        "hybrid": tiny_hybrid(folder / "hybrid.gguf"),
        "llama": tiny_llama(folder / "llama.gguf"),
    }


@pytest.fixture
def opened(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """``opened("nextn", draft_max=3)``: an engine that drafts with `mtp`."""
    monkeypatch.setenv("POWER_ARTIFACTS_DIR", str(tmp_path / "artifacts"))
    runtimes = []

    def call(kind: str, section: dict[str, Any] | None = None, snapshots: int = 8, **options: Any) -> Engine:
        config = PowerConfig(sections=SECTIONS | {"mtp": section or {}}, spec_mtp_recurrent_snapshots=snapshots)
        runtime = Runtime(config)
        runtimes.append(runtime)
        options = {"spec": "mtp", "width_policy": "fixed", "threads": 1, "context_size": 512} | options
        return runtime.open(str(models[kind]), **options)

    yield call
    for runtime in runtimes:
        runtime.close()


def answers(engine: Engine, **options: Any) -> list[Result]:
    return [engine.complete(prompt, max_tokens=60, **options) for prompt in PROMPTS]


@pytest.mark.parametrize(("k", "snapshots"), [(1, 8), (3, 8), (7, 8), (7, 2), (15, 4)])
def test_native_drafts_change_no_token(opened: Callable[..., Engine], k: int, snapshots: int) -> None:
    """Ids equal those of plain decoding for each K; a rejection deeper than the window is replayed once."""
    engine = opened("nextn", snapshots=snapshots, draft_max=k)
    drafted, plain = answers(engine), answers(engine, spec="off")
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    counts = [result.counts for result in drafted]
    assert all(count.drafted > 0 for count in counts)
    assert any(count.replays for count in counts) == (k > snapshots)


def test_seeded_sampling_and_batches_change_no_token(opened: Callable[..., Engine]) -> None:
    """The stream of a seed is the same with drafts, also where three requests share the steps."""
    engine = opened("nextn", draft_max=5, parallel=3)
    options = {"temperature": 0.9, "seed": 5, "max_tokens": 40}
    plain = [engine.complete(prompt, spec="off", **options) for prompt in PROMPTS]
    streams = [engine.generate(prompt, **options) for prompt in PROMPTS]
    for stream, expected in zip(streams, plain, strict=True):
        assert tuple(event.token_id for event in stream if event.token_id is not None) == expected.token_ids


def admitted(path: Path, target: Path, name: str) -> None:
    """Admit *path* for *target*, as `power artifacts admit` does."""
    with Runtime(PowerConfig(sections=SECTIONS)) as runtime:
        model = runtime.load_target(target)
        try:
            contracts = installed_contracts(runtime.registry)
            admit(path, name=name, target=model, provenance=Provenance("made here", "1", "CC0"), contracts=contracts)
        finally:
            model.close()


def test_a_layer_in_a_file_of_its_own(opened: Callable[..., Engine], models: dict[str, Path], tmp_path: Path) -> None:
    """An admitted MTP-only file is taken instead of the target's own layer: it drafts otherwise, the ids stay."""
    own = opened("nextn", draft_max=3)
    plain, before = answers(own, spec="off"), answers(own)
    admitted(tiny_mtp(tmp_path / "mtp.gguf", trunk_layers=4), models["nextn"], "tiny")
    drafted = answers(opened("nextn", draft_max=3))
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert all(result.counts.drafted > 0 for result in drafted)
    assert [result.receipt["body"]["artifacts"][0]["name"] for result in drafted] == ["tiny"] * len(PROMPTS)
    assert "artifacts" not in before[0].receipt["body"]


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_targets_without_a_layer_say_what_is_missing(opened: Callable[..., Engine], kind: str) -> None:
    """No silent substitute: a model without NextN and without an admitted head is an error of one line."""
    with pytest.raises(PowerError) as caught:
        opened(kind)
    for part in ("strategy 'mtp' needs an artifact", "0 prediction layers", "power artifacts admit"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_executor_that_cannot_compute_the_head_is_refused() -> None:
    """`torch` for a layer inside the target's file names what would do."""
    with pytest.raises(CapabilityError, match="executor"):
        MtpDrafter(MtpConfig(executor="torch"), None)


def test_cuts_shorten_native_drafts(opened: Callable[..., Engine]) -> None:
    """A margin no token reaches proposes nothing; ids stay."""
    engine = opened("nextn", {"draft_margin": 1.0}, draft_max=5)
    drafted, plain = answers(engine), answers(engine, spec="off")
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert all(result.counts.drafted == 0 for result in drafted)


def test_each_step_continues_its_own_sequence() -> None:
    """The executor pairs each token with its sequence's last state, at the next position."""
    context = RecordingContext()
    head = NativeHead(context)  # type: ignore[arg-type]  # it has what is called
    for seq in (0, 1):
        head.open(seq)
    zeros = np.zeros((2, 4), np.float32)
    head.start([HeadBlock(0, 7, [1, 2], zeros), HeadBlock(1, 3, [5, 6], zeros + 1)])
    head.step([1], [9])
    head.step([1], [8])
    head.truncate(1, 5)
    head.extend(HeadBlock(1, 5, [4], zeros[:1]))
    steps = [(b.seq, b.position, list(b.tokens), b.hidden[0, 0]) for blocks in context.blocks for b in blocks]
    assert steps == [
        (0, 7, [1, 2], 0.0), (1, 3, [5, 6], 1.0), (1, 5, [9], 103.0), (1, 6, [8], 104.0), (1, 5, [4], 0.0),
    ]  # fmt: skip
    assert context.cuts == [(1, 5)]


class RecordingContext:
    """A draft context whose states are numbered: row r of all that were evaluated has the state 100 + r."""

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.cuts: list[tuple[int, int]] = []
        self._rows = 0

    def open(self, seq: int) -> None:
        pass

    def truncate(self, seq: int, length: int) -> None:
        self.cuts.append((seq, length))

    def forward(self, blocks: Any, *, logits: bool = True) -> RecordingContext:
        self.blocks.append(blocks)
        self._first = self._rows
        self._rows += sum(len(block.tokens) for block in blocks)
        return self

    def logits(self, i: int) -> Any:
        return np.zeros(6, np.float32)

    def extra(self, i: int) -> Any:
        return np.full(4, 100 + self._first + i, np.float32)
