"""Data-parallel training with PyTorch over MPI, which torch's wheels do not support: framework mpi, two processes."""

import json

import torch
from mpi4py import MPI

import falaj as fj

rank, world = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
torch.manual_seed(rank)  # different rows in each rank
rows = torch.randn(256, 4)
target = rows @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])
model = torch.nn.Linear(4, 1, bias=False)
MPI.COMM_WORLD.Bcast(model.weight.detach().numpy(), root=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

losses = []
for step in range(60):
    loss = torch.nn.functional.mse_loss(model(rows), target)
    optimizer.zero_grad()
    loss.backward()
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, model.weight.grad.numpy(), op=MPI.SUM)
    model.weight.grad /= world
    optimizer.step()
    losses.append(loss.item())
    if rank == 0:
        fj.job.log(step=step, loss=losses[-1])

learned = {"world": world, "losses": losses, "weights": model.weight.flatten().tolist()}
(fj.job.outputs / f"rank-{rank}.json").write_text(json.dumps(learned))
