"""What every Python of a job runs first: arm the process once it imports torch, then do as if we were not there.

Python imports one `sitecustomize`, the first on sys.path. Ours takes its folder off sys.path again and imports the next
one, the user's or the system's, exactly as Python would have; if there is none, the same silent ImportError leaves no
module behind. PYTHONPATH keeps the folder, for the processes that this one starts.

A process that never imports torch pays for this file alone. When torch comes, the package that this file belongs to is
loaded by its place: no folder of ours is ever on sys.path beside it, so nothing of the user's can be hidden, and the
job's own environment need not have eroica. Programs that only start training are told apart by `eroica.probe.late`.

Any Python may run this, so it must compile under all of them (2.7, too: hence the comments for types); only those that
eroica supports are armed. EROICA=0 turns it off. Not reached: `python -I`, `-E`, `-S`, and whoever clears PYTHONPATH.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec  # noqa: F401  # in the comments for types

_FOLDER = os.path.dirname(os.path.abspath(__file__))


class _UntilTorch(object):  # noqa: UP004
    """A finder that finds nothing: it waits for torch, arms the process and is gone."""

    def __init__(self, package, options):
        # type: (str, dict[str, str]) -> None
        self._package = package
        self._options = options

    def find_spec(self, name, path=None, target=None):
        # type: (str, object, object) -> ModuleSpec | None
        """For sys.meta_path."""
        if name != "torch":
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        self.arm()
        # We are one step of a walk over sys.meta_path, and who was put at its head now would be passed over.
        for finder in list(sys.meta_path):
            if hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)  # type: ignore[arg-type]
                if spec is not None:
                    return spec
        return None

    def arm(self):
        # type: () -> None
        """Import eroica, which arms this process if it is one to arm. Raises nothing: the import is the user's."""
        try:
            if "eroica" not in sys.modules:
                import importlib.machinery
                import importlib.util

                found = importlib.machinery.PathFinder.find_spec("eroica")
                other = found is not None and list(found.submodule_search_locations or [])
                if found is not None and not (other and os.path.isfile(os.path.join(other[0], "probe", "late.py"))):
                    return  # a module of the user's that has our name; theirs comes first
                spec = importlib.util.spec_from_file_location(
                    "eroica",
                    os.path.join(self._package, "__init__.py"),
                    submodule_search_locations=[self._package],
                )
                if spec is None or spec.loader is None:
                    return
                module = sys.modules["eroica"] = importlib.util.module_from_spec(spec)
                try:
                    spec.loader.exec_module(module)
                except BaseException:
                    del sys.modules["eroica"]
                    raise
            from eroica.probe import place

            # Scripts may clear the environment before their first step; what they were started with holds.
            place.started_with(self._options)
        except Exception:
            return


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
if sys.version_info >= (3, 11) and os.environ.get("EROICA") != "0":
    _waits = _UntilTorch(
        os.path.dirname(_FOLDER),
        {name: value for name, value in os.environ.items() if name.startswith("EROICA_")},
    )
    if "torch" in sys.modules:  # a .pth file has imported it
        _waits.arm()
    else:
        sys.meta_path.insert(0, _waits)

# As if this file had not been found. Without another one the ImportError is what Python expects then.
del sys.modules["sitecustomize"]
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
