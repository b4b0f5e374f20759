"""The report in a real browser; skipped where there is none (Debian: chromium, chromium-driver)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raypo.report.run_page import load_run, run_page
from raypo.storage.rollout_table import rollout_table
from raypo.storage.run_files import RunFiles
from tests.integration.browser import CHROMIUM, DRIVER, chromium
from tests.recorded_run import WORDS, conversations, episode, write_run

pytest.importorskip("selenium.webdriver")
if not (CHROMIUM and DRIVER):
    pytest.skip("chromium and chromedriver are not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    runs = [load_run(str(write_run(folder, name))) for name in ("recorded", "other")]
    return run_page(runs).write(folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def look(browser: Any, page: str, width: int, scheme: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page)
    WebDriverWait(browser, 60).until(
        lambda b: b.execute_script("return document.body.dataset.ready")
    )


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_the_page_draws_everything_without_a_word_on_the_console(
    browser: Any, page: str, width: int, scheme: str
):
    look(browser, page, width, scheme)
    drawn = "return document.querySelectorAll('.chart .main-svg').length > 0 && "
    drawn += "[...document.querySelectorAll('.chart')].every(c => c.querySelector('.main-svg'))"
    assert browser.execute_script(drawn)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(18, 22, 29)")
    assert browser.get_log("browser") == []


def test_samples_are_filtered_coloured_and_set_side_by_side(browser: Any, page: str):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    look(browser, page, 1280, "light")

    def find(selector: str) -> Any:
        return browser.find_element(By.CSS_SELECTOR, selector)

    def scores() -> list[float]:
        found = browser.find_elements(By.CSS_SELECTOR, ".sample .meta b")
        return [float(element.text) for element in found]

    Select(find("select[name=run]")).select_by_visible_text("other")
    Select(find("select[name=kind]")).select_by_visible_text("held out")
    assert find(".count").text == "16 of 16 samples"
    find(".sample .link").click()
    assert len(browser.find_elements(By.CSS_SELECTOR, ".list.across .column h3")) == 8
    find(".back").click()
    Select(find("select[name=kind]")).select_by_visible_text("trained")
    Select(find("select[name=step]")).select_by_visible_text("7")
    assert find(".count").text == "9 of 9 samples"
    find("input[name=low]").send_keys("0.9")
    assert scores() == [1.07] * 3

    token = find(".sample .token")
    by_advantage = token.value_of_css_property("background-color")
    Select(find("select[name=colour]")).select_by_value("changes")
    by_change = find(".sample .token").value_of_css_property("background-color")
    Select(find("select[name=colour]")).select_by_value("")
    plain = find(".sample .token").value_of_css_property("background-color")
    assert len({by_advantage, by_change, plain}) == 3

    find(".sample .link").click()
    columns = browser.find_elements(By.CSS_SELECTOR, ".list.across .column h3")
    assert len(columns) == 24  # 12 steps of 2 runs
    find(".back").click()
    assert find(".count").text == "3 of 3 samples"
    assert browser.get_log("browser") == []


def test_an_episode_is_shown_turn_by_turn(browser: Any, tmp_path: Path):
    from selenium.webdriver.common.by import By

    run = write_run(tmp_path, "episodes", steps=1, with_rollouts=False)
    several = [row | {"group_index": 1} for row in conversations()]
    RunFiles.at(str(run)).write_rollouts(1, rollout_table([episode(), *several]))
    page = run_page([load_run(str(run))]).write(tmp_path / "report.html").as_uri()
    look(browser, page, 1280, "light")

    one, two = browser.find_elements(By.CSS_SELECTOR, ".sample")

    def texts(card: Any, selector: str) -> list[str]:
        return [each.text.strip() for each in card.find_elements(By.CSS_SELECTOR, selector)]

    first, between, last = (WORDS[each] for each in (1, 4, 2))
    assert texts(one, ".token") == [first, between, last]
    assert texts(one, ".token.other") == [between]
    assert texts(one, ".earned") == ["+0.5", "-1"]
    assert texts(one, ".tool") == ["calculator (0.25 s)", "a call failed: not JSON (0 s)"]
    assert texts(one, ".failed") == ["KeyError: x"]
    assert {"2 turns", "3 tokens", "hits 3"} <= set(texts(one, ".meta span"))
    assert texts(two, ".prompt") == ["first prompt", "second prompt"]
    assert {"2 turns", "6 tokens"} <= set(texts(two, ".meta span"))
    assert "conversation 2 of 2" in two.text
    assert browser.get_log("browser") == []
