import torch

from main import Net


def test_net():
    assert Net(8)(torch.zeros(2, 512)).shape == (2, 10)
