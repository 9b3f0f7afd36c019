"""Hidden states beside a kept prompt: which rows are kept, told, cut, and written to the disk."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_core.drafter import HiddenRows
from power_core.errors import BackendError
from power_core.prefix import Snapshot
from power_core.scheduler.cache_disk import DiskTier
from power_core.scheduler.kept_rows import MOST_KEPT, MOST_TOLD, KeptRows, RowHistory, RowStore, row_snapshot
from power_core.scheduler.prefix import ReuseRule
from power_core.scheduler.prompt_cache import PromptCache

LAYERS = (1, 3)
FAR = 10**6


def states(position, count, layers=LAYERS):
    """The state of the row at position p in layer l is [p, l]."""
    made = {layer: np.array([[p, layer] for p in range(position, position + count)], np.float32) for layer in layers}
    return KeptRows(made, position, count)


class Forward:
    """The rows of a forward, the sequence's from the second to the last but one."""

    def __init__(self, rows):
        self.rows = rows

    def hidden(self, i, layer):
        others = np.full((1, 2), np.nan, np.float32)
        return np.concatenate([others, self.rows.layers[layer], others])[i]


def add(history, position, count):
    return history.add(HiddenRows(Forward(states(position, count)), 1, count, position))


def positions(rows):
    """Of what was kept or told; each row's state says which it is."""
    if rows is None:
        return []
    kept = rows.rows if isinstance(rows, HiddenRows) else rows
    start = rows.start if isinstance(rows, HiddenRows) else 0
    block = slice(start, start + rows.count)
    found = kept.hidden(block, 3)
    assert [*found[:, 0]] == [*range(rows.position, rows.position + rows.count)]
    assert not found.size or {*found[:, 1]} == {3.0}
    return [*map(int, found[:, 0])]


@given(
    steps=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=20), back=st.integers(0, 2 * MOST_KEPT)
)
def test_the_last_rows_are_kept_whatever_was_undone(steps, back):
    """Steps of some rows, of each of which some are undone; asked for a place at or before the end."""
    history, end = RowHistory(LAYERS, FAR), 0
    for count, undone in steps:
        add(history, end, count)
        end += max(count - undone, 0)
        history.cut(end)
    found = positions(history.last(end))
    assert found == [*range(end - len(found), end)]
    assert len(found) >= min(end, MOST_KEPT - 300) or not steps
    place = max(end - back, 0)
    earlier = positions(history.last(place))
    assert earlier == [*range(place - len(earlier), place)]
    assert len(earlier) >= min(place, MOST_KEPT - 300 - back)


def test_no_more_rows_are_kept_than_the_bound():
    """Also of one block that is longer, and while requests go on: blocks that no entry can need are dropped."""
    history = RowHistory(LAYERS, FAR)
    for position in range(0, 3000, 100):
        add(history, position, 100)
    assert positions(history.last(3000)) == [*range(3000 - MOST_KEPT, 3000)]
    assert positions(history.last(1000)) == []
    add(history, 3000, 2 * MOST_KEPT)
    assert len(positions(history.last(3000 + 2 * MOST_KEPT))) == MOST_KEPT


@pytest.mark.parametrize(
    ("start", "end", "part"),
    [(0, 5, []), (0, 3, []), (13, 20, []), (15, 20, []), (7, 9, [7, 8]), (0, 99, range(5, 13))],
)
def test_a_part_holds_its_rows_and_no_others(start, end, part):
    """Of the positions from 5 to 12; what it takes is what its rows take."""
    found = states(5, 8).part(start, end)
    assert positions(found) == [*part]
    assert (found is None) == (not part)
    assert found is None or found.nbytes == len(LAYERS) * len(part) * 2 * 4


def test_rows_behind_the_limit_are_not_copied():
    """Rows that were computed in another class than prompts can be part of no entry."""
    history = RowHistory(LAYERS, 10)
    assert positions(add(history, 0, 10)) == [*range(10)]
    for position in (10, 12):
        rows = HiddenRows(Forward(states(position, 2)), 1, 2, position)
        assert history.add(rows) is rows
    assert positions(history.last(10)) == [*range(10)]
    assert history.last(12) is None


def test_what_is_kept_is_a_copy():
    """The forward's memory is the next forward's, and what an entry holds pins nothing larger than its bytes say."""
    history, forward = RowHistory(LAYERS, FAR), Forward(states(0, 4))
    told = history.add(HiddenRows(forward, 1, 4, 0))
    for values in forward.rows.layers.values():
        values[:] = -1
    assert positions(told) == positions(history.last(4)) == [0, 1, 2, 3]
    assert {len(values) for values in told.rows.layers.values()} == {4}
    kept = history.last(3)
    assert {values.base is None for values in kept.layers.values()} == {True}
    assert kept.nbytes == len(LAYERS) * 3 * 2 * 4


@pytest.mark.parametrize(
    ("position", "count", "length", "told"),
    [
        (0, 40, 40, range(40)),
        (0, 40, 30, range(30)),  # a shorter prefix matched
        (20, 40, 30, range(20, 30)),  # its beginning is not known
        (20, 40, 20, ()),
        (0, 40, 41, ()),  # the last row is not known
        (0, 400, 400, range(400 - MOST_TOLD, 400)),
        (0, 400, MOST_TOLD, range(MOST_TOLD)),
        (0, 600, 600, range(600 - MOST_TOLD, 600)),
    ],
)
def test_a_hit_tells_the_last_rows_of_what_matched(position, count, length, told):
    """And the request's own entry may have all of them."""
    history = RowHistory((3,), FAR)
    assert positions(history.begin(states(position, count), length)) == [*told]
    if told:
        add(history, length, 5)
        assert positions(history.last(length + 5)) == [*range(max(position, length + 5 - MOST_KEPT), length + 5)]


def test_a_hit_without_one_of_the_blocks_tells_nothing():
    history = RowHistory((1, 2), FAR)
    assert history.begin(states(0, 40), 40) is None
    assert history.last(40) is None


def test_rows_go_through_bytes_unchanged():
    """Bit for bit, NaN and signed zero as well; blocks keep their order and place."""
    rows = KeptRows({28: np.array([[np.nan, -0.0, 1e-40]], np.float32), 1: np.ones((1, 3), np.float32)}, 7, 1)
    store = RowStore()
    back = store.from_bytes(store.to_bytes(row_snapshot(rows)))
    assert (back.nbytes, back.length, back.can_cut) == (24, 8, True)
    assert (back.payload.position, back.payload.count, [*back.payload.layers]) == (7, 1, [28, 1])
    assert all(back.payload.layers[layer].tobytes() == rows.layers[layer].tobytes() for layer in (28, 1))


@pytest.mark.parametrize("digits", range(1, 8))
def test_values_lie_where_floats_may(digits):
    """However long the header before them is, which says where it ends."""
    rows, store = states(10**digits, 2), RowStore()
    data = store.to_bytes(row_snapshot(rows))
    assert (len(data) - rows.nbytes) % 4 == 0
    assert positions(store.from_bytes(data).payload) == [10**digits, 10**digits + 1]


GOOD = RowStore().to_bytes(row_snapshot(states(0, 3)))


@pytest.mark.parametrize(
    "data",
    [b"", GOOD[:3], GOOD[:-1], GOOD[:-4], GOOD + b"\0" * 4, b"\xff" * 64, GOOD.replace(b'"rows": 3', b'"rows": 0'),
     GOOD.replace(b"[1, 3]", b"[1, 1]"), GOOD.replace(b"[1, 3]", b"[    ]"), GOOD.replace(b'"rows"', b'"cows"')],
)  # fmt: skip
def test_bytes_that_are_no_rows_are_refused(data):
    with pytest.raises(BackendError):
        RowStore().from_bytes(data)


def test_rows_are_no_state_of_a_session():
    """Nothing else can be kept in their place, and loading them into a sequence is a mistake that says so."""
    store = RowStore()
    assert (store.can_cut, store.longest, store.save(0)) == (True, None, None)
    assert store.to_bytes(Snapshot(object(), 1, 1, True)) is None
    with pytest.raises(BackendError):
        store.load(0, row_snapshot(states(0, 1)), 1)


class Target:
    """A store of states without content."""

    can_cut, longest = True, None

    def to_bytes(self, snapshot):
        return b"state"

    def from_bytes(self, data):
        return Snapshot(data, 5, 40, True)

    def free(self, snapshot):
        pass


def open_cache(folder):
    stores = {"target": Target(), "hidden": RowStore()}
    return PromptCache(stores, max_bytes=10_000, disk=DiskTier(folder, max_bytes=10_000))


def kept_file(folder):
    rows = row_snapshot(states(0, 40))
    open_cache(folder).store("k", range(40), {"target": Target().from_bytes(b""), "hidden": rows}, prefilled=40)
    (file,) = folder.iterdir()
    return file


def test_rows_outlive_the_process(tmp_path):
    kept_file(tmp_path)
    cache = open_cache(tmp_path)
    hit = cache.lookup("k", range(60), ReuseRule(), ("target",))
    assert positions(hit.part("hidden").payload) == [*range(40)]
    assert hit.part("other") is None
    assert cache.nbytes == 5 + 40 * 2 * 2 * 4 + 8 * 40


@pytest.mark.parametrize("place", [-40, -200])
def test_a_file_with_damaged_rows_is_a_miss(tmp_path, place):
    """One bit anywhere among them: the digest covers them, and the state beside them is not believed either."""
    file = kept_file(tmp_path)
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    cache = open_cache(tmp_path)
    assert cache.lookup("k", range(60), ReuseRule(), ("target",)) is None
    assert (cache.counters.damaged, [*tmp_path.iterdir()]) == (1, [])
