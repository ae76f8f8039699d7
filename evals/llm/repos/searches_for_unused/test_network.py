import torch

from network import Network


def test_every_parameter_gets_a_gradient():
    net = Network(width=8, depth=2)
    net(torch.randn(4, 32)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
