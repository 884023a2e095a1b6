"""Containers, schedulers and modules of a cluster."""

from powertrain.doctor.causes.cause import Cause

CAUSES = (
    Cause(
        "container-runtime",
        r"[Uu]nknown (?:or invalid )?runtime (?:name|specified):? ?nvidia|exec: \W?nvidia-container-runtime|"
        r"unresolvable CDI devices|failed to inject CDI devices|invoking the NVIDIA Container Runtime Hook directly",
        "Docker (or Podman) does not know NVIDIA's runtime: nvidia-container-toolkit is not installed or not "
        "configured",
        "install nvidia-container-toolkit; sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl "
        "restart docker; CDI: sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        "Docker（或 Podman）不认识 NVIDIA 运行时：没有安装或配置 nvidia-container-toolkit",
        "安装 nvidia-container-toolkit；sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl "
        "restart docker；CDI：sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/troubleshooting.html",
    ),
    Cause(
        "container-toolkit",
        r"could not select device driver \"?\"? with capabilities: \[\[gpu\]\]|"
        r"failed to discover GPU vendor from CDI|unknown or invalid runtime name: nvidia|"
        r"unresolvable CDI devices nvidia\.com",
        "Docker cannot give GPUs to a container: nvidia-container-toolkit is not installed on the host, or "
        "Docker was not configured for it; the driver may be fine",
        "install nvidia-container-toolkit; sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl "
        "restart docker; nvidia-smi on the host shows whether the driver is there; without a GPU: no --gpus",
        "Docker 无法把 GPU 交给容器：主机没有安装 nvidia-container-toolkit，或没有为它配置 Docker；驱动可能正常",
        "安装 nvidia-container-toolkit；sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart "
        "docker；主机上 nvidia-smi 可看驱动是否存在；没有 GPU 时去掉 --gpus",
        "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html",
        confidence="likely",
    ),
    Cause(
        "pod-evicted",
        r"The node was low on resource: (?P<resource>[\w-]+)",
        "Kubernetes evicted the pod: the node ran low on {resource}",
        "requests and limits of {resource} for the pod (ephemeral-storage: the image's own disk, caches and emptyDir; "
        "put checkpoints and HF_HOME on a volume)",
        "Kubernetes 驱逐了该 pod：节点的 {resource} 不足",
        "为 pod 设置 {resource} 的 requests 和 limits（ephemeral-storage：镜像自身的磁盘、缓存和 emptyDir；"
        "检查点和 HF_HOME 放在卷上）",
        "https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/",
    ),
    Cause(
        "ci-runner-stopped",
        r"The runner has received a shutdown signal|"
        r"lost communication with the server\. Verify the machine is running",
        "the CI runner was stopped or died: most often memory or disk ran out, else a time limit or a cancelled job",
        "powertrain build -- <the same command>, or MAX_JOBS=1; df -h and free -g before the step; a larger runner",
        "CI runner 被停止或崩溃：多为内存或磁盘耗尽，否则是时间限制或作业被取消",
        "powertrain build -- <原命令>，或 MAX_JOBS=1；在该步骤前执行 df -h 和 free -g；使用更大的 runner",
        "https://docs.github.com/en/actions/reference/runners/github-hosted-runners",
        confidence="likely",
    ),
    Cause(
        "container-driver",
        r"unsatisfied condition: cuda ?[>=]+ ?(?P<cuda>[\d.]+\d)|"
        r"This container was built for NVIDIA Driver Release (?P<release>[\d.]+\d) or later",
        "the image's CUDA is newer than this host's driver supports",
        "an older tag of the image, or a newer driver on the host; NVIDIA_DISABLE_REQUIRE=1 only skips the check",
        "镜像的 CUDA 比主机驱动支持的版本新",
        "使用较旧的镜像标签，或升级主机驱动；NVIDIA_DISABLE_REQUIRE=1 只是跳过检查",
        "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/troubleshooting.html",
    ),
    Cause(
        "container-hook",
        r"nvidia-container-cli: \w[\w ]{0,30} error|nvidia-container-cli\.real: ",
        "NVIDIA's container hook could not bring the driver's files into the container; the end of the line says "
        "which",
        "nvidia-smi on the host; reboot after a driver update; reinstall nvidia-container-toolkit; in WSL update "
        "Windows's driver",
        "NVIDIA 容器钩子无法把驱动文件放入容器；行尾说明了是哪一个",
        "在主机上运行 nvidia-smi；更新驱动后重启；重装 nvidia-container-toolkit；WSL 中升级 Windows 驱动",
        "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/troubleshooting.html",
        confidence="likely",
    ),
    Cause(
        "docker-daemon",
        r"permission denied while trying to connect to the Docker daemon|Cannot connect to the Docker daemon",
        "Docker's daemon does not run here, or this user may not talk to it",
        "sudo systemctl start docker; sudo usermod -aG docker $USER and log in again; inside a container there is "
        "none",
        "Docker 守护进程未运行，或当前用户无权访问",
        "sudo systemctl start docker；sudo usermod -aG docker $USER 后重新登录；容器内没有守护进程",
        "https://docs.docker.com/engine/install/linux-postinstall/",
    ),
    Cause(
        "cpu-architecture",
        r"exec format error|Exec format error|does not match the detected host platform|cannot execute binary file",
        "a program or image is for another kind of CPU (x86-64 and ARM)",
        "the image or wheel for this machine: uname -m; docker run --platform linux/arm64 (or amd64)",
        "程序或镜像面向另一种 CPU（x86-64 与 ARM）",
        "使用适合本机的镜像或 wheel：uname -m；docker run --platform linux/arm64（或 amd64）",
        "https://docs.docker.com/build/building/multi-platform/",
    ),
    Cause(
        "singularity",
        r"Could not find any nv files on this host|FATAL:\s{1,9}(?:container creation failed|could not open image|"
        r"Unable to handle|While (?:making|checking|performing))",
        "Apptainer (Singularity) cannot start the container, or finds no NVIDIA libraries to bring in with --nv",
        "--nv on a node that has a GPU and its driver; enough room in APPTAINER_TMPDIR and APPTAINER_CACHEDIR",
        "Apptainer（Singularity）无法启动容器，或找不到 --nv 要带入的 NVIDIA 库",
        "在有 GPU 和驱动的节点上使用 --nv；APPTAINER_TMPDIR、APPTAINER_CACHEDIR 要有足够空间",
        "https://apptainer.org/docs/user/latest/gpu.html",
        confidence="likely",
    ),
    Cause(
        "environment-module",
        r"Lmod has detected the following error|Unable to locate a modulefile|\bmodule: command not found|"
        r"module\(s\) are unknown|conflicts with the currently loaded module",
        "the cluster's module command does not have the module, or not together with those loaded",
        "module spider <name>; module purge first; in scripts: bash -l, or source /etc/profile.d/modules.sh",
        "集群的 module 没有该模块，或与已加载的模块冲突",
        "module spider <名称>；先 module purge；脚本中用 bash -l，或 source /etc/profile.d/modules.sh",
        "https://lmod.readthedocs.io/en/latest/",
    ),
    Cause(
        "slurm-refused",
        r"Invalid (?:generic resource \(gres\)|account|partition|qos|feature) (?:specification|or|name)|"
        r"Requested node configuration is not available|Unable to satisfy cpu bind request|"
        r"Batch job submission failed|Unable to (?:allocate resources|create step)|invalid partition specified|"
        r"QOSMax\w+|AssocMax\w+",
        "Slurm refuses the request: partition, account, GPU or limit is not available to this user as it is written",
        "sinfo -o '%P %G %l'; sacctmgr show assoc user=$USER; fewer GPUs, CPUs, memory or hours",
        "Slurm 拒绝请求：分区、账号、GPU 或限额不可用",
        "sinfo -o '%P %G %l'；sacctmgr show assoc user=$USER；减少 GPU、CPU、内存或时间",
        "https://slurm.schedmd.com/sbatch.html",
    ),
    Cause(
        "mpi-launch",
        r"PMI2?X?_Init failed|OMPI was not built with SLURM|OPAL ERROR|not enough slots available|"
        r"attempt to run as root|ORTE has lost communication|ORTE was unable to|orted daemon|"
        r"An ORTE daemon has unexpectedly failed|Authorization required, but no authorization protocol",
        "MPI could not start its processes: PMI of the scheduler, number of slots, root, or a host that does not "
        "answer",
        "srun --mpi=pmix (srun --mpi=list); mpirun --oversubscribe, or more slots; --allow-run-as-root; ssh "
        "without a password; or torchrun instead",
        "MPI 无法启动进程：调度器的 PMI、slot 数、root，或主机无响应",
        "srun --mpi=pmix（srun --mpi=list）；mpirun --oversubscribe 或增加 slot；--allow-run-as-root；免密 ssh；"
        "或改用 torchrun",
        "https://docs.open-mpi.org/en/main/launching-apps/",
        confidence="likely",
    ),
    Cause(
        "mmap-refused",
        r"No such device \(os error 19\)|\[Errno 19\]",
        "the file system cannot map files into memory (FUSE, some network mounts), and safetensors and data sets do",
        "copy the file to a local disk; or mount with caching (gcsfuse, s3fs options)",
        "该文件系统不能把文件映射到内存（FUSE、某些网络挂载），而 safetensors 和数据集需要",
        "把文件复制到本地磁盘；或启用挂载的缓存选项",
        "https://github.com/zai-org/CogVideo/issues/455",
        confidence="likely",
    ),
)  # fmt: skip
