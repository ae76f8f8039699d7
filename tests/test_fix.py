"""`eroica fix`: a real git repository, the user's own commands, a forge over HTTP, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from eroica import cli
from eroica.assist import forge as forges
from eroica.errors import UnavailableError, UserError
from eroica.findings import Diagnosis, FunctionName, to_json
from evals.llm.forge import listening
from tests import samples

Capture = pytest.CaptureFixture[str]

TRAIN = '''"""Train."""

import torch
import torch.distributed as dist
from torch import nn


def main():
    dist.init_process_group("gloo")
    torch.autograd.set_detect_anomaly(True)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(400):
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
'''
LINE = next(n for n, line in enumerate(TRAIN.splitlines(), 1) if "anomaly" in line)


def git(folder: Path, *words: str) -> str:
    told = subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True)
    return told.stdout.strip()


def repository(folder: Path) -> Path:
    """A checkout with a remote beside it, called owner/waves."""
    remote = folder / "owner" / "waves.git"
    git(folder, "init", "--quiet", "--bare", "--initial-branch=main", str(remote))
    checkout = folder / "checkout"
    checkout.mkdir()
    git(checkout, "init", "--quiet", "--initial-branch=main")
    git(checkout, "config", "user.name", "Somebody")
    git(checkout, "config", "user.email", "somebody@example.com")
    (checkout / "src").mkdir()
    (checkout / "src" / "train.py").write_text(TRAIN)
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "--message", "Train")
    git(checkout, "remote", "add", "origin", str(remote))
    git(checkout, "push", "--quiet", "origin", "main")
    return checkout


def diagnosis_file(folder: Path, *, line: int = LINE, path: str = "/app/waves/src/train.py") -> Path:
    """What a job elsewhere was diagnosed with: anomaly detection is on, at a line."""
    whole, _ = samples.slow_input()
    named = FunctionName(
        "setting", "torch.autograd.set_detect_anomaly(True)", f"{path}:{line}", f"{path}:{line}", "main"
    )
    finding = replace(whole.findings[0], cause="configuration", scope="all", function=named)
    told: Diagnosis = replace(whole, findings=(finding,), verdict=replace(whole.verdict, cause="configuration"))
    file = folder / "incidents" / f"diagnosis-{to_json(told)['id']}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(to_json(told)))
    return file


def state(checkout: Path) -> tuple[str, str, str]:
    """All that a run could leave behind: branches, worktrees, files."""
    return git(checkout, "branch", "--list"), git(checkout, "worktree", "list"), git(checkout, "status", "--porcelain")


def test_help_names_what_the_command_needs(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["fix", "--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    for part in ("--repo", "--test", "--verify", "--pr", "example: eroica fix"):
        assert part in shown


def test_a_command_that_runs_too_long_is_ended_with_all_that_it_started(tmp_path: Path, capsys: Capture) -> None:
    checkout, file = repository(tmp_path), diagnosis_file(tmp_path)
    code = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )
    words = ["fix", str(file), "--repo", str(checkout), "--limit", "0.5", "--test", f'{sys.executable} -c "{code}"']
    assert cli.main(words) == 1
    said = capsys.readouterr().err
    assert "(status 124)" in said
    number = re.search(r"without it, too: (\d+)", said)
    assert number is not None
    # Reaped by whoever adopted it, or about to be.
    stat = Path(f"/proc/{number[1]}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_file_that_has_changed_since_the_job_ran_is_told(tmp_path: Path, capsys: Capture) -> None:
    checkout = repository(tmp_path)
    file = diagnosis_file(tmp_path)
    told = json.loads(file.read_text())
    told["environment"] = {"common": {"commit": git(checkout, "rev-parse", "HEAD")}}
    file.write_text(json.dumps(told))
    words = ["fix", str(file), "--repo", str(checkout)]
    assert cli.main(words) == 0
    assert "has changed since" not in capsys.readouterr().out
    (checkout / "src" / "train.py").write_text(TRAIN + "# more\n")
    git(checkout, "commit", "--quiet", "--all", "--message", "More")
    assert cli.main(words) == 0
    assert "src/train.py has changed since the commit that the job ran" in capsys.readouterr().out


def test_a_patch_is_shown_and_left_on_a_branch_of_its_own(tmp_path: Path, capsys: Capture) -> None:
    checkout, file = repository(tmp_path), diagnosis_file(tmp_path)
    before = state(checkout)
    (checkout / "src" / "untracked.txt").write_text("of the user")
    identity = file.stem.removeprefix("diagnosis-")
    where = ["--repo", str(checkout / "src"), "--in", str(file.parent)]
    code = "import ast; assert 'anomaly' not in ast.unparse(ast.parse(open('src/train.py').read()))"
    assert cli.main(["fix", identity[:6], *where, "--test", f'{sys.executable} -c "{code}"']) == 0
    shown = capsys.readouterr()
    branch = f"eroica/{identity}-anomaly-mode"
    assert re.search(rf"branch +{branch}\n", shown.out)
    patch = git(checkout, "diff", "main", branch)
    assert patch in shown.out
    assert [line for line in patch.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")] == [
        "-    torch.autograd.set_detect_anomaly(True)"
    ]
    branches, worktrees, _ = state(checkout)
    assert branches.split() == [branch, "*", "main"]
    assert worktrees == before[1]
    assert git(checkout, "status", "--porcelain") == "?? src/untracked.txt"
    message = git(checkout, "log", "-1", "--format=%B", branch)
    assert message.startswith("Take out anomaly detection\n")
    assert identity in message


def test_a_draft_is_opened_with_evidence_patch_and_how_to_measure_again(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout, file = repository(tmp_path), diagnosis_file(tmp_path)
    monkeypatch.setenv("GH_TOKEN", "a-secret-of-the-user")
    with listening() as forge:
        words = ["fix", str(file), "--repo", str(checkout), "--pr", "--api", forge.url, "--format", "json"]
        assert cli.main(words) == 0
        told = json.loads(capsys.readouterr().out)
    ((path, authorization, request),) = forge.asked
    assert path == "/repos/owner/waves/pulls"
    assert authorization == "Bearer a-secret-of-the-user"
    assert (request["draft"], request["base"], request["head"]) == (True, "main", told["branch"])
    assert told["pull_request"] == "https://forge.example/o/r/pull/7"
    assert git(checkout, "ls-remote", "origin", told["branch"]).split()[0] == git(checkout, "rev-parse", told["branch"])
    body = request["body"]
    for part in ("**E1**", "-    torch.autograd.set_detect_anomaly(True)", "up to 121 ms per iteration", "not measured",
                 "eroica fix", told["diagnosis"], "by a literal"):  # fmt: skip
        assert part in body
    assert "a-secret" not in json.dumps(told) + body


def test_whatever_fails_leaves_no_branch_no_worktree_and_nothing_on_the_remote(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout, file = repository(tmp_path), diagnosis_file(tmp_path)
    before, remote = state(checkout), git(checkout, "ls-remote", "origin")
    monkeypatch.setenv("GH_TOKEN", "t")
    own = tmp_path / "tmp"  # other tests make such folders, too, and at the same time
    own.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(own))
    base = ["fix", str(file), "--repo", str(checkout)]
    python, code = sys.executable, "assert 'anomaly' in open('src/train.py').read()"
    with listening() as forge:
        forge.status, forge.answer = (
            422,
            {"message": "Validation Failed", "errors": [{"message": "Draft \x1b[31mnot supported"}]},
        )
        for more, said in [
            (["--test", f"{python} -c 'raise SystemExit(3)'"], r"\(status 3\); they fail without it, too"),
            (["--test", f'{python} -c "{code}"'], r"tests fail with the patch \(status 1\): .*AssertionError"),
            (["--test", "no-such-command"], "cannot be started"),
            (["--verify", f"{python} -c 'import no_such_module'"], "fails in a clean checkout"),
            (["--pr", "--api", forge.url], r"refused .*: 422 Validation Failed; Draft \\x1b\[31mnot"),
        ]:  # fmt: skip
            assert cli.main([*base, *more]) == 1
            assert re.search(said, capsys.readouterr().err), more
            assert state(checkout) == before
            assert git(checkout, "ls-remote", "origin") == remote
    assert not list(own.glob("eroica-fix-*"))


def test_a_token_goes_to_no_other_address_and_never_in_the_clear(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout, file = repository(tmp_path), diagnosis_file(tmp_path)
    monkeypatch.setenv("GITHUB_TOKEN", "t")
    base = ["fix", str(file), "--repo", str(checkout), "--pr"]
    with listening() as forge, listening() as stranger:
        forge.status, forge.location = 302, stranger.url + "/elsewhere"
        assert cli.main([*base, "--api", forge.url]) == 1
        assert "302" in capsys.readouterr().err
        assert len(forge.asked) == 1
        assert not stranger.asked
    for api, said in [("http://forge.example", "in the clear"), ("ftp://x", "no address"), ("https://a:b@c", "secret")]:
        assert cli.main([*base, "--api", api]) == 1
        assert said in capsys.readouterr().err
    monkeypatch.delenv("GITHUB_TOKEN")
    monkeypatch.setenv("PATH", str(Path(_git_folder())))
    assert cli.main([*base, "--api", "https://forge.example"]) == 1
    assert "needs a token in GH_TOKEN" in capsys.readouterr().err


def _git_folder() -> str:
    import shutil

    found = shutil.which("git")
    assert found is not None
    return os.path.dirname(found)


def test_a_forge_on_this_machine_is_asked_through_no_proxy_and_whatever_it_answers_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = forges.Request(title="t", body="b", head="h", base="main")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with listening() as forge, listening() as stranger:
        monkeypatch.setenv("http_proxy", stranger.url)
        at = forges.find("https://github.com/owner/waves", {"GH_TOKEN": "t"}, forge.url)
        assert forges.open_draft(at, request, tmp_path) == forge.answer["html_url"]
        assert (len(forge.asked), stranger.asked) == (1, [])
        for errors in (None, 7, "no", {"message": "no"}, [{"message": None}]):
            forge.status, forge.answer = 422, {"message": "Validation Failed", "errors": errors}
            with pytest.raises(UnavailableError, match="422 Validation Failed"):
                forges.open_draft(at, request, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as nonsense:
        thread = threading.Thread(target=_say_nonsense, args=(nonsense,))
        thread.start()
        at = replace(at, api=f"http://127.0.0.1:{nonsense.getsockname()[1]}")
        with pytest.raises(UnavailableError, match="does not answer"):
            forges.open_draft(at, request, tmp_path)
        thread.join()
    with pytest.raises(UserError, match="no address"):
        forges.find("https://github.com/owner/waves", {"GH_TOKEN": "t"}, "http://[::1")


def _say_nonsense(server: socket.socket) -> None:
    with server.accept()[0] as peer:
        peer.recv(1 << 16)
        peer.sendall(b"nonsense\r\n\r\n")


def test_a_remote_elsewhere_than_on_github_is_never_taken_for_one_of_github() -> None:
    environ = {"GH_TOKEN": "t", "PATH": ""}
    for remote in (
        "git@git.example:team/waves.git",
        "https://u:p@git.example/team/waves",
        "ssh://git@git.example:22/a/b",
    ):
        with pytest.raises(UserError, match=r"git\.example .*--api"):
            forges.find(remote, environ)
        assert forges.find(remote, environ, "https://git.example/api/v3").api == "https://git.example/api/v3"
    for remote in ("git@github.com:team/waves.git", "https://github.com/team/waves", "work:team/waves", "/srv/a/b.git"):
        assert forges.find(remote, environ).api == forges.GITHUB


def test_gh_is_told_on_which_host_the_repository_is(tmp_path: Path) -> None:
    gh = tmp_path / "gh"
    gh.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\n')
    gh.chmod(0o755)
    at = forges.find("git@git.example:team/waves.git", {"PATH": str(tmp_path)})
    forges.open_draft(at, forges.Request(title="t", body="b", head="h", base="main"), tmp_path)
    assert (tmp_path / "words").read_text().rstrip().endswith("--repo git.example/team/waves")


def test_gh_opens_the_draft_where_it_is_installed(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout, file = repository(tmp_path), diagnosis_file(tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    gh = tools / "gh"
    gh.write_text(
        f'#!/bin/sh\necho "$@" > {tools}/words\ncat > {tools}/body\necho https://github.com/owner/waves/pull/3\n'
    )
    gh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    for name in ("GH_TOKEN", "GITHUB_TOKEN", "GITHUB_API_URL"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["fix", str(file), "--repo", str(checkout), "--pr"]) == 0
    assert "https://github.com/owner/waves/pull/3" in capsys.readouterr().out
    words = (tools / "words").read_text()
    assert words.startswith("pr create --draft --title Take out anomaly detection --body-file - --head eroica/")
    assert words.rstrip().endswith("--base main --repo owner/waves")
    assert "```diff" in (tools / "body").read_text()


def test_what_may_not_be_patched_is_refused_in_a_sentence(tmp_path: Path, capsys: Capture) -> None:
    checkout, file = repository(tmp_path), diagnosis_file(tmp_path)
    base = ["fix", str(file), "--repo"]

    def said(*words: str, status: int = 1) -> str:
        assert cli.main([*words]) == status
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.count("\n") == 1
        return output.err

    assert "is no git repository" in said(*base, str(tmp_path))
    assert "is no folder" in said(*base, str(tmp_path / "nowhere"))
    assert "no finding 'F9'" in said(*base, str(checkout), "--finding", "F9")
    assert "holds no diagnosis abcdef" in said("fix", "abcdef", "--repo", str(checkout), "--in", str(tmp_path))
    assert "names the checkout itself" in said(*base, str(checkout), "--test", f"pytest {checkout}/tests")
    (checkout / "src" / "train.py").write_text(TRAIN + "# changed\n")
    assert "not committed (src/train.py)" in said(*base, str(checkout))
    git(checkout, "commit", "--quiet", "--all", "--message", "Change")
    # The one line that a patch could change is reached through a link.
    (checkout / "src" / "train.py").unlink()
    (tmp_path / "outside.py").write_text(TRAIN)
    (checkout / "src" / "train.py").symlink_to(tmp_path / "outside.py")
    git(checkout, "commit", "--quiet", "--all", "--message", "Link")
    assert "no codemod fits: F1 (configuration): anomaly mode: no line of the repository" in said(*base, str(checkout))
    assert (tmp_path / "outside.py").read_text() == TRAIN


def test_hooks_and_what_the_repository_holds_are_not_run(tmp_path: Path) -> None:
    checkout, file = repository(tmp_path), diagnosis_file(tmp_path)
    for name in ("pre-commit", "post-checkout", "post-commit", "pre-push"):
        hook = checkout / ".git" / "hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\nexit 1\n")
        hook.chmod(0o755)
    (checkout / "sitecustomize.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    git(checkout, "add", "sitecustomize.py")
    git(checkout, "-c", "core.hooksPath=/dev/null", "commit", "--quiet", "--message", "Trap")
    assert cli.main(["fix", str(file), "--repo", str(checkout)]) == 0
    assert not (tmp_path / "hook-ran").exists()
    assert not (tmp_path / "imported").exists()


def test_a_line_that_is_not_in_the_named_function_any_more_leads_nowhere(tmp_path: Path, capsys: Capture) -> None:
    checkout = repository(tmp_path)
    moved = TRAIN.replace("def main():", "def other():\n    torch.autograd.set_detect_anomaly(True)\n\n\ndef main():")
    moved = moved.replace('"gloo")\n    torch.autograd', '"gloo")\n    torch.manual_seed(0)\n    torch.autograd')
    (checkout / "src" / "train.py").write_text(moved)
    git(checkout, "commit", "--quiet", "--all", "--message", "Move")
    line = next(n for n, text in enumerate(moved.splitlines(), 1) if "anomaly" in text)
    assert cli.main(["fix", str(diagnosis_file(tmp_path, line=line)), "--repo", str(checkout)]) == 1
    assert "asked for in 2 places" in capsys.readouterr().err


def test_a_second_patch_takes_a_branch_of_its_own(tmp_path: Path, capsys: Capture) -> None:
    checkout, file = repository(tmp_path), diagnosis_file(tmp_path)
    for _ in range(2):
        assert cli.main(["fix", str(file), "--repo", str(checkout)]) == 0
    branches = [line.strip() for line in git(checkout, "branch", "--list", "eroica/*").splitlines()]
    assert len(branches) == 2
    assert branches[1] == branches[0] + "-2"
    capsys.readouterr()
