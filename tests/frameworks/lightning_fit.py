"""Lightning: sanity validation, validation within and after each epoch, accumulation of 2."""

import json
import tempfile
import warnings
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return (self.layer(x) - y).pow(2).mean()

    def training_step(self, batch: Any, index: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, index: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def loader(num: int) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(num, 4), torch.randn(num, 1)), batch_size=2)

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=3,
            accumulate_grad_batches=2,
            val_check_interval=0.5,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Net(), loader(40), loader(6))
    print(json.dumps({"updates": trainer.global_step, "batches": 2 * trainer.global_step}))


if __name__ == "__main__":
    main()
