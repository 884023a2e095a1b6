"""A message, as programs print it, for each cause that no text of a public thread shows: (cause, text)."""

MESSAGES = [
    (
        "cl-not-found",
        "nvcc fatal   : Cannot find compiler 'cl.exe' in PATH",
    ),
    (
        "msvc-preprocessor",
        "fatal error C1189: #error:  MSVC/cl.exe with traditional preprocessor is used.",
    ),
    (
        "nvcc-input-file",
        "nvcc fatal : A single input file is required for a non-link phase when an outputfile is specified",
    ),
    (
        "windows-link",
        'x.obj : error LNK2001: unresolved external symbol "public: __int64"',
    ),
    (
        "not-position-independent",
        "/usr/bin/ld: a.o: relocation R_X86_64_PC32 against symbol `x' can not be used when making a shar"
        "ed object; recompile with -fPIC",
    ),
    (
        "half-operators",
        'error: no suitable conversion function from "__half" to "float" exists',
    ),
    (
        "arch-too-old-for-source",
        'error: no instance of overloaded function "atomicAdd" matches the argument list',
    ),
    (
        "arch-too-old-for-source",
        "ptxas /tmp/x.ptx, line 44; error   : Instruction 'cp.async' requires .target sm_80 or higher",
    ),
    (
        "kernel-shared-memory",
        "ptxas error   : Entry function '_Z1' uses too much shared data (0xc800 bytes, 0xc000 max)",
    ),
    (
        "device-link",
        "ptxas fatal   : Unresolved extern function 'cudaGetParameterBufferV2'",
    ),
    (
        "rust-too-new",
        "error: casting `&T` to `&mut T` is undefined behavior, even if the reference is unused",
    ),
    (
        "cython-version",
        "AttributeError: cython_sources",
    ),
    (
        "cython-version",
        "Cython.Compiler.Errors.CompileError: foo.pyx",
    ),
    (
        "sklearn-name",
        "The 'sklearn' PyPI package is deprecated, use 'scikit-learn' rather than 'sklearn' for pip commands.",
    ),
    (
        "package-folder",
        "error: package directory 'foo' does not exist",
    ),
    (
        "rocm-arch",
        "RuntimeError: HIP error: invalid device function",
    ),
    (
        "rocm-arch",
        "rocBLAS error: Cannot read /opt/rocm/lib/rocblas/library/TensileLibrary.dat: Illegal seek for GP"
        "U arch : gfx1031",
    ),
    (
        "hipblaslt",
        "RuntimeError: Attempting to use hipBLASLt on a unsupported architecture!",
    ),
    (
        "rocm-devices",
        "Unable to open /dev/kfd read-write: Permission denied",
    ),
    (
        "miopen",
        "MIOpen Error: /MIOpen/src/ocl/convolutionocl.cpp:521: No invoker was registered for convolution forward",
    ),
    (
        "fsdp-mixed-grad",
        "ValueError: `FlatParameter` requires uniform `requires_grad`",
    ),
    (
        "fsdp-mixed-grad",
        "ValueError: Must flatten tensors with uniform requires_grad when use_orig_params=False",
    ),
    (
        "fsdp-layer-class",
        "Exception: Could not find the transformer layer class to wrap in the model.",
    ),
    (
        "zero-no-sync",
        "AssertionError: no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage 2",
    ),
    (
        "zero-inflight",
        "RuntimeError: still have inflight params [{'id': 1}]",
    ),
    (
        "zero-empty-shape",
        "size mismatch for model.embed_tokens.weight: copying a param with shape torch.Size([32000, 4096]"
        ") from checkpoint, the shape in current model is torch.Size([0]).",
    ),
    (
        "zero-optimizer",
        "AssertionError: zero stage 3 requires an optimizer",
    ),
    (
        "precision-device",
        "ValueError: FP16 Mixed precision training with AMP or APEX (`--fp16`) can only be used on CUDA devices.",
    ),
    (
        "batch-division",
        "AssertionError: global batch size (8) is not divisible by micro batch size (4) times data parallel size (4)",
    ),
    (
        "megatron-no-checkpoint",
        "WARNING: could not find the metadata file /ckpt/latest_checkpointed_iteration.txt",
    ),
    (
        "model-parallel-groups",
        "AssertionError: tensor model parallel group is not initialized",
    ),
    (
        "optimizer-groups",
        "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
    ),
    (
        "fused-optimizer",
        "RuntimeError: `fused=True` requires all the params to be floating point Tensors of supported devices",
    ),
    (
        "accelerate-launch-argument",
        '    setattr(args, "node_rank", int(args.machine_rank))\nTypeError: int() argument must be a strin'
        "g, a bytes-like object or a number, not 'NoneType'",
    ),
    (
        "launch-port",
        "ConnectionError: Tried to launch distributed communication on port `11986`, but another process "
        "is utilizing it.",
    ),
    (
        "loss-targets",
        "ValueError: Expected input batch_size (32) to match target batch_size (16).",
    ),
    (
        "loss-targets",
        "RuntimeError: 0D or 1D target tensor expected, multi-target not supported",
    ),
    (
        "label-range",
        "IndexError: Target 5 is out of bounds.",
    ),
    (
        "label-range",
        "Loss.cu:240: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [17,0,0] Assertion "
        "`t >= 0 && t < n_classes` failed.",
    ),
    (
        "matrix-sizes",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x512 and 768x10)",
    ),
    (
        "not-contiguous",
        "RuntimeError: view size is not compatible with input tensor's size and stride (at least one dime"
        "nsion spans across two contiguous subspaces). Use .reshape(...) instead.",
    ),
    (
        "channels",
        "RuntimeError: Given groups=1, weight of size [64, 3, 7, 7], expected input[1, 1, 224, 224] to ha"
        "ve 3 channels, but got 1 channels instead",
    ),
    (
        "batch-of-one",
        "ValueError: Expected more than 1 value per channel when training, got input size torch.Size([1, 512])",
    ),
    (
        "scatter-dtype",
        "RuntimeError: Index put requires the source and destination dtypes match, got Half for the desti"
        "nation and Float for the source.",
    ),
    (
        "scatter-dtype",
        "RuntimeError: Found dtype Float but expected Half",
    ),
    (
        "sampling-nan",
        "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
    ),
    (
        "loss-nan",
        "ValueError: Loss is nan, stopping training",
    ),
    (
        "loss-nan",
        "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
    ),
    (
        "tensor-to-numpy",
        "TypeError: Got unsupported ScalarType BFloat16",
    ),
    (
        "tensor-to-numpy",
        "RuntimeError: Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.",
    ),
    (
        "not-json",
        "TypeError: Object of type Tensor is not JSON serializable",
    ),
    (
        "deepcopy-graph",
        "RuntimeError: Only Tensors created explicitly by the user (graph leaves) support the deepcopy pr"
        "otocol at the moment.",
    ),
    (
        "inference-tensor",
        "RuntimeError: Inplace update to inference tensor outside InferenceMode is not allowed",
    ),
    (
        "device-name",
        "RuntimeError: Invalid device string: 'cuda:auto'",
    ),
    (
        "input-on-cpu",
        "RuntimeError: Placeholder storage has not been allocated on MPS device!",
    ),
    (
        "names-imported",
        "NameError: name 'init_empty_weights' is not defined",
    ),
    (
        "wrapped-output",
        "ValueError: not enough values to unpack (expected 3, got 2)",
    ),
    (
        "rope-scaling-old",
        "ValueError: `rope_scaling` must be a dictionary with with two fields, `type` and `factor`, got {"
        "'factor': 8.0}",
    ),
    (
        "remote-code-newer-transformers",
        "AttributeError: 'MiniCPMForCausalLM' object has no attribute 'generate'",
    ),
    (
        "remote-code-newer-transformers",
        "AttributeError: 'DynamicCache' object has no attribute 'seen_tokens'",
    ),
    (
        "attention-implementation",
        "ValueError: FooModel does not support an attention implementation through torch.nn.functional.sc"
        "aled_dot_product_attention yet.",
    ),
    (
        "quantized-offload",
        "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RA"
        "M to fit the quantized model.",
    ),
    (
        "meta-left",
        "ValueError: weight is on the meta device, we need a `value` to put in on 0.",
    ),
    (
        "quantized-twice",
        "ValueError: Blockwise quantization only supports 16/32-bit floats, but got torch.uint8",
    ),
    (
        "adapter-files",
        "ValueError: Can't find 'adapter_config.json' at 'out/lora'",
    ),
    (
        "generation-length",
        "ValueError: Input length of input_ids is 600, but `max_length` is set to 512.",
    ),
    (
        "pad-token",
        "ValueError: Cannot handle batch sizes > 1 if no padding token is defined.",
    ),
    (
        "chat-template",
        "jinja2.exceptions.TemplateError: Conversation roles must alternate user/assistant/user/assistant/...",
    ),
    (
        "tokenizer-files",
        "RuntimeError: Internal: could not parse ModelProto from tokenizer.model",
    ),
    (
        "tokenizer-files",
        "TypeError: not a string",
    ),
    (
        "tokenizer-class",
        "ValueError: Tokenizer class LlamaTokenizerX does not exist or is not currently imported.",
    ),
    (
        "resume-missing",
        "ValueError: No valid checkpoint found in output directory (out)",
    ),
    (
        "best-model-settings",
        "KeyError: 'eval_loss'",
    ),
    (
        "trainer-columns",
        "ValueError: No columns in the dataset match the model's forward method signature.",
    ),
    (
        "trainer-columns",
        "ValueError: num_samples should be a positive integer value, but got num_samples=0",
    ),
    (
        "dataset-length",
        "ValueError: train_dataset does not implement __len__, max_steps has to be specified",
    ),
    (
        "data-columns",
        "pyarrow.lib.ArrowInvalid: JSON parse error: Column(/x) changed from number to string in row 13",
    ),
    (
        "data-columns",
        "TypeError: Couldn't cast array of type string to null",
    ),
    (
        "json-lines",
        "json.decoder.JSONDecodeError: Extra data: line 2 column 1 (char 200)",
    ),
    (
        "json-lines",
        "pyarrow.lib.ArrowInvalid: straddling object straddles two block boundaries (try to increase block size?)",
    ),
    (
        "map-lengths",
        "pyarrow.lib.ArrowInvalid: Column 1 named input_ids expected length 1000 but got length 1034",
    ),
    (
        "arrow-2gb",
        "pyarrow.lib.ArrowInvalid: offset overflow while concatenating arrays",
    ),
    (
        "dataset-verification",
        "datasets.utils.info_utils.NonMatchingSplitsSizesError: [{'expected':",
    ),
    (
        "dataset-split",
        "ValueError: Unknown split \"validation\". Should be one of ['train'].",
    ),
    (
        "fsspec-newer",
        "ValueError: Invalid pattern: '**' can only be an entire path component",
    ),
    (
        "text-encoding",
        "UnicodeDecodeError: 'gbk' codec can't decode byte 0x80 in position 10",
    ),
    (
        "torchcodec-ffmpeg",
        "RuntimeError: Could not load libtorchcodec. Likely causes:",
    ),
    (
        "yaml-config",
        "omegaconf.errors.ConfigAttributeError: Key 'foo' is not in struct",
    ),
    (
        "docker-old",
        "unknown flag: --gpus",
    ),
    (
        "container-command",
        'docker: Error response from daemon: OCI runtime create failed: exec: "train": executable file no'
        "t found in $PATH: unknown.",
    ),
    (
        "image-name",
        "docker: invalid reference format.",
    ),
    (
        "build-context",
        "COPY failed: file not found in build context",
    ),
    (
        "kubernetes-gpu",
        "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    ),
    (
        "python-syntax",
        "SyntaxError: future feature annotations is not defined",
    ),
    (
        "relative-import",
        "ImportError: attempted relative import with no known parent package",
    ),
    (
        "recursion",
        "RecursionError: maximum recursion depth exceeded",
    ),
    (
        "numpy-binary",
        "RuntimeError: module compiled against API version 0x10 but this version of numpy is 0xf",
    ),
    (
        "urllib3-openssl",
        "ImportError: urllib3 v2 only supports OpenSSL 1.1.1+, currently the 'ssl' module is compiled wit"
        "h 'OpenSSL 1.0.2k'",
    ),
    (
        "thread-limit",
        "RuntimeError: can't start new thread",
    ),
    (
        "connection-refused",
        "ConnectionRefusedError: [Errno 111] Connection refused",
    ),
    (
        "name-resolution",
        "socket.gaierror: [Errno -2] Name or service not known",
    ),
    (
        "rank-race",
        "OSError: [Errno 39] Directory not empty: 'tmp-checkpoint-500'",
    ),
    (
        "peer-closed",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
    ),
    (
        "shared-memory-object",
        "RuntimeError: unable to open shared memory object </torch_1> in read-write mode",
    ),
    (
        "save-failed",
        "RuntimeError: [enforce fail at inline_container.cc:588] . PytorchStreamWriter failed writing fil"
        "e data/1: file write failed",
    ),
    (
        "pickled-class",
        "AttributeError: Can't get attribute 'Net' on <module '__main__'>",
    ),
    (
        "wandb",
        "wandb.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])",
    ),
    (
        "hub-transfer",
        "ValueError: Fast download using 'hf_transfer' is enabled (HF_HUB_ENABLE_HF_TRANSFER=1) but 'hf_t"
        "ransfer' package is not available",
    ),
    (
        "notebook-arguments",
        "ValueError: Some specified arguments are not used by the HfArgumentParser: ['-f', '/x/kernel-1.json']",
    ),
    (
        "compile-windows",
        "RuntimeError: Windows not yet supported for torch.compile",
    ),
    (
        "triton-old-gpu",
        "IndexError: map::at",
    ),
    (
        "triton-python",
        "SystemError: PY_SSIZE_T_CLEAN macro must be defined for '#' formats",
    ),
    (
        "vllm-extension",
        "WARNING: Failed to import from vllm._C with ModuleNotFoundError(\"No module named 'vllm._C'\")",
    ),
    (
        "vllm-weights",
        "ValueError: Cannot find any model weights with `/model`",
    ),
    (
        "bitsandbytes-kernels",
        "Error named symbol not found at line 74 in file /mmfs1/gscratch/csrc/ops.cu",
    ),
    (
        "no-accelerator",
        "RuntimeError: PyTorch is not linked with support for cuda devices",
    ),
    (
        "unbound-local",
        "UnboundLocalError: local variable 'loss' referenced before assignment",
    ),
    (
        "missing-key",
        "KeyError: 'frobnicate'",
    ),
    (
        "empty-sequence",
        "IndexError: list index out of range",
    ),
    (
        "eval-mode",
        "AssertionError: Backward pass is invalid for module in evaluation mode",
    ),
    (
        "generator-device",
        "RuntimeError: Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    (
        "ragged-array",
        "ValueError: setting an array element with a sequence. The requested array has an inhomogeneous s"
        "hape after 1 dimensions.",
    ),
    (
        "text-number",
        "ValueError: could not convert string to float: 'label'",
    ),
    (
        "image-nan",
        "modules.devices.NansException: A tensor with all NaNs was produced in Unet.",
    ),
    (
        "vocabulary-differs",
        "ValueError: Vocab size mismatch (model has 32000, but tokenizer.model has 32001).",
    ),
    (
        "weights-of-another-class",
        "ValueError: There is no module or parameter named 'mm_whisper_embeddings' in LlamaForCausalLM",
    ),
    (
        "merge-quantized",
        "ValueError: Cannot merge LORA layers when the model is loaded in 8-bit mode",
    ),
    (
        "onnx-export",
        "torch.onnx.errors.UnsupportedOperatorError: Exporting the operator 'aten::x' to ONNX opset versi"
        "on 14 is not supported.",
    ),
    (
        "nvme-offload",
        "AssertionError: num_elems 513024> buffer 513000",
    ),
    (
        "zero-offload-optimizer",
        "deepspeed.runtime.zero.utils.ZeRORuntimeException: You are using ZeRO-Offload with a client prov"
        "ided optimizer (<class 'apex.optimizers.fused_adam.FusedAdam'>)",
    ),
    (
        "arguments-missing",
        "vllm serve: error: the following arguments are required: model_tag",
    ),
    (
        "apt",
        "E: Unable to locate package cuda-toolkit-12-4",
    ),
    (
        "driver-module",
        "modprobe: ERROR: could not insert 'nvidia': No such device",
    ),
    (
        "git-lfs",
        "Error downloading object: smudge filter lfs failed",
    ),
    (
        "git-transfer",
        "error: RPC failed; curl 92 HTTP/2 stream 0 was not closed cleanly",
    ),
    (
        "resolver",
        "  × No solution found when resolving dependencies:",
    ),
    (
        "process-start",
        "AssertionError: daemonic processes are not allowed to have children",
    ),
    (
        "opencv",
        "cv2.error: OpenCV(4.8.0) error: (-215:Assertion failed) !_src.empty() in function 'cvtColor'",
    ),
    (
        "no-display",
        'qt.qpa.plugin: Could not load the Qt platform plugin "xcb"',
    ),
    (
        "other-framework-gpu",
        "W tensorflow: Could not load dynamic library 'libcudart.so.11.0'",
    ),
    (
        "tensorrt-version",
        "The engine plan file is generated on an incompatible device, expecting compute 8.6 got compute 8.9",
    ),
    (
        "kernel-died",
        "The kernel appears to have died. It will restart automatically.",
    ),
    (
        "slurm-ended",
        "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2024-01-01T00:00:00 DUE TO PREEMPTION ***",
    ),
    (
        "argument-without-value",
        "error: argument --num_cpu_threads_per_process: expected one argument",
    ),
    (
        "operation-not-supported",
        "OSError: [Errno 95] Operation not supported",
    ),
    (
        "no-terminal",
        "OSError: [Errno 6] No such device or address",
    ),
    (
        "path-limits",
        "OSError: [Errno 36] File name too long: 'x'",
    ),
    (
        "undefined-name",
        "NameError: name 'frobnicate' is not defined",
    ),
    (
        "unknown-value",
        "ValueError: Invalid attention backend for cuda, with use_v1: False",
    ),
    (
        "shared-library",
        "ImportError: libfrobnicate.so.2: cannot open shared object file: No such file or directory",
    ),
    (
        "undefined-symbol-other",
        "ImportError: /x/foo.so: undefined symbol: frobnicate_v2",
    ),
    (
        "module-attribute",
        "AttributeError: module 'frobnicate' has no attribute 'spin'",
    ),
    (
        "sizes-differ",
        "RuntimeError: The size of tensor a (512) must match the size of tensor b (768) at non-singleton dimension 1",
    ),
    (
        "object-attribute",
        "AttributeError: 'Frobnicator' object has no attribute 'spin'",
    ),
    (
        "script-arguments",
        "train.py: error: unrecognized arguments: --spin 3",
    ),
    (
        "triton-version",
        "ImportError: cannot import name 'frobnicate' from 'triton.language' (/x/triton/language/__init__.py)",
    ),
    (
        "torch-attribute",
        "AttributeError: module 'torch' has no attribute 'frobnicate'",
    ),
    (
        "library-older",
        "TypeError: Trainer.__init__() got an unexpected keyword argument 'processing_class'",
    ),
    (
        "library-newer",
        "TypeError: SFTTrainer.__init__() got an unexpected keyword argument 'tokenizer'",
    ),
    (
        "python-dropped",
        "AttributeError: module 'collections' has no attribute 'Mapping'",
    ),
    (
        "own-module-path",
        "ModuleNotFoundError: No module named 'utils'",
    ),
    (
        "submodule-missing",
        "ModuleNotFoundError: No module named 'frobnicate.spin'",
    ),
    (
        "bitsandbytes-override",
        "WARNING: BNB_CUDA_VERSION=123 environment variable detected; loading libbitsandbytes_cuda121_noc"
        "ublaslt123.so.\nCould not find the bitsandbytes CUDA binary at PosixPath('/x')",
    ),
    (
        "headers-of-another-release",
        "x.c:938:34: error: 'struct cudaPointerAttributes' has no member named 'isManaged'",
    ),
    (
        "remote-code-other-release",
        '  File "/x/modules/transformers_modules/y/configuration_y.py", line 48, in __init__\nKeyError: \'a'
        "rchitectures'",
    ),
    (
        "error-inside-library",
        '  File "/x/site-packages/surya/recognition/model/config.py", line 17, in __init__\nAttributeError'
        ": cannot assign module before Module.__init__() call",
    ),
    (
        "own-check",
        "ValueError: The bell cannot ring yet. Please install the clapper first.",
    ),
    (
        "python-lacks",
        "ImportError: cannot import name 'StrEnum' from 'enum' (/usr/lib/python3.10/enum.py)",
    ),
    (
        "mxfp8-old-gpu",
        "AssertionError: Device compute capability 10.0 or higher required for MXFP8 execution.",
    ),
    (
        "fp8-shape",
        "AssertionError: FP8 execution requires the product of all dimensions except the last to be divisible by 8 and "
        "the last dimension to be divisible by 16, but got tensor with dims=[3, 1, 100]",
    ),
    (
        "softmax-kernels",
        "ModuleNotFoundError: No module named 'scaled_upper_triang_masked_softmax_cuda'",
    ),
    (
        "bitsandbytes-library",
        "RuntimeError: Configured CUDA binary not found at /x/bitsandbytes/libbitsandbytes_cuda128.so",
    ),
    (
        "bitsandbytes-library",
        "FileNotFoundError: [Errno 2] No such file or directory: '/x/bitsandbytes/libbitsandbytes_cuda126.so'",
    ),
    (
        "oom-other-process",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.69 "
        "GiB of which 11.75 MiB is free. Process 12345 has 20.00 GiB memory in use. Including non-PyTorch memory, this "
        "process has 3.00 GiB memory in use.",
    ),
    (
        "host-compiler-range",
        "RuntimeError: The current installed version of g++ (13.2.0) is greater than the maximum required version by "
        "CUDA "
        "12.1. Please make sure to use an adequate version of g++ (>=6.0.0, <13.0).",
    ),
    (
        "host-compiler-range",
        "RuntimeError: The current installed version of g++ (4.8.5) is less than the minimum required version by "
        "CUDA 11.7 "
        "(6.0.0). Please make sure to use an adequate version of g++ (>=6.0.0, <12.0).",
    ),
    (
        "nvrtc-name",
        "OSError: libnvrtc.so: cannot open shared object file: No such file or directory",
    ),
    (
        "megatron-core-missing",
        "ModuleNotFoundError: No module named 'megatron.core'",
    ),
    (
        "gloo-peer",
        "RuntimeError: Rank 3 failed to pass monitoredBarrier in 1800000 ms",
    ),
    (
        "oom-larger-than-gpu",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0 has a total capacity of "
        "79.11 "
        "GiB of which 70.00 GiB is free. Including non-PyTorch memory, this process has 9.00 GiB memory in use.",
    ),
    (
        "flash-attention-3-missing",
        "ModuleNotFoundError: No module named 'flash_attn_interface'",
    ),
    (
        "flash-attention-3-missing",
        "ModuleNotFoundError: No module named 'flash_attn_3_cuda'",
    ),
    (
        "own-file-hides-package",
        "ModuleNotFoundError: No module named 'xformers.ops'; 'xformers' is not a package",
    ),
    (
        "namespace-folder",
        "ImportError: cannot import name 'flash_attn_func' from 'flash_attn' (unknown location)",
    ),
    (
        "python-part-missing",
        "    from _ctypes import Union, Structure, Array\nModuleNotFoundError: No module named '_ctypes'",
    ),
    (
        "not-on-windows",
        "    import fcntl\nModuleNotFoundError: No module named 'fcntl'",
    ),
    (
        "vllm-memory-taken",
        "ValueError: Free memory on device (12.3/79.11 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 71.2 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
    ),
    (
        "no-kernel-image",
        "RuntimeError: No compiled cutlass_scaled_mm for CUDA device capability: 120",
    ),
    (
        "nvcc-missing",
        "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist",
    ),
    (
        "cuda-mismatch",
        "RuntimeError: ('The detected CUDA version (%s) mismatches the version that was used to compilePyTorch (%s). "
        "Please make sure to use the same CUDA versions.', '13.0', '12.8')",
    ),
    (
        "cccl-headers",
        "/opt/venv/lib/python3.12/site-packages/torch/include/ATen/cuda/cub_definitions.cuh:4:10: fatal error: "
        "cub/version.cuh: No such file or directory",
    ),
    (
        "cudnn-headers",
        "        Could NOT find CUDNN (missing: LIBRARY)",
    ),
    (
        "cublas-older",
        "ImportError: libcublas.so.13: symbol cublasLtGetEnvironmentMode version libcublasLt.so.13 not defined in file "
        "libcublasLt.so.13 with link time reference",
    ),
    (
        "cudnn-8",
        "ImportError: libcudnn.so.8: cannot open shared object file: No such file or directory",
    ),
    (
        "te-parts-differ",
        '    assert te_core_installed, "Could not find TE core package `transformer-engine-cu*`."\n'
        "AssertionError: Could not find TE core package `transformer-engine-cu*`.",
    ),
    (
        "torch-no-arch",
        "UserWarning:\n    Please install PyTorch with a following CUDA\n    configurations:  12.6\n"
        "Tesla V100-SXM2-32GB with CUDA capability sm_70 is not compatible with the current PyTorch installation.\n"
        "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
    ),
    (
        "package-required",
        "ImportError: Loading a kernel from the hub requires the `kernels` package. Please install it with `pip "
        "install kernels`.",
    ),
    (
        "build-killed",
        '#14 ERROR: process "/bin/sh -c pip install flash-attn==2.8.3 --no-build-isolation" did not complete '
        "successfully: exit code: 137",
    ),
    (
        "build-killed",
        "[41/73] /usr/local/cuda/bin/nvcc -c flash_bwd_hdim256_bf16_sm80.cu\nKilled",
    ),
    (
        "compiler-killed",
        "[ 8112.0] Out of memory: Killed process 4711 (cicc) total-vm:5120000kB, anon-rss:4800000kB",
    ),
    (
        "build-ended-from-outside",
        "nvcc error   : 'cudafe++' died due to signal 15 (Terminated)",
    ),
    (
        "triton-libcuda",
        "AssertionError: libcuda.so cannot found!\nPossible files are located at ['/usr/lib/wsl/lib/libcuda.so.1']."
        "Please create a symlink of libcuda.so to any of the files.",
    ),
    (
        "wheel-platform",
        "error: Failed to determine installation plan\n  Caused by: A path dependency is incompatible with the current "
        "platform: flash_attn-2.8.3+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl",
    ),
    ("nvlink-defect", "torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution"),
    (
        "container-toolkit",
        "docker: Error response from daemon: failed to discover GPU vendor from CDI: no known GPU vendor found.",
    ),
    ("pod-evicted", "Warning  Evicted  12s  kubelet  The node was low on resource: ephemeral-storage."),
    (
        "ci-runner-stopped",
        "##[error]The runner has received a shutdown signal. This can happen when the runner service is "
        "stopped, or a manually started runner is canceled.",
    ),
    ("host-memory", "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137"),
    (
        "python-version",
        "ERROR: Ignored the following versions that require a different python version: 0.8.0 "
        "Requires-Python >=3.9,<3.13\nERROR: Could not find a version that satisfies the requirement vllm==0.8.0\n"
        "ERROR: No matching distribution found for vllm==0.8.0",
    ),
    (
        "no-distribution",
        "ERROR: Ignored the following versions that require a different python version: 1.21.2 "
        "Requires-Python >=3.7,<3.11\nERROR: No matching distribution found for torch==2.99",
    ),
    ("no-distribution", "Unable to find installation candidates for flash-attn (2.8.3)"),
    ("fsdp-device", "ValueError: Inconsistent compute device and `device_id` on rank 1: cuda:1 vs cuda:0"),
]
