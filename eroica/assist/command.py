"""The arguments and the body of `eroica fix`. It prints nothing itself: what to show and say goes to the caller.

Light to import, since the parser is made for each command. Used by `cli` alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from eroica.errors import UserError
from eroica.given import amount

if TYPE_CHECKING:
    from eroica.findings import Diagnosis

_ID = re.compile(r"[0-9a-f]{4,64}")


def add_options(command: argparse.ArgumentParser) -> None:
    """The arguments of `eroica fix`."""
    command.add_argument(
        "diagnosis",
        metavar="ID|FILE",
        help="a diagnosis.json, the directory that holds it, or the id (or its beginning) of one in --in",
    )
    command.add_argument(
        "--repo",
        type=Path,
        required=True,
        metavar="DIR",
        help="the git repository of the training code; its checkout is only read",
    )
    command.add_argument(
        "--in",
        dest="folder",
        type=Path,
        default=Path("eroica-out"),
        metavar="DIR",
        help="where ids are looked up (default: eroica-out)",
    )
    command.add_argument(
        "--finding", default="", metavar="F1", help="the finding to fix (default: the first that can be)"
    )
    command.add_argument(
        "--test", default="", metavar="CMD", help="your tests, as one argument; the patch is dropped if they fail"
    )
    command.add_argument(
        "--verify",
        default="",
        metavar="CMD",
        help="a training of some hundred steps, as one argument: it is run under eroica without and with the patch, "
        "and the iterations are compared; a patch that makes them longer is dropped",
    )
    command.add_argument(
        "--limit",
        type=amount(1e7, "number of seconds"),
        default=1800.0,
        metavar="S",
        help="for each of your commands (default: 1800)",
    )
    command.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="where no codemod fits, have this model propose a change of the files that the evidence names, and send "
        "them to its endpoint: OPENAI_BASE_URL, or OpenAI, or anthropic:NAME (default: no model is asked)",
    )
    command.add_argument(
        "--pr", action="store_true", help="push the branch and open a draft pull request (gh, else the GitHub API)"
    )
    command.add_argument("--remote", default="origin", metavar="NAME", help="where to push to (default: origin)")
    command.add_argument(
        "--base", default="", metavar="BRANCH", help="what the pull request is for (default: the current branch)"
    )
    command.add_argument(
        "--api",
        default="",
        metavar="URL",
        help="base of the API (default: GITHUB_API_URL, else GitHub's); the token is in GH_TOKEN or GITHUB_TOKEN",
    )
    command.add_argument("--format", choices=("text", "json"), default="text", help="what stdout gets (default: text)")


def run(
    options: argparse.Namespace,
    load: Callable[[Path], Diagnosis],
    show: Callable[[str], None],
    say: Callable[[str], None],
) -> int:
    """Make the patch. `load` reads a diagnosis, `show` takes the result, `say` a sentence now and then."""
    words = {}
    for name in ("test", "verify"):
        try:
            words[name] = shlex.split(getattr(options, name))
        except ValueError as error:
            options.usage(f"argument --{name}: {error}")
    diagnosis = load(find(options.diagnosis, options.folder))
    from eroica.assist import describing, endpoints, forge
    from eroica.assist.fixing import Plan, PullRequest, fix
    from eroica.assist.repository import Repository

    repository = Repository(options.repo)
    wanted = None
    if options.pr:
        base = options.base or repository.branch()
        if not base:
            options.usage("argument --base: no branch is checked out; say what the pull request is for")
        at = forge.find(repository.remote_url(options.remote), os.environ, options.api)
        wanted = PullRequest(forge=at, remote=options.remote, base=base)
    fixed = fix(
        Plan(
            diagnosis=diagnosis,
            repository=repository,
            finding=options.finding,
            test=words["test"],
            verify=words["verify"],
            pull_request=wanted,
            limit_s=options.limit,
            # Only by the option: a variable is no consent to send source code out.
            endpoint=endpoints.find(options.model, os.environ) if options.model else None,
        ),
        say,
    )
    show(describing.as_json(fixed) if options.format == "json" else f"{describing.summary(fixed)}\n{fixed.diff}")
    return 0


def find(name: str, folder: Path) -> Path:
    """The file of a diagnosis that is named by its path or id. Raises UserError if there is none, or several."""
    path = Path(name)
    if path.exists() or not _ID.fullmatch(name):
        return path
    found = sorted({*folder.glob(f"diagnosis-{name}*.json"), *folder.glob(f"*/diagnosis-{name}*.json")})
    if not found:
        raise UserError(f"{folder} holds no diagnosis {name}; name another folder by --in, or the file itself")
    if len({one.name for one in found}) > 1:
        raise UserError(f"{folder} holds {len(found)} diagnoses whose id begins with {name}; write more of it")
    return found[0]
