"""Take out `find_unused_parameters=True` where every parameter is used in every forward pass.

The flag makes DistributedDataParallel walk the graph after each forward pass. To take it out wrongly ends training with
an error, so the model's code must show that it is not needed: classes of this repository whose `forward` uses every
submodule and parameter that `__init__` makes, under no condition, with no early return, and gives one result, which the
loss is made of. Layers of torch.nn that always use what they have are known by name; anything else is "cannot tell".
"""

from __future__ import annotations

import ast

from eroica.assist.change import Change, Lead, Refusal
from eroica.assist.codemods.training import given_for
from eroica.assist.reading import Code, Function, Sources, argument, called, constant, here, is_true
from eroica.assist.rewriting import Rewrite, UnfitError

_LAYERS = frozenset(
    "Linear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d BatchNorm1d BatchNorm2d "
    "BatchNorm3d SyncBatchNorm LayerNorm GroupNorm RMSNorm InstanceNorm2d Embedding ReLU GELU SiLU Tanh Sigmoid "
    "Softmax LogSoftmax LeakyReLU ELU Mish Hardswish PReLU Dropout Dropout1d Dropout2d Flatten Unflatten Identity "
    "MaxPool1d MaxPool2d AvgPool1d AvgPool2d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveMaxPool2d Upsample "
    "PixelShuffle ZeroPad2d TransformerEncoderLayer GLU Softplus".split()
)
"""Layers that use all of their parameters whenever they are called."""
_CONTAINERS = ("Sequential", "ModuleList")


def propose(sources: Sources, lead: Lead) -> Change | Refusal:
    """Remove the argument."""
    del lead
    found = [
        (code, node)
        for code in sources.mentioning("find_unused_parameters")
        for node in ast.walk(code.tree)
        if isinstance(node, ast.Call) and code.is_torch(node.func, "DistributedDataParallel")
        and argument(node, None, "find_unused_parameters") is not None
    ]  # fmt: skip
    found = [
        (code, node) for code, node in found if constant(argument(node, None, "find_unused_parameters")) is not False
    ]
    if len(found) != 1:
        return Refusal(f"{len(found)} models are made with find_unused_parameters" if found else
                       "no DistributedDataParallel of the repository is given find_unused_parameters")  # fmt: skip
    code, call = found[0]
    where = f"{code.path}:{call.lineno}"
    given = argument(call, None, "find_unused_parameters")
    if not is_true(given):
        return Refusal(
            f"find_unused_parameters at {where} is {code.source(given) if given is not None else '?'}; change it where "
            "that comes from"
        )
    wrapped = argument(call, 0, "module")
    made, model = code, _value(code, _bare(wrapped), call)
    if isinstance(model, ast.Name):
        told = given_for(sources, code, model)
        if told is not None:
            made, model = told[0], _value(told[0], _bare(told[1]), told[2])
    if not isinstance(model, ast.Call):
        return Refusal(f"which model is wrapped at {where} cannot be told")
    try:
        _all_used(sources, made, model, set())
        _loss_needs_all(code, call)
        _is_left_alone(code)
        _is_left_alone(made)
    except UnfitError as error:
        return Refusal(str(error))
    rewrite = Rewrite(code)
    rewrite.remove_argument(call, "find_unused_parameters")
    return Change(
        code.path,
        rewrite.text(),
        "Look for unused parameters no more",
        (
            f"the model wrapped at {where} uses every parameter in every forward pass, and its one result goes into "
            "the loss",
        ),
    )


def _value(code: Code, wrapped: ast.expr | None, call: ast.Call) -> ast.expr | None:
    """What is wrapped: `model` may be bound again to its wrapper, `model = DDP(model)`."""
    if not isinstance(wrapped, ast.Name):
        return wrapped
    from eroica.assist.reading import bindings

    own = code.statement(call)
    bound = [b for b in bindings(code.scope(wrapped), wrapped.id) if code.statement(b) is not own]
    if len(bound) == 1 and isinstance(bound[0], ast.arg):
        return wrapped
    value = code.value_bound(bound[0]) if len(bound) == 1 else None
    return _bare(value)


def _bare(model: ast.expr | None) -> ast.expr | None:
    """Without `.to(device)` and the like behind it, which give the model itself back."""
    while (
        isinstance(model, ast.Call)
        and isinstance(model.func, ast.Attribute)
        and model.func.attr in ("to", "cuda", "train")
    ):
        model = model.func.value
    return model


def _all_used(sources: Sources, code: Code, made: ast.Call, seen: set[int]) -> None:
    """Raises UnfitError unless the module uses all of its parameters whenever it is called."""
    name = called(made)
    if code.is_torch(made.func, *_LAYERS):
        return
    if code.is_torch(made.func, "Sequential"):
        for one in made.args:
            inner = one.value if isinstance(one, ast.Starred) else one
            if isinstance(inner, (ast.GeneratorExp, ast.ListComp)):
                inner = inner.elt
            if not isinstance(inner, ast.Call):
                raise UnfitError(f"what nn.Sequential holds in line {made.lineno} cannot be told")
            _all_used(sources, code, inner, seen)
        return
    found = sources.class_named(code, name)
    if found is None:
        raise UnfitError(f"{name or 'the model'} is not known to use all of its parameters")
    where, owner = found
    if id(owner) in seen:
        return
    seen.add(id(owner))
    _class_uses_all(sources, where, owner, seen)


def _class_uses_all(sources: Sources, code: Code, owner: ast.ClassDef, seen: set[int]) -> None:
    at = f"{owner.name} ({code.path}:{owner.lineno})"
    if [ast.unparse(base).rpartition(".")[2] for base in owner.bases] != ["Module"]:
        raise UnfitError(f"{at} inherits from more than nn.Module")
    methods = {one.name: one for one in owner.body if isinstance(one, Function)}
    start, forward = methods.get("__init__"), methods.get("forward")
    if start is None or forward is None:
        raise UnfitError(f"{at} has no __init__ and forward of its own")
    parts: dict[str, int] = {}
    for node in ast.walk(start):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if not (isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"):
                    continue
                if node.value is not None and _holds(sources, code, node.value, at, seen):
                    parts[target.attr] = node.lineno
        elif isinstance(node, ast.Call) and called(node) in ("add_module", "register_module", "setattr"):
            raise UnfitError(f"{at} adds modules by name in line {node.lineno}")
        elif isinstance(node, ast.Attribute) and node.attr in ("requires_grad", "requires_grad_", "weight", "bias"):
            raise UnfitError(f"{at} handles parameters itself in line {node.lineno}")
    used: set[str] = set()
    returns = [node for node in here(forward.body) if isinstance(node, ast.Return)]
    if len(returns) != 1 or returns[0] is not forward.body[-1] or returns[0].value is None:
        raise UnfitError(f"forward of {at} may end in several ways")
    if isinstance(returns[0].value, (ast.Tuple, ast.Dict, ast.List)):
        raise UnfitError(f"forward of {at} gives several results, of which the loss may use some")
    for statement in forward.body:
        for node in here(statement):
            if isinstance(
                node, (ast.If, ast.IfExp, ast.While, ast.Try, ast.Match, ast.BoolOp, ast.Break, ast.Continue)
            ):
                raise UnfitError(f"forward of {at} decides what it uses in line {node.lineno}")
            if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Tuple, ast.List, ast.Dict)):
                raise UnfitError(f"forward of {at} keeps several results in line {node.lineno}")
            if isinstance(node, ast.Call) and called(node) == "zip":
                raise UnfitError(f"forward of {at} may use fewer modules than it has in line {node.lineno}")
            if isinstance(node, ast.Call) and called(node) in ("checkpoint", "no_grad", "detach", "inference_mode"):
                raise UnfitError(f"forward of {at} leaves gradients out in line {node.lineno}")
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("self."):
                raise UnfitError(f"forward of {at} chooses among its modules in line {node.lineno}")
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                used.add(node.attr)
    for name, line in parts.items():
        if name not in used:
            raise UnfitError(f"forward of {at} does not use {name} of line {line}: the flag is needed")
    _flows(code, forward, at, set(parts))


def _holds(sources: Sources, code: Code, value: ast.expr, at: str, seen: set[int]) -> bool:
    """It is a module or a parameter (whose own parameters are then looked at), not a number or a name."""
    if not isinstance(value, ast.Call):
        if isinstance(value, (ast.Constant, ast.Name, ast.BinOp, ast.Attribute, ast.Compare, ast.Tuple)):
            return False
        raise UnfitError(f"what {at} keeps in line {value.lineno} cannot be told")
    if code.is_torch(value.func, "Parameter"):
        return True
    if code.is_torch(value.func, "ModuleList"):
        inner = value.args[0] if len(value.args) == 1 else None
        elements = [inner.elt] if isinstance(inner, (ast.GeneratorExp, ast.ListComp)) else getattr(inner, "elts", None)
        if not elements or not all(isinstance(one, ast.Call) for one in elements):
            raise UnfitError(f"what the list of {at} in line {value.lineno} holds cannot be told")
        for one in elements:
            if isinstance(one, ast.Call):
                _all_used(sources, code, one, seen)
        return True
    if isinstance(value.func, ast.Name) and value.func.id in ("int", "float", "len", "tuple", "str"):
        return False
    _all_used(sources, code, value, seen)
    return True


def _flows(code: Code, forward: Function, at: str, parts: set[str]) -> None:
    """Everything that is computed reaches the result: each name that is given is read later on, and no module is called
    for nothing."""
    for node in here(forward.body):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            raise UnfitError(f"forward of {at} does not use a result in line {node.lineno}")
    given = [n for n in here(forward.body) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    for one in given:
        inside_loop = any(isinstance(a, ast.For) for a in code.ancestors(one) if a is not forward)
        later = [
            n for n in here(forward.body)
            if isinstance(n, ast.Name) and n.id == one.id and isinstance(n.ctx, ast.Load)
            and (inside_loop or (n.lineno, n.col_offset) > (one.lineno, one.col_offset))
        ]  # fmt: skip
        if not later and one.id != "_":
            raise UnfitError(f"forward of {at} does not use {one.id} of line {one.lineno}")
        if one.id == "_":
            raise UnfitError(f"forward of {at} drops a result in line {one.lineno}")


def _loss_needs_all(code: Code, wrapped: ast.Call) -> None:
    """The wrapped model gets a name, or is what a function gives back."""
    statement = code.statement(wrapped)
    is_named = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    if not is_named and not isinstance(statement, ast.Return):
        raise UnfitError(f"what becomes of the model in line {wrapped.lineno} cannot be told")


def _is_left_alone(code: Code) -> None:
    """No parameter is frozen where models are made."""
    for node in ast.walk(code.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("requires_grad", "requires_grad_"):
            raise UnfitError(f"{code.path}:{node.lineno} freezes parameters, or thaws them")
