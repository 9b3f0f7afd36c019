"""The host profile: set where it is asked for, refused where it cannot be, recorded as it is."""

import errno
import os
import subprocess
import sys

import pytest

from power_core.errors import ConfigError
from power_core.host import apply_host, host_facts, parse_cores, usable_cores


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1,,2", "0-", "99999", "9" * 5000])
def test_what_is_no_list_of_cores_is_refused(text):
    with pytest.raises(ConfigError, match="affinity is"):
        parse_cores(text)


def test_nothing_is_set_unless_asked_for():
    before = host_facts(None)
    apply_host(None, None)
    assert host_facts(None) == before
    assert before["usable_cores"] == usable_cores()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen on Linux")
def test_cores_and_priority_are_set_and_recorded():
    """In a process of its own, for this one keeps what it has."""
    core = min(os.sched_getaffinity(0))
    program = (
        "from power_core.host import apply_host, host_facts; import os\n"
        f"apply_host('{core}', min(os.getpriority(os.PRIO_PROCESS, 0) + 1, 19)); facts = host_facts(2)\n"
        "print(facts['affinity'], facts['usable_cores'], facts['threads'], facts['priority'] > 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"[{core}] 1 2 True"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen on Linux")
def test_cores_that_are_not_there_are_one_line():
    """It says what there is, and shows no error of Python's."""
    with pytest.raises(ConfigError) as caught:
        apply_host("4000", None)
    cores = f"cores of this machine, 0 to {os.cpu_count() - 1}"
    assert str(caught.value) == f"config: affinity 4000 cannot be set: Invalid argument (expected {cores})"


@pytest.mark.skipif(not hasattr(os, "setpriority"), reason="a priority is set on POSIX")
def test_a_priority_that_is_not_given_is_one_line(monkeypatch):
    """Who may not raise it is told what can be set."""

    def refused(*_args):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "setpriority", refused)
    with pytest.raises(
        ConfigError, match=r"^config: priority -5 cannot be set: Permission denied \(expected \d+ to 19,"
    ):
        apply_host(None, -5)
