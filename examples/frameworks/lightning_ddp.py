"""An unchanged Lightning script under torchrun, with explicit devices and strategy for a CPU: framework torch."""

import json

import lightning
import torch

import falaj as fj


class Slope(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1, bias=False)
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(0)
rows = torch.randn(512, 4)
data = torch.utils.data.TensorDataset(rows, rows @ torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
model = Slope()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=10, **quiet)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=64))

learned = {
    "world": trainer.world_size,
    "losses": model.losses,
    "weights": model.layer.weight.flatten().tolist(),
}
(fj.job.outputs / f"rank-{trainer.global_rank}.json").write_text(json.dumps(learned))
