"""What each strategy stands for on one loaded target: its plugin, its artifact and its drafter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from attrs import frozen

from power_core.artifacts.admission import load_artifact
from power_core.artifacts.catalog import ArtifactEntry, catalog, choose, find
from power_core.artifacts.contract import Artifact, ArtifactContract
from power_core.artifacts.matching import installed_contracts
from power_core.capabilities import AUTO, OFF, Registration, Registry
from power_core.config import PowerConfig
from power_core.drafter import Drafter
from power_core.errors import CapabilityError, ConfigError, PluginError, PowerError
from power_core.scheduler.chains import SEPARATOR, chain_names
from power_core.target import TargetModel

__all__ = ["ResolvedStrategy", "StrategyResolver", "make_configured"]


@frozen
class ResolvedStrategy:
    """
    A strategy that can be opened for the target it was resolved for.

    Args:
        item: Its registration.
        drafter: What its factory made.
        artifact: What the drafter loads; None for zero-weight strategies, and for those that do without.
    """

    item: Registration[Any]
    drafter: Drafter
    artifact: Artifact | None = None


class StrategyResolver:
    """
    Resolves strategy names for one loaded target.

    Args:
        registry: What plugins offer.
        config: Sections of strategies, and `spec_artifact`.
        model: The target.

    Raises:
        CapabilityError: `spec_artifact` names an artifact that is not there.
        ConfigError: `spec_artifact` is no list of names.
    """

    def __init__(self, registry: Registry, config: PowerConfig, model: TargetModel) -> None:
        self._registry = registry
        self._config = config
        self._model = model
        self._wanted = _names(config)
        self._resolved: dict[str, ResolvedStrategy] = {}
        for name in self._wanted:
            find(self._entries, name, where=config.sources.get("spec_artifact"))

    def resolve(self, name: str) -> ResolvedStrategy:
        """
        The strategy *name* for this target; the digests of its artifact have been checked.

        Raises:
            CapabilityError: Nobody provides it, or no artifact of its kind is there for this target.
            ArtifactError: Its artifact is damaged or bound to another target.
            ConfigError: Its section of power.toml does not fit.
        """
        if name not in self._resolved:
            item = self._registry.strategy(name)
            arguments = [] if item.options.get("artifact_kind") is None else [self._artifact(item)]
            drafter: Drafter = make_configured(self._config, item, *arguments)
            self._resolved[name] = ResolvedStrategy(item, drafter, *arguments)
        return self._resolved[name]

    def hidden_layers(self, strategy: str) -> tuple[int, ...]:
        """Block outputs that the members of the chain *strategy* read, in ascending order."""
        if strategy == OFF:
            return ()
        needs = [self.resolve(name).drafter.requirements() for name in chain_names(strategy)]
        return tuple(sorted({layer for need in needs for layer in need.hidden_layers}))

    def candidates(self, spec: str) -> Iterator[str]:
        """
        The strategies to try for *spec*, best first: for `auto` several, for anything else the one it names.

        `auto` prefers strategies whose artifact is there for this target, then those that may do without one
        (a target with prediction layers of its own), then zero-weight ones, then plain decoding; among their
        like the lowest `auto_rank`. Strategies without a rank are not among them. A model-backed strategy is
        tried behind the best zero-weight one, as a chain: lookup costs next to nothing, and copies better.

        Raises:
            CapabilityError: Several artifacts fit alike.
        """
        if spec != AUTO:
            yield spec if spec == OFF else SEPARATOR.join(chain_names(spec))
            return
        ranked = [item for item in self._registry.strategies if item.options.get("auto_rank") is not None]
        entries = {item.name: self._entry(item) for item in ranked}
        ranked.sort(key=lambda item: self._preference(item, entries[item.name]))
        lookup = next((item.name for item in ranked if item.options.get("zero_weight")), None)
        for item in ranked:
            if self._is_possible(item, entries[item.name]):
                is_chain = lookup is not None and item.options.get("artifact_kind") is not None
                yield f"{lookup}{SEPARATOR}{item.name}" if is_chain else item.name
        yield OFF

    def is_chosen(self, strategy: str) -> bool:
        """Whether the user chose an artifact that *strategy* loads: then nothing may stand in for it."""
        if strategy == OFF:
            return False
        entries = [self._entry(self._registry.strategy(name)) for name in chain_names(strategy)]
        return any(entry is not None and entry.name in self._wanted for entry in entries)

    def explain(self, strategy: str, refusal: CapabilityError) -> CapabilityError:
        """What to raise for *refusal*: it says more where a member of *strategy* had to do without its artifact."""
        for name in () if strategy == OFF else chain_names(strategy):
            found = self.resolve(name)
            if found.item.options.get("artifact_kind") is not None and found.artifact is None:
                error = self._nothing_fits(found.item)
                error.what += f"; without one: {refusal.what}"
                return error
        return refusal

    @cached_property
    def _entries(self) -> list[ArtifactEntry]:
        return catalog(self._registry)

    @cached_property
    def _contracts(self) -> dict[str, ArtifactContract]:
        return installed_contracts(self._registry)

    def _entry(self, item: Registration[Any]) -> ArtifactEntry | None:
        kind = item.options.get("artifact_kind")
        return None if kind is None else choose(self._entries, kind, self._model.identity, self._wanted)

    def _preference(self, item: Registration[Any], entry: ArtifactEntry | None) -> tuple[bool, bool, bool, int, str]:
        is_chosen = entry is not None and entry.name in self._wanted
        needs_none = item.options.get("artifact_kind") is None
        return not is_chosen, entry is None, needs_none, item.options["auto_rank"], item.name

    def _is_possible(self, item: Registration[Any], entry: ArtifactEntry | None) -> bool:
        needs_one = item.options.get("artifact_kind") is not None and not item.options.get("artifact_optional")
        return entry is not None or not needs_one

    def _artifact(self, item: Registration[Any]) -> Artifact | None:
        entry = self._entry(item)
        if entry is not None:
            return load_artifact(entry.located(), self._contracts, self._model)
        if item.options.get("artifact_optional"):
            return None
        raise self._nothing_fits(item)

    def _nothing_fits(self, item: Registration[Any]) -> CapabilityError:
        kind, target = item.options["artifact_kind"], self._model.identity.name
        others = [e for e in self._entries if e.manifest is not None and e.manifest.kind == kind]
        notes = [f"{e.name} drafts for {e.manifest.target.name}" for e in others if e.manifest is not None]
        notes += [f"{e.name} cannot be used" for e in self._entries if e.problem is not None]
        return CapabilityError(
            f"strategy {item.name!r} needs an artifact of kind {kind!r} for {target}, and none is there"
            + (f" ({'; '.join(notes)})" if notes else ""),
            who="artifacts",
            got=[entry.name for entry in others],
            plugin=item.plugin,
            fix="admit one with `power artifacts admit FILE --target MODEL`, or install a package that ships one for "
            "this very model file; see `power artifacts list`",
        )


def make_configured(config: PowerConfig, item: Registration[Any], *arguments: object) -> Any:
    """
    What a plugin's factory returns for its section of the configuration.

    Raises:
        ConfigError: The section does not fit.
        PluginError: The factory raised.
    """
    section = config.plugin(item)
    try:
        return item.value(section, *arguments)
    except PowerError:
        raise
    except Exception as exc:  # plugin code may raise anything
        raise PluginError(
            f"making {item.name!r} raised {type(exc).__name__}: {exc}",
            who=item.owner,
            plugin=item.plugin,
            fix="report it to the plugin's author",
        ) from exc


def _names(config: PowerConfig) -> tuple[str, ...]:
    if not config.spec_artifact:
        return ()
    names = tuple(name.strip() for name in config.spec_artifact.split(SEPARATOR))
    if not all(names) or len(set(names)) != len(names):
        raise ConfigError(
            f"spec_artifact is {config.spec_artifact!r}",
            who="config",
            where=config.sources.get("spec_artifact"),
            got=config.spec_artifact,
            expected="names of artifacts separated by commas, each once",
        )
    return names
