"""What a drafter that reads hidden states knows after a hit: what it knows after a cold start, and nothing stale."""

import hashlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from power_core.drafter import DrafterRequirements, Proposal
from power_core.request import GenerationRequest
from power_core.scheduler.backlog import BacklogDrafter
from power_core.scheduler.chains import ChainDrafter
from power_core.scheduler.costs import CostModel
from power_core.scheduler.kept_rows import MOST_TOLD, RowStore
from power_core.scheduler.prompt_cache import PromptCache
from power_core.scheduler.reuse import HIDDEN, TARGET, PromptReuse
from power_core.target import SessionOptions
from power_core.testing import Faults, ScriptedTarget
from power_core.testing.profiles import one_class, padded_class

VOCAB = 24
PREFIX = tuple(n % VOCAB for n in range(3, 83))


class Reader:
    """A drafter whose proposals are a digest of all rows it was told of; rows of one prefix must always be alike."""

    def __init__(self, layers, known):
        self.layers, self.known = layers, known
        self.state, self.proposed, self.told = {}, [], []
        self.interrupt_in = 0  # observations

    def requirements(self):
        return DrafterRequirements(hidden_layers=self.layers)

    def open(self, model, session):
        return self

    def begin(self, seq, tokens):
        self.state[seq] = ([*tokens], [])

    def observe(self, seq, committed, rows):
        self.interrupt_in -= 1
        if self.interrupt_in == 0:
            raise KeyboardInterrupt
        tokens, told = self.state[seq]
        tokens.extend(committed)
        for i in range(0 if rows is None else rows.count):
            position = rows.position + i
            assert not told or position == told[-1][0] + 1
            value = rows.rows.hidden(rows.start + i, self.layers[0]).tobytes()
            for layer in self.layers:
                values = rows.rows.hidden(rows.start + i, layer).tobytes()
                assert self.known.setdefault((tuple(tokens[: position + 1]), layer), values) == values
            told.append((position, value))

    def propose(self, requests):
        for request in requests:
            tokens, told = self.state[request.seq]
            digest = hashlib.sha256(repr(told).encode()).digest()
            self.proposed.append((len(tokens), [byte % VOCAB for byte in digest[: request.max_tokens]]))
        return [Proposal(ids) for _, ids in self.proposed[-len(requests) :]]

    def checkpoint(self, seq):
        return tuple(map(len, self.state[seq]))

    def restore(self, seq, checkpoint):
        for values, length in zip(self.state[seq], checkpoint, strict=True):
            del values[length:]

    def end(self, seq):
        self.told.append(self.state.pop(seq)[1])

    def close(self):
        pass

    def assert_all_ended(self):
        assert not self.state


def make(make_lab, *, target=None, max_bytes=1 << 20, more=(), **kwargs):
    """A lab that keeps prompts, its readers of layers 1, 2 and both, and its cache."""
    known = {}
    target = target or ScriptedTarget(VOCAB, context_size=600)
    readers = {"one": Reader((1,), known), "two": Reader((2,), known), "both": Reader((1, 2), known)}
    lab = make_lab(target, {**readers, **dict(more)}, **{"tells_late": True, **kwargs})
    store = lab.session.prefix_store()
    cache = PromptCache({TARGET: store, HIDDEN: RowStore()}, max_bytes=max_bytes)
    lab.loop.reuse = PromptReuse(cache, lab.session, store, target.identity.file_sha256)
    return lab, readers, cache


def keyed(prompt, spec="both", **fields):
    return GenerationRequest(tuple(prompt), spec=spec, prompt_cache_key="k", **{"max_tokens": 8, **fields})


def drafted(lab, reader, request):
    """The proposals of *request*, the positions it told *reader* of, and how many tokens it reused."""
    reader.proposed.clear()
    [result] = lab.run(request)
    lab.check_same(request, result)
    return list(reader.proposed), [position for position, _ in reader.told[-1]], result.counts.reused


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("memory", [None, 0, 2], ids=["free", "whole", "window"])
@pytest.mark.parametrize("profile", [one_class(), padded_class()], ids=["one", "padded"])
def test_proposals_after_a_hit_are_those_of_a_cold_start(make_lab, profile, memory, late):
    """The same prompt again, others that begin like it, and a conversation that goes on."""
    target = ScriptedTarget(VOCAB, rollback_capacity=memory, profile=profile, context_size=200)
    lab, readers, _ = make(make_lab, target=target, tells_late=late)
    hits = 0
    for tail in ((1,), (1,), (9, 9, 2), (9, 9, 2, *lab.plain(keyed((*PREFIX, 9, 9, 2)))[0], 5), (1,)):
        request = keyed((*PREFIX, *tail))
        cold, warm = drafted(lab, readers["both"], request.with_(prompt_cache_key=None)), None
        warm = drafted(lab, readers["both"], request)
        assert warm[:2] == cold[:2]
        assert warm[1][0] == 0
        hits += warm[2] > 0
    assert hits >= 3


def test_a_drafter_is_told_of_the_last_rows_of_a_long_prefix(make_lab):
    """And no more than the cold start had: a hit costs no more time before the first proposal, however long it is."""
    lab, readers, _ = make(make_lab)
    long = [*PREFIX] * 4
    drafted(lab, readers["both"], keyed(long))
    _, told, reused = drafted(lab, readers["both"], keyed([*long, 1, 2]))
    assert reused == len(long)
    assert told[0] == reused - MOST_TOLD


def test_blocks_that_were_kept_serve_a_drafter_that_reads_some_of_them(make_lab):
    """One that reads others is told of what is evaluated, as before; so is every one after plain decoding."""
    served = [("both", "one", True), ("both", "two", True)]
    unserved = [("one", "both", False), ("two", "one", False), ("off", "one", False)]
    for first, then, from_start in served + unserved:
        lab, readers, _ = make(make_lab)
        lab.run(keyed(PREFIX, spec=first))
        _, told, reused = drafted(lab, readers[then], keyed((*PREFIX, 1, 2), spec=then))
        assert reused == len(PREFIX)
        assert told[0] == (0 if from_start else reused)


def test_states_come_back_also_where_the_answer_is_longer_than_what_is_told(make_lab):
    """An entry holds more rows than a hit tells, so that a hit on its beginning tells something too."""
    lab, readers, _ = make(make_lab)
    lab.run(keyed(PREFIX, max_tokens=2 * MOST_TOLD))
    _, told, reused = drafted(lab, readers["both"], keyed((*PREFIX, 1, 2)))
    assert (told[0], reused) == (0, len(PREFIX))


def test_their_bytes_count_and_they_give_way_where_the_bound_is_small(make_lab):
    """An entry that is kept without them is kept all the same."""
    lab, readers, cache = make(make_lab)
    lab.run(keyed(PREFIX, spec="off"))
    plain = cache.nbytes
    cache.clear()
    lab.run(keyed(PREFIX, spec="one"))
    one = cache.nbytes
    cache.clear()
    lab.run(keyed(PREFIX))
    row = len(next(iter(readers["one"].known.values())))
    assert one - plain == row * (len(PREFIX) + 7)  # the last token was emitted, not evaluated
    assert cache.nbytes - plain == 2 * (one - plain)
    cache.clear()
    cache.max_bytes = plain + 1
    lab.run(keyed(PREFIX))
    assert (cache.entries, cache.nbytes) == (1, plain)


class Chain(ChainDrafter):
    """A chain of readers that are told late, as the engine has it."""

    def __init__(self, readers, target):
        self.readers = readers
        members = {name: BacklogDrafter(reader) for name, reader in readers.items()}
        super().__init__(members, CostModel(target.profile(SessionOptions()).decode, 8))

    def assert_all_ended(self):
        for reader in self.readers.values():
            reader.assert_all_ended()


def test_members_of_a_chain_are_told_of_the_blocks_they_read(make_lab):
    """One entry has the rows of all; a drafter alone may go on with what a chain kept."""
    target = ScriptedTarget(VOCAB, context_size=600)
    known = {}
    readers = {"one": Reader((1,), known), "two": Reader((2,), known)}
    lab, alone, _ = make(make_lab, target=target, more={"chain": Chain(readers, target)})
    lab.run(keyed(PREFIX, spec="chain"))
    assert drafted(lab, readers["one"], keyed((*PREFIX, 1, 2), spec="chain"))[1][0] == 0
    assert all(told[0][0] == 0 for told in readers["two"].told if told)
    assert drafted(lab, alone["both"], keyed((*PREFIX, 1, 3)))[1][0] == 0


@pytest.mark.parametrize("name", ["forward", "truncate", "restore", "checkpoint", "rows.hidden", "rows.greedy"])
def test_a_failure_after_a_hit_leaves_nothing_stale(make_lab, name):
    """Whatever call of the second request fails: rows are told once and in order, and the third begins right."""
    for number in range(1, 8):
        target = ScriptedTarget(VOCAB, rollback_capacity=2, faults=Faults({}))
        lab, readers, _ = make(make_lab, target=target)
        lab.run(keyed((*PREFIX, 1)))
        target.faults.calls.clear()
        target.faults.at = {name: number}
        request_id = lab.submit(keyed((*PREFIX, 1, 2)))
        lab.persist(request_id)
        target.faults.at = {}
        _, told, reused = drafted(lab, readers["both"], keyed((*PREFIX, 1, 3)))
        assert (reused >= len(PREFIX) - 8, told[0]) == (True, 0)


@pytest.mark.parametrize("number", range(1, 6))
def test_an_interrupted_step_leaves_no_row_behind(make_lab, number):
    """It is done again, and its rows come again: the entry has each of them once."""
    lab, readers, _ = make(make_lab, tells_late=False, prefill_chunk=40)
    readers["both"].interrupt_in = number
    request_id = lab.submit(keyed((*PREFIX, 1)))
    with pytest.raises(KeyboardInterrupt):
        lab.drain()
    lab.drain()
    lab.check_same(keyed((*PREFIX, 1)), lab.results[request_id])
    assert drafted(lab, readers["both"], keyed((*PREFIX, 1, 3)))[1][0] == 0


TAILS = st.lists(st.integers(0, 3), max_size=3)


@given(
    turns=st.lists(st.tuples(st.integers(30, 80), TAILS, st.sampled_from(["off", "one", "two", "both"])), max_size=12),
    max_bytes=st.sampled_from([1 << 20, 60_000]),
    memory=st.sampled_from([None, 0, 2]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_row_is_ever_told_of_another_prefix(make_lab, turns, max_bytes, memory):
    """Prompts that part anywhere, drafters that read different blocks, entries that are evicted."""
    target = ScriptedTarget(VOCAB, rollback_capacity=memory, context_size=120)
    lab, readers, cache = make(make_lab, target=target, max_bytes=max_bytes, parallel=2)
    for length, tail, spec in turns:
        requests = [keyed((*PREFIX[:length], *tail, n), spec=spec) for n in (4, 5)]
        for request, result in zip(requests, lab.run(*requests), strict=True):
            lab.check_same(request, result)  # the readers compare each row with those of the same prefix
        assert cache.nbytes <= max_bytes
    assert all(told[-1][0] - told[0][0] + 1 == len(told) for reader in readers.values() for told in reader.told if told)
