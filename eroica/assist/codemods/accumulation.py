"""Reduce gradients on the last micro-step of an accumulation only: `no_sync` of DistributedDataParallel,
`set_requires_gradient_sync` of FSDP2.

It applies to a loop with one backward pass whose optimizer steps under a condition that can be worked out before the
forward pass: a function of the loop's counter and of what the loop does not change, the same on all ranks. Forward and
backward both go under the context, as DistributedDataParallel demands. Not where gradients are looked at between
(clipping, norms, a step behind the loop for what is left): they would be those of one rank.

The backward pass may stand in a function or method of the same file that the loop calls, as trainers have it
(`self.training_step(batch)`): then the call goes under the context, if the model is called in there, too.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from eroica.assist.change import Change, Lead, Refusal
from eroica.assist.reading import (
    Code,
    Function,
    Sources,
    bindings,
    called,
    calls,
    everywhere,
    here,
    inside,
    is_pure,
    names,
)
from eroica.assist.rewriting import Rewrite

_SCHEDULES = ("sched", "lr", "warmup", "prof", "ema", "bar")
"""Parts of names of what has a step() and is no optimizer."""
_DEEPEST = 3
"""Calls between the loop and the backward pass."""
_LOOKS = ("clip_grad_norm_", "clip_grad_value_", "unscale_", "get_total_norm", "clip_grads_with_norm_")


@dataclass(frozen=True, slots=True)
class _Accumulation:
    loop: ast.For | ast.AsyncFor
    first: ast.stmt
    """From here ..."""
    last: ast.stmt
    """... to here: forward and backward."""
    model: str
    kind: str
    """ddp or fsdp."""
    is_last: str
    """When the gradients are needed."""


def propose(sources: Sources, lead: Lead) -> Change | Refusal:
    """Put all micro-steps but the last under `no_sync`."""
    del lead
    found: list[tuple[Code, _Accumulation]] = []
    reasons = []
    for code in sources.mentioning("backward"):
        for call in everywhere(code.tree, "backward"):
            seen = _look(code, call)
            if isinstance(seen, Refusal):
                reasons.append(f"{code.path}:{call.lineno}: {seen.reason}")
            else:
                found.append((code, seen))
    if len(found) != 1:
        where = ", ".join(f"{code.path}:{one.loop.lineno}" for code, one in found)
        return Refusal(f"{len(found)} loops accumulate ({where})" if found else
                       "; ".join(reasons[:3]) or "no backward pass is in the repository")  # fmt: skip
    code, one = found[0]
    rewrite = Rewrite(code)
    if one.kind == "ddp":
        block = code.block(one.first)
        begin, end = block.index(one.first), block.index(one.last)
        rewrite.wrap(
            block[begin : end + 1], f"with contextlib.nullcontext() if {one.is_last} else {one.model}.no_sync():"
        )
        rewrite.need_import("contextlib")
    else:
        rewrite.before(one.first, f"{one.model}.set_requires_gradient_sync({one.is_last})\n")
    return Change(
        code.path,
        rewrite.text(),
        "Reduce gradients on the last micro-step of an update only",
        (
            f"{one.model} is a model of {'DistributedDataParallel' if one.kind == 'ddp' else 'FSDP'}, and the loop in "
            f"line {one.loop.lineno} steps its optimizer when `{one.is_last}`",
            "that is known before the forward pass and the same on all ranks",
            "no gradient is read, clipped or zeroed between, and no optimizer steps elsewhere",
        ),
        ("where the number of micro-steps is no multiple, what is left over is reduced with the next update",),
    )


def _look(code: Code, backward: ast.Call) -> _Accumulation | Refusal:
    place, within = _called_in_a_loop(code, backward)
    loops = code.loops(place)
    if not loops or isinstance(loops[0], ast.While):
        return Refusal("the backward pass is in no `for` loop")
    loop = loops[0]
    assert not isinstance(loop, ast.While)
    if len(calls(within[0].body if within else loop.body, "backward")) != 1:
        return Refusal("the loop has several backward passes")
    if within and (calls(loop.body, "backward") or code.conditions(backward) or code.conditions(place, loop)):
        return Refusal("the backward pass stands under a condition, or is one of several")
    for node in (node for function in within for node in here(function.body)):
        if _handles_gradients(node):
            return Refusal(f"line {getattr(node, 'lineno', 0)} looks at gradients in each micro-step")
    last = _top(code, place, loop)
    if last is None or isinstance(last, (ast.If, ast.Try)):
        return Refusal("the backward pass stands under a condition")
    if any(isinstance(node, ast.Attribute) and node.attr in ("no_sync", "set_requires_gradient_sync")
           for node in ast.walk(code.tree)):  # fmt: skip
        return Refusal("the file decides already which micro-steps reduce gradients")
    told = _model(code, loop.body[: loop.body.index(last) + 1]) or _model(code, [s for f in within for s in f.body])
    if told is None:
        return Refusal("no model of DistributedDataParallel or FSDP is seen in the loop")
    model, kind = told
    body = loop.body
    if within and (not model.startswith("self.") or code.class_of(loop) is not code.class_of(within[0])):
        return Refusal(
            f"{model} is called in another function than the one with the loop, and is no field of one object"
        )
    first = next((one for one in body if model in _read(one)), last)
    begin, end = body.index(first), body.index(last)
    if begin > end:
        return Refusal("the model is called behind the backward pass")
    if any(
        isinstance(node, (ast.Continue, ast.Break, ast.Return)) for one in body[begin : end + 1] for node in here(one)
    ):
        return Refusal("the loop may be left between forward and backward pass")
    guarded = _guard(code, loop, end)
    if isinstance(guarded, Refusal):
        return guarded
    guard, is_last, stepping = guarded
    between = [*body[begin:end], last, *body[end + 1 : body.index(guard)]] if guard in body else body[begin:]
    changed = {name for one in between for node in here(one) for name in _bound(node)}
    wanted = names(ast.parse(is_last, mode="eval"))
    if wanted & changed:
        return Refusal(
            f"`{is_last}` depends on {', '.join(sorted(wanted & changed))}, which changes after the forward pass"
        )
    if code.is_rank_local(guard.test if isinstance(guard, ast.If) else loop.iter):
        return Refusal(f"`{is_last}` differs from rank to rank")
    scope = code.scope(loop)
    # Where an inner loop is the guard itself, what is in it runs for each micro-step.
    inside_guard = set(here(guard)) if guard is not loop else set()
    for node in inside(scope):
        if not isinstance(node, ast.Call) or node in inside_guard or node in stepping:
            continue
        if called(node) == "step" and _is_optimizer(node):
            return Refusal(f"line {node.lineno} also steps an optimizer, with gradients of its rank alone")
    for one in body:
        if one is guard:
            continue
        for node in here(one):
            if node in stepping or (isinstance(node, ast.Call) and node in inside_guard):
                continue
            if isinstance(node, ast.Attribute) and node.attr == "grad":
                return Refusal(f"line {node.lineno} looks at gradients in each micro-step")
            if isinstance(node, ast.Call) and called(node) in _LOOKS and not _follows(body, one, guard):
                return Refusal(f"line {node.lineno} looks at gradients in each micro-step")
            if not isinstance(node, ast.Call) or called(node) != "zero_grad" or _follows(body, one, guard):
                continue
            if not any(is_pure(test) for test in code.conditions(node, loop)):
                return Refusal(f"line {node.lineno} zeroes the gradients in each micro-step: nothing is accumulated")
    return _Accumulation(loop, first, last, model, kind, is_last)


def _guard(code: Code, loop: ast.For | ast.AsyncFor, end: int) -> tuple[ast.stmt, str, set[ast.AST]] | Refusal:
    """The statement that decides whether this is the last micro-step, the test for it, and what steps then."""
    body = loop.body
    for n, one in enumerate(body[end + 1 :], end + 1):
        if not isinstance(one, ast.If):
            if any(_is_optimizer(call) for call in calls(one, "step")):
                return Refusal("the optimizer steps after each backward pass: there are no micro-steps")
            continue
        if not is_pure(one.test) or not _has_remainder(code, one.test):
            continue
        if any(_is_optimizer(call) for call in calls(one.body, "step")) and not one.orelse:
            return one, code.source(one.test), set()
        if len(one.body) == 1 and isinstance(one.body[0], ast.Continue) and not one.orelse:
            rest = body[n + 1 :]
            if any(_is_optimizer(call) for call in calls(rest, "step")):
                return one, f"not ({code.source(one.test)})", {node for r in rest for node in here(r)}
    outer = [around for around in code.loops(loop)]
    siblings = code.block(loop)
    behind = siblings[siblings.index(loop) + 1 :] if loop in siblings else []
    steps = [call for call in calls(behind, "step") if _is_optimizer(call)]
    if outer and len(steps) == 1 and not code.conditions(steps[0], outer[0]):
        test = _last_of(loop)
        if test:
            # All that follows the loop belongs to the update.
            return loop, test, {node for one in behind for node in here(one)}
        return Refusal("it cannot be told which pass of the inner loop is the last one")
    return Refusal("no condition on the number of micro-steps decides when the optimizer steps")


def _last_of(loop: ast.For | ast.AsyncFor) -> str:
    """A test for the last pass of an inner loop: `i == n - 1`; "" if it cannot be written."""
    call, target = loop.iter, loop.target
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
        return ""
    if call.func.id == "range" and len(call.args) == 1 and isinstance(target, ast.Name) and is_pure(call.args[0]):
        return f"{target.id} == {ast.unparse(call.args[0])} - 1"
    is_pair = isinstance(target, ast.Tuple) and len(target.elts) == 2 and isinstance(target.elts[0], ast.Name)
    if call.func.id == "enumerate" and len(call.args) == 1 and is_pair and isinstance(call.args[0], ast.Name):
        assert isinstance(target, ast.Tuple)
        counter = target.elts[0]
        assert isinstance(counter, ast.Name)
        return f"{counter.id} == len({call.args[0].id}) - 1"
    return ""


def _has_remainder(code: Code, test: ast.expr, depth: int = 2) -> bool:
    """It asks for a remainder, itself or through a name."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return True
        if isinstance(node, ast.Name) and depth:
            given = code.value(node)
            if given is not node and is_pure(given) and _has_remainder(code, given, depth - 1):
                return True
    return False


def _is_optimizer(call: ast.Call) -> bool:
    """`optimizer.step()`, `scaler.step(optimizer)`, and not `scheduler.step()`."""
    if not isinstance(call.func, ast.Attribute):
        return False
    name = ast.unparse(call.func.value).lower()
    return not any(part in name for part in _SCHEDULES)


def _model(code: Code, before: list[ast.stmt]) -> tuple[str, str] | None:
    """The name of the model that is called there, and what shares its gradients."""
    for node in here(before):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            kind = sharing(code, node)
            if kind:
                return ast.unparse(node), kind
    return None


def _called_in_a_loop(code: Code, backward: ast.Call) -> tuple[ast.AST, list[Function]]:
    """Where the loop has the backward pass, and the functions in between that it stands in, the innermost first, with
    those of the same object that they call. No functions: it stands in the loop itself, or in none that can be told."""
    place: ast.AST = backward
    within: list[Function] = []
    while not code.loops(place) and len(within) < _DEEPEST:
        function = code.function(place)
        callers = [] if function is None else everywhere(code.tree, function.name)
        if function is None or len(callers) != 1 or function.decorator_list:
            return backward, []
        if code.class_of(function) is not code.class_of(callers[0]) or code.function(callers[0]) is function:
            return backward, []
        within.append(function)
        place = callers[0]
    owner = code.class_of(place)
    methods = {one.name: one for one in owner.body if isinstance(one, Function)} if owner is not None else {}
    for function in within:  # grows while it is gone through
        for call in here(function.body):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            one = methods.get(call.func.attr) if ast.unparse(call.func.value) == "self" else None
            if one is not None and one not in within:
                within.append(one)
    return place, within


def _handles_gradients(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "grad":
        return True
    return isinstance(node, ast.Call) and (
        called(node) in (*_LOOKS, "zero_grad") or (called(node) == "step" and _is_optimizer(node))
    )


def sharing(code: Code, expression: ast.expr) -> str:
    """ "ddp" or "fsdp" if the expression is a model that shares gradients so, as far as the file tells; else ""."""
    if isinstance(expression, ast.Attribute):
        owner = code.class_of(expression)
        if not (isinstance(expression.value, ast.Name) and expression.value.id == "self" and owner is not None):
            return ""
        given = [
            node.value
            for node in ast.walk(owner)
            if isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Attribute) and t.attr == expression.attr and ast.unparse(t.value) == "self"
                    for t in node.targets)
        ]  # fmt: skip
        return _made(code, given[-1]) if given and len({_made(code, one) for one in given[-1:]}) == 1 else ""
    if not isinstance(expression, ast.Name):
        return ""
    scope = code.scope(expression)
    bound = bindings(scope, expression.id)
    if not bound and scope is not code.tree:
        bound = bindings(code.tree, expression.id)
    if len(bound) == 1 and isinstance(bound[0], ast.arg) and isinstance(scope, Function):
        return _passed(code, scope, bound[0].arg)
    kinds = [_made(code, value) for one in bound if (value := code.value_bound(one)) is not None]
    if kinds and len(kinds) == len(bound) and kinds[-1]:
        return kinds[-1]
    if len(bound) >= 1 and any(_shards(code, node, expression.id) for node in inside(scope)):
        return "fsdp"
    return ""


def _made(code: Code, value: ast.expr) -> str:
    if not isinstance(value, ast.Call):
        return ""
    if code.is_torch(value.func, "DistributedDataParallel"):
        return "ddp"
    return "fsdp" if code.is_torch(value.func, "fully_shard") else ""


def _shards(code: Code, node: ast.AST, name: str) -> bool:
    """`fully_shard(name)`"""
    return (
        isinstance(node, ast.Call)
        and code.is_torch(node.func, "fully_shard")
        and bool(node.args)
        and isinstance(node.args[0], ast.Name)
        and node.args[0].id == name
    )


def _passed(code: Code, function: Function, parameter: str) -> str:
    """What all callers in this file pass for a parameter, or what its annotation says."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    told = next((one.annotation for one in every if one.arg == parameter), None)
    if told is not None and code.is_torch(told, "DistributedDataParallel"):
        return "ddp"
    position = next((n for n, one in enumerate(function.args.args) if one.arg == parameter), None)
    kinds = set()
    for call in ast.walk(code.tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == function.name:
            given = next((k.value for k in call.keywords if k.arg == parameter), None)
            if given is None and position is not None and position < len(call.args):
                given = call.args[position]
            kinds.add(
                sharing(code, given)
                if isinstance(given, (ast.Name, ast.Attribute)) and code.function(given) is not function
                else ""
            )
    return kinds.pop() if len(kinds) == 1 else ""


def _top(code: Code, node: ast.AST, loop: ast.For | ast.AsyncFor) -> ast.stmt | None:
    """The statement of the loop's body that `node` is a part of."""
    around = {node, *code.ancestors(node)}
    return next((one for one in loop.body if one in around), None)


def _read(statement: ast.stmt) -> set[str]:
    return {ast.unparse(n) for n in here(statement) if isinstance(n, (ast.Name, ast.Attribute))}


def _bound(node: ast.AST) -> list[str]:
    return [node.id] if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) else []


def _follows(body: list[ast.stmt], one: ast.stmt, guard: ast.stmt) -> bool:
    """`one` runs for the last micro-step only: it comes behind a guard that goes on with the next one."""
    if guard not in body or not isinstance(guard, ast.If) or not isinstance(guard.body[0], ast.Continue):
        return False
    return body.index(one) > body.index(guard)
