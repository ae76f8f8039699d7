"""What the source of a training program says, as far as a codemod must know it: names, loops, data flow.

Text in, syntax and facts out, by the standard `ast`; nothing is imported or run. Every question has a conservative
answer: a name that is bound twice has no known value, an import that is shadowed resolves to nothing. `rewriting` turns
what was decided here into text. Used by the codemods alone.

Wrong where names are made behind the syntax's back (`exec`, `setattr`, `from x import *`): then things are not found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

from eroica.source import parsed

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
MOST_CHARS = 1_000_000
"""A file that is longer was made by a program, and is not patched."""

_RANK = re.compile(
    r"(?i)(^|_)rank(_?id)?$|^is_(main|master|primary|rank_?(0|zero)|local_main)(_|$)|^(main|master)_process$"
)
_RANK_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK"}
)
_RANK_CALLS = frozenset({"get_rank", "get_local_rank", "get_node_local_rank", "is_main_process", "get_global_rank"})


class Code:
    """One file, parsed once. Raises SyntaxError if it is no Python, or too long."""

    def __init__(self, path: str, text: str) -> None:
        if len(text) > MOST_CHARS:
            raise SyntaxError(f"{path} has more than {MOST_CHARS:,} characters")
        self.path = path
        """Relative to the repository, with slashes."""
        self.text = text
        try:
            self.tree = parsed(text)
        except (ValueError, RecursionError, MemoryError) as error:
            raise SyntaxError(str(error)) from None
        self._parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
        self._imports = _imports(self.tree)

    # ---- where something stands

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """From the parent of `node` to the module."""
        while (found := self._parents.get(node)) is not None:
            yield found
            node = found

    def function(self, node: ast.AST) -> Function | None:
        """The function whose body `node` belongs to; a lambda is none."""
        return next((n for n in self.ancestors(node) if isinstance(n, Function)), None)

    def scope(self, node: ast.AST) -> Function | ast.Module:
        """Where the names of `node` are bound: its function, else the module."""
        return self.function(node) or self.tree

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The class that `node` stands in."""
        return next((n for n in self.ancestors(node) if isinstance(n, ast.ClassDef)), None)

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """The innermost statement that `node` is, or is a part of."""
        if isinstance(node, ast.stmt):
            return node
        return next((n for n in self.ancestors(node) if isinstance(n, ast.stmt)), None)

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The list of statements that `statement` is one of."""
        parent = self._parents.get(statement)
        for name in ("body", "orelse", "finalbody"):
            found = getattr(parent, name, None)
            if isinstance(found, list) and any(one is statement for one in found):
                return found
        return []

    def loops(self, node: ast.AST) -> list[Loop]:
        """Loops around `node` within its function, the innermost first."""
        found: list[Loop] = []
        below: ast.AST = node
        for one in self.ancestors(node):
            if isinstance(one, (Function, ast.Lambda, ast.ClassDef)):
                break
            if isinstance(one, Loop) and any(below is child for child in one.body):
                found.append(one)
            below = one
        return found

    def conditions(self, node: ast.AST, until: ast.AST | None = None) -> list[ast.expr]:
        """Tests of the `if`s around `node` within its function (and within `until`), the innermost first."""
        found = []
        for one in self.ancestors(node):
            if one is until or isinstance(one, (Function, ast.Lambda, ast.ClassDef)):
                break
            if isinstance(one, ast.If) and not _is_main_guard(one.test):
                found.append(one.test)
        return found

    def at(self, line: int) -> ast.stmt | None:
        """The statement that line `line`, from 1, belongs to: of a block its header alone."""
        found: ast.stmt | None = None
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt) and _begin(node) <= line <= _own_end(node):
                found = node if found is None or node.lineno >= found.lineno else found
        return found

    # ---- names

    def dotted(self, expression: ast.AST) -> str:
        """The full name that an expression goes by, imports resolved ("torch.nn.parallel.DistributedDataParallel");
        "" if it is none, or its first part is bound otherwise, too."""
        parts: list[str] = []
        while isinstance(expression, ast.Attribute):
            parts.append(expression.attr)
            expression = expression.value
        if not isinstance(expression, ast.Name):
            return ""
        name = expression.id
        scope = self.scope(expression)
        rebound = [b for b in (*bindings(scope, name), *bindings(self.tree, name)) if not isinstance(b, ast.alias)]
        if rebound:
            return ""
        return ".".join([self._imports.get(name, name), *reversed(parts)])

    def is_torch(self, expression: ast.AST, *names: str) -> bool:
        """`expression` is torch's own of one of these names, wherever torch keeps it: ("DataLoader",)."""
        full = self.dotted(expression)
        return full.startswith("torch.") and full.rpartition(".")[2] in names

    def value(self, expression: ast.expr) -> ast.expr:
        """What a name was given, where it was given one thing only, else the expression itself."""
        for _ in range(5):
            if not isinstance(expression, ast.Name):
                break
            scope: ast.AST = self.scope(expression)
            bound = bindings(scope, expression.id)
            if not bound and scope is not self.tree:
                bound = bindings(self.tree, expression.id)
            given = self.value_bound(bound[0]) if len(bound) == 1 else None
            if given is None:
                break
            expression = given
        return expression

    def value_bound(self, bound: ast.AST) -> ast.expr | None:
        """What is given to a name where it is bound, if that is a plain assignment."""
        statement = self._parents.get(bound)
        if isinstance(statement, ast.Assign) and bound in statement.targets:
            return statement.value
        if isinstance(statement, (ast.AnnAssign, ast.NamedExpr)) and statement.target is bound:
            return statement.value
        return None

    def is_shared(self, name: ast.expr) -> bool:
        """The name is read elsewhere in this file, too: another value for it would be another one there."""
        return isinstance(name, ast.Name) and any(
            isinstance(node, ast.Name) and node.id == name.id and node is not name and isinstance(node.ctx, ast.Load)
            for node in ast.walk(self.tree)
        )

    def named(self, name: str) -> Function | ast.ClassDef | None:
        """The function or class of this name at the top of the file, if there is exactly one and nothing else."""
        bound = bindings(self.tree, name)
        one = bound[0] if len(bound) == 1 else None
        return one if isinstance(one, (Function, ast.ClassDef)) else None

    def is_rank_local(self, expression: ast.AST, depth: int = 3) -> bool:
        """The value differs from rank to rank, as its names say: rank, LOCAL_RANK, get_rank(), is_main_process."""
        for node in ast.walk(expression):
            if isinstance(node, ast.Name):
                if _RANK.search(node.id):
                    return True
                given = self.value(node)
                if depth and given is not node and self.is_rank_local(given, depth - 1):
                    return True
            elif isinstance(node, ast.Attribute):
                if _RANK.search(node.attr) or node.attr in _RANK_CALLS:
                    return True
            elif isinstance(node, ast.Constant) and node.value in _RANK_VARIABLES:
                return True
        return False

    def is_main_script(self) -> bool:
        """Nothing but definitions happens when the file is imported."""
        for one in self.tree.body:
            plain = isinstance(one, (Function, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign))
            text = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
            if not (plain or text or (isinstance(one, ast.If) and _is_main_guard(one.test))):
                return False
        return True

    def source(self, node: ast.AST) -> str:
        """The text of a node, as it stands in the file."""
        return ast.get_source_segment(self.text, node) or ast.unparse(node)


class Sources:
    """The Python files of a repository, parsed when they are asked for."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self._parsed: dict[str, Code | None] = {}

    @property
    def paths(self) -> list[str]:
        """All of them, in order."""
        return sorted(self._texts)

    def text(self, path: str) -> str:
        """Of a file that may be of any language."""
        return self._texts[path]

    def code(self, path: str) -> Code | None:
        """None if it is no Python that this Python can read."""
        if path not in self._parsed:
            try:
                self._parsed[path] = Code(path, self._texts[path]) if path.endswith(".py") else None
            except SyntaxError:
                self._parsed[path] = None
        return self._parsed[path]

    def mentioning(self, *words: str) -> list[Code]:
        """Files that hold all of these words; those of tests never."""
        found = []
        for path in self.paths:
            if not is_test(path) and path.endswith(".py") and all(word in self._texts[path] for word in words):
                code = self.code(path)
                if code is not None:
                    found.append(code)
        return found

    def class_named(self, near: Code, name: str) -> tuple[Code, ast.ClassDef] | None:
        """The class of this name at the top of `near`, else of the one other file that has one."""
        found = []
        for code in (near, *(c for c in self.mentioning(f"class {name}") if c is not near)):
            one = code.named(name)
            if isinstance(one, ast.ClassDef):
                if code is near:
                    return code, one
                found.append((code, one))
        return found[0] if len(found) == 1 else None


def is_test(path: str) -> bool:
    """A file that tests the program, and is no part of it."""
    parts = path.split("/")
    return (
        bool({"tests", "test", "testing"} & set(parts[:-1]))
        or parts[-1].startswith("test_")
        or parts[-1] == "conftest.py"
    )


# ---- walking


def here(node: ast.AST | Iterable[ast.AST]) -> Iterator[ast.AST]:
    """`node` (or each of them) and all below, except for what is inside of functions and classes defined there."""
    todo = [node] if isinstance(node, ast.AST) else list(node)
    while todo:
        one = todo.pop(0)
        yield one
        if isinstance(one, (Function, ast.Lambda, ast.ClassDef)):
            continue
        todo = [*ast.iter_child_nodes(one), *todo]


def inside(scope: ast.AST) -> Iterator[ast.AST]:
    """All that belongs to the body of a function or module, its own parameters excluded."""
    for statement in getattr(scope, "body", []):
        yield from here(statement)


def calls(node: ast.AST | Iterable[ast.AST], method: str) -> list[ast.Call]:
    """Calls `anything.method(...)` and `method(...)` in here."""
    return [one for one in here(node) if isinstance(one, ast.Call) and called(one) == method]


def everywhere(tree: ast.AST, method: str) -> list[ast.Call]:
    """The same, also in what is defined in here."""
    return [one for one in ast.walk(tree) if isinstance(one, ast.Call) and called(one) == method]


def called(call: ast.Call) -> str:
    """The last part of the name of what is called; "" if it has none."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def names(node: ast.AST | Iterable[ast.AST]) -> set[str]:
    """Names that are read in here, those inside of lambdas and comprehensions included."""
    nodes = [node] if isinstance(node, ast.AST) else node
    return {n.id for one in nodes for n in ast.walk(one) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def bindings(scope: ast.AST, name: str) -> list[ast.AST]:
    """All that binds `name` in a function or module, parameters and imports included; `del` and `global` count."""
    found: list[ast.AST] = []
    if isinstance(scope, Function):
        arguments = scope.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        found += [one for one in every if one is not None and one.arg == name]
    for node in inside(scope):
        if isinstance(node, ast.Name):
            if node.id == name and not isinstance(node.ctx, ast.Load):
                found.append(node)
        elif isinstance(node, (Function, ast.ClassDef)):
            if node.name == name:
                found.append(node)
        elif isinstance(node, ast.alias):
            if (node.asname or node.name.partition(".")[0]) == name:
                found.append(node)
        elif isinstance(node, ast.ExceptHandler):
            if node.name == name:
                found.append(node)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            if name in node.names:
                found.append(node)
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name == name:
            found.append(node)
    return found


def argument(call: ast.Call, position: int | None, keyword: str) -> ast.expr | None:
    """What a call gives for a parameter; None where it is left out, or hidden in `*` or `**`."""
    for one in call.keywords:
        if one.arg == keyword:
            return one.value
    if position is None or any(isinstance(one, ast.Starred) for one in call.args[: position + 1]):
        return None
    return call.args[position] if position < len(call.args) else None


def has_stars(call: ast.Call) -> bool:
    """Some arguments cannot be seen."""
    return any(one.arg is None for one in call.keywords) or any(isinstance(one, ast.Starred) for one in call.args)


def constant(expression: ast.AST | None) -> object:
    """The value of a literal, a negative number included; None for anything else."""
    if isinstance(expression, ast.Constant):
        return expression.value
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub):
        value = constant(expression.operand)
        return -value if isinstance(value, (int, float)) else None
    return None


def is_pure(expression: ast.AST) -> bool:
    """It can be worked out twice, or not at all, and nobody notices: names, fields, numbers, comparisons, len()."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Call):
            if not (isinstance(node.func, ast.Name) and node.func.id in ("len", "int", "min", "max", "bool", "abs")):
                return False
        elif isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.Lambda, ast.Starred)):
            return False
    return True


def is_true(expression: ast.AST | None) -> bool:
    """The literal True."""
    return isinstance(expression, ast.Constant) and expression.value is True


def _imports(tree: ast.Module) -> dict[str, str]:
    """Name -> what it stands for. A name that stands for two things is left out."""
    found: dict[str, str] = {}
    twice = set()
    for node in ast.walk(tree):
        told: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            told = [(a.asname, a.name) if a.asname else (a.name.partition(".")[0],) * 2 for a in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            told = [(a.asname or a.name, f"{node.module}.{a.name}") for a in node.names]
        for name, full in told:
            if found.setdefault(name, full) != full:
                twice.add(name)
    return {name: full for name, full in found.items() if name not in twice}


def _begin(statement: ast.stmt) -> int:
    """First line, decorators included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def _own_end(statement: ast.stmt) -> int:
    """Last line of the statement itself: of a block, of its header."""
    body = getattr(statement, "body", None)
    if isinstance(statement, ast.Match):
        return statement.subject.end_lineno or statement.lineno
    if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
        first = body[0]
        return max(statement.lineno, _begin(first) - 1)
    return statement.end_lineno or statement.lineno


def _is_main_guard(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))
