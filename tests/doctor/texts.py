"""Literal texts, as people pasted them, and the causes they show: (cause, text). The causes name the threads."""

_TE_CONFIG = (
    "DEBUG:DotProductAttention:Running with config={'transformer_engine_version': '2.8.0', 'compute_capability': "
    "'sm100', "
    "'flash_attn_version': '2.7.3', 'flash_attn_3_version': 'not installed', 'cudnn_version': '9.10.1', 'qkv_type': "
    "<class 'torch.Tensor'>, 'qkv_dtype': torch.bfloat16, 'qkv_layout': 'thd_thd_thd', 'batch_size': 1, "
    "'num_heads': 64, "
    "'num_gqa_groups': 64, 'max_seqlen_q': 8192, 'max_seqlen_kv': 8192, 'head_dim_qk': 192, 'head_dim_v': 128, "
    "'attn_mask_type': 'padding_causal', 'window_size': (-1, 0), 'alibi_slopes_shape': None, "
    "'core_attention_bias_type': "
    "'no_bias', 'core_attention_bias_shape': None, 'core_attention_bias_requires_grad': False, 'pad_between_seqs': "
    "False, "
    "'attention_dropout': 0.0, 'context_parallel': False, 'cp_comm_type': 'p2p', 'deterministic': False, "
    "'is_training': "
    "True, 'fp8': False, 'fp8_meta': {'fp8_checkpoint': False, 'fp8_group': None}, 'inference_params': None, "
    "'softmax_type': 'vanilla'}\n"
)

TE_LOG = (
    _TE_CONFIG
    + "DEBUG:DotProductAttention:Disabling FlashAttention 2 as it does not support MLA.\n"
    + "DEBUG:DotProductAttention:Disabling UnfusedDotProductAttention for qkv_format = thd\n"
    + "DEBUG:DotProductAttention:Disabling FusedAttention as no backend supports the provided input\n"
    + "ValueError: No dot product attention backend is available for the provided inputs. Please run with NVTE_DEBUG=1 "
    "NVTE_DEBUG_LEVEL=2 to find out the reasons for disabling all backends.\n"
)

TEXTS = [
    (
        "credentials-asked",
        """\
Collecting git+https://github.com/openfe/gufe.git
  Cloning https://github.com/openfe/gufe.git to /tmp/pip-req-build-6686emdb
  Running command git clone --filter=blob:none -q https://github.com/openfe/gufe.git /tmp/pip-req-build-6686emdb
Username for 'https://github.com':
""",
    ),
    (
        "credentials-asked",
        "Cloning into '.'... fatal: could not read Username for 'https://gitlab.com': terminal prompts disabled",
    ),
    (
        "wheel-stuck",
        """\
  Resolved https://github.com/NVIDIA/TransformerEngine.git to commit 3ec998e96c82bc30247560ced6170c4221ca2b5a
  Running command git submodule update --init --recursive -q
  Preparing metadata (setup.py) ... done
Requirement already satisfied: packaging in /usr/lib/python3/dist-packages (from transformer-engine==1.8.0) (21.3)
Building wheels for collected packages: transformer-engine
  Building wheel for transformer-engine (setup.py) ... -
""",
    ),
    (
        "wheel-stuck",
        "Building wheels for collected packages: flash-attn\n  Building wheel for flash-attn (pyproject.toml): "
        "started\n"
        "  Building wheel for flash-attn (pyproject.toml): still running...",
    ),
    (
        "fused-kernels-stuck",
        """\
> setting random seeds to 1234 ...
> compiling dataset index builder ...
make: Nothing to be done for 'default'.
>>> done with dataset index builder. Compilation time: 0.115 seconds
> compiling and loading fused kernels ...
""",
    ),
    (
        "fused-kernels-stuck",
        """\
Detected CUDA files, patching ldflags
Emitting ninja build file /workspace/gpt-neox/megatron/fused_kernels/build/build.ninja...
Building extension module scaled_upper_triang_masked_softmax_cuda...
Allowing ninja to set a default number of workers... (overridable by setting the environment variable MAX_JOBS=N)
""",
    ),
    ("fused-kernels-stuck", "Using /home/me/.cache/torch_extensions/py310_cu117 as PyTorch extensions root...\n"),
    (
        "fused-kernels-missing",
        "ERROR: Fused kernels configured but not installed. Please run `python "
        "/home/gpt-neox/megatron/fused_kernels/setup.py install` to install them",
    ),
    (
        "mpi-not-started",
        """\
*** The MPI_Comm_rank() function was called before MPI_INIT was invoked.
*** This is disallowed by the MPI standard.
*** Your MPI job will now abort.
[montblanc1:07616] Local abort before MPI_INIT completed completed successfully, but am not able to aggregate error
""",
    ),
    ("mpi-not-started", "MPI_Comm_rank() called before MPI_INIT"),
    ("userbuffers-not-initialized", "AssertionError: ub_manager not initialized"),
    (
        "userbuffers-multicast",
        "AssertionError: CUDA device, driver and/or toolkit version does not support comm+GEMM overlap with CUDA "
        "Multicast. Launch app with UB_SKIPMC=1 to try CUDA IPC instead.",
    ),
    (
        "gdrcopy-missing",
        "transformer_engine/pytorch/csrc/userbuffers/userbuffers.h:16:10: fatal error: gdrapi.h: No such file or "
        "directory",
    ),
    ("gdrcopy-missing", 'GDRCOPY library "libgdrapi.so" unable to open GDR driver, is gdrdrv.ko loaded?'),
    ("gdrcopy-missing", "gdr_open error: Is gdrdrv driver installed and loaded?"),
    ("no-attention-backend", TE_LOG),
    ("no-attention-backend", "ValueError: No dot product attention support for the provided inputs!"),
    (
        "kernel-for-another-gpu",
        "FATAL: kernel `fmha_cutlassF_f16_aligned_64x128_rf_sm80` is for sm80-sm100, but was built for sm75",
    ),
    (
        "kernel-for-another-gpu",
        "FATAL: kernel `fmha_cutlassF_f32_aligned_64x64_rf_sm80` is for sm80-sm100, but was built for sm37",
    ),
    ("kernel-for-another-gpu", "FATAL: this function is for sm80, but was built for sm750"),
    (
        "compiler-killed",
        """\
FAILED: /tmp/build/temp.linux-x86_64-cpython-310/csrc/flash_attn/src/flash_bwd_hdim256_bf16_sm80.o
nvcc error   : 'cicc' died due to signal 9 (Kill signal)
ninja: build stopped: subcommand failed.
""",
    ),
    ("compiler-killed", "c++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.\n"),
    ("gpu-architecture-unknown", "nvcc fatal   : Unsupported gpu architecture 'compute_120'"),
    ("gpu-architecture-unknown", "nvcc fatal   : Unsupported gpu architecture 'compute_30'"),
    (
        "cuda-mismatch",
        """\
RuntimeError:
      The detected CUDA version (11.8) mismatches the version that was used to compile
      PyTorch (12.4). Please make sure to use the same CUDA versions.
""",
    ),
    (
        "host-compiler-too-new",
        "/usr/local/cuda/include/crt/host_config.h:143:2: error: #error -- unsupported GNU version! gcc versions "
        "later than "
        "12 are not supported! The nvcc flag '-allow-unsupported-compiler' can be used to override this version check",
    ),
    (
        "torch-missing-at-build",
        """\
  Getting requirements to build wheel ... error
  error: subprocess-exited-with-error

  × Getting requirements to build wheel did not run successfully.
      ModuleNotFoundError: No module named 'torch'
      [end of output]
  note: This error originates from a subprocess, and is likely not a problem with pip.
""",
    ),
    (
        "nvcc-missing",
        "/tmp/pip-install-kvw31738/flash-attn/setup.py:95: UserWarning: flash_attn was requested, but nvcc was not "
        "found.  "
        "Are you sure your environment has nvcc available?",
    ),
    ("cuda-home", "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root."),
    ("ninja-missing", "RuntimeError: Ninja is required to load C++ extensions"),
    (
        "cudnn-headers",
        "/envs/megatron/lib/python3.9/site-packages/torch/include/ATen/cudnn/cudnn-wrapper.h:3:10: fatal error: "
        "cudnn.h: "
        "No such file or directory",
    ),
    ("cudnn-headers", "  Could not find cudnn_LIBRARY using the following names: cudnn, libcudnn.so."),
    (
        "submodules",
        "/opt/transformer-engine/transformer_engine/common/fused_attn/utils.h:11:10: fatal error: "
        "cudnn_frontend.h: No such "
        "file or directory",
    ),
    ("python-headers", "/tmp/tmps1rkq3y3/main.c:5:10: fatal error: Python.h: No such file or directory"),
    ("libcuda-link", "/usr/bin/ld: cannot find -lcuda\ncollect2: error: ld returned 1 exit status\n"),
    ("extension-build", "RuntimeError: Error building extension 'fused_adam'"),
    ("disk-full", "OSError: [Errno 28] No space left on device: '/root/.cache/pip/wheels'"),
    (
        "cublas-older",
        "lib/python3.12/site-packages/transformer_engine/wheel_lib/libtransformer_engine.so: undefined symbol: "
        "cublasLtGroupedMatrixLayoutInit_internal, version libcublasLt.so.13",
    ),
    (
        "undefined-symbol",
        "ImportError: /opt/lib/python3.12/site-packages/flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so: "
        "undefined symbol: "
        "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
    ),
    (
        "undefined-symbol",
        "ImportError: "
        "/usr/local/lib/python3.10/dist-packages/transformer_engine_extensions.cpython-310-x86_64-linux-gnu.so: "
        "undefined symbol: _ZN2at4_ops5zeros4callEN3c108ArrayRefINS2_6SymIntEEE",
    ),
    (
        "library-of-another-cuda",
        "OSError: libcublas.so.13: cannot open shared object file: No such file or directory",
    ),
    (
        "cudnn-not-found",
        "transformer_engine failed to import with exception libcudnn_adv.so.9: cannot open shared object file: No "
        "such file",
    ),
    (
        "te-extension-missing",
        "FileNotFoundError: Could not find shared object file for Transformer Engine torch lib.",
    ),
    ("te-extension-missing", "AssertionError: Could not find libtransformer_engine.so when using wheel."),
    (
        "glibc",
        "ImportError: /lib64/libc.so.6: version `GLIBC_2.32' not found (required by flash_attn_2_cuda.cpython-312.so)",
    ),
    (
        "libstdcxx",
        "ImportError: /home/ubuntu/anaconda3/envs/k/bin/../lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found",
    ),
    (
        "numpy-major",
        "A module that was compiled using NumPy 1.x cannot be run in\nNumPy 2.1.0 as it may crash. To support both "
        "1.x and 2.x",
    ),
    ("apex-extensions", "ModuleNotFoundError: No module named 'fused_layer_norm_cuda'"),
    ("driver-updated", "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.144\n"),
    (
        "driver-old",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
        "driver",
    ),
    (
        "no-kernel-image",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors "
        "might be "
        "asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
    ),
    ("flash-attention-old-gpu", "RuntimeError: FlashAttention only supports Ampere GPUs or newer."),
    (
        "xformers-no-operator",
        """\
NotImplementedError: No operator found for `memory_efficient_attention_forward` with inputs:
     query       : shape=(2, 498, 8, 32) (torch.float16)
`fa3F@0.0.0` is not supported because:
    requires device with capability > (9, 0) but your GPU has capability (8, 9) (too old)
""",
    ),
    (
        "cudnn-sublibrary",
        """\
RuntimeError: /TransformerEngine/transformer_engine/common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu:417 in function
cuDNN Error: CUDNN_BACKEND_TENSOR_DESCRIPTOR cudnnFinalize failed
ptrDesc->finalize() cudnn_status: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED
""",
    ),
    (
        "cudnn-execution",
        """\
E! CuDNN (v90100 70) function cudnnBackendFinalize() called:
e!         Error: CUDNN_STATUS_EXECUTION_FAILED; Reason: rtc->loadModule()
""",
    ),
    (
        "fp8-shape",
        "AssertionError: FP8 execution requires 2D input matrices with height divisible by 8 and width divisible "
        "by 16, but "
        "got tensor with dims=[896, 712]",
    ),
    ("illegal-memory-access", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    (
        "triton-shared-memory",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: "
        "101376. "
        "Reducing block sizes or `num_stages` may help.",
    ),
    (
        "cuda-out-of-memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "79.15 GiB",
    ),
    (
        "triton-cache-race",
        "FileNotFoundError: [Errno 2] No such file or directory: "
        "'/home/vllm/.triton/cache/1feb415f3280ca46eea8c4407a58c23e/"
        "fused_moe_kernel.json.tmp.pid_72_c0a0033e-6147-4520-ae3a-3847d02598f8'",
    ),
    (
        "triton-cache-network",
        '  File "triton/runtime/cache.py", line 148, in put\n    os.removedirs(temp_dir)\nOSError: [Errno 16] '
        "Device or resource "
        "busy: '/nfs/cache'",
    ),
    (
        "duplicate-gpu",
        """\
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10
""",
    ),
    (
        "port-taken",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "The server "
        "socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
    ),
    (
        "ranks-missing",
        "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/3 clients joined.",
    ),
    (
        "nccl-shared-memory",
        "ubuntu:9621:9691 [6] misc/shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-fjwOOB to "
        "5967876 bytes\n"
        "misc/shmutils.cc:132 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-WU88OE (size "
        "9637888), "
        "error: No space left on device (28)",
    ),
    (
        "dataloader-shared-memory",
        "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.",
    ),
    ("file-descriptors", "RuntimeError: received 0 items of ancdata"),
    (
        "nccl-timeout",
        "[rank1]:[E ProcessGroupNCCL.cpp:563] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=158046, OpType=GATHER, NumelIn=2867200, NumelOut=0, Timeout(ms)=600000) ran for 600027 "
        "milliseconds before timing out.",
    ),
    (
        "nccl-timeout-while-compiling",
        """\
> compiling and loading fused kernels ...
Building extension module scaled_masked_softmax_cuda...
[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, \
NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600411 milliseconds before timing out.
""",
    ),
]

# messages as the programs print them, for the causes that neither TEXTS nor cases.jsonl shows
MESSAGES = [
    ("pkg-resources", "ModuleNotFoundError: No module named 'pkg_resources'"),
    ("compiler-missing", "error: command 'x86_64-linux-gnu-gcc' failed: No such file or directory"),
    ("compiler-missing", "CMake Error at CMakeLists.txt:3 (project):\n  No CMAKE_CXX_COMPILER could be found."),
    ("rust-missing", "error: can't find Rust compiler"),
    ("nccl-headers", "common/comm.h:9:10: fatal error: nccl.h: No such file or directory"),
    ("thc-removed", "src/roi.cu:3:10: fatal error: THC/THC.h: No such file or directory"),
    ("submodule-headers", "csrc/flash_api.cpp:12:10: fatal error: cutlass/numeric_types.h: No such file or directory"),
    ("header-missing", "a.cpp:1:10: fatal error: crypt.h: No such file or directory"),
    ("arch-list-empty", "    arch_list[-1] += '+PTX'\nIndexError: list index out of range"),
    ("cmake-old", "  CMake 3.26 or higher is required.  You are running version 3.22.1"),
    ("cmake-new", "  Compatibility with CMake < 3.5 has been removed from CMake."),
    ("apex-options", "error: option --cpp_ext not recognized"),
    ("deepspeed-op", "RuntimeError: Unable to JIT load the cpu_adam op due to it not being compatible"),
    ("libaio", " [WARNING]  async_io requires the dev libaio .so object and headers but these were not found."),
    ("link-too-large", "ld: a.o: relocation truncated to fit: R_X86_64_PC32 against symbol `x'"),
    (
        "cross-device-link",
        "error: [Errno 18] Invalid cross-device link: 'flash_attn-2.6.whl' -> '/home/me/.cache/pip/x.whl'",
    ),
    ("dubious-ownership", "fatal: detected dubious ownership in repository at '/workspace/flash-attention'"),
    ("ssh-key", "git@github.com: Permission denied (publickey)."),
    ("wheel-platform", "ERROR: flash_attn-2.8-cp310-cp310-linux_x86_64.whl is not a supported wheel on this platform."),
    ("python-version", "ERROR: Package 'vllm' requires a different Python: 3.8.10 not in '<3.14,>=3.10'"),
    ("pip-conflict", "xformers 0.0.27 requires torch==2.3.1, but you have torch 2.4.0 which is incompatible."),
    ("externally-managed", "error: externally-managed-environment"),
    ("disk-quota", "OSError: [Errno 122] Disk quota exceeded"),
    ("read-only", "OSError: [Errno 30] Read-only file system: '/.triton'"),
    ("undefined-reference", "a.o: undefined reference to `cudnnCreate'"),
    ("python-symbol", "ImportError: /x/foo.so: undefined symbol: _PyGen_Send"),
    ("bitsandbytes-cpu", "AttributeError: /x/libbitsandbytes_cpu.so: undefined symbol: cget_col_row_stats"),
    (
        "partially-initialized",
        "ImportError: cannot import name 'f' from partially initialized module 'random' (most likely)",
    ),
    ("library-package", "ImportError: libGL.so.1: cannot open shared object file: No such file or directory"),
    ("symbol-library", "ImportError: /x/foo.so: undefined symbol: omp_get_max_threads_ext"),
    ("ptx-newer-than-driver", "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain."),
    ("device-ordinal", "RuntimeError: CUDA error: invalid device ordinal"),
    ("gpu-busy", "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable"),
    (
        "gpu-lost",
        "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost. Reboot the system to recover",
    ),
    ("xid", "[ 1203.1] NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008"),
    ("gpu-memory-full", "RuntimeError: CUDA error: out of memory"),
    (
        "mixed-devices",
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    ),
    ("cublas-failed", "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle )`"),
    ("dynamo-python", "RuntimeError: Dynamo is not supported on Python 3.12+"),
    ("recompile-limit", "W0101 torch._dynamo hit config.recompile_limit (8)"),
    ("dynamo-unsupported", "torch._dynamo.exc.Unsupported: call_function BuiltinVariable(print)"),
    (
        "cuda-graph-overwritten",
        "RuntimeError: Error: accessing tensor output of CUDAGraphs that has been overwritten by a run.",
    ),
    ("capture", "RuntimeError: CUDA error: operation not permitted when stream is capturing"),
    ("process-group-missing", "ValueError: Default process group has not been initialized, please make sure to call"),
    (
        "rank-variables",
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK "
        "expected, but not set",
    ),
    ("local-rank-argument", "train.py: error: unrecognized arguments: --local-rank=0"),
    ("pdsh-missing", "RuntimeError: launcher 'pdsh' not installed."),
    ("nccl-interface", "host:1:1 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found"),
    ("nccl-memlock", "misc/ibvwrap.cc:111 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory"),
    (
        "master-unreachable",
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to "
        "connect to (10.0.0.1, 29500).",
    ),
    ("nccl-mismatch", "host:1:1 [0] NCCL WARN Message truncated : received 1024 bytes instead of 256"),
    (
        "fork-cuda",
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use spawn",
    ),
    ("hang-up", "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 1"),
    ("time-limit", "slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***"),
    ("weights-only", "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded"),
    (
        "checkpoint-keys",
        'RuntimeError: Error(s) in loading state_dict for GPT:\n\tMissing key(s) in state_dict: "a.weight".',
    ),
    (
        "model-unknown",
        "ValueError: The checkpoint you are trying to load has model type `qwen3` but Transformers does not "
        "recognize this architecture.",
    ),
    (
        "hub-name",
        "OSError: lama-3 is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co/models'",
    ),
    ("unscale-fp16", "ValueError: Attempting to unscale FP16 gradients."),
    ("dtype-mismatch", "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16"),
    ("no-grad-input", "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"),
    ("vllm-cache", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    (
        "vllm-parallel",
        "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).",
    ),
    (
        "apex-wrong-package",
        "ImportError: cannot import name 'UnencryptedCookieSessionFactoryConfig' from 'pyramid.session'",
    ),
    (
        "apex-wrong-package",
        "ImportError: Please install apex from https://www.github.com/nvidia/apex to use fp16 training.",
    ),
    (
        "megatron-helpers",
        "ImportError: cannot import name 'helpers' from 'megatron.data' (/x/megatron/data/__init__.py)",
    ),
    ("megatron-helpers", "ModuleNotFoundError: No module named 'megatron.core.datasets.helpers_cpp'"),
    ("numpy-names", "AttributeError: module 'numpy' has no attribute 'bool'."),
    ("numpy-major", "ValueError: numpy.dtype size changed, may indicate binary incompatibility."),
    ("protobuf", "TypeError: Descriptors cannot be created directly."),
    ("library-older", "AttributeError: module 'transformers' has no attribute 'Qwen3Config'"),
    ("module-missing", "ModuleNotFoundError: No module named 'torchvision'"),
    ("nccl-not-built", "RuntimeError: Distributed package doesn't have NCCL built in"),
    ("store-timeout", "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//1"),
    ("port-taken", "RuntimeError: Address already in use"),
    ("cuda-home", "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'"),
    ("cuda-home", "/bin/sh: 1: :/usr/local/cuda/bin/nvcc: not found"),
    ("ninja-missing", "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'"),
    (
        "network",
        "fatal: unable to access 'https://github.com/NVIDIA/cutlass.git/': Failed to connect to github.com port 443",
    ),
    ("no-kernel-image", "RuntimeError: CUDA error: invalid device function"),
    ("remote-code", "ValueError: Please pass the argument `trust_remote_code=True` to allow custom code to be run."),
    (
        "no-map-location",
        "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False",
    ),
    ("meta-tensor", "NotImplementedError: Cannot copy out of meta tensor; no data!"),
    ("tokenizer-backend", "ImportError: LlamaTokenizer requires the SentencePiece library but it was not found"),
    ("model-unknown", "ValueError: Model architectures ['Qwen3ForCausalLM'] are not supported for now."),
    (
        "conda-unsolvable",
        "UnsatisfiableError: The following specifications were found to be incompatible with each other:",
    ),
    ("conda-not-found", "PackagesNotFoundError: The following packages are not available from current channels:"),
    ("conda-shell", "CommandNotFoundError: Your shell has not been properly configured to use 'conda activate'."),
    ("distutils-gone", "AttributeError: module 'pkgutil' has no attribute 'ImpImporter'. Did you mean: 'zipimporter'?"),
    (
        "setuptools-version",
        "TypeError: canonicalize_version() got an unexpected keyword argument 'strip_trailing_zero'",
    ),
    ("wheel-missing", "error: invalid command 'bdist_wheel'"),
    ("build-backend", "pip._vendor.pyproject_hooks._impl.BackendUnavailable: Cannot import 'setuptools.build_meta'"),
    ("package-metadata", "WARNING: Ignoring version 1.8.0 of pytorch-lightning since it has invalid metadata:"),
    ("pip-hashes", "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."),
    (
        "not-a-project",
        "ERROR: file:///root/apex does not appear to be a Python project: neither 'setup.py' nor "
        "'pyproject.toml' found.",
    ),
    ("pip-uninstall", "ERROR: Cannot uninstall 'PyYAML'. It is a distutils installed project"),
    ("git-missing", "ERROR: Cannot find command 'git' - do you have 'git' installed and in your PATH?"),
    ("archive-broken", "zipfile.BadZipFile: File is not a zip file"),
    (
        "package-version-required",
        "ImportError: tokenizers>=0.14,<0.19 is required for a normal functioning of this module, but found "
        "tokenizers==0.19.1.",
    ),
    (
        "package-required",
        "ImportError: Using `low_cpu_mem_usage=True` or a `device_map` requires Accelerate: `pip install accelerate`",
    ),
    ("python-older", "TypeError: unsupported operand type(s) for |: 'type' and 'NoneType'"),
    (
        "pydantic-version",
        "pydantic.errors.PydanticImportError: `BaseSettings` has been moved to the `pydantic-settings` package.",
    ),
    (
        "keras-3",
        "ValueError: Your currently installed version of Keras is Keras 3, but this is not yet supported in "
        "Transformers.",
    ),
    (
        "ssl-module",
        "WARNING: pip is configured with locations that require TLS/SSL, however the ssl module in Python is "
        "not available.",
    ),
    ("no-pip", "/usr/bin/python3: No module named pip"),
    ("windows-program", "FileNotFoundError: [WinError 2] 系统找不到指定的文件。"),
    (
        "windows-dll",
        "ImportError: DLL load failed while importing flash_attn_2_cuda: The specified procedure could not be found.",
    ),
    ("windows-path-length", "FileNotFoundError: [WinError 206] The filename or extension is too long"),
    ("windows-access", "OSError: [WinError 1314] A required privilege is not held by the client"),
    ("no-locks", "OSError: [Errno 116] Stale file handle"),
    ("input-output", "OSError: [Errno 5] Input/output error"),
    ("too-many-requests", "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url"),
    ("forbidden", "docker: Error response from daemon: pull access denied for nvcr.io/x, repository does not exist"),
    ("torch-libraries", "RuntimeError: operator torchvision::nms does not exist"),
    ("library-file-broken", "OSError: /usr/lib/libcudart.so.12: invalid ELF header"),
    ("static-tls", "ImportError: /lib/libgomp-d22c30c5.so.1: cannot allocate memory in static TLS block"),
    (
        "executable-stack",
        "ImportError: libctranslate2-bc15bf3f.so.4.5.0: cannot enable executable stack as shared object "
        "requires: Invalid argument",
    ),
    ("openmp-twice", "OMP: Error #15: Initializing libiomp5md.dll, but found libiomp5md.dll already initialized."),
    (
        "mkl-loading",
        "Error: mkl-service + Intel(R) MKL: MKL_THREADING_LAYER=INTEL is incompatible with libgomp.so.1 library.",
    ),
    ("extension-not-registered", "AttributeError: '_OpNamespace' '_C' object has no attribute 'rms_norm'"),
    ("wsl-libcuda-link", "/sbin/ldconfig.real: /usr/lib/wsl/lib/libcuda.so.1 is not a symbolic link"),
    ("container-runtime", "docker: Error response from daemon: unknown or invalid runtime name: nvidia."),
    (
        "container-driver",
        "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4, please update your "
        "driver to a newer version",
    ),
    ("container-hook", "nvidia-container-cli: mount error: file creation failed: /usr/bin/nvidia-smi"),
    (
        "docker-daemon",
        "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
    ),
    ("cpu-architecture", "exec /usr/local/bin/python: exec format error"),
    ("singularity", "INFO:    Could not find any nv files on this host!"),
    ("environment-module", 'Lmod has detected the following error: The following module(s) are unknown: "cuda/12.1"'),
    ("slurm-refused", "sbatch: error: Batch job submission failed: Invalid generic resource (gres) specification"),
    (
        "mpi-launch",
        "There are not enough slots available in the system to satisfy the 8 slots that were requested by "
        "the application",
    ),
    ("driver-combination", "Error 803: system has unsupported display driver / cuda driver combination"),
    ("cuda-start", "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment"),
    ("nvml", "pynvml.NVMLError_LibraryNotFound: NVML Shared Library Not Found"),
    ("launch-timeout", "RuntimeError: CUDA error: the launch timed out and was terminated"),
    ("cuda-not-supported", "RuntimeError: CUDA error: operation not supported"),
    ("invalid-handle", "RuntimeError: CUDA error: invalid resource handle"),
    ("invalid-argument", "RuntimeError: CUDA error: invalid argument"),
    ("nvrtc", "RuntimeError: nvrtc: error: invalid value for --gpu-architecture (-arch)"),
    (
        "cuda-math-library",
        "RuntimeError: cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
    ),
    ("sdpa-no-kernel", "RuntimeError: No available kernel.  Aborting execution."),
    (
        "quantized-old-gpu",
        "ValueError: The quantization method awq_marlin is not supported for the current GPU. Minimum "
        "capability: 80. Current capability: 75.",
    ),
    ("dtype-not-implemented", "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'"),
    ("parameter-not-gathered", "RuntimeError: 'weight' must be 2-D"),
    ("fsdp-state-dict", "RuntimeError: Trying to resize storage that is not resizable"),
    ("fsdp-wrapping", "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32"),
    (
        "dtensor-mixed",
        "RuntimeError: aten.mm.default: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor "
        "to DTensor",
    ),
    ("ready-twice", "RuntimeError: Expected to mark a variable ready only once."),
    (
        "inplace-modified",
        "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation",
    ),
    ("backward-twice", "RuntimeError: Trying to backward through the graph a second time"),
    ("index-range", "IndexError: index out of range in self"),
    ("matrix-sizes", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x1024 and 2048x512)"),
    ("batch-not-padded", "ValueError: Unable to create tensor, you should probably activate truncation and/or padding"),
    ("no-parameters", "ValueError: optimizer got an empty parameter list"),
    ("shared-tensors", "RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk"),
    ("dynamo-source", "OSError: could not get source code"),
    ("ptx-version", "ptxas /tmp/k.ptx, line 5; fatal   : Unsupported .version 8.4; current version is '7.8'"),
    (
        "triton-launcher",
        "subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/tmpx/main.c', '-O3', '-shared']' "
        "returned non-zero exit status 1.",
    ),
    ("triton-cpu-tensor", "ValueError: Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"),
    ("triton-no-driver", "RuntimeError: 0 active drivers ([]). There should only be one."),
    (
        "triton-resources",
        "triton.runtime.errors.OutOfResources: out of resource: threads, Required: 2048, Hardware limit: 1024.",
    ),
    ("inductor-compiler", "RuntimeError: Compiler: cl is not found."),
    (
        "dynamo-data",
        "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode: Could not guard on "
        "data-dependent expression u0 > 1",
    ),
    ("collective-device", "RuntimeError: No backend type associated with device type cpu"),
    (
        "collective-mismatch",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective",
    ),
    (
        "gloo-address",
        "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
    ),
    ("nccl-shm-transport", "NCCL WARN Call to posix_fallocate failed : No space left"),
    ("nccl-nvls", "transport/nvls.cc:241 NCCL WARN Cuda failure 1 'invalid argument'"),
    ("parallel-sizes", "AssertionError: world size (6) is not divisible by tensor_model_parallel_size (4)"),
    (
        "max-connections",
        "RuntimeError: Using sequence parallelism requires setting the environment variable "
        "CUDA_DEVICE_MAX_CONNECTIONS to 1",
    ),
    (
        "main-guard",
        "An attempt has been made to start a new process before the current process has finished its "
        "bootstrapping phase.",
    ),
    ("pickle-spawn", "AttributeError: Can't pickle local object 'main.<locals>.collate'"),
    ("dataloader-worker", "RuntimeError: DataLoader worker (pid(s) 12345) exited unexpectedly"),
    ("ray-resources", "ValueError: Current node has no GPU available. current_node_resource={'CPU': 8.0}"),
    ("vllm-engine", "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"),
    ("vllm-device", "RuntimeError: Failed to infer device type"),
    ("vllm-length", "ValueError: User-specified max_model_len (32768) is greater than the derived max_model_len"),
    ("bitsandbytes-setup", "CUDA SETUP: CUDA detection failed! Possible reasons:"),
    (
        "hub-files",
        "OSError: ./out does not appear to have a file named pytorch_model.bin, tf_model.h5, model.ckpt or "
        "flax_model.msgpack.",
    ),
    ("call-signature", "TypeError: LlamaRotaryEmbedding.__init__() got an unexpected keyword argument 'config'"),
    ("remote-code-newer-transformers", "AttributeError: 'DynamicCache' object has no attribute 'seen_tokens'"),
    ("peft-targets", "ValueError: Target modules {'q_proj', 'v_proj'} not found in the base model."),
    (
        "quantized-training",
        "ValueError: You cannot perform fine-tuning on purely quantized models. Please attach trainable adapters",
    ),
    (
        "deepspeed-settings",
        "ValueError: Please correct the following DeepSpeed config values that mismatch TrainingArguments values:",
    ),
    (
        "sharded-checkpoint",
        "Unable to find latest file at ./checkpoints/latest, if trying to load latest checkpoint please "
        "ensure this file exists",
    ),
    ("datasets-script", "RuntimeError: Dataset scripts are no longer supported, but found c4.py"),
    ("torch-api-changed", "error: ‘class at::Tensor’ has no member named ‘is_symint’"),
    (
        "glibc-cuda-headers",
        "/usr/include/math.h(79): error: exception specification is incompatibl"
        'e with that of previous function "cospi"',
    ),
    (
        "visual-studio-version",
        "fatal error C1189: #error:  -- unsupported Microsoft Visual Studio version! Only the versions "
        "between 2017 and 2022 (inclusive) are supported!",
    ),
    ("linker-library", "/usr/bin/ld: cannot find -lcusparseLt: No such file or directory"),
    ("visual-c-include", "fatal error C1083: Cannot open include file: 'io.h': No such file or directory"),
    ("compiler-memory", "virtual memory exhausted: Cannot allocate memory"),
    ("compiler-input", "ninja: error: '/root/csrc/a.cu', needed by 'a.o', missing and no known rule to make it"),
    ("nvcc-crashed", "nvcc error   : 'cudafe++' died with status 0xC0000005 (ACCESS_VIOLATION)"),
    ("cmake-compiler-broken", "The CUDA compiler identification is unknown"),
    (
        "cmake-package",
        'Could not find a package configuration file provided by "Torch" with any of the following names:',
    ),
    (
        "cmake-stale",
        "CMake Error: The current CMakeCache.txt directory /a/build/CMakeCache.txt is different than the "
        "directory /b/build",
    ),
    (
        "cuda-home-none",
        '    raw_output = subprocess.check_output([cuda_dir + "/bin/nvcc", "-V"])\nTypeError: '
        "unsupported operand type(s) for +: 'NoneType' and 'str'",
    ),
    ("extension-objects", "RuntimeError: Error compiling objects for extension"),
    ("accelerate-config", "ValueError: Less than two GPU ids were configured and tried to run on on multiple GPUs."),
    ("arguments-missing", "train.py: error: the following arguments are required: --data_path"),
    (
        "tokenizers-old",
        "Exception: data did not match any variant of untagged enum ModelWrapper at line 757443 column 3",
    ),
    ("no-labels", "ValueError: The model did not return a loss from the inputs, only the following keys: logits."),
    (
        "recomputation-differs",
        "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: Recomputed values for the following "
        "tensors have different metadata",
    ),
    ("loss-not-scalar", "RuntimeError: grad can be implicitly created only for scalar outputs"),
    ("no-inf-checks", "AssertionError: No inf checks were recorded for this optimizer."),
    ("mps-missing", "NotImplementedError: The operator 'aten::isin' is not currently implemented for the MPS device."),
    ("attention-alignment", "RuntimeError: p.attn_bias_ptr is not correctly aligned"),
    (
        "flash-attention-arch",
        "CUDA error (/root/flash-attention/hopper/flash_fwd_launch_template.h:188): invalid argument",
    ),
    (
        "rendezvous-lost",
        "The node 'a_1_0' has failed to send a keep-alive heartbeat to the rendezvous 'none' due to an error "
        "of type RendezvousConnectionError.",
    ),
    ("hostfile", "ValueError: No slot '4' specified on host 'localhost'"),
    ("mmap-refused", "OSError: [Errno 19] No such device"),
    ("undeclared-name", 'kernel.cu(9): error: identifier "int32_t" is undefined'),
    ("none-value", "AttributeError: 'NoneType' object has no attribute 'lower'"),
    ("file-missing", "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.json'"),
    ("own-check", "ValueError: head_dim must be a multiple of 8, got 36"),
    ("inductor-failed", "torch._inductor.exc.LoweringException: AssertionError:"),
    ("torch-symbol", "undefined symbol: _ZNK3c1010TensorImpl36is_contiguous_nondefault_policy_implENS_12MemoryFormatE"),
    ("numpy-import", "RuntimeError: Numpy is not available"),
    (
        "gloo-peer",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:34567",
    ),
    ("ray-worker-died", "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."),
    (
        "custom-all-reduce",
        '  File "/root/custom_all_reduce.py", line 307, in register_graph_buffers\nRuntimeError: invalid argument',
    ),
    (
        "peer-gone",
        "powertrain.parallel.transport.heartbeat.PeerTimeout: rank 0: all-gather of [6, 4] cannot end: rank 1 (host "
        "node7, process 13303) is gone",
    ),
    (
        "calls-differ",
        "powertrain.parallel.transport.heartbeat.CollectiveMismatch: ranks must make the same calls: rank 0 makes "
        "all-gather of [6, 4] torch.float32, rows [3, 3]; rank 1 makes all-gather of [8, 4] torch.float32, rows [4, 4]",
    ),
]
