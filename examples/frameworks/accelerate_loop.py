"""An unchanged Accelerate script under torchrun: framework torch."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

import falaj as fj

accelerator = Accelerator(cpu=True)
set_seed(0)
rows = torch.randn(512, 4)
data = torch.utils.data.TensorDataset(rows, rows @ torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
model = torch.nn.Linear(4, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses = []
for _ in range(20):
    for inputs, target in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), target)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())

weights = accelerator.unwrap_model(model).weight.flatten().tolist()
learned = {"world": accelerator.num_processes, "losses": losses, "weights": weights}
(fj.job.outputs / f"rank-{accelerator.process_index}.json").write_text(json.dumps(learned))
accelerator.end_training()
