"""A real browser opens the course in JupyterLab, as `make lab` and `make slides` start it, and runs it."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
ON_MACOS = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
BROWSERS = ["chromium", "chromium-browser", "google-chrome", ON_MACOS]
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
# Quiet, and at work in a container, where there is neither a sandbox nor a GPU.
BROWSER_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# The deck looks for the toolbar that it has just hidden. Nothing comes of it.
HARMLESS = "Cannot read properties of null (reading 'observe')"

expect.set_options(timeout=60_000)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH"),
    pytest.mark.timeout(300),
]


# ---- what the tests stand on -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """A copy of the notebooks that nobody has run yet."""
    course = tmp_path_factory.mktemp("course")
    shutil.copytree(ROOT / "assets", course / "assets")
    (course / "notebooks").mkdir()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.execution_count, cell.outputs = None, []
        nbformat.write(notebook, course / "notebooks" / path.name)
    return course


@contextlib.contextmanager
def jupyterlab(course: Path, private: Path, *arguments: str):
    """A server with folders of its own, as {"url": ..., "token": ...}. At the end all that it started is gone."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("JUPYTER", "PYTEST"))}
    environ |= {f"JUPYTER_{what}_DIR": str(private / what) for what in ("CONFIG", "DATA", "RUNTIME")}
    environ |= {f"JUPYTERLAB_{what}_DIR": str(private / what) for what in ("SETTINGS", "WORKSPACES")}
    log = private / "log"
    with log.open("wb") as output:
        server = psutil.Popen(
            [sys.executable, ROOT / "tools" / "lab.py", *arguments, "--no-browser"],
            cwd=course,
            env=environ | {"IPYTHONDIR": str(private / "IPYTHON")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        started = time.monotonic()
        while not (found := list(private.glob("RUNTIME/jpserver-*.json"))) or not found[0].read_text().endswith("}"):
            assert server.poll() is None and time.monotonic() - started < 60, log.read_text()
            time.sleep(0.05)
        yield json.loads(found[0].read_text())
    finally:
        family = [server, *server.children(recursive=True)] if server.is_running() else []
        server.terminate()
        _, left = psutil.wait_procs(family, timeout=15)
        for process in left:
            process.kill()
    assert not left, f"still there after the server had ended: {left}"


@pytest.fixture(scope="module")
def lab(course, tmp_path_factory):
    with jupyterlab(course, tmp_path_factory.mktemp("lab")) as server:
        yield server


@pytest.fixture
def slides(course, tmp_path):
    with jupyterlab(course, tmp_path, "--slides", "notebooks/00_start_here.ipynb") as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=BROWSER_OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def new_page(browser):
    """Opens pages. The test passes only if nothing went wrong on them and they asked no other machine for anything."""
    pages, troubles = [], []

    def watched() -> Page:
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: troubles.append(request.url) if is_elsewhere(request.url) else None)
        pages.append(page)
        return page

    yield watched
    for page in pages:
        page.close()
    assert [trouble for trouble in troubles if trouble != HARMLESS] == []


def is_elsewhere(url: str) -> bool:
    return not re.match(r"(http|ws)://127\.0\.0\.1[:/]|data:|blob:", url)


def open_notebook(page: Page, server: dict, name: str) -> None:
    page.goto(f"{server['url']}lab/workspaces/{name}/tree/notebooks/{name}.ipynb?token={server['token']}")


def choose(page: Page, menu: str, command: str) -> None:
    page.locator("#jp-MainMenu .lm-MenuBar-item", has_text=menu).click()
    page.locator(f".lm-Menu-item[data-command='{command}']").click()


def code_cells(path: Path) -> list:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ("00_start_here", "02_collectives", "10_long_context_and_experts"),
        ("01_memory_hierarchy", "03_inside_collectives"),
        ("04_data_parallel", "05_tensor_parallel"),
        ("06_pipeline_parallel", "07_declarative_sharding"),
        ("08_putting_it_together", "09_planning_at_scale"),
    ],
    ids="-".join,
)
def test_run_all_cells(new_page, lab, course, names):
    """Of some notebooks at the same time, each with a kernel and a world of its own."""
    pages = {name: new_page() for name in names}
    for name, page in pages.items():
        open_notebook(page, lab, name)
    for page in pages.values():
        kernel = page.locator(".jp-StatusBar-TextItem", has_text=re.compile(r"\(ipykernel\) \| Idle"))
        expect(kernel).to_be_visible()  # before that, Run All would be lost
        choose(page, "Run", "runmenu:run-all")
    for name, page in pages.items():
        check_that_all_ran(page, course / "notebooks" / f"{name}.ipynb")
    for name, page in pages.items():
        assert move_each_slider(page) == SLIDERS.get(name, 0)


SLIDERS = {
    "01_memory_hierarchy": 2,
    "03_inside_collectives": 1,
    "04_data_parallel": 3,
    "05_tensor_parallel": 2,
    "06_pipeline_parallel": 6,
    "09_planning_at_scale": 15,
    "10_long_context_and_experts": 4,
}


IDLE = "stages a rank"  # counts for interleaved schedules alone, and chapter 6 begins with another


def move_each_slider(page: Page) -> int:
    """A step redraws what hangs on the slider: to the right, or to the left if it is at its end; and then a step back.
    Returns how many there are."""
    for slider in page.locator(".widget-slider").filter(has_not_text=IDLE).all():
        drawing = slider.locator("xpath=ancestor::*[contains(@class, 'widget-vbox')]").last.locator("svg").first
        slider.scroll_into_view_if_needed()
        before = drawing.inner_html()
        slider.locator(".noUi-handle").focus()
        page.keyboard.press("ArrowRight")
        back = "ArrowLeft"
        try:
            expect(drawing).not_to_have_js_property("innerHTML", before, timeout=2_000)
        except AssertionError:
            page.keyboard.press(back)
            expect(drawing).not_to_have_js_property("innerHTML", before)
            back = "ArrowRight"
        page.keyboard.press(back)
        expect(drawing).to_have_js_property("innerHTML", before)
    return page.locator(".widget-slider").count()


def check_that_all_ran(page: Page, path: Path) -> None:
    prompts = [re.compile(rf"\[{count}\]") for count in range(1, len(code_cells(path)) + 1)]
    expect(page.locator(".jp-Notebook .jp-CodeCell .jp-InputArea-prompt")).to_have_text(prompts, timeout=180_000)
    page.wait_for_function("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    expect(page.get_by_text("Error displaying widget")).to_have_count(0)
    expect(page.locator(".Toastify__toast")).to_have_count(0)  # no news, no advice in front of the notebook

    choose(page, "File", "docmanager:save")
    page.wait_for_function("!document.querySelector('.jp-mod-dirty')")
    failed = [any(output.output_type == "error" for output in cell.outputs) for cell in code_cells(path)]
    assert failed == ["raises-exception" in cell.metadata.get("tags", []) for cell in code_cells(path)]


def test_present_and_run_a_cell_on_its_slide(slides, new_page, course):
    page = new_page()
    open_notebook(page, slides, "00_start_here")
    page.wait_for_selector("body[data-jp-deck-mode='presenting']", state="attached")
    on_slide = page.locator(".jp-Deck .jp-Cell.jp-deck-mod-visible")
    title = nbformat.read(course / "notebooks" / "00_start_here.ipynb", as_version=4).cells[0].source.splitlines()[0]
    expect(on_slide.first).to_contain_text(title.removeprefix("# "))

    on_slide.first.click()
    code = page.locator(".jp-Deck .jp-CodeCell.jp-deck-mod-visible.jp-mod-selected")
    for _ in range(30):
        if code.count():
            break
        page.keyboard.press("Space")
        page.wait_for_timeout(300)
    expect(code).to_be_visible()
    page.keyboard.press("Control+Enter")
    expect(code.locator(".jp-InputArea-prompt")).to_have_text(re.compile(r"\[1\]"))
