"""Registers the drafters in `drafters/`: each a GGUF file with its manifest, receipt and loss curve beside it."""

from __future__ import annotations

from functools import partial
from importlib import resources
from pathlib import Path

from power_core.errors import ArtifactError
from power_core.hookspecs import ArtifactSource, RegisterArtifact, hookimpl

__all__ = ["DRAFTERS", "locate", "power_register_artifacts"]

DRAFTERS = {
    "smollm2-mtp": "MTP head, one layer applied again and again",
    "smollm2-dspark": "DSpark, a block of 7 with Markov and confidence heads",
    "smollm2-dflash": "DFlash, a block of 8",
    "smollm2-dflash2": "DFlash2, a block of 8 with convolutions and a lattice of 8 candidates",
}
"""Artifact name -> description."""


def locate(name: str) -> Path:
    """
    The manifest of the drafter *name*.

    Raises:
        ArtifactError: The installation has lost it.
    """
    path = Path(str(resources.files("power_smollm2_drafters"))) / "drafters" / f"{name}-q4mix.gguf.json"
    if path.is_file():
        return path
    raise ArtifactError(
        f"the installed power-smollm2-drafters has no {path.name}",
        who=f"artifact {name!r}",
        where=str(path),
        fix="pip install --force-reinstall --no-deps power-smollm2-drafters",
        plugin="smollm2-drafters",
    )


@hookimpl
def power_register_artifacts(register: RegisterArtifact) -> None:
    """Offer one drafter of each kind for the model `smollm2`."""
    for name, description in DRAFTERS.items():
        register(name, ArtifactSource(partial(locate, name), description=f"for smollm2: {description}"))
