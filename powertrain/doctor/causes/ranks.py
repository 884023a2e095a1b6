"""Ranks: rendezvous, communication and termination."""

from powertrain.doctor.causes.cause import Cause

_TE = "https://github.com/NVIDIA/TransformerEngine/issues/"
_OVERLAP = "https://docs.pytorch.org/docs/stable/distributed.html"
_TORCH = "https://github.com/pytorch/pytorch/issues/"
_COMPILING = (
    r"Building extension module|PyTorch extensions root|compiling and loading fused kernels|torch\.compile|inductor|"
    r"[Aa]utotun|nvcc|ninja"
)

CAUSES = (
    Cause(
        "mpi-not-started",
        r"MPI_Comm_rank\(\) (?:function was )?called before MPI_INIT",
        "Userbuffers was built to start over MPI, and MPI_Init was not called: the job was not started by mpiexec, or "
        "initialize_ub came first",
        "start with mpiexec and import mpi4py.MPI before initialize_ub; or TransformerEngine 1.9 or newer built "
        "without NVTE_UB_WITH_MPI, with bootstrap_backend='gloo'. powertrain doctor --overlap prints the line",
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
    Cause(
        "peer-gone",
        r"PeerTimeout: rank \d+: (?P<call>.{1,200}?) cannot end: (?P<who>rank \d+ \(.{1,300}?\)) (?:is|are) gone",
        "{who} ended, and the others waited for it in: {call}",
        "the first error in that rank's own log is the cause (torchrun --log-dir DIR --redirects 3); where there is "
        "none: dmesg -T | grep -i 'killed process'",
        "{who} 已退出，其他 rank 在此调用中等待它：{call}",
        "原因是该 rank 自己日志中的第一个错误（torchrun --log-dir DIR --redirects 3）；若没有："
        "dmesg -T | grep -i 'killed process'",
        _OVERLAP,
    ),
    Cause(
        "calls-differ",
        r"CollectiveMismatch: ranks must make the same calls: (?P<one>rank 0 makes .{1,400}?); "
        r"(?P<other>rank \d+ makes .*)",
        "ranks ran different code paths. {one}; {other}",
        "make what differs in the two calls equal on all ranks: the batch's shape, the mask, the mode, a branch on the "
        "rank or on data; uneven rows go into rows= (powertrain.parallel.Overlap.exchange_rows gathers them)",
        "各 rank 的调用不同。{one}；{other}",
        "使两次调用中不同之处在所有 rank 上一致：batch 的形状、掩码、模式、依赖 rank 或数据的分支；行数不同时用 rows= "
        "（powertrain.parallel.Overlap.exchange_rows 收集）",
        _OVERLAP,
    ),
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
        r"^(?=.*ddress already in use).*failed to (?:bind to|listen on)|EADDRINUSE|(?:RuntimeError|\[Errno 98\]|"
        r"error):? Address already in use|bind: Address already in use|Only one usage of each socket address",
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
        "nccl-shm-transport",
        r"transport/shm\.cc:\d+ -> \d|include/shm\w*\.h:\d+ (?:NCCL WARN|-> \d)|"
        r"misc/shm\w*\.cc:\d+ (?:NCCL WARN|-> \d)|ncclShmOpen|posix_fallocate failed",
        "NCCL cannot make or open its shared memory: /dev/shm is too small or full (Docker gives a container 64 MiB), "
        "or the ranks do not share it (two containers, another user)",
        "docker run --shm-size=16g (or --ipc=host for all ranks of the host); rm /dev/shm/nccl-*; NCCL_SHM_DISABLE=1 "
        "shows whether it is that",
        "NCCL 无法创建或打开共享内存：/dev/shm 太小或已满（Docker 默认 64 MiB），或各 rank 不共享它（不同容器、"
        "不同用户）",
        "docker run --shm-size=16g（或同一主机的所有 rank 都用 --ipc=host）；rm /dev/shm/nccl-*；NCCL_SHM_DISABLE=1 "
        "可验证",
        "https://github.com/vllm-project/vllm/issues/1710",
        confidence="likely",
    ),
    Cause(
        "dataloader-shared-memory",
        r"killed by signal: Bus error|insufficient shared memory \(shm\)",
        "workers of the DataLoader hand batches over in /dev/shm, and it is full",
        "docker run --shm-size=16g (or --ipc=host), or fewer workers",
        "DataLoader 的工作进程通过 /dev/shm 传递数据，而它已满",
        "docker run --shm-size=16g（或 --ipc=host），或减少 workers",
        _TORCH + "5040",
        confidence="likely",
    ),
    Cause(
        "file-descriptors",
        r"received 0 items of ancdata|\[Errno 24\] Too many open files",
        "the process ran out of file descriptors; DataLoader workers hand each tensor over in one",
        "ulimit -n 65536, or torch.multiprocessing.set_sharing_strategy('file_system')",
        "进程用尽了文件描述符；DataLoader 的每个张量占用一个",
        "ulimit -n 65536，或 torch.multiprocessing.set_sharing_strategy('file_system')",
        _TORCH + "973",
        confidence="likely",
    ),
    Cause(
        "nccl-timeout-while-compiling",
        r"Watchdog caught collective operation timeout: \w+\(.*OpType=(?P<operation>\w+)",
        "some ranks waited in {operation} while another compiled for the first time, and NCCL gave up on it",
        "compile before the first collective, on every rank; or init_process_group(timeout=timedelta(hours=1)). If "
        "a build never ends: powertrain doctor --only builds. Powertrain's ranks wait at a store, not in NCCL",
        "一些 rank 在 {operation} 中等待，而另一个 rank 正在首次编译，NCCL 因超时放弃",
        "在第一次集合通信之前让所有 rank 完成编译；或 init_process_group(timeout=timedelta(hours=1))。若编译不结束"
        "：powertrain doctor --only builds",
        "https://github.com/NVIDIA/Megatron-LM/issues/82",
        also=_COMPILING,
        confidence="likely",
    ),
    Cause(
        "nccl-timeout",
        r"Watchdog caught collective operation timeout: \w+\(.*OpType=(?P<operation>\w+)",
        "one rank did not reach {operation}: it died, or the ranks run different code paths",
        "find the rank with the smallest last completed SeqNum, and read its log; TORCH_NCCL_TRACE_BUFFER_SIZE=2000 "
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1 writes the pending collective of each rank",
        "有 rank 没有进入 {operation}：它已退出，或各 rank 执行路径不同",
        "找到最后完成的 SeqNum 最小的 rank 并查看其日志；TORCH_NCCL_TRACE_BUFFER_SIZE=2000 "
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1 会记录各 rank 的位置",
        "https://github.com/vllm-project/vllm/issues/6042",
        confidence="likely",
    ),
    Cause(
        "process-group-missing",
        r"Default process group has not been initialized",
        "a collective was called before init_process_group, or after destroy_process_group",
        "torch.distributed.init_process_group() first, and start with torchrun",
        "在 init_process_group 之前或 destroy_process_group 之后调用了集合通信",
        "先调用 torch.distributed.init_process_group()，并用 torchrun 启动",
        "https://docs.pytorch.org/docs/stable/distributed.html",
    ),
    Cause(
        "rank-variables",
        r"environment variable (?P<name>RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_RANK) expected, but not set|"
        r"KeyError: '(?P<key>LOCAL_RANK|RANK|WORLD_SIZE)'",
        "the program was not started by torchrun (or srun, mpiexec), which sets the variables of a rank",
        "torchrun --standalone --nproc-per-node=N <the same program>",
        "程序不是由 torchrun（或 srun、mpiexec）启动，缺少 rank 的环境变量",
        "torchrun --standalone --nproc-per-node=N <原程序>",
        "https://docs.pytorch.org/docs/stable/elastic/run.html",
    ),
    Cause(
        "local-rank-argument",
        r"unrecognized arguments: --local[_-]rank",
        "the launcher passes --local-rank as an argument, and the program does not take it",
        "torchrun instead of python -m torch.distributed.launch, and os.environ['LOCAL_RANK'] in the program",
        "启动器以参数 --local-rank 传递，而程序不接受",
        "用 torchrun 代替 python -m torch.distributed.launch，程序中读取 os.environ['LOCAL_RANK']",
        "https://docs.pytorch.org/docs/stable/distributed.html#launch-utility",
    ),
    Cause(
        "deepspeed-no-launcher",
        r"No module named 'mpi4py'",
        "DeepSpeed was started without a launcher, so it asks MPI for the ranks, and mpi4py is not installed",
        "deepspeed program.py … or torchrun --standalone --nproc-per-node=1 program.py; or pip install mpi4py",
        "DeepSpeed 没有通过启动器运行，因此向 MPI 询问 rank，而 mpi4py 没有安装",
        "deepspeed program.py … 或 torchrun --standalone --nproc-per-node=1 program.py；或 pip install mpi4py",
        "https://github.com/deepspeedai/DeepSpeed/pull/8444",
        confidence="likely",
    ),
    Cause(
        "pdsh-missing",
        r"launcher '(?P<launcher>\w+)' not installed",
        "DeepSpeed starts several hosts with {launcher}, which is not installed",
        "apt install pdsh (or --launcher openmpi, --launcher slurm); powertrain doctor --hostfile FILE prints "
        "torchrun lines",
        "DeepSpeed 用 {launcher} 启动多台主机，但它没有安装",
        "apt install pdsh（或 --launcher openmpi、--launcher slurm）；powertrain doctor --hostfile FILE 给出 torchrun "
        "命令行",
        "https://github.com/stanford-crfm/mistral/issues/38",
    ),
    Cause(
        "ssh-login",
        r"Command '\W{0,2}ssh\b.{0,200} returned non-zero exit status 255|ssh: connect to host \S+ port \d+|"
        r"pdsh@\S+: \S+ ssh exited",
        "ssh cannot log in to a host of the hostfile without a password",
        "ssh -o BatchMode=yes HOST hostname; ssh-copy-id HOST (this host, too); the port in ~/.ssh/config; powertrain "
        "doctor --hostfile FILE tries each",
        "无法不用密码 ssh 登录 hostfile 中的某台主机",
        "ssh -o BatchMode=yes HOST hostname；ssh-copy-id HOST（包括本机）；端口写入 ~/.ssh/config；powertrain doctor "
        "--hostfile FILE 会逐台测试",
        "https://github.com/deepspeedai/DeepSpeed/issues/4907",
        confidence="likely",
    ),
    Cause(
        "nccl-algorithm",
        r"no algorithm/protocol available",
        "NCCL has no algorithm for this operation with the NCCL_ALGO or NCCL_PROTO that is set",
        "unset NCCL_ALGO NCCL_PROTO, or name several: NCCL_ALGO=Ring,Tree",
        "在所设的 NCCL_ALGO 或 NCCL_PROTO 下，NCCL 没有适合该操作的算法",
        "unset NCCL_ALGO NCCL_PROTO，或列出多个：NCCL_ALGO=Ring,Tree",
        "https://github.com/NVIDIA/nccl/issues/653",
    ),
    Cause(
        "nccl-not-built",
        r"Distributed package doesn't have NCCL built in",
        "this torch has no NCCL: a build for the CPU, for Windows or for a Mac",
        "a torch with CUDA (Linux), or backend='gloo'",
        "当前 torch 没有 NCCL：为 CPU、Windows 或 Mac 编译的版本",
        "安装带 CUDA 的 torch（Linux），或 backend='gloo'",
        "https://docs.pytorch.org/docs/stable/distributed.html",
    ),
    Cause(
        "store-timeout",
        r"retrieving ncclUniqueId|"
        r"wait timeout after \d+ ?ms|Socket Timeout|failed to recv, got 0 bytes",
        "a rank waited at the store for another that died, hangs, or never came",
        "look for the first error in the logs of the other ranks (torchrun --log-dir); a longer timeout= only if one "
        "of them is slow",
        "某个 rank 在 store 处等待另一个已退出、卡住或从未到达的 rank",
        "在其他 rank 的日志中查找第一个错误（torchrun --log-dir）；仅当某个 rank 较慢时才加大 timeout=",
        "https://docs.pytorch.org/docs/stable/distributed.html",
        confidence="likely",
    ),
    Cause(
        "nccl-interface",
        r"no socket interface found|No interface found (?:matching|starting|in the same)",
        "NCCL finds no network interface with the given names",
        "ip -br addr; NCCL_SOCKET_IFNAME=<an interface that is there>, or unset it",
        "NCCL 找不到指定名称的网络接口",
        "ip -br addr；NCCL_SOCKET_IFNAME=<存在的接口>，或取消该设置",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
    ),
    Cause(
        "nccl-memlock",
        r"ibv_reg_mr\w* failed with error Cannot allocate memory",
        "InfiniBand may not lock enough memory: the limit of locked memory is low",
        "ulimit -l unlimited (docker run --ulimit memlock=-1); powertrain doctor --only ulimits",
        "InfiniBand 无法锁定足够的内存：锁定内存的上限太低",
        "ulimit -l unlimited（docker run --ulimit memlock=-1）；powertrain doctor --only ulimits",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
    ),
    Cause(
        "nccl-infiniband",
        r"NET/IB ?: Got completion from peer \S+ with (?:status=|error )\d+|ibv_modify_qp\w* failed|"
        r"ibv_\w{2,40} failed|NET/IB ?: Async fatal event|NET/IB ?: Got async event ?: (?:port error|local)|"
        r"NET/IB ?: Unable to open device",
        "InfiniBand or RoCE: the peer did not answer, or is not reached with this device or GID (link, GID index, MTU)",
        "ibstat and ib_write_bw between the hosts; NCCL_IB_HCA, NCCL_IB_GID_INDEX=3 (RoCE v2), NCCL_IB_TIMEOUT=22; "
        "NCCL_IB_DISABLE=1 shows whether it is this",
        "InfiniBand 或 RoCE：对端没有响应，或无法用该设备、GID 到达（链路、GID index、MTU）",
        "主机间 ibstat、ib_write_bw；NCCL_IB_HCA、NCCL_IB_GID_INDEX=3（RoCE v2）、NCCL_IB_TIMEOUT=22；"
        "NCCL_IB_DISABLE=1 可确认是否与此有关",
        "https://github.com/tatsu-lab/stanford_alpaca/issues/207",
        confidence="likely",
    ),
    Cause(
        "nccl-unreachable",
        r"[Cc]onnect to (?P<peer>\S+) (?:failed|returned) ?:? ?(?:No route to host|Connection refused|"
        r"Connection timed out|"
        r"Network is unreachable|Software caused connection abort)|Call to connect (?:to \S+ )?(?:returned|failed "
        r"with error) ?:? ?(?:No route|"
        r"Connection refused|"
        r"Connection timed out|Network is unreachable)",
        "NCCL chose a network interface that does not reach the other host, or a firewall closes its ports",
        "NCCL_SOCKET_IFNAME=<the interface that both hosts share> (not docker0, lo or virbr0); open the ports between "
        "the hosts; powertrain doctor --hostfile FILE",
        "NCCL 选择的网络接口无法到达另一台主机，或防火墙关闭了端口",
        "NCCL_SOCKET_IFNAME=<两台主机共有的接口>（不是 docker0、lo、virbr0）；开放主机间的端口；"
        "powertrain doctor --hostfile FILE",
        "https://github.com/hkproj/pytorch-transformer-distributed/issues/1",
        confidence="likely",
    ),
    Cause(
        "master-unreachable",
        r"client socket has (?:timed out|failed to connect)|failed to connect to any network address|"
        r"Rendezvous(?:Connection|Timeout)Error|connect\(\) timed out|cannot be retrieved \(gai error",
        "a rank does not reach rank 0: MASTER_ADDR is wrong, rank 0 does not run (yet), or its port is closed",
        "an address of rank 0 that the others reach; the same --rdzv-endpoint or --master-addr everywhere; open the "
        "port; powertrain doctor --hostfile FILE tries it",
        "某个 rank 无法连接 rank 0：MASTER_ADDR 错误、rank 0 未运行，或端口关闭",
        "使用其他主机能到达的 rank 0 地址；各处 --rdzv-endpoint 或 --master-addr 相同；开放端口；"
        "powertrain doctor --hostfile FILE 会测试",
        "https://github.com/hpcaitech/ColossalAI/issues/3155",
        confidence="likely",
    ),
    Cause(
        "nccl-mismatch",
        r"Message truncated : received \d+ bytes instead of \d+|[Mm]ismatch(?:ed)? NCCL version",
        "ranks disagree: different collectives or sizes, or different versions of NCCL",
        "the same code, data shapes and NCCL everywhere (powertrain doctor --hostfile FILE compares versions); "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names the collective",
        "各 rank 不一致：集合通信或大小不同，或 NCCL 版本不同",
        "各处使用相同的代码、数据形状和 NCCL（powertrain doctor --hostfile FILE 比较版本）；"
        "TORCH_DISTRIBUTED_DEBUG=DETAIL 指出集合通信",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        confidence="likely",
    ),
    Cause(
        "fork-cuda",
        r"Cannot re-initialize CUDA in forked subprocess|can't create new processes if CUDA is already",
        "CUDA was used before a process forked, and cannot be used in its children",
        "start method spawn (mp.set_start_method('spawn'), VLLM_WORKER_MULTIPROCESSING_METHOD=spawn), or touch CUDA "
        "only in the children",
        "进程在 fork 之前使用了 CUDA，子进程无法再使用",
        "使用 spawn（mp.set_start_method('spawn')，VLLM_WORKER_MULTIPROCESSING_METHOD=spawn），或只在子进程中使用 CUDA",
        "https://docs.pytorch.org/docs/stable/notes/multiprocessing.html",
    ),
    Cause(
        "host-memory",
        r"Out of memory: Kill(?:ed)? process|\bOOMKilled\b|\bKilled process \d+ \(|"
        r"oom[-_]kill event|Detected \d+ oom[-_]kill|DefaultCPUAllocator: (?:can't|"
        r"not enough)|"
        r"\[Errno 12\] Cannot allocate memory|unable to mmap \d+ bytes|killed by signal: Killed|\bMemoryError\b|"
        r"std::bad_alloc|"
        r"ArrayMemoryError|Memory mapping file failed: Cannot allocate",
        "the host's memory (not the GPU's) ran out",
        "free -g; fewer DataLoader workers and processes, low_cpu_mem_usage=True, no offload to the CPU, a larger "
        "--mem of the job; vm.overcommit_memory=1 for mmap",
        "主机内存（不是显存）耗尽",
        "free -g；减少 DataLoader 进程，low_cpu_mem_usage=True，不要卸载到 CPU，作业申请更多 --mem；mmap 可设 "
        "vm.overcommit_memory=1",
        "https://github.com/facebookresearch/CollaQ/issues/13",
    ),
    Cause(
        "process-killed",
        r"exits with return code = -9\b|exitcode ?:? ?-9\b|exitcode\s{1,9}: -9\b|Signal 9 \(SIGKILL\)|"
        r"died with <Signals\.SIGKILL|"
        r"exit code:? 137\b|^(?:\S{1,80}: line \d+:\s{1,9})?\d{0,9}\s{0,9}Killed\b",
        "it was killed with SIGKILL: nearly always because the host's memory ran out (loading a checkpoint in every "
        "rank, offload, DataLoader workers)",
        "dmesg -T | grep -i 'killed process' confirms it; less host memory: low_cpu_mem_usage=True, fewer workers, no "
        "CPU offload; a larger --mem of the job or container",
        "被 SIGKILL 杀死：几乎总是主机内存耗尽（每个 rank 加载权重、卸载到 CPU、DataLoader 进程）",
        "dmesg -T | grep -i 'killed process' 可确认；减少主机内存：low_cpu_mem_usage=True，减少 workers，不卸载到 CPU；"
        "作业或容器申请更多内存",
        "https://github.com/deepspeedai/DeepSpeed/issues/3232",
        confidence="likely",
    ),
    Cause(
        "bus-error",
        r"(?:exitcode\s{0,9}:?|return code =) ?-7\b|Signal 7 \(SIGBUS\)|Bus error \(core dumped\)",
        "SIGBUS: /dev/shm is full or too small, or a mapped file was cut short",
        "docker run --shm-size=16g (or --ipc=host); powertrain doctor --only shared-memory --only disk",
        "SIGBUS：/dev/shm 已满或太小，或映射的文件被截短",
        "docker run --shm-size=16g（或 --ipc=host）；powertrain doctor --only shared-memory",
        _TORCH + "5040",
        confidence="likely",
    ),
    Cause(
        "illegal-instruction",
        r"Illegal instruction|SIGILL\b",
        "a library was compiled for instructions (AVX2, AVX-512) that this CPU does not have",
        "lscpu | grep Flags; an older or plainer build of the library, or build it on this machine",
        "某个库是为具有更多指令（AVX2、AVX-512）的 CPU 编译的",
        "lscpu | grep Flags；使用较旧或通用的版本，或在本机编译",
        "https://github.com/leoxiaobin/deep-high-resolution-net.pytorch/issues/150",
        confidence="likely",
    ),
    Cause(
        "hang-up",
        r"got signal: 1\b|Received (?:\w+ )?signal 1\b|SIGHUP\b",
        "the terminal or ssh session that started it was closed (SIGHUP)",
        "run it in tmux, or with nohup and setsid, or as a job of the scheduler",
        "启动它的终端或 ssh 会话已关闭（SIGHUP）",
        "在 tmux 中运行，或用 nohup、setsid，或提交给调度器",
        "https://docs.pytorch.org/docs/stable/elastic/run.html",
        confidence="likely",
    ),
    Cause(
        "time-limit",
        r"CANCELLED AT \S+ DUE TO TIME LIMIT|DUE TO TIME LIMIT",
        "the job reached the time limit of the scheduler",
        "a longer --time, or save and resume: checkpoints before the limit (#SBATCH --signal=TERM@120)",
        "作业达到调度器的时间上限",
        "延长 --time，或保存并续训：在到期前保存检查点（#SBATCH --signal=TERM@120）",
        "https://slurm.schedmd.com/sbatch.html",
    ),
    Cause(
        "ddp-unused",
        r"Expected to have finished reduction in the prior iteration",
        "some parameters got no gradient in this step, and DDP waits for each",
        "use every parameter in the loss or freeze those that are not used; find_unused_parameters=True if it depends "
        "on the batch",
        "本步中有参数没有梯度，而 DDP 会等待每一个",
        "让每个参数参与 loss，或冻结不用的参数；若随 batch 而变：find_unused_parameters=True",
        "https://github.com/songhaoyu/BoB/issues/11",
    ),
    Cause(
        "nccl-peer-gone",
        r"Connection closed by (?:remote )?peer|Some NCCL operations have failed or timed out|"
        r"NCCL communicator was aborted|Heartbeat monitor timed out|"
        r"remote process exited or there was a network error|ncclRemoteError|"
        r"Broken pipe\. This may indicate a possible application crash on rank|Connection reset by peer",
        "another rank or host ended first, or the network between them failed: this line is the consequence",
        "look for the first error in the logs of the other ranks (torchrun --log-dir); NCCL_DEBUG=INFO if none has one",
        "另一个 rank 或主机先结束，或网络中断：这一行是其后果",
        "在其他 rank 的日志中查找第一个错误（torchrun --log-dir）；若都没有：NCCL_DEBUG=INFO",
        "https://github.com/NVIDIA/nccl/issues/1232",
        also=r"NCCL|nccl|ProcessGroup|TCPStore|c10d|[Gg]loo",
        confidence="possible",
    ),
    Cause(
        "nccl-cuda-error",
        r"Cuda failure \d{0,4} ?'(?P<what>[^']{1,80})'|ncclUnhandledCudaError|unhandled cuda error",
        "a CUDA call inside NCCL failed; NCCL does not say why: a driver that is too old for it, P2P that does not "
        "work, or memory",
        "NCCL_DEBUG=INFO <the same command>: the WARN line before it; NCCL_P2P_DISABLE=1 or NCCL_CUMEM_ENABLE=0 to "
        "see whether it is that; powertrain doctor",
        "NCCL 内部的 CUDA 调用失败，NCCL 没有说明原因：驱动太旧、P2P 不可用，或显存不足",
        "NCCL_DEBUG=INFO <原命令>：查看之前的 WARN 行；用 NCCL_P2P_DISABLE=1 或 NCCL_CUMEM_ENABLE=0 试验；powertrain "
        "doctor",
        "https://github.com/NVIDIA/nccl/issues/1410",
        confidence="possible",
    ),
    Cause(
        "nccl-system-error",
        r"ncclSystemError|unhandled system error|ncclInternalError|ncclInvalidUsage",
        "NCCL stopped; this line does not give the reason. Possible ones: network interface, /dev/shm, two ranks on "
        "one GPU, or different versions",
        "in a container first --ipc=host or --shm-size=16g; else NCCL_DEBUG=INFO <the same command>, and give that log "
        "to powertrain diagnose",
        "NCCL 停止，这一行没有说明原因：网络接口、/dev/shm、两个 rank 使用同一 GPU，或版本不同",
        "容器中先试 --ipc=host 或 --shm-size=16g；否则 NCCL_DEBUG=INFO <原命令>，再把日志交给 powertrain diagnose",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        confidence="possible",
    ),
    Cause(
        "segmentation-fault",
        r"double free or corruption|free\(\): invalid|malloc\(\): |corrupted (?:size|double-linked)|munmap_chunk\(\)|"
        r"Segmentation fault|Signal 11 \(SIGSEGV\)|exitcode\s{0,9}:? ?-11\b|return code = -11\b|SIGSEGV\b",
        "a compiled library crashed: two versions of one library, or an extension that does not fit the torch, are "
        "the most frequent",
        "python -X faulthandler <the same program> names the call; powertrain doctor --only symbols --only twice",
        "某个编译的库崩溃：最常见的是同一库有两个版本，或扩展与 torch 不匹配",
        "python -X faulthandler <原程序> 显示调用位置；powertrain doctor --only symbols",
        "https://github.com/NVIDIA/Megatron-LM/issues/1880",
        confidence="possible",
    ),
)  # fmt: skip
