"""Configuration: which source wins, and what the error says when one is wrong."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs
import pytest
from attrs import frozen

from power_core.capabilities import Registration
from power_core.config import PowerConfig, load_config
from power_core.errors import ConfigError
from power_core.plugins import load_plugins
from power_core.request import SamplingSpec
from power_core.structuring import type_name
from power_core.testing import RandomDrafter, scripted_plugins


class Tone(StrEnum):
    HIGH = "high"
    LOW = "low"


@frozen
class EchoConfig:
    """Section of a plugin that does not exist."""

    max_match: int = 3
    weight: float = 1.0
    names: list[str] = attrs.field(factory=list)
    place: Path | None = None
    deep: bool = attrs.field(default=False)
    floor: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(0)))
    mode: str = attrs.field(default="a", validator=attrs.validators.in_(("a", "b")))
    share: float = attrs.field(default=0.0)
    tone: Tone = attrs.field(default=Tone.HIGH, converter=Tone)

    @share.validator
    def _is_share(self, _attribute: Any, value: float) -> None:
        if not 0 <= value <= 1:
            raise ConfigError(f"share is {value}", expected="a number from 0 to 1")


ECHO = Registration("echo", "echo", "power-echo 1.0", object(), config=EchoConfig)


def load(tmp_path: Path, toml: str = "", environ: dict[str, str] | None = None, **flags: Any) -> PowerConfig:
    (tmp_path / "power.toml").write_text(toml)
    return load_config(flags, environ=environ or {}, cwd=tmp_path)


def test_defaults_are_greedy_speculative_and_bounded(tmp_path: Path) -> None:
    """Without any source: `auto`, K = 8, S = 8, greedy, 256 tokens; sampling is that of a bare request."""
    config = load(tmp_path)
    assert (config.spec_mode, config.spec_draft_max, config.spec_mtp_recurrent_snapshots) == ("auto", 8, 8)
    assert (config.model, config.token_limit, config.parallel, config.allow_unverified) == (None, 256, 1, False)
    assert config.sampling() == SamplingSpec()


def test_flags_beat_variables_beat_the_file(tmp_path: Path) -> None:
    """Each source overrides those before it, key by key, and the object knows which one won."""
    toml = "spec_draft_max = 2\ntop_k = 2\nseed = 2\n"
    environ = {"POWER_SPEC_DRAFT_MAX": "3", "POWER_TOP_K": "3"}
    config = load(tmp_path, toml, environ, spec_draft_max=4, top_k=None)
    assert (config.spec_draft_max, config.top_k, config.seed) == (4, 3, 2)
    assert config.sources["spec_draft_max"] == "--draft-max"
    assert config.sources["top_k"] == "POWER_TOP_K"
    assert config.sources["seed"].endswith("power.toml: seed")


def test_file_is_the_named_one_else_the_folder_else_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--config, then POWER_CONFIG, then ./power.toml, then the user's own; only the first one counts."""
    folder, user = tmp_path / "folder", tmp_path / "home" / "power"
    for number, place in enumerate((folder, user, tmp_path), start=1):
        place.mkdir(parents=True, exist_ok=True)
        (place / "power.toml").write_text(f"top_k = {number}\n")
    monkeypatch.setattr("platformdirs.user_config_path", lambda name: user)
    variable = {"POWER_CONFIG": str(tmp_path / "power.toml")}
    empty = tmp_path / "empty"
    empty.mkdir()
    assert load_config(path=user / "power.toml", environ=variable, cwd=folder).top_k == 2
    assert load_config(environ=variable, cwd=folder).top_k == 3
    assert load_config(environ={}, cwd=folder).top_k == 1
    assert load_config(environ={}, cwd=empty).top_k == 2


@pytest.mark.parametrize(
    ("toml", "environ", "flags", "found"),
    [
        ("spec_draft_mx = 4", {}, {}, ["power.toml: spec_draft_mx", "did you mean 'spec_draft_max'?"]),
        ("sources = {}", {}, {}, ["unknown key 'sources'"]),
        ("top_k = '5'", {}, {}, ["power.toml: top_k", "'5'", "expected an integer"]),
        ("top_k = 1.5", {}, {}, ["top_k is 1.5", "expected an integer"]),
        ("top_k = true", {}, {}, ["top_k is True", "expected an integer"]),
        ("temperature = false", {}, {}, ["temperature is False", "expected a number"]),
        ("model = 5", {}, {}, ["model is 5", "expected a string"]),
        ("allow_unverified = 1", {}, {}, ["allow_unverified is 1", "expected true or false"]),
        ("ctx = 0", {}, {}, ["power.toml: ctx", "ctx is 0", "expected >= 1"]),
        ("plugin = 3", {}, {}, ["power.toml", "plugin is 3 (expected tables [plugin.NAME])"]),
        ("plugin.echo = 3", {}, {}, ["plugin.echo is 3", "expected a table [plugin.echo]"]),
        ("= 3", {}, {}, ["power.toml", "not TOML"]),
        pytest.param("a = " + "[" * 100_000, {}, {}, ["power.toml", "nested too deeply"], id="deep"),
        ("", {"POWER_TOP_K": "many"}, {}, ["POWER_TOP_K", "'many'", "expected an integer"]),
        ("", {"POWER_SPEC_DRAFT_MAXX": "3"}, {}, ["did you mean 'POWER_SPEC_DRAFT_MAX'?"]),
        (
            "",
            {"POWER_TEMPERATUR": "3"},
            {},
            ["variable POWER_TEMPERATUR (", "did you mean 'POWER_TEMPERATURE'?"],
        ),
        ("", {"POWER_ALLOW_UNVERIFIED": "maybe"}, {}, ["POWER_ALLOW_UNVERIFIED", "expected true or false"]),
        ("", {}, {"spec_draft_max": -1}, ["--draft-max", "spec_draft_max is -1", "expected >= 0"]),
    ],
)
def test_an_error_says_key_source_value_and_expectation(
    tmp_path: Path, toml: str, environ: dict[str, str], flags: dict[str, Any], found: list[str]
) -> None:
    """One line names where the value stands, what it is and what would do."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, toml, environ, **flags)
    assert [part for part in found if part not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "text"), [("temperature", "nan"), ("top_p", "2"), ("repeat_penalty", "0")])
def test_sampling_ranges_are_those_of_a_request(tmp_path: Path, key: str, text: str) -> None:
    """What a request would refuse is refused with the variable's name."""
    config = load(tmp_path, environ={f"POWER_{key.upper()}": text})
    with pytest.raises(ConfigError, match=f"POWER_{key.upper()}: {key} is"):
        config.sampling()


@pytest.mark.parametrize(("name", "key"), [
    ("POWER_SPEC", "POWER_SPEC_MODE"), ("POWER_ARTIFACT", "POWER_SPEC_ARTIFACT"),
    ("POWER_DRAFT_MAX", "POWER_SPEC_DRAFT_MAX"), ("POWER_WIDTH_POLICY", "POWER_SPEC_WIDTH_POLICY"),
])  # fmt: skip
def test_a_variable_that_is_named_after_a_flag_is_led_to_its_key(tmp_path: Path, name: str, key: str) -> None:
    """Whoever knows the flag tries it, and would not see that nothing came of it."""
    with pytest.raises(ConfigError, match=f"unknown variable {name} .*did you mean '{key}'"):
        load(tmp_path, environ={name: "off"})


@pytest.mark.parametrize(("text", "value"), [("TRUE", True), ("on", True), ("Yes", True), ("OFF", False), ("0", False)])
def test_truth_is_spelt_in_many_ways(tmp_path: Path, text: str, value: bool) -> None:
    """A variable is text, and other programs take these."""
    assert load(tmp_path, environ={"POWER_ALLOW_UNVERIFIED": text}).allow_unverified is value


def test_variables_of_others_are_left_alone(tmp_path: Path) -> None:
    """The prefix is a common word: what resembles no key is not ours, and an empty variable is switched off."""
    environ = {"POWER_SUPPLY": "on", "POWER_DEBUG": "1", "POWER_BLOCK_PLUGINS": "x", "POWER_TOP_K": ""}
    assert load(tmp_path, environ=environ) == PowerConfig()


def test_a_folder_that_is_gone_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell may stand in a folder that was removed; commands work there all the same."""
    monkeypatch.setattr("platformdirs.user_config_path", lambda name: tmp_path / name)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert load_config(environ={}) == PowerConfig()


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    """A file that was asked for is never silently skipped."""
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        load_config(path=tmp_path / "none.toml", environ={})


def test_a_file_that_does_not_end_is_not_read_to_its_end() -> None:
    """A device is no configuration, and memory has an end."""
    with pytest.raises(ConfigError, match=r"/dev/zero: more than 1,048,576 bytes"):
        load_config(path="/dev/zero", environ={})


def test_plugin_section_becomes_the_plugins_own_class(tmp_path: Path) -> None:
    """Values are of the declared types; a plugin without a section gets its defaults."""
    config = load(tmp_path, "[plugin.echo]\nmax_match = 5\nweight = 2\nnames = ['a']\n")
    assert config.plugin(ECHO) == EchoConfig(max_match=5, weight=2.0, names=["a"])
    assert PowerConfig().plugin(ECHO) == EchoConfig()


def test_a_section_inherits_keys_of_the_whole_and_may_replace_them() -> None:
    """What is set for every drafter reaches the plugin's own class, and the plugin's section wins."""

    @frozen
    class Cut:
        draft_margin: float = attrs.field(default=0.0, metadata={"inherits": "spec_draft_margin"})

    item = Registration("cut", "cut", "cut 1", Cut, Cut)
    assert PowerConfig().plugin(item) == Cut(0.0)
    assert PowerConfig(spec_draft_margin=0.5).plugin(item) == Cut(0.5)
    own = PowerConfig(spec_draft_margin=0.5, sections={"cut": {"draft_margin": 0.25}})
    assert own.plugin(item) == Cut(0.25)


def test_an_inherited_value_that_does_not_fit_is_named_by_its_own_key(tmp_path: Path) -> None:
    """The section is not at fault for what it did not set: the line leads to the key that did."""
    dflash = pytest.importorskip("power_dflash.config")
    item = Registration("dflash", "dflash", "power-dflash 1", object(), dflash.DFlashConfig)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "spec_draft_margin = 5\n[plugin.dflash]\nring = 64\n").plugin(item)
    assert "power.toml: spec_draft_margin: spec_draft_margin, which [plugin.dflash] inherits" in str(caught.value)
    with pytest.raises(ConfigError, match=r"power\.toml: \[plugin\.dflash\]: draft_margin is 5"):
        load(tmp_path, "[plugin.dflash]\ndraft_margin = 5\n").plugin(item)


@pytest.mark.parametrize(("value", "found"), [
    ("'~no-such-user/x'", "home directory"), ('"a\\u0000"', "expected a string without NUL"),
    ("'power.toml/x'", "not a folder"),
    ("'power.toml'", "not a folder"), (f"'{'x' * 300}'", "File name too long"), ("''", None), ("'new/folder'", None),
])  # fmt: skip
def test_a_folder_for_kept_prompts_can_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, found: str | None
) -> None:
    """What cannot be a folder is said with its key, and not when the first prompt is kept."""
    monkeypatch.chdir(tmp_path)
    if found is None:
        load(tmp_path, f"prompt_cache_dir = {value}\n")
        return
    with pytest.raises(ConfigError, match=r"power\.toml: prompt_cache_dir: prompt_cache_dir is") as caught:
        load(tmp_path, f"prompt_cache_dir = {value}\n")
    assert found in str(caught.value)


def test_a_byte_order_mark_is_no_key(tmp_path: Path) -> None:
    """Editors of one system write it."""
    (tmp_path / "power.toml").write_bytes(b"\xef\xbb\xbftop_k = 3\n")
    assert load_config(environ={}, cwd=tmp_path).top_k == 3


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("max_mach = 5", "did you mean 'max_match'?"),
        ("max_match = 'x'", "[plugin.echo] max_match: max_match is 'x' (expected an integer)"),
        ("names = [1]", "expected list[str]"),
        ("names = 'abc'", "expected list[str]"),  # not its letters
        ("names = {a = 1}", "expected list[str]"),
        ('names = ["a\\u0000"]', "expected list[str]"),
        ("place = '~no-such-user/x'", "expected a path"),
        ('place = "a\\u0000"', "expected a path"),
        ("place = 5", "expected a path"),
        ("floor = -1", "[plugin.echo]"),
        ("mode = 'c'", "[plugin.echo]: 'mode' must be in ('a', 'b') (got 'c')"),
        ("tone = 'c'", "[plugin.echo] tone: tone is 'c' (expected 'high' or 'low')"),
        ("tone = 1", "[plugin.echo] tone: tone is 1 (expected 'high' or 'low')"),
        ("share = 2", "[plugin.echo]: share is 2.0 (expected a number from 0 to 1)"),
    ],
)
def test_plugin_section_errors_name_section_and_key(tmp_path: Path, line: str, found: str) -> None:
    """Unknown keys, wrong types and the plugin's own validators all end in one line with the section."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"[plugin.echo]\n{line}\n").plugin(ECHO)
    assert found in str(caught.value)
    assert "power.toml" in str(caught.value)


def test_sections_nobody_owns_are_refused(tmp_path: Path) -> None:
    """A section is a registered target's or strategy's; where a plugin was blocked it may be its own."""
    config = load(tmp_path, "[plugin.echoo]\n")
    plugins = scripted_plugins(strategies={"echo": RandomDrafter(8)})
    with pytest.raises(ConfigError, match=r"\[plugin\.echoo\].*did you mean 'echo'"):
        config.check_plugins(plugins)
    plugins.blocked.append("other")
    config.check_plugins(plugins)


@pytest.mark.parametrize(("line", "found"), [
    ("rnig = 5", "did you mean 'ring'?"), ("ring = 'x'", "expected an integer"), ("executor = 'gpu'", "one of auto"),
    ("full_block = 1", "expected true or false"), ("draft_margin = 2", "a number from 0 to 1"),
])  # fmt: skip
def test_sections_of_installed_plugins_are_checked_before_they_are_used(tmp_path: Path, line: str, found: str) -> None:
    """A section is wrong when it is read, not on the day its strategy is first asked for."""
    pytest.importorskip("power_dflash")
    config = load(tmp_path, f"[plugin.dflash]\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        config.check_plugins(load_plugins())
    assert found in str(caught.value)
    assert "power.toml" in str(caught.value)
    assert "[plugin.dflash]" in str(caught.value)


def test_a_shared_key_for_another_scale_is_no_error_of_a_section(tmp_path: Path) -> None:
    """What a section inherits is its strategy's business once it is used: another may have a wider range."""
    pytest.importorskip("power_dflash")
    config = load(tmp_path, "spec_draft_margin = 5\n[plugin.dflash]\nring = 64\n")
    config.check_plugins(load_plugins())


@pytest.mark.parametrize("key", ["spec_draft_margin", "spec_draft_p_min", "deadline", "prompt_cache_ttl"])
@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
def test_bounds_are_numbers(tmp_path: Path, key: str, value: str) -> None:
    """No clock waits for infinity, and nothing compares with what is no number."""
    with pytest.raises(ConfigError, match=f"{key} is "):
        load(tmp_path, f"{key} = {value}\n")
    with pytest.raises(ConfigError, match=f"POWER_{key.upper()}: {key} is "):
        load(tmp_path, environ={f"POWER_{key.upper()}": value})


def test_choices_are_named_by_their_values() -> None:
    """An enumeration's name says nothing to the reader of a file."""

    class Choice(StrEnum):
        ON = "on"
        OFF = "off"

    assert (type_name(Choice), type_name(Path | None)) == ("'on' or 'off'", "a path")


def test_section_for_a_plugin_that_takes_none(tmp_path: Path) -> None:
    """A section with keys for something without configuration is an error, not a no-op."""
    bare = attrs.evolve(ECHO, config=None)
    assert PowerConfig().plugin(bare) is None
    with pytest.raises(ConfigError, match="takes no configuration"):
        load(tmp_path, "[plugin.echo]\nx = 1\n").plugin(bare)


@pytest.mark.parametrize("sections", [5, "echo", {"echo": 3}, {"echo": None}])
def test_sections_made_by_hand_are_tables(sections: Any) -> None:
    """As those of a file: the line says what stands there and what would do."""
    with pytest.raises(ConfigError, match=r"PowerConfig\(sections=\): plugin.* \(expected "):
        PowerConfig(sections=sections)


def test_minus_one_is_no_limit() -> None:
    """`max_tokens = -1` is how a file says what a request says with None."""
    assert PowerConfig(max_tokens=-1).token_limit is None
    assert PowerConfig(max_tokens=0).token_limit == 0


@pytest.mark.parametrize(("key", "value", "expected"), [
    ("spec_draft_max", "4", "an integer"), ("spec_draft_max", None, "an integer"), ("ctx", 2.5, "an integer"),
    ("parallel", True, "an integer"), ("model", 5, "a string"), ("prompt_cache_dir", 5, "a string"),
    ("spec_width_policy", None, "a string"), ("allow_unverified", 1, "true or false"), ("deadline", "1", "a number"),
])  # fmt: skip
def test_a_configuration_made_by_hand_is_checked_as_well(key: str, value: Any, expected: str) -> None:
    """Nothing waits until some backend trips over a value of another type."""
    with pytest.raises(ConfigError) as caught:
        PowerConfig(**{key: value})
    assert str(caught.value) == f"config: PowerConfig({key}=): {key} is {value!r} (expected {expected})"
