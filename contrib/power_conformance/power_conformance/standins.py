"""What contracts are given in place of the real thing: a target without a model, a file that notes what is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from attrs import evolve, frozen

from power_core.artifacts import TensorFile
from power_core.errors import PowerError
from power_core.target import ChatMessage, SessionOptions, TargetModel, TargetSession
from power_core.types import TargetIdentity, TokenId

__all__ = ["Names", "StandIn", "noting"]


@frozen
class Names:
    """
    A tokenizer that can say what its tokens are, and no more.

    Args:
        names: Of each id.
        pieces: Bytes of each id.
        bos_id: As the tokenizer's.
        eos_id: As the tokenizer's.
        end_ids: As the tokenizer's.
        special_ids: As the tokenizer's.
    """

    names: tuple[str, ...]
    pieces: tuple[bytes, ...]
    bos_id: TokenId | None
    eos_id: TokenId | None
    end_ids: frozenset[TokenId]
    special_ids: frozenset[TokenId]
    has_chat_template = False

    @property
    def vocab_size(self) -> int:
        return len(self.names)

    def token_name(self, token_id: TokenId) -> str:
        return self.names[token_id]

    def token_bytes(self, token_id: TokenId) -> bytes:
        return self.pieces[token_id]

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[TokenId]:  # noqa: ARG002 - the protocol's
        _no_reason("encode texts with")

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[TokenId]:  # noqa: ARG002 - the protocol's
        _no_reason("encode chats with")


@frozen
class StandIn:
    """
    A target that only says what it is: identity and vocabulary. It can be sent to another process.

    Args:
        identity: What it is said to be.
        tokenizer: Its vocabulary.
        trained_context: As the model's.
    """

    identity: TargetIdentity
    tokenizer: Names
    trained_context: int

    @classmethod
    def of(cls, model: TargetModel, *, names: Mapping[TokenId, str] | None = None, **changes: Any) -> StandIn:
        """
        What *model* says of itself, with changes.

        Args:
            model: A real target.
            names: Tokens that are called something else.
            changes: Fields of the identity with other values.
        """
        real = model.tokenizer
        ids = range(real.vocab_size)
        tokenizer = Names(
            tuple((names or {}).get(i, real.token_name(i)) for i in ids), tuple(real.token_bytes(i) for i in ids),
            real.bos_id, real.eos_id, frozenset(real.end_ids), frozenset(real.special_ids),
        )  # fmt: skip
        return cls(evolve(model.identity, **changes), tokenizer, model.trained_context)

    def facts(self) -> Mapping[str, Any]:
        return {}

    def open_session(self, options: SessionOptions) -> TargetSession:  # noqa: ARG002 - the protocol's
        _no_reason("open sessions of")

    def close(self) -> None:
        """Nothing is held."""


def noting(file: TensorFile, reads: list[str]) -> TensorFile:
    """
    A stand-in for *file* that passes for one of its class.

    Args:
        file: The file.
        reads: Names of the tensors that are read are appended.
    """

    def read(_self: object, name: str) -> Any:
        if name == "read":
            return values
        return getattr(file, name)

    def values(tensor: str) -> Any:
        reads.append(tensor)
        return file.read(tensor)

    members = {"__class__": property(lambda _self: type(file)), "__getattr__": read}
    return cast("TensorFile", type("NotingFile", (), members)())


def _no_reason(what: str) -> NoReturn:
    raise PowerError(f"a contract has no reason to {what} the target", who="conformance")
