# Every target uses .venv in this clone and sets it up on first use.
PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.lohan-setup

CUDA_TORCH ?= 2.14.1
CUDA_VENV := build/cuda-venv-$(CUDA_TORCH)

.PHONY: setup demo wheel test test-times test-fast test-slow test-cuda test-browser lint format docs docs-site bench sanitize clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt csrc/CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.hpp)
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,demo]'
	touch $(STAMP)

demo: setup
	$(PY) examples/demo.py

# One worker more than cores, since tests wait for drives and processes; a worker takes whole files,
# the longest first (tests/conftest.py).
TEST := -m pytest -q -n $$(($$(nproc) + 1)) --dist loadfile --no-loadscope-reorder
test: setup
	$(PY) $(TEST)

# The same, with a table of the CPU time of each file.
test-times: setup
	$(PY) $(TEST) -p tests.cpu_times

# The layers that compute without running a model, without the files that take longest, and one
# training by the command line. Both lists together must end within 60 seconds on 2 cores.
FAST := tests/util tests/model tests/schedule tests/planner tests/top_level/test_config.py \
	$(addprefix tests/store/test_,store.py recovery.py extents.py fixed.py) \
	tests/end_to_end/test_train.py::test_plain_text_file
NOT_FAST := $(addprefix tests/planner/test_,best.py commits.py machine_plan.py ranks.py wear.py) \
	$(addprefix tests/util/test_,freed_memory.py trace.py)

test-fast: setup
	$(PY) -m pytest -q -n 2 $(addprefix --ignore=,$(NOT_FAST)) $(FAST)

# Everything else, in slices of at most half an hour; a table in docs/reliability.md says how each
# ended last. One slice: make test-slow SLICE=crash
test-slow: setup
	$(PY) -m tests.slow_tier $(SLICE)

# torch's real CUDA build without a GPU (tests/softcuda): downloads it into an environment of its
# own, a gigabyte with headers, and builds for a minute. An older one: make test-cuda CUDA_TORCH=2.6.0
# Within the time that CI has: make test-cuda LIMITS=--ci
test-cuda: setup
	$(PY) -m tests.softcuda $(CUDA_VENV) $(CUDA_TORCH) $(LIMITS)

# The pages and the report in a real browser; installs Debian's Chromium and its driver if there are
# none. PICTURES=DIR keeps pictures of all pages.
test-browser: setup
	command -v chromedriver || apt-get install -y chromium chromium-driver || sudo apt-get install -y chromium chromium-driver
	$(PY) -m pytest -q -m slow tests/ui

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: setup
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

# The parts of docs/ that are made: tables of settings, and the picture of a simulated step.
docs: setup
	$(PY) docs/settings_page.py
	mkdir -p build
	$(PY) -m lohan simulate --model llama-3-8b --machine rtx4090 --host 48GiB --ssds 8 --batch 32 --trace build/lanes.json
	$(PY) docs/lanes_picture.py build/lanes.json docs/lanes.svg "One step of llama-3-8b, batch 32 x 1024 tokens: RTX 4090, 48 GiB of main memory, 8 SSDs (simulated)"

# The documentation as a site in build/site; to read it while writing: .venv/bin/mkdocs serve
docs-site: setup
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

# Wheels for CPython 3.11 and, with the stable ABI, for 3.12 and later, in dist/. They need glibc 2.28.
WHEEL_PYTHONS ?= python3.11 python3.12
wheel:
	$(PYTHON) csrc/wheels.py $(addprefix --python ,$(WHEEL_PYTHONS))

bench: setup
	$(PY) benchmarks/step.py --tokens 256 --rounds 1 --steps 3
	$(PY) benchmarks/adam.py --chunks 256Ki 4Mi --rounds 5
	$(PY) benchmarks/io.py --seconds 1 --rounds 3
	$(PY) benchmarks/memory.py --no-cgroup --layers 4 --host 1GiB --limit 2GiB

sanitize: setup
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt cmake ninja nanobind
	$(PY) csrc/sanitize.py

clean:
	rm -rf .venv build dist runs demo-run .pytest_cache .mypy_cache .ruff_cache
