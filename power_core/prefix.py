"""
Prefix reuse: what a target session offers so that the state of a prompt can outlive its request.

A session that declares `Capability.PREFIX_REUSE` is a `PrefixSource`: its store copies a sequence's state out
and in again, bit for bit. What is copied is opaque to the core.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from attrs import field, frozen

from power_core.types import SeqId

__all__ = ["PrefixSource", "PrefixStore", "Snapshot"]


@frozen
class Snapshot:
    """
    One part of a request's state after some tokens.

    Args:
        payload: Whatever its store needs to load it again; never looked into.
        nbytes: What it takes.
        length: Tokens it covers.
        can_cut: Whether its store can load it for fewer tokens. Recurrent and sliding-window state can
            not: it is of use only where the prompt holds all the tokens it covers.
    """

    payload: object = field(repr=False)
    nbytes: int
    length: int
    can_cut: bool


class PrefixStore(Protocol):
    """
    Copies state out of a session and into it. Called from the thread that steps, between steps.

    Attributes:
        can_cut: Whether snapshots can be loaded for fewer tokens than they cover.
        longest: Positions up to which a sequence can be copied exactly, or None for any number.
    """

    # Read-only members, so that an implementation may declare narrower types than these.
    @property
    def can_cut(self) -> bool: ...
    @property
    def longest(self) -> int | None: ...

    def save(self, seq: SeqId) -> Snapshot | None:
        """The state of *seq* as it is now, or None where no exact copy can be made."""

    def load(self, seq: SeqId, snapshot: Snapshot, length: int) -> None:
        """
        Give *seq*, which is open and empty, the state after the first *length* tokens.

        Raises:
            BackendError: It cannot; *seq* is empty as before.
        """

    def free(self, snapshot: Snapshot) -> None:
        """The snapshot will not be used again."""

    def to_bytes(self, snapshot: Snapshot) -> bytes | None:
        """The snapshot for the disk, or None where it cannot leave the process."""

    def from_bytes(self, data: bytes) -> Snapshot:
        """
        A snapshot that `to_bytes` wrote, perhaps in an earlier process.

        Raises:
            BackendError: The bytes are none of this store's.
        """


@runtime_checkable
class PrefixSource(Protocol):
    """A target session with `Capability.PREFIX_REUSE`."""

    def prefix_store(self) -> PrefixStore:
        """The store for this session's sequences; snapshots of one session fit any other of the same settings."""
