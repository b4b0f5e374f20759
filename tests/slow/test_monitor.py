"""`raypo monitor RUN` in a real browser; skipped where there is none."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raypo.storage.run_files import RunFiles
from tests.integration.browser import CHROMIUM, DRIVER, chromium
from tests.integration.task import REPOSITORY
from tests.recorded_run import metrics, write_run

pytest.importorskip("selenium.webdriver")
if not (CHROMIUM and DRIVER):
    pytest.skip("chromium and chromedriver are not installed", allow_module_level=True)

SCORES = """
const chart = [...document.querySelectorAll(".chart")].find((c) => c.ariaLabel === "Score");
return chart ? chart.data[0].x : null;
"""


def test_a_page_in_a_browser_follows_the_run_and_keeps_the_readers_place(tmp_path: Path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select, WebDriverWait

    run = write_run(tmp_path, steps=5)
    files = RunFiles.at(str(run))
    server = subprocess.Popen(
        [sys.executable, "-m", "raypo.cli", "monitor", str(run)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    try:
        assert server.stdout is not None
        match = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", server.stdout.readline())
        assert match
        with chromium(tmp_path / "profile") as browser:
            wait = WebDriverWait(browser, 60)

            def find(selector: str) -> Any:
                return browser.find_element(By.CSS_SELECTOR, selector)

            browser.get(match[0])
            wait.until(lambda b: b.execute_script("return document.body.dataset.ready"))
            assert browser.execute_script(SCORES)[-1] == 5
            assert "step 5 of 12" in find("#now").text
            browser.execute_script("document.body.dataset.mine = 'the same document'")
            find("#config-and-versions details").click()
            Select(find("#samples select[name=step]")).select_by_visible_text("4")
            browser.execute_script("window.scrollTo(0, 400)")

            files.append_metrics(6, metrics(6))
            wait.until(lambda b: b.execute_script(SCORES)[-1] == 6)
            wait.until(lambda b: "step 6 of 12" in find("#now").text)
            assert browser.execute_script("return document.body.dataset.mine"), "no reload"
            assert browser.execute_script("return window.scrollY") == 400
            assert find("#config-and-versions details").get_attribute("open")
            assert Select(find("#samples select[name=step]")).first_selected_option.text == "4"
            drawn = "return [...document.querySelectorAll('.chart')].every("
            drawn += "c => c.querySelector('.main-svg'))"
            assert browser.execute_script(drawn)
            assert [e for e in browser.get_log("browser") if "304" not in e["message"]] == []

            browser.execute_script(
                "const real = window.fetch; window.fetch = () => {"
                "window.fetch = real; return Promise.resolve(new Response('half a page')); };"
            )
            files.append_metrics(7, metrics(7))
            wait.until(lambda b: b.execute_script(SCORES)[-1] == 7)
            assert not find("#problem").is_displayed(), "one answer that could not be read"

            server.terminate()
            server.wait(30)
            wait.until(lambda b: find("#problem").is_displayed())
            assert "does not answer any more" in find("#problem").text
    finally:
        server.kill()
