"""What the command line shows: results on stdout, sentences and progress on stderr, reports in files. Used by `cli` and
its parts alone; no other module prints.

A file is replaced as a whole, so that nobody reads half of it; a character that a terminal's encoding lacks does not
lose an answer; what comes from elsewhere is escaped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from eroica.errors import EroicaError, UserError

if TYPE_CHECKING:
    from eroica.findings import Detail, Diagnosis


def render(diagnosis: Diagnosis, detail: Detail | None, form: str) -> str:
    """Text of a diagnosis, as "text" as wide as the terminal; `form`: one of `cli.FORMATS`."""
    from eroica import report

    if form == "json":
        return report.render_json(diagnosis)
    if form == "md":
        return report.render_markdown(diagnosis)
    if form == "html":
        return report.render_html(diagnosis, detail)
    if form == "prompt":
        return report.render_prompt(diagnosis)
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns if on_terminal else 100
    return report.render_text(diagnosis, detail, width=width, color=on_terminal and not os.environ.get("NO_COLOR"))


def print_diagnosis(diagnosis: Diagnosis, detail: Detail | None, form: str) -> None:
    """To stdout."""
    print_text(render(diagnosis, detail, form).rstrip("\n") + "\n")


def print_text(text: str) -> None:
    """Write to stdout in what encoding it has; a character that it lacks must not lose the answer."""
    if sys.stdout is None:
        raise UserError("standard output is closed, so the result cannot be shown; redirect it to a file")
    sys.stdout.write(encodable(text, sys.stdout.encoding))
    sys.stdout.flush()


def encodable(text: str, encoding: str | None) -> str:
    """The text, with escapes for what the encoding lacks."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def say(message: str) -> None:
    """A sentence on stderr. File names and contents come from elsewhere: no escape sequence may reach the terminal."""
    from eroica.untrusted import escape

    if sys.stderr is not None:  # as it is if the caller closed it
        with contextlib.suppress(OSError):
            sys.stderr.write(escape(message) + "\n")


def write_reports(
    folder: Path,
    diagnosis: Diagnosis,
    detail: Detail | None,
    names: tuple[str, str] = ("diagnosis.json", "report.html"),
) -> EroicaError | None:
    """Returns the error instead of raising it: a full disk must not lose an answer that can still be printed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / names[0], render(diagnosis, detail, "json"))
        write_file(folder / names[1], render(diagnosis, detail, "html"))
    except OSError as error:
        return UserError(
            f"{folder}: the reports cannot be written there ({error.strerror or error}); choose another --out"
        )
    return None


def write_file(path: Path, text: str) -> None:
    """Replace the file as a whole: a reader, or a crash here, never sees half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes private files; a report is as public as any other output
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A callback (done, total, what) that moves a bar on stderr, if that is a terminal; total 0 = unknown."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total or None, description=what)


def is_agreed(question: str) -> bool:
    """What a person says; no, where nobody can be asked."""
    if sys.stdin is None or not sys.stdin.isatty():
        return False
    if sys.stderr is not None:
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
