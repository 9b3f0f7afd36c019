"""How a rule ends other than well."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["ConformanceFailure", "Finding", "NotApplicable", "fail", "refuse"]


class Finding(Exception):
    """
    What a check saw; `Rule.run` turns it into a `ConformanceFailure`.

    Args:
        did: What the plugin did.
        expected: What it should have done.
    """

    def __init__(self, did: str, expected: str) -> None:
        super().__init__(did)
        self.did = did
        self.expected = expected


class NotApplicable(Exception):
    """The rule does not concern this plugin; the message says why."""


class ConformanceFailure(AssertionError):
    """
    A rule that a plugin breaks.

    Args:
        rule: Id of the rule.
        title: The rule in one sentence.
        did: What the plugin did.
        expected: What it should have done.
        look: Where the promise is written down.
    """

    def __init__(self, rule: str, title: str, did: str, expected: str, look: str) -> None:
        super().__init__(f"{rule}: {title}\n  did:      {did}\n  expected: {expected}\n  look at:  {look}")
        self.rule = rule
        self.title = title
        self.did = did
        self.expected = expected
        self.look = look


def fail(did: str, expected: str) -> NoReturn:
    """End a check: the plugin *did* something else than *expected*."""
    raise Finding(did, expected)


def refuse(reason: str) -> NoReturn:
    """End a check that does not concern the plugin."""
    raise NotApplicable(reason)
