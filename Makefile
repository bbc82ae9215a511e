# Every target uses .venv in this clone and sets it up on first use.
PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.lohan-setup

.PHONY: setup demo test test-slow lint format bench sanitize clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt csrc/CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.hpp)
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,demo]'
	touch $(STAMP)

demo: setup
	$(PY) examples/demo.py

test: setup
	$(PY) -m pytest -q

test-slow: setup
	$(PY) -m pytest -q -m slow

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: setup
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

bench: setup
	$(PY) benchmarks/step.py --tokens 256 --rounds 1 --steps 3
	$(PY) benchmarks/adam.py --chunks 256Ki 4Mi --rounds 5
	$(PY) benchmarks/io.py --seconds 1 --rounds 3
	$(PY) benchmarks/memory.py --no-cgroup --layers 4 --host 1GiB --limit 2GiB

sanitize: setup
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt cmake ninja nanobind
	$(PY) csrc/sanitize.py

clean:
	rm -rf .venv build runs demo-run .pytest_cache .mypy_cache .ruff_cache
