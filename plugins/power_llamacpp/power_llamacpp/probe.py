"""
The width probe: which settings are alive on this machine, which row counts agree bit for bit, what they cost.

Every candidate setting runs in a child process, so that one that dies costs an answer and not the caller. The
result is kept in the user's cache directory under everything that decides it: model, library build,
processor, settings. A session that finds it there starts no child.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache as cached
from importlib.metadata import version
from pathlib import Path

from attrs import asdict, field, frozen

from power_core import user_cache
from power_core.errors import BackendError, ConfigError, ShapeError
from power_core.host import processor
from power_core.shapes import ExactnessLevel, ShapeIdentity, ShapeProfile, WidthClass
from power_core.types import JSON
from power_llamacpp.config import Choice as Setting
from power_llamacpp.config import KvType, LlamaCppConfig
from power_llamacpp.gguf_file import GgufInfo
from power_llamacpp.lora import LoraAdapter
from power_llamacpp.native import library, set_wait_policy
from power_llamacpp.probe_child import ProbeTask
from power_llamacpp.probe_choice import Choice, Measurement, ProbeSettings, choose, is_faster, width_classes

__all__ = ["ProbeResult", "ProbeSettings", "build_facts", "measure"]

PLUGIN = "llamacpp"
_SCHEMA = 2  # of what is cached; raise it when the probe measures differently
_NARROWEST, _WIDEST = 16, 32  # decode widths are measured one by one up to max_rows, within these bounds
_CHUNKS = (17, 33, 100)  # prompt chunks compared besides the largest: no multiples of a kernel's tile
_TIMEOUT_S = 120.0  # a child; and as much again for every further GB of the model file
_UNQUANTIZED = (KvType.F32, KvType.F16, KvType.BF16)


@frozen
class ProbeResult:
    """
    The outcome for one model on this machine.

    Args:
        settings: The setting taken.
        profile: Level and width classes under it; its evidence names every setting tried.
    """

    settings: ProbeSettings
    profile: ShapeProfile


@frozen
class _Subject:
    """
    What is probed: a checked file under what the caller fixed.

    Args:
        timeout: Seconds a child has.
        adapters: What is added to the weights: more matrices, whose kernels have widths of their own.
        overdue: Tasks that were not done by then: of these nothing is known but that the machine was busy.
    """

    path: Path
    config: LlamaCppConfig
    threads: int
    rollback_rows: int
    widest: int
    largest_chunk: int
    timeout: float
    adapters: Sequence[LoraAdapter] = ()
    overdue: list[ProbeTask] = field(factory=list)

    def answer(self, task: ProbeTask) -> dict[str, JSON]:
        """A child's answer; an `error` where it died, hung or was refused."""
        try:
            return _child(task, self.timeout)
        except subprocess.TimeoutExpired:
            self.overdue.append(task)
            return {"error": f"no answer within {self.timeout:.0f} s"}

    def measured(self, task: ProbeTask, settings: ProbeSettings) -> Measurement:
        return Measurement.of(settings, self.answer(task))

    def task(
        self,
        settings: ProbeSettings,
        *,
        widths: Sequence[int] = (),
        chunks: Sequence[int] = (),
        whole: bool = True,
    ) -> ProbeTask:
        return ProbeTask(
            path=str(self.path),
            extra_buffers=settings.extra_buffers,
            flash_attention=settings.flash_attention,
            kv_type=str(self.config.kv_type),
            swa_full=self.config.swa_full,
            rollback_rows=self.rollback_rows,
            threads=self.threads,
            batch_rows=max(self.largest_chunk, self.widest),
            widest=self.widest,
            widths=list(widths or range(1, self.widest + 1)),
            chunks=list(chunks),
            whole=whole,
            adapters=[(str(adapter.path), adapter.scale) for adapter in self.adapters],
        )


def measure(
    path: Path,
    info: GgufInfo,
    *,
    config: LlamaCppConfig,
    threads: int,
    max_rows: int,
    context: int | None = None,
    rollback_rows: int = 0,
    adapters: Sequence[LoraAdapter] = (),
) -> ProbeResult:
    """
    The best setting for *path* on this machine, measured now or read from the cache.

    Args:
        path: A file that `check_gguf` has accepted.
        info: What it returned.
        config: Fixes settings that are not `auto`.
        threads: Compute threads of the sessions to come.
        max_rows: Most rows of one decode step.
        context: Positions a sequence will hold: no prompt chunk can be larger.
        rollback_rows: Recurrent states kept resident.
        adapters: What `open_adapters` has accepted for *path*.

    Raises:
        BackendError: Every setting allowed kills the process or is refused by llama.cpp.
        ConfigError: The configuration contradicts itself.
    """
    widest = min(max(max_rows, _NARROWEST), _WIDEST)
    subject = _Subject(
        path=path,
        config=config,
        threads=threads,
        rollback_rows=rollback_rows,
        widest=widest,
        largest_chunk=max(min(config.prefill_rows, context or config.prefill_rows), widest),
        timeout=_TIMEOUT_S * (1 + info.file_size / 1e9),
        adapters=adapters,
    )
    candidates = _candidates(config)
    key = _cache_key(subject, info, candidates)
    known = user_cache.load(user_cache.PROBES, key, root=config.probe_cache_dir)
    result = _from_json(known) if known is not None else None
    if result is None:
        result = _probe(subject, candidates, key)
        if not subject.overdue:  # else the next opening, on a quieter machine perhaps, measures again
            user_cache.store(user_cache.PROBES, key, _to_json(result), root=config.probe_cache_dir)
    return result


def _candidates(config: LlamaCppConfig) -> list[ProbeSettings]:
    """The settings that *config* allows, plain ones first."""
    needs_flash = config.kv_type not in _UNQUANTIZED
    if needs_flash and config.flash_attention is Setting.OFF:
        raise ConfigError(
            f"kv_type {config.kv_type} needs flash attention",
            plugin=PLUGIN,
            where="flash_attention",
            got=str(config.flash_attention),
            expected="on or auto",
        )
    switches = {Setting.AUTO: (False, True), Setting.ON: (True,), Setting.OFF: (False,)}
    flash = (True,) if needs_flash else switches[config.flash_attention]
    return [ProbeSettings(extra, fused) for fused in flash for extra in switches[config.extra_buffers]]


def _probe(subject: _Subject, candidates: list[ProbeSettings], key: Mapping[str, JSON]) -> ProbeResult:
    """Run the children, as few as decide."""
    first = candidates[0].flash_attention
    measurements: list[Measurement] = []
    for settings in (settings for settings in candidates if settings.flash_attention is first):
        measurements += _measure_next(subject, settings, measurements)
    choice = choose(measurements, subject.widest)
    if any(settings.flash_attention is not first for settings in candidates):
        # Fused attention is tried with the best weights only, and given up at the first difference between widths:
        # where it is not one class it splits prompt chunks as well, which no gain in speed makes up for.
        extra = choice.measured.settings.extra_buffers if choice else candidates[-1].extra_buffers
        fused = ProbeSettings(extra, flash_attention=True)
        measurements.append(subject.measured(subject.task(fused, whole=choice is None), fused))
        choice = choose(measurements, subject.widest)
    if choice is None:
        raise _all_failed(subject, measurements)
    chunk, steady = _compare_chunks(subject, choice)
    remaining = [measured for measured in measurements if measured is not choice.measured]
    if not steady and (other := choose(remaining, subject.widest)) is not None:
        choice = other  # what agreed on a few rows did not on more
        chunk, steady = _compare_chunks(subject, choice)
    return ProbeResult(choice.measured.settings, _profile(subject, choice, chunk, steady, measurements, key))


def _measure_next(subject: _Subject, settings: ProbeSettings, before: Sequence[Measurement]) -> list[Measurement]:
    """Measure *settings*; where they could win by speed only, a few widths first."""
    best = choose(before, subject.widest)
    if best is not None and best.level is ExactnessLevel.BITWISE and len(best.widths) == subject.widest:
        glance = subject.measured(subject.task(settings, widths=(1, 4, subject.widest)), settings)
        if glance.failure is not None or not is_faster(glance, best.measured):
            return [glance]
    return [subject.measured(subject.task(settings), settings)]


def _child(task: ProbeTask, timeout: float) -> dict[str, JSON]:
    """
    A child's answer; an `error` where it died or was refused.

    Raises:
        subprocess.TimeoutExpired: It did not answer in *timeout* seconds, and was ended.
    """
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}  # a backtrace would start a debugger
    set_wait_policy(environment)
    command = [sys.executable, "-P", "-m", "power_llamacpp.probe_child"]
    child = subprocess.run(
        command,
        input=json.dumps(task.to_json()),
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
        timeout=timeout,
        check=False,
    )
    if child.returncode < 0:
        return {"error": f"died of {_signal_name(-child.returncode)}"}
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        answer = None
    if child.returncode or not isinstance(answer, dict):
        lines = child.stderr.strip().splitlines() or ["no message"]
        return {"error": f"exit status {child.returncode}: {lines[-1]}"}
    return answer


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _all_failed(subject: _Subject, measurements: Sequence[Measurement]) -> BackendError:
    reasons: dict[str, list[str]] = {}
    for m in measurements:
        settings = f"extra_buffers={_on(m.settings.extra_buffers)}, flash_attention={_on(m.settings.flash_attention)}"
        reasons.setdefault(str(m.failure), []).append(settings)
    told = "; ".join(f"{' and '.join(settings)}: {reason}" for reason, settings in reasons.items())
    return BackendError(
        f"llama.cpp cannot run this model with any allowed setting: {told if len(reasons) > 1 else ''.join(reasons)}",
        plugin=PLUGIN,
        where=str(subject.path),
        got=[m.failure for m in measurements],
        fix="leave extra_buffers and flash_attention on auto; if they are, build llama-cpp-python for this machine",
    )


def _on(value: bool) -> str:
    return "on" if value else "off"


def _compare_chunks(subject: _Subject, choice: Choice) -> tuple[int, bool]:
    """
    The largest prompt chunk up to which every chunk tried agrees with the widest decode forward (0: none), and
    whether the decode class holds over more rows and a longer cache.
    """
    if choice.level is ExactnessLevel.UNVERIFIED:
        return 0, False
    chunks = sorted({*(c for c in _CHUNKS if c < subject.largest_chunk), subject.largest_chunk})
    chunks = [chunk for chunk in chunks if chunk > subject.widest] or [subject.widest + 1]
    settings = choice.measured.settings
    result = subject.answer(subject.task(settings, widths=choice.widths, chunks=chunks))
    return int(result.get("agreeing", 0)), bool(result.get("steady", False))


def _profile(
    subject: _Subject,
    choice: Choice,
    chunk: int,
    steady: bool,
    measurements: Sequence[Measurement],
    key: Mapping[str, JSON],
) -> ShapeProfile:
    """Decode and prefill class of the choice; one identity where wide forwards of both agree."""
    level = choice.level if steady else ExactnessLevel.UNVERIFIED
    decode = _width_class(choice, choice.widths, key)
    wide = next((widths for widths in width_classes(choice.measured) if widths[-1] == subject.widest), ())
    if level is ExactnessLevel.UNVERIFIED:
        prefill = _width_class(choice, tuple(range(1, subject.largest_chunk + 1)), key)
    elif chunk and wide:
        prefill = _width_class(choice, (*_tail(wide), *range(subject.widest + 1, chunk + 1)), key, start=wide[0])
    else:
        prefill = decode
    evidence = {
        "settings": asdict(choice.measured.settings),
        "threads": subject.threads,
        "kv_type": str(subject.config.kv_type),
        "decode_widths": f"{decode.widths[0]} to {decode.max_rows}",
        "prefill_widths": f"{prefill.widths[0]} to {prefill.max_rows}",
        "steady": steady,
        "tried": [measured.summary() for measured in measurements],
        "build": key["build"],
    }
    return ShapeProfile(level, decode, prefill, evidence)


def _tail(widths: tuple[int, ...]) -> tuple[int, ...]:
    """The gapless end of a class: prompt chunks of any size from its start on run unpadded."""
    start = next(i for i in range(len(widths)) if widths[-1] - widths[i] == len(widths) - 1 - i)
    return widths[start:]


def _width_class(
    choice: Choice, widths: tuple[int, ...], key: Mapping[str, JSON], *, start: int | None = None
) -> WidthClass:
    """
    The class of *widths*. Its identity is its numeric path: what decides kernels, and the class's smallest width.

    Costs are known as far as widths were timed.
    """
    names = ("model", "adapters", "build", "kv_type", "swa_full", "rollback_rows", "threads")
    path = {name: key[name] for name in names if name in key}
    facts = {**path, "settings": asdict(choice.measured.settings), "class": start or widths[0]}
    times = choice.measured.milliseconds
    timed = [width for width in widths if width in times]
    costs = tuple(round(times[width] / times[1], 3) for width in timed)
    return WidthClass(ShapeIdentity.of(facts), widths, costs, apart=True)  # `split_equal` in llama-batch.cpp


def _cache_key(subject: _Subject, info: GgufInfo, candidates: list[ProbeSettings]) -> dict[str, JSON]:
    """Everything that decides the outcome."""
    adapters = [asdict(adapter.identity) for adapter in subject.adapters]
    return {
        **({"adapters": adapters} if adapters else {}),  # without any, keys are as they were before there were any
        "schema": _SCHEMA,
        "model": info.sha256(),
        "build": build_facts(),
        "candidates": [asdict(settings) for settings in candidates],
        "kv_type": str(subject.config.kv_type),
        "swa_full": subject.config.swa_full,
        "rollback_rows": subject.rollback_rows,
        "threads": subject.threads,
        "widest": subject.widest,
        "largest_chunk": subject.largest_chunk,
    }


@cached
def build_facts() -> dict[str, JSON]:
    """
    The native library and the processor, as far as they can change a kernel.

    Raises:
        BackendError: The library cannot be loaded.
    """
    lib = library()
    files = sorted(Path(str(lib.__file__)).parent.glob("lib/*"))
    sizes = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return {
        "llama_cpp_python": version("llama-cpp-python"),
        "system_info": " ".join(lib.llama_print_system_info().decode().split()),
        "library": hashlib.sha256(repr(sizes).encode()).hexdigest(),
        "processor": processor(),
    }


def _to_json(result: ProbeResult) -> dict[str, JSON]:
    return {"settings": asdict(result.settings), **result.profile.to_json()}


def _from_json(document: JSON) -> ProbeResult | None:
    """The result stored, or None where *document* has another form."""
    try:
        return ProbeResult(ProbeSettings(**document["settings"]), ShapeProfile.from_json(document))
    except (KeyError, TypeError, ShapeError):
        return None
