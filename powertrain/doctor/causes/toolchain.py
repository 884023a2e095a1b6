"""Compilers of Windows, flags of nvcc, and builds of other languages."""

from powertrain.doctor.causes.cause import Cause

CAUSES = (
    Cause(
        "not-nvcc",
        r"identifier \"(?:threadIdx|blockIdx|blockDim|gridDim|__syncthreads)\" is undefined|"
        r"'(?:threadIdx|blockIdx|blockDim)' (?:was not declared|undeclared)|error ?: \"half\" is ambiguous|"
        r"'__global__' does not name a type|unknown type name '__global__'",
        "CUDA code is compiled by the host's compiler (or shown by its editor) instead of nvcc: the file does not end "
        "in .cu, is included by a .cpp, or the project has no CUDA language",
        "nvcc for what includes kernels: .cu files, project(... LANGUAGES CXX CUDA), Visual Studio's CUDA build "
        "customization; an editor's underline alone is no error",
        "CUDA 代码由主机编译器（或编辑器）处理而不是 nvcc：文件不是 .cu、被 .cpp 包含，或工程未启用 CUDA 语言",
        "含核函数的文件用 nvcc：.cu 文件、project(... LANGUAGES CXX CUDA)、Visual Studio 的 CUDA 生成自定义",
        "https://github.com/NVIDIA/cutlass/issues/1594",
        confidence="likely",
    ),
    Cause(
        "cl-not-found",
        r"Cannot find compiler 'cl\.exe'|Error checking compiler version for cl\b|"
        r"'cl' is not recognized|cannot run 'rc\.exe'|vcvarsall\.bat was not found|"
        r"Microsoft Visual Studio .{0,40}vcvars",
        "Visual C++'s compiler is not on PATH: nvcc and torch need cl.exe (and rc.exe) on Windows",
        "start in the \"x64 Native Tools Command Prompt\" of Visual Studio (vcvars64.bat); install "
        "the workload \"Desktop development with C++\" and a Windows SDK",
        "PATH 中没有 Visual C++ 编译器：Windows 上 nvcc 和 torch 需要 cl.exe（及 rc.exe）",
        "在 Visual Studio 的 x64 Native Tools 提示符（vcvars64.bat）中运行；安装“使用 C++ "
        "的桌面开发”和 Windows SDK",
        "https://docs.pytorch.org/docs/stable/notes/windows.html",
    ),
    Cause(
        "msvc-preprocessor",
        r"traditional preprocessor is used|/Zc:preprocessor",
        "CUDA's newer headers need MSVC's standard preprocessor, and cl.exe was started with the "
        "old one",
        "add -Xcompiler /Zc:preprocessor to nvcc's flags (NVCC_APPEND_FLAGS=\"-Xcompiler "
        "/Zc:preprocessor\"), or a CUDA before 13",
        "新版 CUDA 头文件需要 MSVC 的标准预处理器，而 cl.exe 使用旧的",
        "nvcc 加 -Xcompiler /Zc:preprocessor（NVCC_APPEND_FLAGS），或使用 13 之前的 CUDA",
        "https://github.com/microsoft/onnxruntime-genai/pull/2054",
    ),
    Cause(
        "nvcc-input-file",
        r"A single input file is required for a non-link phase|"
        r"nvcc fatal {1,5}: Don't know what to do with",
        "nvcc got a word that it reads as a second file: a flag of the host compiler (/wd4996, "
        "/EHsc, -fopenmp) without -Xcompiler, or a path with a space",
        "pass host flags as -Xcompiler=FLAG (in CMake: $<$<COMPILE_LANGUAGE:CXX>:FLAG>); no spaces "
        "in paths",
        "nvcc 把某个词当成第二个输入文件：没有 -Xcompiler 的宿主编译器选项，或含空格的路径",
        "宿主选项用 -Xcompiler=FLAG（CMake：$<$<COMPILE_LANGUAGE:CXX>:FLAG>）；路径不要有空格",
        "https://github.com/pytorch/executorch/pull/20184",
        confidence="likely",
    ),
    Cause(
        "windows-link",
        r"error LNK2001: unresolved external|error LNK2019: unresolved external|fatal error LNK1120|"
        r"fatal error LNK1104|LNK1112",
        "the Windows linker misses a symbol or file: a library of another torch, CUDA or Python, "
        "of 32 bits, or one that is in use",
        "build from clean (rmdir /s build) with the x64 prompt; one torch, CUDA and Python for "
        "all; end programs that use the .pyd",
        "Windows 链接器缺少符号或文件：属于另一 torch、CUDA、Python 的库、32 位库，或文件被占用",
        "在 x64 提示符中清理后重新编译（rmdir /s build）；统一 torch、CUDA、Python 版本；结束占用 "
        ".pyd 的程序",
        "https://learn.microsoft.com/cpp/error-messages/tool-errors/linker-tools-error-lnk2019",
        confidence="likely",
    ),
    Cause(
        "not-position-independent",
        r"recompile with -fPIC",
        "a static library or object was compiled without -fPIC, and goes into a shared library",
        "compile it with -fPIC (CFLAGS=-fPIC CXXFLAGS=-fPIC, CMAKE_POSITION_INDEPENDENT_CODE=ON), "
        "or link its shared version",
        "静态库或目标文件编译时没有 -fPIC，却要链接进共享库",
        "用 -fPIC 重新编译（CFLAGS、CXXFLAGS，CMAKE_POSITION_INDEPENDENT_CODE=ON），或链接其共享版本",
        "https://gcc.gnu.org/onlinedocs/gcc/Code-Gen-Options.html",
    ),
    Cause(
        "half-operators",
        r"no suitable (?:conversion|user-defined conversion).{0,60}__(?:half|nv_bfloat16)|"
        r"no operator .{1,80}__half|operand types are: __half|__nv_bfloat16. to",
        "torch's flags switch off the operators of __half and __nv_bfloat16, and this source uses "
        "them",
        "add -U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ "
        "-U__CUDA_NO_BFLOAT16_CONVERSIONS__ to nvcc's flags; build for sm_80 and newer where it is "
        "bf16",
        "torch 的编译选项关闭了 __half、__nv_bfloat16 的运算符，而该源码使用它们",
        "nvcc 选项加 -U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ "
        "-U__CUDA_NO_BFLOAT16_CONVERSIONS__；bf16 只为 sm_80 以上编译",
        "https://docs.pytorch.org/docs/stable/cpp_extension.html",
        confidence="likely",
    ),
    Cause(
        "arch-too-old-for-source",
        r"no instance of overloaded function .{0,3}atomicAdd|requires \.target sm_(?P<need>\d+)",
        "the source uses instructions that the oldest arch it is compiled for does not have",
        "leave older archs out: TORCH_CUDA_ARCH_LIST=\"8.0;9.0\" (your GPU's), and no sm_{need}-less "
        "ones in its setup.py",
        "源码使用了所编译的最旧架构没有的指令",
        "去掉较旧的架构：TORCH_CUDA_ARCH_LIST=\"8.0;9.0\"（您的 GPU 的）",
        "https://docs.nvidia.com/cuda/parallel-thread-execution/",
    ),
    Cause(
        "kernel-shared-memory",
        r"uses too much shared data",
        "a kernel declares more shared memory than the arch has",
        "compile for the arch it was written for only; a smaller tile or dynamic shared memory in "
        "the source",
        "某个 kernel 声明的共享内存超过该架构上限",
        "只为其适用的架构编译；减小 tile 或改用动态共享内存",
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/",
    ),
    Cause(
        "device-link",
        r"Unresolved extern function",
        "device code calls a function of another file: relocatable device code is off, or a "
        "library of device code is not linked",
        "nvcc -rdc=true (dlink=True in CUDAExtension, CUDA_SEPARABLE_COMPILATION=ON), and "
        "-lcudadevrt",
        "设备代码调用了另一文件的函数：未启用可重定位设备代码，或未链接设备库",
        "nvcc -rdc=true（CUDAExtension 的 dlink=True、CUDA_SEPARABLE_COMPILATION=ON）及 -lcudadevrt",
        "https://docs.nvidia.com/cuda/cuda-compiler-driver-nvcc/",
        confidence="likely",
    ),
    Cause(
        "rust-too-new",
        r"casting `&T` to `&mut T` is undefined behavior|invalid_reference_casting",
        "an old tokenizers is built from source, and newer Rust refuses its code: there is no "
        "wheel of it for this Python",
        "a newer tokenizers and transformers that have a wheel for this Python; or Python 3.10; or "
        "RUSTFLAGS=\"-A invalid_reference_casting\"",
        "正在从源码编译旧版 tokenizers，而新版 Rust 拒绝其代码：没有适合该 Python 的 wheel",
        "使用有 wheel 的新版 tokenizers 和 transformers；或 Python 3.10；或 RUSTFLAGS=\"-A "
        "invalid_reference_casting\"",
        "https://github.com/huggingface/transformers/issues/28039",
    ),
    Cause(
        "cython-version",
        r"Cython\.Compiler\.Errors|AttributeError: cython_sources|longintrepr\.h|"
        r"has no member named .use_tracing|Cannot assign type .{1,80} except",
        "the package was written for an older Cython or Python than those that build it",
        "a newer release of it that has a wheel; or an older Python (3.10); or echo 'cython<3' > "
        "c.txt && PIP_CONSTRAINT=c.txt pip install ...",
        "该包面向更旧的 Cython 或 Python",
        "使用有 wheel 的新版；或更旧的 Python（3.10）；或 echo 'cython<3' > c.txt && "
        "PIP_CONSTRAINT=c.txt pip install ...",
        "https://cython.readthedocs.io/en/latest/src/userguide/migrating_to_cy30.html",
        confidence="likely",
    ),
    Cause(
        "sklearn-name",
        r"'sklearn' PyPI package is deprecated",
        "a requirement says sklearn, and the package's name is scikit-learn",
        "pip install scikit-learn; SKLEARN_ALLOW_DEPRECATED_SKLEARN_PACKAGE_INSTALL=True lets the "
        "old name pass",
        "依赖写的是 sklearn，而包名为 scikit-learn",
        "pip install scikit-learn；SKLEARN_ALLOW_DEPRECATED_SKLEARN_PACKAGE_INSTALL=True 可放行旧名",
        "https://pypi.org/project/sklearn/",
    ),
    Cause(
        "package-folder",
        r"error: package directory '[^']{1,200}' does not exist|"
        r"error: file '[^']{1,200}' does not exist|can't copy '[^']{1,200}': doesn't exist|"
        r"assert len\(sources\) > 0",
        "setup.py names a folder or file that does not exist: submodules are missing, or it was "
        "started from another folder",
        "git submodule update --init --recursive; run pip in the folder of setup.py; a whole clone "
        "instead of a downloaded archive",
        "setup.py 所列的目录或文件不存在：缺少子模块，或在别的目录启动",
        "git submodule update --init --recursive；在 setup.py 所在目录运行 pip；用完整克隆代替下载的压缩包",
        "https://setuptools.pypa.io/en/latest/userguide/package_discovery.html",
        confidence="likely",
    ),
)  # fmt: skip
