"""Registration of both kinds and strategies. What they need is imported when one is used."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from power_core.hookspecs import RegisterContract, RegisterFixture, RegisterStrategy, hookimpl
from power_dflash import fixtures
from power_dflash.config import DFlash2Config, DFlashConfig

if TYPE_CHECKING:
    from power_core.artifacts import Artifact, ArtifactContract
    from power_core.drafter import Drafter

_STRATEGIES: tuple[tuple[type, str, int, str], ...] = (
    (DFlashConfig, "dflash-v1", 40, "block diffusion: a whole block from one forward over the target's hidden states"),
    (DFlash2Config, "dflash2", 30, "block diffusion with local convolutions and a selector that follows token pairs"),
)


def _make_drafter(config: Any, artifact: Artifact) -> Drafter:
    from power_dflash.drafter import BlockDrafter

    return BlockDrafter(config, artifact)


def _make_contract(kind: str) -> ArtifactContract:
    from power_dflash.artifact import BlockContract

    return BlockContract(kind)


@hookimpl
def power_register_strategies(register: RegisterStrategy) -> None:
    """Register both strategies under the names their config classes carry."""
    for config, kind, auto_rank, description in _STRATEGIES:
        register(
            config.strategy,  # type: ignore[attr-defined]  # every class of the table has it
            _make_drafter, config=config, artifact_kind=kind, auto_rank=auto_rank, description=description,
        )  # fmt: skip


@hookimpl
def power_register_contracts(register: RegisterContract) -> None:
    """Register the contract of each kind."""
    for _, kind, _, _ in _STRATEGIES:
        register(kind, partial(_make_contract, kind))


@hookimpl
def power_register_fixtures(register: RegisterFixture) -> None:
    """Offer a tiny drafter of each kind in each container to ``power conformance``."""
    register("v1", fixtures.tiny_v1, kind="artifact")
    register("v1-published", fixtures.tiny_v1_published, kind="artifact")
    register("v2", fixtures.tiny_v2, kind="artifact")
    register("v2-published", fixtures.tiny_v2_published, kind="artifact")
