"""The smallest training there is, for `eroica doctor`: steps and a collective; prints what this torch can, as JSON.

A plain script: doctor runs it armed, in the Python of the job, and looks whether the probe saw what it did.
"""

from __future__ import annotations

import importlib.util
import json
import sys

NUM_STEPS = 3


def main() -> None:
    """Print one line of JSON."""
    # A path finder that still sees what `eroica run` puts before it would find itself.
    found = importlib.util.find_spec("sitecustomize") if "sitecustomize" in sys.modules else None
    said: dict[str, object] = {
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "sitecustomize": found.origin if found is not None else "",
    }
    try:
        import torch
    except Exception as error:
        said["torch_error"] = f"{type(error).__name__}: {error}"[:300]
        sys.stdout.write(json.dumps(said) + "\n")
        return
    said["torch"] = torch.__version__
    said["kineto"] = torch.profiler.kineto_available()
    activities: set[object] = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    said["activities"] = sorted(str(activity).split(".")[-1] for activity in activities)
    said["num_gpus"] = torch.cuda.device_count()
    train(torch)
    said["num_steps"] = NUM_STEPS
    for name, attempt in (("collective_error", collective), ("profiler_error", profile)):
        try:
            attempt(torch)
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"[:300]
    sys.stdout.write(json.dumps(said) + "\n")


def train(torch) -> None:  # type: ignore[no-untyped-def]
    """Some steps on one thread."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(NUM_STEPS):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def collective(torch) -> None:  # type: ignore[no-untyped-def]
    """One, in a group of one."""
    distributed = torch.distributed
    if not distributed.is_available():
        raise RuntimeError("this torch was built without torch.distributed")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    distributed.all_reduce(torch.ones(1))
    distributed.destroy_process_group()


def profile(torch) -> None:  # type: ignore[no-untyped-def]
    """A window of one operation."""
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiler:
        torch.ones(2).add_(1)
    if not any("add" in event.name for event in profiler.events()):
        raise RuntimeError("a window of torch.profiler holds no operation")


if __name__ == "__main__":
    main()
