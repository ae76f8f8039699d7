"""Report every N steps what is reported in each, keep sums on the device, and wait for the device no more than needed.

Three codemods for one habit. `seldom`: statements of a training loop that only report (print, a logger, a writer, a
function of the repository that does nothing else) go under a condition on the step. `later`: a value that is read back
in each step and only added up, collected or kept for a report is kept on the device and read where it is needed.
`unsynchronized`: a bare wait for the device that orders nothing.

What decides anything (`if loss.item() > limit`), is timed, or is read by others in each step stays as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from eroica.assist.change import Change, Lead, Refusal
from eroica.assist.codemods.training import EVERY, Spot, callers, counted, first
from eroica.assist.reading import (
    Code,
    Function,
    Loop,
    Sources,
    bindings,
    called,
    here,
    inside,
    is_pure,
)
from eroica.assist.rewriting import Rewrite

_METHODS = frozenset(
    {"info", "debug", "log", "log_metrics", "log_metric", "log_dict", "add_scalar", "add_scalars", "add_histogram",
     "set_postfix", "set_postfix_str", "set_description", "write", "writelines", "writerow", "flush", "record_metrics"}
)  # fmt: skip
"""Methods that tell somebody something. Warnings and errors are not among them: they must not wait."""
_READS = frozenset(
    {"item", "float", "int", "str", "format", "round", "len", "tolist", "cpu", "detach", "mean", "sum", "norm", "max",
     "min", "abs", "sqrt", "numpy", "join", "time", "perf_counter", "monotonic", "now", "isoformat", "strftime",
     "get_rank", "get_last_lr", "memory_allocated", "max_memory_allocated", "memory_reserved", "dumps", "fileno",
     "get_world_size",
     "state_dict", "dict", "list", "tuple", "repr", "hex", "getpid", "clone", "double", "exp", "log", "sorted",
     "items", "values", "keys", "parameters", "named_parameters", "flatten", "stack", "cat", "square", "pow"}
)  # fmt: skip
"""Calls within a report that change nothing."""
_DOES = frozenset({"print", "fsync", "sleep", "dump", "makedirs", "mkdir", "open"})
"""Functions that a report may call as a statement: they tell, or wait."""
_SYNCHRONIZE = ("torch.cuda.synchronize", "torch.xpu.synchronize", "torch.hpu.synchronize", "torch.npu.synchronize",
                "torch.accelerator.synchronize", "torch.mps.synchronize", "torch.cpu.synchronize")  # fmt: skip
_CLOCKS = frozenset({"time", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time_ns", "elapsed_time"})


# ---- seldom


def seldom(sources: Sources, lead: Lead) -> Change | Refusal:
    """Report every `EVERY` steps."""
    return first(sources, lead, lambda spot: _seldom(sources, spot))


def _seldom(sources: Sources, spot: Spot) -> Change | Refusal:
    code, loop = spot.code, spot.loop
    whole = _whole(sources, code, spot.statement, loop)
    if whole is None:
        return Refusal("the statement does more than report")
    conditions = code.conditions(whole, loop)
    if isinstance(whole, ast.If):
        conditions = [whole.test, *conditions]
    for test in conditions:
        if _counts(code, test):
            return Refusal(f"it runs under `{code.source(test)}` already")
        if not is_pure(test) or not (code.is_rank_local(test) or _is_fixed(code, test, loop)):
            return Refusal(f"it runs under `{code.source(test)}`, which may be seldom already")
    if isinstance(whole, ast.If) and whole.orelse:
        return Refusal("the condition has an else")
    group = [whole] if isinstance(whole, ast.If) else _neighbours(sources, code, whole)
    if isinstance(group, Refusal):
        return group
    rewrite = Rewrite(code)
    step = counted(code, loop, rewrite)
    if isinstance(whole, ast.If):
        shown = code.source(whole.test)
        is_or = isinstance(whole.test, ast.BoolOp) and isinstance(whole.test.op, ast.Or)
        if is_or or isinstance(whole.test, ast.IfExp):
            shown = f"({shown})"
        rewrite.replace(whole.test, f"{shown} and {step} % {EVERY} == 0")
    else:
        rewrite.wrap(group, f"if {step} % {EVERY} == 0:")
    return Change(
        code.path,
        rewrite.text(),
        f"Report every {EVERY} steps",
        (
            f"line {whole.lineno} runs in each pass of the training loop in line {loop.lineno}, under no condition on "
            "the step",
            "it only reports: it gives nothing to the rest of the loop",
            f"`{step}` counts the passes",
        ),
        (f"what was reported in each step is reported in one of {EVERY}",),
    )


def _whole(sources: Sources, code: Code, statement: ast.stmt, loop: Loop) -> ast.stmt | None:
    """The largest block around a report that holds nothing but reports, else the report; None if it is none."""

    def fits(one: ast.stmt) -> bool:
        return _only_reports(sources, code, [one]) or _is_reading(code, one)

    if not fits(statement):
        return None
    best = statement
    for one in code.ancestors(statement):
        if one is loop or not isinstance(one, (ast.If, ast.With, ast.For)) or not fits(one):
            break
        if not _read_elsewhere(code, _assigned([one]), [one]) or _is_reading(code, one):
            best = one
    return best


def _only_reports(sources: Sources, code: Code, body: Sequence[ast.stmt]) -> bool:
    return any(not _is_reading(code, one) for one in body) and all(
        _is_report(sources, code, one)
        or _is_reading(code, one)
        or (isinstance(one, ast.If) and is_pure(one.test) and _only_reports(sources, code, [*one.body, *one.orelse]))
        or (isinstance(one, ast.With) and _opens(one) and _only_reports(sources, code, one.body))
        or (
            isinstance(one, ast.For)
            and _is_plain(one.iter)
            and _only_reports(sources, code, one.body)
            and not one.orelse
        )
        for one in body
    )


def _opens(block: ast.With) -> bool:
    return all(
        isinstance(item.context_expr, ast.Call) and called(item.context_expr) in ("open", "no_grad", "inference_mode")
        for item in block.items
    )


def _is_report(sources: Sources, code: Code, statement: ast.stmt, depth: int = 2) -> bool:
    """A call whose only effect is that something is told."""
    if isinstance(statement, ast.Pass):
        return True
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    given = [*call.args, *(k.value for k in call.keywords)]
    if not all(_is_plain(one) for one in given):
        return False
    name = called(call)
    if isinstance(call.func, ast.Attribute):
        if name in _METHODS:
            return _is_plain(call.func.value)
        root = code.dotted(call.func)
        return root in ("os.fsync", "time.sleep", "json.dump", "os.makedirs") or root.startswith("wandb.log")
    if name in _DOES and not bindings(code.tree, name):
        return True
    return depth > 0 and is_reporter(sources, code, name, depth - 1)


def is_reporter(sources: Sources, code: Code, name: str, depth: int = 1, also: Sequence[str] = ()) -> bool:
    """A function of the repository that gives nothing back, keeps nothing and only tells. `also`: full names of
    functions that it may call, too."""
    found = [(code, code.named(name))] if code.named(name) else [
        (c, c.named(name)) for c in sources.mentioning(f"def {name}") if c.named(name)
    ]  # fmt: skip
    if len(found) != 1:
        return False
    where, function = found[0]
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return False
    for node in here(function.body):
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal, ast.Raise, Function)):
            return False
        if isinstance(node, ast.Return) and node.value is not None:
            return False
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            return False
        if isinstance(node, ast.stmt) and not isinstance(
            node, (ast.If, ast.With, ast.For, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Pass, ast.Return)
        ):
            return False
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if where.dotted(node.value.func) not in also and not _is_report(sources, where, node, depth):
                return False
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            if node.value is not None and not _is_plain(node.value):
                return False
        elif (isinstance(node, ast.With) and not _opens(node)) or (
            isinstance(node, ast.For) and not _is_plain(node.iter)
        ):
            return False
    return True


def _is_plain(expression: ast.expr) -> bool:
    """Works out a value and changes nothing."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Call) and called(node) not in _READS | {"open"}:
            return False
        if isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)):
            return False
    return True


def _is_reading(code: Code, statement: ast.stmt) -> bool:
    """Gives local names something plain, and does nothing else: also in a loop, or under a condition."""
    if code.function(statement) is None:
        return False
    if isinstance(statement, ast.Assign):
        return all(isinstance(one, ast.Name) for one in statement.targets) and _is_plain(statement.value)
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.target, ast.Name) and _is_plain(statement.value)
    if isinstance(statement, ast.For):
        body = [*statement.body, *statement.orelse]
        return _is_plain(statement.iter) and all(_is_reading(code, one) for one in body)
    if isinstance(statement, ast.If):
        return _is_plain(statement.test) and all(_is_reading(code, one) for one in [*statement.body, *statement.orelse])
    return False


def _assigned(body: Sequence[ast.AST]) -> set[str]:
    return {n.id for n in here(list(body)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _read_elsewhere(code: Code, given: set[str], group: Sequence[ast.stmt]) -> set[str]:
    own = {node for one in group for node in ast.walk(one)}
    scope = code.scope(group[0])
    return {
        node.id
        for node in ast.walk(scope)
        if isinstance(node, ast.Name) and node.id in given and isinstance(node.ctx, ast.Load) and node not in own
    }


def _neighbours(sources: Sources, code: Code, statement: ast.stmt) -> list[ast.stmt] | Refusal:
    """The statement with the reports directly beside it, and with the values that are made for them alone."""
    block = code.block(statement)
    begin = end = block.index(statement)

    def reports(one: ast.stmt) -> bool:
        return _only_reports(sources, code, [one]) and not (isinstance(one, ast.If) and one.orelse)

    while end + 1 < len(block):
        # Values are taken along if a report comes behind them.
        ahead = next((n for n in range(end + 1, len(block)) if not _is_reading(code, block[n])), None)
        if ahead is None or not reports(block[ahead]):
            break
        if _read_elsewhere(code, _assigned(block[end + 1 : ahead]), block[begin : ahead + 1]):
            break
        end = ahead
    while begin:
        one = block[begin - 1]
        if not reports(one) and not (
            _is_reading(code, one) and not _read_elsewhere(code, _assigned([one]), block[begin - 1 : end + 1])
        ):
            break
        begin -= 1
    group = block[begin : end + 1]
    if not any(reports(one) for one in group):
        return Refusal("the value is not only reported")
    elsewhere = _read_elsewhere(code, _assigned(group), group)
    if elsewhere:
        return Refusal(f"{', '.join(sorted(elsewhere))} is used elsewhere, too")
    for one in group:
        if isinstance(one, ast.If) and _counts(code, one.test):
            return Refusal(f"it runs under `{code.source(one.test)}` already")
    return group


def _counts(code: Code, test: ast.expr, depth: int = 2) -> bool:
    """The condition holds in some steps only, by a count: a remainder, or a comparison with the last step."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.BitAnd)):
            return True
        if isinstance(node, ast.Name) and depth:
            given = code.value(node)
            if given is not node and is_pure(given) and _counts(code, given, depth - 1):
                return True
    return False


def _is_fixed(code: Code, test: ast.expr, loop: Loop) -> bool:
    """Nothing in the condition changes from step to step."""
    changing = _assigned([loop])
    return not ({n.id for n in ast.walk(test) if isinstance(n, ast.Name)} & changing)


# ---- later


def later(sources: Sources, lead: Lead) -> Change | Refusal:
    """Keep on the device what is read back in each step and not needed there."""
    return first(sources, lead, lambda spot: _later(spot))


def _later(spot: Spot) -> Change | Refusal:
    code, loop, statement = spot.code, spot.loop, spot.statement
    reads = [n for n in ast.walk(statement) if isinstance(n, ast.expr) and _read_back(code, n, loop) is not None]
    if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.Expr)) or not reads:
        return Refusal("no tensor is read back into a sum, a list or a name here")
    if code.function(statement) is None:
        return Refusal("the loop is in no function, so that others may read its names")
    tests = code.conditions(statement, loop)
    if tests:
        return Refusal(f"it runs under `{code.source(tests[0])}`")
    rewrite = Rewrite(code)
    if isinstance(statement, ast.AugAssign):
        if not isinstance(statement.target, ast.Name) or not isinstance(statement.op, (ast.Add, ast.Sub)):
            return Refusal("the sum is kept where others may read it")
        name, suffix, settle = statement.target.id, ".detach().double()", "{0} = float({0})"
    elif isinstance(statement, ast.Assign):
        if (
            len(statement.targets) != 1
            or not isinstance(statement.targets[0], ast.Name)
            or statement.value not in reads
        ):
            return Refusal("the value is kept where others may read it, or is a part of a computation")
        name, suffix, settle = statement.targets[0].id, ".detach().clone()", "{0} = float({0})"
    else:
        call = statement.value
        is_append = (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "append"
            and isinstance(call.func.value, ast.Name)
            and len(call.args) == 1
            and call.args[0] in reads
        )
        if not is_append:
            return Refusal("what is read back is passed on")
        assert (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Name)
        )
        name, suffix, settle = call.func.value.id, ".detach().clone()", "{0}[:] = [float(value) for value in {0}]"
        made = code.value(call.func.value)
        if not (isinstance(made, ast.List) and not made.elts):
            return Refusal(f"{name} is no list that this function made empty")
    settled = _settled(code, loop, statement, name)
    if isinstance(settled, Refusal):
        return settled
    for read in reads:
        tensor = _read_back(code, read, loop)
        assert tensor is not None
        rewrite.replace(read, f"{_bracketed(code, tensor)}{suffix}")
    blocks, behind = settled
    for block in blocks:
        rewrite.before(block.body[0], settle.format(name) + "\n")
    if behind:
        rewrite.after(loop, settle.format(name) + "\n")
    return Change(
        code.path,
        rewrite.text(),
        f"Keep {name} on the device until it is read",
        (
            f"line {statement.lineno} waits for the device in each pass of the loop in line {loop.lineno}, and {name} "
            "is needed only "
            + " and ".join([*(["behind the loop"] if behind else []), *(["every some steps"] if blocks else [])]),
            f"{name} is local, and each place that reads it gets a number as before",
        ),
        () if suffix.endswith("clone()") else ("the sum is kept in double precision, as Python's was",),
    )


def _settled(code: Code, loop: Loop, statement: ast.stmt, name: str) -> tuple[list[ast.If], bool] | Refusal:
    """The conditional blocks in which the name is read, and whether it is read behind the loop."""
    scope = code.scope(statement)
    for node in ast.walk(scope):
        if (
            node is not scope
            and isinstance(node, (Function, ast.Lambda))
            and name in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        ):
            return Refusal(f"a function inside of this one reads {name}")
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            return Refusal(f"{name} is a global name")
    if any(isinstance(b, ast.arg) for b in bindings(scope, name)):
        return Refusal(f"{name} comes from the caller")
    own = set(ast.walk(statement))
    in_loop = set(here(loop.body))
    blocks: list[ast.If] = []
    behind = bool(loop.orelse)
    if loop.orelse:
        return Refusal("the loop has an else")
    for node in inside(scope):
        if not (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)) or node in own:
            continue
        if node not in in_loop:
            behind = behind or node.lineno > loop.lineno or bool(code.loops(loop))
            continue
        block = next(
            (
                one
                for one in code.ancestors(node)
                if isinstance(one, ast.If) and one in in_loop and _counts(code, one.test)
                and not any(n is node for n in ast.walk(one.test)) and not one.orelse
            ),
            None,
        )  # fmt: skip
        if block is None:
            return Refusal(f"{name} is read in each step, in line {node.lineno}")
        if block not in blocks:
            blocks.append(block)
    if not blocks and not behind:
        return Refusal(f"nobody reads {name}")
    return blocks, behind


def _read_back(code: Code, node: ast.expr, loop: Loop) -> ast.expr | None:
    """The tensor that `x.item()` or `float(x)` reads back, if it is known for one."""
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    tensor: ast.expr | None = None
    if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
        tensor = node.func.value
    elif isinstance(node.func, ast.Name) and node.func.id == "float" and len(node.args) == 1:
        tensor = node.args[0]
    return tensor if tensor is not None and _is_tensor(code, tensor, loop) else None


_OF_TENSORS = frozenset({"detach", "argmax", "softmax", "log_softmax", "float", "backward", "requires_grad_", "data"})


def _is_tensor(code: Code, node: ast.expr, loop: Loop, depth: int = 3) -> bool:
    if isinstance(node, ast.Name):
        for one in here(loop.body):
            is_backward = isinstance(one, ast.Attribute) and one.attr == "backward"
            if is_backward and node.id in {n.id for n in ast.walk(one) if isinstance(n, ast.Name)}:
                return True
        given = [code.value_bound(b) for b in bindings(code.scope(node), node.id)]
        known = [one for one in given if one is not None]
        return bool(depth and known and len(known) == len(given)) and all(
            _is_tensor(code, one, loop, depth - 1) for one in known
        )
    if isinstance(node, ast.Call):
        if code.dotted(node.func).startswith("torch."):
            return True
        return isinstance(node.func, ast.Attribute) and (
            node.func.attr in _OF_TENSORS or _is_tensor(code, node.func.value, loop, depth)
        )
    if isinstance(node, ast.BinOp):
        return _is_tensor(code, node.left, loop, depth) or _is_tensor(code, node.right, loop, depth)
    if isinstance(node, ast.Compare):
        return _is_tensor(code, node.left, loop, depth)
    return False


def _bracketed(code: Code, node: ast.expr) -> str:
    text = code.source(node)
    return text if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({text})"


# ---- unsynchronized


def unsynchronized(sources: Sources, lead: Lead) -> Change | Refusal:
    """Take out a wait for the device."""
    return first(sources, lead, lambda spot: _unsynchronized(sources, spot))


def _waits(code: Code, statement: ast.stmt | None) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and code.dotted(call.func) in _SYNCHRONIZE


def _unsynchronized(sources: Sources, spot: Spot) -> Change | Refusal:
    code = spot.inner
    found = [one for one in spot.named if _waits(code, one)]
    if len(found) != 1:
        return Refusal("this is no bare wait for a device" if not found else "it waits several times")
    statement = found[0]
    function = code.function(statement)
    is_called = function is not spot.code.function(spot.statement)
    if is_called and (function is None or len(callers(sources, code, function)) != 1):
        return Refusal("the function that waits is called from elsewhere, too")
    scope = code.scope(statement)
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and called(node) in _CLOCKS:
            return Refusal(f"line {node.lineno} takes the time, which would mean something else without the wait")
    for word, why in (
        ("Stream(", "uses streams of its own"),
        ("CUDAGraph", "captures graphs"),
        ("wait_stream", "orders streams"),
        ("Event(", "uses events"),
        ("ctypes", "shares memory with foreign code"),
        ("cupy", "shares memory with another library"),
        ("share_memory_", "shares memory with other processes"),
    ):
        if word in code.text:
            return Refusal(f"{code.path} {why}, which the wait may order")
    for node in ast.walk(code.tree):
        if not (isinstance(node, ast.Call) and any(k.arg == "non_blocking" for k in node.keywords)):
            continue
        if called(node) in ("cpu", "copy_") or "cpu" in ast.unparse(node):
            return Refusal(f"line {node.lineno} copies to the host without waiting, which the wait may be for")
    rewrite = Rewrite(code)
    parent = next(code.ancestors(statement), None)
    if isinstance(parent, ast.If) and len(parent.body) == 1 and not parent.orelse:
        if _counts(code, parent.test):
            return Refusal(f"it runs under `{code.source(parent.test)}`, not in each step")
        if "is_available" not in ast.unparse(parent.test) and not is_pure(parent.test):
            return Refusal(f"the condition `{code.source(parent.test)}` does something itself")
        rewrite.remove(parent)
    else:
        tests = [*code.conditions(statement, spot.loop)]
        if is_called:
            tests += spot.code.conditions(spot.statement, spot.loop)
        for test in tests:
            if _counts(code, test):
                return Refusal(f"it runs under `{code.source(test)}`, not in each step")
        rewrite.remove(statement)
    return Change(
        code.path,
        rewrite.text(),
        "Wait for the device no more in each step",
        (
            f"line {statement.lineno} waits for the device in each pass of the loop in line {spot.loop.lineno}, and "
            "gives nothing back",
            "no time is taken around it, and no stream, event or copy to the host depends on it",
        ),
    )
