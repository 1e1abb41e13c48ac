"""Megatron-Core's own argument parser, validation and process groups, without a GPU: megatron-core 0.19.2.

What looks at the GPU is told its compute capability, and that kernels of sparse attention are there. Transformer Engine
is not there, so its fused rotary positions and permutation are off in the config that is built, which takes its release
to be a recent one; everything else is as `pretrain_gpt.py` does it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer import transformer_config
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.training import arguments
from megatron.training.argument_utils import core_transformer_config_from_args

from tools.frameworks.answering import Answer, Check, Groups, Request, fake_world, main

ORDERS = {False: "tp-cp-ep-dp-pp", True: "tp-cp-ep-pp-dp"}
"""Rank orders by `--use-tp-pp-dp-mapping` (megatron/training/initialize.py)."""


def accept(request: Request, folder: Path) -> Answer:
    """Sizes as Megatron-Core reads them."""
    sys.argv = ["pretrain_gpt.py", *request.words(folder)]
    arguments.get_device_arch_version = lambda: request.capability
    torch.cuda.get_device_capability = lambda *_device: (request.capability, 0)
    for module in (arguments, transformer_config):
        module.is_te_min_version = lambda *_release, **_options: True
    transformer_config._validate_dsa_kernel_backend_dependencies = lambda _backend: None
    args = arguments.parse_args()
    arguments.validate_args(args)
    build_tokenizer(args)
    args.apply_rope_fusion = args.moe_permute_fusion = False
    config = core_transformer_config_from_args(args)
    layers = {"layers": _layers(args, config)}
    return _parallelism(args) | _batch(args) | _step(args, config) | _model(args) | _beyond_dense(config) | layers


def _parallelism(args: Any) -> Answer:
    return {
        "world": args.world_size,
        "tp": args.tensor_model_parallel_size,
        "weight_shards": args.tensor_parallel_num_weight_shards,
        "gtp": args.gtp_weight_remat_size,
        "expert_gtp": args.expert_gtp_weight_remat_size,
        "ep": args.expert_model_parallel_size,
        "etp": args.expert_tensor_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "vpp": args.virtual_pipeline_model_parallel_size,
        "cp": args.context_parallel_size,
        "dp": args.data_parallel_size,
        "order": ORDERS[args.use_tp_pp_dp_mapping],
        "optimizer_instances": args.num_distributed_optimizer_instances,
        "sequence_parallel": args.sequence_parallel,
        "cp_comm_type": args.cp_comm_type[0],
        "hierarchy": args.hierarchical_context_parallel_sizes,
    }


def _batch(args: Any) -> Answer:
    """Micro-batches of a step, as megatron/training/global_vars.py counts them."""
    unset_num_microbatches_calculator()
    init_num_microbatches_calculator(
        rank=args.rank,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size * args.gtp_weight_remat_size,
        decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
        step_batch_size_schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    return {
        "micro_batch": args.micro_batch_size,
        "global_batch": args.global_batch_size,
        "micro_batches": get_num_microbatches(),
    }


def _step(args: Any, config: Any) -> Answer:
    return {
        "recompute": config.recompute_granularity,
        "recompute_method": config.recompute_method,
        "recompute_layers": config.recompute_num_layers,
        "recompute_modules": config.recompute_modules,
        "dtype": str(args.params_dtype).removeprefix("torch."),
        "fp32_gradients": args.accumulate_allreduce_grads_in_fp32,
        "distributed_optimizer": args.use_distributed_optimizer,
        "overlap_gradients": args.overlap_grad_reduce,
        "overlap_parameters": args.overlap_param_gather,
        "overlap_tensor": config.tp_comm_overlap,
        "overlap_p2p": config.overlap_p2p_comm,
    }


def _model(args: Any) -> Answer:
    return {
        "blocks": args.num_layers,
        "hidden": args.hidden_size,
        "ffn": args.ffn_hidden_size,
        "heads": args.num_attention_heads,
        "kv_heads": args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        "head_dim": args.kv_channels,
        "sequence": args.seq_length,
        "padded_vocab": args.padded_vocab_size,
        "gated": args.swiglu or args.quick_geglu,
        "normalization": args.normalization,
        "positions": args.position_embedding_type,
        "biases": args.add_bias_linear,
        "tied": not args.untie_embeddings_and_output_weights,
        "dropout": [args.hidden_dropout, args.attention_dropout],
    }


def _beyond_dense(config: Any) -> Answer:
    """Experts, dispatcher, number format, clamp, windows, sinks, latents and MTP; None of each that is not there."""
    flex = config.moe_token_dispatcher_type == "flex"
    experts = ("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    latent = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    return {
        "experts": [getattr(config, name) for name in experts] if config.num_moe_experts else None,
        "dispatcher": config.moe_flex_dispatcher_backend if flex else config.moe_token_dispatcher_type,
        "format": config.fp4 or (config.fp8 and f"{config.fp8} {config.fp8_recipe}"),
        "clamp": config.activation_func_clamp_value,
        "window": config.window_size and config.window_size[0] + 1,
        "sinks": config.softmax_type == "learnable",
        "latent": [getattr(config, name) for name in latent] if config.multi_latent_attention else None,
        "mtp": config.mtp_num_layers,
    }


def _layers(args: Any, config: Any) -> list[list[int]]:
    """Layers of each chunk of each stage."""
    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    if args.hybrid_layer_pattern:
        # Its bars are those of the parts.
        counts = [len(part) for part in args.hybrid_layer_pattern.partition("/")[0].split("|")]
        return [counts[stage::stages] for stage in range(stages)]
    if config.pipeline_model_parallel_layout is not None:
        parts = config.pipeline_model_parallel_layout.layout
        return [[chunk.count(LayerType.decoder) for chunk in stage] for stage in parts]
    return [
        [get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage) for chunk in range(chunks)]
        if chunks
        else [get_num_layers_to_build(config, pp_rank=stage)]
        for stage in range(stages)
    ]


def groups(request: Request, sizes: Answer, rank: int, _folder: Path) -> Groups:
    """Groups of a rank, after the initialisation that training does; `dp` and `edp` are the replicas, without GTP."""
    with fake_world(request.world, rank=rank):
        try:
            parallel_state.initialize_model_parallel(
                sizes["tp"],
                sizes["pp"],
                sizes["vpp"],
                context_parallel_size=sizes["cp"],
                expert_model_parallel_size=sizes["ep"],
                expert_tensor_parallel_size=sizes["etp"],
                gtp_remat_size=sizes["gtp"],
                expert_gtp_remat_size=sizes["expert_gtp"],
                num_distributed_optimizer_instances=sizes["optimizer_instances"],
                order=sizes["order"],
                create_gloo_process_groups=False,
            )
            found = {
                "tp": parallel_state.get_tensor_model_parallel_group(),
                "gtp": parallel_state.get_gtp_weight_remat_group(),
                "cp": parallel_state.get_context_parallel_group(),
                "dp": parallel_state.get_data_parallel_group(with_gtp_remat=False),
                "pp": parallel_state.get_pipeline_model_parallel_group(),
            }
            if sizes["experts"]:
                found |= {
                    "ep": parallel_state.get_expert_model_parallel_group(),
                    "etp": parallel_state.get_expert_tensor_parallel_group(),
                    "egtp": parallel_state.get_expert_gtp_weight_remat_group(),
                    "edp": parallel_state.get_expert_data_parallel_group(with_gtp_remat=False),
                }
            return {name: torch.distributed.get_process_group_ranks(group) for name, group in found.items()}
        finally:
            parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main(Check("megatron-core", accept, groups))
