"""Registration of the strategy `mtp` and of the contract `mtp-head`. What they need is imported when used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from power_core.hookspecs import RegisterContract, RegisterFixture, RegisterStrategy, hookimpl
from power_mtp import fixtures
from power_mtp.config import MtpConfig

if TYPE_CHECKING:
    from power_core.artifacts import Artifact, ArtifactContract
    from power_core.drafter import Drafter


def _make_drafter(config: MtpConfig, artifact: Artifact | None) -> Drafter:
    from power_mtp.drafter import MtpDrafter  # numpy comes with it

    return MtpDrafter(config, artifact)


def _make_contract() -> ArtifactContract:
    from power_mtp.artifact import MtpHeadContract

    return MtpHeadContract()


@hookimpl
def power_register_strategies(register: RegisterStrategy) -> None:
    """Register `mtp`: with an admitted head, or the target's own NextN layer."""
    register(
        "mtp", _make_drafter, config=MtpConfig, artifact_kind="mtp-head", artifact_optional=True, auto_rank=20,
        description="one prediction layer applied to its own output: the target's NextN layer or an attached head",
    )  # fmt: skip


@hookimpl
def power_register_contracts(register: RegisterContract) -> None:
    """Register the contract of MTP heads."""
    register("mtp-head", _make_contract)


@hookimpl
def power_register_fixtures(register: RegisterFixture) -> None:
    """Offer a tiny head in each form to ``power conformance``."""
    register("attached", fixtures.tiny_attached, kind="artifact")
    register("attached-gguf", fixtures.tiny_gguf, kind="artifact")
    register("nextn", fixtures.tiny_nextn, kind="artifact")
