"""`power new-plugin`: projects that pass at once, and the first mistake made in one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from contextlib import suppress
from pathlib import Path

import pytest
from power_conformance.new_plugin import write_project

from power_core.cli import cli
from power_core.cli.state import State
from power_core.errors import ConfigError
from power_core.plugins import LoadedPlugin, load_plugins

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", ["Mine", "1st", "a--b", "off", "auto", "class", "core", "a_b", "", "-x"])
def test_refuses_bad_names(name: str, tmp_path: Path) -> None:
    """A name that cannot be distribution, package and entry point at once is refused."""
    with pytest.raises(ConfigError, match="is no name for a plugin"):
        write_project(name, "drafter", tmp_path / "new")


def test_refuses_a_folder_with_files(tmp_path: Path) -> None:
    """Nothing is ever written over."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        write_project("mine", "drafter", tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("conformance", "target", "'conformance' is installed as power-conformance "),
        ("other-name", "target", "'other-name' is the plugin of power-others 2.0"),
        ("taken", "drafter", "'taken' is the strategy of power-other 1.0"),
        ("taken", "artifact", "'taken' is the strategy of power-other 1.0"),
    ],
)
def test_refuses_what_is_installed(
    name: str,
    kind: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One line and exit code 2, and nothing is written, unless another folder is named on purpose."""
    monkeypatch.chdir(tmp_path)
    plugins = load_plugins()
    plugins.registry.registrar("power_register_strategies", "other", "power-other 1.0")("taken", object)
    plugins.loaded.append(LoadedPlugin("other-name", "power-others", "2.0"))
    monkeypatch.setattr(State, "plugins", plugins)
    command = ["new-plugin", name, "--kind", kind]
    assert cli.main(command, standalone_mode=False) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert list(tmp_path.iterdir()) == []
    assert cli.main([*command, "--directory", "on-purpose"], standalone_mode=False) in (None, 0)
    assert (tmp_path / "on-purpose" / "pyproject.toml").is_file()


@pytest.mark.parametrize("kind", ["artifact", "drafter", "target"])
def test_leaves_no_placeholder(kind: str, tmp_path: Path) -> None:
    """Every file is finished, and Python can read it."""
    folder = write_project("my-own", kind, tmp_path / "new")
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert folder / "power_my_own" / "py.typed" in paths
    for path in paths:
        text = path.read_text()
        assert ".tmpl" not in path.name
        assert "${" not in text
        if path.suffix == ".py":
            compile(text, path, "exec")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    The Python of a new environment with a wheel of every package of this tree.

    Nothing else of Power is in it; other packages are the running environment's.
    """
    folder = tmp_path_factory.mktemp("wheels")
    sources = [ROOT, *sorted(path.parent for path in ROOT.glob("*/power_*/pyproject.toml"))]
    _call(Path(sys.executable), "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, *sources)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    [site] = (folder / "venv").glob("lib/python3*/site-packages")
    others = folder / "others"
    others.mkdir()
    for path in map(Path, (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))):
        for entry in path.iterdir():
            if not entry.name.startswith(("power", "__editable__", "_power")) and entry.suffix != ".pth":
                with suppress(FileExistsError):
                    (others / entry.name).symlink_to(entry)
    (site / "others.pth").write_text(f"{others}\n")
    _call(python, "-m", "pip", "install", "--quiet", "--no-deps", *folder.glob("*.whl"))
    return python


@pytest.mark.slow
def test_wheels_are_whole(python: Path) -> None:
    """Every package of the tree loads from its wheel: no module and no data file was forgotten."""
    listed = _call(python.with_name("power"), "plugins")
    assert "failed" not in listed.stdout
    for file in ROOT.glob("*/power_*/pyproject.toml"):
        assert tomllib.loads(file.read_text())["project"]["name"] in listed.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "file", "old", "new", "rule"),
    [
        ("drafter", "drafter.py", "text.pop(self._config.match)", "text.tokens.pop()", "D-RESTORE-02"),
        ("target", "session.py", "[:length]", "[: length + 1]", "T-ROLLBACK-01"),
        ("artifact", "contract.py", "successors >= len(successors)", "successors < 0", "A-PAYLOAD-02"),
    ],
)
def test_a_new_project_passes_and_a_broken_line_fails(
    python: Path, kind: str, file: str, old: str, new: str, rule: str, tmp_path: Path
) -> None:
    """A new project, installed: green; one line broken: red, with the rule that it breaks."""
    power, name = python.with_name("power"), f"my-{kind}"
    _call(power, "new-plugin", name, "--kind", kind, "--directory", tmp_path / "new")
    _call(Path(sys.executable), "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, tmp_path / "new")
    _call(python, "-m", "pip", "install", "--quiet", "--no-deps", *tmp_path.glob("*.whl"))
    green = _call(power, "conformance", name)
    assert green.returncode == 0, green.stdout + green.stderr
    installed = next(python.parents[1].rglob(f"power_my_{kind}/{file}"))
    text = installed.read_text()
    assert text.count(old) == 1
    installed.write_text(text.replace(old, new))
    red = _call(power, "conformance", name, check=False)
    assert red.returncode == 1
    assert rule in re.findall(r": ([A-Z]-[A-Z]+-[0-9]+): ", red.stdout)


def _call(program: Path, *args: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(program), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd="/", check=False)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done
