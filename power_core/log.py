"""Where events go: to structlog, and quietly until the application configures it."""

from __future__ import annotations

import logging
import sys

import structlog

__all__ = ["log_quietly"]


def log_quietly() -> None:
    """
    Send warnings to standard error, if structlog is not configured yet.

    Unconfigured, structlog prints every event to standard output, among an application's own text.
    An application that calls `structlog.configure`, before or after, gets every event its own way.
    """
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            # Looked up at each event: standard error may be replaced meanwhile.
            logger_factory=lambda *_names: structlog.PrintLogger(sys.stderr),
        )
