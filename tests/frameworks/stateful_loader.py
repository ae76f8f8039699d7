"""torchdata's StatefulDataLoader with NUM workers, stopped in the middle of an epoch and resumed: `... NUM`."""

import json
import sys
from typing import Any

import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader


def main(num_workers: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(net.parameters())
    data: Any = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    updates, state = 0, None
    for most in (5, 12, 12):
        loader = StatefulDataLoader(data, batch_size=2, num_workers=num_workers)
        if state:
            loader.load_state_dict(state)
        state = None
        for x, y in loader:
            optimizer.zero_grad()
            (net(x) - y).pow(2).mean().backward()
            optimizer.step()
            updates += 1
            most -= 1
            if not most:
                state = loader.state_dict()
                break
    print(json.dumps({"updates": updates, "batches": updates}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
