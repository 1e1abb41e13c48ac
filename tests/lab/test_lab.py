"""A lab, from the command line and from Python: what it keeps apart, how runs end, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from axonn_tune.cli.main import main
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


@pytest.fixture(scope="module")
def free() -> Iterator[Lab]:
    """The same, of which this process never uses the ranks."""
    with Lab(SMALL) as found:
        yield found


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a lab that is ended after the test."""
    found = f"test-{os.getpid()}"
    yield found
    if (left := find(found)) is not None:
        end(left)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A launch config of nano for four ranks."""
    path = tmp_path_factory.mktemp("launch") / "launch.yaml"
    words = "--gpus 4 --model nano --machine localhost --precision fp64 --batch 4 -q --x 2 --y 2 --z 1 --data 1"
    assert main([*words.split(), "--micro-batch", "4", "-o", str(path)]) == 0
    return path


@needs_labs
def test_functions_run_on_every_rank(lab: Lab) -> None:
    """Guards the interface for other programs: values by rank, a failed rank named, the next run fresh."""
    each = [(rank,) for rank in range(4)]
    assert lab.ranks.call(labs.whoami, each) == [(0, "0", "0"), (1, "1", "1"), (2, "2", "0"), (3, "3", "1")]
    ended = {one.rank: one.code for one in lab.ranks.run(labs.leave, [(rank, 6) for rank in range(4)])}
    assert ended == {0: 0, 1: 6, 2: 0, 3: 0}
    with pytest.raises(TrainingFailedError, match="rank 1: ended by signal 9"):
        lab.ranks.call(labs.leave, [(rank, -9) for rank in range(4)])
    with pytest.raises(TrainingFailedError, match=r"rank 0: (.|\n)*pickle"):
        lab.ranks.call(labs.unsendable)
    assert {one.rank: one.code for one in lab.ranks.execute(["sh", "-c", "exit $RANK"])} == {0: 0, 1: 1, 2: 2, 3: 3}
    # SIGTERM just before ranks start or after the last has ended is for nobody.
    lab.ranks.save_and_stop()
    assert len(lab.ranks.call(labs.whoami, each)) == 4


@needs_labs
def test_ranks_reach_each_other_and_nothing_else(lab: Lab) -> None:
    """Guards the host: a rank has one interface and a route to its like only; exec ends as its command does."""
    code, out, err = run("exec", "--name", lab.name, "1.0", "--", "ip", "-o", "route")
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines()] == [["10.77.0.0/24", "dev", "axt0"]]
    assert run("exec", "--name", lab.name, "1.1", "--", "sh", "-c", "exit 1$RANK")[0] == 13
    assert run("exec", "--name", lab.name, "1.1", "--", "no-such-program")[0] == 127
    code, out, _ = run("exec", "--name", lab.name, "switch", "--", "ip", "-o", "link")
    assert all(f": {kind}" in out for kind in ("lo", "axt-spine", "axt-leaf1", "axt-up0", "axt-port3"))
    code, _, err = run("exec", "--name", lab.name, "2.0", "--", "true")
    assert code == 2
    assert "0.0 to 1.1" in err


@needs_labs
def test_second_lab_or_run_of_a_name_is_refused(lab: Lab, name: str) -> None:
    """Guards measurements: two would share what one is believed to have alone. On all ranks a command has one code."""
    lab.ranks.call(labs.whoami, [(rank,) for rank in range(4)])
    code, _, err = run("up", *UP, "--name", lab.name)
    assert code == 2
    assert f"lab down --name {lab.name}" in err
    with Lab.attached(lab.name) as other, pytest.raises(UsageError, match="running something already"):
        _ = other.ranks
    with Lab(SMALL, name=name):
        code, out, _ = run("exec", "--name", name, "all", "--", "sh", "-c", "echo $MASTER_ADDR; exit $LOCAL_RANK")
    assert (code, out.split()) == (1, ["10.77.0.1"] * 4)


@needs_labs
def test_killed_lab_leaves_nothing(name: str) -> None:
    """Guards the host after kill -9 of the lab: no process, namespace, interface or name, and the name is free."""

    def host_network() -> str:
        commands = (["ip", "netns"], ["ip", "-br", "link"], ["ip", "route"])
        return "".join(subprocess.run(one, capture_output=True, text=True, check=True).stdout for one in commands)

    before = host_network()
    assert run("up", *UP, "--no-verify", "--name", name)[0] == 0
    sleeping = labs.start("exec", "--name", name, "1.1", "--", "sh", "-c", "sleep 1000 & sleep 1000")
    networks, found = labs.networks_of(name), find(name)
    assert found is not None
    assert len(set(networks)) == 5
    assert wait_until(lambda: len(labs.processes_in(networks[-1:])) >= 2), "the command and what it started"
    assert host_network() == before
    os.kill(found.holder, signal.SIGKILL)
    sleeping.communicate(timeout=labs.PATIENCE_S)
    assert sleeping.returncode == 128 + signal.SIGKILL
    assert wait_until(lambda: labs.processes_in(networks) == [], within_s=10)
    assert (find(name), name in names()) == (None, False)
    assert host_network() == before
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
    networks = labs.networks_of(name)
    # The holder and the forker in the switch's namespace, one process in each rank's.
    assert wait_until(lambda: all(labs.processes_in([one]) for one in networks[1:]))
    process.kill()
    process.wait()
    assert wait_until(lambda: labs.processes_in(networks) == [], within_s=10)
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
        for place in ("0.1", "all"):
            code, out, err = run("exec", "--name", name, place, "--", "ip", "-br", "addr", before=ordinary)
            assert (code, "10.77.0.2/24" in out) == (0, True), err
    finally:
        assert run("down", "--name", name, before=ordinary)[0] == 0


@as_root
def test_refusals_say_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the messages of those without the rights or the tools: exit code 5, and how to have them."""
    code, _, err = run("up", *UP, "--name", name, before=NO_RIGHTS)
    assert code == 5
    assert "run it as root" in err
    assert "user.max_user_namespaces" in err
    monkeypatch.setattr(namespaces.shutil, "which", lambda name, path: None)
    with pytest.raises(EnvironmentProblem, match="apt-get install iproute2"):
        namespaces.require_tools()


def losses(directory: Path) -> list[float]:
    """Loss by step, from rank 0's metrics."""
    path = directory / "metrics-rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    return [line["loss"] for line in lines if "step" in line]


@pytest.mark.nightly
@needs_labs
def test_training_equals_that_on_localhost(free: Lab, launch: Path, tmp_path: Path) -> None:
    """Guards `lab run`: four ranks in four namespaces train exactly as four on localhost; the grid has to fit."""
    code, _, err = run("run", str(launch), "--steps", "2", "--name", free.name, "--directory", str(tmp_path / "lab"))
    assert code == 0, err
    assert main(["run", str(launch), "--steps", "2", "--directory", str(tmp_path / "plain")]) == 0
    assert len(losses(tmp_path / "lab")) == 2
    assert losses(tmp_path / "lab") == losses(tmp_path / "plain")
    small = tmp_path / "launch.yaml"
    assert main(["--gpus", "2", "--model", "nano", "--machine", "localhost", "-q", "-o", str(small)]) == 0
    code, _, err = run("run", str(small), "--name", free.name)
    assert code == 2
    assert "has 2 ranks, but the lab has 2 nodes × 2 = 4" in err


@pytest.mark.nightly
@needs_labs
def test_ends_of_a_run(free: Lab, launch: Path, tmp_path: Path) -> None:
    """Guards exit codes and leftovers: a lost rank is named and ends all with 6; a killed command takes its ranks.

    SIGTERM has all ranks stop, and save where they can; Ctrl-C reaches ranks and command, and ends them with 130.
    """
    began = labs.start("run", str(launch), "--name", free.name, "--directory", str(tmp_path / "lost"))
    assert wait_until(lambda: len(losses(tmp_path / "lost")) >= 1)
    ranks = labs.networks_of(free.name)[1:]
    (second,) = labs.processes_in(ranks[1:2])
    os.kill(second, signal.SIGKILL)
    _, err = began.communicate(timeout=labs.PATIENCE_S)
    assert began.returncode == 6
    assert "Error: rank 1: its process ended without a message" in err
    assert labs.processes_in(ranks) == []
    stopped = "stopped by a signal after step"
    for number, code, words in (
        (signal.SIGTERM, 6, stopped),
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGKILL, -9, ""),
    ):
        folder = tmp_path / number.name
        ending = labs.start("run", str(launch), "--name", free.name, "--directory", str(folder))
        assert wait_until(lambda folder=folder: len(losses(folder)) >= 1)
        for one in labs.processes_in(ranks) if number == signal.SIGINT else ():
            os.kill(one, number)
        ending.send_signal(number)
        # Not by the end of its output, which ranks left behind would hold open.
        assert ending.wait(labs.PATIENCE_S) == code
        assert wait_until(lambda: labs.processes_in(ranks) == [], within_s=10)
        assert words in ending.communicate()[1]
    assert find(free.name) is not None, "the lab itself was not asked to end"
