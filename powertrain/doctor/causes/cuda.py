"""Errors of CUDA's runtime and of its libraries."""

import re

from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.causes.gpu import bytes_of
from powertrain.doctor.cuda_errors import MEANINGS
from powertrain.doctor.excerpt import Excerpt


def _number(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    number = int(groups.get("runtime") or groups.get("start") or groups.get("count") or 0)
    meaning = MEANINGS.get(number)
    return None if meaning is None else {"number": str(number), "meaning": meaning[0], "advice": meaning[1]}


def _others(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    """Whether processes hold a third of the GPU that torch's allocator here, or this process, has not got."""
    this = re.search(r"this process has ([\d.]+ \wi?B) memory in use", excerpt.line)
    if not groups.get("own") and not this:
        return None
    own = bytes_of(groups.get("own") or (this[1] if this else "")) + bytes_of(groups.get("reserved") or "0 B")
    rest = sum(map(bytes_of, _HELD.findall(excerpt.line))) - own
    return {"rest": f"{rest / 2**30:.1f} GiB"} if rest > bytes_of(groups["total"]) / 3 else None


_HELD = re.compile(r"(?:Process \d+ has|this process has) ([\d.]+ \wi?B) memory in use")


def _larger_than_the_gpu(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    total = groups.get("total") or groups["all"]
    return {"whole": total} if bytes_of(groups["size"]) > bytes_of(total) else None


CAUSES = (
    Cause(
        "oom-larger-than-gpu",
        r"out of memory\. Tried to allocate (?P<size>[\d.]+ \wi?B)(?:\. GPU \d+ has a total capacity of "
        r"(?P<total>[\d.]+ \wi?B)| \(GPU \d+; (?P<all>[\d.]+ \wi?B) total capacity)",
        "one tensor of {size} was requested, and the whole GPU has {whole}: freeing other memory would not help",
        "the line of code above names it: attention scores of a long sequence (attn_implementation=\"sdpa\", "
        "powertrain.attention), logits (powertrain.linear_cross_entropy), a mask, or a size that is wrong",
        "请求了一个 {size} 的张量，而整块 GPU 只有 {whole}：释放其他内存无济于事",
        "上方的代码行说明是哪个张量：长序列的注意力分数（attn_implementation=\"sdpa\"、powertrain.attention）、logits"
        "（powertrain.linear_cross_entropy）、mask，或错误的尺寸",
        "https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",
        confidence="likely",
        derive=_larger_than_the_gpu,
        derives=("whole",),
    ),
    Cause(
        "oom-other-process",
        r"CUDA out of memory\. Tried to allocate (?P<size>[\d.]+ \wi?B)\. GPU \d+ has a total capacity of "
        r"(?P<total>[\d.]+ \wi?B) of which (?:.{0,600}?Of the allocated memory (?P<own>[\d.]+ \wi?B) is allocated by "
        r"PyTorch(?:.{0,120}?and (?P<reserved>[\d.]+ \wi?B) is reserved)?)?",
        "other processes, or libraries outside of torch's allocator, hold {rest} of this GPU: too little is left for "
        "{size} here",
        "nvidia-smi names the processes: end those left over from earlier runs, or take another GPU "
        "(CUDA_VISIBLE_DEVICES, one rank a GPU: set_device(LOCAL_RANK)); in vLLM a smaller gpu_memory_utilization",
        "其他进程，或 torch 分配器之外的库，占用了该 GPU 的 {rest}：剩余不足 {size}",
        "nvidia-smi 查看进程：结束此前遗留的进程，或换一块 GPU（CUDA_VISIBLE_DEVICES；每个 rank 一块："
        "set_device(LOCAL_RANK)）；"
        "vLLM 中减小 gpu_memory_utilization",
        "https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",
        confidence="likely",
        derive=_others,
        derives=("rest",),
    ),
    Cause(
        "driver-combination",
        r"unsupported display driver / cuda driver combination|[Ee]rror 803\b|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "the libcuda that was loaded is not of the running kernel module's version",
        "reboot after a driver update; unset LD_LIBRARY_PATH (a libcuda of a compat or stubs folder is first); in "
        "a container: no own driver packages",
        "加载的 libcuda 与正在运行的内核模块版本不同",
        "更新驱动后重启；unset LD_LIBRARY_PATH（先找到了 compat 或 stubs 目录中的 libcuda）；容器内不要安装驱动包",
        "https://docs.nvidia.com/deploy/cuda-compatibility/",
    ),
    Cause(
        "cuda-start",
        r"CUDA unknown error - this may be due to an incorrectly set up environment|"
        r"Unexpected error from cudaGetDeviceCount|CUDA driver initialization failed|"
        r"CUDA error: initialization error|cuInit failed|failed call to cuInit|cudaErrorInitializationError",
        "CUDA could not start: the driver's module nvidia_uvm is not loaded (after a suspend), the driver and its "
        "library differ, or a forked child uses CUDA",
        "nvidia-smi; sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm, or reboot; set CUDA_VISIBLE_DEVICES "
        "before python starts; the start method spawn; in a container: no libcuda of its own (ldconfig -p | grep "
        "libcuda; a cuda-compat folder in LD_LIBRARY_PATH)",
        "CUDA 无法启动：nvidia_uvm 模块未加载（休眠之后）、驱动与库不一致，或 fork 的子进程使用了 CUDA",
        "nvidia-smi；sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm，或重启；在 python 启动前设置 "
        "CUDA_VISIBLE_DEVICES；使用 spawn；容器内不要有自带的 libcuda（LD_LIBRARY_PATH 中的 cuda-compat）",
        "https://docs.pytorch.org/docs/stable/notes/multiprocessing.html",
        confidence="likely",
    ),
    Cause(
        "nvml",
        r"NVML Shared Library Not Found|NVMLError\w*|NVML_SUCCESS == r INTERNAL ASSERT FAILED|Can't initialize NVML|"
        r"nvidia-smi: command not found|NVIDIA-SMI couldn't find|nvmlInit\w* failed",
        "NVML, the library of nvidia-smi, is missing or does not answer: no driver, not in the container, or "
        "updated without a reboot",
        "nvidia-smi on the host and in the container; docker run --gpus all; reboot after a driver update",
        "NVML（nvidia-smi 的库）缺失或无响应：没有驱动、容器内没有，或更新后未重启",
        "在主机和容器中运行 nvidia-smi；docker run --gpus all；更新驱动后重启",
        "https://docs.nvidia.com/deploy/nvml-api/index.html",
        confidence="likely",
    ),
    Cause(
        "launch-timeout",
        r"launch timed out and was terminated|cudaErrorLaunchTimeout|CUDA_ERROR_LAUNCH_TIMEOUT",
        "a kernel ran longer than the watchdog of a GPU with a display allows",
        "smaller kernels (batch, chunk); a GPU without a display; Windows: TdrDelay",
        "核函数运行时间超过了连接显示器的 GPU 的看门狗限制",
        "减小核函数（batch、分块）；使用不接显示器的 GPU；Windows：TdrDelay",
        "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html",
    ),
    Cause(
        "cuda-not-supported",
        r"CUDA error: operation not supported|cudaErrorNotSupported|CUDA_ERROR_NOT_SUPPORTED|"
        r"API call is not supported in the installed CUDA driver",
        "this driver, virtual GPU or WSL does not have a function that was called: CUDA IPC, expandable "
        "segments, cudaMallocAsync, multicast",
        "PYTORCH_CUDA_ALLOC_CONF without expandable_segments or backend; NCCL_CUMEM_ENABLE=0, NCCL_NVLS_ENABLE=0; "
        "a newer driver",
        "该驱动、虚拟 GPU 或 WSL 不支持所需功能：CUDA IPC、expandable segments、cudaMallocAsync、multicast",
        "PYTORCH_CUDA_ALLOC_CONF 不用 expandable_segments 和 backend；NCCL_CUMEM_ENABLE=0，NCCL_NVLS_ENABLE=0；"
        "升级驱动",
        "https://docs.pytorch.org/docs/stable/notes/cuda.html",
        confidence="likely",
    ),
    Cause(
        "invalid-handle",
        r"CUDA error: invalid resource handle|CUDA error: invalid device context|CUDA error: context is destroyed|"
        r"cudaErrorInvalidResourceHandle",
        "a stream, event or memory handle of another GPU or process, or one that is no longer valid, was used",
        "torch.cuda.set_device(LOCAL_RANK) first; the tensors and the stream of a call on one device (with "
        "torch.cuda.device(x.device))",
        "使用了另一 GPU、进程或已失效的 stream、event 或内存句柄",
        "先 torch.cuda.set_device(LOCAL_RANK)；一次调用的张量与 stream 在同一设备（with "
        "torch.cuda.device(x.device)）",
        "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html",
        confidence="likely",
    ),
    Cause(
        "invalid-argument",
        r"CUDA error: invalid argument|CUDA_ERROR_INVALID_VALUE|CUDA driver error: invalid argument|"
        r"CUDA error: invalid value",
        "a CUDA call got invalid arguments; the message does not say which",
        "CUDA_LAUNCH_BLOCKING=1 <the same command> names the call; a newer driver, and torch and the extension for "
        "one CUDA",
        "某个 CUDA 调用拒绝了参数；该行没有说明是哪一个",
        "CUDA_LAUNCH_BLOCKING=1 <原命令> 可找到调用；升级驱动，torch 与扩展使用同一 CUDA",
        "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html",
        confidence="possible",
    ),
    Cause(
        "nvrtc-name",
        r"libnvrtc\.so: cannot open shared object file",
        "libnvrtc.so, without a number, is in the CUDA toolkit only: torch's packages have libnvrtc.so.12 (or .13)",
        "export CUDA_HOME=<the toolkit> LD_LIBRARY_PATH=$CUDA_HOME/lib64:$LD_LIBRARY_PATH (apt install "
        "cuda-nvrtc-dev-12-x; conda install -c nvidia cuda-nvrtc-dev); or a newer release of the caller, which finds "
        "torch's",
        "不带编号的 libnvrtc.so 只在 CUDA 工具包中：torch 的包里只有 libnvrtc.so.12（或 .13）",
        "export CUDA_HOME=<工具包> LD_LIBRARY_PATH=$CUDA_HOME/lib64:$LD_LIBRARY_PATH（apt install "
        "cuda-nvrtc-dev-12-x）；"
        "或升级调用它的库",
        "https://docs.nvidia.com/cuda/nvrtc/index.html",
        confidence="likely",
    ),
    Cause(
        "nvrtc",
        r"nvrtc: error: |libnvrtc-builtins|NVRTC_ERROR\w*|nvrtc\.so\S{0,20}: undefined symbol",
        "CUDA's run-time compiler (NVRTC) failed: it is older than the GPU, or its libnvrtc-builtins is of another "
        "version",
        "torch for a CUDA that knows this GPU; unset LD_LIBRARY_PATH; pip install --force-reinstall "
        "nvidia-cuda-nvrtc-cu12 at torch's version",
        "CUDA 运行时编译器（NVRTC）失败：比 GPU 旧，或其 libnvrtc-builtins 版本不同",
        "安装支持该 GPU 的 CUDA 版 torch；unset LD_LIBRARY_PATH；将 nvidia-cuda-nvrtc-cu12 重装为 torch 要求的版本",
        "https://docs.nvidia.com/cuda/nvrtc/index.html",
        confidence="likely",
    ),
    Cause(
        "cuda-math-library",
        r"cusolver error: CUSOLVER_STATUS_\w+|CUSOLVER_STATUS_\w+|CUSPARSE_STATUS_\w+|cuFFT error: CUFFT_\w+|"
        r"CUFFT_\w+_\w+|CURAND_STATUS_\w+",
        "a library of CUDA (cuSOLVER, cuSPARSE, cuFFT, cuRAND) failed: GPU memory is full, another version than "
        "torch's is loaded, or an earlier kernel failed",
        "nvidia-smi for free memory; unset LD_LIBRARY_PATH; powertrain doctor --only twice; CUDA_LAUNCH_BLOCKING=1",
        "CUDA 的某个库（cuSOLVER、cuSPARSE、cuFFT、cuRAND）失败：显存已满、加载了其他版本，或更早的核函数出错",
        "用 nvidia-smi 查看空闲显存；unset LD_LIBRARY_PATH；powertrain doctor --only twice；CUDA_LAUNCH_BLOCKING=1",
        "https://docs.nvidia.com/cuda/index.html",
        confidence="possible",
    ),
    Cause(
        "sdpa-no-kernel",
        r"No available kernel\.\s{0,3}Aborting execution|No viable backend for scaled_dot_product_attention|"
        r"no kernel found to launch",
        "every attention kernel that is allowed refuses this call: dtype, head dim, mask or GPU "
        "(torch.nn.attention.sdpa_kernel, or enable_*_sdp(False), forbade the others)",
        "read the warnings above it, one for each kernel; allow SDPBackend.MATH or EFFICIENT_ATTENTION; fp16 or "
        "bf16 inputs; powertrain explain attention",
        "允许的每个注意力核都拒绝此调用：dtype、head dim、mask 或 GPU（sdpa_kernel 或 enable_*_sdp(False) "
        "禁用了其余）",
        "查看上方每个核的警告；允许 SDPBackend.MATH 或 EFFICIENT_ATTENTION；使用 fp16 或 bf16；powertrain explain "
        "attention",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html",
        confidence="likely",
    ),
    Cause(
        "quantized-old-gpu",
        r"quantization method \w+ is not supported for the current GPU|Minimum capability: ?\d+|"
        r"requires (?:a )?(?:GPU|CUDA device)s? with compute capability|requires GPU with sm\d+|"
        r"only supported on (?:GPUs|devices|CUDA devices) with (?:compute )?capability",
        "the kernel needs a newer GPU than this one",
        "a method or dtype for this GPU (for Turing and Volta: fp16, no Marlin, no FP8); python -c 'import torch; "
        "print(torch.cuda.get_device_capability())'",
        "该核函数需要比当前更新的 GPU",
        "使用适合该 GPU 的方法或类型（Turing、Volta：fp16，无 Marlin、无 FP8）；用 "
        "torch.cuda.get_device_capability() 查看",
        "https://docs.vllm.ai/en/latest/features/quantization/",
    ),
    Cause(
        "flash-attention-arch",
        r"flash_(?:fwd|bwd)\w*_template\.h\S{0,6}: ?(?:invalid argument|no kernel image|invalid device function)|"
        r"hopper/flash_\w+\.\w+:\d+\S{0,3} ",
        "flash-attn launched a kernel that it was not compiled for on this GPU: FlashAttention 3 is for Hopper "
        "(sm_90) alone",
        "FlashAttention 2, PyTorch's attention or powertrain.attention on other GPUs (vLLM: "
        "VLLM_FLASH_ATTN_VERSION=2); build it for this arch",
        "flash-attn 启动了没有为该 GPU 编译的核函数：FlashAttention 3 只支持 Hopper（sm_90）",
        "其他 GPU 使用 FlashAttention 2、PyTorch 注意力或 powertrain.attention（vLLM：VLLM_FLASH_ATTN_VERSION=2）；"
        "或按该架构编译",
        "https://github.com/Dao-AILab/flash-attention/issues/1763",
        confidence="likely",
    ),
    Cause(
        "cuda-error-number",
        r"[Cc]uda runtime error \((?P<runtime>\d{1,3})\)|CUDA initialization failure with error:? (?P<start>\d{1,3})|"
        r"cudaGetDeviceCount\(\).{0,160}Error (?P<count>\d{1,3}):",
        "CUDA's error {number}: {meaning}",
        "{advice}",
        "CUDA 错误 {number}（含义见 CUDA Runtime API 的 cudaError）",
        "用 nvidia-smi 检查驱动与 GPU；驱动与 CUDA 版本配套；子进程用 spawn；CUDA_LAUNCH_BLOCKING=1 找到出错的调用",
        "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html",
        confidence="likely",
        derive=_number,
        derives=("number", "meaning", "advice"),
    ),
    Cause(
        "container-driver-state",
        r"nvidia-container-cli: initialization error: cuda error|initialization error: driver rpc error|"
        r"initialization error: (?:nvml error: )?(?:driver/library version mismatch|unknown error)",
        "the host's driver is in a bad state (after an update, a suspend or an error of the GPU), so that no "
        "container can use it",
        "nvidia-smi on the host; reboot, or reload the driver's modules; a newer nvidia-container-toolkit",
        "宿主机驱动状态异常（更新、挂起或 GPU 错误之后），容器无法使用",
        "在宿主机运行 nvidia-smi；重启或重新加载驱动模块；升级 nvidia-container-toolkit",
        "https://github.com/NVIDIA/libnvidia-container/issues/103",
        confidence="likely",
    ),
)  # fmt: skip
