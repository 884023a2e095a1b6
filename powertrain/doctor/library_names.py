"""Shared libraries and symbols by name: which package has them."""

import re

from powertrain.doctor.releases import renamed_package

# beginnings of a file's name, and how to get it
_PACKAGES: tuple[tuple[str, str], ...] = (
    (r"libGLU", "apt install libglu1-mesa"),
    (r"libGL\.|libGLdispatch", "apt install libgl1 (or opencv-python-headless instead of opencv-python)"),
    (r"libEGL", "apt install libegl1; NVIDIA_DRIVER_CAPABILITIES=all in a container"),
    (r"libOSMesa", "apt install libosmesa6"),
    (r"libgthread-2|libglib-2", "apt install libglib2.0-0"),
    (r"libSM\.|libICE\.|libXrender|libXext|libX11|libxcb", "apt install libsm6 libxext6 libxrender1 libxcb1"),
    (r"libsndfile", "apt install libsndfile1"),
    (r"libsox", "apt install libsox-dev sox"),
    (r"libportaudio", "apt install libportaudio2"),
    (
        r"libav\w+|libsw\w+",
        "apt install ffmpeg, of the release that the caller was built for (conda install -c conda-forge ffmpeg)",
    ),
    (r"libiomp5", "pip install intel-openmp, or conda install intel-openmp"),
    (r"libgomp", "apt install libgomp1"),
    (r"libmkl_", "pip install mkl, or conda install mkl, of the release that torch was built with"),
    (r"libopenblas|liblapack|libblas", "apt install libopenblas0 (conda install openblas)"),
    (r"libgfortran", "apt install libgfortran5 (conda install libgfortran-ng)"),
    (
        r"libnvToolsExt",
        "pip install nvidia-nvtx-cu12 (CUDA 13 has none: a newer build of the caller), or conda "
        "install -c nvidia cuda-nvtx",
    ),
    (r"libcupti", "pip install nvidia-cuda-cupti-cu12 (nvidia-cuda-cupti for CUDA 13)"),
    (r"libcusparseLt", "pip install nvidia-cusparselt-cu12 (-cu13 for CUDA 13)"),
    (r"libcufile", "pip install nvidia-cufile-cu12 (nvidia-cufile for CUDA 13)"),
    (r"libnvshmem", "pip install nvidia-nvshmem-cu12 (-cu13 for CUDA 13)"),
    (r"libnccl", "pip install nvidia-nccl-cu12 (-cu13 for CUDA 13)"),
    (r"libnvinfer|libnvonnxparser", "pip install tensorrt, of the release that the caller was built for"),
    (
        r"libmpi|libopen-rte|libopen-pal",
        "the MPI it was built with: apt install libopenmpi-dev, conda install openmpi, or module load openmpi",
    ),
    (r"libibverbs|librdmacm|libmlx5", "apt install libibverbs1 librdmacm1 (rdma-core)"),
    (r"libuc[psmt]\w*\.", "the UCX it was built with: apt install libucx0, or unset LD_LIBRARY_PATH of another"),
    (r"libnuma", "apt install libnuma1"),
    (r"libaio", "apt install libaio1 (libaio-dev to build)"),
    (r"libtbb", "pip install tbb, or apt install libtbb12"),
    (
        r"libssl\.so\.1|libcrypto\.so\.1",
        "OpenSSL 1.1, which newer systems do not have: a newer build of the caller, or conda install openssl=1.1.1",
    ),
    (r"libssl|libcrypto", "apt install libssl3"),
    (
        r"libpython(?P<version>3\.\d+)",
        "apt install libpython3.x of that version; conda: export LD_LIBRARY_PATH=$CONDA_PREFIX/lib",
    ),
    (r"libffi", "conda install libffi, or apt install libffi8"),
    (r"libtinfo|libncurses", "apt install libtinfo6 libncurses6"),
    (r"libstdc\+\+", "apt install libstdc++6 (conda install -c conda-forge libstdcxx-ng)"),
    (
        r"libjpeg|libpng|libwebp",
        "apt install libjpeg-turbo8 libpng16-16 libwebp7, or the torchvision wheel of this torch",
    ),
    (
        r"libamdhip|librocblas|libroctx|libhsa|libMIOpen|librccl|libhip",
        "the ROCm release that torch was built for; or a CUDA build of torch on an NVIDIA GPU",
    ),
    (r"libtensorflow", "the TensorFlow release that the caller was built for"),
    (r"libarrow|libparquet", "pip install --force-reinstall pyarrow (one release, from pip or conda)"),
    (
        r"libc\.musl|ld-linux",
        "an image with glibc (Debian, Ubuntu) of this CPU's kind: Alpine does not run these wheels",
    ),
    (r"libz\.|liblzma|libbz2|libzstd", "apt install zlib1g liblzma5 libbz2-1.0 libzstd1"),
    (r"libuv", "conda install libuv"),
    (
        r"libcu(?:rand|dart|blas|sparse|solver|fft)|libnvrtc|libnppi",
        "the CUDA release of its number: a build of the caller for torch's CUDA",
    ),
)

# modules that no package of the index has under their name
_BUILT = "pip install --no-build-isolation "
_MODULES = {
    "apex": "from github.com/NVIDIA/apex (the apex of the index is another project): APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "
    + _BUILT + ".",
    "deep_gemm": "from a clone of github.com/deepseek-ai/DeepGEMM: " + _BUILT + ".",
    "deep_ep": "from a clone of github.com/deepseek-ai/DeepEP: " + _BUILT + ".",
    "tinycudann": _BUILT + "git+https://github.com/NVlabs/tiny-cuda-nn/#subdirectory=bindings/torch",
    "pytorch3d": _BUILT + "git+https://github.com/facebookresearch/pytorch3d",
    "nvdiffrast": _BUILT + "git+https://github.com/NVlabs/nvdiffrast",
    "transformer_engine": _BUILT + "'transformer_engine[pytorch]'",
    "mamba_ssm": _BUILT + "causal-conv1d mamba-ssm",
    "flash_attn": _BUILT + "flash-attn",
    "grouped_gemm": _BUILT + "grouped_gemm",
    "cupy": "pip install cupy-cuda12x (cupy-cuda13x for CUDA 13)",
}  # fmt: skip
# modules of Python itself that are compiled only where a library is, and the package of Debian that has it
_PARTS_OF_PYTHON = {
    "_ctypes": "libffi-dev", "_bz2": "libbz2-dev", "bz2": "libbz2-dev", "_lzma": "liblzma-dev", "_zstd": "libzstd-dev",
    "_sqlite3": "libsqlite3-dev", "_curses": "libncurses-dev", "readline": "libreadline-dev", "_uuid": "uuid-dev",
    "_tkinter": "tk-dev (the system's Python: apt install python3-tk)",
    "tkinter": "tk-dev (the system's Python: apt install python3-tk)",
}  # fmt: skip

# beginnings of symbols, and the library that defines them
_SYMBOLS: tuple[tuple[str, str], ...] = (
    (r"_ZN?K?3MPI|MPI_|ompi_|mca_", "MPI"),
    (r"mkl_|MKL|cblas_|LAPACKE_|vml", "MKL or BLAS"),
    (r"uc[psmt]_", "UCX"),
    (r"ibv_|rdma_|mlx5", "InfiniBand (rdma-core)"),
    (r"GOMP_|omp_|__kmpc|kmp_", "OpenMP"),
    (r"_ZN?K?6google8protobuf", "protobuf"),
    (r"_ZN?K?4absl", "Abseil"),
    (r"_ZN?K?2cv", "OpenCV"),
    (r"_ZN?K?5arrow|_ZN?K?7parquet", "pyarrow"),
    (r"av_|avcodec_|avformat_|sws_|swr_", "FFmpeg"),
    (r"SSL_|EVP_|CRYPTO_|OPENSSL|BIO_|X509", "OpenSSL"),
    (r"sqlite3_", "SQLite"),
    (r"XML_", "expat"),
    (r"H5\w", "HDF5"),
    (r"ffi_", "libffi"),
    (r"hip[A-Z]|roc\w+_|_ZN?K?3hip|miopen", "ROCm"),
    (r"nvml", "NVML (the driver)"),
    (r"cu(?:Mem|Graph|Launch|Ctx|Device|Stream|Tensor|Get|Module|Kernel|Lib)\w*", "libcuda (the driver is older)"),
    (r"nvrtc", "NVRTC"),
    (r"cusparse|cusolver|cufft|curand|npp", "CUDA's mathematical libraries"),
    (r"_ZN?K?10tensorflow|TF_|_ZTIN10tensorflow|_ZN?K?4xla", "TensorFlow or XLA"),
    (r"_ZN?K?4llvm|LLVM", "LLVM"),
    (r"_ZN?K?8nvinfer1", "TensorRT"),
    (r"uv_", "libuv"),
    (r"inflate|deflate|crc32|adler32", "zlib"),
    (r"g_\w+|_ZN?K?4Glib", "GLib"),
    (r"_ZN?K?4fmt|_ZN?K?6spdlog", "fmt or spdlog"),
)


def way_to_module(module: str) -> str | None:
    """How to get a module that pip would not find, or find another project for, under its name."""
    if special := _MODULES.get(module.split(".")[0]):
        return special
    package = renamed_package(module)
    return package and f"python -m pip install {package}"


def library_of_module(module: str) -> str | None:
    """The package with the library that a missing part of Python itself was to be compiled with."""
    return _PARTS_OF_PYTHON.get(module)


def package_of_library(file: str) -> str | None:
    """How to get a shared library that is missing."""
    return next((get for start, get in _PACKAGES if re.match(start, file)), None)


def library_of_symbol(symbol: str) -> str | None:
    """The library that should define a symbol."""
    return next((library for start, library in _SYMBOLS if re.match(start, symbol)), None)
