"""Processes that do not start together, or disagree."""

from powertrain.doctor.causes.cause import Cause

CAUSES = (
    Cause(
        "collective-device",
        r"Tensors must be CUDA and dense|No backend type associated with device type (?P<device>\w+)|"
        r"does not support (?:device )?CPU tensors",
        "a collective got a tensor on a device that its group's backend does not serve: NCCL takes GPU tensors, "
        "gloo CPU tensors",
        "init_process_group(\"cpu:gloo,cuda:nccl\"); move the tensor to the GPU of the rank first",
        "集合通信的张量所在设备不被其后端支持：NCCL 用 GPU 张量，gloo 用 CPU 张量",
        "init_process_group(\"cpu:gloo,cuda:nccl\")；先把张量移到该 rank 的 GPU",
        "https://docs.pytorch.org/docs/stable/distributed.html",
    ),
    Cause(
        "store-unreachable",
        r"(?:RuntimeError|ConnectionError|DistNetworkError|TimeoutError): (?:\[Errno \d+\] )?(?P<why>Connection timed "
        r"out|Connection refused|No route to host|Network is unreachable|Interrupted system call|Broken pipe)",
        "the ranks do not meet: this one does not reach rank 0's store ({why}): MASTER_ADDR or MASTER_PORT is wrong, "
        "rank "
        "0 does not run there, or a firewall closes the port",
        "MASTER_ADDR an address of rank 0's host that the others reach (ping, nc -zv ADDR PORT; not localhost, no "
        "leading "
        "zeros in its numbers), one MASTER_PORT everywhere and open; WORLD_SIZE and RANK that fit; powertrain doctor "
        "--hostfile FILE",
        "各 rank 无法会合：该 rank 连不上 rank 0 的 store（{why}）：MASTER_ADDR 或 MASTER_PORT 错误、rank 0 "
        "未在那里运行，"
        "或防火墙关闭端口",
        "MASTER_ADDR 用其他主机能到达的 rank 0 地址（ping、nc -zv ADDR PORT；不是 localhost，数字不带前导零），"
        "各处 MASTER_PORT 相同且开放；WORLD_SIZE、RANK 正确；powertrain doctor --hostfile FILE",
        "https://github.com/huggingface/transformers/issues/1795",
        also=r"TCPStore\(|rendezvous|init_process_group|init_distributed",
        confidence="likely",
    ),
    Cause(
        "store-protocol",
        r"Stop_waiting response is expected|Ping failed, invalid nonce|invalid (?:nonce|magic) returned|"
        r"TCPStore.{0,60}(?:unexpected|invalid) (?:response|query|magic)",
        "the server at MASTER_ADDR:MASTER_PORT is not the store of this job: another job or service has that port, "
        "or "
        "the ranks run different releases of torch",
        "another, free MASTER_PORT, the same everywhere; end earlier processes (ss -ltnp shows who listens); one "
        "release of "
        "torch on all hosts",
        "MASTER_ADDR:MASTER_PORT 上应答的不是本作业的 store：端口被其他作业或服务占用，或各 rank 的 torch 版本不同",
        "换一个空闲的 MASTER_PORT，各处相同；结束此前的进程（ss -ltnp 查看）；所有主机使用同一 torch 版本",
        "https://github.com/pytorch/pytorch/issues/114357",
        confidence="likely",
    ),
    Cause(
        "nccl-proxy",
        r"Proxy Call to rank (?P<rank>\d+) failed",
        "NCCL could not set up the connection on rank {rank}'s side: that rank ended, or its transport failed there "
        "(GPU "
        "peer access, /dev/shm, InfiniBand, sockets)",
        "the log of rank {rank} with NCCL_DEBUG=INFO: its first WARN is the cause; in a container --ipc=host "
        "--shm-size=16g; NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1 or NCCL_SHM_DISABLE=1 shows which transport",
        "NCCL 无法在 rank {rank} 一侧建立连接：该 rank 已退出，或其传输失败（GPU 互访、/dev/shm、InfiniBand、套接字）",
        "以 NCCL_DEBUG=INFO 查看 rank {rank} 的日志：第一个 WARN 即原因；容器中使用 --ipc=host --shm-size=16g；用 "
        "NCCL_P2P_DISABLE=1、NCCL_IB_DISABLE=1 或 NCCL_SHM_DISABLE=1 判断是哪种传输",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        confidence="likely",
    ),
    Cause(
        "collective-mismatch",
        r"Detected mismatch between collectives|Mismatched collective|op\.preamble\.length <= op\.nbytes|"
        r"ranks are running different collectives|appears not to match|Mismatched? (?:sizes|shapes) across ranks",
        "ranks called different collectives, or the same one with different shapes",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names both; look for branches on the rank or on data, and batches of "
        "unequal number",
        "各 rank 调用了不同的集合通信，或形状不同",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL 会列出双方；检查依赖 rank 或数据的分支，以及数量不等的 batch",
        "https://docs.pytorch.org/docs/stable/distributed.html",
    ),
    Cause(
        "gloo-address",
        r"gloo connectFullMesh failed|Gloo connectFullMesh failed|makeDeviceForHostname\(\)|"
        r"makeDeviceForInterface\(\)|unable to resolve hostname to a \(local\) address|Unable to find address for|"
        r"connect \[(?:127\.|::1)\S{0,40}: Connection refused",
        "gloo finds no address of this host that the others can reach: its name resolves to nothing, or to "
        "127.0.0.1",
        "GLOO_SOCKET_IFNAME=eth0 (ip addr shows the names); the host's real address in /etc/hosts",
        "gloo 找不到其他主机可达的本机地址：主机名无法解析或解析为 127.0.0.1",
        "GLOO_SOCKET_IFNAME=eth0（ip addr 查看）；在 /etc/hosts 中写入真实地址",
        "https://docs.pytorch.org/docs/stable/distributed.html#common-environment-variables",
    ),
    Cause(
        "nccl-p2p",
        r"cudaIpcOpenMemHandle|failed to open CUDA IPC|[Cc]ould not enable P2P|"
        r"ncclP2pImportShareableBuffer|pidfd_getfd|cuMemImportFromShareableHandle",
        "ranks of one host cannot share GPU memory: P2P is off (IOMMU, container, another user's namespace), or "
        "/dev/shm is full",
        "docker run --ipc=host --shm-size=16g; NCCL_P2P_DISABLE=1 or NCCL_CUMEM_ENABLE=0 shows whether it is that; "
        "nvidia-smi topo -p2p r",
        "同一主机的 rank 无法共享显存：P2P 不可用（IOMMU、容器、命名空间），或 /dev/shm 已满",
        "docker run --ipc=host --shm-size=16g；用 NCCL_P2P_DISABLE=1 或 NCCL_CUMEM_ENABLE=0 验证；nvidia-smi topo "
        "-p2p r",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        confidence="likely",
    ),
    Cause(
        "nccl-nvls",
        r"transport/nvls\.cc|NVLS (?:multicast|bind|group)|cuMulticast\w+|Failed to bind NVLink SHARP",
        "NVLink SHARP (multicast) does not work here: the fabric manager, a part of the GPUs, or a virtual machine",
        "NCCL_NVLS_ENABLE=0; systemctl status nvidia-fabricmanager; reboot after a driver update",
        "NVLink SHARP（multicast）在此无法工作：fabric manager、只用部分 GPU，或虚拟机",
        "NCCL_NVLS_ENABLE=0；systemctl status nvidia-fabricmanager；更新驱动后重启",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        confidence="likely",
    ),
    Cause(
        "parallel-sizes",
        r"world[ _]size\W{0,3}\(?\d{0,6}\)? ?is not divisible|not divisible by (?:\(?tensor|pipeline|context|model|"
        r"data)|must be divisible by (?:tensor|pipeline|model|the (?:tensor|number))|[Ii]nvalid (?:mesh|"
        r"device mesh)|Mesh should not be bigger than default world size",
        "the parallel sizes do not fit the number of ranks, heads or layers",
        "tensor * pipeline * context * data = ranks; heads and key heads divisible by the tensor size, layers by "
        "the pipeline's",
        "并行大小与 rank 数、head 数或层数不匹配",
        "tensor × pipeline × context × data = rank 数；head 与 key head 能被 tensor 大小整除，层数能被 pipeline "
        "整除",
        "https://docs.pytorch.org/docs/stable/distributed.tensor.html",
    ),
    Cause(
        "max-connections",
        r"CUDA_DEVICE_MAX_CONNECTIONS\W? (?:environment variable )?(?:must be|should be|to) |"
        r"set (?:the environment variable )?CUDA_DEVICE_MAX_CONNECTIONS",
        "Megatron's sequence parallelism needs CUDA_DEVICE_MAX_CONNECTIONS=1, so that the collective is launched "
        "before the product",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1 (on Blackwell and newer, as the message says)",
        "Megatron 的序列并行要求 CUDA_DEVICE_MAX_CONNECTIONS=1，使通信先于矩阵乘启动",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1（Blackwell 及更新按消息设置）",
        "https://github.com/NVIDIA/Megatron-LM",
    ),
    Cause(
        "main-guard",
        r"before the current process has finished its bootstrapping phase",
        "the program starts processes when it is imported, and each of them imports it again",
        "put the start into if __name__ == \"__main__\":",
        "程序在导入时启动进程，而每个子进程又会导入它",
        "将启动代码放入 if __name__ == \"__main__\":",
        "https://docs.python.org/3/library/multiprocessing.html#the-spawn-and-forkserver-start-methods",
    ),
    Cause(
        "pickle-spawn",
        r"can't pickle \S{1,80} object|popen_spawn_\w+\.py|reduction\.pickle\.load\(from_parent\)|"
        r"Can't pickle local object|cannot pickle '(?P<what>[^']{1,80})'|Can't get local object|Can't pickle <",
        "an object passed to another process (a data set, a collate function, a model) contains one that cannot "
        "be pickled: a lambda, an inner function, a lock, a generator",
        "a function at the top of a module instead of a lambda; num_workers=0 shows whether it is that; open files "
        "and clients in the worker",
        "传给另一进程的对象（数据集、collate 函数、模型）中有无法序列化的内容：lambda、内部函数、锁、生成器",
        "用模块顶层函数代替 lambda；num_workers=0 可验证；在 worker 中打开文件和客户端",
        "https://docs.python.org/3/library/pickle.html",
    ),
    Cause(
        "dataloader-worker",
        r"DataLoader worker \(pid\(?s?\)?:? [\d, ]+\)",
        "a worker of the DataLoader ended; its own reason (memory, /dev/shm, an error in the data set) is not on "
        "this line",
        "num_workers=0 shows the error itself; free memory and /dev/shm: powertrain doctor --only shared-memory "
        "--only container",
        "DataLoader 的某个 worker 退出；该行没有其原因（内存、/dev/shm、数据集错误）",
        "num_workers=0 可显示错误本身；检查内存与 /dev/shm：powertrain doctor --only shared-memory",
        "https://docs.pytorch.org/docs/stable/data.html",
        confidence="possible",
    ),
    Cause(
        "ray-resources",
        r"Current node has no GPU available|Cannot provide a placement group|node running low on memory|"
        r"No available node types can fulfill|The current node timed out during startup|"
        r"The actor died because its (?:node|owner) has died",
        "Ray does not have the GPUs or memory that were requested, or its worker was ended for memory",
        "ray status; ray stop --force and start again with all GPUs visible; fewer workers, or "
        "RAY_memory_usage_threshold",
        "Ray 没有所需的 GPU 或内存，或其 worker 因内存被终止",
        "ray status；ray stop --force 后在所有 GPU 可见时重启；减少 worker，或 RAY_memory_usage_threshold",
        "https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html",
        confidence="likely",
    ),
    Cause(
        "rendezvous-lost",
        r"has failed to (?:shutdown the rendezvous|send a keep-alive heartbeat)|RendezvousClosedError|"
        r"RendezvousGracefulExitError",
        "the rendezvous of the job ended before this node: the node that held it ended, or two jobs share its port "
        "or id",
        "another --rdzv-id and port for each job on one host (or --standalone); the first error of the node that "
        "ended",
        "作业的 rendezvous 先于本节点结束：持有它的节点退出，或两个作业共用端口或 id",
        "同一主机上的每个作业使用不同的 --rdzv-id 和端口（或 --standalone）；查看先退出节点的第一个错误",
        "https://docs.pytorch.org/docs/stable/elastic/rendezvous.html",
        confidence="likely",
    ),
    Cause(
        "hostfile",
        r"No slot '\d+' specified on host|[Hh]ostfile .{0,60}(?:not formatted|is empty|contains)|"
        r"not found in hostfile|bad formatting",
        "the hostfile or --include names a GPU or host that does not exist",
        "HOST slots=N, one a line, with the GPUs that nvidia-smi -L shows; deepspeed --include localhost:0,1",
        "hostfile 或 --include 指定了不存在的 GPU 或主机",
        "每行一个 HOST slots=N，与 nvidia-smi -L 一致；deepspeed --include localhost:0,1",
        "https://www.deepspeed.ai/getting-started/",
    ),
    Cause(
        "gloo-peer",
        r"gloo/transport/tcp/\w+\.cc:\d+\] (?:Connection cl|Connection reset|Timed out|Read error|Write error|"
        r"timeout)|Ranks? [\d, ]{1,80}failed to pass monitoredBarrier",
        "a rank waited over gloo for another that ended, hangs or is late",
        "look for the first error of every other rank; raise the timeout if one loads or compiles for long",
        "某个 rank 通过 gloo 等待另一个已退出、挂起或迟到的 rank",
        "查看其他各 rank 的第一个错误；若某个 rank 加载或编译较久，增大超时",
        "https://docs.pytorch.org/docs/stable/distributed.html",
        confidence="likely",
    ),
    Cause(
        "ray-worker-died",
        r"A worker died or was killed while executing a task|ActorDiedError|RayActorError|The actor (?:is dead|"
        r"died)|WorkerCrashedError",
        "a worker of Ray ended; its own error is in its log, or (killed for memory) in none",
        "/tmp/ray/session_latest/logs/worker-*.err and raylet.out of that node; free -h, /dev/shm; dmesg | grep -i "
        "-E 'oom|xid'",
        "Ray 的某个 worker 退出；其错误在自己的日志中（因内存被终止时则没有）",
        "查看该节点的 /tmp/ray/session_latest/logs/worker-*.err 和 raylet.out；free -h、/dev/shm；dmesg | grep -i "
        "-E 'oom|xid'",
        "https://docs.ray.io/en/latest/ray-observability/user-guides/debug-apps/debug-failures.html",
        confidence="possible",
    ),
)  # fmt: skip
