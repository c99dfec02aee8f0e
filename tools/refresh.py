"""Run notebooks from top to bottom and store what came out: python tools/refresh.py [NOTEBOOK ...]

A second run changes no byte. Everything that only tells of one run or one person's screen is left out, and where a new
output differs from the stored one only in what depends on the machine (tests/nbval_sanitize.cfg says which forms that
has), the stored one stays. To have a cell stored anew all the same, a redrawn picture for example, clear its output.
"""

import copy
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbval.plugin import coalesce_streams, get_sanitize_patterns

ROOT = Path(__file__).parents[1]
PATTERNS = get_sanitize_patterns((ROOT / "tests" / "nbval_sanitize.cfg").read_text())
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
SECONDS_PER_CELL = 60


def main(paths: list[Path]) -> bool:
    """Refresh each, say what became of it, and return whether all ran."""
    failed = []
    for path in paths:
        start = time.perf_counter()
        stored = nbformat.read(path, as_version=4)
        try:
            new = refreshed(stored, path.parent)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"{path.name}: left as it was\n{error}", file=sys.stderr)
            failed.append(path)
            continue
        text = as_text(new)
        changed = text != path.read_text(encoding="utf-8")
        if changed:
            path.write_text(text, encoding="utf-8")
        print(f"{path.name}  {time.perf_counter() - start:.1f} s  {'changed' if changed else 'as it was'}")
    return not failed


def as_text(notebook) -> str:
    return nbformat.writes(notebook) + "\n"


def refreshed(stored, folder: Path):
    """The notebook after a run in ``folder``, with stored outputs wherever the new ones say the same."""
    new = copy.deepcopy(stored)
    new.metadata.pop("widgets", None)
    NotebookClient(
        new,
        kernel_name="python3",
        timeout=SECONDS_PER_CELL,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    ).execute(stderr=subprocess.DEVNULL)  # where the kernel logs; what cells write there still comes
    new = normalised(new)
    for cell, before in zip(new.cells, normalised(stored).cells, strict=True):
        # A cell that has another number now is stored anew: errors name it, "Cell In[12]".
        if cell.cell_type == "code" and before.outputs and cell.execution_count == before.execution_count:
            if ignored(cell) or same(cell.outputs, before.outputs):
                cell.outputs = before.outputs
    widgets, before = new.metadata.get("widgets"), stored.metadata.get("widgets")
    if widgets and sanitised(widgets) == sanitised(before):
        new.metadata.widgets = before
    return new


def normalised(notebook):
    """The same notebook without what differs from run to run, or from one person's JupyterLab to another's."""
    notebook = copy.deepcopy(notebook)
    notebook.metadata.kernelspec = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    notebook.metadata.language_info = {"name": "python"}  # without the version
    for cell in notebook.cells:
        for key in ("collapsed", "editable", "execution", "jp-MarkdownHeadingCollapsed", "scrolled", "trusted"):
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            cell.outputs = coalesce_streams(cell.outputs)
    return with_counted_widgets(notebook)


def with_counted_widgets(notebook):
    """Widgets get random ids; here the first one that was made is 1, the next is 2."""
    made = notebook.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    text = nbformat.writes(notebook)
    for number, identity in enumerate(made, start=1):
        text = text.replace(identity, f"{number:032x}")
    return nbformat.reads(text, as_version=4)


def ignored(cell) -> bool:
    return "nbval-ignore-output" in cell.metadata.get("tags", [])


def same(new: list, stored: list) -> bool:
    """Whether nbval would call them equal. A traceback counts too here: it shows lines of the cell."""
    return comparable(new) == comparable(stored)


def comparable(outputs: list) -> dict[str, list]:
    kinds = defaultdict(list)
    for output in outputs:
        if output.output_type == "stream":
            kinds[output.name].append(sanitised(output.text))
        elif output.output_type == "error":
            kinds["error"].append(sanitised([output.ename, output.evalue, *output.traceback]))
        else:
            for kind, data in output.data.items():
                if kind not in ("image/png", "image/jpeg"):
                    kinds[kind].append(sanitised(data))
    return kinds


def sanitised(value):
    """``value`` with every text in it as nbval compares it."""
    if isinstance(value, str):
        for pattern, token in PATTERNS:
            value = re.sub(pattern, token, value)
        return value
    if isinstance(value, list):
        return [sanitised(item) for item in value]
    if isinstance(value, dict):
        return {key: sanitised(item) for key, item in value.items()}
    return value


if __name__ == "__main__":
    named = [Path(name) for name in sys.argv[1:]]
    sys.exit(not main(named or sorted((ROOT / "notebooks").glob("*.ipynb"))))
