"""Compilers, linkers and CMake."""

from powertrain.doctor.causes.cause import Cause

CAUSES = (
    Cause(
        "cmake-nvcc",
        r"Failed to find nvcc|No CMAKE_CUDA_COMPILER could be found|CMAKE_CUDA_COMPILER-NOTFOUND|"
        r"Could not find nvcc executable|CUDA_TOOLKIT_ROOT_DIR not found|"
        r"Could not find nvcc, please set CUDAToolkit_ROOT|"
        r"Could NOT find CUDAToolkit|Could NOT find CUDA \(missing",
        "CMake finds no CUDA toolkit: there is none, or nvcc is not on PATH",
        "install the toolkit of torch's CUDA; export CUDA_HOME=/usr/local/cuda PATH=$CUDA_HOME/bin:$PATH "
        "CUDACXX=$CUDA_HOME/bin/nvcc",
        "CMake 找不到 CUDA 工具包：没有安装，或 nvcc 不在 PATH 中",
        "安装与 torch 相同版本的工具包；export CUDA_HOME=/usr/local/cuda PATH=$CUDA_HOME/bin:$PATH "
        "CUDACXX=$CUDA_HOME/bin/nvcc",
        "https://github.com/NVIDIA/TransformerEngine/issues/1216",
    ),
    Cause(
        "cuda-toolkit-incomplete",
        r"LIBNVTOOLSEXT \(ADVANCED\)|CUDA_\w+_LIBRARY \(ADVANCED\)|cannot find -l(?:cudart|cublas\w*|nvrtc|cusparse|"
        r"cusolver|curand|cufft|nvToolsExt)\b|target \"CUDA::nvToolsExt\" which may not exist|"
        r"target CUDA::nvToolsExt",
        "a library of the CUDA toolkit is missing: only a part of it is installed, or (nvToolsExt) it is newer than "
        "this torch's CMake files know",
        "install the whole toolkit of torch's CUDA version and set CUDA_HOME to it",
        "缺少 CUDA 工具包中的库：只安装了一部分，或（nvToolsExt）工具包比该 torch 的 CMake 文件新",
        "安装与 torch 相同版本的完整工具包并设置 CUDA_HOME",
        "https://github.com/vllm-project/vllm/issues/3673",
        confidence="likely",
    ),
    Cause(
        "cmake-cuda-archs",
        r"CMAKE_CUDA_ARCHITECTURES must be non-empty if set|arch_bin wasn't set for some reason|"
        r"Failed to detect a default CUDA architecture|Unknown CUDA Architecture Name|"
        r"Unknown CUDA arch \((?P<arch>[^)]{1,20})\) or GPU not supported",
        "CMake or torch gets no list of GPU archs that it knows: torch is older than the GPU, or the list is "
        "misspelled",
        "export TORCH_CUDA_ARCH_LIST=\"8.6\" CMAKE_CUDA_ARCHITECTURES=86 (of your GPU); a newer torch for a newer GPU",
        "CMake 或 torch 没有得到可识别的 GPU 架构列表：torch 比 GPU 旧，或列表写错",
        "export TORCH_CUDA_ARCH_LIST=\"8.6\" CMAKE_CUDA_ARCHITECTURES=86（按您的 GPU）；新 GPU 需要更新的 torch",
        "https://github.com/vllm-project/vllm/issues/6683",
        confidence="likely",
    ),
    Cause(
        "arch-list-empty",
        r"arch_list\[-1\] \+= '\+PTX'",
        "no GPU is visible where it is built (a Docker build has none), so torch knows no arch to build for",
        "TORCH_CUDA_ARCH_LIST=\"8.0 8.6 9.0\" <the same command>: the archs of the GPUs it will run on",
        "编译环境中看不到 GPU（例如 docker build），torch 不知道要为哪种架构编译",
        "TORCH_CUDA_ARCH_LIST=\"8.0 8.6 9.0\" <原命令>：填写将要使用的 GPU 架构",
        "https://docs.pytorch.org/docs/stable/cpp_extension.html",
    ),
    Cause(
        "cmake-old",
        r"CMake (?P<want>[\d.]+) or higher is required\.\s*You are running version (?P<have>[\d.]+\d)",
        "CMake {have} is older than the project requires ({want})",
        "pip install --upgrade cmake, and see that it comes first on PATH",
        "CMake {have} 低于该项目的要求（{want}）",
        "pip install --upgrade cmake，并确认它在 PATH 最前",
        "https://cmake.org/cmake/help/latest/command/cmake_minimum_required.html",
    ),
    Cause(
        "cmake-new",
        r"Compatibility with CMake < (?P<old>[\d.]+\d) has been removed",
        "this CMake is 4 or newer, and the project asks for one before {old}",
        "CMAKE_POLICY_VERSION_MINIMUM=3.5 <the same command>, or pip install 'cmake<4'",
        "当前 CMake 为 4 或更新版本，而该项目面向 {old} 之前的版本",
        "CMAKE_POLICY_VERSION_MINIMUM=3.5 <原命令>，或 pip install 'cmake<4'",
        "https://cmake.org/cmake/help/latest/variable/CMAKE_POLICY_VERSION_MINIMUM.html",
    ),
    Cause(
        "torch-api-changed",
        r"is not a member of [‘'](?:at|c10|torch)\b|namespace \"(?:at|c10|torch)[\w:]{0,40}\" has no member|"
        r"class \"(?:at|c10|torch)::\S{1,60}\" has no member|DeprecatedTypeProperties|[‘'](?:class |struct )?(?:at|c10|"
        r"torch)[\w:<>]{0,80}[’'] has no member named|[‘'](?:class |struct )?(?:at|c10|"
        r"torch)::[\w:<>]{1,80}[’'] has not been declared|macro \"(?:AT|TORCH)_\w+\" (?:requires|passed)",
        "the source is for another version of torch: its C++ interface changed",
        "the torch of the source's time (its README), or a newer version of the source",
        "源码面向另一个版本的 torch：其 C++ 接口已改变",
        "安装与源码同期的 torch（见 README），或使用更新的源码",
        "https://github.com/facebookresearch/pytorch3d/issues/1259",
        confidence="likely",
    ),
    Cause(
        "glibc-cuda-headers",
        r"exception specification is incompatible with that of previous function|\b_Float(?:32|64|"
        r"128)x?\b.{0,20}(?:undefined|does not name)|"
        r"identifier \"__is_(?:pointer|array|function|\w+_v)\"",
        "this system's C library or compiler headers are newer than the CUDA toolkit understands",
        "an older host compiler: CC=gcc-12 CXX=g++-12 NVCC_CCBIN=g++-12; a newer CUDA toolkit; or build in "
        "NVIDIA's devel image",
        "系统 C 库或编译器头文件比 CUDA 工具包所能理解的新",
        "使用较旧的主机编译器：CC=gcc-12 CXX=g++-12 NVCC_CCBIN=g++-12；升级 CUDA 工具包；或在 NVIDIA devel "
        "镜像中编译",
        "https://docs.nvidia.com/cuda/cuda-compiler-driver-nvcc/index.html",
        confidence="likely",
    ),
    Cause(
        "visual-studio-version",
        r"unsupported Microsoft Visual Studio version|unsupported clang version|"
        r"STL1002: Unexpected compiler version|STL1001|Only the versions between 20\d\d and 20\d\d",
        "the host compiler (Visual Studio, clang) is newer than this CUDA toolkit allows, or older than its own "
        "headers",
        "a newer CUDA toolkit; or the older MSVC toolset (vcvarsall.bat x64 -vcvars_ver=14.38); clang: -ccbin",
        "主机编译器（Visual Studio、clang）比该 CUDA 工具包允许的新",
        "升级 CUDA 工具包；或使用较旧的 MSVC 工具集（vcvarsall.bat x64 -vcvars_ver=14.38）；clang：-ccbin",
        "https://docs.nvidia.com/cuda/cuda-compiler-driver-nvcc/index.html",
    ),
    Cause(
        "linker-library",
        r"cannot find -l(?P<library>[\w.+-]+)|LNK1(?:104|181): cannot open (?:input )?file '(?P<file>[^']{1,200})'|"
        r"library not found for -l(?P<mac>\w+)",
        "the linker does not find a library ({library}{file}{mac})",
        "install its development package; add its folder to LIBRARY_PATH (Windows: LIB), -L",
        "链接器找不到某个库（{library}{file}{mac}）",
        "安装其开发包；将目录加入 LIBRARY_PATH（Windows：LIB）或 -L",
        "https://gcc.gnu.org/onlinedocs/gcc/Environment-Variables.html",
        confidence="likely",
    ),
    Cause(
        "visual-c-include",
        r"fatal error C1083: .{0,60}'(?P<header>[^']{1,120})'",
        "{header} is not found by Visual C++: its package or the Windows SDK is not installed, or the prompt is "
        "not set up",
        "the x64 Native Tools prompt; install the Windows SDK, or the library that has {header}; INCLUDE with its "
        "folder",
        "Visual C++ 找不到 {header}：其包或 Windows SDK 未安装，或环境未设置",
        "使用 x64 Native Tools 提示符；安装 Windows SDK 或含 {header} 的库；将目录加入 INCLUDE",
        "https://learn.microsoft.com/cpp/error-messages/compiler-errors-1/fatal-error-c1083",
    ),
    Cause(
        "compiler-memory",
        r"virtual memory exhausted|cc1plus: out of memory|LLVM ERROR: out of memory|"
        r"ptxas fatal\s*: Memory allocation failure|fatal error C10(?:02|60)|"
        r"out of memory allocating \d+ bytes|Cannot allocate memory.{0,40}(?:fork|vfork)",
        "memory ran out while it compiled: too many compilers at once",
        "MAX_JOBS=2 <the same command>; powertrain build plans the number of jobs from free memory; more swap",
        "编译时内存耗尽：同时运行的编译器过多",
        "MAX_JOBS=2 <原命令>；powertrain build 按空闲内存安排任务数；增加 swap",
        "https://github.com/Dao-AILab/flash-attention/issues/1038",
    ),
    Cause(
        "compiler-input",
        r"(?:gcc|g\+\+|cc|c\+\+|clang\+?\+?|cc1plus)\S{0,20}: (?:fatal )?error: (?P<file>[^:]{1,200}): No such file|"
        r"nvcc fatal\s*: Could not open input file|"
        r"ninja: error: '(?P<input>[^']{1,200})'.{0,120}missing and no known rule|ninja: error: (?:manifest|"
        r"loading 'build\.ninja')",
        "a file that the build needs is missing ({file}{input}): an earlier step did not make it, a submodule is "
        "missing, or the path has a space",
        "the first error above; git submodule update --init --recursive; rm -r build and again; a path without "
        "spaces",
        "编译所需的文件不存在（{file}{input}）：前一步没有生成、缺少子模块，或路径含空格",
        "查看上方第一个错误；git submodule update --init --recursive；rm -r build 后重试；路径不要有空格",
        "https://github.com/rusty1s/pytorch_cluster/issues/1",
        confidence="likely",
    ),
    Cause(
        "build-ended-from-outside",
        r"'\S{1,40}' died due to signal (?:2|15)\b|Terminated signal terminated program",
        "the build was ended from outside (SIGINT or SIGTERM): Ctrl-C, a time limit of the job or of CI, or a daemon "
        "that guards memory (systemd-oomd)",
        "the job's time limit; journalctl -u systemd-oomd; powertrain build -- <the same command> if memory ran out",
        "编译被外部终止（SIGINT 或 SIGTERM）：Ctrl-C、作业或 CI 的时间限制，或看护内存的守护进程（systemd-oomd）",
        "检查作业的时间限制；journalctl -u systemd-oomd；若内存耗尽：powertrain build -- <原命令>",
        "https://man7.org/linux/man-pages/man7/signal.7.html",
    ),
    Cause(
        "nvcc-crashed",
        r"(?:cicc|ptxas|cudafe\+\+|nvcc|fatbinary)'? died (?:due to signal (?:6|8|11|4)|with status)|"
        r"nvcc error\s*: '\S{1,40}' (?:core dumped|died(?! due to signal (?:2|15)\b))|"
        r"Segmentation fault.{0,20}(?:cicc|ptxas|nvcc)",
        "a part of nvcc crashed: a bug of this CUDA version, memory that ran out, or (Windows) a damaged "
        "installation",
        "MAX_JOBS=1; another minor version of the CUDA toolkit; fewer archs in TORCH_CUDA_ARCH_LIST",
        "nvcc 的某个部分崩溃：该 CUDA 版本的缺陷、内存不足，或（Windows）安装损坏",
        "MAX_JOBS=1；更换 CUDA 工具包的小版本；减少 TORCH_CUDA_ARCH_LIST 中的架构",
        "https://docs.nvidia.com/cuda/cuda-compiler-driver-nvcc/index.html",
        confidence="likely",
    ),
    Cause(
        "cmake-compiler-broken",
        r"is not able to compile a simple test program|compiler identification is unknown|"
        r"Check for working CUDA compiler: \S+ - broken|"
        r"Compiling the CUDA compiler identification source file .{0,120}failed",
        "CMake tried the compiler on an empty program, and it failed; why stands below, or in "
        "CMakeFiles/CMakeError.log",
        "the first error below it; nvcc and the host compiler must go together (CUDAHOSTCXX=g++-12); "
        "CUDACXX=/usr/local/cuda/bin/nvcc; rm -r build",
        "CMake 用空程序测试编译器失败；原因在下方或 CMakeFiles/CMakeError.log 中",
        "查看下方第一个错误；nvcc 与主机编译器要匹配（CUDAHOSTCXX=g++-12）；CUDACXX=/usr/local/cuda/bin/nvcc；rm "
        "-r build",
        "https://cmake.org/cmake/help/latest/manual/cmake.1.html",
        confidence="likely",
    ),
    Cause(
        "cmake-package",
        r"Could not find a package configuration file provided by \"(?P<package>[^\"]{1,60})\"|"
        r"Could NOT find (?P<found>\w+)|does not contain CMakeLists\.txt|does not contain a CMakeLists\.txt|"
        r"Could not find CMAKE_ROOT",
        "CMake does not find something that the project needs ({package}{found}): it is not installed, elsewhere, "
        "or the submodule is missing",
        "install its development package; -D<name>_ROOT=<folder> or CMAKE_PREFIX_PATH; for Torch: "
        "CMAKE_PREFIX_PATH=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)'); git submodule update "
        "--init --recursive",
        "CMake 找不到项目所需的内容（{package}{found}）：未安装、在别处，或缺少子模块",
        "安装其开发包；-D<名称>_ROOT=<目录> 或 CMAKE_PREFIX_PATH；Torch：CMAKE_PREFIX_PATH=$(python -c 'import "
        "torch; print(torch.utils.cmake_prefix_path)')；git submodule update --init --recursive",
        "https://cmake.org/cmake/help/latest/manual/cmake.1.html",
        confidence="likely",
    ),
    Cause(
        "cmake-stale",
        r"is different than the directory|Does not match the generator used previously|"
        r"does not match the source .{1,200} used to generate cache",
        "the build folder is of another place or generator",
        "rm -r build CMakeCache.txt, and again",
        "build 目录来自另一位置或生成器",
        "rm -r build CMakeCache.txt 后重试",
        "https://cmake.org/cmake/help/latest/manual/cmake.1.html",
    ),
    Cause(
        "cuda-home-none",
        r"unsupported operand type\(s\) for \+: 'NoneType' and 'str'|"
        r"expected str, bytes or os\.PathLike object, not NoneType",
        "setup.py joins CUDA_HOME to a path, and torch finds no CUDA toolkit, so it is None",
        "install the toolkit (conda install -c nvidia cuda-toolkit, or a devel image), then export "
        "CUDA_HOME=/usr/local/cuda",
        "setup.py 用 CUDA_HOME 拼路径，而 torch 找不到 CUDA 工具包，其值为 None",
        "安装工具包（conda install -c nvidia cuda-toolkit，或 devel 镜像），再 export CUDA_HOME=/usr/local/cuda",
        "https://github.com/NVIDIA/apex/issues/957",
        also=r"nvcc|CUDA|cuda_dir|cuda_home|setup\.py|cpp_extension",
        confidence="likely",
    ),
    Cause(
        "extension-objects",
        r"Error compiling objects for extension|command '\S{0,200}(?:nvcc|nvcc\.exe|g\+\+|gcc|cl\.exe|clang\+\+|"
        r"c\+\+|ninja)'? failed with exit (?:status|code)|Error when running CMake: Command|"
        r"subprocess\.CalledProcessError: Command '\['(?:ninja|cmake)",
        "a compile step failed; the compiler's own error stands above this line",
        "the first `error:` above it: give the whole log to powertrain diagnose; MAX_JOBS=1 and pip install -v "
        "make it readable",
        "某个编译步骤失败；编译器的错误在该行上方",
        "查看上方第一个 error:，将完整日志交给 powertrain diagnose；MAX_JOBS=1 和 pip install -v 更易读",
        "https://docs.pytorch.org/docs/stable/cpp_extension.html",
        confidence="possible",
    ),
    Cause(
        "undeclared-name",
        r"error: identifier \"(?P<name>\w{1,80})\" is undefined|"
        r"error: [‘'](?P<missing>[\w:]{1,80})[’'] (?:was not declared|has not been declared|does not name a type|"
        r"is not a member of)|error: namespace \"(?P<space>[\w:]{1,60})\" has no member|"
        r"error C2065: '(?P<msvc>\w+)'|error: no member named '(?P<clang>\w+)'",
        "the compiler does not know a name ({name}{missing}{space}{msvc}{clang}): the headers are of another "
        "version (CUDA, CUB, torch, the compiler's), or an #include is missing",
        "one CUDA toolkit first on every include path (no /usr/include/cub of the distribution beside it); the "
        "versions that the project names; a newer source",
        "编译器不认识某个名称（{name}{missing}{space}{msvc}{clang}）：头文件版本不同（CUDA、CUB、torch、编译器），"
        "或缺少 #include",
        "所有头文件路径中只用同一个 CUDA 工具包（不要混入发行版的 /usr/include/cub）；使用项目指定的版本；更新源码",
        "https://github.com/muelea/shapy/issues/36",
        confidence="likely",
    ),
    Cause(
        "source-does-not-compile",
        r"\.(?:cu|cuh|h|hpp|hxx|cpp|cc|inl)(?:\(\d+\)|:\d+:\d+): (?:fatal )?error ?:? (?P<what>.{3,160})",
        "the source does not compile with the compiler and headers that are used here: {what}",
        "the CUDA toolkit and compiler that the project names; submodules of the commit (git submodule update --init "
        "--recursive); a newer release of the source, or an older one for an older torch or CUDA",
        "源码无法用当前的编译器与头文件编译：{what}",
        "使用项目要求的 CUDA 工具包与编译器；子模块与提交一致（git submodule update --init --recursive）；升级源码，"
        "或为旧 torch、CUDA 使用旧版本",
        "https://github.com/punica-ai/punica/issues/46",
        confidence="likely",
        fallback=True,
    ),
)  # fmt: skip
