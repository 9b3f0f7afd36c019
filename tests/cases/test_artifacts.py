"""Drafter files that users really have: other vocabularies, wrong kinds, incomplete ones (cases 16, 17 and 18)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from click.testing import Result as CliResult

from power_core.artifacts import Provenance, open_tensors
from power_core.artifacts.admission import admit
from power_core.artifacts.matching import installed_contracts
from power_core.cli import cli
from power_core.config import PowerConfig
from power_core.engine import Engine
from power_core.errors import PowerError
from power_core.runtime import Runtime
from power_core.testing.gguf import tiny_hybrid, tiny_llama
from power_core.testing.gguf_drafts import MASK_KEY, tiny_dflash, tiny_dflash2, tiny_dspark, tiny_mtp

for needed in ("power_llamacpp", "power_dflash", "power_dspark", "power_mtp"):
    pytest.importorskip(needed)
pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")

SECTIONS = {"llamacpp": {"flash_attention": "off"}}
OPTIONS = {"width_policy": "fixed", "threads": 1, "context_size": 256}
ORIGIN = ("--source", "a test", "--revision", "1", "--license", "CC0")
MAKERS: dict[str, Callable[..., Path]] = {
    "dflash": tiny_dflash, "dflash2": tiny_dflash2, "dspark": tiny_dspark, "mtp": tiny_mtp,
}  # fmt: skip
KINDS = {"dflash": "dflash-v1", "dflash2": "dflash2", "dspark": "dspark", "mtp": "mtp-head"}
PROMPTS = ("Once upon a time", "alpha beta gamma " * 8)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target for the block drafters and one with a prediction layer of its own."""
    folder = tmp_path_factory.mktemp("targets")
    return {
        "llama": tiny_llama(folder / "llama.gguf", layers=4),
        "hybrid": tiny_hybrid(folder / "hybrid.gguf", nextn_layers=1),
    }


def target_of(strategy: str) -> str:
    return "hybrid" if strategy == "mtp" else "llama"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder of admitted artifacts, and no other settings."""
    for name in [name for name in os.environ if name.startswith("POWER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("POWER_ARTIFACTS_DIR", str(tmp_path / "admitted"))
    return tmp_path / "admitted"


@pytest.fixture
def run(store: Path, tmp_path: Path) -> Callable[..., CliResult]:
    """Runs a command: ``run("artifacts", "list")``."""
    config = tmp_path / "settings.toml"
    config.write_text('ctx = 256\nthreads = 1\n[plugin.llamacpp]\nflash_attention = "off"\n')
    return lambda *args: CliRunner().invoke(cli, ["--config", str(config), *map(str, args)])


@pytest.fixture
def opened(store: Path, targets: dict[str, Path]) -> Iterator[Callable[..., Engine]]:
    """``opened("dspark", path, target="llama")``: the drafter admitted, and an engine that uses it."""
    runtimes: list[Runtime] = []

    def call(strategy: str, drafter: Path | None, *, target: str = "", snapshots: int = 8, **options: Any) -> Engine:
        runtime = Runtime(PowerConfig(sections=SECTIONS, spec_mtp_recurrent_snapshots=snapshots))
        runtimes.append(runtime)
        path = targets[target or target_of(strategy)]
        if drafter is not None:
            model = runtime.load_target(path)
            origin = Provenance("a test", "1", "CC0")
            contracts = installed_contracts(runtime.registry)
            admit(drafter, name=strategy, target=model, provenance=origin, contracts=contracts)
            model.close()
        return runtime.open(path, spec=strategy, **{**OPTIONS, **options})

    yield call
    for runtime in runtimes:
        runtime.close()


def refused(result: CliResult, *words: str) -> str:
    """The one line a command ended with, which holds each of *words*."""
    assert result.exit_code != 0
    assert isinstance(result.exception, SystemExit)  # not what a traceback would have shown
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0], lines[0]
    return lines[0]


# -- case 16 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", MAKERS)
def test_a_drafter_of_a_longer_vocabulary_is_refused_with_the_reason(
    run: Callable[..., CliResult], targets: dict[str, Path], tmp_path: Path, strategy: str
) -> None:
    """16a: 64 unused tokens at the end are another vocabulary; the message names both sizes."""
    path = MAKERS[strategy](tmp_path / "drafter.gguf", vocab_size=384)
    result = run("artifacts", "admit", path, "--target", targets[target_of(strategy)], *ORIGIN)
    refused(result, "384", "320")


@pytest.mark.parametrize("strategy", ["dflash", "dflash2", "dspark"])
def test_a_drafter_without_a_vocabulary_takes_the_mask_id_of_its_header(
    opened: Callable[..., Engine], tmp_path: Path, strategy: str
) -> None:
    """16b: tokenizer model "none" is fine; the mask id comes from the header, and what is drafted is exact."""
    path = MAKERS[strategy](tmp_path / "drafter.gguf", mask_id=300)
    assert open_tensors(path).metadata["tokenizer.ggml.model"] == "none"
    engine = opened(strategy, path, draft_max=5)
    drafted, plain = engine.complete(PROMPTS[0], max_tokens=40), engine.complete(PROMPTS[0], max_tokens=40, spec="off")
    assert drafted.token_ids == plain.token_ids
    assert drafted.counts.drafted > 0
    with Runtime(PowerConfig()) as runtime:
        contract = installed_contracts(runtime.registry)[KINDS[strategy]]
    assert contract.check(open_tensors(path)).details["mask_token_id"] == 300


@pytest.mark.parametrize("strategy", ["dflash", "dflash2", "dspark"])
def test_a_missing_mask_id_is_named(
    run: Callable[..., CliResult], targets: dict[str, Path], tmp_path: Path, strategy: str
) -> None:
    """16c: nothing is guessed; -1, which llama.cpp would take, never gets there."""
    path = MAKERS[strategy](tmp_path / "drafter.gguf", overrides={MASK_KEY: None})
    refused(run("artifacts", "inspect", path), MASK_KEY)
    refused(run("artifacts", "admit", path, "--target", targets["llama"], *ORIGIN), MASK_KEY)


# -- case 17 ---------------------------------------------------------------------------------------------------------

WRONG_FILES: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "i: architecture dflash-draft": (
        lambda path: tiny_dflash(path, overrides={"general.architecture": "dflash-draft"}), ("kind",),
    ),
    "ii: no target_layers": (
        lambda path: tiny_dflash(path, overrides={"dflash.target_layers": None}), ("target_layers",),
    ),
    "v: the whole model": (lambda path: tiny_llama(path), ("kind",)),
    "vi: another width": (lambda path: tiny_dflash(path, hidden_size=128), ("128", "64")),
    "vi: another width, mtp": (lambda path: tiny_mtp(path, hidden_size=128), ("128", "64")),
    "vii: a layer the target has not": (lambda path: tiny_dspark(path, target_layers=(1, 9)), ("8",)),
    "ix: cut in half": (lambda path: _cut(tiny_dflash2(path)), ()),
}  # fmt: skip


def _cut(path: Path) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


@pytest.mark.parametrize("case", WRONG_FILES)
def test_wrong_files_are_refused_before_anything_is_drafted(
    run: Callable[..., CliResult], targets: dict[str, Path], tmp_path: Path, store: Path, case: str
) -> None:
    """17 i, ii, v, vi, vii, ix: one line, a failing exit code, and nothing left among the admitted artifacts."""
    make, words = WRONG_FILES[case]
    target = targets["hybrid" if "mtp" in case else "llama"]
    refused(run("artifacts", "admit", make(tmp_path / "drafter.gguf"), "--target", target, *ORIGIN), *words)
    assert not store.exists() or list(store.iterdir()) == []


def test_the_target_is_no_drafter_of_itself(run: Callable[..., CliResult], targets: dict[str, Path]) -> None:
    """17 viii: the same path for both, with a prediction layer in it or without."""
    for target in targets.values():
        refused(run("artifacts", "admit", target, "--target", target, *ORIGIN), "kind")


@pytest.mark.parametrize("asked", MAKERS)
@pytest.mark.parametrize("given", MAKERS)
def test_a_drafter_of_another_kind_is_not_taken_for_the_one_asked_for(
    run: Callable[..., CliResult], targets: dict[str, Path], tmp_path: Path, given: str, asked: str
) -> None:
    """17 iii, iv: admitted under what it is; asking for another strategy with it fails, or it would be a relabel."""
    target = targets[target_of(given)]
    path = MAKERS[given](tmp_path / "drafter.gguf")
    admitted = run("artifacts", "admit", path, "--target", target, "--name", "mine", *ORIGIN)
    assert admitted.exit_code == 0, admitted.stderr
    result = run("generate", "--raw", "hi", "--model", target, "--spec", asked, "--artifact", "mine", "--max-tokens", 8)
    if given == asked:
        assert result.exit_code == 0, result.stderr
    else:
        refused(result)


@pytest.mark.parametrize("strategy", MAKERS)
def test_matrices_in_bfloat16_work(opened: Callable[..., Engine], tmp_path: Path, strategy: str) -> None:
    """17 x: small heads in BF16 draft, and the receipt names the artifact that did."""
    path = MAKERS[strategy](tmp_path / "drafter.gguf", weights="BF16")
    engine = opened(strategy, path, draft_max=4)
    drafted, plain = engine.complete(PROMPTS[0], max_tokens=24), engine.complete(PROMPTS[0], max_tokens=24, spec="off")
    assert drafted.token_ids == plain.token_ids
    assert drafted.counts.drafted > 0
    assert [each["name"] for each in drafted.receipt["body"]["artifacts"]] == [strategy]


@pytest.mark.parametrize("strategy", ["dflash", "dflash2", "dspark", "mtp"])
def test_asked_for_without_a_drafter_is_an_error(
    run: Callable[..., CliResult], targets: dict[str, Path], strategy: str
) -> None:
    """17: speculation is never silently off."""
    result = run("generate", "--raw", "hi", "--model", targets["llama"], "--spec", strategy, "--max-tokens", 4)
    refused(result)


def test_damage_after_admission_is_found_at_the_next_load(
    opened: Callable[..., Engine], store: Path, tmp_path: Path
) -> None:
    """A byte of the admitted copy changes: nothing is drafted with it."""
    opened("dspark", tiny_dspark(tmp_path / "drafter.gguf")).complete("hi", max_tokens=2)
    copy = next(store.rglob("*.gguf"))
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.chmod(0o644)
    copy.write_bytes(data)
    with pytest.raises(PowerError, match=r"sha256|changed|digest"):
        opened("dspark", None)


# -- case 18 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", MAKERS)
@pytest.mark.parametrize(("k", "snapshots"), [(5, 8), (7, 2), (7, 0)])
def test_state_that_cannot_be_cut_is_brought_back_exactly(
    opened: Callable[..., Engine], tmp_path: Path, strategy: str, k: int, snapshots: int
) -> None:
    """
    18: on a hybrid target each rejection is exact, the target computes little more than it must, and no rollback
    repeats: a replay bounds the request's later proposals.
    """
    layers = {} if strategy == "mtp" else {"target_layers": (1, 3)}
    path = MAKERS[strategy](tmp_path / "drafter.gguf", **layers)
    engine = opened(strategy, path, target="hybrid", draft_max=k, snapshots=snapshots)
    for prompt in PROMPTS:
        drafted = engine.complete(prompt, max_tokens=60)
        assert drafted.token_ids == engine.complete(prompt, max_tokens=60, spec="off").token_ids
        counts = drafted.counts
        assert counts.drafted > 0
        assert counts.replays <= 1
        assert counts.target_passes <= len(drafted.token_ids) + counts.prefill_passes + counts.replays
