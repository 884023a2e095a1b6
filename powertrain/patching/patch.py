"""`powertrain.patch(model)`: a model written elsewhere, on our ops, in one line."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.patching import attention, gain, loss, mlps, norms, replace, rotary, verify
from powertrain.patching.replace import Part, Report
from powertrain.runtime import checks
from powertrain.runtime.positional import hinted

# pairs with their config, since parts of one model share a config object or have their own
_FORMER = "_powertrain_former_attention"  # attribute of a patched model: [(config, its implementation before)]
KINDS = (norms.KIND, mlps.KIND, rotary.KIND, attention.KIND, loss.KIND)


@hinted
def patch(model: nn.Module, *, kinds: Iterable[str] = KINDS, explain: bool = False) -> Report:
    """Run a model's norms, feed-forward layers, rotary embedding, attention and training loss on Powertrain's ops.

    Nothing is known by name: parts are found by the shape of their modules, and each is run beside the op that would
    replace it, on random inputs and weights. Outputs and gradients must lie within twice the old module's own error
    against float64, plus one rounding; what differs is left as it is. Parameters, state dict, classes, hooks and the
    signature of forward stay the same; only `forward` of single modules is replaced.

        model    any nn.Module: norms and feed-forward layers are found in all, rotary embedding, attention and loss in
                 those of Hugging Face transformers
        kinds    of "norm", "mlp", "rotary", "attention", "loss": those to replace
        explain  print the report: what was replaced, what was not and why, and the expected gain
    Returns a Report with `replaced` and `left`, lists of Part(kind, name, what, why, gain). `unpatch(model)` undoes it.

    Before or after PEFT: adapted, quantized and sharded layers are left to their libraries, at call time too. Before
    FSDP, DDP, accelerate's dispatch and torch.compile. Under torch.compile norms, rotary embedding and activations are
    left to Inductor, which fuses them with their neighbours. Where our kernels do not run, on a CPU, modules run their
    own code and attention is transformers' "sdpa", but for softcaps, sinks and packed sequences that are given by
    cu_seq_lens. In training with labels a patched causal language model returns `logits=None`.
    Memory: while a part is judged, a few copies of its weights in float64.
    Raises ValueError for a kind that there is not, and for a model that is no module. Parts that are patched already
    are left.
    """
    _check_model("patch", model)
    wanted = _checked(kinds)
    report = Report(model)
    with _plainly():
        for kind, step in _STEPS.items():
            if kind in wanted:
                step(model, report)
        _judge_whole(model, report)
    replace.hand_on(model)
    if explain:
        print(table(report))
    return report


def unpatch(model: nn.Module) -> None:
    """Undo `patch`: every module runs its class's own forward again, attention its former implementation."""
    _check_model("unpatch", model)
    # reading the mark rather than a list: a deep copy of the model is unpatched too
    for module in model.modules():
        if replace.installed(module) or replace.left_by_pickle(module):
            replace.remove(module)
    replace.hand_on(model)
    _restore_attention(model)


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """With gradients and without autocast, wherever `patch` is called: in bfloat16 a gelu is as near as its tanh."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # older torch warns of "cuda" without a GPU, also where it is switched off
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _check_model(op: str, model: object) -> None:
    got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    checks.require(isinstance(model, nn.Module), op, "model", "be an nn.Module", got)


def _checked(kinds: Iterable[str]) -> set[str]:
    # a single name is a string, whose letters would count as kinds
    wanted = {kinds} if isinstance(kinds, str) else set(kinds)
    if unknown := wanted - set(KINDS):
        raise ValueError(f"patch: kinds must be of {', '.join(KINDS)}, got {', '.join(sorted(map(repr, unknown)))}")
    return wanted


def _replace_modules(
    model: nn.Module, report: Report, kind: str, is_part: Callable[[nn.Module], bool], width: Callable[..., int],
    candidates: Callable[..., list[Any]], why_not: Callable[[nn.Module], str | None] = lambda module: None,
) -> None:  # fmt: skip
    """Norms and feed-forward layers: one judgement for all modules of one key."""
    judged: dict[Any, tuple[Part, Callable[..., Any] | None]] = {}
    for name, module in model.named_modules():
        # patch may be called twice, with other kinds
        if not is_part(module) or replace.installed(module):
            continue
        # layers that are sharded, quantized or hooked keep their library's forward
        if reason := replace.why_not_replaceable(module) or why_not(module):
            report.add(Part(kind, name, why=reason))
            continue
        key = verify.key(module)
        # a model has many modules of few kinds: one of each is compared
        if key not in judged:
            tried = candidates(module)
            index, why = verify.first_equal(module, width(module), tried)
            found = tried[index] if index is not None else ("", None)
            judged[key] = Part(kind, "", found[0], why, gain.of(module, width(module), found[1])), found[1]
        part, forward = judged[key]
        report.add(Part(kind, name, part.what, part.why, part.gain))
        if forward is not None:
            replace.install(module, kind, replace.where_kernels_run(forward))


def _patch_norms(model: nn.Module, report: Report) -> None:
    _replace_modules(model, report, norms.KIND, norms.is_norm, norms.width, norms.candidates)


def _patch_mlps(model: nn.Module, report: Report) -> None:
    _replace_modules(model, report, mlps.KIND, mlps.is_mlp, mlps.width, mlps.candidates, mlps.why_not)


def _patch_rotary(model: nn.Module, report: Report) -> None:
    found: dict[Any, dict[str, rotary.Rotate] | str] = {}
    for name, module in model.named_modules():
        # an attention module is recognized by the rotation its code calls
        theirs, heads = rotary.theirs(module), rotary.heads(module)
        if not theirs or replace.installed(module):
            continue
        if heads is None or replace.is_others(module):
            report.add(Part(rotary.KIND, name, why="its heads are not known" if heads is None else replace.OTHERS))
            continue
        dtype = _dtype(module)
        key = tuple(theirs.items()), heads, dtype
        if key not in found:
            # angles depend on the model's config (scaling, partial rotary), so its own module is asked
            angles = rotary.angles(model, heads[2])
            found[key] = angles if isinstance(angles, str) else rotary.find(theirs, *angles, heads, dtype)
        ours = found[key]
        if isinstance(ours, str):
            report.add(Part(rotary.KIND, name, why=ours))
            continue
        replace.install(module, rotary.KIND, replace.where_kernels_run(rotary.forward_with(module, ours)))
        report.add(Part(rotary.KIND, name, "rope", gain="q and k in one launch"))


def _patch_attention(model: Any, report: Report) -> None:
    if not hasattr(model, "set_attn_implementation"):
        _name_inner(model, report, attention.KIND)
        return
    parts = [(n, m) for n, m in model.named_modules() if _calls_registry(m)]
    # patched already
    if model.config._attn_implementation == attention.NAME:
        return
    reasons = {}
    for name, module in parts:
        heads, parameter = rotary.heads(module), next(module.parameters(), None)
        if heads is None or parameter is None:
            reasons[name] = "its heads are not known"
            continue
        # nothing is computed for a meta module; its weights are not needed by the comparison
        device = torch.device("cpu") if parameter.is_meta else parameter.device
        if reason := attention.find(module, heads, _dtype(module), device):
            reasons[name] = reason
    if not parts:
        report.add(Part(attention.KIND, "", why="no module calls transformers' attention registry"))
    elif reasons:  # the implementation is one of the config: all its layers, or none
        for name, reason in reasons.items():
            report.add(Part(attention.KIND, name, why=reason))
    else:
        _switch_attention(model)
        for name, _ in parts:
            report.add(Part(attention.KIND, name, "attention", gain="by backend: powertrain explain attention"))


def _name_inner(model: nn.Module, report: Report, kind: str) -> None:
    """Report a model of transformers inside one that is none (PEFT's wrappers are: they pass attributes on)."""
    for name, module in model.named_modules():
        if hasattr(module, "set_attn_implementation"):
            why = f"it is inside a {type(model).__name__}, which is no model of transformers; patch it by itself too"
            report.add(Part(kind, name, why=why))
            return


def _calls_registry(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    # the name in the code object: transformers' modules look their attention up by it at every call
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _switch_attention(model: Any) -> None:
    attention.register()
    _own_configs(model)
    # parts of a model (vision, text) may have configs, and implementations, of their own
    former = [(config, config._attn_implementation) for config in _configs(model)]
    model.set_attn_implementation(attention.NAME)
    # on the model, since a config's own attributes are saved with it
    _inner(model).__dict__.setdefault(_FORMER, _Formers()).extend(
        (config, name) for config, name in former if config._attn_implementation == attention.NAME != name
    )


class _Formers(list[tuple[Any, str]]):
    """(config, previous attention implementation) of a patched model. Unpickling it registers our implementation."""

    def __reduce__(self) -> Any:
        return _unpickled, (list(self),)


def _unpickled(pairs: list[tuple[Any, str]]) -> _Formers:
    attention.register()
    return _Formers(pairs)


def _own_configs(model: nn.Module) -> None:
    """Replace the model's configs by copies: another model with the same config object keeps its own attention."""
    copies = {id(config): (config, copy.copy(config)) for config in _configs(model)}
    for _, config in copies.values():
        _exchange(config, copies)
    for module in model.modules():
        _exchange(module, copies)
        # a part may have been patched by itself before
        if formers := module.__dict__.get(_FORMER):
            formers[:] = [(copies.get(id(config), (None, config))[1], name) for config, name in formers]


def _exchange(holder: Any, copies: dict[int, tuple[Any, Any]]) -> None:
    values = vars(holder)
    values.update({name: copies[id(value)][1] for name, value in values.items() if id(value) in copies})


def _restore_attention(model: nn.Module) -> None:
    for config, implementation in _formers(model):
        # the property's setter would write to the configs of all parts too, each of which is restored by itself
        config._attn_implementation_internal = implementation
    for module in model.modules():
        module.__dict__.pop(_FORMER, None)


def _formers(model: nn.Module) -> list[tuple[Any, str]]:
    """The configs that run our attention, and their implementations before, wherever in the model they are kept."""
    pairs = [pair for module in model.modules() for pair in module.__dict__.get(_FORMER, ())]
    # one that was set since, by `set_attn_implementation`, is the user's
    return [(config, name) for config, name in pairs if config._attn_implementation == attention.NAME]


def _inner(model: nn.Module) -> Any:
    """The model of transformers inside a wrapper such as PEFT's, whose class has the forward with the loss."""
    from transformers import PreTrainedModel

    # PEFT and others wrap the model: the wrapper's forward only passes on
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def _configs(model: Any) -> list[Any]:
    """The configs of the model and its parts, each once."""
    configs = [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")]
    return list({id(config): config for config in configs}.values())


def _patch_loss(model: Any, report: Report) -> None:
    if not hasattr(model, "loss_function"):
        _name_inner(model, report, loss.KIND)
        return
    model = _inner(model)
    if replace.installed(model):
        return
    name = type(model).__name__
    reason = replace.OTHERS if replace.is_others(model) else loss.why_not(model)
    outcome = reason or loss.find(model)
    if isinstance(outcome, str):
        report.add(Part(loss.KIND, name, why=outcome))
        return
    replace.install(model, loss.KIND, outcome[1])
    vocabulary = model.get_output_embeddings().out_features
    # logits and their gradient, 16 and 32 bits each
    saved = vocabulary * 12 * 8192 / 2**30
    report.add(Part(loss.KIND, name, outcome[0], gain=f"about {saved:.1f} GiB of logits less at 8192 tokens"))


_STEPS: dict[str, Callable[[nn.Module, Report], None]] = {
    norms.KIND: _patch_norms,
    mlps.KIND: _patch_mlps,
    rotary.KIND: _patch_rotary,
    attention.KIND: _patch_attention,
    loss.KIND: _patch_loss,
}


def _dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def _judge_whole(model: nn.Module, report: Report) -> None:
    """Logits of the whole model on random tokens, patched beside unpatched; kinds that differ are undone, and named."""
    # on meta, sharded or several devices single judgements must do
    if not report.replaced or not _runs_here(model):
        return
    with _AsWritten(model):
        right = [_logits(model, padded) for padded in (False, True)]
    # attention first: the test of one module has shown nothing of the model's masks
    for kind in (None, attention.KIND, rotary.KIND, mlps.KIND, norms.KIND):
        if kind is not None:
            _undo(model, kind)
            for part in [p for p in report.replaced if p.kind == kind]:
                report.replaced.remove(part)
                report.left.append(Part(kind, part.name, why="the whole model's results differed with it"))
        if all(old is None or _agree(_logits(model, padded), old) for padded, old in enumerate(right)):
            return


def _agree(new: Tensor | None, old: Tensor) -> bool:
    # rounding through all layers; a part that is wrong differs by far more
    bound = 0.05 if old.dtype is not torch.float32 else 1e-3
    return new is not None and float((new.double() - old.double()).norm() / old.double().norm()) <= bound


def _undo(model: nn.Module, kind: str) -> None:
    if kind == attention.KIND:
        _restore_attention(model)
    for module in model.modules():
        if replace.installed(module) == kind:
            replace.remove(module)


def _runs_here(model: nn.Module) -> bool:
    parameters = list(model.parameters())
    # a subclass of Parameter is a DTensor or a quantized tensor
    plain = all(type(p) is nn.Parameter and not p.is_meta for p in parameters)
    return plain and len({p.device for p in parameters}) == 1 and hasattr(model, "get_input_embeddings")


class _AsWritten:
    """The model without its replacements, inside the context."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        # popped from the instance, so that the class's forward runs
        self.forwards = {m: m.__dict__.pop("forward") for m in self.model.modules() if replace.installed(m)}
        self.formers = _formers(self.model)
        for config, implementation in self.formers:
            config._attn_implementation_internal = implementation

    def __exit__(self, *_: object) -> None:
        for module, forward in self.forwards.items():
            module.forward = forward
        for config, _name in self.formers:
            config._attn_implementation_internal = attention.NAME


def _logits(model: Any, padded: int) -> Tensor | None:
    """Results for two rows of random tokens, the second padded on the right or not; None: it takes other inputs."""
    try:
        embeddings = model.get_input_embeddings()
        device, vocabulary = embeddings.weight.device, embeddings.weight.shape[0]
    except (AttributeError, NotImplementedError):
        return None
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(vocabulary, (2, 24), generator=generator, device=device)
    mask = torch.ones_like(tokens)
    # right padding exercises the masks; without padding there may be none, and a layer's is_causal stands for it
    mask[1, 17:] = 1 - padded
    inputs = {"input_ids": tokens, "attention_mask": mask if padded else None}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs |= {f"decoder_{name}": value for name, value in inputs.items()}
    training = [m for m in model.modules() if m.training]
    # dropout would make two runs differ
    model.eval()
    try:
        with torch.no_grad():
            result = model(**inputs)
        values = getattr(result, "logits", None)
        values = getattr(result, "last_hidden_state", None) if values is None else values
        # rows of padding mean nothing
        return None if values is None or values.ndim != 3 else values[mask.bool()]
    except Exception:  # no text model, or one that wants more
        return None
    finally:
        for module in training:
            module.training = True


def table(report: Report) -> str:
    """The report as text: one line for all parts of a kind with one result."""
    lines = [f"powertrain.patch({type(report.model).__name__})", "replaced:"]
    lines += _grouped(report.replaced, lambda p: (p.kind, p.what, p.gain)) or ["  nothing"]
    if report.left:
        lines += ["left as they are:", *_grouped(report.left, lambda p: (p.kind, p.why, ""))]
    return "\n".join(lines)


def _grouped(parts: list[Part], key: Callable[[Part], tuple[str, str, str]]) -> list[str]:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for part in parts:
        groups.setdefault(key(part), []).append(part.name)
    lines = []
    for (kind, text, expected), names in groups.items():
        which = names[0] or "-"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"  {kind:<10} {which}{more}: {text}" + (f" ({expected})" if expected else ""))
    return lines
