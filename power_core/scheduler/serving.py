"""How an engine serves many requests: its bounds, its cache, and the loop they are put together in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from attrs import frozen

from power_core.prefix import PrefixSource
from power_core.scheduler.admission import AdmissionController, Permit
from power_core.scheduler.cache_disk import DiskTier
from power_core.scheduler.costs import CostModel
from power_core.scheduler.kept_rows import RowStore
from power_core.scheduler.loop import StepLoop
from power_core.scheduler.policy import WidthPolicy
from power_core.scheduler.prompt_cache import PromptCache
from power_core.scheduler.queue import MAX_WAITING, RequestQueue
from power_core.scheduler.replica_loop import ReplicaLoop
from power_core.scheduler.reuse import HIDDEN, TARGET, PromptReuse
from power_core.shapes import ExactnessLevel
from power_core.target import TargetSession
from power_core.types import Capability

__all__ = ["DEFAULT_CACHE_BYTES", "Serving", "make_cache", "make_loop", "make_queue", "make_reuse", "num_replicas"]

DEFAULT_CACHE_BYTES = 512 * 2**20


@frozen
class Serving:
    """
    The bounds of an engine.

    Args:
        queue_max: Requests that may wait.
        queue_per_client: Of them, those one client may have; None for no further bound.
        deadline_s: Seconds for requests without a deadline of their own; None for no bound.
        replicas: Sessions that decode one request each, instead of one that decodes several; 0 takes them only
            where the target cannot batch.
        cache_bytes: Most bytes of prompts kept in memory; 0 keeps none.
        cache_ttl_s: Seconds after its last use that a kept prompt is dropped; None keeps it.
        cache_dir: Where kept prompts outlive the process; None for nowhere.
        memory: Where bytes are reserved, by all engines of a runtime.
        device: Turns of the device that all engines of a runtime share.
        session_bytes: What one session can at most take.
        reservations: Held for the model and its first session until the engine is closed.
        session_reservation: The first session's; where that is a replica it comes back when the replica is retired.
    """

    queue_max: int = MAX_WAITING
    queue_per_client: int | None = None
    deadline_s: float | None = None
    replicas: int = 0
    cache_bytes: int = DEFAULT_CACHE_BYTES
    cache_ttl_s: float | None = None
    cache_dir: Path | None = None
    memory: AdmissionController | None = None
    device: AdmissionController | None = None
    session_bytes: int = 0
    reservations: tuple[Permit, ...] = ()
    session_reservation: Permit | None = None

    def release(self) -> None:
        """Give back what is reserved. Idempotent."""
        for permit in self.reservations:
            permit.release()


def num_replicas(serving: Serving, session: TargetSession, parallel: int) -> int:
    """Replicas to run over *session*'s model, or 0 where the one session batches *parallel* requests itself."""
    if serving.replicas:
        return serving.replicas
    return parallel if session.max_sequences < parallel else 0


def make_queue(serving: Serving, places: int) -> RequestQueue:
    """The queue of an engine that decodes *places* requests at the same time."""
    admission = AdmissionController(
        max_active=places, max_waiting=serving.queue_max, max_per_client=serving.queue_per_client
    )
    return RequestQueue(admission, serving.deadline_s)


def make_cache(serving: Serving, session: TargetSession, *, allow_unverified: bool) -> PromptCache | None:
    """
    The cache of an engine; None where none was asked for, or *session*'s state cannot be kept exactly.

    It fails closed: where the target does not declare that it can copy state, and where its level promises nothing.
    """
    promised = allow_unverified or session.profile.level is not ExactnessLevel.UNVERIFIED
    if not serving.cache_bytes or not promised or not isinstance(session, PrefixSource):
        return None
    if Capability.PREFIX_REUSE not in session.capabilities:
        return None
    disk = None
    if serving.cache_dir is not None:
        disk = DiskTier(serving.cache_dir, max_bytes=4 * serving.cache_bytes, ttl=serving.cache_ttl_s)
    stores = {TARGET: session.prefix_store(), HIDDEN: RowStore()}
    return PromptCache(stores, max_bytes=serving.cache_bytes, ttl=serving.cache_ttl_s, disk=disk)


def make_reuse(
    cache: PromptCache | None, session: TargetSession, model_digest: str, adapters: Iterable[str] = ()
) -> PromptReuse | None:
    """*cache* as requests of *session* use it."""
    if cache is None or not isinstance(session, PrefixSource):
        return None
    return PromptReuse(cache, session, session.prefix_store(), model_digest, adapters)


def make_loop(
    first: StepLoop,
    replicas: int,
    serving: Serving,
    open_session: Callable[[], TargetSession],
    make: Callable[[TargetSession, CostModel, WidthPolicy], StepLoop],
) -> StepLoop | ReplicaLoop:
    """
    What an engine steps: *first* alone, or *replicas* of it.

    Args:
        first: The loop over the session that is open.
        replicas: From `num_replicas`.
        serving: The bounds.
        open_session: Opens a further session.
        make: Makes the loop over one, with what the first has learned of costs.
    """
    if not replicas:
        return first

    def build() -> StepLoop:
        session = open_session()
        try:
            return make(session, first.costs, first.policy)
        except BaseException:
            session.shutdown()
            raise

    return ReplicaLoop(
        first, build, size=replicas, replica_bytes=serving.session_bytes, memory=serving.memory,
        reservation=serving.session_reservation,
    )  # fmt: skip
