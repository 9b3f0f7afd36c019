"""
``python -m power_conformance.contract_child FOLDER``: judges files in a process without native libraries.

The folder holds `subject.pickle`, a contract and a target's stand-in, and `files.json`, the paths. For each file a
line of JSON is printed before it is judged and one after it; a process that runs out of time or memory dies in between.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from power_conformance.judging import judge

__all__ = ["FILES", "MEMORY", "NATIVE", "SECONDS", "SUBJECT", "main"]

SUBJECT = "subject.pickle"
FILES = "files.json"
SECONDS = 5  # of processor time for one file; a real header takes milliseconds
NATIVE = frozenset(
    {
        "ctransformers",
        "exllamav2",
        "jax",
        "llama_cpp",
        "mlx",
        "onnxruntime",
        "tensorflow",
        "torch",
        "transformers",
        "vllm",
    }
)
MEMORY = 4 << 30  # bytes of address space


class _Refusing(MetaPathFinder):
    """Lets nobody import a native library, and remembers who tried."""

    def __init__(self) -> None:
        self.tried: list[str] = []

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the protocol's
        target: ModuleType | None = None,  # noqa: ARG002 - the protocol's
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in NATIVE:
            self.tried.append(fullname)
            raise ImportError(f"{fullname} cannot be imported here")
        return None


def main(folder: Path) -> None:
    """Judge the files that *folder* names."""
    import resource  # POSIX alone has them; the parent process asks first
    import signal

    refusing = _Refusing()
    sys.meta_path.insert(0, refusing)
    contract, target = pickle.loads((folder / SUBJECT).read_bytes())  # noqa: S301 - the parent process wrote it
    libraries: list[str] = []
    sys.addaudithook(
        lambda event, args: libraries.append(str(args[0])) if event == "ctypes.dlopen" and args[0] else None
    )
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for path in json.loads((folder / FILES).read_text()):
        print(json.dumps({"begins": path}), flush=True)  # noqa: T201 - read by the parent process
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        verdict = judge(contract, Path(path), target)
        signal.setitimer(signal.ITIMER_PROF, 0)
        crash = None if verdict.crash is None else f"{type(verdict.crash).__name__}: {verdict.crash}"
        answer = {"passed": verdict.facts is not None, "crash": crash, "tried": refusing.tried + libraries}
        print(json.dumps(answer), flush=True)  # noqa: T201 - read by the parent process
        refusing.tried, libraries[:] = [], []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
