"""What the factories of the hook ``power_register_fixtures`` return, as subjects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from power_conformance.subjects import DEFAULT_OPTIONS, ContractSubject, DrafterSubject, TargetSubject
from power_core.artifacts import Artifact, ArtifactContract, Provenance, open_tensors
from power_core.artifacts.admission import manifest_of

__all__ = ["artifact_of", "contract_subject", "drafter_subject", "target_subject"]


def target_subject(made: Any, *, seed: int = 0, again: str | None = None) -> TargetSubject:
    """The subject of a target fixture: a model, or a model and the options to try it with."""
    model, options = made if isinstance(made, tuple) else (made, [DEFAULT_OPTIONS])
    return TargetSubject(model, tuple(options), seed=seed, again=again)


def drafter_subject(made: Any, *, seed: int = 0) -> DrafterSubject:
    """The subject of a drafter fixture: a drafter and a target it can draft for."""
    drafter, model = made
    return DrafterSubject(drafter, model, seed=seed)


def contract_subject(made: Any, *, others: Iterable[ArtifactContract] = (), seed: int = 0) -> ContractSubject:
    """The subject of an artifact fixture: a contract, a good file, and a target that the file was made for."""
    contract, path, model = made
    return ContractSubject(contract, path, model, tuple(o for o in others if o.kind != contract.kind), seed)


def artifact_of(subject: ContractSubject) -> Artifact:
    """
    The good file of *subject* as the core hands admitted ones to a strategy's factory.

    Raises:
        ArtifactError: The contract refuses it.
    """
    contracts = {subject.contract.kind: subject.contract}
    origin = Provenance("power-conformance", "none", "none")
    manifest = manifest_of(subject.path, name="good", target=subject.model, provenance=origin, contracts=contracts)
    return Artifact(manifest, open_tensors(subject.path))
