import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

from callbacks import PrintWeights


class Fitter:
    def __init__(self, model, callbacks):
        self.model = nn.parallel.DistributedDataParallel(model)
        self.callbacks = callbacks
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def fit(self, steps):
        for step in range(steps):
            x = torch.randn(48, 96)
            loss = (self.model(x) - x).abs().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            for callback in self.callbacks:
                callback.on_step_end(step, self.model.module, loss)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 96))
    Fitter(model, [PrintWeights(open(os.devnull, "w"))]).fit(args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
