"""Text from tokens: UTF-8, stop strings, end ids, and a past that can be undone."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_core.decoding import Decoder
from power_core.errors import RequestError, TransactionError
from power_core.testing import ScriptedTokenizer

END = b"</s>"


def tokenizer_of(*pieces: bytes) -> ScriptedTokenizer:
    """*pieces* get the ids from 0 on; the last id is the end token."""
    return ScriptedTokenizer([*pieces, END], end_ids={len(pieces)}, special_ids={len(pieces)})


def decoder_of(pieces: list[bytes], **settings: object) -> Decoder:
    return Decoder(tokenizer_of(*pieces), **settings)  # type: ignore[arg-type] # settings are checked by the tests


def run(decoder: Decoder, ids: list[int]) -> tuple[list[str], int]:
    """Released texts up to the end, flush included, and the number of tokens consumed."""
    released, count = [], 0
    for token_id in ids:
        text, is_finished = decoder.push(token_id)
        released.append(text)
        count += 1
        if is_finished:
            break
    return [*released, decoder.flush()], count


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: cut before the longest of the stops that complete first."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def held_back(text: str, stops: list[str]) -> int:
    """Length of the longest end of *text* that a stop string begins with."""
    starts = (n for n in range(min(len(text), max(map(len, stops)) - 1), 0, -1))
    return next((n for n in starts if any(stop.startswith(text[-n:]) for stop in stops)), 0)


texts = st.text(alphabet="abé😀", max_size=30)
stop_lists = st.lists(st.text(alphabet="abé😀", min_size=1, max_size=4), min_size=1, max_size=4)


@st.composite
def pieces_of(draw: st.DrawFn, source: st.SearchStrategy[bytes]) -> list[bytes]:
    """Some bytes, cut anywhere, characters included."""
    data = draw(source)
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)))) | {0, len(data)})
    return [data[a:b] for a, b in pairwise(cuts)]


valid_pieces = pieces_of(texts.map(str.encode))


@given(pieces_of(st.binary(max_size=40)))
def test_any_split_of_any_bytes_decodes_like_the_whole(pieces: list[bytes]) -> None:
    """Joined releases are what Python makes of all bytes at once, broken sequences included."""
    released, _ = run(decoder_of(pieces), list(range(len(pieces))))
    assert "".join(released) == b"".join(pieces).decode("utf-8", "replace")


@given(valid_pieces)
def test_no_character_is_broken(pieces: list[bytes]) -> None:
    """Valid text never shows a replacement character, wherever its bytes are cut."""
    decoder, seen = decoder_of(pieces), b""
    for i, piece in enumerate(pieces):
        decoder.push(i)
        seen += piece
        assert seen.startswith(decoder.text.encode())
        assert len(seen) - len(decoder.text.encode()) < 4  # and nothing is kept longer than it must be
    assert decoder.flush() == ""


@given(valid_pieces, stop_lists)
def test_stop_strings_cut_where_the_definition_says(pieces: list[bytes], stops: list[str]) -> None:
    """Whatever the split, the text ends before the first stop string to complete."""
    decoder = decoder_of(pieces, stop=stops)
    released, count = run(decoder, list(range(len(pieces))))
    expected, is_stopped = cut_at_stop(b"".join(pieces).decode(), stops)
    assert "".join(released) == decoder.text == expected
    if is_stopped:  # the token that completes the stop is the last one
        assert cut_at_stop(b"".join(pieces[:count]).decode("utf-8", "ignore"), stops) == (expected, True)
        assert not cut_at_stop(b"".join(pieces[: count - 1]).decode("utf-8", "ignore"), stops)[1]
        assert released[-1] == ""


@given(valid_pieces, stop_lists)
def test_exactly_the_possible_stop_is_held_back(pieces: list[bytes], stops: list[str]) -> None:
    """After each token, what a stop string could still claim is held, and not a character more."""
    decoder, data = decoder_of(pieces, stop=stops), b""
    for i, piece in enumerate(pieces):
        _, is_finished = decoder.push(i)
        data += piece
        if is_finished:
            break
        text = data.decode("utf-8", "ignore")
        assert decoder.text == text[: len(text) - held_back(text, stops)]


@given(st.data(), valid_pieces, stop_lists)
def test_restore_leaves_no_trace(data: st.DataObject, pieces: list[bytes], stops: list[str]) -> None:
    """A decoder with any number of undone excursions releases what one without them does."""
    ids = list(range(len(pieces) + 1))  # the end id too
    decoder, plain = decoder_of(pieces, stop=stops), decoder_of(pieces, stop=stops)
    for token_id in ids:
        checkpoint = decoder.checkpoint()
        for excursion in data.draw(st.lists(st.lists(st.sampled_from(ids), max_size=4), max_size=2)):
            for wrong in excursion:
                decoder.push(wrong)
            if data.draw(st.booleans()):
                decoder.flush()
            decoder.restore(checkpoint)
        decoder.commit(0)
        assert decoder.push(token_id) == plain.push(token_id)
        assert decoder.text == plain.text
    assert decoder.flush() == plain.flush()


def test_a_stop_inside_one_token_is_found() -> None:
    """The rest of the token that completes a stop string is not released."""
    decoder = decoder_of([b"one STOP two"], stop=["STOP"])
    assert decoder.push(0) == ("one ", True)
    assert decoder.flush() == ""


def test_a_stop_over_several_tokens_is_never_shown() -> None:
    """The alphabet case: no letter of the stop string is released before it is whole."""
    pieces = [b"ABC", b"DE", b"FGH", b"IJ", b"KL"]
    released, count = run(decoder_of(pieces, stop=["DEFGHIJ"]), [0, 1, 2, 3, 4])
    assert (released, count) == (["ABC", "", "", "", ""], 4)


def test_a_near_miss_is_released_in_order() -> None:
    """Text that turned out not to be a stop string comes out with the token that settles it."""
    pieces = [b"beta ", b"gamm", b"a\nalpha"]
    released, _ = run(decoder_of(pieces, stop=["beta gammb"]), [0, 1, 2])
    assert released == ["", "", "beta gamma\nalpha", ""]


def test_the_first_stop_to_complete_wins_whatever_its_place_in_the_list() -> None:
    """A later-listed stop that occurs first ends the text."""
    released, count = run(decoder_of([b"a ", b"second ", b"first"], stop=["first", "second"]), [0, 1, 2])
    assert ("".join(released), count) == ("a ", 2)


def test_of_stops_completing_together_the_longest_is_cut() -> None:
    """Two stops with one last character: the text ends before the longer one."""
    assert decoder_of([b"xabc"], stop=["c", "abc"]).push(0) == ("x", True)


def test_a_stop_inside_the_beginning_of_another_is_found() -> None:
    """While a longer stop string is still possible, a shorter one completes and ends the text."""
    assert decoder_of([b"xab", b"c"], stop=["abcd", "bc"]).push(0) == ("x", False)
    released, count = run(decoder_of([b"xab", b"c", b"d"], stop=["abcd", "bc"]), [0, 1, 2])
    assert (released, count) == (["x", "a", ""], 2)


def test_a_stop_that_begins_with_its_own_tail_is_found() -> None:
    """A failed match continues from the longest beginning that is still there."""
    released, _ = run(decoder_of([b"aabaab", b"aac", b"more"], stop=["aabaac"]), [0, 1, 2])
    assert released == ["aab", "", ""]


@pytest.mark.parametrize("end", ["end id", "stop id"])
def test_an_end_token_gives_no_text_and_what_was_held_comes_with_flush(end: str) -> None:
    """End ids and stop ids end the output; a stop id's own text is not part of it."""
    decoder = decoder_of([b"a ST", b"never shown"], stop=["STOP"], stop_ids={1})
    assert decoder.push(0) == ("a ", False)
    assert decoder.push(2 if end == "end id" else 1) == ("", True)
    assert decoder.push(0) == ("", True)
    assert (decoder.flush(), decoder.flush(), decoder.text) == ("ST", "", "a ST")


def test_all_end_ids_end() -> None:
    """Every end-of-generation id counts, not only the first."""
    tokenizer = ScriptedTokenizer([b"a", b"<1>", b"<2>"], end_ids={1, 2}, special_ids={1, 2}, eos_id=1)
    assert [Decoder(tokenizer).push(i) for i in (0, 1, 2)] == [("a", False), ("", True), ("", True)]


def test_an_incomplete_character_at_the_end_is_replaced() -> None:
    """Three of four bytes of an emoji become one U+FFFD, as in whole-text decoding."""
    released, _ = run(decoder_of(["😀".encode()[:3]]), [0])
    assert released == ["", "\ufffd"]


def test_a_replaced_character_can_complete_a_stop_string() -> None:
    """Also what flush decodes is matched: nothing of a stop string comes out."""
    released, _ = run(decoder_of([b"ab\xf0\x9f"], stop=["b\ufffd"]), [0])
    assert released == ["a", ""]


def test_many_long_stops_cost_no_more_than_one() -> None:
    """A hundred stops that nearly match all along leave long text unchanged."""
    stops = ["a" * n + "b" for n in range(1, 101)]
    decoder = decoder_of([b"a" * 100, b"c"], stop=stops)
    for _ in range(500):
        assert decoder.push(0)[1] is False
    assert len(decoder.text) == 49_900
    assert decoder.push(1) == ("a" * 100 + "c", False)


@pytest.mark.parametrize("stop", ["text", [""], ["a", ""], [3]])
def test_useless_stops_are_refused(stop: object) -> None:
    """A bare string, an empty stop or something else than text is an error, not a surprise."""
    with pytest.raises(RequestError, match="non-empty strings") as caught:
        decoder_of([b"a"], stop=stop)
    assert caught.value.got == stop


@pytest.mark.parametrize("token_id", [-1, 2])
def test_stop_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    """A stop id that cannot occur is named."""
    with pytest.raises(RequestError, match=f"stop id {token_id} is not in the vocabulary"):
        decoder_of([b"a"], stop_ids={token_id})


def test_a_foreign_checkpoint_is_refused() -> None:
    """Restoring something that was never this decoder's state is an error in the engine."""
    decoder = decoder_of([b"a"])
    ahead = decoder_of([b"a"])
    ahead.push(0)
    for checkpoint in (None, ahead.checkpoint()):
        with pytest.raises(TransactionError, match="decoder"):
            decoder.restore(checkpoint)
