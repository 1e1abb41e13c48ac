"""Scripts for other frameworks: the command of a priced configuration in bash around torchrun, or for sbatch.

Each framework's description (`axonn_tune.frameworks`) writes its arguments; this module writes the script around them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from axonn_tune.cost.pipeline import parts_of
from axonn_tune.cost.price import Detail
from axonn_tune.errors import UsageError, suggest
from axonn_tune.files import require_own, write_text_atomically
from axonn_tune.frameworks import find_framework, step_on
from axonn_tune.frameworks.command import OWN_SCRIPT, TRIAL_STEPS
from axonn_tune.frameworks.description import Argument, Command, Run
from axonn_tune.grid import RANK_AXES
from axonn_tune.launch.config import predict, run_name, variable_lines
from axonn_tune.launch.scripts import FOLDERS, SUFFIXES, Job, ScriptKind, job_script, per_task, write_script
from axonn_tune.specs.lengths import Lengths
from axonn_tune.specs.machine import EnvironmentVariable, Machine
from axonn_tune.units import counted
from axonn_tune.vocabulary import VERSION

_ALLOCATOR = "PYTORCH_HIP_ALLOC_CONF"
_OF_ROCM = {
    "PYTORCH_ALLOC_CONF": (_ALLOCATOR, ""),
    "PYTORCH_CUDA_ALLOC_CONF": (_ALLOCATOR, ""),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("GPU_MAX_HW_QUEUES", "2"),
}
"""What ROCm has in place of CUDA's variables, and its value where that is another: AMD's own scripts for Megatron-LM
(ROCm/Megatron-LM, examples) start with two queues."""


@dataclass(frozen=True)
class LaunchFiles:
    """Launch files of a configuration: a script, and text of config files for the same folder."""

    script: Path
    text: str
    files: dict[Path, str]

    def write(self, *, force: bool = True) -> tuple[Path, ...]:
        """Write all of it, config files first; EnvironmentProblem if the disk is full. The paths, script first.

        Without `force` errors as `require_own`, before anything is written.
        """
        if not force:
            require_own(self.script)
            for path in self.files:
                require_own(path, read_by=self.script)
        for path, text in self.files.items():
            write_text_atomically(path, text)
        write_script(self.script, self.text)
        return (self.script, *self.files)


def command_of(priced: Detail, *, form: str = "") -> Command:
    """The command of a priced layout in its framework; `form`: for another front end.

    UsageError for what the framework cannot express, a form it does not have, and a framework without a command.
    """
    job, framework = priced.job, priced.job.framework
    if framework.launch is None:
        raise UsageError(f"{framework.title} is priced only: there is no command for it")
    step = step_on(framework, job.machine, job.workload.precision)
    if job.model.has_experts:
        step = replace(step, dispatcher=job.dispatcher_on(priced.grid))
    run = Run(
        framework=find_framework(framework.name),
        model=job.model,
        machine=job.machine,
        workload=job.workload,
        grid=priced.grid,
        micro_batch=priced.micro_batch,
        accumulation=priced.accumulation,
        recompute=priced.recompute,
        kept_layers=int(priced.memory.kept_layers),
        chunks=priced.chunks,
        parts=parts_of(job, priced.grid.pipeline, priced.chunks, priced.parts),
        mtp_part=priced.mtp_part,
        step=step,
        recompute_layers=priced.recompute_layers,
    )
    if why := framework.cannot_recompute(priced.recompute, priced.recompute_layers):
        raise UsageError(why)
    command = framework.launch(run)
    if job.workload.lengths is not None:
        command = _batching(command, job.workload.lengths)
    if form and form not in command.forms:
        has = ", ".join(["torchrun", "slurm", *command.forms])
        raise UsageError(
            f"--emit {form} is not for this run of {framework.name}{suggest(form, command.forms)}; it has {has}"
        )
    return command.forms[form] if form else command


_BATCHES = {"packed": "packs", "padding-free": "flattened batches", "padded": "padded batches"}


def _batching(command: Command, lengths: Lengths) -> Command:
    """The command of one's own script, or of what fine-tunes, which make the batches; UsageError for a program of
    sequences of one length."""
    if command.fine_tunes:
        return command
    if OWN_SCRIPT not in command.checks:
        raise UsageError(
            f"--lengths {lengths.data}: {command.program[-1]} trains on sequences of one length; give the layout to "
            "your fine-tuning script"
        )
    said = f"It makes {_BATCHES[lengths.packing]} of its data set ({lengths.words})."
    forms = {name: _batching(one, lengths) for name, one in command.forms.items()}
    return replace(command, needs=(*command.needs, said), forms=forms)


def emission(
    priced: Detail,
    path: str | Path,
    *,
    call: str,
    kind: ScriptKind = "torchrun",
    form: str = "",
) -> LaunchFiles:
    """Launch files of a priced layout: `path` with the suffix of the script, and config files in its folder.

    call: the command line, for provenance. Errors as `command_of` and `job_script`, and UsageError if `path` is no
    file in a folder.
    """
    target = Path(path).with_suffix(SUFFIXES[kind]) if Path(path).name else Path(path)
    if not target.name or target.absolute().parts[1:2] in (("dev",), ("proc",)) or target.is_dir():
        raise UsageError(f"-o {str(path)!r}: a script is a file of its own, such as run.sh")
    command, machine, framework = command_of(priced, form=form), priced.job.machine, priced.job.framework
    names, grid = {suffix: f"{target.stem}{suffix}" for suffix in command.files}, priced.grid
    environment = tuple(_environment(command, machine))
    own = {one.name for one in environment}
    others = [variable for variable in machine.launcher.environment if variable.name not in own]
    site = variable_lines("From the machine profile.", others)
    job = Job(
        name=run_name(priced.job.model.name, grid.world),
        about=tuple(_about(priced, command, call=call)),
        predicted=predict(priced),
        factors={framework.called(axis): grid.axis_size(axis) for axis in framework.axes if axis in RANK_AXES},
        inner=next((framework.called(axis) for axis in grid.order if grid.axis_size(axis) > 1), None),
        fixed="" if framework.permuted else framework.title,
        per_node=min(machine.launcher.ranks_per_node, grid.world),
        settings=tuple(_settings(command, kind, names)),
        program=_program(command, names),
        variables=(*variable_lines(f"What {command.release} wants.", environment), *site),
        per_task=per_task(machine.launcher.environment),
        steps=TRIAL_STEPS,
        checks=tuple(_checks(command, names)),
        accelerate=tuple(_words(one, names) for one in command.accelerate),
    )
    text = job_script(kind, job, machine)
    return LaunchFiles(target, text, {target.with_name(names[suffix]): body for suffix, body in command.files.items()})


def _environment(command: Command, machine: Machine) -> Iterator[EnvironmentVariable]:
    """Its variables by the names that the machine's software has."""
    for one in command.environment:
        name, value = _OF_ROCM.get(one.name, ("", "")) if machine.library.name == "RCCL" else ("", "")
        if name:
            yield one.model_copy(update={"name": name, "value": value or one.value})
        if not name:
            yield one
        elif one.name in command.asserted:
            yield one.model_copy(update={"why": "the program's own check asks for it by CUDA's name on ROCm, too"})


def _checks(command: Command, names: dict[str, str]) -> Iterator[str]:
    """Bash that stops where something is not there, before any rank starts."""
    for name in names.values():
        yield f'[[ -f $folder/{shlex.quote(name)} ]] || stop "there is no $folder/{name}, which came with this script"'
    for one in command.checks:
        how = one.how.replace("$", "")
        if one.there.isidentifier():
            found = f"import importlib.util as u, sys; sys.exit(u.find_spec({one.there!r}) is None)"
            yield f'inside python3 -c "{found}" || stop "there is no Python module {one.there}: {how}"'
        else:
            yield f'[[ -f {one.there} ]] || stop "there is no {one.there} in $PWD: {how}"'
        if one.release:
            yield "release="
            yield from (f"release=${{release:-$({{ {prints}; }} 2>/dev/null || true)}}" for prints in one.prints)
            other = f"these arguments are those of {command.release}, and here is ${{release:-an unknown one}}: {how}"
            yield f'[[ $release == {one.release} || -n ${{ANY_RELEASE:-}} ]] || stop "{other}, or set ANY_RELEASE=1"'


def _about(priced: Detail, command: Command, *, call: str) -> Iterator[str]:
    model, machine = priced.job.model, priced.job.machine
    yield f"{command.release}: {model.name} on {priced.grid.world:,} × {machine.name}."
    if model.description:
        yield f"{model.name}: {model.description}."
    framework, layout = priced.job.framework, {**priced.grid.by_axis, "chunks": priced.chunks}
    sizes = [f"{framework.called(one)} {layout[one]}" for one in (*framework.axes, "chunks") if layout[one] > 1]
    steps = counted(priced.accumulation, "gradient accumulation step")
    yield f"{', '.join(sizes) or 'one GPU'}; micro-batch {priced.micro_batch}, {steps}, recompute {priced.recomputed}."
    yield from command.needs
    yield from command.notes
    yield f"Written by axonn-tune {VERSION}: {call}"


def _settings(command: Command, kind: ScriptKind, names: dict[str, str]) -> Iterator[str]:
    """The folder of config files and torchrun's logs, and the arguments by section, as arrays."""
    if kind == "torchrun" or names:
        yield f"folder={FOLDERS[kind]}"
    for section in command.sections:
        yield ""
        yield f"{section.title}=("
        yield from (f"  {_words(one, names)}{f'  # {one.why}' if one.why else ''}" for one in section.arguments)
        yield ")"


def _words(argument: Argument, names: dict[str, str]) -> str:
    """An argument as bash reads it, paths of config files in place."""
    return " ".join(_word(word, names) for word in argument.words)


def _word(word: str, names: dict[str, str]) -> str:
    placed = re.fullmatch(r"(.*)\{file:(.+)\}", word)
    if placed is None:
        return shlex.quote(word)
    before = shlex.quote(placed[1]) if placed[1] else ""
    return f'{before}"$folder"/{shlex.quote(names[placed[2]])}'


def _program(command: Command, names: dict[str, str]) -> str:
    """The program and its arguments; the user's arguments come last and override."""
    sections = sorted(command.sections, key=lambda section: section.last)
    arrays = [f'"${{{section.title}[@]}}"' for section in sections]
    place = sum(not section.last for section in sections)
    words = [_word(word, names) for word in command.program]
    return " ".join([*words, *arrays[:place], '"$@"', *arrays[place:]])
