"""What of a prompt is looked up and kept, with a store and a session that only count."""

import numpy as np
import pytest
from structlog.testing import capture_logs

from power_core.drafter import DrafterRequirements, HiddenRows
from power_core.errors import BackendError
from power_core.prefix import Snapshot
from power_core.scheduler.drafting import OpenDraft
from power_core.scheduler.kept_rows import MOST_TOLD, RowStore
from power_core.scheduler.prompt_cache import PromptCache
from power_core.scheduler.reuse import HIDDEN, LEAST_KEPT, TARGET, PromptReuse
from power_core.target import SessionOptions
from power_core.testing import one_class, two_classes
from scheduler.sequences import make_sequence


class Store:
    """Copies the length of a sequence."""

    def __init__(self, session, *, can_cut=True, longest=None):
        self.can_cut, self.longest = can_cut, longest
        self.saved, self.fails = [], False
        self._session = session

    def save(self, seq):
        if self.fails:
            raise BackendError("no copy")
        self.saved.append(self._session.held)
        return Snapshot(object(), 10, self._session.held, self.can_cut)

    def load(self, seq, snapshot, length):
        if self.fails:
            raise BackendError("no load")
        self._session.held = length

    def free(self, snapshot):
        pass


class Session:
    """One sequence, of which only the length is known."""

    def __init__(self, profile=None):
        self.profile = (profile or one_class(64))(SessionOptions())
        self.context_size = 1000
        self.held = 0
        self.calls = []

    def length(self, seq):
        return self.held

    def truncate(self, seq, length):
        self.calls.append(("truncate", length))
        self.held = length

    def open(self, seq):
        self.calls.append("open")

    def close(self, seq):
        self.calls.append("close")


def make(profile=None, **store):
    session = Session(profile)
    store = Store(session, **store)
    cache = PromptCache({TARGET: store, HIDDEN: RowStore()}, max_bytes=1 << 20)
    return PromptReuse(cache, session, store, "model"), session, store


class Draft:
    """A drafter's session that is told of rows of block 2, and remembers their places."""

    def __init__(self):
        self.seen = []

    def begin(self, seq, tokens): ...

    def observe(self, seq, committed, rows):
        assert not committed
        assert [*rows.rows.hidden(slice(rows.start, rows.start + rows.count), 2)[:, 0]] == [
            *range(rows.position, rows.position + rows.count)
        ]
        self.seen.append((rows.position, rows.count))


class States:
    """The state of row i in every block is its place."""

    def hidden(self, i, layer):
        return np.arange(1000, dtype=np.float32)[i, None]


def drafting(reuse, prompt, *, layers=(2,), held=None):
    """A request whose drafter reads *layers*, begun, evaluated up to *held* if that is said, and ended."""
    draft, sequence = Draft(), keyed(prompt)
    sequence.bind(Session(), OpenDraft("reader", draft, DrafterRequirements(hidden_layers=layers)))
    reuse.begin(sequence)
    if held is not None:
        sequence.held = reuse._session.held = held
        start = sequence.counts.reused
        sequence.drafting.history.add(HiddenRows(States(), start, held - start, start))
        reuse.end(sequence)
    return draft.seen, sequence


def keyed(prompt, **request):
    return make_sequence(tuple(prompt), prompt_cache_key="k", **request)


def ended(reuse, session, prompt, *, answer=0, held=None):
    """A request with *prompt* that was evaluated, answered and ended."""
    sequence = keyed(prompt)
    reuse.begin(sequence)
    sequence.sampler.history += [9] * answer
    sequence.held = session.held = len(prompt) + answer if held is None else held
    sequence.evaluated_prompt = min(sequence.held, len(prompt))
    reuse.end(sequence)
    return sequence


def hits(reuse, prompt):
    """Tokens of *prompt* that a new request finds."""
    sequence = keyed(prompt)
    sequence.open(Session())
    reuse.begin(sequence)
    assert sequence.evaluated_prompt == sequence.counts.reused
    return sequence.counts.reused


def test_without_a_key_nothing_is_looked_up_or_kept():
    reuse, session, store = make()
    sequence = make_sequence(tuple(range(64)))
    reuse.begin(sequence)
    sequence.held = session.held = 64
    reuse.end(sequence)
    assert (sequence.cache_key, sequence.keep_at, store.saved, reuse.cache.counters.requests) == (None, [], [], 0)


@pytest.mark.parametrize(("length", "kept"), [(LEAST_KEPT - 1, []), (LEAST_KEPT, [LEAST_KEPT]), (64, [64])])
def test_short_prompts_are_not_worth_a_copy(length, kept):
    reuse, session, store = make()
    ended(reuse, session, range(length))
    assert store.saved == kept


def test_an_answer_is_kept_where_it_was_computed_like_a_prompt():
    """Else the sequence is cut back to its prompt first."""
    for profile, saved, calls in ((None, 44, []), (two_classes(8), 40, [("truncate", 40)])):
        reuse, session, store = make(profile)
        ended(reuse, session, range(40), answer=4)
        assert (store.saved, session.calls) == ([saved], calls)


def test_no_more_is_kept_than_can_be_copied_exactly():
    for longest, saved in ((39, [39]), (40, [40]), (99, [40]), (LEAST_KEPT - 1, [])):
        reuse, session, store = make(longest=longest)
        ended(reuse, session, range(40))
        assert store.saved == saved


def test_a_prompt_that_was_not_evaluated_to_its_end_is_not_kept():
    reuse, session, store = make()
    ended(reuse, session, range(64), held=63)
    assert store.saved == []


@pytest.mark.parametrize(("more", "copies"), [(0, 1), (LEAST_KEPT - 1, 1), (LEAST_KEPT, 2), (LEAST_KEPT + 1, 2)])
def test_what_saves_hardly_more_is_not_kept_again(more, copies):
    """A copy of the same beginning, shorter by less than the least that is kept, does as well."""
    reuse, session, store = make()
    for length in (64, 64 + more):
        session.held = 0
        ended(reuse, session, range(length))
    assert len(store.saved) == copies


def test_a_hit_is_counted_and_leaves_a_row():
    """The same prompt leaves the last row, a longer one begins where the kept one ends."""
    reuse, session, _ = make()
    ended(reuse, session, range(64))
    assert [hits(reuse, range(length)) for length in (64, 65, 80)] == [63, 64, 64]
    assert session.held == 64
    assert hits(reuse, [9] * 64) == 0


def test_a_state_that_cannot_be_loaded_is_forgotten():
    """The sequence is closed and opened again, whatever the store left there, and evaluates its prompt."""
    reuse, session, store = make()
    ended(reuse, session, range(64))
    store.fails = True
    sequence = keyed(range(64))
    sequence.is_open = True
    with capture_logs() as logs:
        reuse.begin(sequence)
    assert (session.calls, sequence.counts.reused, sequence.evaluated_prompt) == (["close", "open"], 0, 0)
    assert logs[-1]["log_level"] == "warning"
    assert reuse.cache.counters.damaged == 1
    store.fails = False
    assert hits(reuse, range(64)) == 0


def test_a_state_that_cannot_be_saved_is_a_warning():
    reuse, session, store = make()
    store.fails = True
    with capture_logs() as logs:
        ended(reuse, session, range(64))
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert reuse.cache.entries == 0


def places(reuse, prompt):
    sequence = keyed(prompt)
    reuse.begin(sequence)
    return sequence.keep_at


def test_memory_that_can_be_cut_is_kept_at_the_end_only():
    """Unless only its beginning can be copied: then that is kept on the way."""
    assert places(make()[0], range(64)) == []
    assert places(make(longest=50)[0], range(64)) == [50]


def test_memory_that_cannot_be_cut_is_kept_before_the_last_rows_and_where_prompts_part():
    """Not where that is too short, nor what a hit has brought already."""
    for profile, last in ((None, 63), (two_classes(8), 56)):
        assert places(make(profile, can_cut=False)[0], range(64)) == [last]
    assert places(make(can_cut=False)[0], range(LEAST_KEPT)) == []
    assert places(make(can_cut=False)[0], range(LEAST_KEPT + 1)) == [LEAST_KEPT]
    assert places(make(can_cut=False, longest=40)[0], range(64)) == [40]
    reuse, session, store = make(can_cut=False)
    sequence = keyed(range(64))
    reuse.begin(sequence)
    for held in (50, 63, 64):
        sequence.evaluated_prompt = session.held = held
        reuse.advance(sequence)
    assert (store.saved, sequence.keep_at) == ([63], [])
    other = [*range(40), *[9] * 30]
    assert places(reuse, other) == [40, 69]
    assert places(reuse, range(64)) == []  # the hit has the 63 rows that would be kept


def test_a_place_that_was_passed_is_not_kept():
    """Rows beyond it are in the state, and it cannot be cut."""
    reuse, session, store = make(can_cut=False)
    sequence = keyed(range(64))
    reuse.begin(sequence)
    sequence.evaluated_prompt = session.held = 64
    reuse.advance(sequence)
    assert (store.saved, sequence.keep_at) == ([], [])
    reuse.end(sequence)
    assert store.saved == []


@pytest.mark.parametrize("other", [{"client": "x"}, {"endpoint": "x"}, {"prompt_cache_key": "x"}])
def test_a_state_is_found_under_its_own_key_only(other):
    reuse, session, _ = make()
    ended(reuse, session, range(64))
    sequence = make_sequence(tuple(range(64)), **{"prompt_cache_key": "k", **other})
    reuse.begin(sequence)
    assert sequence.counts.reused == 0


def test_generated_rows_of_another_class_are_not_reused_as_prompt_rows():
    """The entry says how many of its tokens were prompt rows."""
    reuse, session, _ = make(two_classes(8), longest=None)
    reuse._mixable = True  # as if the answer had been kept
    ended(reuse, session, range(40), answer=24)
    assert hits(reuse, [*range(40), *[9] * 40]) == 40


def test_places_are_kept_one_after_the_other():
    """Where another prompt parted, then before the last rows; far from the beginning as near to it."""
    reuse, session, store = make(can_cut=False)
    for tail in (1, 2):
        sequence = keyed([*range(600), *[tail] * 100])
        reuse.begin(sequence)
        for held in (int("600"), int("699"), int("700")):
            sequence.evaluated_prompt = session.held = held
            reuse.advance(sequence)
    assert (store.saved, session.calls, sequence.keep_at) == ([699, 600, 699], [], [])


def test_one_row_more_than_a_hit_brought_is_worth_a_copy():
    """Memory that cannot be cut is used whole, so that the longer state is of use to longer prompts only."""
    reuse, session, _ = make(can_cut=False)
    sequence = keyed(range(41))
    reuse.begin(sequence)
    sequence.evaluated_prompt = session.held = 40
    reuse.advance(sequence)
    assert places(reuse, range(42)) == [41]
    assert places(reuse, range(41)) == []


def test_a_hit_tells_a_drafter_of_rows_that_end_where_it_ends():
    """Of the whole entry, of a part of it, and of no more than the bound; then the longer entry has them all."""
    reuse, _, _ = make()
    drafting(reuse, range(64), held=64)
    for prompt, told in ((range(64), (0, 63)), (range(80), (0, 64)), ([*range(40), *[9] * 9], (0, 40))):
        assert drafting(reuse, prompt)[0] == [told]
    assert drafting(reuse, range(300), held=300)[0] == [(0, 64)]
    assert drafting(reuse, range(310))[0] == [(300 - MOST_TOLD, MOST_TOLD)]
    assert drafting(reuse, [9] * 64)[0] == []


def test_a_drafter_of_other_blocks_is_told_nothing():
    """Nor is one told of what a request without a drafter kept."""
    reuse, _, _ = make()
    drafting(reuse, range(64), layers=(2, 3), held=64)
    assert drafting(reuse, range(80), layers=(2,))[0] == [(0, 64)]
    assert drafting(reuse, range(80), layers=(2, 4))[0] == []
    assert drafting(reuse, range(80), layers=())[1].drafting.history is None
    plain, session, _ = make()
    ended(plain, session, range(64))
    assert drafting(plain, range(80))[0] == []


def test_states_that_exceed_the_bound_are_left_out():
    """By one byte here; the target's state is kept all the same, and so it is where there is no place for rows."""
    for change in (lambda cache: setattr(cache, "max_bytes", 777), lambda cache: cache.stores.pop(HIDDEN)):
        reuse, _, _ = make()
        change(reuse.cache)
        sequence = drafting(reuse, range(64))[1]
        sequence.held = reuse._session.held = 64
        if sequence.drafting.history is not None:
            sequence.drafting.history.add(HiddenRows(States(), 0, 64, 0))
        reuse.end(sequence)
        assert (reuse.cache.entries, reuse.cache.nbytes) == (1, 10 + 8 * 64)


def test_states_may_use_the_bound_up():
    reuse = make()[0]
    reuse.cache.max_bytes = 10 + 8 * 64 + 4 * 64
    drafting(reuse, range(64), held=64)
    assert (reuse.cache.entries, reuse.cache.nbytes) == (1, reuse.cache.max_bytes)


def test_rows_of_an_answer_are_kept_where_the_answer_is():
    """Else they would be copied for nothing."""
    for profile, count in ((None, 44), (two_classes(8), 40)):
        reuse = make(profile)[0]
        sequence = drafting(reuse, range(40))[1]
        sequence.drafting.history.add(HiddenRows(States(), 0, 40, 0))
        sequence.drafting.history.add(HiddenRows(States(), 40, 4, 40))
        assert sequence.drafting.history.last(count).count == count
        assert (sequence.drafting.history.last(44) is None) == (count == 40)


def test_rows_of_a_state_that_cannot_be_loaded_are_not_told():
    """They would be followed by rows of the prompt's beginning."""
    reuse, _, store = make()
    drafting(reuse, range(64), held=64)
    store.fails = True
    assert drafting(reuse, range(80))[0] == []
