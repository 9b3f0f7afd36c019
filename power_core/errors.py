"""The error tree: every failure a user or plugin author can meet, as data first and one line second."""

from __future__ import annotations

__all__ = [
    "ArtifactError",
    "BackendError",
    "CapabilityError",
    "ConfigError",
    "DeadlineError",
    "DrafterError",
    "NameTakenError",
    "PluginError",
    "PowerError",
    "QueueFullError",
    "ReceiptError",
    "RequestCancelledError",
    "RequestError",
    "ShapeError",
    "TooLargeError",
    "TransactionError",
]


class PowerError(Exception):
    """
    Base of all errors Power raises on purpose. Reads as one line: who, where, what, fix.

    Args:
        what: What was found, as a clause ("draft vocabulary 32000 differs from the target's 49152").
        who: The component that noticed: "plugin 'dflash'", "power.toml", "request 3".
        where: The file, key, flag or phase it was noticed in.
        got: The offending value, for programs.
        expected: What would have been accepted.
        fix: What the reader can do about it, as an imperative.
        plugin: Name of the plugin concerned, if one is.
    """

    def __init__(
        self,
        what: str,
        *,
        who: str | None = None,
        where: str | None = None,
        got: object = None,
        expected: object = None,
        fix: str | None = None,
        plugin: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.who = who or (f"plugin {plugin!r}" if plugin else None)
        self.where = where
        self.got = got
        self.expected = expected
        self.fix = fix
        self.plugin = plugin

    def __str__(self) -> str:
        head = ": ".join(part for part in (self.who, self.where, self.what) if part)
        if self.expected is not None:
            head += f" (expected {self.expected})"
        line = f"{head}; {self.fix}" if self.fix else head
        return " ".join(line.split())  # one line, whatever a native library put into a message


class ConfigError(PowerError):
    """A configuration file, environment variable or flag that cannot be used."""


class RequestError(PowerError):
    """A request that cannot be served as asked: bad prompt, limit, sampler or stop condition."""


class RequestCancelledError(RequestError):
    """The request was cancelled before it finished."""


class QueueFullError(RequestError):
    """As many requests wait as may; the caller should come back later."""


class DeadlineError(RequestError):
    """The request's deadline passed before it was done."""


class TooLargeError(RequestError):
    """The request could not be served even alone."""


class CapabilityError(PowerError):
    """Something no installed plugin provides for this target: it fails closed."""


class ArtifactError(PowerError):
    """A model or drafter file that breaks its contract. Raised before native code sees the file."""


class ShapeError(PowerError):
    """A row count or resource bound that no declared shape covers."""


class TransactionError(PowerError):
    """An illegal transition of a step's state machine: a bug in the engine or a participant."""


class BackendError(PowerError):
    """A native library reported a failure."""


class DrafterError(PowerError):
    """A drafter plugin raised, or returned something that is not a proposal."""


class PluginError(PowerError):
    """A plugin that cannot be loaded, or that broke a hook's contract."""


class NameTakenError(PluginError):
    """Two plugins registered the same name."""


class ReceiptError(PowerError):
    """A receipt that does not verify."""
