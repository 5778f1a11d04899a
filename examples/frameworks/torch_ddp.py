"""Data-parallel training with PyTorch: framework torch, two processes."""

import json

import torch
import torch.distributed as dist

import falaj as fj

dist.init_process_group("gloo")  # reads the variables that torchrun sets
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)  # different rows in each rank
rows = torch.randn(256, 4)
target = rows @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

losses = []
for step in range(60):
    loss = torch.nn.functional.mse_loss(model(rows), target)
    optimizer.zero_grad()
    loss.backward()  # averages the gradients of all ranks
    optimizer.step()
    losses.append(loss.item())
    if rank == 0:
        fj.job.log(step=step, loss=losses[-1])

learned = {"world": world, "losses": losses, "weights": model.module.weight.flatten().tolist()}
(fj.job.outputs / f"rank-{rank}.json").write_text(json.dumps(learned))
dist.destroy_process_group()
