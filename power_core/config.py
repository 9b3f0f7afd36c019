"""
Configuration: defaults, then ``power.toml``, then ``POWER_*`` variables, then flags; one frozen object.

Every value remembers where it came from, so that an error names the file, variable or flag to mend.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import platformdirs
from attrs import field, frozen

from power_core.errors import ConfigError, PowerError, RequestError
from power_core.host import parse_cores
from power_core.scheduler.widths import policy_name
from power_core.structuring import structured, type_name, unknown_name

if TYPE_CHECKING:  # configuration is read without numpy, which these need
    from power_core.capabilities import Registration
    from power_core.plugins import PluginSet
    from power_core.request import SamplingSpec

__all__ = ["PowerConfig", "config_files", "load_config"]

FILE_NAME = "power.toml"
PREFIX = "POWER_"
PLUGIN_TABLE = "plugin"
_MOST = 1 << 20  # bytes of a file
# Variables with the prefix that are no keys; plugins own POWER_<PLUGIN>_* and are not policed here.
_OTHER_VARIABLES = frozenset({"POWER_ARTIFACTS_DIR", "POWER_BLOCK_PLUGINS", "POWER_CONFIG", "POWER_DEBUG"})
# A variable this like a key's is a typo; the prefix is too common a word to refuse every other name.
_TYPO = 0.85
_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_SAMPLING = (
    "temperature",
    "top_k",
    "typical_p",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "penalty_window",
    "seed",
)


def _is_of_its_type(_config: object, attribute: Any, value: object) -> None:
    """Before any range: a configuration that is made by hand has had no file, variable or flag read for it."""
    structured(PowerConfig, {attribute.name: value}, lambda key: f"PowerConfig({key}=)")


def _at_least(minimum: int) -> Callable[[object, Any, Any], None]:
    def check(_config: object, attribute: Any, value: float | None) -> None:
        if value is not None and not minimum <= value < math.inf:  # NaN compares false
            raise ConfigError(f"{attribute.name} is {value}", who="config", got=value, expected=f">= {minimum}")

    return check


def _is_policy(_config: object, _attribute: Any, value: str) -> None:
    policy_name(value)


def _is_cores(_config: object, _attribute: Any, value: str | None) -> None:
    if value is not None:
        parse_cores(value)


def _is_folder(_config: object, attribute: Any, value: str | None) -> None:
    """A folder, or where one can be made, as far as can be seen without making it."""
    if value is None:
        return
    try:
        folder = Path(value).expanduser().absolute()
        is_one = next(path for path in (folder, *folder.parents) if path.exists()).is_dir()
        cause = "not a folder"
    except (OSError, RuntimeError, ValueError) as exc:  # no such user; a NUL; a name that is too long
        is_one, cause = False, f"{getattr(exc, 'strerror', None) or exc}"
    if not is_one:
        raise ConfigError(f"{attribute.name} is {value!r:.120}: {cause}", who="config", got=value, expected="a folder")


def _is_niceness(_config: object, attribute: Any, value: int | None) -> None:
    if value is not None and not -20 <= value <= 19:
        raise ConfigError(f"{attribute.name} is {value}", who="config", got=value, expected="-20 to 19")


def _key(default: Any, minimum: int | None = None, flag: str | None = None, validator: Any = None) -> Any:
    metadata = {"flag": flag} if flag else {}
    checks = [_is_of_its_type, *([validator] if validator else []), *([] if minimum is None else [_at_least(minimum)])]
    return field(default=default, validator=checks, metadata=metadata)


@frozen
class PowerConfig:
    """
    Everything that can be configured. Keys, variables (``POWER_`` + the key in capitals) and fields have one name.

    Args:
        model: Name of a registered or added model, or a path; None takes the default model.
        spec_mode: `off`, `auto`, the name of a strategy, or several separated by commas: a chain.
        spec_artifact: Names of the artifacts that model-backed strategies load, separated by commas; None takes the
            one that fits.
        spec_draft_max: Most proposal tokens a round (K). 0 never proposes.
        spec_mtp_recurrent_snapshots: Resident rollback states (S), for targets whose memory cannot be cut
            freely. Below K a deep rejection costs one replay, and then bounds the request's proposals.
        spec_width_policy: How many tokens of a proposal are checked: `auto`, `cost-aware`, `adaptive` or `fixed`.
        spec_mtp_adaptive: The older key for `adaptive`.
        spec_mtp_fr_vocab_size: Rows of the output matrix that MTP heads project, from the first on; 0 projects all.
        spec_draft_margin: Model-backed drafters end a proposal at the first token whose margin over the runner-up is
            below this, on the scale their strategy's page names; 0 never does.
        spec_draft_p_min: They end it at the first token whose probability is below this; 0 never does.
        allow_unverified: Let strategies run on targets for which nothing can be promised.
        max_tokens: Most tokens to emit; -1 for no limit but the context.
        backend: Name of the target backend to load models with; None takes the first that knows the file.
        ctx: Positions per sequence; None takes the smaller of 4096 and what the model was trained for.
        threads: Compute threads; None lets the backend choose.
        parallel: Requests decoded together.
        replicas: Sessions that decode one request each, instead of one that decodes several together; 0 takes them
            only for targets that cannot batch.
        queue_max: Requests that may wait.
        queue_per_client: Of them, those that one client may have; None for no further bound.
        deadline: Seconds for a request, waiting and loading included; None for no bound.
        memory_limit: Bytes that the models of a process, with their sessions, may take; None for no bound.
        prompt_cache_bytes: Most bytes of kept prompts in memory, and a quarter of the most on the disk; 0 keeps none.
        prompt_cache_ttl: Seconds after its last use that a kept prompt is dropped; None keeps it.
        prompt_cache_dir: Folder where kept prompts outlive the process; None for nowhere.
        affinity: Cores that the process may run on, as in ``0-3,6``; None leaves it as it is.
        priority: Niceness of the process, from -20 to 19; None leaves it as it is.
        temperature: See `SamplingSpec`, as for all that follow.
        sections: Raw tables ``[plugin.NAME]``, NAME being a target or strategy; see `plugin`.
        sources: Key -> the file, variable or flag it was set by.

    Raises:
        ConfigError: A value is of another type, or out of range.
    """

    model: str | None = _key(None)
    spec_mode: str = _key("auto", flag="--spec")
    spec_artifact: str | None = _key(None, flag="--artifact")
    spec_draft_max: int = _key(8, minimum=0, flag="--draft-max")
    spec_mtp_recurrent_snapshots: int = _key(8, minimum=0)
    spec_width_policy: str = _key("auto", flag="--width-policy", validator=_is_policy)
    spec_mtp_adaptive: bool = _key(False)
    spec_mtp_fr_vocab_size: int = _key(0, minimum=0)
    spec_draft_margin: float = _key(0.0, minimum=0)
    spec_draft_p_min: float = _key(0.0, minimum=0)
    allow_unverified: bool = _key(False)
    max_tokens: int = _key(256, minimum=-1)
    backend: str | None = _key(None)
    ctx: int | None = _key(None, minimum=1)
    threads: int | None = _key(None, minimum=1)
    parallel: int = _key(1, minimum=1)
    replicas: int = _key(0, minimum=0)
    queue_max: int = _key(1024, minimum=0)
    queue_per_client: int | None = _key(None, minimum=0)
    deadline: float | None = _key(None, minimum=0)
    memory_limit: int | None = _key(None, minimum=1)
    prompt_cache_bytes: int = _key(512 * 2**20, minimum=0)
    prompt_cache_ttl: float | None = _key(None, minimum=0)
    prompt_cache_dir: str | None = _key(None, validator=_is_folder)
    affinity: str | None = _key(None, validator=_is_cores)
    priority: int | None = _key(None, validator=_is_niceness)
    temperature: float = _key(0.0)
    top_k: int = _key(0)
    typical_p: float = _key(1.0)
    top_p: float = _key(1.0)
    min_p: float = _key(0.0)
    repeat_penalty: float = _key(1.0)
    presence_penalty: float = _key(0.0)
    frequency_penalty: float = _key(0.0)
    penalty_window: int = _key(64)
    seed: int | None = _key(None, minimum=0)
    sections: Mapping[str, Mapping[str, Any]] = field(
        factory=dict, validator=lambda _config, _attribute, value: _plugin_tables(value), metadata={"internal": True}
    )
    sources: Mapping[str, str] = field(factory=dict, eq=False, repr=False, metadata={"internal": True})

    @property
    def token_limit(self) -> int | None:
        """`max_tokens` as a request has it: None for no limit."""
        return None if self.max_tokens < 0 else self.max_tokens

    @property
    def width_policy(self) -> str:
        """
        The policy that the two keys stand for.

        Raises:
            ConfigError: They disagree.
        """
        return policy_name(self.spec_width_policy, spec_mtp_adaptive=self.spec_mtp_adaptive)

    def overlaid(self, table: Mapping[str, Any], source_of: Callable[[str], str]) -> PowerConfig:
        """
        A copy with the values of *table* on top.

        Args:
            table: Key -> value.
            source_of: Where a key was set, for messages.

        Raises:
            ConfigError: A key is unknown, or a value is of the wrong type or range.
        """
        values: dict[str, Any] = {}
        sources = dict(self.sources)
        _merge(values, sources, table, source_of)
        return attrs.evolve(self, **values, sources=sources)

    def sampling(self, **changes: Any) -> SamplingSpec:
        """
        The sampling settings, with *changes* for what is not configured (bias, schema, log-probabilities).

        Raises:
            ConfigError: A value is out of range; says which key and where it was set.
        """
        from power_core.request import SamplingSpec

        chosen = {name: getattr(self, name) for name in _SAMPLING}
        for name, value in chosen.items():
            try:
                SamplingSpec(**{name: value})
            except RequestError as exc:
                source = self.sources.get(name)
                raise ConfigError(exc.what, who="config", where=source, got=exc.got, expected=exc.expected) from exc
        return SamplingSpec(**{**chosen, **changes})

    def plugin(self, registration: Registration[Any]) -> Any:
        """
        The section ``[plugin.NAME]`` of a registered target or strategy, as its own config class.

        A field of that class with ``metadata={"inherits": KEY}`` takes the value of this configuration's KEY unless
        the section sets it.

        Returns:
            An instance with the plugin's defaults where nothing is configured; None where it takes no configuration.

        Raises:
            ConfigError: A key is unknown or a value is of the wrong type or range.
        """
        return self._section(registration, inherits=True)

    def _section(self, registration: Registration[Any], *, inherits: bool) -> Any:
        """The section alone, or with what it inherits: a shared key may be meant for another plugin's scale."""
        table = self.sections.get(registration.name, {})
        source = self.sources.get(f"{PLUGIN_TABLE}.{registration.name}", "config")
        where = f"[{PLUGIN_TABLE}.{registration.name}]"
        if registration.config is None:
            if table:
                raise ConfigError("takes no configuration", who=source, where=where, plugin=registration.plugin)
            return None
        shared = [a for a in attrs.fields(registration.config) if inherits and "inherits" in a.metadata]
        values = {a.name: getattr(self, a.metadata["inherits"]) for a in shared}
        values |= structured(registration.config, table, lambda key: f"{source}: {where} {key}")
        try:
            return registration.config(**values)
        except Exception as exc:
            inherited = [a for a in shared if a.name not in table and not _takes(registration.config, a, values)]
            if inherited:  # the value is not this section's: the key it comes from is the one to mend
                key = inherited[0].metadata["inherits"]
                source, where = self.sources.get(key, "config"), f"{key}, which {where} inherits"
            what = exc.what if isinstance(exc, PowerError) else str(exc.args[0] if exc.args else exc)
            expected, fix = (exc.expected, exc.fix) if isinstance(exc, PowerError) else (None, None)
            raise ConfigError(
                what, who=source, where=where, plugin=registration.plugin, got=dict(table), expected=expected, fix=fix
            ) from exc

    def check_plugins(self, plugins: PluginSet) -> None:
        """
        Refuse sections for a name that nobody registered, and what is wrong in those of installed plugins.

        Where plugins failed to load or were blocked an unknown section may be theirs, and is let be.

        Raises:
            ConfigError: With the nearest registered name, or with what `plugin` would say.
        """
        registry = plugins.registry
        known = {item.name: item for item in (*registry.targets, *registry.strategies)}
        for name in self.sections:
            if name in known:
                self._section(known[name], inherits=False)
            elif not plugins.failures and not plugins.blocked:
                source = self.sources.get(f"{PLUGIN_TABLE}.{name}")
                raise unknown_name(f"no installed plugin has the section [{PLUGIN_TABLE}.{name}]", name, known, source)


def _takes(config: Any, attribute: Any, values: Mapping[str, Any]) -> bool:
    """Whether the class *config* takes the value of *attribute* alone."""
    try:
        config(**{attribute.name: values[attribute.name]})
    except Exception:  # noqa: BLE001 - plugin code may raise anything
        return False
    return True


def load_config(
    flags: Mapping[str, Any] | None = None,
    *,
    path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> PowerConfig:
    """
    Read the configuration.

    Args:
        flags: Key -> value of what was given on the command line; None means not given.
        path: The file to read instead of looking for one (``--config``).
        environ: Environment to read instead of the process's.
        cwd: Folder whose ``power.toml`` counts, instead of the current one.

    Raises:
        ConfigError: Names key, source, value and what was expected.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    sections: dict[str, Any] = {}
    file = _find_file(path, environ, cwd)
    if file is not None:
        table = _read_toml(file)
        sections = dict(_plugin_tables(table.pop(PLUGIN_TABLE, {}), str(file)))
        _merge(values, sources, table, lambda key: f"{file}: {key}")
        sources |= {f"{PLUGIN_TABLE}.{name}": str(file) for name in sections}
    _merge(values, sources, _from_environment(environ), lambda key: PREFIX + key.upper())
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    _merge(values, sources, given, _flag_name)
    return PowerConfig(**values, sections=sections, sources=sources)


def config_files(environ: Mapping[str, str] | None = None, cwd: Path | None = None) -> list[Path]:
    """Where a configuration file is looked for, first hit wins."""
    environ = os.environ if environ is None else environ
    named = [Path(environ["POWER_CONFIG"])] if environ.get("POWER_CONFIG") else []
    return [*named, (cwd or Path()) / FILE_NAME, platformdirs.user_config_path("power") / FILE_NAME]


def _keys() -> dict[str, Any]:
    attrs.resolve_types(PowerConfig)
    return {a.name: a for a in attrs.fields(PowerConfig) if not a.metadata.get("internal")}


def _flag_name(key: str) -> str:
    attribute = _keys().get(key)
    flag = attribute.metadata.get("flag") if attribute is not None else None
    return flag or "--" + key.replace("_", "-")


def _find_file(path: str | Path | None, environ: Mapping[str, str], cwd: Path | None) -> Path | None:
    if path is None and environ.get("POWER_CONFIG"):
        path = environ["POWER_CONFIG"]
    if path is not None:  # a file that was asked for must be there
        return Path(path)
    return next((file for file in config_files(environ, cwd) if file.is_file()), None)


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as source:
            data = source.read(_MOST + 1)
        if len(data) > _MOST:  # a device need not end
            raise ConfigError(f"more than {_MOST:,} bytes", who="config", where=str(file), expected="a power.toml")
        return tomllib.loads(data.decode("utf-8-sig"))  # some editors write the mark
    except OSError as exc:
        raise ConfigError(f"cannot be read: {exc.strerror}", who="config", where=f"{file!s:.200}", got=file) from exc
    except ValueError as exc:  # broken UTF-8 and broken TOML
        raise ConfigError(f"not TOML: {exc}", who="config", where=str(file)) from exc
    except RecursionError as exc:
        raise ConfigError("nested too deeply", who="config", where=str(file)) from exc


def _plugin_tables(table: Any, source: str = "PowerConfig(sections=)") -> Mapping[str, Any]:
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"{PLUGIN_TABLE} is {table!r:.80}",
            who="config",
            where=source,
            got=table,
            expected=f"tables [{PLUGIN_TABLE}.NAME]",
        )
    for name, section in table.items():
        if not isinstance(section, Mapping):
            raise ConfigError(
                f"{PLUGIN_TABLE}.{name} is {section!r:.80}",
                who="config",
                where=source,
                got=section,
                expected=f"a table [{PLUGIN_TABLE}.{name}]",
            )
    return table


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    keys = {PREFIX + key.upper(): attribute for key, attribute in _keys().items()}
    found = {}
    flags = {PREFIX + _flag_name(key)[2:].replace("-", "_").upper(): PREFIX + key.upper() for key in _keys()}
    for name, value in environ.items():
        if name in keys:
            if value != "":  # an empty variable is one that was switched off
                found[keys[name].name] = _read_value(value, keys[name].type)
        elif name in flags or _looks_like_key(name, keys):
            raise unknown_name(f"unknown variable {name}", flags.get(name, name), keys, "environment")
    return found


def _looks_like_key(name: str, keys: Mapping[str, Any]) -> bool:
    if not name.startswith(PREFIX) or name in _OTHER_VARIABLES:
        return False
    return name.startswith("POWER_SPEC_") or bool(difflib.get_close_matches(name, keys, n=1, cutoff=_TYPO))


def _read_value(text: str, wanted: Any) -> Any:
    """What a variable spells; what does not fit stays text and is refused with its source."""
    readers: dict[str, Callable[[str], Any]] = {
        type_name(int): int,
        type_name(float): float,
        type_name(bool): lambda spelt: _TRUTH[spelt.lower()],
    }
    try:
        return readers.get(type_name(wanted), str)(text)
    except (KeyError, ValueError):
        return text


def _merge(
    values: dict[str, Any], sources: dict[str, str], table: Mapping[str, Any], source_of: Callable[[str], str]
) -> None:
    for key, value in structured(PowerConfig, table, source_of).items():
        try:
            PowerConfig(**{key: value})  # alone, so that an error in its range knows its source
        except ConfigError as exc:
            exc.where = source_of(key)
            raise
        values[key] = value
        sources[key] = source_of(key)
