"""Changes of a Python file that leave every other character as it is: statements wrapped, taken out, moved, put in,
arguments of calls set, expressions replaced.

    rewrite = Rewrite(code)
    rewrite.wrap([statement], "if step % 50 == 0:")
    text = rewrite.text()

Nodes are those of `reading.Code` (the standard `ast`, which is easy to reason about); the text is made by libcst, which
keeps comments and blanks and can indent. The two meet by position. A statement that shares its line with another one,
or a position that does not meet, raises UnfitError, and the codemod says that it does not fit. It decides nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from eroica.assist.reading import Code
from eroica.errors import UnavailableError
from eroica.source import lines_of

if TYPE_CHECKING:
    import libcst as cst

try:
    import libcst as cst
    from libcst.metadata import MetadataWrapper, PositionProvider
except ModuleNotFoundError as _error:
    if (_error.name or "").partition(".")[0] != "libcst":
        raise
    raise UnavailableError(
        "changes of code need libcst, which is not installed; try: pip install 'eroica[fix]'"
    ) from None

_Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement


class UnfitError(Exception):
    """The change cannot be made in this text; the message says why, and becomes a refusal."""


class Rewrite:
    """Changes of one file, collected and then made at once."""

    def __init__(self, code: Code) -> None:
        self._code = code
        wrapper = MetadataWrapper(cst.parse_module(code.text), unsafe_skip_copy=True)
        self._module = wrapper.module
        self._statements: dict[tuple[int, int], _Statement] = {}
        self._expressions: dict[tuple[int, int, int, int], cst.BaseExpression] = {}
        for node, span in wrapper.resolve(PositionProvider).items():
            if isinstance(node, _Statement):
                self._statements[span.start.line, span.start.column] = node
            elif isinstance(node, cst.BaseExpression):
                # Of nodes with one span the outermost comes last or first by chance; the one that says more is taken.
                key = (span.start.line, span.start.column, span.end.line, span.end.column)
                if key not in self._expressions or isinstance(node, (cst.Call, cst.Attribute)):
                    self._expressions[key] = node
        self._before: dict[int, list[cst.BaseStatement]] = {}
        self._after: dict[int, list[cst.BaseStatement]] = {}
        self._dropped: set[int] = set()
        self._unwrapped: set[int] = set()
        self._wraps: list[tuple[list[int], str]] = []
        self._replaced: dict[int, Callable[[Any], cst.CSTNode]] = {}
        self._import: list[str] = []

    # ---- what is to change

    def remove(self, statement: ast.stmt) -> None:
        """Take it out, and the comment that speaks of it alone."""
        self._dropped.add(self._key(statement))

    def unwrap(self, block: ast.stmt) -> None:
        """Put the body of a `with` in its place."""
        self._unwrapped.add(self._key(block))

    def wrap(self, statements: Sequence[ast.stmt], header: str) -> None:
        """Put neighbours into a block with this header."""
        self._wraps.append(([self._key(one) for one in statements], header))

    def before(self, statement: ast.stmt, source: str) -> None:
        """Put lines of code in front. Blank lines above stay above, a comment stays with its statement."""
        self._before.setdefault(self._key(statement), []).extend(self._parsed(source))

    def after(self, statement: ast.stmt, source: str) -> None:
        """Put lines of code behind."""
        self._after.setdefault(self._key(statement), []).extend(self._parsed(source))

    def move_before(self, statements: Sequence[ast.stmt], place: ast.stmt, header: str = "") -> None:
        """Take neighbours out of their block and put them in front of `place`, in a block with this header."""
        self._before.setdefault(self._key(place), []).extend(self._taken(statements, header))

    def move_after(self, statements: Sequence[ast.stmt], place: ast.stmt, header: str = "") -> None:
        """The same, behind `place`."""
        self._after.setdefault(self._key(place), []).extend(self._taken(statements, header))

    def _taken(self, statements: Sequence[ast.stmt], header: str) -> list[cst.BaseStatement]:
        nodes = [self._statement(one) for one in statements]
        self._dropped |= {id(node) for node in nodes}
        return [self._wrapped(header, list(nodes))] if header else list(nodes)

    def replace(self, expression: ast.expr, source: str, *, bare: bool = False) -> None:
        """Put another expression in its place. `bare`: a tuple without its brackets."""
        new = cst.parse_expression(source, config=self._module.config_for_parsing)
        if bare and isinstance(new, cst.Tuple):
            new = new.with_changes(lpar=[], rpar=[])
        self._change(expression, lambda updated: new)

    def set_argument(self, call: ast.Call, name: str, source: str) -> None:
        """Give a call this keyword argument, in the place of the one that it has, if it has one."""
        value = cst.parse_expression(source, config=self._module.config_for_parsing)
        self._change(call, lambda updated: _with_argument(updated, name, value))

    def remove_argument(self, call: ast.Call, name: str) -> None:
        """Take a keyword argument out."""
        self._change(call, lambda updated: _without_argument(updated, name))

    def remove_item(self, block: ast.With | ast.AsyncWith, index: int) -> None:
        """Take one of several context managers out of a `with`."""

        def change(updated: Any) -> cst.CSTNode:
            items = [one for n, one in enumerate(updated.items) if n != index]
            if not isinstance(updated.lpar, cst.LeftParen):
                items[-1] = items[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            return updated.with_changes(items=items)  # type: ignore[no-any-return]

        self._replaced[self._key(block)] = change

    def need_import(self, module: str) -> None:
        """`import module` at the top, unless it is there."""
        for node in self._code.tree.body:
            if isinstance(node, ast.Import) and any(a.name == module and not a.asname for a in node.names):
                return
        if module not in self._import:
            self._import.append(module)

    # ---- the outcome

    def text(self) -> str:
        """The file with all of it."""
        changed = self._module.visit(_Maker(self))
        for module in self._import:
            changed = _with_import(changed, module)
        return changed.code

    def blocks(self, original: Sequence[Any], updated: Sequence[Any]) -> list[Any]:
        """A list of statements, changed. `original`: by which they are known."""
        done: list[Any] = []
        begins = {keys[0]: (keys[-1], header) for keys, header in self._wraps}
        wrapping: tuple[int, str, list[Any]] | None = None
        carried: list[Any] = []
        for old, new in zip(original, updated, strict=True):
            key = id(old)
            if key in begins:
                wrapping = (*begins[key], [])
            target = wrapping[2] if wrapping is not None else done
            if carried and not (new.leading_lines and new.leading_lines[0].comment is None):
                new = new.with_changes(leading_lines=[*carried, *new.leading_lines])
            carried = []
            added = self._before.get(key, [])
            if added:
                blank, rest = _parted(new.leading_lines)
                target += [_below(added[0], blank), *added[1:]]
                is_apart = isinstance(added[-1], (cst.FunctionDef, cst.ClassDef))
                new = new.with_changes(leading_lines=[*blank, *rest] if is_apart else rest)
            if key in self._unwrapped:
                body = list(new.body.body)
                target += [_below(body[0], new.leading_lines), *body[1:]]
            elif key in self._dropped:
                # The comment directly above speaks of what goes.
                carried = list(new.leading_lines)
                while carried and carried[-1].comment is not None:
                    carried.pop()
            else:
                target.append(new)
            target += self._after.get(key, [])
            if wrapping is not None and key == wrapping[0]:
                done.append(self._wrapped(wrapping[1], wrapping[2]))
                wrapping = None
        return done

    def changed(self, original: cst.CSTNode, updated: Any) -> Any:
        """An expression or header, changed."""
        change = self._replaced.get(id(original))
        return change(updated) if change is not None else updated

    def _wrapped(self, header: str, body: list[Any]) -> cst.BaseStatement:
        block = cst.parse_statement(f"{header}\n    pass\n", config=self._module.config_for_parsing)
        above = body[0].leading_lines
        body[0] = body[0].with_changes(leading_lines=[])
        assert isinstance(block, cst.BaseCompoundStatement)
        return block.with_changes(leading_lines=above, body=block.body.with_changes(body=body))

    def _parsed(self, source: str) -> list[cst.BaseStatement]:
        parsed = cst.parse_module(source, config=self._module.config_for_parsing)
        statements: list[cst.BaseStatement] = list(parsed.body)
        if parsed.header and statements:
            statements[0] = _below(statements[0], parsed.header)
        return statements

    def _statement(self, statement: ast.stmt) -> _Statement:
        found = self._statements.get((statement.lineno, statement.col_offset))
        if found is None or (isinstance(found, cst.SimpleStatementLine) and len(found.body) != 1):
            raise UnfitError(f"line {statement.lineno} holds several statements")
        return found

    def _key(self, statement: ast.stmt) -> int:
        return id(self._statement(statement))

    def _change(self, expression: ast.expr, change: Callable[[Any], cst.CSTNode]) -> None:
        found = self._expressions.get(self._span(expression))
        if found is None:
            raise UnfitError(f"the expression in line {expression.lineno} cannot be told from those around it")
        before = self._replaced.get(id(found))
        self._replaced[id(found)] = change if before is None else lambda updated: change(before(updated))

    def _span(self, node: ast.expr) -> tuple[int, int, int, int]:
        """Where it stands: ast counts bytes in a line, libcst characters."""
        lines = lines_of(self._code.text)

        def column(line: int, offset: int) -> int:
            return len(lines[line - 1].encode()[:offset].decode(errors="replace"))

        end_line, end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return node.lineno, column(node.lineno, node.col_offset), end_line, column(end_line, end)


class _Maker(cst.CSTTransformer):
    """Walks the file once and makes the changes."""

    def __init__(self, rewrite: Rewrite) -> None:
        super().__init__()
        self._rewrite = rewrite

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        updated = self._rewrite.changed(original_node, super().on_leave(original_node, updated_node))
        if isinstance(original_node, (cst.Module, cst.IndentedBlock)):
            body = self._rewrite.blocks(original_node.body, updated.body)
            if not body and isinstance(original_node, cst.IndentedBlock):
                body = [cst.SimpleStatementLine([cst.Pass()])]
            updated = updated.with_changes(body=body)
        return updated


def _parted(lines: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Blank lines at the beginning, and the rest: comments that belong to the statement below."""
    number = next((n for n, line in enumerate(lines) if line.comment is not None), len(lines))
    return list(lines[:number]), list(lines[number:])


def _below(statement: Any, lines: Sequence[Any]) -> Any:
    return statement.with_changes(leading_lines=[*lines, *statement.leading_lines])


def _with_argument(call: Any, name: str, value: cst.BaseExpression) -> cst.CSTNode:
    arguments = list(call.args)
    for n, one in enumerate(arguments):
        if one.keyword is not None and one.keyword.value == name:
            arguments[n] = one.with_changes(value=value)
            return call.with_changes(args=arguments)  # type: ignore[no-any-return]
    new = cst.Arg(
        keyword=cst.Name(name),
        value=value,
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )
    if arguments:
        last = arguments[-1]
        space = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        if isinstance(last.comma, cst.Comma):
            on_lines = isinstance(call.whitespace_before_args, cst.ParenthesizedWhitespace)
            own_line = cst.Comma(whitespace_after=call.whitespace_before_args) if on_lines else space
            between = arguments[-2].comma if len(arguments) > 1 else own_line
            new = new.with_changes(comma=last.comma)
            arguments[-1] = last.with_changes(comma=between)
        else:
            between = arguments[-2].comma if len(arguments) > 1 else space
            new = new.with_changes(whitespace_after_arg=last.whitespace_after_arg)
            arguments[-1] = last.with_changes(comma=between, whitespace_after_arg=cst.SimpleWhitespace(""))
    return call.with_changes(args=[*arguments, new])  # type: ignore[no-any-return]


def _without_argument(call: Any, name: str) -> cst.CSTNode:
    arguments = list(call.args)
    gone = next(n for n, one in enumerate(arguments) if one.keyword is not None and one.keyword.value == name)
    last = gone == len(arguments) - 1
    removed = arguments.pop(gone)
    if last and arguments:
        arguments[-1] = arguments[-1].with_changes(
            comma=removed.comma, whitespace_after_arg=removed.whitespace_after_arg
        )
    return call.with_changes(args=arguments)  # type: ignore[no-any-return]


def _with_import(module: cst.Module, name: str) -> cst.Module:
    """In the first run of plain imports, where it belongs by the alphabet; else in front of the first import, else
    behind the docstring."""
    body = list(module.body)
    new = cst.parse_statement(f"import {name}\n", config=module.config_for_parsing)
    run: list[int] = []
    for n, one in enumerate(body):
        plain = isinstance(one, cst.SimpleStatementLine) and len(one.body) == 1 and isinstance(one.body[0], cst.Import)
        if plain and (not run or (n == run[-1] + 1 and not one.leading_lines)):
            run.append(n)
        elif run:
            break
    place = next((n for n in run if _imported(body[n]) > name), run[-1] + 1 if run else None)
    if place is None:
        place = next((n for n, one in enumerate(body) if _is_import(one) and not _is_future(one)), None)
    if place is None:
        place = next((n for n, one in enumerate(body) if not _is_docstring(one) and not _is_future(one)), len(body))
    if place < len(body) and (not run or place == run[0]):
        new = new.with_changes(leading_lines=body[place].leading_lines)
        body[place] = body[place].with_changes(leading_lines=[])
    return module.with_changes(body=[*body[:place], new, *body[place:]])


def _imported(statement: Any) -> str:
    return cst.Module([]).code_for_node(statement.body[0].names[0].name)


def _is_import(statement: Any) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(
        statement.body[0], (cst.Import, cst.ImportFrom)
    )


def _is_future(statement: Any) -> bool:
    one = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    return isinstance(one, cst.ImportFrom) and isinstance(one.module, cst.Name) and one.module.value == "__future__"


def _is_docstring(statement: Any) -> bool:
    one = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    return isinstance(one, cst.Expr) and isinstance(one.value, (cst.SimpleString, cst.ConcatenatedString))
