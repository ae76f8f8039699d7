"""The command line: exit statuses, what stdout and stderr hold, and files written whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eroica import cli, cli_output
from eroica.findings import from_json, to_json
from tests import samples

Capture = pytest.CaptureFixture[str]
DATA = Path(__file__).parent / "data" / "traces"


def test_help_of_every_command_shows_an_example(capsys: Capture) -> None:
    for arguments in (["--help"], ["diagnose", "--help"], ["show", "--help"], ["demo", "--help"]):
        with pytest.raises(SystemExit) as leaving:
            cli.main(arguments)
        assert leaving.value.code == 0
        assert "example: eroica" in capsys.readouterr().out


def test_wrong_usage_exits_with_two_and_says_what_would_be_right(capsys: Capture) -> None:
    for arguments, hint in [
        ([], "COMMAND"),
        (["diagnose"], "PATH"),
        (["diagnose", "x", "--format", "pdf"], "markdown|md"),
        (["diagnose", "x", "--fail-on", "slow,sluggish"], "hang"),
        (["diagnose", "x", "--fail-on", ""], "hang"),
        (["diagnose", "x", "--jobs", "0"], "above 0"),
        (["diagnose", "x", "--engine", "ray"], "local"),
        (["demo", "rust"], "slow_input"),
        (["demo", "--delay-ms", "5", "--effect", "0.1"], "not allowed with"),
        (["demo", "--effect", "nan"], "above 0"),
        (["demo", "--culprit", "-1"], "rank"),
        (["run", "--bus", "store", "--no-baseline", "--", "true"], "--no-baseline: .*coordinator"),
        (["run", "--bus", "store", "--frames", "none", "--", "true"], "--frames: .*coordinator"),
        (["run", "--bus", "nats://127.0.0.1:1", "--job", "a", "--no-baseline", "--", "true"], "eroica serve"),
    ]:
        with pytest.raises(SystemExit) as leaving:
            cli.main(arguments)
        assert leaving.value.code == 2, arguments
        output = capsys.readouterr()
        assert output.out == ""
        assert re.search(hint, output.err), arguments


def test_diagnose_prints_the_asked_form_and_writes_page_and_json(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "new" / "out"
    arguments = ["diagnose", str(DATA / "two_ranks_of_128"), "--out", str(out), "--job", "llama", "--format", "json"]
    assert cli.main(arguments) == 0
    output = capsys.readouterr()
    assert output.err == ""
    shown = json.loads(output.out)
    assert shown == json.loads((out / "diagnosis.json").read_text())
    assert shown["schema"] == "eroica.diagnosis/1"
    assert shown["job"] == "llama"
    assert shown["coverage"]["ranks_expected"] == 128
    assert shown["coverage"]["missing_ranks"] == "2-127"
    assert "</html>" in (out / "report.html").read_text()


def test_the_same_input_gives_the_same_bytes_but_for_the_time(capsys: Capture) -> None:
    shown = []
    for jobs in ("1", "2"):
        assert cli.main(["diagnose", str(DATA / "two_ranks_of_128"), "--format", "json", "--jobs", jobs]) == 0
        shown.append(re.sub(r'"created": "[^"]*"', "", capsys.readouterr().out))
    assert shown[0] == shown[1]


def test_fail_on_exits_with_three_only_for_the_named_kinds(capsys: Capture) -> None:
    arguments = ["diagnose", str(DATA / "gloo_torch_2_13_rank0.json.gz"), "--format", "json"]
    assert cli.main(arguments) == 0
    kind = json.loads(capsys.readouterr().out)["kind"]
    assert cli.main([*arguments, "--fail-on", f"hang,{kind}"]) == 3
    assert cli.main([*arguments, "--fail-on", "hang,crash"]) == 0


def test_an_address_of_ipv6_is_taken_with_brackets_and_without(capsys: Capture) -> None:
    for text, address in (("::1", ("::1", 0)), ("[::1]", ("::1", 0)), ("[::1]:80", ("::1", 80)), ("h:80", ("h", 80))):
        assert cli._parser().parse_args(["serve", "--listen", text]).listen == address
    with pytest.raises(SystemExit, match="2"):
        cli._parser().parse_args(["serve", "--listen", "h:port"])
    assert "'h:port' is no address" in capsys.readouterr().err


def test_one_rank_of_four_is_never_called_healthy(capsys: Capture) -> None:
    assert cli.main(["diagnose", str(DATA / "gloo_torch_2_13_rank0.json.gz"), "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["kind"] != "healthy"
    assert shown["coverage"]["missing_ranks"] == "1-3"


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        (["absent"], "no such file"),
        (["empty"], "no trace files"),
        (["note.txt"], "no profiler trace"),
        (["cut.json"], "no event could be read"),
        (["a/rank0.json", "b/rank0.json"], "claim one rank"),
        (["[", "*.none"], "no such file"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_input_that_is_of_no_use_fails_with_one_sentence(
    names: list[str], hint: str, tmp_path: Path, capsys: Capture
) -> None:
    for folder in ("empty", "a", "b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "note.txt").write_text("hello")
    (tmp_path / "cut.json").write_text('{"traceEvents": [{"ph": "X"')
    for folder in ("a", "b"):
        shutil.copy(DATA / "gloo_torch_2_13_rank0.json.gz", tmp_path / folder / "rank0.json")
    assert cli.main(["diagnose", *(str(tmp_path / name) for name in names), "--out", str(tmp_path / "out")]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("eroica diagnose: ")
    assert hint in output.err
    assert output.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_terminal_shows_no_progress_and_no_colours() -> None:
    command = [sys.executable, "-m", "eroica", "diagnose", str(DATA / "two_ranks_of_128")]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stderr == b""
    assert b"\x1b" not in done.stdout


def test_show_prints_every_form_and_json_survives_the_round_trip(tmp_path: Path, capsys: Capture) -> None:
    diagnosis, _ = samples.slow_input()
    file = tmp_path / "diagnosis.json"
    file.write_text(json.dumps(to_json(diagnosis)))
    shown = {}
    for form in cli.FORMATS:
        assert cli.main(["show", str(file), "--format", form]) == 0
        output = capsys.readouterr()
        assert output.err == ""
        shown[form] = output.out
    assert json.loads(shown["json"]) == to_json(diagnosis)
    assert shown["html"].lower().startswith("<!doctype html>")
    for form in ("text", "md", "prompt"):
        assert "train/data.py:41" in shown[form], form
    assert "\x1b" not in shown["text"]


def test_show_takes_the_folder_that_diagnose_wrote(tmp_path: Path, capsys: Capture) -> None:
    diagnosis, _ = samples.healthy()
    (tmp_path / "diagnosis.json").write_text(json.dumps(to_json(diagnosis)))
    assert cli.main(["show", str(tmp_path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "healthy"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"schema": "eroica.diagnosis/9"}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"schema": "eroica.diagnosis/1"}',
    ],
    ids=["empty", "cut", "list", "newer", "binary", "deep", "bare"],
)
def test_show_of_something_else_fails_with_one_sentence(content: bytes, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "other.json"
    file.write_bytes(content)
    assert cli.main(["show", str(file)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("eroica show: ")
    assert output.err.count("\n") == 1


def test_show_of_a_record_with_a_value_of_another_type_names_the_field(tmp_path: Path, capsys: Capture) -> None:
    whole = to_json(samples.slow_input()[0])
    file = tmp_path / "diagnosis.json"
    for path, value in [
        ("findings", 5),
        ("findings.0.function", "gemm"),
        ("findings.0.evidence", [["E1"]]),
        ("findings.0.pattern.beta", "high"),
        ("findings.0.scope", {}),
        ("verdict.summary", None),
        ("coverage.explained_share", None),
        ("coverage.notes", "\ud800"),
        ("placement", []),
        ("placement.hosts", None),
        ("evidence.E1", None),
        ("evidence.E1.values", [1]),
        ("window.first_step", "7"),
        ("producer", "me"),
        ("roles", {}),
    ]:
        data = json.loads(json.dumps(whole))
        *way, last = path.split(".")
        place = data
        for key in way:
            place = place[int(key) if isinstance(place, list) else key]
        place[last] = value
        file.write_text(json.dumps(data))
        for form in cli.FORMATS:
            assert cli.main(["show", str(file), "--format", form]) == 1, path
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.count("\n") == len(cli.FORMATS)
        assert path.split(".")[0] in output.err


def test_a_device_without_end_is_not_read_to_its_end(capsys: Capture) -> None:
    assert cli.main(["show", "/dev/zero"]) == 1
    assert "more than" in capsys.readouterr().err


def test_reports_that_cannot_be_written_lose_no_answer(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert cli.main(["diagnose", str(DATA / "two_ranks_of_128"), "--out", str(out), "--format", "json"]) == 1
        output = capsys.readouterr()
        assert json.loads(output.out)["coverage"]["ranks_expected"] == 128
        assert "cannot be written" in output.err and str(out) in output.err
        assert output.err.count("\n") == 1


@pytest.mark.parametrize(("closed", "status"), [("2>&-", 0), (">&-", 1), (">&- 2>&-", 1), (">/dev/full", 1)])
def test_a_closed_or_full_output_is_no_traceback(closed: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "diagnosis.json").write_text(json.dumps(to_json(samples.healthy()[0])))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for command in (f"show {tmp_path}", f"diagnose {DATA / 'two_ranks_of_128'} --out {tmp_path / 'out'}"):
        line = f"exec {sys.executable} -m eroica {command} {closed}"
        done = subprocess.run(["sh", "-c", line], capture_output=True, check=False, env=environ)
        assert done.returncode == status
        assert done.stderr.count(b"\n") == (0 if "2>" in closed else 1), done.stderr
    assert (tmp_path / "out" / "report.html").exists()


def test_a_missing_file_fails_with_one_sentence_free_of_escape_sequences(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["show", str(tmp_path / "no\x1b[31mfile\n.json")]) == 1
    output = capsys.readouterr()
    assert "does not exist" in output.err
    assert "\x1b" not in output.err
    assert output.err.count("\n") == 1


def test_a_reader_takes_an_unknown_cause_for_unknown(tmp_path: Path, capsys: Capture) -> None:
    data = to_json(samples.slow_input()[0])
    data["verdict"]["cause"] = data["findings"][0]["cause"] = "cosmic_rays"
    data["future"] = {"field": 1}
    (tmp_path / "diagnosis.json").write_text(json.dumps(data))
    assert cli.main(["show", str(tmp_path), "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"]["cause"] == shown["findings"][0]["cause"] == "unknown"


def test_demo_list_names_each_fault_on_a_line_of_its_own(capsys: Capture) -> None:
    assert cli.main(["demo", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:2] == ["slow_input", "backward_delay"] and names[-1] == "healthy" and len(set(names)) == 13


def test_a_culprit_that_is_no_rank_is_wrong_usage(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["demo", "--ranks", "4", "--culprit", "4"])
    assert leaving.value.code == 2
    assert "from 0 to 3" in capsys.readouterr().err


def test_a_reader_that_closes_the_pipe_early_sees_no_complaint(tmp_path: Path) -> None:
    diagnosis, _ = samples.slow_input(64)
    (tmp_path / "diagnosis.json").write_text(json.dumps(to_json(diagnosis)))
    command = [sys.executable, "-m", "eroica", "show", str(tmp_path), "--format", "html"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_a_terminal_without_unicode_still_gets_the_answer(tmp_path: Path) -> None:
    diagnosis, _ = samples.hostile("naïve – Ω.py")
    (tmp_path / "diagnosis.json").write_text(json.dumps(to_json(diagnosis)))
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "eroica", "show", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0
    assert done.stderr == b""
    done.stdout.decode("ascii")


def test_reports_replace_older_ones_whole_and_leave_nothing_else(tmp_path: Path) -> None:
    diagnosis, detail = samples.slow_input()
    for _ in range(2):
        cli_output.write_reports(tmp_path / "out", diagnosis, detail)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["diagnosis.json", "report.html"]
    assert from_json(json.loads((tmp_path / "out" / "diagnosis.json").read_text())).verdict == diagnosis.verdict
    assert (tmp_path / "out" / "report.html").stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--out", str(tmp_path / "file")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
