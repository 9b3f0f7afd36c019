"""The keyed prompt cache (R26, case 22)."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from power_core.errors import BackendError
from power_core.prefix import Snapshot
from power_core.scheduler.prefix import ReuseRule, cache_key, common_prefix
from power_core.scheduler.prompt_cache import CacheCounters, PromptCache
from power_core.target import SessionOptions
from power_core.testing import one_class, padded_class, two_classes

ANY = ReuseRule()
TARGET = ("target",)


class Store:
    """A prefix store that counts what it holds, and records what was loaded."""

    def __init__(self):
        self.held = 0
        self.loaded = []
        self.freed = []

    def make(self, length, nbytes=10, can_cut=True):
        self.held += nbytes
        return Snapshot(object(), nbytes, length, can_cut)

    def load(self, seq, snapshot, length):
        assert length <= snapshot.length
        assert snapshot.can_cut or length == snapshot.length
        self.loaded.append((seq, length))

    def free(self, snapshot):
        assert snapshot.payload not in self.freed
        self.freed.append(snapshot.payload)
        self.held -= snapshot.nbytes
        assert self.held >= 0


def make_cache(now=lambda: 0.0, **kwargs):
    store = Store()
    return PromptCache({"target": store, "draft": store}, clock=now, **{"max_bytes": 10_000, **kwargs}), store


def keep(cache, store, key, tokens, *, prefilled=None, parts=TARGET, **kwargs):
    snapshots = {part: store.make(len(tokens), **kwargs) for part in parts}
    return cache.store(key, tokens, snapshots, prefilled=len(tokens) if prefilled is None else prefilled)


def length_of(cache, key, prompt, rule=ANY, needs=TARGET):
    hit = cache.lookup(key, prompt, rule, needs)
    if hit is None:
        return 0
    with hit:
        return hit.length


def test_a_key_stands_for_everything_that_decides_the_state():
    """Another caller, endpoint, model, setting or adapter: another key, even where the parts read alike in a row."""
    base = {"identity": "i", "endpoint": "e", "model_digest": "m", "settings_digest": "s", "adapters": ("x", "y")}
    keys = {cache_key("k", **base), cache_key("ki", **{**base, "identity": ""})}
    keys |= {cache_key("k", **{**base, name: "?"}) for name in base}
    keys |= {cache_key("k", **{**base, "adapters": adapters}) for adapters in (("y", "x"), ("xy",), ())}
    assert len(keys) == 2 + len(base) + 3


def test_the_longest_common_prefix_is_found_within_the_key_only():
    cache, store = make_cache()
    keep(cache, store, "a", [1, 2, 3, 4])
    keep(cache, store, "a", [1, 2, 3, 9, 9, 9])
    keep(cache, store, "b", [1, 2, 3, 4, 5, 6])
    assert length_of(cache, "a", [1, 2, 3, 4, 5, 6]) == 4
    assert length_of(cache, "a", [7, 2, 3]) == 0
    assert length_of(cache, "c", [1, 2, 3, 4]) == 0
    assert (cache.counters.requests, cache.counters.hits, cache.counters.misses) == (3, 1, 2)
    assert (cache.counters.reused_tokens, cache.counters.evaluated_tokens) == (4, 2 + 3 + 4)


def test_a_hit_leaves_the_last_chunk_in_the_prefill_class():
    """At least one token must be evaluated; where narrow chunks are another class, that many rows."""
    cache, store = make_cache()
    keep(cache, store, "a", range(20))
    prompt = [*range(20)]
    for profile, most in ((one_class(), 19), (padded_class(), 18), (two_classes(8), 12)):
        assert length_of(cache, "a", prompt, ReuseRule.of(profile(SessionOptions()))) == most


def test_rows_of_another_class_are_not_reused_as_prompt_rows():
    """A conversation's earlier answer was decoded: where decode and prefill differ it is evaluated again."""
    cache, store = make_cache()
    keep(cache, store, "a", range(20), prefilled=12)
    prompt = [*range(40)]
    assert length_of(cache, "a", prompt, ReuseRule.of(one_class()(SessionOptions()))) == 20
    assert length_of(cache, "a", prompt, ReuseRule.of(two_classes(8)(SessionOptions()))) == 12


def test_state_that_cannot_be_cut_is_used_whole_or_not_at_all():
    """Recurrent and sliding-window state: a rollback that cannot be proved is a miss."""
    cache, store = make_cache()
    keep(cache, store, "a", [1, 2, 3], can_cut=False)
    assert length_of(cache, "a", [1, 2, 3, 4]) == 3
    assert length_of(cache, "a", [1, 2, 9, 9]) == 0
    assert length_of(cache, "a", [1, 2, 3]) == 0  # nothing would be left to evaluate


def test_an_entry_without_a_part_the_request_needs_is_a_miss():
    """State saved with drafting off is no hit for a drafter that would have seen its rows."""
    cache, store = make_cache()
    keep(cache, store, "a", [1, 2, 3])
    assert length_of(cache, "a", [1, 2, 3, 4], needs=("target", "draft")) == 0
    keep(cache, store, "a", [1, 2, 3], parts=("target", "draft"))
    assert length_of(cache, "a", [1, 2, 3, 4], needs=("target", "draft")) == 3
    assert length_of(cache, "a", [1, 2, 3, 4]) == 3
    assert cache.entries == 1


def test_the_least_recently_used_goes_first():
    cache, store = make_cache(max_entries=2)
    keep(cache, store, "a", [1])
    keep(cache, store, "b", [2])
    assert length_of(cache, "a", [1, 0]) == 1
    keep(cache, store, "c", [3])
    assert [length_of(cache, key, [token, 0]) for key, token in (("a", 1), ("b", 2), ("c", 3))] == [1, 0, 1]
    assert cache.counters.evictions == 1


def test_an_entry_larger_than_the_bound_is_refused_and_freed():
    cache, store = make_cache(max_bytes=100)
    assert not keep(cache, store, "a", [1], nbytes=1000)
    assert (cache.entries, cache.nbytes, store.held, cache.counters.refused) == (0, 0, 0, 1)


def test_an_entry_expires_after_its_last_use():
    time = itertools.count(0, 4)
    cache, store = make_cache(now=lambda: float(next(time)), ttl=30)
    keep(cache, store, "a", [1])
    assert length_of(cache, "a", [1, 0]) == 1
    for _ in range(10):
        length_of(cache, "b", [1])
    assert length_of(cache, "a", [1, 0]) == 0
    assert (cache.counters.expirations, cache.nbytes, store.held) == (1, 0, 0)


def test_an_entry_in_use_survives_its_eviction():
    cache, store = make_cache(max_entries=1)
    keep(cache, store, "a", [1, 2])
    hit = cache.lookup("a", [1, 2, 3], ANY, TARGET)
    keep(cache, store, "b", [5])
    assert store.held == 20
    hit.load("target", 7)
    assert store.loaded == [(7, 2)]
    hit.release()
    hit.release()
    assert (store.held, cache.nbytes) == (10, 10 + 8)


def test_a_payload_that_cannot_be_loaded_is_a_miss_from_then_on():
    cache, store = make_cache()
    keep(cache, store, "a", [1, 2])

    def fail(*_args):
        raise BackendError("refused")

    store.load = fail
    with cache.lookup("a", [1, 2, 3], ANY, TARGET) as hit:
        with pytest.raises(BackendError):
            hit.load("target", 0)
        cache.forget(hit)
    assert length_of(cache, "a", [1, 2, 3]) == 0
    assert (cache.counters.damaged, store.held, cache.nbytes) == (1, 0, 0)


@pytest.mark.parametrize("a", [(), (1,), (1, 2, 3), (1, 2, 4), (2, 2, 3)])
@pytest.mark.parametrize("b", [(), (1,), (1, 2, 3), (1, 2, 3, 5)])
def test_common_prefix_counts_equal_leading_tokens(a, b):
    assert common_prefix(a, b) == next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_common_prefix_ends_at_the_first_difference_wherever_it_is():
    """And at the end of the shorter, for every length."""
    for length in range(12):
        tokens = tuple(range(length))
        assert common_prefix(tokens, (*tokens, 99)) == common_prefix((*tokens, 99), tokens) == length
        for place in range(length):
            other = (*tokens[:place], 99, *tokens[place + 1 :])
            assert common_prefix(tokens, other) == place


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


class Cache(RuleBasedStateMachine):
    """Whatever is stored, used, evicted and dropped: bounds hold, and every byte is held once and freed once."""

    hits = Bundle("hits")

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.cache, self.store = make_cache(now=lambda: self.now, max_bytes=300, max_entries=4, ttl=20)
        self.held = []

    @rule(key=st.sampled_from("ab"), tokens=TOKENS, nbytes=st.integers(1, 320), cut=st.booleans(), part=st.booleans())
    def keep(self, key, tokens, nbytes, cut, part):
        parts = ("target", "draft") if part else TARGET
        keep(self.cache, self.store, key, tokens, nbytes=nbytes, can_cut=cut, parts=parts)

    @rule(target=hits, key=st.sampled_from("ab"), prompt=TOKENS, needs=st.sampled_from([TARGET, ("target", "draft")]))
    def lookup(self, key, prompt, needs):
        hit = self.cache.lookup(key, prompt, ANY, needs)
        if hit is None:
            return None
        assert 0 < hit.length < len(prompt)
        assert hit._entry.key == key
        assert hit._entry.tokens[: hit.length] == prompt[: hit.length]
        self.held.append(hit)
        return hit

    @rule(hit=consumes(hits), twice=st.booleans())
    def release(self, hit, twice):
        if hit is not None:
            hit.load("target", 0)
            beside = hit.part("draft")
            assert beside is None or (
                beside.length == len(hit._entry.tokens) and beside.payload not in self.store.freed
            )
            hit.release()
            if twice:
                hit.release()
            self.held.remove(hit)

    @rule(hit=consumes(hits))
    def cannot_be_loaded(self, hit):
        if hit is not None:
            self.cache.forget(hit)
            assert hit._entry not in self.cache._entries.values()
            hit.release()
            self.held.remove(hit)

    @rule(seconds=st.integers(1, 25))
    def time_passes(self, seconds):
        self.now += seconds

    @rule()
    def clear(self):
        self.cache.clear()
        assert self.cache.entries == 0

    @invariant()
    def nothing_is_lost(self):
        counters = self.cache.counters
        assert counters.requests == counters.hits + counters.misses
        held = {id(hit._entry): hit._entry.nbytes for hit in self.held}
        assert self.cache.entries <= 4
        assert self.cache.nbytes <= 300 + sum(held.values())
        assert self.store.held <= self.cache.nbytes <= self.store.held + 8 * 6 * (4 + len(held))

    def teardown(self):
        self.cache.clear()
        for hit in self.held:
            hit.release()
        assert (self.cache.nbytes, self.store.held) == (0, 0)


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("rule", "prompt", "matched", "prefilled", "expected"),
    [
        (ReuseRule(), 10, 10, 10, 9),
        (ReuseRule(), 10, 9, 9, 9),
        (ReuseRule(), 10, 8, 2, 8),
        (ReuseRule(is_mixable=False), 10, 8, 2, 2),
        (ReuseRule(is_mixable=False), 10, 2, 8, 2),
        (ReuseRule(least_rows=4), 10, 10, 10, 6),
        (ReuseRule(least_rows=4), 4, 4, 4, 0),
        (ReuseRule(least_rows=4), 3, 3, 3, 0),
        (ReuseRule(), 10, 0, 0, 0),
    ],
)
def test_rows_are_left_to_evaluate_and_none_reused_across_classes(rule, prompt, matched, prefilled, expected):
    """As many as the narrowest chunk has; a prompt shorter than that reuses nothing."""
    assert rule.most(prompt, matched, prefilled) == expected


def test_an_entry_that_covers_is_not_stored_again():
    """Same tokens, no more parts and no more prompt rows: it is used instead, and what was brought is freed."""
    cache, store = make_cache(max_entries=2)
    assert keep(cache, store, "a", [1, 2], prefilled=1)
    assert keep(cache, store, "b", [1, 2])
    assert not keep(cache, store, "a", [1, 2], prefilled=1)
    assert (cache.counters.stored, cache.counters.refused, store.held) == (2, 1, 20)
    keep(cache, store, "c", [1, 2])
    assert [length_of(cache, key, [1, 2, 3]) for key in "abc"] == [2, 0, 2]
    assert keep(cache, store, "a", [1, 2], prefilled=2)
    assert (cache.counters.stored, store.held, cache.entries) == (4, 20, 2)


def test_an_entry_with_less_takes_the_place_of_none_with_more():
    """Fewer parts, or fewer prompt rows, or both."""
    cache, store = make_cache()
    keep(cache, store, "a", [1, 2], prefilled=2, parts=("target", "draft"))
    for parts, prefilled in ((TARGET, 2), (("target", "draft"), 1), (TARGET, 1)):
        assert not keep(cache, store, "a", [1, 2], prefilled=prefilled, parts=parts)
    assert (cache.counters.refused, store.held) == (3, 20)
    assert length_of(cache, "a", [1, 2, 3], needs=("target", "draft")) == 2


def test_bounds_may_be_used_up_exactly():
    """By one entry and by several; 8 bytes a token count beside the payload."""
    cache, store = make_cache(max_bytes=36)
    assert keep(cache, store, "a", [1], nbytes=10)
    assert keep(cache, store, "b", [1], nbytes=10)
    assert (cache.nbytes, cache.entries, cache.counters.evictions) == (36, 2, 0)
    assert keep(cache, store, "c", [1, 2], nbytes=20)
    assert (cache.nbytes, cache.entries, cache.counters.evictions) == (36, 1, 2)
    assert not keep(cache, store, "d", [1, 2], nbytes=21)
    assert cache.entries == 1


def test_the_longest_hit_wins_and_the_first_of_equals():
    """What saves the most, whatever was kept last."""
    cache, store = make_cache()
    keep(cache, store, "a", [1, 2, 3])
    keep(cache, store, "a", [1, 2])
    keep(cache, store, "a", [1, 2, 9])
    for prompt, length in (([1, 2, 3, 4], 3), ([1, 2, 9, 4], 3), ([1, 2, 5, 5], 2), ([1, 5, 5, 5], 1)):
        assert length_of(cache, "a", prompt) == length
    assert [cache.covered("a", prompt) for prompt in ([1, 2, 3, 4], [1, 2], [5], [])] == [3, 2, 0, 0]
    assert cache.covered("b", [1, 2, 3]) == cache.covered("A", [1, 2, 3]) == 0


def test_an_entry_is_kept_for_its_whole_time():
    """It expires when more than that has passed since its last use, not before."""
    time = [0.0]
    cache, store = make_cache(now=lambda: time[0], ttl=30)
    keep(cache, store, "a", [1])
    time[0] = 30
    assert length_of(cache, "a", [1, 0]) == 1
    time[0] = 60
    assert length_of(cache, "a", [1, 0]) == 1
    time[0] = 90.5
    assert (length_of(cache, "a", [1, 0]), cache.counters.expirations) == (0, 1)


def test_state_of_several_lengths_is_used_where_all_of_it_fits():
    """Parts that cannot be cut must agree; those that can are cut to them."""
    cache, store = make_cache()

    def put(key, *lengths):
        parts = {name: store.make(length, can_cut=cut) for name, length, cut in lengths}
        cache.store(key, [1, 2, 3, 4], parts, prefilled=4)

    both, prompt = ("target", "draft"), [1, 2, 3, 4, 5]
    put("cut", ("target", 4, True), ("draft", 3, True))
    put("whole", ("target", 4, True), ("draft", 3, False))
    put("apart", ("target", 4, False), ("draft", 3, False))
    put("short", ("target", 2, True), ("draft", 3, False))
    assert [length_of(cache, key, prompt, needs=both) for key in ("cut", "whole", "apart", "short")] == [3, 3, 0, 0]
    assert length_of(cache, "apart", prompt) == 4


def test_what_a_payload_that_cannot_be_loaded_had_counted_is_counted_back():
    cache, store = make_cache()
    keep(cache, store, "a", [1, 2])
    with cache.lookup("a", [1, 2, 3], ANY, TARGET) as hit:
        assert (cache.counters.hits, cache.counters.reused_tokens, cache.counters.evaluated_tokens) == (1, 2, 1)
        cache.forget(hit)
    counters = cache.counters
    assert (counters.requests, counters.hits, counters.misses, counters.damaged) == (1, 0, 1, 1)
    assert (counters.reused_tokens, counters.evaluated_tokens) == (0, 3)


def test_entries_in_use_are_the_last_to_be_evicted():
    """They would free no bytes; where nothing else is there, the oldest of them goes all the same."""
    cache, store = make_cache(max_entries=2)
    keep(cache, store, "a", [1])
    held = cache.lookup("a", [1, 0], ANY, TARGET)
    keep(cache, store, "b", [1])
    keep(cache, store, "c", [1])
    assert [length_of(cache, key, [1, 0]) for key in "abc"] == [1, 0, 1]
    other = cache.lookup("c", [1, 0], ANY, TARGET)
    keep(cache, store, "d", [1])
    assert (cache.entries, length_of(cache, "d", [1, 0])) == (2, 1)
    held.release()
    other.release()
    assert (store.held, cache.nbytes) == (20, 36)


def test_a_cache_begins_empty():
    cache, _ = make_cache()
    assert cache.counters == CacheCounters(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert (cache.entries, cache.nbytes, cache.max_entries) == (0, 0, 64)


def test_an_evicted_entry_is_freed_by_the_last_who_holds_it():
    cache, store = make_cache(max_entries=1)
    keep(cache, store, "a", [1])
    first, second = (cache.lookup("a", [1, 0], ANY, TARGET) for _ in range(2))
    keep(cache, store, "b", [1])
    first.release()
    assert (store.held, cache.nbytes) == (20, 36)
    second.release()
    assert (store.held, cache.nbytes) == (10, 18)


def test_what_does_not_fit_beside_entries_in_use_is_not_kept():
    """Dropping them would free nothing; of too many that fit the oldest makes room."""
    for most_bytes, most, kept, found in ((36, 9, False, "ab"), (54, 2, True, "bc")):
        cache, store = make_cache(max_bytes=most_bytes, max_entries=most)
        hits = []
        for key in "ab":
            keep(cache, store, key, [1])
            hits.append(cache.lookup(key, [1, 0], ANY, TARGET))
        assert keep(cache, store, "c", [1]) is kept
        assert [key for key in "abc" if length_of(cache, key, [1, 0])] == [*found]
        for hit in hits:
            hit.release()
        assert (store.held, cache.nbytes) == (20, 36)


def test_a_part_that_cannot_be_freed_keeps_no_other_from_it():
    cache, store = make_cache()
    keep(cache, store, "a", [1], parts=("target", "draft"))
    freed = []

    def free(snapshot):
        freed.append(snapshot)
        raise BackendError("stuck")

    store.free = free
    cache.clear()
    assert (len(freed), cache.nbytes, cache.entries) == (2, 0, 0)
