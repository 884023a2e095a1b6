"""Containers, Python, the operating system, and programs around training."""

from powertrain.doctor.causes.cause import Cause

CAUSES = (
    Cause(
        "docker-old",
        r"unknown flag: --gpus",
        "this Docker is older than 19.03, which brought --gpus",
        "a newer Docker and nvidia-container-toolkit; or docker run --runtime=nvidia with "
        "nvidia-docker2",
        "Docker 版本早于引入 --gpus 的 19.03",
        "升级 Docker 并安装 nvidia-container-toolkit；或用 nvidia-docker2 的 --runtime=nvidia",
        "https://docs.docker.com/engine/containers/resource_constraints/",
    ),
    Cause(
        "container-command",
        r"OCI runtime \w+ failed.{0,300}(?:executable file not found|no such file or directory|"
        r"permission denied)",
        "the command given after the image (or its entrypoint) does not exist in the image, or is "
        "no executable file",
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
        "there is no image of that name and tag (for this CPU), it is private, or its name is "
        "misspelled",
        "the tags on its registry's page; docker login; a space or capital letter in the name or "
        "in a -v path",
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
        "kubectl describe node | grep nvidia.com/gpu；安装 NVIDIA device plugin；减少 "
        "GPU；查看其他 pod",
        "https://kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus/",
    ),
    Cause(
        "python-syntax",
        r"future feature annotations is not defined|SyntaxError: (?:invalid syntax|expected ':'|"
        r"f-string: )|Missing parentheses in call to 'print'|IndentationError|TabError",
        "this Python does not take the line: it is too old for the source (match, :=, except*, "
        "quotes in f-strings), too new (print without parentheses), or the line is misspelled",
        "python --version; the Python that the project names (3.10 to 3.12 suit most); else the "
        "line the message points at, or the one before",
        "当前 Python 不接受该行：版本太旧（match、:=、except*、f-string 引号）、太新（print "
        "无括号），或该行有误",
        "python --version；使用项目要求的 Python（多为 3.10 至 3.12）；否则检查该行及其上一行",
        "https://docs.python.org/3/tutorial/errors.html",
        confidence="likely",
    ),
    Cause(
        "relative-import",
        r"attempted relative import (?:with no known parent|beyond top-level)",
        "a file of a package was started as a script",
        "python -m package.module from the folder above the package",
        "把包中的文件当作脚本启动",
        "在包的上级目录执行 python -m package.module",
        "https://docs.python.org/3/tutorial/modules.html",
    ),
    Cause(
        "recursion",
        r"RecursionError|maximum recursion depth exceeded",
        "a function calls itself without end: a module patched twice, a __getattr__ that asks for "
        "itself (before __init__, while unpickling), or a tokenizer whose unknown token is not set",
        "the repeating frames in the traceback name it; one release of transformers and tokenizers "
        "for both; do not patch twice",
        "函数无限递归：重复打补丁、__getattr__ 调用自身（__init__ "
        "之前或反序列化时），或分词器未设置 unk token",
        "traceback 中重复的帧即原因；统一 transformers 与 tokenizers 版本；不要重复打补丁",
        "https://docs.python.org/3/library/exceptions.html#RecursionError",
        confidence="likely",
    ),
    Cause(
        "numpy-binary",
        r"numpy\.(?:ndarray|ufunc) size changed|module compiled against A[PB]I version 0x",
        "a compiled module was built for a newer NumPy than the one that is loaded",
        "pip install --upgrade numpy within what the module allows (2.x for modules built with 2), "
        "or reinstall the module: pip install --force-reinstall --no-cache-dir; one NumPy only: "
        "pip list and conda list",
        "某个编译的模块面向比所加载更新的 NumPy",
        "在允许范围内 pip install --upgrade numpy，或重装该模块 pip install --force-reinstall "
        "--no-cache-dir；确保只有一个 NumPy",
        "https://numpy.org/doc/stable/user/troubleshooting-importerror.html",
    ),
    Cause(
        "urllib3-openssl",
        r"urllib3 v2(?:\.0)? only supports OpenSSL|X509_V_FLAG_\w+",
        "the TLS packages are of different times: urllib3 2 with an old OpenSSL, or pyOpenSSL "
        "older than cryptography",
        "pip install 'urllib3<2' for an old OpenSSL; pip install --upgrade pyOpenSSL cryptography",
        "TLS 相关包版本不一致：urllib3 2 与旧 OpenSSL，或 pyOpenSSL 早于 cryptography",
        "旧 OpenSSL：pip install 'urllib3<2'；pip install --upgrade pyOpenSSL cryptography",
        "https://urllib3.readthedocs.io/en/stable/v2-migration-guide.html",
    ),
    Cause(
        "thread-limit",
        r"can't start new thread|pthread_create failed|blas_thread_init|"
        r"fork: retry: Resource temporarily unavailable|BlockingIOError: \[Errno 11\]",
        "the limit of processes and threads of this user or container is reached",
        "OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1; fewer workers; ulimit -u; docker run "
        "--pids-limit=-1; TasksMax of the session",
        "达到该用户或容器的进程、线程上限",
        "OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1；减少 worker；ulimit -u；docker run "
        "--pids-limit=-1；会话的 TasksMax",
        "https://man7.org/linux/man-pages/man2/setrlimit.2.html",
    ),
    Cause(
        "connection-refused",
        r"\[Errno 111\]|Connection refused|\[WinError 10061\]|ECONNREFUSED",
        "nothing listens at that address: the server did not start or has ended, listens on "
        "another host or port (127.0.0.1 of another container), or a proxy variable leads elsewhere",
        "the server's own log for its first error; ss -ltnp; --host 0.0.0.0 in a container; unset "
        "http_proxy https_proxy for local addresses",
        "该地址没有服务监听：服务未启动或已退出、监听别的主机或端口（另一容器的 "
        "127.0.0.1），或代理变量指向别处",
        "查看服务日志的第一个错误；ss -ltnp；容器中 --host 0.0.0.0；本地地址取消 http_proxy "
        "https_proxy",
        "https://man7.org/linux/man-pages/man2/connect.2.html",
        confidence="likely",
    ),
    Cause(
        "name-resolution",
        r"Name or service not known|Temporary failure in name resolution|nodename nor servname|"
        r"getaddrinfo failed|gaierror",
        "a host name cannot be resolved: MASTER_ADDR is not known on this node, the container has "
        "no DNS, or there is no network",
        "getent hosts NAME on each node; an IP address as MASTER_ADDR; /etc/hosts; "
        "HF_HUB_OFFLINE=1 where there is no network",
        "无法解析主机名：该节点不认识 MASTER_ADDR、容器没有 DNS，或没有网络",
        "各节点 getent hosts 名称；MASTER_ADDR 用 IP；/etc/hosts；无网络时 HF_HUB_OFFLINE=1",
        "https://man7.org/linux/man-pages/man3/getaddrinfo.3.html",
        confidence="likely",
    ),
    Cause(
        "rank-race",
        r"Directory not empty: '[^']{0,200}|\[Errno 17\] File exists|\[Errno 39\]",
        "several ranks or runs make, rename or delete one folder at a time",
        "only rank 0 writes (save_on_each_node only for local disks), then a barrier; "
        "exist_ok=True; an output folder of its own for each run; a newer transformers",
        "多个 rank 或运行同时创建、重命名或删除同一目录",
        "只由 rank 0 写入（save_on_each_node 仅用于本地磁盘）后 "
        "barrier；exist_ok=True；每次运行使用各自的输出目录；升级 transformers",
        "https://github.com/huggingface/transformers/issues/27925",
        confidence="likely",
    ),
    Cause(
        "peer-closed",
        r"\[Errno 104\]|Connection reset by peer|\[Errno 32\] Broken pipe|EOFError: $|"
        r"Connection closed by peer",
        "the process at the other end of a connection ended; why stands in its own log",
        "the first error of the other ranks, workers or the server; dmesg for the out-of-memory "
        "killer",
        "连接另一端的进程已退出；原因在其日志中",
        "查看其他 rank、worker 或服务器的第一个错误；dmesg 查看 OOM killer",
        "https://man7.org/linux/man-pages/man3/errno.3.html",
        confidence="possible",
    ),
    Cause(
        "shared-memory-object",
        r"unable to open shared memory object|unable to mmap \d+ bytes from file|"
        r"unable to write to file </torch|Pin memory thread exited unexpectedly|shm_open",
        "shared memory (/dev/shm) is too small for what the data loader's workers hand over, or is "
        "not writable",
        "docker run --ipc=host or --shm-size=16g; num_workers=0 or fewer; "
        "torch.multiprocessing.set_sharing_strategy(\"file_system\"); df -h /dev/shm",
        "共享内存（/dev/shm）不足以供 DataLoader worker 传递数据，或不可写",
        "docker run --ipc=host 或 --shm-size=16g；减少 "
        "num_workers；torch.multiprocessing.set_sharing_strategy(\"file_system\")；df -h /dev/shm",
        "https://docs.pytorch.org/docs/stable/multiprocessing.html",
        confidence="likely",
    ),
    Cause(
        "save-failed",
        r"PytorchStreamWriter failed writing|inline_container\.cc:\d+\] .{0,40}(?:unexpected pos|"
        r"file write failed)|enforce fail at inline_container.{0,120}Writer",
        "a checkpoint could not be written whole: the disk or quota is full, the folder does not "
        "exist, or the process was stopped while saving",
        "df -h and quota -s at the output folder; fewer checkpoints (save_total_limit); delete the "
        "half-written file",
        "检查点没有完整写入：磁盘或配额已满、目录不存在，或保存时进程被终止",
        "在输出目录 df -h、quota -s；减少检查点（save_total_limit）；删除不完整的文件",
        "https://github.com/huggingface/setfit/issues/477",
        confidence="likely",
    ),
    Cause(
        "pickled-class",
        r"Can't get attribute '(?P<name>\w+)' on <module|AttributeError: Can't get attribute",
        "the pickled object's class {name} is not where it was when it was saved (a notebook, "
        "another script or release), or where a new process looks",
        "define or import {name} in the same module before loading; save state_dict() instead of "
        "the whole model; functions for workers in a file of their own",
        "被序列化对象的类 {name} 不在保存时的位置（notebook、另一脚本或版本），或新进程找不到",
        "加载前在同一模块定义或导入 {name}；保存 state_dict() 而非整个模型；worker 函数放入单独文件",
        "https://docs.python.org/3/library/pickle.html",
    ),
    Cause(
        "wandb",
        r"wandb\.errors|wandb: ERROR|api_key not configured|wandb: Network error",
        "Weights & Biases cannot log in or reach its server",
        "wandb login (or WANDB_API_KEY); WANDB_MODE=offline or report_to=\"none\"; pip install "
        "--upgrade wandb",
        "Weights & Biases 无法登录或连接其服务器",
        "wandb login（或 WANDB_API_KEY）；WANDB_MODE=offline 或 report_to=\"none\"；pip install "
        "--upgrade wandb",
        "https://docs.wandb.ai/",
        confidence="likely",
    ),
    Cause(
        "hub-transfer",
        r"'hf_transfer' (?:is enabled|package is not available)|outgoing traffic has been disabled|"
        r"HF_HUB_OFFLINE|offline mode is enabled",
        "the Hub library is told to be offline, or to use hf_transfer, which is not installed, and "
        "the file is not in the cache",
        "HF_HUB_OFFLINE=0 (TRANSFORMERS_OFFLINE, local_files_only too) and download once; "
        "HF_HUB_ENABLE_HF_TRANSFER=0 or pip install hf_transfer",
        "Hub 库被设为离线，或使用未安装的 hf_transfer，而文件不在缓存中",
        "HF_HUB_OFFLINE=0（以及 "
        "TRANSFORMERS_OFFLINE、local_files_only）后下载一次；HF_HUB_ENABLE_HF_TRANSFER=0 或 pip "
        "install hf_transfer",
        "https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables",
    ),
    Cause(
        "notebook-arguments",
        r"not used by the HfArgumentParser: \['-f'|unrecognized arguments: -f \S{0,200}(?:\.json|"
        r"jupyter)",
        "a script's argument parser runs in a notebook, whose kernel was started with -f FILE",
        "parser.parse_args([]) or parser.parse_dict({...}); or run the script with !python "
        "script.py",
        "在 notebook 中运行脚本的参数解析器，而 kernel 启动时带有 -f 文件",
        "parser.parse_args([]) 或 parser.parse_dict({...})；或用 !python script.py 运行",
        "https://github.com/huggingface/trl/issues/677",
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
        "this Triton cannot compile the kernel for this GPU: one before Ampere, or newer than "
        "Triton",
        "a newer Triton (with its torch) for a new GPU; before sm_80: no bf16 or fp8 and another "
        "backend (attn_implementation=\"sdpa\", TORCHDYNAMO_DISABLE=1)",
        "该 Triton 无法为此 GPU 编译 kernel：早于 Ampere，或比 Triton 新",
        "新 GPU 升级 Triton（及 torch）；sm_80 之前不用 "
        "bf16、fp8，并换后端（attn_implementation=\"sdpa\"、TORCHDYNAMO_DISABLE=1）",
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
        "离开源码目录；新环境中 pip install --force-reinstall vllm，使用其固定的 "
        "torch；其他设备设置 VLLM_TARGET_DEVICE",
        "https://docs.vllm.ai/en/latest/getting_started/installation/",
    ),
    Cause(
        "vllm-weights",
        r"Cannot find any model weights with",
        "the folder has no weight files that vLLM loads (*.safetensors, *.bin, *.pt): an adapter, "
        "GGUF, or an incomplete download",
        "ls it; hf download again; an adapter: --enable-lora with its base model; GGUF: the path "
        "of the file",
        "目录中没有 vLLM 可加载的权重（*.safetensors、*.bin、*.pt）：adapter、GGUF 或下载不完整",
        "检查目录；重新 hf download；adapter：--enable-lora 加基础模型；GGUF：给出文件路径",
        "https://docs.vllm.ai/en/latest/",
    ),
    Cause(
        "bitsandbytes-kernels",
        r"named symbol not found at line \d+ in file|at line \d+ in file \S{1,200}ops\.cu",
        "bitsandbytes' kernels fail: no code for this GPU in this release, an error of an earlier "
        "kernel, or GPUs of different archs",
        "pip install --upgrade bitsandbytes; CUDA_LAUNCH_BLOCKING=1; one kind of GPU "
        "(CUDA_VISIBLE_DEVICES)",
        "bitsandbytes 的 kernel 失败：该版本没有此 GPU 的代码、先前 kernel 出错，或 GPU 架构不一",
        "pip install --upgrade bitsandbytes；CUDA_LAUNCH_BLOCKING=1；只用同一种 "
        "GPU（CUDA_VISIBLE_DEVICES）",
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
        "unbound-local",
        r"UnboundLocalError: (?:local variable|cannot access local variable) '(?P<name>\w+)'",
        "{name} was never set: the loop or branch that sets it did not run (an empty data set, a "
        "condition that no case met)",
        "len() of the data loader; the branch above that line; resuming past the last step",
        "{name} 从未赋值：赋值它的循环或分支没有执行（空数据集、条件不满足）",
        "检查数据加载器的 len()；该行上方的分支；是否从最后一步之后继续",
        "https://docs.python.org/3/library/exceptions.html#UnboundLocalError",
        confidence="possible",
    ),
    Cause(
        "missing-key",
        r"^\s*KeyError: '?(?P<name>[\w./-]{1,80})'?\s*$",
        "{name} is not in the mapping that is asked for it: a config, state dict, batch or "
        "environment of another release or form",
        "the line above the message; print its keys; the releases of the program and of what wrote "
        "the file",
        "被查询的映射中没有 {name}：配置、state dict、batch 或环境属于另一版本或形式",
        "查看消息上一行；打印其键；核对程序与写文件者的版本",
        "https://docs.python.org/3/library/exceptions.html#KeyError",
        confidence="possible",
    ),
    Cause(
        "empty-sequence",
        r"IndexError: list index out of range|ZeroDivisionError: |max\(\) arg is an empty sequence|"
        r"arg is an empty sequence|expects a non-empty TensorList",
        "something that should have elements is empty: no file matched a pattern, no data was left "
        "after filtering, no parameter is trained",
        "the line above the message; print the length of what it indexes; paths and patterns of "
        "the data",
        "本应有元素的对象为空：没有匹配的文件、过滤后没有数据，或没有可训练参数",
        "查看消息上一行；打印被索引对象的长度；检查数据路径与模式",
        "https://docs.python.org/3/library/exceptions.html#IndexError",
        confidence="possible",
    ),
    Cause(
        "arguments-missing",
        r"error: the following arguments are required: (?P<arguments>[^\n]{1,200})",
        "the command line lacks {arguments}",
        "give {arguments}: with its dashes where it has them, else as a word by itself (vllm serve "
        "MODEL); the program with --help",
        "命令行缺少 {arguments}",
        "补上 {arguments}：有横线则带横线，否则直接写值（vllm serve MODEL）；用 --help 查看",
        "https://docs.python.org/3/library/argparse.html",
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
        "apt 无法安装：列表过旧、缺少仓库或密钥（NVIDIA 2022 年更换密钥）、另一 apt 在运行，或两个 "
        "CUDA 仓库冲突",
        "apt-get update；NVIDIA：dpkg -i cuda-keyring_1.1-1_all.deb；等待另一 apt；删除 "
        "/etc/apt/sources.list.d 中重复的 CUDA 仓库",
        "https://docs.nvidia.com/cuda/cuda-installation-guide-linux/",
        confidence="likely",
    ),
    Cause(
        "driver-module",
        r"could not insert '?nvidia|Required key not available|nvidia-installer was unable|"
        r"Module nvidia not found|Nouveau kernel driver is currently|DKMS.{0,40}(?:fail|error)|"
        r"GPU access blocked by the operating system",
        "the NVIDIA kernel module does not load: Secure Boot, nouveau, no headers for this kernel, "
        "no GPU behind it, or (WSL) Windows's driver or policy blocks it",
        "mokutil --sb-state (sign the module or switch it off); blacklist nouveau; apt install "
        "linux-headers-$(uname -r) and reinstall the driver; dmesg | grep -i nvidia; WSL: update "
        "Windows's driver, run as the same user",
        "NVIDIA 内核模块未加载：Secure Boot、nouveau、缺少该内核的头文件、没有 "
        "GPU，或（WSL）Windows 驱动或策略阻止",
        "mokutil --sb-state（签名或关闭）；禁用 nouveau；apt install linux-headers-$(uname -r) "
        "后重装驱动；dmesg | grep -i nvidia；WSL：更新 Windows 驱动",
        "https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",
        confidence="likely",
    ),
    Cause(
        "git-lfs",
        r"smudge filter lfs failed|git-lfs: command not found|over its data quota|"
        r"git: 'lfs' is not a git command|git-lfs filter-process",
        "large files of the repository come through Git LFS, which is not installed or refused "
        "(quota)",
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
        "git clone --depth 1，再 git fetch --unshallow；http.postBuffer 524288000；http.version "
        "HTTP/1.1；换网络或镜像",
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
        "the lines with \"because\" name the two; loosen one; another Python (uv venv -p 3.11); "
        "prereleases or an extra index only where they are meant",
        "没有满足所有依赖的版本组合：其中两者互斥，或没有适合该 Python、平台的 wheel",
        "“because” 的行指出两者；放宽其一；换 Python（uv venv -p 3.11）；必要时允许预发布或额外索引",
        "https://docs.astral.sh/uv/concepts/resolution/",
        confidence="likely",
    ),
    Cause(
        "process-start",
        r"daemonic processes are not allowed to have children|context has already been set|"
        r"signal only works in main thread|asyncio\.run\(\) cannot be called from a running|"
        r"event loop is already running",
        "a process, signal handler or event loop is started where there may be none: in a data "
        "loader's worker, a second time, in a thread, or in a notebook",
        "num_workers=0 inside workers; set_start_method(..., force=True) once under if __name__; "
        "start it in the main thread; nest_asyncio.apply() or await in a notebook",
        "在不允许处启动进程、信号处理或事件循环：DataLoader worker 中、第二次、线程中或 notebook 中",
        "worker 内 num_workers=0；在 if __name__ 下只调用一次 set_start_method(..., "
        "force=True)；在主线程启动；notebook 中 nest_asyncio.apply() 或 await",
        "https://docs.python.org/3/library/multiprocessing.html",
    ),
    Cause(
        "opencv",
        r"error: \(-215:Assertion failed\)|Rebuild the library with Windows, GTK",
        "OpenCV got an empty image (a wrong path, a video that ended) or, for windows, is the "
        "headless build",
        "check the path: cv2.imread returns None without a word; pip uninstall "
        "opencv-python-headless && pip install opencv-python for imshow",
        "OpenCV 得到空图像（路径错误、视频结束），或显示窗口时为 headless 版",
        "检查路径：cv2.imread 失败时只返回 None；imshow 需 pip uninstall opencv-python-headless && "
        "pip install opencv-python",
        "https://docs.opencv.org/4.x/",
        confidence="likely",
    ),
    Cause(
        "no-display",
        r"could not connect to display|Qt platform plugin|no display name and no \$DISPLAY|"
        r"cannot open display|libEGL|EGL_NOT_INITIALIZED|GLXBadFBConfig",
        "a window or an OpenGL context is wanted on a machine without a display",
        "matplotlib: MPLBACKEND=Agg; QT_QPA_PLATFORM=offscreen; xvfb-run; MUJOCO_GL=egl with "
        "NVIDIA_DRIVER_CAPABILITIES=all in a container",
        "在没有显示器的机器上需要窗口或 OpenGL",
        "matplotlib：MPLBACKEND=Agg；QT_QPA_PLATFORM=offscreen；xvfb-run；容器中 MUJOCO_GL=egl 且 "
        "NVIDIA_DRIVER_CAPABILITIES=all",
        "https://matplotlib.org/stable/users/explain/figure/backends.html",
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
        "kernel-died",
        r"[Kk]ernel (?:appears to have )?died|The kernel for .{1,80} appears to have died|"
        r"Kernel Restarting",
        "the notebook's process ended without an error of its own: most often no memory was left, "
        "or a library crashed",
        "dmesg | tail for the out-of-memory killer; the same code as a script shows the message; "
        "python -X faulthandler",
        "notebook 进程无提示退出：多为内存耗尽或库崩溃",
        "dmesg | tail 查看 OOM killer；以脚本运行可看到消息；python -X faulthandler",
        "https://docs.jupyter.org/",
        confidence="possible",
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
    Cause(
        "argument-without-value",
        r"argument (?P<option>-\S{1,80}): expected (?:one|at least one|\d+) arguments?",
        "{option} was given without its value: another option or the end of the line follows it, "
        "or the value begins with a dash",
        "the value right after it: {option}=VALUE (with = where it begins with a dash); an empty "
        "shell variable leaves nothing there: echo the command",
        "{option} 没有值：其后是另一选项或行尾，或值以横线开头",
        "紧跟其值：{option}=值（值以横线开头时用 =）；空的 shell 变量会导致此问题：先 echo 命令",
        "https://docs.python.org/3/library/argparse.html",
    ),
    Cause(
        "operation-not-supported",
        r"\[Errno 95\]|\[Errno 22\] Invalid argument: '/|\[Errno 524\]|\[Errno 45\]",
        "the file system under that folder cannot do it (sockets, locks, links, direct I/O): a "
        "Windows drive in WSL, a network or FUSE mount",
        "put temporary files, caches and checkpoints on a Linux disk: TMPDIR=/tmp, HF_HOME, "
        "TRITON_CACHE_DIR; in WSL under ~ and not /mnt/c",
        "该目录所在的文件系统不支持此操作（套接字、锁、链接、直接 I/O）：WSL 中的 Windows "
        "盘、网络或 FUSE 挂载",
        "临时文件、缓存和检查点放在 Linux 磁盘：TMPDIR=/tmp、HF_HOME、TRITON_CACHE_DIR；WSL 中放在 "
        "~ 而非 /mnt/c",
        "https://man7.org/linux/man-pages/man3/errno.3.html",
        confidence="likely",
    ),
    Cause(
        "no-terminal",
        r"OSError: \[Errno 6\] No such device or address|Inappropriate ioctl for device|"
        r"the input device is not a TTY|os\.getlogin",
        "the program asks for a terminal (os.getlogin, docker -t, a password), and there is none: "
        "a container, WSL, cron or a batch job",
        "getpass.getuser() or USER instead of os.getlogin(); docker run without -t; answers by "
        "options or environment variables",
        "程序需要终端（os.getlogin、docker -t、密码），而此处没有：容器、WSL、cron 或批处理作业",
        "用 getpass.getuser() 或 USER 代替 os.getlogin()；docker run 不加 "
        "-t；通过选项或环境变量提供输入",
        "https://docs.python.org/3/library/os.html#os.getlogin",
        confidence="likely",
    ),
    Cause(
        "path-limits",
        r"\[Errno 36\]|File name too long|\[Errno 7\] Argument list too long|"
        r"\[Errno 27\] File too large|\[Errno 40\]",
        "a name, a list of arguments or a file is larger than the system or file system allows",
        "shorter names (run name, cache folder); a file with the list instead of the command line; "
        "another file system for files over 4 GB (FAT)",
        "名称、参数列表或文件超过系统或文件系统的上限",
        "使用更短的名称（运行名、缓存目录）；用文件代替命令行列表；4 GB 以上文件换文件系统（FAT）",
        "https://man7.org/linux/man-pages/man3/errno.3.html",
    ),
    Cause(
        "undefined-name",
        r"\bname '(?P<name>\w{1,60})' is not defined",
        "{name} is used but was never imported or set: an optional package's import failed and was "
        "passed over, or the line that sets it did not run",
        "the first warning or ImportError above; pip install the package that has {name}; in a "
        "notebook run the earlier cells",
        "使用了 {name}，但从未导入或赋值：可选包导入失败被忽略，或赋值的行没有执行",
        "查看上方第一个警告或 ImportError；安装含有 {name} 的包；notebook 中先运行前面的单元",
        "https://docs.python.org/3/library/exceptions.html#NameError",
        confidence="possible",
    ),
    Cause(
        "unknown-value",
        r"(?:Error|Exception): (?:Invalid|Unknown|Unsupported|"
        r"Unrecognized) (?P<thing>[a-zA-Z][\w -]{2,40}?)(?: for\b|:|,| '|$)",
        "a setting has a value that the program does not know: {thing}",
        "look where {thing} is set: command line, config, environment variables (env | sort); the "
        "values that this release takes are in its documentation",
        "某项设置的值程序不认识：{thing}",
        "查看 {thing} 的来源：命令行、配置、环境变量（env | sort）；该版本可用的值见其文档",
        "https://docs.python.org/3/library/exceptions.html",
        confidence="possible",
    ),
)  # fmt: skip
