"""A made-up kind of drafter in both containers, its contract, and a plugin that loads it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from power_core.artifacts import Artifact, ArtifactFacts, Provenance, TensorFile
from power_core.artifacts.files import refuse
from power_core.hookspecs import ArtifactSource, hookimpl
from power_core.target import TargetModel
from power_core.testing import OracleDrafter, ScriptedTarget
from power_core.testing.gguf_writer import GgufFile

VOCAB, HIDDEN = 24, 8
ORIGIN = Provenance("https://example.org/toys", "r1", "MIT")
_DTYPES = {"float32": "F32", "float16": "F16", "int64": "I64"}


def head(value: float = 0.5) -> NDArray[np.float32]:
    """A head's one matrix."""
    return np.full((VOCAB, HIDDEN), value, np.float32)


def write_safetensors(
    path: Path, tensors: Mapping[str, NDArray[Any]] | None = None, config: Mapping[str, Any] | None = None
) -> Path:
    """A toy head as safetensors, with its config.json beside it."""
    tensors = {"head.weight": head()} if tensors is None else tensors
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        offsets = [len(data), len(data) + values.nbytes]
        header[name] = {"dtype": _DTYPES[values.dtype.name], "shape": list(values.shape), "data_offsets": offsets}
        data += values.tobytes()
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    settings = {"model_type": "toy", "target_layers": [1, 2]} | dict(config or {})
    path.with_name("config.json").write_text(json.dumps(settings))
    return path


def write_gguf(path: Path, tensors: Mapping[str, NDArray[Any]] | None = None, **keys: Any) -> Path:
    """A toy head as GGUF."""
    file = GgufFile("toy", 0, "F32", {"general.architecture": "toy", "toy.target_layers": [1, 2], **keys})
    for name, values in ({"head.weight": head()} if tensors is None else tensors).items():
        file.plain(name, values)
    return file.write(path, None, ())


class ToyContract:
    """Kind `toy-head`: one matrix; with a second tensor the file is a `toy-tree`."""

    def __init__(self, kind: str = "toy-head", tensors: frozenset[str] = frozenset({"head.weight"})) -> None:
        self.kind = kind
        self.tensors = tensors

    def matches(self, file: TensorFile) -> bool:
        key = "general.architecture" if file.format == "gguf" else "model_type"
        return file.metadata.get(key) == "toy" and set(file.tensors) == self.tensors

    def check(self, file: TensorFile) -> ArtifactFacts:
        if not self.matches(file):
            refuse(file.path, f"the tensors are {', '.join(file.tensors)}", expected=", ".join(sorted(self.tensors)))
        vocab, hidden = file.tensors["head.weight"].shape
        layers = file.metadata["toy.target_layers" if file.format == "gguf" else "target_layers"]
        return ArtifactFacts(tuple(int(i) for i in layers), hidden, vocab, vocab, details={"rows": vocab})

    def check_payload(self, file: TensorFile) -> None:
        bad = ~np.isfinite(file.read("head.weight"))
        if bad.any():
            refuse(file.path, f"head.weight is not finite at index {np.argmax(bad)}", expected="finite numbers")

    def check_target(self, file: TensorFile, facts: ArtifactFacts, target: TargetModel) -> None:
        if facts.hidden_size != target.identity.hidden_size:
            refuse(file.path, f"hidden size {facts.hidden_size}", expected=target.identity.hidden_size)


CONTRACTS = {"toy-head": ToyContract(), "toy-tree": ToyContract("toy-tree", frozenset({"head.weight", "tree.weight"}))}


@define(eq=False)
class ToyPlugin:
    """
    Strategies `head` and `tree`, which load the two kinds, and `either`, which can do without.

    Args:
        target: What the drafters know the answers of.
        shipped: Artifacts the package ships: name -> manifest.
        layers: Block outputs `either` reads where it has no artifact.
        refuses: Raised by the factory of `head`.
    """

    target: ScriptedTarget
    shipped: Mapping[str, Path] = field(factory=dict)
    layers: tuple[int, ...] = ()
    refuses: Exception | None = None
    given: list[tuple[str, Artifact | None]] = field(factory=list)

    def _factory(self, name: str) -> Callable[[Any, Artifact | None], OracleDrafter]:
        def make(_config: Any, artifact: Artifact | None) -> OracleDrafter:
            if self.refuses is not None and name == "head":
                raise self.refuses
            self.given.append((name, artifact))
            layers = self.layers if artifact is None else artifact.manifest.facts.hidden_layers
            return OracleDrafter(self.target.greedy, VOCAB, hidden_layers=layers)

        return make

    @hookimpl
    def power_register_strategies(self, register: Any) -> None:
        register("head", self._factory("head"), artifact_kind="toy-head", auto_rank=5)
        register("tree", self._factory("tree"), artifact_kind="toy-tree", auto_rank=3)
        register("either", self._factory("either"), artifact_kind="toy-tree", artifact_optional=True, auto_rank=9)

    @hookimpl
    def power_register_contracts(self, register: Any) -> None:
        for kind, contract in CONTRACTS.items():
            register(kind, lambda contract=contract: contract)

    @hookimpl
    def power_register_artifacts(self, register: Any) -> None:
        for name, path in self.shipped.items():
            register(name, ArtifactSource(lambda path=path: path, description=f"ships {name}"))
