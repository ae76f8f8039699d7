"""The project itself: a light import, a complete wheel, documents whose commands and code run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import eroica
from eroica import cli

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "docs/cluster.md", "docs/pacing.md", "docs/security.md")


def _fresh(code: str, *options: str) -> str:
    """What a new interpreter prints for `code`."""
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_import_loads_neither_numpy_nor_torch_nor_asyncio() -> None:
    code = "import sys; before = set(sys.modules); import eroica; print(*(set(sys.modules) - before))"
    loaded = set(_fresh(code).split())
    assert "eroica" in loaded
    assert not {
        name for name in loaded if name.split(".")[0] in {"numpy", "torch", "asyncio", "rich", "jinja2", "msgspec"}
    }
    assert {name for name in loaded if name.startswith("eroica")} <= {"eroica", "eroica.probe", "eroica.probe.late"}


def test_help_and_version_load_no_numpy() -> None:
    for option in ("--help", "--version"):
        code = (
            "import atexit, sys; atexit.register(lambda: print('numpy' in sys.modules));"
            f"from eroica.cli import main; main(['{option}'])"
        )
        assert _fresh(code).splitlines()[-1] == "False"


def test_every_public_name_resolves_and_others_do_not() -> None:
    for name in eroica.__all__:
        assert getattr(eroica, name) is not None
    assert set(dir(eroica)) == set(eroica.__all__)
    with pytest.raises(AttributeError, match="no attribute 'reed_trace'"):
        eroica.reed_trace  # noqa: B018


def test_every_package_folder_is_in_the_wheel() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    folders = {path.parent for top in ("eroica", "mcp_server") for path in (ROOT / top).rglob("*.py")}
    assert {".".join(path.relative_to(ROOT).parts) for path in folders} | {"eroica.prompts"} == listed


@pytest.mark.slow
def test_the_wheel_holds_the_texts_and_works_away_from_the_checkout(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # A copy, since a build leaves its folders beside the sources.
    source = tmp_path / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "evals/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for text in (ROOT / "prompts").iterdir():
        assert f"eroica/prompts/{text.name}" in names
    assert {"eroica/demos/train.py", "eroica/py.typed", "mcp_server/server.py"} <= names
    assert not {name for name in names if name.split("/")[0] in {"tests", "evals", "bench", "prompts"}}
    target = tmp_path / "target"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    code = f"""
import sys
import tomllib
sys.path[0:0] = [{str(target)!r}, {str(ROOT)!r}]
from eroica import report
from tests import samples
assert report.__file__.startswith({str(target)!r})
print(len(report.render_html(*samples.slow_input())))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert int(done.stdout) > 10_000


def _commands(document: str) -> list[str]:
    """Indented lines of a document that a shell would run, without their comments."""
    lines = re.findall(r"^(?:    |\$ )((?:make|eroica|\.venv/bin/eroica)\b.*)$", (ROOT / document).read_text(), re.M)
    return [re.sub(r"\s+#.*", "", line) for line in lines]


def test_commands_in_the_documents_exist() -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert targets is not None
    seen = set()
    for document in DOCUMENTS:
        for line in _commands(document):
            program, *arguments = shlex.split(line)
            if program == "make":
                assert arguments[0] in targets[1].split(), line
            else:
                cli._parser().parse_args(arguments)
            seen.add((program, arguments[0]))
    assert {("make", "demo"), ("make", "test"), ("eroica", "diagnose"), ("eroica", "show")} <= seen


@pytest.mark.slow
def test_the_code_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(blocks) >= 2
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    names = {"rank": 0, "loader": range(24), "train_step": lambda batch: torch.ones(64, 64) @ torch.ones(64, 64)}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert (tmp_path / "traces" / "rank0.json").exists()


def test_the_layers_in_agents_md_are_those_that_the_linter_checks() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    checked = {name for line in contracts[0]["layers"] for name in line.split(" | ")}
    table = re.search(r"^    __main__.*?^    errors$", (ROOT / "AGENTS.md").read_text(), re.M | re.S)
    assert table is not None
    assert checked <= set(re.findall(r"\w+", table[0]))
