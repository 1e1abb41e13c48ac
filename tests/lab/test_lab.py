"""A lab, from the command line and from Python: what it keeps apart, and that nothing is left of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from axonn_tune.errors import EnvironmentProblem, TrainingFailedError, UsageError
from axonn_tune.lab import namespaces
from axonn_tune.lab.holder import end, find, names
from axonn_tune.lab.lab import Lab
from tests.lab import labs
from tests.lab.labs import SMALL, needs_labs, run, wait_until

UP = ("--nodes", "2", "--ranks-per-node", "2", "--uplink", "100mbit")
NO_RIGHTS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
ORDINARY_USER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
# The interpreter may lie where an ordinary user cannot read; this right alone allows no namespace.
ONLY_READING = ("--bounding-set=-all,+dac_read_search", "--inh-caps=-all,+dac_read_search")
as_root = pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab of four ranks."""
    with Lab(SMALL) as found:
        yield found


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a lab that is ended after the test."""
    found = f"test-{os.getpid()}"
    yield found
    status = find(found)
    if status is not None:
        end(status)


@needs_labs
def test_functions_run_on_every_rank(lab: Lab) -> None:
    """Guards the interface for other programs: values by rank, a failed rank named, the next run fresh."""
    each = [(rank,) for rank in range(4)]
    assert lab.ranks.call(labs.whoami, each) == [(0, "0", "0"), (1, "1", "1"), (2, "2", "0"), (3, "3", "1")]
    codes = [one.code for one in lab.ranks.run(labs.leave, [(rank, 6) for rank in range(4)])]
    assert codes == [0, 6, 0, 0]
    with pytest.raises(TrainingFailedError, match="rank 1: ended by signal 9"):
        lab.ranks.call(labs.leave, [(rank, -9) for rank in range(4)])
    with pytest.raises(TrainingFailedError, match="rank 1: ended with exit code 6"):
        lab.ranks.call(labs.leave, [(rank, 6) for rank in range(4)])
    with pytest.raises(TrainingFailedError, match=r"rank 0: (.|\n)*pickle"):
        lab.ranks.call(labs.unsendable)
    assert [one.code for one in lab.ranks.execute(["sh", "-c", "exit $RANK"])] == [0, 1, 2, 3]


@needs_labs
def test_a_signal_between_runs_is_for_nobody(lab: Lab) -> None:
    """Guards SIGTERM just before ranks start or after the last has ended: the next run is as any other."""
    lab.ranks.signal(signal.SIGUSR2)
    assert len(lab.ranks.call(labs.whoami, [(rank,) for rank in range(4)])) == 4


@needs_labs
def test_ranks_reach_each_other_and_nothing_else(lab: Lab) -> None:
    """Guards the host: a rank has one interface and a route to its like only; exec ends as its command does."""
    code, out, err = run("exec", "--name", lab.name, "1.0", "--", "ip", "-o", "route")
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines()] == [["10.77.0.0/24", "dev", "axt0"]]
    assert run("exec", "--name", lab.name, "1.1", "--", "sh", "-c", "exit 1$RANK")[0] == 13
    code, out, _ = run("exec", "--name", lab.name, "switch", "--", "ip", "-o", "link")
    assert all(f": {kind}" in out for kind in ("lo", "axt-spine", "axt-leaf1", "axt-up0", "axt-port3"))
    code, _, err = run("exec", "--name", lab.name, "2.0", "--", "true")
    assert code == 2
    assert "0.0 to 1.1" in err


@needs_labs
def test_command_on_all_ranks(name: str) -> None:
    """Guards `lab exec all`: torchrun's variables, and one exit code for all."""
    with Lab(SMALL, name=name):
        code, out, _ = run("exec", "--name", name, "all", "--", "sh", "-c", "echo $MASTER_ADDR; exit $LOCAL_RANK")
    assert (code, out.split()) == (1, ["10.77.0.1"] * 4)


@needs_labs
def test_second_lab_or_run_of_a_name_is_refused(lab: Lab) -> None:
    """Guards measurements: two would share what one is believed to have alone."""
    lab.ranks.call(labs.whoami, [(rank,) for rank in range(4)])
    code, _, err = run("up", *UP, "--name", lab.name)
    assert code == 2
    assert f"lab down --name {lab.name}" in err
    with Lab.attached(lab.name) as other, pytest.raises(UsageError, match="running something already"):
        _ = other.ranks


@needs_labs
def test_killed_lab_leaves_nothing(name: str) -> None:
    """Guards the host after kill -9 of the lab: no process, namespace, interface or name, and the name is free."""
    before = labs.host_network()
    assert run("up", *UP, "--no-verify", "--name", name)[0] == 0
    sleeping = labs.start("exec", "--name", name, "1.1", "--", "sh", "-c", "sleep 1000 & sleep 1000")
    namespaces, status = labs.namespaces_of(name), find(name)
    assert status is not None
    assert wait_until(lambda: len(labs.processes_in(namespaces[-1:])) >= 2), "the command and what it started"
    assert labs.host_network() == before
    os.kill(status.holder, signal.SIGKILL)
    sleeping.communicate(timeout=labs.PATIENCE_S)
    assert sleeping.returncode == 128 + signal.SIGKILL
    assert wait_until(lambda: labs.processes_in(namespaces) == [], within_s=10)
    assert (find(name), name in names()) == (None, False)
    assert labs.host_network() == before
    assert run("up", *UP, "--no-verify", "--name", name)[0] == 0
    assert run("down", "--name", name)[0] == 0
    assert run("down", "--name", name)[0] == 2


@needs_labs
def test_lab_ends_with_the_program_that_made_it(name: str) -> None:
    """Guards `with Lab(...)`: killed with -9, the program takes lab and ranks along."""
    program = (
        "from axonn_tune.lab.lab import Lab; from tests.lab.labs import SMALL\n"
        f"with Lab(SMALL, name={name!r}) as lab: lab.ranks.execute(['sleep', '1000'])"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    assert wait_until(lambda: find(name) is not None)
    namespaces = labs.namespaces_of(name)
    # The holder and the forker in the switch's namespace, one process in each rank's.
    assert wait_until(lambda: all(labs.processes_in([one]) for one in namespaces[1:]))
    process.kill()
    process.wait()
    assert wait_until(lambda: labs.processes_in(namespaces) == [], within_s=10)
    assert find(name) is None


@needs_labs
@as_root
def test_ordinary_user_has_labs_too() -> None:
    """Guards the way without root: user namespaces; other users neither see such a lab nor can join it."""
    ordinary = (*ORDINARY_USER, *ONLY_READING, "--ambient-caps=-all,+dac_read_search", "env", "PYTHONPATH=.")
    name = f"user-{os.getpid()}"
    code, _, err = run("up", *UP, "--no-verify", "--name", name, before=ordinary)
    if code == 5 and "user namespaces" in err:
        pytest.skip(err)
    assert code == 0, err
    try:
        assert "unprivileged" in run("status", before=ordinary)[1]
        assert name not in run("status")[1]
        code, out, err = run("exec", "--name", name, "0.1", "--", "ip", "-br", "addr", before=ordinary)
        assert (code, "10.77.0.2/24" in out) == (0, True), err
    finally:
        assert run("down", "--name", name, before=ordinary)[0] == 0


@as_root
def test_refusal_says_what_to_do(name: str) -> None:
    """Guards the message of those who may not: exit code 5, root or user namespaces, and how."""
    code, _, err = run("up", *UP, "--name", name, before=NO_RIGHTS)
    assert code == 5
    assert "run it as root" in err
    assert "user.max_user_namespaces" in err


def test_missing_iproute2_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the message where the tools are missing."""
    monkeypatch.setattr(namespaces.shutil, "which", lambda name, path: None)
    with pytest.raises(EnvironmentProblem, match="apt-get install iproute2"):
        namespaces.require_tools()
