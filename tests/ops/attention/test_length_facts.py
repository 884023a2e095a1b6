"""What torch.compile guards of the lengths: a graph serves all batches that the choice does not depend on."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import powertrain
from powertrain.ops.attention.api import _constant
from powertrain.ops.attention.problem import Lengths, size_class
from tests.torch_setup import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="launches nothing: the same as in the run on the CPU")


def _graphs(sizes: list[tuple[int, int]], dynamic: bool | None) -> int:
    """Of (batch, length) one after the other."""
    torch._dynamo.reset()
    counter = CompileCounter()

    @torch.compile(backend=counter, dynamic=dynamic, fullgraph=True)
    def ask(query: Tensor) -> Tensor:
        batch, length, *_ = query.shape
        facts = Lengths.facts(length, length, None, batch, query.numel(), None, True)
        return query + sum(_constant(fact) is True for fact in facts) + _constant(facts[0])

    for batch, length in sizes:
        ask(torch.zeros(batch, length, 8, 8))
    return counter.frame_count


def test_symbolic_sizes_have_four_classes() -> None:
    batches = [(3, 20), (5, 20), (300, 20), (400, 20)]
    assert _graphs(batches, True) == 1
    # 65 is odd and no multiple of 8, as all the others but 16
    lengths = [(3, n) for n in (9, 15, 17, 65, 513, 1001, 1025, 3001, 5001, 9001)]
    assert _graphs(lengths, True) == 4


@pytest.mark.parametrize(("has_bias", "graphs"), [(False, 1), (True, 3)])
def test_divisors_are_guarded_beside_a_bias_alone(has_bias: bool, graphs: int) -> None:
    torch._dynamo.reset()

    def attend(x: Tensor, bias: Tensor) -> Tensor:
        return powertrain.attention(x, x, x, is_causal=True, attn_bias=bias if has_bias else None)

    compiled = torch.compile(attend, backend=(counter := CompileCounter()), dynamic=True, fullgraph=True)
    # a multiple of 8, 64 more than one of 128, neither
    for length in (24, 192, 25):
        x, bias = torch.randn(2, length, 2, 8), torch.randn(length, length)
        torch.testing.assert_close(compiled(x, bias), attend(x, bias))
    assert counter.frame_count == graphs


def test_sizes_of_one_shape_have_their_own_class() -> None:
    """Traced once, sizes are numbers: the choice is that of an eager call."""
    seen = []

    def facts(query: Tensor) -> Tensor:
        batch, length, *_ = query.shape
        seen.append(Lengths.facts(length, length, None, batch, query.numel(), None, True)[:3])
        return query + 1

    torch._dynamo.reset()
    torch.compile(facts, backend="eager", fullgraph=True)(torch.zeros(5, 300, 2, 8))
    assert seen == [(384, 384, 6)]


def test_transforms_of_eager_calls_have_no_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attention of a process in torch.func.grad was an AttributeError: nothing had imported the module."""
    monkeypatch.delattr(torch.fx.experimental, "symbolic_shapes", raising=False)
    x = torch.randn(1, 5, 2, 16, device="meta")
    with pytest.raises(NotImplementedError, match=r"attention: torch.func.grad and similar transforms are not"):
        torch.func.grad(lambda q: powertrain.attention(q, x, x).sum())(x)


def test_fake_tensors_of_symbolic_sizes() -> None:
    """Outside of torch.compile the choice was looked up by symbols, which have no hash."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    x = mode.from_tensor(torch.zeros(3, 7, 4, 16, requires_grad=True), static_shapes=False)
    with mode:
        assert isinstance(x.shape[1], torch.SymInt)
        out = powertrain.attention(x, x, x, is_causal=True)
        assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


def test_packed_sequences_count_as_equal_ones() -> None:
    def classes(tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        return Lengths.facts(tokens, tokens, True, sequences, 0, longest)[:3]

    assert classes(8 * 512, 8, 512) == (512, 512, 8)
    assert classes(8 * 512, 8, 0) == (512, 512, 8)  # nothing is said of the longest
    # of 0 to 1024 tokens: the mean of squares is that of 683
    assert classes(8 * 512, 8, 1024) == (768, 768, 6)
    assert classes(4 * 512, 4, 8192) == (2048, 2048, 1)  # a bound beyond all tokens
    assert classes(0, 0, 0) == (0, 0, 0)


def test_classes_are_few_and_above_the_size() -> None:
    classes = {size_class(n) for n in range(1, 32769)}
    assert len(classes) == 30
    assert all(n <= size_class(n) <= 1.5 * n for n in range(1, 4000))
