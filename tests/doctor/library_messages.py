"""A message, as libraries print it, for each cause of theirs that no text of a public thread shows: (cause, text)."""

LIBRARY_MESSAGES = [
    (
        "attention-kv-heads",
        "RuntimeError: Number of heads in key/value must divide number of heads in query",
    ),
    (
        "attention-lengths",
        "RuntimeError: cu_seqlens_q must have shape (batch_size + 1)",
    ),
    (
        "attention-last-dim",
        "RuntimeError: Input tensor must have contiguous last dimension",
    ),
    (
        "flash-attention-float32",
        "ValueError: You are attempting to use Flash Attention 2.0 without specifying a torch dtype.",
    ),
    (
        "padding-side",
        "ValueError: You are attempting to perform batched generation with padding_side='right' this may "
        "lead to unexpected behaviour for Flash Attention version of Mistral.",
    ),
    (
        "te-parts-differ",
        "RuntimeError: Multiple files found: libtransformer_engine",
    ),
    (
        "te-check",
        "RuntimeError: transformer_engine/common/gemm/cublaslt_gemm.cu:105 in function "
        "CanonicalizeGemmInput: Assertion failed: ret.lda % 16 == 0. Leading dimension requirement on A for "
        "FP8 GEMM. Caller must pad.",
    ),
    (
        "cublas-lacks",
        "RuntimeError: transformer_engine/common/gemm/cublaslt_gemm.cu:415 in function cublas_gemm: cuBLAS "
        "Error: the requested functionality is not supported",
    ),
    (
        "zero-trace",
        "AssertionError: no sync context manager is incompatible with gradientpartitioning logic of ZeRo stage 3",
    ),
    (
        "pydantic-config",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig",
    ),
    (
        "scaler-order",
        "ValueError: Attempted unscale_ but _scale is None.",
    ),
    (
        "result-dtype",
        "RuntimeError: result type Float can't be cast to the desired output type Long",
    ),
    (
        "offloaded-move",
        "RuntimeError: You can't move a model that has some modules offloaded to cpu or disk.",
    ),
    (
        "signal-exit",
        "exits with return code = -6",
    ),
    (
        "vllm-token-budget",
        "AssertionError: Error in memory profiling. Initial free memory 10 GiB, current free memory 12 GiB.",
    ),
    (
        "map-worker-died",
        "RuntimeError: One of the subprocesses has abruptly died during map operation.",
    ),
    (
        "chat-roles",
        "jinja2.exceptions.UndefinedError: 'list object' has no attribute 'role'",
    ),
    (
        "inputs-missing",
        "ValueError: You should supply an encoding or a list of encodings to this method that includes "
        "input_ids, but you provided ['label']",
    ),
    (
        "weights-of-another-size",
        'ValueError: Trying to set a tensor of shape torch.Size([32000, 4096]) in "weight" (which has shape '
        "torch.Size([32001, 4096])), this look incorrect.",
    ),
    (
        "scalar-concatenated",
        "RuntimeError: zero-dimensional tensor (at position 0) cannot be concatenated",
    ),
    (
        "deepspeed-not-started",
        "AssertionError: DeepSpeed backend not set, please initialize it using init_process_group()",
    ),
    (
        "accelerate-not-started",
        "ValueError: Please make sure to properly initialize your accelerator via `accelerator = "
        "Accelerator()` before using any functionality from the `accelerate` library.",
    ),
    (
        "token-limit",
        "Token indices sequence length is longer than the specified maximum sequence length for this model "
        "(1234 > 512). Running this sequence through the model will result in indexing errors",
    ),
    (
        "rust-panic",
        "thread '<unnamed>' panicked at 'no entry found for key', src/models/mod.rs:36:66",
    ),
    (
        "triton-tile-small",
        "AssertionError: Input shapes should have M >= 16, N >= 16 and K >= 16",
    ),
    (
        "triton-power-of-two",
        "ValueError: arange's range must be a power of 2",
    ),
    (
        "triton-global",
        "NameError: Cannot access global variable BLOCK from within @jit'ed function.",
    ),
    (
        "triton-types",
        "    AssertionError('Loop-carried variable acc has initial type fp32 but is re-assigned to fp16 in loop!')",
    ),
    (
        "triton-gpu-too-old",
        "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised: RuntimeError: Found Quadro "
        "P4000 which is too old to be supported by the triton GPU compiler, which is used as the backend. "
        "Triton only supports devices of CUDA Capability >= 7.0",
    ),
    (
        "dynamo-shapes",
        "torch._dynamo.exc.TorchRuntimeError: Failed running call_function <built-in method matmul of type "
        "object>(*(FakeTensor(..., size=(2, 3)), FakeTensor(..., size=(4, 5))), **{}): a and b must have "
        "same reduction dim, but got [2, 3] X [4, 5].",
    ),
    (
        "cache-form",
        "AttributeError: 'tuple' object has no attribute 'get_seq_length'",
    ),
    (
        "attention-second-derivative",
        "RuntimeError: derivative for aten::_scaled_dot_product_efficient_attention_backward is not implemented",
    ),
    (
        "gradient-unused",
        "RuntimeError: One of the differentiated Tensors appears to not have been used in the graph. Set "
        "allow_unused=True if this is the desired behavior.",
    ),
    (
        "memory-overlap",
        "RuntimeError: unsupported operation: some elements of the input tensor and the written-to tensor "
        "refer to a single memory location. Please clone() the tensor before performing the operation.",
    ),
    (
        "tensor-as-number",
        "ValueError: only one element tensors can be converted to Python scalars",
    ),
    (
        "index-dtype",
        "RuntimeError: index_select(): Expected dtype int32 or int64 for index",
    ),
    (
        "bce-range",
        "RuntimeError: all elements of input should be between 0 and 1",
    ),
    (
        "bce-autocast",
        "RuntimeError: torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.",
    ),
    (
        "scheduler-resume",
        "KeyError: \"param 'initial_lr' is not specified in param_groups[0] when resuming an optimizer\"",
    ),
    (
        "loader-options",
        "ValueError: sampler option is mutually exclusive with shuffle",
    ),
    (
        "pin-cuda",
        "RuntimeError: cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
    ),
    (
        "worker-crashed",
        "RuntimeError: DataLoader worker (pid 1234) is killed by signal: Segmentation fault.",
    ),
    (
        "rank-outside",
        "ValueError: Invalid rank 8, rank should be in the interval [0, 7]",
    ),
    (
        "collective-contiguous",
        "RuntimeError: Tensors must be contiguous",
    ),
    (
        "ddp-models-differ",
        "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 100 params, while rank 1 has "
        "inconsistent 0 params.",
    ),
    (
        "ddp-nothing-trains",
        "RuntimeError: DistributedDataParallel is not needed when a module doesn't have any parameters that "
        "require a gradient.",
    ),
    (
        "ddp-device-ids",
        "ValueError: DistributedDataParallel device_ids and output_device arguments only work with "
        "single-device/multiple-device GPU modules or CPU modules, but got device_ids [0]",
    ),
    (
        "shape-mismatch",
        "RuntimeError: shape mismatch: value tensor of shape [2] cannot be broadcast to indexing result of shape [3]",
    ),
    (
        "loss-nan",
        "RuntimeError: Rank 3, node host1, device 3, iteration 812: Unexpected result nan (message='found "
        "NaN in local forward loss calculation')",
    ),
    (
        "nccl-p2p",
        "transport/p2p.cc:248 NCCL WARN failed to open CUDA IPC handle : 1 invalid argument",
    ),
    (
        "nvcc-ended",
        "error: command '/usr/local/cuda/bin/nvcc' failed with exit status 255",
    ),
    (
        "deepspeed-config-key",
        "KeyError: 'train_micro_batch_size_per_gpu'",
    ),
    (
        "extension-part-missing",
        "ModuleNotFoundError: No module named 'sparse_attn_cuda_ext'",
    ),
    (
        "te-outside-autocast",
        "AssertionError: Data types for parameters must match when outside of autocasted region.  Found "
        "input dtype: torch.float32 and 'weight' dtype: torch.bfloat16",
    ),
    (
        "megatron-of-another-project",
        "ModuleNotFoundError: No module named 'megatron.model.fused_softmax'",
    ),
    (
        "nccl-proxy",
        "proxy.cc:1533 NCCL WARN [Service thread] Proxy Call to rank 5 failed (Connect)",
    ),
    (
        "oom-other-process",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
        "of 79.10 GiB of which 1.20 GiB is free. Process 4211 has 61.30 GiB memory in use. Process 977 has "
        "16.50 GiB memory in use. Of the allocated memory 14.90 GiB is allocated by PyTorch, and 900.00 MiB "
        "is reserved by PyTorch but unallocated.",
    ),
]
