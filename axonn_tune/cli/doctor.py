"""`axonn-tune doctor`: what this environment can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import SuggestingChoice, help_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from axonn_tune.launch.host import HostCheck, State
    from axonn_tune.specs.launch import Launch

_PATIENCE_S = 120.0


@click.command("doctor", short_help="Say what this environment can do, and what it lacks.")
@click.argument("launch", required=False, metavar="[LAUNCH.YAML]")
@click.option(
    "--format",
    "output_format",
    type=SuggestingChoice(("table", "json")),
    default="table",
    show_default=True,
    help="How to print the result.",
)
@help_option
def doctor_command(*, launch: str | None, output_format: str) -> None:
    """Look at software, GPUs, network, rights and variables, and say what works here and what does not.

    With a LAUNCH config also whether it could run here, and which variables differ from those that it
    sets; if something that it needs is missing, the exit code is 5. Nothing is changed.

    \b
    Examples:
      axonn-tune doctor
      axonn-tune doctor launch.yaml
    """
    import os

    from axonn_tune.errors import EnvironmentProblem
    from axonn_tune.launch import host
    from axonn_tune.report.doctor import doctor_json, doctor_text

    document = None if launch is None else _loaded(launch)
    devices = _devices()
    findings = [
        *host.host_checks(),
        *host.software_checks(),
        *_torch_findings(devices),
        *host.network_checks(),
        *host.starter_checks(os.environ),
        *_lab_findings(),
        *host.variable_checks(os.environ, document),
    ]
    needed = [] if document is None else _needed(document, devices)
    click.echo((doctor_json if output_format == "json" else doctor_text)([*findings, *needed]), nl=False)
    missing = [one for one in needed if one.state == "missing"]
    if missing:
        listed = "; ".join(f"{one.what} ({one.note or one.here})" for one in missing)
        raise EnvironmentProblem(f"{launch} cannot run here: {listed}")


def _loaded(path: str) -> Launch:
    from axonn_tune.specs.launch import Launch
    from axonn_tune.specs.loading import load_document

    return load_document(path, schema=Launch)


def _needed(launch: Launch, devices: dict[str, Any] | None) -> list[HostCheck]:
    """What a launch config needs of this host."""
    from axonn_tune.launch.host import HostCheck, launch_checks

    found = list(launch_checks(launch, gpus=len(devices.get("gpus", ())) if devices else 0))
    if devices is None:
        found.insert(0, HostCheck("launch config", "torch", "not here", "missing", "pip install 'axonn-tune[runtime]'"))
    elif "error" in devices:
        found.insert(
            0, HostCheck("launch config", "torch", devices["error"], "missing", "`import torch` does not work")
        )
    return found


def _devices() -> dict[str, Any] | None:
    """What torch finds, in a process of its own, as a driver may hang or crash; None without torch."""
    import importlib.util
    import json
    import subprocess
    import sys

    if importlib.util.find_spec("torch") is None:
        return None
    command = [sys.executable, "-m", "axonn_tune.runtime.devices"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
    except subprocess.TimeoutExpired:
        return {"gpus": [], "error": f"torch did not start within {_PATIENCE_S:g} s"}
    except subprocess.CalledProcessError as error:
        return {"gpus": [], "error": (error.stderr.strip().splitlines() or ["torch does not start"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _torch_findings(devices: dict[str, Any] | None) -> Iterator[HostCheck]:
    from axonn_tune.launch.host import HostCheck
    from axonn_tune.units import show_bytes

    area = "torch"
    if devices is None:
        return
    if "error" in devices:
        yield HostCheck(area, "torch", devices["error"], "missing", "nothing can run until `import torch` works")
        return
    built = (devices["cuda"] and f"CUDA {devices['cuda']}") or (devices["hip"] and f"ROCm {devices['hip']}")
    yield HostCheck(area, "built for", built or "CPUs alone", "ok")
    gloo: State = "ok" if devices["gloo"] else "missing"
    yield HostCheck(area, "backend gloo", "yes" if devices["gloo"] else "no", gloo, "for CPUs")
    nccl: State = "ok" if devices["nccl"] else "noted"
    yield HostCheck(area, "backend nccl", devices["nccl"] or "no", nccl, "for GPUs")
    for number, gpu in enumerate(devices["gpus"]):
        yield HostCheck(area, f"GPU {number}", f"{gpu['name']}, {show_bytes(float(gpu['memory_bytes']))}", "ok")
    if not devices["gpus"]:
        yield HostCheck(area, "GPUs", "none", "noted", "training here is over gloo, on CPUs")


def _lab_findings() -> Iterator[HostCheck]:
    """Whether an emulated cluster could come up."""
    import subprocess
    import sys

    from axonn_tune.lab.rights import UNPRIVILEGED
    from axonn_tune.launch.host import HostCheck

    command = [sys.executable, "-m", "axonn_tune.lab.rights"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    words = {0: "possible", UNPRIVILEGED: "possible, in a user namespace"}.get(done.returncode)
    why = (done.stderr.strip().splitlines() or [""])[-1]
    yield HostCheck("rights", "lab", words or "not possible", "ok" if words else "missing", "" if words else why)
