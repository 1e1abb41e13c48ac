"""The model document: one GPT- or Llama-shaped decoder, as its sizes.

Letters used throughout the project, per layer: H hidden, Q = heads * head_dim (what attention
works on), N = Q + 2 * kv_heads * head_dim (fused qkv output), F ffn, G = 2F when the MLP is gated
and F otherwise (fused gate and up output), V vocabulary, S sequence length.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, model_validator

from axonn_tune.specs.document import Document, Size

MODEL_SCHEMA = "axonn-tune/model/1"


class ModelDefaults(Document):
    """The workload a model is searched with unless the command line says otherwise."""

    global_batch: Size = Field(description="Global batch size, in sequences.")
    sequence_length: Size = Field(description="Tokens in one sequence.")


class Model(Document):
    """A decoder-only transformer."""

    schema_: Literal["axonn-tune/model/1"] = Field(
        alias="schema", description="Kind and version of this document: axonn-tune/model/1."
    )
    name: str = Field(min_length=1, description="The name it is found by: that of its file.")
    description: str = Field(default="", description="One line: what it is and where its sizes come from.")
    family: Literal["gpt", "llama"] = Field(
        description="gpt: LayerNorm, GELU, learned positions. llama: RMSNorm, SwiGLU, rotary positions."
    )
    layers: Size = Field(description="Transformer blocks.")
    hidden: Size = Field(description="H, width of the residual stream.")
    heads: Size = Field(description="Query heads.")
    kv_heads: Size = Field(description="Key and value heads; equal to heads without grouped-query attention.")
    head_dim: Size = Field(description="Width of one head; need not be hidden / heads.")
    ffn: Size = Field(description="F, width of the MLP.")
    vocab: Size = Field(description="V, before padding.")
    max_sequence_length: Size = Field(description="Length of the learned position table, or the trained context.")
    biases: bool = Field(description="Biases on the linear layers.")
    tied_embeddings: bool = Field(description="The LM head uses the token embedding.")
    rotary_base: PositiveFloat | None = Field(
        default=None, description="Base of rotary positions (rope_theta), for scripts: no cost depends on it."
    )
    norm_epsilon: PositiveFloat | None = Field(default=None, description="Epsilon of norms, for scripts.")
    qkv_biases: bool | None = Field(
        default=None, description="Biases of queries, keys and values alone, for scripts: too small to be priced."
    )
    source: str = Field(min_length=1, description="Where the sizes come from.")
    defaults: ModelDefaults = Field(description="Workload unless the command line says otherwise.")

    @model_validator(mode="after")
    def _heads_group(self) -> Model:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be divisible by kv_heads ({self.kv_heads})")
        return self

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate (SwiGLU)."""
        return self.family == "llama"

    @property
    def learned_positions(self) -> bool:
        """Whether positions are a learned table (GPT) and not rotary (Llama)."""
        return self.family == "gpt"

    @property
    def query_width(self) -> int:
        """Q = heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """N = Q + 2 * kv_heads * head_dim."""
        return self.query_width + 2 * self.kv_heads * self.head_dim

    @property
    def up_width(self) -> int:
        """G: output width of the first MLP GEMM, gate included."""
        return 2 * self.ffn if self.gated else self.ffn

    @property
    def block_weights(self) -> int:
        """Elements in the four matrices of one block."""
        return self.hidden * (self.qkv_width + self.query_width + self.up_width + self.ffn)

    @property
    def parameters(self) -> int:
        """All trainable elements, vocabulary unpadded."""
        h, biased, norm_vectors = self.hidden, int(self.biases), 1 if self.family == "llama" else 2
        block_vectors = 2 * norm_vectors * h + biased * (self.qkv_width + h + self.up_width + h)
        tables = self.vocab * h * (1 if self.tied_embeddings else 2)
        positions = self.max_sequence_length * h if self.learned_positions else 0
        return self.layers * (self.block_weights + block_vectors) + tables + positions + norm_vectors * h
