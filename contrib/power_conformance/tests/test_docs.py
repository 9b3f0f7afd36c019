"""The page of rules is what the registry says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_page_lists_every_rule() -> None:
    """docs/conformance.md is what `make docs` would write."""
    spec = importlib.util.spec_from_file_location("generate_conformance", DOCS / "generate_conformance.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert (DOCS / "conformance.md").read_text(encoding="utf-8") == generator.page()
