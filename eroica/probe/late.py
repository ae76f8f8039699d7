"""Late binding: puts the hooks in place when torch is there, whoever imports first.

A finder at the head of `sys.meta_path` finds nothing itself. For the few modules that have hooks it lets the others
find, and wraps the loader so as to hear when the module has run. Until torch is imported this is all there is of the
probe, so this module may import nothing that is not loaded in any interpreter.

Never armed: launchers, our own programs, test runners (a training process that they start is armed all the same), and
whatever runs under EROICA=0. Whether a process has a rank is asked later, at its first step.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # `typing` would be most of the cost of `import eroica`
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PROGRAMS = frozenset(("eroica", "eroica-mcp", "torchrun", "accelerate", "deepspeed", "pytest", "py.test"))
"""Names of programs that start or test training, and do not train."""
MODULES = frozenset(
    (
        *("eroica", "mcp_server", "torch.distributed.run", "torch.distributed.launch", "pytest", "unittest"),
        *("accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
    )
)
"""The same, started as `python -m NAME`."""

HOOKED = {
    "torch": "",
    "torch.utils.data.dataloader": "loader",
    "torch.optim.optimizer": "optimizer",
    "torch.amp.grad_scaler": "scaler",
    "torch.distributed.distributed_c10d": "collectives",
    "torch.autograd.profiler": "profiler",
    "torch.profiler.profiler": "traces",
    "torch.autograd.anomaly_mode": "anomaly",
    "torch._dynamo.trace_rules": "dynamo",
    "torch.serialization": "serialization",
    "torch.distributed.checkpoint.state_dict_saver": "saver",
    "torch.distributed.checkpoint.state_dict_loader": "restorer",
    "torch._dynamo.callback": "compiler",
    "torch.nn.parallel.distributed": "data parallel",
    "torch.distributed._composable.fsdp.fully_shard": "fully shard",  # up to torch 2.5; later ones only name it there
    "torch.distributed.fsdp._fully_shard._fully_shard": "fully shard",
}
"""Modules and the function of `hooks` that is called once each has run. `torch` imports most of the others itself,
unfinished as it is then, so theirs wait for it."""


def watch() -> bool:
    """Arm this process, late-bound; True if it is one to arm. Twice is once."""
    if os.environ.get("EROICA") == "0" or _is_tool() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return False
    sys.meta_path.insert(0, _Finder())
    _loaded("torch")
    return True


def _is_tool() -> bool:
    arguments = sys.orig_argv
    module = arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] and sys.argv[:1] == ["-m"] else ""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = module or getattr(main, "name", "").removesuffix(".__main__")
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    return program in PROGRAMS or module in MODULES or "pytest" in sys.modules


def _loaded(name: str) -> None:
    """`name` has run: place its hooks, and those of all that waited for torch to be complete."""
    torch = sys.modules.get("torch")
    if torch is None or (getattr(torch.__spec__, "_initializing", False) and name != "torch"):
        return
    from eroica.probe import hooks

    for module, function in HOOKED.items():
        if function and module in sys.modules and (name in (module, "torch")):
            hooks.place(function, sys.modules[module])


class _Finder:
    """Hears of the import of the modules in `HOOKED`, and finds nothing."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in HOOKED:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec: ModuleSpec | None = finder.find_spec(name, path, target)  # type: ignore[arg-type]
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = _Loader(spec.loader, _loaded)  # type: ignore[assignment]
                    return spec
        return None


class _Loader:
    """Runs a module as its own loader would, then calls `then(name)`; leaves no trace in the module."""

    def __init__(self, loader: object, then: Callable[[str], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create = getattr(self._loader, "create_module", None)
        module: ModuleType | None = create(spec) if create else None
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # type: ignore[assignment]
        module.__loader__ = self._loader  # type: ignore[assignment]
        self._loader.exec_module(module)  # type: ignore[attr-defined]
        # An error of ours must not become an ImportError of theirs; `place` guards itself, this guards its import.
        try:
            self._then(module.__name__)
        except Exception:
            sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
