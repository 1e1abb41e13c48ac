"""The whole model on one rank, and the gradients of one training step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from axonn_tune.program.operations import Phase
from axonn_tune.runtime.block import Block, Passed
from axonn_tune.runtime.buckets import DataBuckets
from axonn_tune.runtime.chains import Gathers, Gradients
from axonn_tune.runtime.communicate import Communicator
from axonn_tune.runtime.initial import key_of
from axonn_tune.runtime.linear import Linear
from axonn_tune.runtime.local import Dropout, activation, attention_on, compiled, dropped
from axonn_tune.runtime.norm import Norm
from axonn_tune.runtime.parameters import Bucket, Layout, Matrix, Store, part_of
from axonn_tune.runtime.settings import Settings
from axonn_tune.runtime.tables import Embedding, Head
from axonn_tune.specs.model import Model
from axonn_tune.specs.traces import EMBEDDING_BACKWARD, EMBEDDING_FORWARD, END, HEAD, block_backward, block_forward

DEVIATION = 0.02
"""Of initial weights; those that write to the residual stream have it divided by √(2·layers), as GPT-2 does."""


class Transformer:
    """Parameters of one rank, and forward and backward through them.

    Every rank makes its own shards from the seed; no rank ever holds the whole model.
    """

    def __init__(
        self, model: Model, communicator: Communicator, settings: Settings, *, sequence: int, seed: int
    ) -> None:
        self.model, self.communicator, self.settings, self.sequence = model, communicator, settings, sequence
        self.store = Store(communicator.mesh, seed, settings.main, settings.device)
        self.buckets = DataBuckets(communicator, settings)
        self.embedding = Embedding(self._token_table("embedding"), self._positions(), sequence, communicator)
        self.blocks = [self._block(number) for number in range(model.layers)]
        self.head = self._head()
        self.dropout = self._dropout("embedding")
        self._fill_buckets()

    def micro_batch(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        *,
        scale: float,
        last: bool,
        sequences: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Forward and backward of `[b, S]` tokens; adds to the gradients, returns loss · scale summed.

        In the `last` micro-batch of a step the data-parallel buckets go out. `sequences`: numbers `[b]` of the
        sequences, counted through the whole run, which dropout goes by; absent: from 0.
        """
        self.buckets.open, part = last, self.communicator.timer.part
        part(EMBEDDING_FORWARD)
        gathers = Gathers(self.communicator, self.settings, list(self._gather_chain()))
        gradients = Gradients(self.communicator, self.settings)
        numbers = self._token_numbers(sequences, tokens)
        tokens, halves = tokens.flatten(), self.settings.parts
        x = self.dropout(self.embedding.forward(tokens, gathers), numbers)
        parts, numbers_of_parts = list(x.chunk(halves)), numbers.chunk(halves)
        del x  # The blocks save what they need of it.
        passed: list[Passed] = []
        for block in self.blocks:
            part(block_forward(block.number))
            parts, of_block = block.forward(parts, numbers_of_parts, gathers, keep_weights=self._keeps_weights(block))
            passed.append(of_block)
            del of_block  # Or the last block's activations would live until all of backward is done.
        part(HEAD)
        loss, gradient = self.head.forward_backward(_joined(parts), targets.flatten(), gathers, gradients, scale=scale)
        part_gradients = list(gradient.chunk(halves))
        del gradient, parts
        for block in reversed(self.blocks):
            part(block_backward(block.number))
            part_gradients = block.backward(passed.pop(), part_gradients, gradients)
        part(EMBEDDING_BACKWARD)
        self.embedding.backward(tokens, self.dropout(_joined(part_gradients), numbers), gradients)
        self._send_tables()
        return loss

    def finish_gradients(self) -> None:
        """Complete the gradients of a step: wait for the buckets, reduce the vectors."""
        self.communicator.timer.part(END)
        self.buckets.finish()
        self.buckets.reduce_vectors(self.vectors)

    def _token_numbers(self, sequences: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        """Number of each token `[M]`, counted through the whole run."""
        if sequences is None:
            sequences = torch.arange(tokens.shape[0], device=tokens.device)
        places = torch.arange(self.sequence, device=tokens.device)
        return (sequences[:, None] * self.sequence + places).flatten()

    def _gather_chain(self) -> Iterator[tuple[Matrix, Phase, str]]:
        """Every weight gather of a micro-batch, in order."""
        yield self.embedding.table, "forward", "embedding"
        if self.embedding.positions is not None:
            yield self.embedding.positions, "forward", "position"
        for block in self.blocks:
            yield from ((linear.weight, "forward", linear.layer) for linear in block.linears)
        yield self.head.table, "forward", "head"
        full = self.settings.recompute == "full"
        for block in reversed(self.blocks):
            if not self._keeps_weights(block):
                order = block.linears if full else block.linears[::-1]
                yield from ((one.weight, "recompute" if full else "backward", one.layer) for one in order)

    def _keeps_weights(self, block: Block) -> bool:
        """The last layers keep their gathered weights from forward to backward."""
        return block.number >= self.model.layers - self.settings.kept_layers

    def _send_tables(self) -> None:
        for bucket in self._tables:
            self.buckets.send(bucket)

    def _fill_buckets(self) -> None:
        """Move all parameters into the buckets that the program reduces; send each when its last gradient is there."""
        self._tables = [self._bucket("embedding", [self.embedding.table])]
        if self.embedding.positions is not None:
            self._tables.append(self._bucket("position", [self.embedding.positions]))
        for block in self.blocks:
            bucket = self._bucket("block", [linear.weight for linear in block.linears])
            block.qkv.after = partial(self.buckets.send, bucket)
        if self.head.table is not self.embedding.table:
            self.head.after = partial(self.buckets.send, self._bucket("head", [self.head.table]))
        self.vectors = self.store.bucket("vectors", self.store.vectors)

    def _bucket(self, layer: str, matrices: list[Matrix]) -> Bucket:
        return self.store.bucket(layer, matrices, compute=self.settings.compute if self.settings.split_main else None)

    def _token_table(self, name: str) -> Matrix:
        grid = self.communicator.mesh.grid
        rows = _padded(self.model.vocab, grid.x * grid.y * grid.z)
        return self.store.matrix(
            Layout(name, rows, self.model.hidden, ("x", "y"), None, real_rows=self.model.vocab, deviation=DEVIATION)
        )

    def _positions(self) -> Matrix | None:
        if not self.model.learned_positions:
            return None
        length = self.model.max_sequence_length
        rows = _padded(length, self.communicator.mesh.grid.z)
        return self.store.matrix(
            Layout("position", rows, self.model.hidden, (), "y", real_rows=length, deviation=DEVIATION)
        )

    def _head(self) -> Head:
        tied = self.model.tied_embeddings
        table = self.embedding.table if tied else self._token_table("head")
        norm = self._norm("head.norm", layer="head.norm")
        return Head(table, norm, self.model.vocab, self.communicator, self.settings)

    def _block(self, number: int) -> Block:
        model, shares, name = self.model, self.communicator.mesh.size("x"), f"blocks.{number}"
        return Block(
            number=number,
            norms=(
                self._norm(f"{name}.attention.norm", layer="attention.norm"),
                self._norm(f"{name}.mlp.norm", layer="mlp.norm"),
            ),
            qkv=self._linear(name, "attention.qkv", (model.hidden, model.qkv_width)),
            output=self._linear(name, "attention.output", (model.query_width, model.hidden), transposed=True),
            up=self._linear(name, "mlp.fc1", (model.hidden, model.up_width)),
            down=self._linear(name, "mlp.fc2", (model.ffn, model.hidden), transposed=True),
            attention=attention_on(model, self.settings, sequence=self.sequence, shares=shares),
            activation=activation(self.settings, gated=model.gated),
            dropouts=(self._dropout(f"{name}.attention.output"), self._dropout(f"{name}.mlp.fc2")),
            settings=self.settings,
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

    def _linear(self, block: str, layer: str, shape: tuple[int, int], *, transposed: bool = False) -> Linear:
        """A normal layer has W[K_y, N_x]; a transposed one, which writes to the residual stream, W[K_x, N_y]."""
        rows, columns = shape
        row_axis, column_axis = ("x", "y") if transposed else ("y", "x")
        deviation = DEVIATION / math.sqrt(2 * self.model.layers) if transposed else DEVIATION
        name = f"{block}.{layer}"
        weight = self.store.matrix(
            Layout(f"{name}.weight", rows, columns, (row_axis,), column_axis, real_rows=rows, deviation=deviation)
        )
        bias = self.store.vector(f"{name}.bias", columns, column_axis, value=0.0) if self.model.biases else None
        return Linear(layer, row_axis, column_axis, weight, bias, self.communicator, self.settings)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts of a micro-batch as one."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _padded(rows: int, multiple: int) -> int:
    """Rows rounded up to a multiple."""
    return -(-rows // multiple) * multiple
