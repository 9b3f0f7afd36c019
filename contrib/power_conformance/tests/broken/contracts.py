"""Artifact contracts that break one rule each: a contract of made-up heads, which looks away in one place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from power_core.artifacts import ArtifactFacts, TensorFile
from power_core.errors import ArtifactError
from power_core.target import TargetModel
from power_core.testing import ScriptedTarget
from power_core.testing.safetensors_writer import save_tensors

BROKEN: dict[str, Callable[[], Contract]] = {}
VOCAB, HIDDEN, ROWS = 32, 8, 20


def good_file(folder: Path) -> tuple[Path, TargetModel]:
    """A good head, and the target it was made for."""
    target = ScriptedTarget(VOCAB, hidden_size=HIDDEN)
    rng = np.random.default_rng(1)
    tensors = {
        "fc.weight": rng.standard_normal((HIDDEN, 2 * HIDDEN), np.float32),
        "output.weight": rng.standard_normal((ROWS, HIDDEN), np.float32),
        "d2t": rng.permutation(VOCAB)[:ROWS].astype(np.int64),
    }
    config = {
        "model_type": "toy", "hidden_size": HIDDEN, "vocab_size": VOCAB, "scale": 0.5, "target_layer_ids": [1, 2],
        "tokenizer_sha256": target.identity.tokenizer_sha256, "author": "nobody",
    }  # fmt: skip
    return save_tensors(folder / "head", tensors, config), target


def refuse(file: TensorFile, what: str, expected: object) -> NoReturn:
    raise ArtifactError(what, where=str(file.path), expected=expected, fix="export it again")


class Contract:
    """Kind `toy`: a matrix over two blocks' outputs, an output matrix of some tokens, and which those are."""

    kind = "toy"

    def matches(self, file: TensorFile) -> bool:
        return file.metadata.get("model_type") == "toy" and any(name in file.tensors for name in self.shapes())

    def check(self, file: TensorFile) -> ArtifactFacts:
        if file.metadata.get("model_type") != "toy":
            refuse(file, f"model_type is {file.metadata.get('model_type')!r:.40}", "toy")
        vocab = self.whole(file, "vocab_size")
        if self.whole(file, "hidden_size") != HIDDEN:
            refuse(file, f"hidden_size is {file.metadata['hidden_size']}", HIDDEN)
        self.scale(file)
        layers = file.metadata.get("target_layer_ids")
        if not isinstance(layers, list) or len(layers) != 2 or not all(type(i) is int and i >= 0 for i in layers):
            refuse(file, f"target_layer_ids is {layers!r:.40}", "two blocks")
        if layers[0] == layers[1]:
            refuse(file, "target_layer_ids names a block twice", "two blocks")
        self.table(file)
        return ArtifactFacts(tuple(layers), HIDDEN, vocab, ROWS)

    def whole(self, file: TensorFile, key: str) -> int:
        value = file.metadata.get(key)
        if type(value) is not int or not 1 <= value < 2**20:
            refuse(file, f"{key} is {value!r:.40}", "a number from 1 on")
        return value

    def scale(self, file: TensorFile) -> float:
        value = file.metadata.get("scale")
        if not isinstance(value, float) or not math.isfinite(value):
            refuse(file, f"scale is {value!r:.40}", "a number")
        return value

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"fc.weight": (HIDDEN, 2 * HIDDEN), "output.weight": (ROWS, HIDDEN), "d2t": (ROWS,)}

    def types(self, name: str) -> tuple[str, ...]:
        return ("I64",) if name == "d2t" else ("F32", "F16", "BF16")

    def table(self, file: TensorFile) -> None:
        for name, shape in self.shapes().items():
            if name not in file.tensors:
                refuse(file, f"tensor {name} is missing", shape)
            if file.tensors[name].shape != shape:
                refuse(file, f"tensor {name} has shape {file.tensors[name].shape}", shape)
            if file.tensors[name].dtype not in self.types(name):
                refuse(file, f"tensor {name} is {file.tensors[name].dtype}", self.types(name))
        self.others(file)

    def others(self, file: TensorFile) -> None:
        for name in set(file.tensors) - set(self.shapes()):
            refuse(file, f"tensor {name!r:.40} is unknown", "no other tensor")

    def check_payload(self, file: TensorFile) -> None:
        for name in ("fc.weight", "output.weight"):
            if not np.isfinite(self.values(file, name)).all():
                refuse(file, f"tensor {name} is not finite", "finite numbers")
        self.ids(file)

    def values(self, file: TensorFile, name: str) -> Any:
        return file.read(name)

    def ids(self, file: TensorFile) -> None:
        ids = file.read("d2t")
        if ids.min() < 0 or ids.max() >= VOCAB:
            refuse(file, "d2t holds ids outside the vocabulary", f"0 to {VOCAB - 1}")

    def check_target(self, file: TensorFile, facts: ArtifactFacts, target: TargetModel) -> None:
        self.sizes(file, facts, target)
        self.layers(file, facts, target)
        self.tokenizer(file, target)

    def sizes(self, file: TensorFile, facts: ArtifactFacts, target: TargetModel) -> None:
        identity = target.identity
        if (facts.vocab_size, facts.hidden_size) != (identity.vocab_size, identity.hidden_size):
            refuse(file, f"sizes are {facts.vocab_size} and {facts.hidden_size}", "the target's")

    def layers(self, file: TensorFile, facts: ArtifactFacts, target: TargetModel) -> None:
        if max(facts.hidden_layers) >= target.identity.num_layers:
            refuse(file, f"reads block {max(facts.hidden_layers)}", "a block of the target")

    def tokenizer(self, file: TensorFile, target: TargetModel) -> None:
        if file.metadata.get("tokenizer_sha256") != target.identity.tokenizer_sha256:
            refuse(file, "made for another tokenizer", "the target's")


class OtherContract(Contract):
    """Another kind, which does not mind this one."""

    kind = "other"

    def matches(self, file: TensorFile) -> bool:
        return file.metadata.get("model_type") == "other"


class Greedy(Contract):
    """Another kind, which takes whatever has its tensor."""

    kind = "greedy"

    def matches(self, file: TensorFile) -> bool:
        return "fc.weight" in file.tensors


OTHERS: dict[str, type[Contract]] = {"A-MATCH-03": Greedy}


def breaks(rule_id: str) -> Callable[[type[Contract]], type[Contract]]:
    """Register a contract as what breaks *rule_id*."""

    def register(cls: type[Contract]) -> type[Contract]:
        BROKEN[rule_id] = cls
        return cls

    return register


@breaks("A-GOOD-01")
class RefusesAll(Contract):
    """Was written for a later version of the format."""

    def ids(self, file: TensorFile) -> None:
        refuse(file, "d2t holds ids", "ranks")


@breaks("A-MATCH-01")
class MatchesByRaising(Contract):
    """Refuses where it is only asked."""

    def matches(self, file: TensorFile) -> bool:
        if "model_type" not in file.metadata:
            refuse(file, "model_type is missing", "toy")
        return super().matches(file)


@breaks("A-MATCH-02")
class TakesEmptyFiles(Contract):
    """Believes the metadata where none of the tensors is there, as with weights in another file."""

    def matches(self, file: TensorFile) -> bool:
        return file.metadata.get("model_type") == "toy"

    def table(self, file: TensorFile) -> None:
        if any(name.rstrip("_") in self.shapes() for name in file.tensors):
            super().table(file)

    def check_payload(self, file: TensorFile) -> None:
        if "d2t" in file.tensors:
            super().check_payload(file)


@breaks("A-MATCH-03")
class OfTwoKinds(Contract):
    """Is right; it is the other contract that takes too much."""


@breaks("A-FACTS-01")
class NoBlock(Contract):
    """Says that nothing can be drafted."""

    def check(self, file: TensorFile) -> ArtifactFacts:
        facts = super().check(file)
        return ArtifactFacts(facts.hidden_layers, HIDDEN, facts.vocab_size, ROWS, block_size=0)


@breaks("A-HEADER-01")
class ReadsEarly(Contract):
    """Counts the ids instead of looking at the table."""

    def check(self, file: TensorFile) -> ArtifactFacts:
        facts = super().check(file)
        return ArtifactFacts(facts.hidden_layers, HIDDEN, facts.vocab_size, len(file.read("d2t")))


@breaks("A-REPEAT-01")
class BearsGrudges(Contract):
    """Refuses everything after a bad file: an error flag that nobody clears."""

    def __init__(self) -> None:
        self.failed = False

    def table(self, file: TensorFile) -> None:
        if self.failed:
            refuse(file, "an error happened before", "none")
        self.failed = True
        super().table(file)
        self.failed = False


@breaks("A-FILES-01")
class LeavesNotes(Contract):
    """Writes down what it found beside the file."""

    def check_payload(self, file: TensorFile) -> None:
        super().check_payload(file)
        file.path.with_name("checked").touch()


@breaks("A-TENSORS-01")
class IdsOptional(Contract):
    """Takes a reduced output matrix without the ids of its rows."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return super().shapes()

    def table(self, file: TensorFile) -> None:
        if "d2t" in file.tensors or len(file.tensors) != 2:
            super().table(file)

    def ids(self, file: TensorFile) -> None:
        if "d2t" in file.tensors:
            super().ids(file)


@breaks("A-TENSORS-02")
class AnyShape(Contract):
    """Does not look at the shape of one matrix."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return _AnyShape(super().shapes())


class _AnyShape(dict[str, tuple[int, ...]]):
    def items(self) -> Any:
        return [(name, _Any(shape) if name == "fc.weight" else shape) for name, shape in super().items()]


class _Any(tuple[int, ...]):
    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = tuple.__hash__


@breaks("A-TENSORS-03")
class AnyType(Contract):
    """Takes whole numbers for weights."""

    def types(self, name: str) -> tuple[str, ...]:
        return (*super().types(name), "I32", "I8") if name == "output.weight" else super().types(name)


@breaks("A-TENSORS-04")
class IgnoresOthers(Contract):
    """Passes over tensors it does not know."""

    def others(self, file: TensorFile) -> None:
        pass


@breaks("A-KEYS-01")
class TakesText(Contract):
    """Takes a text for a number."""

    def scale(self, file: TensorFile) -> float:
        return 1.0 if isinstance(file.metadata.get("scale"), str) else super().scale(file)


@breaks("A-KEYS-02")
class TakesInfinity(Contract):
    """Takes every float."""

    def scale(self, file: TensorFile) -> float:
        return math.inf if file.metadata.get("scale") == math.inf else super().scale(file)


@breaks("A-MESSAGE-01")
class SaysNothing(Contract):
    """Refuses without saying what would have been right."""

    def others(self, file: TensorFile) -> None:
        if len(file.tensors) > len(self.shapes()):
            raise ArtifactError("bad tensors", where=str(file.path))


@breaks("A-PAYLOAD-01")
class LooksAtOne(Contract):
    """Looks at the first value of each tensor."""

    def values(self, file: TensorFile, name: str) -> Any:
        return file.read(name).reshape(-1)[:1]


@breaks("A-PAYLOAD-02")
class NegativeOnly(Contract):
    """Looks for negative ids only."""

    def ids(self, file: TensorFile) -> None:
        if file.read("d2t").min() < 0:
            super().ids(file)


@breaks("A-TARGET-01")
class AnySizes(Contract):
    """Compares hidden sizes alone."""

    def sizes(self, file: TensorFile, facts: ArtifactFacts, target: TargetModel) -> None:
        if facts.hidden_size != target.identity.hidden_size:
            super().sizes(file, facts, target)


@breaks("A-TARGET-02")
class AnyLayers(Contract):
    """Trusts the layer ids."""

    def layers(self, file: TensorFile, facts: ArtifactFacts, target: TargetModel) -> None:
        pass


@breaks("A-TARGET-03")
class AnyTokenizer(Contract):
    """Compares sizes and calls it a tokenizer."""

    def tokenizer(self, file: TensorFile, target: TargetModel) -> None:
        if not isinstance(file.metadata.get("tokenizer_sha256"), str):
            refuse(file, "tokenizer_sha256 is missing", "a digest")


@breaks("A-ERRORS-01")
class Crashes(Contract):
    """Counts on a key."""

    def whole(self, file: TensorFile, key: str) -> int:
        if key == "vocab_size":
            file.metadata[key]
        return super().whole(file, key)


@breaks("A-NATIVE-01")
class AsksAnEngine(Contract):
    """Lets an engine look at the file first, where one is installed."""

    def check_payload(self, file: TensorFile) -> None:
        with suppress(ImportError):
            import_module("vllm")
        super().check_payload(file)


@breaks("A-COST-01")
class Counts(Contract):
    """Makes a table of a size it has not looked at."""

    def whole(self, file: TensorFile, key: str) -> int:
        value = file.metadata.get(key)
        if isinstance(value, int):
            sum(1 for _ in range(value))
        return super().whole(file, key)
