"""The commands that ask a running coordinator: what they print, and how they end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from eroica import cli
from eroica.findings import from_json
from eroica.guard import Limits, Rate, Web
from tests.site import JOB, Site

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A coordinator that the environment names."""
    fast = Rate(1e6, 1e6)
    made = Site(tmp_path, web=Web(limits=Limits(reads=fast, acts=fast))).start()
    monkeypatch.setattr("eroica.remote.POLL_S", 0.01)
    monkeypatch.setenv("EROICA_API", str(made.state / "act.token"))
    yield made
    made.close()


def printed(capsys: Capture, *arguments: str, status: int = 0) -> str:
    assert cli.main(arguments) == status
    output = capsys.readouterr()
    assert "Traceback" not in output.err and (status == 0) == (output.err == "")
    return output.out if status == 0 else output.err


def test_a_job_is_profiled_shown_confirmed_and_known_the_next_time(site: Site, capsys: Capture) -> None:
    assert printed(capsys, "incidents") == "no incident\n"
    told = printed(capsys, "profile", JOB)
    assert told.startswith("SLOW: rank 5: input pipeline in __getitem__ (data.py:41)")
    site.kept()
    (line,) = printed(capsys, "incidents", "--job", JOB).splitlines()
    id = line.split()[0]
    assert re.fullmatch(r"[0-9a-f]{12}  20\d\d-\d\d-\d\d \d\d:\d\d:\d\d  waves  slow: .*rank 5.*", line)
    assert from_json(json.loads(printed(capsys, "show", id, "--format", "json"))).verdict.ranks == "5"
    assert printed(capsys, "confirm", id, "checkpoint_io", "--note", "the \x1b[31mNFS\x1b[0m server") == (
        f"{id}: checkpoint_io, confirmed by act\n"
    )
    shown = printed(capsys, "show", id)
    assert shown.startswith(told.splitlines()[0]) and "\x1b" not in shown
    assert shown.splitlines()[-1].startswith("confirmed by act as checkpoint_io: the \\x1b[31mNFS")
    again = printed(capsys, "profile", JOB)
    assert "seen before: 1 time; people found checkpoint_io (1)" in again
    assert again.splitlines()[-1].endswith("[confirmed: checkpoint_io]") and id in again.splitlines()[-1]
    site.kept()
    assert len(json.loads(printed(capsys, "incidents", "--format", "json"))) == 2
    assert len(printed(capsys, "incidents", "--limit", "1").splitlines()) == 1


def test_status_tells_of_all_jobs_and_of_the_ranks_of_one(site: Site, capsys: Capture) -> None:
    head, row = printed(capsys, "status").splitlines()
    assert head.split() == ["job", "state", "ranks", "hosts", "iteration", "iterations", "incidents"]
    assert row.split() == [JOB, "running", "8/8", "2", "1000.0", "ms", "117", "0"]
    lines = printed(capsys, "status", JOB).splitlines()
    assert lines[0].startswith(f"{JOB}: 8 of 8 ranks on 2 hosts, 1000.0 ms per iteration") and len(lines) == 10
    assert lines[-1].split() == ["7", "b", "alive", "117", "1000.0", "ms"]
    assert json.loads(printed(capsys, "status", JOB, "--format", "json"))["ranks"][5]["host"] == "b"
    for agent in site.agents:
        site.in_loop(agent.end)
    site.wait(lambda: site.client().job(JOB).num_alive == 0, "an end")
    assert "ended" in printed(capsys, "status", JOB)


def test_what_cannot_be_is_said_in_one_sentence(site: Site, capsys: Capture, tmp_path: Path) -> None:
    for arguments, why in [
        (["status", "tides"], "no job tides is running here"),
        (["profile", "tides"], "no job tides is running here"),
        (["show", "0" * 12], "there is no incident 000000000000"),
        (["confirm", "0" * 12, "gremlins"], "host_gc"),
        (["incidents", "--since", "yesterday"], "is no time"),
        (["status", "../../etc"], "is no name of a job"),
        (["status", "--api", str(tmp_path / "none.token")], "cannot be read"),
    ]:
        said = printed(capsys, *arguments, status=1)
        assert why in said and said.count("\n") == 1 and said.startswith(f"eroica {arguments[0]}: ")


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:x", "ftp://127.0.0.1"])
def test_an_address_that_is_none_is_said_in_one_sentence(
    url: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EROICA_TOKEN", "t")
    assert "is no address of a coordinator" in printed(capsys, "status", "--api", url, status=1)


def test_a_window_that_fails_is_an_error_with_the_reason(site: Site, capsys: Capture) -> None:
    for agent in site.agents:
        agent.is_quiet = True
    said = printed(capsys, "profile", JOB, "--no-wait")
    id = said.split()[-1]
    assert re.fullmatch(r"w-[0-9a-f]{12}", id)
    assert "another window (manual) is under way" in printed(capsys, "profile", JOB, status=1)
    site.client().cancel_window(JOB, id)


def test_nobody_that_answers_is_one_sentence_and_a_secret_on_the_command_line_is_refused(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path).start(with_job=False)
    monkeypatch.setenv("EROICA_API", str(site.state / "read.token"))
    assert printed(capsys, "status") == "no job has reported to this coordinator yet\n"
    assert "scope act" in printed(capsys, "confirm", "0" * 12, "host_gc", status=1)
    site.close()
    said = printed(capsys, "status", status=1)
    assert said.startswith("eroica status: nobody answers at http://127.0.0.1:") and said.count("\n") == 1
    monkeypatch.delenv("EROICA_API")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "no coordinator is known here" in printed(capsys, "incidents", status=1)
    for arguments, hint in [
        (["status", "--api", "https://me:secret@there"], "EROICA_TOKEN"),
        (["serve", "--store", "postgresql://me:secret@there/db"], "EROICA_STORE"),
        (["serve", "--token", "alice:root"], "NAME:read"),
        (["serve", "--http", "nowhere:x"], "HOST:PORT"),
        (["incidents", "--limit", "0"], "whole number"),
    ]:
        with pytest.raises(SystemExit) as leaving:
            cli.main(arguments)
        assert leaving.value.code == 2
        assert hint in capsys.readouterr().err


def test_the_pacing_of_a_job_is_switched_told_and_in_the_audit_log(site: Site, capsys: Capture) -> None:
    assert printed(capsys, "pace", JOB) == "waves: pacing is off; nobody is held back\n"
    told = printed(capsys, "pace", JOB, "--dry-run", "--threshold", "0.2", "--max-delay", "20", "--ttl", "5")
    assert told.startswith("waves: pacing is dry-run") and "a dry run begins by act" in told
    assert "tried above 20.0% of waiting, holds of 20 ms at most, orders end after 5 s; set by act" in told
    told = printed(capsys, "pace", JOB, "--enable", "--cap", "dp=3", "--cap", "a=b=2.5")
    assert "  group a=b: holds of 2.5 ms at most\n  group dp: holds of 3 ms at most\n" in told
    told = printed(capsys, "pace", JOB, "--enable", "--format", "json")
    assert json.loads(told)["mode"] == "enable" and json.loads(told)["max_delay_s"] == 0.05
    assert json.loads(told)["group_caps_s"] == {}
    assert "the cap of group 'dp' is 3" in printed(capsys, "pace", JOB, "--enable", "--cap", "dp=3000", status=1)
    many = [word for number in range(65) for word in ("--cap", f"{number}=1")]
    assert "group_caps_s" in printed(capsys, "pace", JOB, "--enable", *many, status=1)
    assert printed(capsys, "pace", JOB, "--off").startswith("waves: pacing is off")
    assert "max_delay_s is 5" in printed(capsys, "pace", JOB, "--enable", "--max-delay", "5000", status=1)
    assert "no job tides" in printed(capsys, "pace", "tides", status=1)
    site.kept()
    audited = [one for one in site.client("admin").audit() if one.who == "eroica"]
    assert [one.outcome for one in audited] == [
        "switched off by act",
        *["switched on by act"] * 2,
        "a dry run begins by act",
    ]
    with pytest.raises(SystemExit):
        cli.main(["pace", JOB, "--ttl", "5"])
    with pytest.raises(SystemExit):
        cli.main(["pace", JOB, "--off", "--ttl", "5"])
    with pytest.raises(SystemExit):
        cli.main(["pace", JOB, "--enable", "--cap", "5"])
    assert "'5' is no GROUP=MS" in capsys.readouterr().err


def test_a_token_that_may_only_read_sees_pacing_and_switches_none(
    site: Site, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EROICA_API", str(site.state / "read.token"))
    assert "pacing is off" in printed(capsys, "pace", JOB)
    assert "scope act" in printed(capsys, "pace", JOB, "--enable", status=1)
