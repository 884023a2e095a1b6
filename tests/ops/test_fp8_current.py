"""Quantization with the last call's scale: bytes beside those of two passes, whatever the last scale was."""

import random

import pytest
import torch
from torch import Tensor

from powertrain.ops.fp8.current import fp8_quantize_current, new_states
from powertrain.ops.fp8.formulas import DTYPES, Copies, padded, quantize_ref, scale_of
from powertrain.ops.fp8.linear import fp8_linear, quantized_weight
from powertrain.ops.fp8.quantize import same_bits, special_values

DATA = ("data", "data_t", "scale", "scale_inv")


def _check(x: Tensor, state: Tensor, format: str, device: torch.device) -> bool:
    """Compares both copies with the formulas'; whether the call quantized twice."""
    before, there = state.tolist(), state.to(device)
    found = fp8_quantize_current(x.to(device), there, format)
    exact = quantize_ref(x, "tensor", format)
    for part in DATA:
        assert same_bits(getattr(found, part), getattr(exact, part)), part
    state.copy_(there)
    bits = exact.scale.view(torch.int32).item()
    assert state.tolist() == [bits, 0, before[2] + 1, before[3] + (bits != before[0])]
    return bits != before[0]


# a tile of 32x128 and more, K of 1, 127 and 129, one element
@pytest.mark.parametrize("shape", [(33, 129), (40, 127), (35, 1), (1, 1), (2, 256)], ids=str)
def test_bytes_without_a_last_scale_and_with_it(shape: tuple[int, int], device: torch.device) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for format in DTYPES:
            state, x = new_states(1, torch.device("cpu"))[0], torch.randn(shape).to(dtype)
            assert _check(x, state, format, device)
            assert not _check(-x, state, format, device)


@pytest.mark.parametrize("format", list(DTYPES))
def test_special_values(format: str, device: torch.device) -> None:
    """NaN, inf, zeros alone, denormals, ties, what overflows the scale; each after a scale of ordinary values."""
    special, state = special_values(), new_states(1, torch.device("cpu"))[0]
    cases = [special, special[7:8], special[9:10], special[140:141], special[20:60] * 1e-38]
    cases += [torch.full((3, 20), 1e-45), torch.tensor([[3e38, 1e-45]]), torch.tensor([[torch.nan, torch.inf]])]
    for case in cases:
        _check(special[20:24], state, format, device)
        _check(case, state, format, device)


# the interpreter takes 6 ms a call; all of them run on a GPU (tests/gpu/test_fp8_on_gpu.py)
def test_random_paths_of_exponents(device: torch.device) -> None:
    r, x = random.Random(5), torch.randn(1, 16)
    for format in DTYPES:
        repeated = 0
        state, exponent = new_states(1, torch.device("cpu"))[0], 0
        for _ in range(100):
            exponent = max(-149, min(127, exponent + r.choice((0, 0, 0, 1, -1, 9, -30, 50))))
            repeated += _check(x / x.abs().max() * 2.0**exponent, state, format, device)
        assert 0 < repeated < 100 and state[2:].tolist() == [100, repeated]


def test_any_state_gives_the_same_bits(device: torch.device) -> None:
    """NaN, infinity, negative and denormal numbers as the last scale, which memory of another's could hold."""
    for last in (0x7FC00000, 0x7F800000, -1, 1, 0x00400000, -(2**31)):
        _check(torch.randn(4, 20), torch.tensor([last, 0, 0, 0], dtype=torch.int32), "e4m3", device)


def test_one_copy_views_and_empty_tensors(device: torch.device) -> None:
    wide = torch.randn(40, 70, device=device)
    for x in (wide[:, 3:], wide.T, wide[::2]):
        for rows, columns in ((True, False), (False, True)):
            state = new_states(1, device)[0]
            for _ in range(2):
                found = fp8_quantize_current(x, state, rows=rows, columns=columns)
                exact = quantize_ref(x.cpu(), "tensor", "e4m3")
                assert (found.data.numel() > 0) is rows and (found.data_t.numel() > 0) is columns
                assert same_bits(found.data, exact.data) if rows else same_bits(found.data_t, exact.data_t)
            assert state[2:].tolist() == [2, 1]
    state = torch.tensor([7, 0, 5, 2], dtype=torch.int32, device=device)
    for shape in ((0, 40), (40, 0)):
        empty: Copies = fp8_quantize_current(torch.empty(shape, device=device), state)
        assert empty.data.shape == (shape[0], padded(shape[1])) and empty.scale.item() == 1
        assert not empty.data.view(torch.uint8).any() and not empty.data_t.view(torch.uint8).any()
    assert state.tolist() == [7, 0, 5, 2]


def test_the_state_is_that_of_the_formula(device: torch.device) -> None:
    state = new_states(2, device)
    fp8_quantize_current(torch.full((3, 5), 3.0, device=device), state[1], "e5m2")
    assert not state[0].any()
    assert torch.equal(state[1, :1].cpu().view(torch.float32), scale_of(torch.tensor([3.0]), "e5m2", True))


def _grads(tensors: dict[str, Tensor], last: Tensor | None) -> list[Tensor]:
    y = fp8_linear(**tensors, last=last)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.device) * y.detach().abs().mean()
    return [y.detach(), *torch.autograd.grad(y, list(tensors.values()), dy)]


def test_a_linear_layer_has_the_bits_of_two_passes(device: torch.device) -> None:
    """While magnitudes of all three operands grow and fall; each is counted, and its last scale is its own."""
    tensors = {"x": torch.randn(12, 33, device=device), "weight": torch.randn(40, 33, device=device) / 6}
    last, repeats = new_states(3, device), [0, 0, 0]
    for call, size in enumerate((1.0, 1.0, 2.0**9, 2.0**-20)):
        now = {name: (t * size).requires_grad_() for name, t in tensors.items()}
        before = last[:, 0].tolist()
        for ours, right in zip(_grads(now, last), _grads(now, None), strict=True):
            assert torch.equal(ours, right)
        repeats = [n + (a != b) for n, a, b in zip(repeats, before, last[:, 0].tolist(), strict=True)]
        assert last[:, 1:].tolist() == [[0, call + 1, n] for n in repeats]
    assert repeats == [3, 3, 3] and len(set(last[:, 0].tolist())) == 3


def test_a_weights_copies_are_noted_and_no_call_of_the_product_is(device: torch.device) -> None:
    weight, last = torch.randn(8, 16, device=device), new_states(3, device)
    copies = quantized_weight(weight, "tensor", last=last)
    exact = quantize_ref(weight.cpu(), "tensor", "e4m3")
    assert same_bits(copies.data, exact.data) and same_bits(copies.data_t, exact.data_t)
    fp8_linear(torch.ones(4, 16, device=device), weight, last=last, weight_copies=copies)
    assert last[:, 2].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"last": torch.zeros(3, 4)}, "last must be int32, got float32"),
        ({"last": torch.zeros(4, dtype=torch.int32)}, "last must have shape [3, 4] (of x, weight and dy), got [4]"),
        ({"by": "row"}, "last must be None unless by is 'tensor', got a tensor with by 'row'"),
        ({"power_of_two": False}, "last must be None unless scales are powers of two, got a tensor"),
        ({"scales": torch.ones(3)}, "last must be None with delayed scaling, got a tensor beside scales"),
        ({"amaxes": torch.ones(3)}, "last must be None with delayed scaling, got a tensor beside amaxes"),
    ],
    ids=range(6),
)
def test_errors_of_a_linear_layer(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        fp8_linear(torch.ones(2, 16), torch.ones(3, 16), **{"last": new_states(3, torch.device("cpu")), **options})
    assert f"fp8_linear: {message}" in str(error.value)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.ones(3), new_states(1, torch.device("cpu"))[0]), "x must be [R, C], got [3]"),
        ((torch.ones(3, 4).int(), new_states(1, torch.device("cpu"))[0]), "x must be float32, float16 or bfloat16"),
        ((torch.ones(3, 4), new_states(1, torch.device("cpu"))), "state must have shape [4] (of one tensor)"),
        ((torch.ones(3, 4), torch.zeros(4)), "state must be int32, got float32"),
        ((torch.ones(3, 4), new_states(1, torch.device("cpu"))[0], "e3m4"), "format must be one of 'e4m3', 'e5m2'"),
    ],
    ids=range(5),
)
def test_errors(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError) as error:
        fp8_quantize_current(*arguments)
    assert f"fp8_quantize_current: {message}" in str(error.value)
