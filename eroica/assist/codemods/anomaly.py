"""Take out anomaly detection of autograd that was left on.

It applies where the mode is asked for by a literal: a plain `set_detect_anomaly(True)`, or a `with detect_anomaly():`.
Not where an option or a condition asks for it (that was a decision, and the option is the place to undo it), nor where
the program lives on what the mode does: catches the error that it raises, or asks whether it is on.
"""

from __future__ import annotations

import ast

from eroica.assist.change import Change, Lead, Refusal
from eroica.assist.codemods.training import callers
from eroica.assist.reading import Code, Sources, argument, calls, everywhere, here, is_true
from eroica.assist.rewriting import Rewrite

_NAMES = ("set_detect_anomaly", "detect_anomaly")


def propose(sources: Sources, lead: Lead) -> Change | Refusal:
    """Remove or unwrap the one place that turns the mode on."""
    found: list[tuple[Code, ast.Call]] = []
    for place in lead.places:
        code = sources.code(place.path)
        statement = code.at(place.line) if code is not None else None
        if code is not None and statement is not None:
            found = [(code, call) for call in _uses(code, _header(statement))]
            if found:
                break
    if not found:
        found = [(code, call) for code in sources.mentioning("detect_anomaly") for call in _uses(code, [code.tree])]
        found = [(code, call) for code, call in found if not _is_off(call)]
    if len(found) != 1:
        where = ", ".join(f"{code.path}:{call.lineno}" for code, call in found[:4])
        return Refusal(
            f"anomaly detection is asked for in {len(found)} places ({where})" if found
            else "no line of the repository turns anomaly detection on"
        )  # fmt: skip
    return _without(sources, *found[0])


def _without(sources: Sources, code: Code, call: ast.Call) -> Change | Refusal:
    where = f"{code.path}:{call.lineno}"
    is_context = code.dotted(call.func).endswith(".detect_anomaly")
    mode = argument(call, None if is_context else 0, "mode")
    if not is_context and not is_true(mode):
        shown = code.source(mode) if mode is not None else "a value that is not seen"
        return Refusal(f"{where} is switched by {shown}; switch it off there")
    condition = _condition(sources, code, call)
    if condition:
        return Refusal(f"{where} stands under the condition `{condition}`; switch that off instead")
    if everywhere(code.tree, "is_anomaly_enabled"):
        return Refusal(f"{code.path} asks whether the mode is on")
    statement = code.statement(call)
    guarded = [one for one in ast.walk(code.tree) if isinstance(one, ast.Try) and _swallows(one)]
    for one in guarded:
        # A plain call holds for all that comes later; a `with` for what is in it.
        if (statement is not None and statement in ast.walk(one)) or (
            not isinstance(statement, (ast.With, ast.AsyncWith)) and calls(one.body, "backward")
        ):
            return Refusal(f"{code.path}:{one.lineno} catches errors, perhaps those that the mode raises")
    rewrite = Rewrite(code)
    because = (
        f"{where} turns the mode on by a literal, under no condition",
        "nothing catches its errors or asks for it",
    )
    if isinstance(statement, ast.Expr) and statement.value is call:
        rewrite.remove(statement)
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        index = next((n for n, item in enumerate(statement.items) if item.context_expr is call), None)
        if index is None or statement.items[index].optional_vars is not None:
            return Refusal(f"{where} keeps the context in a name")
        if len(statement.items) == 1:
            rewrite.unwrap(statement)
        else:
            rewrite.remove_item(statement, index)
    else:
        return Refusal(f"{where} uses the result of the call")
    return Change(code.path, rewrite.text(), "Take out anomaly detection", because)


def _condition(sources: Sources, code: Code, call: ast.Call) -> str:
    """On what it depends whether the call is made: an `if` around it, around a call of its function, or around a
    `return` before it; "" if on nothing."""
    function = code.function(call)
    tests = [(code, test) for test in code.conditions(call)]
    for node in here(function.body) if function is not None else ():
        if isinstance(node, ast.Return) and node.lineno < call.lineno:
            tests += [(code, test) for test in code.conditions(node)]
    if function is not None:
        uses = callers(sources, code, function)
        tests += [(other, test) for other, use in uses for test in other.conditions(use)]
    return next((where.source(test) for where, test in tests), "")


def _header(statement: ast.stmt) -> list[ast.AST]:
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return [item.context_expr for item in statement.items]
    return [statement] if isinstance(statement, (ast.Expr, ast.Assign, ast.AnnAssign)) else []


def _uses(code: Code, nodes: list[ast.AST]) -> list[ast.Call]:
    every = [one for node in nodes for one in ast.walk(node)]
    return [one for one in every if isinstance(one, ast.Call) and code.is_torch(one.func, *_NAMES)]


def _is_off(call: ast.Call) -> bool:
    mode = argument(call, 0, "mode")
    return isinstance(mode, ast.Constant) and mode.value is False


def _swallows(one: ast.Try) -> bool:
    """Some handler does not pass the error on."""
    return any(not any(isinstance(node, ast.Raise) for node in here(handler.body)) for handler in one.handlers)
