import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@dataclass
class TrainingArguments:
    max_steps: int = 100
    per_device_batch_size: int = 16
    gradient_accumulation_steps: int = 6
    learning_rate: float = 1e-3
    logging_steps: int = 25


class Trainer:
    """A small copy of the trainer that everybody knows."""

    def __init__(self, model, args, dataset):
        self.args = args
        self.dataset = dataset
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate)
        self.global_step = 0

    def compute_loss(self, batch):
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(self.model(inputs), labels)

    def training_step(self, batch):
        loss = self.compute_loss(batch)
        loss = loss / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()

    def train(self):
        self.model.train()
        batches = iter(self.dataset)
        while self.global_step < self.args.max_steps:
            total = torch.zeros(())
            for micro_step in range(self.args.gradient_accumulation_steps):
                total += self.training_step(next(batches))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_step += 1
            if self.global_step % self.args.logging_steps == 0 and dist.get_rank() == 0:
                print({"step": self.global_step, "loss": round(total.item(), 4)}, flush=True)
