"""A built extension, or a package, does not load."""

from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.excerpt import Excerpt
from powertrain.doctor.library_names import library_of_module, way_to_module
from powertrain.doctor.releases import NAMESPACES

_TE = "https://github.com/NVIDIA/TransformerEngine/issues/"
_FA = "https://github.com/Dao-AILab/flash-attention/issues/"
_TORCH = "https://github.com/pytorch/pytorch/issues/"


def _way(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str]:
    return {"way": way_to_module(groups["module"]) or "python -m pip install it"}


def _part_of_python(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    library = library_of_module(groups["module"])
    return None if library is None else {"library": library}


def _of_one_package(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    return None if groups["package"] in NAMESPACES else {}


CAUSES = (
    Cause(
        "cublas-older",
        r"undefined symbol: cublas\w+|symbol cublas\w+,? version \S+ not defined",
        "another cuBLAS than the one it was built with is loaded: an older one",
        "pip install --upgrade nvidia-cublas-cu12 (or nvidia-cublas for CUDA 13) to torch's version; unset "
        "LD_LIBRARY_PATH",
        "加载的 cuBLAS 不是编译时的版本，而是更旧的",
        "pip install --upgrade nvidia-cublas-cu12（CUDA 13 为 nvidia-cublas）；unset LD_LIBRARY_PATH",
        _TE + "2504",
    ),
    Cause(
        "undefined-symbol",
        r"(?<![\w.+-])(?=[\w.+-]*\.so)(?P<library>[\w.+-]+): undefined symbol: "
        r"(?P<symbol>_Z(?=\w*(?:3c10|2at\d|2at_|N2at|5torch|6caffe2))\w+|THP\w+|THC\w+)",
        "{library} was compiled for another torch than the one installed, whose C++ names differ (release or C++ "
        "ABI), or was loaded before torch",
        "install a build of it for this torch, or build it again: pip install --no-build-isolation --no-cache-dir "
        "--force-reinstall --no-deps <package>; an extension of your own: import torch before it",
        "{library} 是为另一个版本的 torch 编译的，C++ 符号不同（版本或 ABI），或在 torch 之前加载",
        "安装对应当前 torch 的版本，或重新编译：pip install --no-build-isolation --no-cache-dir --force-reinstall "
        "--no-deps <包>；自己的扩展：先 import torch",
        _FA + "931",
        confidence="likely",
    ),
    Cause(
        "library-of-another-cuda",
        r"(?<!dlerror: )lib(?:cublas|cublasLt|cudart|nvrtc|cufft|cusparse)\.so\.(?P<major>\d+)[.\d]*: cannot open "
        r"shared object",
        "a package for CUDA {major} is installed beside a torch for another CUDA",
        "powertrain doctor --only versions names it; install its build for torch's CUDA (cu12 or cu13 in its name, "
        "or in that of its wheel or index)",
        "装了面向 CUDA {major} 的包，而 torch 是另一个 CUDA 版本",
        "powertrain doctor --only versions 会指出该包；安装与 torch 的 CUDA 一致的版本（包名、wheel 名或索引中的 "
        "cu12、cu13）",
        _TE + "2040",
        confidence="likely",
    ),
    Cause(
        "cudnn-8",
        r"libcudnn\w*\.so\.8[.\d]*: cannot open shared object",
        "a library was built for cuDNN 8, which torch before 2.4 brought; newer ones bring cuDNN 9 alone",
        "a newer build of that library, for cuDNN 9; where torch is older than 2.4: import torch first, or pip install "
        "'nvidia-cudnn-cu12<9' in an environment of its own",
        "某个库面向 cuDNN 8；torch 2.4 之前自带它，之后只带 cuDNN 9",
        "使用面向 cuDNN 9 的版本；torch 低于 2.4 时先 import torch，或在单独的环境中 pip install 'nvidia-cudnn-cu12<9'",
        "https://github.com/pytorch/pytorch/releases/tag/v2.4.0",
        confidence="likely",
    ),
    Cause(
        "cudnn-not-found",
        r"libcudnn\w*\.so(?!\.8)[.\d]*: cannot open shared object",
        "cuDNN lies in site-packages, where this library does not look",
        "import torch first, or LD_LIBRARY_PATH=$(python -c 'import nvidia.cudnn as c; print(c.__path__[0])')/lib",
        "cuDNN 在 site-packages 中，而该库不在那里查找",
        "先 import torch，或 LD_LIBRARY_PATH=$(python -c 'import nvidia.cudnn as c; print(c.__path__[0])')/lib",
        _TE + "1853",
    ),
    Cause(
        "te-extension-missing",
        r"Could not find shared object file for Transformer Engine|Could not find libtransformer_engine\.so|"
        r"so_path = next\(so_dir\.glob|No module named '?transformer_engine_(?:extensions|torch)|"
        r"module 'transformer_engine' has no attribute 'pytorch'",
        "TransformerEngine's core is installed without its torch part, or it is imported from its own source folder",
        "leave the source folder; pip install --no-build-isolation 'transformer_engine[pytorch]' at the core's version",
        "只安装了 TransformerEngine 的核心而没有 torch 部分，或在其源码目录中导入",
        "离开源码目录；pip install --no-build-isolation 'transformer_engine[pytorch]'，版本与核心一致",
        _TE + "2505",
    ),
    Cause(
        "glibc",
        r"version `(?P<version>GLIBC_[\d.]+)' not found",
        "the wheel was built on a newer Linux: this one's C library has no {version}, and that cannot be added",
        "build it here (--no-binary, --no-build-isolation), or use a container with a newer base",
        "该 wheel 在更新的 Linux 上编译：本机 C 库没有 {version}，且无法补上",
        "在本机编译（--no-binary，--no-build-isolation），或使用更新的基础镜像",
        _FA + "1708",
    ),
    Cause(
        "libstdcxx",
        r"version `(?P<version>(?:GLIBCXX|CXXABI)_[\d.]+)' not found",
        "an older libstdc++ is loaded first, often conda's, than the one it was compiled with",
        "conda install -c conda-forge libstdcxx-ng, or LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libstdc++.so.6",
        "先加载了较旧的 libstdc++（常为 conda 自带）",
        "conda install -c conda-forge libstdcxx-ng，或 LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libstdc++.so.6",
        "https://github.com/kvcache-ai/ktransformers/issues/439",
    ),
    Cause(
        "numpy-major",
        r"compiled using NumPy 1\.x cannot be run in|_ARRAY_API not found|numpy\.dtype size changed",
        "a module was compiled against NumPy 1, and NumPy 2 is installed",
        "pip install 'numpy<2', or a newer version of that module",
        "某模块是针对 NumPy 1 编译的，而安装的是 NumPy 2",
        "pip install 'numpy<2'，或升级该模块",
        _TORCH + "135013",
    ),
    Cause(
        "flash-attention-3-missing",
        r"No module named '?(?P<module>flash_attn_interface|flash_attn_3(?:_cuda)?|flashattn_hopper_cuda)\b",
        "{module} is FlashAttention-3's, for Hopper GPUs; pip install flash-attn does not have it",
        "in flash-attention's source: cd hopper && python setup.py install; or use flash_attn (FlashAttention-2); "
        "powertrain.compat.flash_attn_interface needs no build",
        "{module} 属于 FlashAttention-3（Hopper GPU）；pip install flash-attn 不包含它",
        "在 flash-attention 源码中：cd hopper && python setup.py install；或使用 flash_attn（FlashAttention-2）；"
        "powertrain.compat.flash_attn_interface 无需编译",
        "https://github.com/Dao-AILab/flash-attention#flashattention-3-beta-release",
    ),
    Cause(
        "softmax-kernels",
        r"No module named '?(?P<module>scaled_\w{1,60}_cuda|fused_rotary_positional_embedding)",
        "{module}, a CUDA extension that GPT-NeoX and older Megatrons compile from their own fused_kernels, and newer "
        "ones take from Apex, was not built for this Python",
        "GPT-NeoX: python megatron/fused_kernels/setup.py install in its folder, or without it "
        "\"scaled_upper_triang_masked_softmax_fusion\": false; Megatron: Apex from source with APEX_CPP_EXT=1 "
        "APEX_CUDA_EXT=1, or --no-masked-softmax-fusion",
        "{module} 未为此 Python 编译：GPT-NeoX 与旧版 Megatron 从自己的 fused_kernels 编译，新版 Megatron 用 Apex 中的",
        "GPT-NeoX：在其目录中 python megatron/fused_kernels/setup.py install，或设 "
        "\"scaled_upper_triang_masked_softmax_fusion\": false；Megatron：以 APEX_CPP_EXT=1 APEX_CUDA_EXT=1 从源码安装 "
        "Apex，或 --no-masked-softmax-fusion",
        "https://github.com/EleutherAI/gpt-neox",
        confidence="likely",
    ),
    Cause(
        "apex-extensions",
        r"No module named '?(?P<module>amp_C|fused_layer_norm_cuda|fused_weight_gradient_mlp_cuda)|"
        r"(?:apex\.[\w.]{1,60}|Fused\w{1,40}) requires cuda extensions",
        "Apex was installed as Python only, without its CUDA extensions",
        "in its source: APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation .   "
        "# older: --config-settings '--build-option=--cuda_ext'; or powertrain.ops: rms_norm, "
        "layer_norm and AdamW need no build",
        "Apex 只装了 Python 部分，没有 CUDA 扩展",
        "在其源码中：APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation .   # 或无需编译的 "
        "powertrain.ops：rms_norm、layer_norm、AdamW",
        "https://github.com/NVIDIA/apex/issues/1755",
    ),
    Cause(
        "fused-kernels-missing",
        r"Fused kernels configured but not installed",
        "GPT-NeoX imports fused kernels that were built for another Python or environment",
        "python megatron/fused_kernels/setup.py install with the Python that trains, or set the *_fusion keys to false",
        "GPT-NeoX 要导入的 fused kernels 是为另一个 Python 或环境编译的",
        "用训练所用的 Python 执行 python megatron/fused_kernels/setup.py install，或将 *_fusion 设为 false",
        "https://github.com/EleutherAI/gpt-neox/issues/610",
    ),
    Cause(
        "filesystem-symbol",
        r"undefined symbol: (?P<symbol>_ZN?K?St10filesystem\w*)",
        "it was compiled by a gcc before 9, whose libstdc++ has no std::filesystem; torch has nothing to do with it",
        "build it again with g++ 9 or newer: CC=gcc-11 CXX=g++-11 <the same command>",
        "它由 9 之前的 gcc 编译，其 libstdc++ 没有 std::filesystem；与 torch 无关",
        "用 g++ 9 或更新版本重新编译：CC=gcc-11 CXX=g++-11 <原命令>",
        _TE + "611",
    ),
    Cause(
        "libstdcxx-symbol",
        r"undefined symbol: (?P<symbol>__cxa_\w+|_ZN?K?St(?!10filesystem)\w+|_ZN?K?S[absiod]\w+)",
        "it was compiled by a newer gcc than the libstdc++ that is loaded (often conda's): {symbol} is not in it",
        "conda install -c conda-forge libstdcxx-ng, or LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libstdc++.so.6, or build "
        "it with the gcc of this environment",
        "编译它的 gcc 比加载的 libstdc++（常为 conda 自带）新：其中没有 {symbol}",
        "conda install -c conda-forge libstdcxx-ng，或 LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libstdc++.so.6，"
        "或用本环境的 gcc 编译",
        _FA + "1441",
        confidence="likely",
    ),
    Cause(
        "te-core-not-loaded",
        r"undefined symbol: (?P<symbol>nvte_\w+|_ZN18transformer_engine\w+)",
        "TransformerEngine's torch part was imported before its core library, or the core is of another version",
        "import transformer_engine.pytorch and nothing inside it; pip install transformer_engine and its torch part "
        "at one version",
        "先于核心库导入了 TransformerEngine 的 torch 部分，或核心库版本不同",
        "只导入 transformer_engine.pytorch；transformer_engine 与其 torch 部分安装同一版本",
        _TE + "115",
        confidence="likely",
    ),
    Cause(
        "nvjitlink-older",
        r"(?:undefined symbol: |symbol )(?P<symbol>_?_?nvJitLink\w+)",
        "an older libnvJitLink than torch's is loaded first, from LD_LIBRARY_PATH or another package",
        "unset LD_LIBRARY_PATH; or put torch's first: LD_LIBRARY_PATH=$(python -c 'import nvidia.nvjitlink as n; "
        "print(n.__path__[0])')/lib; pip install --force-reinstall nvidia-nvjitlink-cu12 at torch's version",
        "先加载了比 torch 所需更旧的 libnvJitLink（来自 LD_LIBRARY_PATH 或其他包）",
        "unset LD_LIBRARY_PATH；或把 torch 的放在最前：LD_LIBRARY_PATH=$(python -c 'import nvidia.nvjitlink as n; "
        "print(n.__path__[0])')/lib；将 nvidia-nvjitlink-cu12 重装为 torch 要求的版本",
        _TORCH + "111469",
    ),
    Cause(
        "nccl-older",
        r"undefined symbol: (?P<symbol>nccl\w+)",
        "an older NCCL than torch was built with is loaded first: it has no {symbol}",
        "unset LD_LIBRARY_PATH; pip install --force-reinstall nvidia-nccl-cu12 at the version that torch requires "
        "(powertrain doctor --only twice --only versions)",
        "先加载了比 torch 所需更旧的 NCCL：其中没有 {symbol}",
        "unset LD_LIBRARY_PATH；将 nvidia-nccl-cu12 重装为 torch 要求的版本（powertrain doctor --only twice）",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
    ),
    Cause(
        "cudnn-library",
        r"Could not load library (?P<library>libcudnn\w*\.so[.\d]*)|Unable to load any of \{?libcudnn|"
        r"undefined symbol: cudnn\w+|cuDNN version incompatibility: PyTorch was compiled",
        "another cuDNN than torch's own is found first, or a part of it is missing",
        "unset LD_LIBRARY_PATH; powertrain doctor --only twice names each cuDNN; pip install nvidia-cudnn-cu12 at the "
        "version that torch requires",
        "先找到的 cuDNN 不是 torch 自带的，或缺少其中一部分",
        "unset LD_LIBRARY_PATH；powertrain doctor --only twice 列出所有 cuDNN；将 nvidia-cudnn-cu12 装为 torch "
        "要求的版本",
        "https://github.com/naver/dust3r/issues/198",
    ),
    Cause(
        "cuda-runtime-symbol",
        r"undefined symbol: (?P<symbol>__cuda\w+|cuda[A-Z]\w+)",
        "it was built with a newer CUDA than the runtime that torch loads: {symbol} is not in it",
        "build it again with the toolkit of torch's CUDA (CUDA_HOME), or install a build for that CUDA",
        "编译它的 CUDA 比 torch 加载的运行时新：其中没有 {symbol}",
        "用与 torch 相同的 CUDA 工具包重新编译（CUDA_HOME），或安装面向该 CUDA 的版本",
        "https://github.com/NVIDIA/apex/issues/187",
        confidence="likely",
    ),
    Cause(
        "mkl-symbol",
        r"undefined symbol: (?P<symbol>iJIT_\w+)",
        "torch of conda's channel does not go with MKL 2024.1 and newer",
        "conda install 'mkl<2024.1', or torch from pip",
        "conda 的 torch 与 MKL 2024.1 及更新版本不兼容",
        "conda install 'mkl<2024.1'，或用 pip 安装 torch",
        "https://github.com/pytorch/pytorch/issues/123097",
    ),
    Cause(
        "python-symbol",
        r"undefined symbol: (?P<symbol>_?Py[A-Z_]\w+)",
        "it was built for another Python version: {symbol} is not in this one",
        "install it with the pip of this Python, or build it again",
        "它是为另一个 Python 版本编译的：当前 Python 没有 {symbol}",
        "用当前 Python 的 pip 重新安装或编译",
        "https://docs.python.org/3/c-api/stable.html",
        confidence="likely",
    ),
    Cause(
        "bitsandbytes-cpu",
        r"undefined symbol: c(?:get_col_row_stats|get_managed_ptr|quantize\w+|dequantize\w+)|"
        r"has no attribute 'cget_managed_ptr'|bitsandbytes was compiled without GPU support|"
        r"name 'str2optimizer\w+' is not defined",
        "bitsandbytes loaded its library for the CPU, because it found none for this CUDA",
        "pip install --upgrade bitsandbytes; python -m bitsandbytes; a torch with CUDA in the same environment",
        "bitsandbytes 没有找到适合当前 CUDA 的库，加载了 CPU 版本",
        "pip install --upgrade bitsandbytes；python -m bitsandbytes；同一环境中安装带 CUDA 的 torch",
        "https://huggingface.co/docs/bitsandbytes/main/en/errors",
    ),
    Cause(
        "bitsandbytes-override",
        r"BNB_CUDA_VERSION=?(?P<cuda>\d*) environment variable detected",
        "BNB_CUDA_VERSION={cuda} makes bitsandbytes load its library of that CUDA, which it may not have",
        "unset BNB_CUDA_VERSION (also in .bashrc); pip install --upgrade bitsandbytes",
        "BNB_CUDA_VERSION={cuda} 使 bitsandbytes 加载该 CUDA 的库，而它可能没有",
        "unset BNB_CUDA_VERSION（包括 .bashrc 中）；pip install --upgrade bitsandbytes",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1180",
        also=r"Could not find the bitsandbytes|cannot open shared object|Could not load bitsandbytes",
    ),
    Cause(
        "bitsandbytes-library",
        r"libbitsandbytes_cuda(?P<cuda>\d+)\w*\.so: cannot open shared|Could not find the bitsandbytes CUDA binary at|"
        r"Configured CUDA binary not found at|No such file or directory: .{0,200}libbitsandbytes_cuda|"
        r"Required library version not found: libbitsandbytes_cuda|CUDA Setup failed despite (?:GPU|"
        r"CUDA) being available",
        "this bitsandbytes has no library for the CUDA that torch uses",
        "pip install --upgrade bitsandbytes; BNB_CUDA_VERSION=126 names another of its libraries; in a source tree: "
        "cmake -DCOMPUTE_BACKEND=cuda -S . && make",
        "当前 bitsandbytes 没有适合 torch 所用 CUDA 的库",
        "pip install --upgrade bitsandbytes；用 BNB_CUDA_VERSION=126 指定另一个库；源码目录中：cmake "
        "-DCOMPUTE_BACKEND=cuda -S . && make",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1559",
        confidence="likely",
    ),
    Cause(
        "flash-attention-extension",
        r"No module named '?(?P<module>flash_attn_(?:2_|3_)?cuda|flash_attn_3\._C)|"
        r"libflash_attn\w*\.so: cannot open shared",
        "flash-attn is there without its compiled part: it was installed for another Python, its build was skipped, "
        "or its source folder is imported",
        "leave the source folder; pip install --no-build-isolation --force-reinstall --no-deps flash-attn with this "
        "Python; powertrain.compat.flash_attn needs no build",
        "flash-attn 缺少编译部分：为另一个 Python 安装、跳过了编译，或导入的是源码目录",
        "离开源码目录；用当前 Python 执行 pip install --no-build-isolation --force-reinstall --no-deps flash-attn；"
        "powertrain.compat.flash_attn 无需编译",
        _FA + "614",
        confidence="likely",
    ),
    Cause(
        "flash-attention-extras",
        r"No module named '?(?P<module>dropout_layer_norm|rotary_emb|xentropy_cuda_lib|fused_dense_lib|"
        r"fused_softmax_lib)|ImportError: (?P<extra>fused_dense|rotary_emb|dropout_layer_norm|dropout_add_layer_norm|"
        r"xentropy\w*|FusedDense|FusedMLP) (?:is|are) not installed|import flash_attn (?P<part>rotary|rms_norm|"
        r"layer_norm) fail",
        "{module}{part}{extra} is an extension in flash-attn's csrc folder, which pip install flash-attn does not "
        "build",
        "in its source: cd csrc/layer_norm (rotary, xentropy, fused_dense_lib) && pip install --no-build-isolation .; "
        "powertrain.ops has layer_norm, rms_norm, rope and cross_entropy without a build",
        "{module}{part}{extra} 是 flash-attn 的 csrc 目录中的扩展，pip install flash-attn 不会编译它",
        "在其源码中：cd csrc/layer_norm（rotary、xentropy、fused_dense_lib）&& pip install --no-build-isolation .；"
        "powertrain.ops 无需编译即有 layer_norm、rms_norm、rope、cross_entropy",
        _FA + "250",
    ),
    Cause(
        "flash-attention-not-installed",
        r"FlashAttention\w* has been toggled on, but it cannot be used|"
        r"[Ff]lash[ _-]?[Aa]tt\w* \w*\s?(?:is )?not installed|"
        r"not found in your environment: flash_attn",
        "the model was asked to run with flash-attn, which is not installed in this Python, or does not import",
        'attn_implementation="sdpa", or pip install --no-build-isolation flash-attn (powertrain build --plan first)',
        "模型要求使用 flash-attn，但当前 Python 没有安装它，或无法导入",
        'attn_implementation="sdpa"，或 pip install --no-build-isolation flash-attn（先执行 powertrain build --plan）',
        "https://github.com/hiyouga/EasyR1/issues/384",
    ),
    Cause(
        "xformers-extension",
        r"xFormers can't load C\+\+/CUDA extensions|xFormers was built for:|xFormers wasn't build with CUDA support|"
        r"No such operator xformers::",
        "xFormers' compiled part does not load: it was built for another torch or Python than the installed ones",
        "the xFormers of this torch: pip install -U xformers --index-url https://download.pytorch.org/whl/cuXXX (it "
        "names its torch), python -m xformers.info; powertrain.compat.xformers needs no build",
        "xFormers 的编译部分无法加载：它是为另一个 torch 或 Python 编译的",
        "安装与当前 torch 匹配的 xFormers：pip install -U xformers --index-url https://download.pytorch.org/whl/cuXXX，"
        "python -m xformers.info；powertrain.compat.xformers 无需编译",
        "https://github.com/yangjianxin1/Firefly/issues/258",
    ),
    Cause(
        "causal-conv1d",
        r"'NoneType' object has no attribute '(?:causal_conv1d|selective_scan|flash_attn)\w*'|"
        r"(?:causal_conv1d|selective_scan)_\w+\(\): incompatible function arguments|"
        r"No module named '?(?:causal_conv1d_cuda|selective_scan_cuda\w*)\b",
        "a compiled package (causal-conv1d, selective scan) is missing, does not load, or is of another version than "
        "its caller",
        "python -c 'import causal_conv1d_cuda' says why; pip install --no-build-isolation causal-conv1d and mamba-ssm "
        "of the same time",
        "某个编译的包（causal-conv1d、selective scan）缺失、无法加载，或与调用方版本不同",
        "python -c 'import causal_conv1d_cuda' 会说明原因；用 --no-build-isolation 安装同期的 causal-conv1d 和 "
        "mamba-ssm",
        "https://github.com/state-spaces/mamba/issues/467",
        confidence="likely",
    ),
    Cause(
        "bitsandbytes-missing",
        r"requires the latest version of bitsandbytes|requires bitsandbytes|"
        r"No package metadata was found for bitsandbytes",
        "Transformers finds no bitsandbytes in this Python, one that is too old, or one that does not see the GPU",
        "python -m pip install -U bitsandbytes accelerate with the Python that runs, and start it again; python -m "
        "bitsandbytes",
        "Transformers 在当前 Python 中找不到 bitsandbytes，版本太旧，或看不到 GPU",
        "用运行程序的 Python 执行 python -m pip install -U bitsandbytes accelerate 并重新启动；python -m bitsandbytes",
        "https://github.com/AIAnytime/Fine-Tune-DeepSeek/issues/1",
    ),
    Cause(
        "apex-wrong-package",
        r"UnencryptedCookieSessionFactoryConfig|[Pp]lease install apex from (?:source )?\(?https?://\S+(?:nvidia|"
        r"NVIDIA)/apex|"
        r"cannot import name 'amp' from 'apex'|Class advice impossible in Python3",
        "NVIDIA's Apex is not installed: pip install apex installs another project of that name",
        "pip uninstall apex, then from github.com/NVIDIA/apex: APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install "
        "--no-build-isolation .; torch.amp replaces apex.amp; powertrain.ops has rms_norm, layer_norm and AdamW",
        "没有安装 NVIDIA 的 Apex：pip install apex 安装的是同名的另一个项目",
        "pip uninstall apex，然后从 github.com/NVIDIA/apex 安装：APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install "
        "--no-build-isolation .；torch.amp 可代替 apex.amp；powertrain.ops 有 rms_norm、layer_norm 和 AdamW",
        "https://github.com/NVIDIA/apex",
    ),
    Cause(
        "megatron-helpers",
        r"No module named '?(?:megatron\.(?:core\.datasets|data)\.)?helpers(?:_cpp)?\b|"
        r"cannot import name 'helpers(?:_cpp)?' from|"
        r"make(?:\[\d+\])?: \*\*\* \[(?:Makefile:\d+: )?helpers\S{0,40}\] Error",
        "Megatron's data set helpers, a small C++ module, were not compiled",
        "make -C megatron/core/datasets (GPT-NeoX: make -C megatron/data) with pybind11 and g++ there",
        "Megatron 的数据集辅助模块（C++）没有编译",
        "make -C megatron/core/datasets（GPT-NeoX：make -C megatron/data），需要 pybind11 和 g++",
        "https://github.com/NVIDIA/Megatron-LM",
    ),
    Cause(
        "numpy-names",
        r"module 'numpy' has no attribute '(?P<name>bool|float|int|object|str|complex|typeDict|product|in1d)'",
        "a package uses numpy.{name}, which newer NumPys do not have",
        "a newer version of that package, or pip install 'numpy<1.24'",
        "某个包使用了 numpy.{name}，新版 NumPy 已将其移除",
        "升级该包，或 pip install 'numpy<1.24'",
        "https://numpy.org/doc/stable/release/1.24.0-notes.html",
    ),
    Cause(
        "protobuf",
        r"Descriptors cannot be created directly",
        "a package's generated code is older than the installed protobuf",
        "a newer version of that package, or pip install 'protobuf<=3.20.3'",
        "某个包的生成代码比已安装的 protobuf 旧",
        "升级该包，或 pip install 'protobuf<=3.20.3'",
        "https://protobuf.dev/news/2022-05-06/",
    ),
    Cause(
        "deepspeed-extension",
        r"No module named '?(?:fused_adam|cpu_adam|fused_lamb|async_io)\b|has no attribute 'ds_opt_\w+'|"
        r"undefined symbol: curandCreateGenerator|"
        r"/(?P<op>fused_adam|cpu_adam|fused_lamb|async_io|utils|transformer_inference|cpu_adagrad|quantizer|"
        r"inference_core_ops|ragged_device_ops)\.so: cannot open shared object file",
        "DeepSpeed's op was not built, or its build failed earlier: this line is the consequence",
        "look for the first error above; rm -r ~/.cache/torch_extensions, then ds_report; CUDA_HOME with nvcc and "
        "libcurand",
        "DeepSpeed 的算子没有编译，或之前编译失败：这一行是其后果",
        "查看上方第一个错误；rm -r ~/.cache/torch_extensions，然后 ds_report；CUDA_HOME 中需有 nvcc 和 libcurand",
        "https://github.com/deepspeedai/DeepSpeed/issues/1846",
        confidence="likely",
    ),
    Cause(
        "triton-version",
        r"cannot import name '(?P<name>\w+)' from '(?P<module>triton[\w.]*)'|"
        r"module '(?P<of>triton[\w.]*)' has no attribute '(?P<attribute>\w+)'|"
        r"No module named '(?P<gone>triton\.[\w.]+)'|"
        r"target must be of GPUTarget type|"
        r"KeyError: .{0,3}(?:Unknown key: )?'(?P<key>cubin|hsaco|ptx|ttgir|ttir|num_ctas|cluster_dims|"
        r"launch_cooperative_grid)'|"
        r"'(?P<object>CompiledKernel|KernelMetadata|JITFunction|GPUTarget|CUDAOptions|ASTSource)' object has no "
        r"attribute",
        "Triton is of another version than the package that imports it was made for",
        "the Triton that torch requires: pip install torch==<yours> triton (powertrain doctor --only versions); or a "
        "newer version of the package that imports it",
        "Triton 的版本与导入它的包不匹配",
        "安装 torch 要求的 Triton：pip install torch==<当前版本> triton（powertrain doctor --only versions）；"
        "或升级导入它的包",
        "https://github.com/FoundationVision/Infinity/issues/31",
        confidence="likely",
    ),
    Cause(
        "partially-initialized",
        r"partially initialized module '(?P<module>[\w.]+)'",
        "{module} is imported while it imports itself: a file of your own has its name, or a half-removed install is "
        "there",
        "rename your {module}.py; python -c 'import {module}; print({module}.__file__)'; pip install "
        "--force-reinstall it",
        "{module} 在自身导入过程中又被导入：您有同名文件，或安装不完整",
        "重命名您的 {module}.py；python -c 'import {module}; print({module}.__file__)'；pip install --force-reinstall",
        "https://docs.python.org/3/faq/programming.html",
        confidence="likely",
    ),
    Cause(
        "submodule-missing",
        r"No module named '?(?P<package>\w{1,60})\.(?P<inner>[\w.]{1,80})",
        "{package} is installed, but its release has no {inner}: it is older or newer than the code was written for",
        "the release of {package} that the code's requirements name (pip show {package}); pip "
        "install --upgrade {package} if they name none; a file or folder of your own called {package} hides the real "
        "one",
        "已安装 {package}，但其版本没有 {inner}：比代码所适配的旧或新",
        "安装代码的 requirements 所要求的 {package} 版本（pip show {package}）；没有要求时 pip "
        "install --upgrade {package}；名为 {package} 的自有文件或目录会遮蔽它",
        "https://docs.python.org/3/library/exceptions.html#ModuleNotFoundError",
        confidence="likely",
        derive=_of_one_package,
    ),
    Cause(
        "own-file-hides-package",
        r"No module named '[\w.]{1,80}'; '(?P<module>\w{1,60})' is not a package",
        "a file {module}.py, of your own or beside the program, is imported instead of the package {module}",
        "python -c 'import {module}; print({module}.__file__)' in the same folder; rename that file and remove its "
        "__pycache__",
        "导入的是您自己的或程序旁的文件 {module}.py，而不是 {module} 包",
        "在同一目录执行 python -c 'import {module}; print({module}.__file__)'；重命名该文件并删除其 __pycache__",
        "https://docs.python.org/3/library/sys_path_init.html",
        confidence="likely",
    ),
    Cause(
        "namespace-folder",
        r"cannot import name '(?P<name>\w+)' from '(?P<module>\w+)' \(unknown location\)",
        "{module} is a folder without an __init__.py here, so it has no {name}: a folder of that name where the "
        "program starts hides the package, or only a part of the package is installed",
        "python -c 'import {module}; print({module}.__path__)' shows the folder: start from another one, or remove it; "
        "pip install --force-reinstall --no-deps the whole package",
        "此处的 {module} 是没有 __init__.py 的目录，因此没有 {name}：程序启动处的同名目录遮蔽了该包，"
        "或只安装了它的一部分",
        "python -c 'import {module}; print({module}.__path__)' 会显示该目录：换一个目录启动，或删除它；"
        "pip install --force-reinstall --no-deps 完整的包",
        "https://docs.python.org/3/reference/import.html#namespace-packages",
        confidence="likely",
    ),
    Cause(
        "python-part-missing",
        r"No module named '?(?P<module>\w{1,40})'?",
        "{module} is a part of Python itself, which this Python was compiled without: the library that it wraps was "
        "not there, and pip cannot add it",
        "apt install {library}, then compile this Python again (pyenv install --force); or a Python of uv or conda, "
        "which have all parts",
        "{module} 是 Python 自身的一部分，而编译当前 Python 时缺少它所需的库；pip 无法补上",
        "apt install {library}，然后重新编译 Python（pyenv install --force）；或使用 uv、conda 的 Python",
        "https://devguide.python.org/getting-started/setup-building/#install-dependencies",
        derive=_part_of_python,
        derives=("library",),
    ),
    Cause(
        "not-on-windows",
        r"No module named '(?P<module>fcntl|pwd|grp|resource|termios)'",
        "{module} is a part of Python on Linux and macOS only: the program or package does not run on Windows itself",
        "run it in WSL; or a release of the package for Windows",
        "{module} 只存在于 Linux 和 macOS 的 Python 中：该程序或包不能直接在 Windows 上运行",
        "在 WSL 中运行；或使用该包面向 Windows 的版本",
        "https://docs.python.org/3/library/fcntl.html",
    ),
    Cause(
        "module-missing",
        r"(?:(?:ModuleNotFound|Import)Error: |^)No module named '?(?P<module>[\w.]{1,80})",
        "{module} is not installed in the Python that runs here, though it may be in another "
        "(pip builds in one of its own); or it is a file of the program itself that is not there",
        "{way}, with this very Python (which python; sys.executable); if it is missing while pip "
        "builds: --no-build-isolation",
        "当前运行的 Python 没有安装 {module}（可能装在另一个 Python 中；pip "
        "编译时使用独立的环境）；或它是程序自身缺少的文件",
        "用同一个 Python（which python；sys.executable）执行：{way}；若在 pip 编译时缺失：--no-build-isolation",
        "https://packaging.python.org/en/latest/tutorials/installing-packages/",
        confidence="likely",
        derive=_way,
        derives=("way",),
    ),
    Cause(
        "no-driver",
        r"Found no NVIDIA driver on your system|libcuda\.so(?:\.1)?: cannot open shared object|"
        r"(?:dlopen|open|find|load) libcuda\.so|"
        r"nvidia-container-cli: initialization error|"
        r"NVIDIA-SMI has failed because it couldn't",
        "there is no NVIDIA driver here: none is installed, its module is not loaded, or the container was started "
        "without GPUs",
        "nvidia-smi on the host; docker run --gpus all with nvidia-container-toolkit installed; on a cluster: ask for "
        "a GPU; in WSL: export LD_LIBRARY_PATH=/usr/lib/wsl/lib",
        "这里没有 NVIDIA 驱动：未安装、模块未加载，或容器启动时没有 GPU",
        "在主机上运行 nvidia-smi；安装 nvidia-container-toolkit 并使用 docker run --gpus all；集群上请申请 GPU；"
        "WSL：export LD_LIBRARY_PATH=/usr/lib/wsl/lib",
        "https://github.com/facebookresearch/pytorch3d/issues/1259",
    ),
)  # fmt: skip
