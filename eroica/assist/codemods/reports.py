"""Report every N steps what is reported in each.

Statements of a training loop that only report (print, a logger, a writer, a function of the repository that does
nothing else) go under a condition on the step; a function that only reports and is given the step, as callbacks are,
returns at once in the other steps. What decides anything (`if loss.item() > limit`), is timed, or is read by others in
each step stays as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from eroica.assist.change import Change, Lead, Refusal
from eroica.assist.codemods.training import EVERY, Spot, callers, counted, first, spots
from eroica.assist.reading import (
    Code,
    Function,
    Loop,
    Sources,
    argument,
    bindings,
    called,
    here,
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
     "Path", "items", "values", "keys", "parameters", "named_parameters", "flatten", "stack", "cat", "square", "pow"}
)  # fmt: skip
"""Calls within a report that change nothing."""
_DOES = frozenset({"print", "fsync", "sleep", "dump", "makedirs", "mkdir", "open"})
"""Functions that a report may call as a statement: they tell, or wait."""


_COUNTERS = ("step", "global_step", "iteration", "step_number", "n_iter", "it")
"""Names by which functions are given the number of the step."""


def seldom(sources: Sources, lead: Lead) -> Change | Refusal:
    """Report every `EVERY` steps."""
    seen = first(sources, lead, lambda spot: _seldom(sources, spot))
    return (_guarded(sources, lead) or seen) if isinstance(seen, Refusal) else seen


def _guarded(sources: Sources, lead: Lead) -> Change | None:
    """The same for a function that only tells and is given the step, as callbacks are: it returns at once otherwise.

    The one that the finding names, else the one that a statement of the loop calls, where the finding names no more
    than the function with the loop. None where several would fit.
    """
    found: dict[tuple[str, str], Change] = {}
    for spot in (spot for group in spots(sources, lead) for spot in group):
        if any(counts(spot.code, test) for test in spot.code.conditions(spot.statement, spot.loop)):
            continue
        code, function = spot.inner, spot.inner.function(spot.named[0])
        if function is spot.code.function(spot.loop):
            told = _told(sources, spot.statement)
            if told is None:
                continue
            code, function = told
        if isinstance(function, ast.FunctionDef) and (seen := _returning(sources, spot, code, function)) is not None:
            found.setdefault((seen.path, seen.after), seen)
    return next(iter(found.values())) if len(found) == 1 else None


def _told(sources: Sources, statement: ast.stmt) -> tuple[Code, Function] | None:
    """The method that a statement calls for its effect: the one of this name in the repository that does anything."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    found = [
        (code, node)
        for code in sources.mentioning(f"def {called(call)}")
        for node in ast.walk(code.tree)
        if isinstance(node, Function) and node.name == called(call) and not all(map(_is_idle, node.body))
    ]
    return found[0] if len(found) == 1 and found[0][0].class_of(found[0][1]) is not None else None


def _is_idle(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _returning(sources: Sources, spot: Spot, code: Code, function: ast.FunctionDef) -> Change | None:
    ordered = [*function.args.posonlyargs, *function.args.args]
    step = next((one.arg for one in ordered if one.arg in _COUNTERS), "")
    begins = function.body[1:] if ast.get_docstring(function) is not None else function.body
    is_seldom = any(isinstance(n, ast.If) and counts(code, n.test) for n in here(function.body))
    if not step or not begins or is_seldom or len(bindings(function, step)) != 1:
        return None
    uses = callers(sources, code, function)
    at = [one.arg for one in ordered].index(step) - (code.class_of(function) is not None)
    # Who calls it elsewhere, or without a step, may report what comes once.
    if len(uses) != 1 or argument(uses[0][1], at, step) is None or not _only_tells(sources, code, function):
        return None
    rewrite = Rewrite(code)
    rewrite.before(begins[0], f"if {step} % {EVERY}:\n    return\n")
    return Change(
        code.path,
        rewrite.text(),
        f"Report every {EVERY} steps",
        (
            f"{function.name} ({code.path}:{function.lineno}) is called in each pass of the training loop in line "
            f"{spot.loop.lineno} of {spot.code.path}, and is given the step as `{step}`",
            "it only reports: it gives nothing back and keeps nothing",
        ),
        (f"what was reported in each step is reported in one of {EVERY}",),
    )


def _seldom(sources: Sources, spot: Spot) -> Change | Refusal:
    code, loop = spot.code, spot.loop
    whole = _whole(sources, code, spot.statement, loop)
    if whole is None:
        return Refusal("the statement does more than report")
    conditions = code.conditions(whole, loop)
    if isinstance(whole, ast.If):
        conditions = [whole.test, *conditions]
    for test in conditions:
        if counts(code, test):
            return Refusal(f"it runs under `{code.source(test)}` already")
        if not is_pure(test) or not (code.is_rank_local(test) or _is_fixed(code, test, loop)):
            return Refusal(f"it runs under `{code.source(test)}`, which may be seldom already")
    if isinstance(whole, ast.If) and whole.orelse:
        return Refusal("the condition has an else")
    is_whole = isinstance(whole, ast.If) and _only_reports(sources, code, [whole])
    group = [whole] if is_whole else _neighbours(sources, code, whole)
    if isinstance(group, Refusal):
        return group
    needed = _needed(code, _assigned(group), group)
    if needed:
        return Refusal(f"{', '.join(sorted(needed))} is used elsewhere, or in the next step")
    rewrite = Rewrite(code)
    step = counted(code, loop, rewrite)
    if isinstance(whole, ast.If) and is_whole:
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
        if not _needed(code, _assigned([one]), [one]) or _is_reading(code, one):
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
    found = function_named(sources, code, name)
    return found is not None and _only_tells(sources, *found, depth, also)


def function_named(sources: Sources, code: Code, name: str) -> tuple[Code, ast.FunctionDef] | None:
    """The function of this name at the top of `code`, else of the one other file that has one."""
    found = [(code, code.named(name))] if code.named(name) else [
        (c, c.named(name)) for c in sources.mentioning(f"def {name}") if c.named(name)
    ]  # fmt: skip
    where, function = found[0] if len(found) == 1 else (code, None)
    return (where, function) if isinstance(function, ast.FunctionDef) else None


def _only_tells(
    sources: Sources, where: Code, function: ast.FunctionDef, depth: int = 1, also: Sequence[str] = ()
) -> bool:
    """It gives nothing back, keeps nothing and only tells."""
    if function.decorator_list:
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


def _needed(code: Code, given: set[str], group: Sequence[ast.stmt]) -> set[str]:
    """Names of `given` that others read, or the group itself in the next step: a sum, or the best of all steps."""
    return _read_elsewhere(code, given, group) | (given & _carried(group))


def _carried(group: Sequence[ast.stmt]) -> set[str]:
    """Names that are read here before they are given anything: they have it from the step before."""
    given: set[str] = set()
    carried: set[str] = set()
    for name, is_given in (one for statement in group for one in _in_order(statement)):
        if is_given:
            given.add(name)
        elif name not in given:
            carried.add(name)
    return carried


def _in_order(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names in the order in which they are worked out, and whether they are given something there."""
    if isinstance(node, ast.Name):
        yield node.id, not isinstance(node.ctx, ast.Load)
        return
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.AugAssign):
        if isinstance(node.target, ast.Name):
            yield node.target.id, False
        parts = [node.value, node.target]
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        parts.sort(key=lambda one: one is not node.value)
    elif isinstance(node, (ast.For, ast.comprehension)):
        parts.sort(key=lambda one: one is not node.iter)
    elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        parts.sort(key=lambda one: not isinstance(one, ast.comprehension))
    for one in parts:
        yield from _in_order(one)


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
        if _needed(code, _assigned(block[end + 1 : ahead]), block[begin : ahead + 1]):
            break
        end = ahead
    while begin:
        one = block[begin - 1]
        if not reports(one) and not (
            _is_reading(code, one) and not _read_elsewhere(code, _assigned([one]), block[begin - 1 : end + 1])
        ):
            break
        begin -= 1
    at = block.index(statement)
    while begin < at and _assigned(block[begin : end + 1]) & _carried(block[begin : end + 1]):
        begin += 1  # what goes on from step to step is worked out in each, and no more than shown every some steps
    group = block[begin : end + 1]
    if not any(reports(one) for one in group):
        return Refusal("the value is not only reported")
    for one in group:
        if isinstance(one, ast.If) and counts(code, one.test):
            return Refusal(f"it runs under `{code.source(one.test)}` already")
    return group


def counts(code: Code, test: ast.expr, depth: int = 2) -> bool:
    """The condition holds in some steps only, by a count: a remainder, or a comparison with the last step."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.BitAnd)):
            return True
        if isinstance(node, ast.Name) and depth:
            given = code.value(node)
            if given is not node and is_pure(given) and counts(code, given, depth - 1):
                return True
    return False


def _is_fixed(code: Code, test: ast.expr, loop: Loop) -> bool:
    """Nothing in the condition changes from step to step."""
    changing = _assigned([loop])
    return not ({n.id for n in ast.walk(test) if isinstance(n, ast.Name)} & changing)
