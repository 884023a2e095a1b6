"""Our kernels in plain PyTorch: a decoder layer of functions on tensors, its loss without logits in memory."""

import argparse

import torch
from text import rows
from torch import Tensor, nn

import powertrain as pt

DIM, HEADS, HIDDEN = 64, 4, 192


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.ones(DIM))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.gate_up, self.down = nn.Linear(DIM, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        y, residual = pt.rms_norm(x, self.norm_1, residual=residual)  # the sum and its norm in one kernel
        query, key, value = self.qkv(y).unflatten(-1, (3 * HEADS, DIM // HEADS)).chunk(3, -2)
        x = self.out(pt.attention(query, key, value, is_causal=True).flatten(-2))
        y, residual = pt.rms_norm(x, self.norm_2, residual=residual)
        return self.down(pt.swiglu(self.gate_up(y))), residual


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
embedding = nn.Embedding(256, DIM, device=device)
nn.init.normal_(embedding.weight, std=0.1)
layers = nn.ModuleList([Layer() for _ in range(2)]).to(device)
optimizer = pt.AdamW([*embedding.parameters(), *layers.parameters()], lr=2e-3)
losses = []
for tokens in rows(4 * options.steps).to(device).split(4):
    x = embedding(tokens[:, :-1])
    residual = torch.zeros_like(x)
    for layer in layers:
        x, residual = layer(x, residual)
    loss = pt.linear_cross_entropy((x + residual).flatten(0, 1), embedding.weight, tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step(max_norm=1.0)
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} over {len(losses)} steps")
