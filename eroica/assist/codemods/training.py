"""Where a program trains: its loop, the counter of its steps, and the statement of the loop that a finding leads to.

Shared by the codemods. A loop trains if a backward pass or the step of an optimizer is in it, there or in a function of
the repository that it calls.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eroica.assist.change import Change, Lead, Refusal
from eroica.assist.reading import (
    Code,
    Function,
    Loop,
    Sources,
    argument,
    bindings,
    called,
    constant,
    here,
    inside,
)
from eroica.assist.rewriting import Rewrite, UnfitError

EVERY = 50
"""Steps between reports, and between collections: a read-back or a line in a log of a few milliseconds is then well
below 1 % of the time, and a person sees no less."""
_NOT_OPTIMIZERS = ("sched", "warmup", "prof", "lr", "ema", "bar")
_DEEPEST = 2
"""Calls that are followed from a line up to the loop."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A statement in a training loop that a finding leads to."""

    code: Code
    statement: ast.stmt
    loop: Loop
    inner: Code
    named: tuple[ast.stmt, ...]
    """What the finding itself names, in `inner`: the statement, or those of a function that the loop calls."""


def spots(sources: Sources, lead: Lead) -> Iterator[list[Spot]]:
    """For each place of a finding the statements of training loops that it stands for; likeliest place first.

    Stacks name lines. Profiles name functions, by their first line: then each statement of the function's own training
    loop may be meant, or all of them where the loop calls it.
    """
    for place in lead.places:
        code = sources.code(place.path)
        statement = code.at(place.line) if code is not None else None
        if code is None or statement is None:
            continue
        if not isinstance(statement, Function):
            found = list(_upwards(sources, code, statement, code, (statement,), _DEEPEST))
        else:
            loops = [n for n in here(statement.body) if isinstance(n, Loop) and trains(sources, code, n)]
            innermost = [n for n in loops if not any(o is not n and o in set(here(n.body)) for o in loops)]
            found = [
                Spot(code, one, loop, code, (one,))
                for loop in innermost
                for one in here(loop.body)
                if isinstance(one, ast.stmt) and not isinstance(one, Function)
            ]
            if not loops:
                body = tuple(n for n in here(statement.body) if isinstance(n, ast.stmt))
                for other, call in callers(sources, code, statement):
                    above = other.statement(call)
                    if above is not None:
                        found += _upwards(sources, other, above, code, body, _DEEPEST - 1)
        if found:
            yield found


def first(sources: Sources, lead: Lead, look: Callable[[Spot], Change | Refusal]) -> Change | Refusal:
    """The one change that a codemod makes at the places of a finding. Where a place stands for several statements, no
    more than one may be fit: nothing tells them apart."""
    reasons: list[str] = []
    for group in spots(sources, lead):
        found: dict[str, Change] = {}
        for spot in group:
            try:
                seen = look(spot)
            except UnfitError as error:
                seen = Refusal(str(error))
            if isinstance(seen, Change):
                found.setdefault(seen.after, seen)
            else:
                reasons.append(f"{spot.code.path}:{spot.statement.lineno}: {seen.reason}")
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            return Refusal(f"{len(found)} statements would fit, and the finding does not tell them apart")
    return Refusal(reasons[0] if reasons else "the finding leads to no statement of a training loop")


def _upwards(
    sources: Sources, code: Code, statement: ast.stmt, inner: Code, named: tuple[ast.stmt, ...], deepest: int
) -> Iterator[Spot]:
    loop = next((one for one in code.loops(statement) if trains(sources, code, one)), None)
    if loop is not None:
        yield Spot(code, statement, loop, inner, named)
        return
    function = code.function(statement)
    if function is None or not deepest:
        return
    for other, call in callers(sources, code, function):
        above = other.statement(call)
        if above is not None:
            yield from _upwards(sources, other, above, inner, named, deepest - 1)


def callers(sources: Sources, code: Code, function: Function) -> list[tuple[Code, ast.Call]]:
    """Calls of a function or method, by its name: in its own file, and where it is imported."""
    found = []
    is_method = code.class_of(function) is not None and code.function(function) is None
    for other in sources.mentioning(function.name):
        for node in ast.walk(other.tree):
            if not isinstance(node, ast.Call) or called(node) != function.name:
                continue
            if is_method == isinstance(node.func, ast.Attribute) or (other is not code and not is_method):
                found.append((other, node))
    return found


def given_for(sources: Sources, code: Code, parameter: ast.Name) -> tuple[Code, ast.expr, ast.Call] | None:
    """What the one call of a function in the repository gives for a parameter that the function never binds again: its
    file, the expression and the call. None for a method, for several calls, and where it cannot be seen."""
    function = code.scope(parameter)
    bound = bindings(function, parameter.id)
    if not isinstance(function, Function) or len(bound) != 1 or not isinstance(bound[0], ast.arg):
        return None
    defined = [
        node
        for other in sources.mentioning(f"def {function.name}")
        for node in ast.walk(other.tree)
        if isinstance(node, Function) and node.name == function.name
    ]
    calls = callers(sources, code, function)
    if len(defined) != 1 or len(calls) != 1 or code.class_of(function) is not None:
        return None
    other, call = calls[0]
    ordered = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    given = argument(call, ordered.index(parameter.id) if parameter.id in ordered else None, parameter.id)
    return (other, given, call) if given is not None else None


def trains(sources: Sources, code: Code, loop: Loop) -> bool:
    """A backward pass or an optimizer's step is in the loop, or in a function that it calls."""
    if _has_update(loop):
        return True
    for node in here(loop.body):
        if isinstance(node, ast.Call):
            name = called(node)
            for function in _functions(sources, code, name, isinstance(node.func, ast.Attribute)):
                if _has_update(function):
                    return True
    return False


def _functions(sources: Sources, code: Code, name: str, is_method: bool) -> list[Function]:
    """Functions of the repository that a call of this name may mean."""
    found = []
    for other in [code] if is_method else [code, *(c for c in sources.mentioning(f"def {name}") if c is not code)]:
        found += [n for n in ast.walk(other.tree) if isinstance(n, Function) and n.name == name]
    return found


def _has_update(node: ast.AST) -> bool:
    body = getattr(node, "body", [])
    return any(isinstance(one, ast.Call) and (called(one) == "backward" or is_update(one)) for one in here(list(body)))


def is_update(call: ast.Call) -> bool:
    """`optimizer.step()`, `scaler.step(optimizer)`, and not `scheduler.step()`."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    name = ast.unparse(call.func.value).lower()
    return not any(part in name for part in _NOT_OPTIMIZERS)


def training_loops(sources: Sources) -> list[tuple[Code, Loop]]:
    """The innermost training loops of the repository, tests left out."""
    found = []
    for code in sources.mentioning("step("):
        for node in ast.walk(code.tree):
            if isinstance(node, Loop) and trains(sources, code, node):
                inner = [one for one in here(node.body) if isinstance(one, Loop) and trains(sources, code, one)]
                if not inner:
                    found.append((code, node))
    return found


def counter(code: Code, loop: Loop) -> str:
    """A name that counts the passes of the loop, the same on all ranks that make the same passes; "" without one."""
    if isinstance(loop, (ast.For, ast.AsyncFor)):
        call = loop.iter
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            # With a stride a remainder of the number may never be 0, or always.
            is_each = len(call.args) < 3 or constant(call.args[2]) == 1
            if (
                call.func.id == "range" and is_each and isinstance(loop.target, ast.Name)
                and not code.is_rank_local(call)
            ):  # fmt: skip
                return loop.target.id if len(_bound_in(loop.body, loop.target.id)) == 0 else ""
            if call.func.id == "enumerate" and isinstance(loop.target, ast.Tuple) and len(loop.target.elts) == 2:
                first = loop.target.elts[0]
                if isinstance(first, ast.Name) and not _bound_in(loop.body, first.id):
                    return first.id
    scope = code.scope(loop)
    for one in loop.body:
        if (
            isinstance(one, ast.AugAssign)
            and isinstance(one.op, ast.Add)
            and isinstance(one.target, ast.Name)
            and constant(one.value) == 1
        ):
            others = [b for b in bindings(scope, one.target.id) if b is not one.target]
            given = code.value_bound(others[0]) if len(others) == 1 else None
            if given is not None and isinstance(constant(given), int) and others[0] not in set(here(loop)):
                return one.target.id
    return ""


def _bound_in(body: list[ast.stmt], name: str) -> list[ast.AST]:
    return [n for n in here(body) if isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load)]


def counted(code: Code, loop: Loop, rewrite: Rewrite) -> str:
    """The name of the loop's counter, made by `enumerate` if it has none. Raises UnfitError if neither can be."""
    name = counter(code, loop)
    if name:
        return name
    if not isinstance(loop, ast.For):
        raise UnfitError(f"the loop in line {loop.lineno} has no counter of its steps")
    scope = code.scope(loop)
    taken = {n.id for n in inside(scope) if isinstance(n, ast.Name)} | {
        n.id for n in ast.walk(code.tree) if isinstance(n, ast.Name)
    }
    name = next((one for one in ("step", "step_number", "loop_step") if one not in taken), "")
    if not name:
        raise UnfitError(f"the loop in line {loop.lineno} has no counter of its steps, and no name is free for one")
    target = code.source(loop.target)
    if isinstance(loop.target, ast.Tuple) and not target.startswith("("):
        target = f"({target})"
    rewrite.replace(loop.target, f"({name}, {target})", bare=True)
    rewrite.replace(loop.iter, f"enumerate({code.source(loop.iter)})")
    return name
