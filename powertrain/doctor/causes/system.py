"""Python, the operating system, and programs around training."""

from powertrain.doctor.causes.cause import Cause

CAUSES = (
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
        "{name} is not in the mapping that was searched for it: a config, state dict, batch or "
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
        "the line above the message; the length of the object it indexes; paths and patterns of "
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
