"""The Trainer of transformers on a tiny GPT-2 of random weights: accumulation of 2, evaluation and saves on the way."""

import json
import os
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, num: int) -> None:
        self.tokens = torch.randint(0, 64, (num, 8))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=3,
            eval_strategy="steps",
            eval_steps=5,
            save_strategy="steps",
            save_steps=6,
            save_total_limit=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_num_workers=1,
        )
        trainer = Trainer(net, arguments, train_dataset=Tokens(32), eval_dataset=Tokens(12))
        trainer.train()
    updates = trainer.state.global_step
    print(json.dumps({"updates": updates, "batches": 2 * updates}))


if __name__ == "__main__":
    main()
