"""Checks of ranks (check_ranks.py) against one process, in float64.

Every rank computes the whole reference itself. The first rank writes to OUT what failed: name -> traceback.
"""

import copy
import importlib.util
import json
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from powertrain.models import build, configure
from powertrain.models.parallelize import _shard_layers as spread_layers
from powertrain.models.parallelize import check_tensor, parallelize
from powertrain.nn.attention import Context
from powertrain.nn.norm import LayerNorm, RMSNorm
from powertrain.nn.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, columns, replicate
from powertrain.nn.tensor_parallel.parallelize_linears import parallelize_linears
from powertrain.nn.tensor_parallel.token_shards import even_rows, gather_tokens, scatter_tokens, split_tokens, sum_ranks
from powertrain.nn.tensor_parallel.vocab import (
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from powertrain.ops.adamw import AdamW
from powertrain.ops.cross_entropy import cross_entropy_ref
from powertrain.ops.norm import layer_norm, rms_norm
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.heartbeat import CollectiveMismatch
from tests.distributed import fp8_layers_checks
from tests.distributed.worker import MODELS

CHECKS: dict[str, Callable[[DeviceMesh], None]] = dict(fp8_layers_checks.CHECKS)
SLOW: dict[str, Callable[[DeviceMesh], None]] = dict(fp8_layers_checks.SLOW)
B, S, D, N = 3, 5, 8, 16  # 15 tokens: no number of ranks divides them


def check(function: Callable[[DeviceMesh], None]) -> Callable[[DeviceMesh], None]:
    CHECKS[function.__name__] = function
    return function


def same(got: Any, expected: Any, **tolerance: float) -> None:
    torch.testing.assert_close(got, expected, **tolerance)


def whole(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x


def own(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows, differentiable by themselves."""
    rows = even_rows(x.shape[0], mesh.size())
    return x.detach().split(rows)[mesh.get_local_rank()].clone().requires_grad_()


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def linears(mesh: DeviceMesh, **options: Any) -> tuple[list[nn.Linear], list[Any]]:
    """Three columns and a row layer, plain and spread, with the same weights: the generator's, whatever the ranks."""
    shapes = ((D, N), (D, N), (D, 2 * N), (N, D))
    torch.manual_seed(0)
    plain = [nn.Linear(*shape, bias=n != 1, dtype=torch.float64) for n, shape in enumerate(shapes)]
    torch.manual_seed(0)
    kinds = (ColumnParallelLinear, ColumnParallelLinear, ColumnParallelLinear, RowParallelLinear)
    spread = [
        kind(*shape, mesh, bias=n != 1, dtype=torch.float64, **options)
        for n, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
    ]
    return plain, spread


def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Something of three that every rank can do for its own features."""
    return torch.tanh(q) * k + v.unflatten(-1, (-1, 2)).prod(-1)


def same_weights_and_grads(plain: list[nn.Linear], spread: list[Any]) -> None:
    for one, other in zip(plain, spread, strict=True):
        for (name, p), (_, q) in zip(one.named_parameters(), other.named_parameters(), strict=True):
            same(whole(q.detach()), p.detach(), rtol=0, atol=0)
            assert isinstance(q.grad, DTensor) and q.grad.placements == q.placements, name
            same(whole(q.grad), p.grad)


@check
def columns_and_rows(mesh: DeviceMesh) -> None:
    plain, spread = linears(mesh)
    x, dy = randn(B * S, D), randn(B * S, D, seed=1).detach()
    y = plain[3](mixed(*(layer(x) for layer in plain[:3])))
    y.backward(dy)
    for _ in range(2):  # gradients add up
        part = own(x, mesh)
        made = spread[3](mixed(*columns(part, *spread[:3], shape=(B, S))))
        same(made, own(y, mesh).detach())
        made.backward(own(dy, mesh).detach())
        same(part.grad, own(x.grad, mesh).detach())
    y = plain[3](mixed(*(layer(x) for layer in plain[:3])))
    y.backward(dy)
    same_weights_and_grads(plain, spread)


@check
def without_sequence_parallelism(mesh: DeviceMesh) -> None:
    plain, spread = linears(mesh, sequence_parallel=False)
    x, dy = randn(B, S, D), randn(B, S, D, seed=1).detach()
    y = plain[3](mixed(*(layer(x) for layer in plain[:3])))
    y.backward(dy)
    again = x.detach().clone().requires_grad_()
    made = spread[3](mixed(*columns(again, *spread[:3])))
    same(made, y)
    made.backward(dy)
    same(again.grad, x.grad)
    same_weights_and_grads(plain, spread)


@check
def gathered_features(mesh: DeviceMesh) -> None:
    plain, _ = linears(mesh)
    up = ColumnParallelLinear.from_linear(plain[0], mesh, gather_output=True)
    down = RowParallelLinear.from_linear(plain[3], mesh, input_is_parallel=False)
    x, dy = randn(B * S, D), randn(B * S, D, seed=1).detach()
    y = plain[3](torch.tanh(plain[0](x)))
    y.backward(dy)
    part = own(x, mesh)
    hidden = up(part, shape=(B, S))
    assert hidden.shape == (B, S, N)
    made = down(torch.tanh(hidden))
    same(made, own(y, mesh).detach())
    made.backward(own(dy, mesh).detach())
    same(part.grad, own(x.grad, mesh).detach())
    same_weights_and_grads([plain[0], plain[3]], [up, down])


@check
def calls_that_are_compared(mesh: DeviceMesh) -> None:
    """In debug mode ranks say each other what they call: the same, whatever their shares of the tokens."""
    overlap = Overlap(dist.new_group(), debug=True)
    x, target = own(randn(B * S, D), mesh), labels()
    up, down = ColumnParallelLinear(D, N, overlap).double(), RowParallelLinear(N, D, overlap).double()
    embed, head = VocabParallelEmbedding(N, D, overlap).double(), VocabParallelHead(D, N, overlap).double()
    y = down(torch.tanh(up(x, shape=(B, S)))) + embed(target.clamp(min=0))
    loss = head(y, target) + vocab_parallel_cross_entropy(head(y, shape=(B, S)), target, overlap)
    loss.backward()
    same(gather_tokens(y, overlap, even_rows(B * S, mesh.size())).shape, torch.Size((B * S, D)))
    overlap.close()


@check
def main_grad(mesh: DeviceMesh) -> None:
    plain, spread = linears(mesh)
    x = randn(B * S, D)
    (plain[3](torch.tanh(plain[0](x)))).sum().backward()
    for layer in (spread[0], spread[3]):
        layer.weight.main_grad = torch.ones_like(layer.weight.to_local(), dtype=torch.float32)
    spread[3](torch.tanh(spread[0](own(x, mesh), shape=(B, S)))).sum().backward()
    for one, layer in ((plain[0], spread[0]), (plain[3], spread[3])):
        assert layer.weight.grad is None
        total = DTensor.from_local(layer.weight.main_grad, mesh, layer.weight.placements).full_tensor()
        same(total, one.weight.grad.float() + 1.0)


@check
def norms_on_a_part_of_the_tokens(mesh: DeviceMesh) -> None:
    for kind, op in ((RMSNorm, rms_norm), (LayerNorm, layer_norm)):
        norm = kind(D, bias=True).double()
        replicate(norm, mesh)
        weight, bias = (torch.full((D,), value, dtype=torch.float64, requires_grad=True) for value in (1.0, 0.0))
        x = randn(B * S, D)
        for _ in range(2):
            norm(own(x, mesh)).square().sum().backward()
            op(x, weight, bias, eps=norm.eps).square().sum().backward()
        for p, q in ((norm.weight, weight), (norm.bias, bias)):
            assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements
            same(p.grad.to_local(), q.grad)


@check
def embedding(mesh: DeviceMesh) -> None:
    tokens = torch.randint(0, N, (B, S), generator=torch.Generator().manual_seed(0))
    dy = randn(B, S, D).detach()
    torch.manual_seed(0)
    plain = nn.Embedding(N, D, dtype=torch.float64)
    y = plain(tokens)
    y.backward(dy)
    for sequence_parallel in (True, False):
        torch.manual_seed(0)
        spread = VocabParallelEmbedding(N, D, mesh, sequence_parallel=sequence_parallel, dtype=torch.float64)
        made = spread(tokens)
        expected, gradient = (own(t.flatten(0, 1), mesh).detach() if sequence_parallel else t for t in (y, dy))
        same(made, expected, rtol=0, atol=0)
        made.backward(gradient)
        same(whole(spread.weight.grad), plain.weight.grad)


@check
def tokens_of_no_vocabulary(mesh: DeviceMesh) -> None:
    spread = VocabParallelEmbedding(N, D, mesh)
    for token in (-1, N):
        try:
            spread(torch.tensor([[0, token]]))
        except ValueError as error:
            assert f"tokens must be in [0, {N}), got {token}" in str(error)
        else:
            raise AssertionError(f"{token} was looked up")


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "sum", "label_smoothing": 0.1, "softcap": 3.0},
    {"z_loss": 0.01, "ignore_index": 3},
)


def labels() -> Tensor:
    target = torch.randint(0, N, (B, S), generator=torch.Generator().manual_seed(0))
    target[0, :3] = -100
    return target


@check
def cross_entropy(mesh: DeviceMesh) -> None:
    overlap = Overlap(mesh)
    for options in (*OPTIONS, {"reduction": "none", "label_smoothing": 0.2, "z_loss": 0.1}):
        target = labels().clamp(min=options.get("ignore_index", -100))
        logits = randn(B, S, N)
        loss = cross_entropy_ref(logits, target, **options)
        part = logits.detach().chunk(mesh.size(), -1)[mesh.get_local_rank()].clone().requires_grad_()
        made = vocab_parallel_cross_entropy(part, target, overlap, **options)
        same(made, loss)
        weight = randn(*loss.shape, seed=2).detach()
        loss.backward(weight)
        made.backward(weight)
        same(part.grad, logits.grad.chunk(mesh.size(), -1)[mesh.get_local_rank()])
    bad = labels().fill_(N)
    assert vocab_parallel_cross_entropy(part, bad, overlap, reduction="none").isnan().all()


@check
def linear_cross_entropy(mesh: DeviceMesh) -> None:
    overlap = Overlap(mesh)
    for options in OPTIONS:
        for sequence_parallel in (True, False):
            target = labels().clamp(min=options.get("ignore_index", -100))
            x, weight, bias = randn(B * S, D), randn(N, D, seed=1), randn(N, seed=2)
            loss = 2.0 * cross_entropy_ref(F.linear(x, weight, bias).view(B, S, N), target, **options)
            loss.backward()
            mine = own(x, mesh) if sequence_parallel else x.detach().clone().requires_grad_()
            w, b = (
                t.detach().chunk(mesh.size())[mesh.get_local_rank()].clone().requires_grad_() for t in (weight, bias)
            )
            made = 2.0 * vocab_parallel_linear_cross_entropy(
                mine, w, target, overlap, bias=b, sequence_parallel=sequence_parallel, **options
            )
            same(made, loss)
            made.backward()
            same(mine.grad, own(x.grad, mesh).detach() if sequence_parallel else x.grad)
            same(w.grad, weight.grad.chunk(mesh.size())[mesh.get_local_rank()])
            same(b.grad, bias.grad.chunk(mesh.size())[mesh.get_local_rank()])


@check
def linear_cross_entropy_stays_float64(mesh: DeviceMesh) -> None:
    """The mean of 12 labels: 1/12 rounded to float32 would be an error of 1e-8."""
    x, weight = randn(B * S, D), randn(N, D, seed=1).detach().chunk(mesh.size())[mesh.get_local_rank()]
    loss = vocab_parallel_linear_cross_entropy(own(x, mesh), weight, labels(), Overlap(mesh))
    same(loss, cross_entropy_ref(F.linear(x, randn(N, D, seed=1)).view(B, S, N), labels()), rtol=1e-13, atol=0)


@check
def linear_cross_entropy_in_blocks(mesh: DeviceMesh) -> None:
    from powertrain.ops import linear_cross_entropy as module

    before = module.SCRATCH_BYTES, module.MIN_ROW_BLOCK, module.MIN_ROW_BLOCK_OF_DWEIGHT
    module.SCRATCH_BYTES = 4 * 8 * N // mesh.size()  # four rows a block
    module.MIN_ROW_BLOCK = module.MIN_ROW_BLOCK_OF_DWEIGHT = 1
    try:
        linear_cross_entropy(mesh)
    finally:
        module.SCRATCH_BYTES, module.MIN_ROW_BLOCK, module.MIN_ROW_BLOCK_OF_DWEIGHT = before


@check
def head(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    spread = VocabParallelHead(D, N, mesh, bias=False)
    spread.weight.main_grad = torch.ones_like(spread.weight.to_local())  # type: ignore[attr-defined]
    weight = whole(spread.weight.detach()).requires_grad_()
    x = randn(B * S, D).detach().float().requires_grad_()
    loss = cross_entropy_ref(F.linear(x, weight), labels().flatten(), z_loss=0.1)
    loss.backward()
    part = own(x, mesh)
    made = spread(part, labels(), z_loss=0.1)
    same(made, loss)
    made.backward()
    same(part.grad, own(x.grad, mesh).detach())
    assert spread.weight.grad is None
    start = mesh.get_local_rank() * N // mesh.size()
    same(spread.weight.main_grad, weight.grad[start : start + N // mesh.size()] + 1.0)  # type: ignore[attr-defined]
    logits = spread(part, shape=(B, S))
    same(logits, F.linear(x, weight).view(B, S, N)[..., start : start + N // mesh.size()])


@check
def tokens_there_and_back(mesh: DeviceMesh) -> None:
    overlap = Overlap(mesh)
    x, weight = randn(B * S, D), randn(B * S, D, seed=1).detach()
    rows = even_rows(B * S, mesh.size())
    y = gather_tokens(torch.tanh(split_tokens(x, overlap)), overlap, rows)
    same(y, torch.tanh(x))
    (y * weight).sum().backward()
    same(x.grad, weight * (1.0 - torch.tanh(x.detach()).square()))
    whole = randn(7, 2, 3)  # other dims, and none beside the first
    for t in (whole, whole[:, 0, 0]):
        split = split_tokens(t, overlap)
        same(split, t.detach().split(even_rows(7, mesh.size()))[mesh.get_local_rank()])
        same(scatter_tokens(t, overlap), split * mesh.size())
        same(sum_ranks(t, overlap), t * mesh.size())
        same(gather_tokens(split, overlap, even_rows(7, mesh.size())), t)
    part = own(x, mesh)
    (gather_tokens(part, overlap, rows, gradient="parts") * weight).sum().backward()
    same(part.grad, own(weight, mesh).detach() * mesh.size())


def model_of(name: str, **sizes: Any) -> Any:
    model = build(configure(**{**MODELS[name], **sizes})).double()
    model.to_empty(device="cpu")
    model.init_weights(3)
    for p in model.parameters():  # biases and norms that are not all alike
        if p.dim() == 1:
            p.data += 0.1 * torch.arange(p.numel()).double().sin()
    return model


def model_equals_one_process(mesh: DeviceMesh, name: str, recompute: str, **sizes: Any) -> None:
    tokens = torch.randint(0, 61, (B, S), generator=torch.Generator().manual_seed(1))
    target = tokens.roll(-1, 1)
    target[0, :4] = -100
    one, spread = model_of(name, **sizes), model_of(name, **sizes)
    full = init_device_mesh("cpu", (1, 1, mesh.size()), mesh_dim_names=("replicate", "shard", "tensor"))
    for block in spread.layers:
        block.recompute = recompute
    parallelize(spread, full, param_dtype=torch.float64, reduce_dtype=torch.float64)
    labels = {name: module.label for name, module in spread.named_modules() if hasattr(module, "label")}
    assert bool(labels) == (mesh.size() > 1) and all(name == label for name, label in labels.items()), labels
    positions = (torch.arange(S) % 4).expand(B, S)
    documents = (torch.arange(S) // 4).expand(B, S).int()
    options = {"position_ids": positions, "document_ids": documents, "z_loss": 0.01}
    loss, made = one(tokens, target, **options), spread(tokens, target, **options)
    same(made, loss)
    loss.backward()
    made.backward()
    for (key, p), (_, q) in zip(one.named_parameters(), spread.named_parameters(), strict=True):
        same(whole(q.detach()), p.detach(), rtol=0, atol=0)
        same(whole(q.grad), p.grad, msg=lambda text, key=key: f"{key}: {text}")
    one.zero_grad()
    spread.zero_grad()
    logits, found = one(tokens), spread(tokens)
    same(found, logits)
    logits.square().mean().backward()
    found.square().mean().backward()
    for (key, p), (_, q) in zip(one.named_parameters(), spread.named_parameters(), strict=True):
        same(whole(q.grad), p.grad, msg=lambda text, key=key: f"{key} by logits: {text}")


@check
def model_gpt_neox(mesh: DeviceMesh) -> None:
    model_equals_one_process(mesh, "gpt_neox", "none")


@check
def model_gpt_neox_recomputing_all(mesh: DeviceMesh) -> None:
    model_equals_one_process(mesh, "gpt_neox_rotary", "full", position_embedding="learned")


@check
def model_llama_recomputing_some(mesh: DeviceMesh) -> None:
    model_equals_one_process(mesh, "llama", "selective", num_kv_heads=4, mlp_bias=True, out_bias=True)


@check
def model_deepseek(mesh: DeviceMesh) -> None:
    model_equals_one_process(mesh, "deepseek", "none")
    model_equals_one_process(mesh, "deepseek", "full", q_lora_rank=12, attention_bias=True, num_shared_experts=0)


@check
def dropout(mesh: DeviceMesh) -> None:
    """On tokens and heads of its own every rank drops other elements, and the streams stay where they belong."""
    model = model_of("gpt_neox", hidden_dropout=0.5, attention_dropout=0.5).float().train()
    parallelize(model, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32)
    seen: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    torch.manual_seed(mesh.get_local_rank())
    tokens = torch.zeros((4, 16), dtype=torch.int64)
    loss = model(tokens, tokens)
    loss.backward()
    dropped = (seen[0] == 0).double()
    assert 0.3 < dropped.mean() < 0.7
    everyone = gather_tokens(dropped.detach(), Overlap(mesh)).chunk(mesh.size())
    assert not torch.equal(everyone[0], everyone[1])
    losses = [torch.empty_like(loss) for _ in range(mesh.size())]
    dist.all_gather(losses, loss.detach())
    assert len({float(value) for value in losses}) == 1


class Plain(nn.Module):
    """Somebody's layer: three products of one tensor, or of two."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj"):
            self.add_module(name, nn.Linear(D, N, dtype=torch.float64))
        self.o_proj = nn.Linear(N, D, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        return self.o_proj(torch.tanh(self.q_proj(x)) * self.k_proj(y) + self.v_proj(y))


def same_model(one: nn.Module, spread: nn.Module, rtol: float = 0.0) -> None:
    for (key, p), (_, q) in zip(one.named_parameters(), spread.named_parameters(), strict=False):
        same(whole(q.detach()), p.detach(), rtol=rtol, atol=1e-9 if rtol else 0.0)
        same(whole(q.grad), p.grad, msg=lambda text, key=key: f"{key}: {text}")


@check
def linears_from_outside(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    one = Plain()
    spread = copy.deepcopy(one)
    parallelize_linears(spread, mesh, {"q_proj": "columns", "k_proj": "columns", "v_proj": "columns", "o_proj": "rows"})
    assert spread.q_proj.label == "q_proj" and spread.o_proj.label == "o_proj"
    hooked = nn.Sequential(nn.Linear(D, N), nn.Linear(N, D)).double()
    hooked[0].register_forward_hook(lambda layer, args, y: y * 2)
    exact = hooked(randn(2, 3, D)).detach()
    parallelize_linears(hooked, mesh, {"0": "columns", "1": "rows"})
    same(hooked(randn(2, 3, D)).detach(), exact)
    encoder = nn.TransformerEncoderLayer(D, 2, N, batch_first=True, dtype=torch.float64).eval()
    exact = encoder(randn(2, 3, D)).detach()
    parallelize_linears(encoder, mesh, {"linear1": "columns", "linear2": "rows"})
    with torch.no_grad():
        # its fused function knows no DTensors
        same(encoder(randn(2, 3, D)), exact)
    x, y = randn(2, 3, D), randn(2, 3, D, seed=1)
    mine = [t.detach().clone().requires_grad_() for t in (x, y)]
    for inputs, others in (((x,), mine[:1]), ((x, y), mine), ((x, y), mine)):
        expected, found = one(*inputs), spread(*others)
        same(found, expected)
        expected.sum().backward()
        found.sum().backward()
    same([t.grad for t in mine], [x.grad, y.grad])
    same_model(one, spread)
    spread.add_module("plain", nn.Linear(2, 2))  # a parameter that is no DTensor
    spread.plain(torch.ones(2)).sum().backward()
    for kind, options in ((AdamW, {}), (torch.optim.AdamW, {"foreach": False})):
        for model in (one, spread):
            kind(model.parameters(), lr=0.1, **options).step()
        same_model(one, spread, rtol=1e-6)
    # the norm is that of all shards and of the replicated biases; ours takes it in float32
    del spread.plain
    norm = torch.nn.utils.get_total_norm([p.grad for p in one.parameters() if p.grad is not None])
    optimizers = []
    for model in (one, spread):
        optimizers.append(AdamW(model.parameters(), lr=0.1))
        optimizers[-1].step(max_norm=0.5 * float(norm))
    same_model(one, spread, rtol=1e-6)
    for optimizer in optimizers:
        same(optimizer.grad_norm.double(), norm, rtol=1e-6, atol=0)  # type: ignore[union-attr]
    cases: tuple[tuple[Any, str], ...] = (
        ({"q_proj": "column"}, "plan's q_proj must be one of 'columns', 'rows', "),
        (["q_proj"], "plan must be a dictionary of the ends of modules' names and their roles, got ['q_proj']"),
        (None, "plan must be given for a model whose config.model_type is none of llama"),
        ({"q_proj": "columns", "z_proj": "rows"}, "plan must name modules that the model has, got z_proj"),
        ({"": "rows"}, "must be an nn.Linear to be sharded, got Plain"),
    )
    computed = Plain()
    prune.l1_unstructured(computed.q_proj, "weight", 0.5)
    derived = Plain()
    derived.q_proj = Scaled(D, D)
    odd = Plain()
    odd.o_proj = nn.Linear(mesh.size() + 1, D)
    others = (
        (odd, {"q_proj": "columns", "o_proj": "rows"}, f"plan's o_proj must have in_features that {mesh.size()} ranks"),
        (computed, {"q_proj": "columns"}, "plan's q_proj must have a weight that is a parameter, got a computed one"),
        (derived, {"q_proj": "columns"}, "plan's q_proj must be an nn.Linear to be sharded, got Scaled"),
    )
    for model, plan, said in (*((Plain(), *case) for case in cases), *others):
        try:
            parallelize_linears(model, mesh, plan)
        except ValueError as error:
            assert said in str(error), str(error)
        else:
            raise AssertionError(f"must be refused: {said}")
        assert not any(isinstance(p, DTensor) for p in model.parameters())


class Scaled(nn.Linear):
    """Does more than its weight says."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def hugging_face(mesh: DeviceMesh, kind: str, *, sequence_parallel: bool, recompute: bool = False) -> None:
    one = _hugging_face(kind)
    spread = copy.deepcopy(one)
    parallelize_linears(spread, mesh, sequence_parallel=sequence_parallel)
    if recompute:
        spread.train().gradient_checkpointing_enable({"use_reentrant": False})
        one.train()
    for length in (5, 4):
        tokens = torch.randint(0, 61, (3, length), generator=torch.Generator().manual_seed(1))
        expected, found = one(tokens, labels=tokens), spread(tokens, labels=tokens)
        same(found.logits, expected.logits)
        expected.loss.backward()
        found.loss.backward()
    same_model(one, spread)


def _hugging_face(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 16, "attn_implementation": "eager", "use_cache": False,
    }  # fmt: skip
    if kind != "gpt_neox":
        sizes |= {"num_key_value_heads": 4, "head_dim": 8}
    torch.manual_seed(0)
    made: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).double()
    return made


@check
def hugging_face_models(mesh: DeviceMesh) -> None:
    if importlib.util.find_spec("transformers") is None:  # not for Python 3.10
        return
    hugging_face(mesh, "qwen3", sequence_parallel=True)
    hugging_face(mesh, "gpt_neox", sequence_parallel=True, recompute=True)
    hugging_face(mesh, "qwen2", sequence_parallel=False, recompute=True)
    hugging_face(mesh, "llama", sequence_parallel=True)
    hugging_face(mesh, "mistral", sequence_parallel=False)


class Layer(nn.Module):
    """A norm, columns and rows: half a layer."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm = RMSNorm(D)
        replicate(self.norm, mesh)
        self.gate, self.up = (ColumnParallelLinear(D, N, mesh, bias=False) for _ in range(2))
        self.down = RowParallelLinear(N, D, mesh)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = columns(self.norm(x), self.gate, self.up)
        return x + self.down(F.silu(gate) * up)


@check
def fsdp_and_checkpoints(mesh: DeviceMesh) -> None:
    """FSDP2 over the layers, in 16 bits; what it saves loads into layers without it."""
    full = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(0)
    layer, sharded = Layer(mesh), Layer(full["tensor"])
    sharded.load_state_dict(layer.state_dict())
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(sharded, mesh=full["shard"], mp_policy=policy)
    x = randn(8, D).float().detach()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    made = sharded(x)
    same(made.float(), y.float(), rtol=0.05, atol=0.05)
    for result in (y, made):
        result.float().sum().backward()
    for (key, p), q in zip(layer.named_parameters(), sharded.parameters(), strict=True):
        assert q.grad is not None and q.grad.dtype is torch.float32
        same(whole(q.grad), whole(p.grad), rtol=0.05, atol=0.3, msg=lambda text, key=key: f"{key}: {text}")
    folder = [tempfile.mkdtemp() if mesh.get_local_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    saved = get_model_state_dict(sharded)
    dcp.save(saved, checkpoint_id=folder[0])
    for p in layer.parameters():
        p.data.zero_()
    dcp.load(layer.state_dict(), checkpoint_id=folder[0])
    dist.barrier()
    if mesh.get_local_rank() == 0:
        shutil.rmtree(folder[0])
    for p, q in zip(layer.parameters(), saved.values(), strict=True):
        same(whole(p.detach()), whole(q), rtol=0, atol=0)


@check
def compiled(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    layer = Layer(mesh)
    x = randn(8, D).float().detach().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    expected = [x.grad.clone(), *(p.grad.to_local().clone() for p in layer.parameters())]  # type: ignore[union-attr]
    x.grad = None
    layer.zero_grad()
    made = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    same(made, y)
    made.square().sum().backward()
    same([x.grad, *(p.grad.to_local() for p in layer.parameters())], expected)  # type: ignore[union-attr]


def compiled_layer_of_a_model(mesh: DeviceMesh) -> None:
    """Llama's with qk-norm, recomputing some, on token counts that change and divide by no number of ranks."""
    model = model_of("llama", num_kv_heads=4)
    spread_layers(model, mesh)
    block = model.layers[0]
    for recompute in ("none", "selective"):
        block.recompute = recompute
        made = torch.compile(block, fullgraph=True, backend="aot_eager")
        for length in (5, 7):
            context = Context(shape=(B, length))
            found = []
            for layer in (block, made):
                x = own(randn(B * length, 32), mesh)
                y, residual = layer(x, None, context)
                (y.sin() + residual).sum().backward()
                found.append([y, x.grad, *(whole(p.grad) for p in block.parameters())])
                block.zero_grad()
            same(found[1], found[0])


SLOW["compiled_layer_of_a_model"] = compiled_layer_of_a_model


@check
def flops(mesh: DeviceMesh) -> None:
    share = 2 * B * S * D * N // mesh.size()
    for sequence_parallel in (True, False):
        _, (gate, up, _, down) = linears(mesh, sequence_parallel=sequence_parallel)
        x = own(randn(B * S, D), mesh) if sequence_parallel else randn(B * S, D)
        with FlopCounterMode(display=False) as counter:
            gate_x, up_x = columns(x, gate, up, shape=(B, S))
            down(gate_x * up_x).sum().backward()
        assert counter.get_total_flops() == 3 * 3 * share
    head = VocabParallelHead(D, N, mesh, bias=False, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        head(own(randn(B * S, D), mesh), labels()).backward()
    assert counter.get_total_flops() == 3 * share


@check
def wrong_arguments(mesh: DeviceMesh) -> None:
    size = mesh.size()
    overlap = Overlap(mesh)
    cases: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: ColumnParallelLinear(4, size + 1, mesh), f"out_features must be a multiple of {size} ranks"),
        (lambda: RowParallelLinear(size + 1, 4, mesh), f"in_features must be a multiple of {size} ranks"),
        (lambda: ColumnParallelLinear(4, size, mesh)(torch.ones(4)), "ColumnParallelLinear: x must be [..., features]"),
        (lambda: RowParallelLinear(size, 4, mesh)(torch.ones(1)), "RowParallelLinear: x must be [..., features]"),
        (lambda: VocabParallelEmbedding(size + 1, 4, mesh), f"num_embeddings must be a multiple of {size} ranks"),
        (lambda: ColumnParallelLinear(4, size, "tensor"), "ranks must be one axis of a DeviceMesh or an Overlap"),  # type: ignore[arg-type]
        (
            lambda: parallelize(
                None,
                DeviceMesh("cpu", range(size), mesh_dim_names=("tp",)),
                param_dtype=torch.float32,
                reduce_dtype=torch.float32,
            ),
            "mesh must have axes among pipeline, replicate, shard, context, tensor, in this order",
        ),
        (
            lambda: check_tensor(configure(**{**MODELS["deepseek"], "balance_loss": 0.1}), 2),
            "model.balance_loss must be 0 with parallel.tensor above 1",
        ),
        (lambda: check_tensor(configure(**MODELS["llama"]), 3), "parallel.tensor must divide model.num_kv_heads (2)"),
        (lambda: columns(randn(2, D), *linears(mesh)[1][2:]), "layers must all be ColumnParallelLinear"),
        (
            lambda: vocab_parallel_linear_cross_entropy(randn(2, D), randn(4, D), labels(), overlap),
            "x must have",
        ),
        (
            lambda: vocab_parallel_linear_cross_entropy(
                randn(2, D),
                randn(4, D),
                labels(),
                overlap,
                reduction="none",  # type: ignore[arg-type]
            ),
            "reduction must be one of 'mean', 'sum'",
        ),
    )
    for call, said in cases:
        try:
            call()
        except ValueError as error:
            assert said in str(error), str(error)
        else:
            raise AssertionError(f"must be refused: {said}")


@check
def models_that_cannot_be_sharded(mesh: DeviceMesh) -> None:
    """Frozen on one rank: gloo ended the process in backward. Sharded already: torch's assertion, or a TypeError."""
    axis, dtype = DeviceMesh("cpu", range(mesh.size()), mesh_dim_names=("tensor",)), torch.float32
    last_first = DeviceMesh("cpu", [*range(1, mesh.size()), 0], mesh_dim_names=("shard",))
    frozen, sharded = build(configure(**MODELS["llama"])), build(configure(**MODELS["llama"]))
    frozen.layers[1].mlp.down.requires_grad_(dist.get_rank() != 1)
    sharded.head = ColumnParallelLinear(4, mesh.size(), mesh)
    whole = build(configure(**MODELS["llama"]))
    cases: tuple[tuple[Any, Any, Any, str], ...] = (
        (whole, DeviceMesh("cpu", range(mesh.size())), dtype, "mesh must have axes among"),
        (whole, None, dtype, "mesh must have axes among"),
        (whole, last_first, dtype, f"mesh must have all {mesh.size()} ranks, in their order"),
        (whole, axis, "bf16", "param_dtype must be a torch.dtype, got 'bf16'"),
        (sharded, axis, dtype, "model must not be sharded already, got one whose head.weight is a DTensor"),
        (frozen, axis, dtype, "must be the same on all ranks, got layers.1.mlp.down.weight [32, 48] torch.float32, "
         "trained on rank 0 and layers.1.mlp.down.weight [32, 48] torch.float32, frozen on rank 1"),
    )  # fmt: skip
    for model, over, given, said in cases:
        try:
            parallelize(model, over, param_dtype=given, reduce_dtype=dtype)
        except (ValueError, CollectiveMismatch) as error:
            assert said in str(error), str(error)
        else:
            raise AssertionError(f"must be refused: {said}")


def prepare() -> None:
    """What takes longest the first time, ahead of the ranks: a compile, and the models of transformers."""
    torch.compile(lambda x: x.sin() * 2, backend="aot_eager")(torch.ones(1, requires_grad=True))
    if importlib.util.find_spec("transformers") is not None:
        for kind in ("qwen3", "gpt_neox", "qwen2", "llama", "mistral"):
            _hugging_face(kind)


def run_checks(checks: dict[str, Callable[[DeviceMesh], None]], out: str) -> None:
    """One rank's part of all of them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    failed = {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    for name, function in checks.items():
        error = ""
        try:
            function(mesh)
        except Exception:
            error = traceback.format_exc()
            print(name, error, flush=True)  # the others may not be told: they may wait within the check
        everywhere: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(everywhere, error)
        failed[name] = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(everywhere) if text)
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(failed, file)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads now and then abort a process that ends while they let go of tensors
