"""Deadlines, bounds and fairness of an engine's queue (R23), and session replicas (R25), over scripted plugins."""

import threading
import time
from functools import cache
from unittest.mock import Mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from power_core.config import PowerConfig
from power_core.errors import (
    BackendError,
    ConfigError,
    DeadlineError,
    PowerError,
    QueueFullError,
    RequestError,
    TooLargeError,
)
from power_core.request import GenerationRequest, SamplingSpec
from power_core.runtime import Runtime
from power_core.scheduler.admission import AdmissionController, Deadline
from power_core.testing import (
    Faults,
    OracleDrafter,
    RandomDrafter,
    ScriptedBackend,
    ScriptedTarget,
    plain_decode,
    scripted_plugins,
)
from power_core.types import FinishReason

VOCAB = 24
PROMPT = tuple(n % VOCAB for n in range(40))


class Sized(ScriptedTarget):
    """A target whose sessions take 100 bytes a sequence."""

    def session_bytes(self, options):
        return 100 * options.max_sequences


class Single(ScriptedTarget):
    """A target that cannot batch: its sessions hold one sequence, whatever is asked for."""

    def open_session(self, options):
        session = super().open_session(options)
        session.max_sequences = 1
        return session


@pytest.fixture
def make_runtime(tmp_path):
    """Makes runtimes whose model `toy` is a scripted target; nothing may be left open or broken at the end."""
    made = []

    def make(target=None, drafters=None, **keys):
        path = tmp_path / "toy.scripted"
        path.write_bytes(b"t" * 50)
        target = target or ScriptedTarget(VOCAB)
        drafters = drafters or {"oracle": OracleDrafter(target.greedy, VOCAB), "random": RandomDrafter(VOCAB)}
        plugins = scripted_plugins(
            targets={"scripted": ScriptedBackend(lambda _path: target)}, strategies=drafters, models={"toy": path}
        )
        runtime = Runtime(PowerConfig(**keys), plugins)
        made.append((runtime, target, drafters))
        return runtime

    yield make
    for runtime, target, drafters in made:
        runtime.close()
        for session in target.sessions:
            session.assert_all_closed()
        for drafter in drafters.values():
            drafter.assert_all_ended()


def request(n=0, **fields):
    return GenerationRequest((*PROMPT, n), **{"max_tokens": 12, **fields})


def slow(target, seconds=0.01):
    """Let every forward of *target* take a while."""
    target.faults.hook = lambda call: time.sleep(seconds) if call.name == "forward" and call.done else None
    return target


def test_a_deadline_ends_a_request_with_what_was_made(make_runtime):
    """The tokens so far are plain decoding's, the error says where it was; the next request is not touched."""
    target = slow(ScriptedTarget(VOCAB))
    with make_runtime(target).open("toy", spec="off") as engine:
        asked = request(max_tokens=200, deadline_s=0.15)
        result = engine.generate(asked).drain()
        assert isinstance(result.error, DeadlineError)
        assert result.finish_reason is FinishReason.ERROR
        assert 0 < len(result.token_ids) < 50
        assert result.token_ids == plain_decode(target, asked).token_ids[: len(result.token_ids)]
        assert engine.complete(request(1)).token_ids == plain_decode(target, request(1)).token_ids
        assert engine.stats().totals.expired == 1


def test_a_deadline_counts_waiting_and_loading(make_runtime):
    """A request whose time began before the load has less left; one that waits for its turn expires there."""
    target = slow(ScriptedTarget(VOCAB))
    runtime = make_runtime(target, deadline=30)
    started = time.monotonic()
    with runtime.open("toy", spec="off", deadline=Deadline.after(20)) as engine:
        first = engine.generate(request(max_tokens=60))
        waiting = engine.generate(request(1, deadline_s=0.1))
        assert isinstance(waiting.drain().error, DeadlineError)
        assert waiting.result.token_ids == ()
        assert engine.stats().queue.counters.expired == 1
        with pytest.raises(DeadlineError):
            engine.generate(request(2, deadline_s=0.1, started_s=started))
        assert first.finish().token_ids == plain_decode(target, request(max_tokens=60)).token_ids
    with pytest.raises(DeadlineError):
        runtime.open("toy", deadline=Deadline.after(0))


def test_a_full_queue_refuses_and_recovers(make_runtime):
    """Typed, at once, and only as long as it is full; one client's bound is its own."""
    with make_runtime(queue_max=3, queue_per_client=2).open("toy") as engine:
        running = [engine.generate(request(n, client="a")) for n in range(3)]
        with pytest.raises(QueueFullError, match="2 requests are waiting"):
            engine.generate(request(client="a"))
        running.append(engine.generate(request(3, client="b")))
        with pytest.raises(QueueFullError, match="3 requests are waiting"):
            engine.generate(request(client="c"))
        for generation in running:
            generation.finish()
        engine.complete(request(client="c"))
        assert engine.stats().queue.counters.refused_full == 2


@pytest.mark.parametrize("replicas", [0, 2])
def test_dropped_requests_that_nobody_steps_leave_the_queue(make_runtime, replicas):
    """A queue full of requests whose callers are gone takes the next one, whose caller steps."""
    target = ScriptedTarget(VOCAB)
    with make_runtime(target, queue_max=3, replicas=replicas).open("toy") as engine:
        dropped = [engine.generate(request(n)) for n in range(3 + (replicas or 1))]
        with pytest.raises(QueueFullError):
            engine.generate(request())
        dropped.pop().cancel()  # the last that waits, by name; the others by forgetting them
        dropped.clear()
        assert engine.complete(request()).token_ids == plain_decode(target, request()).token_ids
        queue = engine.stats().queue
        assert (queue.waiting, queue.active, engine.loop.active) == (0, 0, 0)


def test_many_requests_are_fed_to_a_short_queue(make_runtime):
    """`generate_many` hands a request in when there is room; one that can never be served stops it."""
    target = ScriptedTarget(VOCAB)
    with make_runtime(target, queue_max=2).open("toy", parallel=2) as engine:
        asked = [request(n) for n in range(20)]
        results = engine.generate_many(asked)
        assert [r.token_ids for r in results] == [plain_decode(target, r).token_ids for r in asked]
        with pytest.raises(RequestError):
            engine.generate_many([request(), GenerationRequest((VOCAB,))])
        assert engine.complete(request()).token_ids == results[0].token_ids
        assert engine.loop.active == 0


def test_a_request_of_many_that_comes_too_late_fails_alone(make_runtime):
    """Its deadline had passed before it was handed in, or others fill the queue: an error in its result only."""
    target = ScriptedTarget(VOCAB)
    late = [{"deadline_s": 0}, {"deadline_s": 1, "started_s": time.monotonic() - 2}]
    with make_runtime(target, queue_max=1).open("toy") as engine:
        asked = [request(n, client_id=str(n), **fields) for n, fields in enumerate([{}, *late, {}])]
        results = engine.generate_many(asked)
        assert [type(result.error) for result in results] == [type(None), DeadlineError, DeadlineError, type(None)]
        assert [result.client_id for result in results] == list("0123")
        assert len({result.request_id for result in results}) == 4
        assert results[3].token_ids == plain_decode(target, asked[3]).token_ids
        others = [engine.generate(request(n)) for n in range(2)]
        (full,) = engine.generate_many([request(sampling=SamplingSpec(logprobs=1))])
        assert (type(full.error), full.finish_reason, full.logprobs) == (QueueFullError, FinishReason.ERROR, ())
        assert all(other.finish().token_ids for other in others)


def test_turns_go_round_the_clients(make_runtime):
    """One request of another client is not behind a hundred of the first."""
    with make_runtime().open("toy") as engine:
        ends = []
        numbers = {engine.submit(request(n, client="many")): "many" for n in range(20)}
        numbers[engine.submit(request(client="one"))] = "one"
        while len(ends) < len(numbers):
            ends += [numbers[event.request_id] for event in engine.step() if event.result is not None]
        assert ends.index("one") <= 2


def test_memory_is_reserved_before_a_load(make_runtime):
    """50 bytes of weights, 100 a sequence: what can never fit, what does not fit now, and what is waited for."""
    runtime = make_runtime(Sized(VOCAB), memory_limit=400)
    with pytest.raises(TooLargeError, match="450 bytes"):
        runtime.open("toy", parallel=4)
    engine = runtime.open("toy", parallel=2)
    with pytest.raises(TooLargeError, match="beside what is open"):
        runtime.open("toy", parallel=2)
    with pytest.raises(DeadlineError):
        runtime.open("toy", parallel=2, deadline=Deadline.after(0.05))
    closer = threading.Timer(0.1, engine.close)
    closer.start()
    with runtime.open("toy", parallel=3, deadline=Deadline.after(20)) as second:
        assert second.complete(request()).token_ids
    closer.join()
    with runtime.open("toy", parallel=3):  # everything came back
        pass


def test_a_cache_folder_that_cannot_be_made_is_refused_before_a_load(make_runtime, tmp_path, monkeypatch):
    """Where prompts are kept at all; not after the model was loaded and measured."""
    folder, loaded = tmp_path / "kept", Mock()
    runtimes = [make_runtime(prompt_cache_dir=str(folder), **keys) for keys in ({}, {"prompt_cache_bytes": 0})]
    monkeypatch.setattr("pathlib.Path.mkdir", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(ConfigError, match="kept: the folder cannot be made: Permission denied"):
        runtimes[0].open("toy", check=loaded)
    loaded.assert_not_called()
    runtimes[1].open("toy", check=loaded)
    loaded.assert_called_once()


def test_memory_needs_a_target_that_knows_its_size(make_runtime):
    with pytest.raises(PowerError, match="cannot say"):
        make_runtime(memory_limit=10_000).open("toy")


def test_a_lost_first_replica_gives_its_memory_back(make_runtime):
    """There is room for one: the one built in its place needs its bytes, and serves what waits."""
    target = Sized(VOCAB, faults=Faults({"close": 3}))
    runtime = make_runtime(target, memory_limit=150)
    with runtime.open("toy", spec="off", replicas=1) as engine:
        for n in range(4):
            assert engine.complete(request(n, deadline_s=20)).token_ids == plain_decode(target, request(n)).token_ids
        assert engine.stats().replicas.counters.retired == 1
    with runtime.open("toy"):  # everything came back
        pass
    target.sessions[:] = [session for session in target.sessions if not session.is_shut_down]


@pytest.mark.parametrize("end", ["deadline", "cancel", "memory"])
def test_what_waits_for_memory_ends_in_time(make_runtime, end):
    """The replica was lost and another model took its bytes: deadlines and cancels hold without one."""
    target = Sized(VOCAB, faults=Faults({"close": 2}))
    runtime = make_runtime(target, memory_limit=200)
    engine = runtime.open("toy", spec="off", replicas=1)
    generations = [engine.generate(request(n, deadline_s=0.3 if n and end == "deadline" else None)) for n in range(2)]
    generations[0].finish()
    other = runtime.open("toy")
    if end == "cancel":
        generations[1].cancel()
    if end == "memory":
        other.close()
    result = generations[1].drain()
    if end == "deadline":
        assert isinstance(result.error, DeadlineError)
    if end == "cancel":
        assert result.finish_reason is FinishReason.CANCELLED
    if end == "memory":
        assert result.token_ids == plain_decode(target, request(1)).token_ids
    target.sessions[:] = [session for session in target.sessions if not session.is_shut_down]


def test_a_replica_lost_in_a_failing_step_leaves_the_others_waiting(make_runtime):
    """Forward, the drafter's undo and the close fail at once: one request ends, and the next has the new replica."""
    target = ScriptedTarget(VOCAB, faults=Faults({"forward": 3, "close": 2}))
    drafter = OracleDrafter(target.greedy, VOCAB, faults=Faults({"restore": 1}))
    runtime = make_runtime(target, drafters={"oracle": drafter}, spec_width_policy="fixed")
    with runtime.open("toy", spec="oracle", replicas=1) as engine:
        generations = [engine.generate(request(n)) for n in range(3)]
        with pytest.raises(BackendError, match="forward"):
            generations[0].drain()
        assert "restore" in str(generations[0].drain().error)
        for n in (1, 2):
            assert generations[n].finish().token_ids == plain_decode(target, request(n)).token_ids
        assert engine.stats().replicas.counters.retired == 1
    drafter.sessions.clear()
    target.sessions.clear()


@pytest.mark.parametrize("arguments", [{"replicas": 3}, {"parallel": 3}], ids=str)
def test_replicas_serve_a_target_that_cannot_batch(make_runtime, arguments):
    """Each request alone in a session, several at once, lazily built; all as if alone."""
    target = Single(VOCAB)
    with make_runtime(target).open("toy", spec="random", **arguments) as engine:
        assert engine.complete(request()).token_ids == plain_decode(target, request()).token_ids
        assert engine.stats().replicas.built == 1
        asked = [request(n, spec=("oracle", "off")[n % 2]) for n in range(9)]
        results = engine.generate_many(asked)
        assert [r.token_ids for r in results] == [plain_decode(target, r).token_ids for r in asked]
        stats = engine.stats().replicas
        assert (stats.built, stats.size, stats.leased) == (3, 3, 0)


def test_replicas_share_kept_prompts(make_runtime):
    target = ScriptedTarget(VOCAB)
    with make_runtime(target).open("toy", replicas=2) as engine:
        engine.complete(request(prompt_cache_key="k"))
        for result in engine.generate_many([request(n, prompt_cache_key="k") for n in range(4)]):
            assert result.counts.reused == len(PROMPT)
            assert result.receipt["body"]["counts"]["reused"] == len(PROMPT)


def test_a_damaged_replica_is_rebuilt_without_touching_the_others(make_runtime):
    """One session's close fails: its request ends, the other's goes on, and both places are there again."""
    target = ScriptedTarget(VOCAB, faults=Faults({"close": 3}))
    with make_runtime(target).open("toy", spec="off", replicas=2) as engine:
        asked = [request(n) for n in range(8)]
        results = engine.generate_many(asked)
        assert [r.token_ids for r in results] == [plain_decode(ScriptedTarget(VOCAB), r).token_ids for r in asked]
        stats = engine.stats()
        assert stats.replicas.counters.retired == 1
        assert stats.queue.most_active == 2
        assert len(target.sessions) == 3
    target.sessions[:] = [session for session in target.sessions if not session.is_shut_down]


def test_two_engines_take_turns_of_the_device(make_runtime):
    """No two forwards run at the same time, whatever threads ask for them."""
    target, running, most = ScriptedTarget(VOCAB), [], []

    def watch(call):
        if call.name == "forward":
            running.pop() if call.done else running.append(1)
            most.append(len(running))
            time.sleep(0.001)

    target.faults.hook = watch
    runtime = make_runtime(target)
    engines = [runtime.open("toy", spec="off") for _ in range(2)]
    threads = [threading.Thread(target=engine.complete, args=(request(),)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1


@pytest.mark.parametrize("keys", [{"affinity": "0-"}, {"affinity": "x"}, {"priority": 20}, {"deadline": -1}], ids=str)
def test_host_and_bounds_are_checked(keys):
    with pytest.raises(ConfigError):
        PowerConfig(**keys)


def test_the_receipt_names_the_host(make_runtime):
    with make_runtime().open("toy", threads=1) as engine:
        host = engine.complete(request()).receipt["body"]["environment"]["host"]
        assert host["threads"] == 1
        assert host["usable_cores"] >= 1


@cache
def reference(prompt):
    """What the state machines' target decodes after *prompt*; a twin computes it, for theirs fails on purpose."""
    return plain_decode(ScriptedTarget(VOCAB, context_size=96), GenerationRequest(prompt, max_tokens=6)).token_ids


class Serving(RuleBasedStateMachine):
    """
    Requests come, are cancelled, expire, fail and are kept, over one session or replicas, in any order.

    At every point the books balance; at the end every place, sequence and byte is back.
    """

    replicas = 0

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.memory, self.others = AdmissionController(max_active=9, max_waiting=0, max_bytes=200), []
        self.target = ScriptedTarget(VOCAB, context_size=96)
        self.make_engine()
        self.live = {}

    def make_engine(self):
        from power_core.engine import Engine
        from power_core.scheduler.serving import Serving as Bounds
        from power_core.target import SessionOptions

        self.engine = Engine(
            "toy", self.target, SessionOptions(max_sequences=1 if self.replicas else 2, max_rows=8), resolve=None,
            allow_unverified=False, strategy="off", draft_max=4, width_policy="auto",
            serving=Bounds(
                queue_max=3, cache_bytes=1500, replicas=self.replicas, memory=self.memory, session_bytes=100,
                session_reservation=self.memory.acquire_now(reserve_bytes=100),
            ),
        )  # fmt: skip
        self.admission = self.engine.loop.queue.admission
        self.admission.clock = lambda: self.now

    @rule(
        n=st.integers(0, 3),
        key=st.sampled_from([None, "a", "b"]),
        deadline=st.sampled_from([None, 2.0, 9.0]),
        client=st.sampled_from("xy"),
    )
    def ask(self, n, key, deadline, client):
        asked = request(n, prompt_cache_key=key, deadline_s=deadline, client=client, max_tokens=6)
        try:
            self.live[self.engine.submit(asked)] = asked
        except QueueFullError:
            assert self.admission.waiting == 3 or self.built == 0

    @property
    def built(self):
        return self.engine.loop.pool.built if self.replicas else 1

    @rule()
    def step(self):
        self.now += 1
        try:
            events = self.engine.step()
        except PowerError:
            return  # what the target raised: every request is as before
        for event in events:
            if event.result is not None:
                self.check(self.live.pop(event.request_id), event.result)

    def check(self, asked, result):
        expected = reference(asked.prompt)
        assert result.token_ids == expected[: len(result.token_ids)]
        if result.error is None and result.finish_reason is not FinishReason.CANCELLED:
            assert result.token_ids == expected

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data):
        self.engine.cancel(data.draw(st.sampled_from(sorted(self.live))))

    @rule(name=st.sampled_from(["forward", "copy_in", "copy_out", "truncate", "checkpoint", "open"]))
    def break_next(self, name):
        faults = self.target.faults
        faults.at = {name: faults.calls[name] + 1}

    @rule()
    def evict(self):
        self.engine.cache.clear()

    @rule(nbytes=st.sampled_from([50, 100]))
    def another_model_takes_memory(self, nbytes):
        permit = self.memory.acquire_now(reserve_bytes=nbytes)
        if permit is not None:
            self.others.append(permit)

    @precondition(lambda self: self.others)
    @rule()
    def another_model_is_closed(self):
        self.others.pop().release()

    @invariant()
    def the_books_balance(self):
        counters, admission = self.admission.counters, self.admission
        ended = counters.released + counters.cancelled + counters.expired + counters.refused_full
        assert counters.submitted == ended + admission.waiting + admission.active
        assert admission.active <= admission.max_active == 2
        assert self.engine.cache.nbytes <= 1500
        assert self.memory.reserved_bytes == 100 * self.built + sum(permit.reserved_bytes for permit in self.others)

    def teardown(self):
        self.target.faults.at = {}
        while self.others:
            self.another_model_is_closed()
        for _ in range(300):
            if not self.engine.loop.active:
                break
            self.step()
        assert (self.engine.loop.active, self.admission.active, self.admission.waiting) == (0, 0, 0)
        if self.engine.stats().replicas:
            assert self.engine.stats().replicas.leased == 0
        self.engine.close()
        assert self.engine.cache.nbytes == 0
        for session in self.target.sessions:
            assert session.is_shut_down
            if not self.replicas:  # one that is lost in a close is shut down as it is
                session.assert_all_closed()


class ServingReplicas(Serving):
    """The same over two session replicas, which are also lost and built anew, where there is memory for them."""

    replicas = 2

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def lose_a_replica(self, data):
        """The end of a request comes now, and its close fails: most likely that of a sequence, else of a check."""
        faults = self.target.faults
        faults.at = {"close": faults.calls["close"] + 1}
        self.cancel(data)
        self.step()


TestServing = Serving.TestCase
TestServingReplicas = ServingReplicas.TestCase
TestServing.settings = TestServingReplicas.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
