"""Whole matrices from the shards of a group of ranks, orthogonalized: what Muon does to momenta.

Ranks of z take the matrices of one kind in turn, those of different blocks at once. Each gathers its own over y and x,
iterates on all of it and gives each rank of z its part back: `axonn_tune.program.whole` lists the collectives. A kind
that begins goes to the rank behind the last one, so that kinds with few matrices are on different ranks.

Source of the iteration: Keller Jordan's Muon (torch.optim.Muon has the same); of the scale, by which an update has the
size of AdamW's and its learning rate: arXiv 2502.16982, section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from axonn_tune.program.whole import LAYER
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.parameters import Matrix, part_of

QUINTIC = 3.4445, -4.7750, 2.0315
"""Of X, X·Xᵀ·X and (X·Xᵀ)²·X in an iteration that brings singular values near 1."""
SCALE = 0.2
"""Root mean square of AdamW's updates, about."""
_LEAST_NORM = 1e-7


@dataclass(frozen=True)
class Orthogonalizer:
    """Makes updates of momenta; iterations are in the type `compute`."""

    communicator: Communicator
    iterations: int
    compute: torch.dtype

    def run(self, matrices: Sequence[Matrix]) -> None:
        """Replace each rank's shards of momenta, which are where its gradients were, by those of the updates."""
        kinds, begin = dict[tuple[str, str, int], list[Matrix]](), dict[str, int]()
        for one in matrices:
            for part in range(max(len(one.parts), 1)):
                kinds.setdefault((one.of, one.layer, part), []).append(one)
        for (_, _, part), several in kinds.items():
            axis = several[0].shard_axis
            ranks, first = self.communicator.mesh.size(axis), begin.get(axis, 0)
            for start in range(0, len(several), ranks):
                turn = several[start : start + ranks]
                owners = {(first + start + number) % ranks: number for number in range(len(turn))}
                self._turn([_Shard(one, part) for one in turn], owners)
            begin[axis] = first + len(several)

    def _turn(self, shards: Sequence[_Shard], owners: dict[int, int]) -> None:
        """Of matrices of one kind, one or none on each rank; owners: number of each rank's."""
        one, mesh = shards[0].matrix, self.communicator.mesh
        ranks, rows, own = mesh.size(one.shard_axis), len(one.row_range), mesh.place(one.shard_axis) in owners
        name, many = f"{LAYER}.{one.layer}", len(shards) * rows
        ordered = [shards[owners[rank]] for rank in sorted(owners)]
        there = [rows if rank in owners else 0 for rank in range(ranks)], [rows if own else 0] * ranks
        momenta = [shard.read() for shard in ordered]
        momentum = torch.cat(momenta) if ranks > 1 else momenta[0]
        whole = self.communicator.pass_shards(momentum, there, one.shard_axis, name, whole=many).wait()
        nothing = momentum.new_empty(0, momentum.shape[1])
        del momenta, momentum
        if not own:
            # Ranks over y and x have none either, and the program has as many gathers on all.
            whole = whole.new_zeros(rows * ranks, whole.shape[1]) if mesh.size("x") * mesh.size("y") > 1 else whole
        whole = self._gathered(whole, one, name)
        back = self._update(whole, one).contiguous() if own else nothing
        del whole
        found = self.communicator.pass_shards(back, there[::-1], one.shard_axis, name, whole=many).wait()
        for number, shard in enumerate(ordered):
            shard.write(found[number * rows : (number + 1) * rows])

    def _gathered(self, part: torch.Tensor, matrix: Matrix, name: str) -> torch.Tensor:
        """The matrix of which each rank over y and x has a part; perhaps that itself."""
        for axis in ("y", "x"):
            if self.communicator.mesh.size(axis) > 1:
                across = axis in matrix.column_axes
                part = (part.t() if across else part).contiguous()
                whole = self.communicator.all_gather(part, axis, "step", name).wait()
                part = whole.t() if across else whole
                del whole
        return part

    def _update(self, whole: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """This rank's part over y and x of a matrix's update."""
        kind, rows = whole.dtype, matrix.gathered_rows
        columns = part_of(range(whole.shape[1]), matrix.column_axes, self.communicator.mesh)
        scale = SCALE * math.sqrt(max(whole.shape))
        whole = whole.div_(whole.norm().clamp(min=_LEAST_NORM)).to(self.compute)
        tall = whole.shape[0] > whole.shape[1]
        whole = newton_schulz(whole.t() if tall else whole, self.iterations)
        whole = whole.t() if tall else whole
        return whole[rows.start : rows.stop, columns.start : columns.stop].to(kind) * scale


@dataclass(frozen=True)
class _Shard:
    """This rank's part of a matrix, of those of its columns that are one matrix."""

    matrix: Matrix
    part: int

    def read(self) -> torch.Tensor:
        """The momentum, which may be overwritten."""
        parts, found = self.matrix.parts, self.matrix.gradient
        return found[:, parts[self.part]] if parts else found

    def write(self, update: torch.Tensor) -> None:
        """Put the update in its place."""
        parts, place = self.matrix.parts, self.matrix.gradient
        if parts:
            place[:, parts[self.part]] = update
        else:
            place.copy_(update)


def newton_schulz(x: torch.Tensor, iterations: int) -> torch.Tensor:
    """Nearly the nearest matrix to `x`, no taller than wide and of norm 1, whose singular values are all 1."""
    first, third, fifth = QUINTIC
    for _ in range(iterations):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x
