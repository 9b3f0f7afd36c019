"""Whatever a caller hands over by mistake: one typed line, and the next request is served as if nothing had been."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from power_core.engine import Engine
from power_core.errors import ArtifactError, CapabilityError, ConfigError, PowerError, RequestError
from power_core.request import GenerationRequest, SamplingSpec
from power_core.runtime import Runtime
from power_core.target import ChatMessage

pytestmark = pytest.mark.model
USER = ChatMessage("user", "hi")
INF = float("inf")


def refused(error: type[PowerError], call: Callable[[], object]) -> PowerError:
    """The error of *call*, checked to be one line that says who."""
    with pytest.raises(error) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    assert 10 < len(line) < 600
    return caught.value


@pytest.mark.parametrize("name", ["draft_max", "context_size", "parallel", "threads", "rollback_rows"])
@pytest.mark.parametrize("value", [-1, "8", 1.5, 10**9, [1], math.nan])
def test_sizes_that_are_none(runtime: Runtime, engine: Engine, name: str, value: object) -> None:
    """A size of the wrong type or range is refused before weights are loaded, by its name."""
    message = str(refused(ConfigError, lambda: runtime.open("smollm2", **{name: value})))
    sum_of = {"draft_max": "max_rows", "parallel": "max_sequences"}  # what a number too large adds up to
    assert name in message or sum_of[name] in message


@pytest.mark.parametrize(("name", "error"), [
    ("absent", CapabilityError), ("absent.gguf", ArtifactError), (".", ArtifactError), ("", ArtifactError),
    (5, CapabilityError), ("x" * 5000 + ".gguf", ArtifactError), ("a\0b.gguf", ConfigError),
    ("~no-such-user/model.gguf", ArtifactError),
], ids=lambda value: str(value)[:20])  # fmt: skip
def test_models_that_are_none(runtime: Runtime, name: Any, error: type[PowerError]) -> None:
    """A name nobody registered and a path to nothing."""
    refused(error, lambda: runtime.open(name))


@pytest.mark.parametrize(("content", "suffix", "error"), [
    (b"", ".gguf", ArtifactError), (b"GGUF", ".gguf", ArtifactError),
    (b"GGUF\x03\0\0\0" + b"\xff" * 64, "", ArtifactError),
    (b"PK\x03\x04", ".gguf", ArtifactError), (b"hello", ".txt", CapabilityError),
])  # fmt: skip
def test_files_that_are_no_models(
    runtime: Runtime, tmp_path: Path, content: bytes, suffix: str, error: type[PowerError]
) -> None:
    """Empty, cut, foreign: refused before native code sees the file."""
    file = tmp_path / f"model{suffix}"
    file.write_bytes(content)
    assert "model" in str(refused(error, lambda: runtime.open(file)))


@pytest.mark.parametrize("spec", ["nope", "", "draft-model", 5, ["suffix"]], ids=str)
def test_strategies_that_are_none(runtime: Runtime, engine: Engine, undisturbed: Any, spec: Any) -> None:
    """Of an engine and of a request."""
    refused(PowerError, lambda: runtime.open("smollm2", spec=spec))
    refused(PowerError, lambda: engine.complete("hi", spec=spec))


PROMPTS: list[Any] = [
    None, 5, b"ab", [], (), [1.5], ["a"], [None], [[1]], [-1], [49152], [2**40], "a\ud800", [1] * 2049,
    [{"role": "user", "content": "hi"}], [USER, 1], [1, USER], [ChatMessage("tool", "x")], [ChatMessage("user", 5)],  # type: ignore[arg-type]  # wrong on purpose
    [ChatMessage("user", "\ud800")], np.array([1.0]),
]  # fmt: skip


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: f"{p!r:.24}")
def test_prompts_that_are_none(engine: Engine, undisturbed: Any, prompt: Any) -> None:
    """Neither text nor ids nor messages, or ids the model does not have, or more than fit."""
    refused(RequestError, lambda: engine.complete(prompt, max_tokens=1))


FIELDS: list[dict[str, Any]] = [
    {"max_token": 3}, {"max_tokens": -1}, {"max_tokens": 1.5}, {"max_tokens": "3"}, {"draft_max": -1},
    {"draft_max": "x"}, {"draft_max": 1.5}, {"sampling": 5}, {"sampling": SamplingSpec(), "seed": 1},
    {"stop": ""}, {"stop": [""]}, {"stop": [1]}, {"stop": 5}, {"stop": b"a"}, {"stop": None}, {"stop": ["\ud800"]},
    {"stop_ids": {-1}}, {"stop_ids": {49152}}, {"stop_ids": {"a"}}, {"stop_ids": {1.5}}, {"stop_ids": 5},
    {"temperature": -1}, {"temperature": math.nan}, {"temperature": INF}, {"temperature": "hot"}, {"temperature": None},
    {"top_k": -1}, {"top_k": 1.5}, {"top_p": 1.5}, {"min_p": -0.1}, {"typical_p": math.nan}, {"penalty_window": -2},
    {"repeat_penalty": 0}, {"presence_penalty": INF}, {"frequency_penalty": "1"}, {"seed": 1.5}, {"seed": "x"},
    {"logprobs": -1}, {"logprobs": 10**9}, {"logprobs": "3"}, {"logit_bias": [1]}, {"logit_bias": {49152: 1}},
    {"logit_bias": {1: math.nan}}, {"logit_bias": {1: "a"}}, {"logit_bias": {"1": 2}}, {"logit_bias": None},
    {"processors": 5}, {"processors": ["x"]}, {"processors": None}, {"json_schema": "{"}, {"json_schema": 5},
    {"json_schema": "[]"}, {"json_schema": {"type": "strin"}}, {"json_schema": {"a": {1}}}, {"json_schema": "\ud800"},
    {"regex": "("}, {"regex": 5}, {"regex": "\ud800"}, {"regex": "a", "json_schema": "{}"},
]  # fmt: skip


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: f"{fields!r:.40}")
def test_fields_that_are_none(engine: Engine, undisturbed: Any, fields: dict[str, Any]) -> None:
    """Every field of a request, of the wrong type or out of range; the message names it."""
    message = str(refused(RequestError, lambda: engine.complete("hi", **{"max_tokens": 1, **fields})))
    name = next(iter(fields)).removesuffix("s")
    assert name in message or name.replace("_", " ") in message or name.split("_")[-1] in message


def test_a_request_is_changed_by_nothing_beside_it(engine: Engine) -> None:
    """Fields beside a finished request would be ignored; so they are refused."""
    request = engine.request("hi", max_tokens=1)
    refused(RequestError, lambda: engine.complete(request, max_tokens=2))
    for call in (engine.submit, engine.encode, engine.encode_chat, lambda what: engine.generate_many([what])):
        refused(RequestError, lambda call=call: call(5))


def test_a_processor_that_fails_ends_its_request_only(engine: Engine, undisturbed: Any) -> None:
    """What a user's hook raises or returns is that request's error; the one beside it is as it was alone."""

    def broken(tokens: Any, logits: Any) -> Any:
        raise KeyError("mine")

    hooks = [broken, lambda t, x: x[:5], lambda t, x: "x", lambda t, x: np.full_like(x, np.nan), lambda t: None]
    good = engine.request("Once upon a time", max_tokens=4)
    requests = [good, *(engine.request("hi", max_tokens=4, processors=[hook]) for hook in hooks)]
    first, *others = engine.generate_many(requests)
    assert first.token_ids == engine.complete(good).token_ids
    assert all(isinstance(result.error, RequestError) and not result.token_ids for result in others)


def test_numpy_ids_are_ids(engine: Engine) -> None:
    """Prompt ids and stop ids may come as numpy's integers; results and receipts hold Python's."""
    ids = np.array(engine.encode("Once upon a time"), np.int32)
    result = engine.complete(ids, max_tokens=2, stop_ids=np.array([5]), logit_bias={ids[0]: np.float32(1)})
    assert {type(token) for token in (*result.prompt_token_ids, *result.token_ids)} == {int}
    assert result.receipt
    assert GenerationRequest(ids) == GenerationRequest(ids.tolist())
