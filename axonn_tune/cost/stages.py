"""Price of one candidate with pipeline stages: each stage's program replayed by itself, joined by the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from axonn_tune.cost.collectives import Line, collective_time_s, lines_of, route, transfer_time_s
from axonn_tune.cost.compute import compute_s
from axonn_tune.cost.pipeline import PipelineTime, StageTimes, pipeline_time, stage_end_s
from axonn_tune.cost.timeline import Batch, ChunkTimes, Timeline
from axonn_tune.program.dimensions import executed_flops
from axonn_tune.program.memory import Memory, memory_limit_bytes
from axonn_tune.program.pipeline import in_flight, model_parts
from axonn_tune.program.size import PLAIN
from axonn_tune.program.step import Stage

if TYPE_CHECKING:
    from axonn_tune.cost.prediction import Pricing, StagePrediction, Term, _Pricer


@dataclass(frozen=True)
class _PricedStage:
    """One stage: durations of its chunks, and all parts of a rank's step except sends."""

    stage: Stage
    blocks: int
    chunks: tuple[ChunkTimes, ...]
    values: dict[str, float]
    memory: Memory
    terms: tuple[Term, ...]
    compute_s: float
    host_s: float
    flops: float
    record: Callable[[], tuple[Batch, ...]]


def parts_of(pricer: _Pricer) -> tuple[int, ...]:
    """Blocks of each model part, chunk c of stage s at c·p + s."""
    asked = pricer.configuration
    return model_parts(pricer.model.layers, stages=asked.grid.pipeline, chunks=asked.chunks, given=asked.parts)


def price_stages(pricer: _Pricer) -> Pricing:
    """The candidate's stages, joined by 1F1B or interleaved 1F1B."""
    from axonn_tune.cost.prediction import Pricing

    stages = tuple(_price_stages(pricer))
    sends = _Sends(pricer)
    time = _step(pricer, stages, sends)
    communication = [sum(term.seconds for term in one.terms) for one in stages]
    sent_s = [count * sends.one_s for count in time.sends]
    most = max(range(len(stages)), key=lambda at: communication[at] + sent_s[at])
    slowest = max(range(len(stages)), key=lambda at: stages[at].compute_s)
    shown, busiest = stages[most], stages[slowest]
    terms = (*shown.terms, *sends.terms(time, most))
    return Pricing(
        framework=pricer.framework,
        configuration=pricer.configuration,
        accumulation=int(shown.values["A"]),
        memory=max((one.memory for one in stages), key=lambda memory: float(memory.total_bytes)),
        memory_limit_bytes=memory_limit_bytes(pricer.machine.accelerator),
        terms=terms,
        alone_s=busiest.compute_s,
        scheduled_s=time.step_s,
        executed_flops=sum(one.flops for one in stages) / len(stages),
        values=shown.values,
        program=pricer.program,
        rates=pricer.rates,
        host_s=busiest.host_s,
        bubble_s=min(time.bubble_s[slowest], max(0.0, time.step_s - busiest.compute_s)),
        stages=tuple(_predictions(stages, time, communication, sent_s)),
        stage=most,
        computing=(busiest.stage, busiest.values),
        record=shown.record,
    )


def _predictions(
    stages: tuple[_PricedStage, ...], time: PipelineTime, communication: list[float], sent_s: list[float]
) -> Iterator[StagePrediction]:
    from axonn_tune.cost.prediction import StagePrediction

    for at, one in enumerate(stages):
        yield StagePrediction(
            blocks=one.blocks,
            compute_s=one.compute_s,
            communication_s=communication[at] + sent_s[at],
            bubble_s=time.bubble_s[at],
            memory=one.memory,
        )


def _price_stages(pricer: _Pricer) -> Iterator[_PricedStage]:
    """Every stage; stages that differ only in memory are replayed once."""
    parts, stages = parts_of(pricer), pricer.grid.pipeline
    kept = _kept_everywhere(pricer, parts)
    known: dict[tuple[Stage, tuple[int, ...], float], _PricedStage] = {}
    for number in range(stages):
        stage, blocks = Stage(number == 0, number == stages - 1), parts[number::stages]
        held = _blocks_held(pricer, number, blocks)
        values, memory = pricer.settled(stage, sum(blocks), held, kept_layers=kept)
        key = stage, blocks, values["kept"]
        if key not in known:
            known[key] = _price_stage(pricer, stage, blocks, values, memory)
        yield replace(known[key], values=values, memory=memory)


def _kept_everywhere(pricer: _Pricer, parts: tuple[int, ...]) -> float:
    """Layers not resharded after forward that every stage has memory for; the first, second and last have the least."""
    stages, asked = pricer.grid.pipeline, pricer.configuration.kept_layers
    if asked is not None:
        return float(asked)
    found = [float(max(sum(parts[number::stages]) for number in range(stages)))]
    for number in {0, min(1, stages - 1), stages - 1}:
        blocks = parts[number::stages]
        stage = Stage(number == 0, number == stages - 1)
        _, memory = pricer.settled(stage, sum(blocks), _blocks_held(pricer, number, blocks))
        if memory.kept_layers < sum(blocks):
            found.append(float(memory.kept_layers))
    return min(found)


def _blocks_held(pricer: _Pricer, number: int, blocks: tuple[int, ...]) -> float:
    """Largest number of blocks with saved activations at once on a stage."""
    grid, batch = pricer.grid, pricer.workload.global_batch
    micro_batches = batch // (grid.batch_shares * pricer.configuration.micro_batch)
    return float(in_flight(number, stages=grid.pipeline, micro_batches=micro_batches, weights=blocks))


def _price_stage(
    pricer: _Pricer, stage: Stage, blocks: tuple[int, ...], values: dict[str, float], memory: Memory
) -> _PricedStage:
    """Replay each chunk of a stage from free streams; only its first and last have embedding and LM head."""
    clock, prices, timeline = pricer.priced(values)
    chunks = _replay(pricer, timeline, stage, blocks, values)
    return _PricedStage(
        stage=stage,
        blocks=sum(blocks),
        chunks=chunks,
        values=values,
        memory=memory,
        terms=prices.terms(pricer.program, timeline.exposed_s, stage),
        compute_s=float(compute_s(pricer.program, clock, stage)) + timeline.host_s,
        host_s=timeline.host_s,
        flops=float(executed_flops(pricer.program, values, stage)),
        record=partial(_record, pricer, stage, blocks, values),
    )


def _replay(
    pricer: _Pricer, timeline: Timeline, stage: Stage, blocks: tuple[int, ...], values: dict[str, float]
) -> tuple[ChunkTimes, ...]:
    """Replay each chunk of a stage from free streams; only its first and last have embedding and LM head."""
    times, kept = int(values["A"]), int(values["kept"])
    chunks = []
    for number, count in enumerate(blocks):
        of_chunk = Stage(stage.first and number == 0, stage.last and number == len(blocks) - 1)
        share = min(count, kept * count // max(1, sum(blocks)))
        found = timeline.chunk(
            pricer.schedule, of_chunk, stage, layers=count, kept=share, times=times, ends=number == 0
        )
        chunks.append(found)
    return tuple(chunks)


def _record(pricer: _Pricer, stage: Stage, blocks: tuple[int, ...], values: dict[str, float]) -> tuple[Batch, ...]:
    """A second replay of a stage that records every interval."""
    timeline = pricer.priced(values, recording=True)[2]
    _replay(pricer, timeline, stage, blocks, values)
    return tuple(timeline.batches)


class _Sends:
    """Activations and gradients between stages, over x in shares where a framework does so."""

    def __init__(self, pricer: _Pricer) -> None:
        grid, machine = pricer.grid, pricer.machine
        self.schedule = pricer.framework.schedule
        self.machine = machine
        self.stride = grid.stride("pipeline")
        values = pricer.settled(Stage(first=True, last=False))[0]
        self.message = pricer.program.send(scattered=self.schedule.scattered)
        whole = pricer.program.send(scattered=False)
        self.whole_bytes, self.size_bytes = (float(one.size_bytes.evaluate(values)) for one in (whole, self.message))
        self.gathered = self.schedule.scattered and not pricer.options.sequence_parallel
        self.chunks = pricer.configuration.chunks
        path, call_s = route(grid.group_shape("x"), machine.tiers, grid.world), pricer.call_s
        self._gather = lines_of("all_gather", path, machine, call_s=call_s) if self.gathered else ()
        self.calls = 2 if self._gather else 1
        sent_s = transfer_time_s(self.size_bytes, stride=self.stride, machine=machine, call_s=call_s)
        self.one_s = float(sent_s) + self._gather_s()

    @property
    def overlapped(self) -> bool:
        """Whether sends overlap with computation."""
        return self.schedule.overlapped_interleaved if self.chunks > 1 else self.schedule.overlapped

    def _gather_s(self) -> float:
        chosen = tuple((line.latency_s, line.bandwidth_bytes_per_s) for line in self._gather)
        return float(collective_time_s(chosen, self.whole_bytes, PLAIN))

    def terms(self, time: PipelineTime, stage: int) -> Iterator[Term]:
        """The sends of one stage as a term."""
        from axonn_tune.cost.prediction import Term

        count = time.sends[stage]
        if not count:
            return
        bandwidth = self.size_bytes / max(self.one_s, 1e-12)
        yield Term(
            op=self.message.kind,
            axis=self.message.axis,
            phase=self.message.phase,
            layer=self.message.layer,
            count=count,
            bytes=self.size_bytes,
            group=2,
            tier=self._tier(),
            seconds=count * self.one_s,
            exposed_s=min(time.exposed_send_s[stage], count * self.one_s),
            formula=str(self.message.size_bytes),
            collective=self.message,
            line=Line("direct", "simple", 0.0, bandwidth),
        )

    def _tier(self) -> str:
        tiers = self.machine.tiers
        return next((tier.name for tier in tiers if tier.ranks is None or self.stride < tier.ranks), tiers[-1].name)


def _step(pricer: _Pricer, stages: tuple[_PricedStage, ...], sends: _Sends) -> PipelineTime:
    """The step by the exact recurrence."""
    times = StageTimes(
        forward_s=[[chunk.forward_s for chunk in one.chunks] for one in stages],
        backward_s=[[chunk.backward_s for chunk in one.chunks] for one in stages],
        last_backward_s=[[chunk.last_backward_s for chunk in one.chunks] for one in stages],
        end_s=[float(stage_end_s(one.chunks, stages=len(stages))) for one in stages],
        activation_send_s=sends.one_s,
        gradient_send_s=sends.one_s,
        overlapped=sends.overlapped,
    )
    return pipeline_time(times, micro_batches=int(stages[0].values["A"]))
