"""Elastic training with PyTorch, restarted with fewer processes when one is lost: framework torch, processes_min."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import falaj as fj

SAVED = Path("saved.pt")
steps = int(sys.argv[1])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
rows = torch.randn(256, 4)
target = rows @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])
model = torch.nn.Linear(4, 1, bias=False)
state = torch.load(SAVED, weights_only=True) if SAVED.exists() else {"step": 0, "model": model.state_dict()}
model.load_state_dict(state["model"])
print(f"rank {rank} of {world} begins at step {state['step']}", flush=True)
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for step in range(state["step"], steps):
    loss = torch.nn.functional.mse_loss(parallel(rows), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 50 == 0:
        torch.save({"step": step + 1, "model": model.state_dict()}, "saving.pt")
        os.replace("saving.pt", SAVED)

learned = {
    "world": world,
    "began": state["step"],
    "loss": loss.item(),
    "weights": model.weight.flatten().tolist(),
}
(fj.job.outputs / f"rank-{rank}.json").write_text(json.dumps(learned))
dist.destroy_process_group()
