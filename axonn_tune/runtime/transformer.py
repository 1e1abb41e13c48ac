"""The whole model on one rank: forward and backward of every block, in the order the program lists them.

Letters as in `axonn_tune.program.layers`: M tokens of this rank's micro-batch, or of one half of it where that is
split, `A[M, K_y]` a tensor whose dim K is split over axis y. Backward is explicit, so that every collective is issued
where the schedule has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from axonn_tune.program.block import block_nodes, repeated_groups
from axonn_tune.program.inputs import ADAPTER, COPY, EXPERTS, LayerInputs, suffixes
from axonn_tune.program.step import BUNDLED
from axonn_tune.program.types.gdn import GatedDeltaNet
from axonn_tune.runtime.adapters import adapters_of
from axonn_tune.runtime.blocks import BlockContext, ResidualBranch, TransformerBlock
from axonn_tune.runtime.communicator import (
    Communicator,
    DataBuckets,
    WaitingGradients,
    WeightGather,
    WeightGathers,
    WeightGradients,
)
from axonn_tune.runtime.context import RingAttention, kernel_on, own_positions
from axonn_tune.runtime.delta import DeltaRule
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.experts import ExpertBranch, ExpertFunctions
from axonn_tune.runtime.modules import (
    Dropout,
    GatedAttention,
    LocalFunction,
    Norm,
    ParallelLinear,
    activation,
    attention_on,
    attention_parts,
    compiled,
    dropped,
    gate_gradients,
    gated,
    rotary_positions,
)
from axonn_tune.runtime.parameters import Bucket, Matrix, ParameterStore, part_of
from axonn_tune.runtime.philox import key_of
from axonn_tune.runtime.saved import ExpertWeights, Router
from axonn_tune.runtime.tables import Embedding, LMHead
from axonn_tune.specs.model import Layer, Model
from axonn_tune.specs.traces import block_backward, block_forward
from axonn_tune.specs.workload import ELEMENT_SIZES
from axonn_tune.vocabulary import EMBEDDING_BACKWARD, EMBEDDING_FORWARD, END, HEAD, WEIGHTS


@dataclass(frozen=True)
class MicroBatch:
    """Tokens and targets `[b, S]` of whole sequences, and the numbers `[b]` of these, counted through the whole run,
    which dropout goes by; absent: from 0."""

    tokens: torch.Tensor
    targets: torch.Tensor
    sequences: torch.Tensor | None = None


@dataclass
class ChunkContext:
    """What backward of a chunk needs of a micro-batch.

    tokens, numbers: `[M]`; gathers: the chain that goes on into backward, where forward and backward follow each
    other; gradient: of the last block's output, once the LM head has made it.
    """

    tokens: torch.Tensor
    numbers: torch.Tensor
    gathers: WeightGathers | None
    blocks: list[BlockContext] = field(default_factory=list)
    gradient: torch.Tensor | None = None


DEVIATION = 0.02
"""Of initial weights; those that write to the residual stream have it divided by √(2·layers), as GPT-2 does."""


class Transformer:
    """Parameters of one rank's pipeline stage, and forward and backward through its chunks.

    Every rank makes its own shards from the seed; no rank ever holds the whole model. `parts`: layers of each model
    part, chunk c of stage s at c·p + s; absent: one part. `places`: positions of this rank's tokens in each sequence.
    """

    def __init__(
        self,
        model: Model,
        communicator: Communicator,
        settings: RuntimeSettings,
        *,
        sequence: int,
        seed: int,
        parts: Sequence[int] | None = None,
    ) -> None:
        self.model, self.communicator, self.settings, self.sequence = model, communicator, settings, sequence
        frozen = settings.compute if model.tuning is not None else None
        self.store = ParameterStore(communicator.mesh, seed, settings.master, settings.device, frozen)
        self.buckets = DataBuckets(communicator, settings)
        self.places = own_positions(communicator.mesh, sequence, settings.device)
        mesh, stages = communicator.mesh, communicator.mesh.grid.pipeline
        self.embedding, self.head = None, None
        if mesh.stage == 0:
            table, positions, length = self._token_table("embedding"), None, model.max_sequence_length
            if model.learned_positions:
                positions = self.store.matrix(
                    "position",
                    _padded(length, mesh.grid.z),
                    model.hidden,
                    row_axes=(),
                    column_axes=("y",),
                    real_rows=length,
                    deviation=DEVIATION,
                )
            self.embedding = Embedding(table, positions, self.places, communicator)
        turned = {_turned(layer) for layer in model.types if layer.attention}
        self._turns = {one: rotary_positions(model, settings, self.places, *one) for one in turned}
        # Of each layer its type, and what stands before names of its layers in the program.
        prefixes = [f"{of[1:]}." if of else "" for of in suffixes(model)]
        self._layers = [(model.types[one], prefixes[one]) for one, count in model.runs for _ in range(count)]
        parts = parts or (model.layers,)
        numbers = [range(sum(parts[:part]), sum(parts[: part + 1])) for part in range(mesh.stage, len(parts), stages)]
        some = settings.recompute_layers or model.layers
        self.chunks = [[self._block(one, repeats=place < some) for place, one in enumerate(chunk)] for chunk in numbers]
        self.blocks = [block for chunk in self.chunks for block in chunk]
        if mesh.stage == stages - 1:
            tied = model.tied_embeddings
            if tied and self.embedding is not None:
                table = self.embedding.table
            else:
                table = self._token_table("embedding" if tied else "head")
            norm = self._norm("head.norm", layer="head.norm")
            self.head = LMHead(table, norm, model.vocab, communicator, settings)
        self.dropout = self._dropout("embedding")
        self._fill_buckets()

    def begins(self, chunk: int) -> bool:
        """Whether a chunk is the model's first part, which has the embedding."""
        return self.embedding is not None and chunk == 0

    def ends(self, chunk: int) -> bool:
        """Whether it is the last, which has the LM head."""
        return self.head is not None and chunk == len(self.chunks) - 1

    def forward(
        self, chunk: int, batch: MicroBatch, x: torch.Tensor | None, *, scale: float, last: bool
    ) -> tuple[torch.Tensor, ChunkContext]:
        """A chunk's output `[M, H_y]`, or of the model's last part loss · scale summed; and what backward needs.

        x: input `[M, H_y]`, None for the first part. last: this is the `last` micro-batch of a step, in which
        data-parallel buckets are reduced.
        """
        self.buckets.open, part, halves = last, self.communicator.timer.part, self.settings.parts
        part(EMBEDDING_FORWARD)
        whole = self.begins(chunk) and self.ends(chunk)
        backward = self._backward_gathers(chunk) if whole else ()
        gathers = WeightGathers(self.communicator, self.settings, [*self._forward_gathers(chunk), *backward])
        sequences, device = batch.sequences, batch.tokens.device
        if sequences is None:
            sequences = torch.arange(batch.tokens.shape[0], device=device)
        numbers = (sequences[:, None] * self.sequence + self.places).flatten()
        context = ChunkContext(self._own(batch.tokens), numbers, gathers if whole else None)
        if x is None:
            assert self.embedding is not None, "other chunks are given their input"
            x = self.dropout(self.embedding.forward(context.tokens, gathers), numbers)
        parts, numbers_of_parts = list(x.chunk(halves)), numbers.chunk(halves)
        del x  # The blocks save what they need.
        for block in self.chunks[chunk]:
            part(block_forward(block.number))
            parts, saved = block.forward(parts, numbers_of_parts, gathers, keep_weights=self._keeps_weights(block))
            context.blocks.append(saved)
            del saved  # Freed, or the last block's activations would live until the end of backward.
        result = _joined(parts)
        if not self.ends(chunk):
            return result, context
        part(HEAD)
        del parts
        assert self.head is not None, "the last part has it"
        gradients = WeightGradients(self.communicator, self.settings)
        loss, context.gradient = self.head.forward_backward(
            result, self._own(batch.targets), gathers, gradients, scale=scale
        )
        return loss, context

    def backward(
        self,
        chunk: int,
        context: ChunkContext,
        gradient: torch.Tensor | None,
        *,
        last: bool,
        gradients: WeightGradients | None = None,
    ) -> torch.Tensor | None:
        """Add to the gradients of a chunk; the gradient of its input, None for the first part.

        gradient: of its output `[M, H_y]`, None for the last part; gradients: what takes those of weights.
        """
        self.buckets.open, part = last, self.communicator.timer.part
        gathers = context.gathers or WeightGathers(
            self.communicator, self.settings, list(self._backward_gathers(chunk))
        )
        gradients = gradients or WeightGradients(self.communicator, self.settings)
        gradient, context.gradient = context.gradient if gradient is None else gradient, None
        assert gradient is not None, "the LM head has made it, or it has been received"
        part_gradients = list(gradient.chunk(self.settings.parts))
        del gradient
        for block in reversed(self.chunks[chunk]):
            part(block_backward(block.number))
            saved = context.blocks.pop()
            if not self._keeps_weights(block):
                saved.weights.gathers = gathers
            part_gradients = block.backward(saved, part_gradients, gradients)
            del saved
        result = _joined(part_gradients) if part_gradients else None
        del part_gradients
        part(EMBEDDING_BACKWARD)
        if not self.begins(chunk) or result is None:
            gradients.finish()
            return result
        assert self.embedding is not None, "the first part has it"
        self.embedding.backward(context.tokens, self.dropout(result, context.numbers), gradients)
        for bucket in self._tables:
            self.buckets.send(bucket)
        return None

    def weight_gradients(self, waiting: WaitingGradients, *, last: bool) -> None:
        """Add the weight gradients that have waited since a backward pass."""
        self.buckets.open = last
        self.communicator.timer.part(WEIGHTS)
        waiting.run()

    def finish_gradients(self) -> None:
        """Complete the gradients of a step: wait for the buckets, reduce the vectors and a tied table's copies."""
        self.communicator.timer.part(END)
        for block in self.blocks:
            if isinstance(block.mlp, ExpertBranch):
                block.mlp.end_step()
        self.buckets.finish()
        if self.vectors is not None:
            self.buckets.reduce_vectors(self.vectors)
        for axis, bucket in self.adapters:
            self.buckets.reduce_adapters(axis, bucket)
        if self._copies is not None:
            self.buckets.reduce_copies(self._copies)

    def _own(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's of whole sequences `[b, S]`, `[M]`."""
        return (tokens[:, self.places] if self.communicator.mesh.grid.context > 1 else tokens).flatten()

    def _attention(self, layer: Layer, block: str, prefix: str) -> LocalFunction:
        """Attention on this rank's heads and tokens."""
        communicator, settings = self.communicator, self.settings
        shares, own = communicator.mesh.size("x"), len(self.places)
        names = (f"{block}.attention.{one}_norm.weight" for one in (("q", "k") if layer.qk_norms else ()))
        norms = tuple(self.store.vector(one, layer.head_dim, value=1.0, of_heads=True) for one in names)
        turns = self._turns[_turned(layer)]
        local = attention_on(layer, settings, sequence=own, shares=shares, turns=turns, norms=norms)
        attention: LocalFunction = local
        if communicator.mesh.grid.context > 1:
            overlaps, name = bool(settings.overlaps), f"{prefix}attention.core"
            attention = RingAttention(local, communicator, kernel_on(settings), overlaps, settings.statistics, name)
        if not layer.gate_width:
            return attention
        gate, back = compiled(gated, settings), compiled(gate_gradients, settings)
        width = layer.gate_width // layer.kv_heads
        return GatedAttention(attention, local.kv_heads, width, not norms, gate, back)

    def _forward_gathers(self, chunk: int) -> Iterator[WeightGather]:
        """Weight gathers of a forward pass through a chunk, in order."""
        if self.embedding is not None and chunk == 0:
            yield self.embedding.table, "forward", "embedding"
            if self.embedding.positions is not None:
                yield self.embedding.positions, "forward", "position"
        for block in self.chunks[chunk]:
            yield from ((linear.weight, "forward", linear.layer) for linear in block.linears)
        if self.head is not None and self.ends(chunk):
            yield self.head.table, "forward", "head"

    def _backward_gathers(self, chunk: int) -> Iterator[WeightGather]:
        """The same of a backward pass."""
        for block in reversed(self.chunks[chunk]):
            if not self._keeps_weights(block):
                yield from block.backward_gathers()

    def _keeps_weights(self, block: TransformerBlock) -> bool:
        """Whether this layer is not resharded after forward: the stage's last layers keep their gathered weights."""
        kept = self.settings.kept_layers
        return kept > 0 and any(block is one for one in self.blocks[-kept:])

    def _fill_buckets(self) -> None:
        """Move all that trains into the buckets that the program reduces; each is sent with its last gradient, but for
        adapters."""
        self._tables: list[Bucket] = []
        self._copies: Bucket | None = None
        self.vectors: Bucket | None = None
        self.adapters: list[tuple[str, Bucket]] = []
        if self.model.tuning is not None:
            mine = [one for one in self.store.matrices if one.trains]
            for axis, split in (("x", "y"), ("y", "x")):
                self.adapters.append((axis, self._bucket(ADAPTER, [one for one in mine if split in one.split_axes])))
            return
        if self.embedding is not None:
            self._tables.append(self._bucket("embedding", [self.embedding.table]))
            if self.embedding.positions is not None:
                self._tables.append(self._bucket("position", [self.embedding.positions]))
        for block in self.blocks:
            dense = [linear.weight for linear in block.linears if not isinstance(linear, ExpertWeights)]
            bucket = self._bucket("block", dense)
            block.attention.input.after = partial(self.buckets.send, bucket)
            if isinstance(block.mlp, ExpertBranch):
                experts = block.mlp.experts
                experts.bucket = self._bucket(EXPERTS, [*experts.first, *experts.second])
                block.mlp.after = partial(self.buckets.send, experts.bucket)
        tied = self.model.tied_embeddings
        if self.head is not None and not tied:
            self.head.after = partial(self.buckets.send, self._bucket("head", [self.head.table]))
        # Of a tied table the first and the last stage have a copy each.
        if tied and self.communicator.mesh.grid.pipeline > 1 and (self.embedding is not None or self.head is not None):
            self._copies = self._tables[0] if self.head is None else self._bucket(COPY, [self.head.table])
            self._copies.copies = 2
        self.store.vectors.sort(key=lambda one: one.of_heads)
        self.vectors = self.store.bucket("vectors", self.store.vectors)

    def _bucket(self, layer: str, matrices: list[Matrix]) -> Bucket:
        return self.store.bucket(layer, matrices, compute=self.settings.compute if self.settings.shard_master else None)

    def _token_table(self, name: str) -> Matrix:
        grid = self.communicator.mesh.grid
        rows = _padded(self.model.vocab, grid.x * grid.y * grid.z)
        return self.store.matrix(
            name,
            rows,
            self.model.hidden,
            row_axes=("x", "y"),
            column_axes=(),
            real_rows=self.model.vocab,
            deviation=DEVIATION,
        )

    def _block(self, number: int, *, repeats: bool) -> TransformerBlock:
        recompute = self.settings.recompute if repeats else "none"
        (layer, prefix), model, name = self._layers[number], self.model, f"blocks.{number}"
        nodes = block_nodes(LayerInputs(model, ELEMENT_SIZES["fp32"], BUNDLED, layer=layer))
        groups = repeated_groups(nodes, recompute)
        repeated = frozenset(prefix + node.layer for group in groups for node in group.nodes)
        mlp_norm = self._norm(f"{name}.mlp.norm", layer=f"{prefix}mlp.norm")
        attention = self._mixer(name, prefix, layer, repeated)
        if layer.experts is not None:
            mlp: ResidualBranch | ExpertBranch = self._experts(name, prefix, layer, mlp_norm, repeated)
        else:
            mlp = ResidualBranch(
                norm=mlp_norm,
                input=self._linear(name, prefix, "mlp.fc1", (model.hidden, layer.up_width), of=layer),
                local=activation(self.settings, gated=layer.gated),
                output=self._linear(name, prefix, "mlp.fc2", (layer.ffn, model.hidden), transposed=True, of=layer),
                dropout=self._dropout(f"{name}.mlp.fc2"),
                repeated=repeated,
                name=f"{prefix}mlp.activation",
            )
        every = (one for one in (*attention.linears, *mlp.linears) if isinstance(one, ParallelLinear) and one.adapters)
        return TransformerBlock(number, attention, mlp, recompute == "full", next(every) if layer.opens else None)

    def _mixer(self, name: str, prefix: str, layer: Layer, repeated: frozenset[str]) -> ResidualBranch:
        """Attention, or what a layer has in its place."""
        hidden, delta = self.model.hidden, layer.mixer
        if isinstance(delta, GatedDeltaNet):
            into, middle, out = "gdn.in", "gdn.scan", "gdn.out"
            widths, local = (delta.projected, delta.values), self._delta(delta, name)
        else:
            into, middle, out = "attention.qkv", "attention.core", "attention.output"
            widths = layer.qkv_width + layer.gate_width, layer.query_width
            local = self._attention(layer, name, prefix)
        norm = f"{into.partition('.')[0]}.norm"
        projections = self._linear(name, prefix, into, (hidden, widths[0]), of=layer)
        if layer.attention:
            shares, device = self.communicator.mesh.size("x"), self.settings.device
            projections.weight.parts = attention_parts(layer, shares=shares, device=device)
        return ResidualBranch(
            norm=self._norm(f"{name}.{norm}", layer=f"{prefix}{norm}"),
            input=projections,
            local=local,
            output=self._linear(name, prefix, out, (widths[1], hidden), transposed=True, of=layer),
            dropout=self._dropout(f"{name}.{out}"),
            repeated=repeated,
            name=f"{prefix}{middle}",
        )

    def _delta(self, given: GatedDeltaNet, block: str) -> LocalFunction:
        """A gated delta net on this rank's heads, whose decays begin as those of FLA's layers."""
        vector, shares = self.store.vector, self.communicator.mesh.size("x")
        name, width = f"{block}.gdn", given.convolved * given.conv
        return DeltaRule(
            *(given.key_heads // shares, given.value_heads // given.key_heads, given.key_dim, given.value_dim),
            sequence=len(self.places),
            taps=given.conv,
            filters=vector(f"{name}.filters", width, "x", value=0.0, deviation=1.0 / math.sqrt(3 * given.conv)),
            rates=vector(f"{name}.rates", given.value_heads, "x", value=math.log(8.0)),
            steps=vector(f"{name}.steps", given.value_heads, "x", value=math.log(math.expm1(0.01)), deviation=1.3),
            norm=vector(f"{name}.gated.weight", given.value_dim, value=1.0, of_heads=True),
            dtype=self.settings.statistics,
        )

    def _experts(self, name: str, prefix: str, layer: Layer, norm: Norm, repeated: frozenset[str]) -> ExpertBranch:
        """This rank's experts of a block, with its router and shared experts."""
        hidden, given, mesh = self.model.hidden, layer.experts, self.communicator.mesh
        assert given is not None, "asked before"
        mine = part_of(range(given.count), ("expert",), mesh)
        up, down = (hidden, layer.ups * given.width), (given.width, hidden)
        shared = None
        if given.shared_width:
            width = given.shared_width
            shared = (
                self._linear(name, prefix, "moe.shared_fc1", (hidden, layer.ups * width)),
                self._linear(name, prefix, "moe.shared_fc2", (width, hidden), transposed=True),
            )

        def each(of: str, shape: tuple[int, int], *, transposed: bool) -> list[Matrix]:
            names = (f"{name}.moe.experts.{expert}.{of}" for expert in mine)
            return [self._matrix(one, shape, prefix, transposed=transposed, shard_axis="expert_z") for one in names]

        weights, bias = (each("fc1", up, transposed=False), each("fc2", down, transposed=True)), None
        if given.score_bias:
            rate = self.settings.bias_rate
            bias = self.store.vector(f"{name}.moe.router.bias", given.count, value=0.0, rate=rate)
        varying = self.communicator.mesh.size("expert") > 1 and not self.settings.forced_balance
        return ExpertBranch(
            norm=norm,
            given=given,
            router=Router(
                f"{prefix}moe.router", self._matrix(f"{name}.moe.router", (hidden, given.count), prefix), bias
            ),
            experts=ExpertWeights(f"{prefix}{EXPERTS}", *weights),
            shared=shared,
            local=activation(self.settings, gated=layer.gated, varying=varying),
            functions=ExpertFunctions.of(self.settings, varying=varying),
            dropout=self._dropout(f"{name}.mlp.fc2"),
            communicator=self.communicator,
            settings=self.settings,
            repeated=repeated,
            prefix=prefix,
            places=self.places,
            tokens=torch.zeros(given.count, dtype=self.settings.statistics, device=self.settings.device),
        )

    def _dropout(self, name: str) -> Dropout:
        """Of a tensor `[M, H_y]`."""
        hidden = self.model.hidden
        columns = part_of(range(hidden), ("y",), self.communicator.mesh)
        key = torch.tensor(key_of(self.store.seed, f"dropout.{name}"), device=self.settings.device)
        return Dropout(self.settings.dropout, key, columns, hidden, compiled(dropped, self.settings))

    def _norm(self, name: str, *, layer: str) -> Norm:
        hidden = self.model.hidden
        weight = self.store.vector(f"{name}.weight", hidden, "y", value=1.0)
        bias = self.store.vector(f"{name}.bias", hidden, "y", value=0.0) if self.model.family == "gpt" else None
        return Norm(layer, hidden, weight, bias, self.communicator, self.settings)

    def _linear(
        self,
        block: str,
        prefix: str,
        layer: str,
        shape: tuple[int, int],
        *,
        transposed: bool = False,
        of: Layer | None = None,
    ) -> ParallelLinear:
        """A linear layer; prefix: before its name in the program; of: the layer type, where it may have adapters."""
        row_axis, column_axis = ("x", "y") if transposed else ("y", "x")
        weight, name = self._matrix(f"{block}.{layer}", shape, prefix, transposed=transposed), f"{block}.{layer}.bias"
        bias = self.store.vector(name, shape[1], column_axis, value=0.0) if self.model.biases else None
        axes, where, tuning = (row_axis, column_axis), (self.communicator, self.settings), self.model.tuning
        scale = self.settings.adapter_scale
        adapters = adapters_of(self.store, tuning, of, f"{block}.{layer}", shape, axes, scale=scale)
        return ParallelLinear(prefix + layer, *axes, weight, bias, *where, adapters=adapters)

    def _matrix(
        self, name: str, shape: tuple[int, int], of: str, *, transposed: bool = False, shard_axis: str = "z"
    ) -> Matrix:
        """A normal layer has W[K_y, N_x]; a transposed one, which writes to the residual stream, W[K_x, N_y]."""
        row_axis, column_axis = ("x", "y") if transposed else ("y", "x")
        made = self.store.matrix(
            f"{name}.weight",
            *shape,
            row_axes=(row_axis,),
            column_axes=(column_axis,),
            real_rows=shape[0],
            deviation=DEVIATION / math.sqrt(2 * self.model.layers) if transposed else DEVIATION,
            shard_axis=shard_axis,
        )
        made.of = of
        return made


def _turned(layer: Layer) -> tuple[int, float]:
    """Width of a head, and the share of it that is rotated."""
    return layer.head_dim, 1.0 if layer.rotary_share is None else layer.rotary_share


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts of a micro-batch, concatenated."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _padded(rows: int, multiple: int) -> int:
    """Rows rounded up to a multiple."""
    return -(-rows // multiple) * multiple
