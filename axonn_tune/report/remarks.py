"""Remarks below a ranking: what to do next in a few lines, and with -v why, how sure, and what was rejected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from axonn_tune.cost.collectives import Term
from axonn_tune.cost.price import METRICS as PRICES
from axonn_tune.cost.price import Detail, PricedLayout
from axonn_tune.cost.uncertainty import ACCELERATOR, DEVIATIONS, GENERATIONS, LARGEST, of_layout, outside, own_bound_s
from axonn_tune.frameworks import registry
from axonn_tune.program.feasibility import CHUNKS, EXPERT_OVERLAP, MEMORY, MICRO_BATCH, PINNED
from axonn_tune.program.memory import memory_limit_bytes, room_of
from axonn_tune.ranking.priced import WORTH_SAYING, Priced
from axonn_tune.ranking.space import Problem
from axonn_tune.report.ranking import METRICS, OUTSIDE, SHORTEST, TIED, entry_fields
from axonn_tune.report.training import training_words
from axonn_tune.request import ALPHA_BETA, DEFAULT_TOP
from axonn_tune.units import GIB, counted, show_bytes, show_seconds

if TYPE_CHECKING:
    from axonn_tune.cost.work import Parts

_TELLING = 0.02
"""Differences below this share of the total are summed as the rest."""
_MOST_NAMED = 3
"""Number of configurations within model error that a remark names."""
_LONG_CONTEXT = 32_768
"""Tokens in a sequence from which context parallelism is mentioned."""
INTERRUPTED = "Interrupted: the rest was not searched, and may have better layouts."


def ranking_verdict(ranked: Priced) -> list[str]:
    """Which configuration to take and why, in those of the sentences below a table that say so."""
    why = why_first(ranked) if len(ranked) < 2 or not ranked[1].tie else ""
    said = (shortest_step_remark(ranked), benchmark_remark(ranked), why, training_remark(ranked))
    return [one for one in said if one]


def short_remarks(ranked: Priced, families: Sequence[Sequence[int]], *, hint: str = "") -> list[str]:
    """What to do next, in a line each and the most important first; families: places of each row that is shown.

    hint: another, before all others but that of an interrupted search.
    """
    shortest = shortest_step_remark(ranked)
    said = [
        INTERRUPTED if ranked.interrupted else "",
        hint,
        kept_remark(ranked, [family[0] for family in families]),
        training_remark(ranked),
        shortest if shortest.startswith(SHORTEST) else "",
        benchmark_remark(ranked),
        interval_remark(ranked),
        assumed_remark(ranked, [family[0] for family in families]),
        folded_remark(ranked, families),
        nodes_remark(ranked.problem),
        context_remark(ranked.problem),
    ]
    return [sentence for sentence in said if sentence]


def ranking_remarks(ranked: Priced, families: Sequence[Sequence[int]], *, hint: str = "") -> list[str]:
    """The same, then all else that is known of the ranking."""
    places = [family[0] for family in families]
    tied, shortest = len(ranked) > 1 and ranked[1].tie, shortest_step_remark(ranked)
    said = [
        "" if shortest.startswith(SHORTEST) else shortest,
        stages_remark(ranked, places),
        "" if tied else why_first(ranked),
        *formats_remarks(ranked),
        expert_overlap_remark(ranked),
        logged_words(ranked[0]) if len(ranked) else "",
        ties_remark(ranked),
        outside_remark(ranked, places),
        rejected_remark(ranked),
        searched_remark(ranked),
    ]
    return [*short_remarks(ranked, families, hint=hint), *filter(None, said)]


def benchmark_remark(ranked: Priced) -> str:
    """Which rows to run before one is chosen, and what to compare with the log; empty without rows."""
    if not len(ranked):
        return ""
    problem = ranked.problem
    framework, logged = problem.framework, ""
    if (count := framework.logged and framework.logged.of(problem.model, problem.workload)) is not None:
        log = "the" if count.log == framework.title else f"{count.log}'s"
        as_whole = problem.workload.tuning is not None and not count.frozen
        whole = ", which counts all weights as if they trained" if as_whole else ""
        logged = f'; TFLOP/s is "{count.label}" in {log} log{whole}'
    if ranked.ties < 2:
        others = " (others are slower by more than model error)" if len(ranked) > 1 else ""
        return f"Run #1{others}{logged}."
    return f"Benchmark {_listed(_untied_families(ranked))} (within model error){logged}."


def _untied_families(ranked: Priced) -> list[str]:
    """Ranks of the first rows within model error of the first that differ in more than context and micro-batch."""
    families = ranked.families(DEFAULT_TOP)[:_MOST_NAMED]
    return [f"#{family[0] + 1}" for family in families if family[0] < ranked.ties]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def assumed_remark(ranked: Priced, places: Sequence[int]) -> str:
    """The assumption that matters most: a machine that nobody named, routing of experts, memory without reserve."""
    problem = ranked.problem
    machine, step = problem.machine, problem.framework.step
    if problem.machine_assumed:
        return f"Assumed: {machine.name}, since no --machine is given (`axonn-tune machines list` has others)."
    routed = [place for place in places if ranked[place].grid.expert > 1]
    if step.imbalance is None and routed:
        most = float(ranked.detail(routed[0]).values["imbalance"])
        return (
            f"Assumed: natural routing, {most:.2f} times the mean tokens on the fullest rank (--imbalance 1: balanced)."
        )
    limit_bytes = memory_limit_bytes(machine.accelerator)
    roomy = next((place for place in places if room_of(ranked[place].memory_bytes, limit_bytes) == "fits"), None)
    if not places or roomy == places[0]:
        return ""

    def leaves(place: int) -> str:
        return f"#{place + 1} leaves {show_bytes(limit_bytes - ranked[place].memory_bytes)}"

    instead = "" if roomy is None else f"; {leaves(roomy)}"
    return f"Tight: {leaves(places[0])} of {show_bytes(limit_bytes)} usable{instead}."


def folded_remark(ranked: Priced, families: Sequence[Sequence[int]]) -> str:
    """Rows that stand for others, with context parallelism in place of replicas; empty without any."""
    framework, said = ranked.problem.framework, list[str]()
    for first, *others in families:
        if others:
            sizes = " or ".join(f"{ranked[place].grid.context}" for place in others)
            replicas = f"{framework.called('data')} {ranked[first].grid.data}"
            said.append(f"#{first + 1} with {framework.called('context')} {sizes} for {replicas}")
    more = f" and {len(said) - _MOST_NAMED} more" if len(said) > _MOST_NAMED else ""
    return (
        f"Within model error, not listed: {', '.join(said[:_MOST_NAMED])}{more} (--unfold lists them)." if said else ""
    )


def stages_remark(ranked: Priced, places: Sequence[int]) -> str:
    """Pipeline layouts of the first rows whose stages are balanced by time; empty without any."""
    splits = {place: ranked[place].parts for place in places}
    named = [(place, parts) for place, parts in splits.items() if parts and parts != ranked.problem.parts][:_MOST_NAMED]
    if not named:
        return ""
    # Imported here: most searches balance no stages, and start-up time is theirs.
    from axonn_tune.stages import layout_text

    mtp, alike = ranked.problem.model.mtp_layers, dict[str, list[str]]()
    for place, parts in named:
        alike.setdefault(layout_text(parts, mtp=mtp), []).append(f"#{place + 1}")
    said = "; ".join(f"{', '.join(ranks)} {layout}" for layout, ranks in alike.items())
    return f"Stages balanced by time, with other numbers of layers: {said}."


def nodes_remark(problem: Problem) -> str:
    """That some node is not filled, as launchers and schedulers want; empty where all are."""
    per_node, gpus = problem.machine.launcher.ranks_per_node, problem.gpus
    if gpus % per_node == 0 or gpus < per_node:
        return ""
    return f"{gpus:,} GPUs do not fill nodes of {per_node}: scripts can be written for multiples of {per_node} only."


def context_remark(problem: Problem) -> str:
    """Frameworks with context parallelism, for long sequences in one without."""
    if "context" in problem.framework.axes or problem.workload.sequence_length < _LONG_CONTEXT:
        return ""
    others = [name for name, one in registry().items() if "context" in one.axes and one.launch]
    return (
        f"{problem.framework.title} has no context parallelism, which sequences of "
        f"{problem.workload.sequence_length:,} tokens may need: --framework {' or '.join(others)} has."
    )


def merged_remark(ranked: Priced, place: int) -> str:
    """Why a layout has no expert overlap although it was asked for; empty where it has, or was not asked for."""
    layout, called = ranked[place], ranked.problem.framework.called
    if not ranked.problem.request.expert_overlap or layout.expert_overlap:
        return ""
    reasons = (
        (layout.grid.expert == 1, f"{called('expert')} is 1"),
        (layout.dispatcher == "allgather", "all-gathers cannot overlap"),
        (True, f"recompute {layout.recompute} repeats experts"),
    )
    return f"--expert-overlap changes nothing here: {next(why for holds, why in reasons if holds)}."


def kept_remark(ranked: Priced, places: Sequence[int]) -> str:
    """That layers asked for not to be resharded are sharded in no row; empty where they are, or were not asked for."""
    kept = ranked.problem.request.kept_layers
    if not kept or not places or any(ranked[place].grid.z > 1 for place in places):
        return ""
    axis = ranked.problem.framework.called("z")
    return f"--kept-layers {kept} changes nothing here: {axis} is 1, so no layer is sharded."


def formats_remarks(ranked: Priced) -> list[str]:
    """What the best layout of each number format saves, of time and memory, over that of the first that fits."""
    best = ranked.best_by_format
    if len(best) < 2:
        if not ranked.problem.formats or ranked.problem.framework.formats:
            return []
        others = ", ".join(name for name, one in registry().items() if len(one.formats) > 1)
        return [f"{ranked.problem.framework.title} is priced in bf16 alone; with formats: {others}."]
    (first, base), *others_best = best.items()
    said = [f"{first} at best: {show_seconds(base.iteration_s)} a step, {show_bytes(base.memory_bytes)}{_at(base)}."]
    for name, one in others_best:
        saved_s, saved_bytes = base.iteration_s - one.iteration_s, base.memory_bytes - one.memory_bytes
        said.append(
            f"{name} at best: {show_seconds(one.iteration_s)}, {abs(saved_s) / base.iteration_s:.1%} "
            f"{'less' if saved_s >= 0 else 'more'}; {show_bytes(one.memory_bytes)}, {show_bytes(abs(saved_bytes))} "
            f"{'less' if saved_bytes >= 0 else 'more'}{_at(one)}{', within model error' * (one.tie and base.tie)}."
        )
    quickest = min((one for _, one in others_best), key=lambda one: one.iteration_s)
    said.append("MFU is relative to the peak of each row's own format: compare formats by tokens/s/GPU.")
    return [*said, f"{f'#{quickest.rank}: ' if quickest.rank else ''}{format_words(quickest.detail)}"]


def _at(row: PricedLayout) -> str:
    """The place of a row that has one."""
    return f" (#{row.rank})" if row.rank else ""


def format_words(priced: Detail) -> str:
    """Why a step in a format below 16 bits takes less, or no less, than in BF16; empty in others."""
    if (plain := priced.in_bf16) is None:
        return ""
    # Imported here: a table in BF16 does not say this, and start-up time is its own.
    from axonn_tune.cost.work import quantization

    (gemms_s, _), (own_s, quantizing_s) = quantization(plain), quantization(priced)
    return (
        f"{priced.job.workload.precision}: {show_seconds(priced.iteration_s)} a step, the same layout in bf16 "
        f"{show_seconds(plain.iteration_s)}. GEMMs take {show_seconds(own_s)} instead of {show_seconds(gemms_s)}, "
        f"quantization kernels with their launches {show_seconds(quantizing_s)}"
        f"{', no less than GEMMs save' if quantizing_s >= gemms_s - own_s else ''}."
    )


def expert_overlap_words(priced: Detail) -> str:
    """What a step would take without expert overlap; empty where it has none."""
    if (apart := priced.without_expert_overlap) is None:
        return ""
    more_bytes = priced.memory_bytes - apart.memory_bytes
    return (
        f"dispatch and combine overlap with computation of another micro-batch (--expert-overlap): "
        f"{show_seconds(priced.iteration_s)} a step, {show_seconds(apart.iteration_s)} without"
        f"{f', for {show_bytes(more_bytes)} more memory' if more_bytes else ''}."
    )


def offload_words(priced: Detail) -> str:
    """What a step would take with nothing on the host, and what that keeps; empty where nothing is there."""
    if (plain := priced.without_offload) is None:
        return ""
    host, moved = priced.job.machine.host, priced.job.framework.step
    stated_gib = host.memory_gib if host else None
    lacks = stated_gib is not None and priced.host_bytes > stated_gib * GIB
    of = f" of {show_bytes(stated_gib * GIB)}{', which is too little' if lacks else ''}" if stated_gib else ""
    what = ", ".join(moved.offloaded) or "activations"
    return (
        f"{what} on the host: {show_seconds(priced.iteration_s)} a step and {show_bytes(priced.memory_bytes)}, without "
        f"{show_seconds(plain.iteration_s)} and {show_bytes(plain.memory_bytes)}; a node's ranks keep "
        f"{show_bytes(priced.host_bytes)} there{of}{'' if host else '; link and Adam of the host are assumed'}"
    )


def expert_overlap_remark(ranked: Priced) -> str:
    """The same of the first layout, where the search chose it."""
    said = expert_overlap_words(ranked.detail(0)) if ranked.problem.compares_expert_overlap and len(ranked) else ""
    return f"#1: {said} --no-expert-overlap leaves it out." if said else ""


def training_remark(ranked: Priced) -> str:
    """Cost of a whole training run with the first configuration."""
    problem = ranked.problem
    if problem.tokens_total is None or not len(ranked):
        return ""
    found = entry_fields(ranked[0])
    return f"#1: {training_words(problem, found)} Evaluation comes on top."


def why_first(ranked: Priced) -> str:
    """Why the first configuration is faster than the next outside of its family, as one signed sum of causes."""
    rank_by, places = ranked.problem.rank_by, [family[0] for family in ranked.families(DEFAULT_TOP)]
    if len(ranked) < 2:
        pinned = " with these pins" if ranked.problem.request.axes else ""
        return f"Only one configuration{pinned} is feasible." if len(ranked) > ranked.searched.unlisted else ""
    rival = (*places, 1)[1]
    first, second = (ranked.with_terms(place) for place in (0, rival))
    name, attribute = METRICS[rank_by], PRICES[rank_by]
    less_s = getattr(second, attribute) - getattr(first, attribute)
    if less_s == 0.0:
        return f"#1 and #{rival + 1} have the same {name}; the shorter step decides, then less memory."
    # Imported here: only -v says this, and start-up time is everyone's.
    from axonn_tune.cost.work import separated, step_parts

    if rank_by == "iteration":
        base, other = (step_parts(ranked.detail(place)) for place in (rival, 0))
    else:
        base, other = _collective_reasons(ranked.problem, first, second)
    apart_s = [other.get(key, ("", 0.0))[1] - base.get(key, ("", 0.0))[1] for key in {**base, **other}]
    worth_s = _TELLING * sum(map(abs, apart_s))
    found = separated(base, other, longer_s=-less_s, worth_s=worth_s, unseen_s=worth_s / 10.0)
    parts = [f"{'-' if more_s < 0 else '+'}{show_seconds(abs(more_s))} {what}" for what, more_s in found]
    return f"#1 vs. #{rival + 1}: -{show_seconds(less_s)} of {name} = {', '.join(parts)} (minus: #1 takes less)."


def _collective_reasons(problem: Problem, first: PricedLayout, second: PricedLayout) -> tuple[Parts, Parts]:
    """Communication of the second and the first by collective and axis, all or exposed."""
    exposed = problem.rank_by != "communication"
    sizes = [{(term.op, _axis_of(term)): term.group for term in entry.terms} for entry in (first, second)]

    def called(key: tuple[str, str]) -> str:
        groups = dict.fromkeys(str(of[key]) for of in sizes if key in of)
        words = f"{key[0]} over {problem.framework.called(key[1])} ({' vs. '.join(groups)} ranks)"
        return f"exposed {words}" if exposed else words

    second_s, first_s = (_by_axis(entry.terms, exposed=exposed) for entry in (second, first))
    return (
        {key: (called(key), seconds) for key, seconds in second_s.items()},
        {key: (called(key), seconds) for key, seconds in first_s.items()},
    )


def _axis_of(term: Term) -> str:
    """Axes of a collective without context, which holds shards or replicas as z or data do."""
    return term.axis.replace("context", "") or term.axis


def _by_axis(terms: tuple[Term, ...], *, exposed: bool) -> dict[tuple[str, str], float]:
    """Seconds by collective and axis."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for term in terms:
        sums[term.op, _axis_of(term)] += (term.exposed_s or 0.0) if exposed else term.seconds
    return sums


def ties_remark(ranked: Priced) -> str:
    """Number of configurations within model error of the first, and which to benchmark: one of each family."""
    ties = ranked.ties
    if ties < 2:
        return ""
    machine = ranked.problem.machine
    known = f"communication ±{machine.uncertainty.communication:.0%}"
    if machine.learned is not None:
        known = "by what the profile has learned"
    else:
        own = f"each layout's step ±{DEVIATIONS * of_layout(ranked.problem.model):.0%}"
        known = f"{own}, exposed {known}" if ranked.problem.rank_by == "iteration" else f"{known}, {own}"
    last = ", the last that is listed," if ties == len(ranked) and ranked.searched.unlisted else ""
    listed, others = _untied_families(ranked), "#2" if ties == 2 else f"#2 to #{ties:,}"
    benchmark = f": benchmark {_listed(listed)} first" if len(listed) > 1 else ""
    return f"{TIED}: {others}{last} {'is' if ties == 2 else 'are'} within model error of #1 ({known}){benchmark}."


def interval_remark(ranked: Priced) -> str:
    """#1's step with its 80% interval, and how much of that differs between rows."""
    first = ranked[0] if len(ranked) else None
    if first is None:
        return ""
    machine = ranked.problem.machine
    own_s = own_bound_s(ranked.problem, step_s=first.iteration_s, waiting_s=first.exposed_communication_s)
    between = f", between rows ±{show_seconds(own_s)}"
    if machine.learned is not None:
        apart = ranked.difference
        of = METRICS[ranked.problem.rank_by]
        between = "" if apart is None else f", ±{apart:.1%} between #1 and #2 in {of}"
    return (
        f"#1: {show_seconds(first.iteration_s)} a step, 80% interval {show_seconds(first.low_s)} to "
        f"{show_seconds(first.high_s)}{between}."
    )


_SIZES = {"gpus": "number of GPUs", "sequence": "sequence length"}


def outside_remark(ranked: Priced, places: Sequence[int]) -> str:
    """What of these rows no published step validates, with the largest among those steps; "" without any."""
    problem = ranked.problem
    found = dict.fromkeys(name for place in places for name in outside(problem, ranked[place]))
    names = [name for name in found if name != ACCELERATOR]
    said = [
        f"largest {_SIZES.get(name) or problem.framework.called(name)} in the data: {LARGEST[name]:,}" for name in names
    ]
    if ACCELERATOR in found:
        said.append(f"{problem.machine.accelerator.name}: the data has {', '.join(map(str.capitalize, GENERATIONS))}")
    return f"{OUTSIDE}: outside what was validated ({'; '.join(said)})." if said else ""


def shortest_step_remark(ranked: Priced) -> str:
    """The candidate with the shortest step, and its gain over the first configuration."""
    problem = ranked.problem
    best = ranked.fastest() if len(ranked) and problem.rank_by != "iteration" else None
    if best is None:
        return ""
    first_s = ranked[0].iteration_s
    gain = 1.0 - best.iteration_s / first_s
    if best.iteration_s == first_s:
        return "#1 also has the shortest step of all."
    if gain < WORTH_SAYING:
        return f"#1's step is within {WORTH_SAYING:.0%} of the shortest of all, {show_seconds(best.iteration_s)}."
    rank = ranked.ranks().get(tuple(map(best.grid.axis_size, problem.axes)))
    grid = f"the grid of #{rank}" if rank else "another grid"
    cost = "" if ranked.cost == ALPHA_BETA else f"--cost {ALPHA_BETA} "
    return (
        f"{SHORTEST} {show_seconds(best.iteration_s)}, {gain:.0%} less than #1, on {grid}: {cost}--rank-by step ranks "
        "by step time."
    )


def rejected_remark(ranked: Priced) -> str:
    """Number of rejected layouts by constraint."""
    found, problem = ranked.searched, ranked.problem
    left_out = found.grids - int(ranked.feasible.sum())
    if not left_out:
        return "The only layout is feasible." if found.grids == 1 else f"All {found.grids:,} layouts are feasible."
    most_first = sorted(found.rejected.items(), key=lambda one: -one[1])
    called = _CONSTRAINTS | {one.name: f"with {one.brief(problem.framework)}" for one in ranked.grids.constraints}
    reasons = ", ".join(f"{number:,} {called.get(name, name)}" for name, number in most_first)
    several = " (a layout can break several)" if sum(found.rejected.values()) > left_out else ""
    of, are, them = counted(found.grids, "layout"), *(("is", "it") if left_out == 1 else ("are", "them"))
    return f"{left_out:,} of {of} {are} rejected: {reasons}{several}; --all lists {them}."


_CONSTRAINTS = {
    MEMORY: "out of memory",
    MICRO_BATCH: "without a micro-batch that divides the batch",
    CHUNKS: "without the chunks asked for",
    EXPERT_OVERLAP: "without room for expert overlap",
    PINNED: "other than pinned",
}


def searched_remark(ranked: Priced) -> str:
    """How much fits into memory of what was searched, and the time, on a line of its own."""
    found, variants = ranked.searched, ranked.problem.request.variants
    fit, of = "fits" if found.feasible == 1 else "fit", counted(found.candidates, "candidate" if variants else "layout")
    of = of if variants else f"{of} with micro-batch and rank order"
    what = "candidate" if variants else "layout"
    more = f"{counted(found.unlisted, f'more {what}')} {'has' if found.unlisted == 1 else 'have'} no rank"
    rest = f" {more}: --top 0 ranks all." if found.unlisted else ""
    return f"{found.feasible:,} of {of} {fit}, searched in {show_seconds(found.seconds)}.{rest}"


def logged_words(entry: PricedLayout) -> str:
    """What the framework's own log will print, in a sentence; empty if it prints nothing of the kind."""
    job = entry.job
    count, peak = job.logged, job.machine.accelerator.peak_tflops[job.gemm_format]
    tflops = entry.logged_tflops_per_gpu
    if count is None or tflops is None:
        return ""
    will = "will" if count.log.lower() in job.framework.title.lower() else "would"
    return (
        f'{count.log}\'s log {will} print about {tflops:,.0f} TFLOP/s per GPU ("{count.label}"), {tflops / peak:.1%} '
        f"of peak: it counts {count.counts}."
    )
