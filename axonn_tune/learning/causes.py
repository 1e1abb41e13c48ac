"""Explanations of a step that is not as predicted: what changes, how much, how probable beforehand, and advice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.learning.evidence import Adjust, Setup, probe_samples
from axonn_tune.learning.observed import DISPATCH_US, NOTICED, Guess, Observed
from axonn_tune.learning.setups import alternatives, captures, most_bytes, possible, with_step
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.points import CollectiveProbe
from axonn_tune.units import GB, show_seconds

PRIORS: Mapping[str, float] = {
    "nothing": 60.0,
    "oversubscribed": 60.0,
    "recompute": 5.0,
    "micro_batch": 4.0,
    "precision": 8.0,
    "overlaps": 3.0,
    "overlap": 3.0,
    "imbalance": 6.0,
    "dispatcher": 10.0,
    "routing": 3.0,
    "cuda_graphs": 3.0,
    "interleaving": 2.0,
    "rank_order": 2.0,
    "kernels": 2.0,
    "attention": 2.0,
    "sequence_parallel": 2.0,
    "distributed_optimizer": 2.0,
    "sockets": 8.0,
    "gpudirect": 3.0,
    "nics": 3.0,
    "slow_network": 3.0,
    "slow_link": 2.0,
    "latency": 1.0,
    "host": 3.0,
    "straggler": 3.0,
    "throttled": 2.0,
    "shared": 2.0,
    "memory": 1.0,
    "contention": 1.0,
    "launch": 1.0,
}
"""Relative prior probabilities of faults, estimated, not measured. Most runs are as stated. Flags that are not in
effect and the inter-node network are the most frequent faults. `sockets`, `gpudirect`, `nics` and `slow_network` are of
the outermost network level, `slow_link` of each other one, `latency` of each. `dispatcher` and `imbalance` are of
models with experts."""

OF_NETWORK = ("sockets", "gpudirect", "nics", "slow_network")
"""Those of the outermost network level."""

UNSTATED = 4.0
"""How many times as often an option differs from what was assumed of it as from what was stated: judgement, too. No run
states its token imbalance unless it forces the load balance."""

CONTRADICTED = 40.0
"""The same of a number format that was asked for where the log itself states another."""

LATE_HOST = 4.0
"""How many times as often the host is late with experts and without CUDA graphs: the steps of one layout of DeepSeek-V3
halved as launches and Python were removed (NVIDIA/Megatron-LM@1d9edcf8, docs/discussions)."""


@dataclass(frozen=True)
class Factors:
    """By what a number may be worse, from least to most; how probable each is declines with this power of it."""

    least: float = 1.1
    most: float = 10.0
    decline: float = 0.0

    @property
    def priced(self) -> list[float]:
        """Those that are priced."""
        return [float(factor) for factor in np.geomspace(self.least, self.most, 10)]

    @property
    def tried(self) -> list[float]:
        """Those of guesses, between which logarithms of prices are interpolated."""
        return [float(factor) for factor in np.geomspace(self.least, self.most, TRIED)]


TRIED = 46
"""Guesses of a number that is worse."""

ANY, RARE = Factors(), Factors(decline=2.0)
"""Of links and fixed times; and of computation, which seldom takes several times as long: a thermal or power slowdown
divides clocks by about two (NVML API, nvmlClocksEventReasonHwSlowdown)."""

IMBALANCE, HOST = Factors(decline=1.0), Factors(decline=1.0)

SOCKETS_GB_PER_S = 3.0, 32.0
"""What NCCL sends from a node over TCP, least and most: one interface of 25 Gbit/s carries 3.1 GB/s, a NIC of 12.5 GB/s
gave 4 by IPoIB (NVIDIA/nccl#465), of which a node may have eight."""

STAGED = Factors(1.5, 4.0)
"""Through host memory for want of GPUDirect RDMA: the same NIC gave 6 of 12.5 GB/s. With several NICs and GPUs behind
one root port of PCIe it is less."""

DEGRADED = Factors(1.1, 3.0)
"""Of a network with RDMA that is congested, or has lanes, cables or routes that are down."""


@dataclass(frozen=True)
class Hypothesis:
    """One explanation: its guesses, and advice; weight: multiplies its prior."""

    kind: str
    title: str
    guesses: tuple[Guess, ...]
    advice: str = ""
    weight: float = 1.0


KINDS = {
    "mbs": "micro_batch",
    "vpp": "interleaving",
    "recompute": "recompute",
    "seq_parallel": "sequence_parallel",
    "zero_stage": "distributed_optimizer",
    "routing": "routing",
    "dispatcher": "dispatcher",
    "precision": "precision",
}
"""Columns that a row may leave blank, and the hypothesis of another value. Attention has none: frameworks that have it
fused seldom run without."""


def hypotheses_of(observed: Observed) -> Iterator[Hypothesis]:
    """All explanations that change the prediction."""
    found = [*_worse_numbers(observed)]
    if observed.setup is not None:
        found += [
            *_other_setups(observed, observed.setup),
            _straggler(observed),
            *_imbalanced(observed, observed.setup),
        ]
    if observed.sample.ranks_per_core > 1.0:
        found.append(_oversubscribed(observed, observed.sample.ranks_per_core))
    stated = observed.logs(observed.stated.times)
    for one in found:
        apart = [float(np.nanmax(np.abs(observed.logs(guess.times) - stated))) for guess in one.guesses]
        if max(apart) > NOTICED:
            yield one


def _worse_numbers(observed: Observed) -> Iterator[Hypothesis]:
    """A number of the profile that is worse than its uncertainty allows."""
    gloo = observed.prior.machine.launcher.backend == "gloo"
    for one in _numbers(observed.prior.machine):
        advice = _OF_GLOO.get(one.advice, one.advice) if gloo else one.advice
        late = observed.late_host if one.kind == "host" else {}
        launches = one.kind == "host" and observed.launches_experts
        worse = [{path: factor**sign for path, sign in one.signs.items()} for factor in one.factors.priced]
        priced = [observed.price(observed.slower(factors, stated=late)) for factors in worse]
        if launches:
            nearest = min(range(len(priced)), key=lambda at: abs(priced[at]["step"] - observed.measured_s))
            advice += _captured(observed, observed.slower(worse[nearest], stated=late))
        words = f"{{:g}} × {DISPATCH_US:g} µs an operation" if late else "{:g} times slower"
        guesses = _between(observed, priced, words, one.factors)
        yield Hypothesis(one.kind, one.title, guesses, advice, LATE_HOST if launches else 1.0)


def _captured(observed: Observed, late: Adjust) -> str:
    """What CUDA graphs would save of a step whose host is late."""
    setup = observed.setup
    graphs = {} if setup is None else captures(setup)
    steps = {scope: observed.price(late, one)["step"] for scope, one in graphs.items() if scope}
    if not steps:
        return ""
    scope = min(steps, key=steps.__getitem__)
    took = show_seconds(steps[scope])
    return f" With --cuda-graphs {scope}, and the host as late, the step is predicted to take {took}."


def _between(
    observed: Observed, priced: Sequence[Mapping[str, float]], words: str, factors: Factors
) -> tuple[Guess, ...]:
    """Guesses at the factors that are tried from what is predicted at those that are priced; words: of a factor."""
    columns = np.array([observed.logs(times) for times in priced]).T
    tried, at = factors.tried, np.log(factors.priced)
    between = np.array([np.interp(np.log(tried), at, column) for column in columns]).T
    found = (dict(zip(observed.rows, np.nan_to_num(np.exp(logs)).tolist(), strict=True)) for logs in between)
    return tuple(
        replace(
            observed.stated,
            words=words.format(float(f"{factor:.2g}")),
            times={**observed.stated.times, **times},
            chance=factor**-factors.decline,
        )
        for factor, times in zip(tried, found, strict=True)
    )


def _imbalanced(observed: Observed, setup: Setup) -> Iterator[Hypothesis]:
    """More tokens on one rank of experts than predicted, for which all others wait."""
    step, ranks = setup.framework.step, setup.layout.grid.expert
    if ranks == 1:
        return
    natural, own = step.imbalance is None, float(setup.priced.values["imbalance"])
    # A token has each expert once, so the most loaded rank gets as many copies of it as it has experts.
    most = max(
        ranks * min(1.0, one.count / ranks / one.per_token)
        for one in (layer.experts for layer in setup.model.types)
        if one is not None
    )
    factors = replace(IMBALANCE, most=min(IMBALANCE.most, most / own))
    if factors.most <= factors.least:
        return
    priced = [observed.price(observed.known, with_step(setup, imbalance=own * factor)) for factor in factors.priced]
    guesses = _between(observed, priced, f"{{:g}} times the assumed {own:.3g}", factors)
    balanced_s = observed.price(observed.known, with_step(setup, imbalance=1.0))["step"]
    advice = f"{_BALANCE} Balanced, the step is predicted to take {show_seconds(balanced_s)}."
    yield Hypothesis("imbalance", "token imbalance of experts", guesses, advice, UNSTATED if natural else 1.0)


@dataclass(frozen=True)
class _Worse:
    """Numbers of a profile that get worse together, with the sign of the exponent, by these factors."""

    kind: str
    title: str
    signs: Mapping[str, float]
    advice: str = ""
    factors: Factors = ANY


def _numbers(machine: Machine) -> Iterator[_Worse]:
    """Every number of a profile that may be worse."""
    accelerator = {"accelerator.training_share": -1.0}
    memory = {"accelerator.memory_bandwidth_gb_per_s": -1.0}
    host = {f"accelerator.{name}": 1.0 for name in ("kernel_launch_us", "matmul_launch_us")}
    host |= {f"software.{key}.{name}": 1.0 for key in machine.software for name in ("operation_us", "dispatch_us")}
    calls = {"library.launch_us": 1.0} | {f"software.{key}.collective_us": 1.0 for key in machine.software}
    for tier in machine.tiers:
        rate, hop = {f"tiers.{tier.name}.bandwidth_gb_per_s": -1.0}, {f"tiers.{tier.name}.latency_us": 1.0}
        if tier is not machine.tiers[-1]:
            yield _Worse("slow_link", f"slow link: bandwidth of {tier.name}", rate, _LINKS)
        elif tier is machine.tiers[0] or machine.launcher.backend == "gloo":
            yield _Worse("slow_network", f"slow link: bandwidth of {tier.name}", rate, _LINKS)
        else:
            yield from _network(machine, rate)
        yield _Worse("latency", f"latency of {tier.name}", hop, _LINKS)
    yield _Worse("throttled", "sustained efficiency of GEMMs and attention (clocks, power)", accelerator, _CLOCKS, RARE)
    whole = accelerator | memory | host
    title = "the accelerator as a whole (shared with another process, or another one)"
    yield _Worse("shared", title, whole, _SHARED, RARE)
    yield _Worse("memory", "memory bandwidth", memory, _CLOCKS, RARE)
    yield _Worse("host", "host-bound: dispatch and launch of kernels", host, _HOST, HOST)
    yield _Worse("contention", "larger compute slowdown from overlap", {"accelerator.contention": 1.0})
    yield _Worse("launch", "fixed time of each collective call", calls, _LINKS)


def _network(machine: Machine, rate: Mapping[str, float]) -> Iterator[_Worse]:
    """What makes the network between nodes slow, and by how much each does."""
    name, test = f"network ({machine.tiers[-1].name})", _link_test(machine)
    full, (least, most) = machine.tiers[-1].bandwidth_bytes_per_s / GB, SOCKETS_GB_PER_S
    if full > ANY.least * least:
        tcp = Factors(max(ANY.least, full / most), full / least)
        yield _Worse("sockets", f"{name}: TCP sockets in place of RDMA", rate, f"{_SOCKETS} {test}", tcp)
    yield _Worse("gpudirect", f"{name}: no GPUDirect RDMA", rate, f"{_GPUDIRECT} {test}", STAGED)
    nics = machine.launcher.ranks_per_node
    if nics > 1:
        # A NIC a GPU, as these nodes mostly have them.
        advice = f"{_NICS} {test}"
        yield _Worse("nics", f"{name}: 1 of {nics} NICs in use", rate, advice, Factors(0.85 * nics, 1.15 * nics))
    yield _Worse("slow_network", f"{name}: congested or degraded links", rate, f"{_LINKS} {test}", DEGRADED)


def _link_test(machine: Machine) -> str:
    """What to run on two nodes, and what it should print by the profile."""
    per_node, framework = machine.launcher.ranks_per_node, AXONN_TUNE
    probe = CollectiveProbe(op="all_gather", group=2 * per_node, stride=1, size_bytes=1 << 30)
    (sample,) = probe_samples({probe: 1.0}, machine, framework, name="")
    rate = sample.bus_bytes[0] / sample.price(lambda same: same)[0] / GB
    return (
        f"On two nodes, `srun -N 2 --ntasks-per-node {per_node} all_gather_perf -b 1G -e 1G -g 1` of "
        f"{machine.library.name.lower()}-tests should have a busbw of {rate:.3g} GB/s by this profile."
    )


_SOCKETS = (
    "NCCL_DEBUG=INFO prints the transport: `NET/Socket` is TCP, `NET/IB` is RDMA, `NET/OFI` that of EFA or Slingshot. "
    "Look for NCCL_IB_DISABLE=1, an NCCL_NET or NCCL_IB_HCA that finds no device, a container without /dev/infiniband, "
    "the plugin of the cloud (aws-ofi-nccl) or unlimited locked memory. If it has to be TCP, NCCL_SOCKET_IFNAME names "
    "the fast interface."
)
_GPUDIRECT = (
    "NCCL_DEBUG=INFO prints `NET/IB/0/GDRDMA` for each channel with GPUDirect RDMA, `NET/IB/0` without it: load "
    "nvidia-peermem, disable ACS, and see NCCL_NET_GDR_LEVEL."
)
_NICS = (
    "NCCL_DEBUG=INFO prints the NICs in use after `NET/IB : Using`: NCCL_IB_HCA must name all that carry data, each up "
    "(ibstat), and the container must see them."
)
_LINKS = (
    "Measure the links with nccl-tests on these nodes (then `axonn-tune learn`), look at NCCL_DEBUG=INFO for the "
    "transport, NICs and rings in use (NCCL_IB_HCA, NCCL_SOCKET_IFNAME, NCCL_NET_GDR_LEVEL), and exclude slow nodes."
)
_CLOCKS = "Check clocks, power and temperature while it trains (nvidia-smi -q -d CLOCK,POWER,PERFORMANCE)."
_OF_GLOO = {
    _LINKS: (
        "Measure the links between the hosts (iperf3, `axonn-tune calibrate`), and look at GLOO_SOCKET_IFNAME: Gloo "
        "sends over TCP, on the interface of the host's name unless that is set."
    ),
    _CLOCKS: "Check clocks and other processes on the cores while it trains (top, turbostat).",
}
_SHARED = "Check for other processes on the accelerators and cores, and that each rank has its own cores."
_HOST = "Bind each rank to cores next to its GPU (numactl, --cpu-bind), compile, or use CUDA graphs."
_QUEUES = "Check that the flags reached every rank, and CUDA_DEVICE_MAX_CONNECTIONS=1 where the framework needs it."
_BALANCE = (
    "Log the tokens of each expert. A balancing loss or a bias of the router evens them out (--moe-aux-loss-coeff, "
    "--moe-router-enable-expert-bias); a capacity factor bounds them, and drops tokens."
)
_DISPATCH = (
    "Look for the dispatcher's kernels in a profiler trace, and compare --moe-token-dispatcher-type and the backend of "
    "flex with the arguments that the run printed."
)
_FLAGS = "Compare the arguments that the run printed with those stated here."
_STATE = "State the settings that ran, as columns of the CSV or with --fact COLUMN=VALUE."


def _straggler(observed: Observed) -> Hypothesis:
    """One rank computes longer and all others wait for it; no collective is slower on the network."""
    stated, count, guesses = observed.stated.times, observed.sample.ranks, []
    who = "one rank" if observed.ranks is None else f"rank {observed.ranks.slowest}"
    for factor in RARE.tried:
        lost_s = (factor - 1.0) * stated["computation"]
        whole = {"step": stated["step"] + lost_s, "computation": stated["computation"] + lost_s / count}
        words = f"{who} computes {factor:.2g} times as long"
        guess = replace(observed.stated, words=words, slow_rank=factor)
        # The rank may be among those of the smaller run, or not.
        for slow, share in observed.of_one_rank(factor):
            chance = share * factor**-RARE.decline
            guesses.append(replace(guess, times={**stated, **whole, **slow}, chance=chance))
    return Hypothesis("straggler", "straggler: one rank computes longer", tuple(guesses), _SHARED)


CROWDED, KEPT_WAITING = np.geomspace(1.0, 10.0, 12), np.geomspace(1.0, 40.0, 20)
"""Factors of computation and of collectives where ranks share cores: a rank without a core keeps others waiting."""


def _oversubscribed(observed: Observed, ranks_per_core: float) -> Hypothesis:
    """Ranks share cores: what a profile with cores of their own has takes longer, computation and collectives apart."""
    machine, guesses = observed.prior.machine, []
    own_signs = next(one.signs for one in _numbers(machine) if one.kind == "shared")
    network = {f"tiers.{tier.name}.{name}": sign for tier in machine.tiers for name, sign in _OF_TIERS}
    # Which rank waits longest for a core is chance.
    slow_rank = math.exp(max(0.0, observed.ranks.excess)) if observed.ranks else 1.0
    for factor in CROWDED:
        own = {path: factor**sign for path, sign in own_signs.items()}
        for waiting in KEPT_WAITING:
            times = observed.price(observed.slower(own | {path: waiting**sign for path, sign in network.items()}))
            words = (
                f"{ranks_per_core:.3g} ranks a core: computation {factor:.2g}, collectives {waiting:.2g} times as long"
            )
            guesses.append(replace(observed.stated, words=words, times=times, slow_rank=slow_rank))
    return Hypothesis("oversubscribed", "oversubscribed host: more ranks than cores", tuple(guesses), _CORES)


_OF_TIERS = (("bandwidth_gb_per_s", -1.0), ("latency_us", 1.0))
_CORES = "Start no more ranks than cores, or `axonn-tune calibrate` with as many ranks on this host and pass --machine."


def _other_setups(observed: Observed, setup: Setup) -> Iterator[Hypothesis]:
    """A configuration other than stated or assumed."""
    within, open_ = most_bytes(setup), {KINDS.get(column) for column in observed.sample.unstated}
    for (kind, title), others in alternatives(setup).items():
        guesses = tuple(
            observed.guess(words, changed) for words, changed in others if possible(changed, within_bytes=within)
        )
        advice = {"overlap": _QUEUES, "overlaps": _QUEUES, "dispatcher": _DISPATCH}.get(kind, _FLAGS)
        if guesses and kind == "precision":
            yield Hypothesis(kind, title, guesses, advice, CONTRADICTED if kind in open_ else 1.0)
        elif guesses and kind in open_:
            yield Hypothesis(kind, title.replace("than stated", "than assumed"), guesses, _STATE, UNSTATED)
        elif guesses:
            yield Hypothesis(kind, title, guesses, advice)
