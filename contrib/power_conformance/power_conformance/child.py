"""``python -m power_conformance.child MODULE:FUNCTION``: the shape identity of a target, made in this process."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

from power_conformance.fixtures import target_subject

__all__ = ["main"]


def main(path: str) -> None:
    """Print the identity of the target that the factory at *path* makes."""
    module, _, name = path.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        subject = target_subject(getattr(importlib.import_module(module), name)(Path(folder)))
        with subject.session() as session:
            print(session.profile.identity.digest)  # noqa: T201 - the answer to the parent process
        subject.model.close()


if __name__ == "__main__":
    main(sys.argv[1])
