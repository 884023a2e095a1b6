"""`disable`: for the whole process, while one that names the op is in force, in whatever order they end."""

import random
import re
import threading
from pathlib import Path

import pytest
import torch

import powertrain
from powertrain.runtime import dispatch, settings
from powertrain.runtime.dispatch import disable, falls_back, is_disabled
from powertrain.runtime.errors import CompileError
from powertrain.runtime.op_names import OPS


@pytest.fixture(autouse=True)
def nothing_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_holds", [])
    monkeypatch.setattr(dispatch, "disabled_ops", ())


def test_ends_in_any_order() -> None:
    """Random beginnings and ends of some, nested, interleaved, equal and shared: the union of those in force."""
    chance, names = random.Random(4), ["rope", "rms_norm", "all", "attention"]
    for _ in range(200):
        live: list[tuple[disable, set[str]]] = []
        for _ in range(chance.randint(1, 30)):
            if live and chance.random() < 0.5:
                one, _ = live.pop(chance.randrange(len(live)))
                one.__exit__(None, None, None)
            else:
                chosen = chance.sample(names, chance.randint(0, 3))
                shared = chance.choice(live)[0] if live and chance.random() < 0.2 else None
                one = shared or disable(*chosen)
                one.__enter__()
                live.append((one, set(one._names)))
            expected = set().union(*(names for _, names in live))
            assert dispatch.disabled_ops == tuple(sorted(expected))
            assert is_disabled("rope") == bool(expected & {"rope", "all"})
        for one, _ in live:
            one.__exit__(None, None, None)
        assert dispatch.disabled_ops == ()


def test_among_threads() -> None:
    errors: list[object] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(400):
            own = OPS[seed]
            name = chance.choice(["rope", "rms_norm", own])
            with disable(name), disable(own):
                if not (is_disabled(name) and is_disabled(own)):
                    errors.append(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and dispatch.disabled_ops == () and not dispatch._holds


def test_two_threads_that_end_in_the_order_they_began() -> None:
    first, second = disable("rope"), disable("rms_norm")
    with first:
        second.__enter__()
    assert is_disabled("rms_norm") and not is_disabled("rope")
    second.__exit__()
    assert dispatch.disabled_ops == ()


def test_a_fallback_inside_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    @falls_back("rope")
    def rope() -> str:
        if is_disabled("rope"):
            return "plain"
        raise CompileError("no")

    monkeypatch.setenv("POWERTRAIN_ON_COMPILE_FAILURE", "reference")
    settings.reload()
    try:
        with disable("rms_norm"):
            assert rope() == "plain"
        assert rope() == "plain" and dispatch.disabled_ops == ("rope",)
    finally:
        monkeypatch.undo()
        settings.reload()


def test_from_now_on_and_for_a_while_again() -> None:
    kept = disable("rope")
    assert is_disabled("rope")
    with kept:
        assert is_disabled("rope")
    assert not is_disabled("rope")
    with kept, kept:
        assert is_disabled("rope")
    assert not is_disabled("rope")


def test_the_thread_of_a_backward_sees_it() -> None:
    seen: list[bool] = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            seen.append(is_disabled("rope"))
            return grad

    y = Ask.apply(torch.ones(3, requires_grad=True)).sum()
    with disable("rope"):
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    assert seen == [True]


def test_inside_a_compiled_function() -> None:
    x, w = torch.randn(4, 64), torch.randn(64)

    def function(x: torch.Tensor) -> torch.Tensor:
        with powertrain.disable("rms_norm"):
            return powertrain.rms_norm(x, w) * 2

    found = torch.compile(function, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(found, function(x))
    assert dispatch.disabled_ops == ()


def test_names_are_those_of_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that nothing asks for would switch nothing off, without a word."""
    package = Path(powertrain.__file__).parent
    text = "\n".join(path.read_text() for path in package.rglob("*.py"))
    asked = re.findall(r'(?:use_kernel|falls_back|is_disabled)\("(\w+)"', text)
    assert len(asked) > 40 and set(asked) <= set(OPS)
    assert set(OPS) - set(asked) <= set(re.findall(r'(?:op|_OP) = "(\w+)"', text))
    for name, op in (("swiglu", "gated_activation"), ("AdamW", "adamw"), ("gelu", "activation")):
        with disable(name):
            assert is_disabled(op)
    with pytest.raises(ValueError, match=r"disable must name ops, got 'rms_nrom'; did you mean 'rms_norm'\?"):
        disable("rms_nrom")
    assert not is_disabled("rms_norm")
    monkeypatch.setenv("POWERTRAIN_DISABLE", "rope,nothing")
    with pytest.raises(ValueError, match="environment variable POWERTRAIN_DISABLE must name ops, got 'nothing'"):
        settings.reload()
    monkeypatch.setenv("POWERTRAIN_DISABLE", "swiglu")
    assert settings.reload().disable == ("gated_activation",)
    monkeypatch.delenv("POWERTRAIN_DISABLE")
    settings.reload()
