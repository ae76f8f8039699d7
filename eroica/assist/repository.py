"""The user's git repository: is it clean, what is in it, and a worktree in which to try a change.

All work happens in a worktree in a temporary folder, on a branch of its own; the user's checkout is never written to.
What is not kept on purpose leaves nothing behind: no folder, no branch. Hooks do not run: nothing is executed that the
user did not name. Git is the command, since it knows its formats. Used by `fixing`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eroica.assist.change import Change
from eroica.assist.reading import MOST_CHARS
from eroica.errors import UnavailableError, UserError
from eroica.untrusted import clean, escape

MOST_FILES = 20_000
"""Files of a repository that are looked at."""
_READ = (".py", ".sh", ".bash", ".sbatch", ".slurm", ".env", ".yaml", ".yml", "Makefile", "Dockerfile")
TO_END_S = 30.0
"""For a command that is told to end, before it is made to."""
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_LAST_WORDS = 12
"""Lines of a command's output that a message quotes."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    status: int
    """128+N for signal N; 124 if it ran too long."""
    tail: str
    """The end of what it said."""


class Repository:
    """A checkout. Raises UserError if there is none at `folder`, or git is missing."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("git") is None:
            raise UnavailableError("git is not installed; eroica fix works on a git repository")
        if not folder.is_dir():
            raise UserError(f"{escape(str(folder))} is no folder; name the repository of the training code by --repo")
        self._at = folder
        top = self._try("rev-parse", "--show-toplevel")
        if top is None or not top.strip():
            raise UserError(f"{escape(str(folder))} is no git repository; name the one of the training code by --repo")
        self.root = Path(top.rstrip("\n"))
        """The top of the checkout."""
        self._at = self.root
        head = self._try("rev-parse", "--verify", "HEAD")
        if head is None:
            raise UserError(f"{escape(str(folder))} has no commit yet; commit the training code first")
        self.head = head.strip()
        """The commit that a patch is made on."""

    def refuse_dirt(self) -> None:
        """Raises UserError if tracked files differ from HEAD: a patch would be made on something else than runs."""
        changed = self._git("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=none").splitlines()
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            shown = ", ".join(escape(line[3:], 80) for line in changed[:3])
            raise UserError(
                f"the repository has changes that are not committed ({shown}{more}); commit or stash them first"
            )

    def texts(self) -> dict[str, str]:
        """Tracked sources and start scripts; no links, nothing that is not UTF-8, nothing huge."""
        found: dict[str, str] = {}
        for entry in self._git("ls-files", "--stage", "-z").split("\0"):
            mode, _, rest = entry.partition(" ")
            path = rest.partition("\t")[2]
            if mode not in ("100644", "100755") or not path.endswith(_READ) or len(found) >= MOST_FILES:
                continue
            file = self.root / path
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if not file.is_symlink() and file.stat().st_size <= MOST_CHARS:
                    # newline="": carriage returns are a part of the file that a patch must leave.
                    with open(file, encoding="utf-8", newline="") as source:
                        found[path] = source.read()
        return found

    def has_changed(self, path: str, commit: str) -> bool:
        """The file differs from what it was in a commit of this repository; False if that is not known here."""
        if not _COMMIT.fullmatch(commit) or self._try("cat-file", "-e", f"{commit}^{{commit}}") is None:
            return False
        return self._try("diff", "--quiet", commit, self.head, "--", path) is None

    def branch(self) -> str:
        """The branch that is checked out; "" if none is."""
        return (self._try("symbolic-ref", "--quiet", "--short", "HEAD") or "").strip()

    def remote_url(self, remote: str) -> str:
        """Where a remote is. Raises UserError if there is none of this name."""
        url = self._try("remote", "get-url", "--push", remote)
        if url is None:
            raise UserError(f"the repository has no remote {escape(remote, 60)!r}; name another one by --remote")
        return url.strip()

    @contextlib.contextmanager
    def worktree(self, name: str) -> Iterator[Worktree]:
        """A worktree of HEAD on a new branch, gone at the end; the branch, too, unless `keep` was called."""
        folder = Path(tempfile.mkdtemp(prefix="eroica-fix-"))
        branch, number = name, 1
        while self._try("rev-parse", "--verify", "--quiet", f"refs/heads/{branch}") is not None:
            number += 1
            branch = f"{name}-{number}"
        tree: Worktree | None = None
        try:
            self._git("worktree", "add", "--quiet", "-b", branch, str(folder / "tree"), self.head)
            tree = Worktree(self, folder / "tree", branch)
            yield tree
        finally:
            self._try("worktree", "remove", "--force", str(folder / "tree"))
            shutil.rmtree(folder, ignore_errors=True)
            self._try("worktree", "prune")
            if tree is None or not tree.is_kept:
                self._try("branch", "-D", branch)

    def push(self, remote: str, branch: str) -> None:
        """Raises UnavailableError with git's words if the remote does not take it."""
        ended = _run_git(self.root, "push", "--quiet", remote, f"refs/heads/{branch}:refs/heads/{branch}")
        if ended.returncode:
            raise UnavailableError(f"git push to {escape(remote, 60)} failed: {_last(ended.stderr)}")

    def unpush(self, remote: str, branch: str) -> bool:
        """Take the branch back from the remote; False if that failed."""
        return self._try("push", "--quiet", remote, f":refs/heads/{branch}") is not None

    def _git(self, *words: str) -> str:
        ended = _run_git(self._at, *words)
        if ended.returncode:
            raise UserError(f"git {words[0]} failed: {_last(ended.stderr)}")
        return ended.stdout

    def _try(self, *words: str) -> str | None:
        ended = _run_git(self._at, *words)
        return None if ended.returncode else ended.stdout


class Worktree:
    """A checkout in a temporary folder."""

    def __init__(self, repository: Repository, folder: Path, branch: str) -> None:
        self._repository = repository
        self.folder = folder
        self.branch = branch
        self.is_kept = False
        """The branch stays."""

    def write(self, changes: Sequence[Change]) -> None:
        """Put changes in their files. Raises UserError for what may not be written, before anything is."""
        for change in changes:
            refuse_outside(self.folder, change.path)
        for change in changes:
            with open(self.folder / change.path, "w", encoding="utf-8", newline="") as file:
                file.write(change.after)

    def compile(self, changes: Sequence[Change]) -> None:
        """Raises UserError if a changed file is no Python any more."""
        for change in changes:
            if change.path.endswith(".py"):
                try:
                    compile(change.after, change.path, "exec", dont_inherit=True)
                except (SyntaxError, ValueError) as error:
                    raise UserError(f"the patch of {clean(change.path)} does not compile: {clean(error)}") from None

    def commit(self, changes: Sequence[Change], message: str) -> None:
        """Commit what was written and nothing else."""
        words = [change.path for change in changes]
        for command in (
            ["add", "--", *words],
            ["commit", "--quiet", "--no-verify", "--no-gpg-sign", "-m", message, "--", *words],
        ):
            ended = _run_git(self.folder, *command)
            if ended.returncode:
                raise UserError(f"git {command[0]} failed: {_last(ended.stderr or ended.stdout)}")

    def diff(self) -> str:
        """What the branch changes, as a patch."""
        ended = _run_git(self.folder, "diff", "--no-color", "--no-ext-diff", self._repository.head, self.branch)
        return ended.stdout

    def as_before(self) -> None:
        """The files without the patch, and without what commands have left among them. For measuring."""
        _run_git(self.folder, "checkout", "--quiet", "--force", "--detach", self._repository.head)
        _run_git(self.folder, "clean", "--quiet", "--force", "-dx")

    def as_patched(self) -> None:
        """The files of the branch, the same way."""
        _run_git(self.folder, "checkout", "--quiet", "--force", self.branch)
        _run_git(self.folder, "clean", "--quiet", "--force", "-dx")

    def run(self, words: Sequence[str], limit_s: float, extra: Mapping[str, str] | None = None) -> Ended:
        """A command of the user's, here. Python finds this checkout first, also where the package is installed from
        another one."""
        return run_command(words, self.folder, environment_of(self.folder) | dict(extra or {}), limit_s)


def environment_of(folder: Path) -> dict[str, str]:
    """The environment, with the sources in `folder` in front of what Python would import otherwise."""
    environment = dict(os.environ)
    known = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    own = [str(folder)] + ([str(folder / "src")] if (folder / "src").is_dir() else [])
    environment["PYTHONPATH"] = os.pathsep.join([*own, *(os.path.abspath(part) for part in known)])
    return environment


def run_command(words: Sequence[str], folder: Path, environment: Mapping[str, str], limit_s: float) -> Ended:
    """Run a command to its end, in a process group of its own, which ends with it, with us, or when time is up."""
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                list(words),
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"{escape(words[0])} cannot be started: {error.strerror or error}") from None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            end_group(process)
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - 8_000))
        text = output.read().decode("utf-8", "replace")
    return Ended(status if status >= 0 else 128 - status, text)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its group: first as a terminal would, since launchers keep workers in groups of their
    own that only they can end."""
    for number in (signal.SIGTERM, signal.SIGKILL) if process.poll() is None else (signal.SIGKILL,):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TO_END_S)


def last_words(text: str) -> str:
    """The end of a command's output, in one line that may be shown."""
    lines = [clean(line, 160) for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_LAST_WORDS:])[-600:] or "it said nothing"


def refuse_outside(root: Path, path: str) -> None:
    """Raises UserError unless `path` is an ordinary file below `root`, reached through no link."""
    parts = path.split("/")
    file = root / path
    bad = os.path.isabs(path) or not path or any(part in ("", ".", "..", ".git") for part in parts)
    if bad or any((root / "/".join(parts[: n + 1])).is_symlink() for n in range(len(parts))) or not file.is_file():
        raise UserError(f"{escape(path, 200)} is no file of the repository, or a link; it is not patched")


def _run_git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX"))
    }
    environment |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    return subprocess.run(
        ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=false", *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
    )


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return clean(lines[-1] if lines else "it does not say why", 300)
