"""What the commands of one process share: the configuration file and the loaded plugins."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from power_core.plugins import PluginSet, load_plugins

if TYPE_CHECKING:  # `power --help` runs without them
    from power_core.config import PowerConfig
    from power_core.runtime import Runtime

__all__ = ["EXIT_INTERRUPTED", "State", "check_named_file"]

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def check_named_file(path: Path | None) -> None:
    """
    Refuse a configuration file that was asked for, with ``--config`` or `POWER_CONFIG`, and cannot be used.

    Raises:
        ConfigError: It is not there, or what it says is wrong.
    """
    named = path or os.environ.get("POWER_CONFIG")
    if named and not _is_pipe(Path(named)):  # `--config <(...)` is read once, by a command that needs it
        from power_core.config import load_config

        load_config(path=named, environ={})


def _is_pipe(path: Path) -> bool:
    try:
        return path.is_fifo()
    except OSError:  # a name too long, a folder that may not be entered: said when it is read
        return False


class State:
    """
    Shared state, made by click on first use.

    Attributes:
        config_path: The file given with ``--config``.
    """

    config_path: Path | None = None

    @cached_property
    def plugins(self) -> PluginSet:
        """The installed plugins."""
        return load_plugins()

    def config(self, flags: Mapping[str, Any]) -> PowerConfig:
        """The configuration with *flags* (key -> value, None where not given) on top."""
        from power_core.config import load_config

        return load_config(flags, path=self.config_path)

    def runtime(self, flags: Mapping[str, Any]) -> Runtime:
        """A runtime of this configuration and these plugins."""
        from power_core.runtime import Runtime

        config = self.config(flags)
        config.check_plugins(self.plugins)
        _quiet_logs()
        return Runtime(config, self.plugins)


def _quiet_logs() -> None:
    """
    Keep logs out of the output, and errors at one line: what a log calls an error is raised as well.

    structlog prints to standard output unless told otherwise.
    """
    import logging

    import structlog

    is_debug = os.environ.get("POWER_DEBUG") == "1"
    processors = [each for each in structlog.get_config()["processors"] if each is not _only_measuring]
    structlog.configure(
        processors=processors if is_debug else [_only_measuring, *processors],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if is_debug else logging.INFO),
        logger_factory=lambda *_names: structlog.PrintLogger(sys.stderr),
    )


def _only_measuring(_logger: Any, _level: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Drop whatever is not the one thing worth a line: why nothing happens, where no terminal shows it."""
    from structlog import DropEvent

    from power_core.runtime import MEASURING

    if event["event"] != MEASURING or sys.stderr.isatty():
        raise DropEvent
    return event
