"""Requests that keep their prompts: a hit has the tokens of a miss, whatever happens in between (R26)."""

import itertools

import pytest
from attrs import evolve

from power_core.errors import CapabilityError
from power_core.request import GenerationRequest, SamplingSpec
from power_core.scheduler.prompt_cache import PromptCache
from power_core.scheduler.reuse import TARGET, PromptReuse
from power_core.shapes import ExactnessLevel
from power_core.testing import Faults, OracleDrafter, PatternDrafter, RandomDrafter, ScriptedTarget
from power_core.testing.profiles import one_class, padded_class, two_classes
from power_core.types import Capability

VOCAB = 24
PREFIX = tuple(n % VOCAB for n in range(3, 83))
PROFILES = {"one": one_class(), "padded": padded_class(), "two": two_classes(8)}
DRAFTS = ("off", "oracle", "mixed", "random", "hidden")


def drafters(target):
    return {
        "oracle": OracleDrafter(target.greedy, VOCAB),
        "mixed": PatternDrafter(target.greedy, VOCAB, ["RRRW", "", "R", "WWWW"]),
        "random": RandomDrafter(VOCAB),
        "hidden": OracleDrafter(target.greedy, VOCAB, hidden_layers=[1]),
    }


def caching_lab(make_lab, target, *, max_bytes=1 << 20, **kwargs):
    """A lab whose loop keeps prompts, and the cache."""
    lab = make_lab(target, drafters(target), **kwargs)
    store = lab.session.prefix_store()
    cache = PromptCache({TARGET: store}, max_bytes=max_bytes)
    lab.loop.reuse = PromptReuse(cache, lab.session, store, target.identity.file_sha256)
    return lab, cache


def keyed(tail, **fields):
    return GenerationRequest((*PREFIX, *tail), prompt_cache_key="k", **{"max_tokens": 12, **fields})


@pytest.mark.parametrize("spec", DRAFTS)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("memory", [None, 0, 2], ids=["free", "whole", "window"])
def test_a_hit_has_the_tokens_of_a_miss(make_lab, memory, profile, spec):
    """Cold, warm, after another tail, after a changed strategy and after an eviction: always plain decoding's."""
    target = ScriptedTarget(VOCAB, rollback_capacity=memory, profile=PROFILES[profile])
    lab, cache = caching_lab(make_lab, target, parallel=2)
    seeded = SamplingSpec(temperature=0.8, seed=5)
    for turn, tail in enumerate([(1,), (1,), (9, 9, 2), (9, 9, 5, 1), (1,)]):
        request = keyed(tail, spec=spec if turn % 2 else "oracle", sampling=seeded if turn == 3 else SamplingSpec())
        [result] = lab.run(request)
        lab.check_same(request, result)
        if turn in (1, 4):
            assert result.counts.reused >= len(PREFIX) - 8
        if turn == 3:
            cache.clear()
            lab.check_same(keyed((1,)), lab.run(keyed((1,)))[0])
    assert cache.counters.hits >= 2


def test_a_conversation_reuses_its_answers_where_they_were_computed_like_prompts(make_lab):
    """One class: prompt and answer of the last turn; two classes: its prompt alone."""
    for profile, answer in (("one", 12), ("two", 0)):
        target = ScriptedTarget(VOCAB, profile=PROFILES[profile])
        lab, _ = caching_lab(make_lab, target)
        [first] = lab.run(keyed((1,)))
        then = keyed((1, *first.token_ids, *[2] * 9))
        [second] = lab.run(then)
        lab.check_same(then, second)
        assert second.counts.reused == 81 + max(answer - 1, 0)  # the last token was emitted, not evaluated


def test_memory_that_cannot_be_cut_is_kept_where_prompts_part(make_lab):
    """The third question about one text finds the state at the end of the text."""
    target = ScriptedTarget(VOCAB, rollback_capacity=0)
    lab, _ = caching_lab(make_lab, target)
    reused = []
    for tail in ((1, 2, 3, 4), (5, 6, 7, 8), (9, 1, 9, 1)):
        request = keyed(tail)
        [result] = lab.run(request)
        lab.check_same(request, result)
        reused.append(result.counts.reused)
    assert reused == [0, 0, len(PREFIX)]


def test_a_state_is_each_clients_endpoints_and_keys_own(make_lab):
    target = ScriptedTarget(VOCAB)
    lab, cache = caching_lab(make_lab, target)
    lab.run(keyed((1,), client="a", endpoint="chat"))
    for fields in ({"client": "b"}, {"endpoint": "raw"}, {"prompt_cache_key": "other"}, {"prompt_cache_key": None}):
        [result] = lab.run(keyed((1,), client="a", endpoint="chat").with_(**fields))
        assert result.counts.reused == 0
    [again] = lab.run(keyed((1,), client="a", endpoint="chat"))
    assert again.counts.reused == len(PREFIX)
    assert cache.counters.requests == 5  # a request without a key asks nothing


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_copy_that_cannot_be_loaded_is_a_miss(make_lab, after):
    """Also where the store had its effect and failed then: the sequence is emptied, and the entry forgotten."""
    target = ScriptedTarget(VOCAB, faults=Faults({"copy_in": 1}, after=after))
    lab, cache = caching_lab(make_lab, target)
    for _ in range(3):
        [result] = lab.run(keyed((1,)))
        lab.check_same(keyed((1,)), result)
    assert (cache.counters.hits, cache.counters.misses, cache.counters.damaged) == (1, 2, 1)
    assert result.counts.reused == len(PREFIX)


def test_a_copy_that_cannot_be_made_costs_nothing(make_lab):
    target = ScriptedTarget(VOCAB, faults=Faults({"copy_out": 1}))
    lab, cache = caching_lab(make_lab, target)
    [result] = lab.run(keyed((1,)))
    lab.check_same(keyed((1,)), result)
    assert cache.entries == 0


def unverified(options):
    return evolve(one_class()(options), level=ExactnessLevel.UNVERIFIED)


class Uncopied(ScriptedTarget):
    """Does not declare that its state can be copied."""

    def capabilities(self, options):
        return super().capabilities(options) - {Capability.PREFIX_REUSE}


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        (Uncopied(VOCAB), "state cannot be kept exactly"),
        (ScriptedTarget(VOCAB, profile=unverified), "state cannot be kept exactly"),
        (ScriptedTarget(VOCAB), "prompt_cache_bytes: no prompt is kept"),
    ],
    ids=["no copies", "unverified", "no cache"],
)
def test_a_key_is_refused_where_nothing_is_kept(make_lab, target, cause):
    """Fail closed: no request is served as if its prompt were kept; the error says whether that could be changed."""
    with pytest.raises(CapabilityError, match=cause):
        make_lab(target).submit(keyed((1,)))


@pytest.mark.parametrize("name", ["forward", "truncate", "restore", "checkpoint", "rows.greedy"])
def test_a_failure_after_a_hit_undoes_to_the_hit_or_starts_over(make_lab, name):
    """A fault in any call of the second request: it ends or goes on, and the third has plain decoding's tokens."""
    for number in itertools.count(1):
        target = ScriptedTarget(VOCAB, rollback_capacity=2)
        lab, _ = caching_lab(make_lab, target)
        lab.run(keyed((1, 2), spec="mixed"))
        target.faults.calls.clear()
        target.faults.at = {name: number}
        request_id = lab.submit(keyed((1, 2), spec="mixed"))
        lab.persist(request_id)
        target.faults.at = {}
        if lab.results[request_id].error is None:
            lab.check_same(keyed((1, 2)), lab.results[request_id])
        [third] = lab.run(keyed((1, 2), spec="mixed"))
        lab.check_same(keyed((1, 2)), third)
        if not target.faults.fired or number > 12:
            break
    assert number > 1 or name in ("truncate", "restore")
