"""bias_dropout_add: the bits drawn, every option, size class and error."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import powertrain
from powertrain.ops import bias_dropout_add as op_module
from powertrain.ops import column_sums, flat_elements
from powertrain.ops.bias_dropout_add import (
    bias_dropout_add,
    bias_dropout_add_ref,
    dropout_keep,
)
from powertrain.ops.flat_elements import BLOCK, goes_flat
from powertrain.ops.philox import dropout_seed, halves, philox
from powertrain.runtime.settings import settings
from powertrain.testing.numerics import check


def _seed(device: torch.device) -> Tensor:
    return torch.tensor([2**62 + 12345, -(2**40) - 7], device=device)


def _tensors(device: torch.device, M: int, N: int) -> dict[str, Tensor | None]:
    made = {"x": torch.randn(M, N), "bias": torch.randn(N), "residual": torch.randn(M, N)}
    return {name: t.to(device).requires_grad_() for name, t in made.items()} | {"seed": _seed(device)}


def _check(tensors: dict[str, Tensor | None], p: float = 0.3) -> None:
    ref = lambda **t: bias_dropout_add_ref(**t, p=p)  # noqa: E731
    check(lambda **t: bias_dropout_add(**t, p=p), ref, ref, tensors)


# known answers of Random123 for Philox 4x32 of seven and of ten rounds
PI = [0x299F31D0A4093822, 0x0370734413198A2E], 0x85A308D3243F6A88 - 2**64


@pytest.mark.parametrize(
    "key, counter, seven, ten",
    [
        ([0, 0], 0, "5f6fb709 0d893f64 4f121f81 4f730a48", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([-1, -1], -1, "5207ddc2 45165e59 4d8ee751 8c52f662", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (*PI, "4dfccaba 190a87f0 c47362ba b6b5242a", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers(key: list[int], counter: int, seven: str, ten: str) -> None:
    for rounds, words in ((7, seven), (10, ten)):
        words_of = (*halves(torch.tensor(counter)), *halves(torch.tensor(key[1])))
        drawn = philox(torch.tensor(key[0]), words_of, rounds)
        assert " ".join(f"{int(word):08x}" for word in drawn) == words


# 3: four rows a counter; 260: two; 1024: a group; 2100: three groups, the last ragged; rows: one tile and several
@pytest.mark.parametrize("M, N", [(70, 3), (5, 260), (3, 1024), (5, 2100)])
@pytest.mark.parametrize("p", [0.0, 0.3, 1 - 2**-30])
@pytest.mark.parametrize("are_few", [False, True], ids=["many", "few"])
@pytest.mark.kernels
def test_kernel_and_pytorch_drop_the_same(
    M: int, N: int, p: float, are_few: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_module, "_FEW", 1024 if are_few else 0)
    ones = torch.ones(M, N, device=device, requires_grad=True)
    y = bias_dropout_add(ones, None, None, p, seed=_seed(device))
    (dx,) = torch.autograd.grad(y, ones, torch.ones_like(y))
    keep = dropout_keep(_seed(torch.device("cpu")), (M, N), p).to(device)
    assert torch.equal(y != 0, keep) and torch.equal(dx, y)
    with powertrain.disable("bias_dropout_add"):
        torch.testing.assert_close(bias_dropout_add(ones, None, None, p, seed=_seed(device)), y)


# 200, 400: four rows and two share a counter
@pytest.mark.parametrize("M, N", [(256, 1500), (1001, 400), (2003, 200)])
def test_share_dropped_and_independence(M: int, N: int) -> None:
    for p in (0.1, 0.5, 0.9):
        keep = dropout_keep(_seed(torch.device("cpu")), (M, N), p).double()
        sigma = (p * (1 - p) / keep.numel()) ** 0.5
        assert abs(keep.mean() - (1 - p)) < 4 * sigma
        centred = keep - (1 - p)
        for a, b in (
            (centred[:, N // 4 * 3 :], centred[:, : N - N // 4 * 3]),
            (centred[:, 256:], centred[:, :-256]) if N > 256 else (centred[4:], centred[:-4]),
            (centred[:, 1:], centred[:, :-1]),
            (centred[1:], centred[:-1]),
        ):
            assert abs((a * b).mean()) < 4 * p * (1 - p) / a.numel() ** 0.5  # fmt: skip


@pytest.mark.parametrize("M, N", [(70, 33), (6, 260), (3, 1024), (5, 2100)])
def test_sizes(M: int, N: int, device: torch.device) -> None:
    _check(_tensors(device, M, N))


@pytest.mark.parametrize("M, N", [(120, 9), (21, 341), (3, 1727)])
@pytest.mark.parametrize("left_out", [(), ("bias",), ("residual",), ("bias", "residual")], ids="-".join)
@pytest.mark.kernels
def test_odd_rows_taken_flat(
    M: int, N: int, left_out: tuple[str, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_module, "_FEW", 0)
    monkeypatch.setattr(column_sums, "_FEW", 0)
    monkeypatch.setattr(flat_elements, "_MANY", 0)
    assert flat_elements.goes_by_eights(M, N, 2)
    flat: list[bool] = []
    goes = op_module.goes_flat
    monkeypatch.setattr(op_module, "goes_flat", lambda *sizes: flat.append(goes(*sizes)) or flat[-1])
    _check(_tensors(device, M, N) | dict.fromkeys(left_out), 0.0)
    assert any(flat)


def test_places_of_flat_elements_are_exact() -> None:
    """The quotient in float32, at every width's worst places: the last element of a row, and the first."""
    for N in (9, 11, 341, 1023, 1025, 99_999, 2**19 + 1, *range(2**20 - 9, 2**20)):
        assert goes_flat(N, 2) == (N % 8 != 0)
        inverse = torch.tensor(1 / N, dtype=torch.float32)
        behind = (
            torch.arange(N + BLOCK - 1)
            if N < 2000
            else torch.cat([torch.arange(2000), N + torch.arange(-2000, BLOCK - 1)])
        )
        rows = ((behind.float() + 0.5) * inverse).int()
        assert torch.equal(rows, (behind // N).int())
    assert not goes_flat(2**20 + 1, 2) and not goes_flat(7, 2) and not goes_flat(159, 2, 2**22)


@pytest.mark.parametrize("left_out", [("bias",), ("residual",), ("bias", "residual")], ids="-".join)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_optional_arguments(left_out: tuple[str, ...], p: float, device: torch.device) -> None:
    _check(_tensors(device, 4, 30) | dict.fromkeys(left_out), p)


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_mixed_dtypes(p: float, device: torch.device) -> None:
    tensors = _tensors(device, 4, 72)
    tensors["x"] = tensors["x"].detach().bfloat16().requires_grad_()
    _check(tensors, p)
    assert bias_dropout_add(**tensors, p=p).dtype is torch.float32
    assert bias_dropout_add(**{**tensors, "residual": None}, p=p).dtype is torch.bfloat16


def test_not_training_is_plain_addition(device: torch.device) -> None:
    tensors = _tensors(device, 4, 8)
    y = bias_dropout_add(**tensors, p=0.5, training=False)
    torch.testing.assert_close(y, tensors["x"] + tensors["bias"] + tensors["residual"])


@pytest.mark.parametrize("p, training", [(0.0, True), (0.5, False)])
def test_nothing_to_add_or_drop_is_a_copy(p: float, training: bool, device: torch.device) -> None:
    """A write to the result would be one to x."""
    x = torch.ones(4, 8, device=device, requires_grad=True)
    y = bias_dropout_add(x, None, None, p, training=training)
    y.add_(1.0)
    assert torch.equal(x, torch.ones_like(x)) and torch.equal(y, torch.full_like(x, 2.0))


def test_seed_comes_from_torchs_generator(device: torch.device) -> None:
    x = torch.ones(4, 64, device=device)

    def draw(seed: int | None = None) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        return bias_dropout_add(x, None, None, 0.5)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw())
    torch.manual_seed(1)
    if device.type == "cuda" or settings().interpret:
        drawn = bias_dropout_add(x, None, None, 0.5, seed=dropout_seed(device))
    else:  # plain PyTorch draws the elements themselves
        drawn = torch.nn.functional.dropout(x, 0.5)
    assert torch.equal(drawn, draw(1))


def test_checkpointing_drops_the_same(device: torch.device) -> None:
    tensors = [torch.randn(4, 64, device=device, requires_grad=True) for _ in range(2)]

    def gradients(run: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        return torch.autograd.grad(run(lambda x, r: bias_dropout_add(x, None, r, 0.5).exp(), *tensors).sum(), tensors)

    plain = gradients(lambda f, *t: f(*t))
    recomputed = gradients(lambda f, *t: checkpoint(f, *t, use_reentrant=False))
    for a, b in zip(plain, recomputed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.kernels
def test_saves_only_the_seed(device: torch.device) -> None:
    tensors, saved = _tensors(device, 3, 8), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        bias_dropout_add(**tensors, p=0.5)
    assert saved == [tensors["seed"].data_ptr()]


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (5,)])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_empty_and_one_dim(shape: tuple[int, ...], p: float, device: torch.device) -> None:
    x, bias = (torch.randn(s, device=device, requires_grad=True) for s in (shape, shape[-1:]))
    y = bias_dropout_add(x, bias, torch.randn(shape, device=device), p)
    y.sum().backward()
    assert y.shape == shape and x.grad.shape == shape and (bias.grad.any() or 0 in shape)


def test_errors(device: torch.device) -> None:
    x = torch.randn(2, 8, device=device)
    with pytest.raises(ValueError, match=r"bias_dropout_add: p must be in \[0, 1\), got 1.0"):
        bias_dropout_add(x, None, None, 1.0)
    with pytest.raises(ValueError, match=r"bias must have shape \[8\] \(last dim of x\), got \[4\]"):
        bias_dropout_add(x, x[0, :4], None, 0.1)
    with pytest.raises(ValueError, match=r"residual must have shape \[2, 8\] \(shape of x\), got \[8\]"):
        bias_dropout_add(x, None, x[0], 0.1)
    with pytest.raises(ValueError, match="seed must be int64, got int32"):
        bias_dropout_add(x, None, None, 0.1, seed=torch.zeros(2, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"seed must have shape \[2\] \(seed and offset\), got \[1\]"):
        bias_dropout_add(x, None, None, 0.1, seed=torch.zeros(1, dtype=torch.int64, device=device))


@pytest.mark.gpu
def test_graph_replays_draw_anew(device: torch.device) -> None:
    x = torch.ones(64, 64, device=device)
    bias_dropout_add(x, None, None, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = bias_dropout_add(x, None, None, 0.5)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(y, first)


@pytest.mark.gpu
@pytest.mark.usefixtures("most_gpu_memory")
def test_more_than_2_31_elements(device: torch.device) -> None:
    x = torch.ones(131073, 16384, device=device, dtype=torch.bfloat16)
    y = bias_dropout_add(x, None, x, 0.5, seed=_seed(device))
    assert torch.equal(y[0] > 1, dropout_keep(_seed(device), (1, 16384), 0.5)[0])
    assert set(y[-1].unique().tolist()) == {1.0, 3.0} and not torch.equal(y[-1], y[0])


def test_a_bad_number_is_not_taken_for_a_bad_tensor(device: torch.device) -> None:
    with pytest.raises(TypeError):
        bias_dropout_add(torch.randn(2, 8, device=device), None, None, "a")  # type: ignore[arg-type]
