"""
The hooks a plugin may implement. All run once, at start-up; none is called per token.

A plugin is a module named by an entry point in the group ``power``. It marks its functions with
`hookimpl` and hands factories to the ``register`` callback it is given; heavy imports belong inside
the factories. Each callback knows which plugin it was given to and refuses a name that is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pluggy
from attrs import frozen

if TYPE_CHECKING:
    from power_core.artifacts.contract import ArtifactContract
    from power_core.drafter import Drafter
    from power_core.target import TargetBackend

__all__ = [
    "ENTRY_POINT_GROUP",
    "ArtifactSource",
    "ModelSource",
    "RegisterArtifact",
    "RegisterCommand",
    "RegisterContract",
    "RegisterFixture",
    "RegisterModel",
    "RegisterStrategy",
    "RegisterTarget",
    "hookimpl",
    "hookspec",
]

ENTRY_POINT_GROUP = "power"
hookspec = pluggy.HookspecMarker("power")
hookimpl = pluggy.HookimplMarker("power")


@frozen
class ModelSource:
    """
    A named model.

    Args:
        locate: Returns the file's path; raises `ArtifactError` with the command that would bring it.
        sha256: Digest the file must have (64 hex digits), or None where any content is accepted.
        description: One line for `power models`.
    """

    locate: Callable[[], Path]
    sha256: str | None = None
    description: str = ""


@frozen
class ArtifactSource:
    """
    A drafter that a package ships.

    Args:
        locate: Returns the path of its manifest, a JSON file beside the drafter's files; raises `ArtifactError`.
        description: One line for ``power artifacts list``.
    """

    locate: Callable[[], Path]
    description: str = ""


class RegisterTarget(Protocol):
    """
    ``register("llamacpp", make, config=LlamaCppConfig)``.

    *config* is an attrs class: the section ``[plugin.llamacpp]`` of power.toml, given to the factory.
    """

    def __call__(
        self, name: str, factory: Callable[[Any], TargetBackend], /, *, config: type | None = None
    ) -> None: ...


class RegisterStrategy(Protocol):
    """
    ``register("suffix", make, config=SuffixConfig)``.

    *zero_weight* marks strategies that need no artifact; *auto_rank* orders strategies for `auto` among their
    like: those with an artifact first, zero-weight ones after them (lowest first, None never).

    *artifact_kind* is the kind a model-backed strategy loads; its factory is called ``factory(config, artifact)``
    with an admitted `Artifact` bound to the target. With *artifact_optional* it is called with None where no
    artifact is admitted, and its drafter's requirements then decide whether the target can do without.
    """

    def __call__(
        self,
        name: str,
        factory: Callable[..., Drafter],
        /,
        *,
        config: type | None = None,
        zero_weight: bool = False,
        artifact_kind: str | None = None,
        artifact_optional: bool = False,
        auto_rank: int | None = None,
        description: str = "",
    ) -> None: ...


class RegisterModel(Protocol):
    """``register("smollm2", ModelSource(...), default=True)``."""

    def __call__(self, name: str, source: ModelSource, /, *, default: bool = False) -> None: ...


class RegisterContract(Protocol):
    """``register("dspark", make_contract)``: *factory* takes no argument; the name is the artifact kind."""

    def __call__(self, name: str, factory: Callable[[], ArtifactContract], /) -> None: ...


class RegisterArtifact(Protocol):
    """``register("smollm2-dspark", ArtifactSource(locate, description="..."))``."""

    def __call__(self, name: str, source: ArtifactSource, /) -> None: ...


class RegisterCommand(Protocol):
    """``register("train", "power_train.cli:train", help="...")``: imported only when the command is run."""

    def __call__(self, name: str, import_path: str, /, *, help: str) -> None: ...  # noqa: A002 - click's own word


class RegisterFixture(Protocol):
    """
    ``register("tiny-llama", make_tiny_llama, kind="target")``: something ``power conformance`` can try.

    *factory* is given an empty folder. For kind `target` it returns a `TargetModel`, or that and the
    `SessionOptions` to try it with: ``(model, [options, ...])``. For kind `drafter` it returns the drafter
    and a target it can draft for: ``(drafter, model)``. For kind `artifact` it returns an `ArtifactContract`, the path
    of a good file without anything optional, and a target the file was made for: ``(contract, path, model)``;
    strategies that load the kind are then tried with it. Zero-weight strategies need no fixture.
    """

    def __call__(self, name: str, factory: Callable[[Path], Any], /, *, kind: str) -> None: ...


@hookspec
def power_register_targets(register: RegisterTarget) -> None:
    """Offer target backends."""


@hookspec
def power_register_strategies(register: RegisterStrategy) -> None:
    """Offer drafters by strategy name."""


@hookspec
def power_register_models(register: RegisterModel) -> None:
    """Offer models by name."""


@hookspec
def power_register_contracts(register: RegisterContract) -> None:
    """Offer the contracts of artifact kinds."""


@hookspec
def power_register_artifacts(register: RegisterArtifact) -> None:
    """Offer drafters that the package ships, by name."""


@hookspec
def power_register_commands(register: RegisterCommand) -> None:
    """Offer subcommands of ``power``."""


@hookspec
def power_register_fixtures(register: RegisterFixture) -> None:
    """Offer targets, drafters and artifacts that ``power conformance`` checks without a model file of the user."""
