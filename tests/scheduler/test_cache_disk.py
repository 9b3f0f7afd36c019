"""The disk tier of the prompt cache: a damaged file is a miss with a warning, never a crash (case 22)."""

import os
import struct

import pytest
from structlog.testing import capture_logs

from power_core.errors import BackendError, ConfigError
from power_core.prefix import Snapshot
from power_core.scheduler.cache_disk import _MAGIC, _SUFFIX, DiskTier, PartShape
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


def test_an_entry_that_memory_cannot_hold_stays_on_the_disk(tmp_path):
    """It is a miss and no damage: a process with more memory can use it."""
    keep(*open_cache(tmp_path), "a", [1, 2, 3], b"x" * 50)
    for most, found in ((73, None), (74, (b"x" * 50, 3))):
        store = BytesStore()
        cache = PromptCache({"target": store}, max_bytes=most, disk=DiskTier(tmp_path, max_bytes=1000))
        assert loaded(cache, store, "a", [1, 2, 3, 4]) == found
        assert (cache.entries, cache.counters.damaged) == (int(found is not None), 0)
    assert only_file(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    """A file stands in its place: one line says where, and what to set."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="prompt_cache_dir"):
        DiskTier(tmp_path / "file" / "kept", max_bytes=1)


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
    assert cache.counters.damaged == 1


def test_a_file_damaged_while_it_is_open_makes_a_miss(tmp_path):
    keep(*open_cache(tmp_path), "a", [1, 2, 3])
    cache, store = open_cache(tmp_path)
    only_file(tmp_path).write_bytes(b"no")
    assert loaded(cache, store, "a", [1, 2, 3, 4]) is None
    assert cache.counters.damaged == 1


@pytest.mark.parametrize(
    "head",
    [
        b'{"key": "k", "tokens": Infinity, "prefilled": 1, "parts": {}}',
        b'{"key": "k", "tokens": 0, "prefilled": 1, "parts": []}',
        b"[" * 60_000,
    ],
)  # fmt: skip
def test_a_header_of_any_content_is_a_miss(tmp_path, head):
    """What JSON can hold, and what it cannot hold either."""
    (tmp_path / ("0" * 40 + _SUFFIX)).write_bytes(_MAGIC + struct.pack("<I", len(head)) + head + b"\0" * 40)
    assert DiskTier(tmp_path, max_bytes=1000).damaged == 1


def test_a_file_another_process_removed_makes_a_miss(tmp_path):
    keep(*open_cache(tmp_path), "a", [1, 2, 3])
    cache, store = open_cache(tmp_path)
    only_file(tmp_path).unlink()
    with capture_logs() as logs:
        assert loaded(cache, store, "a", [1, 2, 3, 4]) is None
    assert len([entry for entry in logs if "removed" in entry["event"]]) == 1


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
        assert not write(cache.disk, "b")
    assert [entry["log_level"] for entry in logs] == ["warning"] * 2
    assert list(tmp_path.iterdir()) == []
    assert loaded(cache, store, "a", [1, 2, 3, 4]) == (b"state", 3)


def write(tier, key="a", tokens=(1, 2, 3), data=b"state", more=b""):
    parts = {"target": (PartShape(len(tokens), True, len(data)), data)}
    if more:
        parts["draft"] = (PartShape(1, False, len(more)), more)
    return tier.write(key, tokens, len(tokens) - 1, parts)


def test_an_entry_is_read_back_part_by_part(tmp_path):
    """What it says of itself agrees with the file, and a process that opens the folder later sees the same."""
    tier = DiskTier(tmp_path, max_bytes=10_000, clock=lambda: 50.0)
    assert write(tier, data=b"rows", more=b"draft's")
    [entry] = tier.entries
    assert (entry.key, entry.tokens, entry.prefilled) == ("a", (1, 2, 3), 2)
    assert entry.parts == {"target": PartShape(3, True, 4), "draft": PartShape(1, False, 7)}
    assert entry.size == only_file(tmp_path).stat().st_size == tier.nbytes == entry.offset + 4 + 7 + 32
    assert tier.read(entry) == {"target": b"rows", "draft": b"draft's"}
    assert (entry.used, only_file(tmp_path).stat().st_mtime) == (50.0, 50.0)
    [again] = DiskTier(tmp_path, max_bytes=10_000, clock=lambda: 50.0).entries
    assert (again, tier.damaged) == (entry, 0)


def test_a_file_may_fill_the_bound_and_not_exceed_it(tmp_path):
    tier = DiskTier(tmp_path, max_bytes=10_000)
    write(tier)
    size = tier.nbytes
    for most, kept in ((size, True), (size - 1, False)):
        tier = DiskTier(tmp_path / str(most), max_bytes=most)
        assert write(tier) is kept
        assert (tier.nbytes, len(tier.entries)) == ((size, 1) if kept else (0, 0))


def test_only_as_many_files_go_as_must(tmp_path):
    """The least recently used first; what fits exactly stays."""
    time = [1000.0]
    tier = DiskTier(tmp_path, max_bytes=100_000, clock=lambda: time[0])
    for key in "abc":
        write(tier, key)
        time[0] += 10
        tier.read(tier.entries[-1])
    size = tier.nbytes // 3
    tier.max_bytes = 2 * size
    write(tier, "c")
    assert [entry.key for entry in tier.entries] == ["b", "c"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_expires_after_its_last_use(tmp_path):
    """At the time that was allowed it is still there."""
    time = [1000.0]
    tier = DiskTier(tmp_path, max_bytes=10_000, ttl=30, clock=lambda: time[0])
    write(tier)
    tier.read(tier.entries[0])
    time[0] += 30
    assert len(tier.entries) == 1
    time[0] += 1
    assert (tier.entries, list(tmp_path.iterdir()), tier.damaged) == ([], [], 0)


@pytest.mark.parametrize("length", [(1 << 20) + 1, (1 << 32) - 1])
def test_a_header_that_is_too_long_is_not_read(tmp_path, length):
    """A damaged length must not fill the memory."""
    (tmp_path / "x.powercache").write_bytes(b"PWRPC001" + length.to_bytes(4, "little") + b"{}")
    with capture_logs() as logs:
        tier = DiskTier(tmp_path, max_bytes=10_000)
    assert (tier.entries, tier.damaged) == ([], 1)
    assert f"a header of {length} bytes" in logs[0]["cause"]


@pytest.mark.parametrize("count", [-1, 3, 1 << 60])
def test_a_header_that_counts_wrong_is_not_believed(tmp_path, count):
    """Neither fewer tokens than none, nor more than there are bytes for."""
    text = b'{"key": "a", "tokens": %d, "prefilled": 0, "parts": {}}' % count
    (tmp_path / "x.powercache").write_bytes(b"PWRPC001" + len(text).to_bytes(4, "little") + text + bytes(4 + 32))
    tier = DiskTier(tmp_path, max_bytes=10_000)
    assert (tier.entries, tier.damaged, list(tmp_path.iterdir())) == ([], 1, [])


def test_dropping_what_is_not_there_is_no_damage(tmp_path):
    tier = DiskTier(tmp_path, max_bytes=10_000)
    tier.drop("a", [1])
    assert tier.damaged == 0
    write(tier)
    tier.drop("a", [1, 2, 3])
    assert (tier.damaged, tier.entries, list(tmp_path.iterdir())) == (1, [], [])


def test_keys_and_tokens_name_the_file(tmp_path):
    """Another key or another token is another file; the same again replaces it."""
    tier = DiskTier(tmp_path, max_bytes=10_000)
    for key, tokens in (("a", (1, 2)), ("a", (1, 3)), ("b", (1, 2)), ("a", (1,)), ("a", (1, 2))):
        write(tier, key, tokens)
    assert len(tier.entries) == len(list(tmp_path.iterdir())) == 4
    assert all(len(file.name) == 40 + len(".powercache") for file in tmp_path.iterdir())


def test_what_never_fits_drives_nothing_out(tmp_path):
    """Whatever its length: it is refused before anything is written."""
    tier = DiskTier(tmp_path, max_bytes=100_000)
    write(tier, "small")
    write(tier, "large", data=b"")
    rest = tier.nbytes - tier.entries[0].size  # of a file without parts' bytes; digits of the length come on top
    tier.drop("large", (1, 2, 3))
    for length in range(1000, 1040):
        tier.max_bytes = rest + 3 + length - 1
        assert not write(tier, "large", data=bytes(length))
        assert [entry.key for entry in tier.entries] == ["small"]


def test_a_long_prompt_is_read_back(tmp_path):
    """Into a folder that is made with those above it."""
    folder = tmp_path / "of" / "prompts"
    write(DiskTier(folder, max_bytes=100_000), tokens=tuple(range(1000)), data=bytes(1000))
    tier = DiskTier(folder, max_bytes=100_000)
    [entry] = tier.entries
    assert (entry.tokens, tier.read(entry)) == (tuple(range(1000)), {"target": bytes(1000)})


@pytest.mark.parametrize("first", [b"A", b"Z"])
def test_a_file_of_another_format_is_not_taken_for_one_of_ours(tmp_path, first):
    write(DiskTier(tmp_path, max_bytes=10_000))
    file = only_file(tmp_path)
    file.write_bytes(first + file.read_bytes()[1:])
    with capture_logs() as logs:
        assert DiskTier(tmp_path, max_bytes=10_000).entries == []
    assert "another format" in logs[0]["cause"]


def test_the_file_that_saves_most_is_brought_into_memory(tmp_path):
    """And none of another key, whatever its name."""
    cache, store = open_cache(tmp_path)
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3]):
        keep(cache, store, "b", tokens, b"of %d" % len(tokens))
    cache, store = open_cache(tmp_path)
    assert loaded(cache, store, "a", [1, 2, 3, 4, 5]) is loaded(cache, store, "c", [1, 2, 3, 4, 5]) is None
    assert cache.entries == 0
    assert loaded(cache, store, "b", [1, 2, 3, 4, 5]) == (b"of 4", 4)
    assert loaded(cache, store, "b", [1, 2, 9, 9, 9]) == (b"of 4", 2)
    assert cache.entries == 1
