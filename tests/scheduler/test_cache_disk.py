"""The disk tier of the prompt cache: a damaged file is a miss with a warning, never a crash (case 22)."""

import os

import pytest
from structlog.testing import capture_logs

from power_core.errors import BackendError
from power_core.prefix import Snapshot
from power_core.scheduler.cache_disk import DiskTier
from power_core.scheduler.prefix import ReuseRule
from power_core.scheduler.prompt_cache import PromptCache

ANY = ReuseRule()


class BytesStore:
    """A store whose payloads are bytes."""

    def make(self, length, data=b"state"):
        return Snapshot(data, len(data), length, True)

    def to_bytes(self, snapshot):
        return b"%d:" % snapshot.length + snapshot.payload

    def from_bytes(self, data):
        length, _, payload = data.partition(b":")
        if not length.isdigit():
            raise BackendError("none of this store's bytes")
        return self.make(int(length), payload)

    def load(self, seq, snapshot, length):
        self.loaded = (snapshot.payload, length)

    def free(self, snapshot):
        pass


def open_cache(folder, *, max_bytes=100_000, **kwargs):
    store = BytesStore()
    disk = DiskTier(folder, max_bytes=max_bytes, **kwargs)
    return PromptCache({"target": store}, max_bytes=100_000, disk=disk), store


def keep(cache, store, key, tokens, data=b"state"):
    return cache.store(key, tokens, {"target": store.make(len(tokens), data)}, prefilled=len(tokens))


def loaded(cache, store, key, prompt):
    """What a lookup loads, or None for a miss."""
    hit = cache.lookup(key, prompt, ANY, ("target",))
    if hit is None:
        return None
    with hit:
        hit.load("target", 0)
        return store.loaded


def only_file(folder):
    (file,) = folder.iterdir()
    return file


def test_an_entry_outlives_the_process(tmp_path):
    keep(*open_cache(tmp_path), "a", [1, 2, 3], b"xyz")
    cache, store = open_cache(tmp_path)
    assert loaded(cache, store, "b", [1, 2, 3, 4]) is None
    assert loaded(cache, store, "a", [1, 2, 3, 4]) == (b"xyz", 3)
    assert loaded(cache, store, "a", [1, 2, 9, 9]) == (b"xyz", 2)
    assert (cache.counters.hits, cache.counters.misses, cache.counters.damaged) == (2, 1, 0)


def test_any_changed_byte_makes_a_miss_with_a_warning(tmp_path):
    keep(*open_cache(tmp_path), "a", [1, 2, 3])
    file = only_file(tmp_path)
    whole = file.read_bytes()
    for position in range(len(whole)):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 0x11]) + whole[position + 1 :])
        with capture_logs() as logs:
            cache, store = open_cache(tmp_path)
            found = loaded(cache, store, "a", [1, 2, 3, 4])
        assert found is None, position
        # A byte of the key or the tokens hides the entry from this prompt; every other one is found out.
        hidden = bool(cache.disk.entries)
        assert hidden or any(entry["log_level"] == "warning" for entry in logs)
        if not hidden:
            assert not file.exists()


@pytest.mark.parametrize("keep_bytes", [0, 1, 8, 12, 40, -1])
def test_a_truncated_file_makes_a_miss_with_a_warning(tmp_path, keep_bytes):
    keep(*open_cache(tmp_path), "a", [1, 2, 3])
    file = only_file(tmp_path)
    file.write_bytes(file.read_bytes()[:keep_bytes])
    with capture_logs() as logs:
        cache, store = open_cache(tmp_path)
        assert loaded(cache, store, "a", [1, 2, 3, 4]) is None
    assert [entry["log_level"] for entry in logs] == ["warning"]


def test_a_file_damaged_while_it_is_open_makes_a_miss(tmp_path):
    keep(*open_cache(tmp_path), "a", [1, 2, 3])
    cache, store = open_cache(tmp_path)
    only_file(tmp_path).write_bytes(b"no")
    assert loaded(cache, store, "a", [1, 2, 3, 4]) is None
    assert cache.counters.damaged == 1


def test_a_file_another_process_removed_makes_a_miss(tmp_path):
    keep(*open_cache(tmp_path), "a", [1, 2, 3])
    cache, store = open_cache(tmp_path)
    only_file(tmp_path).unlink()
    assert loaded(cache, store, "a", [1, 2, 3, 4]) is None


def test_bytes_that_the_store_refuses_make_a_miss(tmp_path):
    """Whole by its digest, but written by another version of the backend."""
    cache, store = open_cache(tmp_path)
    store.to_bytes = lambda _snapshot: b"other"
    keep(cache, store, "a", [1, 2, 3])
    cache, store = open_cache(tmp_path)
    assert loaded(cache, store, "a", [1, 2, 3, 4]) is None
    assert (cache.counters.damaged, list(tmp_path.iterdir())) == (1, [])


def test_the_oldest_files_go_when_the_folder_is_full(tmp_path):
    """Room for two files of three; the one used last and the newest stay."""
    time = [1000.0]
    cache, store = open_cache(tmp_path, clock=lambda: time[0])
    for key in "abc":
        keep(cache, store, key, [1, 2, 3])
        time[0] += 10
        newest = max(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime)
        os.utime(newest, (time[0], time[0]))
    cache, store = open_cache(tmp_path, max_bytes=2 * newest.stat().st_size, clock=lambda: time[0])
    assert loaded(cache, store, "a", [1, 2, 3, 4]) is None
    assert loaded(cache, store, "c", [1, 2, 3, 4]) == (b"state", 3)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_disk_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    cache, store = open_cache(tmp_path)

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("power_core.scheduler.cache_disk.os.fsync", full)
    with capture_logs() as logs:
        assert keep(cache, store, "a", [1, 2, 3])
    assert logs[0]["log_level"] == "warning"
    assert list(tmp_path.iterdir()) == []
    assert loaded(cache, store, "a", [1, 2, 3, 4]) == (b"state", 3)
