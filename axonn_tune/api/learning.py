"""`axonn_tune.learn`, `diagnose`, `explain_command` and `compare_command`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from axonn_tune.api.analysis import CompareResult
from axonn_tune.api.explanation import Explanation
from axonn_tune.api.search import call_text, request_of
from axonn_tune.errors import AxonnTuneError, UsageError
from axonn_tune.files import write_text_atomically
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.job import Job
from axonn_tune.learning.evidence import Sample, Setup
from axonn_tune.learning.run import CommandRun, shipped_twin
from axonn_tune.learning.setups import changes_of, problem_of, searched
from axonn_tune.learning.stated import OF_MODEL, read_run
from axonn_tune.ranking.compare import compare, with_layout
from axonn_tune.ranking.inputs import Inputs, load_inputs
from axonn_tune.ranking.nearest import nothing_feasible
from axonn_tune.report.commands import FileToWrite, NamedModel
from axonn_tune.report.explain import ExplainSection
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
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model, ModelDefaults
from axonn_tune.specs.numbers import told
from axonn_tune.validation.published.accuracy import best_pricing
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
    baseline: str | Path | float | None = None,
    baseline_facts: Mapping[str, object] | Sequence[str] = (),
    **options: Unpack[EvidenceOptions],
) -> tuple[tuple[Diagnosis, ...], Evidence]:
    """Compare runs with their predictions, as `axonn-tune diagnose` does: one diagnosis for each run of a file.

    path: a training log, steps as CSV, a trace, a log of collectives, a measurement file or the folder of a run; or
    step_s: what a step took of `from_command`, or of the layout of `facts`.
    baseline: the same run on fewer GPUs, such as one node, by its log or its step, s, which tells a slow network from
    all else; baseline_facts: what differs from `facts` there, `{"n_gpus": 8}`.
    A number format of `from_command` holds though the log states another: it is what was asked for. Each diagnosis has
    `reasonable`, the predicted step with its interval, `causes` with their probabilities, the most probable first, and
    `changes` that would make the run faster. The second result says what was assumed. UsageError or DocumentError for
    what cannot be read.
    """
    from axonn_tune.learning.diagnose import diagnose as diagnose_one
    from axonn_tune.learning.evidence import joined
    from axonn_tune.learning.observed import read_rank_times
    from axonn_tune.learning.reading import EvidenceRequest, read_evidence

    if (path is None) == (step_s is None):
        raise UsageError("diagnose needs a log, a trace, a run's folder or rows of steps, or else --step SECONDS")
    paths = [] if path is None else [path]
    evidence = read_evidence(EvidenceRequest(paths=paths, step_s=step_s, asked=("precision",), **options))
    if known := list(evidence.known):
        own = f"{evidence.machine.name} has learned from {known[0]}, so its prediction has seen this run"
        evidence = replace(evidence, assumed=(own, *evidence.assumed))
    samples = [sample for sample in evidence.samples if sample.seen]
    beside = None
    if baseline is not None:
        run = (samples or evidence.samples)[0].narrowed(lambda same: same).setup
        beside = _baseline(baseline, baseline_facts, evidence.machine, options, run)
        more = (f"baseline: {words}" for words in beside.assumed if not any(words in one for one in evidence.assumed))
        evidence = replace(evidence, assumed=(*evidence.assumed, *more))
        for sample in samples or evidence.samples:
            _check_baseline(beside.samples[0], sample)
    elif baseline_facts:
        raise UsageError("--baseline-fact says what differs in another run: name that with --baseline")
    folder = next((Path(one) if Path(one).is_dir() else Path(one).parent for one in paths), None)
    ranks = read_rank_times(folder) if folder and any(len(sample.seen) > 1 for sample in samples) else None
    found = samples or [joined(evidence.samples)]
    other = None if beside is None else beside.samples[0]
    return tuple(diagnose_one(one, evidence.machine, ranks=ranks, baseline=other) for one in found), evidence


def _baseline(
    baseline: str | Path | float,
    facts: Mapping[str, object] | Sequence[str],
    machine: Machine,
    options: EvidenceOptions,
    run: Setup | None,
) -> Evidence:
    """What is read of the smaller run: the facts of the other one hold but where its own differ; of run, if it states
    more than a time, its model, batch and layout."""
    from axonn_tune.learning.reading import EvidenceRequest, read_evidence

    told, options = isinstance(baseline, float | int), options.copy()
    own: dict[str, object] = {}
    if told and run is not None and options.get("from_command") is None:
        grid, workload = run.layout.grid, run.workload
        own = {"gbs": workload.global_batch, "seq": workload.sequence_length, "mbs": run.layout.micro_batch}
        own |= {"tp": grid.x, "pp": grid.pipeline, "cp": grid.context, "precision": workload.precision}
        options["model"] = options.get("model") or run.model
        options["framework"] = options.get("framework") or run.framework.name
    several = (own, options.get("facts") or (), facts)
    stated = [
        word
        for one in several
        for word in ([f"{name}={value}" for name, value in one.items()] if isinstance(one, Mapping) else one)
    ]
    measured: dict[str, Any] = {"step_s": baseline, "step_option": "--baseline"} if told else {"paths": [baseline]}
    measured |= {**options, "machine": machine, "facts": stated}
    evidence = read_evidence(EvidenceRequest(asked=("precision",), **measured))
    if len(evidence.samples) != 1 or "step" not in evidence.samples[0].seen:
        raise UsageError(f"--baseline {baseline}: needs one run with a step, has {len(evidence.samples)}")
    return evidence


def _check_baseline(baseline: Sample, sample: Sample) -> None:
    """UsageError unless it is a smaller run, and both are steps."""
    if "step" not in sample.seen:
        raise UsageError(f"--baseline is for steps, and {sample.name} has none")
    if baseline.ranks >= sample.ranks:
        raise UsageError(
            f"--baseline: {baseline.name} is on {baseline.ranks} GPUs and {sample.name} on {sample.ranks}: it has to "
            "be the run on fewer, which --baseline-fact states, as in --baseline-fact n_gpus=8"
        )


@dataclass(frozen=True, repr=False, eq=False)
class CommandExplanation(Explanation):
    """Explanation of the run of a command or config file.

    stated: the run, its assumptions, its rank in a search, and faster changes.
    """

    stated: StatedCommand = field(kw_only=True)

    def sections(self, *, terms: bool = False) -> list[ExplainSection]:
        """The run, its gap to peak, the step in words, faster layouts, and every number."""
        gap, words, *numbers = super().sections(terms=terms)
        better = better_section(self.stated, self.priced)
        return [command_section(self.stated, self.priced), gap, words, better, *numbers]

    def to_dict(self) -> Json:
        """Everything, by the schema `axonn-tune/explain/1`, with `run` and `changes`."""
        return {**super().to_dict(), **command_json(self.stated)}


_RANKED = 10
"""Grids of a search that have a rank."""


def explain_command(path: str | Path, *, machine: MachineLike | None = None, **options: object) -> CommandExplanation:
    """Predict the run that a file starts, with faster layouts, as `axonn-tune explain --from-command` does.

    path: a bash script or argument list of Megatron-LM, Megatron-Core, NeMo, Megatron-DeepSpeed, Megatron-AxoNN or
    torchtitan, a TOML of torchtitan, a YAML of NeMo or accelerate, a JSON of DeepSpeed. Options of `axonn_tune.search`
    state what the file does not: gpus, model, framework, batch, seq, micro_batch, set, tokens_total, and precision
    also in place of one that is not modelled. UsageError or DocumentError, with file and line, for missing or
    impossible values.
    """
    run, setup, inputs = _stated(path, machine, options)
    priced, ranking = setup.priced, searched(setup, top=_RANKED)
    stated = StatedCommand(
        run=run,
        setup=setup,
        changes=changes_of(setup, lambda changed: changed.priced.iteration_s, ranking=ranking),
        ranking=ranking,
        machine=str(machine) if isinstance(machine, str | Path) else inputs.machine.document.name,
        model=named_model(path, options.get("model"), seq=int(run.columns["seq"].value)),
        why_none="" if len(ranking) else nothing_feasible(ranking),
    )
    job = replace(priced.job, tokens_total=inputs.problem.tokens_total)
    ranked = replace(priced, job=job, rank=1, shortest_step_s=priced.iteration_s)
    return CommandExplanation(inputs, ranked, stated=stated)


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
    return None if shipped_twin(own) else FileToWrite(file, own, shlex.join(words))


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
