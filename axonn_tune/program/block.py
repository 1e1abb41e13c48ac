"""The passes of a block, derived from its nodes by one rule each: forward, backward, and what recompute repeats.

Forward goes through the nodes in order. An addition to the residual stream is in the norm behind it, where kernels have
it there. Backward goes through them in reverse: what a node needs is repeated if the recompute set has it, its weight
is gathered, its gradients follow. An array lives from the node that makes it to the last that needs it.

A recompute set names layers; those nodes of a block that have one of the names are repeated, each before the first
gradient that needs it, all nodes of one name at once. Full recompute repeats all nodes that something saved comes of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

from axonn_tune.program import layers
from axonn_tune.program.inputs import ADAPTER, WHOLE_BLOCK, LayerInputs, Linear
from axonn_tune.program.nodes import (
    Add,
    Behind,
    Branches,
    Exchange,
    Gemm,
    Node,
    Nodes,
    Norm,
    gathered,
    names,
    parallel,
    stream_before,
    tuned,
)
from axonn_tune.program.operations import Array, Operation, Phase, Size
from axonn_tune.program.types import experts, kinds
from axonn_tune.specs.workload import Recompute


@dataclass(frozen=True, eq=False)
class BlockNodes:
    """Nodes of a block, in the order of the forward pass and in that of the backward pass.

    reads: the node whose output each reads, if it is not the residual stream; aside: nodes that run beside an exchange.
    """

    given: LayerInputs
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    reads: dict[Node, Node | None]
    aside: frozenset[Node]

    @cached_property
    def ends(self) -> bool:
        """Whether the backward pass ends in it: its input has no gradient, and of its nodes some have none."""
        return self.given.own.opens

    def stops(self, node: Node) -> bool:
        """Whether gradients of its adapters are all: its input has none."""
        return self.ends and bool(node.adapters) and self.reads[node] not in self.backward

    @cached_property
    def readers(self) -> dict[Node, list[Node]]:
        """Nodes that read the output of another, in the order of their backward passes."""
        found: dict[Node, list[Node]] = {node: [] for node in self.forward}
        for node in self.backward:
            if (source := self.reads[node]) is not None:
                found[source].append(node)
        return found

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """Every linear layer that trains."""
        return tuple(node.linear for node in self.trained if isinstance(node, Gemm))

    @cached_property
    def trained(self) -> tuple[Node, ...]:
        """Those whose matrices and vectors have gradients."""
        return tuple(node for node in self.forward if node.trains)

    @cached_property
    def trained_matrices(self) -> tuple[tuple[Node, Size], ...]:
        """Each matrix that trains, by its node: elements on one rank, adapters' included, routed experts' not."""
        own = ((node, node.matrix_elements) for node in self.trained)
        added = ((node, one) for node in self.forward for adapter in node.adapters for one in adapter.elements)
        return tuple((node, one) for node, one in (*own, *added) if one.coefficient)

    @cached_property
    def duplicated(self) -> float:
        """Elements times y over hidden of matrices that train and that x does not split: where x splits tokens, their
        gradients are summed over it."""
        found = 0.0
        for node, matrix in self.trained_matrices:
            if "x" not in dict(matrix.powers) and not node.detached:
                found += matrix.coefficient / (1.0 if "H" in dict(matrix.powers) else float(self.given.own.hidden))
        return found

    @cached_property
    def unneeded(self) -> frozenset[Node]:
        """Nodes whose output no gradient needs: all that read it pass on that of theirs alone."""
        readers = ((node, several) for node, several in self.readers.items() if several and not node.keeps)
        return frozenset(node for node, several in readers if not any(one.needs_input for one in several))

    @cached_property
    def adapted(self) -> bool:
        """Whether a node has adapters."""
        return any(node.adapters for node in self.forward)

    @cached_property
    def trains_matrices(self) -> bool:
        """Whether a matrix trains beside those of routed experts."""
        return bool(self.trained_matrices)

    @cached_property
    def first(self) -> Norm | None:
        """The norm that reads the block's input."""
        return next((node for node in self.forward if isinstance(node, Norm)), None)

    @cached_property
    def lasting(self) -> frozenset[Node]:
        """Nodes of whose output something saved comes."""
        found, wanted = set[Node](), False
        wider = {one for node in self.forward for one in node.needs if node.makes}
        for node in reversed(self.forward):
            after = self.readers[node]
            if (
                (node.makes and node not in self.unneeded)
                or node in wider
                or (any(one in found for one in after) if after else wanted)
            ):
                found.add(node)
            wanted = wanted or isinstance(node, Norm)
        return frozenset(found)

    def freed_again(self, node: Node) -> tuple[str, ...]:
        """Its input, where no gradient needs that and it is the last to read what was made once more."""
        source = self.reads[node]
        last = source in self.unneeded and [one for one in self.forward if self.reads[one] is source][-1] is node
        return names(source.makes) if source is not None and last else ()


def _freeing(operations: Iterable[Operation], freed: tuple[str, ...]) -> list[Operation]:
    """Operations of which the last is the last to need some arrays."""
    steps = list(operations)
    return [*steps[:-1], replace(steps[-1], frees=(*steps[-1].frees, *freed))] if freed else steps


def block_nodes(given: LayerInputs) -> BlockNodes:
    """Nodes of a layer type."""
    made: Nodes = [one for kind in kinds() for one in kind.nodes(given)]
    listed = tuned(parallel(made) if given.own.norms == "parallel" else made, given)
    forward, back = list[Node](), list[Node]()
    for one in listed:
        if isinstance(one, Branches):
            stages = zip(*one.branches, strict=True)
            forward += [node for stage in stages for part in stage for node in part]
            back += [node for branch in one.branches for part in branch for node in part]
        else:
            forward.append(one)
            back.append(one)
    reads: dict[Node, Node | None] = {}
    for before, node in pairwise([None, *back]):
        assert node is not None
        reads[node] = node.reads or (None if isinstance(node, Norm) else before)
    aside = frozenset(node for one in forward if isinstance(one, Exchange) for node in one.beside)
    if given.own.opens:
        back = _with_gradients(listed, reads)
    return BlockNodes(given, tuple(forward), tuple(reversed(back)), reads, aside)


def _with_gradients(listed: Nodes, reads: dict[Node, Node | None]) -> list[Node]:
    """Nodes with a backward pass in a block whose input has no gradient: what trains, and what reads of that."""
    found, reached, stream = list[Node](), set[Node](), False

    def add(node: Node, inputs: Sequence[Node | None]) -> None:
        nonlocal stream
        below = stream if isinstance(node, Norm) else any(one in reached for one in inputs)
        if below or node.trains or node.adapters:
            found.append(node)
            reached.add(node)
        if any(one in reached for one in node.joins):
            reached.add(node)
        stream = stream or (isinstance(node, Add) and node in reached)

    joined: tuple[Node, ...] = ()
    for one in listed:
        if isinstance(one, Branches):
            chains = [[node for stage in branch for node in stage] for branch in one.branches]
            for node in (node for chain in chains for node in chain):
                add(node, (reads[node],))
            joined = tuple(chain[-1] for chain in chains if chain)
        else:
            add(one, (reads[one], *joined))
            joined = ()
    return found


def gather_block(nodes: BlockNodes, phase: Phase) -> list[Operation]:
    """Gather of all weights of a block at once, where they are; otherwise of its adapters.

    ZeRO-3 keeps parameters below `stage3_param_persistence_threshold` on each rank, and gathers others up to its
    prefetch bucket in one call, as it reduces gradients: a block's adapters are far below both buckets
    (deepspeedai/DeepSpeed@edaa7221, runtime/zero/partitioned_param_coordinator.py, stage3.py).
    """
    given, calls = nodes.given, nodes.given.gathered_share(phase)
    if given.options.gather_unit == "weight":
        adapters = layers.gather_weight(ADAPTER, given.trained_block, given, phase=phase, calls=calls)
        return adapters if nodes.adapted and not given.replicates_adapters else []
    gathers = layers.gather_weight(WHOLE_BLOCK, given.block, given, phase=phase, calls=calls)
    return [*gathers, *experts.gather_experts(given, phase=phase, unit="block")]


def forward(nodes: BlockNodes, *, phase: Phase = "forward") -> Iterator[Operation]:
    """The forward pass, or the same again.

    Repeated, a norm has its statistics, and where blocks are not repeated to their last operation nodes are left out
    that nothing saved comes of; their weights are gathered for the backward pass.
    """
    given = nodes.given
    whole = phase == "forward" or given.options.recompute_whole_block
    yield from gather_block(nodes, phase)
    added: Add | None = None

    def steps(node: Node) -> Iterator[Operation]:
        nonlocal added
        if isinstance(node, Add) and node is not nodes.forward[-1] and given.own.norms != "parallel":
            added = node
        elif isinstance(node, Norm):
            yield from _normed(nodes, node, added, phase)
            added = None
        else:
            yield from node.gather(given, phase)
            if whole or node in nodes.lasting:
                freed = nodes.freed_again(node) if phase == "recompute" else ()
                yield from _freeing(node.forward(given, phase), freed)
            else:
                # What they keep is made of a saved input, without the layer's own GEMM.
                yield from (step for one in node.adapters for step in one.into_middle(given, phase))

    yield from _in_order(nodes.forward, steps)


def _in_order(nodes: Sequence[Node], steps: Callable[[Node], Iterable[Operation]]) -> Iterator[Operation]:
    """Operations of some nodes in the order of a pass, those of nodes beside exchanges there: of the last of their
    GEMMs beside the second exchange, and all others beside the first."""
    aside = {node for one in nodes if isinstance(one, Exchange) for node in one.beside}
    parts = list[list[Operation]]()
    for node in nodes:
        if not isinstance(node, Exchange) or not node.beside:
            yield from steps(node) if node not in aside else ()
            continue
        own = list(steps(node))
        if not parts:
            others = [one for one in nodes if one in aside]
            last = next(one.layer for one in reversed(others) if isinstance(one, Gemm))
            every = [step for one in others for step in steps(one)]
            place = next((number for number, step in enumerate(every) if step.layer == last), len(every))
            parts = [every[:place], every[place:]]
        # Behind the exchange itself, if it is in this pass, not behind those of what is repeated for it.
        sent = (n for n, step in enumerate(own) if getattr(step, "routing", None) and step.phase == own[-1].phase)
        after = next(sent, -1) + 1
        yield from (*own[:after], *parts.pop(0), *own[after:])
    # Where a backward pass ends between both exchanges.
    for part in parts:
        yield from part


def _normed(nodes: BlockNodes, node: Norm, added: Add | None, phase: Phase) -> Iterator[Operation]:
    """A norm behind an addition, which is in its kernel where there is no other for it."""
    given = nodes.given
    made = (_stream(nodes, node),) if phase == "forward" or added else ()
    summed = None
    if added is not None:
        if given.kernels.sum.kernels or phase == "recompute" or not node.weighted or given.streams > 1:
            yield from layers.residual(added.layer, given, phase=phase, makes=made)
            made = ()
        else:
            summed, made = given.kernels.sum, (*made, *layers.dropout_masks(added.layer, given))
    if phase == "recompute":
        yield from node.forward(given, phase)
    else:
        yield from node.after(given, makes=made, summed=summed)


def _stream(nodes: BlockNodes, node: Norm) -> Array:
    """The residual stream before a norm."""
    return stream_before(node.layer, nodes.given, first=node is nodes.first)


def backward(nodes: BlockNodes, *, recompute: Recompute) -> list[Operation]:
    """What full recompute repeats, then the gradients of the block, last node first; nothing if it has none.

    Where the pass ends in it, arrays that no gradient needs are none that a repeat makes.
    """
    if not nodes.backward:
        return []
    steps = list(_backward(nodes, recompute))
    if not nodes.ends:
        return steps
    freed = {name for step in steps for name in step.frees}
    return [replace(step, makes=tuple(one for one in step.makes if one.name in freed)) for step in steps]


def _backward(nodes: BlockNodes, recompute: Recompute) -> Iterator[Operation]:
    given, after = nodes.given, _Backward(nodes, recompute)
    if recompute == "full":
        yield from forward(nodes, phase="recompute")
    if after.gathers:
        yield from gather_block(nodes, "backward")
    if recompute == "selective" and given.options.selective_at_once:
        for node in nodes.forward if not nodes.ends else reversed(nodes.backward):
            yield from after.repeated(node)
    yield from _in_order(nodes.backward, after.steps)
    if given.options.gather_unit == "block":
        if nodes.trains_matrices:
            whole = len(nodes.trained) == len(nodes.forward)
            yield from layers.reduce_weight_gradient(WHOLE_BLOCK, given.block if whole else given.trained_block, given)
        yield from experts.reduce_experts(given, nodes.forward, unit="block")
    elif nodes.adapted and not given.replicates_adapters:
        yield from layers.reduce_weight_gradient(ADAPTER, given.trained_block, given)


class Group(NamedTuple):
    """Nodes that a name repeats at once."""

    name: str
    nodes: tuple[Node, ...]


def repeated_groups(nodes: BlockNodes, recompute: Recompute) -> list[Group]:
    """What a set repeats of a block: a module's nodes at once, those of a layer one by one, none of them twice."""
    found = list[Group]()
    for name in nodes.given.options.repeated(recompute):
        found.append(Group(name, tuple(one for one in nodes.forward if name in one.modules)))
        found += [Group(name, (one,)) for one in nodes.forward if name in one.alone]
    wider = [{*one.nodes} for one in found]
    return [one for one in found if one.nodes and not any({*one.nodes} < other for other in wider)]


class _Backward:
    """A backward pass on its way: what is left to be repeated, and which gradients and weights are there.

    gathers: weights are gathered again, unless recompute has gathered them.
    """

    def __init__(self, nodes: BlockNodes, recompute: Recompute) -> None:
        self.nodes, self.given = nodes, nodes.given
        self.gathers = recompute != "full" or self.given.options.gather_after_recompute
        self._left = repeated_groups(nodes, recompute)
        self._held, self._gathers_again = set[Node](), 0
        self._gradients: dict[Node, list[str]] = {}
        self._added: Add | None = None
        self._again, self._wanted = set[str](), set[str]()

    def steps(self, node: Node) -> Iterator[Operation]:
        """One node: what is repeated for it and its weight, then its gradients; behind its gather, an addition's."""
        if isinstance(node, Add):
            self._added = node
            return
        if node not in self.nodes.aside:
            for needed in node.needs:
                yield from self._output_of(needed)
        before, source = self._gathers_again, self.nodes.reads[node]
        beside = node in self.nodes.aside and source not in self.nodes.aside
        read = source if source and node.needs_input and not beside else None
        again = [*(self._output_of(read) if read else ()), *self.repeated(node)]
        gather = [] if node in self._held and not self.given.options.gather_after_recompute else self._gather(node)
        # What gathers weights of its own comes before.
        yield from (*again, *gather) if self._gathers_again > before else (*gather, *again)
        if self._added is not None:
            yield from self._added.backward(self.given, Behind(None, (), self._gathered))
            self._added = None
        behind = Behind(self._made(node), self._freed(node), self._gathered, node.trains)
        yield from node.backward(self.given, behind)
        if isinstance(node, experts.Grouped) and node.gathers == "forward":
            yield from experts.reduce_experts(self.given, self.nodes.forward, unit="weight")

    def _gather(self, node: Node) -> list[Operation]:
        return node.gather(self.given, "backward") if self.gathers else []

    def _gathered(self, linear: Linear) -> list[Operation]:
        return gathered(linear, self.given, "backward") if self.gathers else []

    def _output_of(self, node: Node) -> Iterator[Operation]:
        """A node that is repeated for another."""
        yield from self.repeated(node, without=node.inside)

    def repeated(self, node: Node, *, without: tuple[str, ...] = ()) -> Iterator[Operation]:
        """A node by each name that the set has of it, with all others of that name."""
        if not self._left:
            return
        for group in [one for one in self._left if node in one.nodes and one.name not in without]:
            self._left.remove(group)
            yield from _in_order(group.nodes, partial(self._once_more, name=group.name))

    def _once_more(self, node: Node, name: str) -> Iterator[Operation]:
        """A node by one name, behind what it reads."""
        source = self.nodes.reads[node]
        if source is not None:
            yield from self._output_of(source)
        if gather := node.gather(self.given, "recompute"):
            self._held.add(node)
            self._gathers_again += 1
            yield from gather
        own = node.partly[name](self.given) if name in node.partly else node.forward(self.given, "recompute")
        yield from self._repeats(node, own)

    def _repeats(self, node: Node, operations: Iterable[Operation]) -> list[Operation]:
        """Operations that are done once more, which may be all that an array is there for."""
        source = self.nodes.reads[node]
        read = {*names(source.makes)} if source in self.nodes.unneeded else set[str]()
        self._wanted |= read - self._again
        steps = _freeing(operations, self.nodes.freed_again(node) if read <= self._again else ())
        for step in steps:
            self._again.update(names(step.makes))
            self._again.difference_update(step.frees)
        return steps

    def _made(self, node: Node) -> Array | None:
        """The gradient of its input: one of several until the last of those that read it."""
        source = self.nodes.reads[node]
        if source is None or source.gradient is None or node.detached or self.nodes.stops(node):
            return None
        found = source.gradient
        if self.nodes.readers[source][-1] is not node:
            found = replace(found, name=f"{found.name} by {node.layer}")
        self._gradients.setdefault(source, []).append(found.name)
        return found

    def _freed(self, node: Node) -> tuple[str, ...]:
        """Its input, where no other node needs that, and gradients of its output."""
        source, gradients = self.nodes.reads[node], self._gradients.get(node, [])
        if not gradients and node.gradient is not None:
            gradients = [node.gradient.name]
        if node in self.nodes.unneeded:
            # Repeated for its own gradients alone.
            gradients = [*gradients, *(name for name in names(node.makes) if name in self._again)]
        if isinstance(node, Norm) and not node.weighted:
            return tuple(gradients)
        if isinstance(node, Norm):
            statistics = map(layers.statistics_of, node.makes)
            return (_stream(self.nodes, node).name, *gradients, *statistics)
        read = names(source.makes) if source is not None and not source.keeps else ()
        needing = [one for one in self.nodes.readers[source] if one.needs_input] if source is not None else []
        if source in self.nodes.unneeded:
            # Only where something was repeated from it.
            needing, read = self.nodes.readers[source], tuple(name for name in read if name in self._wanted)
        return (*(read if needing and needing[-1] is node else ()), *gradients)


def check_arrays(
    forward: Iterable[Operation], backward: Sequence[Operation], *, unneeded: frozenset[str] = frozenset()
) -> None:
    """AssertionError if an array of a block is freed that is not there, or is still there behind its backward pass.

    unneeded: those that no gradient needs, which are not saved unless something is repeated from them.
    """
    again = {array.name for step in backward if step.phase == "recompute" for array in step.makes}
    alive = {array.name for step in forward for array in step.makes} - again
    for step in backward:
        alive.update(array.name for array in step.makes)
        for name in step.frees:
            assert name in alive, f"{step.layer} frees {name}, which is not there"
            alive.remove(name)
    assert alive <= unneeded, f"never freed: {', '.join(sorted(alive - unneeded))}"
