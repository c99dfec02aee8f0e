# Everything one does with the course. The first target that needs it makes .venv and installs what is missing there.
#
#   make lab PYTHON=python3.12    another Python, 3.11 or newer
#   make lab TORCH=cuda           PyTorch with CUDA (cpu: without; auto, if not said: with, where a GPU answers)
#   make slides NOTEBOOK=notebooks/02_collectives.ipynb
#
# PYTHON and TORCH count when .venv is made: to change them later, `make clean` first.

PYTHON ?= python3
TORCH ?= auto
START := notebooks/00_start_here.ipynb

INSTALLED := .venv/installed
IN_VENV := . .venv/bin/activate &&

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1	\2/p' Makefile

lab: $(INSTALLED) ## open the course in JupyterLab
	$(IN_VENV) python tools/lab.py $(or $(NOTEBOOK),$(START))

slides: $(INSTALLED) ## present a notebook: click the first slide once, then step with Space and Shift+Space
	$(IN_VENV) python tools/lab.py --slides $(or $(NOTEBOOK),$(START))

test: $(INSTALLED) ## run every check: style, unit tests, rules for notebooks, every notebook, the browser
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
	$(IN_VENV) python -m pytest

refresh: $(INSTALLED) ## run all notebooks, or NOTEBOOK, and store what came out
	$(IN_VENV) python tools/refresh.py $(NOTEBOOK)

assets: $(INSTALLED) ## draw the pictures in assets/ again
	$(IN_VENV) python -m lecture_lib.figures

bench: $(INSTALLED) ## measure on this machine, beside peers in the same run
	$(IN_VENV) python -m tests.bench

format: $(INSTALLED) ## put code and notebooks into the common style
	$(IN_VENV) ruff check --fix .
	$(IN_VENV) ruff format .

clean: ## remove .venv and everything else that can be made again
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -prune -exec rm -r {} +
	find . -name .ipynb_checkpoints -prune -exec rm -r {} +

# A stamp: what is newer than it gets installed, and a second `make lab` installs nothing.
$(INSTALLED): pyproject.toml constraints.txt tools/install.sh
	sh tools/install.sh $(PYTHON) $(TORCH)
	touch $(INSTALLED)

.PHONY: help lab slides test refresh assets bench format clean
