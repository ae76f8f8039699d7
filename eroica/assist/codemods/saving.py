"""Write checkpoints behind the training instead of in it.

`torch.save(state, path)` in a training loop, or a function of the repository that only writes what it is given, works
on a copy of the state in a thread; the next save waits for the one before, so that files appear in order, and behind
the loop the last one is waited for, so that its errors are still raised. It applies where the state can be copied
(dictionaries of state_dict() and plain values, or what a function asks for its state_dict() and for nothing else) and
nobody looks at the file right away: no rename, upload, load or barrier follows in the same block.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from eroica.assist.change import Change, Lead, Refusal
from eroica.assist.codemods.reports import function_named, is_reporter
from eroica.assist.codemods.training import spots, training_loops
from eroica.assist.reading import Code, Loop, Sources, bindings, called, has_stars, here, names
from eroica.assist.rewriting import Rewrite, UnfitError

_HELPER = '''_writer = concurrent.futures.ThreadPoolExecutor(max_workers=1)
_saves: list[concurrent.futures.Future] = []


def _finish_saves():
    """Wait for what is being written, and raise what went wrong."""
    while _saves:
        _saves.pop(0).result()


def _save_behind(write, *given):
    """Have copies of what is given written while training goes on; what cannot be copied is written at once."""
    _finish_saves()
    try:
        given = copy.deepcopy(given)
    except Exception:
        write(*given)
    else:
        _saves.append(_writer.submit(write, *given))
'''
_TAKEN = '''

class _Taken:
    """The state of something at this moment, for who asks it for nothing else."""

    def __init__(self, of):
        self._state = copy.deepcopy(of.state_dict())

    def __deepcopy__(self, memo):
        return self

    def state_dict(self):
        return self._state
'''
_HARMLESS = frozenset(
    {"print", "info", "debug", "log", "makedirs", "mkdir", "state_dict", "join", "format", "str", "flush"}
)


def propose(sources: Sources, lead: Lead) -> Change | Refusal:
    """Hand the save of a training loop to a thread."""
    found: dict[int, tuple[Code, ast.Call, Loop]] = {}
    for spot in (spot for group in spots(sources, lead) for spot in group):
        calls = [n for n in here(spot.statement) if isinstance(n, ast.Call)]
        # A function that writes is handed over as a whole; else the save in what the finding names, in the same file.
        writers = [n for n in calls if _is_writer(sources, spot.code, n)]
        near = [*here(spot.statement), *(n for one in spot.named for n in here(one) if spot.inner is spot.code)]
        for call in writers or _saves(spot.code, near):
            found[id(call)] = (spot.code, call, spot.loop)
    if not found and lead.cause == "checkpoint_io":
        # What the ranks' own records tell names no line. Of another cause without one, no save is to blame.
        for code, loop in training_loops(sources):
            nodes = list(here(loop.body))
            calls = [n for n in nodes if isinstance(n, ast.Call) and _is_writer(sources, code, n)]
            for call in (*_saves(code, nodes), *calls):
                found[id(call)] = (code, call, loop)
    if len(found) != 1:
        where = ", ".join(f"{code.path}:{call.lineno}" for code, call, _ in found.values())
        return Refusal(f"{len(found)} places save in training loops ({where})" if found else
                       "no torch.save stands in a training loop of the repository")  # fmt: skip
    code, call, loop = next(iter(found.values()))
    try:
        return _behind(sources, code, call, loop)
    except UnfitError as error:
        return Refusal(str(error))


def _saves(code: Code, nodes: list[ast.AST]) -> list[ast.Call]:
    return [n for n in nodes if isinstance(n, ast.Call) and code.dotted(n.func) == "torch.save"]


_WRITES = ("torch.save", "os.replace", "os.rename", "os.makedirs", "shutil.move")


def _is_writer(sources: Sources, code: Code, call: ast.Call) -> bool:
    """A function of the repository that saves what it is given, and does nothing else. What it asks for a state itself,
    without being given it, has gone on by the time it is written."""
    found = function_named(sources, code, called(call)) if isinstance(call.func, ast.Name) else None
    if found is None:
        return False
    where, function = found
    is_given = all(bindings(function, name) for asked, _ in _states(function) for name in names(asked))
    return (
        is_given
        and bool(_saves(where, list(here(function.body))))
        and is_reporter(sources, code, function.name, also=_WRITES)
    )


def _states(function: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.Call]]:
    """What a function asks for its state_dict(), and how."""
    for node in here(function.body):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "state_dict":
            yield node.func.value, node


def _asked_for_states(sources: Sources, code: Code, call: ast.Call) -> list[ast.expr]:
    """What is given to a function of the repository that asks it for its state_dict() and for nothing else."""
    found = function_named(sources, code, called(call)) if isinstance(call.func, ast.Name) else None
    if found is None:
        return []
    function = found[1]
    states = [asked for asked, call in _states(function) if not call.args and not call.keywords]
    parameters = [*function.args.posonlyargs, *function.args.args]
    # Also in lambdas, which `here` leaves out.
    used = [n for one in function.body for n in ast.walk(one) if isinstance(n, ast.Name)]
    asked = []
    for given, parameter in zip(call.args, parameters, strict=False):
        uses = [n for n in used if n.id == parameter.arg]
        if uses and all(any(use is state for state in states) for use in uses):
            asked.append(given)
    return asked


def _behind(sources: Sources, code: Code, call: ast.Call, loop: Loop) -> Change | Refusal:
    where = f"{code.path}:{call.lineno}"
    statement = code.statement(call)
    if not isinstance(statement, ast.Expr) or statement.value is not call:
        return Refusal(f"{where} is no statement of its own")
    if not call.args or call.keywords or has_stars(call):
        return Refusal(f"{where} is given more than a state and a path")
    asked = _asked_for_states(sources, code, call)
    states = [one for one in call.args if one in asked or _is_copied(code, one)]
    if not states or not all(one in states or _is_value(one) for one in call.args):
        return Refusal(f"what {where} saves cannot be told to be a copy of states")
    if any(isinstance(made := code.value(one), ast.Call) and called(made) == "BytesIO" for one in call.args):
        return Refusal(f"{where} saves into memory, and a copy of that would be written")
    if code.function(call) is None:
        return Refusal(f"the loop at {code.path}:{loop.lineno} is in no function")
    block = code.block(statement)
    for one in block[block.index(statement) + 1 :]:
        for node in here(one):
            if isinstance(node, ast.Call) and called(node) not in _HARMLESS:
                return Refusal(f"line {node.lineno} comes right behind the save, and may need the file")
    if any(isinstance(node, ast.Return) for node in here(loop.body)):
        return Refusal(f"the loop in line {loop.lineno} may return while a file is being written")
    if any(name in code.text for name in ("_save_behind", "_finish_saves", "async_save")):
        return Refusal(f"{code.path} saves behind the training already")
    taken = next((name for name in ("_writer", "_saves", "_Taken") if bindings(code.tree, name)), "")
    if taken:
        return Refusal(f"{code.path} has a {taken} of its own")
    outermost = (code.loops(loop) or [loop])[-1]
    for node in here(outermost.body):
        if isinstance(node, ast.Call) and code.dotted(node.func) in (
            "torch.load",
            "os.replace",
            "os.rename",
            "shutil.move",
        ):
            return Refusal(f"line {node.lineno} handles saved files in the loop")
    first = next(
        (one for one in code.tree.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))), None
    )
    if first is None or first.decorator_list:
        return Refusal(f"{code.path} has no place for a function of its own")
    rewrite = Rewrite(code)
    given = ", ".join(f"_Taken({code.source(one)})" if one in asked else code.source(one) for one in call.args)
    rewrite.replace(call, f"_save_behind({code.source(call.func)}, {given})")
    rewrite.after(outermost, "_finish_saves()\n")
    rewrite.before(first, _HELPER + (_TAKEN if asked else ""))
    for module in ("copy", "concurrent.futures"):
        rewrite.need_import(module)
    return Change(
        code.path,
        rewrite.text(),
        "Write checkpoints behind the training",
        (
            f"{where} writes in the training loop while all ranks wait for it",
            "what is saved are states that can be copied, and nothing in the block needs the file",
            "saves stay in order; the last one is waited for behind the loop, and errors are raised there or at the "
            "next save",
        ),
        ("a copy of the state is kept in memory while it is written",),
    )


def _is_copied(code: Code, state: ast.expr) -> bool:
    """A dictionary of states and plain values, or the state of one thing."""
    state = code.value(state)
    if isinstance(state, ast.Call):
        return isinstance(state.func, ast.Attribute) and state.func.attr in ("state_dict", "item")
    if isinstance(state, ast.Dict):
        return all(key is not None and (_is_copied(code, v) or isinstance(v, (ast.Constant, ast.Name))) for key, v in
                   zip(state.keys, state.values, strict=True))  # fmt: skip
    return False


def _is_value(node: ast.expr) -> bool:
    """A path or a number: names, texts and what is put together of them."""
    plain = (ast.Name, ast.Constant, ast.JoinedStr, ast.FormattedValue, ast.BinOp, ast.Attribute)
    return all(
        isinstance(one, (*plain, ast.operator, ast.expr_context))
        or (isinstance(one, ast.Call) and called(one) in ("join", "str", "format", "Path"))
        for one in ast.walk(node)
    )
