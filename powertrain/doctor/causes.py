"""The errors of this field: patterns in logs, causes, fixes, in English and Chinese, and where it
was seen.

A pattern is searched in every line that holds one of the literals that its matches must (diagnose.py); it takes time in
proportion to the line: what can begin in the middle of a word, or has two open gaps, does not. `{names}` in the words
are the pattern's groups. Where two causes are found, the
one that stands first here is said first: causes before their consequences. tests/doctor/texts.py has a literal text for
each.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    name: str
    pattern: str  # a regular expression, for one line
    cause: str
    fix: str
    cause_zh: str
    fix_zh: str
    source: str
    also: str = ""  # a regular expression that some line must match, too
    last: bool = False  # only among the last lines: the log stops there


_TE = "https://github.com/NVIDIA/TransformerEngine/issues/"
_FA = "https://github.com/Dao-AILab/flash-attention/issues/"
_TORCH = "https://github.com/pytorch/pytorch/issues/"
_COMPILING = (
    r"Building extension module|PyTorch extensions root|compiling and loading fused kernels|torch\.compile|inductor|"
    r"[Aa]utotun|nvcc|ninja"
)

CAUSES = (
    # builds that die
    Cause(
        "compiler-killed",
        r"'?(?P<program>cicc|ptxas|cudafe\+\+|nvcc|cc1plus)'? died due to signal 9|"
        r"Killed signal terminated program (?P<host>\w+)",
        "the kernel killed a compiler because memory ran out: too many compile at once",
        "powertrain build -- <the same command>   # starts only as many as fit; or MAX_JOBS=1 NVCC_THREADS=1",
        "内存耗尽，内核杀死了编译器：同时编译的任务太多",
        "powertrain build -- <原命令>   # 按内存决定并行数；或设置 MAX_JOBS=1 NVCC_THREADS=1",
        "https://github.com/microsoft/onnxruntime/issues/18579",
    ),
    Cause(
        "gpu-architecture-unknown",
        r"[Uu]nsupported gpu architecture '(?P<arch>\w+)'",
        "this nvcc does not know {arch}: it is older than the GPU, or so new that the GPU was dropped",
        "name only archs of your GPUs (TORCH_CUDA_ARCH_LIST=\"8.6\", NVTE_CUDA_ARCHS=86), or install a CUDA "
        "toolkit that "
        "knows {arch}: nvcc --list-gpu-arch",
        "当前 nvcc 不认识 {arch}：nvcc 太旧，或太新而不再支持该 GPU",
        "只为本机 GPU 编译（TORCH_CUDA_ARCH_LIST=\"8.6\"，NVTE_CUDA_ARCHS=86），或安装认识 {arch} 的 CUDA：nvcc "
        "--list-gpu-arch",
        "https://github.com/mit-han-lab/Block-Sparse-Attention/issues/15",
    ),
    Cause(
        "cuda-mismatch",
        r"detected CUDA version \((?P<have>[\d.]+)\) mismatches",
        "nvcc is of CUDA {have}, torch was built for another major version: compiled extensions would not load",
        "install the CUDA toolkit of torch's version (python -c 'import torch; print(torch.version.cuda)') and set "
        "CUDA_HOME to it; or install torch for CUDA {have}",
        "nvcc 是 CUDA {have}，而 torch 是为另一个主版本编译的，编译结果无法加载",
        "安装与 torch 相同版本的 CUDA（python -c 'import torch; print(torch.version.cuda)'）并设置 CUDA_HOME；或安"
        "装 CUDA {have} 的 torch",
        "https://github.com/ModalMinds/MM-EUREKA/issues/24",
    ),
    Cause(
        "host-compiler-too-new",
        r"unsupported GNU version! gcc versions later than (?P<gcc>\d+) are not supported",
        "the host's gcc is newer than this nvcc allows ({gcc})",
        "CC=gcc-{gcc} CXX=g++-{gcc} NVCC_PREPEND_FLAGS='-ccbin g++-{gcc}' <the same command>",
        "主机的 gcc 比该 nvcc 允许的版本（{gcc}）新",
        "CC=gcc-{gcc} CXX=g++-{gcc} NVCC_PREPEND_FLAGS='-ccbin g++-{gcc}' <原命令>",
        "https://github.com/Eyeline-Labs/FlashDepth/issues/2",
    ),
    Cause(
        "torch-missing-at-build",
        r"ModuleNotFoundError: No module named 'torch'",
        "pip builds in an empty environment of its own, and there is no torch in it",
        "pip install torch first, then the same command with --no-build-isolation",
        "pip 在独立的空环境中编译，那里没有 torch",
        "先安装 torch，再给原命令加上 --no-build-isolation",
        _FA + "1920",
        also=r"[Gg]etting requirements to build wheel|build-isolation|build_meta",
    ),
    Cause(
        "nvcc-missing",
        r"(?<!\w)(?P<package>\w+) was requested, but nvcc was not found",
        "{package} is compiled here, and there is no nvcc: this is a runtime image, or no CUDA toolkit is installed",
        "install the CUDA toolkit of torch's version, or use an image with -devel in its name, or a prebuilt wheel",
        "{package} 需要在本机编译，但没有 nvcc：这是 runtime 镜像，或没有安装 CUDA 工具包",
        "安装与 torch 同版本的 CUDA 工具包，或使用名称含 -devel 的镜像，或使用预编译 wheel",
        _FA + "948",
    ),
    Cause(
        "cuda-home",
        r"CUDA_HOME (?:environment variable is not set|does not exist)",
        "torch finds no CUDA toolkit to compile with",
        "export CUDA_HOME=/usr/local/cuda (the folder with bin/nvcc in it); without one, install the toolkit",
        "torch 找不到用于编译的 CUDA 工具包",
        "export CUDA_HOME=/usr/local/cuda（其中有 bin/nvcc）；没有则安装 CUDA 工具包",
        _FA + "1736",
    ),
    Cause(
        "ninja-missing",
        r"Ninja is required to load C\+\+ extensions",
        "torch compiles extensions with ninja, and it is not on PATH",
        "pip install ninja   # and run inside the environment, so that its bin folder is on PATH",
        "torch 用 ninja 编译扩展，但 PATH 中没有 ninja",
        "pip install ninja   # 并激活该环境，使其 bin 目录在 PATH 中",
        "https://github.com/openseg-group/openseg.pytorch/issues/32",
    ),
    Cause(
        "cudnn-headers",
        r"fatal error: cudnn\.h: No such file or directory|Could not find cudnn_LIBRARY",
        "cuDNN's headers or library are not where the build looks",
        "pip install nvidia-cudnn-cu12, then CUDNN_PATH=$(python -c 'import nvidia.cudnn as c; "
        "print(c.__path__[0])') and "
        "CPATH=$CUDNN_PATH/include before the same command",
        "编译时找不到 cuDNN 的头文件或库",
        "pip install nvidia-cudnn-cu12，然后设置 CUDNN_PATH=$(python -c 'import nvidia.cudnn as c; "
        "print(c.__path__[0])') 和 CPATH=$CUDNN_PATH/include",
        _TE + "1309",
    ),
    Cause(
        "submodules",
        r"fatal error: cudnn_frontend\.h: No such file or directory|Could not find cuDNN frontend API",
        "the source tree was cloned without its submodules",
        "git submodule update --init --recursive, then build again",
        "源码克隆时没有带上子模块",
        "git submodule update --init --recursive，然后重新编译",
        _TE + "171",
    ),
    Cause(
        "credentials-asked",
        r"(?:Username|Password) for '(?P<host>https?://[^']+)':?\s*(?:terminal prompts disabled.*|"
        r"No such device or address.*)?$",
        "git asks who you are at {host}, and nobody answers: the repository is private, moved, or its name is wrong",
        "look whether the address is right; if it is private: gh auth login, or an ssh address (git+ssh://git@…). In "
        "a terminal, powertrain build -- <the same command> shows the question and takes the answer",
        "git 询问您在 {host} 的身份，却没有人回答：仓库是私有的、已迁移，或名称有误",
        "先确认地址正确；若为私有仓库：gh auth login，或使用 ssh 地址（git+ssh://git@…）。在终端中执行 "
        "powertrain build -- <原命令>，它会显示问题并接受回答",
        "https://github.com/OpenFreeEnergy/gufe/issues/26",
    ),
    Cause(
        "gdrcopy-missing",
        r"fatal error: gdrapi\.h: No such file|libgdrapi\.so.*(?:unable to|cannot) open|gdr_open error",
        "GDRCopy is not installed, or its kernel module gdrdrv is not loaded",
        "TransformerEngine 1.9 and newer need no GDRCopy: upgrade; else install it and `sudo modprobe gdrdrv`",
        "没有安装 GDRCopy，或没有加载其内核模块 gdrdrv",
        "TransformerEngine 1.9 起不再需要 GDRCopy：升级；否则安装并执行 sudo modprobe gdrdrv",
        "https://github.com/NVIDIA/gdrcopy/issues/72",
    ),
    Cause(
        "python-headers",
        r"fatal error: '?Python\.h'?:? No such file|include file 'Python\.h' not found",
        "this Python has no headers, and Triton or torch compiles a launcher in C at run time",
        "apt install python3-dev (of this very version), or use a Python of conda or uv, which has them",
        "当前 Python 没有头文件，而 Triton 或 torch 在运行时要编译 C 代码",
        "apt install python3-dev（同一版本），或使用自带头文件的 conda、uv 的 Python",
        "https://github.com/sgl-project/sglang/issues/1117",
    ),
    Cause(
        "libcuda-link",
        r"cannot find -lcuda\b",
        "the linker finds libcuda.so.1 only, or no driver at all: Triton links its launcher with -lcuda",
        "export TRITON_LIBCUDA_PATH=/usr/lib/x86_64-linux-gnu and link libcuda.so there; or "
        "LIBRARY_PATH=/usr/local/cuda/"
        "lib64/stubs",
        "链接器只找到 libcuda.so.1 或没有驱动：Triton 用 -lcuda 链接启动器",
        "export TRITON_LIBCUDA_PATH=/usr/lib/x86_64-linux-gnu 并在其中建立 libcuda.so 链接；或 "
        "LIBRARY_PATH=/usr/local/cuda/lib64/stubs",
        "https://github.com/state-spaces/mamba/issues/123",
    ),
    Cause(
        "extension-build",
        r"Error building extension '(?P<name>\w+)'",
        "torch could not compile {name}; the compiler's own error stands above this line",
        "read the first `error:` above; powertrain doctor says whether nvcc, gcc and torch go together",
        "torch 编译 {name} 失败；编译器自己的错误在这一行之上",
        "查看上方第一个 error:；powertrain doctor 会说明 nvcc、gcc 与 torch 是否匹配",
        "https://github.com/deepspeedai/DeepSpeed/issues/4889",
    ),
    Cause(
        "disk-full",
        r"No space left on device",
        "a disk is full; in a container often /dev/shm or TMPDIR",
        "df -h /dev/shm /tmp ~; docker run --shm-size=16g for /dev/shm, TMPDIR=<a larger disk> for builds",
        "磁盘已满；容器中常见的是 /dev/shm 或 TMPDIR",
        "df -h /dev/shm /tmp ~；/dev/shm 用 docker run --shm-size=16g，编译用 TMPDIR=<更大的磁盘>",
        "https://github.com/NVIDIA/nccl/issues/525",
    ),
    # a built extension does not load
    Cause(
        "cublas-older",
        r"undefined symbol: cublas\w+|symbol cublas\w+, version \S+ not defined",
        "another cuBLAS than the one it was built with is loaded: an older one",
        "pip install --upgrade nvidia-cublas-cu12 (or nvidia-cublas for CUDA 13) to torch's version; unset "
        "LD_LIBRARY_PATH",
        "加载的 cuBLAS 不是编译时的版本，而是更旧的",
        "pip install --upgrade nvidia-cublas-cu12（CUDA 13 为 nvidia-cublas）；unset LD_LIBRARY_PATH",
        _TE + "2504",
    ),
    Cause(
        "undefined-symbol",
        r"(?<![\w.+-])(?=[\w.+-]*\.so)(?P<library>[\w.+-]+): undefined symbol: (?P<symbol>_Z\S+)",
        "{library} was compiled for another torch than the one installed: its C++ names changed",
        "install a build of it for this torch, or build it again: pip install --no-build-isolation --no-cache-dir "
        "--force-reinstall --no-deps <package>",
        "{library} 是为另一个版本的 torch 编译的，C++ 符号已改变",
        "安装对应当前 torch 的版本，或重新编译：pip install --no-build-isolation --no-cache-dir --force-reinstall "
        "--no-deps <包>",
        _FA + "931",
    ),
    Cause(
        "library-of-another-cuda",
        r"lib(?:cublas|cublasLt|cudart|nvrtc|cufft|cusparse)\.so\.(?P<major>\d+): cannot open shared object",
        "a package for CUDA {major} is installed beside a torch for another CUDA",
        "powertrain doctor --only versions names it; install its build for torch's CUDA (transformer_engine_cu12)",
        "装了面向 CUDA {major} 的包，而 torch 是另一个 CUDA 版本",
        "powertrain doctor --only versions 会指出该包；安装与 torch 的 CUDA 一致的版本（transformer_engine_cu12）",
        _TE + "2040",
    ),
    Cause(
        "cudnn-not-found",
        r"libcudnn\w*\.so[.\d]*: cannot open shared object",
        "cuDNN lies in site-packages, where this library does not look",
        "import torch first, or LD_LIBRARY_PATH=$(python -c 'import nvidia.cudnn as c; print(c.__path__[0])')/lib",
        "cuDNN 在 site-packages 中，而该库不在那里查找",
        "先 import torch，或 LD_LIBRARY_PATH=$(python -c 'import nvidia.cudnn as c; print(c.__path__[0])')/lib",
        _TE + "1853",
    ),
    Cause(
        "te-extension-missing",
        r"Could not find shared object file for Transformer Engine|Could not find libtransformer_engine\.so",
        "TransformerEngine's core is installed without its torch part, or it is imported from its own source folder",
        "leave the source folder; pip install --no-build-isolation 'transformer_engine[pytorch]' at the core's version",
        "只安装了 TransformerEngine 的核心而没有 torch 部分，或在其源码目录中导入",
        "离开源码目录；pip install --no-build-isolation 'transformer_engine[pytorch]'，版本与核心一致",
        _TE + "2505",
    ),
    Cause(
        "glibc",
        r"version `(?P<version>GLIBC_[\d.]+)' not found",
        "the wheel was built on a newer Linux: this one's C library has no {version}, and that cannot be added",
        "build it here (--no-binary, --no-build-isolation), or use a container with a newer base",
        "该 wheel 在更新的 Linux 上编译：本机 C 库没有 {version}，且无法补上",
        "在本机编译（--no-binary，--no-build-isolation），或使用更新的基础镜像",
        _FA + "1708",
    ),
    Cause(
        "libstdcxx",
        r"version `(?P<version>(?:GLIBCXX|CXXABI)_[\d.]+)' not found",
        "an older libstdc++ is loaded first, often conda's, than the one it was compiled with",
        "conda install -c conda-forge libstdcxx-ng, or LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libstdc++.so.6",
        "先加载了较旧的 libstdc++（常为 conda 自带）",
        "conda install -c conda-forge libstdcxx-ng，或 LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libstdc++.so.6",
        "https://github.com/kvcache-ai/ktransformers/issues/439",
    ),
    Cause(
        "numpy-major",
        r"compiled using NumPy 1\.x cannot be run in|_ARRAY_API not found",
        "a module was compiled against NumPy 1, and NumPy 2 is installed",
        "pip install 'numpy<2', or a newer version of that module",
        "某模块是针对 NumPy 1 编译的，而安装的是 NumPy 2",
        "pip install 'numpy<2'，或升级该模块",
        _TORCH + "135013",
    ),
    Cause(
        "apex-extensions",
        r"No module named '?(?P<module>amp_C|fused_layer_norm_cuda|fused_weight_gradient_mlp_cuda)",
        "Apex was installed as Python only; {module} is one of its CUDA extensions",
        "in its source: APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation .   "
        "# older: --config-settings '--build-option=--cuda_ext'; or powertrain.compat.apex, which needs no build",
        "Apex 只装了 Python 部分；{module} 是其 CUDA 扩展",
        "在其源码中：APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation .   # 或无需编译的 "
        "powertrain.compat.apex",
        "https://github.com/NVIDIA/apex/issues/1755",
    ),
    Cause(
        "fused-kernels-missing",
        r"Fused kernels configured but not installed",
        "GPT-NeoX imports fused kernels that were built for another Python or environment",
        "python megatron/fused_kernels/setup.py install with the Python that trains, or set the *_fusion keys to false",
        "GPT-NeoX 要导入的 fused kernels 是为另一个 Python 或环境编译的",
        "用训练所用的 Python 执行 python megatron/fused_kernels/setup.py install，或将 *_fusion 设为 false",
        "https://github.com/EleutherAI/gpt-neox/issues/610",
    ),
    # the GPU and its driver
    Cause(
        "driver-updated",
        r"Driver/library version mismatch",
        "the driver's libraries were updated while its older kernel module is still loaded",
        "reboot; or stop all GPU processes, then sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && nvidia-smi",
        "驱动的库已更新，而旧的内核模块仍在运行",
        "重启；或停止所有 GPU 进程后 sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && nvidia-smi",
        "https://github.com/tinygrad/open-gpu-kernel-modules/issues/47",
    ),
    Cause(
        "driver-old",
        r"NVIDIA driver on your system is too old \(found version (?P<version>\d+)\)",
        "the driver supports CUDA up to {version} (11040 is 11.4), torch was built for a newer one",
        "update the driver, or install torch for a CUDA of that major version: pip install torch --index-url "
        "https://download.pytorch.org/whl/cu126",
        "驱动最高支持 CUDA {version}（11040 即 11.4），而 torch 需要更新的版本",
        "升级驱动，或安装低版本 CUDA 的 torch：pip install torch --index-url https://download.pytorch.org/whl/cu126",
        "https://github.com/lllyasviel/Fooocus/issues/1313",
    ),
    Cause(
        "kernel-for-another-gpu",
        r"FATAL: (?:kernel `(?P<kernel>\w+)`|this function) is for (?P<range>sm\d+(?:-sm\d+)?), but was built for "
        r"(?P<built>sm\d+)",
        "a kernel for {range} was launched from code compiled for {built}: the library chose it for another GPU "
        "than the "
        "one it runs on, or was built for the wrong archs",
        "powertrain doctor --only code lists the archs of each library; run each GPU model alone with "
        "CUDA_VISIBLE_DEVICES, or use powertrain.compat.xformers, which chooses by the tensors' GPU",
        "为 {range} 选择的核函数运行了为 {built} 编译的代码：库按另一块 GPU 做了选择，或编译的架构不对",
        "powertrain doctor --only code 显示各库含有哪些架构的代码；用 CUDA_VISIBLE_DEVICES 分开运行不同型号，或使用"
        " powertrain.compat.xformers",
        "https://github.com/dmMaze/BallonsTranslator/issues/1148",
    ),
    Cause(
        "no-kernel-image",
        r"no kernel image is available for execution on the device",
        "the library has no code for this GPU's arch, nor PTX that the driver could compile",
        "powertrain doctor --only code names the library; install a build with your arch, or build it with "
        "TORCH_CUDA_ARCH_LIST set to it",
        "该库没有本 GPU 架构的代码，也没有可供驱动编译的 PTX",
        "powertrain doctor --only code 指出是哪个库；安装含该架构的版本，或设置 TORCH_CUDA_ARCH_LIST 自行编译",
        _FA + "1785",
    ),
    Cause(
        "flash-attention-old-gpu",
        r"FlashAttention only supports Ampere GPUs or newer",
        "flash-attn has no kernels for GPUs before Ampere (sm_80)",
        "powertrain.attention or powertrain.compat.flash_attn, which run on sm_75; in Transformers: "
        'attn_implementation="sdpa"',
        "flash-attn 没有 Ampere（sm_80）之前 GPU 的核函数",
        'powertrain.attention 或 powertrain.compat.flash_attn（支持 sm_75）；Transformers 中 '
        'attn_implementation="sdpa"',
        "https://github.com/vllm-project/vllm/issues/8189",
    ),
    Cause(
        "xformers-no-operator",
        r"No operator found for `(?P<function>memory_efficient_attention_\w+)`",
        "none of xFormers' attention kernels takes these shapes, types and this GPU; its reasons stand below",
        "powertrain.compat.xformers has a kernel for every one; powertrain explain attention --as xformers says why",
        "xFormers 没有支持这些形状、类型和 GPU 的核函数；原因列在下方",
        "powertrain.compat.xformers 总有可用的核函数；powertrain explain attention --as xformers 说明原因",
        "https://github.com/facebookresearch/xformers/issues/1263",
    ),
    Cause(
        "no-attention-backend",
        r"No dot product attention (?:backend is available|support) for the provided inputs",
        "every attention backend of TransformerEngine refuses this call; which and why is in its DEBUG log only",
        "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 <the same command>, and give that log to powertrain diagnose; "
        "powertrain.compat.transformer_engine has a backend for every call",
        "TransformerEngine 的所有注意力后端都拒绝了该调用；原因只在 DEBUG 日志中",
        "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 <原命令>，再把日志交给 powertrain diagnose；"
        "powertrain.compat.transformer_engine 总有后端可用",
        _TE + "2285",
    ),
    Cause(
        "cudnn-sublibrary",
        r"CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED",
        "one part of cuDNN was found in one version, the others in another or not at all: two cuDNNs, or "
        "LD_LIBRARY_PATH before torch's own",
        "unset LD_LIBRARY_PATH; powertrain doctor --only twice names both; keep nvidia-cudnn-cu12 at torch's version",
        "cuDNN 的各部分来自不同版本或缺失：存在两个 cuDNN，或 LD_LIBRARY_PATH 排在 torch 自带的之前",
        "unset LD_LIBRARY_PATH；powertrain doctor --only twice 会列出；保持 nvidia-cudnn-cu12 为 torch 要求的版本",
        "https://github.com/nv-tlabs/lyra/issues/49",
    ),
    Cause(
        "cudnn-execution",
        r"CUDNN_STATUS_(?:EXECUTION_FAILED|NOT_SUPPORTED|INTERNAL_ERROR)",
        "cuDNN refuses or fails on this call; often another cuDNN is loaded than TransformerEngine was built with",
        "powertrain doctor --only twice, versions; NVTE_FUSED_ATTN=0 takes another backend meanwhile",
        "cuDNN 拒绝或执行失败；常因加载的 cuDNN 与 TransformerEngine 编译时的不同",
        "powertrain doctor --only twice；暂时用 NVTE_FUSED_ATTN=0 换一个后端",
        _TE + "1407",
    ),
    Cause(
        "fp8-shape",
        r"FP8 execution requires 2D input matrices with height divisible by 8 and width divisible by 16",
        "FP8 tensor cores take rows in eights and columns in sixteens only",
        "pad tokens and features to a multiple of 32, or leave this layer in bf16: fp8_autocast(enabled=False)",
        "FP8 张量核要求行数为 8 的倍数、列数为 16 的倍数",
        "将 token 数和特征数补齐到 32 的倍数，或让该层使用 bf16：fp8_autocast(enabled=False)",
        _TE + "1422",
    ),
    Cause(
        "illegal-memory-access",
        r"an illegal memory access was encountered",
        "a kernel read or wrote outside its memory; the line that reports it is seldom the one that did it",
        "CUDA_LAUNCH_BLOCKING=1 <the same command> names the call; compute-sanitizer names the kernel",
        "某核函数越界读写；报告错误的位置往往不是出错的位置",
        "CUDA_LAUNCH_BLOCKING=1 <原命令> 找到调用；compute-sanitizer 找到核函数",
        _TE + "3124",
    ),
    Cause(
        "triton-shared-memory",
        r"out of resource: shared memory,? Required: (?P<need>\d+),? Hardware limit(?:ation)?: (?P<have>\d+)",
        "a Triton kernel's tile wants {need} bytes of shared memory, this GPU has {have} a block: it was tuned for "
        "a larger one",
        "smaller block sizes or num_stages in that kernel; Powertrain plans its tiles by the GPU",
        "Triton 核函数需要 {need} 字节共享内存，而本 GPU 每块只有 {have}：它是为更大的 GPU 调优的",
        "减小该核函数的 block 或 num_stages；Powertrain 按 GPU 规划分块",
        "https://github.com/triton-lang/triton/issues/8182",
    ),
    Cause(
        "cuda-out-of-memory",
        r"CUDA out of memory\. Tried to allocate (?P<size>[\d.]+ \w+)",
        "the GPU's memory is full: {size} more were asked for",
        "a smaller micro-batch with more accumulation, activation checkpointing, FSDP; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if much is reserved but unallocated",
        "GPU 显存已满：还需要 {size}",
        "减小 micro-batch 并增加累积步数，使用激活重算、FSDP；若大量保留但未分配："
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "https://pytorch.org/docs/stable/notes/cuda.html#memory-management",
    ),
    # Triton's cache
    Cause(
        "triton-cache-race",
        r"FileNotFoundError: .*(?:\.triton/cache|triton_cache)",
        "several processes share one Triton cache, and one removed a file that another was writing",
        "TRITON_CACHE_DIR=/tmp/triton-$RANK for each rank, or a newer Triton (3.2 or later)",
        "多个进程共用一个 Triton 缓存，一个进程删除了另一个正在写的文件",
        "为每个 rank 设置 TRITON_CACHE_DIR=/tmp/triton-$RANK，或升级 Triton（3.2 以上）",
        "https://github.com/triton-lang/triton/issues/2688",
    ),
    Cause(
        "triton-cache-network",
        r"\[Errno 16\] Device or resource busy",
        "Triton's cache lies on a network file system, where a folder that another host has open cannot be removed",
        "TRITON_CACHE_DIR=/tmp/triton-cache: a local disk",
        "Triton 缓存位于网络文件系统，其他主机打开的目录无法删除",
        "TRITON_CACHE_DIR=/tmp/triton-cache：使用本地磁盘",
        "https://github.com/triton-lang/triton/issues/11512",
        also=r"[Tt]riton|FileCacheManager|removedirs",
    ),
    # tensor-parallel overlap
    Cause(
        "mpi-not-started",
        r"MPI_Comm_rank\(\) (?:function was )?called before MPI_INIT",
        "Userbuffers was built to start over MPI, and nobody called MPI_Init: the job was not started by mpiexec, or "
        "initialize_ub came first",
        "start with mpiexec and import mpi4py.MPI before initialize_ub; or TransformerEngine 1.9 or newer built "
        "without "
        "NVTE_UB_WITH_MPI, with bootstrap_backend='gloo'. powertrain doctor --overlap prints the line",
        "Userbuffers 编译为通过 MPI 启动，但没有调用 MPI_Init：任务不是由 mpiexec 启动，或 initialize_ub 过早",
        "用 mpiexec 启动并在 initialize_ub 之前导入 mpi4py.MPI；或使用不带 NVTE_UB_WITH_MPI 编译的 1.9 以上版本和 "
        "bootstrap_backend='gloo'。powertrain doctor --overlap 给出命令行",
        _TE + "827",
    ),
    Cause(
        "userbuffers-not-initialized",
        r"ub_manager (?:is )?not initialized|initialize_ub.{0,80}?(?:not|must).{0,80}?(?:called|initialized)",
        "a layer with ub_tp_comm_overlap=True was run before initialize_ub",
        "call te.module.base.initialize_ub([tokens, hidden], tp_size) after init_process_group and before the "
        "first layer",
        "在 initialize_ub 之前运行了 ub_tp_comm_overlap=True 的层",
        "在 init_process_group 之后、第一个层之前调用 te.module.base.initialize_ub([tokens, hidden], tp_size)",
        _TE + "827",
    ),
    Cause(
        "userbuffers-multicast",
        r"does not support comm\+GEMM overlap with CUDA Multicast|with UB_SKIPMC=1 to try",
        "GPU, driver or toolkit have no NVLink multicast, which Userbuffers asks for by default",
        "export UB_SKIPMC=1   # CUDA IPC instead; powertrain doctor --overlap lists missing requirements",
        "GPU、驱动或工具包不支持 Userbuffers 默认使用的 NVLink multicast",
        "export UB_SKIPMC=1   # 改用 CUDA IPC；powertrain doctor --overlap 说明缺什么",
        _TE + "985",
    ),
    # processes and their meeting
    Cause(
        "duplicate-gpu",
        r"Duplicate GPU detected : rank (?P<one>\d+) and rank (?P<other>\d+) both on CUDA device",
        "ranks {one} and {other} chose the same GPU: a set_device is missing, or there are more ranks than GPUs",
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything else; --nproc-per-node = GPUs of the "
        "host",
        "rank {one} 和 {other} 使用了同一块 GPU：缺少 set_device，或 rank 多于 GPU",
        "最先执行 torch.cuda.set_device(int(os.environ['LOCAL_RANK']))；--nproc-per-node 等于本机 GPU 数",
        "https://github.com/verl-project/verl/issues/161",
    ),
    Cause(
        "port-taken",
        r"^(?=.*ddress already in use).*failed to (?:bind to|listen on)|EADDRINUSE",
        "another job, or a dead one's process, holds the port of rank 0",
        "--master-port=29501, or torchrun --standalone (a free port); `ss -ltnp | grep 29500` names the holder",
        "另一个任务或残留进程占用了 rank 0 的端口",
        "--master-port=29501，或 torchrun --standalone（自动选择端口）；`ss -ltnp | grep 29500` 查看占用者",
        "https://github.com/meta-pytorch/torchtune/issues/392",
    ),
    Cause(
        "ranks-missing",
        r"Timed out after (?P<seconds>\d+) seconds waiting for clients\. (?P<came>\d+/\d+) clients joined",
        "only {came} ranks reached rank 0 in {seconds} s: others never started, died, or cannot reach its port",
        "look at the other ranks' logs; powertrain doctor --hostfile FILE checks ssh, versions and the port",
        "{seconds} 秒内只有 {came} 个 rank 连上 rank 0：其余没有启动、已退出，或无法访问其端口",
        "查看其他 rank 的日志；powertrain doctor --hostfile FILE 检查 ssh、版本和端口",
        "https://github.com/Liuziyu77/Visual-RFT/issues/123",
    ),
    Cause(
        "nccl-shared-memory",
        r"Error while (?:creating|attaching to) shared memory segment|failed to extend /dev/shm",
        "/dev/shm is too small or full: Docker gives a container 64 MiB",
        "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir of medium Memory at /dev/shm",
        "/dev/shm 太小或已满：Docker 默认只给容器 64 MiB",
        "docker run --shm-size=16g（或 --ipc=host）；Kubernetes 在 /dev/shm 挂载 medium: Memory 的 emptyDir",
        "https://github.com/NVIDIA/nccl-tests/issues/166",
    ),
    Cause(
        "dataloader-shared-memory",
        r"killed by signal: Bus error|insufficient shared memory \(shm\)",
        "workers of the DataLoader hand batches over in /dev/shm, and it is full",
        "docker run --shm-size=16g (or --ipc=host), or fewer workers",
        "DataLoader 的工作进程通过 /dev/shm 传递数据，而它已满",
        "docker run --shm-size=16g（或 --ipc=host），或减少 workers",
        _TORCH + "5040",
    ),
    Cause(
        "file-descriptors",
        r"received 0 items of ancdata|\[Errno 24\] Too many open files",
        "the process ran out of file descriptors; DataLoader workers hand each tensor over in one",
        "ulimit -n 65536, or torch.multiprocessing.set_sharing_strategy('file_system')",
        "进程用尽了文件描述符；DataLoader 的每个张量占用一个",
        "ulimit -n 65536，或 torch.multiprocessing.set_sharing_strategy('file_system')",
        _TORCH + "973",
    ),
    Cause(
        "nccl-timeout-while-compiling",
        r"Watchdog caught collective operation timeout: \w+\(.*OpType=(?P<operation>\w+)",
        "some ranks waited in {operation} while another compiled for the first time, and NCCL gave up on it",
        "compile before the first collective, on every rank; or init_process_group(timeout=timedelta(hours=1)). If "
        "a build "
        "never ends: powertrain doctor --only builds. Powertrain's ranks wait at a store, not in NCCL",
        "一些 rank 在 {operation} 中等待，而另一个 rank 正在首次编译，NCCL 因超时放弃",
        "在第一次集合通信之前让所有 rank 完成编译；或 init_process_group(timeout=timedelta(hours=1))。若编译不结束"
        "：powertrain doctor --only builds",
        "https://github.com/NVIDIA/Megatron-LM/issues/82",
        also=_COMPILING,
    ),
    Cause(
        "nccl-timeout",
        r"Watchdog caught collective operation timeout: \w+\(.*OpType=(?P<operation>\w+)",
        "one rank did not come to {operation}: it died, or the ranks take different ways",
        "find the rank with the smallest last completed SeqNum, and read its log; TORCH_NCCL_TRACE_BUFFER_SIZE=2000 "
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1 writes the pending collective of each rank",
        "有 rank 没有进入 {operation}：它已退出，或各 rank 执行路径不同",
        "找到最后完成的 SeqNum 最小的 rank 并查看其日志；TORCH_NCCL_TRACE_BUFFER_SIZE=2000 "
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1 会记录各 rank 的位置",
        "https://github.com/vllm-project/vllm/issues/6042",
    ),
    # logs that stop
    Cause(
        "fused-kernels-stuck",
        r"compiling and loading fused kernels|Building extension module (?P<module>\w+)|"
        r"Using \S+ as PyTorch extensions root|Allowing ninja to set a default number of workers",
        "the log stops where torch builds an extension: it waits for a `lock` file whose maker was killed, or it "
        "compiles",
        "powertrain doctor --only builds --fix, in the folder of the training: it tells which of the two, and "
        "renames a "
        "lock that nobody holds; the waiting ranks then go on",
        "日志停在 torch 编译扩展处：它在等待已被杀死的进程留下的 lock 文件，或正在编译",
        "在训练目录中执行 powertrain doctor --only builds --fix：它会判断是哪一种，并重命名无人持有的 lock，等待的"
        "进程随即继续",
        "https://github.com/EleutherAI/gpt-neox/issues/1334",
        last=True,
    ),
    Cause(
        "wheel-stuck",
        r"Building wheel for (?P<package>[\w.-]+) \((?:setup\.py|pyproject\.toml)\)(?!.*(?:error|done|finished))",
        "pip shows nothing while {package} compiles: for an hour or more, or for ever when memory ran out",
        "powertrain build -- <the same command>   # shows each file, its time and memory, and does not run out of it",
        "pip 在编译 {package} 时不显示任何输出：可能要一小时以上；内存耗尽时会永远卡住",
        "powertrain build -- <原命令>   # 显示每个文件的时间和内存，且不会耗尽内存",
        _TE + "976",
        last=True,
    ),
)  # fmt: skip
