"""Which installed contract a file falls under, and what that contract finds in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from power_core.artifacts.contract import ArtifactContract, ArtifactFacts
from power_core.artifacts.tensors import TensorFile
from power_core.errors import ArtifactError, PluginError, PowerError
from power_core.target import TargetModel

if TYPE_CHECKING:
    from power_core.capabilities import Registry

__all__ = ["checked_facts", "installed_contracts", "match_contract"]

T = TypeVar("T")


def installed_contracts(registry: Registry) -> dict[str, ArtifactContract]:
    """
    The contracts that plugins registered, by kind.

    Raises:
        PluginError: A factory raised, or made a contract of another kind.
    """
    contracts: dict[str, ArtifactContract] = {}
    for item in registry.contracts:
        contract: ArtifactContract = _guarded(f"the contract of kind {item.name!r}", item.value)
        if contract.kind != item.name:
            raise PluginError(
                f"the contract registered as {item.name!r} is of kind {contract.kind!r}",
                who=item.owner,
                plugin=item.plugin,
                got=contract.kind,
                expected=item.name,
            )
        contracts[item.name] = contract
    return contracts


def match_contract(file: TensorFile, contracts: Mapping[str, ArtifactContract]) -> ArtifactContract:
    """
    The one contract that *file* falls under.

    Raises:
        ArtifactError: None does; says for each kind what it misses.
        PluginError: Several do: two plugins disagree about what a file is.
    """
    found = [each for each in contracts.values() if _guarded(f"contract {each.kind!r}", each.matches, file)]
    if len(found) > 1:
        kinds = " and ".join(sorted(each.kind for each in found))
        raise PluginError(
            f"the file is of kinds {kinds} at once",
            who="artifacts",
            where=str(file.path),
            got=kinds,
            expected="one kind",
            fix="report it to the plugins' authors, or block one with POWER_BLOCK_PLUGINS",
        )
    if not found:
        reasons = "; ".join(f"{kind}: {_complaint(file, each)}" for kind, each in sorted(contracts.items()))
        raise ArtifactError(
            "no installed plugin knows this kind of drafter" + (f" ({reasons})" if reasons else ""),
            who="artifacts",
            where=str(file.path),
            got=sorted(contracts),
            expected="a file of kind " + (" or ".join(sorted(contracts)) or "that an installed plugin loads; none is"),
            fix="install the plugin of its kind, or convert it again",
        )
    return found[0]


def checked_facts(
    file: TensorFile, contract: ArtifactContract, target: TargetModel | None = None, *, payload: bool
) -> ArtifactFacts:
    """
    What *contract* reads off *file* after every check it has.

    Args:
        file: A file that it matches.
        contract: The contract.
        target: What the file is to draft for, or None where that is not asked.
        payload: Whether the values are looked at too.

    Raises:
        ArtifactError: The first thing found wrong.
        PluginError: The contract broke its own.
    """
    who = f"contract {contract.kind!r}"
    facts = _guarded(who, contract.check, file)
    if not isinstance(facts, ArtifactFacts):
        raise PluginError(f"check returned {facts!r:.80}", who=who, got=facts, expected="ArtifactFacts")
    if target is not None:
        _guarded(who, contract.check_target, file, facts, target)
    if payload:
        _guarded(who, contract.check_payload, file)
    return facts


def _complaint(file: TensorFile, contract: ArtifactContract) -> str:
    """Why *file* is none of the contract's, in its own words."""
    try:
        contract.check(file)
    except PowerError as exc:
        return exc.what[:160]
    except Exception as exc:  # noqa: BLE001 - plugin code may raise anything
        return type(exc).__name__
    return "metadata and tensors are not of this kind"


def _guarded(who: str, call: Callable[..., T], *args: object) -> T:
    """Call a plugin; what is no error of ours becomes one that names it."""
    try:
        return call(*args)
    except PowerError:
        raise
    except Exception as exc:  # plugin code may raise anything
        path = getattr(args[0], "path", None) if args else None
        raise PluginError(
            f"raised {type(exc).__name__}: {exc}",
            who=who,
            where=path and str(path),
            got=exc,
            fix="report it to the plugin's author",
        ) from exc
