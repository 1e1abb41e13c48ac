"""A mixture of experts on one rank: router, dispatch, grouped linear layers, combine, shared experts.

Letters as in `program.types.experts`: T tokens of this rank's micro-batch or half of it, E experts, K experts a
token, R rows after dispatch. x and y split each expert as any linear layer: a row is `[H_y]`, so logits, the output of
FC1 and the input gradient of FC2 are summed over y, a token's output over x. Ranks of `expert` have whole experts, what
is left of z shards these, what is left of data replicates them. No token is dropped. Sums are in the order of ranks,
then of tokens; of a token in the order of its experts, best first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray

from axonn_tune.program.operations import OpKind, Phase
from axonn_tune.program.types.experts import COMBINE, DISPATCH, FC1, FC2, PROBABILITIES
from axonn_tune.runtime.communicator import CollectiveHandle, Communicator, WeightGradients
from axonn_tune.runtime.context import own_positions
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.modules import Dropout, LocalFunction, Norm, ParallelLinear, compiled
from axonn_tune.runtime.saved import (
    ExpertWeights,
    GatheredWeights,
    LocalOutput,
    Router,
    Routing,
    SavedActivations,
    SavedExperts,
)
from axonn_tune.specs.sections import Experts


@dataclass
class ExpertFunctions:
    """Functions of local tensors between GEMMs, compiled if the settings ask for it."""

    scaled: Callable[..., torch.Tensor]
    scaled_gradient: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    combined: Callable[..., torch.Tensor]
    widened: Callable[..., torch.Tensor]
    narrowed: Callable[..., torch.Tensor]

    @classmethod
    def of(cls, settings: RuntimeSettings, *, varying: bool) -> ExpertFunctions:
        """Those of one rank; varying: whether other numbers of rows come to its experts each step."""
        return cls(
            scaled=compiled(scaled, settings, varying=varying),
            scaled_gradient=compiled(scaled_gradient, settings, varying=varying),
            combined=compiled(combined, settings),
            widened=compiled(widened, settings),
            narrowed=compiled(narrowed, settings),
        )


@dataclass
class ExpertBranch:
    """`x + dropout(experts(norm(x)))`, in place of an MLP's residual branch.

    prefix: of layers' names in the program; places: positions of this rank's tokens in each sequence; tokens: of each
    expert `[E]` that this rank has routed in the step so far; after: run once experts have their gradients.
    """

    norm: Norm
    given: Experts
    router: Router
    experts: ExpertWeights
    shared: tuple[ParallelLinear, ParallelLinear] | None
    local: LocalFunction
    functions: ExpertFunctions
    dropout: Dropout
    communicator: Communicator
    settings: RuntimeSettings
    repeated: frozenset[str]
    prefix: str
    places: torch.Tensor
    tokens: torch.Tensor
    after: Callable[[], None] | None = None

    @property
    def sequence(self) -> int:
        """This rank's tokens of one sequence."""
        return len(self.places)

    @property
    def linears(self) -> tuple[Router | ExpertWeights | ParallelLinear, ...]:
        """Layers of which weights are gathered, in forward order."""
        return self.router, *(self.shared or ()), self.experts

    def forward(
        self, saved: SavedActivations, normal: torch.Tensor, weights: GatheredWeights, *, last: bool, save: bool
    ) -> Generator[None, None, torch.Tensor]:
        """`[T, H_y] → [T, H_y]`, before dropout; `last`: of those that use the weights."""
        kept = yield from self._up(normal, weights, "forward", last=last)
        shared = None
        if self.shared is not None:
            assert kept.shared is not None, "with shared experts"
            second = self.shared[1]
            shared = yield from second.forward(kept.shared[0], weights.take(second, last=last), "forward")
        _, weight = self.experts.views(weights.take(self.experts, last=last))
        down = self._grouped(self.functions.scaled(kept.local[0], kept.probabilities), weight, kept.routing)
        del weight
        output = self._from_experts(down, kept.routing, "forward", COMBINE)
        pending = self.communicator.all_reduce(output, "x", "forward", self.prefix + COMBINE)
        if "output" not in self.settings.overlaps:
            pending.wait()
        yield
        output = pending.wait()
        if save:
            saved.normal = None if self.norm.name in self.repeated else normal
            saved.experts = kept
        return output if shared is None else output.add_(shared)

    def recompute(self, saved: SavedActivations, weights: GatheredWeights) -> Generator[None, None, torch.Tensor]:
        """Recompute the forward pass of one part, up to the activation."""
        assert saved.x is not None, "recomputed before"
        saved.normal = self.norm.apply(saved.x, saved.statistics)
        saved.experts = yield from self._up(saved.normal, weights, "recompute", last=False)
        if self.shared is not None:
            weights.take(self.shared[1], last=False)
        weights.take(self.experts, last=False)
        return saved.experts.local[0]

    def _up(
        self, normal: torch.Tensor, weights: GatheredWeights, phase: Phase, *, last: bool
    ) -> Generator[None, None, SavedExperts]:
        """From the norm's output to the activation of all experts."""
        logits = self._logits(normal, weights.take(self.router, last=last), phase)
        chosen, shares, routing = self._routed(logits, phase)
        shared: LocalOutput | None = None
        if self.shared is not None:
            first, second = self.shared
            up = yield from first.forward(normal, weights.take(first, last=last), phase)
            shared = self.local(up, phase)
            # In the order in which weights are gathered; the layer itself is last.
            weights.take(second, last=False)
        rows = self._to_experts(normal[routing.order // self.given.per_token], routing, phase, DISPATCH)
        sent = chosen.detach().flatten()[routing.order]
        name = self.prefix + PROBABILITIES
        probabilities = routing.sorted(self._exchanged(sent, routing, "all_to_all", phase, name))
        weight, _ = self.experts.views(weights.take(self.experts, last=False))
        up = self._grouped(rows, weight, routing)
        del weight
        up = self.communicator.all_reduce(up, "y", phase, self.prefix + FC1, planned=len(routing.order)).wait()
        return SavedExperts(logits, chosen, shares, routing, rows, probabilities, self.local(up, phase), shared)

    def _logits(self, normal: torch.Tensor, weight: torch.Tensor, phase: Phase) -> torch.Tensor:
        """`[T, E]` in the statistics type."""
        wide, layer = self.settings.statistics, self.router.layer
        own = self.functions.widened(normal, wide) @ weight.to(wide)
        own = self.communicator.all_reduce(own, "y", phase, layer).wait()
        return self.communicator.all_gather(own.t(), "x", phase, layer).wait().t().contiguous()

    def count(self, parts: Sequence[SavedActivations]) -> None:
        """For the load-balancing loss, sum over ranks what each expert got in the step so far, this micro-batch
        included; it is needed, and waited for, in the backward pass.

        Loss: `E · Σ_e (share of tokens of e) · (mean score of e)`, of scores as shares of one. Tokens are those of the
        micro-batches so far, as in Megatron-Core's global_aux_loss (NVIDIA/Megatron-LM@d98e8a64,
        megatron/core/transformer/moe/router.py; arXiv 2501.11873).
        """
        if self.settings.balance:
            group = f"z{self.communicator.mesh.data_axes}"
            pending = self.communicator.all_reduce(self.tokens.clone(), group, "forward", self.router.layer)
            if not self.settings.overlaps:
                pending.wait()
            for part in parts:
                part.counts = pending

    def end_step(self) -> None:
        """Hand the counts of a step to the router's bias."""
        if self.router.bias is not None:
            self.router.bias.gradient.copy_(self.tokens)
        self.tokens.zero_()

    def _routed(self, logits: torch.Tensor, phase: Phase) -> tuple[torch.Tensor, torch.Tensor | None, Routing]:
        """Probabilities `[T, K]` of a token's experts, and `SavedExperts.shares`, with their graph; where they go."""
        given, forced = self.given, self.settings.forced_balance
        logits.requires_grad_()
        with torch.enable_grad():
            scores = logits.softmax(-1) if given.score == "softmax" else logits.sigmoid()
            if forced:
                best = balanced(self.places, given).repeat(len(logits) // self.sequence, 1)
            else:
                # Stable, so that of equal scores the lowest expert's is first.
                ranked = scores.detach() if self.router.bias is None else scores.detach() + self.router.bias.value
                best = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : given.per_token]
            chosen = scores.gather(1, best)
            if given.normalized:
                chosen = chosen / chosen.sum(-1, keepdim=True)
            chosen = chosen * (given.scaling or 1.0)
            shares = (scores / scores.sum(-1, keepdim=True)).sum(0) if self.settings.balance else None
        experts = best.flatten()
        if phase == "forward" and (self.router.bias is not None or self.settings.balance):
            self.tokens.scatter_add_(0, experts, torch.ones_like(experts, dtype=self.tokens.dtype))
        order = experts.argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return chosen, shares, self._routing(experts, order, back.view(best.shape), phase)

    def _routing(self, experts: torch.Tensor, order: torch.Tensor, back: torch.Tensor, phase: Phase) -> Routing:
        """Where each of (token, choice) goes, whose experts are given, `[T·K]`."""
        count, axis = self.given.count, "expert_tensorexpert"
        ranks, here = self.communicator.mesh.size("expert"), self.communicator.mesh.coordinate("expert")
        forced, device = self.settings.forced_balance, experts.device
        mine = torch.zeros(count, dtype=torch.int64, device=device) if forced else experts.bincount(minlength=count)
        found = self.communicator.all_gather(mine[None], axis, phase, self.prefix + PROBABILITIES).wait()
        if ranks == 1 and not forced:
            # All rows stay here, so that the host need not wait to learn how many are whose.
            return Routing(order, back, ([len(order)], [len(order)]), None, found[0])
        if forced:
            # All ranks of the group have the same positions.
            every = np.tile(self._forced_counts * (len(back) // self.sequence), (ranks, 1))
        else:
            every = found.cpu().numpy()
        each = count // ranks
        arrives = every[:, here * each : (here + 1) * each]
        sent = every[here].reshape(ranks, each).sum(1).tolist()
        places = None
        if ranks > 1:
            of_rows = np.repeat(np.tile(np.arange(each), ranks), arrives.flatten())
            places = torch.from_numpy(np.argsort(of_rows, kind="stable")).to(device)
        sizes = torch.from_numpy(arrives.sum(0))
        return Routing(order, back, (sent, arrives.sum(1).tolist()), places, sizes)

    @cached_property
    def _forced_counts(self) -> NDArray[np.int64]:
        """Tokens of a sequence on this rank that each expert gets under forced load balancing."""
        mesh = self.communicator.mesh
        places = own_positions(mesh, self.sequence * mesh.grid.context, torch.device("cpu"))
        return np.bincount(balanced(places, self.given).flatten().numpy(), minlength=self.given.count)

    def _to_experts(self, rows: torch.Tensor, routing: Routing, phase: Phase, layer: str) -> torch.Tensor:
        """Copies of tokens, `[T·K, H_y]` by expert, to the rows of this rank's experts, `[R, H_y]`."""
        return routing.sorted(self._exchanged(rows, routing, "dispatch", phase, self.prefix + layer))

    def _exchanged(
        self, rows: torch.Tensor, routing: Routing, op: OpKind, phase: Phase, layer: str, *, back: bool = False
    ) -> torch.Tensor:
        """What ranks send each other of these rows; back: from experts to tokens."""
        counts, planned = routing.counts[::-1] if back else routing.counts, len(routing.order)
        return self.communicator.exchange(rows, counts, op, phase, layer, planned=planned).wait()

    def _from_experts(self, rows: torch.Tensor, routing: Routing, phase: Phase, layer: str) -> torch.Tensor:
        """Rows of this rank's experts `[R, H_y]` back to their tokens, of each the sum over its experts, `[T, H_y]`."""
        # Copies of all dispatched tokens are the largest arrays of a block.
        rows = routing.unsorted(rows)
        rows = self._exchanged(rows, routing, "combine", phase, self.prefix + layer, back=True)
        return self.functions.combined(rows, routing.back)

    @staticmethod
    def _grouped(
        rows: torch.Tensor, weight: torch.Tensor, routing: Routing, *, transposed: bool = False
    ) -> torch.Tensor:
        """`O[R, n]`, each expert's rows `I[R_e, k]` times its weight `[k, n]`, or its transpose."""
        if in_one_launch(rows, weight):
            whole = weight[:, 0]
            return functional.grouped_mm(rows, whole.transpose(1, 2) if transposed else whole, offs=routing.ends)
        shape = weight.shape[1] * weight.shape[2], weight.shape[3]
        output = rows.new_empty(len(rows), shape[0 if transposed else 1])
        parts = zip(torch.split(rows, routing.on_host), weight, torch.split(output, routing.on_host), strict=True)
        for some, shards, into in parts:
            # Of several shards a copy, one expert at a time.
            one = shards.reshape(shape)
            torch.mm(some, one.t() if transposed else one, out=into)
        return output

    def _add_gradient(
        self,
        rows: torch.Tensor,
        gradient: torch.Tensor,
        routing: Routing,
        room: list[torch.Tensor],
        which: int,
        *,
        first: bool,
    ) -> None:
        """Add `dW[k, n] = I[R_e, k]ᵀ · dO[R_e, n]` of each expert to what other parts have added, as shards.

        room: of a block's experts, made here for the first; which: of FC1 and FC2.
        """
        if not room:
            room.append(self.experts.new_gradient(rows))
        into = self.experts.views(room[0])[which]
        if in_one_launch(rows, into):
            every = functional.grouped_mm(rows.t(), gradient, offs=routing.ends)[:, None]
            if first:
                into.copy_(every)
            else:
                into.add_(every)
            return
        parts = zip(torch.split(rows, routing.on_host), torch.split(gradient, routing.on_host), into, strict=True)
        for some, its, shards in parts:
            found = (some.t() @ its).view(shards.shape)
            if first:
                shards.copy_(found)
            else:
                shards.add_(found)

    def backward(
        self,
        parts: Sequence[SavedActivations],
        output_gradients: Sequence[torch.Tensor],
        weights: GatheredWeights,
        gradients: WeightGradients,
    ) -> list[torch.Tensor]:
        """Gradient of the residual stream that the branch reads, of each part."""
        kept = [_kept(part) for part in parts]
        before = [self.dropout(one, part.tokens) for one, part in zip(output_gradients, parts, strict=True)]
        counts = None if parts[0].counts is None else parts[0].counts.wait()
        routed, of_logits = self._experts_backward(kept, before, counts, weights, gradients)
        inputs = [(_there(part.x), part.statistics) for part in parts]
        normals = [
            self.norm.apply(*read) if part.normal is None else part.normal
            for part, read in zip(parts, inputs, strict=True)
        ]
        shared: list[torch.Tensor] = []
        if self.shared is not None:
            shared = self._shared_backward(kept, normals, before, weights, gradients)
        waiting = self._router_backward(normals, routed, of_logits, weights, gradients)
        for part in parts:
            part.experts = part.normal = None
        result = []
        for number, pending in enumerate(waiting):
            gradient = pending.wait()
            if shared:
                gradient = gradient.add_(shared[number])
            result.append(self.norm.backward(*inputs[number], gradient, output_gradients[number]))
        return result

    def _experts_backward(
        self,
        kept: Sequence[SavedExperts],
        output_gradients: Sequence[torch.Tensor],
        counts: torch.Tensor | None,
        weights: GatheredWeights,
        gradients: WeightGradients,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Gradients of the experts' input `[T, H_y]`, a share over x, and of the logits `[T, E]`, of each part."""
        gathered = weights.take(self.experts, last=True)
        room = list[torch.Tensor]()
        first, second = self.experts.views(gathered)
        del gathered
        routed, of_logits = list[torch.Tensor](), list[torch.Tensor]()
        for number, (part, gradient) in enumerate(zip(kept, output_gradients, strict=True)):
            routing, (active, activation_backward) = part.routing, part.local
            copies = gradient[routing.order // self.given.per_token]
            down = self._to_experts(copies, routing, "backward", COMBINE)
            scaled = self._grouped(down, second, routing, transposed=True)
            weighted = self.functions.scaled(active, part.probabilities)
            add = partial(self._add_gradient, routing=routing, room=room, first=number == 0)
            gradients.later(partial(add, weighted, down, which=1))
            del copies, down, weighted
            pending = self.communicator.all_reduce(
                scaled, "y", "backward", self.prefix + FC2, planned=len(routing.order)
            )
            scaled = pending.wait()
            shares, scaled = self.functions.scaled_gradient(scaled, active, part.probabilities)
            up = activation_backward(scaled)
            del scaled
            rows = self._grouped(up, first, routing, transposed=True)
            gradients.later(partial(add, part.rows, up, which=0))
            # Read for the last time.
            part.rows = up[:0].clone()
            del up
            routed.append(self._from_experts(rows, routing, "backward", DISPATCH))
            of_logits.append(self._probability_gradient(part, shares, counts))
        del first, second
        gradients.later(lambda: gradients.reduce(self.experts, room.pop(), self.experts.layer, self.after))
        return routed, of_logits

    def _probability_gradient(
        self, part: SavedExperts, shares: torch.Tensor, counts: torch.Tensor | None
    ) -> torch.Tensor:
        """Gradient of all logits, from those of rows' probabilities, to which each rank of x has a share, and from
        tokens of each expert by the load-balancing loss."""
        routing, name = part.routing, self.prefix + PROBABILITIES
        found = self._exchanged(routing.unsorted(shares), routing, "all_to_all", "backward", name, back=True)
        whole = self.communicator.all_reduce(found[routing.back], "x", "backward", name).wait()
        ends, of_ends = [part.chosen], [whole]
        if part.shares is not None and counts is not None:
            ends, of_ends = [*ends, part.shares], [*of_ends, counts / counts.mean() * self.settings.balance]
        (gradient,) = torch.autograd.grad(ends, part.logits, of_ends)
        return gradient

    def _shared_backward(
        self,
        kept: Sequence[SavedExperts],
        normals: Sequence[torch.Tensor],
        output_gradients: Sequence[torch.Tensor],
        weights: GatheredWeights,
        gradients: WeightGradients,
    ) -> list[torch.Tensor]:
        """Gradient of the shared experts' input, of each part."""
        assert self.shared is not None, "asked before"
        first, second = self.shared
        local = [part.shared for part in kept if part.shared is not None]
        weight = weights.take(second, last=True)
        found = second.backward([value for value, _ in local], weight, list(output_gradients), gradients)
        found = [backward(one) for (_, backward), one in zip(local, found, strict=True)]
        return first.backward(normals, weights.take(first, last=True), found, gradients)

    def _router_backward(
        self,
        normals: Sequence[torch.Tensor],
        routed: Sequence[torch.Tensor],
        of_logits: Sequence[torch.Tensor],
        weights: GatheredWeights,
        gradients: WeightGradients,
    ) -> list[CollectiveHandle]:
        """Gradient of the norm's output, through router and experts, being summed over x, of each part."""
        weight, wide = weights.take(self.router, last=True), self.settings.statistics
        columns, found, owns = self.router.weight.column_range, list[CollectiveHandle](), list[torch.Tensor]()
        for rows, all_logits in zip(routed, of_logits, strict=True):
            own = all_logits[:, columns.start : columns.stop]
            total = self.functions.narrowed(rows, own @ weight.to(wide).t())
            found.append(self.communicator.all_reduce(total, "x", "backward", self.prefix + DISPATCH))
            owns.append(own)
        gradients.later(partial(self._router_gradient, tuple(normals), owns, gradients))
        return found

    def _router_gradient(
        self, normals: Sequence[torch.Tensor], of_logits: Sequence[torch.Tensor], gradients: WeightGradients
    ) -> None:
        """Gradient of the router's weight, summed over parts in a wide type."""
        wide = of_logits[0].dtype
        found = of_logits[0].new_zeros(normals[0].shape[1], of_logits[0].shape[1])
        for normal, own in zip(normals, of_logits, strict=True):
            found.addmm_(self.functions.widened(normal, wide).t(), own)
        gradients.reduce(self.router.weight, found.to(normals[0].dtype), self.router.layer)


def in_one_launch(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether GEMMs of `rows[R, k]` and `weight[experts, shards, k, n]` are one kernel: in 16 bits on a GPU.

    The weight must be of one shard, and rows of both be aligned to 16 bytes. Natural routing gives each expert any
    number of rows. Source: torch.nn.functional.grouped_mm (torch 2.10).
    """
    aligned = all(size % 8 == 0 for size in (rows.shape[1], *weight.shape[2:]))
    fits = rows.is_cuda and len(rows) > 0 and rows.dtype == torch.bfloat16 and weight.shape[1] == 1
    return fits and aligned and hasattr(functional, "grouped_mm")


def scaled(active: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Activations `[R, F]` times the probabilities `[R]` of their experts."""
    return (active * probabilities[:, None]).to(active.dtype)


def scaled_gradient(
    gradient: torch.Tensor, active: torch.Tensor, probabilities: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of probabilities, a share over x, and of activations, of what `scaled` has made."""
    shares = (gradient * active).sum(-1, dtype=probabilities.dtype)
    return shares, (gradient * probabilities[:, None]).to(active.dtype)


def combined(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`[T, H_y]` of rows `[T·K, H_y]`: the sum over those at a token's places `[T, K]`, in their order."""
    return rows[places].sum(1)


def widened(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same in a wider type."""
    return rows.to(dtype)


def narrowed(rows: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """The sum in the type of the rows, rounded once."""
    return (rows + wide).to(rows.dtype)


def balanced(places: torch.Tensor, given: Experts) -> torch.Tensor:
    """Experts `[places, K]` of tokens at some positions under forced load balancing: the same on every layout.

    Experts take turns, from one equal block of them to the next. Blocks are the largest power of two that divides the
    number of experts, so that ranks with as many blocks get as many tokens even where single experts do not.
    """
    blocks = given.count & -given.count
    turn = places[:, None] * given.per_token + torch.arange(given.per_token, device=places.device)
    return turn % blocks * (given.count // blocks) + turn // blocks % (given.count // blocks)


def _kept(saved: SavedActivations) -> SavedExperts:
    assert saved.experts is not None, "saved in forward, or just recomputed"
    return saved.experts


def _there(saved: torch.Tensor | None) -> torch.Tensor:
    assert saved is not None, "saved in forward, or just recomputed"
    return saved
