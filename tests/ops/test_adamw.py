"""AdamW and clip_grad_norm_ beside torch's own: values, dtypes, state dicts, GradScaler, layouts."""

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import powertrain
from powertrain.ops import adamw_kernels as module
from powertrain.ops.adamw import AdamW, adamw_ref
from powertrain.ops.grad_norm import clip_grad_norm_
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from tests.cuda_graph import captured

SHAPES = [(3,), (7, 5), (20000,), ()]  # an unaligned size, a second chunk, a scalar
OPTIONS: dict[str, Any] = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def _params(device: torch.device, dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def _set_grads(params: list[Tensor], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator(params[0].device).manual_seed(seed)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator, device=p.device)).to(p.dtype)


def _copies(params: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [p.detach().to(dtype or p.dtype, copy=True).requires_grad_() for p in params]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)])
def test_as_close_to_float64_as_torch(betas: tuple[float, float], maximize: bool, device: torch.device) -> None:
    params = _params(device)
    sets = [params, _copies(params), _copies(params, torch.float64)]
    options = {**OPTIONS, "betas": betas, "maximize": maximize}
    optimizers = [AdamW(sets[0], **options), *(torch.optim.AdamW(s, **options) for s in sets[1:])]
    for step in range(5):
        _set_grads(params, step)
        for others in sets[1:]:
            for p, q in zip(params, others, strict=True):
                q.grad = p.grad.to(q.dtype)
        for optimizer in optimizers:
            optimizer.step()
    for ours, plain, exact in zip(*sets, strict=True):
        error, allowed = ((t - exact).abs().max() for t in (ours, plain))
        assert error <= 2 * allowed + torch.finfo(torch.float32).eps * exact.abs().max()


@pytest.mark.parametrize("state_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision(
    dtype: torch.dtype, master_weights: bool, state_dtype: torch.dtype | None, device: torch.device
) -> None:
    params = _params(device, dtype)
    expected = _copies(params)
    optimizer = AdamW(params, **OPTIONS, master_weights=master_weights, state_dtype=state_dtype)
    states = [
        dict(
            exp_avg=torch.zeros_like(p, dtype=state_dtype or (torch.float32 if master_weights else dtype)),
            exp_avg_sq=torch.zeros_like(p, dtype=state_dtype or (torch.float32 if master_weights else dtype)),
            step=torch.zeros((), device=device),
            master=p.detach().float() if master_weights else None,
        )
        for p in params
    ]
    for step in range(3):
        _set_grads(params, step)
        for p, q, state in zip(params, expected, states, strict=True):
            with torch.no_grad():
                adamw_ref(q, p.grad, **state, **OPTIONS)
        optimizer.step()
    for p, q, state in zip(params, expected, states, strict=True):
        torch.testing.assert_close(p, q, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
        for name, value in optimizer.state[p].items():
            assert value.dtype == state[name].dtype
            torch.testing.assert_close(value, state[name], rtol=2e-2, atol=1e-5)


def test_groups_missing_gradients_and_mixed_dtypes(device: torch.device) -> None:
    first, second = _params(device), _params(device, torch.bfloat16, [(9,), (4, 4)])
    groups = lambda: [dict(params=first[:2]), dict(params=[*first[2:], *second], lr=1e-3, weight_decay=0.0)]  # noqa: E731
    kept = _copies([*first, *second])
    optimizer = AdamW(groups(), **OPTIONS)
    _set_grads([*first, *second], 1)
    first[1].grad = None
    optimizer.step()
    for i, (p, old) in enumerate(zip([*first, *second], kept, strict=True)):
        if i == 1:
            assert torch.equal(p, old) and not optimizer.state[p]
            continue
        options = {**OPTIONS, **({} if i < 2 else dict(lr=1e-3, weight_decay=0.0))}
        with torch.no_grad():
            zeros = [torch.zeros_like(p) for _ in range(2)]
            adamw_ref(old, p.grad, *zeros, torch.zeros((), device=device), **options)
        torch.testing.assert_close(p, old)


def test_storages_may_change(device: torch.device) -> None:
    params, others = (_params(device, shapes=[(40,), (6, 6)]) for _ in range(2))
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    optimizer, expected = AdamW(params, **OPTIONS), torch.optim.AdamW(others, **OPTIONS)
    for step in range(3):
        for each in (params, others):
            _set_grads(each, step)
        params[0].data = params[0].data.clone()
        optimizer.step()
        expected.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)


def test_layouts(device: torch.device) -> None:
    base = torch.randn(6, 8, device=device)
    made = [base.t().clone(memory_format=torch.preserve_format), base[:, ::2], base[1:2].expand(3, 8).clone()]
    params = [t.detach().requires_grad_() for t in made]
    others = _copies(params)
    for p, q in zip(params, others, strict=True):
        q.grad = torch.randn_like(q)
        p.grad = q.grad.clone().contiguous()
    optimizers = AdamW(params, **OPTIONS), torch.optim.AdamW(others, **OPTIONS)
    for optimizer in optimizers:
        optimizer.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("found", [0.0, 1.0], ids=["finite", "inf"])
def test_grad_scale_and_found_inf(found: float, device: torch.device) -> None:
    params = _params(device)
    others = _copies(params)
    optimizer, expected = AdamW(params, **OPTIONS), torch.optim.AdamW(others, **OPTIONS)
    _set_grads(params, 0, 1024.0)
    _set_grads(others, 0)
    optimizer.grad_scale = torch.full((), 1024.0, device=device)
    optimizer.found_inf = torch.full((), found, device=device)
    optimizer.step()
    if found:
        others = _copies(others)
    else:
        expected.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)
        assert optimizer.state[p]["step"].item() == 1 - found
        if not found:
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("max_norm", [0.5, 1e9], ids=["clips", "within"])
@pytest.mark.parametrize("scale", [None, 1024.0], ids=["", "grad_scale"])
def test_step_clips_as_clip_then_step(scale: float | None, max_norm: float, device: torch.device) -> None:
    params = _params(device)
    sets = [params, _copies(params), _copies(params, torch.float64)]
    optimizers = [AdamW(sets[0], **OPTIONS), *(torch.optim.AdamW(s, **OPTIONS) for s in sets[1:])]
    for step in range(3):
        _set_grads(params, step)
        kept = [p.grad.clone() for p in params]
        for others in sets[1:]:
            for p, q in zip(params, others, strict=True):
                q.grad = p.grad.to(q.dtype, copy=True)
        if scale is not None:
            for p in params:
                p.grad *= scale
            optimizers[0].grad_scale = torch.full((), scale, device=device)
        optimizers[0].step(max_norm=max_norm)
        for others, optimizer in zip(sets[1:], optimizers[1:], strict=True):
            norm = torch.nn.utils.clip_grad_norm_(others, max_norm)
            optimizer.step()
        torch.testing.assert_close(optimizers[0].grad_norm.double(), norm, rtol=1e-6, atol=0)
        # unscaled, if by grad_scale, and never clipped
        for p, grad in zip(params, kept, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=0, atol=0)
    for ours, plain, exact in zip(*sets, strict=True):
        error, allowed = ((t - exact).abs().max() for t in (ours, plain))
        assert error <= 2 * allowed + torch.finfo(torch.float32).eps * exact.abs().max()
        # Adam's update hardly depends on the gradients' scale, its average does
        mean, wanted = optimizers[0].state[ours]["exp_avg"], optimizers[2].state[exact]["exp_avg"]
        torch.testing.assert_close(mean.double(), wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32], ids=["", "main_grad"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_step_clips_low_precision(
    dtype: torch.dtype, grad_dtype: torch.dtype | None, master_weights: bool, device: torch.device
) -> None:
    params = _params(device, dtype)
    optimizer = AdamW(params, **OPTIONS, master_weights=master_weights, state_dtype=torch.float32)
    exact = [p.detach().double() for p in params]
    states = [dict(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p), step=torch.zeros(())) for p in exact]
    _set_grads(params, 0)
    if grad_dtype is not None:
        for p in params:
            # a float32 gradient beside a 16-bit parameter, as accumulated in main_grad
            grad, p.grad = p.grad.to(grad_dtype) * 1.001, None
            p.grad_dtype = grad_dtype
            p.grad = grad
    grads = [p.grad.double() for p in params]
    norm = torch.cat([g.flatten() for g in grads]).norm()
    optimizer.step(max_norm=0.5)
    for p, q, grad, state in zip(params, exact, grads, states, strict=True):
        state = {name: t.to(device) for name, t in state.items()}
        adamw_ref(q, grad * (0.5 / (norm + 1e-6)), **state, **OPTIONS)
        torch.testing.assert_close(p.double(), q, rtol=torch.finfo(dtype).eps, atol=1e-6)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), state["exp_avg"], rtol=1e-5, atol=1e-9)
        if master_weights:
            torch.testing.assert_close(optimizer.state[p]["master"].double(), q, rtol=1e-5, atol=1e-6)


def test_grad_factor_and_small_fp16_gradients(device: torch.device) -> None:
    params = _params(device, torch.float16)
    for p in params:
        p.grad = torch.full_like(p, 2.0**-20)  # times the factor: nothing that fp16 holds
    optimizer = AdamW(params, **OPTIONS, master_weights=True)
    optimizer.step(grad_factor=torch.full((), 2.0**-10, device=device))
    for p in params:
        expected = torch.full_like(p, (1 - OPTIONS["betas"][0]) * 2.0**-30, dtype=torch.float32)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], expected, rtol=1e-5, atol=0)


def test_step_clips_in_a_grad_scaler(device: torch.device) -> None:
    params, others = (_params(device, shapes=[(7, 5)]) for _ in range(2))
    others[0].data.copy_(params[0].data)
    ours, plain = AdamW(params, **OPTIONS), torch.optim.AdamW(others, **OPTIONS)
    for each, optimizer, options in ((params, ours, {"max_norm": 0.1}), (others, plain, {})):
        scaler = torch.amp.GradScaler(device.type, init_scale=256.0)
        scaler.scale((each[0] ** 3).sum()).backward()
        if optimizer is plain:
            scaler.unscale_(plain)
            norm = torch.nn.utils.clip_grad_norm_(others, 0.1)
        scaler.step(optimizer, **options)
    torch.testing.assert_close(ours.grad_norm, norm)
    torch.testing.assert_close(params[0], others[0])


def test_step_refuses_bad_clipping(device: torch.device) -> None:
    optimizer = AdamW(_params(device), **OPTIONS)
    with pytest.raises(ValueError, match="max_norm must be above 0, got -1"):
        optimizer.step(max_norm=-1)
    with pytest.raises(ValueError, match="grad_factor must come without max_norm"):
        optimizer.step(max_norm=1.0, grad_factor=torch.ones((), device=device))
    with pytest.raises(ValueError, match="grad_factor must have one element"):
        optimizer.step(grad_factor=torch.ones(2, device=device))
    with pytest.raises(ValueError, match=r"grad_factor must be a tensor, got 0\.5"):
        optimizer.step(grad_factor=0.5)  # type: ignore[call-overload]


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_refuses_sparse_gradients_and_complex_parameters(max_norm: float | None, device: torch.device) -> None:
    sparse, turning = (torch.nn.Parameter(torch.ones(4, 4, device=device, dtype=d)) for d in (None, torch.complex64))
    sparse.grad, turning.grad = torch.eye(4, device=device).to_sparse(), torch.ones_like(turning)
    for p, what in ((sparse, "sparse gradients"), (turning, "complex parameters")):
        with pytest.raises(NotImplementedError, match=f"AdamW: {what} are not implemented"):
            AdamW([p], **OPTIONS).step(max_norm=max_norm)


def test_grad_factor_of_one_dim_scales_a_parameter_of_none(device: torch.device) -> None:
    params = [torch.nn.Parameter(torch.ones((), device=device, dtype=torch.float32)) for _ in range(2)]
    for p, factor in zip(params, (torch.full((1,), 0.5), torch.full((), 0.5)), strict=True):
        p.grad = torch.full_like(p, 3.0)
        AdamW([p], **OPTIONS).step(grad_factor=factor.to(device))
    assert torch.equal(*params) and params[0] != 1


def test_tensor_learning_rate_and_scheduler(device: torch.device) -> None:
    params = _params(device)
    others = _copies(params)
    optimizer = AdamW(params, lr=torch.tensor(1e-2, device=device))
    expected = torch.optim.AdamW(others, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(expected, lambda step: 1 / (1 + step))
    for step in range(3):
        _set_grads(params, step)
        _set_grads(others, step)
        optimizer.param_groups[0]["lr"].fill_(schedule.get_last_lr()[0])
        optimizer.step()
        expected.step()
        schedule.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("to_torch", [False, True], ids=["from-torch", "to-torch"])
def test_state_dict_goes_to_and_from_torch(to_torch: bool, device: torch.device) -> None:
    kinds = (AdamW, torch.optim.AdamW) if to_torch else (torch.optim.AdamW, AdamW)
    params = _params(device)
    source = kinds[0](params, **OPTIONS)
    for step in range(2):
        _set_grads(params, step)
        source.step()
    others = _copies(params)
    loaded = kinds[1](others, lr=1.0)
    loaded.load_state_dict(copy.deepcopy(source.state_dict()))
    for each, optimizer in ((params, source), (others, loaded)):
        _set_grads(each, 7)
        optimizer.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)


def test_loading_keeps_float32_state(device: torch.device) -> None:
    params = _params(device, torch.bfloat16)
    source = AdamW(params, **OPTIONS, master_weights=True)
    _set_grads(params, 0)
    source.step()
    loaded = AdamW(_copies(params), **OPTIONS, master_weights=True)
    loaded.load_state_dict(copy.deepcopy(source.state_dict()))
    for p, q in zip(params, loaded.param_groups[0]["params"], strict=True):
        for name, value in source.state[p].items():
            assert torch.equal(loaded.state[q][name], value) and loaded.state[q][name].dtype == torch.float32


def test_closure_disable_and_deepcopy(device: torch.device) -> None:
    params = _params(device)
    optimizer = AdamW(params, **OPTIONS)
    _set_grads(params, 0)
    assert optimizer.step(lambda: 5) == 5
    twin = copy.deepcopy(optimizer)
    with powertrain.disable("adamw"):
        twin.step()
    optimizer.step()
    for p, q in zip(params, twin.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q)


def test_refuses(device: torch.device) -> None:
    with pytest.raises(NotImplementedError, match=r"amsgrad=True is not implemented; use torch\.optim\.AdamW"):
        AdamW(_params(device), amsgrad=True)
    for name, value in (("amsgrad", True), ("differentiable", True), ("decoupled_weight_decay", False)):
        with pytest.raises(NotImplementedError, match=f"AdamW: {name}={value} is not implemented"):
            AdamW([{"params": _params(device), name: value}])
    with pytest.raises(ValueError, match="Invalid learning rate"):
        AdamW(_params(device), lr=-1.0)
    with pytest.raises(ValueError, match="state_dtype must be one of"):
        AdamW(_params(device), state_dtype=torch.int8)
    with pytest.raises(ValueError, match="betas must be numbers, or tensors on the CPU"):
        AdamW([{"params": _params(device), "betas": (torch.empty((), device="meta"), 0.9)}])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tensors_of_options_act_as_numbers(dtype: torch.dtype, device: torch.device) -> None:
    # [1] times a parameter of no dims would be [1]
    params = [torch.ones((), device=device, dtype=dtype).requires_grad_() for _ in range(2)]
    for p, make in zip(params, (lambda x: torch.tensor([x], device="cpu"), float), strict=True):
        optimizer = AdamW([p], lr=make(0.125), master_weights=True)
        # torch's constructor takes tensors as betas of captured steps alone
        optimizer.param_groups[0]["betas"] = (make(0.5), make(0.75))
        for value in (3.0, -1.0):
            p.grad = torch.full_like(p, value)
            optimizer.step()
    assert torch.equal(*params) and params[0] != 1


def test_loading_calls_hooks_as_torch_does(device: torch.device) -> None:
    p = torch.ones(3, device=device, requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = AdamW([p], **OPTIONS)
    optimizer.step()

    def before(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {key: {**state, "exp_avg": torch.full((3,), 5.0)} for key, state in state_dict["state"].items()}
        return {**state_dict, "state": states}

    def after(optimizer: AdamW) -> None:
        optimizer.state[p]["exp_avg_sq"] = torch.full_like(p, 7.0)

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(optimizer.state_dict())
    assert (optimizer.state[p]["exp_avg"] == 5.0).all() and (optimizer.state[p]["exp_avg_sq"] == 7.0).all()


@pytest.mark.parametrize("clips", ["in the step", "apart", ""])
def test_a_compiled_step(clips: str, device: torch.device) -> None:
    p = torch.ones(4, device=device, requires_grad=True)
    other = p.detach().clone().requires_grad_()
    optimizer, expected = AdamW([p], **OPTIONS), torch.optim.AdamW([other], **OPTIONS)
    p.grad, other.grad = torch.full_like(p, 3.0), torch.full_like(p, 3.0)

    def step() -> None:
        if clips == "apart":
            clip_grad_norm_([p], 0.5)
        optimizer.step(max_norm=0.5 if clips == "in the step" else None)

    torch.compile(step)()
    if clips:
        torch.nn.utils.clip_grad_norm_([other], 0.5)
    expected.step()
    torch.testing.assert_close(p, other)


@pytest.mark.parametrize("norm_type", [1, 2.0, float("inf"), 3.0])
@pytest.mark.parametrize("max_norm", [0.5, 1e9], ids=["clips", "within"])
def test_clip(norm_type: float, max_norm: float, device: torch.device) -> None:
    params, others = (_params(device) for _ in range(2))
    for each in (params, others):
        _set_grads(each, 3)
        each[0].grad = None
    norm = clip_grad_norm_(params, max_norm, norm_type)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(others, max_norm, norm_type))
    for p, q in zip(params[1:], others[1:], strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_clip_mixed_dtypes_twice_the_same_bits(device: torch.device) -> None:
    norms = []
    for _ in range(2):
        torch.manual_seed(1)
        params = [*_params(device), *_params(device, torch.bfloat16)]
        _set_grads(params, 3)
        exact = torch.cat([p.grad.double().flatten() for p in params]).norm()
        norms.append(clip_grad_norm_(params, 1.0))
    assert torch.equal(*norms)
    torch.testing.assert_close(norms[0].double(), exact, rtol=4e-3, atol=0)  # torch takes the bfloat16 norm in bfloat16


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clip_nonfinite(value: float, norm_type: float, device: torch.device) -> None:
    params, others = (_params(device) for _ in range(2))
    for each in (params, others):
        _set_grads(each, 3)
        each[1].grad[2, 2] = value
    with pytest.raises(RuntimeError, match="finite"):
        clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
    norm = clip_grad_norm_(params, 1.0, norm_type)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(others, 1.0, norm_type), equal_nan=True)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


@pytest.mark.skipif(settings().interpret, reason="nothing is specialized under the interpreter")
def test_clipping_takes_vectors_though_its_factor_lies_behind_the_norm() -> None:
    parameter = torch.empty(64, device="meta", requires_grad=True)
    parameter.grad = torch.empty_like(parameter)
    with record("sm_90") as wanted:
        clip_grad_norm_([parameter], 1.0)
    aligned = {spec.kernel.name: set(spec.aligned) for spec in wanted.specs}
    assert aligned["_scale_tensors_kernel"] == {"chunks_ptr", "table_ptr", "grad_ptr"}
    assert aligned["_norm_total_kernel"] == {"partial_ptr", "total_ptr"}


@pytest.mark.parametrize("norm_type", [1, 2.0, float("inf"), -float("inf"), 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_empty_gradients_are_no_part_of_a_norm(norm_type: float, dtype: torch.dtype, device: torch.device) -> None:
    """torch: "cannot compute the infinity norm on an empty tensor"."""
    params = [torch.nn.Parameter(torch.zeros(n, device=device, dtype=dtype)) for n in (0, 3)]
    for p in params:
        p.grad = torch.full_like(p, -2.0)
    assert clip_grad_norm_(params[:1], 1.0, norm_type) == 0
    norm = clip_grad_norm_(params, 1.0, norm_type)
    torch.testing.assert_close(norm.float(), torch.full((3,), 2.0, device=device).norm(norm_type))
    torch.testing.assert_close(params[1].grad.float(), torch.full((3,), -2.0, device=device) / norm, rtol=4e-3, atol=0)


def test_clip_refuses_sparse_gradients(device: torch.device) -> None:
    p = torch.nn.Parameter(torch.ones(4, 4, device=device))
    p.grad = torch.eye(4, device=device).to_sparse()
    with pytest.raises(
        ValueError, match=r"clip_grad_norm_: gradients must be dense tensors, got one of layout torch.sp"
    ):
        clip_grad_norm_([p], 1.0)


def test_clip_nothing(device: torch.device) -> None:
    assert clip_grad_norm_([], 1.0) == 0 and clip_grad_norm_(_params(device), 1.0) == 0


@pytest.mark.kernels
def test_tables_are_built_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    params = _params(device)
    optimizer = AdamW(params, **OPTIONS)
    _set_grads(params, 0)
    optimizer.step()
    optimizer.step()
    ((update, _),) = optimizer._located[0].updates
    before, misses = update._table, module.chunk_table.cache_info().misses
    optimizer.step()
    assert update._table is before and module.chunk_table.cache_info().misses == misses


MOVES: dict[str, Callable[[AdamW, list[Tensor]], Any]] = {
    "gradients": lambda optimizer, params: [setattr(p, "grad", p.grad.clone()) for p in params],
    "one gradient": lambda optimizer, params: setattr(params[1], "grad", params[1].grad.clone()),
    "no gradient": lambda optimizer, params: setattr(params[0], "grad", None),
    "parameters": lambda optimizer, params: [setattr(p, "data", p.data.clone()) for p in params],
    "state": lambda optimizer, params: [
        s.update({name: t.clone() for name, t in s.items()}) for s in optimizer.state.values()
    ],
    "state's data": lambda optimizer, params: [
        setattr(t, "data", t.data.clone()) for s in optimizer.state.values() for t in s.values()
    ],
    "state's dict": lambda optimizer, params: [
        optimizer.state.update({p: {name: t.clone() for name, t in optimizer.state[p].items()}}) for p in params
    ],
    "loaded": lambda optimizer, params: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "order": lambda optimizer, params: optimizer.param_groups[0]["params"].reverse(),
    "layout": lambda optimizer, params: setattr(params[1], "grad", params[1].grad.t().clone().t()),
    "a group more": lambda optimizer, params: optimizer.add_param_group(
        {"params": [torch.zeros(5, device=params[0].device)]}
    ),
    "nothing": lambda optimizer, params: None,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["", "clips"])
@pytest.mark.parametrize("master", [False, True], ids=["", "master"])
def test_what_lies_elsewhere_is_found(
    move: Callable[[AdamW, list[Tensor]], Any], max_norm: float | None, master: bool, device: torch.device
) -> None:
    """Each step's update is that of an optimizer which has no step behind it, whatever moved between the steps."""
    params = [*_params(device, shapes=[(40,), (6, 4)]), *_params(device, torch.bfloat16, [(9,)])]
    optimizer = AdamW(params, **OPTIONS, master_weights=master)
    for seed in range(4):
        _set_grads(params, seed)
        if seed > 1:
            move(optimizer, params)
        twin = copy.deepcopy(optimizer)
        optimizer.step(max_norm=max_norm)
        twin.step(max_norm=max_norm)
        for group, others in zip(optimizer.param_groups, twin.param_groups, strict=True):
            for p, q in zip(group["params"], others["params"], strict=True):
                assert torch.equal(p, q)
                for name, value in optimizer.state[p].items():
                    assert torch.equal(value, twin.state[q][name])


def test_state_that_is_moved_away_is_freed(device: torch.device) -> None:
    params = _params(device)
    optimizer = AdamW(params, **OPTIONS)
    for seed in range(2):
        _set_grads(params, seed)
        optimizer.step()
    held = [weakref.ref(t) for s in optimizer.state.values() for t in s.values()]
    for s in optimizer.state.values():
        s.update({name: t.clone() for name, t in s.items()})
    gc.collect()
    assert not any(ref() is not None for ref in held)


@pytest.mark.kernels
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["", "clips"])
def test_a_step_calls_one_function_a_parameter(max_norm: float | None) -> None:
    """Tensor.__hash__, by which its state is found. Hundreds of small parameters, as of LoRA, are host time."""
    calls = []
    for count in (10, 110):
        params = _params(torch.device("meta"), shapes=[(16, 8)] * count)
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer = AdamW(params, **OPTIONS)
        with record("sm_90"):
            optimizer.step(max_norm=max_norm)
            optimizer.step(max_norm=max_norm)
            found = []
            sys.setprofile(lambda frame, event, arg, found=found: found.append(frame) if event == "call" else None)
            optimizer.step(max_norm=max_norm)
            sys.setprofile(None)
        calls.append(len(found))
    assert calls[1] - calls[0] <= 100 + 20


@pytest.mark.gpu
def test_a_graph_has_tables_of_its_own(device: torch.device) -> None:
    """Captured on the stream of eager steps, whose tables are made anew when gradients move."""
    params = _params(device)
    others = _copies(params)
    optimizer, expected = AdamW(params, **OPTIONS), torch.optim.AdamW(others, **OPTIONS)
    _set_grads(params, 0)
    fixed = [p.grad for p in params]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step(max_norm=0.5)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        optimizer.step(max_norm=0.5)
    with torch.cuda.stream(stream):
        for i in range(3):
            optimizer.step(max_norm=0.5)  # the captured gradients, not yet replayed at first
            for p in params:
                p.grad = p.grad.clone()
            optimizer.step(max_norm=0.5)
            for p, g in zip(params, fixed, strict=True):
                p.grad = g
            filled = [torch.full((4096,), 2**40 + i, device=device) for _ in range(8)]  # where freed tables lay
            graph.replay()
            del filled
    torch.cuda.synchronize()
    for p, g in zip(others, fixed, strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.get_total_norm(fixed)
    for p in others:
        p.grad *= (0.5 / (norm + 1e-6)).clamp(max=1)
    for _ in range(1 + 3 * 3):
        expected.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.gpu
def test_cuda_graph(device: torch.device) -> None:
    params = _params(device)
    others = _copies(params)
    optimizer, expected = AdamW(params, **OPTIONS), torch.optim.AdamW(others, **OPTIONS)
    grads = [torch.randn_like(p) for p in params]

    def step() -> None:
        for p, g in zip(params, grads, strict=True):
            p.grad = g * 2
        clip_grad_norm_(params, 1.0)
        optimizer.step()

    graph, _ = captured(step)
    for _ in range(2):
        graph.replay()
    for _ in range(3):
        for p, g in zip(others, grads, strict=True):
            p.grad = g * 2
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        expected.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("dtype, value, count", [(torch.float16, 300.0, 100_000), (torch.bfloat16, 1.0, 1000)], ids=str)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_norms_of_16_bit_gradients_are_float32_on_a_cpu(
    dtype: torch.dtype, value: float, count: int, norm_type: float
) -> None:
    """In float16 this norm overflows, and gradients were multiplied by 0."""
    p = torch.zeros(count, dtype=dtype, requires_grad=True)
    p.grad = torch.full((count,), value, dtype=dtype)
    exact = torch.linalg.vector_norm(p.grad.double(), norm_type)
    norm = clip_grad_norm_(p, 1.0, norm_type)
    assert norm.dtype is torch.float32
    torch.testing.assert_close(norm.double(), exact, rtol=1e-3, atol=0)
    # each rounded to 16 bits
    torch.testing.assert_close(p.grad.double(), torch.full((count,), value).double() / exact, rtol=1e-2, atol=1e-6)


def test_a_state_of_amsgrad_is_refused() -> None:
    p = torch.nn.Parameter(torch.randn(4))
    theirs = torch.optim.AdamW([p], amsgrad=True)
    p.grad = torch.ones(4)
    theirs.step()
    with pytest.raises(NotImplementedError, match="without amsgrad"):
        AdamW([p]).load_state_dict(theirs.state_dict())


@pytest.mark.kernels
def test_another_default_device_does_not_matter(device: torch.device) -> None:
    p = torch.nn.Parameter(torch.ones(5, device=device))
    p.grad = torch.full((5,), 3.0, device=device)
    optimizer = AdamW([p])
    with torch.device("meta"):
        norm = clip_grad_norm_([p], 1.0)
        optimizer.step(max_norm=1.0)
    assert norm.item() == pytest.approx(3 * 5**0.5)
    assert p.device.type == device.type and p.isfinite().all() and (p < 1).all()


def test_a_graph_made_before_a_step_says_so(device: torch.device) -> None:
    """Kernels write where autograd does not look: a backward would use the new parameters, without a word."""
    p = torch.nn.Parameter(torch.ones(5, device=device))
    opt = AdamW([p])
    for _ in range(3):  # the first makes the state, the second its tables
        graph = (p * p).sum()
        p.grad = torch.ones_like(p)
        opt.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.backward()


def test_a_graph_of_a_gradient_that_was_clipped_says_so(device: torch.device) -> None:
    p = torch.nn.Parameter(torch.ones(5, device=device))
    p.grad = torch.ones_like(p)
    graph = (p.grad * p.square()).sum()
    clip_grad_norm_([p], 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()


def test_the_state_of_another_optimizer_is_refused() -> None:
    p = torch.nn.Parameter(torch.ones(5))
    p.grad = torch.ones_like(p)
    other, ours = torch.optim.SGD([p], lr=1e-2, momentum=0.9), AdamW([p])
    other.step()
    ours.step()
    message = r"AdamW: state_dict must have step, exp_avg and exp_avg_sq, got \['momentum_buffer'\]"
    with pytest.raises(ValueError, match=message):
        ours.load_state_dict(other.state_dict())
    assert ours.state[p]["step"] == 1 and ours.param_groups[0]["lr"] == 1e-3
