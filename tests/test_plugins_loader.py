"""Plugin loading, with real distributions on disk: isolated, checked, loud."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from power_core.errors import CapabilityError
from power_core.plugins import PluginSet, load_plugins

Install = Callable[..., None]
Load = Callable[..., PluginSet]

IMPORTS = "from power_core.hookspecs import ModelSource, hookimpl\n"
STRATEGY = IMPORTS + (
    "@hookimpl\n"
    "def power_register_strategies(register):\n"
    "    register({name!r}, lambda config: None, zero_weight=True, auto_rank={rank})\n"
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Writes a distribution with one plugin module: `install("power-echo", "echo", source)`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written = []

    def write(distribution: str, point: str, source: str, version: str = "1.0") -> None:
        module = distribution.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[power]\n{point} = {module}\n")
        written.append(module)

    yield write
    for module in written:
        sys.modules.pop(module, None)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads the plugins that were installed by the test, and no others."""

    def loaded(**environ: str) -> PluginSet:
        points = [
            point
            for point in entry_points(group="power")
            if point.dist is not None and (tmp_path / f"{point.value}.py").exists()
        ]
        return load_plugins(points, environ)

    return loaded


def test_installed_plugin_appears_with_its_owner(install: Install, load: Load) -> None:
    """What is registered knows the distribution and version it came from."""
    install("power-echo", "echo", STRATEGY.format(name="echo", rank=0), version="1.2")
    found = load()
    assert [(p.name, p.distribution, p.version) for p in found.loaded] == [("echo", "power-echo", "1.2")]
    assert found.registry.strategies.get("echo").owner == "power-echo 1.2"
    assert found.registry.auto_strategy() == "echo"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import power_nowhere\n", "ModuleNotFoundError: No module named 'power_nowhere'"),
        ("def broken(:\n", "SyntaxError"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        (STRATEGY.format(name="bad", rank=0).replace("_strategies", "_strategys"), "power_register_strategys"),
        (STRATEGY.format(name="bad", rank=0).replace("zero_weight", "zero_wait"), "did you mean 'zero_weight'?"),
        (STRATEGY.format(name="bad", rank=0).replace("lambda config: None", "3"), "cannot be registered by a int"),
        (STRATEGY.format(name="auto", rank=0), "reserved"),
        (STRATEGY.format(name="draft-model", rank=0), "reserved"),
        (STRATEGY.format(name="a,b", rank=0), "a list of names is a chain"),
        (STRATEGY.format(name="", rank=0), "not empty"),
        (STRATEGY.format(name="bad", rank=0).replace("(register)", "(registr)"), "registr"),
        (
            STRATEGY.format(name="bad", rank=0) + "    raise ValueError('late\\nand long')\n",
            "ValueError: late and long",
        ),
    ],
)
def test_broken_plugin_is_shown_and_breaks_nothing_else(install: Install, load: Load, source: str, cause: str) -> None:
    """It is listed with its cause on one line, leaves nothing behind, and its neighbours work."""
    install("power-bad", "bad", source)
    install("power-echo", "echo", STRATEGY.format(name="echo", rank=1))
    found = load()
    assert [item.name for item in found.loaded] == ["echo"]
    assert [(item.name, item.distribution) for item in found.failures] == [("bad", "power-bad")]
    assert cause in found.failures[0].cause
    assert "\n" not in found.failures[0].cause
    assert found.registry.strategies.names() == ["echo"]


def test_name_clash_names_both_owners(install: Install, load: Load) -> None:
    """Two plugins cannot offer one name: the second fails, whole, and is told who was first."""
    install("power-echo", "echo", STRATEGY.format(name="echo", rank=0), version="1.2")
    second = STRATEGY.format(name="other", rank=0) + "    register('echo', lambda config: None)\n"
    install("power-foo", "foo", second, version="0.3")
    found = load()
    (failure,) = found.failures
    assert failure.name == "foo"
    assert "power-foo 0.3" in failure.cause
    assert "already registered by power-echo 1.2" in failure.cause
    assert "POWER_BLOCK_PLUGINS=foo" in failure.cause
    assert found.registry.strategies.names() == ["echo"]  # 'other' went with the plugin it came from


def test_one_entry_point_name_for_two_distributions(install: Install, load: Load) -> None:
    """The second distribution under an entry-point name is a failure, not silently skipped."""
    install("power-echo", "echo", STRATEGY.format(name="echo", rank=0))
    install("power-echo-too", "echo", STRATEGY.format(name="echo-too", rank=0))
    found = load()
    assert [item.distribution for item in found.loaded] == ["power-echo"]
    assert "already taken" in found.failures[0].cause


def test_blocked_plugin_is_never_imported(install: Install, load: Load) -> None:
    """Blocking works before the import, so a plugin that ends the process can be kept out."""
    install("power-bad", "bad", "import os\nos._exit(9)\n")
    install("power-echo", "echo", STRATEGY.format(name="echo", rank=0))
    found = load(POWER_BLOCK_PLUGINS="bad, unknown")
    assert found.blocked == ["bad"]
    assert "power_bad" not in sys.modules
    assert found.registry.strategies.names() == ["echo"]


def test_core_commands_cannot_be_taken(install: Install, load: Load) -> None:
    """A plugin adds commands; it does not replace those of the core."""
    source = IMPORTS + "@hookimpl\ndef power_register_commands(register):\n    register({!r}, 'a:b', help='Say it.')\n"
    install("power-bad", "bad", source.format("generate"))
    install("power-echo", "echo", source.format("echo"))
    found = load()
    assert found.registry.commands.names() == ["echo"]
    assert "already registered by power-core" in found.failures[0].cause


def test_asking_for_what_is_not_provided_fails_closed(install: Install, load: Load) -> None:
    """An unknown strategy is an error with the nearest name; a reserved one says what is missing."""
    install("power-echo", "echo", STRATEGY.format(name="echo", rank=0))
    registry = load().registry
    with pytest.raises(CapabilityError, match="did you mean 'echo'") as unknown:
        registry.strategy("ecko")
    assert unknown.value.got == "ecko"
    with pytest.raises(CapabilityError, match="reserved: no plugin provides"):
        registry.strategy("draft-model")


def test_auto_is_the_best_ranked_and_off_without_any(install: Install, load: Load) -> None:
    """`auto` takes the lowest rank, ignores strategies that rank themselves never, and ends at `off`."""
    assert load().registry.auto_strategy() == "off"
    install("power-echo", "echo", STRATEGY.format(name="echo", rank=7))
    install("power-foo", "foo", STRATEGY.format(name="foo", rank=3))
    install("power-shy", "shy", STRATEGY.format(name="shy", rank=None))
    assert load().registry.auto_strategy() == "foo"
