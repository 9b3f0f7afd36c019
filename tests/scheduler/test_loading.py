"""What an unfinished load reserves, with books that are looked at after every step."""

import threading
from types import SimpleNamespace

import pytest

from power_core.errors import CapabilityError, DeadlineError, TooLargeError
from power_core.scheduler.admission import AdmissionController, Deadline
from power_core.scheduler.loading import LoadReservation


class Sized:
    """A model that says what a session takes: whatever its options are."""

    identity = tokenizer = describe = open_session = close = None

    def session_bytes(self, options):
        if isinstance(options, Exception):
            raise options
        return options


@pytest.fixture
def memory():
    return AdmissionController(max_active=9, max_waiting=9, max_bytes=100)


def begin(memory, seconds=None):
    return LoadReservation(memory, Deadline.after(seconds))


def test_nothing_is_asked_for_where_memory_has_no_bound():
    """Not even of a target that could not say what it takes."""
    memory = AdmissionController(max_active=9, max_waiting=9)
    load = begin(memory)
    load.reserve(10**12)
    assert load.session(SimpleNamespace(), 70) is load
    assert (load.reserved, load.permits, load.session_permit, load.session_bytes) == (0, [], None, 0)
    assert memory.counters.submitted == 0


def test_a_load_reserves_weights_and_then_a_session(memory):
    load = begin(memory)
    assert (load.reserved, load.session_permit, load.session_bytes) == (0, None, 0)
    load.reserve(30)
    load.reserve(10)
    assert (load.reserved, load.session_permit, memory.reserved_bytes) == (40, None, 40)
    assert load.session(Sized(), 60) is load
    assert (load.reserved, load.session_bytes, memory.reserved_bytes) == (100, 60, 100)
    assert load.session_permit.reserved_bytes == 60
    assert [permit.reserved_bytes for permit in load.permits] == [30, 10, 60]


@pytest.mark.parametrize("kept", [(), (40,)])
def test_what_can_never_fit_is_refused_with_all_that_the_load_takes(memory, kept):
    """The sum counts: 61 bytes fit into 100, but not beside this load's own 40. One byte less is taken."""
    load = begin(memory, 60.0)
    for nbytes in kept:
        load.reserve(nbytes)
    over = 101 - sum(kept)
    with pytest.raises(TooLargeError, match="can take 101 bytes") as caught:
        load.reserve(over)
    assert (caught.value.who, caught.value.got, caught.value.expected) == ("open", 101, "at most 100")
    assert "memory_limit" in caught.value.fix
    assert load.reserved == memory.reserved_bytes == sum(kept)
    load.reserve(over - 1)
    assert load.reserved == 100


def test_what_does_not_fit_beside_others_is_refused_at_once_without_a_deadline(memory):
    """It leaves the queue: who comes next gets what is free."""
    other, load = memory.acquire(reserve_bytes=30), begin(memory)
    with pytest.raises(TooLargeError, match="can take 71 bytes") as caught:
        load.reserve(71)
    assert (caught.value.got, caught.value.expected) == (71, "at most 70 beside what is open")
    assert "deadline" in caught.value.fix
    assert (memory.waiting, memory.reserved_bytes, load.permits) == (0, 30, [])
    load.reserve(70)
    other.release()
    assert memory.reserved_bytes == load.reserved == 70


def test_with_a_deadline_memory_is_waited_for(memory):
    other, load = memory.acquire(reserve_bytes=70), begin(memory, 60.0)
    closer = threading.Timer(0.05, other.release)
    closer.start()
    load.reserve(31)
    closer.join()
    assert load.reserved == memory.reserved_bytes == 31


def test_memory_that_is_not_free_in_time_is_not_taken_later(memory):
    other, load = memory.acquire(reserve_bytes=70), begin(memory, 0.05)
    with pytest.raises(DeadlineError):
        load.reserve(31)
    other.release()
    assert (memory.waiting, memory.reserved_bytes, load.permits) == (0, 0, [])


def test_a_session_asked_for_again_takes_the_place_of_the_one_before(memory):
    """Another strategy needs another session: 60 bytes fit where 50 of an earlier one were set aside."""
    load = begin(memory)
    load.reserve(40)
    load.session(Sized(), 50).session(Sized(), 60)
    assert (load.session_bytes, load.session_permit.reserved_bytes) == (60, 60)
    assert load.reserved == memory.reserved_bytes == 100
    load.release()
    assert memory.reserved_bytes == 0


@pytest.mark.parametrize(
    ("options", "error"), [(61, TooLargeError), (CapabilityError("no such layers", who="toy"), CapabilityError)]
)
def test_a_session_that_could_not_be_set_aside_leaves_room_for_the_next(memory, options, error):
    """Strategies are tried one after the other: what a second one cannot have is no matter to a third."""
    load = begin(memory)
    load.reserve(40)
    load.session(Sized(), 50)
    with pytest.raises(error):
        load.session(Sized(), options)
    assert load.session_permit is None
    assert load.reserved == memory.reserved_bytes == 40
    load.session(Sized(), 60)
    assert load.reserved == memory.reserved_bytes == 100


def test_a_target_that_cannot_say_what_a_session_takes_is_refused_where_memory_is_bounded(memory):
    load = begin(memory)
    load.reserve(40)
    with pytest.raises(CapabilityError, match="cannot say what a session takes") as caught:
        load.session(SimpleNamespace(), 60)
    assert caught.value.who == "memory_limit"
    assert load.reserved == 40


def test_release_gives_everything_back_once(memory):
    """The second call gives nothing back: by then the bytes may be somebody else's."""
    load = begin(memory)
    load.reserve(40)
    load.session(Sized(), 60).release()
    assert (load.reserved, memory.reserved_bytes, memory.counters.released) == (0, 0, 2)
    memory.acquire(reserve_bytes=100)
    load.release()
    assert memory.reserved_bytes == 100
