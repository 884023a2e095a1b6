"""Containers, repositories and systems to install from, and programs that do not fit this machine."""

from powertrain.doctor.causes.cause import Cause

CAUSES = (
    Cause(
        "docker-old",
        r"unknown flag: --gpus",
        "this Docker is older than 19.03, which brought --gpus",
        "a newer Docker and nvidia-container-toolkit; or docker run --runtime=nvidia with nvidia-docker2",
        "Docker 版本早于引入 --gpus 的 19.03",
        "升级 Docker 并安装 nvidia-container-toolkit；或用 nvidia-docker2 的 --runtime=nvidia",
        "https://docs.docker.com/engine/containers/resource_constraints/",
    ),
    Cause(
        "container-command",
        r"OCI runtime \w+ failed.{0,300}(?:executable file not found|no such file or directory|"
        r"permission denied)",
        "the command given after the image (or its entrypoint) does not exist in the image, or is no executable file",
        "docker run --entrypoint sh IMAGE and look; the image's own command line in its "
        "documentation; chmod +x and Unix line ends for a script",
        "镜像名后的命令（或 entrypoint）在镜像中不存在，或不是可执行文件",
        "docker run --entrypoint sh IMAGE 查看；参考镜像文档；脚本需 chmod +x 且使用 Unix 换行",
        "https://docs.docker.com/engine/containers/run/",
    ),
    Cause(
        "image-name",
        r"manifest unknown|manifest for \S{1,200} not found|invalid reference format|"
        r"repository does not exist or may require|ErrImagePull|ImagePullBackOff",
        "there is no image of that name and tag (for this CPU), it is private, or its name is misspelled",
        "the tags on its registry's page; docker login; a space or capital letter in the name or in a -v path",
        "没有该名称和标签的镜像（或不支持此 CPU）、为私有镜像，或名称有误",
        "查看镜像仓库的标签；docker login；检查名称或 -v 路径中的空格、大写字母",
        "https://docs.docker.com/reference/cli/docker/image/pull/",
    ),
    Cause(
        "build-context",
        r"COPY failed: file not found|failed to compute cache key|not found in build context|"
        r"excluded by \.dockerignore",
        "the Dockerfile copies a file that is not in the build context: another folder was given, "
        "or .dockerignore leaves it out",
        "docker build -f path/Dockerfile . in the folder that has the file; look at .dockerignore; "
        "git submodule update --init",
        "Dockerfile 复制的文件不在构建上下文中：目录不对，或被 .dockerignore 排除",
        "在含该文件的目录执行 docker build -f path/Dockerfile .；检查 .dockerignore",
        "https://docs.docker.com/build/concepts/context/",
    ),
    Cause(
        "kubernetes-gpu",
        r"Insufficient nvidia\.com/gpu",
        "no node has that many free GPUs that Kubernetes knows of",
        "kubectl describe node | grep nvidia.com/gpu; the NVIDIA device plugin on the nodes; fewer "
        "GPUs; other pods' GPUs",
        "没有节点有足够的空闲 GPU（Kubernetes 可见）",
        "kubectl describe node | grep nvidia.com/gpu；安装 NVIDIA device plugin；减少 GPU；查看其他 pod",
        "https://kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus/",
    ),
    Cause(
        "compile-windows",
        r"Windows not yet supported for torch\.compile",
        "this torch has no torch.compile on Windows",
        "WSL; or torch 2.6 and newer with triton-windows; TORCHDYNAMO_DISABLE=1 to go without",
        "该 torch 在 Windows 上没有 torch.compile",
        "使用 WSL；或 torch 2.6 以上与 triton-windows；TORCHDYNAMO_DISABLE=1 可不使用",
        "https://docs.pytorch.org/docs/stable/torch.compiler_faq.html",
    ),
    Cause(
        "triton-old-gpu",
        r"IndexError: map::at|Unsupported conversion from f16|not supported on this target|"
        r"mma layout conversion is only supported on Ampere",
        "this Triton cannot compile the kernel for this GPU: one before Ampere, or newer than Triton",
        "a newer Triton (with its torch) for a new GPU; before sm_80: no bf16 or fp8 and another "
        'backend (attn_implementation="sdpa", TORCHDYNAMO_DISABLE=1)',
        "该 Triton 无法为此 GPU 编译 kernel：早于 Ampere，或比 Triton 新",
        "新 GPU 升级 Triton（及 torch）；sm_80 之前不用 "
        'bf16、fp8，并换后端（attn_implementation="sdpa"、TORCHDYNAMO_DISABLE=1）',
        "https://github.com/triton-lang/triton/issues/616",
        confidence="likely",
    ),
    Cause(
        "triton-python",
        r"PY_SSIZE_T_CLEAN macro must be defined",
        "this Triton is too old for the Python that runs here (3.10 and newer)",
        "pip install --upgrade triton (with the torch that requires it), or Python 3.9",
        "该 Triton 对当前 Python（3.10 以上）来说太旧",
        "pip install --upgrade triton（连同对应的 torch），或 Python 3.9",
        "https://docs.python.org/3/whatsnew/3.10.html",
    ),
    Cause(
        "vllm-extension",
        r"Failed to import from vllm\._\w+|No module named 'vllm\._\w*C'|"
        r"'_OpNamespace' '_C\w*' object has no attribute",
        "vLLM's compiled part does not load: it is imported from its source folder, was built for "
        "another torch, CUDA or device, or runs on Windows",
        "leave the source folder; pip install --force-reinstall vllm in a new environment with the "
        "torch that it pins; VLLM_TARGET_DEVICE for other devices",
        "vLLM 的编译部分无法加载：从源码目录导入、面向另一 torch、CUDA 或设备，或在 Windows 上",
        "离开源码目录；新环境中 pip install --force-reinstall vllm，使用其固定的 torch；其他设备设置 "
        "VLLM_TARGET_DEVICE",
        "https://docs.vllm.ai/en/latest/getting_started/installation/",
    ),
    Cause(
        "vllm-weights",
        r"Cannot find any model weights with",
        "the folder has no weight files that vLLM loads (*.safetensors, *.bin, *.pt): an adapter, "
        "GGUF, or an incomplete download",
        "ls it; hf download again; an adapter: --enable-lora with its base model; GGUF: the path of the file",
        "目录中没有 vLLM 可加载的权重（*.safetensors、*.bin、*.pt）：adapter、GGUF 或下载不完整",
        "检查目录；重新 hf download；adapter：--enable-lora 加基础模型；GGUF：给出文件路径",
        "https://docs.vllm.ai/en/latest/",
    ),
    Cause(
        "quantize-empty",
        r"invalid configuration argument at line \d+ in file",
        "bitsandbytes was given an empty tensor: the weights are in parts (ZeRO-3, FSDP) or on the meta device where "
        "they are quantized",
        "ZeRO-2, or FSDP with bnb_4bit_quant_storage equal to the model's dtype; pip install --upgrade bitsandbytes "
        "transformers accelerate; no quantization with ZeRO-3",
        "bitsandbytes 得到空张量：量化时权重是分片的（ZeRO-3、FSDP）或在 meta 设备上",
        "使用 ZeRO-2，或 FSDP 并令 bnb_4bit_quant_storage 与模型 dtype 相同；升级 bitsandbytes、transformers、"
        "accelerate",
        "https://github.com/axolotl-ai-cloud/axolotl/issues/1527",
        confidence="likely",
    ),
    Cause(
        "bitsandbytes-kernels",
        r"named symbol not found at line \d+ in file|at line \d+ in file \S{1,200}ops\.cu",
        "bitsandbytes' kernels fail: no code for this GPU in this release, an error of an earlier "
        "kernel, or GPUs of different archs",
        "pip install --upgrade bitsandbytes; CUDA_LAUNCH_BLOCKING=1; one kind of GPU (CUDA_VISIBLE_DEVICES)",
        "bitsandbytes 的 kernel 失败：该版本没有此 GPU 的代码、先前 kernel 出错，或 GPU 架构不一",
        "pip install --upgrade bitsandbytes；CUDA_LAUNCH_BLOCKING=1；只用同一种 GPU（CUDA_VISIBLE_DEVICES）",
        "https://huggingface.co/docs/bitsandbytes/main/en/errors",
        confidence="likely",
    ),
    Cause(
        "no-accelerator",
        r"Cannot access accelerator device when none is available|"
        r"is not linked with support for \w+ devices|Torch is not able to use GPU",
        "torch has no support for that device: a build for the CPU, or no GPU is visible",
        "python -c 'import torch; print(torch.__version__, torch.version.cuda, "
        "torch.cuda.is_available())'; a build of torch for this GPU (index URL of pytorch.org); "
        "CUDA_VISIBLE_DEVICES",
        "torch 不支持该设备：CPU 版，或 GPU 不可见",
        "python -c 'import torch; print(torch.__version__, torch.version.cuda, "
        "torch.cuda.is_available())'；安装面向该 GPU 的 torch；CUDA_VISIBLE_DEVICES",
        "https://pytorch.org/get-started/locally/",
        confidence="likely",
    ),
    Cause(
        "apt",
        r"E: Unable to locate package|E: Package '?\S{1,60}'? has no installation candidate|"
        r"NO_PUBKEY|E: Could not get lock|E: Unable to correct problems, you have held broken|"
        r"E: Failed to fetch|unmet dependencies",
        "apt cannot install: its lists are old, the repository or its key is missing (NVIDIA "
        "changed its key in 2022), another apt runs, or packages of two CUDA repositories do not "
        "go together",
        "apt-get update; NVIDIA: dpkg -i cuda-keyring_1.1-1_all.deb; wait for the other apt; "
        "remove the second CUDA repository in /etc/apt/sources.list.d",
        "apt 无法安装：列表过旧、缺少仓库或密钥（NVIDIA 2022 年更换密钥）、另一 apt 在运行，或两个 CUDA 仓库冲突",
        "apt-get update；NVIDIA：dpkg -i cuda-keyring_1.1-1_all.deb；等待另一 apt；删除 "
        "/etc/apt/sources.list.d 中重复的 CUDA 仓库",
        "https://docs.nvidia.com/cuda/cuda-installation-guide-linux/",
        confidence="likely",
    ),
    Cause(
        "driver-module",
        r"could not insert '?nvidia|Required key not available|nvidia-installer was unable|"
        r"Module nvidia not found|Nouveau kernel driver is currently|Bad return status for module build|"
        r"GPU access blocked by the operating system",
        "the NVIDIA kernel module does not load: Secure Boot, nouveau, no headers for this kernel, "
        "no GPU behind it, or (WSL) Windows's driver or policy blocks it",
        "mokutil --sb-state (sign the module or switch it off); blacklist nouveau; apt install "
        "linux-headers-$(uname -r) and reinstall the driver; dmesg | grep -i nvidia; WSL: update "
        "Windows's driver, run as the same user",
        "NVIDIA 内核模块未加载：Secure Boot、nouveau、缺少该内核的头文件、没有 GPU，或（WSL）Windows 驱动或策略阻止",
        "mokutil --sb-state（签名或关闭）；禁用 nouveau；apt install linux-headers-$(uname -r) "
        "后重装驱动；dmesg | grep -i nvidia；WSL：更新 Windows 驱动",
        "https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",
        confidence="likely",
    ),
    Cause(
        "git-lfs",
        r"smudge filter lfs failed|git-lfs: command not found|over its data quota|"
        r"git: 'lfs' is not a git command|git-lfs filter-process",
        "large files of the repository come through Git LFS, which is not installed or refused (quota)",
        "git lfs install && git lfs pull; GIT_LFS_SKIP_SMUDGE=1 git clone and then hf download or "
        "git lfs pull; the files from another place when the quota is used up",
        "仓库的大文件经 Git LFS 提供，而其未安装或被拒绝（配额）",
        "git lfs install && git lfs pull；GIT_LFS_SKIP_SMUDGE=1 git clone 后 hf download 或 git "
        "lfs pull；配额用尽时从别处获取",
        "https://git-lfs.com/",
    ),
    Cause(
        "git-transfer",
        r"RPC failed; |fetch-pack: unexpected disconnect|early EOF|GnuTLS recv error|"
        r"the remote end hung up unexpectedly|invalid index-pack output",
        "git's transfer was cut off: a slow or filtered connection, a proxy, or a large repository",
        "git clone --depth 1, then git fetch --unshallow; git config --global http.postBuffer "
        "524288000; http.version HTTP/1.1; another network or a mirror",
        "git 传输被中断：连接慢或被过滤、代理，或仓库很大",
        "git clone --depth 1，再 git fetch --unshallow；http.postBuffer 524288000；http.version HTTP/1.1；换网络或镜像",
        "https://git-scm.com/docs/git-config",
        confidence="likely",
    ),
    Cause(
        "resolver",
        r"No solution found when resolving|SolverProblemError|"
        r"because .{1,200}depends on .{1,200}version solving failed|"
        r"we can conclude that .{1,200}requirements are unsatisfiable|ResolutionTooDeep",
        "no set of releases satisfies all requirements: two of them exclude each other, or none "
        "has a wheel for this Python or platform",
        'the lines with "because" name the two; loosen one; another Python (uv venv -p 3.11); '
        "prereleases or an extra index only where they are meant",
        "没有满足所有依赖的版本组合：其中两者互斥，或没有适合该 Python、平台的 wheel",
        "“because” 的行指出两者；放宽其一；换 Python（uv venv -p 3.11）；必要时允许预发布或额外索引",
        "https://docs.astral.sh/uv/concepts/resolution/",
        confidence="likely",
    ),
    Cause(
        "other-framework-gpu",
        r"Could not load dynamic library 'lib\w+|Unable to initialize backend '(?:cuda|rocm|gpu)'|"
        r"Cannot dlopen some GPU libraries|Could not find cuda drivers on your machine|"
        r"TF-TRT Warning: Could not find TensorRT",
        "TensorFlow or JAX runs on the CPU: it does not find its CUDA libraries (that torch brings "
        "its own does not help it)",
        "pip install 'tensorflow[and-cuda]' or 'jax[cuda12]' in an environment of its own; without "
        "a GPU these lines are harmless",
        "TensorFlow 或 JAX 运行在 CPU 上：找不到其 CUDA 库（torch 自带的库对其无效）",
        "在单独环境中 pip install 'tensorflow[and-cuda]' 或 'jax[cuda12]'；无 GPU 时可忽略",
        "https://www.tensorflow.org/install/pip",
        confidence="likely",
    ),
    Cause(
        "tensorrt-version",
        r"serialized with (?:a )?(?:different|newer|older) |Version tag does not match|"
        r"The engine plan file is (?:not compatible|generated on an incompatible)|engine plan file",
        "the TensorRT engine was made by another TensorRT or for another GPU",
        "build the engine again on this machine",
        "TensorRT engine 由另一版本或为另一 GPU 生成",
        "在本机重新构建 engine",
        "https://docs.nvidia.com/deeplearning/tensorrt/latest/",
    ),
    Cause(
        "slurm-ended",
        r"CANCELLED AT .{0,40}DUE TO (?P<why>NODE FAILURE|PREEMPTION)",
        "Slurm ended the job: {why}",
        "--requeue, and checkpoints from which it goes on; after a node failure --exclude=NODE",
        "Slurm 结束了作业：{why}",
        "使用 --requeue 并从检查点继续；节点故障后 --exclude=节点",
        "https://slurm.schedmd.com/sbatch.html",
    ),
)
