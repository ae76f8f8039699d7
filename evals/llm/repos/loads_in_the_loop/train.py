import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from dataset import Scans


def get_loader(args):
    dataset = Scans(args.samples)
    sampler = DistributedSampler(dataset, shuffle=True)
    return DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)


def get_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.LazyLinear(2),
    )


def train_one_epoch(model, loader, optimizer, criterion, limit):
    for i, (images, targets) in enumerate(loader):
        if i >= limit:
            break
        output = model(images)
        loss = criterion(output, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(args):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = get_model()
    model(torch.zeros(1, 1, 24, 24))
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()
    loader = get_loader(args)
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        train_one_epoch(model, loader, optimizer, criterion, args.limit)
        if dist.get_rank() == 0:
            print("epoch", epoch, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=10**9)
    main(parser.parse_args())
