"""Which causes cover others: a cause is left out if one of the more specific causes in its set is found too."""

_INTERFACES = {"library-older", "library-newer", "python-lacks", "python-dropped"}

COVERS = {
    "nccl-timeout": {"nccl-timeout-while-compiling"},
    "disk-full": {"nccl-shared-memory"},
    "header-missing": {
        "cudnn-headers", "submodules", "gdrcopy-missing", "python-headers", "cuda-headers", "nccl-headers",
        "torch-headers", "thc-removed", "submodule-headers", "libaio", "cuda-older-than-source",
    },
    "shared-library": {
        "library-of-another-cuda", "cudnn-not-found", "cudnn-library", "no-driver", "bitsandbytes-library",
        "bitsandbytes-cpu", "flash-attention-extension", "gdrcopy-missing", "torch-libraries", "nvrtc",
    },
    "import-name": {
        "pydantic-version", "python-older", "setuptools-version", "pkg-resources", "apex-wrong-package",
        "megatron-helpers", "triton-version", "torch-attribute",
        "partially-initialized",
    },
    "module-missing": {
        "build-package-missing", "pkg-resources", "torch-missing-at-build", "flash-attention-extension",
        "triton-version", "flash-attention-extras", "apex-extensions", "triton-missing", "deepspeed-no-launcher",
        "softmax-kernels",
        "megatron-helpers", "deepspeed-extension", "te-extension-missing", "distutils-gone", "build-backend",
        "ssl-module",
    },
    "module-attribute": {
        "triton-version", "torch-attribute", "partially-initialized", "numpy-names", "te-extension-missing",
        "distutils-gone", "setuptools-version",
    },
    "torch-attribute": {"triton-version", "partially-initialized"},
    "no-distribution": {"network", "certificate", "python-version"},
    "network": {"certificate"},
    "triton-missing": {"triton-version"},
    "cuda-out-of-memory": {"oom-but-free"},
    "process-killed": {"host-memory", "compiler-killed"},
    "store-timeout": {"master-unreachable"},
    "bus-error": {"dataloader-shared-memory"},
    "checkpoint-keys": {"checkpoint-shape"},
    "undefined-symbol": {"cudnn-library"},
    "cuda-toolkit-incomplete": {"cmake-nvcc"},
    "deepspeed-op": {"cuda-home", "deepspeed-cuda-mismatch", "libaio"},
    "linker-library": {"cuda-toolkit-incomplete", "libaio", "libcuda-link"},
    "cmake-package": {"cmake-nvcc", "nccl-headers", "cudnn-headers"},
    "conda-not-found": {"conda-unsolvable"},
    "xformers-no-operator": {"xformers-extension"},
    "quantized-old-gpu": {"fp8-old-gpu", "bf16-old-gpu", "xformers-no-operator"},
    "no-gpu-visible": {
        "ray-resources", "torch-without-cuda", "driver-old", "no-driver", "forward-compatibility",
        "fabric-manager",
    },
    "attention-alignment": {"xformers-no-operator"},
    "extension-not-registered": {"torch-libraries", "xformers-extension"},
    "container-hook": {"no-driver", "container-driver"},
    "cuda-start": {"driver-combination", "fabric-manager", "forward-compatibility", "driver-updated", "driver-old"},
    "nvml": {"driver-updated", "nvml-container"},
    "parallel-sizes": {"vllm-parallel"},
    "package-required": {
        "apex-wrong-package", "flash-attention-not-installed", "bitsandbytes-missing", "tokenizer-backend",
    },
    "torch-symbol": {"undefined-symbol"},
    "numpy-import": {"numpy-major"},
    "ray-worker-died": {"ray-resources"},
    "hub-files": {"hub-name", "network"},
    "master-unreachable": {"rendezvous-lost"},
    "gpu-memory-full": {"cuda-out-of-memory"},
    "call-signature": {"setuptools-version", "python-older", "accelerate-config"},
    "file-missing": {
        "cuda-home", "ninja-missing", "triton-cache-race", "build-lock-gone", "compiler-missing", "not-a-project",
        "mpi-launch", "git-missing", "hub-files", "wheel-missing",
    },
    "forbidden": {"hub-name"},
    "fsdp-state-dict": {"parameter-not-gathered"},
    "windows-program": {"cuda-home", "ninja-missing"},
}  # fmt: skip

COVERS |= {
    "shape-mismatch": {"matrix-sizes", "loss-targets", "not-contiguous", "channels", "scatter-dtype"},
    "fsdp-wrapping": {"fsdp-mixed-grad", "fsdp-layer-class"},
    "no-kernel-image": {"rocm-arch"},
    "script-arguments": {"notebook-arguments", "arguments-missing", "argument-without-value"},
    "deepspeed-settings": {"zero-offload-optimizer"},
    "missing-key": {"weights-of-another-class"},
    "pip-conflict": {"resolver"},
    "device-assert": {"label-range"},
    "index-range": {"label-range"},
    "checkpoint-shape": {"zero-empty-shape"},
    "dtype-mismatch": {"scatter-dtype"},
    "flash-attention-old-gpu": {"flash-attention-backward-gpu"},
    "model-unknown": {"model-type-unknown"},
    "port-taken": {"launch-port"},
    "triton-launcher": {"triton-python"},
    "batch-not-padded": {"pad-token"},
    "permission": {"rocm-devices"},
    "python-syntax": {"python-older"},
    "connection-refused": {"store-timeout", "master-unreachable", "network", "docker-daemon", "rendezvous-lost"},
    "name-resolution": {"store-timeout", "master-unreachable", "network", "gloo-address"},
    "text-encoding": {"checkpoint-broken"},
    "trainer-columns": {"no-labels"},
}
COVERS |= {
    "undefined-in-library": {"alias-not-imported", "flash-attention-one", "names-imported"},
    "cuda-error-number": {
        "forward-compatibility",
        "driver-combination",
        "driver-old",
        "driver-insufficient",
        "no-kernel-image",
        "device-assert",
        "fabric-manager",
        "gpu-memory-full",
        "fork-cuda",
        "illegal-memory-access",
        "no-gpu-visible",
        "device-ordinal",
        "invalid-argument",
        "label-range",
        "gpu-busy",
    },
    "cuda-start": {"cuda-error-number", *COVERS["cuda-start"]},
    "segmentation-fault": {"cuda-error-number"},
    "no-driver": {"container-driver-state", *COVERS.get("no-driver", set())},
    "bare-assertion": {"vllm-weight-shape", "compiled-layout"},
    "row-without-column": {"data-column-missing", "model-type-unknown", "checkpoint-of-another-layout"},
    "device-assert": {"packed-out-of-bounds", *COVERS["device-assert"]},
    "sizes-differ": {"optimizer-state-sizes", "matrix-sizes", "loss-targets", "parameter-not-gathered", "channels"},
    "shape-mismatch": {"sizes-differ", "optimizer-state-sizes", *COVERS["shape-mismatch"]},
    "names-imported": {"alias-not-imported", "flash-attention-one"},
    "nccl-argument": {"duplicate-gpu", "nccl-shared-memory"},
    "dataloader-worker": {"worker-crashed"},
    "dynamo-shapes": {"matrix-sizes", "sizes-differ"},
    "attention-lengths": {"parallel-sizes"},
    "te-parts-differ": {"te-core-not-loaded", "te-extension-missing"},
    "undefined-symbol-other": {"te-parts-differ"},
    "internal-name": {"pydantic-version", "backward-past-engine", "cache-form"},
    "config-field": {"remote-code-other-release"},
    "value-of-another-kind": {
        "remote-code-other-release",
        "cache-form",
        "tensor-to-numpy",
        "numpy-names",
        "triton-older-than-kernel",
        "no-labels",
    },
    "checkpoint-of-another-layout": {"megatron-checkpoint-keys"},
    "result-dtype": {"dtype-mismatch", "scatter-dtype"},
    "devices-differ": {"mps-missing", "mixed-devices", "input-on-cpu"},
    "chat-roles": {"chat-template"},
    "weights-of-another-size": {"zero-empty-shape", "parameter-not-gathered"},
    "object-attribute": {"pydantic-version", "backward-past-engine", "triton-older-than-kernel", "internal-name"},
    "bitsandbytes-kernels": {"quantize-empty"},
    "launch-configuration": {"quantize-empty"},
    "call-signature": {"triton-newer-than-kernel", *COVERS["call-signature"]},
    "triton-version": {"triton-newer-than-kernel"},
    "command-missing": {
        "windows-program",
        "conda-shell",
        "git-missing",
        "cl-not-found",
        "nvcc-missing",
        "ninja-missing",
    },
    "torch-attribute": {"internal-name", *COVERS["torch-attribute"]},
    "import-name": {"internal-name", *COVERS["import-name"]},
    "module-attribute": {"internal-name", *COVERS["module-attribute"]},
}
for _name in ("internal-name", "config-field", "value-of-another-kind", "cache-form"):
    COVERS[_name] = COVERS.get(_name, set()) | _INTERFACES
COVERS["missing-key"] = {"weights-of-another-class", "remote-code-other-release"}
COVERS["object-attribute"] |= {"remote-code-other-release", "remote-code-newer-transformers"}
COVERS["module-missing"] |= {"vllm-extension", "own-module-path", "submodule-missing"}
COVERS["submodule-missing"] = (COVERS["module-missing"] - {"submodule-missing"}) | {"distutils-gone"}
COVERS["library-package"] = COVERS["shared-library"] | {"bitsandbytes-override"}
COVERS["shared-library"] |= {"library-package"}
COVERS["undefined-symbol-other"] |= {"symbol-library"}
COVERS["bitsandbytes-library"] = {"bitsandbytes-override"}
COVERS["checkpoint-broken"] = COVERS.get("checkpoint-broken", set()) | {"pickle-spawn"}
COVERS["weights-only"] = {"checkpoint-broken"}
COVERS["undeclared-name"] = {"headers-of-another-release"}
COVERS["headers-of-another-release"] = {"torch-api-changed", "cython-version", "cuda-older-than-source", "thc-removed"}
for _name in (
    "call-signature", "import-name", "module-attribute", "module-missing", "submodule-missing",
    "object-attribute", "torch-attribute",
    "triton-version", "python-older",
):  # fmt: skip
    COVERS[_name] = COVERS.get(_name, set()) | _INTERFACES
COVERS["library-newer"] = {"numpy-names", "pkg-resources", "setuptools-version", "pydantic-version", "distutils-gone"}
COVERS["python-dropped"] = {"distutils-gone"}
COVERS["undeclared-name"] = COVERS.get("undeclared-name", set()) | {"gcc-intrinsics", "cuda-source-release"}
COVERS["glibc-cuda-headers"] = COVERS.get("glibc-cuda-headers", set()) | {"gcc-intrinsics", "cpu-instructions"}
COVERS["gcc-intrinsics"] = {"cpu-instructions"}
COVERS["file-missing"] |= {"object-missing"}
COVERS["cuda-out-of-memory"] |= {"oom-other-process"}
COVERS["file-missing"] = COVERS.get("file-missing", set()) | {"bitsandbytes-library"}
COVERS["cuda-out-of-memory"] |= {"oom-larger-than-gpu"}
COVERS["module-missing"] |= {"flash-attention-3-missing"}
COVERS["flash-attention-extension"] = COVERS.get("flash-attention-extension", set()) | {"flash-attention-3-missing"}
COVERS["library-package"] = COVERS.get("library-package", set()) | {"nvrtc-name"}
COVERS["submodule-missing"] |= {"megatron-core-missing"}
COVERS["module-missing"] |= {"megatron-core-missing"}
COVERS["deepspeed-settings"] = COVERS.get("deepspeed-settings", set()) | {"deepspeed-batch"}
COVERS["oom-other-process"] = {"oom-but-free", "oom-larger-than-gpu"}
COVERS["triton-compiler"] = COVERS.get("triton-compiler", set()) | {"triton-own-assertion"}
COVERS["nccl-p2p"] = COVERS.get("nccl-p2p", set()) | {"nccl-shared-memory", "nccl-shm-transport"}
COVERS["nccl-shm-transport"] = {"nccl-shared-memory"}
COVERS["module-missing"] |= {"extension-part-missing", "causal-conv1d", "megatron-of-another-project"}
COVERS["submodule-missing"] |= {"megatron-of-another-project"}
COVERS["own-module-path"] = COVERS.get("own-module-path", set()) | {"megatron-of-another-project"}
COVERS["import-name"] |= {"megatron-of-another-project"}
COVERS["module-attribute"] |= {"megatron-of-another-project"}
COVERS["megatron-of-another-project"] = {"megatron-helpers", "library-older", "library-newer"}
COVERS["extension-part-missing"] = {
    "apex-extensions", "softmax-kernels",
    "causal-conv1d", "flash-attention-extension", "flash-attention-extras", "te-extension-missing",
    "deepspeed-extension", "vllm-extension",
}  # fmt: skip
COVERS["missing-key"] |= {"deepspeed-config-key"}
COVERS["shared-library"] |= {"deepspeed-extension"}
COVERS["header-missing"] |= {"openmp-missing"}
COVERS["cuda-source-release"] = COVERS.get("cuda-source-release", set()) | {"host-compiler-old-for-torch"}
COVERS["undeclared-name"] |= {"host-compiler-old-for-torch"}
COVERS["headers-of-another-release"] = COVERS.get("headers-of-another-release", set()) | {"host-compiler-old-for-torch"}
COVERS["inductor-cpp"] = COVERS.get("inductor-cpp", set()) | {
    "openmp-missing", "host-compiler-old-for-torch", "msvc-options",
}  # fmt: skip
COVERS["nvcc-ended"] = {"compiler-killed", "compiler-memory"}
COVERS["linker-library"] |= {"openmp-missing"}
COVERS["connection-refused"] = COVERS.get("connection-refused", set()) | {"gloo-address", "store-unreachable"}
COVERS["store-unreachable"] = {"master-unreachable", "gloo-address", "rendezvous-lost", "store-timeout"}
COVERS["ptxas-does-not-run"] = COVERS.get("ptxas-does-not-run", set()) | {"nvidia-triton-elsewhere"}
COVERS["network"] = COVERS.get("network", set()) | {"store-unreachable"}
COVERS["module-missing"] |= {"own-file-hides-package", "python-part-missing", "not-on-windows"}
COVERS["submodule-missing"] |= {"own-file-hides-package"}
COVERS["own-module-path"] |= {"own-file-hides-package"}
for _name in (*_INTERFACES, "import-name"):
    COVERS[_name] = COVERS.get(_name, set()) | {"own-file-hides-package", "namespace-folder"}
COVERS["no-kernel-image"] |= {"torch-no-arch"}
COVERS["cmake-package"] |= {"cudnn-headers"}
COVERS["header-missing"] |= {"cccl-headers"}
COVERS["shared-library"] |= {"cudnn-8"}
COVERS["library-package"] |= {"cudnn-8"}
COVERS["bare-assertion"] |= {"te-parts-differ"}
COVERS["host-memory"] = COVERS.get("host-memory", set()) | {"compiler-killed"}
COVERS["nvcc-crashed"] = COVERS.get("nvcc-crashed", set()) | {"compiler-killed"}
COVERS["script-arguments"] |= {"apex-options"}
COVERS["cl-not-found"] = COVERS.get("cl-not-found", set()) | {"visual-c"}
COVERS["windows-program"] |= {"visual-c", "cl-not-found"}
COVERS["command-missing"] |= {"cuda-home"}
COVERS["build-killed"] = {"compiler-killed"}
COVERS["process-killed"] |= {"build-killed"}
COVERS["no-driver"] |= {"container-toolkit"}
COVERS["container-hook"] |= {"container-toolkit"}
