"""`axonn_tune.learn`, `diagnose`, `explain_command` and `compare_command`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypedDict, Unpack

from axonn_tune.api.analysis import CompareResult
from axonn_tune.api.explanation import Explanation
from axonn_tune.api.search import call_text, request_of
from axonn_tune.errors import AxonnTuneError, UsageError
from axonn_tune.files import write_text_atomically
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.job import Job
from axonn_tune.learning.adapters import stated_adapters
from axonn_tune.learning.evidence import Sample, Setup
from axonn_tune.learning.run import CommandRun, shipped_model
from axonn_tune.learning.setups import Change, changes_of, problem_of, searched
from axonn_tune.learning.stated import OF_MODEL, read_run
from axonn_tune.learning.trainers import stated_packing
from axonn_tune.learning.translated import file_words
from axonn_tune.ranking.compare import compare, with_layout
from axonn_tune.ranking.inputs import Inputs, load_inputs
from axonn_tune.ranking.nearest import nothing_feasible
from axonn_tune.report.commands import FileToWrite, NamedModel
from axonn_tune.report.explain import ExplainSection
from axonn_tune.report.facts import SmallestChange
from axonn_tune.report.learning import StatedCommand, better_section, command_json, command_section, said_of
from axonn_tune.report.output import Json
from axonn_tune.request import BESIDE_COMMAND
from axonn_tune.specs.catalog import DEFAULT_MACHINE, MachineLike, ModelLike, load_machine
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.hugging_face import (
    LONGEST_DEFAULT_SEQUENCE,
    TOKENS_PER_STEP,
    model_from_hf_config,
    refuse_hub_name,
)
from axonn_tune.specs.model import Model, ModelDefaults
from axonn_tune.specs.numbers import told
from axonn_tune.units import counted
from axonn_tune.validation.published.accuracy import best_pricing
from axonn_tune.validation.published.rows import TIMES
from axonn_tune.vocabulary import OVERLAPS

if TYPE_CHECKING:
    from axonn_tune.learning.diagnose import Diagnosis
    from axonn_tune.learning.learn import Learning
    from axonn_tune.learning.reading import Evidence


class EvidenceOptions(TypedDict, total=False):
    """Facts that evidence does not state, as options of `axonn-tune learn`; all are optional.

    machine: base profile. framework, model: what logs ran. facts: columns of the step CSV, as a mapping or as
    `"tp=8"`. from_command: the script or config that started them, as of `explain_command`, for what logs lack. ranks,
    nodes: of a collective log. ranks_per_node: gives a profile of one network level nodes.
    """

    machine: MachineLike | None
    framework: str | None
    model: ModelLike | None
    facts: Mapping[str, object] | Sequence[str]
    from_command: str | Path | None
    ranks: int | None
    nodes: int | None
    ranks_per_node: int | None


def learn(
    paths: Sequence[str | Path],
    *,
    output: str | Path | None = None,
    name: str | None = None,
    command: str = "axonn_tune.learn",
    listen: Callable[[float, str], None] = lambda share, words: None,
    **options: Unpack[EvidenceOptions],
) -> tuple[Learning, Evidence]:
    """Update a profile from files of evidence, as `axonn-tune learn` does.

    output: writes the profile. Its document is `.machine` of the first result, which also has every row before and
    after; the second says what was read and assumed. UsageError or DocumentError for evidence that cannot be read.
    """
    from axonn_tune.learning.learn import learn as learn_from
    from axonn_tune.learning.reading import EvidenceRequest, read_evidence

    evidence = read_evidence(EvidenceRequest(paths=paths, **options))
    if known := list(evidence.known):
        raise UsageError(f"{evidence.machine.name} has learned from {known[0]} already: it would count twice")
    found = learn_from(
        evidence.samples,
        evidence.machine,
        frameworks=evidence.frameworks,
        evidence=[f"{source} ({digest})" for source, digest in zip(evidence.sources, evidence.digests, strict=True)],
        name=name or (None if output is None else Path(output).stem),
        listen=lambda prices: listen(min(0.95, prices / (400.0 * len(evidence.samples))), f"{prices} prices"),
    )
    if output is not None:
        header = [f"{found.machine.description or found.machine.name}", f"Learned by {command}"]
        write_text_atomically(output, to_yaml(found.machine, header=header))
    return found, evidence


def diagnose(
    path: str | Path | None = None,
    *,
    step_s: float | None = None,
    tflops: float | None = None,
    tokens_per_gpu: float | None = None,
    beside: str | Path | float | None = None,
    beside_facts: Facts = (),
    beside_command: str | Path | None = None,
    **options: Unpack[EvidenceOptions],
) -> tuple[tuple[Diagnosis, ...], Evidence]:
    """Compare runs with their predictions, as `axonn-tune diagnose` does: one diagnosis for each run of a file.

    path: a training log, steps as CSV, a trace, a log of collectives, a measurement file or the folder of a run; or
    step_s: what a step took of `from_command`, or of the layout of `facts`; or tflops, TFLOP/s, or tokens_per_gpu,
    tokens/s, of a GPU, as the framework's log prints them.
    beside: the same run on fewer or more GPUs, such as one node, by its log or its step, s, which tells a slow network
    from all else: the diagnosis is of the larger. beside_facts: what differs from `facts` there, `{"gpus": 8}`, and its
    time if that is no step: `{"tflops_per_gpu": 410}`, `{"tokens_per_s_per_gpu": 6500}`. beside_command: its script.
    A number format of `from_command` holds though the log states another: it is what was asked for. Each diagnosis has
    `reasonable`, the predicted step with its interval, `causes` with their probabilities, the most probable first, and
    `changes` that would make the run faster. The second result says what was assumed. UsageError or DocumentError for
    what cannot be read.
    """
    from axonn_tune.learning.diagnose import diagnose as diagnose_one
    from axonn_tune.learning.evidence import joined
    from axonn_tune.learning.observed import read_rank_times
    from axonn_tune.learning.reading import EvidenceRequest, read_evidence

    paths, times = [] if path is None else [path], (step_s, tflops, tokens_per_gpu)
    measured = {name: f"{one:.12g}" for name, one in zip(TIMES.values(), times, strict=True) if one is not None}
    stated = options.get("facts", ())
    facts = {**stated, **measured} if isinstance(stated, Mapping) else [*stated, *_words(measured)]
    options["facts"] = facts
    evidence = read_evidence(EvidenceRequest(paths=paths, asked=("precision",), **options))
    if known := list(evidence.known):
        own = f"{evidence.machine.name} has learned from {known[0]}, so its prediction has seen this run"
        evidence = replace(evidence, assumed=(own, *evidence.assumed))
    told = options.get("from_command") or options.get("framework")
    if not (paths or told or any(one.startswith("framework=") for one in _words(options["facts"]))):
        title = evidence.samples[0].framework.title
        own = f"framework {title}, since none is stated: --framework megatron-core, torchtitan, … names yours"
        evidence = replace(evidence, assumed=(own, *evidence.assumed))
    samples = [sample for sample in evidence.samples if sample.seen]
    folder = next((Path(one) if Path(one).is_dir() else Path(one).parent for one in paths), None)
    ranks = read_rank_times(folder) if folder and any(len(sample.seen) > 1 for sample in samples) else None
    found = samples or [joined(evidence.samples)]
    if beside is None and beside_command is not None and not beside_facts:
        raise UsageError("--beside-command is the script of another run: give its log or step with --beside")
    if beside is None and not beside_facts:
        alone = (diagnose_one(one, evidence.machine, ranks=ranks) for one in found)
        return tuple(_with_file(one, sample, options) for one, sample in zip(alone, found, strict=True)), evidence
    more, named = _words(beside_facts), None if isinstance(beside, float | int) else beside
    if isinstance(beside, float | int):
        if timed := [one for one in more if one.partition("=")[0] in TIMES.values()]:
            raise UsageError(f"--beside {beside:g} and {timed[0]} each say what the step took: leave out one of them")
        more.append(f"step_s={beside}")
    other = _read_beside(named, more, beside_command, {**options, "machine": evidence.machine}, found[0])
    said = (f"beside: {words}" for words in other.assumed if not any(words in one for one in evidence.assumed))
    evidence = replace(evidence, assumed=(*evidence.assumed, *said))
    diagnoses = []
    for one in found:
        smaller, larger = sorted((one, other.samples[0]), key=lambda each: each.ranks)
        _check_sizes(smaller, larger)
        own_ranks = ranks if larger is one else None
        diagnoses.append(diagnose_one(larger, evidence.machine, ranks=own_ranks, baseline=smaller))
    return tuple(diagnoses), evidence


Facts: TypeAlias = Mapping[str, object] | Sequence[str]
"""Columns that are stated, by name or as in `tp=8`."""


def _words(facts: Facts) -> list[str]:
    """Facts as words."""
    return [f"{name}={value}" for name, value in facts.items()] if isinstance(facts, Mapping) else list(facts)


def _read_beside(
    path: str | Path | None,
    facts: Sequence[str],
    command: str | Path | None,
    options: EvidenceOptions,
    sample: Sample,
) -> Evidence:
    """The other run: facts of the first hold but where its own differ; without a log and a script of its own, all that
    the log of the first states but its size; of rows and run folders model, batch and layout."""
    from axonn_tune.learning.reading import EvidenceRequest, read_evidence

    own: dict[str, object] = {}
    options["from_command"] = command or options.get("from_command")
    alone = path is None and options["from_command"] is None
    if alone and sample.run is None and (run := sample.narrowed(lambda same: same).setup):
        grid, workload = run.layout.grid, run.workload
        own = {"gbs": workload.global_batch, "seq": workload.sequence_length, "mbs": run.layout.micro_batch}
        own |= {"tp": grid.x, "pp": grid.pipeline, "cp": grid.context, "precision": workload.precision}
        options["model"] = options.get("model") or run.model
        options["framework"] = options.get("framework") or run.framework.name
    first = [one for one in _words(options.get("facts", ())) if one.partition("=")[0] not in TIMES.values()]
    options["facts"] = [*_words(own), *first, *facts]
    paths = [] if path is None else [path]
    same = sample.run if alone else None
    evidence = read_evidence(EvidenceRequest(paths=paths, asked=("precision",), beside=True, run=same, **options))
    if len(evidence.samples) != 1 or "step" not in evidence.samples[0].seen:
        raise UsageError(f"--beside {path}: needs one run with a step, has {len(evidence.samples)}")
    return evidence


def _check_sizes(smaller: Sample, larger: Sample) -> None:
    """UsageError unless both are steps, on different numbers of GPUs."""
    if odd := [one.name for one in (smaller, larger) if "step" not in one.seen]:
        raise UsageError(f"--beside is for steps, and {odd[0]} has none")
    if smaller.ranks == larger.ranks:
        raise UsageError(
            f"--beside: {smaller.name} and {larger.name} are both on {counted(larger.ranks, 'GPU')}: the runs have to "
            "differ in that, as in --gpus 32 --beside-gpus 8"
        )


@dataclass(frozen=True, repr=False, eq=False)
class CommandExplanation(Explanation):
    """Explanation of the run of a command or config file.

    stated: the run, its assumptions, its rank in a search, and faster changes.
    """

    stated: StatedCommand = field(kw_only=True)

    def sections(self, *, terms: bool = False, verbose: bool = False) -> list[ExplainSection]:
        """The run, its gap to peak, the step in words, faster layouts, and verbose every number."""
        gap, words, *numbers = super().sections(terms=terms, verbose=verbose)
        first, better = (make(self.stated, self.priced, verbose=verbose) for make in (command_section, better_section))
        return [first, gap, words, better, *numbers]

    @property
    def smallest_change(self) -> SmallestChange | None:
        """The change that costs least time, a single one before another layout as a whole; None if it fits."""
        if self.priced.memory_bytes <= self.priced.memory_limit_bytes:
            return None
        changes = sorted(self.stated.changes, key=lambda one: one.whole)
        fitting = (one for one in changes if one.memory_bytes <= self.priced.memory_limit_bytes)
        return next((SmallestChange(one.words, one.memory_bytes, one.step_s) for one in fitting), None)

    def to_dict(self) -> Json:
        """Everything, by the schema `axonn-tune/explain/1`, with `run` and `changes`."""
        return {**super().to_dict(), **command_json(self.stated)}


_RANKED = 10
"""Grids of a search that have a rank."""


def explain_command(path: str | Path, *, machine: MachineLike | None = None, **options: object) -> CommandExplanation:
    """Predict the run that a file starts, with faster layouts, as `axonn-tune explain --from-command` does.

    path: a bash script or argument list of Megatron-LM, Megatron-Core, NeMo, Megatron-DeepSpeed, Megatron-AxoNN,
    torchtitan or Hugging Face's Trainer, a TOML of torchtitan, a YAML of NeMo, Accelerate or LLaMA-Factory, a JSON of
    DeepSpeed or the Trainer. Options of `axonn_tune.search` state what the file does not: gpus, model, framework,
    batch, seq, micro_batch, set, tokens_total, and precision also in place of one that is not modelled. UsageError or
    DocumentError, with file and line, for missing or impossible values.
    """
    run, setup, inputs = _stated(path, machine, options)
    priced, ranking = setup.priced, searched(setup, top=_RANKED)
    stated = StatedCommand(
        run=run,
        setup=setup,
        changes=_in_file(run, setup, changes_of(setup, lambda changed: changed.priced.iteration_s, ranking=ranking)),
        ranking=ranking,
        machine=str(machine) if isinstance(machine, str | Path) else inputs.machine.document.name,
        model=named_model(path, options.get("model"), seq=int(run.columns["seq"].value)),
        why_none="" if len(ranking) else nothing_feasible(ranking),
    )
    job = replace(priced.job, tokens_total=inputs.problem.tokens_total)
    ranked = replace(priced, job=job, rank=1, shortest_step_s=priced.iteration_s)
    return CommandExplanation(inputs, ranked, stated=stated)


def _in_file(run: CommandRun, setup: Setup, changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Changes with the keys of the tool's file that make them, where it is a tool's."""
    if not run.tables:
        return changes

    def said(one: Change) -> Change:
        batch = one.setup.workload.global_batch
        keys = file_words(run.tables, setup.layout, one.setup.layout, batch=batch)
        return replace(one, words=f"{one.words}; in {Path(run.path).name}: {keys}") if keys else one

    return tuple(map(said, changes))


def _with_file(one: Diagnosis, sample: Sample, options: EvidenceOptions) -> Diagnosis:
    """A diagnosis whose changes have the keys of the file that started the run."""
    script, setup = options.get("from_command"), sample.setup
    if script is None or setup is None:
        return one
    try:
        run = read_run(script, given={}, model=setup.model, needed=())
    except AxonnTuneError:
        return one
    return replace(one, find_changes=lambda: _in_file(run, setup, one.find_changes()))


def named_model(script: str | Path | None, named: object, *, seq: int | None = None) -> NamedModel:
    """How commands name the model of a script: as named, as one that ships, or as a file that `models import` writes.

    seq: sequence length where the script does not state it.
    """
    if script is None or named is not None:
        return str(named) if isinstance(named, str | Path) else None
    try:
        own, file = import_model(script, seq=seq), f"{read_run(script, given={}, needed=OF_MODEL).model().name}.yaml"
    except AxonnTuneError:
        return None
    words = ["axonn-tune", "models", "import", str(script), "-o", file, *(["--seq", str(seq)] if seq else [])]
    return None if shipped_model(own) else FileToWrite(file, own, shlex.join(words))


def _stated(
    path: str | Path, machine: MachineLike | None, options: Mapping[str, object]
) -> tuple[CommandRun, Setup, Inputs]:
    """The run of a file, as one setup, and as what is searched."""
    asked = request_of("explain_command", options, known=BESIDE_COMMAND, needs=())
    columns = {"gpus": "n_gpus", "batch": "gbs", "seq": "seq", "micro_batch": "mbs", "precision": "precision"}
    given = {column: str(value) for name, column in columns.items() if (value := getattr(asked, name)) is not None}
    named = asked.framework if isinstance(asked.framework, str) else None
    run = read_run(path, given=given, model=asked.model, framework=named)
    chosen = tuple(f"(--set model.{one.partition('=')[0].removeprefix('model.')}=N)" for one in asked.set)
    run = replace(run, assumed=tuple(words for words in run.assumed if not words.endswith(chosen)))
    if machine is None:
        said = f"the machine is {DEFAULT_MACHINE}, since no --machine was named"
        run = replace(run, assumed=(said, *run.assumed))
    case = run.case(load_machine(DEFAULT_MACHINE if machine is None else machine).document)
    run = replace(run, assumed=(*run.assumed, *run.kernel(case), *run.elsewhere(case)))
    if asked.tune is None and (adapters := stated_adapters(run.arguments)) is not None:
        told_of = adapters.options(case.framework)
        asked = replace(asked, **{**told_of, "set": (*told_of.get("set", ()), *asked.set)})
    if asked.lengths is not None:
        asked = replace(asked, packing=asked.packing or stated_packing(run.arguments, case.framework))
        run = replace(run, assumed=tuple(words for words in run.assumed if "without --lengths" not in words))
    request = replace(
        asked,
        gpus=case.row.gpus,
        model=case.model,
        machine=machine,
        batch=case.workload.global_batch,
        seq=case.workload.sequence_length,
        micro_batch=None,
        precision=case.workload.precision,
        overlap=case.workload.overlaps,
        no_overlap=() if case.workload.overlaps else "all",
        rank_by="step",
        framework=case.framework,
    )
    inputs = load_inputs(request)
    problem = inputs.problem
    job = Job(problem.model, problem.machine, problem.workload, problem.framework)
    best = best_pricing(job, case.configurations).layout
    run = replace(run, assumed=(*run.assumed, *told(inputs.machine.consequences, kept=False)))
    return run, Setup(job.model, job.machine, job.workload, job.framework, layout=best), inputs


def import_model(
    path: str | Path, *, name: str | None = None, batch: int | None = None, seq: int | None = None
) -> Model:
    """The model of a Hugging Face config.json, or of a file that `explain_command` reads, as `models import` does.

    name: else that of the file or its folder. batch, seq: of the default workload; else those of the run, or about 4
    million tokens a step. UsageError or DocumentError for what is no such file or cannot be mapped.
    """
    if not Path(path).exists():
        refuse_hub_name(str(path))
    if Path(path).is_dir() or Path(path).suffix == ".json":
        return model_from_hf_config(path, name=name, global_batch=batch, sequence_length=seq)
    run = read_run(path, given={}, needed=OF_MODEL)
    found, stated = run.model(), {key: int(run.columns[key].value) for key in ("gbs", "seq") if key in run.columns}
    length = seq or stated.get("seq", LONGEST_DEFAULT_SEQUENCE)
    defaults = {
        "global_batch": batch or stated.get("gbs", max(1, TOKENS_PER_STEP // length)),
        "sequence_length": length,
    }
    title = find_framework(run.software).title
    vocabulary = "; the vocabulary is assumed" if any("vocabulary" in words for words in run.assumed) else ""
    changes = {
        "name": name or Path(path).stem,
        "description": f"Imported from arguments of {title}{vocabulary}",
        "source": f"arguments of {title} in {Path(path).name}",
        "max_sequence_length": max(length, found.max_sequence_length),
        "defaults": ModelDefaults(**defaults),
    }
    return found.model_copy(update=changes)


def compare_command(path: str | Path, *, machine: MachineLike | None = None, **options: object) -> CompareResult:
    """The best layout of each framework for the model, batch and GPUs of a command, and its own, key `yours`."""
    run, setup, inputs = _stated(path, machine, options)
    workload = setup.workload.model_copy(update={"overlaps": OVERLAPS})
    problem = replace(inputs.problem, framework=AXONN_TUNE, pipeline=False, workload=workload)
    name, own = Path(run.path).name, setup.workload
    found = compare(problem, of_run=problem_of(setup))
    found = with_layout(found, setup.layout, setup.framework, workload=own, name=name)
    given = {"path": path, "machine": machine, **options}
    return CompareResult(
        found, replace(inputs, problem=problem), call_text("compare_command", given), tuple(said_of(run))
    )
