"""accelerate: two batches for one update, a scheduler, and an evaluation in the middle and at the end of each epoch."""

import json
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net: Any = torch.nn.Linear(4, 1)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer)
    training: Any = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=2, shuffle=True)
    validation: Any = DataLoader(TensorDataset(torch.randn(14, 4), torch.randn(14, 1)), batch_size=2)
    net, optimizer, training, validation, schedule = accelerator.prepare(net, optimizer, training, validation, schedule)

    def loss(batch: Any) -> Any:
        x, y = batch
        return (net(x) - y).pow(2).mean()

    def evaluate() -> None:
        with torch.no_grad():
            for batch in validation:
                accelerator.gather_for_metrics(loss(batch))

    updates = 0
    for _ in range(4):
        for index, batch in enumerate(training):
            with accelerator.accumulate(net):
                accelerator.backward(loss(batch))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                updates += accelerator.sync_gradients
            if index == 13:  # before the last update of the epoch, whose batch the loader has fetched by then
                evaluate()
        evaluate()
    print(json.dumps({"updates": updates, "batches": 2 * updates}))


if __name__ == "__main__":
    main()
