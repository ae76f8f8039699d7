import torch

from model import build_model


def test_model_gives_one_value_per_sample():
    assert build_model(depth=2)(torch.zeros(3, 64)).shape == (3, 1)
