"""What is measured side by side: the runtime, FSDP2, and DTensor tensor parallelism with FSDP2.

All train the same model from the same weights on the same batches, one micro-batch a step, with torch's fused
AdamW, clipping over lists of tensors, and torch's scaled dot-product attention (in fp32 at least, on CPUs).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from axonn_tune.grid import Grid
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.devices import settings_of
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.runtime.optimizer import learning_rate
from axonn_tune.runtime.parameters import Parameter
from axonn_tune.runtime.tokens import BatchShard, SyntheticTokens, batches
from axonn_tune.runtime.trainer import Trainer
from axonn_tune.runtime.transformer import Transformer
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.launch import Launch, Optimizer
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.vocabulary import OVERLAPS, Overlap, PipelineOrder, Precision
from benchmarks.launches import pinned_launch
from benchmarks.reference_model import Mixture, Reference, ReferenceStage

CPU = torch.device("cpu")
OPTIMIZER = Optimizer(warmup_steps=2)
COMPUTE: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
"""Type that FSDP2 gathers weights and reduces gradients in; None: the parameters' own."""


@dataclass(frozen=True)
class Job:
    """What all contenders train."""

    model_name: str
    precision: Precision
    global_batch: int
    sequence: int
    world: int

    @property
    def model(self) -> Model:
        """The model document."""
        return load_model(self.model_name).document

    def share(self, place: int, places: int) -> BatchShard:
        """One of `places` equal parts of a step's batch."""
        return BatchShard(self.global_batch, self.global_batch // places, 1, place)

    def tokens(self, share: BatchShard) -> SyntheticTokens:
        """The source of the batches."""
        return SyntheticTokens(self.model.vocab, 0, self.sequence, share)


@dataclass(frozen=True)
class Ours:
    """The runtime on a grid; kept: all layers keep their gathered weights for backward, or none does; chunks, order: of
    pipeline stages."""

    grid: Grid
    kept: bool = True
    overlaps: tuple[Overlap, ...] = OVERLAPS
    micro_batches: int = 1
    chunks: int = 1
    order: PipelineOrder = "1f1b"

    @property
    def name(self) -> str:
        """As the table calls it."""
        grid = self.grid
        kept = ", kept" if self.kept and grid.z > 1 else ""
        overlap = "" if self.overlaps else ", no overlap"
        several = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        stages = f", {grid.pipeline} stages{several}, {self.order}, {self.micro_batches} micro-batches"
        stages = stages if grid.pipeline > 1 else ""
        expert = f", EP {grid.expert}" if grid.expert > 1 else ""
        return f"runtime {grid.x}·{grid.y}·{grid.z}·{grid.data}{expert}{stages}{kept}{overlap}"

    def without_overlap(self) -> Ours:
        """The same, waiting for each collective where it is issued."""
        return replace(self, overlaps=())

    def launch(self, job: Job) -> Launch:
        """The launch config."""
        workload = Workload(
            global_batch=job.global_batch,
            sequence_length=job.sequence,
            precision=job.precision,
            overlaps=self.overlaps,
        )
        launch = pinned_launch(
            *(job.model_name, self.grid, workload),
            kept=self.kept,
            optimizer=OPTIMIZER,
            command="benchmark",
            micro_batches=self.micro_batches,
            chunks=self.chunks,
        )
        return launch.model_copy(update={"pipeline_order": self.order})

    def build(self, job: Job, weights: Mapping[str, torch.Tensor]) -> RuntimeSteps:
        """One rank of it; the runtime makes the same weights from its seed."""
        launch = self.launch(job)
        mesh = build_mesh(launch.grid.grid(), chunks=self.chunks)
        return RuntimeSteps(Trainer(launch, mesh, device=CPU, source=batches(launch, mesh)))


@dataclass
class RuntimeSteps:
    """Trains with the runtime."""

    trainer: Trainer

    def step(self, step: int) -> float:
        """One optimizer step; the loss."""
        return self.trainer.step(step).loss


@dataclass(frozen=True)
class Peer:
    """FSDP2 over `shard` ranks, replicated `replicate` times, of `tensor`-wise parallel groups.

    keep: weights stay gathered from forward to backward (`reshard_after_forward=False`).
    """

    shard: int
    tensor: int = 1
    replicate: int = 1
    keep: bool = False

    @property
    def name(self) -> str:
        """As the table calls it."""
        parts = ["FSDP2" if self.tensor == 1 else f"DTensor TP {self.tensor} + FSDP2", str(self.shard)]
        replicated = f", replicated {self.replicate}" if self.replicate > 1 else ""
        return " ".join(parts) + replicated + (", kept" if self.keep else "")

    def build(self, job: Job, weights: Mapping[str, torch.Tensor]) -> PeerSteps:
        """One rank of it."""
        sizes = (self.replicate, self.shard, self.tensor)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tensor"))
        module = _module(job.model, weights)
        if self.tensor > 1:
            parallelize(module, mesh["tensor"])
            # With it DTensor sums the gradient norm over both axes at once; it warns where it cannot.
            mesh["shard", "tensor"]._flatten("shard_tensor")
        data = mesh["replicate", "shard"] if self.replicate > 1 else mesh["shard"]
        compute = COMPUTE[job.precision]
        shard(module, data, policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute), keep=self.keep)
        place = mesh.get_local_rank("replicate") * self.shard + mesh.get_local_rank("shard")
        return PeerSteps(module, job.tokens(job.share(place, self.replicate * self.shard)))


@dataclass(frozen=True)
class PipelinePeer:
    """`torch.distributed.pipelining`: so many micro-batches a step, and model parts a rank, in the order of a schedule;
    of two parts in a folded one, the second runs back over the ranks."""

    micro_batches: int
    schedule: Literal["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"] = "1F1B"
    chunks: int = 1

    @property
    def name(self) -> str:
        """As the table calls it."""
        several = f" of {self.chunks} parts a rank" if self.chunks > 1 else ""
        return f"torch pipelining, {self.schedule}{several}, {self.micro_batches} micro-batches"

    def build(self, job: Job, weights: Mapping[str, torch.Tensor]) -> PipelineSteps:
        """One rank of it."""
        rank, parts = dist.get_rank(), self.chunks * job.world
        numbers = (rank, parts - 1 - rank) if self.schedule == "ZBVZeroBubble" else range(rank, parts, job.world)
        # Of modules of their own, since schedules divide the gradients of each part by the micro-batches.
        modules = [ReferenceStage(_module(job.model, weights), number, parts) for number in numbers]
        return PipelineSteps(job, modules, self)


@dataclass(frozen=True)
class ExpertPeer:
    """FSDP2 of all but the experts, of which each rank has its share: tokens get there by torch's all-to-all, or as
    DeepSpeed-MoE's layer sends them."""

    deepspeed: bool = False

    @property
    def name(self) -> str:
        """As the table calls it."""
        return f"FSDP2, experts by {'DeepSpeed-MoE' if self.deepspeed else 'all-to-all'}"

    def build(self, job: Job, weights: Mapping[str, torch.Tensor]) -> ExpertSteps:
        """One rank of it."""
        mesh = init_device_mesh("cpu", (job.world,))
        module = _module(job.model, weights)
        dispatched: Callable[[Mixture, dist.ProcessGroup], nn.Module] = DispatchedMixture
        if self.deepspeed:
            # It asks for what a launcher sets, although the process group exists.
            os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "MASTER_PORT": "29500"}
            os.environ |= {"WORLD_SIZE": str(job.world), "MASTER_ADDR": "127.0.0.1"}
            importlib.import_module("deepspeed").init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
            dispatched = DeepSpeedMixture
        for block in module.blocks:
            if isinstance(block.mlp, Mixture):
                block.mlp = dispatched(block.mlp, mesh.get_group())
        compute = COMPUTE[job.precision]
        own = {one for name, one in module.named_parameters() if ".experts." in name}
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute)
        shard(module, mesh, policy=policy, keep=True, ignored=own)
        return ExpertSteps(module, job.tokens(job.share(mesh.get_local_rank(), job.world)), own)


class DispatchedMixture(nn.Module):
    """The experts of a `Mixture`, a share of them on each rank of a group."""

    def __init__(self, whole: Mixture, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.given, self.group, self.router, self.shared = whole.given, group, whole.router, whole.shared
        each = whole.given.count // group.size()
        self.experts = whole.experts[group.rank() * each : (group.rank() + 1) * each]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[b, S, H] → [b, S, H]`."""
        rows, given = x.flatten(0, 1), self.given
        shares, best = functional.linear(rows, self.router.weight).softmax(-1).topk(given.per_token)
        shares = shares / shares.sum(-1, keepdim=True) if given.normalized else shares
        order = best.flatten().argsort(stable=True)
        sent = best.flatten().bincount(minlength=given.count).view(self.group.size(), -1)
        comes = torch.empty_like(sent)
        dist.all_to_all_single(comes, sent, group=self.group)
        there, here = sent.sum(1).tolist(), comes.sum(1).tolist()
        arrived = all_to_all_single_autograd(rows[order // given.per_token], here, there, self.group)
        places = torch.arange(comes.shape[1]).repeat(len(comes)).repeat_interleave(comes.flatten()).argsort(stable=True)
        parts = torch.split(arrived[places], comes.sum(0).tolist())
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        back = all_to_all_single_autograd(made[places.argsort()], there, here, self.group)
        weighted = back * shares.flatten()[order, None]
        total = torch.zeros_like(rows) if self.shared is None else self.shared(rows)
        return total.index_add(0, order // given.per_token, weighted).view(x.shape)


class DeepSpeedMixture(nn.Module):
    """The same by DeepSpeed's layer, dropless, without noise in its choice of two experts."""

    def __init__(self, whole: Mixture, group: dist.ProcessGroup) -> None:
        super().__init__()
        layer = importlib.import_module("deepspeed.moe.layer")
        ranks, count = group.size(), whole.given.count
        chosen = {"k": whole.given.per_token, "drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
        self.layer = layer.MoE(whole.router.in_features, whole.experts[0], count, ranks, **chosen)
        self.layer.set_deepspeed_parallelism()
        own = self.layer.deepspeed_moe
        with torch.no_grad():
            own.gate.wg.weight.copy_(whole.router.weight)
        first = group.rank() * (count // ranks)
        # Last, so that its parameters have the names that tell those of experts.
        for number, expert in enumerate(own.experts.deepspeed_experts):
            expert.load_state_dict(whole.experts[first + number].state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[b, S, H] → [b, S, H]`."""
        made: torch.Tensor = self.layer(x)[0]
        return made


Contender = Ours | Peer | PipelinePeer | ExpertPeer


def _module(model: Model, weights: Mapping[str, torch.Tensor]) -> Reference:
    module = Reference(model)
    module.load(weights)
    return module


def parallelize(module: Reference, mesh: DeviceMesh) -> None:
    """Tensor parallelism by DTensor: tables by rows, qkv and fc1 by columns, output and fc2 by rows."""
    tables = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(module, mesh, tables)
    module.tie()
    for block in module.blocks:
        layers = {
            "attention.qkv": ColwiseParallel(),
            "attention.output": RowwiseParallel(),
            "mlp.fc1": ColwiseParallel(),
            "mlp.fc2": RowwiseParallel(),
        }
        parallelize_module(block, mesh, layers)


def shard(
    module: Reference,
    mesh: DeviceMesh,
    *,
    policy: MixedPrecisionPolicy,
    keep: bool,
    ignored: set[nn.Parameter] | None = None,
) -> None:
    """FSDP2 on each block, then on what is left; ignored: parameters that stay as they are."""
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep, ignored_params=ignored)
    fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=ignored)


class Adam:
    """torch's fused AdamW on lists of parameters, none of which may mix meshes; only matrices decay."""

    def __init__(self, lists: list[list[nn.Parameter]]) -> None:
        self.lists = lists
        groups = [
            {"params": [one for one in found if (one.dim() == 2) == matrices], "weight_decay": decay}
            for found in lists
            for matrices, decay in ((True, OPTIMIZER.weight_decay), (False, 0.0))
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=OPTIMIZER.learning_rate,
            betas=OPTIMIZER.betas,
            eps=OPTIMIZER.eps,
            fused=True,
        )

    def step(self, step: int, norm: torch.Tensor) -> None:
        """Clip gradients of this norm, and update."""
        assert OPTIMIZER.gradient_clip_norm is not None, "all contenders clip"
        for found in self.lists:
            nn.utils.clip_grads_with_norm_(found, OPTIMIZER.gradient_clip_norm, norm, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = learning_rate(OPTIMIZER, step)
        self.adam.step()
        self.adam.zero_grad()


class PeerSteps:
    """Trains a wrapped module."""

    def __init__(self, module: Reference, source: SyntheticTokens) -> None:
        self.module, self.source = module, source
        parameters = list(module.parameters())
        # Norms and biases of a tensor-parallel model lie on another mesh, and no list may mix meshes.
        self.lists = _by_mesh(parameters)
        self.adam = Adam(self.lists)

    def step(self, step: int) -> float:
        """One optimizer step; this rank's mean loss."""
        tokens, targets = self.source.batch(step, 0)
        loss = self.module(tokens, targets)
        loss.backward()
        norms = [_norm([one.grad for one in found if one.grad is not None]) for found in self.lists]
        self.adam.step(step, torch.linalg.vector_norm(torch.stack(norms)))
        return float(loss.item())


class ExpertSteps:
    """Trains a wrapped module beside the experts of this rank."""

    def __init__(self, module: Reference, source: SyntheticTokens, own: set[nn.Parameter]) -> None:
        self.module, self.source = module, source
        self.own = [one for one in module.parameters() if one in own]
        self.others = [one for one in module.parameters() if one not in own]
        self.adam = Adam([self.own, self.others])

    def step(self, step: int) -> float:
        """One optimizer step; this rank's mean loss."""
        tokens, targets = self.source.batch(step, 0)
        loss = self.module(tokens, targets)
        loss.backward()
        gradients = [one.grad for one in self.own if one.grad is not None]
        # Sums over the tokens of all ranks, each of which has the mean over its own for its loss.
        torch._foreach_div_(gradients, float(dist.get_world_size()))
        square = nn.utils.get_total_norm(gradients, foreach=True) ** 2
        dist.all_reduce(square)
        rest = _norm([one.grad for one in self.others if one.grad is not None])
        self.adam.step(step, (square + rest**2).sqrt())
        return float(loss.item())


class PipelineSteps:
    """Trains the model parts of one rank. A tied table's copies, of the first and the last, add their gradients."""

    def __init__(self, job: Job, parts: Sequence[ReferenceStage], peer: PipelinePeer) -> None:
        self.source = job.tokens(job.share(0, 1))
        self.first, self.last = (any(getattr(one, end) for one in parts) for end in ("first", "last"))
        dtype = COMPUTE[job.precision] or torch.float32
        stages = [PipelineStage(one, one.stage, peer.chunks * job.world, CPU) for one in parts]
        made = get_schedule_class(peer.schedule)
        self.schedule = made(
            stages[0] if issubclass(made, PipelineScheduleSingle) else stages,
            n_microbatches=peer.micro_batches,
            loss_fn=ReferenceStage.loss,
        )
        self.autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
        self.ends = dist.new_group([0, job.world - 1])
        self.tables = [one for one in (part.shared_table() for part in parts) if one is not None]
        self.parameters = [one for part in parts for one in part.parameters()]
        self.adam = Adam([self.parameters])

    def step(self, step: int) -> float:
        """One optimizer step; the mean loss."""
        (tokens, targets), losses = self.source.batch(step, 0), list[torch.Tensor]()
        with self.autocast:
            last = {"target": targets, "losses": losses} if self.last else {}
            self.schedule.step(*([tokens] if self.first else []), **last)
        gradients = [one.grad for one in self.tables if one.grad is not None]
        if len(gradients) > 1:
            total = gradients[0] + gradients[1]
            for one in gradients:
                one.copy_(total)
        elif gradients and not (self.first and self.last):
            dist.all_reduce(gradients[0], group=self.ends)
        counted_before = self.tables[-1] if self.tables and self.last else None
        parameters = [one for one in self.parameters if one is not counted_before]
        square = nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None], foreach=True) ** 2
        dist.all_reduce(square)
        self.adam.step(step, square.sqrt())
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(mean)
        return float(mean.item())


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Norm of all elements, summed over the ranks that hold them."""
    norm = nn.utils.get_total_norm(gradients, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    found: dict[object, list[nn.Parameter]] = {}
    for one in parameters:
        assert isinstance(one, DTensor), "FSDP2 makes every parameter one"
        found.setdefault(one.device_mesh, []).append(one)
    return list(found.values())


def initial_weights(job: Job) -> dict[str, torch.Tensor]:
    """The weights that the runtime begins with, whole, by their names there."""
    launch = Ours(Grid()).launch(replace(job, world=1))
    communicator = Communicator(build_mesh(Grid()), Ledger())
    store = Transformer(
        job.model, communicator, settings_of(launch, CPU), sequence=job.sequence, seed=launch.seed
    ).store
    parameters: list[Parameter] = [*store.matrices, *store.vectors]
    return {one.name: one.value for one in parameters}
