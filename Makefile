# Everything runs in .venv, which is made and kept up to date by itself. Needed: make, Python 3.11 or
# newer with venv, and pip's package index.

# The first of these that runs and is new enough; or say which: make test PYTHON=/path/to/python3.12
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$python && break; done)
# Test processes. One is easier to debug: make test WORKERS=0
WORKERS ?= 2
# Anything more for pytest: make test PYTEST_ARGS="-k limits"
PYTEST_ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := .venv/.installed
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist worksteal

# Anything for `make bench`: make bench BENCH_ARGS="gpt2 --methods checkpoint hybrid"
BENCH_ARGS ?=

EXTRA := .compat/site-packages

# For `make gpu`: where it runs, its results, and wheels of what is missing there beside torch.
DEVICE ?= cuda
OUT ?= build/gpu
WHEELS ?= $(wildcard build/gpu-wheels)
GPU_ARGS ?=
# The Python and the system that `make gpu-wheels` collects for; pip compares the numbers of glibc exactly.
GPU_PYTHON ?= 3.12
GPU_PLATFORMS := $(foreach glibc,2_28 2_27 2_17,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64

# The first and the last minor release of torch in the range of pyproject.toml.
OLDEST := $(shell sed -n 's/.*"torch>=\([0-9.]*\),.*/\1.0/p' pyproject.toml)
NEWEST := $(shell awk -F'"torch>=[0-9.]*,<2[.]' 'NF > 1 {print "2." $$2 - 1 ".0"}' pyproject.toml)
# Another release of torch, for test-torch; unless said, the oldest one that is supported. TORCH_INDEX: a further
# package index to take it from, such as https://download.pytorch.org/whl/cpu, whose builds are small.
TORCH ?= $(OLDEST)
TORCH_INDEX ?=
OTHER := .torch/$(TORCH)
# What a release of torch could break: the graphs that are captured, their numbers, Inductor's lowering
OF_TORCH := $(wildcard $(addprefix tests/test_,exactness.py wrap.py shapes.py trace.py checker.py direct_calls.py units.py dynamic.py inside_compiled.py constants.py forgetting.py compiled*.py lowered_memory.py generated_lines.py))

# The mathematics: blocks, the chain, judge, bounds, searches; torch is neither needed nor importable.
OF_MATHEMATICS := $(wildcard tests/test_blocks*.py tests/test_sequence*.py $(addsuffix .py,$(addprefix tests/test_,\
	bounds exchange judge least_times memory offload_placement offload_search polish segment solving sweeps)))

# Tests that take little time, and all that `make test-torch` runs; without "seconds" the other torches' are quick.
QUICK := not slow and not seconds and not compat
TORCH_TESTS ?= not slow and not compat

# For `make test-slow`: a number that grows from run to run, to make a part of the heavy tests in turn; else all.
TURN ?=

# For `make faults`: words of their names, or --turn for the tenth of this hour.
FAULTS ?=

.PHONY: help demo test test-core test-rest test-slow test-long test-times test-slow-times test-all test-torch test-oldest test-newest other-torches faults lint types wheel-check docs check marks bench compat gpu gpu-wheels browser clean
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

demo: $(STAMP) ## train real models under a memory limit, plain and planned side by side
	$(BIN)/hybridremat demo

# Without a marker on the command line, pytest runs the same ones. What takes seconds: tests/support/seconds.py.
test: $(STAMP) browser ## the quick tests, of each mechanism what takes little time: six minutes
	$(PYTEST) -m "$(QUICK)" $(PYTEST_ARGS)

test-core: $(STAMP) ## the quick tests of the mathematics, without torch: half a minute
	HYBRIDREMAT_CORE=1 $(PYTEST) -m "$(QUICK)" $(OF_MATHEMATICS) $(PYTEST_ARGS)

test-rest: $(STAMP) browser ## the other quick tests: with test-core all of make test
	$(PYTEST) -m "$(QUICK)" $(addprefix --ignore=,$(OF_MATHEMATICS)) $(PYTEST_ARGS)

test-slow: $(STAMP) browser ## what takes seconds, more models and cases
	HYBRIDREMAT_TURN=$(TURN) $(PYTEST) -m "(slow or seconds) and not long and not compat" $(PYTEST_ARGS)

# Property tests are in both: with few examples above, with all of them here (tests/conftest.py).
test-long: $(STAMP) ## what CI leaves out: models in full size, further cases, all examples of property tests
	$(PYTEST) -m "long and not compat" --hypothesis-profile=full $(PYTEST_ARGS)

test-times: $(STAMP) browser ## measure which tests take seconds, and leave those to make test-slow
	$(BIN)/pytest -n 0 -m "not slow and not compat" -o junit_duration_report=call --junitxml=build/tests.xml $(PYTEST_ARGS)
	$(BIN)/python tools/test_times.py build/tests.xml

test-slow-times: $(STAMP) browser ## measure which slow tests are heavy, of which CI runs a part in turn
	$(PYTEST) -m "(slow or seconds) and not long and not compat" --junitxml=build/tests.xml $(PYTEST_ARGS)
	$(BIN)/python tools/test_times.py build/tests.xml --heavy

test-all: $(STAMP) browser ## all of these
	$(PYTEST) -m "not compat" --hypothesis-profile=full $(PYTEST_ARGS)

test-torch: $(OTHER)/.installed browser ## the quick tests and those of seconds with another torch: make test-torch TORCH=2.11.0
	$(OTHER)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "$(TORCH_TESTS)" $(PYTEST_ARGS)

test-oldest: ## the quick tests of captured graphs, their numbers and compiled steps with the oldest torch
	@$(MAKE) test-torch TORCH=$(OLDEST) TORCH_TESTS="$(QUICK)" PYTEST_ARGS="$(OF_TORCH) $(PYTEST_ARGS)"

test-newest: ## the same tests with the newest torch that is supported
	@$(MAKE) test-torch TORCH=$(NEWEST) TORCH_TESTS="$(QUICK)" PYTEST_ARGS="$(OF_TORCH) $(PYTEST_ARGS)"

other-torches: ## set up what test-oldest and test-newest run in
	@$(MAKE) .torch/$(OLDEST)/.installed TORCH=$(OLDEST)
	@$(MAKE) .torch/$(NEWEST)/.installed TORCH=$(NEWEST)

# Without one, the tests of the HTML report's page are skipped (in CI: fail), all others run.
browser: ## install Chromium and its driver, for the tests of the HTML report (Debian, as root or with sudo)
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi; \
	if ! command -v apt-get >/dev/null; then \
		echo "No Chromium with chromedriver on PATH, and no apt-get to install them with:" \
			"the tests of the HTML report's page will be skipped." >&2; exit 0; fi; \
	if [ "$$(id -u)" = 0 ]; then sudo=; else sudo="sudo -n"; fi; \
	echo "Installing Chromium, for the tests of the HTML report"; \
	said=$$({ $$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		$$sudo apt-get install -y -qq --no-install-recommends chromium chromium-driver; } 2>&1) || { \
		printf '%s\n' "$$said" | tail -n 5; \
		echo "Chromium could not be installed (apt-get install chromium chromium-driver, as root):" \
			"the tests of the HTML report's page will be skipped."; } >&2

faults: $(STAMP) ## make deliberate faults in a copy of the source: the tests have to see each (FAULTS=words of its name)
	$(BIN)/python tools/faults.py $(FAULTS)

lint: $(STAMP) ## ruff: rules and format of imports
	$(BIN)/ruff check .

types: $(STAMP) ## mypy --strict over the four packages
	$(BIN)/python tools/typing_tree.py
	$(BIN)/mypy

wheel-check: $(STAMP) ## build the wheel, install it elsewhere, import every module
	$(BIN)/python tools/check_wheel.py

docs: $(STAMP) ## the documentation as pages, docs/_build/html/index.html; a warning is an error
	$(BIN)/sphinx-build -M html docs docs/_build -W --keep-going -q

check: lint types wheel-check docs test-all test-oldest test-newest faults ## lint, types, wheel, documentation and all tests, as CI does

marks: $(STAMP) ## frontiers of the reference models beside the recorded ones; write docs/benchmarks.md
	$(BIN)/python benchmarks/compare_marks.py

bench: $(STAMP) ## what people use today beside ours: measure what is new, write docs/benchmarks.md (hours)
	$(BIN)/python benchmarks/peers.py $(BENCH_ARGS)

compat: $(STAMP) $(EXTRA)/.installed ## try every model and habit of docs/compatibility.md, and write its table
	rm -rf .compat/lines
	HYBRIDREMAT_COMPAT_RESULTS=.compat/lines HYBRIDREMAT_COMPAT_PACKAGES=$(EXTRA) \
		$(PYTEST) tests/compat -m "compat or not compat" $(PYTEST_ARGS)
	$(BIN)/python tools/compat_table.py .compat/lines docs/compatibility.md

# Not in .venv: torchvision has no CPU build for this torch, and breaks other imports unless the tests'
# conftest.py prepares it. The other packages that these and timm need are there already. Those of quantized
# weights stand in a folder of their own, as transformers imports them where it finds them. dill takes packages for
# installed by the folder's name (site-packages), and else pickles all of pyarrow, which fails.
$(EXTRA)/.installed: $(STAMP)
	@$(PIP) install -qq -c constraints.txt --no-deps --upgrade --target $(EXTRA) torchvision timm \
		trl datasets pyarrow dill multiprocess xxhash \
		scipy torchdiffeq torch_geometric
	@$(PIP) install -qq -c constraints.txt --no-deps --upgrade --target $(EXTRA)/quantized torchao bitsandbytes
	@touch $@

# With the torch of $(PYTHON), in an environment on top of it; see docs/benchmarks.md.
gpu: ## on a machine with a GPU, without network: doctor, the tests marked cuda, benchmarks, in ten minutes
	"$(PYTHON)" tools/gpu_run.py --device $(DEVICE) --out "$(OUT)" $(if $(WHEELS),--wheels "$(WHEELS)") $(GPU_ARGS)

gpu-wheels: $(STAMP) ## collect what `make gpu` may need on a machine without network, into build/gpu-wheels
	$(PIP) download -q -c constraints.txt -r tools/gpu_wheels.txt --no-deps --only-binary=:all: \
		--implementation cp --python-version $(GPU_PYTHON) $(GPU_PLATFORMS) -d build/gpu-wheels
	@du -sh build/gpu-wheels

$(OTHER)/.installed: $(STAMP) tools/torch_environment.py
	@echo "Setting up $(OTHER): some minutes the first time, and 6 GB where torch comes with CUDA"
	@$(BIN)/python tools/torch_environment.py $(OTHER) $(TORCH) $(if $(TORCH_INDEX),--index $(TORCH_INDEX))
	@touch $@

clean: ## remove .venv and everything that was built
	rm -rf .venv .torch .typing .compat docs/_build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is named with its exact version: a bare "torch" may bring several GB for accelerators. setuptools
# comes first, from constraints.txt too, so that the package is built with nothing unpinned.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "hybridremat needs Python 3.11 or newer, and none was found as python3," \
		"python3.13, python3.12, python3.11 or python. Install one, or: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "hybridremat needs Python 3.11 or newer; $(PYTHON) is not, or does not run." >&2; exit 1; }
	@echo "Setting up .venv: a few minutes the first time, most of it for torch"
	@test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	@$(PIP) install -qq -c constraints.txt setuptools
	@$(PIP) install -qq -c constraints.txt --no-build-isolation "$$(grep '^torch==' constraints.txt)" -e '.[dev]'
	@touch $@
