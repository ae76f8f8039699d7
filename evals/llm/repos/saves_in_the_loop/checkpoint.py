from pathlib import Path

import torch


def save_checkpoint(folder, step, model, optimizer):
    path = Path(folder) / f"step-{step:06d}.pt"
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def load_checkpoint(path, model, optimizer):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]
