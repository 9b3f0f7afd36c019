"""Grammars with drafts: rejected tokens do not move the automaton, nor is it asked after its end (case 13)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cases.lab import draft_with, fields_of
from power_core.engine import Engine
from power_core.errors import RequestError
from power_core.request import GenerationRequest
from power_core.testing import AdversarialDrafter, OracleDrafter, ZeroDrafter, recorded
from power_core.types import FinishReason

pytestmark = pytest.mark.model
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TWICE = '{"name": "Ann", "age": 31}\n{"name": "Ann", "age": 31}\n'
FORBIDDEN = '{"name": "Ann", "age": "abc"}\n{"name": "Ann", "age": "abc"}\n'  # a copy of it breaks the grammar


def check_all(engine: Engine, request: GenerationRequest) -> Any:
    """off, real strategies and scripted ones give one answer; returns it."""
    off = engine.complete(request)
    ids, vocab = recorded((*off.prompt_token_ids, *off.token_ids, *engine.encode("xyz {" * 9))), 49152
    for spec in ("suffix", "prompt-lookup"):
        assert fields_of(engine.complete(request.with_(spec=spec, draft_max=8))) == fields_of(off)
    scripted = [OracleDrafter(ids, vocab), ZeroDrafter(ids, vocab)]
    scripted += [AdversarialDrafter(ids, vocab, wrong_at=j) for j in (0, 3, 7)]
    for drafter in scripted:
        result = draft_with(engine, drafter, request, 8)
        assert fields_of(result) == fields_of(off)
        if result.counts.drafted and not isinstance(drafter, OracleDrafter):
            assert result.counts.accepted < result.counts.drafted
    return off


@pytest.mark.parametrize("text", [TWICE, FORBIDDEN], ids=["copyable", "forbidden"])
def test_json_under_every_drafter(engine: Engine, text: str) -> None:
    """Drafts against the grammar are rejected like any other, those within it accepted like any other."""
    off = check_all(engine, engine.request(text, max_tokens=32, json_schema=SCHEMA))
    assert off.finish_reason is FinishReason.STOP
    assert json.loads(off.text)["age"] in range(1000)


def test_thirty_sampled_outputs_parse(engine: Engine) -> None:
    """Whatever a hot sampler makes of it, with drafts that copy: 30 documents of the schema, as without drafts."""
    specs = ("suffix", "ngram-context", "prompt-lookup")
    requests = [
        engine.request(
            (TWICE, FORBIDDEN)[seed % 2],
            max_tokens=60,
            json_schema=SCHEMA,
            temperature=1.2,
            seed=seed,
            spec=specs[seed % 3],
        )
        for seed in range(30)
    ]
    results = engine.generate_many(requests)
    for result in results:
        assert result.finish_reason is FinishReason.STOP
        document = json.loads(result.text)
        assert set(document) == {"name", "age"}
        assert (len(document["name"]) <= 8, document["age"] in range(1000)) == (True, True)
    for request, result in list(zip(requests, results, strict=True))[:4]:
        assert fields_of(engine.complete(request.with_(spec="off"))) == fields_of(result)


@pytest.mark.parametrize("text", ["yes", " yes yes"])
def test_a_grammar_of_one_text_ends_at_once(engine: Engine, text: str) -> None:
    """A proposal of eight reaches far past the only text that is allowed."""
    off = check_all(engine, engine.request("yes yes yes yes yes yes", max_tokens=16, regex=text))
    assert (off.text, off.finish_reason) == (text, FinishReason.STOP)
    assert len(off.token_ids) <= 3


@pytest.mark.parametrize("broken", [
    {"json_schema": "{"}, {"json_schema": {"type": "strin"}}, {"json_schema": {"$ref": "#/absent"}}, {"regex": "(a"},
    {"regex": "(?<=a)b"},
], ids=str)  # fmt: skip
def test_a_broken_grammar_is_refused(engine: Engine, undisturbed: None, broken: dict[str, Any]) -> None:
    """Before anything is decoded; free text instead would be worse than an error."""
    for spec in ("off", "suffix"):
        with pytest.raises(RequestError) as caught:
            engine.generate("yes", spec=spec, **broken)
        assert next(iter(broken)) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_grammars_on_the_command_line(power: Any, tmp_path: Path) -> None:
    """A schema file holds; a broken one is exit code 2 and one line."""
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text('{"enum": ["yes"]}')
    bad.write_text('{"type": "strin"}')
    found = power("generate", "Say yes", "--json-schema", good, "--json")
    assert json.loads(json.loads(found.stdout)["text"]) == "yes"
    refused = power("generate", "Say yes", "--json-schema", bad)
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "strin" in refused.stderr
