"""Triton and torch.compile."""

import re

from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.compile_reasons import compile_reason

# archs of NVIDIA's GPUs, as ptxas names them
_OURS = re.compile(r"sm_(?:5[023]|6[012]|7[025]|8[0679]|90|1[0-9][0-9])[af]?")
_TORCH = "https://github.com/pytorch/pytorch/issues/"

CAUSES = (
    Cause(
        "triton-cache-race",
        r"FileNotFoundError: .*(?:\.triton/cache|triton_cache)",
        "several processes share one Triton cache, and one removed a file that another was writing",
        "TRITON_CACHE_DIR=/tmp/triton-$RANK for each rank, or a newer Triton (3.2 or later)",
        "多个进程共用一个 Triton 缓存，一个进程删除了另一个正在写的文件",
        "为每个 rank 设置 TRITON_CACHE_DIR=/tmp/triton-$RANK，或升级 Triton（3.2 以上）",
        "https://github.com/triton-lang/triton/issues/2688",
        confidence="likely",
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
        confidence="likely",
    ),
    Cause(
        "triton-no-compiler",
        r"Failed to find C compiler",
        "Triton compiles its launcher in C, and there is no compiler",
        "apt install gcc (build-essential), or CC=<a C compiler>",
        "Triton 要用 C 编译启动器，但没有编译器",
        "apt install gcc（build-essential），或设置 CC",
        "https://github.com/apple/ml-cross-entropy/issues/5",
    ),
    Cause(
        "triton-missing",
        r"Cannot find a working triton installation|Triton (?:package )?is not (?:installed|available)|"
        r"ModuleNotFoundError: No module named 'triton'",
        "torch.compile or a library needs Triton, which is not installed in this Python or does not work here",
        "pip install triton at the version that torch requires (Linux); on Windows: triton-windows, or WSL",
        "torch.compile 或某个库需要 Triton，但当前 Python 没有安装或无法使用",
        "安装 torch 要求版本的 triton（Linux）；Windows 上用 triton-windows 或 WSL",
        "https://github.com/triton-lang/triton/issues/4034",
    ),
    Cause(
        "ptxas-old",
        r"Value '(?P<arch>sm_(?:5[023]|6[012]|7[025]|8[0679]|90|"
        r"1[0-9][0-9])[af]?)' is not defined for option 'gpu-name'|"
        r"'(?P<cpu>sm_\w+)' is not a recognized processor",
        "the ptxas bundled with Triton, or its LLVM, is older than the GPU",
        "a newer Triton (with its torch), or TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas of a CUDA that knows the GPU",
        "Triton 自带的 ptxas 或 LLVM 比 GPU 旧",
        "升级 Triton（连同 torch），或设置 TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas（支持该 GPU 的 CUDA）",
        "https://github.com/triton-lang/triton/issues/8539",
    ),
    Cause(
        "nvidia-triton-elsewhere",
        r"Value '(?P<arch>sm_\w+)' is not defined for option 'gpu-name'",
        "{arch} is no GPU of NVIDIA's: Triton for NVIDIA runs on another vendor's GPU through a translation (ZLUDA), "
        "or "
        "the arch was set by hand",
        "the Triton for this GPU (pytorch-triton-rocm, triton-windows for AMD); without it no torch.compile and no "
        "Triton "
        "kernels: TORCHDYNAMO_DISABLE=1, attn_implementation=\"sdpa\"; unset TRITON_OVERRIDE_ARCH",
        "{arch} 不是 NVIDIA 的 GPU：NVIDIA 版 Triton 通过转换层（ZLUDA）在其他厂商的 GPU 上运行，或架构被手动设置",
        "安装适用于该 GPU 的 Triton（pytorch-triton-rocm、AMD 版 triton-windows）；否则不用 torch.compile 和 Triton "
        "核函数："
        "TORCHDYNAMO_DISABLE=1、attn_implementation=\"sdpa\"；取消 TRITON_OVERRIDE_ARCH",
        "https://github.com/patientx/ComfyUI-Zluda/issues/210",
        confidence="likely",
        derive=lambda groups, excerpt: None if _OURS.fullmatch(groups["arch"]) else {},
    ),
    Cause(
        "triton-tools-missing",
        r"Cannot find (?P<tool>ptxas|cuobjdump|nvdisasm)(?:\.exe)?\b|"
        r"No such file or directory: '\S{0,200}/(?P<path>ptxas\S{0,12})'",
        "Triton finds no {tool}{path}: its own copy is missing (a source build, a repackaged or Windows wheel) and "
        "no CUDA "
        "toolkit is on PATH",
        "pip install --force-reinstall triton (its wheel brings one; on Windows triton-windows); or a CUDA toolkit and "
        "TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas, CUDA_HOME (CUDA_PATH on Windows)",
        "Triton 找不到 {tool}{path}：自带的缺失（源码编译、重新打包或 Windows 版），且 PATH 中没有 CUDA 工具包",
        "pip install --force-reinstall triton（wheel 自带；Windows 用 triton-windows）；或安装 CUDA 工具包并设置 "
        "TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas、CUDA_HOME（Windows 为 CUDA_PATH）",
        "https://github.com/woct0rdho/triton-windows/issues/49",
        confidence="likely",
    ),
    Cause(
        "dynamo-python",
        r"(?:Dynamo|torch\.compile) is not supported on Python|Python 3\.\d+\+? not yet supported for torch\.compile",
        "this torch cannot compile on this Python version",
        "a newer torch, or an older Python; TORCHDYNAMO_DISABLE=1 goes without",
        "当前 torch 不支持在该 Python 版本上编译",
        "升级 torch，或使用较旧的 Python；TORCHDYNAMO_DISABLE=1 可跳过编译",
        "https://github.com/pytorch/pytorch/issues/136361",
    ),
    Cause(
        "recompile-limit",
        r"torch\._dynamo hit config\.(?P<limit>\w+)",
        "a compiled function was compiled again for every new shape or value, until torch gave up ({limit})",
        "TORCH_LOGS=recompiles names what changes; mark_dynamic, or pad to a few sizes; no Python numbers that change",
        "编译的函数因形状或数值变化而反复重新编译，直到达到上限（{limit}）",
        "TORCH_LOGS=recompiles 显示变化之处；mark_dynamic，或补齐到少数几种大小；避免变化的 Python 数值",
        "https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html",
    ),
    Cause(
        "dynamo-source",
        r"source code not available|could not get source code",
        "torch.compile or Triton reads the function's source, which a notebook cell, exec or an interactive prompt "
        "may not have",
        "put the function into a .py file and import it",
        "torch.compile 或 Triton 要读取函数源码，而 notebook 单元、exec 或交互式提示符中可能没有",
        "把该函数写入 .py 文件再导入",
        "https://github.com/pytorch/pytorch/issues/111328",
    ),
    Cause(
        "ptx-version",
        r"Unsupported \.version (?P<want>[\d.]+\d); current version is '(?P<have>[\d.]+\d)'",
        "the PTX is of version {want}, and this ptxas knows only {have}: it is of an older CUDA than the compiler "
        "that wrote it",
        "TRITON_PTXAS_PATH and PATH without the older CUDA (Triton brings a ptxas of its own), or a newer toolkit",
        "PTX 版本为 {want}，而该 ptxas 只支持 {have}：它比生成 PTX 的编译器旧",
        "不要让 TRITON_PTXAS_PATH 和 PATH 指向旧 CUDA（Triton 自带 ptxas），或升级工具包",
        "https://github.com/triton-lang/triton/issues/5385",
    ),
    Cause(
        "triton-launcher",
        r"Command '\['[^']{0,200}(?:gcc|g\+\+|cc|clang|tcc\.exe|cl\.exe)', '[^']{0,200}(?:main|cuda_utils|"
        r"__triton_launcher|"
        r"driver)\.c'",
        "Triton compiles a small launcher in C, and that failed: Python's headers or libcuda are missing, or the "
        "compiler is; its own error stands above",
        "apt install gcc python3-dev; ldconfig -p | grep libcuda (a link libcuda.so); Windows: a newer "
        "triton-windows",
        "Triton 用 C 编译启动器失败：缺少 Python 头文件、libcuda 或编译器；其错误在上方",
        "apt install gcc python3-dev；ldconfig -p | grep libcuda（需要 libcuda.so 链接）；Windows：升级 "
        "triton-windows",
        "https://github.com/triton-lang/triton/issues/4034",
        confidence="likely",
    ),
    Cause(
        "triton-cpu-tensor",
        r"cannot be accessed from Triton \(cpu tensor\?\)",
        "a Triton kernel got a tensor that is on the CPU, or on another GPU than the current one",
        "move it to the GPU; with torch.cuda.device(x.device): around the call (device_map models on several GPUs)",
        "Triton 核函数得到了 CPU 上或其他 GPU 上的张量",
        "移到 GPU；调用处加 with torch.cuda.device(x.device)（多 GPU 的 device_map 模型）",
        "https://github.com/Dao-AILab/flash-attention/issues/523",
    ),
    Cause(
        "triton-libcuda",
        r"libcuda\.so cannot found",
        "Triton finds no libcuda.so.1 in the folders of ldconfig's cache and of LD_LIBRARY_PATH: the cache is stale, "
        "the library is elsewhere (WSL), or there is no driver (a container without GPUs)",
        "find / -name 'libcuda.so.1*'; where it is: TRITON_LIBCUDA_PATH=<its folder> (WSL: /usr/lib/wsl/lib), or sudo "
        "ldconfig; where it is not: install the driver, docker run --gpus all",
        "Triton 在 ldconfig 缓存和 LD_LIBRARY_PATH 的目录中找不到 libcuda.so.1：缓存过期、库在别处（WSL），或没有驱动"
        "（容器没有 GPU）",
        "find / -name 'libcuda.so.1*'；找到则设置 TRITON_LIBCUDA_PATH=<其目录>（WSL：/usr/lib/wsl/lib）或 sudo "
        "ldconfig；找不到则安装驱动，docker run --gpus all",
        "https://github.com/triton-lang/triton/blob/main/third_party/nvidia/backend/driver.py",
    ),
    Cause(
        "triton-no-driver",
        r"\d+ active drivers \(|No supported gpu backend found",
        "Triton finds no GPU driver: no GPU is visible to this process, torch is a build for the CPU, or it is "
        "imported where there is none (a login node, a build)",
        "nvidia-smi in the same place; a torch with CUDA; TRITON_INTERPRET=1 runs kernels on a CPU",
        "Triton 找不到 GPU 驱动：进程看不到 GPU、torch 为 CPU 版，或在没有 GPU 的地方导入",
        "在同一处运行 nvidia-smi；安装 CUDA 版 torch；TRITON_INTERPRET=1 可在 CPU 上运行",
        "https://github.com/triton-lang/triton/issues/5388",
    ),
    Cause(
        "triton-resources",
        r"out of resource: (?P<what>threads|registers|tensor memory)",
        "a Triton kernel's tile needs more {what} than this GPU has",
        "a smaller block or fewer warps or stages in that kernel's configs; a newer version of its package",
        "Triton 核函数的 tile 所需 {what} 超过该 GPU",
        "减小该核函数配置中的 block、warp 或 stage；升级其所属的包",
        "https://github.com/triton-lang/triton/issues/2689",
    ),
    Cause(
        "inductor-compiler",
        r"Compiler: \S{1,80} is not found|InvalidCxxCompiler|No working C\+\+ compiler found|"
        r"clang\+\+: command not found",
        "torch.compile writes C++ and finds no compiler for it",
        "apt install g++; Windows: the x64 Native Tools prompt of Visual Studio; CXX=<a C++ compiler>",
        "torch.compile 生成 C++ 但找不到编译器",
        "apt install g++；Windows：Visual Studio 的 x64 Native Tools 提示符；设置 CXX",
        "https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html",
    ),
    Cause(
        "dynamo-data",
        r"Could not guard on data-dependent expression|GuardOnDataDependentSymNode|DataDependentOutputException|"
        r"data dependent operator",
        "compiled code branches on, or is shaped by, a value that is known only when it runs",
        "torch._check on the size; torch._dynamo.config.capture_scalar_outputs=True; keep .item(), nonzero and "
        "masks with lengths out of the compiled function",
        "编译的代码依赖运行时才知道的数值来分支或决定形状",
        "对大小使用 torch._check；torch._dynamo.config.capture_scalar_outputs=True；将 .item()、nonzero "
        "移出编译函数",
        "https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html",
    ),
    Cause(
        "dynamo-unsupported",
        r"torch\._dynamo\.exc\.(?!BackendCompilerFailed)\w+|InternalTorchDynamoError",
        "torch.compile cannot trace this piece of code: {reason}",
        "fullgraph=False, or torch.compiler.disable on that function; a newer torch, which traces more; "
        "TORCHDYNAMO_DISABLE=1 goes without",
        "torch.compile 无法跟踪这段代码：{reason}",
        "fullgraph=False，或对该函数使用 torch.compiler.disable；升级 torch；TORCHDYNAMO_DISABLE=1 可跳过",
        "https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html",
        confidence="likely",
        derive=compile_reason,
        derives=("reason",),
        fallback=True,
    ),
    Cause(
        "cuda-graph-overwritten",
        r"accessing tensor output of CUDAGraphs that has been overwritten",
        "an output of a compiled function with CUDA graphs was kept over its next run, which reuses its memory",
        "clone() it, or torch.compiler.cudagraph_mark_step_begin() before each run",
        "CUDA graph 的输出被保留到下一次运行，而其内存会被重用",
        "clone() 该输出，或每次运行前调用 torch.compiler.cudagraph_mark_step_begin()",
        "https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html",
    ),
    Cause(
        "capture",
        r"operation not permitted when stream is capturing|cudaErrorStreamCapture\w+|"
        r"operation failed due to a previous error during capture",
        "something in a CUDA graph's capture waits for the GPU or allocates: .item(), printing, a new NCCL group, the "
        "first call of a library",
        "warm up three iterations before the capture, on a side stream; no .item() and no host copies inside",
        "CUDA graph 捕获期间有等待 GPU 或分配内存的操作：.item()、打印、新建 NCCL 组、库的首次调用",
        "捕获前在另一个 stream 上预热三次；捕获中不要 .item() 和主机拷贝",
        "https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs",
        confidence="likely",
    ),
    Cause(
        "inductor-cpp",
        r"CppCompileError",
        "the C++ code that torch.compile wrote does not compile here; the compiler's own error stands below its "
        "command",
        "read the first `error:` below; g++ 10 or newer, Python's headers and OpenMP; a newer torch",
        "torch.compile 生成的 C++ 代码在此无法编译；编译器自己的错误在命令下方",
        "查看下方第一个 error:；需要 g++ 10 以上、Python 头文件和 OpenMP；或升级 torch",
        _TORCH + "106513",
        confidence="possible",
    ),
    Cause(
        "triton-own-assertion",
        r"lib/(?:Analysis|Dialect|Conversion|Target|Tools)/[^\n:]{1,80}\.(?:cpp|h):\d+: [^\n]{0,600}Assertion `|"
        r"mlir::\S{1,80}: Assertion `|llvm::\S{1,80}: Assertion `|"
        r"Unexpected mma -> mma layout|unsupported mma version|Unsupported conversion from [^\n]{1,60} to ",
        "a check inside Triton's own compiler failed: this release does not handle the kernel on this GPU (early ones "
        "on GPUs before sm_80, each on newer GPUs than it)",
        "a newer Triton with its torch; where that cannot be: switch off the feature with the kernel (a fused layer, "
        "torch.compile), or other tiles (BLOCK sizes, num_warps, num_stages=1)",
        "Triton 编译器自身的检查失败：该版本无法为此 GPU 编译该核函数（早期版本在 sm_80 之前的 GPU 上，或 GPU 比 "
        "Triton 新）",
        "连同 torch 升级 Triton；否则关闭含有该核函数的功能（融合层、torch.compile），或换用其他分块（BLOCK、"
        "num_warps、"
        "num_stages=1）",
        "https://github.com/qwopqwop200/GPTQ-for-LLaMa/issues/179",
        confidence="likely",
    ),
    Cause(
        "triton-compiler",
        r"PassManager::run failed|Internal Triton PTX codegen error|PTXASError|`ptxas` failed|ptxas fatal|"
        r"LLVM ERROR: Cannot select|lib/(?:Conversion|Dialect|Target)/Triton[^\n]{1,400}: Assertion|"
        r"triton\.compiler\.errors\.\w+Error|"
        r"Failures have been detected while processing an MLIR pass pipeline",
        "Triton could not compile a kernel: its version, or the kernel on this GPU",
        "the error above it; the Triton that torch requires, or a newer one with its torch; rm -r ~/.triton/cache",
        "Triton 无法编译某个核函数：与其版本或该 GPU 有关",
        "查看上方的错误；使用 torch 要求的 Triton，或连同 torch 一起升级；rm -r ~/.triton/cache",
        "https://github.com/intel/intel-xpu-backend-for-triton/issues/5654",
        confidence="possible",
    ),
    Cause(
        "inductor-failed",
        r"torch\._inductor\.exc\.\w+|LoweringException|BackendCompilerFailed|backend='\w+' raised",
        "torch.compile's compiler (Inductor) fails on this program, which runs without it: {reason}",
        "a newer torch (it is most often a defect of this release); until then torch.compiler.disable on that part, or "
        "backend=\"aot_eager\" or TORCHDYNAMO_DISABLE=1; rm -r /tmp/torchinductor_$USER",
        "torch.compile 的编译器（Inductor）在该程序上失败，而不编译可以运行：{reason}",
        "升级 torch（多为该版本的缺陷）；在此之前对该部分使用 torch.compiler.disable，或 backend=\"aot_eager\"、"
        "TORCHDYNAMO_DISABLE=1；rm -r /tmp/torchinductor_$USER",
        "https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html",
        confidence="likely",
        derive=compile_reason,
        derives=("reason",),
        fallback=True,
    ),
)  # fmt: skip
