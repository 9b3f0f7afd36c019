"""The Python API over scripted plugins: many threads on one engine, each as if it were alone (case 23)."""

import gc
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier, Thread
from unittest.mock import Mock

import pytest

from power_core.config import PowerConfig
from power_core.errors import ArtifactError, CapabilityError, ConfigError, DrafterError, PowerError, RequestError
from power_core.evidence import verify_document
from power_core.request import GenerationRequest, SamplingSpec
from power_core.runtime import Runtime
from power_core.scheduler.simulate import read_curve
from power_core.shapes import ExactnessLevel
from power_core.target import ChatMessage
from power_core.testing import (
    OracleDrafter,
    PatternDrafter,
    RandomDrafter,
    ScriptedBackend,
    ScriptedTarget,
    plain_decode,
    scripted_plugins,
)
from power_core.types import FinishReason, Origin

VOCAB = 24
PROMPT = (3, 1, 4, 1, 5)


@pytest.fixture
def target():
    return ScriptedTarget(VOCAB, rollback_capacity=2)


@pytest.fixture
def runtime(tmp_path, target):
    """A runtime whose only model, `toy`, is the scripted target."""
    path = tmp_path / "toy.scripted"
    path.write_bytes(b"toy")
    drafters = {
        "oracle": OracleDrafter(target.greedy, VOCAB),
        "mixed": PatternDrafter(target.greedy, VOCAB, ["RRRW", "", "R", "WWWW"]),
        "random": RandomDrafter(VOCAB),
        "hidden": OracleDrafter(target.greedy, VOCAB, hidden_layers=[2]),
        "block": OracleDrafter(target.greedy, VOCAB, fixed_shape=True),
    }
    backend = ScriptedBackend(lambda path: target)
    plugins = scripted_plugins(targets={"scripted": backend}, strategies=drafters, models={"toy": path})
    assert plugins.failures == []
    with Runtime(PowerConfig(), plugins) as made:
        yield made
    for session in target.sessions:
        session.assert_all_closed()
    for drafter in drafters.values():
        drafter.assert_all_ended()


def requests_of_clients():
    """Eight clients: four greedy, four with seeds 1 to 4, all with different widths and penalties."""
    specs = ["oracle", "mixed", "random", "off"]
    return [
        GenerationRequest(
            (n + 1, 2 * n, 7),
            max_tokens=20 + n,
            spec=specs[n % 4],
            draft_max=1 + n % 5,
            sampling=SamplingSpec(repeat_penalty=1 + n / 10, logprobs=1)
            if n < 4
            else SamplingSpec(temperature=0.9, seed=n - 3, frequency_penalty=n / 10, logprobs=2),
        )
        for n in range(8)
    ]


def fields_of(result):
    return result.token_ids, result.text, result.finish_reason, result.usage, result.logprobs


@pytest.mark.parametrize("parallel", [1, 3, 8])
def test_eight_threads_each_get_their_solo_answer(runtime, parallel):
    """Three rounds of eight threads on one engine: all fields are those of each request alone (case 23)."""
    requests = requests_of_clients()
    with runtime.open("toy", parallel=1) as engine:
        alone = [fields_of(engine.complete(request)) for request in requests]
    with runtime.open("toy", parallel=parallel, draft_max=5) as engine:
        for _ in range(3):
            barrier = Barrier(len(requests))

            def client(request, barrier=barrier, engine=engine):
                barrier.wait(timeout=20)
                return fields_of(engine.complete(request))

            with ThreadPoolExecutor(len(requests)) as pool:
                assert list(pool.map(client, requests, timeout=60)) == alone


def test_generate_many_equals_plain_decoding(runtime, target):
    """Requests run together come back in their order, each as plain decoding would have it."""
    requests = requests_of_clients()
    with runtime.open("toy", parallel=4) as engine:
        for request, result in zip(requests, engine.generate_many(requests), strict=True):
            assert result.token_ids == plain_decode(target, request).token_ids


def test_submit_and_step(runtime, target):
    """Callers that step themselves get every event, the last of each request with its result."""
    requests = [GenerationRequest((n, 1), max_tokens=5) for n in range(5)]
    with runtime.open("toy", parallel=2, spec="mixed") as engine:
        numbers = [engine.submit(request) for request in requests]
        results = {}
        while len(results) < len(numbers):
            results.update({event.request_id: event.result for event in engine.step() if event.origin is Origin.END})
    for number, request in zip(numbers, requests, strict=True):
        assert results[number].token_ids == plain_decode(target, request).token_ids


def test_cancel_from_another_thread(runtime):
    """A cancelled generation ends with that reason, on the path of plain decoding; the next one is served."""
    with runtime.open("toy", spec="mixed") as engine:
        generation = engine.generate(PROMPT, max_tokens=200)
        first = next(generation)
        canceller = Thread(target=generation.cancel)
        canceller.start()
        canceller.join()
        result = generation.drain()
        assert result.finish_reason is FinishReason.CANCELLED
        full = engine.complete(PROMPT, max_tokens=200)
        assert full.token_ids[: len(result.token_ids)] == result.token_ids
        assert result.token_ids[0] == first.token_id


def test_a_dropped_generation_is_cancelled(runtime, target):
    """A reader that goes away frees its sequence for the next request."""
    with runtime.open("toy") as engine:
        generation = engine.generate(PROMPT, max_tokens=200)
        next(generation)
        del generation
        gc.collect()
        request = GenerationRequest((1, 2), max_tokens=4)
        assert engine.complete(request).token_ids == plain_decode(target, request).token_ids
        assert engine.loop.active == 0


def test_a_strategy_that_reads_hidden_states(runtime, target):
    """`open` orders the layers a strategy requires; a session without them refuses it by name."""
    request = GenerationRequest(PROMPT, max_tokens=12)
    with runtime.open("toy", spec="hidden") as engine:
        assert engine.complete(request).token_ids == plain_decode(target, request).token_ids
    with (
        runtime.open("toy", spec="oracle") as engine,
        pytest.raises(
            CapabilityError,
            match="block outputs that this session was not opened with: 2; open the model with --spec hidden",
        ),
    ):
        engine.complete(request.with_(spec="hidden"))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"model": "toi"}, CapabilityError),
        ({"model": "absent.scripted"}, ArtifactError),
        ({"model": "toy", "spec": "oracel"}, CapabilityError),
        ({"model": "toy", "spec": "draft-model"}, CapabilityError),
        ({"model": "toy", "parallel": 0}, PowerError),
    ],
    ids=str,
)
def test_what_is_not_there_fails_closed(runtime, arguments, error):
    """An unknown model, file or strategy is one line that says what would provide it."""
    with pytest.raises(error) as caught:
        runtime.open(**arguments)
    assert "\n" not in str(caught.value)


def test_an_unverified_target_takes_no_strategy_unasked(tmp_path):
    """Where nothing can be promised, a strategy needs the explicit switch; `off` does not."""

    def unverified(options):
        profile = ScriptedTarget(VOCAB).profile(options)
        return type(profile)(ExactnessLevel.UNVERIFIED, profile.decode, profile.prefill)

    path = tmp_path / "toy.scripted"
    path.write_bytes(b"toy")
    target = ScriptedTarget(VOCAB, profile=unverified)
    backend = ScriptedBackend(lambda path: target)
    plugins = scripted_plugins(targets={"scripted": backend}, strategies={"random": RandomDrafter(VOCAB)})
    with Runtime(PowerConfig(), plugins) as runtime:
        with pytest.raises(CapabilityError, match="lossless"):
            runtime.open(path, spec="random")
        with runtime.open(path, spec="off") as engine:
            assert len(engine.complete(PROMPT, max_tokens=3).token_ids) == 3
    with Runtime(PowerConfig(allow_unverified=True), plugins) as runtime, runtime.open(path, spec="random") as engine:
        assert len(engine.complete(PROMPT, max_tokens=3).token_ids) == 3


def test_a_chain_is_a_strategy(runtime, target):
    """Names with commas between them: by default, by request, hidden states included; the receipt names them all."""
    request = GenerationRequest(PROMPT, max_tokens=30)
    expected = plain_decode(target, request).token_ids
    with runtime.open("toy", spec="hidden, random", draft_max=4, width_policy="fixed") as engine:
        assert engine.strategy == "hidden,random"
        results = [engine.complete(request), engine.complete(request.with_(spec="oracle,mixed"))]
    assert [result.token_ids for result in results] == [expected, expected]
    assert all(result.counts.accepted > 10 for result in results)
    bodies = [result.receipt["body"] for result in results]
    assert [body["strategy"] for body in bodies] == ["hidden,random", "oracle,mixed"]
    assert [body["drafter"].count(" ") for body in bodies] == [1, 1]  # one plugin provides both


@pytest.mark.parametrize("spec", ["oracle,nobody", "oracle,off", "oracle,oracle", "oracle,", "oracle,auto"])
def test_a_chain_with_a_missing_member_fails_closed(runtime, spec):
    """As a default and in a request, before anything is decoded."""
    with pytest.raises((CapabilityError, ConfigError)):
        runtime.open("toy", spec=spec)
    with runtime.open("toy") as engine, pytest.raises((CapabilityError, ConfigError)):
        engine.submit(GenerationRequest(PROMPT, spec=spec))


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({}, "cost-aware"),
        ({"spec_width_policy": "fixed"}, "fixed"),
        ({"spec_mtp_adaptive": True}, "adaptive"),
        ({"spec_width_policy": "cost-aware"}, "cost-aware"),
    ],
    ids=str,
)
def test_the_configured_policy_decides_and_is_in_the_receipt(runtime, target, keys, name, tmp_path):
    """What the receipt says of costs is a curve that a simulation can read; plain decoding has no policy."""
    configured = Runtime(PowerConfig(**keys), runtime.plugins)
    request = GenerationRequest(PROMPT, max_tokens=12)
    with configured, configured.open("toy", spec="mixed") as engine:
        results = [engine.complete(request), engine.complete(request.with_(spec="off"))]
    assert {result.token_ids for result in results} == {plain_decode(target, request).token_ids}
    drafted, plain = (verify_document(result.receipt).body.policy for result in results)
    assert plain is None
    assert drafted.name == name
    assert drafted.summary
    file = tmp_path / "curve.json"
    file.write_text(json.dumps(results[0].receipt["body"]["policy"]["costs"]))
    assert read_curve(file).step(1) == 1.0


def test_policies_that_cannot_be_are_refused_at_open(runtime):
    """A name nobody knows, and two keys that disagree."""
    with pytest.raises(ConfigError, match=r"open\(width_policy=\)"):
        runtime.open("toy", width_policy="best")
    contradictory = Runtime(PowerConfig(spec_width_policy="fixed", spec_mtp_adaptive=True), runtime.plugins)
    with pytest.raises(ConfigError, match="spec_mtp_adaptive"):
        contradictory.open("toy")


def test_a_fixed_shape_and_adaptive_do_not_open_together(runtime):
    """The engine is refused, not each of its requests."""
    with pytest.raises(ConfigError, match=r"draft shape is fixed .*; choose another --width-policy"):
        runtime.open("toy", spec="block", width_policy="adaptive")
    with runtime.open("toy", spec="block") as engine:
        assert len(engine.complete(PROMPT, max_tokens=9).token_ids) == 9


def test_a_strategy_that_cannot_be_opened_is_one_line(runtime, monkeypatch):
    """Whatever a drafter raises as it opens, the error names the strategy; other strategies still decode."""

    def refuse(_drafter, _model, _session):
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(RandomDrafter, "open", refuse)
    with pytest.raises(DrafterError, match=r"^strategy 'random': opening it raised ZeroDivisionError: by zero"):
        runtime.open("toy", spec="random")
    with runtime.open("toy", spec="oracle") as engine:
        with pytest.raises(DrafterError):
            engine.complete(PROMPT, max_tokens=9, spec="mixed,random")
        assert len(engine.complete(PROMPT, max_tokens=9).token_ids) == 9


TURN = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("prompt", [[TURN], [TURN, TURN], TURN], ids=["one", "two", "bare"])
def test_turns_as_tables_are_told_what_a_turn_is(runtime, prompt):
    """And not that they are no token ids."""
    with runtime.open("toy") as engine:
        for call in (engine.complete, engine.generate, engine.encode_chat):
            with pytest.raises(
                RequestError, match=r"^chat: the messages are .* write a turn as power_core\.ChatMessage"
            ):
                call(prompt)


def test_closing_frees_the_model_though_a_drafter_refuses(runtime, target, monkeypatch):
    """What a drafter raises as it closes reaches the caller after session and model are free."""
    engine = runtime.open("toy", spec="random")
    monkeypatch.setattr(engine.loop.drafts, "close", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        engine.close()
    target.sessions[-1].assert_all_closed()
    monkeypatch.undo()
    engine.loop.close()


def test_a_closed_engine_says_so(runtime):
    """Whoever still reads from an engine that was closed, or asks it for more, gets one clear error."""
    engine = runtime.open("toy")
    generation = engine.generate(PROMPT)
    next(generation)
    engine.close()
    asked, turns = GenerationRequest(PROMPT), [ChatMessage("user", "hi")]
    calls = [partial(call, "hi") for call in (engine.generate, engine.encode, engine.request)]
    calls += [partial(call, asked) for call in (engine.generate, engine.complete, engine.submit)]
    calls += [partial(engine.generate_many, [asked]), partial(engine.encode_chat, turns)]
    for call in (generation.drain, engine.step, *calls):
        with pytest.raises(RequestError, match="engine 'toy': the engine is closed; open the model again"):
            call()


def test_arguments_of_the_wrong_kind_are_typed_errors(runtime):
    """No number of a request, no requests, no function: what was given, and what is expected."""
    with pytest.raises(ConfigError, match=r"check is 5 \(expected a function"):
        runtime.open("toy", check=5)
    with runtime.open("toy") as engine:
        many, one = engine.generate_many, GenerationRequest(PROMPT)
        for call, what in [(engine.cancel, []), (engine.progress, {}), (many, 5), (many, one)]:
            with pytest.raises(RequestError, match=r"request(s|_id) is .* \(expected"):
                call(what)


@pytest.mark.parametrize("call", ["complete", "another", "submit", "step", "close"])
def test_a_processor_that_calls_its_engine_is_refused(runtime, call):
    """What would wait for the very step that it runs in is an error of the request, at once; the engines go on."""
    with runtime.open("toy") as engine, runtime.open("toy") as another:
        open_before = engine.complete([1, 2], max_tokens=2), another.complete([1, 2], max_tokens=2)
        request = GenerationRequest((1, 2), max_tokens=2)
        calls = {
            "complete": lambda: engine.complete(request),
            "another": lambda: another.complete(request),  # one forward at a time, over all engines of a runtime
            "submit": lambda: engine.submit(request),
            "step": engine.step,
            "close": engine.close,
        }
        errors = []
        hooked = request.with_(sampling=SamplingSpec(processors=(lambda _tokens, _logits: calls[call](),)))
        caller = Thread(target=lambda: errors.append(engine.generate(hooked).drain().error), daemon=True)
        caller.start()
        caller.join(20)
        (error,) = errors
        assert isinstance(error, RequestError)
        assert "called from within a step, by a logits processor or a plugin" in str(error)
        after = engine.complete(request), another.complete(request)
        assert [result.token_ids for result in after] == [result.token_ids for result in open_before]
