"""What the probe found is found again by a later process, and only where it would find the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from power_torch import network, profiles

from power_core import user_cache
from power_core.shapes import ExactnessLevel

Calls = list[int]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POWER_CACHE_DIR", str(tmp_path))
    return tmp_path / user_cache.PROBES


@pytest.fixture
def calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The row counts of the measurements made so far."""
    made: Calls = []
    measure = profiles.measure
    monkeypatch.setattr(profiles, "measure", lambda *a, **k: made.append(k["max_rows"]) or measure(*a, **k))
    return made


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> Callable[[], None]:
    """Forgets what this process knows."""

    def forget() -> None:
        monkeypatch.setattr(profiles, "_KNOWN", {})

    forget()
    return forget


def test_one_measurement_serves_every_session_of_its_kind(
    model: Any, open_session: Any, new_process: Callable[[], None], calls: Calls, folder: Path
) -> None:
    """In this process, where the folder is gone too, and in later ones; a session of other options is measured."""
    first = open_session(model("llama"))
    (kept,) = folder.iterdir()
    new_process()
    again = open_session(model("llama"))
    kept.unlink()
    third = open_session(model("llama"))
    assert calls == [8]
    assert first.profile == again.profile == third.profile
    assert first._cache.spans == again._cache.spans == third._cache.spans
    open_session(model("llama"), max_rows=6)
    assert calls == [8, 6]


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"dtype": "bf16"}, {}),
        ({"prefill_rows": 16}, {}),
        ({}, {"max_rows": 4}),
        ({}, {"max_sequences": 2}),
        ({}, {"context_size": 600}),
    ],
)
def test_whatever_decides_a_kernel_is_part_of_the_question(
    settings: Any, options: Any, model: Any, open_session: Any, new_process: Any, calls: Calls
) -> None:
    """Element type, rows, sequences and cache length."""
    open_session(model("llama"))
    new_process()
    open_session(model("llama", **settings), **options)
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["version", "processor", "switch", "threads", "file"])
def test_another_build_machine_or_model_is_measured(
    name: str, model: Any, open_session: Any, new_process: Any, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new torch, another processor under the same folder, a kernel switch, more threads, another file."""
    open_session(model("llama"))
    new_process()
    if name == "version":
        monkeypatch.setattr(torch, "__version__", "0")
    elif name == "processor":
        monkeypatch.setattr("power_torch.device.processor", lambda: "another")
    elif name == "switch":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    elif name == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    open_session(model("qwen3" if name == "file" else "llama"))
    assert len(calls) == 2


@pytest.mark.parametrize("damage", ["", "{", '{"content": {}, "sha256": ""}', "level", "attention_spans"])
def test_a_damaged_file_is_a_miss(
    damage: str, model: Any, open_session: Any, new_process: Any, calls: Calls, folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Cut, another's, or of another form: it is measured again, and what is kept then is sound."""
    first = open_session(model("llama")).profile
    (kept,) = folder.iterdir()
    sound = kept.read_bytes()
    if damage.isidentifier():  # a member that is missing under a digest that agrees
        load = user_cache.load
        monkeypatch.setattr(user_cache, "load", lambda *a, **k: without(load(*a, **k), damage))
    else:
        kept.write_text(damage)
    new_process()
    assert open_session(model("llama")).profile.decode.widths == first.decode.widths
    assert len(calls) == 2
    assert abs(len(kept.read_bytes()) - len(sound)) < 20  # the costs were measured anew


def without(document: Any, name: str) -> Any:
    return {
        key: without(value, name) if isinstance(value, dict) else value
        for key, value in document.items()
        if key != name
    }


def test_kernels_that_compute_otherwise_are_measured_though_the_question_is_the_same(
    model: Any, open_session: Any, new_process: Any, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fingerprint differs: something that is not part of the question has changed a last bit."""
    open_session(model("llama"))
    new_process()
    make = network.make_linear

    def other(weight: torch.Tensor) -> Any:
        product = make(weight)
        return lambda x: product(x) * 1.0000002

    monkeypatch.setattr(network, "make_linear", other)
    profile = open_session(model("llama")).profile
    assert len(calls) == 2
    new_process()
    assert open_session(model("llama")).profile == profile  # kept in the place of the old one
    assert len(calls) == 2


def test_a_verdict_that_promises_nothing_is_not_kept(
    model: Any, open_session: Any, new_process: Any, calls: Calls, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on the disk nor in the process."""

    def by_index(weight: torch.Tensor) -> Any:
        return lambda x: x @ weight.T * (1 + torch.arange(len(x)).remainder(2)[:, None] * 2e-7)

    monkeypatch.setattr(network, "make_linear", by_index)
    for _ in range(2):
        assert open_session(model("llama")).profile.level is ExactnessLevel.UNVERIFIED
    assert len(calls) == 2
    assert not folder.exists()


def test_it_is_kept_where_the_configuration_says_and_found_again_on_request(
    model: Any, open_session: Any, new_process: Any, calls: Calls, folder: Path, tmp_path: Path
) -> None:
    """`probe_cache_dir` takes the place of the user's folder; `power doctor --reprobe` measures again."""
    settings = {"probe_cache_dir": tmp_path / "mine"}
    open_session(model("llama", **settings))
    assert list((tmp_path / "mine" / user_cache.PROBES).iterdir())
    assert not folder.exists()
    new_process()
    with user_cache.found_again(user_cache.PROBES):
        open_session(model("llama", **settings))
    assert len(calls) == 2
