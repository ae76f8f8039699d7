"""Give each rank as many intra-op threads as it has cores.

The finding brings the numbers: threads per rank, ranks and cores of the host. It applies where the repository itself
sets that number: `torch.set_num_threads(24)`, a literal in the environment that it starts ranks with, or a line of a
start script. Where nobody sets any, the number is set where the process group is made. What a shell or a scheduler sets
outside of the repository is not ours to change.
"""

from __future__ import annotations

import ast
import re

from eroica.assist.change import Change, Lead, Refusal
from eroica.assist.reading import Code, Sources, argument, constant, is_test
from eroica.assist.rewriting import Rewrite

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm", ".env", ".yaml", ".yml", "Makefile", "Dockerfile")
_NAMED = re.compile(r"(?P<variable>[A-Z_]+_NUM_THREADS)=(?P<value>\d+)$|torch\.set_num_threads\((?P<call>\d+)\)$")


def propose(sources: Sources, lead: Lead) -> Change | Refusal:
    """Set cores / ranks."""
    named = _NAMED.match(lead.name)
    if named is None:
        return Refusal("the finding is not about a number of threads")
    cores, ranks = lead.values.get("cores"), lead.values.get("ranks")
    if not isinstance(cores, (int, float)) or not isinstance(ranks, int) or ranks < 1 or cores < 1:
        return Refusal("the finding does not tell how many cores and ranks the host has")
    share = max(int(cores // ranks), 1)
    seen = named["value"] or named["call"]
    found = [*_calls(sources, seen), *_literals(sources, seen)]
    lines = _lines(sources, seen)
    because = (f"{ranks} ranks share {cores:g} cores, so {share} thread{'s' if share > 1 else ''} each",)
    if len(found) + len(lines) > 1:
        where = ", ".join([f"{code.path}:{node.lineno}" for code, node in found] + [f"{p}:{n}" for p, n, _ in lines])
        return Refusal(f"{len(found) + len(lines)} places set that number ({where})")
    title = f"Use {share} intra-op thread{'s' if share > 1 else ''} per rank"
    if found:
        code, node = found[0]
        rewrite = Rewrite(code)
        rewrite.replace(node, str(share) if not isinstance(constant(node), str) else f'"{share}"')
        return Change(code.path, rewrite.text(), title, (f"{code.path}:{node.lineno} sets {seen}", *because))
    if lines:
        path, number, changed = lines[0]
        text = changed.replace(_SHARE, str(share))
        return Change(path, text, title, (f"{path}:{number} sets {seen}", *because))
    if named["variable"]:
        return Refusal(
            f"nothing in the repository sets {named['variable']}={seen}: it comes from the launcher or the shell"
        )
    return _inserted(sources, share, title, because)


def _calls(sources: Sources, seen: str) -> list[tuple[Code, ast.expr]]:
    """`torch.set_num_threads(24)`, its argument; also through a name or os.cpu_count()."""
    found = []
    for code in sources.mentioning("set_num_threads"):
        for node in ast.walk(code.tree):
            if isinstance(node, ast.Call) and code.dotted(node.func) == "torch.set_num_threads":
                given = argument(node, 0, "nthreads")
                value = code.value(given) if given is not None else None
                if value is not None and given is not None and str(constant(value)) == seen:
                    found.append((code, given if code.is_shared(given) else value))
                elif isinstance(value, ast.Call) and code.dotted(value.func) in (
                    "os.cpu_count",
                    "multiprocessing.cpu_count",
                ):
                    found.append((code, given if given is not None else value))
    return found


def _literals(sources: Sources, seen: str) -> list[tuple[Code, ast.expr]]:
    """The literal that an environment gets: environ["OMP_NUM_THREADS"] = "24", {"OMP_NUM_THREADS": "24"}."""
    found: list[tuple[Code, ast.expr]] = []
    for code in sources.mentioning("_NUM_THREADS"):
        for node in ast.walk(code.tree):
            pairs: list[tuple[ast.AST | None, ast.expr]] = []
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
                pairs = [(node.targets[0].slice, node.value)]
            elif isinstance(node, ast.Dict):
                pairs = list(zip(node.keys, node.values, strict=True))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 2:
                if node.func.attr in ("setdefault", "putenv"):
                    pairs = [(node.args[0], node.args[1])]
            elif isinstance(node, ast.Call):
                pairs = [(ast.Constant(k.arg), k.value) for k in node.keywords if k.arg in _VARIABLES]
            for key, value in pairs:
                given = value if code.is_shared(value) else code.value(value)
                if (
                    isinstance(given, ast.Call)
                    and isinstance(given.func, ast.Name)
                    and given.func.id == "str"
                    and given.args
                ):
                    given = given.args[0] if code.is_shared(given.args[0]) else code.value(given.args[0])
                if constant(key) in _VARIABLES and str(constant(given)) == seen:
                    found.append((code, given))
    return found


_SHARE = "\0share\0"


def _lines(sources: Sources, seen: str) -> list[tuple[str, int, str]]:
    """Lines of start scripts that set it: path, line, the text with a mark for the new number."""
    found = []
    pattern = re.compile(
        rf"(?m)^(?P<before>[^#\n]*\b(?:{'|'.join(_VARIABLES)})\s*[=:]\s*[\"']?){re.escape(seen)}(?![\w.])"
    )
    for path in sources.paths:
        if path.endswith(_SCRIPTS) and not is_test(path):
            text = sources.text(path)
            for match in pattern.finditer(text):
                end = match.end("before")
                changed = text[:end] + _SHARE + text[end + len(seen) :]
                found.append((path, text.count("\n", 0, end) + 1, changed))
    return found


def _inserted(sources: Sources, share: int, title: str, because: tuple[str, ...]) -> Change | Refusal:
    for code in sources.mentioning("set_num_threads"):
        return Refusal(f"{code.path} sets a number of threads that is not this one")
    found = [
        (code, node)
        for code in sources.mentioning("init_process_group")
        for node in ast.walk(code.tree)
        if isinstance(node, ast.Call) and code.dotted(node.func) == "torch.distributed.init_process_group"
    ]
    if len(found) != 1:
        return Refusal(f"the process group is made in {len(found)} places, so that it is not known where to set it")
    code, call = found[0]
    statement = code.statement(call)
    if not isinstance(statement, ast.Expr):
        return Refusal(f"{code.path}:{call.lineno} is no statement of its own")
    rewrite = Rewrite(code)
    rewrite.before(statement, f"torch.set_num_threads({share})\n")
    rewrite.need_import("torch")
    return Change(
        code.path,
        rewrite.text(),
        title,
        ("nothing in the repository sets a number of threads, and each rank makes its process group here", *because),
    )
