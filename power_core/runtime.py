"""The facade: plugins, configuration, models and engines."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from power_core import user_cache
from power_core.capabilities import AUTO, OFF
from power_core.config import PowerConfig, load_config
from power_core.engine import Engine
from power_core.errors import ArtifactError, CapabilityError, ConfigError
from power_core.hookspecs import ModelSource
from power_core.host import apply_host, host_facts
from power_core.log import log_quietly
from power_core.models import added_models
from power_core.names import is_address, one_of
from power_core.plugins import PluginSet, load_plugins
from power_core.scheduler.admission import AdmissionController, Deadline
from power_core.scheduler.cache_disk import make_folder
from power_core.scheduler.chains import chain_names
from power_core.scheduler.loading import LoadReservation
from power_core.scheduler.serving import Serving
from power_core.strategies import StrategyResolver, make_configured
from power_core.target import SessionOptions, TargetBackend, TargetModel

__all__ = ["MEASURED", "MEASURING", "Runtime"]

MEASURING = "measuring widths"
"""Log event, level info: a backend measures which row counts compute the same row, once for a model and settings."""
MEASURED = "widths measured"
"""Log event, level info: it is done, or failed; with the seconds that it took."""

log = structlog.get_logger("power.runtime")
_MANY = 1 << 20  # no bound: what counts is bounded by bytes, or by the engines there are
# Arguments of `Runtime.open` that are configured under another name.
_KEYS = {
    "spec": "spec_mode",
    "artifact": "spec_artifact",
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
        if not isinstance(config, PowerConfig | None):
            raise ConfigError(
                f"config is {config!r:.80}",
                who="runtime",
                got=config,
                expected="a PowerConfig",
                fix="load_config(path=...) reads a file",
            )
        self.config = load_config() if config is None else config
        self.plugins = load_plugins() if plugins is None else plugins
        self.config.check_plugins(self.plugins)
        self.registry = self.plugins.registry
        self._engines: list[Engine] = []
        self._memory = AdmissionController(
            max_active=_MANY, max_waiting=_MANY, max_bytes=self.config.memory_limit
        )  # fmt: skip
        self._loads = AdmissionController(max_active=1, max_waiting=self.config.queue_max)
        self._device = AdmissionController(max_active=1, max_waiting=_MANY)  # one forward at a time, over all engines

    def models(self) -> dict[str, ModelSource]:
        """Models by name: those plugins register and those added with ``power models add``."""
        return {**{item.name: item.value for item in self.registry.models}, **added_models()}

    def open(
        self,
        model: str | Path | None = None,
        *,
        spec: str | None = None,
        artifact: str | None = None,
        draft_max: int | None = None,
        width_policy: str | None = None,
        backend: str | None = None,
        context_size: int | None = None,
        parallel: int | None = None,
        threads: int | None = None,
        rollback_rows: int | None = None,
        replicas: int | None = None,
        deadline: Deadline | None = None,
        check: Callable[[TargetModel], None] | None = None,
    ) -> Engine:
        """
        Load a model and make it ready to decode. Arguments that are None come from the configuration.

        Where the widths of these settings were never measured here, that takes its time: `MEASURING` and `MEASURED`
        are the events of the log, at level info, with the model and the row counts.

        Args:
            model: A registered name or a file's path.
            spec: Default strategy of the engine's requests: a name, a chain of names, `auto` or `off`. The session
                gives the hidden states that this one reads; requests may name others that read no more.
            artifact: Names of the artifacts to use, separated by commas, where several fit.
            draft_max: K, the most proposal tokens of a round.
            width_policy: How many of them are used: `auto`, `cost-aware`, `adaptive` or `fixed`.
            backend: Name of the target backend to load the model with, where several know its format.
            context_size: Positions per request.
            parallel: Requests decoded together.
            threads: Compute threads.
            rollback_rows: S, resident rollback states, for targets whose memory cannot be cut freely.
            replicas: Sessions that decode one request each, instead of one that decodes several together.
            deadline: When it must be done, waiting for other loads and for memory included. Without one, memory that
                open models hold is not waited for.
            check: Called with the loaded model before widths are measured; what it raises ends the opening.

        Raises:
            PowerError: With what is missing, damaged or contradictory.
        """
        arguments = {
            "model": None if model is None else str(model),
            "spec": spec,
            "artifact": artifact,
            "draft_max": draft_max,
            "width_policy": width_policy,
            "backend": backend,
            "context_size": context_size,
            "parallel": parallel,
            "threads": threads,
            "rollback_rows": rollback_rows,
            "replicas": replicas,
        }
        given = {_KEYS.get(name, name): value for name, value in arguments.items() if value is not None}
        sources = {_KEYS.get(name, name): f"open({name}=)" for name in arguments}
        config = self.config.overlaid(given, sources.__getitem__)
        self._check_names(config.spec_mode)
        name, path = self._locate(config.model)
        apply_host(config.affinity, config.priority)
        if not isinstance(deadline, Deadline | None):
            raise ConfigError(
                f"deadline is {deadline!r:.80}",
                who="open",
                got=deadline,
                expected="a Deadline",
                fix="Deadline.after(SECONDS) of power_core.scheduler.admission is one",
            )
        if check is not None and not callable(check):
            raise ConfigError(f"check is {check!r:.80}", who="open", got=check, expected="a function of the model")
        deadline = Deadline.after(None) if deadline is None else deadline
        with self._loads.acquire(deadline=deadline):
            engine = self._load(name, path, config, deadline, check)
        self._engines.append(engine)
        return engine

    def _load(
        self,
        name: str,
        path: Path,
        config: PowerConfig,
        deadline: Deadline,
        check: Callable[[TargetModel], None] | None,
    ) -> Engine:
        """Reserve what the model can at most take, then load it: a part of it is never loaded in vain."""
        load = LoadReservation(self._memory, deadline)
        try:
            backend = self._backend(path, config.backend)
            folder = _cache_dir(config)
            if folder is not None and config.prompt_cache_bytes:
                make_folder(folder)  # not after minutes of loading and measuring
            load.reserve(_file_bytes(path))
            loaded = backend.load(path)
            try:
                deadline.check("loading the model")
                if check is not None:
                    check(loaded)
                engine = self._engine(name, loaded, config, load)
                deadline.check("loading the model")
            except BaseException:
                loaded.close()
                raise
        except BaseException:
            load.release()
            raise
        return engine

    def load_target(self, model: str | Path | None = None) -> TargetModel:
        """
        Load a model without a session, for callers that ask for its identity or its tokenizer; they close it.

        Args:
            model: A registered name or a file's path; None takes the configured or the default one.

        Raises:
            PowerError: With what is missing or damaged.
        """
        _, path = self._locate(self.config.model if model is None else str(model))
        return self._backend(path, self.config.backend).load(path)

    def close(self) -> None:
        """Close every engine. Idempotent."""
        while self._engines:
            self._engines.pop().close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_names(self, spec: str) -> None:
        """Refuse a strategy that nobody provides before a model is loaded."""
        if spec not in (AUTO, OFF):
            for name in chain_names(spec):
                self.registry.strategy(name)

    def _engine(self, name: str, loaded: TargetModel, config: PowerConfig, load: LoadReservation) -> Engine:
        """An engine with the first candidate for the configured strategy that this target can do."""
        resolver = StrategyResolver(self.registry, config, loaded)
        candidates = resolver.candidates(config.spec_mode)
        while True:
            strategy = next(candidates)  # the last one is plain decoding, which returns or raises
            try:
                return self._engine_with(strategy, name, loaded, config, resolver, load)
            except CapabilityError as exc:
                if config.spec_mode != AUTO or strategy == OFF or resolver.is_chosen(strategy):
                    raise resolver.explain(strategy, exc) from exc.__cause__
                log.debug("auto passes over a strategy", strategy=strategy, reason=str(exc))

    def _engine_with(
        self,
        strategy: str,
        name: str,
        loaded: TargetModel,
        config: PowerConfig,
        resolver: StrategyResolver,
        load: LoadReservation,
    ) -> Engine:
        sequences = 1 if config.replicas else config.parallel
        options = SessionOptions(
            context_size=config.ctx,
            max_sequences=sequences,
            max_rows=sequences * (config.spec_draft_max + 1),
            rollback_rows=config.spec_mtp_recurrent_snapshots,
            hidden_layers=resolver.hidden_layers(strategy),
            threads=config.threads,
        )
        with _measuring_told(name, options):
            return Engine(
                name,
                loaded,
                options,
                resolve=resolver.resolve,
                allow_unverified=config.allow_unverified,
                strategy=strategy,
                draft_max=config.spec_draft_max,
                width_policy=config.width_policy,
                is_auto=config.spec_mode == AUTO,
                must_pay=config.spec_mode == AUTO and not resolver.is_chosen(strategy),
                serving=self._serving(config, load.session(loaded, options)),
                host=host_facts(config.threads),
            )

    def _serving(self, config: PowerConfig, load: LoadReservation) -> Serving:
        return Serving(
            queue_max=config.queue_max,
            queue_per_client=config.queue_per_client,
            deadline_s=config.deadline,
            replicas=config.replicas,
            cache_bytes=config.prompt_cache_bytes,
            cache_ttl_s=config.prompt_cache_ttl,
            cache_dir=_cache_dir(config),
            memory=None if self._memory.max_bytes is None else self._memory,
            device=self._device,
            session_bytes=load.session_bytes,
            reservations=tuple(load.permits),
            session_reservation=load.session_permit,
        )

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
                expected=one_of(models),
                fix="see `power models`, or add a file with `power models add NAME PATH`",
            )
        return path.stem, path

    def _backend(self, path: Path, name: str | None) -> TargetBackend:
        """The backend called *name*, or the first that knows the format of *path*."""
        if not path.is_file() and not path.is_dir():
            found = "not a regular file" if path.exists() else "no such file"
            fix = "nothing is fetched here: download it first" if is_address(str(path)) else "check the path"
            raise ArtifactError(found, who="open", where=str(path), expected="a model file", fix=fix)
        for item in self.registry.targets if name is None else [self.registry.targets.get(name)]:
            backend: TargetBackend = make_configured(self.config, item)
            if backend.claims(path):
                return backend
        if path.is_dir():
            raise ArtifactError(
                "a directory", who="open", where=str(path), expected="a model file", fix="check the path"
            )
        names = ", ".join(self.registry.targets.names()) or "none installed"
        raise CapabilityError(
            "no target backend knows this file's format",
            who="open",
            where=str(path),
            expected=f"a file of: {names}",
            fix="pip install power-llamacpp for GGUF files; see `power plugins`",
        )


@contextmanager
def _measuring_told(model: str, options: SessionOptions) -> Iterator[None]:
    """Log when a backend begins to measure widths within the block, and that it is over where the block ends."""
    facts = {"model": model, "ctx": options.context_size, "rows": options.max_rows, "threads": options.threads}
    started: list[float] = []

    def on_miss(kind: str) -> None:
        if kind == user_cache.PROBES and not started:
            started.append(time.monotonic())
            log.info(MEASURING, **facts)

    try:
        with user_cache.misses_told(on_miss):
            yield
    finally:
        if started:
            log.info(MEASURED, **facts, seconds=round(time.monotonic() - started[0], 1))


def _cache_dir(config: PowerConfig) -> Path | None:
    folder = config.prompt_cache_dir
    return None if folder is None else Path(folder).expanduser()


def _file_bytes(path: Path) -> int:
    """Bytes of a model: a file, or a folder of files."""
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


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
