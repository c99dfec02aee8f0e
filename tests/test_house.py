"""Arrows between the parts of the library point one way, and what a rank executes draws no pictures."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1] / "lecture_lib"
PARTS = sorted(path.name for path in HOUSE.iterdir() if (path / "__init__.py").exists())
USES = {  # part -> parts that it may use; figures may use all
    "launch": set(),
    "trace": set(),
    "hardware": set(),
    "kernels": set(),
    "collectives": {"trace", "kernels", "launch"},  # launch: to start ranks when bench.py runs as a program
    "parallel": {"collectives", "trace"},
    "planner": {"hardware"},
    "train": {"parallel", "trace"},
}
IN_A_RANK = ("trace", "kernels", "collectives", "parallel", "train")
DRAWING = {"IPython", "ipywidgets", "matplotlib"}


def imports(path: Path) -> set[str]:
    """Full names of what a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def parts_used(part: str) -> set[str]:
    names = {name for path in (HOUSE / part).rglob("*.py") for name in imports(path)}
    used = {name.split(".")[1] for name in names if name.startswith("lecture_lib.")}
    return {"launch" if name in ("World", "RankError", "RankTimeout") else name for name in used} - {part}


@pytest.mark.parametrize("part", PARTS)
def test_arrows_point_one_way(part):
    if part != "figures":
        assert part in USES, "a new part says here what it uses"
        assert parts_used(part) <= USES[part]


@pytest.mark.parametrize("part", IN_A_RANK)
def test_what_a_rank_executes_draws_nothing(part):
    names = {name.split(".")[0] for path in (HOUSE / part).rglob("*.py") for name in imports(path)}
    assert not names & DRAWING


@pytest.mark.parametrize("module", ["lecture_lib", "lecture_lib.hardware", "lecture_lib.planner"])
def test_what_a_notebook_imports_first_loads_neither_torch_nor_matplotlib(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'matplotlib', 'jax'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
