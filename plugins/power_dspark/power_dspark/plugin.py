"""Registration of the contract and the strategy `dspark`. What they need is imported when one is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from power_core.hookspecs import RegisterContract, RegisterFixture, RegisterStrategy, hookimpl
from power_dspark import fixtures
from power_dspark.config import DsparkConfig

if TYPE_CHECKING:
    from power_core.artifacts import Artifact, ArtifactContract
    from power_core.drafter import Drafter

_KIND = "dspark"


def _contract() -> ArtifactContract:
    from power_dspark.artifact import DsparkContract

    return DsparkContract()


def _drafter(config: DsparkConfig, artifact: Artifact) -> Drafter:
    from power_dspark.drafter import DsparkDrafter

    return DsparkDrafter(config, artifact.file)


@hookimpl
def power_register_contracts(register: RegisterContract) -> None:
    """Register the contract of DSpark drafter files."""
    register(_KIND, _contract)


@hookimpl
def power_register_strategies(register: RegisterStrategy) -> None:
    """Register the strategy under the name its config class carries."""
    register(
        DsparkConfig.strategy, _drafter, config=DsparkConfig, artifact_kind=_KIND, auto_rank=10,
        description="a block in one pass, a Markov head over it, and a confidence for each token",
    )  # fmt: skip


@hookimpl
def power_register_fixtures(register: RegisterFixture) -> None:
    """Offer a tiny drafter in each container to ``power conformance``."""
    register("gguf", fixtures.tiny_gguf, kind="artifact")
    register("published", fixtures.tiny_published, kind="artifact")
