"""Collect garbage at the same steps on all ranks.

Two forms. Where the program collects by itself, at steps that differ from rank to rank or in each step, the condition
becomes one on the step. Where Python's collector does it, it is switched off for the training loop, and collections
come every so many steps, on all ranks together; what is there before the loop is frozen, so that they are short.
"""

from __future__ import annotations

import ast

from eroica.assist.change import Change, Lead, Refusal
from eroica.assist.codemods.training import EVERY, counted, counter, spots, training_loops
from eroica.assist.reading import Code, Loop, Sources, constant, here, is_pure
from eroica.assist.rewriting import Rewrite, UnfitError

_COLLECT = "gc.collect"
_HARMLESS = ("gc.collect", "torch.cuda.empty_cache", "torch.cuda.memory.empty_cache")


def propose(sources: Sources, lead: Lead) -> Change | Refusal:
    """Align the collections that the program makes, else those of Python."""
    try:
        own = [(code, call) for code in sources.mentioning("gc") for call in _collections(code)]
        in_loops = _in_loops(sources, own)
        if in_loops:
            here_first = {(spot.code.path, spot.statement.lineno) for group in spots(sources, lead) for spot in group}
            chosen = [one for one in in_loops if (one[0].path, one[1].lineno) in here_first] or in_loops
            if len(chosen) > 1:
                where = ", ".join(f"{code.path}:{call.lineno}" for code, call, _ in chosen)
                return Refusal(f"{len(chosen)} places collect garbage in training loops ({where})")
            return _aligned(*chosen[0])
        return _in_function(*own[0]) if len(own) == 1 else _automatic(sources)
    except UnfitError as error:
        return Refusal(str(error))


def _collections(code: Code) -> list[ast.Call]:
    return [n for n in ast.walk(code.tree) if isinstance(n, ast.Call) and code.dotted(n.func) == _COLLECT]


def _in_loops(sources: Sources, own: list[tuple[Code, ast.Call]]) -> list[tuple[Code, ast.Call, Loop]]:
    loops = training_loops(sources)
    return [(code, call, loop) for code, call in own for c, loop in loops if c is code and call in set(here(loop.body))]


def _aligned(code: Code, call: ast.Call, loop: Loop) -> Change | Refusal:
    statement = code.statement(call)
    where = f"{code.path}:{call.lineno}"
    if not isinstance(statement, ast.Expr) or statement.value is not call:
        return Refusal(f"{where} uses what the collection returns")
    if call.args and constant(call.args[0]) in (0, 1):
        return Refusal(f"{where} collects the young generation only, which is short")
    condition = next((one for one in code.ancestors(statement) if isinstance(one, ast.If) or one is loop), loop)
    rewrite = Rewrite(code)
    if condition is loop:
        step = counted(code, loop, rewrite)
        rewrite.wrap([statement], f"if {step} % {EVERY} == 0:")
        seen = f"{where} collects garbage in each pass of the loop in line {loop.lineno}"
        return Change(
            code.path, rewrite.text(), f"Collect garbage every {EVERY} steps", (seen, "all ranks count the same steps")
        )
    assert isinstance(condition, ast.If)
    outer = code.conditions(condition, loop)
    if outer:
        return Refusal(f"{where} stands under several conditions")
    test = code.source(condition.test)
    if not all(_is_harmless(code, one) for one in condition.body) or condition.orelse:
        return Refusal(f"the condition `{test}` decides more than when to collect")
    if not _drops(code, condition.test):
        return Refusal(f"the condition `{test}` does something itself")
    period = _period(code, condition.test)
    if period and not code.is_rank_local(condition.test) and _is_common(code, condition.test, loop):
        return Refusal(f"{where} collects at the same steps on all ranks already, by `{test}`")
    step = counted(code, loop, rewrite)
    rewrite.replace(condition.test, f"{step} % {period or EVERY} == 0")
    return Change(
        code.path,
        rewrite.text(),
        "Collect garbage at the same steps on all ranks",
        (
            f"{where} collects garbage when `{test}`, which comes at other steps on each rank",
            "the condition decides nothing else, and all ranks count the same steps",
        ),
    )


def _in_function(code: Code, call: ast.Call) -> Change | Refusal:
    """A collection in a function that the loop calls, when a count has a remainder of the rank's own."""
    where = f"{code.path}:{call.lineno}"
    conditions = code.conditions(call)
    test = conditions[0] if len(conditions) == 1 else None
    if not (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.BinOp)
        and isinstance(test.left.op, ast.Mod)
        and len(test.ops) == 1
        and isinstance(test.ops[0], ast.Eq)
    ):
        return Refusal(f"{where} collects in no training loop, and under no condition on a count of steps")
    remainder = test.comparators[0]
    if code.is_rank_local(test.left) or not is_pure(test) or not code.is_rank_local(remainder):
        return Refusal(f"{where} collects when `{code.source(test)}`, which is not seen to differ from rank to rank")
    rewrite = Rewrite(code)
    rewrite.replace(remainder, "0")
    return Change(
        code.path,
        rewrite.text(),
        "Collect garbage at the same steps on all ranks",
        (f"{where} collects garbage when `{code.source(test)}`, which comes at other steps on each rank",),
    )


def _is_harmless(code: Code, statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and (
        code.dotted(statement.value.func) in _HARMLESS
    )  # fmt: skip


def _drops(code: Code, test: ast.expr) -> bool:
    """The test can be left out: it only looks."""
    bare = [n for n in ast.walk(test) if isinstance(n, ast.Call)]
    looks = ("gc.get_count", "gc.get_stats", "torch.cuda.memory_allocated", "torch.cuda.memory_reserved", "time.time",
             "time.monotonic", "time.perf_counter", "torch.distributed.get_rank", "psutil.virtual_memory",
             "torch.cuda.max_memory_allocated")  # fmt: skip
    rest = [n for n in bare if code.dotted(n.func) not in looks]
    return all(is_pure(n) for n in rest) if rest else True


def _period(code: Code, test: ast.expr, depth: int = 2) -> str:
    """N of `x % N`, as it stands there."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and is_pure(node.right):
            is_plain = isinstance(node.right, (ast.Name, ast.Attribute, ast.Constant))
            if is_plain and not code.is_rank_local(node.right):
                return code.source(node.right)
        if isinstance(node, ast.Name) and depth:
            given = code.value(node)
            if given is not node and (found := _period(code, given, depth - 1)):
                return found
    return ""


def _is_common(code: Code, test: ast.expr, loop: Loop) -> bool:
    """Nothing but the counter of the loop, and what does not change in it, decides."""
    step = counter(code, loop)
    changing = {n.id for n in here(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} - {step}
    named = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    return is_pure(test) and not named & changing


def _automatic(sources: Sources) -> Change | Refusal:
    loops = training_loops(sources)
    if len(loops) != 1:
        where = ", ".join(f"{code.path}:{loop.lineno}" for code, loop in loops[:4])
        return Refusal(f"{len(loops)} training loops are in the repository ({where})" if loops else
                       "no training loop is seen in the repository")  # fmt: skip
    code, loop = loops[0]
    for one in sources.mentioning("gc."):
        for node in ast.walk(one.tree):
            if isinstance(node, ast.Call) and one.dotted(node.func) in ("gc.disable", "gc.freeze", "gc.set_threshold"):
                return Refusal(f"{one.path}:{node.lineno} steers the collector already")
    outermost = (code.loops(loop) or [loop])[-1]
    rewrite = Rewrite(code)
    step = counted(code, loop, rewrite)
    rewrite.before(outermost, "gc.collect()\ngc.freeze()\ngc.disable()\n")
    rewrite.before(loop.body[0], f"if {step} % {EVERY} == 0:\n    gc.collect()\n")
    rewrite.need_import("gc")
    return Change(
        code.path,
        rewrite.text(),
        f"Collect garbage every {EVERY} steps, on all ranks together",
        (
            f"the loop in line {loop.lineno} is the one training loop of the repository, and nothing else steers the "
            "collector",
            f"`{step}` counts the same steps on all ranks",
        ),
        (f"objects in circles live up to {EVERY} steps longer", "the collector stays off when the loop is over"),
    )
