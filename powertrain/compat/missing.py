"""Names of other libraries that `compat` does not have: the reasons, and the alternatives.

docs/names.md is made from this table and from the modules themselves (scripts/peer_names.py);
tests/compat/test_names.py walks the libraries' public names and fails on one that is neither in a module nor here.
"""

import difflib
import dis
import importlib
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NoReturn

_PACKAGE = "powertrain.compat."
# bytecode of `from module import name`: that statement replaces an AttributeError's text by its own
_FROM_IMPORT = dis.opmap["IMPORT_FROM"]

# pattern of their name -> why not, or the name to take; the longest pattern that matches counts
WHY_NOT: dict[str, str] = {
    "flash_attn.flash_attn_interface.*": "internal",
    "flash_attn.flash_attn_triton*": "experimental there; flash_attn_func",
    "flash_attn.flash_blocksparse*": "not yet; a bool attn_bias of powertrain.attention skips blocks that nobody sees",
    "flash_attn.layers.patch_embed.*": "torch.nn.Conv2d or Linear",
    "flash_attn.models.*": "models of transformers, with powertrain.patch",
    "flash_attn.modules.*": "torch.nn.Embedding; powertrain.nn.tensor_parallel, powertrain.parallelize_linears",
    "flash_attn.ops.fused_dense.*": "powertrain.linear_activation",
    "flash_attn.ops.layer_norm.*": "rows taken by index: not yet; dropout_add_layer_norm",
    "flash_attn.ops.rms_norm.*": "rows taken by index: not yet; dropout_add_rms_norm",
    "flash_attn.ops.triton.k_activations.*": "internal; powertrain.activation",
    "flash_attn.ops.triton.layer_norm.*": "internal or a reference; layer_norm_linear_fn: not yet",
    "flash_attn.ops.triton.linear.*": "powertrain.linear_activation",
    "flash_attn.ops.triton.mlp.*": "powertrain.linear_activation",
    "flash_attn.utils.*": "helpers of its own models",
    "flash_attn_interface.*": "internal",
    "xformers.checkpoint.*": "internal",
    "xformers.compute_once": "internal",
    "xformers.get_python_lib": "internal",
    "xformers.info.*": "internal",
    "xformers.ops.ColumnParallelLinear": "powertrain.parallelize_linears",
    "xformers.ops.RowParallelLinear": "powertrain.parallelize_linears",
    "xformers.ops.modpar_layers.*": "powertrain.parallelize_linears",
    "xformers.ops.MemoryEfficientAttention*": "an operator for other hardware; op=None takes the fastest backend",
    "xformers.ops.AttentionOpBase": "internal; AttentionOp",
    "xformers.ops.SwiGLUEagerOp": "one implementation; op=None",
    "xformers.ops.SwiGLUOpDispatch": "one implementation; op=None",
    "xformers.ops.swiglu_op.*": "one implementation; op=None",
    "xformers.ops.masked_matmul": "torch's product and masked_fill",
    "xformers.ops.common.*": "internal",
    "xformers.ops.differentiable_collectives.*": "powertrain.nn.tensor_parallel, or torch's functional collectives",
    "xformers.ops.fmha.*": "internal; op=None takes the fastest backend",
    "xformers.ops.fused_*": "powertrain.parallel.all_gather_gemm and gemm_reduce_scatter",
    "xformers.ops.sequence_parallel_fused_ops.*": "powertrain.parallel.all_gather_gemm and gemm_reduce_scatter",
    "xformers.ops.sequence_parallel_*": "powertrain.parallel.all_gather_gemm and gemm_reduce_scatter",
    "xformers.ops.seqpar.*": "powertrain.parallel.all_gather_gemm and gemm_reduce_scatter",
    "xformers.ops.indexing.*": "internal",
    "xformers.ops.sp24.*": "2:4 sparsity: torch.sparse.to_sparse_semi_structured",
    "xformers.ops.sparsify24*": "2:4 sparsity: torch.sparse.to_sparse_semi_structured",
    "xformers.ops.Sparse24Tensor": "2:4 sparsity: torch.sparse.to_sparse_semi_structured",
    "xformers.ops.tiled_matmul.*": "internal; tiled_matmul",
    "xformers.ops.tree_attention.*": "speculative decoding: not planned",
    "xformers.profiler.*": "torch.profiler; report.html of powertrain train",
    "xformers.sparse.*": "block-sparse tensors: not planned",
    "apex.DeprecatedFeatureWarning": "internal",
    "apex.deprecated_warning": "internal",
    "apex.check_cudnn_version_and_warn": "internal; powertrain doctor",
    "apex.normalization.*": "internal",
    "apex.amp_C.*": "an older form of multi_tensor_lamb: not planned; multi_tensor_lamb",
    "transformer_engine.pytorch.*Quantize*": "of custom recipes: not yet",
    "transformer_engine.pytorch.QuantizedTensor": "no class of torch.Tensor; QuantizedTensorStorage",
    "transformer_engine.pytorch.Float8Tensor": "no class of torch.Tensor; Float8TensorStorage",
    "transformer_engine.pytorch.Float8BlockwiseQTensor": "no class of torch.Tensor; Float8BlockwiseQTensorStorage",
    "transformer_engine.pytorch.Identity*": "of custom recipes: not yet",
    "transformer_engine.pytorch.IdentityQuantizer": "of custom recipes: not yet",
    "transformer_engine.pytorch.DelayedScalingRequest": "of custom recipes: not yet",
    "transformer_engine.pytorch.*MXFP8*": "needs the products of sm_100: not yet; Float8BlockQuantizer",
    "transformer_engine.pytorch.MXFP8Quantizer": "needs the products of sm_100: not yet; Float8BlockQuantizer",
    "transformer_engine.pytorch.*NVFP4*": "needs the products of sm_100: not yet",
    "transformer_engine.pytorch.NVFP4Quantizer": "needs the products of sm_100: not yet",
    "transformer_engine.pytorch.optimizers.multi_tensor_adam_fp8": "FP8 parameters: not yet; FusedAdam",
    "transformer_engine.pytorch.ops.basic.Quantize": "not yet; Float8CurrentScalingQuantizer",
    "transformer_engine.pytorch.*moe_*": "not yet; powertrain.moe_permute, moe_unpermute and moe_route",
    "transformer_engine.pytorch.router.*": "quantile balancing: not yet; powertrain.moe_update_bias_",
    "transformer_engine.pytorch.*Gated*": "linear attention: not yet",
    "transformer_engine.pytorch.ops.*": "operations of one's own are not fused: a torch.nn.Module in ops.Sequential",
    "transformer_engine.pytorch.graph.*": "internal; make_graphed_callables",
    "transformer_engine.pytorch.cpu_offload.*": "internal; get_cpu_offload_context",
    "transformer_engine.pytorch.ops.*Linear": "not yet; GroupedLinear of transformer_engine.pytorch",
    "transformer_engine.pytorch.onnx_export": "not planned",
    "transformer_engine.pytorch.distributed.*": "internal; torch.distributed, powertrain.nn.tensor_parallel",
    "transformer_engine.pytorch.distributed.*recompute*": "internal; checkpoint",
    "transformer_engine.pytorch.distributed.*symm*": "torch.distributed._symmetric_memory; powertrain.parallel.Overlap",
    "transformer_engine.pytorch.distributed.*rng_*": "internal; CudaRNGStatesTracker",
    "transformer_engine.pytorch.distributed.*fsdp": "torch's fully_shard",
    "transformer_engine.pytorch.distributed.FullyShardedDataParallel": "torch's fully_shard",
    "transformer_engine.pytorch.*FusedMLAQUpProj*": "not yet; powertrain.nn.LatentAttention",
    "transformer_engine.pytorch.CPLoadBalancingStrategy": "powertrain.parallel.context_parallel",
    "transformer_engine.pytorch.*newton_schulz*": "not yet; torch.optim.Muon",
    "transformer_engine.pytorch.CusolverMpCtx": "of newton_schulz_tp: not yet",
    "transformer_engine.pytorch.*UserBufferQuantizationMode": "initialize_ub(use_fp8=True)",
    "transformer_engine.pytorch.load_framework_extension": "internal: there is nothing to load",
    "transformer_engine.pytorch.module.is_module_grouped_tensor_path_supported": "internal",
    "megatron.core.fusions.*": "internal",
}


def why_not(name: str) -> str:
    """The reason that a name is not here; `name` may begin with ours or theirs."""
    name = name.removeprefix(_PACKAGE)
    # the longest pattern: "fmha.*" is refined by single names
    matching = [pattern for pattern in WHY_NOT if fnmatchcase(name, pattern)]
    return WHY_NOT[max(matching, key=len)] if matching else "not yet"


def unknown(module: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a compat module: says why a name is not here, and which are.

    `from module import name` raises ImportError with that text (Python would replace an AttributeError's), everything
    else AttributeError, so that hasattr works.
    """

    def __getattr__(name: str) -> NoReturn:
        theirs = module.removeprefix(_PACKAGE)
        # importlib and inspect ask for dunder names; a long answer would only cost time
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        there = public(module)
        # close names first, for most misses are typing errors or renames
        shown = difflib.get_close_matches(name, there, 3, 0.6) or there
        text = f"{theirs}.{name} is not in Powertrain ({why_not(f'{theirs}.{name}')}); there is {', '.join(shown[:40])}"
        # co_code at the caller's last instruction tells which statement asked
        caller = sys._getframe(1)
        if caller.f_lasti >= 0 and caller.f_code.co_code[caller.f_lasti] == _FROM_IMPORT:
            raise ImportError(text, name=module)
        raise AttributeError(text)

    return __getattr__


def public(module: str) -> list[str]:
    """The names of a compat module: its `__all__`."""
    return sorted(importlib.import_module(module).__all__)
