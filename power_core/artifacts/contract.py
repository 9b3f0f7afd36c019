"""
What a plugin promises about the drafter files it loads, and what the core remembers of an admitted one.

A contract decides a file's kind from its metadata and its tensor table, and refuses, in Python, whatever
native code would abort on or silently misread. The core binds an admitted file to one target and one
content by digests it computes itself, and checks them at every load.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from attrs import frozen

from power_core.artifacts.tensors import TensorFile
from power_core.target import TargetModel
from power_core.types import JSON, TargetIdentity

__all__ = ["Artifact", "ArtifactContract", "ArtifactFacts", "ArtifactManifest", "FileDigest", "Provenance"]


@frozen
class ArtifactFacts:
    """
    What a contract reads off a good file.

    Args:
        hidden_layers: Target block outputs the drafter reads, in the order their features are concatenated;
            numbered as in `Rows.hidden`.
        hidden_size: Width of one of them.
        vocab_size: Vocabulary the drafter was made for: the target's.
        draft_vocab_size: Rows of its output matrix; equal to *vocab_size* without a reduced vocabulary.
        block_size: Most tokens of one draft round, or None where any number can be drafted.
        details: Whatever else a user may want to see.
    """

    hidden_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    block_size: int | None = None
    details: Mapping[str, JSON] = {}


class ArtifactContract(Protocol):
    """One kind of drafter file. Made by the factory a plugin registers; holds no state."""

    @property
    def kind(self) -> str:
        """`mtp-head`, `dflash-v1`, `dflash2`, `dspark`, or a third party's own."""

    def matches(self, file: TensorFile) -> bool:
        """
        Whether metadata and tensor table together make *file* one of this kind.

        At most one installed contract may match a file: a DSpark file is not a DFlash file with more tensors.
        """

    def check(self, file: TensorFile) -> ArtifactFacts:
        """
        Check names, types, shapes and metadata ranges; reads the header only.

        Raises:
            ArtifactError: The first thing found wrong: what was found, what was expected, what to do.
        """

    def check_payload(self, file: TensorFile) -> None:
        """
        Check the values: finite floats, ids inside the vocabulary.

        Raises:
            ArtifactError: With the tensor and the index.
        """

    def check_target(self, file: TensorFile, facts: ArtifactFacts, target: TargetModel) -> None:
        """
        Check that the file can draft for *target*: hidden size, layers, vocabulary, and the tokenizer's content
        where the file carries one.

        Raises:
            ArtifactError: It cannot.
        """


@frozen
class Provenance:
    """Where a file came from, as the user or the packager says; recorded, never trusted for identity."""

    source: str
    revision: str
    license: str


@frozen
class FileDigest:
    """One file of an artifact, by name relative to the manifest's folder."""

    name: str
    nbytes: int
    sha256: str


@frozen
class ArtifactManifest:
    """
    An admitted artifact: what it is, where it came from and which target it is bound to.

    Args:
        name: The name it was admitted under.
        kind: The contract that admitted it.
        files: Its files with their digests, the tensor file first.
        target: The one target it may draft for.
        facts: What the contract read off it.
        provenance: Where it came from.
    """

    name: str
    kind: str
    files: tuple[FileDigest, ...]
    target: TargetIdentity
    facts: ArtifactFacts
    provenance: Provenance


@frozen
class Artifact:
    """An admitted artifact whose digests have just been checked: what a drafter's factory is given."""

    manifest: ArtifactManifest
    file: TensorFile

    @property
    def path(self) -> Path:
        return self.file.path
