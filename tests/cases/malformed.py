"""
Malformed drafters of all four kinds: small good ones, and every way to break them that a table can list.

`main` is the body of a child process: it forks once for each file, so that a death is one file's, and says what
became of each. What is accepted is used: it drafts, and the tokens must be those of plain decoding.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from power_dspark.testing import save_published
from power_mtp.testing import head_config, random_tensors, tiny_shape, write_gguf, write_safetensors

from power_core.artifacts import open_tensors
from power_core.testing.gguf_drafts import tiny_dflash, tiny_dflash2, tiny_dspark, tiny_mtp

__all__ = ["ACCEPTED", "REFUSED", "STRATEGIES", "Good", "Mutant", "good_drafters", "main", "mutants", "write"]

ACCEPTED, REFUSED, RAISED = 0, 10, 11  # exit codes of a file's process
SECONDS = 240  # for one file, on a machine with other work to do
STRATEGIES = {"dflash-v1": "dflash", "dflash2": "dflash2", "dspark": "dspark", "mtp-head": "mtp"}
Array = NDArray[Any]
_IDS = list(range(7, 300, 3))
_NUMBERS = {"zero": 0, "huge": 2**31 - 1, "odd": 7}


class Good(NamedTuple):
    """A drafter that is admitted as it is: its header and its values."""

    name: str
    kind: str
    container: str
    metadata: dict[str, Any]
    types: dict[str, str]  # GGUF type of each key
    tensors: dict[str, Array]


class Mutant(NamedTuple):
    """What is wrong, and the file: contents to be written, or the change of a good file's bytes."""

    name: str
    good: Good
    edit: Callable[[bytes], bytes] | None = None


def good_drafters(folder: Path) -> list[Good]:
    """One small drafter of each kind and container, for targets of 64 channels and 320 ids."""
    shape = tiny_shape(has_output=True, is_reduced=True, draft_vocab=99, fuses=True, target_layers=(0, 2))
    tensors, config = random_tensors(shape), head_config(shape)
    dspark = tiny_dspark(folder / "dspark.gguf", draft_vocab=_IDS)
    return [
        _read("dflash-v1", tiny_dflash(folder / "dflash.gguf", draft_vocab=_IDS)),
        _read("dflash2", tiny_dflash2(folder / "dflash2.gguf")),
        _read("dspark", dspark),
        _read("dspark", save_published(open_tensors(dspark), folder / "dspark")),
        _read("mtp-head", write_gguf(folder / "head.gguf", tensors, config)),
        _read("mtp-head", write_safetensors(folder / "head", tensors, config)),
        _read("mtp-head", tiny_mtp(folder / "mtp.gguf"), name="nextn.gguf"),
    ]


def write(good: Good, folder: Path) -> Path:
    """The file (and `config.json`) of *good* in *folder*."""
    if good.container == "gguf":
        return _write_gguf(good, folder / "drafter.gguf")
    from safetensors.numpy import save_file

    path = folder / "model.safetensors"
    save_file({name: np.ascontiguousarray(values) for name, values in good.tensors.items()}, path)
    (folder / "config.json").write_text(json.dumps(good.metadata))
    return path


def mutants(good: Good) -> Iterator[Mutant]:
    """Everything that is done to *good*, one thing at a time."""
    as_it_is = Mutant(f"{good.name}: as it is", good)
    return chain(
        [as_it_is], _broken_tensors(good), _broken_ids(good), _broken_keys(good), _renamed(good), _broken_bytes(good)
    )


def _read(kind: str, path: Path, name: str | None = None) -> Good:
    file = open_tensors(path)
    metadata = {key: value for key, value in file.metadata.items() if key != "__metadata__"}
    tensors = {each: file.read(each) for each in file.tensors}
    return Good(name or f"{kind}.{file.format}", kind, file.format, metadata, getattr(file, "value_types", {}), tensors)


def _write_gguf(good: Good, path: Path) -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "")
    writer.kv_data[0].clear()
    add: Mapping[str, Callable[[str, Any], None]] = {
        "u32": writer.add_uint32, "i32": writer.add_int32, "f32": writer.add_float32, "bool": writer.add_bool,
        "str": writer.add_string,
    }  # fmt: skip
    for key, value in good.metadata.items():
        kind = good.types[key]
        if kind in add:
            add[kind](key, value)
        else:
            writer.add_array(key, list(value) if not isinstance(value, np.ndarray) else value.tolist())
    for name, values in good.tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _with(good: Good, what: str, *, tensors: Mapping[str, Any] | None = None, **changes: Any) -> Mutant:
    """*good* with other parts; a tensor None is left out."""
    if tensors is not None:
        merged = {**good.tensors, **tensors}
        changes["tensors"] = {name: values for name, values in merged.items() if values is not None}
    return Mutant(f"{good.name}: {what}", good._replace(**changes))


def _broken_tensors(good: Good) -> Iterator[Mutant]:
    yield _with(good, "a tensor more", tensors={"left.over": np.zeros((2, 2), np.float32)})
    for name, values in good.tensors.items():
        yield _with(good, f"{name} missing", tensors={name: None})
        yield _with(good, f"{name} twice as long", tensors={name: np.concatenate([values, values])})
        yield _with(good, f"{name} of one more axis", tensors={name: np.stack([values, values])})
        if name == "d2t":
            continue
        yield _with(good, f"{name} in I32", tensors={name: np.ones(values.shape, np.int32)})
        for bad in (np.nan, np.inf):
            spoilt = values.copy()
            spoilt.reshape(-1)[spoilt.size // 2] = bad
            yield _with(good, f"{name} with {bad}", tensors={name: spoilt})


def _broken_ids(good: Good) -> Iterator[Mutant]:
    if "d2t" not in good.tensors:
        return
    ids = good.tensors["d2t"]
    for what, value in (("320", 320), ("-1", -1), ("2^40", 2**40), ("an id twice", ids[0])):
        spoilt = ids.copy()
        spoilt[-1] = value
        yield _with(good, f"d2t with {what}", tensors={"d2t": spoilt})
    yield _with(good, "d2t in I32", tensors={"d2t": ids.astype(np.int32)})
    yield _with(good, "d2t of floats", tensors={"d2t": ids.astype(np.float32)})


def _broken_keys(good: Good) -> Iterator[Mutant]:
    """Each key of sizes and constants: left out, of a wrong type, and of values that divide by zero or overflow."""
    for key, value in good.metadata.items():
        if key.startswith(("general.", "tokenizer.ggml.")) and key != "tokenizer.ggml.mask_token_id":
            continue
        if isinstance(value, dict):
            continue
        yield _with(good, f"{key} missing", metadata={k: v for k, v in good.metadata.items() if k != key})
        text = {"types": {**good.types, key: "str"}} if good.types else {}
        yield _with(good, f"{key} is text", metadata={**good.metadata, key: "seven"}, **text)
        if isinstance(value, bool | str):
            continue
        if isinstance(value, list) and value and isinstance(value[0], str):
            continue
        if isinstance(value, list | np.ndarray):
            many = [0] * len(value), [2**31 - 1] * len(value), [int(v) for v in value] * 40
            for what, items in zip(("zeros", "huge", "long"), many, strict=True):
                yield _with(good, f"{key} is {what}", metadata={**good.metadata, key: items})
            continue
        is_real = isinstance(value, float | np.floating)
        numbers = {"nan": float("nan"), "negative": -1.0, "zero": 0.0} if is_real and good.types else _NUMBERS
        for what, number in numbers.items():
            if number != value:
                typed = {"types": {**good.types, key: "f32" if is_real else "u32"}} if good.types else {}
                number = float(number) if is_real else number
                yield _with(good, f"{key} is {what}", metadata={**good.metadata, key: number}, **typed)


def _renamed(good: Good) -> Iterator[Mutant]:
    """The same contents under another kind's name."""
    key = "general.architecture" if good.container == "gguf" else "model_type"
    for name in ("llama", "dflash", "dflash-draft", "dspark", "mtp-head", "qwen35", "eagle3"):
        if name != good.metadata.get(key):
            yield _with(good, f"{key} is {name}", metadata={**good.metadata, key: name})


def _broken_bytes(good: Good) -> Iterator[Mutant]:
    for part in (0.0, 0.001, 0.02, 0.5, 0.999):
        yield Mutant(f"{good.name}: cut at {part}", good, lambda data, part=part: data[: int(part * len(data))])
    yield Mutant(f"{good.name}: another magic", good, lambda data: b"GGML" + data[4:])
    yield Mutant(f"{good.name}: absurd counts", good, lambda data: data[:4] + b"\xff" * 20 + data[24:])
    yield Mutant(f"{good.name}: garbage", good, lambda data: random.Random(1).randbytes(len(data)))


def main() -> None:
    """Judge each mutant whose index is on the command line ("start:step"); a JSON line for each on stdout."""
    start, step = map(int, sys.argv[1].split(":"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        judge = _judge(folder)
        every = list(chain.from_iterable(mutants(good) for good in good_drafters(folder)))
        for mutant in every[start::step]:
            code, message = _forked(mutant, judge, folder)
            print(json.dumps([mutant.name, code, message]), flush=True)


Judge = Callable[[Path, str], None]


def _judge(folder: Path) -> Judge:
    """Admits a file of a kind as the command line does, then decodes with it and without."""
    from power_core.artifacts import Provenance
    from power_core.artifacts.admission import admit
    from power_core.artifacts.matching import installed_contracts
    from power_core.config import PowerConfig
    from power_core.runtime import Runtime
    from power_core.testing.gguf import tiny_hybrid, tiny_llama

    llama, hybrid = tiny_llama(folder / "llama.gguf", layers=4), tiny_hybrid(folder / "hybrid.gguf", nextn_layers=1)
    runtime = Runtime(PowerConfig(sections={"llamacpp": {"flash_attention": "off"}}))
    contracts = installed_contracts(runtime.registry)
    targets = {path: runtime.load_target(path) for path in (llama, hybrid)}

    def judge(path: Path, name: str) -> None:
        os.environ["POWER_ARTIFACTS_DIR"] = str(path.parent / "admitted")
        target = hybrid if name.startswith("nextn") else llama
        origin = Provenance("a test", "1", "CC0")
        kind = admit(path, name="x", target=targets[target], provenance=origin, contracts=contracts).kind
        options = {"width_policy": "fixed", "threads": 1, "context_size": 128, "draft_max": 5}
        with runtime.open(target, spec=STRATEGIES[kind], **options) as engine:
            drafted, plain = (engine.complete("Once upon a time", max_tokens=12, spec=spec) for spec in (None, "off"))
        if drafted.token_ids != plain.token_ids or drafted.error is not None:
            raise AssertionError(f"{drafted.token_ids} for {plain.token_ids}: {drafted.error}")

    return judge


def _forked(mutant: Mutant, judge: Judge, folder: Path) -> tuple[int, str]:
    """Exit code and message of a process that judges one file."""
    report = folder / "report"
    report.write_text("")
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS)
        os._exit(_outcome(mutant, judge, folder, report))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), report.read_text()


def _outcome(mutant: Mutant, judge: Judge, folder: Path, report: Path) -> int:
    from power_core.errors import ArtifactError

    try:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            path = write(mutant.good, Path(name))
            if mutant.edit is not None:
                path.write_bytes(mutant.edit(path.read_bytes()))
            judge(path, mutant.name)
    except ArtifactError as exc:
        report.write_text(str(exc))
        return REFUSED
    except BaseException as exc:  # noqa: BLE001 - whatever it is, the parent is told
        report.write_text(f"{type(exc).__name__}: {exc}")
        return RAISED
    return ACCEPTED


if __name__ == "__main__":
    main()
