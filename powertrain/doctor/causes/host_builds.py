"""Builds that stop in the host's compiler or linker: instructions of another CPU, intrinsics, objects, old toolkits."""

from powertrain.doctor.causes.cause import Cause

CAUSES = (
    Cause(
        "openmp-missing",
        r"\bomp\.h\W{0,3} ?(?:file not found|No such file)|OpenMP support not found|unsupported option '-fopenmp'|"
        r"cannot find -l(?:i?omp5?|gomp)\b|library not found for -l(?:i?omp)",
        "the compiler that is used has no OpenMP: Apple's clang brings none, other clangs and small images need a "
        "package",
        "macOS: brew install libomp, then CXX of brew's llvm or CPATH and LIBRARY_PATH of libomp; Linux: apt install "
        "libomp-dev (clang) or g++; conda install -c conda-forge llvm-openmp; without it TORCHDYNAMO_DISABLE=1",
        "所用编译器没有 OpenMP：Apple 的 clang 不带，其他 clang 和小型镜像需要安装软件包",
        "macOS：brew install libomp，再设置 brew 的 llvm 为 CXX，或 libomp 的 CPATH、LIBRARY_PATH；"
        "Linux：apt install libomp-dev（clang）或使用 g++；conda install -c conda-forge llvm-openmp；"
        "否则 TORCHDYNAMO_DISABLE=1",
        "https://github.com/pytorch/pytorch/issues/95708",
        confidence="likely",
    ),
    Cause(
        "host-compiler-old-for-torch",
        r"include/(?:ATen/(?:cpu/)?vec|c10/util|ATen/core)\S{0,200}:\d+:\d+: error|"
        r"#error .{0,30}(?:C\+\+17|C\+\+20|GCC \d+|PyTorch).{0,60}(?:required|or (?:later|newer)|need)|"
        r"too old version of GCC|unrecognized command[- ]line option .-std=c\+\+(?:17|20|2a)",
        "the host compiler is too old for the headers of this torch (2.0 wants C++17 and gcc 9, later releases more)",
        "g++ 10 to 12 first on PATH: CC=gcc-11 CXX=g++-11 (apt install g++-11; scl or module load on clusters; conda "
        "install -c conda-forge gxx=11), rm -r /tmp/torchinductor_$USER ~/.cache/torch_extensions, then the same "
        "command",
        "主机编译器对该 torch 的头文件而言太旧（2.0 需要 C++17 和 gcc 9，更新的版本要求更高）",
        "让 g++ 10 至 12 排在 PATH 最前：CC=gcc-11 CXX=g++-11（apt install g++-11；集群上用 scl 或 module load；"
        "conda install -c conda-forge gxx=11），删除 /tmp/torchinductor_$USER 和 ~/.cache/torch_extensions 后重试",
        "https://github.com/pytorch/pytorch/issues/130815",
        confidence="likely",
    ),
    Cause(
        "host-compiler-vendor",
        r"[Uu]nsupported (?:NVHPC|PGI|ICC|Intel|IBM|XL) (?:C\+\+ )?(?:compiler|version)|nvc\+\+ is the only|"
        r"\bICC\b.{0,30}(?:not supported|unsupported)|#error.{0,30}(?:Intel|PGI|nvc) compiler",
        "the host compiler is another vendor's (a cluster's module sets CC, CXX or nvcc's -ccbin): nvcc and torch's "
        "extensions are made for GNU's",
        "module unload nvhpc intel; CC=gcc CXX=g++ CUDAHOSTCXX=g++ NVCC_PREPEND_FLAGS='-ccbin g++' <the same command>, "
        "with a g++ that this CUDA takes",
        "主机编译器是其他厂商的（集群的 module 设置了 CC、CXX 或 nvcc 的 -ccbin）：nvcc 和 torch 扩展面向 GNU 编译器",
        "module unload nvhpc intel；CC=gcc CXX=g++ CUDAHOSTCXX=g++ NVCC_PREPEND_FLAGS='-ccbin g++' <原命令>，"
        "g++ 版本需被该 CUDA 支持",
        "https://github.com/NVIDIA/apex/issues/1833",
        confidence="likely",
    ),
    Cause(
        "msvc-options",
        r"command[- ]line error D8\d{3}|error D8\d{3}\s?:|: \S+ D8016\b",
        "Visual Studio's cl refuses options that torch or the build gives it: they do not go together, or not in this "
        "release of cl",
        "the Visual Studio toolset of this torch's time (vcvarsall.bat x64 -vcvars_ver=14.3x), or a newer torch; for "
        'torch.compile on a CPU: TORCHDYNAMO_DISABLE=1 or backend="aot_eager"; WSL',
        "Visual Studio 的 cl 拒绝 torch 或构建给出的选项：它们互斥，或该版本不支持",
        "使用与该 torch 同期的 Visual Studio 工具集（vcvarsall.bat x64 -vcvars_ver=14.3x），或升级 torch；"
        'CPU 上的 torch.compile 可用 TORCHDYNAMO_DISABLE=1 或 backend="aot_eager"；WSL',
        "https://github.com/EnragedAntelope/comfyui-sdnq/issues/21",
        confidence="likely",
    ),
    Cause(
        "nvcc-ended",
        r"nvcc(?:\.exe)?'? failed with exit (?:status|code) (?:255|137|139|-9|-11|9|11)\b",
        "a part of nvcc ended without an error of the source: most often memory ran out (many compilers at once), else "
        "the compiler itself crashed",
        "powertrain build -- <the same command>, or MAX_JOBS=1 NVCC_THREADS=1; dmesg -T | grep -i 'killed process'; "
        "if it "
        "ends alone too: a newer CUDA toolkit",
        "nvcc 的某个部分在没有源码错误的情况下结束：多为内存耗尽（同时编译过多），否则是编译器自身崩溃",
        "powertrain build -- <原命令>，或 MAX_JOBS=1 NVCC_THREADS=1；dmesg -T | grep -i 'killed process'；"
        "单独编译仍失败则升级 CUDA",
        "https://github.com/Dao-AILab/flash-attention/issues/298",
        confidence="possible",
    ),
    Cause(
        "cpu-instructions",
        r"target specific option mismatch|vector return without \w{1,20} enabled changes the ABI|"
        r"(?:unrecognized|unknown|invalid) (?:command[- ]line )?option .{0,3}-m(?:avx|sse|fma|amx|arch|cpu)\S{0,20}|"
        r"#error.{0,40}\b(?:AVX\d*|SSE\d?|NEON)\b.{0,40}(?:required|not enabled|support)",
        "the source uses instructions of a CPU ({isa}) that the compiler was not told to build for, or does not know: "
        "its flags are for another CPU than the one here (conda's or a cluster's compiler sets its own)",
        "build on the machine that runs it with CFLAGS and CXXFLAGS=-march=native, and without the compiler's own "
        "-march; a compiler that knows the CPU (gcc 9 or newer); without this operation: DS_BUILD_CPU_ADAM=0 for "
        "DeepSpeed",
        "源码使用了某种 CPU 指令（{isa}），而编译器未被要求为其编译，或不认识它：编译选项针对别的 CPU（conda "
        "或集群的编译器"
        "会设置自己的选项）",
        "在运行的机器上以 CFLAGS、CXXFLAGS=-march=native 编译，去掉编译器自带的 -march；使用认识该 CPU 的编译器（gcc 9 "
        "以上）；或不编译该操作：DeepSpeed 用 DS_BUILD_CPU_ADAM=0",
        "https://github.com/deepspeedai/DeepSpeed/issues/7556",
        confidence="likely",
        derive=lambda groups, excerpt: {"isa": _isa("\n".join([*excerpt.above[-3:], excerpt.line]))},
        derives=("isa",),
    ),
    Cause(
        "gcc-intrinsics",
        r"\w{1,12}intrin\.h\S{0,12} error|identifier \"__builtin_ia32_\w+\" is undefined",
        "nvcc cannot read the intrinsics headers of this gcc: a release of gcc (its minor number counts) that this "
        "CUDA "
        "toolkit does not know",
        "another gcc within the toolkit's bounds: gcc-6 or 7 for CUDA 9 and 10, gcc-9 or 10 for 11, gcc-11 or 12 for "
        "12: "
        "CC=gcc-N CXX=g++-N NVCC_PREPEND_FLAGS='-ccbin g++-N' <the same command>; or a newer toolkit",
        "nvcc 无法读取该 gcc 的 intrinsics 头文件：该 CUDA 工具包不认识这个 gcc 版本（次版本号也有关）",
        "换用工具包支持的其他 gcc：CUDA 9、10 用 gcc-6 或 7，11 用 gcc-9 或 10，12 用 gcc-11 或 12：CC=gcc-N CXX=g++-N "
        "NVCC_PREPEND_FLAGS='-ccbin g++-N' <原命令>；或升级工具包",
        "https://github.com/NVIDIA/apex/issues/529",
        confidence="likely",
    ),
    Cause(
        "object-missing",
        r"cannot find \S{1,300}\.(?:o|obj|so\.o)\b(?::|$)|no such file or directory: '\S{1,200}\.o'|"
        r"\b(?P<object>[\w.+-]{1,100}\.o): No such file or directory",
        "the linker needs an object file that was not made: its compile step failed or did not run (an earlier, "
        "interrupted or parallel build), or this release's build has a defect",
        "rm -r build *.egg-info and pip's cache, then build again one at a time: MAX_JOBS=1, no -j in --build-option "
        "or "
        "--global-option, pip install -v: the first error is the cause; else the release before or after it",
        "链接器需要的目标文件不存在：其编译步骤失败或没有执行（此前中断或并行的编译），或该版本的构建有缺陷",
        "删除 build、*.egg-info 和 pip 缓存，再逐个编译：MAX_JOBS=1，--build-option 中不要 -j，pip install -v："
        "第一个错误即"
        "原因；否则换前一或后一个版本",
        "https://github.com/deepspeedai/DeepSpeed/issues/5192",
        confidence="likely",
    ),
    Cause(
        "cuda-source-release",
        r"error: (?:no matching (?:function|constructor|member function) for call to|could not convert|"
        r"(?:reference|call) to .{1,60} is ambiguous|static assertion failed)|"
        r"\.(?:cu|cuh|h|hpp)\(\d+\): error: (?:type name is not allowed|no instance of (?:overloaded function|"
        r"constructor|function template)|expected an? (?:expression|identifier|declaration|\S{1,3}\")|"
        r"no suitable (?:user-defined )?conversion|name must be a namespace name|"
        r"a template argument list is not allowed|constexpr if|more than one (?:instance|operator)|"
        r"qualified name is not allowed|class template .{0,80}has already been defined|"
        r"(?:variable|function) .{0,80}has already been defined)",
        "the compiler does not accept the source: it is of another time than this CUDA toolkit or these torch "
        "headers (it "
        "uses C++ or functions that they do not have, or that changed)",
        "the release of the package that is as old as this CUDA and torch (an older tag for an old toolkit), or a "
        "newer toolkit with its torch; one toolkit on the include path; NVIDIA's pytorch image has a set that fits",
        "编译器不接受该源码：源码与该 CUDA 工具包或 torch 头文件年代不同（使用了其没有或已改变的 C++ 特性或函数）",
        "使用与该 CUDA、torch 同期的源码版本（旧工具包用旧标签），或升级工具包和 torch；include "
        "路径中只保留一个工具包；"
        "NVIDIA 的 pytorch 镜像自带匹配的组合",
        "https://github.com/NVIDIA/apex/issues/1263",
        confidence="likely",
    ),
)


def _isa(text: str) -> str:
    """The instruction set that a compiler's lines name."""
    lowered = text.lower()
    names = ("avx512", "amx", "avx2", "avx", "fma", "sse", "neon", "sve")
    return next((name.upper() for name in names if name in lowered), "such as AVX-512")
