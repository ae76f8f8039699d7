"""Keep sums on the device until they are read, and wait for the device no more than needed.

`later`: a value that is read back in each step and only added up, collected or kept for a report is kept on the device
and read where it is needed. `unsynchronized`: a bare wait for the device that orders nothing. What decides anything, is
timed, or is read by others in each step stays as it is.
"""

from __future__ import annotations

import ast

from eroica.assist.change import Change, Lead, Refusal
from eroica.assist.codemods.reports import counts
from eroica.assist.codemods.training import Spot, callers, first
from eroica.assist.reading import (
    Code,
    Function,
    Loop,
    Sources,
    bindings,
    called,
    constant,
    here,
    inside,
    is_pure,
)
from eroica.assist.rewriting import Rewrite

_SYNCHRONIZE = ("torch.cuda.synchronize", "torch.xpu.synchronize", "torch.hpu.synchronize", "torch.npu.synchronize",
                "torch.accelerator.synchronize", "torch.mps.synchronize", "torch.cpu.synchronize")  # fmt: skip
_CLOCKS = frozenset({"time", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time_ns", "elapsed_time"})


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
    whole = [
        isinstance(n, ast.Call) and called(n) == "item" and _is_whole(code, _read_back(code, n, loop)) for n in reads
    ]
    if isinstance(statement, ast.AugAssign):
        if not isinstance(statement.target, ast.Name) or not isinstance(statement.op, (ast.Add, ast.Sub)):
            return Refusal("the sum is kept where others may read it")
        if not all(_is_reckoned(code, read, statement) for read in reads):
            return Refusal("what is read back is passed on")
        name, suffix, settle = statement.target.id, ".detach().double()", "{0} = float({0})"
        begun = [code.value_bound(b) for b in bindings(code.scope(statement), name) if b is not statement.target]
        if any(whole) and not any(isinstance(constant(one), float) for one in begun):
            if statement.value not in reads:
                return Refusal("a whole number that is read back is a part of a computation")
            suffix, settle = ".detach().long()", "{0} = int({0})"
    elif isinstance(statement, ast.Assign):
        if (
            len(statement.targets) != 1
            or not isinstance(statement.targets[0], ast.Name)
            or statement.value not in reads
        ):
            return Refusal("the value is kept where others may read it, or is a part of a computation")
        if any(whole):
            return Refusal("the value is a whole number, or a flag")
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
        if any(whole):
            return Refusal("the list is of whole numbers, or of flags")
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
    other = None if isinstance(statement, ast.Expr) else _other(code, loop, statement, name)
    if other is not None:
        return Refusal(f"{name} is given what is not known for a number in line {other}")
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
        () if not suffix.endswith("double()") else ("the sum is kept in double precision, as Python's was",),
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
                if isinstance(one, ast.If) and one in in_loop and counts(code, one.test)
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


def _is_reckoned(code: Code, read: ast.expr, statement: ast.stmt) -> bool:
    """Nothing but arithmetic is done with it: a function that is given a tensor for a number may do anything."""
    for one in code.ancestors(read):
        if one is statement:
            return True
        if not isinstance(one, (ast.BinOp, ast.UnaryOp)):
            return False
    return False


def _other(code: Code, loop: Loop, statement: ast.stmt, name: str) -> int | None:
    """The line in which the name is given what is not known for a number, before the loop or in it: what it holds when
    the loop is over is made a number, and that may be a tensor that others share, or nothing at all. None = there is
    none."""
    is_again = bool(code.loops(loop))
    for bound in bindings(code.scope(statement), name):
        line = getattr(bound, "lineno", 0)
        if code.statement(bound) is statement or (line > (loop.end_lineno or 0) and not is_again):
            continue
        given = _given(code, bound)
        if given is None or not _is_number(code, given, name):
            return line
    return None


def _given(code: Code, bound: ast.AST) -> ast.expr | None:
    """What a name is given, also as one of several: `total, count = 0.0, 0`."""
    statement = code.statement(bound)
    if isinstance(statement, ast.AugAssign):
        return statement.target
    for target in statement.targets if isinstance(statement, ast.Assign) else []:
        value = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, given in zip(target.elts, value.elts, strict=True):
                if one is bound:
                    return given
    return code.value_bound(bound)


_NUMBERS = frozenset({"float", "int", "len", "round", "abs", "sum", "min", "max"})


def _is_number(code: Code, given: ast.expr, name: str) -> bool:
    if isinstance(given, ast.BinOp):
        return _is_number(code, given.left, name) and _is_number(code, given.right, name)
    if isinstance(given, ast.Call):
        return isinstance(given.func, ast.Name) and given.func.id in _NUMBERS
    if isinstance(given, ast.Name) and given.id == name:
        return True
    value = code.value(given)
    return isinstance(constant(value), (int, float)) or code.dotted(value) in ("math.inf", "math.nan")


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
            if not (isinstance(one, ast.Attribute) and one.attr == "backward"):
                continue
            divided = [d for d in ast.walk(one) if isinstance(d, ast.BinOp) and isinstance(d.op, ast.Div)]
            numbers = {n for d in divided for n in ast.walk(d.right)}  # `(loss / rounds).backward()`
            if any(isinstance(n, ast.Name) and n.id == node.id and n not in numbers for n in ast.walk(one)):
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


_WHOLE = frozenset(
    {"argmax", "argmin", "count_nonzero", "eq", "ne", "gt", "lt", "ge", "le", "any", "all", "long", "int"}
)
_ALIKE = frozenset({"sum", "max", "min", "detach", "clone", "cpu", "squeeze", "view", "reshape", "flatten"})


def _is_whole(code: Code, node: ast.expr | None, depth: int = 5) -> bool:
    """A tensor of whole numbers or flags, as far as it shows: what `item()` reads is no float then."""
    node = code.value(node) if node is not None else None
    if node is None or not depth:
        return False
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Div):
        sides = [node.left, node.right]
        return all(isinstance(constant(one), int) or _is_whole(code, one, depth - 1) for one in sides)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        of = next(iter(node.args), None) if code.dotted(node.func).startswith("torch.") else node.func.value
        return called(node) in _WHOLE or (called(node) in _ALIKE and _is_whole(code, of, depth - 1))
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
        if counts(code, parent.test):
            return Refusal(f"it runs under `{code.source(parent.test)}`, not in each step")
        if "is_available" not in ast.unparse(parent.test) and not is_pure(parent.test):
            return Refusal(f"the condition `{code.source(parent.test)}` does something itself")
        rewrite.remove(parent)
    else:
        tests = [*code.conditions(statement, spot.loop)]
        if is_called:
            tests += spot.code.conditions(spot.statement, spot.loop)
        for test in tests:
            if counts(code, test):
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
