"""The rules: one function each, found by id; suites, the command and the documentation read this registry."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from enum import StrEnum
from importlib import import_module
from typing import Any, TypeVar

from attrs import field, frozen

from power_conformance.failures import ConformanceFailure, Finding, NotApplicable
from power_core.errors import ConfigError

__all__ = ["Kind", "Rule", "all_rules", "find_rule", "rule", "rules_of"]

Check = TypeVar("Check", bound=Callable[[Any], None])
_MODULES = (
    "target",
    "target_rows",
    "target_state",
    "target_ends",
    "target_engine",
    "tokenizer",
    "drafter",
    "drafter_stop",
    "drafter_state",
    "drafter_engine",
    "contract",
    "contract_header",
    "contract_values",
    "contract_process",
    "plugin",
    "plugin_parts",
)


class Kind(StrEnum):
    """What a rule is about; the first letter of its id says so."""

    TARGET = "target"
    DRAFTER = "drafter"
    ARTIFACT = "artifact"
    PLUGIN = "plugin"


@frozen
class Rule:
    """
    One promise and the check of it.

    Args:
        id: For example `T-ROLLBACK-03`.
        title: One sentence: what is promised, and why.
        applies_to: The kind of subject that `check` is given.
        look: Where the promise is written down.
        check: Raises `Finding` where the promise is broken, `NotApplicable` where it does not concern the subject.
        closes_model: Whether the check leaves the subject's model closed.
    """

    id: str
    title: str
    applies_to: Kind
    look: str
    check: Callable[[Any], None] = field(repr=False)
    closes_model: bool = False

    def run(self, subject: object) -> None:
        """
        Check *subject*.

        Raises:
            ConformanceFailure: It breaks the rule, or raised where it must not.
            NotApplicable: The rule does not concern it.
        """
        try:
            self.check(subject)
        except Finding as exc:
            raise self._failure(exc.did, exc.expected) from None
        except NotApplicable:
            raise
        except Exception as exc:
            did = f"raised {type(exc).__name__}: {' '.join(str(exc).split())}"
            raise self._failure(did, "no exception") from exc

    def _failure(self, did: str, expected: str) -> ConformanceFailure:
        return ConformanceFailure(self.id, self.title, did, expected, self.look)


_RULES: dict[str, Rule] = {}


def rule(rule_id: str, *, look: str, closes_model: bool = False) -> Callable[[Check], Check]:
    """
    Register a check under *rule_id*; its docstring is the rule's sentence.

    Args:
        rule_id: Its first letter says what it applies to.
        look: Where the promise is written down.
        closes_model: Whether the check leaves the subject's model closed: the next rule needs another one.
    """
    kind = next(kind for kind in Kind if kind.value[0] == rule_id[0].lower())

    def register(check: Check) -> Check:
        title = " ".join((inspect.getdoc(check) or "").split())
        if rule_id in _RULES or not title:
            raise ValueError(f"rule {rule_id} is registered twice or has no sentence")
        _RULES[rule_id] = Rule(rule_id, title, kind, look, check, closes_model)
        return check

    return register


def all_rules() -> tuple[Rule, ...]:
    """Every rule, by kind and then in the order they are written."""
    for module in _MODULES:
        import_module(f"power_conformance.rules.{module}")
    return tuple(sorted(_RULES.values(), key=lambda rule: list(Kind).index(rule.applies_to)))


def rules_of(kind: Kind) -> tuple[Rule, ...]:
    """The rules about one kind of subject."""
    return tuple(rule for rule in all_rules() if rule.applies_to is kind)


def find_rule(rule_id: str) -> Rule:
    """
    The rule of that id.

    Raises:
        ConfigError: There is none; names the nearest.
    """
    rules = {rule.id: rule for rule in all_rules()}
    if rule_id in rules:
        return rules[rule_id]
    near = difflib.get_close_matches(rule_id.upper(), rules, n=1)
    hint = f"did you mean {near[0]}?" if near else "see docs/conformance.md"
    raise ConfigError(f"no rule {rule_id!r}", who="conformance", got=rule_id, fix=hint)
