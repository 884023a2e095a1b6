"""A Hugging Face Llama over the GPUs of one host, its linear layers as DTensors; the same losses as on one process.

`torchrun --nproc-per-node 2 examples/tensor_parallel.py`; on a CPU over gloo.
"""

import argparse
import copy

import torch
import torch.distributed as dist
from text import rows
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

import powertrain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(dist.get_rank())
mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tensor",))

torch.manual_seed(0)  # the same weights on every rank
config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256,
)  # fmt: skip
whole = AutoModelForCausalLM.from_config(config).to(device)
sharded = copy.deepcopy(whole)
powertrain.parallelize_linears(sharded, mesh["tensor"])  # q, k, v, gate, up by columns; o, down by rows
optimizers = [torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=False) for model in (whole, sharded)]

losses = []
for tokens in rows(4 * options.steps).to(device).split(4):  # every rank reads the same
    pair = []
    for model, optimizer in zip((whole, sharded), optimizers, strict=True):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pair.append(loss.item())
    losses.append(pair)
difference = max(abs(one - other) for one, other in losses)
shard = sharded.model.layers[0].mlp.gate_proj.weight
if dist.get_rank() == 0:
    print(f"gate_proj {tuple(shard.shape)}, here {tuple(shard.to_local().shape)}")
    print(f"loss {losses[0][1]:.3f} to {losses[-1][1]:.3f}; largest difference from one process {difference:.1e}")
assert difference < 1e-2, losses
dist.destroy_process_group()
