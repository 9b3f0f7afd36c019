"""What is refused before any step."""

import pytest

from power_core.errors import RequestError
from power_core.request import GenerationRequest
from power_core.scheduler.checks import check_request


@pytest.mark.parametrize("prompt", [(0,), (7,), (0, 7, 0, 7)])
def test_any_token_of_the_vocabulary_and_a_full_context_are_served(prompt):
    check_request(GenerationRequest(prompt), vocab_size=8, context_size=4)


@pytest.mark.parametrize(
    ("prompt", "got", "expected"),
    [
        ((8,), 8, "0 to 7"),
        ((9, 1), 9, "0 to 7"),
        ((1, -1), -1, "0 to 7"),
        ((1, 2, 3, 4, 5), 5, "at most 4"),
        ((1,) * 9, 9, "at most 4"),
    ],
)
def test_what_no_step_could_serve_is_refused(prompt, got, expected):
    """Naming what was wrong and what is right."""
    with pytest.raises(RequestError) as caught:
        check_request(GenerationRequest(prompt), vocab_size=8, context_size=4)
    assert (caught.value.got, caught.value.expected) == (got, expected)


def test_an_empty_prompt_and_no_request_are_refused():
    """Whatever gets past the constructor."""
    empty = GenerationRequest((1,))
    object.__setattr__(empty, "prompt", ())
    for bad, what in ((empty, "the prompt is empty"), ("text", "'text' was submitted")):
        with pytest.raises(RequestError, match=what):
            check_request(bad, vocab_size=8, context_size=4)
