"""Adapters of low rank beside a linear layer that stays as it is: `O = I · W + α/r · (I · A) · B`.

Letters: M tokens, all of x's even with sequence parallelism, k and n of the linear layer on one rank, r the rank of the
adapter. A column-parallel layer has its outputs split over x, a row-parallel one its inputs. As Megatron-Bridge has it
(`gathered`, `exchanged`), x splits both matrices: A of a column-parallel layer by its rank, `[M, r]` is gathered and B
has the layer's outputs; A of a row-parallel layer has the layer's inputs, `[M, r]` is summed, and B's outputs are split
and gathered, or exchanged for their tokens. Otherwise one of both is whole on each rank of x, and what is summed is so
with the layer's own output.

Sources: arXiv 2106.09685, section 4.1; NVIDIA-NeMo/Megatron-Bridge@067f987d, src/megatron/bridge/peft/utils.py
(ParallelLinearAdapter), lora_layers.py; huggingface/peft@5d602fdb, src/peft/tuners/lora/layer.py;
pytorch/torchtitan@b5bcd76c, torchtitan/components/lora.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from axonn_tune.program.inputs import PARTS, LayerInputs, Linear, X
from axonn_tune.program.operations import ONCE, Array, Collective, Kernel, MatMul, Operation, Phase, Size, as_size
from axonn_tune.specs.machine import CollectiveKind
from axonn_tune.specs.tuning import Tuning


@dataclass(frozen=True, eq=False)
class Adapter:
    """Both matrices beside a linear layer, or beside a part of its outputs.

    target: what it adapts, as `Tuning.targets` has it; layer: its own name; n: outputs on a rank; down, up: elements of
    A and B on a rank; shares_input: the gradient of A reads what the layer reads; otherwise own_input, which it or the
    first of several keeps. output: of DoRA, kept for the gradient of its magnitudes. rows: of routed experts in a half
    micro-batch, if it is theirs; experts: of these, each with an adapter of its own, if they do not share one.
    """

    target: str
    layer: str
    linear: Linear
    tuning: Tuning
    n: Size
    down: Size
    up: Size
    shares_input: bool
    own_input: Array | None
    middle: Array
    output: Array | None
    rows: Size | None = None
    experts: Size | None = None

    @property
    def each(self) -> bool:
        """Whether each routed expert has such a one."""
        return self.experts is not None

    @property
    def elements(self) -> tuple[Size, ...]:
        """Of its matrices on one rank, but those of experts, which count as theirs."""
        return () if self.each else (self.down, self.up)

    @property
    def magnitudes(self) -> Size:
        """Elements of DoRA's vector on a rank: one an output."""
        return self.n if self.output else 0.0 * self.n

    @property
    def column(self) -> bool:
        """Whether outputs of its linear layer are split over x."""
        return self.linear.split_output == "x"

    @property
    def row(self) -> bool:
        """Whether inputs of its linear layer are split over x."""
        return self.linear.output_axis == "x"

    @property
    def part(self) -> str:
        """Of its layer's outputs, as `Tuning.targets` has it; "" for all."""
        return self.target.partition("/")[2]

    @property
    def _rank(self) -> Size:
        return as_size(float(self.tuning.rank))

    def _split(self, given: LayerInputs) -> tuple[Size, Size]:
        """Columns of A, and of B, that a rank multiplies with."""
        split = self.tuning.collectives != "none"
        return (
            self._rank / X if split and self.column else self._rank,
            self.n / X if split and self.row else self.n,
        )

    def _tokens(self, given: LayerInputs) -> Size:
        if self.rows is not None:
            return self.rows
        return given.outside(given.part) if self.linear.outside else given.part

    def _sent(self, kind: CollectiveKind, phase: Phase, size: Size, given: LayerInputs) -> list[Operation]:
        """A collective over x, where adapters have their own."""
        if self.tuning.collectives == "none" or not (self.column or self.row):
            return []
        return [Collective(kind, "x", phase, self.layer, given.element * size, calls=PARTS)]

    def _rejoined(self, phase: Phase, tokens: Size, given: LayerInputs) -> list[Operation]:
        """Outputs of a row-parallel layer's B, which x splits, as the layer has its own, or their gradients back."""
        if self.tuning.collectives == "exchanged" and given.options.sequence_parallel:
            return self._sent("all_to_all", phase, tokens * self.n / X, given)
        return self._sent("all_gather", phase, tokens * self.n, given)

    def forward(self, given: LayerInputs, phase: Phase) -> Iterator[Operation]:
        """Both GEMMs, and the sum with the layer's output; before them dropout."""
        tokens, n = self._tokens(given), self._split(given)[1]
        groups = self.experts or ONCE
        product = partial(MatMul, phase, self.layer, layout="NN", calls=PARTS, groups=groups)
        yield from self.into_middle(given, phase)
        yield from self._sent("all_gather" if self.column else "all_reduce", phase, tokens * self._rank, given)
        yield product(tokens / groups, n, self._rank)
        if self.row:
            yield from self._rejoined(phase, tokens, given)
        # Scaled by α/r, and added: read and written, then two read and one written.
        summed = given.outside(tokens) if self.row and not self.linear.outside else tokens
        # The bundled runtime's GEMM scales and adds to all outputs what it makes; a part of them is made first.
        if not given.launched:
            yield Kernel(phase, self.layer, 2.5 * given.element * summed * self.n, 2.0 * PARTS)
        elif self.part:
            yield Kernel(phase, self.layer, 3.0 * given.element * summed * self.n, PARTS)
        yield from self._converted(given, phase)
        if self.output is not None:
            # The norm of W + B·A, which is made for it: both are read, the sum is written and read. Then all outputs
            # are scaled (NVIDIA-NeMo/Megatron-Bridge@067f987d, peft/dora_layers.py, _get_weight_norm).
            yield MatMul(phase, self.layer, self.linear.k, self.n, self._rank, "NN")
            yield Kernel(phase, self.layer, 4.0 * given.element * self.linear.k * self.n)
            yield Kernel(phase, self.layer, 2.0 * given.element * summed * self.n, PARTS, makes=(self.output,))

    def _converted(self, given: LayerInputs, phase: Phase) -> list[Kernel]:
        """Both matrices, of which the bundled runtime has master weights alone unless these are sharded."""
        main, element = given.state_element, given.element
        if not given.launched or given.sharded or main == element:
            return []
        return [Kernel(phase, self.layer, 1.0 * (main + element) * size, PARTS) for size in self.elements]

    def into_middle(self, given: LayerInputs, phase: Phase) -> Iterator[Operation]:
        """Dropout of its input, and the GEMM with A."""
        yield from self._copied(given, phase)
        tokens, r, groups = self._tokens(given), self._split(given)[0], self.experts or ONCE
        product = partial(MatMul, phase, self.layer, layout="NN", calls=PARTS, groups=groups)
        yield product(tokens / groups, r, self.linear.k, makes=(self.middle,))

    def _copied(self, given: LayerInputs, phase: Phase) -> Iterator[Operation]:
        """Dropout of its input, which reads and writes it beside a mask; what is only kept takes no time."""
        if self.own_input is not None:
            moved = (2.0 * given.element + 1.0) * (self.tuning.dropout > 0.0)
            yield Kernel(phase, self.layer, moved * self._tokens(given) * self.linear.k, PARTS, makes=(self.own_input,))

    def backward(self, given: LayerInputs, *, passes: bool = True, frees: tuple[str, ...] = ()) -> Iterator[Operation]:
        """Gradients of B, of its input, of A, and, if it `passes` them on, of the layer's input, which is added to the
        layer's own; frees: what no gradient needs behind that of A."""
        layer, k, tokens = self.layer, self.linear.k, self._tokens(given)
        (r, n), gradient = self._split(given), self.input_gradient(given)
        groups = self.experts or ONCE
        back, each = partial(MatMul, "backward", layer, calls=PARTS, groups=groups), tokens / groups
        if self.output is not None:
            scaled = (self.output.name,)
            yield Kernel("backward", layer, 4.0 * given.element * tokens * n, PARTS, frees=scaled)
        part = self._part_gradient(given)
        if self.part or not given.launched:
            yield Kernel("backward", layer, 2.0 * given.element * tokens * n, PARTS, makes=part)
        if self.row and given.options.sequence_parallel:
            yield from self._rejoined("backward", tokens, given)
        yield back(each, self._rank, n, layout="NT")
        yield from self._scaled(given)
        yield from self._sent("all_reduce", "backward", tokens * self._rank, given)
        yield back(self._rank, n, each, layout="TN")
        freed = (self.middle.name, *([self.own_input.name] if self.own_input else []))
        yield back(k, r, each, layout="TN", frees=(*freed, *frees, *(one.name for one in part)))
        if self.rows is not None and not self.each and self.tuning.collectives != "none":
            # The one that they share, on all ranks of experts (Megatron-Bridge's _allreduce_shared_expert_grad).
            for size in self.elements:
                yield Collective("all_reduce", "expert", "backward", layer, given.element * size, calls=PARTS)
        if not passes:
            return
        yield back(each, k, r, layout="NT", makes=gradient)
        if self.column and not given.options.sequence_parallel:
            yield from self._sent("all_reduce", "backward", tokens * k, given)
        if not given.launched:
            yield Kernel("backward", layer, 3.0 * given.element * tokens * k, PARTS)

    def input_gradient(self, given: LayerInputs) -> tuple[Array, ...]:
        """What of the input's gradient comes of it, until it is added; the bundled runtime's GEMMs add to one array."""
        size = given.element * PARTS * self._tokens(given) * self.linear.k
        return () if given.launched else (Array(f"{self.layer} input gradient", "backward temporaries", size),)

    def _scaled(self, given: LayerInputs) -> Iterator[Kernel]:
        """What the bundled runtime has of small kernels: α/r, conversions, additions to gradients of another type."""
        if not given.launched:
            return
        yield Kernel("backward", self.layer, 2.0 * given.element * self._tokens(given) * self._rank, PARTS)
        yield from self._converted(given, "backward")
        if given.gradient_bytes != given.element:
            moved = given.element + 2.0 * given.gradient_bytes
            yield from (Kernel("backward", self.layer, moved * size, PARTS) for size in self.elements)

    def _part_gradient(self, given: LayerInputs) -> tuple[Array, ...]:
        """The bundled runtime's copy of the gradient of a part of its layer's outputs, as a GEMM takes it."""
        size = given.element * self._tokens(given) * self.n
        name = f"{self.layer} output gradient"
        return (Array(name, "backward temporaries", size),) if given.launched and self.part else ()


def adapters_of(
    linear: Linear, given: LayerInputs, rows: tuple[Size, Size] | None = None, experts: Size = ONCE
) -> tuple[Adapter, ...]:
    """Those of a linear layer: of the whole, or of parts of its outputs, which read one input.

    rows: of routed experts in a half micro-batch, and the most that a micro-batch saves; experts: how many of them a
    rank has, which share one adapter (Megatron-Bridge's share_expert_adapters) or have each their own; only where they
    are named.
    """
    if (tuning := given.tuning) is None or (rows and not tuning.names(linear.layer)):
        return ()
    widths = part_widths(linear, given)
    parts = [part for part in tuning.parts(linear.layer) if part in widths]
    made = (_adapter(linear, given, tuning, part, widths[part], rows=rows, first=part == parts[0]) for part in parts)
    return tuple(replace(one, experts=experts) if rows and tuning.experts == "each" else one for one in made)


def part_widths(linear: Linear, given: LayerInputs) -> dict[str, Size]:
    """Outputs of a linear layer on a rank, "" for all, and of the parts that frameworks have as layers of their own."""
    own, found = given.own, {"": linear.n}
    if linear.layer == "attention.qkv":
        keys = as_size(float(own.kv_heads * own.head_dim)) / X
        values = as_size(float(own.kv_heads * own.value_dim)) / X
        # Heads are a symbol in a program of one layer type; only types with gates have their own.
        queries = (as_size(float(own.query_width + own.gate_width)) if own.output_gate else given.Q) / X
        found |= {"q": queries, "k": keys, **({} if own.values_are_keys else {"v": values})}
    elif linear.layer.endswith("fc1"):
        found |= {name: linear.n / float(own.ups) for name in ("up", "gate")[: own.ups]}
    return found


def _adapter(
    linear: Linear,
    given: LayerInputs,
    tuning: Tuning,
    part: str,
    n: Size,
    *,
    rows: tuple[Size, Size] | None,
    first: bool,
) -> Adapter:
    """One adapter. Dropout gives each an input of its own; what sequence parallelism gathered all keep as one, the
    `first` of them (Megatron-Bridge's wrapper of Transformer Engine's LayerNormLinear returns it gathered)."""
    layer, rank = f"{linear.layer}.{part}_lora".replace("._", "."), float(tuning.rank)
    column, row = linear.split_output == "x", linear.output_axis == "x"
    split = tuning.collectives != "none"
    tokens = rows[1] if rows else given.outside(given.tokens) if linear.outside else given.tokens
    gathered = given.options.sequence_parallel and linear.input_axis == "x"
    own_input, summed = None, given.outside(given.tokens) if row else tokens
    if tuning.dropout or (gathered and first):
        size = (given.element + float(tuning.dropout > 0.0)) * tokens * linear.k
        own_input = Array(f"{layer} input", "adapter inputs", size)
    return Adapter(
        target=f"{linear.layer}/{part}".rstrip("/"),
        layer=layer,
        linear=linear,
        tuning=tuning,
        n=n,
        down=rank * linear.k / X if split and column else rank * linear.k,
        up=rank * n / X if split and row else rank * n,
        shares_input=not tuning.dropout and not gathered,
        own_input=own_input,
        middle=Array(f"{layer} middle", "adapter inputs", given.element * rank * tokens),
        # PEFT scales what the layer made and what the adapter made, each by itself (tuners/lora/dora.py).
        output=Array(f"{layer} output", "adapter inputs", (1.0 if split else 2.0) * given.element * summed * n)
        if tuning.mode == "dora"
        else None,
        rows=rows[0] if rows else None,
    )
