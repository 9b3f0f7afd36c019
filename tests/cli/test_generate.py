"""`power generate`: the text of plain decoding, however it is asked for and shown."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from power_core.cli.progress import PrefillProgress
from power_core.evidence import verify_file
from power_core.request import GenerationRequest, SamplingSpec
from power_core.target import ChatMessage
from power_core.testing import OracleDrafter, ScriptedTokenizer, next_table, plain_decode

Power = Callable[..., Result]


def document(result: Result) -> dict[str, Any]:
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_streams_the_text_of_plain_decoding(power: Power, toy: Any) -> None:
    """On standard output is the text and a newline, nothing else, whatever the strategy."""
    target = toy.target()
    ids = target.tokenizer.encode_chat([ChatMessage("user", "abc")])
    expected = plain_decode(target, GenerationRequest(ids, max_tokens=24)).text
    for spec in ("off", "auto", "random", "other"):
        result = power("generate", "abc", "--max-tokens", "24", "--spec", spec)
        assert (result.exit_code, result.stdout, result.stderr) == (0, expected + "\n", "")


def test_prompt_from_argument_file_and_standard_input(power: Power, tmp_path: Path) -> None:
    """Four ways to give one prompt give one answer."""
    (tmp_path / "prompt.txt").write_text("abc")
    limit = ("--max-tokens", "8", "--json")
    answers = [
        power("generate", "abc", *limit),
        power("generate", "-f", "prompt.txt", *limit),
        power("generate", "-", *limit, input="abc"),
        power("generate", *limit, input="abc"),
    ]
    assert len({tuple(document(answer)["prompt_token_ids"]) for answer in answers}) == 1
    assert len({document(answer)["text"] for answer in answers}) == 1


def test_prompt_that_is_no_text_is_refused(power: Power) -> None:
    """Bytes that are not UTF-8 are an error, not a guess."""
    result = power("generate", input=b"\xff\xfe")
    assert (result.exit_code, result.stderr) == (2, "power generate: standard input: not UTF-8 text (byte 0)\n")
    result = power("generate", os.fsdecode(b"a\xffb"))
    assert (result.exit_code, result.stderr) == (2, "power generate: PROMPT: not UTF-8 text (byte 1)\n")


def test_chat_is_the_default_where_the_model_has_a_template(power: Power, toy: Any) -> None:
    """--chat, --raw and --system decide what is encoded; a model without a template reads the prompt as it is."""

    def ids(*args: str) -> list[int]:
        found: list[int] = document(power("generate", "ab", "--max-tokens", "1", "--json", *args))["prompt_token_ids"]
        return found

    tokenizer = toy.target().tokenizer
    user = ChatMessage("user", "ab")
    assert ids() == ids("--chat") == tokenizer.encode_chat([user])
    assert ids("--system", "cd") == tokenizer.encode_chat([ChatMessage("system", "cd"), user])
    assert ids("--raw") == tokenizer.encode("ab")
    toy.target_options["tokenizer"] = ScriptedTokenizer([b"a", b"b", b"c", b"d"])
    assert ids() == [0, 1]
    for args in (("--chat",), ("--system", "cd")):
        assert "no chat template" in power("generate", "ab", *args).stderr


def test_json_document_verifies(power: Power, tmp_path: Path) -> None:
    """The document has the promised fields, and its bytes are evidence of text and ids."""
    result = power("generate", "abc", "--max-tokens", "9", "--logprobs", "2", "--json")
    found = document(result)
    assert set(found) == {
        "text", "token_ids", "prompt_token_ids", "finish_reason", "usage", "logprobs", "receipt"
    }  # fmt: skip
    assert found["usage"] == {"prompt_tokens": len(found["prompt_token_ids"]), "completion_tokens": 9}
    assert (len(found["token_ids"]), len(found["logprobs"]), found["finish_reason"]) == (9, 9, "length")
    file = tmp_path / "out.json"
    file.write_bytes(result.stdout_bytes)
    verified = verify_file(file)
    assert verified.covers_output
    assert verified.body.strategy == "random"
    assert verified.body.drafter


def test_log_probabilities_are_in_the_document_or_bound_by_the_receipt(power: Power, tmp_path: Path) -> None:
    """Where neither is asked for they would cost time and be nowhere."""
    with_them = ("generate", "abc", "--max-tokens", "3", "--logprobs", "2")
    assert power(*with_them, "--receipt", "r.json").exit_code == 0
    bound = verify_file(tmp_path / "r.json").body.output.logprobs_sha256
    assert bound is not None
    assert json.loads(power(*with_them, "--json").stdout)["receipt"]["body"]["output"]["logprobs_sha256"] == bound


def test_receipt_file_verifies(power: Power, tmp_path: Path) -> None:
    """--receipt writes the receipt alone; it binds the same output as that of plain decoding does."""
    for spec in ("off", "random"):
        assert power("generate", "abc", "--spec", spec, "--max-tokens", "9", "--receipt", f"{spec}.json").exit_code == 0
    plain, drafted = verify_file(tmp_path / "off.json"), verify_file(tmp_path / "random.json")
    assert plain.body.output == drafted.body.output
    assert plain.digest != drafted.digest
    said = power("receipt", "verify", "random.json")
    assert said.exit_code == 0
    assert said.stdout.startswith(f"verified: {drafted.digest}")


def test_settings_reach_the_sampler_and_the_receipt(power: Power, toy: Any, tmp_path: Path) -> None:
    """Flags, variables and the file all end in the request that is decoded."""
    flags = ["--temperature", "0.9", "--top-k", "20", "--seed", "7", "--logit-bias", "3=-100"]
    (tmp_path / "power.toml").write_text("repeat_penalty = 1.2\n")
    environ = {"POWER_PENALTY_WINDOW": "5"}
    found = document(power("generate", "abc", *flags, "--max-tokens", "12", "--json", env=environ))
    settings = found["receipt"]["body"]["request"]["sampling"]
    spec = SamplingSpec(temperature=0.9, top_k=20, seed=7, logit_bias={3: -100.0}, repeat_penalty=1.2, penalty_window=5)
    assert (settings["seed"], settings["penalty_window"], settings["logit_bias"]) == ("7", 5, [[3, -100]])
    request = GenerationRequest(found["prompt_token_ids"], spec, max_tokens=12)
    assert found["token_ids"] == list(plain_decode(toy.target(), request).token_ids)


def test_stops_and_limits(power: Power) -> None:
    """Stop texts, stop ids, zero tokens and no limit end the answer where plain decoding would."""
    whole = document(power("generate", "abc", "--max-tokens", "20", "--json"))
    text, ids = whole["text"], whole["token_ids"]
    stopped = document(power("generate", "abc", "--max-tokens", "20", "--stop", text[5:8], "--json"))
    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(text[5:8])], "stop")
    at_id = document(power("generate", "abc", "--max-tokens", "20", "--stop-id", ids[6], "--json"))
    assert (at_id["token_ids"], at_id["finish_reason"]) == (ids[: ids.index(ids[6]) + 1], "stop")
    nothing = document(power("generate", "abc", "--max-tokens", "0", "--json"))
    assert (nothing["text"], nothing["token_ids"], nothing["finish_reason"]) == ("", [], "length")
    unlimited = document(power("generate", "abc", "--max-tokens", "-1", "--ctx", "64", "--json"))
    prompt_and_answer = len(unlimited["prompt_token_ids"]) + len(unlimited["token_ids"])
    assert unlimited["finish_reason"] == "stop" or prompt_and_answer in (64, 65)


def test_trace_colours_by_origin_and_sums_up(power: Power, toy: Any) -> None:
    """Accepted tokens are green; legend and summary stand on standard error, beside the text."""
    target = toy.target()
    toy.strategies = {"oracle": OracleDrafter(lambda tokens: target.greedy(tokens), 105)}
    result = power("generate", "abc", "--max-tokens", "16", "--width-policy", "fixed", "--trace", color=True)
    assert "\x1b[32m" in result.stdout
    legend, summary = result.stderr.splitlines()
    assert [name for name in ("plain", "accepted", "correction", "bonus") if name not in legend] == []
    assert summary.startswith("16 tokens (")
    assert "(100%)" in summary
    assert "oracle, exactness bitwise" in summary


def test_stats_say_how_it_was_decoded(power: Power, toy: Any) -> None:
    """Policy, widths, guard and counters on standard error; the text is untouched."""
    target = toy.target()
    toy.strategies = {"oracle": OracleDrafter(lambda tokens: target.greedy(tokens), 105)}
    fixed = ("generate", "abc", "--max-tokens", "9", "--draft-max", "3", "--width-policy", "fixed")
    plain, counted = power(*fixed), power(*fixed, "--stats")
    assert plain.stdout == counted.stdout
    lines = counted.stderr.splitlines()
    assert lines[0].startswith("strategy: oracle (")
    assert lines[1] == "width policy: fixed (draft_max 3)"
    assert "4 x 2" in lines[2]
    assert lines[3] == "guard: none"
    assert "drafted 6, accepted 6, dropped 0, emitted 9" in lines[4]
    assert lines[5].startswith("costs of rows, in plain steps: 1 1")
    off = power("generate", "abc", "--max-tokens", "9", "--spec", "off", "--stats").stderr.splitlines()
    assert off[:2] == ["strategy: off", "width policy: none, plain decoding"]
    assert off[5] == "prompt tokens reused: 0 of 6"
    assert off[6].startswith("queue: 0 of 1024 waiting, 0 of 1 active; submitted 1, granted 1, released 1,")
    assert off[7].startswith("prompt cache: 0 entries, 0 of 536870912 bytes; requests 0,")
    assert len(off) == 8


def test_a_deadline_from_the_command_line(power: Power) -> None:
    """Time that is up before the model is open, and time enough."""
    late = power("generate", "abc", "--deadline", "0")
    assert (late.exit_code, late.stderr.count("\n")) == (2, 1)
    assert "deadline" in late.stderr
    assert power("generate", "abc", "--deadline", "600").stdout == power("generate", "abc").stdout
    assert ">= 0" in power("generate", "abc", "--deadline", "-1").stderr


def test_a_key_changes_no_answer(power: Power) -> None:
    """Within one process nothing was kept before; the counters say that it was asked for."""
    counted = power("generate", "abc", "--prompt-cache-key", "k", "--stats", env={"POWER_PROMPT_CACHE_DIR": "kept"})
    assert counted.stdout == power("generate", "abc").stdout
    assert "requests 1, hits 0, misses 1" in counted.stderr


def test_a_key_that_can_keep_nothing_is_refused(power: Power) -> None:
    """A process with one request has nothing to reuse unless a folder outlives it: the line names the key to set."""
    result = power("generate", "abc", "--prompt-cache-key", "k")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "prompt_cache_dir" in result.stderr
    assert "POWER_PROMPT_CACHE_DIR" in result.stderr
    none = {"POWER_PROMPT_CACHE_DIR": "kept", "POWER_PROMPT_CACHE_BYTES": "0"}
    assert "POWER_PROMPT_CACHE_BYTES is 0" in power("generate", "abc", "--prompt-cache-key", "k", env=none).stderr


def test_a_receipt_that_cannot_be_written_is_noticed_before_decoding(
    power: Power, toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after minutes of it; and what can be written is not touched by the check."""
    file = tmp_path / "receipt.json"
    real = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == file:
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    refused = power("generate", "abc", "--receipt", str(file))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "cannot be written: Permission denied" in refused.stderr
    monkeypatch.undo()
    assert not file.exists()


def test_a_chain_from_the_command_line(power: Power) -> None:
    """Both commands that take strategies take chains of them."""
    assert document(power("generate", "abc", "--spec", "random,other", "--json"))["receipt"]["body"]["strategy"] == (
        "random,other"
    )
    checked = power("verify", "abc", "--spec", "random,other", "--max-tokens", "12")
    assert (checked.exit_code, checked.stdout[:23]) == (0, "random,other: identical")
    assert "nobody" in power("verify", "abc", "--spec", "random,nobody").stderr


def interrupting(logits: Callable[[Sequence[int]], Any], at: int) -> Callable[[Sequence[int]], Any]:
    """The same logits, and Ctrl-C while the row after *at* tokens is computed."""
    sent = []

    def interrupted(tokens: Sequence[int]) -> Any:
        if len(tokens) == at and not sent:
            sent.append(at)
            signal.raise_signal(signal.SIGINT)
        return logits(tokens)

    return interrupted


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_prints_what_was_made_and_exits_130(power: Power, toy: Any, as_json: bool) -> None:
    """A cancel is no loss: text so far, a document that says so, and a receipt that verifies."""
    table = next_table([(i + 1) % 26 for i in range(25)] + [0] * 80)
    toy.target_options["logits"] = interrupting(table, at=12)
    handler = signal.getsignal(signal.SIGINT)
    result = power("generate", "abc", "--spec", "off", "--max-tokens", "50", *["--json"] * as_json)
    assert result.exit_code == 130
    text = json.loads(result.stdout)["text"] if as_json else result.stdout.removesuffix("\n")
    assert 0 < len(text) < 12
    assert "abcdefghijklmnop".startswith(text)
    if as_json:
        assert json.loads(result.stdout)["finish_reason"] == "cancelled"
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_failing_target_is_one_line(power: Power, toy: Any) -> None:
    """Text that was streamed stays, and the cause is one line on standard error."""

    def failing(tokens: Sequence[int]) -> Any:
        if len(tokens) > 10:
            raise RuntimeError("the device is gone")
        return np.zeros(105, np.float32)

    toy.target_options["logits"] = failing
    result = power("generate", "abc", "--max-tokens", "50")
    assert result.exit_code == 2
    assert "the device is gone" in result.stderr
    assert result.stderr.count("\n") == 1


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_line_of_a_long_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a prompt in several parts shows its progress; one that is done at once shows nothing."""
    monkeypatch.setattr("sys.stderr", Terminal())
    with PrefillProgress(enabled=True) as line:
        line.update(0, 100)
        line.update(100, 100)
        assert sys.stderr.getvalue() == ""
        line.update(40, 100)
        assert "40/100" in sys.stderr.getvalue()
        line.done()
        shown = sys.stderr.getvalue()
        line.update(60, 100)
        assert sys.stderr.getvalue() == shown


def test_no_progress_line_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs and pipes are left alone."""
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with PrefillProgress(enabled=True) as line:
        line.update(40, 100)
    assert sys.stderr.getvalue() == ""
