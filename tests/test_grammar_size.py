"""Grammars that would take minutes to build are refused at once."""

import time

import pytest

from power_core.errors import RequestError
from power_core.grammar import GrammarConstraint
from power_core.testing.tokenizers import ScriptedTokenizer

LARGE = [
    {"regex": "((a{1000}b){1000}c){1000}"},
    {"regex": "[a-z]{1,100000}"},
    {"json_schema": {"type": "string", "pattern": "^((a{1000}b){1000}c){1000}$"}},
    {"json_schema": {"type": "string", "minLength": 1_000_000}},
    {"json_schema": {"items": {"items": {"type": "integer"}, "minItems": 1000}, "maxItems": 1000}},
    {"json_schema": {"properties": {"a": {"anyOf": [{"pattern": "(?:xy{300}){300}"}]}}}},
]


@pytest.mark.parametrize("spec", LARGE, ids=str)
def test_repetitions_that_multiply_are_refused(spec):
    """One line, in no time, with the size found and the size allowed."""
    started = time.monotonic()
    with pytest.raises(RequestError, match=r"comes? to") as caught:
        GrammarConstraint(ScriptedTokenizer.chat(), **spec)
    assert time.monotonic() - started < 5
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        {"regex": "[a-z]{1,200}"},
        {"regex": r"\{5\}[{9999999}]"},
        {"json_schema": {"type": "array", "maxItems": 10, "items": {"type": "string", "maxLength": 200}}},
    ],
    ids=str,
)
def test_ordinary_ones_are_not(spec):
    """Braces that repeat nothing are not counted."""
    assert not GrammarConstraint(ScriptedTokenizer.chat(), **spec).is_complete
