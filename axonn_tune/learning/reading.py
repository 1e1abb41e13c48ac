"""Reads evidence files, recognised by their content, as samples on one base profile.

Read are steps as CSV, training logs, logs of nccl-tests, rccl-tests and OSU collectives, profiler traces, measurement
files of `axonn-tune validate`, and run folders of `axonn-tune run`. `LOG.yaml` in its folder, then the user's options
supply what a training log does not state of its layout and model; assumptions are recorded in words.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, NamedTuple

from axonn_tune.errors import DocumentError, Problem, UnknownNameError, UsageError, suggest
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.keys import Stated
from axonn_tune.frameworks.names import why_unpriced
from axonn_tune.learning.arguments import EXPERT_COLUMNS, experts_proof, stated_count
from axonn_tune.learning.collective_logs import read_log, times_of
from axonn_tune.learning.evidence import Sample, measured_samples, probe_samples, run_sample, step_sample
from axonn_tune.learning.run import CommandRun, StatedRun, is_same, model_columns
from axonn_tune.learning.setups import layout_words, with_best_layout
from axonn_tune.learning.stated import OF_RUN, read_run
from axonn_tune.learning.traces import read_trace
from axonn_tune.learning.training_logs import LoggedRun, decoded, looks_like_training_log, read_training_log
from axonn_tune.specs.catalog import MachineLike, ModelLike, load_machine, load_model, machines_with
from axonn_tune.specs.document import read_config
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document, read_bytes, read_text
from axonn_tune.specs.machine import Machine, Source, Tier
from axonn_tune.specs.numbers import told
from axonn_tune.specs.points import MatmulProbe, Probe
from axonn_tune.specs.results import LAUNCH_NAME, SUMMARY_NAME, Measurements, Summary
from axonn_tune.units import TERA, counted
from axonn_tune.validation.published.accuracy import best_pricing
from axonn_tune.validation.published.cases import (
    ACCELERATORS,
    NODE,
    case_of,
    differences,
    framework_of,
    measured_s,
    profile_of,
    step_at,
)
from axonn_tune.validation.published.cells import ALSO, names_model
from axonn_tune.validation.published.rows import (
    COLUMNS,
    COUNTS,
    FROM_ZERO,
    MEASURES,
    NEEDED,
    SILENT,
    TIMES,
    Cell,
    Place,
    StepRow,
    cell_text,
    each_record,
    meaning,
    needed_columns,
    odd_fact,
    step_row,
)

_SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")


@dataclass(frozen=True, kw_only=True)
class EvidenceRequest:
    """Files, and facts that they do not state.

    machine: base profile; without one, that of measurement files, or the shipped one nearest to what rows say.
    framework: software of logs and rows that do not name it. model, facts: what logs and rows do not state; facts are
    columns of the step CSV, by name or as in `tp=8`. from_command: script or config that started the runs of logs;
    asked: columns in which it holds though a log states another value. Without files, one of the facts is what the step
    of that script took, or of the layout that the others state (a column of `TIMES`). beside: whether it is the run
    beside another, for messages; run: in place of a script, that other run, whose size differs.
    ranks, nodes: of a collective log that does not state them. ranks_per_node: splits a base profile of one network
    level.
    """

    paths: Sequence[str | Path] = ()
    machine: MachineLike | None = None
    framework: str | None = None
    model: ModelLike | None = None
    facts: Mapping[str, object] | Sequence[str] = ()
    from_command: str | Path | None = None
    asked: Sequence[str] = ()
    ranks: int | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None
    beside: bool = False
    run: CommandRun | None = None

    @cached_property
    def told(self) -> tuple[str, str, str]:
        """Option, column and value of the fact that says what a step took; UsageError unless there is one."""
        prefix = "--beside-" if self.beside else "--"
        found = [
            (prefix + option, column, self.stated[column]) for option, column in TIMES.items() if column in self.stated
        ]
        if len(found) == 1:
            return found[0]
        names = f"{prefix}step SECONDS, {prefix}tflops or {prefix}tokens-per-gpu"
        if found:
            both = " and ".join(f"{option} {value}" for option, _, value in found)
            raise UsageError(f"{both} each say what the step took: give one of {names}")
        what = (
            "--beside-fact, or a fact that is given twice, is of another run: give its log, --beside LOG"
            if self.beside
            else ("diagnose needs a log, a trace, a run's folder or rows of steps")
        )
        raise UsageError(f"{what}, or else {names}")

    @property
    def option(self) -> str:
        """The option of its facts."""
        return "--beside-fact" if self.beside else "--fact"

    @cached_property
    def stated(self) -> dict[str, str]:
        """Facts by column; UsageError for an invalid one."""
        pairs = [*self.facts.items()] if isinstance(self.facts, Mapping) else []
        for words in () if isinstance(self.facts, Mapping) else self.facts:
            column, _, value = (part.strip() for part in words.partition("="))
            if not column or not value:
                raise UsageError(f"{self.option} {words}: write COLUMN=VALUE, as in tp=8")
            pairs.append((column, value))
        found = {ALSO.get(column, column): cell_text(value) for column, value in pairs}
        if isinstance(self.facts, Mapping):
            numbers = (*COUNTS, *FROM_ZERO, *MEASURES)
            found = {name: value for name, value in found.items() if name not in numbers or value.lower() not in SILENT}
        if unknown := [name for name in found if name not in COLUMNS]:
            why = why_unpriced(unknown[0]) or f"no such column{suggest(unknown[0], COLUMNS)}"
            raise UsageError(f"{self.option} {unknown[0]}: {why}")
        for name, value in found.items():
            self._check(name, value)
        return found

    def _check(self, name: str, value: str) -> None:
        """UsageError for a number, word or accelerator that is none, and a size that the given model has not."""
        if odd := odd_fact(name, value):
            raise UsageError(f"{self.option} {name}={value:.80}: {odd}")
        if name == "gpu" and profile_of(Place(value)) is None:
            own = "" if self.machine is None else load_machine(self.machine).document.accelerator.name.lower()
            if not own or (value.lower() not in own and own not in value.lower()):
                known = [word.upper() for word, _ in ACCELERATORS]
                near = f"{suggest(value.upper(), known)}; known: {', '.join(known)}"
                raise UsageError(f"{self.option} gpu={value}: no profile has this accelerator{near}")
        sizes = {} if self.model is None or name not in _SIZES else model_columns(load_model(self.model).document)
        if name in sizes and not is_same(sizes[name], value, name):
            raise UsageError(
                f"{self.option} {name}={value}: --model {sizes['model']} has {sizes[name]}: leave one of them out"
            )

    def script(self, *, gpus: int | None = None, needed: Sequence[str] = ()) -> CommandRun | None:
        """The run of the script or config, on as many GPUs as a log states; needed: columns it must have.

        UsageError or DocumentError where it cannot be read.
        """
        if self.from_command is None:
            return self.run and self.run.with_size(self.stated)
        given: dict[str, Cell] = {} if gpus is None else {"n_gpus": gpus}
        given |= {name: value for name, value in self.stated.items() if name not in EXPERT_COLUMNS}
        return read_run(self.from_command, given=given, model=self.model, framework=self.framework, needed=needed)


@dataclass(frozen=True)
class Evidence:
    """Samples on a base profile, the profile, and a line for each file; assumptions, and excluded rows."""

    samples: tuple[Sample, ...]
    machine: Machine
    frameworks: tuple[Framework, ...]
    sources: tuple[str, ...]
    digests: tuple[str, ...]
    assumed: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def known(self) -> Iterator[str]:
        """Files that the base profile has learned from."""
        learned = self.machine.learned
        for source in () if learned is None else learned.evidence:
            yield from (source for digest in self.digests if digest in source)


class _Notes(NamedTuple):
    """Assumptions of a reading, and what it left out."""

    assumed: list[str]
    left_out: list[str]


@dataclass(frozen=True)
class _Found:
    """What a file holds.

    samples: on a profile, with the file in a line. kind: `rows` where options may state what it does not, `probes`
    where they state ranks and software. machine: its own profile; nearest: profiles nearest to its rows; device: its
    accelerator as a driver names it. nodes: ranks of one node, and of all.
    """

    samples: Callable[[Machine, _Notes], tuple[list[Sample], str]]
    kind: Literal["rows", "probes", "measured"]
    machine: Callable[[], Machine] | None = None
    nearest: frozenset[str | None] = frozenset()
    device: str = ""
    nodes: tuple[int, int] = (0, 0)


def read_evidence(request: EvidenceRequest) -> Evidence:
    """Read every file; UsageError or DocumentError, with file and line, for what cannot be read."""
    if request.framework is not None:
        find_framework(request.framework)
    _ = request.stated
    given: dict[str, str | Path] = {}
    for path in request.paths:
        content = Path(path) / SUMMARY_NAME if Path(path).is_dir() else Path(path)
        digest = f"sha256 {hashlib.sha256(read_bytes(content)).hexdigest()[:12]}" if content.is_file() else str(path)
        if digest in given:
            raise UsageError(f"{str(path)!r} is the same evidence as {str(given[digest])!r}: give it once")
        given[digest] = path
    found = [_read(Path(path), request) for path in request.paths]
    found += [] if found else [_told(request)]
    _require_use(found, request)
    notes = _Notes([], [])
    machine = _base(found, request, notes.assumed)
    read = [one.samples(machine, notes) for one in found]
    samples, sources = [sample for several, _ in read for sample in several], [source for _, source in read]
    if not samples:
        raise UsageError("\n".join(["nothing to learn from:", *(notes.left_out or sources)]))
    named = [find_framework(request.framework)] if request.framework else []
    frameworks = tuple({one.name: one for one in (*named, *(sample.framework for sample in samples))}.values())
    return Evidence(tuple(samples), machine, frameworks, tuple(sources), tuple(given), *map(tuple, notes))


def _require_use(found: Sequence[_Found], request: EvidenceRequest) -> None:
    """UsageError for an option that no file needs."""
    rows, probes = (any(one.kind == kind for one in found) for kind in ("rows", "probes"))
    unused = {
        "--fact": bool(request.facts) and not rows,
        "--from-command": request.from_command is not None and not rows,
        "--model": request.model is not None and not rows,
        "--framework": request.framework is not None and not (rows or probes),
        "--ranks": request.ranks is not None and not probes,
        "--nodes": request.nodes is not None and not probes,
    }
    if named := [option for option, idle in unused.items() if idle]:
        raise UsageError(f"{', '.join(named)}: no file here needs it: runs and measurements state it all")


# Kinds of files.


def _read(path: Path, request: EvidenceRequest) -> _Found:
    if path.is_dir():
        return _run_folder(path)
    if path.name == SUMMARY_NAME:
        return _run_folder(path.parent)
    if path.suffix == ".gz":
        return _trace(path, request)
    if not (content := read_bytes(path)).strip():
        raise UsageError(f"{str(path)!r} is empty")
    if reader := _reader(decoded(content)):
        return reader(path, request)
    raise UsageError(
        f"{str(path)!r} is no kind of evidence that can be read: steps as CSV (columns {', '.join(NEEDED)}), a "
        "training log, a log of nccl-tests, rccl-tests or OSU, a profiler trace, a measurement file or a run's folder"
    )


_DEGREES = {"tp", "pp", "cp", "dp", "z", "ep"}


def _told(request: EvidenceRequest) -> _Found:
    """A step of which nothing but its time was measured; UsageError without a script, or facts.

    Without a layout it is compared with the best.
    """
    option, column, value = request.told
    run = request.script(needed=OF_RUN)
    if run is None:
        software = find_framework(request.framework or AXONN_TUNE.name).name
        stated = {name: Stated(meaning(name, value), 0) for name, value in _given(request, None).items()}
        model = None if request.model is None else load_model(request.model).document
        run = CommandRun("--fact", software, (0, 0), stated, given=model)
    # The run of a log has all of its ranks for data where it states no other degree.
    open_ = request.from_command is None and not (request.run or _DEGREES & run.columns.keys())
    if request.from_command is None:
        run = _of_model(run, request)
        missing = [name for name in OF_RUN if name not in run.columns]
        missing += ["framework"] * (open_ and request.framework is None)
        if missing:
            raise UsageError(
                f"{option} {value} is of a run that does not state {', '.join(missing)}: give its script, "
                "--from-command FILE, or --model NAME and what it lacks, as in --framework megatron-core --gpus 256; "
                "its layout, as in --tp 8 --pp 4, or it is compared with the best"
            )

    def samples(machine: Machine, notes: _Notes) -> tuple[list[Sample], str]:
        told, name = run, Path(run.path).name
        if request.from_command is None:
            told, name = _with_dispatcher(run, machine), "the stated step"
        case = with_best_layout(told, machine) if open_ else told.case(machine)
        if open_:
            words = layout_words(case.configurations[0], case.framework)
            notes.assumed.append(f"the layout is the best of a search: {words}; state the run's, as in --tp 8 --pp 4")
        notes.assumed.extend((*told.assumed, *told.elsewhere(case)))
        # A script without interleaving has none.
        unstated = [one for one in case.row.unstated if one != "vpp" or request.from_command is None]
        measured = float(value)
        step_s: float | None = measured
        if column != "step_s":
            layout = best_pricing(case, case.configurations).layout
            per_s = {"tokens": measured} if "tokens" in column else {"flops": TERA * measured}
            step_s = step_at(case, layout, **per_s)
            name = f"{name} at {measured:,g} {'tokens/s' if 'tokens' in column else 'TFLOP/s'} per GPU"
        if step_s is None:
            raise UsageError(
                f"{option} {value}: the log of {case.framework.title} prints no FLOPs of such a run: give its "
                "step by --step or --tokens-per-gpu"
            )
        row = replace(case.row, step_s=step_s, unstated=tuple(unstated))
        return [step_sample(replace(case, row=row), name=name)], name

    gpu = run.columns.get("gpu")
    return _Found(samples, "rows", nearest=frozenset() if gpu is None else frozenset([profile_of(Place(gpu.value))]))


def _with_dispatcher(run: CommandRun, machine: Machine) -> CommandRun:
    """The run with the dispatcher that a search would have, where none is stated and experts are on several nodes."""
    ranks = int(str(run.columns["ep"].value)) if "ep" in run.columns else 1
    if ranks <= NODE or "dispatcher" in run.columns:
        return run
    name = find_framework(run.software).dispatcher_over(ranks, machine.tiers[0].ranks)
    said = f"dispatcher {name}, as in a search; --dispatcher names another"
    return replace(run, columns={**run.columns, "dispatcher": Stated(name, 0)}, assumed=(said,))


def _of_model(run: CommandRun, request: EvidenceRequest) -> CommandRun:
    """The run with batch and length of the given model, as a search has them, where it states none."""
    if request.model is None:
        return run
    model = load_model(request.model).document
    own = {"gbs": model.defaults.global_batch, "seq": model.defaults.sequence_length}
    open_ = {name: Stated(value, 0) for name, value in own.items() if name not in run.columns}
    said = f"{' and '.join(f'{name}={one.value}' for name, one in open_.items())}, those of {model.name}"
    return replace(run, columns={**run.columns, **open_}, assumed=(*run.assumed, said)) if open_ else run


def _run_folder(path: Path) -> _Found:
    for name in (SUMMARY_NAME, LAUNCH_NAME):
        if not (path / name).is_file():
            raise UsageError(f"{str(path)!r} has no {name}: it is not the folder of a run that has ended")
    launch = load_document(path / LAUNCH_NAME, schema=Launch)
    summary = load_document(path / SUMMARY_NAME, schema=Summary)

    def machine() -> Machine:
        name = launch.predicted.machine
        try:
            return load_machine(name).document
        except UnknownNameError:
            words = f"{path.name} was predicted for the profile {name!r}, which no name finds"
            raise UsageError(f"{words}: give its file with --machine") from None

    def samples(machine: Machine, notes: _Notes) -> tuple[list[Sample], str]:
        return [run_sample(launch, summary, machine, name=path.name)], f"{path.name}: a run"

    return _Found(samples, "measured", machine, nodes=(launch.ranks_per_node, launch.grid.world))


def _measurements(path: Path, request: EvidenceRequest) -> _Found:
    found = load_document(path, schema=Measurements)
    place = (found.place.ranks_per_node or found.place.ranks, found.place.ranks)
    return _Found(lambda machine, _: measured_evidence(found, machine), "measured", lambda: found.machine, nodes=place)


MOST_LEFT_OUT = 5
"""Largest number of ignored log lines that are named."""
_HEAD = 20_000
"""Characters in which a document or a trace is recognised; logs may start with other output."""


_IN_TRACES = ('"traceEvents"', '"ph"', '"deviceProperties"')
_OF_COLLECTIVES = re.compile(
    r"# nThread|# Collective test starting|# OSU MPI|out-of-place\s+in-place|algbw\s+busbw|\"(?:out_of_place|inPlace)\""
)


def _reader(text: str) -> Callable[[Path, EvidenceRequest], _Found] | None:
    """What reads a file of this content."""
    head, columns = text[:_HEAD], text.partition("\n")[0].replace('"', "").split(",")
    if len({name.strip() for name in columns} & set(COLUMNS)) > len(columns) // 2 > 2:
        return _rows
    if "axonn-tune/measurement/" in head:
        return _measurements
    if head.lstrip()[:1] in "{[" and any(word in head for word in _IN_TRACES):
        return _trace
    if looks_like_training_log(text):
        return _training_log
    return _collectives if _OF_COLLECTIVES.search(text) else None


def _rows(path: Path, request: EvidenceRequest) -> _Found:
    """A CSV of steps, whose blank cells and missing columns are what was given."""
    given, own_gpu = _given(request, request.script()), "gpu" not in request.stated
    plain: dict[str, list[int]] = {}

    def row(record: Mapping[str, str], line: int) -> StepRow:
        stated = {name: Stated(value, line) for name, value in record.items() if value.lower() not in SILENT}
        # Rows of another accelerator than that of --machine are priced on it, and that is said.
        asked = {name: value for name, value in given.items() if name != "gpu" or not (own_gpu and "gpu" in stated)}
        named = [
            "".join(filter(str.isalnum, str(words).lower()))
            for words in (record.get("framework", ""), asked.get("framework", ""))
        ]
        # One name may be part of the other: `Megatron-LM (NeMo)` and `nemo`.
        if "framework" in stated and "framework" in asked and not (named[0] in named[1] or named[1] in named[0]):
            raise ValueError(f"framework is {stated['framework'].value}, but {asked['framework']} is given")
        run = StatedRun(str(path), record.get("framework", ""), (line, line), stated).with_given(asked)
        cells = {name: one.value for name, one in run.columns.items() if name not in EXPERT_COLUMNS}
        if not cells.setdefault("framework", run.software):
            raise ValueError("framework is blank: name the software there, or with --framework")
        blank = [words for name, words in _PLAIN_MODEL.items() if name not in run.columns]
        if blank and not names_model(record):
            plain.setdefault(" and ".join(blank), []).append(line)
        return step_row({**record, **cells, "id": record["id"]}, line)

    needed = tuple(name for name in needed_columns(path) if name not in given)
    rows = each_record(path, needed, row, known=COLUMNS)
    # Rows that name their model may have tokens, TFLOP/s or MFU in place of a time.
    timed = tuple(row for row in rows if row.step_s is not None or row.more is not None)
    if not timed:
        raise UsageError(f"{str(path)!r} has no row with a time (column step_s)")
    said = []
    for words, lines in plain.items():
        place = f"{lines[0]} and {len(lines) - 1} more" if len(lines) > 1 else str(lines[0])
        said.append(f"{path.name}:{place}: {words}; --model NAME says it")
    return _of_rows(path, timed, (0.0,) * len(timed), _Notes(said, []))


def _of_rows(
    path: Path,
    rows: Sequence[StepRow],
    errors: Sequence[float],
    own: _Notes,
    runs: Sequence[tuple[CommandRun | None, bool]] = (),
) -> _Found:
    """Steps of a CSV file, or of a training log; errors: relative standard error of each time.

    runs: those of a log, each with whether its arguments say more than its row.
    """

    def samples(machine: Machine, notes: _Notes) -> tuple[list[Sample], str]:
        found = []
        notes.assumed.extend(own.assumed)
        notes.left_out.extend(own.left_out)
        for row, spread, (run, more) in zip(rows, errors, runs or ((None, False),) * len(rows), strict=True):
            place = f"{path.name}:{row.line}"
            case = run.case(machine) if run and more else case_of(row, machine=machine)
            if isinstance(case, str):
                notes.left_out.append(f"{place}: {case}")
                continue
            if (measured := measured_s(case)) is None:
                notes.left_out.append(f"{place}: no time is stated (column step_s)")
                continue
            case = replace(case, row=replace(row, step_s=measured))
            notes.assumed.extend(f"{place}: {words}" for words in differences(row, machine, case.framework))
            found.append(replace(step_sample(case, name=place, spread=spread), run=run))
        return found, f"{path.name}: {_counted(found, 'step')}"

    return _Found(samples, "rows", nearest=frozenset(profile_of(row) for row in rows))


_PLAIN_MODEL = {
    "kv_heads": "kv_heads is blank, so as many as heads",
    "gated_mlp": "gated_mlp is blank, so an MLP without gate",
}
"""Columns of a model that change its FLOPs, and what they are taken to be where they are blank."""


def _collectives(path: Path, request: EvidenceRequest) -> _Found:
    log = read_log(path, ranks=request.ranks, nodes=request.nodes)
    cut_off = ((line, "the log is cut off here; what comes before counts") for line in log.cut_off)
    said = [f"{path.name}:{line}: {words}" for line, words in (*log.assumed, *cut_off)]
    return _of_probes(path, request, partial(times_of, log), said, "collective", log.device)


def _trace(path: Path, request: EvidenceRequest) -> _Found:
    found = read_trace(path)
    if not found:
        raise UsageError(f"{str(path)!r} has no collective with its size and group, and no GEMM with its shapes")
    gemms = any(isinstance(probe, MatmulProbe) for probe in found)
    said = [f"{path.name}: GEMMs ran in bf16, on CPUs in fp32"] if gemms else []
    return _of_probes(path, request, lambda machine: found, said, "time" if gemms else "collective")


def _of_probes(
    path: Path,
    request: EvidenceRequest,
    times: Callable[[Machine], Mapping[Probe, float]],
    said: Sequence[str],
    noun: str,
    device: str = "",
) -> _Found:
    """Times of collectives and GEMMs, once the profile is known whose nodes they ran on."""
    framework = find_framework(request.framework) if request.framework else AXONN_TUNE

    def samples(machine: Machine, notes: _Notes) -> tuple[list[Sample], str]:
        notes.assumed.extend(said)
        found = probe_samples(times(machine), machine, framework, name=path.name)
        return found, f"{path.name}: {counted(sum(len(sample.what) for sample in found), noun)}"

    return _Found(samples, "probes", device=device)


def _training_log(path: Path, request: EvidenceRequest) -> _Found:
    runs, rows, said = read_training_log(path), list[StepRow](), list[str]()
    stated: list[tuple[CommandRun, bool]] = []
    if told := [option for option, column in TIMES.items() if column in request.stated]:
        prefix = "--beside-" if request.beside else "--"
        raise UsageError(f"{prefix}{told[0]} and {path} each say what the step took: leave out one of them")
    for run in runs:
        if (gpus := _gpus_of(run, request)) is not None and "n_gpus" not in run.columns:
            said.append(f"{path.name}:{run.lines[0]}: {gpus} GPUs, by the global and the local batch that it states")
            run = run.with_given({"n_gpus": gpus})
        script = request.script(gpus=gpus)
        said += [] if script is None else [f"{script.path}: {words}" for words in (*script.assumed, *script.ignored)]
        given = _given(request, script, _beside(path, request))
        asked = {name: given.pop(name) for name in request.asked if name in given.keys() & run.columns.keys()}
        log, place = run.completed(given), f"{path.name}:{run.lines[0]}"
        doubted = [name for name, value in asked.items() if not is_same(log.columns[name].value, value, name)]
        for name in doubted:
            states = f"the log states {name} {cell_text(log.columns[name].value)}"
            said.append(f"{place}: {states}, and {script.path if script else 'an option'} {cell_text(asked[name])}")
        log = replace(log, columns={**log.columns, **{name: Stated(value, 0) for name, value in asked.items()}})
        row = CommandRun(log.path, log.software, log.lines, log.columns, log.arguments).row()
        # A log that prints its arguments prints no interleaving and default kernels as nothing.
        printed = ("vpp", "attn") if "recompute" in run.columns else ()
        rows.append(replace(row, unstated=(*(name for name in row.unstated if name not in printed), *doubted)))
        command, more_than_row = _stated(log, row, request, script)
        stated.append((replace(command, saving=log.saving), more_than_row))
        taken_for = run.taken_for if script is None and not request.framework else ()
        said += [f"{place}: {words}" for words in (*run.assumed, *taken_for)]
        if not stated[-1][1] and (proof := experts_proof(run.arguments)):
            said.append(
                f"{place}: the model has no experts, but the log has {proof}, which only mixtures of experts have"
            )
    errors = tuple(run.spread / math.sqrt(len(run.times_s)) for run in runs)
    left_out = [f"{path.name}:{line}: {words}" for run in runs for line, words in run.left_out]
    more = [f"{path.name}: {len(left_out) - MOST_LEFT_OUT} lines more"] if len(left_out) > MOST_LEFT_OUT else []
    return _of_rows(path, rows, errors, _Notes(said, [*left_out[:MOST_LEFT_OUT], *more]), stated)


def _gpus_of(run: LoggedRun, request: EvidenceRequest) -> int | None:
    """GPUs of a run: as its log states them, else those over which torchtitan's batch is spread where a script states
    the degrees of parallelism; None where neither says."""
    batch, local = (stated_count(run.arguments, f"{name}_batch_size") for name in ("global", "local"))
    if "n_gpus" in run.columns or batch is None or local is None or "n_gpus" in request.stated:
        return run.columns["n_gpus"].value if "n_gpus" in run.columns else None
    script = request.script()
    if script is None or "n_gpus" in script.columns:
        return None
    steps = stated_count(run.arguments, "gradient_accumulation_steps") or Stated(1, 0)
    ranks = math.prod(script.columns[axis].value for axis in ("tp", "pp", "cp") if axis in script.columns)
    return int(ranks * batch.value // (local.value * steps.value))


def _stated(
    log: LoggedRun, row: StepRow, request: EvidenceRequest, script: CommandRun | None
) -> tuple[CommandRun, bool]:
    """The run by the arguments of its script, else of its log; whether they say more than its row: not where there are
    none, or they show experts of which nothing is known."""
    if script is not None:
        return script.of_log(log, log.arguments), True
    document = None if request.model is None else load_model(request.model).document
    experts = log.columns.get("experts")
    known = (document is not None and document.has_experts) or (experts is not None and experts.value > 1)
    more = known or (bool(log.arguments) and not experts_proof(log.arguments))
    name = framework_of(row).name
    return CommandRun(log.path, name, log.lines, log.columns, log.arguments, given=document), more


def _given(
    request: EvidenceRequest, script: CommandRun | None, beside: Mapping[str, str] | None = None
) -> dict[str, Cell]:
    """Columns that options give, over those of the file beside a log, and of the script that started it."""
    model = {} if request.model is None else model_columns(load_model(request.model).document)
    said = {} if script is None else {name: one.value for name, one in script.columns.items() if name in COLUMNS}
    given: dict[str, Cell] = {**model, **said, **(beside or {}), **request.stated}
    if request.framework:
        given.setdefault("framework", request.framework)
    if request.machine is not None and "gpu" not in given:
        given["gpu"] = load_machine(request.machine).document.accelerator.name
    return given


def _beside(path: Path, request: EvidenceRequest) -> dict[str, str]:
    """Columns from `LOG.yaml` beside a log, unless that is its run's config; DocumentError for what is no column."""
    beside = path.with_suffix(".yaml")
    config = request.from_command
    if beside == path or not beside.is_file() or (config is not None and beside.samefile(config)):
        return {}
    found = read_config(read_text(beside), source=str(beside)).mapping()
    if unknown := [name for name in found if name not in COLUMNS]:
        config = f"; a config of the run is given by --from-command {beside}"
        raise UsageError(f"{str(beside)!r}: no column {unknown[0]!r}{suggest(unknown[0], COLUMNS)}{config}")
    said = {name: str(node.plain()) for name, node in found.items()}
    wrong = [
        (name, odd) for name, value in said.items() if value.lower() not in SILENT and (odd := odd_fact(name, value))
    ]
    if wrong:
        raise DocumentError(str(beside), [Problem(name, odd, found[name].line) for name, odd in wrong])
    return said


# Base profile and samples.


def _base(found: Sequence[_Found], request: EvidenceRequest, assumed: list[str]) -> Machine:
    """The base profile, with an added inter-node level where the evidence has nodes and the profile has none."""
    if request.machine is None:
        machine = _nearest(found, assumed)
    else:
        loaded = load_machine(request.machine)
        machine = loaded.document
        assumed.extend(told(loaded.consequences, kept=False))
    nodes = (one.nodes[0] for one in found if one.nodes[0] < one.nodes[1])
    per_node = request.ranks_per_node or next(nodes, None)
    if per_node is None or per_node == 1 or len(machine.tiers) > 1 or machine.tiers[0].ranks is not None:
        if request.ranks_per_node is not None and len(machine.tiers) > 1:
            raise UsageError(f"--ranks-per-node is for profiles of one network level; {machine.name} has several")
        return machine
    if machine.learned is not None:
        raise UsageError(
            f"{machine.name} has learned as a machine of one network level, but the evidence has nodes of {per_node} "
            "ranks: start from the profile it was learned from"
        )
    assumed.append(f"{machine.name} has one network level; nodes of {per_node} ranks get one of their own")
    return with_nodes(machine, per_node)


def _nearest(found: Sequence[_Found], assumed: list[str]) -> Machine:
    """The profile of a measurement, or the one nearest to the rows' accelerator; UsageError without either."""
    if own := next((one.machine for one in found if one.machine), None):
        return own()
    names = {name for one in found for name in one.nearest} - {None}
    if len(names) != 1:
        several = f": its rows are of {', '.join(sorted(map(str, names)))}" if names else ""
        products = (product for one in found if (product := re.search(r"[A-Z]+\d{2,}\w*", one.device)))
        near = sorted({name for product in products for name in machines_with(product[0])})
        such = f", such as {' or '.join(near)}" if near else ""
        raise UsageError(
            f"the evidence does not say on which machine it ran{several}; name the nearest with --machine{such}"
        )
    name = str(names.pop())
    assumed.append(f"base profile {name}, the nearest to what the rows say; --machine names another")
    return load_machine(name).document


def with_nodes(machine: Machine, per_node: int) -> Machine:
    """A profile of one network level with two: inside nodes of so many ranks, and between them, at the same rates."""
    only = machine.tiers[0]
    fact = Source(kind="fact", source="ranks of a node, as the evidence has them")
    inner = only.model_copy(update={"name": "node", "ranks": per_node, "sources": {**only.sources, "ranks": fact}})
    outer: Tier = only.model_copy(update={"name": "network"})
    return machine.model_copy(update={"tiers": (inner, outer)})


def measured_evidence(measurements: Measurements, machine: Machine) -> tuple[list[Sample], str]:
    """Samples of a validation, and the validation in a line."""
    day = measurements.created[:10]
    found = measured_samples(measurements, machine, name=f"validate, {day}")
    return found, f"validate of {day}: {_counted(found, 'configuration')}"


def _counted(found: Sequence[Sample], noun: str) -> str:
    ranks = sorted({sample.ranks for sample in found})
    if not ranks:
        return counted(0, noun)
    on = counted(ranks[0], "rank") if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]} ranks"
    return f"{counted(len(found), noun)} on {on}"
