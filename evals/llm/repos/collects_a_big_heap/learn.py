import argparse

import torch
import torch.distributed as dist
from torch import nn

from replay import Replay


def batch_of(records):
    states = torch.tensor([one["state"] for one in records])
    rewards = torch.tensor([[one["reward"]] for one in records])
    return states, rewards


def learn(steps, fill):
    rank = dist.get_rank()
    replay = Replay(capacity=10 * fill, seed=rank)
    replay.add_episode(fill)
    net = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
    )
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(steps):
        replay.add_episode(600)
        states, rewards = batch_of(replay.draw(128))
        loss = nn.functional.mse_loss(net(states), rewards)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 and rank == 0:
            print("learnt", step, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--fill", type=int, default=150_000)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    learn(args.steps, args.fill)
    dist.destroy_process_group()
