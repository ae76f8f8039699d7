"""What tests of several modules share: golden files and the marker of the full run."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import settings

GOLDENS = Path(__file__).parent / "goldens"
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"

# The same examples in every run and no time limits: a failure in CI is a failure at home.
settings.register_profile("ci", derandomize=True, database=None, deadline=None, max_examples=40)
settings.register_profile("dev", parent=settings.get_profile("ci"), derandomize=False, max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write tests/goldens anew; review them as a diff")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: needs a browser, frameworks or a model; runs with `-m full` only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "full" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="part of the full run: pytest -m full"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """check(name, text): `text` is what tests/goldens/`name` holds; with --update-goldens it becomes that."""

    def check(name: str, text: str) -> None:
        file = GOLDENS / name
        if request.config.getoption("--update-goldens"):
            # Other versions wrap or sort differently; goldens written under them would fail for everybody else.
            pinned = dict(
                line.strip().lower().split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line
            )
            for package in ("rich", "jinja2", "numpy"):
                assert metadata.version(package) == pinned[package], (
                    f"update goldens under {package}=={pinned[package]}"
                )
            file.write_text(text, encoding="utf-8")
        assert text == file.read_text(encoding="utf-8"), f"{name} differs; if meant: pytest --update-goldens, git diff"

    return check
