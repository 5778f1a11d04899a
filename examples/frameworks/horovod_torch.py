"""Data-parallel training with Horovod: framework horovod, two processes, over Gloo."""

import json

import horovod.torch as hvd
import torch

import falaj as fj

hvd.init()
rank, world = hvd.rank(), hvd.size()
torch.manual_seed(rank)  # different rows in each rank
rows = torch.randn(256, 4)
target = rows @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])
model = torch.nn.Linear(4, 1, bias=False)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

losses = []
for step in range(60):
    loss = torch.nn.functional.mse_loss(model(rows), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # with the gradients of all ranks, averaged
    losses.append(loss.item())
    if rank == 0:
        fj.job.log(step=step, loss=losses[-1])

learned = {"world": world, "losses": losses, "weights": model.weight.flatten().tolist()}
(fj.job.outputs / f"rank-{rank}.json").write_text(json.dumps(learned))
hvd.shutdown()
