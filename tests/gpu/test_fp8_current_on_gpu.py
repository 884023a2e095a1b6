"""Quantization with the last call's scale on a GPU: bytes, 10^5 paths of exponents in a CUDA graph, two streams."""

import pytest
import torch
from torch import Tensor

from powertrain.ops.fp8 import current as module
from powertrain.ops.fp8.current import fp8_quantize_current, new_states, quantize_current_op, write_state_op
from powertrain.ops.fp8.formulas import DTYPES, quantize_ref
from powertrain.ops.fp8.quantize import same_bits, special_values
from powertrain.runtime.errors import WarmUpFirst

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="FP8 needs sm_89"
    ),
]
CUDA = torch.device("cuda", 0)
DATA = ("data", "data_t", "scale", "scale_inv")


# specials; one element; one short of a group, one more; long rows; more tiles than the second kernel has programs
@pytest.mark.parametrize("shape", [(144, 272), (1, 1), (127, 129), (130, 20000), (3000, 3008)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", list(DTYPES))
def test_bytes(format: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = (special_values() if shape == (144, 272) else torch.randn(shape)).to(dtype)
    state = new_states(1, CUDA)[0]
    repeats = 0
    # no scale before; the same; larger, which saturates by the last scale; smaller
    for size in (1.0, 1.0, 2.0**5, 2.0**-9):
        now, before = x * size, int(state[0])
        found, exact = fp8_quantize_current(now.to(CUDA), state, format), quantize_ref(now, "tensor", format)
        for part in DATA:
            assert same_bits(getattr(found, part), getattr(exact, part)), (part, size)
        repeats += exact.scale.view(torch.int32).item() != before
    assert state[1:].tolist() == [0, 4, repeats]


def _paths(count: int, steps: int, generator: torch.Generator) -> Tensor:
    """[steps, count, 16] bfloat16: random walks of exponents, with leaps, zeros, infinities and NaN."""
    stays = torch.rand(steps, count, generator=generator) < 0.6
    moves = torch.where(stays, 0, torch.randint(-2, 3, (steps, count), generator=generator))
    leaps = torch.randint(-60, 61, (steps, count), generator=generator)
    is_leap = torch.rand(steps, count, generator=generator) < 0.2
    exponents = torch.where(is_leap, leaps, moves).cumsum(0).clamp(-133, 125).float()
    x = (torch.rand(steps, count, 16, generator=generator) * 2 - 1) * torch.exp2(exponents)[..., None]
    kind = torch.rand(steps, count, generator=generator)
    for share, value in ((0.01, 0.0), (0.02, torch.inf), (0.03, torch.nan)):
        x[(kind < share) & (kind >= share - 0.01), 3 if value else slice(None)] = value
    return x.bfloat16()


@pytest.mark.parametrize("format", list(DTYPES))
def test_a_hundred_thousand_paths_of_exponents(format: str) -> None:
    """Each path has a state of its own; a graph of 500 calls takes a step of 500 paths. Rows by row are the formulas'
    tensors of one row."""
    at_once, steps, rounds = 500, 4, 200 // len(DTYPES)
    x, states = torch.zeros(at_once, 16, dtype=torch.bfloat16, device=CUDA), new_states(at_once, CUDA)

    def step() -> list[Tensor]:
        made = [quantize_current_op(x[i : i + 1], states[i], format, True, True, True) for i in range(at_once)]
        data, data_t, scale, inverse, new = zip(*made, strict=True)
        write_state_op(states, torch.stack(new), 0)
        # the CPU and some versions of torch.cat have no FP8
        return [torch.stack([t.view(torch.uint8) for t in parts]) for parts in (data, data_t)] + [
            torch.cat(parts) for parts in (scale, inverse)
        ]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data, data_t, scale, inverse = step()
    generator = torch.Generator().manual_seed(7)
    repeats = 0
    for _ in range(rounds):
        path = _paths(at_once, steps, generator)
        states.zero_()
        last = torch.zeros(at_once, dtype=torch.int32)
        for now in path:
            x.copy_(now)
            graph.replay()
            exact = quantize_ref(now, "row", format)
            assert same_bits(scale, exact.scale) and same_bits(inverse, exact.scale_inv)
            assert torch.equal(data[:, 0].cpu(), exact.data.view(torch.uint8))
            assert torch.equal(data_t[..., 0], data[:, 0]) and not data_t[..., 1:].any()
            bits = exact.scale.view(torch.int32)
            repeats += int((bits != last).sum())
            last = bits
        assert torch.equal(states[:, 0].cpu(), last) and (states[:, 2] == steps).all()
    share = repeats / (rounds * steps * at_once)
    print(f"{rounds * at_once} paths of {steps} steps in {format}: {share:.1%} quantized again")
    assert 0.2 < share < 0.9


def test_a_layer_on_two_streams() -> None:
    """Both write the same state while the other reads it: whichever scale each finds, the bytes are right."""
    state = new_states(1, CUDA)[0]
    xs = [torch.randn(2048, 2048, device=CUDA).bfloat16() * size for size in (1.0, 2.0**12)]
    rights = [quantize_ref(x, "tensor", "e4m3") for x in xs]
    streams, wrong = [torch.cuda.Stream() for _ in xs], torch.zeros(2, dtype=torch.int64, device=CUDA)
    fp8_quantize_current(xs[0], state)
    torch.cuda.synchronize()
    for _ in range(50):
        for place, (stream, x, right) in enumerate(zip(streams, xs, rights, strict=True)):
            with torch.cuda.stream(stream):
                found = fp8_quantize_current(x, state)
                for part in ("data", "data_t"):
                    ours, exact = (getattr(c, part).view(torch.uint8) for c in (found, right))
                    wrong[place] += (ours != exact).sum()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


def test_self_test_passes_and_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module._self_tests.clear()
    assert module._self_test(CUDA, torch.bfloat16) is module._self_test(CUDA, torch.float16) is None
    right = module._launch

    def wrong(x: Tensor, state: Tensor, format: str, out: module.Current) -> None:
        right(x, state, format, out)
        out.data_t.view(torch.uint8)[3, 4] ^= 1

    x, state = torch.randn(64, 64, device=CUDA).bfloat16(), new_states(1, CUDA)[0]
    monkeypatch.setattr(module, "_launch", wrong)
    found, exact = fp8_quantize_current(x, state), quantize_ref(x.cpu(), "tensor", "e4m3")
    assert "data_t in e4m3 differs" in str(module._self_tests[torch.bfloat16][0])
    assert all(same_bits(getattr(found, part), getattr(exact, part)) for part in DATA)
    assert state.tolist() == [exact.scale.view(torch.int32).item(), 0, 1, 1]
    module._self_tests.clear()


def test_a_capture_before_the_self_test_is_refused() -> None:
    x, state = torch.randn(64, 64, device=CUDA).bfloat16(), new_states(1, CUDA)[0]
    fp8_quantize_current(x, state)
    module._self_tests.clear()
    refused = pytest.raises(WarmUpFirst, match="fp8_quantize_current of bfloat16 would have to be tested")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        fp8_quantize_current(x, state)
    module._self_tests.clear()
