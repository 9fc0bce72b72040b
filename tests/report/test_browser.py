"""The page as a person meets it, in the system's Chromium; run by `make browser`."""

import math
import random
import shutil

import pytest

from halfword.report.html import to_html

playwright = pytest.importorskip("playwright.sync_api", reason="needs halfword[browser]")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs halfword[browser]")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-headless-shell")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")

WCAG_2_1_AA = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
NUM_STEPS = 3000
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        # Tests may run as root, as in containers, where Chromium refuses its sandbox.
        browser = driver.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False)
        yield browser
        browser.close()


@pytest.fixture
def pages(write_run, compared, tmp_path):
    """Two files: one run alone, and four runs with all that can happen to them."""
    generator = random.Random(0)
    losses = [1.5 + 4 * math.exp(-s / 300) + generator.gauss(0, 0.05) for s in range(NUM_STEPS)]
    other = [loss + generator.gauss(0.01, 0.01) for loss in losses]
    poisoned = [*other[:1000], math.nan, math.inf, *other[1002:]]
    times = [generator.lognormvariate(-2, 0.1) for _ in losses]
    lean = {"settings": {"precision": "lean"}}
    runs = [
        write_run("fp32-master", losses, sizes=(2, 4, 8, 2), step_s=times),
        write_run("exact", losses, step_s=times),
        write_run("lean", other[:2000], sizes=(2, 2, 2.1, 2), summary=lean, step_s=times),
        write_run(HOSTILE, poisoned, step_s=times),
    ]
    several, alone = tmp_path / "several.html", tmp_path / "alone.html"
    several.write_text(to_html(compared(*runs)))
    alone.write_text(to_html(compared(runs[0])))
    return {"several": several, "alone": alone}, losses


class Visit:
    """An open page, and everything that it said or asked for."""

    def __init__(self, browser, file, scheme="light"):
        self.page = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 900})
        self.said, self.requests = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    def hover(self, chart, x, y):
        """Move the mouse to a place of a chart, in parts of its size, and read the tooltip."""
        self.page.locator(f"#{chart}").scroll_into_view_if_needed()
        box = self.page.locator(f"#{chart}").bounding_box()
        at = box["x"] + x * box["width"], box["y"] + y * box["height"]
        self.page.mouse.move(*at)
        tip = self.page.locator(f"#{chart} .tip")
        tip.wait_for(state="visible")
        return at, tip.inner_text()

    def drawn_steps(self):
        """The steps between which the loss chart is zoomed."""
        return self.page.evaluate(
            "(() => { const zoom = echarts.getInstanceByDom(document.getElementById('loss'))"
            ".getOption().dataZoom[0]; return [zoom.startValue, zoom.endValue]; })()"
        )

    def background(self):
        return self.page.evaluate("getComputedStyle(document.body).backgroundColor")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["several", "alone"])
def test_the_page_is_accessible_quiet_and_loads_nothing(browser, pages, name, scheme):
    files, _ = pages
    visit = Visit(browser, files[name], scheme)
    for chart in ("loss", "memory", "time"):
        visit.hover(chart, 0.5, 0.3)
    found = axe.Axe().run(visit.page, options=WCAG_2_1_AA)
    assert found.violations_count == 0, found.generate_report()
    assert visit.said == []
    assert visit.requests == [files[name].as_uri()]


def test_hovering_tells_the_values_of_every_run(browser, pages):
    files, losses = pages
    visit = Visit(browser, files["several"])
    _, text = visit.hover("loss", 0.5, 0.3)
    title, *rows = text.splitlines()
    step = int(title.split()[1])
    assert title.split("\t")[1:] == ["loss", "difference"] and abs(step - 1500) < 150
    values = {row.split("\t")[0]: row.split("\t")[1:] for row in rows}
    assert list(values) == ["fp32-master", "exact", "lean", HOSTILE]
    assert values["exact"] == [f"{losses[step]:.7g}", "0"]
    _, text = visit.hover("memory", 0.4, 0.2)
    assert text.splitlines()[0] == "fp32-master\tbytes" and "moments\t8.00" in text
    _, text = visit.hover("time", 0.5, 0.5)
    assert " ms\tsteps" in text.splitlines()[0] and " %" in text


def test_dragging_zooms_and_a_double_click_shows_all(browser, pages):
    visit = Visit(browser, pages[0]["several"])
    assert visit.drawn_steps() == [0, NUM_STEPS - 1]
    (x, y), _ = visit.hover("loss", 0.4, 0.3)
    visit.page.mouse.down()
    visit.page.mouse.move(x + 200, y, steps=5)
    visit.page.mouse.up()
    first, last = visit.drawn_steps()
    assert 800 < first < 1300 and first + 400 < last < first + 800
    visit.page.mouse.dblclick(x, y)
    assert visit.drawn_steps() == [0, NUM_STEPS - 1]


def test_keys_walk_zoom_and_show_all(browser, pages):
    visit = Visit(browser, pages[0]["alone"])
    visit.page.focus("#loss")
    visit.page.keyboard.press("ArrowRight")
    assert visit.page.locator("#spoken").inner_text().startswith("step 1 loss fp32-master ")
    visit.page.keyboard.press("+")
    assert visit.drawn_steps()[1] < NUM_STEPS / 2
    visit.page.keyboard.press("0")
    assert visit.drawn_steps() == [0, NUM_STEPS - 1]


def test_the_button_switches_between_light_and_dark(browser, pages):
    visit = Visit(browser, pages[0]["several"], "dark")
    dark = visit.background()
    visit.page.click("#colours")
    light = visit.background()
    assert (dark, light) == ("rgb(20, 23, 26)", "rgb(255, 255, 255)")
    found = axe.Axe().run(visit.page, options=WCAG_2_1_AA)
    assert found.violations_count == 0 and visit.said == []


def test_a_narrow_screen_scrolls_tables_not_the_page(browser, pages):
    visit = Visit(browser, pages[0]["several"])
    visit.page.set_viewport_size({"width": 360, "height": 800})
    width = visit.page.evaluate("document.documentElement.scrollWidth")
    assert width <= 360 and visit.said == []
