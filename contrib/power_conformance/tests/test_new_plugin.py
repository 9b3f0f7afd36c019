"""`power new-plugin`: projects that pass at once, and the first mistake made in one."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest
from power_conformance.new_plugin import write_project

from power_core.errors import CapabilityError, ConfigError

ROOT = Path(__file__).resolve().parents[3]
CORE = (ROOT, ROOT / "contrib" / "power_conformance")


@pytest.mark.parametrize("name", ["Mine", "1st", "a--b", "off", "auto", "class", "a_b", "", "-x"])
def test_refuses_bad_names(name: str, tmp_path: Path) -> None:
    """A name that cannot be distribution, package and entry point at once is refused."""
    with pytest.raises(ConfigError, match="is no name for a plugin"):
        write_project(name, "drafter", tmp_path / "new")


def test_refuses_a_folder_with_files(tmp_path: Path) -> None:
    """Nothing is ever written over."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        write_project("mine", "drafter", tmp_path)


def test_refuses_what_the_core_does_not_have(tmp_path: Path) -> None:
    """An artifact contract has no place to be registered, so no project is written for one."""
    with pytest.raises(CapabilityError, match="no artifact contracts"):
        write_project("mine", "artifact", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["drafter", "target"])
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "file", "old", "new", "rule"),
    [
        ("drafter", "drafter.py", "text.pop(self._config.match)", "text.tokens.pop()", "D-RESTORE-02"),
        ("target", "session.py", "[:length]", "[: length + 1]", "T-ROLLBACK-01"),
    ],
)
def test_from_wheels_in_a_new_environment(kind: str, file: str, old: str, new: str, rule: str, tmp_path: Path) -> None:
    """Wheels of this tree, a new project, green; one line broken, red with the rule that it breaks."""
    python = _environment(tmp_path)
    _call(python.with_name("power"), "new-plugin", "my-own", "--kind", kind, "--directory", tmp_path / "new")
    _call(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", tmp_path / "new")
    green = _call(python.with_name("power"), "conformance", "my-own")
    assert green.returncode == 0, green.stdout + green.stderr
    installed = next(python.parents[1].rglob(f"power_my_own/{file}"))
    installed.write_text(installed.read_text().replace(old, new))
    red = _call(python.with_name("power"), "conformance", "my-own", check=False)
    assert red.returncode == 1
    assert rule in red.stdout


def _environment(folder: Path) -> Path:
    """The Python of a new environment with wheels of the core and the kit; other packages are this one's."""
    wheels = folder / "wheels"
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels]
    for source in CORE:
        _call(Path(sys.executable), *build, source)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    _call(python, "-m", "pip", "install", "--quiet", "hatchling", *wheels.glob("*.whl"))
    return python


def _call(program: Path, *args: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([program, *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done
