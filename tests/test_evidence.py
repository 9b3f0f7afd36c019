"""Receipts: what they hold, that they are canonical, and that no change to one goes unseen."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_core.errors import ReceiptError, RequestError
from power_core.evidence import (
    Timings,
    build_receipt,
    generation_document,
    verify_document,
    verify_file,
    verify_generation,
)
from power_core.evidence.canonical import canonical, digest, parse, plain
from power_core.evidence.schema import CountsRecord, SamplingRecord
from power_core.request import Counts, GenerationRequest, SamplingSpec, TokenLogprobs, Usage
from power_core.shapes import ExactnessLevel, ShapeIdentity, ShapeProfile, WidthClass
from power_core.types import FinishReason, TargetIdentity

WIDTHS = WidthClass(ShapeIdentity("sha256:w"), (1, 2, 4), (1.0, 1.6, 2.25))
OUTPUT: dict[str, Any] = {
    "token_ids": (7, 8, 9),
    "text": 'déjà "vu"\n',
    "finish_reason": FinishReason.STOP,
    "usage": Usage(2, 3),
    "logprobs": (TokenLogprobs(7, -0.5, ((7, -0.5), (3, -math.inf))),) * 3,
}


def make_receipt(**changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "target": TargetIdentity("toy", "llama", "sha256:f", "sha256:t", 32, 8, 2),
        "strategy": "suffix",
        "drafter_owner": "power-ngram 0.1.0",
        "profile": ShapeProfile(ExactnessLevel.BITWISE, WIDTHS, WIDTHS, {"probe": ("child", Path("x"))}),
        "request": GenerationRequest((1, 2), SamplingSpec(logit_bias={5: -100.0, 2: 1.0}, logprobs=2), stop=("x",)),
        "seed": 2**64 - 1,
        "counts": Counts(rounds=2, proposals=1, emitted=3, widths={4: 1, 1: 2}),
        "timings": Timings(ttft_s=0.1, prefill_s=0.05, decode_s=0.25, request_s=0.5),
        "environment": {"library": "b1234", "paths": [Path("a")]},
        **OUTPUT,
    }
    return build_receipt(**{**arguments, **changes})


def make_generation() -> dict[str, Any]:
    return generation_document(prompt_token_ids=(1, 2), receipt=make_receipt(), **OUTPUT)


def test_receipt_says_what_ran_and_what_it_cost() -> None:
    """Identities, settings, counts and both rates are in the body that a verification returns."""
    body = verify_document(make_receipt()).body
    assert (body.target.name, body.strategy, body.drafter) == ("toy", "suffix", "power-ngram 0.1.0")
    assert (body.shape.level, body.shape.decode.widths) == ("bitwise", [1, 2, 4])
    assert body.request.sampling.seed == str(2**64 - 1)
    assert body.request.sampling.logit_bias == [(2, 1.0), (5, -100.0)]
    assert body.counts.widths == {"1": 2, "4": 1}
    assert body.timings.steady_tokens_per_s == 2 / 0.25
    assert body.timings.request_tokens_per_s == 3 / 0.5
    assert body.environment["target"] == {"library": "b1234", "paths": ["a"]}
    assert "power-core" in body.environment["packages"]
    assert body.source


def test_receipt_holds_no_prompt_and_no_text() -> None:
    """A receipt can be shown to others: prompt, text, schema and pattern are digests in it."""
    sampling = SamplingSpec(json_schema='{"title":"secret"}')
    request = GenerationRequest((111111, 222222), sampling)
    data = canonical(make_receipt(request=request, text="secret text", token_ids=(333333,)))
    assert not [word for word in (b"secret", b"111111", b"222222", b"333333") if word in data]


def test_equal_output_has_equal_output_digest() -> None:
    """Outputs of two strategies are compared by one digest, whatever else differs."""
    one, other = make_receipt(), make_receipt(strategy="off", drafter_owner=None, counts=Counts())
    assert one["body"]["output"] == other["body"]["output"]
    assert one["digest"] != other["digest"]


def test_every_changed_byte_of_a_file_is_found(tmp_path: Path) -> None:
    """Flipping a bit of any byte of a receipt is found."""
    data = canonical(make_receipt()) + b"\n"
    file = tmp_path / "receipt.json"
    file.write_bytes(data)
    assert verify_file(file).body.strategy == "suffix"
    for index in range(len(data)):
        file.write_bytes(data[:index] + bytes([data[index] ^ (1 << index % 8)]) + data[index + 1 :])
        with pytest.raises(ReceiptError):
            verify_file(file)


def test_every_changed_byte_of_a_generation_is_found(tmp_path: Path) -> None:
    """The same for what `power generate --json` prints: text, ids and log-probabilities are covered."""
    data = canonical(make_generation()) + b"\n"
    file = tmp_path / "generation.json"
    file.write_bytes(data)
    assert verify_file(file).covers_output
    for index in range(len(data)):
        file.write_bytes(data[:index] + bytes([data[index] ^ (1 << index % 8)]) + data[index + 1 :])
        with pytest.raises(ReceiptError):
            verify_file(file)


@given(st.data())
def test_inserted_deleted_and_replaced_bytes_are_found(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """So are bytes put in, taken out and replaced by any other."""
    good = canonical(make_receipt())
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, min(len(good), start + 3)))
    bad = good[:start] + data.draw(st.binary(max_size=3)) + good[end:]
    if bad.removesuffix(b"\n") == good:
        return
    file = tmp_path_factory.mktemp("receipt") / "receipt.json"
    file.write_bytes(bad)
    with pytest.raises(ReceiptError):
        verify_file(file)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text", "another"),
        ("token_ids", [7, 8]),
        ("prompt_token_ids", [1]),
        ("finish_reason", "length"),
        ("usage", {"prompt_tokens": 2, "completion_tokens": 4}),
        ("logprobs", None),
    ],
)
def test_generation_names_the_field_that_changed(field: str, value: Any) -> None:
    """An output that is not the receipt's is refused by the name of the field."""
    with pytest.raises(ReceiptError) as caught:
        verify_generation({**make_generation(), field: value})
    assert caught.value.where == field


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"a":1,"a":1}',
        b"[" * 100_000,
        b"1" * 5000,
        b'{"x":NaN}',
        b'"\\ud800"',
    ],
    ids=["empty", "binary", "cut", "list", "null", "fields", "repeated", "deep", "digits", "nan", "surrogate"],
)
def test_foreign_files_are_one_line(tmp_path: Path, content: bytes) -> None:
    """Whatever the file holds, the answer is one line that names it."""
    file = tmp_path / "foreign.json"
    file.write_bytes(content)
    with pytest.raises(ReceiptError) as caught:
        verify_file(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_document_of_another_schema_says_which_it_has() -> None:
    """A receipt of a later version is no changed one."""
    with pytest.raises(ReceiptError, match=r"unknown schema 'power\.receipt/9' \(expected power\.receipt/1 or"):
        verify_document({**make_receipt(), "schema": "power.receipt/9"})


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    """So is a file that is not there, and a folder."""
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ReceiptError, match="cannot be read"):
            verify_file(path)


def test_pretty_printed_receipt_is_refused(tmp_path: Path) -> None:
    """A file that was written again by something else is not what Power wrote, even with the same content."""
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(make_receipt(), indent=1))
    with pytest.raises(ReceiptError, match="canonical form"):
        verify_file(file)


@pytest.mark.parametrize(("key", "value"), [("strategy", 3), ("surprise", 1), ("warnings", "text"), ("counts", None)])
def test_a_forged_body_of_other_types_is_no_receipt(key: str, value: Any) -> None:
    """A correct digest over a body that is not of the schema does not make it a receipt."""
    receipt = make_receipt()
    content = {"schema": receipt["schema"], "body": {**receipt["body"], key: value}}
    with pytest.raises(ReceiptError, match=r"body (is not|has values)"):
        verify_document({**content, "digest": digest(content)})


def test_drafting_that_never_proposed_is_a_warning() -> None:
    """A run with a drafter that had nothing to say does not look like a speculative one."""
    silent = make_receipt(counts=Counts(emitted=3, proposals=0), warnings=["from the engine"])
    assert silent["body"]["warnings"][0] == "from the engine"
    assert "no proposal" in silent["body"]["warnings"][1]
    assert make_receipt(drafter_owner=None, counts=Counts(emitted=3))["body"]["warnings"] == []


def test_records_have_every_field_of_what_they_record() -> None:
    """A field added to the sampling settings or the counts cannot be left out of the receipt."""
    assert {a.name for a in attrs.fields(CountsRecord)} == {a.name for a in attrs.fields(Counts)}
    digests = {"json_schema": "json_schema_sha256", "regex": "regex_sha256"}
    settings = {digests.get(a.name, a.name) for a in attrs.fields(SamplingSpec)}
    assert {a.name for a in attrs.fields(SamplingRecord)} == settings


def test_a_ban_has_a_place_in_the_receipt() -> None:
    """A bias of -inf, which no JSON number can be, is recorded as None and verifies."""
    request = GenerationRequest((1, 2), SamplingSpec(logit_bias={5: -math.inf, 2: 1.0}))
    body = verify_document(make_receipt(request=request)).body
    assert body.request.sampling.logit_bias == [(2, 1.0), (5, None)]


@pytest.mark.parametrize("key", ["top_k", "penalty_window", "max_tokens", "draft_max"])
def test_a_count_that_a_receipt_cannot_hold_is_refused_before_decoding(key: str) -> None:
    """The largest count a request may have is the largest integer a receipt can record."""

    def request(value: int) -> GenerationRequest:
        if key in ("top_k", "penalty_window"):
            return GenerationRequest((1, 2), SamplingSpec(**{key: value}))
        return GenerationRequest((1, 2), **{key: value})

    assert verify_document(make_receipt(request=request(2**53 - 1))).body
    with pytest.raises(RequestError, match=f"{key} is {2**53} "):
        request(2**53)


def test_numbers_that_json_cannot_hold_are_refused() -> None:
    """A rate that is infinite must not become a receipt; a probability of zero is null."""
    with pytest.raises(ReceiptError, match="canonical"):
        make_receipt(timings=Timings(math.inf, 0.0, 0.0, 1.0))
    assert make_generation()["logprobs"][0]["top"] == [[7, -0.5], [3, None]]


def test_plain_makes_json_of_anything() -> None:
    """Facts of a backend are free-form: paths, sets, enums, huge and non-finite numbers."""
    facts = {1: {2, 1}, "e": FinishReason.STOP, "n": math.nan, "big": 2**60, "b": b"x", "t": (None, True)}
    assert plain(facts) == {"1": [1, 2], "e": "stop", "n": "nan", "big": str(2**60), "b": "b'x'", "t": [None, True]}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_canonical_numbers_read_back_and_write_the_same(number: float) -> None:
    """Also those that canonical JSON writes as long integers."""
    assert canonical(parse(canonical([number]))) == canonical([number])


def test_building_is_cheap() -> None:
    """A receipt of 128 tokens is made in a few milliseconds at most, once the process is known."""
    make_receipt()

    def once() -> float:
        start = time.perf_counter()
        make_receipt(token_ids=range(128), text="word " * 128, logprobs=None)
        return time.perf_counter() - start

    assert min(once() for _ in range(10)) < 0.005
