"""Let all ranks come to a collective that only some come to.

A collective of all ranks under a condition on the rank halts the job. It applies to an `if` without a counterpart:
a barrier at its end goes behind it, where all ranks come to it when rank 0 has done its work; a collective at its
beginning, with the plain computations that make its input, goes in front. Not where the call is for a group, where
other branches have calls of their own (send and receive, a barrier for the others), or where its input exists on
some ranks only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from eroica.assist.change import Change, Lead, Refusal
from eroica.assist.codemods.training import counter
from eroica.assist.reading import Code, Function, Sources, bindings, called, has_stars, here, is_pure
from eroica.assist.rewriting import Rewrite, UnfitError

_COLLECTIVES = frozenset(
    "all_reduce all_gather all_gather_object all_gather_into_tensor reduce_scatter reduce_scatter_tensor barrier "
    "broadcast broadcast_object_list all_to_all all_to_all_single monitored_barrier reduce gather scatter "
    "gather_object scatter_object_list".split()
)
_PAIRS = frozenset("send recv isend irecv batch_isend_irecv".split())
_BARRIERS = frozenset({"barrier", "monitored_barrier"})
_EVERYWHERE = frozenset({"all_reduce", "all_gather_into_tensor", "all_gather", "broadcast", "reduce"}) | _BARRIERS
"""Those whose input and output are the same on all ranks as the call is written."""
_COMPUTES = frozenset(
    {"tensor", "zeros", "zeros_like", "ones", "empty_like", "detach", "clone", "item", "float", "mean", "sum",
     "get_world_size", "range", "len", "int", "stack", "cat", "full", "double", "to", "max", "min"}
)  # fmt: skip


def propose(sources: Sources, lead: Lead) -> Change | Refusal:
    """Move the one collective that stands under a condition on the rank."""
    reasons: list[str] = []
    found = list(_candidates(sources, lead))
    caution: tuple[str, ...] = ()
    if not found:
        # Where ranks broke off over it the finding has no line of the call. One that is alone of its kind is meant.
        everywhere = [
            one for code in sources.mentioning("distributed") for one in _under_a_rank(code, list(ast.walk(code.tree)))
        ]
        found = everywhere if len(everywhere) == 1 else []
        caution = ("the finding names no line: this is the one collective of the repository under such a condition",)
    for code, block, call in found:
        try:
            seen = _moved(code, block, call)
        except UnfitError as error:
            seen = Refusal(str(error))
        if isinstance(seen, Change):
            return replace(seen, caution=(*seen.caution, *caution))
        reasons.append(f"{code.path}:{call.lineno}: {seen.reason}")
    return Refusal(
        reasons[0]
        if reasons
        else "no collective of all ranks stands under a condition on the rank, in the lines of the finding or alone"
    )


def _candidates(sources: Sources, lead: Lead) -> Iterator[tuple[Code, ast.If, ast.Call]]:
    """Collectives in the functions that the finding names, under a condition on the rank."""
    seen: set[int] = set()
    for place in lead.places:
        code = sources.code(place.path)
        statement = code.at(place.line) if code is not None else None
        if code is None or statement is None:
            continue
        for one in _under_a_rank(code, list(here(list(code.scope(statement).body)))):
            if id(one[2]) not in seen:
                seen.add(id(one[2]))
                yield one


def _under_a_rank(code: Code, nodes: list[ast.AST]) -> Iterator[tuple[Code, ast.If, ast.Call]]:
    """Collectives among the nodes that stand under a condition on the rank."""
    for node in nodes:
        if not isinstance(node, ast.Call) or not (_is_collective(code, node) or _meets(code, node)):
            continue
        block = next(
            (one for one in code.ancestors(node) if isinstance(one, ast.If) and code.is_rank_local(one.test)), None
        )
        if block is not None and code.function(block) is code.function(node):
            yield code, block, node


def _is_collective(code: Code, call: ast.Call) -> bool:
    name = code.dotted(call.func)
    return name.startswith("torch.distributed.") and name.rpartition(".")[2] in _COLLECTIVES


def _meets(code: Code, call: ast.Call) -> ast.FunctionDef | None:
    """The function that is called, if it computes and meets the other ranks, and does nothing else."""
    function = code.named(call.func.id) if isinstance(call.func, ast.Name) else None
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    met = False
    for node in here(function.body):
        if isinstance(node, ast.Call):
            if _is_collective(code, node):
                if called(node) not in _EVERYWHERE or any(k.arg == "group" for k in node.keywords):
                    return None
                met = True
            elif called(node) not in _COMPUTES:
                return None
        elif isinstance(node, ast.stmt):
            if not isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr, ast.Return, ast.Pass)):
                return None
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            return None
    return function if met else None


def _moved(code: Code, block: ast.If, call: ast.Call) -> Change | Refusal:
    name = called(call)
    test = code.source(block.test)
    is_direct = _is_collective(code, call)
    if (
        has_stars(call)
        or any(k.arg == "group" for k in call.keywords)
        or (is_direct and _group_by_position(call, name))
    ):
        return Refusal("the call is for a group, whose ranks may be those of the condition")
    if is_direct and name not in _EVERYWHERE:
        return Refusal(f"{name} takes other arguments on other ranks")
    statement = code.statement(call)
    index = next((n for n, one in enumerate(block.body) if one is statement), None)
    if index is None or not isinstance(statement, (ast.Expr, ast.Assign)):
        return Refusal(f"the call does not stand directly under `{test}`")
    if block.orelse:
        return Refusal(f"`{test}` has an else, where the other ranks do something of their own")
    if _is_elif(code, block):
        return Refusal(f"`{test}` is one of several branches")
    if any(code.is_rank_local(one) for one in code.conditions(block)):
        return Refusal("it stands under several conditions on the rank")
    for node in here(list(code.scope(block).body)):
        if (
            isinstance(node, ast.Call)
            and node is not call
            and (called(node) in _PAIRS or _is_collective(code, node) or _meets(code, node))
        ):
            around = next(
                (o for o in code.ancestors(node) if isinstance(o, ast.If) and code.is_rank_local(o.test)), None
            )
            if around is not None and around is not block:
                return Refusal(
                    f"line {node.lineno} has a call under another condition on the rank, perhaps its counterpart"
                )
            if around is block:
                return Refusal(f"`{test}` has several collectives")
    if any(
        isinstance(node, (ast.Return, ast.Break, ast.Continue, ast.Raise)) for one in block.body for node in here(one)
    ):
        return Refusal(f"what stands under `{test}` may leave before the call")
    rest = _rest(code, block)
    if isinstance(rest, Refusal):
        return rest
    header = f"if {rest}:" if rest else ""
    rewrite = Rewrite(code)
    if is_direct and name in _BARRIERS and index == len(block.body) - 1 and index > 0:
        rewrite.move_after([statement], block, header)
        what = "behind the condition: all ranks meet there when it is done"
    else:
        before = block.body[: index + 1]
        own = [t for t in getattr(statement, "targets", [])]
        if not all(isinstance(one, ast.Name) for one in own):
            return Refusal("its result is kept where others may read it")
        trouble = _differs(code, block, before[:-1], call, {one.id for one in own if isinstance(one, ast.Name)})
        if trouble:
            return Refusal(trouble)
        rewrite.move_before(before, block, header)
        if len(before) == len(block.body):
            rewrite.remove(block)
        what = "in front of the condition, with the plain computations that make its input"
    return Change(
        code.path,
        rewrite.text(),
        f"Let all ranks come to {name}",
        (
            f"line {call.lineno} calls {name} for all ranks under `{test}`, which holds on some of them",
            "no other branch calls anything that would match it",
            f"it goes {what}",
        ),
    )


def _rest(code: Code, block: ast.If) -> str | Refusal:
    """The part of the condition that all ranks share: `step % 10 == 0` of `rank == 0 and step % 10 == 0`."""
    test = block.test
    is_and = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
    parts = test.values if isinstance(test, ast.BoolOp) and is_and else [test]
    others = [one for one in parts if not code.is_rank_local(one)]
    if any(isinstance(node, ast.BoolOp) for one in parts if code.is_rank_local(one) for node in ast.walk(one)):
        return Refusal(f"`{code.source(test)}` does not part what differs between ranks from what does not")
    loop = next(iter(code.loops(block)), None)
    step = counter(code, loop) if loop is not None else ""
    changing = {n.id for n in here(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} if loop else set()
    for one in others:
        named = {n.id for n in ast.walk(one) if isinstance(n, ast.Name)}
        if not is_pure(one) or named & (changing - {step}):
            return Refusal(f"`{code.source(one)}` may differ between ranks, too")
    return " and ".join(code.source(one) for one in others)


def _group_by_position(call: ast.Call, name: str) -> bool:
    most = {
        "barrier": 0,
        "monitored_barrier": 0,
        "all_reduce": 2,
        "all_gather": 2,
        "all_gather_into_tensor": 2,
        "broadcast": 2,
        "reduce": 3,
    }
    return len(call.args) > most.get(name, 9)


def _is_elif(code: Code, block: ast.If) -> bool:
    parent = next(code.ancestors(block), None)
    return isinstance(parent, ast.If) and block in parent.orelse


def _differs(code: Code, block: ast.If, before: list[ast.stmt], call: ast.Call, result: set[str]) -> str:
    """Why the other ranks cannot do these statements and the call; "" if they can. `result`: names that it is kept
    in."""
    made: set[str] = set()
    for one in before:
        if not isinstance(one, ast.Assign) or not all(isinstance(t, ast.Name) for t in one.targets):
            return f"line {one.lineno}, before the call, does more than compute its input"
        for node in ast.walk(one.value):
            if isinstance(node, ast.Call) and called(node) not in _COMPUTES:
                return f"line {one.lineno}, before the call, calls {called(node) or 'something'} on some ranks only"
        made |= {t.id for t in one.targets if isinstance(t, ast.Name)}
    wanted = {
        n.id
        for one in [*before, call]
        for n in ast.walk(one)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    }
    scope = code.scope(block)
    for name in wanted - made:
        for bound in bindings(scope, name) if isinstance(scope, Function) else []:
            around = next(
                (o for o in code.ancestors(bound) if isinstance(o, ast.If) and code.is_rank_local(o.test)), None
            )
            if around is not None:
                return f"{name} exists on some ranks only"
    for name in made | result:
        outside = [
            n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name and n not in set(ast.walk(block))
        ]
        if outside:
            return f"{name}, which would be computed on all ranks, is used elsewhere, too"
    return ""
