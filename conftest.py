"""Settings of all tests."""

import sys

import pytest
import structlog
from hypothesis import settings

settings.register_profile("power", deadline=None)  # on a busy machine a pause is no failure
settings.load_profile("power")


@pytest.fixture(autouse=True)
def _log_of_its_own() -> None:
    """Each test starts with structlog as it comes: a command line that an earlier one ran sets it for the process."""
    structlog.reset_defaults()


def pytest_unconfigure() -> None:
    """Close what llama-cpp-python opens when it is imported: the interpreter would complain of it as it ends."""
    opened = sys.modules.get("llama_cpp._utils")
    for name in ("outnull_file", "errnull_file"):
        stream = getattr(opened, name, None)
        if stream is not None:
            stream.close()
