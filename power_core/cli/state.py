"""What the commands of one process share: the configuration file and the loaded plugins."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from power_core.plugins import PluginSet, load_plugins

if TYPE_CHECKING:  # `power --help` runs without them
    from power_core.config import PowerConfig
    from power_core.runtime import Runtime

__all__ = ["EXIT_INTERRUPTED", "State"]

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


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

    level = logging.DEBUG if os.environ.get("POWER_DEBUG") == "1" else logging.CRITICAL
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_names: structlog.PrintLogger(sys.stderr),
    )
