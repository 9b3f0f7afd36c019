"""
Generated text with features, on disk.

A folder holds `dataset.json` and one folder a generating process: `shard-N/` with `tokens.bin` (int32),
`features.bin` (bfloat16 as uint16, [tokens, layers, hidden]), `final.bin` (the same for the state after the final
norm, [tokens, hidden]) and `sequences.bin` (int32 records: prompt index, tokens, prompt tokens, sampled or greedy).
A sequence counts once its record is written, so that an interrupted run continues where it stopped. The last token
of a sequence was never evaluated: its features are zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.errors import ArtifactError
from power_core.types import JSON

__all__ = ["Dataset", "Sequence", "ShardWriter", "check_header", "num_tokens", "open_dataset", "write_header"]

_RECORD = np.dtype([("prompt", "<i4"), ("tokens", "<i4"), ("prompt_tokens", "<i4"), ("sampled", "<i4")])
HEADER = "dataset.json"


class ShardWriter:
    """
    Appends finished sequences to a shard; what a killed run left half-written is cut off at opening.

    Args:
        folder: Of the shard; made where missing.
        width: Numbers of a feature row: layers * hidden.
        hidden: Numbers of a final state.
    """

    def __init__(self, folder: Path, *, width: int, hidden: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "sequences.bin"
        path.touch()
        count = path.stat().st_size // _RECORD.itemsize
        records = np.fromfile(path, _RECORD, count)
        self.prompts = {int(prompt) for prompt in records["prompt"]}
        self.tokens = int(records["tokens"].sum())
        sizes = {
            "tokens": self.tokens * 4,
            "features": self.tokens * width * 2,
            "final": self.tokens * hidden * 2,
            "sequences": count * _RECORD.itemsize,
        }
        self._files = {name: _opened(folder / f"{name}.bin", size) for name, size in sizes.items()}

    def add(
        self,
        prompt: int,
        tokens: NDArray[np.int32],
        prompt_tokens: int,
        features: NDArray[np.uint16],
        final: NDArray[np.uint16],
        *,
        sampled: bool,
    ) -> None:
        """Append one sequence; its record comes last."""
        record = np.array([(prompt, len(tokens), prompt_tokens, sampled)], _RECORD)
        for name, values in (("tokens", tokens), ("features", features), ("final", final), ("sequences", record)):
            self._files[name].write(values.tobytes())
            self._files[name].flush()
        self.prompts.add(prompt)
        self.tokens += len(tokens)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _opened(path: Path, size: int):  # type: ignore[no-untyped-def]  # a buffered binary file, whose class has no public name
    path.touch()
    file = path.open("r+b")
    file.truncate(size)
    file.seek(size)
    return file


@frozen
class Sequence:
    """One generated sequence: where its rows are, and what it came from."""

    shard: int
    start: int
    length: int
    prompt_length: int
    prompt: int
    is_sampled: bool


@frozen(eq=False)
class Dataset:
    """
    A folder opened for reading; the arrays are memory maps.

    Attributes:
        header: `dataset.json`.
        sequences: Every sequence, shard by shard.
    """

    folder: Path
    header: Mapping[str, JSON]
    sequences: tuple[Sequence, ...]
    _tokens: tuple[NDArray[np.int32], ...]
    _features: tuple[NDArray[np.uint16], ...]
    _final: tuple[NDArray[np.uint16], ...]

    def tokens(self, sequence: Sequence) -> NDArray[np.int32]:
        return self._tokens[sequence.shard][sequence.start : sequence.start + sequence.length]

    def features(self, sequence: Sequence) -> NDArray[np.uint16]:
        """uint16[tokens, layers * hidden]: the bits of bfloat16 numbers."""
        return self._features[sequence.shard][sequence.start : sequence.start + sequence.length]

    def final(self, sequence: Sequence) -> NDArray[np.uint16]:
        """uint16[tokens, hidden]: the bits of bfloat16 numbers."""
        return self._final[sequence.shard][sequence.start : sequence.start + sequence.length]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.length for sequence in self.sequences)


def check_header(folder: Path, header: Mapping[str, JSON]) -> None:
    """
    Check that `dataset.json`, where there is one, says the same: a folder belongs to one target, text and seed.

    Raises:
        ArtifactError: The folder holds another run's text.
    """
    path = folder / HEADER
    if not path.exists():
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    header = json.loads(json.dumps(header))  # as it would be read back: a tuple is a list
    differing = sorted(key for key in {*found, *header} if found.get(key) != header.get(key))
    if differing:
        raise ArtifactError(
            f"the text in this folder was generated with another {', '.join(differing)}",
            who="power-train",
            where=str(folder),
            fix="choose another --out, or remove the folder",
        )


def write_header(folder: Path, header: Mapping[str, JSON]) -> None:
    """
    Claim *folder*: write `dataset.json`, or check the one there as `check_header` does.

    Raises:
        ArtifactError: The folder holds another run's text.
    """
    check_header(folder, header)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / HEADER
    if not path.exists():
        path.write_text(json.dumps(header, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def num_tokens(folder: Path) -> int:
    """Tokens of the finished sequences of *folder*."""
    return sum(int(np.fromfile(path, _RECORD)["tokens"].sum()) for path in folder.glob("shard-*/sequences.bin"))


def open_dataset(folder: Path) -> Dataset:
    """
    Open the text of *folder*.

    Raises:
        ArtifactError: There is none.
    """
    path = folder / HEADER
    if not path.is_file():
        raise ArtifactError(f"no {HEADER}", who="power-train", where=str(folder), fix="generate the text first")
    header = json.loads(path.read_text(encoding="utf-8"))
    hidden, layers = header["hidden_size"], len(header["layers"])
    sequences: list[Sequence] = []
    arrays: tuple[list[NDArray[np.int32]], list[NDArray[np.uint16]], list[NDArray[np.uint16]]] = ([], [], [])
    for shard, part in enumerate(sorted(folder.glob("shard-*"))):
        records = np.fromfile(part / "sequences.bin", _RECORD)
        ends = records["tokens"].cumsum()
        rows = int(ends[-1]) if len(ends) else 0
        sequences += [
            Sequence(
                shard,
                int(end - r["tokens"]),
                int(r["tokens"]),
                int(r["prompt_tokens"]),
                int(r["prompt"]),
                bool(r["sampled"]),
            )
            for end, r in zip(ends, records, strict=True)
        ]
        arrays[0].append(_mapped(part / "tokens.bin", np.int32, (rows,)))
        arrays[1].append(_mapped(part / "features.bin", np.uint16, (rows, layers * hidden)))
        arrays[2].append(_mapped(part / "final.bin", np.uint16, (rows, hidden)))
    if not sequences:
        raise ArtifactError("no finished sequence", who="power-train", where=str(folder), fix="generate the text first")
    return Dataset(folder, header, tuple(sequences), *(tuple(array) for array in arrays))  # type: ignore[arg-type]  # the three lists keep their element types


def _mapped(path: Path, dtype: type, shape: tuple[int, ...]) -> NDArray[Any]:
    if shape[0] == 0:  # an empty file cannot be mapped
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", shape=shape)
