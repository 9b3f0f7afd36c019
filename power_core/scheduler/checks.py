"""Whether a target can serve a request at all; what is checked here needs no step to find out."""

from __future__ import annotations

from power_core.errors import RequestError
from power_core.request import GenerationRequest

__all__ = ["check_request"]


def check_request(request: GenerationRequest, vocab_size: int, context_size: int) -> None:
    """
    Refuse what no step could serve.

    Raises:
        RequestError: Not a request, or its prompt is empty, too long or of ids the target does not have.
    """
    who = "request"
    if not isinstance(request, GenerationRequest):
        raise RequestError(f"{request!r:.80} was submitted", who=who, got=request, expected="a GenerationRequest")
    if not request.prompt:
        raise RequestError("the prompt is empty", who=who, expected="at least one token")
    bad = next((token for token in request.prompt if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise RequestError(f"prompt token {bad} is no token id", who=who, got=bad, expected=f"0 to {vocab_size - 1}")
    if len(request.prompt) > context_size:
        raise RequestError(
            f"the prompt has {len(request.prompt)} tokens",
            who=who,
            got=len(request.prompt),
            expected=f"at most {context_size}",
            fix="shorten it or raise --ctx",
        )
