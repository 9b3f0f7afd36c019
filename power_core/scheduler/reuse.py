"""
Where requests meet the prompt cache: what is looked up before a prefill, and what is kept after it.

Memory that can be cut is kept when its request ends, the answer included where it was computed like a prompt.
Memory that cannot is of use only whole, so it is kept while the prompt is evaluated, where another prompt
may want to go on: before its last rows, and where it parts from what is kept already.

Drafters are given the whole prompt when a request begins. Those that read hidden states are told of the last reused
rows, where the entry was kept by a request whose drafter read the same blocks, and else of what is evaluated alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import structlog

from power_core.prefix import PrefixStore, Snapshot
from power_core.request import GenerationRequest
from power_core.scheduler.kept_rows import KeptRows, RowHistory, row_snapshot
from power_core.scheduler.prefix import ReuseRule, cache_key
from power_core.scheduler.prompt_cache import Hit, PromptCache, entry_bytes
from power_core.scheduler.sequence import Sequence
from power_core.shapes import ShapeProfile
from power_core.target import TargetSession

__all__ = ["HIDDEN", "TARGET", "PromptReuse"]

log = structlog.get_logger("power.prompt_cache")
TARGET = "target"  # the part of a request's state that is cached
HIDDEN = "hidden"  # the part that drafters are told of; a request does without where there is none
LEAST_KEPT = 32  # tokens; fewer are evaluated as fast as they are copied


class PromptReuse:
    """
    The prompt cache as the requests of one session use it.

    Args:
        cache: What is kept; may be shared with other sessions of the same model and settings.
        session: The session.
        store: Copies its state.
        model_digest: Of the model's file.
        adapters: Digests and scales of what is added to its weights, in order.
    """

    def __init__(
        self,
        cache: PromptCache,
        session: TargetSession,
        store: PrefixStore,
        model_digest: str,
        adapters: Iterable[str] = (),
    ) -> None:
        self.cache = cache
        self._session = session
        self._store = store
        self._model = model_digest
        self._adapters = tuple(adapters)
        self._settings = _settings_digest(session.profile, session.context_size)
        self._rule = ReuseRule.of(session.profile)
        self._mixable = session.profile.mixable

    def begin(self, sequence: Sequence) -> None:
        """Give *sequence*, which is open and empty, what is known of its prompt, and decide what of it to keep."""
        request = sequence.request
        if request.prompt_cache_key is None:
            return
        sequence.cache_key = key = self._key(request)
        self._begin_history(sequence)
        hit = self.cache.lookup(key, request.prompt, self._rule, (TARGET,))
        if hit is not None:
            with hit:
                self._load(sequence, hit)
        sequence.keep_at = self._places(sequence)

    def _load(self, sequence: Sequence, hit: Hit) -> None:
        try:
            hit.load(TARGET, sequence.seq, self._store)
        except Exception as exc:  # noqa: BLE001 - whatever a store raises, the prompt can be evaluated
            log.warning("a cached prompt could not be loaded", request=sequence.request_id, error=str(exc))
            self.cache.forget(hit)
            sequence.close(self._session)  # whatever the store left there
            sequence.open(self._session)
            return
        sequence.counts.reused = sequence.evaluated_prompt = hit.length
        log.debug("prompt reused", request=sequence.request_id, tokens=hit.length, of=sequence.num_prompt)
        self._tell(sequence, hit)

    def _begin_history(self, sequence: Sequence) -> None:
        """Have the rows that the draft is told of copied, as far as they may be kept."""
        draft = sequence.draft
        if draft is None or not draft.needs.hidden_layers or HIDDEN not in self.cache.stores:
            return
        limit = self._session.context_size if self._store.can_cut and self._mixable else sequence.num_prompt
        sequence.drafting.history = RowHistory(draft.needs.hidden_layers, limit)

    def _tell(self, sequence: Sequence, hit: Hit) -> None:
        """Tell the draft of the last rows of *hit*, where their states are known in all blocks that it reads."""
        snapshot = hit.part(HIDDEN)
        history = None if sequence.draft is None else sequence.drafting.history
        if history is None or snapshot is None:
            return
        rows = history.begin(cast("KeptRows", snapshot.payload), hit.length)
        if rows is not None:
            sequence.drafting.tell_reused(rows)

    def _key(self, request: GenerationRequest) -> str:
        return cache_key(
            request.prompt_cache_key or "",
            identity=request.client,
            endpoint=request.endpoint,
            model_digest=self._model,
            settings_digest=self._settings,
            adapters=self._adapters,
        )

    def _places(self, sequence: Sequence) -> list[int]:
        """Prompt lengths, ascending, that have to be copied before more is evaluated."""
        if self._store.can_cut and self._store.longest is None:
            return []
        last = sequence.num_prompt - self._rule.least_rows
        parting = self.cache.covered(sequence.cache_key or "", sequence.request.prompt)
        most = last if self._store.longest is None else min(last, self._store.longest)
        places = {min(place, most) for place in (parting, last)}
        return sorted(place for place in places if place >= max(LEAST_KEPT, sequence.counts.reused + 1))

    def advance(self, sequence: Sequence) -> None:
        """Keep the state of *sequence* where it has got to a place that was asked for."""
        if sequence.keep_at and sequence.evaluated_prompt >= sequence.keep_at[0]:
            place = sequence.keep_at.pop(0)
            if sequence.evaluated_prompt == place:
                self._keep(sequence, place)

    def end(self, sequence: Sequence) -> None:
        """Keep the state of *sequence*, which has ended without a failure and is still open."""
        store = self._store
        if sequence.cache_key is None or not store.can_cut or sequence.held < sequence.num_prompt:
            return
        length = sequence.held if self._mixable else sequence.num_prompt
        if store.longest is not None:
            length = min(length, store.longest)
        if length >= LEAST_KEPT:
            self._keep(sequence, length)

    def _keep(self, sequence: Sequence, length: int) -> None:
        key, tokens = sequence.cache_key or "", sequence.tokens[:length]
        if self._store.can_cut and self.cache.covered(key, tokens) > length - LEAST_KEPT:
            return  # what is kept already saves as much
        try:
            if self._session.length(sequence.seq) > length:
                self._session.truncate(sequence.seq, length)
            snapshot = self._store.save(sequence.seq)
        except Exception as exc:  # noqa: BLE001 - a copy that fails costs time later, and nothing now
            log.warning("a prompt could not be kept", request=sequence.request_id, error=str(exc))
            return
        if snapshot is None:
            return
        parts, prefilled = self._parts(sequence, length, snapshot), min(length, sequence.num_prompt)
        kept = self.cache.store(key, tokens, parts, prefilled=prefilled)
        nbytes = entry_bytes(length, parts)
        log.debug("prompt kept", request=sequence.request_id, tokens=length, bytes=nbytes, kept=kept)

    def _parts(self, sequence: Sequence, length: int, target: Snapshot) -> dict[str, Snapshot]:
        """*target* and what its drafter was told of, unless the entry would exceed the cache's bound for it."""
        history = None if sequence.draft is None else sequence.drafting.history
        rows = None if history is None else history.last(length)
        parts = {TARGET: target} if rows is None else {TARGET: target, HIDDEN: row_snapshot(rows)}
        return parts if entry_bytes(length, parts) <= self.cache.max_bytes else {TARGET: target}


def _settings_digest(profile: ShapeProfile, context_size: int) -> str:
    """Everything but the model that decides a row's bits: the numeric paths, and how the memory is laid out."""
    return f"{profile.identity.digest}/{context_size}"
