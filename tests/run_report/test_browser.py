"""The page in a headless browser, where one is installed. What it does is also tested without a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import raytrain_hpc as rt
from tests.run_report.run_directories import write_run_directory

CHROMIUM = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=5000",
    "--window-size=1000,900",
    "--dump-dom",
]
# What a user does: time on the x axis, no training line, then a look at a point of the loss curve.
# At once, behind the page's own script: a browser without a screen may end before it draws a frame.
ACTIONS = """<script>{
  const time = document.querySelector("[value=time]");
  time.checked = true;
  time.dispatchEvent(new Event("input", {bubbles: true}));
  document.querySelector(".key").click();
  const plot = document.querySelector(".plot");
  const box = plot.getBoundingClientRect();
  plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + 300, clientY: box.top + 50}));
  document.body.dataset.sideways = document.documentElement.scrollWidth > innerWidth;
}</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_controls_legend_and_pointer_work_in_a_browser(tmp_path: Path) -> None:
    page = rt.report([write_run_directory(tmp_path / "run")])
    page.write_text(page.read_text().replace("</body>", f"{ACTIONS}</body>"))
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    dom = result.stdout
    assert '<form id="tools">' in dom  # no longer hidden
    loss = dom.partition('data-chart="0"')[2].partition("</figure>")[0]
    assert "time since the first step (s)" in loss
    assert re.findall(r'aria-pressed="(\w+)"', loss) == ["false", "true"]
    assert loss.count("<polyline") == 1  # the validation alone
    assert 'width="560"' not in loss and re.search(r'<svg viewBox="0 0 \d+ \d+" width="\d+"', loss)
    assert "validation, step 6: 2.5" in dom.partition('<div id="tip"')[2]
    assert 'data-sideways="false"' in dom
