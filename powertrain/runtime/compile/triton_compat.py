"""All uses of Triton's internals, which differ between Triton 3.6 and 3.9.

Must not import torch: the compile workers import this module and no torch.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from powertrain.runtime.gc_disabled import gc_disabled
from powertrain.runtime.settings import settings

if settings().interpret:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "POWERTRAIN_INTERPRET=1 was set after triton had been imported; set TRITON_INTERPRET=1 too, before"
        )
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.runtime.jit

from powertrain.runtime.compile.function_source import Inspect, source_lines, source_tokens

# before a module of kernels is imported; other libraries' functions are found as before
triton.runtime.jit.inspect = Inspect()

if settings().interpret:
    from powertrain.runtime.compile import triton_interpreter

    triton_interpreter.install()

VERSION_TEXT: str = triton.__version__
# their versions are part of the key, or they hold no kernels
_FOREIGN = ("triton", "torch", "numpy", "math", "builtins")


def _is_device_function(value: Any) -> bool:
    return hasattr(value, "fn") and isinstance(getattr(value, "fn", None), FunctionType)


@cache  # kernels share device functions
def _tokens(function: FunctionType) -> str:
    # a nested function's source is indented, which tokenize refuses
    lines, _ = source_lines(function)
    indent = len(lines[0]) - len(lines[0].lstrip())
    return " ".join(source_tokens("".join(line[indent:] if line.strip() else "\n" for line in lines)))


def source_hash(function: FunctionType) -> str:
    """A hash of a kernel's source, of the device functions it calls and of the global constants it names."""
    parts: dict[str, str] = {}
    _collect(function, parts)
    return hashlib.sha256("\n".join(f"{name}={parts[name]}" for name in sorted(parts)).encode()).hexdigest()


def _collect(function: FunctionType, parts: dict[str, str]) -> None:
    name = f"{function.__module__}.{function.__qualname__}"
    # device functions may call each other in a circle
    if name in parts:
        return
    parts[name] = _tokens(function)
    names = function.__code__.co_names
    scopes = [function.__globals__]
    for named in (function.__globals__.get(n) for n in names):
        if isinstance(named, ModuleType) and named.__name__.partition(".")[0] not in _FOREIGN:
            scopes.append(vars(named))
    for scope in scopes:
        for called in names:
            value: Any = scope.get(called)
            if _is_device_function(value) and value.fn.__module__.partition(".")[0] not in _FOREIGN:
                _collect(value.fn, parts)
            elif isinstance(value, type) and hasattr(value, "_fields"):  # a NamedTuple, which kernels fill by position
                parts[f"{name}:{called}"] = repr(value._fields)
            elif isinstance(value, triton.language.constexpr):
                parts[f"{name}:{called}"] = repr(value.value)
            elif isinstance(value, bool | int | float | str):
                parts[f"{name}:{called}"] = repr(value)


@cache
def _backend(arch: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    return make_backend(GPUTarget("cuda", arch, 32))


@cache
def ptxas_version(arch: int) -> str:
    """The ptxas that would be used: "bundled" with Triton (whose version is in the key too), or another's own words."""
    variables = ("TRITON_PTXAS_BLACKWELL_PATH",) if arch >= 100 else ("TRITON_PTXAS_PATH",)
    for path in (os.environ.get(variable) for variable in variables):
        if path:
            run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
            return f"{path}: {run.stdout.strip().splitlines()[-1] if run.stdout.strip() else run.returncode}"
    return "bundled"


def _parse(backend: Any, options: Mapping[str, Any]) -> Any:
    # said explicitly because its default is an environment variable, and another one from Triton 3.10 on
    return backend.parse_options({"enable_fp_fusion": True, **options})


def is_gluon(jit: Any) -> bool:
    return bool(jit.is_gluon())


def lower(
    jit: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: Mapping[str, int],
    options: Mapping[str, Any],
    arch: int,
) -> str:
    """A kernel's TTIR (Gluon's: TTGIR), as text without source locations, so that equal kernels give equal cubins."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import ASTSource

    if is_gluon(jit):
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        Source = ASTSource
    names = list(jit.arg_names)
    backend = _backend(arch)
    source = Source(
        jit,
        dict(signature),
        {(names.index(name),): value for name, value in constants.items()},
        # as backend.parse_attr("D") says 16
        {(names.index(name),): [["tt.divisibility", step]] for name, step in aligned.items()},
    )
    parsed = _parse(backend, options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with gc_disabled():
        module = source.make_ir(
            backend.target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
        )
    return str(module)


def compile_ir(path: Path, options: Mapping[str, Any], arch: int, gluon: bool) -> tuple[dict[str, Any], bytes, str]:
    """TTIR (Gluon's: TTGIR) in a file to (launch facts, cubin, PTX). May hang or abort the process (LLVM does when
    sm_90's wgmma is asked of another arch): only workers call it."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import Language

    backend = _backend(arch)
    parsed = _parse(backend, options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = ir.parse_mlir_module(str(path), context)
    module.context = context
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, Language.GLUON if gluon else Language.TRITON)
    metadata: dict[str, Any] = {**parsed.__dict__, "target": backend.target}
    results: dict[str, Any] = {}
    for name, stage in stages.items():
        results[name] = module = stage(module, metadata)
    facts = {
        "name": metadata["name"],
        "num_warps": metadata["num_warps"],
        "num_ctas": metadata.get("num_ctas", 1),
        "shared": metadata["shared"],
        "tmem": metadata.get("tmem_size") or 0,
        "global_scratch": metadata.get("global_scratch_size") or 0,
        "global_scratch_align": metadata.get("global_scratch_align") or 1,
        "profile_scratch": metadata.get("profile_scratch_size") or 0,
        "tensor_maps": metadata.get("tensordesc_meta") or [],
    }
    return facts, results["cubin"], results["ptx"]


def _bundled(tool: str) -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool


def resource_usage(cubin: Path) -> dict[str, int]:
    """Registers and stack bytes (spills show as stack) of a cubin, from the cuobjdump that comes with Triton."""
    run = subprocess.run(
        [str(_bundled("cuobjdump")), "-res-usage", str(cubin)], capture_output=True, text=True, timeout=60
    )
    words = dict(part.split(":", 1) for part in run.stdout.split() if ":" in part)
    return {"registers": int(words.get("REG", 0)), "stack": int(words.get("STACK", 0))}
