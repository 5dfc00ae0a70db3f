# `make` alone shows what there is. Every target sets up what it needs.

VENV ?= .venv
-include $(VENV)/choices.mk # of the last `make setup`, so that they need not be repeated

# -- choices of `make setup` ---------------------------------------------------------------------
PYTHON ?=#               a Python 3.11 or newer; empty: the first one found
TORCH ?= torch==2.13.0#  what pip installs as torch
TORCH_INDEX ?=#          another package index to find it on
CUDA ?= 0#               1: accept a CUDA build of torch; in `make kernels`, build for GPUs too
MPI ?= pip#              pip: Open MPI as a wheel; site: the MPI of this machine
MPICC ?= mpicc#          with MPI=site: its compiler
OFFLINE ?=#              a folder of `make wheelhouse`: install from it alone, without a network
WHEELHOUSE ?= wheelhouse#  where `make wheelhouse` puts it
# -- choices of `make train` ---------------------------------------------------------------------
N ?= 2#                  ranks
CONFIG ?= examples/gpt.yaml
ARGS ?=#                 more arguments: ARGS="train.steps=100 pipeline.micro_batches=4"
# -- choices of the tests ------------------------------------------------------------------------
MPI_SIZES ?= 1 2 3 4#    numbers of ranks for test-mpi
MPI_TIMEOUT ?= 600#      seconds for each
K ?=#                    pytest arguments for any test target: K="-k dropout -x"
# -- choices of `make bench` ---------------------------------------------------------------------
BENCH ?= bench#          bench, overhead, prediction, planning, scaling, partition, joint, cuts, split, ceiling, replicas, hosts, checkpoint, memory_1b; ARGS="--models vgg"

PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CHOICES := PYTHON TORCH TORCH_INDEX CUDA MPI MPICC OFFLINE
SOURCES := pyproject.toml setup.py $(shell find kernels -name '*.cpp' -o -name '*.h')
chosen = $(foreach c,$(CHOICES),$(c)=$(strip $($(c))))
export VENV
unexport PYTHONDONTWRITEBYTECODE # every process, and pytest most of all, would compile all modules again

.PHONY: help setup kernels wheelhouse docs train test test-fast test-slow test-kernels test-browser test-mpi test-slurm test-torch test-mpis test-full lint format bench bench-survive bench-kernels clean choices-changed
.DEFAULT_GOAL := help
.NOTPARALLEL: # the tests measure times, and the last lines are those of the last test

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@awk -F ' *[?]= *' '/^[A-Z_]+ [?]=/ {name = $$1; text = $$2; sub(/# +/, "\t", text); \
		split(text, part, "\t"); printf "  %-12s %-20s %s\n", name, part[1], part[2]}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## a virtual environment with torch, MPI and the compiled package in it

# other choices than last time: install again
ifneq ($(strip $(shell cat $(VENV)/.chosen 2>/dev/null)),$(strip $(chosen)))
$(STAMP): choices-changed
endif

$(STAMP): $(SOURCES) .ci/setup
	@env $(foreach c,$(CHOICES),$(c)='$(strip $($(c)))') .ci/setup
	@printf '%s\n' $(foreach c,$(CHOICES),'$(c) ?= $(strip $($(c)))') >$(VENV)/choices.mk
	@echo '$(strip $(chosen))' >$(VENV)/.chosen
	@touch $@

kernels: setup ## the compiled modules again; with CUDA=1 also that for GPUs, by nvcc (NVCC names another)
	MPIPIPE_CUDA=$(strip $(CUDA)) $(PY) setup.py -q build_ext --inplace

wheelhouse: ## all that make setup installs, in a folder for machines without internet
	@env $(foreach c,$(CHOICES) WHEELHOUSE,$(c)='$(strip $($(c)))') .ci/wheelhouse

train: setup ## train CONFIG on N ranks of this machine
	@.ci/launch $(N) $(PY) -m mpipipe.train $(CONFIG) $(ARGS)

test: setup lint test-fast test-slow test-kernels test-browser test-slurm test-mpi ## all of the checks below but test-full

WITHOUT_MPI = OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal
OF_OTHERS = mpi or jobs or slurm or browser or kernels or full

test-fast: setup ## tests without MPI, but the slow ones: for while one works
	$(WITHOUT_MPI) -m "not ($(OF_OTHERS) or slow)" $(K)

test-slow: setup ## the other tests without MPI, each of which takes a quarter of a second or more
	$(WITHOUT_MPI) -m "slow and not ($(OF_OTHERS))" $(K)

test-kernels: setup ## each kernel against float64 and its reference, under sanitizers; each benchmark once
	$(PY) -m pytest -n auto --maxprocesses 4 --dist worksteal -m "kernels and not full" $(K)

TWO_JOBS = -n 2 --dist loadfile# what one of them waits for, the other computes; full ones measure what ranks take

test-mpi: setup ## tests on each of MPI_SIZES ranks, under a real MPI, and of how its jobs end
	$(PY) -m pytest $(if $(FULL),,$(TWO_JOBS)) -m "jobs$(if $(FULL),, and not full)" $(K)
	@for n in $(MPI_SIZES); do \
		OMP_NUM_THREADS=1 .ci/launch $$n timeout -k 10 $(MPI_TIMEOUT) $(PY) -m pytest \
			tests/mpi --with-mpi -m "mpi$(if $(FULL),, and not full)" $(K) </dev/null || \
			{ echo "test-mpi: failed or took over $(strip $(MPI_TIMEOUT)) s with $$n ranks" >&2; exit 1; }; \
	done

test-slurm: setup ## tests under Slurm, when MPIPIPE_TESTBED names the test bed
	$(if $(MPIPIPE_TESTBED),$(PY) -m pytest -m "slurm$(if $(FULL),, and not full)" $(K),@echo \
		"test-slurm: no MPIPIPE_TESTBED, not run")

test-browser: setup ## tests of the page of a run in a headless Chromium, where there is one
	$(PY) -m pytest -m browser $(K)

test-torch: setup ## capture and bits on the oldest and newest torch that is allowed, where they can be had
	@.ci/torch-range $(foreach c,$(filter-out TORCH,$(CHOICES)),$(c)='$(strip $($(c)))')

test-mpis: setup ## tests on 2 and 3 ranks under MPICH and Intel MPI, where pip has them
	@OFFLINE='$(strip $(OFFLINE))' MPI_TIMEOUT='$(strip $(MPI_TIMEOUT))' .ci/mpis $(K)

test-full: setup lint ## everything: more cases of each promise, and what takes minutes too
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not mpi and not jobs and not slurm" $(K)
	$(MAKE) test-slurm test-mpi FULL=1

lint: setup ## ruff, mypy, and the rules on who may import whom
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

docs: setup ## these documents as HTML in build/docs; a broken link is an error
	@$(VENV)/bin/sphinx-build --quiet --fail-on-warning --nitpicky --conf-dir docs . build/docs
	@echo build/docs/index.html

format: setup ## lay the code out as lint wants it
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: setup ## one benchmark, BENCH, a JSON line for each result; see benchmarks/README.md
	@$(PY) -m benchmarks.$(strip $(BENCH)) $(ARGS)

bench-survive: setup ## kills of real ranks under the supervisor, a JSON line at the end; ARGS="--kills 200"
	@$(PY) -m benchmarks.survive $(ARGS)

bench-kernels: setup ## the compiled kernels and whole steps against torch, as JSON; ARGS="dropout --threads 1"
	@$(PY) -m benchmarks.kernels $(ARGS)

clean: ## remove all that was built; runs/ stays
	rm -rf $(VENV) build *.egg-info mpipipe/_kernels_*.so mpipipe/_planner.*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
