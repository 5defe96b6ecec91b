# `make demo` shows what the library does, `make test` is what every change must pass, `make bench` measures it beside its peers
# (all suites take about a quarter of an hour; `make bench SUITE=all_reduce` is one). All begin by making .venv, each with
# what it needs.

PYTHON ?= python3
VENV := $(CURDIR)/.venv
PY := $(VENV)/bin/python

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.PHONY: demo docs test test-fast test-real test-torch test-hosts test-long test-compile bench chaos profile lint types suite clean gpu

demo: $(VENV)/.demo
	$(PY) notebooks/digits.py

test: lint types suite

# The essential in a minute on two cores, while one works: names, layout, regions, collectives, gradients, failures.
FAST := library/test_layout.py library/test_spmd.py library/test_optimizer_mesh.py mesh/test_mesh.py mesh/test_array.py \
	transforms/test_data_parallel.py transforms/test_sampler.py kernels/test_messages.py kernels/test_reduction.py
test-fast: lint
	cd tests && $(PY) -m pytest -q -x -n 2 --dist loadfile $(FAST)

# A suite, whose file is bench/bench_$(SUITE).py, or a part of one, such as "train_step and cnn". Without "bench_" a name
# would also choose what other suites call so, and their results would be that part alone.
SUITE ?=
bench: $(VENV)/.bench
	cd bench && $(PY) -m pytest -k "bench_$(SUITE)" && $(PY) cost.py

# Ranks killed, stopped and stuck at random moments for ten minutes: the run must be the undisturbed one, bit for bit;
# then what happens between two hosts, and torchrun beside it.
chaos: $(VENV)/.made
	cd bench && $(PY) chaos.py --hosts --peer 20 | tee results/chaos.txt

# Where the time of each model's step goes, and that of a call that does nothing.
profile: $(VENV)/.bench
	{
		$(PY) bench/profile_call.py 4
		for model in mlp_1k mlp_4k encoder cnn; do
			$(VENV)/bin/spmd run -n 1 bench/profile_parts.py $$model --fused --donate
			$(VENV)/bin/spmd run -n 2 bench/profile_parts.py $$model --shard data --fused --donate
			$(VENV)/bin/spmd run -n 2 bench/profile_step.py $$model --shard data --fused --donate
		done
	} | tee bench/results/profiles.txt

# What only GPUs can show, on one page to send back (bench/results/gpu.md). In an environment of its own, which sees
# the torch that is there; the extra is that of torch's CUDA. Without a GPU nothing is installed.
gpu:
	@$(PYTHON) bench/gpu_page.py --is-there
	$(PYTHON) -m venv --system-site-packages .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet -e '.[dev]'
	extra=$$(.venv-gpu/bin/python bench/gpu_page.py --extra) || { echo "$$extra"; exit 1; }
	.venv-gpu/bin/python -m pip install --quiet -e ".[$$extra]"
	.venv-gpu/bin/python bench/gpu_page.py

lint: $(VENV)/.made
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# What users get is the wheel: it is built, installed outside the checkout, and checked there.
# The second environment sees the first one's packages, all but the editable install of this checkout.
types: $(VENV)/.made
	work=$$(mktemp -d); trap 'trap "" INT TERM; rm -rf "$$work" $(CURDIR)/build' EXIT
	rm -rf build
	$(PY) -m build --wheel --no-isolation --outdir "$$work" . > "$$work/log" || { cat "$$work/log"; exit 1; }
	$(PY) -m venv --without-pip "$$work/venv"
	site() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
	site $(PY) > "$$(site "$$work/venv/bin/python")/others.pth"
	$(PY) -m pip install --quiet --no-deps --no-index --target "$$(site "$$work/venv/bin/python")" "$$work"/spmd-*.whl
	cd "$$work"
	$(PY) -m mypy --python-executable venv/bin/python --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p spmd
	$(PY) -m mypy --python-executable venv/bin/python --cache-dir $(CURDIR)/.mypy_cache --strict $(CURDIR)/tests/typed_program.py

# From tests/, so that `import spmd` finds the installed package and no folder of the checkout; hundreds of processes
# do, so it is compiled first, and the tests themselves stay compiled for the next run. Three workers keep two cores busy,
# for many tests wait; each takes whole files, so that fixtures are shared, in conftest.py's order.
suite: $(VENV)/.made
	$(PY) -m compileall -q spmd mesh kernels transforms
	unset PYTHONDONTWRITEBYTECODE
	cd tests && $(PY) -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m 'not long' --ignore real

# What `make test` leaves out: drivers of several hosts, and combinations of what it has.
test-long: $(VENV)/.made
	cd tests && $(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m long

# Real models beside plain torch; what they come from is installed for them alone.
test-real: $(VENV)/.real
	cd tests && $(PY) -m pytest -q -n 3 --dist loadfile real

# torch's own tests of torch.distributed on the backend "spmd" beside Gloo, and the programs of its stack on more ranks.
test-torch: $(VENV)/.made
	cd tests
	for ranks in 2 3 4; do $(PY) forked.py $$ranks torch_programs.py all; done
	$(PY) torch_suite.py

# A driver in one network namespace, with ranks in it and in another, by hand and by sshd; Slurm, Ray. Needs root.
test-hosts: $(VENV)/.made
	cd tests && TEST_NAMESPACES=1 $(PY) -m pytest -q mesh/test_hosts.py mesh/test_hosts_listening.py mesh/test_engines.py \
		mesh/test_nodes.py

# Where torch.compile may be put, in a driver and on launched ranks: equal to eager, or refused.
test-compile: $(VENV)/.made
	$(PY) bench/compile_matrix.py | tee bench/results/compile_matrix.txt

# Streams stopped at every batch, and killed, and resumed on other numbers of ranks.
.PHONY: resume
resume: $(VENV)/.made
	cd tests && $(PY) stream_matrix.py

# The site, in build/site: every page, every public name, every link, or it fails.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

# A picture of each page, and what does not fit its width. Needs Chromium with its driver.
.PHONY: pictures
pictures: docs
	$(PY) -m pip install --quiet -c constraints.txt selenium
	$(PY) docs/site/pictures.py

$(VENV)/.docs: $(VENV)/.demo
	$(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[docs]'
	touch $@

$(VENV)/.real: $(VENV)/.made
	$(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[real]'
	touch $@

# What the demo needs, with pip's own progress.
$(VENV)/.demo: pyproject.toml setup.py kernels/shm/_small.c constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints.txt setuptools
	$(PY) -m pip install -c constraints.txt --no-build-isolation -e '.[demo]'
	touch $@

# Without build isolation setuptools, too, is the version that constraints.txt pins.
# CuPy, NCCL and CUDA's compiler are tested as far as they go without a GPU; none of them asks for a torch of CUDA.
$(VENV)/.made: $(VENV)/.demo
	$(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev,jax]'
	timeout 300 $(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[cuda12]' \
		nvidia-cuda-nvrtc-cu12 || echo "CuPy and NCCL could not be installed: the tests that need them are skipped"
	touch $@

# What only the bench needs: pytest-benchmark, and the peers. Without an MPI to build it for, mpi4py is left out.
$(VENV)/.bench: $(VENV)/.made
	$(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) .venv-gpu build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/.hypothesis
	rm -f notebooks/*.png kernels/shm/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
