"""FP8 folders of Hugging Face: their values, the bytes of frozen weights, what is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from powertrain.models import build, configure
from powertrain.models.fp8_checkpoint import load_frozen
from powertrain.models.huggingface import from_hf, open_tensors, read_config, write
from powertrain.nn.lora import lora, merge_lora
from powertrain.ops.fp8.formulas import Quantized, dequantized, quantize_ref
from powertrain.ops.fp8.linear import fp8_linear
from powertrain.quant import FP8Linear, dequantize_model
from powertrain.quant.frozen import FrozenWeight, keep_frozen
from powertrain.train.checkpoint.convert import convert
from powertrain.train.checkpoint.load import load_model, open_weights

# heads of 128 rows, a whole block each; 200 and 160: partial blocks at both edges
LLAMA: dict[str, Any] = {
    "architecture": "llama", "vocab_size": 61, "hidden_size": 160, "intermediate_size": 200, "num_layers": 2,
    "num_heads": 2, "num_kv_heads": 1, "head_dim": 128, "max_position_embeddings": 16,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "architecture": "deepseek", "vocab_size": 61, "hidden_size": 48, "intermediate_size": 136, "num_layers": 2,
    "num_heads": 2, "moe_intermediate_size": 24, "num_experts": 4, "experts_per_token": 2, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "max_position_embeddings": 16,
}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def _compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups,
            "ignore": ["lm_head"]}  # fmt: skip


def _quantized(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """By the authors' formula: data = weight / scale, scale = amax / 448 of each block."""
    N, K = weight.shape
    rows, cols = (min(size, whole) for size, whole in zip(block, (N, K), strict=True))
    padded = torch.zeros(-(-N // rows) * rows, -(-K // cols) * cols)
    padded[:N, :K] = weight
    tiles = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, cols))
    scale = tiles.abs().amax((1, 3)) / 448.0
    data = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return data.float().flatten(2).flatten(0, 1)[:N, :K].to(torch.float8_e4m3fn), scale


def _folder(
    folder: Path, sizes: dict[str, Any], stored: dict[str, Any], block: tuple[int, int], suffix: str, shards: int = 1
) -> dict[str, Tensor]:
    """A folder in FP8 of random weights; the values that it stands for, by theirs names."""
    torch.manual_seed(0)
    folder.mkdir()
    config = configure(**sizes)
    model = build(config, device="cpu")
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    write(folder, config, model.state_dict().items(), dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    values, files = {}, {}
    for name, tensor in tensors.items():
        values[name] = tensor.float()
        files[name] = tensor
        if tensor.dim() == 2 and name.endswith("_proj.weight"):
            data, scale = _quantized(tensor.float(), block)
            blocks = [min(size, whole) for size, whole in zip(block, tensor.shape, strict=True)]
            spread = scale.repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)
            values[name] = data.float() * spread[: tensor.shape[0], : tensor.shape[1]]
            files[name], files[name + suffix] = data, scale.reshape(1) if block[0] > 1000 else scale
            if stored["quant_method"] == "compressed-tensors":
                files[name.replace(".weight", ".input_scale")] = torch.ones(1)
    (folder / "model.safetensors").unlink()
    names, weight_map = sorted(files), {}
    for i in range(shards):
        mine = names[i::shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        save_file({name: files[name].contiguous() for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"quantization_config": stored}))
    return values


FORMATS: dict[str, tuple[dict[str, Any], tuple[int, int], str]] = {
    "blocks": (BLOCKS, (128, 128), "_scale_inv"),
    "other_blocks": (BLOCKS | {"weight_block_size": [64, 32]}, (64, 32), "_scale_inv"),
    "fp8_tensor": (BLOCKS | {"weight_block_size": None}, (10**9, 10**9), "_scale_inv"),
    "tensor": (_compressed("tensor"), (10**9, 10**9), "_scale"),
    "channel": (_compressed("channel"), (1, 10**9), "_scale"),
    "compressed_blocks": (_compressed("block", block_structure=[128, 128]), (128, 128), "_scale"),
}


@pytest.mark.parametrize("sizes", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
@pytest.mark.parametrize("name", FORMATS)
def test_values_are_data_times_scales(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    values = _folder(tmp_path / "fp8", sizes, *FORMATS[name], shards=3)
    opened = open_tensors(tmp_path / "fp8")
    assert set(opened) == set(values)
    for theirs, value in values.items():
        assert torch.equal(opened[theirs].float(), value), theirs
    # into float32 masters unrounded, into bfloat16 rounded once
    config = read_config(tmp_path / "fp8")
    expected = build(config, device="cpu")
    expected.load_state_dict(dict(from_hf(config, values)))
    for dtype in (torch.float32, torch.bfloat16):
        model, weights = load_model(tmp_path / "fp8", device="cpu", dtype=dtype)
        assert weights.is_fp8 and weights.dtype is torch.bfloat16
        for (ours, p), (_, right) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
            assert torch.equal(p, right.to(p.dtype)), ours


def test_a_folder_becomes_one_in_bfloat16(tmp_path: Path) -> None:
    """Checked by the logits of both; its config says nothing of FP8."""
    values = _folder(tmp_path / "fp8", LLAMA, *FORMATS["blocks"])
    done = convert(open_weights(tmp_path / "fp8"), tmp_path / "bf16", "hf")
    assert done.compared is not None and done.compared.source == "powertrain"
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    assert found.keys() == values.keys()
    assert all(torch.equal(t, values[name].bfloat16()) for name, t in found.items())


@pytest.mark.parametrize("name", ["blocks", "channel", "tensor"])
def test_frozen_weights_are_the_stored_bytes(name: str, tmp_path: Path) -> None:
    _folder(tmp_path / "fp8", LLAMA, *FORMATS[name])
    model, _ = load_model(tmp_path / "fp8", device="cpu", dtype=torch.bfloat16)
    model.requires_grad_(False)
    values = {name: p.clone() for name, p in model.named_parameters()}
    report = load_frozen(model, tmp_path / "fp8")
    assert [str(part.recipe) for part in report.quantized] == ["block" if name == "blocks" else "row"] * 10, report
    assert not report.left
    raw = load_file(tmp_path / "fp8" / "model.safetensors")
    down = model.layers[1].mlp.down
    assert isinstance(down, FP8Linear) and isinstance(down.weight, FrozenWeight)
    data = down.weight.quantized.data
    assert torch.equal(data[:, :200].view(torch.uint8), raw["model.layers.1.mlp.down_proj.weight"].view(torch.uint8))
    assert data.shape[1] == 208 and not data[:, 200:].float().any()
    # rows of queries, keys and values in our order, with their blocks' scales
    qkv = model.layers[0].attention.qkv.weight
    assert torch.equal(qkv.float().bfloat16(), values["layers.0.attention.qkv.weight"])
    # the product is fp8_linear's of these bytes
    x = torch.randn(5, 200).bfloat16().requires_grad_()
    y = down(x)
    y.float().sum().backward()
    stand_in = torch.full((160, 200), torch.nan).bfloat16()
    leaf = x.detach().requires_grad_()
    by = "block" if name == "blocks" else "row"
    right = fp8_linear(leaf, stand_in, by=by, weight_copies=down.weight.copies())
    right.float().sum().backward()
    assert torch.equal(y, right) and torch.equal(x.grad, leaf.grad)
    full = x.detach().float() @ dequantized(down.weight.quantized, 200).T
    assert (y.float() - full).norm() < 0.05 * full.norm()
    # undone: plain weights of the values
    dequantize_model(model)
    assert type(down) is nn.Linear and torch.equal(down.weight, values["layers.1.mlp.down.weight"])


def test_adapters_train_on_frozen_bytes(tmp_path: Path) -> None:
    _folder(tmp_path / "fp8", LLAMA, *FORMATS["blocks"])
    model, _ = load_model(tmp_path / "fp8", device="cpu", dtype=torch.bfloat16)
    lora(model, rank=4)
    assert len(load_frozen(model, tmp_path / "fp8").quantized) == 10
    tokens = torch.arange(12).view(2, 6) % 61
    weight = model.layers[0].mlp.up.weight
    before = weight.quantized.data.view(torch.uint8).clone()
    # one byte an element and scales, beside what else the model has
    assert weight.quantized.data.nbytes + weight.quantized.scale_inv.numel() * 4 == 200 * 160 + 2 * 2 * 4
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        loss = checkpoint(lambda: model(tokens).float().logsumexp(-1).mean(), use_reentrant=False)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert torch.equal(weight.quantized.data.view(torch.uint8), before) and weight.grad is None
    # moved, cast, copied and saved with its bytes
    for other in (copy.deepcopy(model), model.to(torch.bfloat16).to("cpu")):
        there = other.layers[0].mlp.up.weight
        assert isinstance(there, FrozenWeight) and torch.equal(there.quantized.data.view(torch.uint8), before)
        assert torch.equal(other(tokens), model(tokens))
    torch.save(model.layers[0].mlp.up.weight, tmp_path / "weight.pt")
    back = torch.load(tmp_path / "weight.pt", weights_only=False)
    assert torch.equal(back.quantized.data.view(torch.uint8), before)
    wide = copy.deepcopy(model).float().layers[0].mlp.up.weight
    assert wide.dtype is torch.float32 and torch.equal(wide.quantized.data.view(torch.uint8), before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.isfinite(model(tokens)).all()
    with pytest.raises(NotImplementedError, match="held in FP8 cannot be changed"):
        weight.add_(1.0)
    merged = merge_lora(model)
    assert type(merged.layers[0].mlp.up) is nn.Linear


def _held(seed: int, by: str = "block", dora: bool = False) -> nn.Module:
    """A layer with an adapter whose weight is held in FP8, and another one."""
    torch.manual_seed(seed)
    model = lora(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)), rank=2, dora=dora)
    found = quantize_ref(model[0].weight.detach(), by, "e4m3")
    keep_frozen(model, {"0.weight": Quantized(found.data, found.scale_inv)})
    return model


def _undone(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    dequantize_model(copied)
    return copied


def test_state_dicts_of_frozen_weights(tmp_path: Path) -> None:
    """They could be saved and not loaded again, into the same model or into one of plain weights."""
    model, x = _held(0), torch.randn(3, 32)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")  # with weights_only
    other = _held(1)
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(state)
    assert torch.equal(other(x), model(x))
    plain = lora(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)), rank=2)
    plain.load_state_dict(state)
    assert torch.equal(plain[0].weight, model[0].weight.clone().float())
    torch.save(model, tmp_path / "model.pt")
    for again in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert isinstance(again[0].weight, nn.Parameter) and torch.equal(again(x), model(x))
    with pytest.raises(RuntimeError, match="scale_inv of a state dict's weight must have shape"):
        _held(1, "row").load_state_dict(state)


def test_a_frozen_weight_is_read_by_whatever_writes_elsewhere() -> None:
    """The norms of DoRA were refused, as if the weight were changed."""
    model, x = _held(0, dora=True), torch.randn(3, 32)
    plain = _undone(model)
    torch.testing.assert_close(model(x), plain(x), rtol=0.1, atol=0.1)
    model(x).sum().backward()
    assert model[0].lora_magnitude.grad.norm() > 0
    target = torch.empty(48, 32)
    assert torch.equal(target.copy_(model[0].weight), plain[0].weight)
    with pytest.raises(NotImplementedError, match="cannot be changed; dequantize_model makes it plain"):
        model[0].weight.copy_(target)
    with pytest.raises(ValueError, match=r"keep_frozen: stored must name parameters of the model, got \['2.weight'\]"):
        keep_frozen(plain, {"2.weight": model[0].weight.quantized})


def test_what_cannot_be_kept_is_said(tmp_path: Path) -> None:
    _folder(tmp_path / "deepseek", DEEPSEEK, *FORMATS["blocks"])
    model, _ = load_model(tmp_path / "deepseek", device="cpu", dtype=torch.bfloat16)
    why = {part.name: part.why for part in load_frozen(model.requires_grad_(False), tmp_path / "deepseek").left}
    assert "stack of experts" in why["layers.1.mlp.experts"]
    _folder(tmp_path / "small", LLAMA | {"head_dim": 64}, *FORMATS["blocks"])
    model, _ = load_model(tmp_path / "small", device="cpu", dtype=torch.bfloat16)
    left = load_frozen(model.requires_grad_(False), tmp_path / "small").left
    assert {part.why for part in left} == {"in our order of rows its blocks of 128 are parts of several"}
    _folder(tmp_path / "other", LLAMA, *FORMATS["other_blocks"])
    model, _ = load_model(tmp_path / "other", device="cpu", dtype=torch.bfloat16)
    report = load_frozen(model, tmp_path / "other")
    assert not report.quantized and "its blocks are [64, 32]" in report.left[0].why
    # trained weights are not changed
    layer = nn.Linear(16, 4)
    data = Quantized(torch.zeros(4, 16).to(torch.float8_e4m3fn), torch.ones(4))
    assert keep_frozen(nn.Sequential(layer), {"0.weight": data}).left[0].why == "its weight is trained"


def _changed(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(UP + "_scale_inv"), f"{UP} is FP8 and must have {UP}_scale_inv or {UP}_scale, got neither"),
        (lambda t: t.update({UP + "_scale": torch.ones(2, 2)}), f"{UP} is FP8 and must have .* got .*_inv and"),
        (lambda t: t.update({UP + "_scale_inv": torch.ones(2, 3)}),
         rf"{UP}_scale_inv must have \[2, 2\] scales \(of \[200, 160\]\), got \[2, 3\]"),
        (lambda t: t.update({UP: torch.zeros(200, 160)}), f"{UP} must be float8_e4m3fn beside {UP}_scale_inv, got"),
        (lambda t: t.update({UP: torch.zeros(200, 160).to(torch.float8_e5m2)}), f"{UP} must be float8_e4m3fn beside"),
        (lambda t: t.update({UP: torch.zeros(8).to(torch.float8_e4m3fn)}), rf"{UP} must be \[N, K\] in FP8, got \[8\]"),
    ],
    ids=["no_scale", "two_scales", "shape", "not_fp8", "e5m2", "one_dim"],
)  # fmt: skip
def test_bad_tensors_are_named(change: Any, said: str, tmp_path: Path) -> None:
    _folder(tmp_path / "fp8", LLAMA, *FORMATS["blocks"])
    _changed(tmp_path / "fp8", change)
    with pytest.raises(ValueError, match=said):
        load_model(tmp_path / "fp8", device="cpu")


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"quant_method": "awq"}, r"quant_method must be fp8 or compressed-tensors .*, got 'awq'"),
        (BLOCKS | {"weight_block_size": [128]}, r"weight_block_size must be two sizes above 0, got \[128\]"),
        ("fp8", "quantization_config must be an object, got str"),
        (_compressed("channel", num_bits=4), "weights.num_bits must be 8, got 4"),
        (_compressed("channel", type="int"), "weights.type must be 'float', got 'int'"),
        (_compressed("group"), "weights.strategy must be tensor, channel or block, got 'group'"),
        ({"quant_method": "compressed-tensors"}, "config_groups must have a group, got None"),
    ],
    ids=["method", "block", "kind", "bits", "type", "strategy", "groups"],
)
def test_other_formats_are_refused_by_key(stored: Any, said: str, tmp_path: Path) -> None:
    _folder(tmp_path / "fp8", LLAMA, *FORMATS["blocks"])
    values = json.loads((tmp_path / "fp8" / "config.json").read_text())
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(values | {"quantization_config": stored}))
    with pytest.raises(
        ValueError, match=rf"config\.json: quantization_config.*{said.removeprefix('quantization_config')}"
    ):
        open_weights(tmp_path / "fp8")
