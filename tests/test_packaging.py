"""The files that say what the course needs agree with each other."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = [Requirement(line) for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
PINNED = [Requirement(line) for line in LINES]


@pytest.mark.parametrize("needed", NEEDED, ids=lambda needed: needed.name)
def test_each_has_one_lower_bound_and_a_pin_that_keeps_it(needed):
    (bound,) = needed.specifier
    assert bound.operator == ">="
    (pin,) = (pin for pin in PINNED if canonicalize_name(pin.name) == canonicalize_name(needed.name))
    (version,) = pin.specifier
    assert version.operator == "==" and version.version in needed.specifier


def test_pins_hold_on_every_machine():
    for pin in PINNED:
        (version,) = pin.specifier
        assert Version(version.version).local is None, f"{pin} is a build of one index"


def test_conda_environment_is_the_same_one():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    assert environment["channels"] == ["conda-forge"]
    python, pip, by_pip = environment["dependencies"]
    name, bound = re.fullmatch(r"(\w+) (\S+)", python).groups()
    assert name == "python" and SpecifierSet(bound) == SpecifierSet(PROJECT["requires-python"])
    assert pip == "pip"
    # Names and bounds come from pyproject.toml itself, versions from constraints.txt; nothing is said a second time.
    assert [line for line in by_pip["pip"] if "index-url" not in line] == ["-c constraints.txt", "-e .[test]"]


def test_ci_runs_what_the_project_promises():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    lowest = min(matrix["python"], key=Version)
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(f">={lowest}")
    assert {matrix["os"][0], *(extra["os"] for extra in matrix["include"])} == {"ubuntu-latest", "macos-latest"}
    assert workflow["jobs"]["test"]["steps"][-1] == {"run": ".ci/run"}
