"""What the runtime does on a GPU, predicted vs. measured: `python -m benchmarks.gpu_proof`, or `make gpu`.

Stages run one after the other, each in a process of its own and in less than ten minutes, and write one JSON document
each, row by row. A stage that is there already, and whole, is not measured again, so a run that was cut off goes on
where it was; `--again` measures everything anew. At the end all documents become one Markdown page. Without a GPU it
says so, and runs what tensors on CPUs can show, with the smallest models.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # so that no forked stage that compiles has to

from axonn_tune.files import write_text_atomically
from axonn_tune.specs.catalog import available, load_machine
from axonn_tune.units import show_bytes, show_seconds
from benchmarks.gpu_site import Site
from benchmarks.gpu_stages import STAGES, Stage, run_stage

LIMIT_S = 600.0
"""A stage that takes longer is ended, unless told otherwise."""
FOLDER, PAGE = Path("build/gpu-proof"), Path("docs/gpu.md")
PREFERRED = ("dgx-h100", "dgx-h200", "dgx-a100", "perlmutter", "dgx-b200", "dgx-b300", "dgx2-v100")
"""Profiles that come first where several have the GPU that is here."""


def site_here(machine: str | None, *, compiled: bool | None) -> Site:
    """The GPU here, else the CPU; SystemExit if no profile has this GPU and none is given."""
    found = _gpus()
    if not found:
        return Site("cpu", f"CPU, {platform.machine()}", machine or "localhost", compiled=bool(compiled))
    name = str(found[0]["name"])
    chosen = machine or machine_with(name)
    if chosen is None:
        raise SystemExit(f"no machine profile has a {name}: name one with --machine")
    return Site("cuda", name, chosen, compiled=compiled is not False)


def _gpus() -> list[dict[str, Any]]:
    """GPUs as torch finds them, in a process of its own: this one must not touch them before it forks."""
    if torch.version.cuda is None and torch.version.hip is None:
        return []
    command = [sys.executable, "-m", "axonn_tune.runtime.devices"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["gpus"]
    return found


def machine_with(gpu: str) -> str | None:
    """The profile whose accelerator shares most of its name with this GPU, its model number at least."""
    words = set(gpu.replace("-", " ").split())
    found: dict[str, int] = {}
    for name in (*PREFERRED, *available("machine")):
        model, *others = load_machine(name).document.accelerator.name.replace("-", " ").split()
        if model in words:
            found.setdefault(name, len(words & set(others)))
    return max(found, key=lambda name: found[name], default=None)


def measure(stage: Stage, site: Site, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run a stage in a process of its own and return its document."""
    path = folder / f"{stage.name}.json"
    process = multiprocessing.get_context("fork").Process(target=_write, args=(stage, site, folder, path))
    began_s = time.monotonic()
    process.start()
    try:
        process.join(min(limit_s, stage.limit_s))
    finally:
        if process.is_alive():
            # It leads a session of its own: with what it has started.
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
    document = _read(path)
    why = f"ended with code {process.exitcode} after {time.monotonic() - began_s:.0f} s"
    if document is None:
        document = {"stage": stage.name, "site": asdict(site), "torch": str(torch.__version__)}
        return {**document, "seconds": 0.0, "error": why, "rows": []}
    return document if process.exitcode == 0 else document | {"error": why}


def _write(stage: Stage, site: Site, folder: Path, path: Path) -> None:
    os.setsid()
    torch.set_num_threads(1 if not site.cuda else torch.get_num_threads())
    for document in run_stage(stage, site, folder / stage.name):
        write_text_atomically(path, json.dumps(document, indent=2) + "\n")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found


def run(
    stages: Iterable[Stage], site: Site, folder: Path, *, again: bool, limit_s: float = LIMIT_S
) -> Iterator[dict[str, Any]]:
    """The document of each stage, measured unless it is there already, whole and of this device."""
    for stage in stages:
        path = folder / f"{stage.name}.json"
        found = _read(path)
        if again or found is None or found["error"] or found["site"] != asdict(site):
            path.unlink(missing_ok=True)
            found = measure(stage, site, folder, limit_s)
        failed = [row["what"] for row in found["rows"] if row["ok"] is False]
        said = found["error"] or (f"failed: {'; '.join(failed)}" if failed else "passed")
        print(f"{stage.title} ({found['seconds']:.0f} s): {said}", file=sys.stderr, flush=True)
        yield found


def page(site: Site, documents: list[dict[str, Any]], skipped: list[Stage]) -> str:
    """The Markdown page."""
    titles = {stage.name: stage.title for stage in STAGES}
    lines = ["# The runtime on a GPU", "", *_heading(site, documents, skipped)]
    for document in documents:
        lines += ["", f"## {titles[document['stage']]}", "", *_table(document)]
    return "\n".join(lines) + "\n"


def _heading(site: Site, documents: list[dict[str, Any]], skipped: list[Stage]) -> Iterator[str]:
    yield "`make gpu` (`python -m benchmarks.gpu_proof`) writes this page. It measures the runtime on one GPU, stage by"
    yield "stage, and compares it with the prediction."
    yield ""
    versions = sorted({str(one["torch"]) for one in documents})
    where = f"torch {', '.join(versions)}, {site.name}; predicted with the profile `{site.machine}`"
    if site.cuda:
        yield f"Measured with {where}."
        measured = [one["stage"] for one in documents]
        if missing := [f"`{stage.name}`" for stage in STAGES if stage.name not in measured]:
            yield f"Not measured yet: {', '.join(missing)}."
        return
    yield f"**No GPU has run it yet.** These figures are from a host without one: {where}."
    yield "The stages ran on CPU tensors, with the smallest models, over Gloo instead of NCCL. They show that each"
    yield "stage works and that results are correct. Their times and memory say nothing about a GPU, and the profile"
    yield "is not one of this host."
    if skipped:
        yield f"Skipped, since they need a GPU: {', '.join(f'`{one.name}`' for one in skipped)}."


def _table(document: dict[str, Any]) -> Iterator[str]:
    if document["error"]:
        yield f"Failed: {document['error']}"
        yield ""
    if not document["rows"]:
        return
    yield "| what | predicted | measured | pass | note |"
    yield "|---|---:|---:|---|---|"
    for row in document["rows"]:
        cells = (_shown(row["predicted"], row["unit"]), _shown(row["measured"], row["unit"]))
        fine = {True: "yes", False: "**no**", None: ""}[row["ok"]]
        yield f"| {row['what']} | {cells[0]} | {cells[1]} | {fine} | {row['note'].replace('|', ' ')} |"


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "B":
        return show_bytes(value)
    if unit == "s":
        return show_seconds(value)
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:.1e}" if unit == "relative" else f"{value:g}"


def main() -> int:
    """Run what is missing and write the page; 1 if a stage or a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stage", choices=names, action="append", help="only this one; may be repeated")
    parser.add_argument("--again", action="store_true", help="measure even what is there already")
    parser.add_argument("--machine", help="profile to predict with; default: one with this GPU, localhost without")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, help="torch.compile; default: on GPUs")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds of a stage; default: {LIMIT_S:.0f}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"for the JSON documents; default: {FOLDER}")
    parser.add_argument("--page", type=Path, default=PAGE, help=f"the Markdown page; default: {PAGE}")
    chosen = parser.parse_args()
    site = site_here(chosen.machine, compiled=chosen.compiled)
    if not site.cuda:
        print("no GPU here: what follows is of CPU tensors and the smallest models", file=sys.stderr, flush=True)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    wanted = [stage for stage in STAGES if stage.name in (chosen.stage or names)]
    possible = [stage for stage in wanted if site.cuda or not stage.cuda_only]
    measured = list(run(possible, site, chosen.folder, again=chosen.again, limit_s=chosen.limit))
    documents = [found for stage in STAGES if (found := _read(chosen.folder / f"{stage.name}.json")) is not None]
    there = [one for one in documents if one["site"] == asdict(site)]
    skipped = [stage for stage in STAGES if not site.cuda and stage.cuda_only]
    write_text_atomically(chosen.page, page(site, there, skipped))
    wrong = any(one["error"] or any(row["ok"] is False for row in one["rows"]) for one in measured)
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
