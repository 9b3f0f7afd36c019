"""What all commands have in common: help, JSON, errors in one line, pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import Result

from power_core.capabilities import CORE_COMMANDS
from power_core.cli import cli
from power_core.cli.app import _COMMANDS
from power_core.cli.state import State
from power_core.errors import CapabilityError
from power_core.hookspecs import hookimpl
from power_core.testing import inline_plugin

Power = Callable[..., Result]

HELP = """
import sys
from power_core.cli import cli
code = cli.main(["--help"], standalone_mode=False)
assert not {"torch", "llama_cpp", "numpy"} & set(sys.modules), sorted(sys.modules)
sys.exit(code)
"""
MODELS = [sys.executable, "-c", "from power_core.cli import main; main()", "models", "--json"]
WARY = [MODELS[0], "-X", "dev", *MODELS[1:]]  # says which files were left open


class Commands:
    """A plugin with commands: one that works, one that is not there, one that is no command."""

    @hookimpl
    def power_register_commands(self, register: Any) -> None:
        register("echo", f"{__name__}:echo", help="Say it again.")
        register("gone", "power_nowhere:gone", help="Is not there.")
        register("wrong", "json:dumps", help="Is no command.")


@click.command()
@click.argument("word")
@click.pass_obj
def echo(state: State, word: str) -> None:
    if word == "bug":
        raise ZeroDivisionError("by\nzero")
    if word == "fail":
        raise CapabilityError("nothing\nprovides it", who="echo")
    click.echo(f"{word} {len(state.plugins.loaded)}")


@pytest.fixture
def power_echo(toy: Any, power: Power, monkeypatch: pytest.MonkeyPatch) -> Power:
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(echo=echo))
    toy.more = [inline_plugin("commands", Commands())]
    return power


def test_help_is_quick_and_light() -> None:
    """With every installed plugin loaded, help takes less than 300 ms of processor and imports nothing heavy."""
    times = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60)
        after = os.times()
        assert done.returncode == 0, done.stderr
        assert "generate" in done.stdout
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(times) < 0.3


def test_help_lines_are_those_of_the_commands() -> None:
    """The table that help is printed from says what the commands say, and names what is reserved."""
    assert set(_COMMANDS) == CORE_COMMANDS
    context = click.Context(cli, obj=State())
    for name, (_, line) in _COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert (command.help or "").strip().splitlines()[0] == line


def test_bare_power_is_help(power: Power) -> None:
    """Without a command the answer is the help, and no error."""
    result = power()
    assert (result.exit_code, result.stdout) == (0, power("--help").stdout)


@pytest.mark.parametrize(
    "args",
    [
        ("plugins",),
        ("models",),
        ("models", "add", "mine", "toy.scripted"),
        ("generate", "abc", "--max-tokens", "3"),
        ("verify", "abc", "--max-tokens", "3"),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_json_is_exactly_one_document(power: Power, args: tuple[str, ...]) -> None:
    """Nothing but the document is on standard output, and nothing at all on standard error."""
    result = power(*args, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert isinstance(json.loads(result.stdout), dict)
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--nonsense",), "No such option"),
        (("generate", "x", "--temp", "1"), "No such option '--temp'. Did you mean '--temperature'?"),
        (("generate", "-f", "-"), "File '-' does not exist; /dev/stdin is standard input."),
        (("receipt", "verify", "-"), "File '-' does not exist; /dev/stdin is standard input."),
        (
            ("generate", "x", "--model", "https://example.org/m.gguf"),
            "no such file (expected a model file); nothing is",
        ),
        (("models", "add", "x", "https://example.org/m.gguf"), "no such file (expected a model file); nothing is"),
        (("generat", "x"), "did you mean 'generate'?"),
        (("generate", "x", "--max-tokens", "many"), "'many' is not a valid integer"),
        (("generate", "x", "--temperature", "-1"), "--temperature: temperature is -1.0 (expected"),
        (("generate", "x", "--max-tokens", "-2"), "--max-tokens"),
        (("generate", "x", "--draft-max", "-1"), "--draft-max"),
        (("generate", "x", "--logit-bias", "5:1"), "not ID=V"),
        (("generate", "x", "--logit-bias", "99999=1"), "99999"),
        (("generate", "x", "--stop-id", "-1"), "-1"),
        (("generate", "x", "--logprobs", "-1", "--json"), "logprobs is -1"),
        (("generate", "x", "--spec", "randon"), "did you mean 'random'?"),
        (("generate", "x", "--spec", "draft-model"), "reserved"),
        (("generate", "x", "--model", "tox"), "no model and no file is named 'tox'"),
        (("generate", "x", "--model", "none.scripted"), "no such file"),
        (("generate", "x", "--model", os.devnull), "not a regular file"),
        (("generate", "x", "-f", "none.txt"), "does not exist"),
        (("generate", "x", "-f", "toy.scripted"), "give one of them"),
        (("generate", "x", "--raw", "--system", "s"), "--system needs a chat"),
        (("generate", "x", "--receipt", "nowhere/r.json"), "no folder nowhere"),
        (("generate", "x", "--json-schema", "toy.scripted"), "schema"),
        (("--config", "none.toml", "generate", "x"), "none.toml: cannot be read"),
        (("verify", "x", "--spec", "off"), "off"),
        (("models", "add", "toy", "toy.scripted"), "already registered by"),
        (("models", "add", "a/b", "toy.scripted"), "is no model name"),
        (("models", "add", "mine", "none.gguf"), "no such file"),
        (("models", "remove", "toy"), "model 'toy' is shipped by power_core.testing"),
        (("models", "remove", "none"), "no model 'none' was added, nor any other\n"),
        (("artifacts", "remove", "none"), "no artifact 'none' was admitted, nor any other\n"),
        (("generate",), "no prompt: standard input is empty"),
        (("verify",), "no prompt: standard input is empty"),
        (("generate", "x", "--logprobs", "2"), "--logprobs: only the document of --json"),
        (("receipt", "verify", "none.json"), "does not exist"),
        (("receipt",), "power receipt: no command was named; see `power receipt --help`"),
        (("receipt", "verify", "/dev/zero"), "is a device, not a file"),
        (("generate", "-f", "/dev/zero"), "is a device, not a file"),
        (("simulate", "/dev/zero", "--cost-curve", "/dev/zero"), "is a device, not a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_2(power: Power, args: tuple[str, ...], said: str) -> None:
    """Whatever is wrong, the answer is one line on standard error and exit code 2."""
    result = power(*args)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    "args",
    [
        ("plugins",),
        ("models",),
        ("models", "remove", "x"),
        ("artifacts", "list"),
        ("receipt", "verify", "toy.scripted"),
        ("doctor",),
        ("generate", "abc"),
        ("echo", "hi"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("none.toml", None, "none.toml: cannot be read: no such file"),
        ("bad.toml", "= 3", "bad.toml: not toml"),
        ("bad.toml", "top_kk = 3", "did you mean 'top_k'?"),
        ("bad.toml", "top_k = 'x'", "expected an integer"),
        (".", None, "a directory"),
    ],
)
def test_a_named_configuration_that_cannot_be_used_is_refused_by_every_command(
    power_echo: Power, args: tuple[str, ...], file: str, content: str | None, said: str
) -> None:
    """Also by those that need none: who names a file wants it read, with the flag as with the variable."""
    if content is not None:
        Path(file).write_text(content)
    for result in (power_echo("--config", file, *args), power_echo(*args, env={"POWER_CONFIG": file})):
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert said in result.stderr.lower()


def test_help_needs_no_configuration(power: Power) -> None:
    """Whatever a variable names, every command can still be asked what it does."""
    for args in ((), ("--help",), ("plugins", "--help"), ("models", "add", "-h")):
        assert power(*args, env={"POWER_CONFIG": "none.toml"}).exit_code == 0


def test_input_without_an_end_is_not_read_to_it(power: Power, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is bounded, whoever writes it."""
    monkeypatch.setattr("power_core.cli.prompts._MOST", 8)
    Path("long.txt").write_text("123456789")
    for result in (power("generate", "-f", "long.txt"), power("generate", "-", input="123456789")):
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert "more than 8 bytes" in result.stderr
    assert power("generate", "-", "--max-tokens", "1", input="12345678").exit_code == 0


def test_debug_raises_instead(power: Power, monkeypatch: pytest.MonkeyPatch) -> None:
    """With POWER_DEBUG=1 an error keeps its traceback."""
    monkeypatch.setenv("POWER_DEBUG", "1")
    assert isinstance(power("generate", "x", "--model", "tox").exception, CapabilityError)


def test_plugins_add_commands(power_echo: Power) -> None:
    """They are in the help with the plugin's name, run with the shared state, and fail in one line."""
    assert "Say it again. [commands]" in power_echo("--help").stdout
    assert power_echo("echo", "hi").stdout == "hi 2\n"
    failed = power_echo("echo", "fail")
    assert (failed.exit_code, failed.stderr) == (2, "power: echo: nothing provides it\n")


def test_a_terminal_is_shown_names_and_does_not_obey_them(power: Power) -> None:
    """Control characters and halves of characters in a name come out as their escapes."""
    stderr = power("generate", "x", "--model", "a\x1b[2J\udcff.gguf").stderr
    assert "a\\x1b[2J\\udcff.gguf: no such file" in stderr


def test_a_bug_is_one_line_that_says_how_to_see_more(power_echo: Power, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a plugin's command raises, the exit code tells it from bad input, and POWER_DEBUG=1 shows where."""
    failed = power_echo("echo", "bug")
    assert (failed.exit_code, failed.stderr.count("\n"), failed.stdout) == (70, 1, "")
    assert "ZeroDivisionError: by zero; POWER_DEBUG=1" in failed.stderr
    monkeypatch.setenv("POWER_DEBUG", "1")
    assert isinstance(power_echo("echo", "bug").exception, ZeroDivisionError)


@pytest.mark.parametrize("name", ["gone", "wrong"])
def test_a_command_that_cannot_be_imported_is_its_plugins_fault(power_echo: Power, name: str) -> None:
    """One line names plugin and cause; the other commands still work."""
    failed = power_echo(name)
    assert failed.exit_code == 2
    assert failed.stderr.startswith(f"power: power_core.testing unknown: its command '{name}' cannot be imported")
    assert power_echo("plugins").exit_code == 0


def test_closed_pipe_is_quiet() -> None:
    """`power ... | head` ends without a traceback."""
    with subprocess.Popen(MODELS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode != 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line() -> None:
    """Output that cannot be written is an error, and nothing is said twice when the process ends."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(WARY, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "power: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_error_that_cannot_be_written_keeps_its_exit_code() -> None:
    """Nobody reads the line, but a script sees bad input all the same, and no bug."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*MODELS[:-2], "nonsense"], stdout=subprocess.PIPE, stderr=full, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_closed_streams_are_empty_ones(closed: int) -> None:
    """A caller may close any of the three streams; the exit code stays what it would have been."""
    shell = f'exec "$0" "$@" {closed}>&-'
    for arguments, code in ((WARY, 0), ([*WARY[:-2], "nonsense"], 2)):
        done = subprocess.run(["sh", "-c", shell, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == code
        assert "ResourceWarning" not in done.stderr
