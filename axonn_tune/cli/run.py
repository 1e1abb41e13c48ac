"""`axonn-tune run`, `data`, `doctor` and `export`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import Count, format_option, help_option, terms_option, training_options

if TYPE_CHECKING:
    from axonn_tune.launch.host import HostCheck, State


@click.command("run", short_help="Execute a launch config.")
@click.argument("launch", metavar="LAUNCH.YAML")
@training_options
@click.option(
    "--dry-run",
    is_flag=True,
    help="Build one rank without memory or network; print its memory and collectives. Exit code 3 if it does not fit.",
)
@terms_option
@click.option("--trace", type=Count(), metavar="N", help="Write a trace of N steps after the warm-up.")
@click.option("--trace-all", is_flag=True, help="With --trace: of every rank, not only the first.")
@help_option
def run_command(*, launch: str, dry_run: bool, terms: bool, **options: Any) -> None:
    """Train as LAUNCH.YAML says, on this host; under torchrun or srun, as the rank this process is.

    One line a step goes to standard error, and each rank's metrics to a file in the run's folder. At the
    end a table compares predicted and measured times; summary.json holds it all. If the launch
    config names a checkpoint.directory, the run resumes from its newest checkpoint; if that is
    damaged, the error names the newest whole one, for --resume-from. SIGTERM and SIGUSR2 save and
    end with exit code 75.

    \b
    Examples:
      axonn-tune run launch.yaml --steps 10
      axonn-tune run launch.yaml --dry-run
      srun axonn-tune run launch.yaml
    """
    from axonn_tune.api.measurement import start, start_dry

    if options["trace_all"] and options["trace"] is None:
        raise click.UsageError("--trace-all is of a trace: give --trace N too.")
    if dry_run:
        code = start_dry(launch)
    else:
        started = start(launch, **options, warn=lambda words: click.echo(f"Warning: {words}", err=True))
        code = started.code
        if started.leads:
            show_summary(started.folder, all_terms=terms)
    if code:
        raise click.exceptions.Exit(code)


def show_summary(folder: Path, *, all_terms: bool) -> None:
    """The table of a run with measured steps."""
    from axonn_tune.report.run import summary_text
    from axonn_tune.specs.loading import load_document
    from axonn_tune.specs.results import SUMMARY_NAME, Summary

    path = folder / SUMMARY_NAME
    if path.exists():
        click.echo(f"\n{summary_text(load_document(path, schema=Summary), all_terms=all_terms)}", nl=False)
        click.echo(f"All of it, and every collective: {path}", err=True)


@click.command("data", short_help="Tokenize text files.")
@click.argument("paths", nargs=-1, metavar="[PATHS]...")
@click.option("-o", "--output", required=True, metavar="FILE", help="Token file to write.")
@click.option(
    "--tokenizer",
    default="bytes",
    show_default=True,
    metavar="bytes|FILE.json",
    help="Every byte its own id, or a Hugging Face tokenizer.json, which needs the library `tokenizers`.",
)
@click.option(
    "--include",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Files to take from folders; may be repeated.  [default: *.txt, *.md, *.rst, *.py]",
)
@click.option("--python-stdlib", is_flag=True, help="Add the source of Python's standard library.")
@click.option("--vocab", type=Count(), help="Fail if the tokenizer has more ids than this.")
@help_option
def data_command(
    *,
    paths: tuple[str, ...],
    output: str,
    tokenizer: str,
    patterns: tuple[str, ...],
    python_stdlib: bool,
    vocab: int | None,
) -> None:
    """Turn text files and folders into one token file, for `data: {path: FILE}` in a launch config.

    With the default tokenizer there are 257 ids: the bytes, and an end-of-text mark after each file.
    The file is written under another name and renamed when it is complete.

    \b
    Examples:
      axonn-tune data --python-stdlib -o tokens.bin
      axonn-tune data books/ --include *.txt -o tokens.bin
    """
    from axonn_tune.errors import UsageError
    from axonn_tune.report.output import progress
    from axonn_tune.runtime import tokens

    if not paths and not python_stdlib:
        raise UsageError("nothing to read: name files or folders, or give --python-stdlib")
    sources = [Path(path) for path in paths] + [Path(sysconfig.get_path("stdlib"))] * python_stdlib
    files = tokens.text_files(sources, patterns=patterns or tokens.TEXT_PATTERNS)
    chosen = tokens.tokenizer_named(tokenizer)
    if vocab is not None and chosen.vocab > vocab:
        raise UsageError(f"tokenizer {chosen.name!r} has {chosen.vocab:,} ids, --vocab allows {vocab:,}")
    total_bytes = sum(file.stat().st_size for file in files)
    read_bytes = 0
    with progress("reading text") as tell:

        def advance(size: int) -> None:
            nonlocal read_bytes
            read_bytes += size
            tell(read_bytes / max(total_bytes, 1), f"{read_bytes / 1e6:,.0f} of {total_bytes / 1e6:,.0f} MB")

        ids = tokens.encoded(files, chosen, on_read=advance)
        header = tokens.write_tokens(output, ids, vocab=chosen.vocab, tokenizer=chosen.name)
    click.echo(
        f"wrote {output}: {header.count:,} tokens from {total_bytes / 1e6:,.1f} MB of text, "
        f"vocabulary {header.vocab:,} ({header.tokenizer})"
    )


@click.command("export", short_help="Write a checkpoint's parameters as one safetensors file.")
@click.argument("checkpoint")
@click.option("-o", "--output", required=True, metavar="FILE", help="File to write, such as model.safetensors.")
@click.option(
    "--dtype",
    type=click.Choice(["saved", "fp64", "fp32", "bf16", "fp16"]),
    default="saved",
    show_default=True,
    help="Number format to write.",
)
@click.option(
    "--merge",
    metavar="LAUNCH.YAML",
    help="CHECKPOINT has adapters, which this launch config trained: add them to its checkpoint.base, and write that.",
)
@help_option
def export_command(*, checkpoint: str, output: str, dtype: str, merge: str | None) -> None:
    """Write the parameters of a CHECKPOINT as one safetensors file, whatever grid saved it.

    CHECKPOINT is the folder of one step, or that of a run's checkpoints, of which the newest is taken. The tensors have
    this program's names, and weights have the layout inputs × outputs.

    \b
    Example:
      axonn-tune export checkpoints -o model.safetensors --dtype bf16
      axonn-tune export adapters --merge launch.yaml -o merged.safetensors
    """
    from axonn_tune.errors import EnvironmentProblem, UsageError

    if importlib.util.find_spec("torch") is None:
        raise EnvironmentProblem("export needs torch: pip install '.[runtime]' in the checkout")
    from axonn_tune.runtime.checkpoint import TYPES, checkpoint_at, export, merged

    found = checkpoint_at(checkpoint)
    if merge is None:
        count = export(found, output, dtype=TYPES.get(dtype))
        click.echo(f"wrote {output}: {count:,} parameters of {found}")
        return
    from axonn_tune.specs.launch import Launch
    from axonn_tune.specs.loading import load_document

    launch = load_document(merge, schema=Launch)
    if launch.checkpoint.base is None:
        raise UsageError(f"--merge {merge}: it has no checkpoint.base, whose weights adapters are added to")
    base = checkpoint_at(launch.checkpoint.base)
    count = export(base, output, dtype=TYPES.get(dtype), change=merged(found, launch))
    click.echo(f"wrote {output}: {count:,} parameters of {base} with adapters of {found}")


@click.command("doctor", short_help="Check what can run on this host.")
@click.argument("launch", required=False, metavar="[LAUNCH.YAML]")
@format_option(("table", "json"))
@help_option
def doctor_command(*, launch: str | None, output_format: str) -> None:
    """Look at software, GPUs and profiles for them, network, rights and variables; say what works here.

    With a LAUNCH config also whether it could run here, and which variables differ from those that it
    sets; if something that it needs is missing, the exit code is 5. Nothing is changed.

    \b
    Examples:
      axonn-tune doctor
      axonn-tune doctor launch.yaml
    """
    from axonn_tune.errors import EnvironmentProblem
    from axonn_tune.lab.holder import UNPRIVILEGED
    from axonn_tune.launch import host
    from axonn_tune.launch.host import HostCheck
    from axonn_tune.report.inventory import doctor_json, doctor_text
    from axonn_tune.specs.launch import Launch
    from axonn_tune.specs.loading import load_document

    document = None if launch is None else load_document(launch, schema=Launch)
    devices = host.torch_devices()
    # A process of its own: trying changes its namespaces.
    trial = subprocess.run([sys.executable, "-m", "axonn_tune.lab.holder"], capture_output=True, text=True, check=False)
    can = {0: "possible", UNPRIVILEGED: "possible, in a user namespace"}.get(trial.returncode)
    why = (trial.stderr.strip().splitlines() or [""])[-1]
    findings = [
        *host.host_checks(),
        *host.software_checks(),
        *_torch_findings(devices),
        *host.profile_checks((devices or {}).get("gpus", ())),
        *host.network_checks(),
        *host.launcher_checks(os.environ),
        *host.folder_checks(),
        HostCheck("rights", "lab", can or "not possible", "ok" if can else "missing", "" if can else why),
        *host.variable_checks(os.environ, document),
    ]
    needed = [] if document is None else list(host.launch_checks(document, gpus=len((devices or {}).get("gpus", ()))))
    if document is not None and (devices is None or "error" in devices):
        note = "pip install '.[runtime]' in the checkout" if devices is None else "`import torch` does not work"
        here = "not here" if devices is None else devices["error"]
        needed.insert(0, HostCheck("launch config", "torch", here, "missing", note))
    click.echo((doctor_json if output_format == "json" else doctor_text)([*findings, *needed]), nl=False)
    missing = [one for one in needed if one.state == "missing"]
    if missing:
        listed = "; ".join(f"{one.what} ({one.note or one.here})" for one in missing)
        raise EnvironmentProblem(f"{launch} cannot run here: {listed}")


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
