"""The names of `import power_core`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import power_core


@pytest.mark.parametrize("name", power_core.__all__)
def test_every_public_name_is_there(name: str) -> None:
    """What `__all__` lists can be imported."""
    assert getattr(power_core, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    """The lazy facade behaves like a module."""
    with pytest.raises(AttributeError, match="no attribute 'Runtme'"):
        _ = power_core.Runtme


def test_importing_the_package_is_light() -> None:
    """`import power_core` brings no numpy, no torch and no native library."""
    code = "import sys, power_core; print({'numpy', 'torch', 'llama_cpp'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
