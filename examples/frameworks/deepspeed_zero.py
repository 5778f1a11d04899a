"""An unchanged DeepSpeed script under torchrun, with ZeRO stage 1: framework torch."""

import json

import deepspeed
import torch

import falaj as fj

deepspeed.init_distributed("gloo")
rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
torch.manual_seed(rank)  # different rows in each rank
rows = torch.randn(256, 4)
target = rows @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])
layer = torch.nn.Linear(4, 1, bias=False)
settings = {"train_micro_batch_size_per_gpu": len(rows), "zero_optimization": {"stage": 1}}
optimizer = torch.optim.Adam(layer.parameters(), lr=0.2)
model, _, _, _ = deepspeed.initialize(model=layer, optimizer=optimizer, config=settings)

losses = []
for _ in range(120):
    loss = torch.nn.functional.mse_loss(model(rows), target)
    model.backward(loss)
    model.step()
    losses.append(loss.item())

learned = {"world": world, "losses": losses, "weights": layer.weight.flatten().tolist()}
(fj.job.outputs / f"rank-{rank}.json").write_text(json.dumps(learned))
