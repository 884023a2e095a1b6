"""Shared libraries that do not load, and operators that are not registered."""

from powertrain.doctor.causes.cause import Cause

CAUSES = (
    Cause(
        "extension-part-missing",
        r"No module named '?(?P<module>\w{2,60}(?:_cuda|_cuda_ext|_cuda_lib|_ext|_kernels|_cpp|_C|_gpu|_hip))\b",
        "{module} is no package of its own but the compiled part of one: that package was installed without compiling "
        "it (no nvcc, a CPU torch, pip in an empty environment), or is of a release that has it not",
        "pip install -v --no-build-isolation --no-cache-dir --force-reinstall the package that has {module}, with "
        "nvcc of "
        "torch's CUDA (CUDA_HOME); its log says why it is not compiled",
        "{module} 不是独立的包，而是某个包的编译部分：该包安装时没有编译它（没有 nvcc、CPU 版 torch、隔离环境），"
        "或该版本没有它",
        "安装含有 {module} 的包：pip install -v --no-build-isolation --no-cache-dir --force-reinstall，需要与 torch "
        "同 CUDA 的 "
        "nvcc（CUDA_HOME）；日志会说明为何没有编译",
        "https://github.com/hustvl/Vim/issues/82",
        confidence="likely",
    ),
    Cause(
        "torch-libraries",
        r"lib(?:torch|c10|torch_cuda|torch_cpu|torch_python|c10_cuda|torch_cuda_cpp|torch_cuda_cu)\.so: cannot open|"
        r"operator torchvision::nms does not exist|Couldn't load custom C\+\+ ops|_torchtext\.so|"
        r"libtorchaudio\w*\.so|libtorchvision|Could not load (?:this )?library: \S{0,200}(?:_torchtext|torchaudio|"
        r"torchvision)|PyTorch and (?:torchvision|torchaudio) were compiled with different CUDA",
        "torchvision, torchaudio or an extension is for another torch (often torch was replaced, by a CPU build "
        "too), or was imported before torch",
        "pip install torch torchvision torchaudio in one line, from one --index-url; an extension of your own: "
        "import torch first",
        "torchvision、torchaudio 或某扩展对应另一个 torch（torch 常被替换，包括 CPU 版），或在 torch 之前导入",
        "在一条命令中从同一 --index-url 安装 torch torchvision torchaudio；自己的扩展：先 import torch",
        "https://github.com/pytorch/pytorch/issues/111983",
        confidence="likely",
    ),
    Cause(
        "library-file-broken",
        r"\.so\S{0,20}: (?:file too short|invalid ELF header|wrong ELF class|ELF load command)|"
        r"ImportError: \S{1,200}: (?:file too short|invalid ELF header)",
        "a library's file is not whole (0 bytes after a full disk or a broken install), or is for another kind of "
        "CPU",
        "pip install --force-reinstall --no-cache-dir the package that owns it; df -h; uname -m",
        "库文件不完整（磁盘满或安装中断后为 0 字节），或面向另一种 CPU",
        "用 pip install --force-reinstall --no-cache-dir 重装其所属的包；df -h；uname -m",
        "https://github.com/JinghaoZhao/GPT-Code-Learner/issues/11",
    ),
    Cause(
        "static-tls",
        r"cannot allocate memory in static TLS block",
        "a library with thread-local memory was loaded too late: the room that the loader keeps for it is used up",
        "import it (or torch) first in the program, or LD_PRELOAD=<that library>",
        "带线程局部存储的库加载太晚：加载器预留的空间已用完",
        "在程序最前面导入它（或 torch），或 LD_PRELOAD=<该库>",
        "https://sourceware.org/bugzilla/show_bug.cgi?id=17090",
    ),
    Cause(
        "executable-stack",
        r"cannot enable executable stack",
        "the library asks for an executable stack, which this system's C library or SELinux refuses",
        "a newer version of the package; patchelf --clear-execstack <library>",
        "该库要求可执行栈，而系统 C 库或 SELinux 拒绝",
        "升级该包；patchelf --clear-execstack <库>",
        "https://github.com/NixOS/patchelf",
    ),
    Cause(
        "openmp-twice",
        r"OMP: Error #15|Initializing libiomp5\w*(?:\.dll|\.so|\.dylib)?, but found",
        "two copies of Intel's OpenMP are loaded, conda's and that of torch or NumPy",
        "one source for torch, NumPy and MKL (all pip or all conda); KMP_DUPLICATE_LIB_OK=TRUE only hides it",
        "加载了两份 OpenMP：conda 的与 torch 或 NumPy 自带的",
        "torch、NumPy、MKL 来自同一来源（全用 pip 或全用 conda）；KMP_DUPLICATE_LIB_OK=TRUE 只是掩盖",
        "https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-linux/",
    ),
    Cause(
        "mkl-loading",
        r"MKL_THREADING_LAYER=\w+ is incompatible|Intel MKL FATAL ERROR: Cannot load|MKL FATAL ERROR",
        "MKL was mixed with another OpenMP, or a part of it is missing",
        "MKL_THREADING_LAYER=GNU, or import numpy before torch; reinstall mkl and numpy from one source",
        "MKL 与另一种 OpenMP 混用，或缺少其中一部分",
        "MKL_THREADING_LAYER=GNU，或先 import numpy 再 import torch；从同一来源重装 mkl 和 numpy",
        "https://github.com/pytorch/pytorch/issues/37377",
        confidence="likely",
    ),
    Cause(
        "extension-not-registered",
        r"'_OpNamespace' '(?P<namespace>\w+)' object has no attribute '(?P<op>\w+)'|"
        r"Could not run '(?P<ran>[\w:.]+)' with arguments from the '(?P<backend>\w+)' backend|"
        r"No such operator (?P<operator>[\w:]+)",
        "an operator is not registered for this device: the compiled part of its package did not load, or was "
        "built without CUDA (or for the CPU alone)",
        "reinstall the package for this torch and CUDA (torchvision, vllm, xformers …); its import warning says "
        "why it did not load; or move the tensors to a device that has it",
        "算子没有为该设备注册：其包的编译部分未能加载，或编译时没有 CUDA",
        "按当前 torch 和 CUDA 重装该包（torchvision、vllm、xformers 等）；其导入警告说明了原因；"
        "或把张量移到支持的设备",
        "https://github.com/pytorch/vision/issues/4192",
        confidence="likely",
    ),
    Cause(
        "wsl-libcuda-link",
        r"libcuda\.so\.1 is not a symbolic link",
        "WSL has libcuda.so, libcuda.so.1 and libcuda.so.1.1 as three equal files; ldconfig says so, and no "
        "program is harmed",
        "nothing; to silence it, make the first two links to the third, in C:\\Windows\\System32\\lxss\\lib",
        "WSL 中 libcuda.so、libcuda.so.1、libcuda.so.1.1 是三个相同文件；ldconfig 只是提示，不影响程序",
        "无需处理；要消除提示，可在 C:\\Windows\\System32\\lxss\\lib 中将前两个改为指向第三个的链接",
        "https://github.com/microsoft/WSL/issues/5663",
    ),
    Cause(
        "torch-symbol",
        r"undefined symbol: (?P<symbol>_Z\w*(?:3c10|N2at|2at\d|5torch|6caffe2)\w+)",
        "a compiled package was built for another torch than the one installed: {symbol} is one of torch's C++ "
        "names",
        "install its build for this torch, or build it again: pip install --no-build-isolation --no-cache-dir "
        "--force-reinstall --no-deps <package>",
        "某个编译的包面向另一个版本的 torch：{symbol} 是 torch 的 C++ 符号",
        "安装对应当前 torch 的版本，或重新编译：pip install --no-build-isolation --no-cache-dir --force-reinstall "
        "--no-deps <包>",
        "https://github.com/Dao-AILab/flash-attention/issues/928",
    ),
    Cause(
        "numpy-import",
        r"numpy\.core\.multiarray failed to import|[Nn]umpy is not available",
        "NumPy cannot be loaded by a compiled module: it is not installed here, or of another major version than "
        "the module was built with",
        "pip install numpy; if it is there: 'numpy<2', or a newer version of that module",
        "编译的模块无法加载 NumPy：没有安装，或与编译时的主版本不同",
        "pip install numpy；若已安装：'numpy<2'，或升级该模块",
        "https://github.com/pytorch/pytorch/issues/2188",
        confidence="likely",
    ),
)  # fmt: skip
