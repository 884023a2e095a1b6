"""`powertrain explain`: the attention backend chosen on any GPU, with reasons, and the effects of FP8 on a run."""

import os
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powertrain.cli import explain_fp8
from powertrain.runtime.console import Console

if TYPE_CHECKING:
    from powertrain.ops.attention.explain import Column, Explanation

_MASKS = {  # TransformerEngine's names: causal, aligned bottom right, padded
    "no_mask": (False, False, False),
    "padding": (False, False, True),
    "causal": (True, False, False),
    "padding_causal": (True, False, True),
    "causal_bottom_right": (True, True, False),
    "padding_causal_bottom_right": (True, True, True),
    "arbitrary": (False, False, False),
}
# a slip of the keyboard must not reach PyTorch, whose counting of bytes overflows in 64 bits
_LONGEST, _MOST = 1 << 30, 1 << 20
_MOST_ELEMENTS = 1 << 48
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def explain(
    topic: Annotated[str, typer.Argument(help="topic to explain: attention, fp8")],
    files: Annotated[list[str] | None, typer.Argument(help="for fp8: config files and key=value overrides")] = None,
    arch: Annotated[
        list[str] | None, typer.Option(help="a GPU or arch, or cpu; default: the devices here, for fp8 H100")
    ] = None,
    head_dim: Annotated[int, typer.Option(help="of query, key and value", min=1, max=_MOST)] = 128,
    head_dim_qk: Annotated[int | None, typer.Option(help="of query and key", min=1, max=_MOST)] = None,
    head_dim_v: Annotated[int | None, typer.Option(help="of value", min=1, max=_MOST)] = None,
    heads: Annotated[int, typer.Option(help="query heads", min=1, max=_MOST)] = 16,
    kv_heads: Annotated[
        int | None, typer.Option(help="key heads (bmghk: groups); default: as many", min=1, max=_MOST)
    ] = None,
    batch: Annotated[int, typer.Option(help="sequences", min=0, max=_MOST)] = 2,
    seqlen: Annotated[int, typer.Option(help="queries of one sequence", min=0, max=_LONGEST)] = 4096,
    seqlen_k: Annotated[
        int | None, typer.Option(help="keys of one sequence; default: as many", min=0, max=_LONGEST)
    ] = None,
    layout: Annotated[str, typer.Option(help="bshd, bhsd, sbhd, thd or bmghk")] = "bshd",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32")] = "bf16",
    mask: Annotated[str, typer.Option(help=f"{', '.join(_MASKS)}")] = "causal",
    window: Annotated[str | None, typer.Option(help="left,right; -1: unbounded")] = None,
    bias: Annotated[str | None, typer.Option(help="a dense mask: bool or float")] = None,
    alibi: Annotated[bool, typer.Option("--alibi", help="ALiBi slopes")] = False,
    sinks: Annotated[bool, typer.Option("--sinks", help="learnable sinks")] = False,
    softcap: Annotated[float, typer.Option(help="0: none")] = 0.0,
    dropout: Annotated[float, typer.Option(help="dropout_p")] = 0.0,
    lse: Annotated[bool, typer.Option("--lse", help="the LSE is returned")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="backward must be")] = False,
    inference: Annotated[bool, typer.Option("--inference", help="no gradients")] = False,
    backend: Annotated[list[str] | None, typer.Option(help="as backend=: a name, or -name to forbid")] = None,
    like: Annotated[
        str | None, typer.Option("--as", help="choice of transformer-engine, xformers or flash-attn")
    ] = None,
    version: Annotated[str | None, typer.Option(help="of that library")] = None,
    torch_version: Annotated[str | None, typer.Option("--torch", help="PyTorch's version to answer for")] = None,
    cudnn: Annotated[str | None, typer.Option(help="cuDNN's version to answer for")] = None,
    flash_attn: Annotated[str | None, typer.Option(help="flash-attn's version to answer for, or none")] = None,
    switch: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of the library's environment variables")
    ] = None,
) -> None:
    """Show which attention backend a GPU uses and why, or how FP8 changes a run's layers; the GPU need not be present.

    fp8: for each linear layer of a config its recipe, or why it stays in bf16, with expected times and memory.

    \b
    powertrain explain attention --arch A100 --arch H100 --head-dim-qk 192 --head-dim-v 128 --layout thd
    powertrain explain attention --arch A100 --head-dim-qk 192 --head-dim-v 128 --layout thd --mask padding_causal \\
        --as transformer-engine --version 2.3 --cudnn 9.8 --set NVTE_FLASH_ATTN=0 --set NVTE_UNFUSED_ATTN=0
    powertrain explain fp8 run.yml fp8.recipe=block --arch H100

    The exit code is 1 where no backend can compute the attention.
    """
    if topic == "fp8":
        if not files:
            raise typer.BadParameter("fp8 needs a config file, as in: powertrain explain fp8 run.yml --arch H100")
        return explain_fp8.show(files, arch or ["H100"])
    if topic != "attention":
        raise typer.BadParameter(f"must be attention or fp8, got {topic!r}")
    if files:
        raise typer.BadParameter(f"attention takes options only, got {files[0]!r}")
    _check_mask(mask, dtype, bias, layout)
    dims = (head_dim_qk or head_dim, head_dim_v or head_dim)
    _check_elements(max(batch, 1) * max(seqlen, seqlen_k or 1) * max(heads, kv_heads or 1) * max(dims))
    if like is None and (version or switch):
        raise typer.BadParameter("--version and --set are of the library that --as names")
    # imported after the checks: a wrong option is said without waiting for torch
    import torch

    from powertrain.ops.attention.explain import explain_attention

    is_causal, bottom_right, padded = _MASKS[mask]
    arguments: dict[str, Any] = {
        "is_causal": is_causal,
        "causal_align": "bottom_right" if bottom_right else "top_left",
        "softcap": softcap,
        "dropout_p": dropout,
        "return_lse": lse,
        "deterministic": deterministic,
        "backend": _backend(backend),
    }
    if window is not None:
        arguments["window_size"] = _window(window)
    flags = {"alibi_slopes": alibi, "sinks": sinks, "seqused_k": padded and layout != "thd"}
    arguments |= {name: True for name, given in flags.items() if given}
    if bias or mask == "arbitrary":
        arguments["attn_bias"] = bias or "bool"
    try:
        explanation = explain_attention(
            arch=arch or _here(), dtype=getattr(torch, _DTYPES[dtype]), layout=layout,  # type: ignore[arg-type]
            head_dim_qk=dims[0], head_dim_v=dims[1], num_heads=heads,
            num_kv_heads=kv_heads, batch=batch, queries=seqlen, keys=seqlen_k, needs_grad=not inference,
            software=_software(torch_version, cudnn, flash_attn), **arguments,
        )  # fmt: skip
        if like is not None:
            versions = (version, torch_version, cudnn, flash_attn)
            keys = seqlen if seqlen_k is None else seqlen_k
            explanation = explained_as(like, explanation, seqlen, keys, versions, switch or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _show(explanation)


def _check_mask(mask: str, dtype: str, bias: str | None, layout: str) -> None:
    if mask not in _MASKS:
        raise typer.BadParameter(f"mask must be one of {', '.join(_MASKS)}, got {mask!r}")
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    if bias not in (None, "bool", "float"):
        raise typer.BadParameter(f"bias must be bool or float, got {bias!r}")
    if layout == "thd" and (bias or mask == "arbitrary"):
        raise typer.BadParameter("packed sequences (thd) take no dense mask: leave out --bias and --mask arbitrary")


def _check_elements(elements: int) -> None:
    if elements > _MOST_ELEMENTS:
        raise typer.BadParameter(
            f"--batch, --seqlen, --heads and --head-dim must give tensors of at most {_MOST_ELEMENTS} elements, "
            f"got {elements}"
        )


def _show(explanation: "Explanation") -> None:
    """Print it; exit code 1 where no backend can compute the attention."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(str(explanation), markup=False)
    if None in explanation.by_gpu.values():
        raise typer.Exit(1)


def _backend(names: list[str] | None) -> str | list[str] | None:
    return names or None


def _window(text: str) -> tuple[int, int]:
    try:
        left, right = (int(number) for number in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"window must be two numbers such as 1024,0 (-1: unbounded), got {text!r}") from None
    return left, right


def _here() -> list[str]:
    """The GPUs of this machine, each kind once, or the CPU."""
    import torch

    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return list(dict.fromkeys(names)) or ["cpu"]


def _software(torch_version: str | None, cudnn: str | None, flash_attn: str | None) -> Any:
    """The versions to answer for, where some were given."""
    if torch_version is None and cudnn is None and flash_attn is None:
        return None
    from dataclasses import replace

    from powertrain.ops.attention.backends.versions import cudnn_number, installed, version_numbers, with_cuda

    given = with_cuda(installed())
    if torch_version is not None:
        major, minor, *_ = (*version_numbers("PyTorch", torch_version), 0)
        given = replace(given, torch=(major, minor))
    if cudnn is not None:
        given = replace(given, cudnn=cudnn_number(cudnn))
    if flash_attn is not None:
        # a release may end in letters: 2.8.0.post2, 4.0.0b4
        if flash_attn != "none" and not re.match(r"\d+\.\d", flash_attn):
            raise ValueError(f"--flash-attn must be a version such as 2.8.3, or none, got {flash_attn!r}")
        packages = () if flash_attn == "none" else ((_package(flash_attn), flash_attn),)
        given = replace(given, packages=packages)
    return given


def _package(version: str) -> str:
    return "flash-attn" if version.startswith("2") else f"flash-attn-{version[0]}"


def explained_as(
    library: str,
    ours: "Explanation",
    queries: int,
    keys: int,
    versions: tuple[str | None, ...],
    switches: list[str],
) -> "Explanation":
    """The same table of another library."""
    from powertrain.compat.attention_rules import LIBRARIES, versions_of
    from powertrain.ops.attention.explain import Explanation

    if library not in LIBRARIES:
        raise ValueError(f"--as must be one of {', '.join(LIBRARIES)}, got {library!r}")
    known = LIBRARIES[library]
    given = dict(text.split("=", 1) for text in switches if "=" in text)
    wrong = [text for text in switches if "=" not in text]
    wrong += [name for name in given if name not in known.switches]
    if wrong:
        raise ValueError(f"--set takes NAME=VALUE of {', '.join(known.switches) or 'nothing'}, got {', '.join(wrong)}")
    environment = {name: os.environ[name] for name in known.switches if name in os.environ} | given
    about = versions_of(library, *versions)
    return Explanation(tuple(_peer_column(c, library, queries, keys, about, environment) for c in ours.columns))


def _peer_column(
    column: "Column", library: str, queries: int, keys: int, versions: Any, environment: dict[str, str]
) -> "Column":
    from powertrain.compat.attention_rules import LIBRARIES, PeerCase, changes_that_help, peer_verdicts
    from powertrain.ops.attention.explain import Column

    known = LIBRARIES[library]
    case = PeerCase(column.problem, queries, keys, versions, environment)
    verdicts = peer_verdicts(library, case)
    notes = [f"as {known.name} {versions}", f"rules: {known.source}"]
    if versions.library not in (v.library for v in known.versions):
        read = " and ".join(".".join(map(str, v.library)) for v in known.versions)
        notes.append(f"rules were read for {read}; changes in between are dated roughly")
    notes += [f"{name}={value}" for name, value in environment.items()]
    if all(v.verdict == "no" for v in verdicts):
        notes.append("no backend is left; changes that would help:")
        notes += [f"  {change.description}: {change.backend}" for change in changes_that_help(library, case)]
        notes.append(f"  Powertrain: {column.chosen}")
    return Column(column.name, column.problem, verdicts, tuple(notes))
