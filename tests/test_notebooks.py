"""What every notebook of the course keeps to. CONTRIBUTING.md says the same in words."""

import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools import refresh

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

SLIDE_TYPES = {"slide", "subslide", "fragment", "skip"}  # "-" hides a cell, "notes" leaves a blank slide
CODE_LINES = 20
OUTPUT_LINES = 30
CELLS_PER_IGNORED = 20
MACHINE_PATH = re.compile(
    "|".join(
        [r"(?<![\w.])/(?:home|Users|root|private|var/folders)/\S", r"\b[A-Z]:\\\\?\w", r"/ipykernel_\d+"]
        + [re.escape(f"{folder}/") for folder in (ROOT, Path.home(), tempfile.gettempdir()) if folder != Path("/")]
    )
)
IMAGE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<source>[^)\s]*)[^)]*\)")
LINK_TO_IMAGE_IN_HTML = re.compile(r"<img\b", re.IGNORECASE)


# ---- the rules: each yields a sentence for everything that is off ----------------------------------------------------


def is_as_refresh_writes_it(notebook, folder):
    ids = [cell.get("id") for cell in notebook.cells]
    if None in ids or len(set(ids)) < len(ids):
        yield "its cells have no ids of their own: open it in JupyterLab and save it"
        return  # validation would give them new ones
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        yield f"it is not valid: {error.message}"
    if notebook != refresh.normalised(notebook):
        yield "it is not in the form that `make refresh` writes"


def was_run_from_top_to_bottom(notebook, folder):
    counts = [cell.execution_count for cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts are {counts}: run `make refresh`"


def tells_its_chapter_in_order(notebook, folder):
    """Title, what you will be able to do, your turn, what is still missing (or comes next), sources."""
    text = [cell.source if cell.cell_type == "markdown" else "" for cell in notebook.cells]
    if not text or not text[0].startswith("# "):
        yield "the first cell is not a title, `# ...`"
    headings = re.findall(r"^(?:##+ |\*\*(?=.*\*\*$))(.*)$", "\n".join(text), re.MULTILINE)
    place = -1
    for section in ("be able to", "your turn", "missing|next", "sources"):
        places = [i for i, heading in enumerate(headings) if re.search(section, heading, re.IGNORECASE)]
        if not places or places[-1] < place:
            yield f"no heading with '{section}' where one belongs"
        else:
            place = places[-1]
    if headings and place != len(headings) - 1:
        yield f"'{headings[-1]}' comes after the sources"


def can_be_presented(notebook, folder):
    for number, cell in enumerate(notebook.cells, start=1):
        kind = cell.metadata.get("slideshow", {}).get("slide_type")
        if "slideshow" in cell.metadata and kind not in SLIDE_TYPES:
            yield f"cell {number}: slide type {kind!r}; leave slideshow out for a cell that continues the slide"
        if number == 1 and kind != "slide":
            yield "the first cell does not start a slide"


def fits_on_slides(notebook, folder):
    for number, cell in numbered_code_cells(notebook):
        if (lines := len(cell.source.splitlines())) > CODE_LINES:
            yield f"cell {number}: {lines} lines of code, at most {CODE_LINES}"
        if (lines := sum(len(shown(output).splitlines()) for output in cell.outputs)) > OUTPUT_LINES:
            yield f"cell {number}: {lines} lines of output, at most {OUTPUT_LINES}"


def compares_its_outputs(notebook, folder):
    ignoring = 0
    for number, cell in numbered_code_cells(notebook):
        tags = cell.metadata.get("tags", [])
        ignoring += "nbval-ignore-output" in tags
        if re.search(r"^\s*#\s*(NBVAL|PYTEST_VALIDATE)_", cell.source, re.MULTILINE):
            yield f"cell {number}: say it with a tag, not with a comment"
        if "nbval-skip" in tags:
            yield f"cell {number}: a cell that does not run is not tested"
    if ignoring * CELLS_PER_IGNORED > len(code_cells(notebook)):
        yield f"{ignoring} cells ignore their output, at most one in {CELLS_PER_IGNORED}"


def fails_only_on_purpose(notebook, folder):
    for number, cell in numbered_code_cells(notebook):
        failed = any(output.output_type == "error" for output in cell.outputs)
        if failed and "raises-exception" not in cell.metadata.get("tags", []):
            yield f"cell {number}: a stored error without the tag raises-exception"
        if "raises-exception" in cell.metadata.get("tags", []) and not failed:
            yield f"cell {number}: tagged raises-exception, but it raised nothing"


def has_no_cell_for_nothing(notebook, folder):
    for number, cell in enumerate(notebook.cells, start=1):
        if not cell.source.strip():
            yield f"cell {number} is empty"
        if cell.cell_type == "code" and cell.source.rstrip().endswith(";"):
            yield f"cell {number} ends in `;`, which does not silence it everywhere: assign the value to `_`"


def shows_no_path_of_one_machine(notebook, folder):
    for number, cell in enumerate(notebook.cells, start=1):
        texts = [cell.source, *(shown(output) for output in cell.get("outputs", []))]
        if found := MACHINE_PATH.search("\n".join(texts)):
            yield f"cell {number}: {found.group()}... is a path of one machine"


def says_its_pictures_in_words(notebook, folder):
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type == "code":
            for output in cell.outputs:
                data = output.get("data", {})
                if any(kind.startswith("image/") for kind in data) and data.get("text/plain", "<").startswith("<"):
                    yield f"cell {number}: a picture without a line of text that says what it shows"
            continue
        if LINK_TO_IMAGE_IN_HTML.search(cell.source):
            yield f"cell {number}: write ![what it shows](../assets/file.svg) rather than <img>"
        for image in IMAGE.finditer(cell.source):
            if not image["alt"].strip():
                yield f"cell {number}: {image['source']} has no text that says what it shows"
            if not (folder / image["source"]).is_file():
                yield f"cell {number}: there is no file {image['source']}"


RULES = [
    is_as_refresh_writes_it,
    was_run_from_top_to_bottom,
    tells_its_chapter_in_order,
    can_be_presented,
    fits_on_slides,
    compares_its_outputs,
    fails_only_on_purpose,
    has_no_cell_for_nothing,
    shows_no_path_of_one_machine,
    says_its_pictures_in_words,
]


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def numbered_code_cells(notebook) -> list:
    return [(n, cell) for n, cell in enumerate(notebook.cells, start=1) if cell.cell_type == "code"]


def shown(output) -> str:
    """What a person reads of an output."""
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join(output.traceback)
    return str(output.data.get("text/plain", ""))


def complaints(notebook, folder: Path) -> dict[str, list[str]]:
    """What each rule has to say, without the rules that are content."""
    said = {rule.__name__: list(rule(notebook, folder)) for rule in RULES}
    return {rule: sentences for rule, sentences in said.items() if sentences}


# ---- the notebooks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_keeps_the_rules(path):
    said = complaints(nbformat.read(path, as_version=4), path.parent)
    assert not said, "\n".join(sentence for sentences in said.values() for sentence in sentences)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_refresh_would_not_rewrite_it(path):
    assert path.read_text(encoding="utf-8") == refresh.as_text(nbformat.read(path, as_version=4))


# ---- the rules themselves --------------------------------------------------------------------------------------------


def good_notebook():
    def slide(cell):
        cell.metadata.slideshow = {"slide_type": "slide"}
        return cell

    cells = [
        slide(new_markdown_cell("# Chapter")),
        slide(new_markdown_cell("## What you will be able to do")),
        new_markdown_cell("![Four ranks.](picture.svg)"),
        new_code_cell("print(1)", outputs=[new_output("stream", text="1\n")]),
        new_code_cell("figure", outputs=[picture("Four ranks: 1, 2, 3, 4")]),
        new_code_cell("1 / 0", outputs=[new_output("error", ename="E", evalue="", traceback=["E"])]),
        slide(new_markdown_cell("## Your turn")),
        slide(new_markdown_cell("## What is still missing")),
        slide(new_markdown_cell("## Sources")),
    ]
    cells[5].metadata.tags = ["raises-exception"]
    notebook = new_notebook(cells=cells)
    for count, cell in enumerate(code_cells(notebook), start=1):
        cell.execution_count = count
    return refresh.normalised(notebook)


def picture(words: str):
    return new_output("display_data", data={"image/png": "aGk=", "text/plain": words})


def many(lines: int) -> str:
    return "\n".join(["x"] * lines)


# One way to break each part of each rule: the rule, and a statement that breaks it in the notebook nb.
BREAKS = [
    ("is_as_refresh_writes_it", "nb.cells[0].id = 'not valid!'"),
    ("is_as_refresh_writes_it", "nb.cells[0].id = nb.cells[1].id"),
    ("is_as_refresh_writes_it", "nb.nbformat_minor = 4; [cell.pop('id') for cell in nb.cells]"),
    ("is_as_refresh_writes_it", "nb.metadata.language_info.version = '3.11.7'"),
    ("is_as_refresh_writes_it", "nb.cells[3].metadata.execution = {'iopub.status.busy': '2025-01-01'}"),
    ("was_run_from_top_to_bottom", "nb.cells[3].execution_count = None; nb.cells[3].outputs = []"),
    ("was_run_from_top_to_bottom", "nb.cells[4].execution_count = 7"),
    ("tells_its_chapter_in_order", "nb.cells[0].source = 'Chapter'"),
    ("tells_its_chapter_in_order", "nb.cells[1].source = 'To do'"),
    ("tells_its_chapter_in_order", "nb.cells[6].source = '## Exercise'"),
    ("tells_its_chapter_in_order", "nb.cells[7].source = '## The end'"),
    ("tells_its_chapter_in_order", "nb.cells[8].source = 'Sources'"),
    ("tells_its_chapter_in_order", "nb.cells[7].source, nb.cells[8].source = nb.cells[8].source, nb.cells[7].source"),
    ("can_be_presented", "nb.cells[2].metadata.slideshow = {'slide_type': '-'}"),
    ("can_be_presented", "nb.cells[2].metadata.slideshow = {'slide_type': 'notes'}"),
    ("can_be_presented", "nb.cells[2].metadata.slideshow = {'slide_type': ''}"),
    ("can_be_presented", "nb.cells[0].metadata.slideshow.slide_type = 'subslide'"),
    ("fits_on_slides", "nb.cells[3].source = many(21)"),
    ("fits_on_slides", "nb.cells[3].outputs[0].text = many(31)"),
    ("fits_on_slides", "nb.cells[4].outputs = [picture(many(16)), picture(many(16))]"),
    ("compares_its_outputs", "nb.cells[3].metadata.tags = ['nbval-ignore-output']"),
    ("compares_its_outputs", "nb.cells[3].metadata.tags = ['nbval-skip']"),
    ("compares_its_outputs", "nb.cells[3].source = '# NBVAL_IGNORE_OUTPUT'"),
    ("fails_only_on_purpose", "nb.cells[5].metadata.tags = []"),
    ("fails_only_on_purpose", "nb.cells[3].metadata.tags = ['raises-exception']"),
    ("has_no_cell_for_nothing", "nb.cells[3].source = ' '"),
    ("has_no_cell_for_nothing", "nb.cells[4].source += ';'"),
    ("shows_no_path_of_one_machine", "nb.cells[3].source = 'open(\"/home/ada/data\")'"),
    ("shows_no_path_of_one_machine", "nb.cells[3].outputs[0].text = f'{ROOT}/assets'"),
    ("shows_no_path_of_one_machine", "nb.cells[5].outputs[0].traceback = ['/tmp/ipykernel_17/3.py:1: Warning']"),
    ("says_its_pictures_in_words", "nb.cells[2].source = '![](picture.svg)'"),
    ("says_its_pictures_in_words", "nb.cells[2].source = '![Four ranks.](nowhere.svg)'"),
    ("says_its_pictures_in_words", "nb.cells[2].source = '![Four ranks.](https://example.org/picture.svg)'"),
    ("says_its_pictures_in_words", "nb.cells[2].source = '<img src=\"picture.svg\">'"),
    ("says_its_pictures_in_words", "nb.cells[4].outputs = [picture('<Figure size 400x200 with 1 Axes>')]"),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "picture.svg").write_text("<svg/>")
    return tmp_path


def test_a_good_notebook_passes(folder):
    assert complaints(good_notebook(), folder) == {}


@pytest.mark.parametrize(("rule", "statement"), BREAKS)
def test_a_bad_notebook_is_told(rule, statement, folder):
    notebook = good_notebook()
    exec(statement, globals(), {"nb": notebook})
    assert list(complaints(notebook, folder)) == [rule]


def test_one_ignored_output_in_twenty_is_fine(folder):
    notebook = good_notebook()
    notebook.cells[4:4] = [new_code_cell("1", metadata={"tags": []}) for _ in range(17)]
    for count, cell in enumerate(code_cells(notebook), start=1):
        cell.execution_count = count
    notebook.cells[4].metadata.tags = ["nbval-ignore-output"]
    assert complaints(notebook, folder) == {}


def test_each_rule_has_a_bad_notebook():
    assert {rule for rule, _ in BREAKS} == {rule.__name__ for rule in RULES}
