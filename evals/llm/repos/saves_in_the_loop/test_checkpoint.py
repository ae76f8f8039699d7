import torch
from torch import nn

from checkpoint import load_checkpoint, save_checkpoint


def test_what_was_saved_can_be_loaded(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint(tmp_path, 7, model, optimizer)
    other = nn.Linear(2, 2)
    assert load_checkpoint(tmp_path / "step-000007.pt", other, torch.optim.AdamW(other.parameters())) == 7
    assert (other.weight == model.weight).all()
