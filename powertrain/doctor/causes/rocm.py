"""AMD GPUs."""

from powertrain.doctor.causes.cause import Cause

CAUSES = (
    Cause(
        "rocm-arch",
        r"HIP error: (?:invalid device function|no kernel image)|hipErrorNoBinaryForGpu|"
        r"rocBLAS error: Cannot read|TensileLibrary\S{0,40}: |"
        r"HIP error: shared object initialization failed|hipErrorInvalidDeviceFunction|"
        r"hipErrorSharedObjectInitFailed",
        "this ROCm build has no code for this GPU's gfx number",
        "HSA_OVERRIDE_GFX_VERSION=11.0.0 (gfx110x), 10.3.0 (gfx103x) or 9.0.0 (gfx90c) before the "
        "start takes a neighbour's code; a torch built for the gfx (PYTORCH_ROCM_ARCH); rocminfo | "
        "grep gfx",
        "该 ROCm 版本没有此 GPU（gfx）的代码",
        "启动前设置 HSA_OVERRIDE_GFX_VERSION=11.0.0（gfx110x）、10.3.0（gfx103x）或 "
        "9.0.0（gfx90c）；或为该 gfx 编译的 torch（PYTORCH_ROCM_ARCH）；rocminfo | grep gfx",
        "https://github.com/pytorch/pytorch/issues/164346",
        confidence="likely",
    ),
    Cause(
        "hipblaslt",
        r"hipBLASLt on an? unsupported architecture",
        "hipBLASLt has no kernels for this GPU",
        "TORCH_BLAS_PREFER_HIPBLASLT=0, or torch.backends.cuda.preferred_blas_library(\"cublas\")",
        "hipBLASLt 没有此 GPU 的 kernel",
        "TORCH_BLAS_PREFER_HIPBLASLT=0，或 torch.backends.cuda.preferred_blas_library(\"cublas\")",
        "https://github.com/pytorch/pytorch/issues/103973",
    ),
    Cause(
        "rocm-devices",
        r"/dev/kfd|ROCk module is NOT loaded|HSA_STATUS_ERROR_OUT_OF_RESOURCES|hsa_init\b.{0,40}fail",
        "ROCm cannot open the GPU: amdgpu's module is not loaded, or the user or container may not "
        "use /dev/kfd and /dev/dri",
        "sudo usermod -aG render,video $USER and log in again; docker run --device=/dev/kfd "
        "--device=/dev/dri --group-add video --ipc=host; sudo modprobe amdgpu",
        "ROCm 无法打开 GPU：amdgpu 模块未加载，或用户、容器无权访问 /dev/kfd 和 /dev/dri",
        "sudo usermod -aG render,video $USER 后重新登录；docker run --device=/dev/kfd "
        "--device=/dev/dri --group-add video --ipc=host；sudo modprobe amdgpu",
        "https://rocm.docs.amd.com/projects/install-on-linux/en/latest/",
        confidence="likely",
    ),
    Cause(
        "miopen",
        r"MIOpen Error|miopenStatus\w+|MIOpen\(HIP\): Error",
        "MIOpen could not compile or find a convolution for this GPU: a cache that cannot be "
        "written, or a gfx that it does not support",
        "rm -r ~/.cache/miopen ~/.config/miopen; MIOPEN_FIND_MODE=2; torch and ROCm of one version",
        "MIOpen 无法为此 GPU 编译或找到卷积：缓存不可写，或不支持该 gfx",
        "rm -r ~/.cache/miopen ~/.config/miopen；MIOPEN_FIND_MODE=2；torch 与 ROCm 版本一致",
        "https://rocm.docs.amd.com/projects/MIOpen/en/latest/",
        confidence="likely",
    ),
)  # fmt: skip
