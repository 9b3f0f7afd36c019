"""The pytest plugin: the seed of the texts, and failures that read as the rule they break."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from power_conformance.failures import ConformanceFailure

__all__ = ["conformance_seed", "pytest_addoption", "pytest_runtest_makereport"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--conformance-seed``."""
    group = parser.getgroup("power-conformance")
    group.addoption("--conformance-seed", type=int, default=0, metavar="N", help="seed of the conformance texts")


@pytest.fixture
def conformance_seed(request: pytest.FixtureRequest) -> int:
    """The seed that conformance suites choose their texts by."""
    seed: int = request.config.getoption("--conformance-seed")
    return seed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show a broken rule as its message: the traceback would only show the kit."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, ConformanceFailure):
        error = call.excinfo.value
        cause = f"\n{call.excinfo.getrepr(chain=True)}" if error.__cause__ is not None else ""
        report.longrepr = f"{error}{cause}"
    return report
