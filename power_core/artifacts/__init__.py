"""Drafter files: tensor tables, contracts, manifests and the record of what was admitted."""

from power_core.artifacts.contract import (
    Artifact,
    ArtifactContract,
    ArtifactFacts,
    ArtifactManifest,
    Provenance,
)
from power_core.artifacts.tensors import TensorFile, TensorInfo, open_tensors

__all__ = [
    "Artifact",
    "ArtifactContract",
    "ArtifactFacts",
    "ArtifactManifest",
    "Provenance",
    "TensorFile",
    "TensorInfo",
    "open_tensors",
]
