# Every target makes what it needs on first use; `make help` lists them.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Given on the command line only (`make reproduce PROFILE=laptop MODEL=gpt2`): a variable DATA or LENGTH that happens
# to be in the caller's environment does not change a result.
PROFILE = embedded
MODEL =
DATA =
SEED =
STEPS =
WITH =
LOG =
AGAINST =
CHECKPOINT =
RECIPE =
PROMPT =
URL =
ENGINE =
WINDOWS =
LENGTH =
TOP =
WITHIN =
STALE =
SCHEDULER =
FOLDER =
# The names of all that the command line gives: `make diagnose` finds its options among them.
export override FRAGILITY_GIVEN := $(strip $(foreach name,$(.VARIABLES),$(if $(filter command%,$(origin $(name))),$(name))))
# A dollar sign in a value of the command line or the environment is no variable or function of make. Commands see both.
$(foreach name,$(filter-out %MAKEFLAGS MFLAGS MAKELEVEL MAKEFILES SHELL,$(.VARIABLES)),\
    $(if $(filter command% environment%,$(origin $(name))),\
        $(eval $(if $(filter command%,$(origin $(name))),export override) $(name) := $$(value $(name)))))
# $(call quoted,text) is one word of the shell, whatever the text holds.
quoted = '$(subst ','\'',$(1))'
# All variables here are in capitals: nobody would read windows=1.
override LOWER := $(if $(FRAGILITY_GIVEN),$(shell printf '%s\n' $(foreach name,$(FRAGILITY_GIVEN),$(call quoted,$(name))) | grep '^[a-z]'))
$(if $(LOWER),$(error the variables of make are in capitals, got $(LOWER)))
# A profile has the seeds and sizes of an experiment.
override OF_PROFILES := reproduce predictor recipes rivals windows seeds realisation engines referees real
override UNREAD := $(filter SEED WINDOWS LENGTH,$(FRAGILITY_GIVEN))
$(if $(and $(UNREAD),$(filter $(OF_PROFILES),$(MAKECMDGOALS))),$(error $(addsuffix =,$(UNREAD)) is for make diagnose and make score: \
    experiments have their seeds and windows from PROFILE=, a folder of notebooks/profiles))
export PROFILE MODEL DATA PROMPT SEED STEPS WITH LOG AGAINST CHECKPOINT RECIPE URL ENGINE WINDOWS LENGTH TOP WITHIN STALE SCHEDULER FOLDER
# STALE=keep takes finished runs of other code or other versions as they are.
export FRAGILITY_STALE := $(STALE)
# SCHEDULER=tcp://host:port or file.json has the workers of that Dask cluster compute (docs/clusters.md).
export FRAGILITY_SCHEDULER := $(SCHEDULER)

# An activated environment that has the packages works even without the package installed into it.
export override PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# glibc hands the memory of every large tensor back to the system and takes it anew, page by page: a fifth of a pass.
export MALLOC_MMAP_THRESHOLD_ ?= 33554432
export MALLOC_TRIM_THRESHOLD_ ?= 1073741824
# Above that threshold, as for the logits of 262,144 tokens: pages of 2 MiB, where the system has them.
export THP_MEM_ALLOC_ENABLE ?= 1
# A thread that waits for others looks so often before it sleeps: enough for most waits, little where cores are shared.
ifndef OMP_WAIT_POLICY
export GOMP_SPINCOUNT ?= 10000
endif

# Packages keep caches and settings at home. Where that cannot be written (some containers), home is here.
ifneq ($(shell test -d "$$HOME" && test -w "$$HOME" && echo yes),yes)
export override HOME := $(CURDIR)/.home
$(shell mkdir -p $(call quoted,$(HOME)) 2>/dev/null)
endif

# The activated environment where it satisfies pyproject.toml, otherwise .venv.
ACTIVE := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX))
LACKS := $(if $(ACTIVE),$(shell $(call quoted,$(ACTIVE)/bin/python) -m fragility_lab.running.environment 2>&1 || echo "(unmet)"))
USABLE := $(if $(ACTIVE),$(if $(LACKS),,yes))
PYTHON := $(if $(USABLE),$(call quoted,$(ACTIVE)/bin/python),.venv/bin/python)
ENVIRONMENT := $(if $(USABLE),,.venv/installed)
export LACKS

NOTEBOOKS := $(wildcard notebooks/*.ipynb notebooks/*/*.ipynb)
EXECUTE = $(PYTHON) -m fragility_lab.running.execute
PARALLEL = --numprocesses logical --maxprocesses 4

# Results of a model or text of one's own do not mix with those of the profile; RESULTS=name
# on the command line keeps those of several apart. Those of another embedded checkpoint have its name.
SHIPPED := $(if $(DATA),,$(filter $(MODEL),$(notdir $(wildcard fragility_lab/assets/checkpoints/*))))
export RESULTS := $(or $(and $(filter embedded,$(PROFILE)),$(SHIPPED)),$(PROFILE)$(if $(MODEL)$(DATA),-custom))

# The values come through the shell's variables, so that spaces and quotes in them survive.
GIVEN = --profile "$$PROFILE" -p "profile=$$RESULTS" \
    $${MODEL:+--if-present "model=$$MODEL"} $${DATA:+--if-present "data=$$DATA"}

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo "  with PROFILE=embedded (default), smoke, laptop or paper; MODEL= and DATA= take a hub name or a path,"
	@echo "  RESULTS= a name for the folder of results under outputs, STALE=keep takes runs of older code as they are,"
	@echo "  SCHEDULER=tcp://... or file.json the Dask cluster that computes, as docs/clusters.md says"
	@for python in $(PYTHON) python3; do "$$python" -m fragility_lab.diagnosis.options 2>/dev/null && exit; done; \
	echo "  options of make diagnose: docs/protocol.md, section 11"

.PHONY: reproduce
reproduce: $(ENVIRONMENT)  ## run the experiments, leaving tables and figures under outputs/PROFILE
	@$(EXECUTE) e1_controlled_sweeps $(GIVEN)
	@$(EXECUTE) e2_predictor $(GIVEN)
	@$(EXECUTE) e3_patching $(GIVEN)
	@$(EXECUTE) e5_mitigation $(GIVEN)
	@$(EXECUTE) report $(GIVEN)
	@printf '%s\n' "" "tables: outputs/$$RESULTS/tables" "figures: outputs/$$RESULTS/figures" \
	    "report: outputs/$$RESULTS/report.html"

.PHONY: predictor
predictor: $(ENVIRONMENT)  ## X1: the adjoint predictor on E2's and E3's windows, and the report
	@$(EXECUTE) x1_adjoint_predictor $(GIVEN)
	@$(EXECUTE) report $(GIVEN)

.PHONY: recipes
recipes: $(ENVIRONMENT)  ## X2: quantization recipes and mixed plans, predicted in KL and changed tokens, and measured
	@$(EXECUTE) x2_recipes $(GIVEN)

.PHONY: rivals
rivals: $(ENVIRONMENT) .peers/installed  ## X2: other libraries' mixed plans beside ours, under their own quantizers
	@$(EXECUTE) x2_rivals $(GIVEN)

# What was asked for on the command line alone: two models have a folder of results each.
GIVEN_PROFILE := $(if $(filter command override,$(origin PROFILE)),yes)
GIVEN_RESULTS := $(if $(filter command override,$(origin RESULTS)),yes)

.PHONY: real
real: $(ENVIRONMENT)  ## two real, trained models (or MODEL=), fetched by pip, through E2, E3, X1, X2 and the diagnosis
	@$(PYTHON) -m fragility_lab.running.real $(if $(GIVEN_PROFILE),--profile "$$PROFILE") \
	    $${MODEL:+--model "$$MODEL"} $${DATA:+--data "$$DATA"} $(if $(GIVEN_RESULTS),--results "$$RESULTS")

INDEPENDENT = -p "profile=independent$${MODEL:+-$$(basename "$$MODEL")}" $${MODEL:+--if-present "model=$$MODEL"} --profile independent

.PHONY: windows
windows: $(ENVIRONMENT)  ## E2 and E3 on held-back text in windows that no two seeds share (MODEL= an embedded one)
	@$(EXECUTE) e2_predictor $(INDEPENDENT)
	@$(EXECUTE) e3_patching $(INDEPENDENT)

.PHONY: seeds
seeds: $(ENVIRONMENT)  ## E5 over many seeds, as far as its profile's looks say, and the report (six core-minutes a seed)
	@$(EXECUTE) e5_seeds $(GIVEN)
	@$(EXECUTE) report $(GIVEN)

.PHONY: realisation
realisation: $(ENVIRONMENT)  ## E5's first eight seeds under another realisation of rounding
	@$(EXECUTE) e5_seeds --profile realisation

.PHONY: diagnose
diagnose: $(ENVIRONMENT)  ## how a model drifts by RECIPE= or from REFERENCE_MODEL=, in TARGET=; what to do for BUDGET=
	@$(PYTHON) -m fragility_lab.diagnosis --profile "$$PROFILE" $(if $(GIVEN_RESULTS),--results "$$RESULTS")

.PHONY: explorer
explorer: $(ENVIRONMENT)  ## one HTML file in which anyone tries plans for the embedded model, without Python
	@$(PYTHON) -m fragility_explorer.build

.PHONY: sentence
sentence: $(ENVIRONMENT)  ## a text (PROMPT=) written on by MODEL= in fp32, bf16, fp8 and int4: which words change, and why
	@$(PYTHON) -m fragility_explorer.continued $${MODEL:+--model "$$MODEL"} $${PROMPT:+--prompt "$$PROMPT"}

.PHONY: compare
compare: $(ENVIRONMENT)  ## rounding or a bug? An engine's log-probabilities (LOG=) against MODEL= by RECIPE=, or AGAINST= a log
	@$(PYTHON) -m fragility_engines --log "$$LOG" $${MODEL:+--model "$$MODEL"} $${RECIPE:+--recipe "$$RECIPE"} \
	    $${AGAINST:+--against "$$AGAINST"} $${CHECKPOINT:+--checkpoint "$$CHECKPOINT"} $(if $(GIVEN_RESULTS),--results "$$RESULTS")

.PHONY: score
score: $(ENVIRONMENT)  ## have the server at URL= score text (DATA=) by the tokens of MODEL=, and write the LOG= for make compare
	@$(PYTHON) -m fragility_engines.logs.score --url "$$URL" --model "$$MODEL" $${DATA:+--data "$$DATA"} $${LOG:+--log "$$LOG"} \
	    $${WINDOWS:+--windows "$$WINDOWS"} $${LENGTH:+--length "$$LENGTH"} $${SEED:+--seed "$$SEED"} $${TOP:+--top "$$TOP"} \
	    $${ENGINE:+--engine "$$ENGINE"} $${WITHIN:+--within "$$WITHIN"}

.PHONY: engines
engines: $(ENVIRONMENT)  ## X3: verdicts of make compare on engines with known truth, harmless and faulty
	@$(EXECUTE) x3_engines $(GIVEN)

.PHONY: referees
referees: $(ENVIRONMENT) .engines/installed  ## X4: engines that other people wrote, beside predictions and emulations of them
	@$(EXECUTE) x4_referees $(GIVEN)

.PHONY: gguf
gguf: $(ENVIRONMENT) .engines/installed  ## plans of GGUF types beside llama-quantize's mixes at equal size, as llama.cpp measures them
	@$(PYTHON) -m fragility_engines.llama_cpp.plans $${MODEL:+--model "$$MODEL"} $${DATA:+--data "$$DATA"} \
	    $(if $(GIVEN_RESULTS),--results "$$RESULTS")

.PHONY: reruns
reruns: $(ENVIRONMENT)  ## the claims on which outputs/RESULTS and outputs/WITH= have different verdicts
	@$(PYTHON) -m fragility_lab.reporting.reruns "$$RESULTS" "$$WITH"

.PHONY: verify
verify: $(ENVIRONMENT)  ## compute a sample of the committed results again, and compare (SEED= draws it; three minutes)
	@$(PYTHON) -m fragility_lab.experiments.verify $${SEED:+--seed "$$SEED"}

.PHONY: pretrain
pretrain: $(ENVIRONMENT)  ## train an embedded checkpoint again (two hours on two CPU cores; STEPS= for fewer)
	@$(EXECUTE) pretrain_embedded $(GIVEN) $${STEPS:+-p "steps=$$STEPS"}

.PHONY: test
test: SELECTED = -m "not slow"
test:  ## run all tests but the slow ones (tests/slow.txt), then every notebook with its committed defaults
test-all:  ## the same with the slow tests, which take most of the time
.PHONY: test-all
test test-all: $(ENVIRONMENT)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -p tests.quick_start tests $(SELECTED) $(PARALLEL) --dist worksteal
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest --nbval --nbval-current-env --nbval-kernel-startup-timeout 300 $(NOTEBOOKS) $(PARALLEL) \
	    -p tests.quick_start -p tests.forked_kernels --dist loadfile

.PHONY: test-families
test-families: $(ENVIRONMENT)  ## diagnose 19 families at 2 and 40 blocks in three formats each, other types at 2 (20 core-minutes)
	EVERY=yes $(PYTHON) -m pytest tests/lab/test_diagnosis_families.py tests/lab/test_further_families.py $(PARALLEL)

.PHONY: test-faults
test-faults: $(ENVIRONMENT)  ## kill E2, E3, E5 and X1 at 50 random moments each, and compare their tables (hours)
	KILLS=50 $(PYTHON) -m pytest tests/lab/test_faults.py -k killed

.PHONY: browser
browser: $(ENVIRONMENT)  ## install what test-browser needs, or say what is missing
	$(PYTHON) tests/browser/prepare.py

.PHONY: test-browser
test-browser: browser .site/installed  ## use the teaching notebooks in a real JupyterLab and Chromium
	$(PYTHON) -m pytest tests/browser

.PHONY: test-peers
test-peers: .peers/installed  ## compare schemes and exports with torchao, ModelOpt, compressed-tensors and gfloat
	.peers/bin/python -m pytest -o filterwarnings=default tests/peers

.PHONY: test-large
test-large: $(ENVIRONMENT)  ## diagnose a model of 1 B parameters within 2.5 GB of memory (12 GB of disk, some minutes)
	$(PYTHON) -m pytest tests/large -s

.PHONY: notebooks
notebooks: $(ENVIRONMENT)  ## run every notebook with its committed defaults and store clean outputs
	$(PYTHON) -m fragility_lab.running.refresh

.PHONY: shipped
shipped: $(ENVIRONMENT)  ## what lessons and results show without computing it, again: assets/lessons, assets/results_explorer
	$(PYTHON) -m fragility_lessons.shipping
	$(PYTHON) -m fragility_explorer.windows

.PHONY: exercises
exercises: $(ENVIRONMENT)  ## outputs/exercises: the lessons' exercises to print, and their solutions apart
	@$(PYTHON) docs/site/exercise_sheets.py

.PHONY: answers
answers: $(ENVIRONMENT)  ## students' answers in FOLDER= (their saved files or notebooks) as one table
	@$(PYTHON) -m fragility_lessons.collected "$$FOLDER"

.PHONY: bench
bench: $(ENVIRONMENT)  ## time the monitored pass and the emulation
	$(PYTHON) tools/bench.py

.PHONY: lab
lab: $(ENVIRONMENT)  ## open the notebooks in JupyterLab
	$(PYTHON) -m jupyterlab --config=jupyter_server_config.py $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: docs
docs: $(ENVIRONMENT)  ## write docs/results.md, docs/sinks.md, the findings of README and site, and tables of other pages, from outputs
	$(PYTHON) -m fragility_lab.reporting.results
	$(PYTHON) -m fragility_lab.reporting.results_sinks
	$(PYTHON) docs/site/finding.py
	$(PYTHON) docs/site/engine_tables.py
	$(PYTHON) docs/site/sentence.py

.PHONY: site
site: .site/installed  ## outputs/site: README, docs, notebooks, pages and API as one static website
	@rm -rf outputs/site .site/doctrees  # pages of modules that are gone would stay
	.site/bin/python -m sphinx -q -W --keep-going -c docs/site -d .site/doctrees . outputs/site
	@.site/bin/python tools/check_links.py outputs/site
	@echo "site: outputs/site/index.html"

.PHONY: slides
slides: .site/installed  ## outputs/slides: the lessons as slides, with no code but the functions to write
	.site/bin/python -m sphinx -q -W --keep-going -c docs/site/slides -d .site/slides -b revealjs . outputs/slides
	@echo "slides: outputs/slides/notebooks/theory/*.html"

# Sphinx needs neither PyTorch nor the notebooks' packages, so it has an environment of its own.
.site/installed: docs/site/requirements.txt $(ENVIRONMENT)
	$(PYTHON) -m venv .site
	.site/bin/python -m pip install -q -c constraints.txt -r docs/site/requirements.txt
	@touch $@

.PHONY: sbom
sbom: .audit/installed  ## outputs/sbom.json: every package of the environment, in CycloneDX's format
	.audit/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o outputs/sbom.json $(PYTHON)
	@echo "sbom: outputs/sbom.json"

.PHONY: audit
audit: .audit/installed  ## known vulnerabilities of the environment's packages, where their database answers
	@.audit/bin/python tools/audit.py $(PYTHON)

.audit/installed: tools/audit-requirements.txt $(ENVIRONMENT)
	$(PYTHON) -m venv .audit
	.audit/bin/python -m pip install -q -r tools/audit-requirements.txt
	@touch $@

.PHONY: picture
picture:  ## docs/diagnosis.png from outputs/embedded/diagnosis.html (needs Chromium)
	chromium --headless --no-sandbox --hide-scrollbars --window-size=900,1080 --screenshot=docs/diagnosis.png \
	    $(call quoted,file://$(CURDIR)/outputs/embedded/diagnosis.html)

.PHONY: lint
lint: $(ENVIRONMENT)  ## check the code's style and types, strictly in fragility_numerics and fragility_core
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

.PHONY: env
env: $(ENVIRONMENT)  ## make the environment, without running anything
	@echo "environment: $$($(PYTHON) -c 'import sys; print(sys.prefix)')"

# The stamp comes last, so an interrupted installation is taken up again.
.venv/installed: pyproject.toml constraints.txt
	@$(if $(ACTIVE),printf '%s\n' $(call quoted,not using the active environment $(ACTIVE):) "$$LACKS" "using .venv instead")
	@for python in python3.12 python3.11 python3; do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "installing into .venv with $$python"; exec $$python -m venv .venv; \
	    fi; \
	done; \
	echo "No Python >= 3.11 with venv found (tried python3.12, python3.11, python3)." \
	    "Install one, or activate an environment made from environment.yml." >&2; exit 1
	.venv/bin/python -m pip install -c constraints.txt -e '.[lab,test,gguf]'
	@touch $@

# The peers bring versions of their own, so they have an environment of their own.
.peers/installed: pyproject.toml .venv/installed
	.venv/bin/python -m venv .peers
	.peers/bin/python -m pip install -c constraints.txt -e '.[lab,test,gguf,peers]'
	@touch $@

.engines/installed: pyproject.toml .venv/installed
	.venv/bin/python -m venv .engines
	.engines/bin/python -m pip install -c constraints.txt -e '.[engines]'
	@touch $@

.PHONY: clean
clean:  ## remove .venv and caches; outputs stay
	rm -rf .venv .peers .engines .real .site .audit .home .pytest_cache .ruff_cache .hypothesis *.egg-info
	find fragility_* tests notebooks \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
