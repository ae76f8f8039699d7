"""Let loaders work ahead: worker processes, workers that live on over epochs, pinned memory.

Workers are given to a loader that makes its batches in the training process, where its data set can be read in several
processes at once: of the indexed kind (an iterable one would give each sample once per worker), a class of this
repository whose code reads and does not write, opens no file or connection that forked processes would share, and uses
no device. `persistent_workers` where a loop over epochs starts them anew and nothing changes the data set meanwhile:
living workers would not see it. `pin_memory` where a batch is copied to a CUDA device from a loader that does not pin.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass

from eroica.assist.change import Change, Lead, Refusal
from eroica.assist.codemods.training import callers, trains
from eroica.assist.reading import (
    Code,
    Function,
    Loop,
    Sources,
    argument,
    called,
    constant,
    has_stars,
    here,
)
from eroica.assist.rewriting import Rewrite

MOST_WORKERS = 8
FEW_WORKERS = 2
"""Less would leave one batch in the making, with no time for one that takes longer."""
_SHARED = ("open", "connect", "File", "TarFile", "ZipFile", "mmap", "lmdb", "Lock", "Session", "Client", "socket")
"""What makes an object that forked processes must not share: a position in a file, a connection, a lock."""
_DRAWS = ("Random", "SystemRandom", "default_rng", "RandomState", "Generator", "iter", "count", "cycle")
"""What makes an object that goes on from call to call: each worker would have a copy that begins at the same point."""
_CHANGES = frozenset(
    {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear", "remove", "discard",
     "sort", "reverse", "write", "seek", "put", "send", "recv", "acquire", "appendleft"}
)  # fmt: skip
_WRAPPERS = ("Subset", "ConcatDataset")


@dataclass(frozen=True, slots=True)
class _Loader:
    code: Code
    call: ast.Call
    name: str
    """ "loader" or "self.loader"."""
    loop: Loop
    """The training loop that goes through it."""
    loop_code: Code
    has_epochs: bool
    """The loop is run again and again, by a loop around it."""


def workers(sources: Sources, lead: Lead) -> Change | Refusal:
    """Let worker processes make the batches."""
    found = _loader(sources, lead)
    if isinstance(found, Refusal):
        return found
    code, call = found.code, found.call
    where = f"{code.path}:{call.lineno}"
    given = argument(call, 5, "num_workers")
    value = code.value(given) if given is not None else None
    if given is not None and constant(value) != 0:
        shown = code.source(given)
        num = constant(value)
        return Refusal(f"the loader at {where} has {num} workers already" if isinstance(num, int) else
                       f"the number of workers at {where} is {shown}; change it where that comes from")  # fmt: skip
    if given is not None and not any(k.value is given for k in call.keywords):
        return Refusal(f"num_workers at {where} is given by position")
    made = _made(sources, code, call)
    if isinstance(made, Refusal):
        return made
    trouble = _trouble(*made) or _spawned(sources, code)
    if trouble:
        return Refusal(trouble)
    collate = argument(call, 6, "collate_fn")
    if isinstance(collate, ast.Lambda):
        return Refusal(f"the collate_fn at {where} is a lambda, which workers cannot be sent")
    rewrite = Rewrite(code)
    num = _number(lead)
    if given is not None and value is not given and isinstance(value, ast.Constant) and not code.is_shared(given):
        rewrite.replace(value, str(num))
    else:
        rewrite.set_argument(call, "num_workers", str(num))
    because = [
        f"the loader at {where} feeds the loop in line {found.loop.lineno} and makes its batches in the training "
        "process",
        f"{made[1].name} is an indexed data set whose code only reads: no state that workers would not share, no file "
        "or connection that they would, no device",
    ]
    kept = ""
    if found.has_epochs and argument(call, None, "persistent_workers") is None and not _is_changed(found):
        rewrite.set_argument(call, "persistent_workers", "True")
        kept = ", and keep them over epochs"
        because.append("nothing changes the data set between epochs, so workers may live on")
    return Change(
        code.path,
        rewrite.text(),
        f"Make batches in {num} worker processes{kept}",
        tuple(because),
        ("random numbers that samples draw come from the workers' own generators",),
    )


def persistent(sources: Sources, lead: Lead) -> Change | Refusal:
    """Keep workers over epochs."""
    found = _loader(sources, lead)
    if isinstance(found, Refusal):
        return found
    code, call = found.code, found.call
    where = f"{code.path}:{call.lineno}"
    num = constant(code.value(given)) if (given := argument(call, 5, "num_workers")) is not None else 0
    if not num and not (given is not None and constant(code.value(given)) is None):
        return Refusal(f"the loader at {where} has no workers")
    if not isinstance(num, int) or num <= 0:
        return Refusal(f"how many workers the loader at {where} has is not seen")
    kept = argument(call, None, "persistent_workers")
    if kept is not None and constant(kept) is not False:
        return Refusal(f"the loader at {where} keeps its workers already")
    if not found.has_epochs:
        return Refusal(f"the loop that the loader at {where} feeds is not run again")
    changed = _is_changed(found)
    if changed:
        return Refusal(changed)
    rewrite = Rewrite(code)
    rewrite.set_argument(call, "persistent_workers", "True")
    return Change(
        code.path,
        rewrite.text(),
        "Keep the loader's workers over epochs",
        (
            f"the loader at {where} starts {num} workers anew for each pass of the loop in line {found.loop.lineno}, "
            "which is run once per epoch",
            "the loader is made once, before, and nothing changes its data set between epochs",
        ),
    )


def pinned(sources: Sources, lead: Lead) -> Change | Refusal:
    """Pin batches, and copy them while the host goes on."""
    found = _loader(sources, lead)
    if isinstance(found, Refusal):
        return found
    code, call = found.code, found.call
    where = f"{code.path}:{call.lineno}"
    pin = argument(call, 7, "pin_memory")
    if pin is not None and constant(pin) is not False:
        return Refusal(f"pin_memory at {where} is {code.source(pin)} already")
    if found.loop_code is not code:
        return Refusal(f"the loader at {where} is made in another file than the loop that it feeds")
    targets = {n.id for n in ast.walk(found.loop.target) if isinstance(n, ast.Name)} if not isinstance(
        found.loop, ast.While) else set[str]()  # fmt: skip
    copies = []
    for node in here(found.loop.body):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda"):
            roots = {n.id for n in ast.walk(node.func.value) if isinstance(n, ast.Name)}
            if roots and roots <= targets and _is_cuda(code, node):
                copies.append(node)
    if not copies:
        return Refusal(f"no copy of a batch to a CUDA device is seen in the loop in line {found.loop.lineno}")
    rewrite = Rewrite(code)
    rewrite.set_argument(call, "pin_memory", "True")
    for copy in copies:
        if argument(copy, None, "non_blocking") is None and not has_stars(copy) and len(copy.args) <= 1:
            rewrite.set_argument(copy, "non_blocking", "True")
    lines = ", ".join(str(copy.lineno) for copy in copies)
    return Change(
        code.path,
        rewrite.text(),
        "Pin batches and copy them while the host goes on",
        (
            f"batches of the loader at {where} are copied to a CUDA device in line {lines}, from memory that is not "
            "pinned",
            "these copies go to the device, in the order of its stream: later work sees them done",
        ),
        ("pinned memory cannot be swapped out: a few batches per rank",),
    )


def _is_cuda(code: Code, copy: ast.Call) -> bool:
    assert isinstance(copy.func, ast.Attribute)
    if copy.func.attr == "cuda":
        return True
    target = copy.args[0] if copy.args else argument(copy, None, "device")
    if target is None:
        return False
    text = ast.unparse(code.value(target)) if isinstance(target, ast.Name) else ast.unparse(target)
    return "cuda" in text and "cpu" not in text.replace("cpu' if", "")


def _loader(sources: Sources, lead: Lead) -> _Loader | Refusal:
    """The loader that the finding is about: it feeds a training loop, and reads the class that the finding names, if
    it names one."""
    found: list[_Loader] = []
    for code in sources.mentioning("DataLoader"):
        for call in ast.walk(code.tree):
            if isinstance(call, ast.Call) and _is_loader(code, call) and not has_stars(call):
                found += _feeding(sources, code, call)
    if not found:
        return Refusal("no DataLoader whose arguments are seen feeds a training loop of the repository")
    named = _classes(sources, lead)
    about = [one for one in found if isinstance(made := _made(sources, one.code, one.call), tuple) and made[1] in named]
    if not about and lead.cause == "cpu_contention":
        return Refusal("the finding is not about the data set of a loader")
    calls = {id(one.call): one for one in (about or found)}
    if len(calls) > 1:
        where = ", ".join(f"{one.code.path}:{one.call.lineno}" for one in calls.values())
        return Refusal(f"{len(calls)} loaders feed training ({where}), and the finding does not tell them apart")
    return next(iter(calls.values()))


def _is_loader(code: Code, call: ast.Call) -> bool:
    return code.is_torch(call.func, "DataLoader")


def _classes(sources: Sources, lead: Lead) -> list[ast.ClassDef]:
    """Classes that the places of a finding stand in."""
    found = []
    for place in lead.places:
        code = sources.code(place.path)
        statement = code.at(place.line) if code is not None else None
        if code is not None and statement is not None:
            owner = statement if isinstance(statement, ast.ClassDef) else code.class_of(statement)
            if owner is not None:
                found.append(owner)
    return found


def _feeding(sources: Sources, code: Code, call: ast.Call) -> list[_Loader]:
    """How a loader is used: bound to a name that a training loop goes through, here or as a parameter."""
    statement = code.statement(call)
    if isinstance(statement, ast.Return) and statement.value is call:
        # Made in a function of its own: what its one caller does with it counts.
        maker = code.function(call)
        if maker is None or code.loops(call):
            return []
        places = callers(sources, code, maker)
        found = [one for other, use in places for one in _through(sources, code, call, other, use)]
        return found if len(places) == 1 else []
    return _through(sources, code, call, code, call)


def _through(sources: Sources, code: Code, call: ast.Call, where: Code, made: ast.Call) -> list[_Loader]:
    statement = where.statement(made)
    if not isinstance(statement, ast.Assign) or statement.value is not made or len(statement.targets) != 1:
        return []
    target = statement.targets[0]
    if not isinstance(target, (ast.Name, ast.Attribute)):
        return []
    name = ast.unparse(target)
    again = bool(where.loops(statement))
    found = []
    for loop_code, loop, epochs in _loops_over(sources, where, statement, name):
        found.append(_Loader(code, call, name, loop, loop_code, epochs and not again))
    return found


def _loops_over(sources: Sources, code: Code, statement: ast.stmt, name: str) -> list[tuple[Code, Loop, bool]]:
    """Training loops that go through what `name` holds, and whether a loop around runs them again."""
    found: list[tuple[Code, Loop, bool]] = []
    whole: ast.AST = code.class_of(statement) or code.scope(statement) if "." in name else code.scope(statement)
    nodes = ast.walk(whole)
    for node in nodes:
        if isinstance(node, (ast.For, ast.AsyncFor)) and _goes_through(node.iter, name) and trains(sources, code, node):
            found.append((code, node, bool(code.loops(node)) or _is_called_again(sources, code, node)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and called(node) != "DataLoader":
            function = code.named(node.func.id)
            where = code
            if function is None:
                hits = [
                    (c, f)
                    for c in sources.mentioning(f"def {node.func.id}")
                    if isinstance(f := c.named(node.func.id), Function)
                ]
                if len(hits) != 1:
                    continue
                where, function = hits[0]
            if not isinstance(function, Function):
                continue
            parameter = _parameter(function, node, name)
            for inner in here(function.body) if parameter else ():
                is_over = isinstance(inner, (ast.For, ast.AsyncFor)) and _goes_through(inner.iter, parameter)
                if isinstance(inner, (ast.For, ast.AsyncFor)) and is_over and trains(sources, where, inner):
                    found.append((where, inner, bool(code.loops(node)) or bool(where.loops(inner))))
    return found


def _is_called_again(sources: Sources, code: Code, loop: Loop) -> bool:
    """The function that the loop is in is called in a loop."""
    function = code.function(loop)
    return function is not None and any(bool(c.loops(call)) for c, call in callers(sources, code, function))


def _parameter(function: Function, call: ast.Call, name: str) -> str:
    """The parameter that gets what `name` holds; "" if none does."""
    for n, one in enumerate(call.args):
        if ast.unparse(one) == name and n < len(function.args.args):
            return function.args.args[n].arg
    return next((k.arg for k in call.keywords if k.arg and ast.unparse(k.value) == name), "")


def _goes_through(iterated: ast.expr, name: str) -> bool:
    """`for x in name`, also through enumerate, tqdm and the like."""
    if ast.unparse(iterated) == name:
        return True
    if isinstance(iterated, ast.Call):
        return any(_goes_through(one, name) for one in iterated.args)
    return False


def _made(sources: Sources, code: Code, call: ast.Call) -> tuple[Code, ast.ClassDef] | Refusal:
    """The class of the loader's data set."""
    where = f"{code.path}:{call.lineno}"
    data = argument(call, 0, "dataset")
    for _ in range(3):
        value = code.value(data) if data is not None else None
        if not isinstance(value, ast.Call):
            break
        name = called(value)
        if name in _WRAPPERS and value.args:
            data = value.args[0]
            continue
        found = sources.class_named(code, name)
        if found is not None:
            return found
        maker = code.named(name)
        returned = (
            [n.value for n in here(maker.body) if isinstance(n, ast.Return)] if isinstance(maker, Function) else []
        )
        if len(returned) != 1 or returned[0] is None:
            return Refusal(f"the data set of the loader at {where} is a {name}, whose code is not in the repository")
        data = returned[0]
    return Refusal(f"what the data set of the loader at {where} is cannot be told from its code")


def _trouble(code: Code, owner: ast.ClassDef) -> str:
    """Why several processes must not read this data set; "" if they may."""
    where = f"{owner.name} ({code.path}:{owner.lineno})"
    bases = [ast.unparse(base).partition("[")[0] for base in owner.bases]
    if any("Iterable" in base for base in bases):
        return f"{where} is an iterable data set: each worker would give all of its samples"
    methods = {one.name: one for one in owner.body if isinstance(one, Function)}
    if "__iter__" in methods or not {"__getitem__", "__getitems__"} & set(methods):
        return f"{where} is not read by index"
    known = {"Dataset", "object", "Generic", "TensorDataset"}
    strange = [base for base in bases if base.rpartition(".")[2] not in known]
    if strange:
        return f"{where} inherits from {strange[0]}, which may keep state"
    for node in ast.walk(owner):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_self(
            node.targets[0] if isinstance(node, ast.Assign) else node.target
        ):
            value = node.value
            if isinstance(value, ast.Call) and called(value) in (*_SHARED, *_DRAWS):
                kind = "draws from" if called(value) in _DRAWS else "keeps"
                return (
                    f"{where} {kind} what processes must not share, in line {node.lineno}: `{code.source(value)[:60]}`"
                )
    todo, seen = [m for name, m in methods.items() if name in ("__getitem__", "__getitems__", "__len__")], set[str]()
    while todo:
        method = todo.pop()
        seen.add(method.name)
        for node in ast.walk(method):
            line = getattr(node, "lineno", method.lineno)
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                return f"{where} changes a global name in line {line}"
            if (
                isinstance(node, (ast.Attribute, ast.Subscript))
                and not isinstance(node.ctx, ast.Load)
                and _is_self(node)
            ):
                return f"{where} changes its own state in line {line}: workers would each have their own"
            if isinstance(node, ast.Call):
                name = called(node)
                if isinstance(node.func, ast.Attribute) and name in _CHANGES and _is_self(node.func.value):
                    return f"{where} changes its own state in line {line}: workers would each have their own"
                if name == "next" and node.args and _is_self(node.args[0]):
                    return f"{where} changes its own state in line {line}: workers would each have their own"
                if name in ("cuda", "get_rank", "all_reduce", "broadcast", "barrier", "all_gather"):
                    return f"{where} uses a device or a process group in line {line}"
                if name == "to" and "cuda" in ast.unparse(node):
                    return f"{where} uses a device in line {line}"
                is_own = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self"
                if is_own and name in methods and name not in seen:
                    todo.append(methods[name])
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda"):
                return f"{where} uses a device in line {line}"
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                # A function of the file may keep state of its own.
                helper = code.named(node.id)
                if isinstance(helper, Function) and any(isinstance(n, ast.Global) for n in ast.walk(helper)):
                    return f"{where} calls {node.id}, which changes a global name"
    return ""


def _is_self(node: ast.AST) -> bool:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"


def _spawned(sources: Sources, code: Code) -> str:
    """Why workers could not be started; "" if they can."""
    for one in sources.mentioning("set_start_method"):
        return f"{one.path} chooses how processes are started; workers may need a guard for the main module"
    if not code.is_main_script():
        return f"{code.path} does its work when it is imported, which workers that are not forked would do again"
    return ""


def _is_changed(found: _Loader) -> str:
    """What may change the data set after the loader was made: a sentence; "" if nothing does."""
    code, call = found.code, found.call
    data = argument(call, 0, "dataset")
    holders = {f"{found.name}.dataset"}
    if isinstance(data, (ast.Name, ast.Attribute)):
        holders.add(ast.unparse(data))
    files = {id(code): code, id(found.loop_code): found.loop_code}
    for one in files.values():
        for node in ast.walk(one.tree):
            line = getattr(node, "lineno", 0)
            if isinstance(node, ast.Attribute) and any(ast.unparse(node.value) == held for held in holders):
                parent = next(one.ancestors(node), None)
                is_call = isinstance(parent, ast.Call) and parent.func is node
                if not isinstance(node.ctx, ast.Load) or is_call:
                    return f"{one.path}:{line} changes the data set, or may: workers that live on would not see it"
    return ""


def _number(lead: Lead) -> int:
    """So many workers that batches come as fast as steps go, and one more; as far as cores are there for them."""
    share = lead.share if lead.share is not None and 0 < lead.share < 1 else 0.5
    wanted = math.ceil(share / (1 - share)) + 1
    room = MOST_WORKERS if lead.cores_per_rank is None else max(int(lead.cores_per_rank), FEW_WORKERS)
    return max(FEW_WORKERS, min(wanted, room, MOST_WORKERS))
