# `make demo` and `make test` set up their own environment on the first run and reuse it afterwards.
PYTHON ?= python3
VENV := .venv
FLOOR := .venv-floor
TE := .venv-te
TE_VERSION := 2.20.2
TE_NEEDS := onnx onnxscript pydantic einops packaging importlib-metadata nvdlfw-inspect peft accelerate matplotlib flashoptim \
	'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*'
DEEPSPEED := .site-deepspeed
DEEPSPEED_NEEDS := deepspeed==0.19.8 hjson py-cpuinfo msgpack einops ninja
CLIENTS_VENV := .venv-clients
CLIENTS_NEEDS := darts pytorch-forecasting 'rfdetr[train]' scvi-tools timm
# nemo-toolkit asks for lightning 2.4.0 at most, rfdetr for pytorch_lightning 2.6 at least
NEMO_VENV := .venv-nemo
CLIENTS ?= darts litgpt litgpt-lora nemo-toolkit pytorch-forecasting rfdetr scvi-tools timm
NEMO_CLIENTS = $(filter nemo-toolkit,$(CLIENTS))
OTHER_CLIENTS = $(filter-out nemo-toolkit,$(CLIENTS))
# the newest releases of some clients ask for Python 3.12; 3.11 gets old ones
CLIENTS_PYTHON ?= $(shell for python in python3.12 python3.13 $(HOME)/.pyenv/versions/3.1[23].*/bin/python $(PYTHON); \
	do $$python -c '' 2>/dev/null && echo $$python && break; done)
DOCS := .site-docs
RUN := OMP_NUM_THREADS=1 $(VENV)/bin
# the processes that share the tests of a command
WORKERS ?= 2
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# tests that other people wrote; about half an hour, not a part of CI
PEERS ?= ../shared/peers

# these three of the eight plugins of the contract run over pytorch_lightning in `make test-versions`; in test-more,
# tests/registration/test_both_packages.py trains and resumes such plugins over both packages
OVER := not (half-auto or fp16-master or fp8-rowwise-gw-hp-sr)

.PHONY: help demo test test-generated test-more test-all lanes environments test-versions check format package test-faults test-dtypes test-peers test-clients test-gpu test-floor test-te test-deepspeed test-ledger ledger ledger-score rehearse evidence notebook docs docs-test clean
.DEFAULT_GOAL := help

# the tests start many processes: each would compile the package and its tests anew
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo        train a small GPT in fp32, bf16 and FP8 and compare them (report in lowprec-compare/)"
	@echo "make test        run the tests that show a fault soon (about 4 minutes on 2 cores)"
	@echo "make test-more   every name, more processes, examples, the benchmarks in toy sizes (about a quarter of an hour on 2 quiet cores)"
	@echo "make test-all    both"
	@echo "make lanes       what CI runs after make test: all lanes, with -j 2 two of them side by side (12 GB on disk)"
	@echo "make check       lint and types"
	@echo "make package     build sdist and wheel in dist/, install the wheel in an empty environment and try it"
	@echo "make test-floor  registration, contract and numerics of the first tier on the oldest supported versions (5 GB on disk)"
	@echo "make test-versions  torch 2.11 to 2.15 over both packages of Lightning (12 GB on disk, an hour)"
	@echo "make test-te     conversion, recipes, training by the reference quantizers with the real Transformer Engine, without a GPU (5 GB)"
	@echo "make test-deepspeed  ZeRO 1, 2 and 3 with the real DeepSpeed on 2 gloo ranks, without a GPU (25 MB on disk)"
	@echo "make ledger      count what a GPU would be asked to do, without a GPU (needs g++; 6 minutes; the first time 5 GB and 20 more)"
	@echo "make ledger-score hold the predicted gains against figures that others have published; writes docs/speed.md"
	@echo "make test-ledger every CUDA path on a GPU that computes nothing: kernels, bytes, waits, memory (needs g++)"
	@echo "make rehearse    on a GPU that computes nothing: the cases that others stand for in make test-ledger"
	@echo "make test-gpu    FP8 kernels against their emulation, on a GPU with FP8 (skips by itself elsewhere)"
	@echo "make test-peers  Lightning's own tests and a probe of the Trainer under our names (PEERS=folder; half an hour)"
	@echo "make test-clients  other people's packages of Lightning with only the precision changed (CLIENTS=\"darts timm\"; 14 GB on disk, half an hour)"
	@echo "make test-generated  500 programs that a seed draws, against a control and with what must change nothing"
	@echo "make test-faults plant the faults of tests/faults/table.jsonl, one at a time, and see that a test catches each (FAULTS=\"--some 30\": fewer)"
	@echo "make test-dtypes what stays float32 in every model of transformers"
	@echo "make evidence    four small models under every precision of a CPU, 5 seeds, against float32 (some hours; goes on with the next model)"
	@echo "make docs        build the docs site into site/, without network once its tools are installed (140 MB on disk)"
	@echo "make docs-test   the same, then look for broken links, and open every page in Chromium where there is one"
	@echo "make notebook    execute the notebook of the examples and write it with its outputs (two minutes)"

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

$(FLOOR)/.installed: pyproject.toml constraints-floor.txt
	@echo "Setting up $(FLOOR) (a minute or two) ..."
	@$(PYTHON) -m venv $(FLOOR)
	@$(FLOOR)/bin/python $(PIP_INSTALL) -c constraints-floor.txt -e '.[test]'
	@touch $@

# the torch extension is not published as a wheel: from the folder $$TE_WHEELS, or built once (17 minutes) and cached
$(TE)/.installed: pyproject.toml constraints-te.txt tools/te_extension.py
	@echo "Setting up $(TE) (a minute or two) ..."
	@$(PYTHON) -m venv $(TE)
	@$(TE)/bin/python $(PIP_INSTALL) -c constraints-te.txt -e '.[test,hf]' transformer-engine==$(TE_VERSION) transformer-engine-cu13 $(TE_NEEDS)
	@wheel=$$($(TE)/bin/python tools/te_extension.py $(TE_VERSION)) && $(TE)/bin/python $(PIP_INSTALL) --no-deps "$$wheel"
	@touch $@

# beside the ordinary environment, not in it: an installed DeepSpeed changes Lightning, accelerate and transformers
$(DEEPSPEED)/.installed: $(VENV)/.installed
	@echo "Setting up $(DEEPSPEED) ..."
	@rm -rf $(DEEPSPEED)
	@$(VENV)/bin/python $(PIP_INSTALL) --no-deps --target $(DEEPSPEED) $(DEEPSPEED_NEEDS)
	@touch $@

# beside the ordinary environment too: the versions are those of the extra `docs`
$(DOCS)/.installed: pyproject.toml $(VENV)/.installed
	@echo "Setting up $(DOCS) ..."
	@rm -rf $(DOCS)
	@$(VENV)/bin/python $(PIP_INSTALL) --target $(DOCS) $$($(VENV)/bin/python -c "import tomllib; \
	print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch $@

demo: $(VENV)/.installed
	@$(VENV)/bin/lowprec compare --precisions 32-true,bf16-mixed,fp8-hybrid $(DEMO) --out lowprec-compare --force

test: $(VENV)/.installed
	$(RUN)/python -m pytest -n $(WORKERS) --dist worksteal --tier 1

test-generated: $(VENV)/.installed
	GENERATED=500 $(RUN)/python -m pytest -n $(WORKERS) tests/generated

test-more: $(VENV)/.installed
	$(RUN)/python -m pytest -n $(WORKERS) --dist worksteal --tier 2
	$(RUN)/python -m pytest --tier 1 -p tests.over_pytorch_lightning tests/contract -k "$(OVER)"

test-all: test test-more

check: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

package: $(VENV)/.installed
	$(VENV)/bin/python -m tools.package

test-gpu: $(VENV)/.installed
	$(VENV)/bin/python -m pytest tests/gpu -W default

test-floor: $(FLOOR)/.installed
	OMP_NUM_THREADS=1 $(FLOOR)/bin/python -m pytest -n $(WORKERS) --dist loadfile --tier 1 tests/registration tests/contract tests/masters tests/numerics tests/precision/test_set_up_again.py tests/torchao/test_fp8_linear.py tests/torchao/test_prototypes.py tests/precision/test_loss_scale*.py tests/msamp/test_scaled_[acgs]*.py tests/fsdp2/test_fsdp2_shards_shown.py

# the newest of constraints.txt with another torch
.venv-2.%/.installed: pyproject.toml constraints.txt
	@echo "Setting up .venv-2.$* (6 GB) ..."
	@$(PYTHON) -m venv $(@D)
	@sed 's/^torch==.*/torch==2.$*/' constraints.txt > $(@D)/constraints.txt
	@$(@D)/bin/python $(PIP_INSTALL) -c $(@D)/constraints.txt -e '.[test]' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*'
	@touch $@

# the loop: from torch 2.14 on the compiled kernels of names are read, on a GPU that computes nothing
test-versions: $(VENV)/.installed $(FLOOR)/.installed .venv-2.14.1/.installed .venv-2.15.0/.installed
	$(VENV)/bin/python -m tools.torch_versions
	for python in .venv-2.14.1/bin/python .venv-2.15.0/bin/python; do $$python -m benchmarks.ledger.launch \
	$$python -m pytest tests/ledger/test_float8_stores.py || exit 1; done

test-te: $(TE)/.installed
	OMP_NUM_THREADS=1 $(TE)/bin/python -m pytest -n $(WORKERS) --dist loadfile -k 'FP8TE or not contract' tests/te tests/triton tests/registration/test_names.py tests/migration/test_our_side.py tests/test_gone.py tests/contract

test-deepspeed: $(DEEPSPEED)/.installed
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(DEEPSPEED) DS_ACCELERATOR=cpu $(RUN)/python -m pytest tests/deepspeed
	@if [ -e $(TE)/.installed ]; then PYTHONPATH=$(CURDIR):$(CURDIR)/$(DEEPSPEED) DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 \
	$(TE)/bin/python -m pytest tests/deepspeed/test_zero_te.py; \
	else echo "left out: tests/deepspeed/test_zero_te.py, which needs the environment of make test-te"; fi

test-ledger: $(TE)/.installed
	$(TE)/bin/python -m benchmarks.ledger.launch $(TE)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m 'not rehearsed' tests/ledger tests/gpu

rehearse: $(TE)/.installed
	$(TE)/bin/python -m benchmarks.ledger.launch $(TE)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m rehearsed tests/ledger tests/gpu

ledger: $(TE)/.installed
	$(TE)/bin/python -m benchmarks.ledger $(LEDGER)

ledger-score: $(VENV)/.installed
	$(RUN)/python -m benchmarks.ledger.score

# what .ci/run runs after `make test`, two lanes side by side: make -j 2 --output-sync=recurse WORKERS=1 lanes
# The longest come first; while the tests of test-more run, the environments of the others are set up one after another.
LANES := test-more test-ledger test-te test-floor docs-test package test-deepspeed demo check

lanes: $(LANES:%=lane-%)

$(filter-out lane-test-more,$(LANES:%=lane-%)): | environments

# without a Chromium this lane fails
lane-docs-test: export CI := true

# a tenth of the steps; in test-more, tests/tools/test_demo.py trains the same model for all of them
lane-demo: export DEMO := --max-steps 20

environments: $(TE)/.installed $(FLOOR)/.installed $(DEEPSPEED)/.installed $(DOCS)/.installed

$(LANES:%=lane-%): lane-%: $(VENV)/.installed
	@echo "=== make $*"; start=$$(date +%s); $(MAKE) --no-print-directory $* && end=passed || end=FAILED; \
	echo "=== make $* $$end after $$(($$(date +%s) - start)) seconds"; [ $$end = passed ]

# each lane plants the faults that its tests see; a lane without its environment is left out, with a word
test-faults: $(VENV)/.installed
	$(RUN)/python -m tests.faults --workers $(WORKERS) $(FAULTS)
ifndef FAULTS
	@[ ! -e $(TE)/.installed ] || OMP_NUM_THREADS=1 $(TE)/bin/python -m tests.faults --lane te --workers $(WORKERS)
	@[ ! -e $(TE)/.installed ] || $(TE)/bin/python -m benchmarks.ledger.launch $(TE)/bin/python -m tests.faults --lane ledger --workers $(WORKERS)
	@[ ! -e $(DEEPSPEED)/.installed ] || PYTHONPATH=$(CURDIR):$(CURDIR)/$(DEEPSPEED) DS_ACCELERATOR=cpu \
	$(RUN)/python -m tests.faults --lane deepspeed --workers $(WORKERS)
endif

test-dtypes: $(VENV)/.installed
	EVERY_FAMILY=1 $(RUN)/python -m pytest -s tests/families/test_kept_float32.py -k a_family

test-peers: $(VENV)/.installed test-dtypes
	$(RUN)/python -m tests.peers $(PEERS)

$(CLIENTS_VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(CLIENTS_VENV) (8 GB) ..."
	@$(CLIENTS_PYTHON) -m venv $(CLIENTS_VENV)
	@$(CLIENTS_VENV)/bin/python $(PIP_INSTALL) --upgrade pip
	@$(CLIENTS_VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[lightning,pytorch-lightning]' $(CLIENTS_NEEDS)
	@$(CLIENTS_VENV)/bin/python $(PIP_INSTALL) --no-deps litgpt  # which asks for older releases than the others
	@touch $@

$(NEMO_VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(NEMO_VENV) (6 GB) ..."
	@$(CLIENTS_PYTHON) -m venv $(NEMO_VENV)
	@grep -v lightning constraints.txt > $(NEMO_VENV)/constraints.txt
	@$(NEMO_VENV)/bin/python $(PIP_INSTALL) -c $(NEMO_VENV)/constraints.txt -e '.[lightning]' 'nemo-toolkit[asr]'
	@touch $@

test-clients: $(if $(OTHER_CLIENTS),$(CLIENTS_VENV)/.installed) $(if $(NEMO_CLIENTS),$(NEMO_VENV)/.installed)
	$(if $(OTHER_CLIENTS),$(CLIENTS_VENV)/bin/python -m tests.clients $(OTHER_CLIENTS))
	$(if $(NEMO_CLIENTS),$(NEMO_VENV)/bin/python -m tests.clients $(NEMO_CLIENTS))

notebook: $(VENV)/.installed
	$(RUN)/python -m tools.notebook

docs: $(DOCS)/.installed
	@PYTHONPATH=$(CURDIR):$(CURDIR)/$(DOCS) NO_MKDOCS_2_WARNING=1 $(RUN)/python -m mkdocs build --clean --quiet
	@echo "To read and search: python -m http.server --directory site"

docs-test: docs
	$(RUN)/python -m tools.site.check site
	$(RUN)/python -m tools.site.browse site

evidence: $(VENV)/.installed
	$(RUN)/python -m benchmarks.evidence --out evidence-out

clean:
	rm -rf dist .venv-2.* $(VENV) $(FLOOR) $(TE) $(CLIENTS_VENV) $(NEMO_VENV) $(DEEPSPEED) $(DOCS) site .nullgpu .pytest_cache .mypy_cache .ruff_cache
