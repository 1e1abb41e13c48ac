"""`axonn_tune.learn` and `diagnose`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from axonn_tune.errors import UsageError
from axonn_tune.files import write_text_atomically
from axonn_tune.specs.document import to_yaml

if TYPE_CHECKING:
    from axonn_tune.learning.diagnose import Diagnosis
    from axonn_tune.learning.learn import Learning
    from axonn_tune.learning.reading import Evidence
    from axonn_tune.specs.catalog import MachineLike, ModelLike


class EvidenceOptions(TypedDict, total=False):
    """What evidence does not say of itself, as of `axonn-tune learn`; each may be left out.

    machine: base profile. framework, model: what logs ran. facts: columns of the step CSV, as a mapping or as
    `"tp=8"`. ranks, nodes: of a collective log. ranks_per_node: gives a profile of one network level nodes.
    """

    machine: MachineLike | None
    framework: str | None
    model: ModelLike | None
    facts: Mapping[str, object] | Sequence[str]
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
    """Move a profile's numbers as far as files of evidence make them, as `axonn-tune learn` does.

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


def diagnose(path: str | Path, **options: Unpack[EvidenceOptions]) -> tuple[tuple[Diagnosis, ...], Evidence]:
    """Whether a run is reasonable, as `axonn-tune diagnose` says it: one diagnosis for each run of a file.

    path: a training log, steps as CSV, a trace, a log of collectives, a measurement file or the folder of a run. Each
    diagnosis has `reasonable`, the predicted step with its interval, `causes` with their probabilities, the most
    probable first, and `changes` that would make the run faster. The second result says what was assumed. UsageError
    or DocumentError for what cannot be read.
    """
    from axonn_tune.learning.diagnose import diagnose as diagnose_one
    from axonn_tune.learning.diagnose import read_rank_times
    from axonn_tune.learning.evidence import joined
    from axonn_tune.learning.reading import EvidenceRequest, read_evidence

    evidence = read_evidence(EvidenceRequest(paths=[path], **options))
    if known := list(evidence.known):
        own = f"{evidence.machine.name} has learned from {known[0]}, so its prediction has seen this run"
        evidence = replace(evidence, assumed=(own, *evidence.assumed))
    samples = [sample for sample in evidence.samples if sample.seen]
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    ranks = read_rank_times(folder) if any(len(sample.seen) > 1 for sample in samples) else None
    found = samples or [joined(evidence.samples)]
    return tuple(diagnose_one(sample, evidence.machine, ranks=ranks) for sample in found), evidence
