"""Settings of all tests."""

import sys

from hypothesis import settings

settings.register_profile("power", deadline=None)  # on a busy machine a pause is no failure
settings.load_profile("power")


def pytest_unconfigure() -> None:
    """Close what llama-cpp-python opens when it is imported: the interpreter would complain of it as it ends."""
    opened = sys.modules.get("llama_cpp._utils")
    for name in ("outnull_file", "errnull_file"):
        stream = getattr(opened, name, None)
        if stream is not None:
            stream.close()
