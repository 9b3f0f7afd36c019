"""Small records shared by every module. Imports nothing of the package."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeAlias

from attrs import frozen

__all__ = [
    "AUTO",
    "JSON",
    "OFF",
    "AdapterIdentity",
    "Capability",
    "FinishReason",
    "Origin",
    "SeqId",
    "TargetIdentity",
    "TokenId",
]

TokenId: TypeAlias = int
SeqId: TypeAlias = int
JSON: TypeAlias = Any
# Where a strategy is named: plain decoding, and the best one that there is.
OFF = "off"
AUTO = "auto"


class Origin(StrEnum):
    """How an emitted token came about. Every one of them is the target's own choice."""

    PLAIN = "plain"  # no proposal in this step
    ACCEPTED = "accepted"  # proposed by the drafter, chosen by the target
    CORRECTION = "correction"  # the target chose another token than the proposal
    BONUS = "bonus"  # the whole proposal was accepted, one more came free
    END = "end"  # not a token: the closing event of a request


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-generation id, a stop id, a stop string, or the grammar's end
    LENGTH = "length"  # max_tokens or the end of the context
    CANCELLED = "cancelled"
    ERROR = "error"


class Capability(StrEnum):
    """What a target session can do beyond `forward`. Drafters require these by name."""

    LOGITS = "logits"
    GREEDY_IDS = "greedy-ids"
    HIDDEN_STATES = "hidden-states"
    NEXTN = "nextn"
    STATE_SNAPSHOT = "state-snapshot"
    PREFIX_REUSE = "prefix-reuse"
    TREE_ROWS = "tree-rows"
    DRAFT_CONTEXT = "draft-context"


@frozen
class AdapterIdentity:
    """
    A change to a target's weights, by content.

    Args:
        sha256: Digest of its file.
        scale: What it is multiplied with.
    """

    sha256: str
    scale: float


@frozen
class TargetIdentity:
    """
    What a target is, by content. Two targets of one identity decode alike.

    Drafters are bound to `file_sha256`: adapters change how often they are right, and nothing else.

    Args:
        name: As the file calls itself.
        architecture: Of the file.
        file_sha256: Digest of the file.
        tokenizer_sha256: Digest of what turns text into ids.
        vocab_size: Ids.
        hidden_size: Values of a hidden state.
        num_layers: Blocks.
        adapters: What is added to the file's weights, in order.
    """

    name: str
    architecture: str
    file_sha256: str
    tokenizer_sha256: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    adapters: tuple[AdapterIdentity, ...] = ()

    @property
    def adapter_digests(self) -> tuple[str, ...]:
        """Digest and scale of each adapter, as keys have them."""
        return tuple(f"{adapter.sha256}*{adapter.scale!r}" for adapter in self.adapters)
