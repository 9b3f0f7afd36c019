"""
The keyed prompt cache: state of prompts already evaluated, found again by key and longest common prefix.

A caller opts in with a `prompt_cache_key`. The key an entry is filed under is a digest of it together
with who asks, where, and everything that decides the numbers (`cache_key`), so that state never
crosses an identity, a model, an adapter or a setting. Payloads are opaque: each part of a request's
state (the target's rows, a drafter's) is saved and loaded by a `PrefixStore` of its own, and an entry
that lacks a part a request needs is a miss.

A hit is bit-identical to a miss: `ReuseRule` gives back only rows that were computed in the prefill
class, and leaves enough prompt rows to evaluate for the last chunk to stay in that class.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Protocol

import structlog
from attrs import define

from power_core.prefix import PrefixStore, Snapshot
from power_core.scheduler.cache_disk import DiskEntry, DiskTier, PartShape
from power_core.scheduler.prefix import ReuseRule, common_prefix
from power_core.types import SeqId, TokenId

__all__ = ["CacheCounters", "Hit", "PromptCache", "entry_bytes"]

log = structlog.get_logger("power.prompt_cache")


@define
class CacheCounters:
    """
    What the cache did. Every request is a hit or a miss.

    Attributes:
        reused_tokens: Prompt tokens that hits did not have to evaluate.
        evaluated_tokens: Prompt tokens that had to be, of hits and misses.
        refused: Entries not stored because they alone exceed the bound, or were there already.
        damaged: Entries that could not be read back, files that were damaged when their folder was opened included.
    """

    requests: int = 0
    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    evaluated_tokens: int = 0
    stored: int = 0
    refused: int = 0
    evictions: int = 0
    expirations: int = 0
    damaged: int = 0


class _Entry:
    __slots__ = ("key", "nbytes", "parts", "pins", "prefilled", "tokens", "used")

    def __init__(
        self, key: str, tokens: tuple[TokenId, ...], parts: Mapping[str, Snapshot], prefilled: int, used: float
    ) -> None:
        self.key = key
        self.tokens = tokens
        self.parts = dict(parts)
        self.prefilled = prefilled
        self.nbytes = entry_bytes(len(tokens), parts)
        self.used = used
        self.pins = 0


def entry_bytes(tokens: int, parts: Mapping[str, Snapshot]) -> int:
    """What an entry of *tokens* tokens takes: its parts, and the ids."""
    return sum(part.nbytes for part in parts.values()) + 8 * tokens


class Hit:
    """
    An entry found for a prompt, kept alive until `release`. Use as a context manager.

    Attributes:
        length: Prompt tokens whose state it holds.
    """

    def __init__(self, cache: PromptCache, entry: _Entry, length: int) -> None:
        self._cache = cache
        self._entry = entry
        self._is_held = True
        self.length = length

    def load(self, part: str, seq: SeqId, store: PrefixStore | None = None) -> None:
        """
        Give *seq* the state of *part*; raises what its store raises.

        Args:
            store: Of another session of the same settings, where *seq* is one of that.
        """
        store = self._cache.stores[part] if store is None else store
        store.load(seq, self._entry.parts[part], self.length)

    def part(self, part: str) -> Snapshot | None:
        """The whole of *part*, whatever `length` is, or None where the entry has none."""
        return self._entry.parts.get(part)

    def release(self) -> None:
        """The entry may be evicted. Idempotent."""
        if self._is_held:
            self._is_held = False
            self._cache._unpin(self._entry)  # noqa: SLF001 - a hit is its cache's handle

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class PromptCache:
    """
    Entries in memory, bounded by bytes, count and age; the least recently used go first.

    Args:
        stores: Part name -> the store that saves and loads it.
        max_bytes: Most bytes of all entries.
        max_entries: Most entries.
        ttl: Seconds after its last use that an entry is dropped; None keeps it.
        disk: Where entries are kept beyond memory and process; written when they are stored.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        stores: Mapping[str, PrefixStore],
        *,
        max_bytes: int,
        max_entries: int = 64,
        ttl: float | None = None,
        disk: DiskTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stores = dict(stores)
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.ttl = ttl
        self.disk = disk
        self.counters = CacheCounters(damaged=0 if disk is None else disk.damaged)  # found as the folder was opened
        self._clock = clock
        self._lock = threading.RLock()
        self._entries: OrderedDict[tuple[str, tuple[TokenId, ...]], _Entry] = OrderedDict()  # least recently used first
        self._evicted: list[_Entry] = []  # evicted while a hit held them
        self._bytes = 0

    @property
    def entries(self) -> int:
        """Entries that can be found."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes held, those of evicted entries that a hit still uses included."""
        return self._bytes

    def lookup(self, key: str, prompt: Sequence[TokenId], rule: ReuseRule, needs: Collection[str]) -> Hit | None:
        """
        The entry of *key* that saves *prompt* the most, or None: a miss.

        Args:
            key: From `cache_key`.
            prompt: All its tokens.
            rule: What may be reused exactly.
            needs: Parts that the request's state consists of; entries that lack one are no hits.
        """
        wanted = tuple(prompt)
        with self._lock:
            self._expire()
            best, length = self._best(key, wanted, rule, needs)
            if self.disk is not None and self._fetch(self.disk, key, wanted, rule, needs, length):
                best, length = self._best(key, wanted, rule, needs)
            self.counters.requests += 1
            self.counters.evaluated_tokens += len(wanted) - length
            if best is None:
                self.counters.misses += 1
                return None
            self.counters.hits += 1
            self.counters.reused_tokens += length
            self._touch(best)
            best.pins += 1
            return Hit(self, best, length)

    def _best(
        self, key: str, prompt: tuple[TokenId, ...], rule: ReuseRule, needs: Collection[str]
    ) -> tuple[_Entry | None, int]:
        best, length = None, 0
        for entry in self._entries.values():
            if entry.key == key and all(part in entry.parts for part in needs):
                usable = _usable(entry, entry.parts, prompt, rule, needs)
                if usable > length:
                    best, length = entry, usable
        return best, length

    def store(self, key: str, tokens: Sequence[TokenId], parts: Mapping[str, Snapshot], *, prefilled: int) -> bool:
        """
        Keep *parts*, the state after *tokens*, under *key*. The cache owns them from here on, also if it refuses.

        Args:
            prefilled: How many of *tokens* were evaluated as prompt rows.

        Returns:
            Whether they were kept.
        """
        entry = _Entry(key, tuple(tokens), parts, prefilled, self._clock())
        place = (key, entry.tokens)
        with self._lock:
            self._expire()
            known = self._entries.get(place)
            covers = known is not None and parts.keys() <= known.parts.keys() and prefilled <= known.prefilled
            if covers and known is not None:
                self._touch(known)
            if entry.nbytes > self.max_bytes or covers:
                self.counters.refused += 1
                self._free(entry)
                return False
            if known is not None:
                self._drop(known)
            self.counters.stored += 1
            if self.disk is not None:
                self._write(self.disk, entry)
            return self._insert(entry)

    def clear(self) -> None:
        """Drop everything that no hit holds, and what hits hold as soon as they release it."""
        with self._lock:
            for entry in list(self._entries.values()):
                self._drop(entry)

    def covered(self, key: str, tokens: Sequence[TokenId]) -> int:
        """Most tokens that an entry of *key* begins with in common with *tokens*; no request, and no use."""
        wanted = tuple(tokens)
        with self._lock:
            return max((common_prefix(e.tokens, wanted) for e in self._entries.values() if e.key == key), default=0)

    def forget(self, hit: Hit) -> None:
        """Drop the entry of *hit*, whose payload could not be loaded: that was a miss, as all from now on."""
        with self._lock:
            entry = hit._entry  # noqa: SLF001 - the cache owns its hits
            self.counters.damaged += 1
            self.counters.hits -= 1
            self.counters.misses += 1
            self.counters.reused_tokens -= hit.length
            self.counters.evaluated_tokens += hit.length
            log.warning("a cached prefix could not be loaded", tokens=len(entry.tokens))
            if self._entries.get((entry.key, entry.tokens)) is entry:
                self._drop(entry)
            if self.disk is not None:
                self.disk.drop(entry.key, entry.tokens)

    # -- under the lock ---------------------------------------------------------------------------

    def _touch(self, entry: _Entry) -> None:
        entry.used = self._clock()
        self._entries.move_to_end((entry.key, entry.tokens))

    def _insert(self, entry: _Entry) -> bool:
        self._entries[entry.key, entry.tokens] = entry
        self._bytes += entry.nbytes
        self._evict(keep=entry)
        return (entry.key, entry.tokens) in self._entries

    def _write(self, disk: DiskTier, entry: _Entry) -> None:
        parts = {}
        for name, part in entry.parts.items():
            data = self.stores[name].to_bytes(part)
            if data is None:
                return
            parts[name] = PartShape(part.length, part.can_cut, len(data)), data
        disk.write(entry.key, entry.tokens, entry.prefilled, parts)

    def _fetch(
        self,
        disk: DiskTier,
        key: str,
        prompt: tuple[TokenId, ...],
        rule: ReuseRule,
        needs: Collection[str],
        length: int,
    ) -> bool:
        """Bring into memory the file that saves more than *length* tokens, if there is one that can be read."""
        files = [
            (_usable(file, file.parts, prompt, rule, needs), file)
            for file in disk.entries
            if file.key == key and all(part in file.parts for part in needs)
        ]
        for usable, file in sorted(files, key=lambda item: -item[0]):
            if usable <= length:
                return False
            entry = self._read(disk, file)
            if entry is not None:
                known = self._entries.get((key, entry.tokens))
                if known is not None:
                    self._drop(known)
                return self._insert(entry)
        return False

    def _read(self, disk: DiskTier, file: DiskEntry) -> _Entry | None:
        data = disk.read(file)
        parts: dict[str, Snapshot] = {}
        try:
            for name, part in (data or {}).items():
                parts[name] = self.stores[name].from_bytes(part)
        except Exception as exc:  # noqa: BLE001 - a store may raise anything; a file it refuses is a miss
            log.warning("a cached prefix could not be read back", error=str(exc))
            disk.drop(file.key, file.tokens)
            data = None
        entry = _Entry(file.key, file.tokens, parts, file.prefilled, self._clock())
        if data is None or entry.nbytes > self.max_bytes:
            self.counters.damaged += data is None
            self._free(entry)
            return None
        return entry

    def _expire(self) -> None:
        if self.ttl is None:
            return
        oldest = self._clock() - self.ttl
        for entry in [e for e in self._entries.values() if e.used < oldest]:
            self.counters.expirations += 1
            self._drop(entry)

    def _evict(self, keep: _Entry) -> None:
        """Drop the least recently used until the bounds hold. What a hit holds frees no bytes, so it goes last."""
        while len(self._entries) > self.max_entries or self._bytes > self.max_bytes:
            idle = (e for e in self._entries.values() if e is not keep and e.pins == 0)
            victim = next(idle, keep if self._bytes > self.max_bytes else next(iter(self._entries.values())))
            self.counters.evictions += 1
            self._drop(victim)
            if victim is keep:
                return

    def _drop(self, entry: _Entry) -> None:
        """Make *entry* unfindable, and free it as soon as nothing holds it."""
        del self._entries[entry.key, entry.tokens]
        if entry.pins:
            self._evicted.append(entry)
        else:
            self._bytes -= entry.nbytes
            self._free(entry)

    def _unpin(self, entry: _Entry) -> None:
        with self._lock:
            entry.pins -= 1
            if entry.pins == 0 and entry in self._evicted:
                self._evicted.remove(entry)
                self._bytes -= entry.nbytes
                self._free(entry)

    def _free(self, entry: _Entry) -> None:
        for name, part in entry.parts.items():
            try:
                self.stores[name].free(part)
            except Exception as exc:  # noqa: BLE001 - a store may raise anything; the other parts must be freed
                log.warning("a cached part could not be freed", part=name, error=str(exc))


class _Covers(Protocol):
    """A part as far as matching needs it."""

    @property
    def length(self) -> int: ...

    @property
    def can_cut(self) -> bool: ...


def _usable(
    entry: _Entry | DiskEntry,
    parts: Mapping[str, _Covers],
    prompt: tuple[TokenId, ...],
    rule: ReuseRule,
    needs: Collection[str],
) -> int:
    """Tokens of *prompt* whose state *entry*, in memory or on the disk, can give."""
    length = rule.most(len(prompt), common_prefix(entry.tokens, prompt), entry.prefilled)
    needed = [parts[name] for name in needs]
    length = min([length, *(part.length for part in needed if part.can_cut)])
    whole = {part.length for part in needed if not part.can_cut}
    if not whole:
        return length
    (only, *others) = whole
    return only if not others and only <= length else 0
