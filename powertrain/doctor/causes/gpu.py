"""The GPU, its driver, and the libraries on it."""

from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.excerpt import Excerpt
from powertrain.doctor.refusals import refusals

_TE = "https://github.com/NVIDIA/TransformerEngine/issues/"
_FA = "https://github.com/Dao-AILab/flash-attention/issues/"


def _enough_is_free(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    """Whether twice the refused size was free: then it is not the GPU's memory that ran out."""
    free = groups.get("free") or groups["left"]
    return {} if 2 * bytes_of(groups["size"]) <= bytes_of(free) else None


def bytes_of(size: str) -> float:
    """A size as torch prints it, "15.52 GiB"."""
    number, unit = size.split()
    return float(number) * 1024 ** "bkmgt".index(unit[0].lower())


# wheels of torch run on every driver of their CUDA's major version
_TORCH_INDEX = {11: "cu118", 12: "cu126", 13: "cu130"}


def _torch_for_driver(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str]:
    """11040 is CUDA 11.4."""
    version = int(groups["version"])
    major = version // 1000
    index = _TORCH_INDEX.get(major, f"cu{major}{version % 1000 // 10}")
    return {"cuda": f"{major}.{version % 1000 // 10}", "major": str(major), "index": index}


CAUSES = (
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
        "the driver supports CUDA up to {version} ({cuda}), torch was built for a newer one",
        "update the driver, or install torch for CUDA {major}: pip install torch --index-url "
        "https://download.pytorch.org/whl/{index}",
        "驱动最高支持 CUDA {version}（即 {cuda}），而 torch 需要更新的版本",
        "升级驱动，或安装 CUDA {major} 的 torch：pip install torch --index-url https://download.pytorch.org/whl/{index}",
        "https://github.com/lllyasviel/Fooocus/issues/1313",
        derive=_torch_for_driver,
        derives=("cuda", "major", "index"),
    ),
    Cause(
        "kernel-for-another-gpu",
        r"FATAL: (?:kernel `(?P<kernel>\w+)`|this function) is for (?P<range>sm\d+(?:-sm\d+)?), but was built for "
        r"(?P<built>sm\d+)",
        "a kernel for {range} was launched from code compiled for {built}: the library chose it for another GPU "
        "than the one it runs on, or was built for the wrong archs",
        "build it for every GPU of this host, TORCH_CUDA_ARCH_LIST=\"7.5 8.6\" pip install --no-build-isolation "
        "--no-binary xformers --force-reinstall --no-deps xformers "
        "(the archs: powertrain doctor --only mixed --only code); without a build: each GPU model alone with "
        "CUDA_VISIBLE_DEVICES, or powertrain.compat.xformers, which chooses by the tensors' GPU",
        "为 {range} 选择的核函数运行了为 {built} 编译的代码：库按另一块 GPU 做了选择，或编译的架构不对",
        "为本机所有 GPU 重新编译：TORCH_CUDA_ARCH_LIST=\"7.5 8.6\" pip install --no-build-isolation --no-binary "
        "xformers --force-reinstall --no-deps xformers（架构见 powertrain doctor --only mixed --only code）；不编译："
        "用 CUDA_VISIBLE_DEVICES 分开运行不同型号，或使用 powertrain.compat.xformers",
        "https://github.com/dmMaze/BallonsTranslator/issues/1148",
    ),
    Cause(
        "no-kernel-image",
        r"no kernel image is available for execution on the device|(?<!HIP error: )invalid device function|"
        r"hipErrorNoBinaryForGpu|No compiled \w{1,60} for (?:CUDA device|a|compute) ?(?:compute )?capability",
        "the library has no code for this GPU's arch, nor PTX that the driver could compile",
        "powertrain doctor --only code names the library; install a build with your arch, or build it with "
        "TORCH_CUDA_ARCH_LIST set to it",
        "该库没有本 GPU 架构的代码，也没有可供驱动编译的 PTX",
        "powertrain doctor --only code 指出是哪个库；安装含该架构的版本，或设置 TORCH_CUDA_ARCH_LIST 自行编译",
        _FA + "1785",
    ),
    Cause(
        "flash-attention-old-gpu",
        r"FlashAttention only supports Ampere GPUs or newer|Expected is_sm80 to be true",
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
        r"No operator found for `(?P<function>memory_efficient_attention_\w+)`|"
        r"but your GPU has capability \((?P<arch>\d+, \d+)\) \((?P<age>too \w+)\)",
        "none of xFormers' attention kernels takes these shapes, types and this GPU{reasons}",
        "{advice}; powertrain.compat.xformers has a kernel for every one; powertrain explain attention --as xformers "
        "says why",
        "xFormers 没有支持这些形状、类型和 GPU 的核函数{reasons}",
        "按原因修改（CPU 张量移到 GPU、float32 改为半精度、换用匹配的安装包）；powertrain.compat.xformers "
        "总有可用的核函数；powertrain explain attention --as xformers 说明原因",
        "https://github.com/facebookresearch/xformers/issues/1263",
        confidence="likely",
        derive=refusals,
        derives=("reasons", "advice"),
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
        confidence="likely",
    ),
    Cause(
        "cudnn-execution",
        r"cuDNN Error: |\[cudnn_frontend\] Error|No valid (?:execution plans|engine configs)|"
        r"CUDNN_STATUS_(?:EXECUTION_FAILED|NOT_SUPPORTED|INTERNAL_ERROR|MAPPING_ERROR)",
        "cuDNN refuses or fails on this call; often another cuDNN is loaded than TransformerEngine was built with",
        "powertrain doctor --only twice --only versions; NVTE_FUSED_ATTN=0 takes another backend meanwhile",
        "cuDNN 拒绝或执行失败；常因加载的 cuDNN 与 TransformerEngine 编译时的不同",
        "powertrain doctor --only twice；暂时用 NVTE_FUSED_ATTN=0 换一个后端",
        _TE + "1407",
        confidence="possible",
    ),
    Cause(
        "fp8-shape",
        r"FP8 execution requires (?:2D input matrices with height|the product of all dimensions except the last to be) "
        r"divisible by 8 and ",
        "FP8 products need a multiple of 8 rows and a multiple of 16 columns",
        "pad tokens and features to a multiple of 32, or leave this layer in bf16: fp8_autocast(enabled=False)",
        "FP8 张量核要求行数为 8 的倍数、列数为 16 的倍数",
        "将 token 数和特征数补齐到 32 的倍数，或让该层使用 bf16：fp8_autocast(enabled=False)",
        _TE + "1422",
    ),
    Cause(
        "illegal-memory-access",
        r"Memory access fault by GPU|"
        r"an illegal memory access was encountered",
        "a kernel read or wrote outside its memory; the line that reports it is seldom the one that did it",
        "CUDA_LAUNCH_BLOCKING=1 <the same command> names the call; compute-sanitizer names the kernel",
        "某核函数越界读写；报告错误的位置往往不是出错的位置",
        "CUDA_LAUNCH_BLOCKING=1 <原命令> 找到调用；compute-sanitizer 找到核函数",
        _TE + "3124",
        confidence="possible",
    ),
    Cause(
        "triton-shared-memory",
        r"out of resource: shared memory,? ?Required: (?P<need>\d+),? ?Hardware limit(?:ation)?: (?P<have>\d+)",
        "a Triton kernel's tile needs {need} bytes of shared memory, this GPU has {have} a block: it was tuned for "
        "a larger one",
        "smaller block sizes or num_stages in that kernel; Powertrain plans its tiles by the GPU",
        "Triton 核函数需要 {need} 字节共享内存，而本 GPU 每块只有 {have}：它是为更大的 GPU 调优的",
        "减小该核函数的 block 或 num_stages；Powertrain 按 GPU 规划分块",
        "https://github.com/triton-lang/triton/issues/8182",
    ),
    Cause(
        "cuda-out-of-memory",
        r"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate (?P<size>[\d.]+ \w+)|CUDA driver error: (?P<driver>out "
        r"of memory)",
        "the GPU's memory is full: {size}{driver} (more was requested)",
        "a smaller micro-batch with more accumulation, activation checkpointing, FSDP; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if much is reserved but unallocated",
        "GPU 显存已满：还需要 {size}{driver}",
        "减小 micro-batch 并增加累积步数，使用激活重算、FSDP；若大量保留但未分配："
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "https://pytorch.org/docs/stable/notes/cuda.html#memory-management",
    ),
    Cause(
        "driver-insufficient",
        r"CUDA driver version is insufficient for CUDA runtime version",
        "the driver is older than the CUDA that the library was built with, or there is no driver at all",
        "nvidia-smi shows the newest CUDA of the driver: update it, or install torch for a CUDA of that major version",
        "驱动比编译该库的 CUDA 旧，或根本没有驱动",
        "nvidia-smi 显示驱动支持的最高 CUDA：升级驱动，或安装该主版本 CUDA 的 torch",
        "https://github.com/facebookresearch/faiss/issues/825",
    ),
    Cause(
        "ptx-newer-than-driver",
        r"the provided PTX was compiled with an unsupported toolchain|CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        "PTX of a newer CUDA toolkit than the driver can compile",
        "update the driver; or a build with machine code for this GPU (TORCH_CUDA_ARCH_LIST), or an older toolkit",
        "PTX 由比驱动更新的 CUDA 工具包生成，驱动无法编译",
        "升级驱动；或使用含本 GPU 机器码的版本（TORCH_CUDA_ARCH_LIST），或较旧的工具包",
        "https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html",
    ),
    Cause(
        "forward-compatibility",
        r"forward compatibility was attempted on non supported HW",
        "the container brings a libcuda newer than the host's driver, which only data center GPUs may use",
        "update the host's driver, or take an image of its CUDA version; or remove /usr/local/cuda/compat from "
        "LD_LIBRARY_PATH",
        "容器自带的 libcuda 比主机驱动新，只有数据中心 GPU 允许这样使用",
        "升级主机驱动，或使用其 CUDA 版本的镜像；或从 LD_LIBRARY_PATH 中移除 /usr/local/cuda/compat",
        "https://github.com/gpustack/gpustack/issues/1254",
    ),
    Cause(
        "nvml-container",
        r"Failed to initialize NVML: Unknown Error",
        "in a container: systemd reloaded the cgroups of the host, and the container lost its GPUs",
        "restart the container; for good: cgroup driver cgroupfs in Docker, or --device=/dev/nvidia0 "
        "--device=/dev/nvidiactl --device=/dev/nvidia-uvm",
        "容器中：主机的 systemd 重新加载了 cgroup，容器失去了 GPU",
        "重启容器；长期解决：Docker 使用 cgroupfs，或加上 --device=/dev/nvidia0 --device=/dev/nvidiactl "
        "--device=/dev/nvidia-uvm",
        "https://github.com/NVIDIA/nvidia-container-toolkit/issues/251",
        confidence="likely",
    ),
    Cause(
        "fabric-manager",
        r"[Ee]rror 802|system not yet initialized",
        "NVSwitch's fabric manager does not run, or is of another version than the driver",
        "systemctl status nvidia-fabricmanager; install nvidia-fabricmanager of the driver's very version and start it",
        "NVSwitch 的 fabric manager 没有运行，或与驱动版本不同",
        "systemctl status nvidia-fabricmanager；安装与驱动版本完全相同的 nvidia-fabricmanager 并启动",
        "https://github.com/huggingface/huggingface_hub/issues/4134",
    ),
    Cause(
        "torch-without-cuda",
        r"Torch not compiled with CUDA enabled|cuda is missing or is incompatible with installed torch|"
        r"PyTorch was installed without CUDA|torch version: [\d.]+\+cpu",
        "the installed torch is a build without CUDA",
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cuXXX, with the CUDA of "
        "your driver; python -c 'import torch; print(torch.version.cuda)'",
        "安装的 torch 是不带 CUDA 的版本",
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cuXXX（按驱动的 CUDA）；"
        "python -c 'import torch; print(torch.version.cuda)'",
        "https://github.com/deepspeedai/DeepSpeed/issues/4513",
        confidence="likely",
    ),
    Cause(
        "torch-no-arch",
        r"CUDA capability (?P<arch>sm_\d+) is not compatible with the current PyTorch installation",
        "the installed torch has no code for {arch}: it is older than the GPU, or so new that the GPU was dropped",
        "pip install --upgrade torch --index-url https://download.pytorch.org/whl/cu128 (Blackwell; sm_110: cu130), "
        "or cu126 (before Turing)",
        "安装的 torch 没有 {arch} 的代码：比 GPU 旧，或太新而不再支持该 GPU",
        "pip install --upgrade torch --index-url https://download.pytorch.org/whl/cu128（Blackwell；sm_110 为 "
        "cu130），或 cu126（Turing 之前）",
        "https://pytorch.org/get-started/locally/",
    ),
    Cause(
        "no-gpu-visible",
        r"But your machine only has: \[\]|Torch is not able to use GPU|[Nn]o GPUs? (?:is |are )?(?:found|available|"
        r"detected)|No HIP GPUs are available|"
        r"cannot find any torch accelerator|CUDA is not available\b|requires? an? (?:NVIDIA )?GPU\b|"
        r"No (?:NVIDIA )?GPU found|"
        r"No CUDA GPUs are available|no CUDA-capable device is detected|CUDA_ERROR_NO_DEVICE",
        "the process sees no GPU: CUDA_VISIBLE_DEVICES names none that exists, or the job or container has none",
        "echo $CUDA_VISIBLE_DEVICES (and what the program sets in os.environ); nvidia-smi -L in the same place",
        "进程看不到 GPU：CUDA_VISIBLE_DEVICES 指定的不存在，或作业、容器没有分配 GPU",
        "echo $CUDA_VISIBLE_DEVICES（以及程序在 os.environ 中的设置）；在同一处运行 nvidia-smi -L",
        "https://github.com/KeYang8/WITT/issues/34",
        confidence="likely",
    ),
    Cause(
        "device-ordinal",
        r"CUDA error: invalid device ordinal|device >= 0 && device < num_gpus|CUDAContext\.cpp\W{1,3}\d",
        "a GPU index that does not exist was requested: more processes than GPUs, or CUDA_VISIBLE_DEVICES hides "
        "some",
        "--nproc-per-node = GPUs of the host; LOCAL_RANK, not RANK, in set_device; nvidia-smi -L",
        "使用了不存在的 GPU 编号：进程多于 GPU，或 CUDA_VISIBLE_DEVICES 隐藏了一些",
        "--nproc-per-node 等于本机 GPU 数；set_device 用 LOCAL_RANK 而不是 RANK；nvidia-smi -L",
        "https://docs.pytorch.org/docs/stable/elastic/run.html",
    ),
    Cause(
        "gpu-busy",
        r"all CUDA-capable devices are busy or unavailable|device\(s\) is/are busy or unavailable",
        "the GPU is in exclusive mode and another process has it, or its MIG or driver state is broken",
        "nvidia-smi -q -d COMPUTE; end the other process; nvidia-smi -c DEFAULT; reset or reboot",
        "GPU 处于独占模式且被其他进程占用，或 MIG、驱动状态异常",
        "nvidia-smi -q -d COMPUTE；结束其他进程；nvidia-smi -c DEFAULT；重置或重启",
        "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html",
        confidence="likely",
    ),
    Cause(
        "nvlink-defect",
        r"uncorrectable NVLink error|CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "an NVLink between GPUs lost data: a link, bridge or NVSwitch failed, or another GPU on it was reset",
        "nvidia-smi nvlink -e; dmesg | grep -i xid (74); reset the GPUs or reboot; if it comes back, the hardware has "
        "to be repaired; NCCL_P2P_DISABLE=1 goes without",
        "GPU 之间的 NVLink 丢失数据：链路、桥或 NVSwitch 故障，或其他 GPU 被重置",
        "nvidia-smi nvlink -e；dmesg | grep -i xid（74）；重置 GPU 或重启；若再次出现则需维修；"
        "NCCL_P2P_DISABLE=1 可绕开",
        "https://docs.nvidia.com/deploy/xid-errors/index.html",
    ),
    Cause(
        "gpu-memory-defect",
        r"uncorrectable ECC error|CUDA_ERROR_ECC_UNCORRECTABLE|double bit ECC error",
        "memory of the GPU returned wrong bits: the hardware failed",
        "nvidia-smi -q -d ECC,ROW_REMAPPER; reset the GPU or reboot; if it comes back, the card has to be replaced",
        "GPU 显存返回了错误的数据：硬件故障",
        "nvidia-smi -q -d ECC,ROW_REMAPPER；重置 GPU 或重启；若再次出现则需更换",
        "https://github.com/tloen/alpaca-lora/issues/123",
    ),
    Cause(
        "gpu-lost",
        r"GPU has fallen off the bus|GPU is lost|Unable to determine the device handle for GPU",
        "the driver lost the GPU: power, heat, a PCIe link, or a defect",
        "dmesg | grep -i xid; reboot; look at power cables, temperature and risers",
        "驱动失去了与 GPU 的联系：电源、温度、PCIe 链路或硬件故障",
        "dmesg | grep -i xid；重启；检查电源线、温度和转接卡",
        "https://docs.nvidia.com/deploy/xid-errors/index.html",
    ),
    Cause(
        "xid",
        r"NVRM: Xid \([^)]{1,40}\): (?P<xid>\d+)",
        "the driver reported Xid {xid}, an error of the GPU or of the program on it",
        "look Xid {xid} up in NVIDIA's list; 13, 31, 43 and 45 are most often the program's, 48, 63, 74, 79 and 94 "
        "the hardware's",
        "驱动报告了 Xid {xid}：GPU 或其上程序的错误",
        "在 NVIDIA 的列表中查 Xid {xid}；13、31、43、45 多为程序问题，48、63、74、79、94 多为硬件问题",
        "https://docs.nvidia.com/deploy/xid-errors/index.html",
        confidence="likely",
    ),
    Cause(
        "device-assert",
        r"thread: \[\d+,\d+,\d+\] Assertion|device-side assert triggered",
        "a kernel's own check failed: most often an index (token id, position, label) is beyond its table",
        "compare the largest id with the vocabulary and the embedding (added tokens: resize_token_embeddings), "
        "positions with the longest, labels with the classes; CUDA_LAUNCH_BLOCKING=1 or the CPU names the call",
        "核函数的检查失败：通常是下标（token id、位置、标签）超出了表的大小",
        "比较最大的 id 与词表和 embedding（新增 token：resize_token_embeddings）、位置与最大长度、标签与类别数；"
        "CUDA_LAUNCH_BLOCKING=1 或在 CPU 上运行可找到调用",
        "https://github.com/NVIDIA/Megatron-LM/issues/1038",
        confidence="likely",
    ),
    Cause(
        "bf16-old-gpu",
        r"[Bb]float16 is only supported on GPUs with compute capability of at least|"
        r"Your setup doesn't support bf16/gpu|bf16 is not supported on your machine|"
        r"Current CUDA Device does not support bfloat16",
        "this GPU has no bfloat16: it came with Ampere (sm_80)",
        "float16: --dtype=half (vLLM), --fp16 instead of --bf16 (Trainer), precision: fp16",
        "该 GPU 不支持 bfloat16（Ampere sm_80 起才有）",
        "使用 float16：--dtype=half（vLLM），以 --fp16 代替 --bf16（Trainer），precision: fp16",
        "https://github.com/vllm-project/vllm/issues/1157",
    ),
    Cause(
        "fp8-old-gpu",
        r"compute capability (?P<arch>[\d.]+\d) or higher required for FP8|fp8e4nv not supported in this architecture|"
        r"torch\._scaled_mm is only supported on CUDA devices with compute capability|"
        r"FP8 is not supported on this (?:GPU|device)",
        "this GPU has no FP8 tensor cores: they came with sm_89 (Ada) and sm_90 (Hopper)",
        "bf16: fp8_autocast(enabled=False), or a checkpoint that is not FP8; FP8 needs sm_89 or newer",
        "该 GPU 没有 FP8 张量核（sm_89 和 sm_90 起才有）",
        "使用 bf16：fp8_autocast(enabled=False)，或非 FP8 的权重；FP8 需要 sm_89 或更新",
        _TE + "1159",
    ),
    Cause(
        "mxfp8-old-gpu",
        r"compute capability (?P<arch>[\d.]+\d) or higher required for (?P<format>MXFP8|NVFP4)",
        "{format} needs a GPU of compute capability {arch} (Blackwell) or newer: this one has no such tensor cores",
        "an FP8 recipe that this GPU has (DelayedScaling or Float8CurrentScaling from sm_89 on), or bf16: "
        "fp8_autocast(enabled=False)",
        "{format} 需要计算能力 {arch}（Blackwell）或更新的 GPU：该 GPU 没有这种张量核",
        "使用该 GPU 支持的 FP8 recipe（sm_89 起：DelayedScaling、Float8CurrentScaling），或 bf16："
        "fp8_autocast(enabled=False)",
        "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/fp8.py",
    ),
    Cause(
        "flash-attention-dtype",
        r"FlashAttention only supports? fp16(?:,| and) bf16",
        "flash-attn was given float32: a norm or an embedding keeps fp32, or autocast is off",
        "torch_dtype=torch.bfloat16 when loading, bf16=True in the trainer, or cast q, k and v; powertrain.attention "
        "takes fp32",
        "flash-attn 收到了 float32：某个 norm 或 embedding 保持 fp32，或没有启用 autocast",
        "加载时设置 torch_dtype=torch.bfloat16，训练器中 bf16=True，或转换 q、k、v；powertrain.attention 支持 fp32",
        "https://github.com/unslothai/unsloth/issues/827",
    ),
    Cause(
        "flash-attention-head-dim",
        r"FlashAttention \w+ (?:only supports head dimension|for head dim)[^.]{0,80}|"
        r"only supports head dimension at most (?P<dim>\d+)",
        "flash-attn has no kernel for this head dim on this GPU",
        "powertrain.attention takes head dims to 512; in Transformers: attn_implementation=\"sdpa\"",
        "flash-attn 在该 GPU 上没有支持此 head dim 的核函数",
        "powertrain.attention 支持到 512；Transformers 中 attn_implementation=\"sdpa\"",
        "https://github.com/Dao-AILab/flash-attention",
    ),
    Cause(
        "oom-but-free",
        r"CUDA out of memory\. Tried to allocate (?P<size>[\d.]+ \wi?B)(?:.{0,60}?total capacity;? .{0,60}?already "
        r"allocated; (?P<free>[\d.]+ \wi?B) free|. GPU \d+ has a total capacity of [\d.]+ \wi?B of which "
        r"(?P<left>[\d.]+ \wi?B) is free)",
        "{size} were refused though {free}{left} of the GPU are free: the limit is another, such as WSL's memory, "
        "host memory that is pinned, or a fraction set for the process",
        ".wslconfig memory= (WSL), ulimit -v and the cgroup; no set_per_process_memory_fraction; a defective driver: "
        "nvidia-smi, reboot",
        "GPU 还有 {free}{left} 空闲却拒绝了 {size}：限制在别处，例如 WSL 的内存、锁页内存，或进程的显存比例",
        "WSL 的 .wslconfig memory=，ulimit -v 和 cgroup；检查 set_per_process_memory_fraction；nvidia-smi，重启",
        "https://github.com/liucongg/ChatGLM-Finetuning/issues/28",
        confidence="likely",
        derive=_enough_is_free,
    ),
    Cause(
        "gpu-memory-full",
        r"OutOfMemoryError: Allocation on device|HIP out of memory|"
        r"CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|"
        r"Cuda failure (?:2 )?'out of memory'",
        "the GPU's memory is full, outside of torch's allocator: other processes on it, or torch reserved all of it",
        "nvidia-smi names the processes; a smaller batch; torch.cuda.empty_cache() before; expandable_segments:True",
        "GPU 显存已满（在 torch 分配器之外）：有其他进程，或 torch 已全部保留",
        "nvidia-smi 查看进程；减小 batch；先 torch.cuda.empty_cache()；expandable_segments:True",
        "https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",
        confidence="likely",
    ),
    Cause(
        "too-many-peers",
        r"peer mapping resources exhausted|CUDA_ERROR_TOO_MANY_PEERS",
        "a GPU can map the memory of at most eight others, and this host has more",
        "CUDA_VISIBLE_DEVICES with at most nine GPUs a process or job, or NCCL_P2P_DISABLE=1",
        "一块 GPU 最多映射另外八块的显存，而本机更多",
        "每个进程或作业用 CUDA_VISIBLE_DEVICES 限制为最多九块，或 NCCL_P2P_DISABLE=1",
        "https://github.com/ggml-org/llama.cpp/issues/21883",
    ),
    Cause(
        "no-peer-access",
        r"peer access is not supported between these two devices",
        "two of these GPUs cannot reach each other's memory: no NVLink, and PCIe peer access is off",
        "nvidia-smi topo -p2p r; powertrain doctor --only links; NCCL_P2P_DISABLE=1, or GPUs that are linked",
        "其中两块 GPU 无法互访显存：没有 NVLink，且 PCIe 互访不可用",
        "nvidia-smi topo -p2p r；powertrain doctor --only links；NCCL_P2P_DISABLE=1，或选用互联的 GPU",
        "https://github.com/deepseek-ai/DeepEP/issues/584",
    ),
    Cause(
        "mixed-devices",
        r"Expected all tensors to be on the same device|Expected object of device type cuda but got|"
        r"Input type \(torch\.cuda\.\w+\) and weight type \(torch\.\w+\) should be the same",
        "a product of tensors on two devices: an input, a buffer or a part of the model was not moved",
        "model.to(device) and batch.to(device); with device_map=\"auto\": inputs on the device of the first layer",
        "运算的张量位于不同设备：输入、buffer 或模型的一部分没有移动",
        "model.to(device) 和 batch.to(device)；device_map=\"auto\" 时输入放在第一层所在设备",
        "https://github.com/asahi417/lmppl/pull/12",
        confidence="likely",
    ),
    Cause(
        "launch-resources",
        r"too many resources requested for launch",
        "a kernel needs more registers or threads per block than this GPU has: it was compiled or tuned for another",
        "smaller blocks or fewer warps in that kernel; a build for this GPU's arch (no debug flags)",
        "核函数需要的寄存器或每块线程数超过该 GPU：它是为另一种 GPU 编译或调优的",
        "减小该核函数的 block 或 warp 数；为本 GPU 架构编译（不带调试选项）",
        "https://github.com/microsoft/onnxruntime/issues/20885",
    ),
    Cause(
        "kernel-image-invalid",
        r"device kernel image is invalid",
        "the driver cannot load the compiled kernel: it is for another arch, made by a newer CUDA or Triton than the "
        "driver knows, or damaged in a cache",
        "rm -r ~/.triton/cache /tmp/torchinductor_$USER; the Triton that torch requires; a newer driver",
        "驱动无法加载编译好的核函数：架构不同、由比驱动新的 CUDA 或 Triton 生成，或缓存损坏",
        "rm -r ~/.triton/cache /tmp/torchinductor_$USER；使用 torch 要求的 Triton；升级驱动",
        "https://github.com/OpenGVLab/EfficientQAT/issues/20",
        confidence="likely",
    ),
    Cause(
        "launch-configuration",
        r"CUDA error: invalid configuration argument",
        "a kernel was launched with a grid or block that the GPU does not have: most often batch times heads is past "
        "65535, or a size is 0",
        "a smaller batch or fewer heads a call (slice it); powertrain.compat.xformers has no such bound",
        "核函数的 grid 或 block 超出 GPU 的限制：通常是 batch × heads 超过 65535，或大小为 0",
        "每次调用减小 batch 或 heads（切片）；powertrain.compat.xformers 没有该限制",
        "https://github.com/facebookresearch/xformers/issues/998",
        confidence="likely",
    ),
    Cause(
        "cublas-not-initialized",
        r"CUBLAS_STATUS_NOT_INITIALIZED",
        "cuBLAS could not start: most often the GPU's memory is full, or an earlier kernel failed (an index beyond "
        "its table)",
        "nvidia-smi for free memory; a smaller batch; CUDA_LAUNCH_BLOCKING=1 for an earlier error",
        "cuBLAS 无法启动：通常是显存已满，或更早的核函数出错（下标越界）",
        "用 nvidia-smi 查看空闲显存；减小 batch；CUDA_LAUNCH_BLOCKING=1 查找更早的错误",
        "https://github.com/QwenLM/Qwen/issues/120",
        confidence="possible",
    ),
    Cause(
        "cublas-failed",
        r"cuBLAS Error: |!!!! kernel execution error|"
        r"Unable to find suitable cuBLAS GEMM algorithm|CUBLAS_STATUS_(?P<status>EXECUTION_FAILED|INVALID_VALUE|"
        r"NOT_SUPPORTED|INTERNAL_ERROR|ARCH_MISMATCH)",
        "cuBLAS refused or failed: another cuBLAS than torch's is loaded, the GPU lacks the dtype, or an "
        "earlier kernel failed",
        "unset LD_LIBRARY_PATH; powertrain doctor --only twice; CUDA_LAUNCH_BLOCKING=1",
        "cuBLAS 拒绝或失败：加载的不是 torch 的 cuBLAS，GPU 不支持该类型，或更早的核函数出错",
        "unset LD_LIBRARY_PATH；powertrain doctor --only twice；CUDA_LAUNCH_BLOCKING=1",
        "https://docs.nvidia.com/cuda/cublas/index.html",
        confidence="possible",
    ),
    Cause(
        "cudnn-not-initialized",
        r"CUDNN_STATUS_NOT_INITIALIZED|unable to find an engine to execute this computation|"
        r"Unable to find a valid cuDNN algorithm",
        "cuDNN could not start or found no algorithm: the GPU's memory is full, or cuDNN or driver does not fit",
        "nvidia-smi for free memory; a smaller batch; unset LD_LIBRARY_PATH; "
        "powertrain doctor --only twice --only driver",
        "cuDNN 无法启动或找不到算法：显存已满，或 cuDNN、驱动不匹配",
        "用 nvidia-smi 查看空闲显存；减小 batch；unset LD_LIBRARY_PATH；powertrain doctor --only twice",
        "https://github.com/HobbitLong/SupContrast/issues/70",
        confidence="possible",
    ),
    Cause(
        "launch-failure",
        r"unspecified launch failure|CUDA error: misaligned address|CUDA error: unknown error|"
        r"Cuda failure (?:999 )?'unknown error'|CUDA error: an illegal instruction was encountered",
        "a kernel failed, or the driver is in a broken state; the message does not say which",
        "CUDA_LAUNCH_BLOCKING=1 <the same command>; dmesg | grep -i xid; reset the GPU or reboot; compute-sanitizer",
        "某个核函数失败，或驱动状态异常；消息没有说明是哪一种",
        "CUDA_LAUNCH_BLOCKING=1 <原命令>；dmesg | grep -i xid；重置 GPU 或重启；compute-sanitizer",
        "https://github.com/opendatalab/MinerU/issues/426",
        confidence="possible",
    ),
)  # fmt: skip
