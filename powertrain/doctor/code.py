"""GPU archs that each installed library has code for, and the consequence for the GPUs here."""

from collections.abc import Iterator
from pathlib import Path

from powertrain.doctor.fatbin import Code, codes, fatbins
from powertrain.doctor.finding import Check, Finding
from powertrain.runtime.machine import Machine

# library: where its GPU code lies, from a folder of installed packages
LIBRARIES = {
    "torch": ("torch/lib/libtorch_cuda*.so",),
    "xformers": ("xformers/*.so",),
    "flash-attn": ("flash_attn_2_cuda*.so", "flash_attn_3/*.so", "flash_attn_3_cuda*.so"),
    "transformer-engine": (
        "transformer_engine/*.so", "transformer_engine/wheel_lib/*.so", "transformer_engine/lib/*.so",
        "transformer_engine_torch*.so", "libtransformer_engine*.so",
    ),
    "apex": ("amp_C*.so", "fused_layer_norm_cuda*.so", "fused_weight_gradient_mlp_cuda*.so", "apex_C*.so",
             "fast_layer_norm*.so", "scaled_*_softmax_cuda*.so"),
    "gpt-neox fused kernels": ("megatron/fused_kernels/build/*.so", "fused_kernels*/*.so"),
    "deepspeed": ("deepspeed/ops/**/*.so",),
    "mamba-ssm": ("selective_scan_cuda*.so",),
    "causal-conv1d": ("causal_conv1d_cuda*.so",),
    "vllm": ("vllm/*.so", "vllm/vllm_flash_attn/*.so"),
}  # fmt: skip


def code(machine: Machine) -> Iterator[Finding]:
    """A finding for each library with GPU code: SASS and PTX apart, and the verdict for every arch here."""
    archs = sorted({gpu.arch for gpu in machine.gpus if gpu.arch})
    has_library = False
    for library, patterns in LIBRARIES.items():
        held = {}
        for file in _files(machine, patterns):
            try:
                if inside := codes(file):
                    held[file] = inside
            except (ValueError, OSError) as error:
                has_library = True
                yield Finding(
                    "problem", f"{library}: {error}", fix=f"install {library} again: pip install --force-reinstall"
                )
        if held:
            has_library = True
            yield _verdict(machine, library, held, archs)
    if not has_library:
        yield Finding("ok", f"none of {', '.join(LIBRARIES)} has GPU code here")


def _files(machine: Machine, patterns: tuple[str, ...]) -> list[Path]:
    folders = (*machine.packages, machine.cwd)
    return sorted({file for folder in folders for pattern in patterns for file in folder.glob(pattern)})


def _verdict(machine: Machine, library: str, held: dict[Path, frozenset[Code]], archs: list[int]) -> Finding:
    everything = frozenset().union(*held.values())
    message = f"{library}: {describe(everything)}"
    evidence = tuple(f"{file}: {describe(codes)}" for file, codes in held.items())
    verdicts = {arch: judge(everything, arch) for arch in archs}
    names = {gpu.arch: gpu.name for gpu in machine.gpus}
    verdict = "; ".join(f"your {names[arch]} (sm_{arch}): {words}" for arch, (_, words) in verdicts.items() if words)
    without = {arch: _without(held, arch) for arch in archs}
    evidence += tuple(f"sm_{arch}: {words}" for arch, words in without.items() if words)
    levels = [level for level, _ in verdicts.values()]
    fix = (
        f"install a build of {library} for {', '.join(f'sm_{arch}' for arch in archs)}, or build it here: "
        f'TORCH_CUDA_ARCH_LIST="{" ".join(f"{arch // 10}.{arch % 10}" for arch in archs)}"'
    )
    if "problem" in levels:
        return Finding("problem", f"{message}; {verdict}", evidence, fix)
    if "warning" in levels:
        return Finding(
            "warning", f"{message}; {verdict}", evidence, f"{fix} (or wait once: the driver caches its compiles)"
        )
    return Finding("ok", f"{message}; {verdict}" if verdict else message, evidence)


def describe(held: frozenset[Code]) -> str:
    sass = ", ".join(str(one) for one in sorted(held) if one.kind == "sass")
    ptx = ", ".join(f"{one.arch // 10}.{one.arch % 10}{one.suffix}" for one in sorted(held) if one.kind == "ptx")
    return f"{sass or 'no SASS'}; PTX {ptx}" if ptx else f"{sass}; no PTX"


def judge(held: frozenset[Code], arch: int) -> tuple[str, str]:
    """(level, in words) for one arch."""
    fits = [one for one in held if one.runs_on(arch)]
    if any(one.kind == "sass" for one in fits):
        exact = any(one.arch == arch and one.kind == "sass" for one in fits)
        return "ok", "" if exact else f"runs the code of sm_{max(one.arch for one in fits if one.kind == 'sass')}"
    if fits:
        best = max(fits)
        return "warning", f"PTX {best.arch // 10}.{best.arch % 10} only: the driver will compile it at the first use"
    return "problem", "no code, will fail"


def _without(held: dict[Path, frozenset[Code]], arch: int) -> str:
    """Number of source files without code for an arch that others have code for: their kernels fail there."""
    units = [unit for file in held for unit in fatbins(file) if unit]
    lacking = sum(not any(one.runs_on(arch) for one in unit) for unit in units)
    return f"{lacking} of {len(units)} compiled source files have no code for it" if 0 < lacking < len(units) else ""


CHECKS = (Check("code", "for which GPUs does each library have code?", code),)
