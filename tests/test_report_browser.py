"""The page in a real browser: part of the full run, since it needs Chromium (`apt-get install chromium`)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from eroica.report import render_html
from tests import samples

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --v=0 --virtual-time-budget=2000 --dump-dom"
).split()

pytestmark = [pytest.mark.full, pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")]


def load(page: str, folder: Path) -> tuple[str, list[str]]:
    """The document after its scripts ran, and what it wrote to the console (errors, refused resources)."""
    file = folder / "report.html"
    file.write_text(page, encoding="utf-8")
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


@pytest.mark.parametrize(
    "sample", [samples.slow_input(8), samples.throttled_gpu(1024), samples.hostile("</script><b>'")]
)
def test_the_page_loads_without_a_word_on_the_console(sample: samples.Sample, tmp_path: Path) -> None:
    document, console = load(render_html(*sample), tmp_path)
    assert console == []
    assert "Where an iteration goes" in document


def test_hovering_a_cell_shows_its_numbers(tmp_path: Path) -> None:
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", render_html(*samples.slow_input(8)))
    hover = """<script>
      const svg = document.querySelector("[data-map=difference] svg"), box = svg.getBoundingClientRect();
      const cell = svg.querySelector(".outline").getBoundingClientRect();
      const at = {clientX: cell.left + cell.width / 2, clientY: cell.top + cell.height / 2, bubbles: true};
      svg.dispatchEvent(new MouseEvent("mousemove", at));
    </script></body>"""
    document, console = load(page.replace("</body>", hover), tmp_path)
    assert console == []
    tip = re.search(r'(?s)<div id="tip"[^>]*>(.*?)</div>', document)
    assert tip is not None
    assert tip[1].startswith(
        "rank 3 · gpu-node-00\nTokenDataset.__getitem__\ntrain/data.py:41\nbeta 31.2 %, peers 0.3 %"
    )


def test_a_script_that_got_into_the_page_would_be_refused_and_reported(tmp_path: Path) -> None:
    page = render_html(*samples.slow_input(8)).replace("</body>", "<script>document.title = 'taken'</script></body>")
    document, console = load(page, tmp_path)
    assert "<title>taken" not in document
    assert any("Content Security Policy" in line for line in console)
