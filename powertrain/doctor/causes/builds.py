"""Builds and installations that die."""

import re

from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.excerpt import Excerpt

_TE = "https://github.com/NVIDIA/TransformerEngine/issues/"
_FA = "https://github.com/Dao-AILab/flash-attention/issues/"
_TORCH = "https://github.com/pytorch/pytorch/issues/"

# a command that compiles, and lines that compilers leave above the one that was killed
_BUILD = re.compile(
    r"--no-build-isolation|setup\.py|\bninja\b|cmake --build|MAX_JOBS|\bnvcc\b|^\[\d+/\d+\] |ptxas info"
)


def _of_a_build(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    lines = [groups["command"]] if "command" in groups else excerpt.above[-6:]
    return {} if any(map(_BUILD.search, lines)) else None


CAUSES = (
    Cause(
        "compiler-killed",
        r"'?(?P<program>cicc|ptxas|cudafe\+\+|nvcc|cc1plus)'? died due to signal 9|"
        r"Killed signal terminated program (?P<host>\w+)|"
        r"line \d+: +\d+ Killed +.{0,80}(?:nvcc|cicc|ptxas|cc1plus|g\+\+|ninja|make)|"
        r"Killed process \d+ \((?:nvcc|cicc|ptxas|cc1plus|cudafe\+\+|ninja|ld)\)",
        "the kernel killed a compiler because memory ran out: too many compile at once",
        "powertrain build -- <the same command>   # starts only as many as fit; or MAX_JOBS=1 NVCC_THREADS=1",
        "内存耗尽，内核杀死了编译器：同时编译的任务太多",
        "powertrain build -- <原命令>   # 按内存决定并行数；或设置 MAX_JOBS=1 NVCC_THREADS=1",
        "https://github.com/microsoft/onnxruntime/issues/18579",
    ),
    Cause(
        "build-killed",
        r"process \"(?P<command>.{1,900}\") did not complete successfully: exit code: 137\b|"
        r"^(?:#\d+ [\d.]+ )?Killed\b",
        "the build was killed with SIGKILL: nearly always because memory ran out: too many compile at once",
        "powertrain build -- <the same command>   # starts only as many as fit; or MAX_JOBS=1 NVCC_THREADS=1 "
        "(ENV lines of a Dockerfile); more memory for Docker or WSL",
        "编译被 SIGKILL 杀死：几乎总是因为同时运行的编译器太多，内存耗尽",
        "powertrain build -- <原命令>   # 按内存决定并行数；或设置 MAX_JOBS=1 NVCC_THREADS=1（Dockerfile 中用 ENV）；"
        "为 Docker 或 WSL 分配更多内存",
        "https://docs.docker.com/engine/containers/resource_constraints/",
        confidence="likely",
        derive=_of_a_build,
    ),
    Cause(
        "gpu-architecture-unknown",
        r"[Uu]nsupported gpu architecture '(?P<arch>\w+)'",
        "this nvcc does not know {arch}: it is older than the GPU, or so new that the GPU was dropped",
        "name only archs of your GPUs (TORCH_CUDA_ARCH_LIST=\"8.6\", NVTE_CUDA_ARCHS=86), or install a CUDA "
        "toolkit that "
        "knows {arch}: nvcc --list-gpu-arch",
        "当前 nvcc 不认识 {arch}：nvcc 太旧，或太新而不再支持该 GPU",
        "只为本机 GPU 编译（TORCH_CUDA_ARCH_LIST=\"8.6\"，NVTE_CUDA_ARCHS=86），或安装认识 {arch} 的 CUDA：nvcc "
        "--list-gpu-arch",
        "https://github.com/mit-han-lab/Block-Sparse-Attention/issues/15",
    ),
    Cause(
        "cuda-mismatch",
        r"detected CUDA version \((?P<have>[\d.]+)\) mismatches|"
        r"detected CUDA version \(%s\) mismatches.{1,200}', '(?P<toolkit>[\d.]+)', '",
        "nvcc is of CUDA {have}{toolkit}, torch was built for another major version: compiled extensions would "
        "not load",
        "install the CUDA toolkit of torch's version (python -c 'import torch; print(torch.version.cuda)') and set "
        "CUDA_HOME to it; or install torch for CUDA {have}{toolkit}",
        "nvcc 是 CUDA {have}{toolkit}，而 torch 是为另一个主版本编译的，编译结果无法加载",
        "安装与 torch 相同版本的 CUDA（python -c 'import torch; print(torch.version.cuda)'）并设置 CUDA_HOME；或安"
        "装 CUDA {have}{toolkit} 的 torch",
        "https://github.com/ModalMinds/MM-EUREKA/issues/24",
    ),
    Cause(
        "host-compiler-too-new",
        r"unsupported GNU version! gcc versions later than (?P<gcc>\d+) are not supported",
        "the host's gcc is newer than this nvcc allows ({gcc})",
        "CC=gcc-{gcc} CXX=g++-{gcc} NVCC_PREPEND_FLAGS='-ccbin g++-{gcc}' <the same command>",
        "主机的 gcc 比该 nvcc 允许的版本（{gcc}）新",
        "CC=gcc-{gcc} CXX=g++-{gcc} NVCC_PREPEND_FLAGS='-ccbin g++-{gcc}' <原命令>",
        "https://github.com/Eyeline-Labs/FlashDepth/issues/2",
    ),
    Cause(
        "host-compiler-range",
        r"current installed version of (?P<compiler>\S{1,200}) \((?P<have>[\d.]+)\) is (?:less than the "
        r"minimum|greater than "
        r"the maximum) required version by CUDA (?P<cuda>[\d.]+\d)(?:.{0,300}\((?P<range>>=?[\d.]+(?:, "
        r"<=?[\d.]+)?)\))?",
        "nvcc of CUDA {cuda} does not go with {compiler} {have}: it takes versions {range}",
        "CC=gcc-11 CXX=g++-11 <the same command>, with a version {range} (apt install g++-11; conda install -c "
        "conda-forge "
        "gxx=11; scl or module load on clusters); or another CUDA toolkit",
        "CUDA {cuda} 的 nvcc 不支持 {compiler} {have}：要求版本 {range}",
        "CC=gcc-11 CXX=g++-11 <原命令>，版本须为 {range}（apt install g++-11；conda install -c conda-forge gxx=11）；"
        "或换用另一个 "
        "CUDA 工具包",
        "https://github.com/pytorch/pytorch/blob/main/torch/utils/cpp_extension.py",
    ),
    Cause(
        "torch-missing-at-build",
        r"ModuleNotFoundError: No module named 'torch'",
        "pip builds in an empty environment of its own, and there is no torch in it",
        "pip install torch first, then the same command with --no-build-isolation",
        "pip 在独立的空环境中编译，那里没有 torch",
        "先安装 torch，再给原命令加上 --no-build-isolation",
        _FA + "1920",
        also=r"[Gg]etting requirements to build|build-isolation|build_meta|[Pp]reparing metadata|setup\.py|egg_info|"
        r"bdist_wheel|"
        r"Failed to build|build backend",
    ),
    Cause(
        "nvcc-missing",
        r"(?<!\w)(?P<package>\w+) was requested, but nvcc was not found|"
        r"name '(?P<unset>bare_metal_version|CUDA_HOME|cuda_version)' is not defined|"
        r"Could not find (?P<tool>nvcc) and default cuda_home",
        "{package}{unset}{tool}: CUDA code is compiled here, and there is no nvcc: this is a runtime image, or "
        "no CUDA toolkit is installed",
        "install the CUDA toolkit of torch's version, or use an image with -devel in its name, or a prebuilt wheel",
        "{package}{unset}{tool}：需要在本机编译 CUDA 代码，但没有 nvcc：这是 runtime 镜像，或没有安装 CUDA 工具包",
        "安装与 torch 同版本的 CUDA 工具包，或使用名称含 -devel 的镜像，或使用预编译 wheel",
        _FA + "948",
    ),
    Cause(
        "cuda-home",
        r"CUDA_HOME (?:environment variable is not set|does not exist)|\bnvcc: (?:command )?not found|"
        r"No such file or directory: '[^']{0,200}nvcc'",
        "torch finds no CUDA toolkit to compile with",
        "export CUDA_HOME=/usr/local/cuda (the folder with bin/nvcc in it); without one, install the toolkit",
        "torch 找不到用于编译的 CUDA 工具包",
        "export CUDA_HOME=/usr/local/cuda（其中有 bin/nvcc）；没有则安装 CUDA 工具包",
        _FA + "1736",
    ),
    Cause(
        "ninja-missing",
        r"Ninja is required to load C\+\+ extensions|No such file or directory: 'ninja'|"
        r"build program corresponding to \"Ninja\"",
        "torch compiles extensions with ninja, and it is not on PATH",
        "pip install ninja   # and run inside the environment, so that its bin folder is on PATH",
        "torch 用 ninja 编译扩展，但 PATH 中没有 ninja",
        "pip install ninja   # 并激活该环境，使其 bin 目录在 PATH 中",
        "https://github.com/openseg-group/openseg.pytorch/issues/32",
    ),
    Cause(
        "cudnn-headers",
        r"fatal error: cudnn(?:_version)?\.h: No such file or directory|Could not find cudnn_LIBRARY|"
        r"Could NOT find CUDNN\b",
        "cuDNN's headers or library are not where the build looks",
        "pip install nvidia-cudnn-cu12 (-cu13 for CUDA 13), then CUDNN_PATH=$(python -c 'import nvidia.cudnn as c; "
        "print(c.__path__[0])') and "
        "CPATH=$CUDNN_PATH/include before the same command",
        "编译时找不到 cuDNN 的头文件或库",
        "pip install nvidia-cudnn-cu12，然后设置 CUDNN_PATH=$(python -c 'import nvidia.cudnn as c; "
        "print(c.__path__[0])') 和 CPATH=$CUDNN_PATH/include",
        _TE + "1309",
    ),
    Cause(
        "submodules",
        r"fatal error: cudnn_frontend\.h: No such file or directory|Could not find cuDNN frontend API",
        "the source tree was cloned without its submodules",
        "git submodule update --init --recursive, then build again",
        "源码克隆时没有带上子模块",
        "git submodule update --init --recursive，然后重新编译",
        _TE + "171",
        confidence="likely",
    ),
    Cause(
        "credentials-asked",
        r"(?:Username|Password) for '(?P<host>https?://[^']+)':?\s*(?:terminal prompts disabled.*|"
        r"No such device or address.*)?$",
        "git asks for your login at {host} and gets none: the repository is private, moved, or its name is wrong",
        "look whether the address is right; if it is private: gh auth login, or an ssh address (git+ssh://git@…). In "
        "a terminal, powertrain build -- <the same command> shows the question and takes the answer",
        "git 询问您在 {host} 的身份，却没有人回答：仓库是私有的、已迁移，或名称有误",
        "先确认地址正确；若为私有仓库：gh auth login，或使用 ssh 地址（git+ssh://git@…）。在终端中执行 "
        "powertrain build -- <原命令>，它会显示问题并接受回答",
        "https://github.com/OpenFreeEnergy/gufe/issues/26",
    ),
    Cause(
        "gdrcopy-missing",
        r"fatal error: gdrapi\.h: No such file|libgdrapi\.so.*(?:unable to|cannot) open|gdr_open error",
        "GDRCopy is not installed, or its kernel module gdrdrv is not loaded",
        "TransformerEngine 1.9 and newer need no GDRCopy: upgrade; else install it and `sudo modprobe gdrdrv`",
        "没有安装 GDRCopy，或没有加载其内核模块 gdrdrv",
        "TransformerEngine 1.9 起不再需要 GDRCopy：升级；否则安装并执行 sudo modprobe gdrdrv",
        "https://github.com/NVIDIA/gdrcopy/issues/72",
    ),
    Cause(
        "python-headers",
        r"fatal error: '?Python\.h'?:? No such file|include file 'Python\.h' not found",
        "this Python has no headers, and Triton or torch compiles a launcher in C at run time",
        "apt install python3-dev (of this very version), or use a Python of conda or uv, which has them",
        "当前 Python 没有头文件，而 Triton 或 torch 在运行时要编译 C 代码",
        "apt install python3-dev（同一版本），或使用自带头文件的 conda、uv 的 Python",
        "https://github.com/sgl-project/sglang/issues/1117",
    ),
    Cause(
        "libcuda-link",
        r"cannot find -lcuda\b",
        "the linker finds libcuda.so.1 only, or no driver at all: Triton links its launcher with -lcuda",
        "export TRITON_LIBCUDA_PATH=/usr/lib/x86_64-linux-gnu and link libcuda.so there; or "
        "LIBRARY_PATH=/usr/local/cuda/"
        "lib64/stubs",
        "链接器只找到 libcuda.so.1 或没有驱动：Triton 用 -lcuda 链接启动器",
        "export TRITON_LIBCUDA_PATH=/usr/lib/x86_64-linux-gnu 并在其中建立 libcuda.so 链接；或 "
        "LIBRARY_PATH=/usr/local/cuda/lib64/stubs",
        "https://github.com/state-spaces/mamba/issues/123",
    ),
    Cause(
        "extension-build",
        r"Error building extension '(?P<name>\w+)'",
        "torch could not compile {name}; the compiler's own error stands above this line",
        "read the first `error:` above; powertrain doctor says whether nvcc, gcc and torch go together",
        "torch 编译 {name} 失败；编译器自己的错误在这一行之上",
        "查看上方第一个 error:；powertrain doctor 会说明 nvcc、gcc 与 torch 是否匹配",
        "https://github.com/deepspeedai/DeepSpeed/issues/4889",
        confidence="possible",
    ),
    Cause(
        "disk-full",
        r"No space left on device",
        "a disk is full; in a container often /dev/shm or TMPDIR",
        "df -h /dev/shm /tmp ~; docker run --shm-size=16g for /dev/shm, TMPDIR=<a larger disk> for builds",
        "磁盘已满；容器中常见的是 /dev/shm 或 TMPDIR",
        "df -h /dev/shm /tmp ~；/dev/shm 用 docker run --shm-size=16g，编译用 TMPDIR=<更大的磁盘>",
        "https://github.com/NVIDIA/nccl/issues/525",
    ),
    Cause(
        "build-package-missing",
        r"ModuleNotFoundError: No module named '(?P<module>wheel|setuptools|setuptools_scm|packaging|psutil|ninja|"
        r"pybind11|"
        r"numpy|cmake|Cython|einops|hatchling|scikit_build_core|skbuild)'",
        "setup.py imports {module}, which --no-build-isolation does not install",
        "pip install {module} (such builds ask for wheel, setuptools, packaging, ninja and psutil next), then the same "
        "command",
        "setup.py 需要 {module}，而 --no-build-isolation 不会安装它",
        "先执行 pip install {module}（此类构建常还需要 wheel、setuptools、packaging、ninja、psutil），再执行原命令",
        "https://github.com/llm-jp/llm-jp-sft/pull/41",
        also=r"metadata|requirements to build|setup\.py|bdist_wheel|subprocess-exited",
    ),
    Cause(
        "pkg-resources",
        r"No module named 'pkg_resources'|cannot import name 'packaging' from 'pkg_resources'",
        "pkg_resources was a part of setuptools, and the newest setuptools come without it",
        "pip install 'setuptools<81', then the same command with --no-build-isolation",
        "pkg_resources 属于 setuptools，而最新版 setuptools 已不再包含它",
        "pip install 'setuptools<81'，再给原命令加上 --no-build-isolation",
        "https://setuptools.pypa.io/en/latest/pkg_resources.html",
    ),
    Cause(
        "nvcc-old",
        r"(?P<package>\w[\w-]{0,40}) is only supported on CUDA (?P<cuda>[\d.]+\d) and above",
        "{package} needs nvcc {cuda} or newer; the nvcc found first is older, whatever CUDA nvidia-smi shows",
        "nvcc -V; export CUDA_HOME=/usr/local/cuda-12.x PATH=$CUDA_HOME/bin:$PATH with a newer toolkit",
        "{package} 需要 nvcc {cuda} 或更新；首先找到的 nvcc 更旧（与 nvidia-smi 显示的 CUDA 无关）",
        "nvcc -V；安装更新的工具包并设置 export CUDA_HOME=/usr/local/cuda-12.x PATH=$CUDA_HOME/bin:$PATH",
        "https://github.com/state-spaces/mamba/issues/323",
    ),
    Cause(
        "nvcc-option",
        r"nvcc fatal\s*: Unknown option '-?-?(?P<option>[\w=+-]+)'",
        "this nvcc does not know the option {option}: most often it is older than the build expects, such as the "
        "distribution's in /usr/bin",
        "nvcc -V; export CUDA_HOME and PATH to the toolkit of torch's CUDA",
        "当前 nvcc 不认识选项 {option}：通常是 nvcc 太旧（例如发行版的 /usr/bin/nvcc）",
        "nvcc -V；将 CUDA_HOME 和 PATH 指向与 torch 相同版本的工具包",
        "https://github.com/daerduoCarey/structurenet/issues/13",
        confidence="likely",
    ),
    Cause(
        "cuda-older-than-source",
        r"identifier \W?(?:__grid_constant__|__nv_fp8\w*|__nv_fp4\w*|CUtensorMap|"
        r"cudaLaunchKernelEx\w*)\W? is undefined|"
        r"fatal error: cuda_fp[864]\.h",
        "the source uses what this CUDA toolkit does not have yet: the toolkit is older than the source needs",
        "build with a newer toolkit (CUDA_HOME), or an older version of the package",
        "源码使用了当前 CUDA 工具包尚不具备的功能：工具包太旧",
        "使用更新的工具包编译（CUDA_HOME），或安装该包的旧版本",
        "https://github.com/OpenNMT/CTranslate2/issues/1664",
        confidence="likely",
    ),
    Cause(
        "gcc-11-headers",
        r"error: parameter packs not expanded",
        "this nvcc does not understand these headers: gcc 11 and newer with nvcc before 11.7, "
        "or torch's with nvcc 10.2",
        "CC=gcc-10 CXX=g++-10 NVCC_PREPEND_FLAGS='-ccbin g++-10' <the same command>, or a newer toolkit",
        "11.7 之前的 nvcc 无法处理 gcc 11 及更新版本的头文件",
        "CC=gcc-10 CXX=g++-10 NVCC_PREPEND_FLAGS='-ccbin g++-10' <原命令>，或使用更新的工具包",
        "https://github.com/NVIDIA/nccl/issues/650",
    ),
    Cause(
        "pybind11-nvcc",
        r"pybind11/cast\.h[:(]\d+.{0,12} error: (?:expected template-name|expected identifier|too few arguments|"
        r"no matching function)",
        "nvcc and the pybind11 that torch brings do not go together: nvcc 12.0 and 12.1 fail on its templates with an "
        "older host compiler",
        "a toolkit of another version (12.4 or newer), or g++ 11 or newer as host compiler, or a torch of your own "
        "with "
        "--no-build-isolation",
        "nvcc 与 torch 自带的 pybind11 不兼容：nvcc 12.0 和 12.1 配较旧的主机编译器时无法编译其模板",
        "使用其他版本（12.4 以上）的工具包，或 g++ 11 以上，或用 --no-build-isolation 使用自己的 torch",
        "https://github.com/vllm-project/vllm/issues/4201",
        confidence="likely",
    ),
    Cause(
        "cxx17-flag",
        r"#error \W?(?:You need C\+\+(?P<need>\d\d) to compile PyTorch|"
        r"C\+\+(?P<later>\d\d) or later compatible compiler)",
        "the project asks for an older C++ (-std=c++14 or 17) than the headers of the installed torch need, "
        "C++{need}{later}",
        "replace -std=c++14 (or 17) in its setup.py by -std=c++{need}{later}, or take a newer version of it; or an "
        "older torch",
        "该项目使用的 C++ 标准（-std=c++14 或 17）低于已安装 torch 的要求（C++{need}{later}）",
        "将其 setup.py 中的 -std=c++14（或 17）改为 -std=c++{need}{later}，或使用其新版本；或使用较旧的 torch",
        "https://github.com/NVlabs/FoundationPose/issues/35",
    ),
    Cause(
        "host-compiler-old",
        r"unrecognized (?:command[- ]line )?option \W(?P<option>-std=[\w+]+)",
        "the host compiler is too old for {option}",
        "install g++ 11 or newer and set CC and CXX to it (conda install -c conda-forge gxx=11)",
        "主机编译器太旧，不支持 {option}",
        "安装 g++ 11 或更新版本并设置 CC、CXX（conda install -c conda-forge gxx=11）",
        "https://github.com/teboli/CPCR/issues/2",
    ),
    Cause(
        "compiler-crash",
        r"internal compiler error",
        "the compiler itself crashed: a bug of this version, or memory ran out",
        "another version of gcc (CC, CXX) or of the CUDA toolkit; with MAX_JOBS=1 to exclude memory",
        "编译器自身崩溃：该版本的缺陷，或内存不足",
        "更换 gcc（CC、CXX）或 CUDA 工具包版本；用 MAX_JOBS=1 排除内存问题",
        _FA + "21",
        confidence="likely",
    ),
    Cause(
        "compiler-missing",
        r"No CMAKE_C(?:XX)?_COMPILER could be found|unable to execute '[\w.+-]*(?:gcc|g\+\+|cc|c\+\+)'|"
        r"error: command '[\w./+-]*(?:gcc|g\+\+|c\+\+)' failed: No such file|"
        r"\['which', '(?:c\+\+|g\+\+|gcc|cc|clang\+\+)'\]|\['where', '(?:cl|c\+\+)'\]|"
        r"\b(?:g\+\+|c\+\+|gcc): (?:command )?not found",
        "there is no C++ compiler on PATH",
        "apt install build-essential (or: conda install -c conda-forge gxx), or set CC and CXX",
        "PATH 中没有 C++ 编译器",
        "apt install build-essential（或 conda install -c conda-forge gxx），或设置 CC 和 CXX",
        _TE + "1216",
    ),
    Cause(
        "visual-c",
        r"Microsoft Visual C\+\+ \d+\.\d+ or greater is required|Error checking compiler version for cl|"
        r"Unable to find vcvarsall",
        "the build needs the compiler of Visual Studio, which is not installed or not on PATH",
        "install the Build Tools for Visual Studio with C++ and run in its x64 prompt; or use WSL",
        "编译需要 Visual Studio 的编译器，但未安装或不在 PATH 中",
        "安装 Visual Studio 生成工具（含 C++）并在其 x64 命令行中运行；或使用 WSL",
        "https://docs.pytorch.org/tutorials/advanced/cpp_extension.html",
    ),
    Cause(
        "rust-missing",
        r"can't find Rust compiler|requires Rust and Cargo",
        "a package (often tokenizers) has no wheel for this Python and would be compiled with Rust",
        "a Python version that has wheels, or a newer version of the package; or install Rust: https://rustup.rs",
        "某个包（常为 tokenizers）没有适合当前 Python 的 wheel，需要用 Rust 编译",
        "使用有 wheel 的 Python 版本或更新该包；或安装 Rust：https://rustup.rs",
        "https://huggingface.co/docs/tokenizers/installation",
    ),
    Cause(
        "cccl-headers",
        r"fatal error: (?P<header>(?:thrust|cub|cuda/std|nv)/\S+): No such file",
        "{header} is one of CCCL's headers (Thrust, CUB, libcu++): CUDA 13 has them in include/cccl, where nvcc looks "
        "and a C++ compiler does not, unless its folder is given; before 13 they are in include, of a whole toolkit",
        "CPATH=$CUDA_HOME/include/cccl <the same command>, or build a newer release of the package; with CUDA 12 "
        "install the whole toolkit (conda install -c nvidia cuda-toolkit=12.x) and set CPATH=$CUDA_HOME/include",
        "{header} 属于 CCCL（Thrust、CUB、libcu++）：CUDA 13 将其放在 include/cccl 中，nvcc 会查找该目录而 "
        "C++ 编译器不会；13 之前在完整工具包的 include 中",
        "CPATH=$CUDA_HOME/include/cccl <原命令>，或使用更新的源码版本；CUDA 12：安装完整工具包"
        "（conda install -c nvidia cuda-toolkit=12.x），CPATH=$CUDA_HOME/include",
        "https://nvidia.github.io/cccl/",
        confidence="likely",
    ),
    Cause(
        "cuda-headers",
        r"fatal error: (?P<header>cu(?:blas_v2|blasLt|blas|sparse|solverDn|fft|rand|rand_kernel|da_runtime|"
        r"da_runtime_api|"
        r"da|da_fp16|da_bf16|da_profiler_api|pti)\.h|nvToolsExt\.h|nvtx3/\S+): No such file",
        "{header} of the CUDA toolkit is missing: only a part of the toolkit is installed (conda's cuda-nvcc), or "
        "another folder is searched",
        "install the whole toolkit of torch's CUDA (conda install -c nvidia cuda-toolkit=12.x) and export CUDA_HOME "
        "and "
        "CPATH=$CUDA_HOME/include",
        "缺少 CUDA 工具包的 {header}：只安装了部分工具包（如 conda 的 cuda-nvcc），或查找的目录不对",
        "安装与 torch 相同版本的完整工具包（conda install -c nvidia cuda-toolkit=12.x），并设置 CUDA_HOME 和 "
        "CPATH=$CUDA_HOME/include",
        "https://github.com/NVIDIA/apex/issues/957",
    ),
    Cause(
        "nccl-headers",
        r"fatal error: nccl\.h: No such file|Could NOT find NCCL",
        "NCCL's header is not where the build looks",
        "apt install libnccl-dev; or CPATH=$(python -c 'import nvidia.nccl as n; print(n.__path__[0])')/include",
        "编译时找不到 NCCL 的头文件",
        "apt install libnccl-dev；或 CPATH=$(python -c 'import nvidia.nccl as n; print(n.__path__[0])')/include",
        _TE + "1284",
    ),
    Cause(
        "torch-headers",
        r"fatal error: (?P<header>(?:torch|ATen|c10)/\S+): No such file",
        "{header} of torch is not found: the file is compiled without torch's include folders, or for another torch",
        "build with the project's setup.py and --no-build-isolation in the environment that has torch",
        "找不到 torch 的 {header}：编译时没有 torch 的 include 目录，或面向另一个版本的 torch",
        "在装有 torch 的环境中用该项目的 setup.py 和 --no-build-isolation 编译",
        "https://github.com/jiangxiluning/FOTS.PyTorch/issues/89",
        confidence="likely",
    ),
    Cause(
        "thc-removed",
        r"\bAT_CHECK\(|\bTHCudaCheck\b|\bTHCState_\w+|"
        r"fatal error: THC/\S+: No such file|[`'‘\"]?AT_CHECK[`'’\"]? was not declared|identifier \"AT_CHECK\"",
        "the source is for torch before 1.11, which still had THC and AT_CHECK",
        "a newer version of the project, or torch 1.10; in its source: AT_CHECK is TORCH_CHECK, THCudaMalloc is "
        "c10::cuda::CUDACachingAllocator",
        "源码面向 1.11 之前的 torch（当时还有 THC 和 AT_CHECK）",
        "使用该项目的新版本，或 torch 1.10；源码中将 AT_CHECK 改为 TORCH_CHECK",
        "https://github.com/pytorch/pytorch/issues/9155",
    ),
    Cause(
        "submodule-headers",
        r"fatal error: (?:cutlass|cute|ck_tile|flashinfer)/\S+: No such file",
        "the source tree was taken without its submodules",
        "git submodule update --init --recursive, then build again (a downloaded .zip has none)",
        "源码没有带上子模块",
        "git submodule update --init --recursive，然后重新编译（下载的 .zip 不含子模块）",
        "https://github.com/Dao-AILab/flash-attention",
    ),
    Cause(
        "header-missing",
        r"fatal error: (?P<header>[\w./+-]{1,80}\.(?:h|hpp|cuh|inl)): No such file",
        "{header} is not installed, or not in a folder that the compiler searches",
        "install the development package that has it (apt-file search {header}), or add its folder to CPATH",
        "没有安装 {header}，或编译器不在其目录中查找",
        "安装包含它的开发包（apt-file search {header}），或把其目录加入 CPATH",
        "https://gcc.gnu.org/onlinedocs/gcc/Environment-Variables.html",
    ),
    Cause(
        "apex-cuda-mismatch",
        r"compiled with a version of Cuda that does not match the version used to compile Pytorch binaries",
        "nvcc is not of the CUDA version that torch was built with, and Apex checks the minor version too",
        "a toolkit of torch's CUDA in CUDA_HOME; if only the minor version differs, its "
        "check_cuda_torch_binary_vs_bare_metal "
        "may be commented out; powertrain.ops has rms_norm, layer_norm and AdamW without a build",
        "nvcc 与编译 torch 的 CUDA 版本不同，而 Apex 连次版本也检查",
        "将 CUDA_HOME 指向与 torch 相同的工具包；若仅次版本不同，可注释掉其 check_cuda_torch_binary_vs_bare_metal；"
        "powertrain.ops 无需编译即有 rms_norm、layer_norm 和 AdamW",
        "https://github.com/HwangBo94/Anti-UAV410/issues/26",
    ),
    Cause(
        "apex-options",
        r"(?:no such option|option|unrecognized arguments):? --(?P<option>cuda_ext|cpp_ext|global-option)\b",
        "a newer pip or setuptools does not hand --{option} to setup.py any more, so Apex is not built with its "
        "extensions",
        "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation .",
        "新版 pip 或 setuptools 不再把 --{option} 传给 setup.py，Apex 的扩展不会被编译",
        "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation .",
        "https://github.com/NVIDIA/apex",
    ),
    Cause(
        "deepspeed-cuda-mismatch",
        r"Installed CUDA version (?P<have>[\d.]+\d) does not match the version torch was compiled with "
        r"(?P<want>[\d.]+\d), "
        r"unable to compile",
        "nvcc is of CUDA {have}, torch was built with {want}: DeepSpeed does not build its ops",
        "a toolkit of CUDA {want} in CUDA_HOME, or a torch for CUDA {have}; DS_SKIP_CUDA_CHECK=1 if only the minor "
        "version differs",
        "nvcc 是 CUDA {have}，torch 用 {want} 编译：DeepSpeed 不会编译其算子",
        "将 CUDA_HOME 指向 CUDA {want} 的工具包，或安装 CUDA {have} 的 torch；若仅次版本不同：DS_SKIP_CUDA_CHECK=1",
        "https://github.com/JIA-Lab-research/MGM/issues/91",
    ),
    Cause(
        "deepspeed-op",
        r"Unable to (?:JIT load|pre-compile) (?:the )?(?P<op>\w+)",
        "DeepSpeed cannot build {op} here: a library, nvcc or the GPU does not suit; the warning above says which",
        "ds_report, which lists each op with what it misses",
        "DeepSpeed 无法在此编译 {op}：缺少库、nvcc，或 GPU 不支持；上方的警告会说明",
        "ds_report，列出每个算子缺少什么",
        "https://www.deepspeed.ai/tutorials/advanced-install/",
        confidence="likely",
    ),
    Cause(
        "libaio",
        r"requires the dev libaio \.so object and headers|cannot find -laio\b|fatal error: libaio\.h",
        "DeepSpeed's async_io needs libaio with its headers",
        "apt install libaio-dev (or: conda install -c conda-forge libaio)",
        "DeepSpeed 的 async_io 需要 libaio 及其头文件",
        "apt install libaio-dev（或 conda install -c conda-forge libaio）",
        "https://www.deepspeed.ai/tutorials/advanced-install/",
    ),
    Cause(
        "link-too-large",
        r"relocation truncated to fit",
        "the library grew past 2 GiB of code: too many archs are built into it",
        "TORCH_CUDA_ARCH_LIST=\"8.6\": only the archs of your GPUs",
        "库的代码超过 2 GiB：编译的架构太多",
        "TORCH_CUDA_ARCH_LIST=\"8.6\"：只编译本机 GPU 的架构",
        "https://github.com/pytorch/pytorch/blob/main/CMakeLists.txt",
        confidence="likely",
    ),
    Cause(
        "cross-device-link",
        r"Invalid cross-device link",
        "flash-attn's setup.py moves the wheel it downloaded, and pip's cache is on another file system than TMPDIR",
        "pip install --no-cache-dir, or TMPDIR on the file system of ~/.cache",
        "flash-attn 的 setup.py 要移动下载的 wheel，而 pip 缓存与 TMPDIR 不在同一文件系统",
        "pip install --no-cache-dir，或将 TMPDIR 设在 ~/.cache 所在的文件系统",
        "https://github.com/Dao-AILab/flash-attention/blob/main/setup.py",
        confidence="likely",
    ),
    Cause(
        "build-lock-gone",
        r"No such file or directory: '[^']{1,300}/lock'",
        "several processes build the same extension in one folder, and one removed the lock that another waited for",
        "build once, in one process, before the others start; or TORCH_EXTENSIONS_DIR of its own for each host",
        "多个进程在同一目录编译同一个扩展，其中一个删除了另一个等待的锁",
        "先在单个进程中编译一次，再启动其他进程；或为每台主机设置各自的 TORCH_EXTENSIONS_DIR",
        "https://github.com/modelscope/modelscope/issues/117",
        confidence="likely",
    ),
    Cause(
        "undefined-reference",
        r"undefined reference to [`'‘](?P<symbol>[^'’]{1,200})",
        "the linker misses {symbol}: a library is not linked, or is of another version than its headers",
        "see which library has it; build in a clean folder with one torch and one toolkit on PATH and CPATH",
        "链接器找不到 {symbol}：没有链接某个库，或库与头文件版本不同",
        "查明该符号属于哪个库；在干净的目录中编译，PATH 和 CPATH 中只保留一个 torch 和一个工具包",
        "https://github.com/triton-lang/triton/pull/3712",
        confidence="possible",
    ),
)  # fmt: skip
