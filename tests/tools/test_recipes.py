"""Every recipe: its options are finetune.py's, it plans, and its header states what the papers state, and no other."""

import re
from pathlib import Path

import pytest
import yaml

from tests.invented import FIVE
from tests.load_tool import TOOLS, load_tool
from timm_moe_dg.cli.arguments import parse_arguments
from timm_moe_dg.protocols.planner import plan_runs
from timm_moe_dg.results.paper_figures import FIGURES, figures_for

FILES = sorted((TOOLS / "recipes").glob("*.yaml"))
RECIPES = [path for path in FILES if "model" in yaml.safe_load(path.read_text())]
PLANS = [path for path in FILES if path not in RECIPES]


def names(path: Path) -> str:
    return path.stem


def header(path: Path) -> str:
    lines = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
    return " ".join(lines)


@pytest.fixture(scope="module")
def sweep():
    return load_tool("sweep")


@pytest.fixture(scope="module")
def finetune(sweep):
    return sweep.load_finetune()


def test_both_kinds_are_there():
    assert len(RECIPES) >= 16
    assert "digits" in map(names, PLANS)


@pytest.mark.parametrize("path", RECIPES, ids=names)
def test_a_recipe_is_a_configuration_of_finetune(path, finetune):
    args = parse_arguments(finetune.build_parser(), ["-c", str(path), "--dataset", "PACS"])
    assert args.pretrained
    assert vars(args)["model"] == yaml.safe_load(path.read_text())["model"]


@pytest.mark.parametrize("path", FILES, ids=names)
def test_a_file_dry_runs_as_its_header_says(path, sweep, finetune, monkeypatch, tmp_path, capsys):
    """The very command of the header, from the folder that it is written for."""
    command = re.search(
        r"python tools/sweep\.py (.*?)(?= python tools/collect_results\.py)", header(path).replace("\\ ", "")
    )
    words = command[1].split()
    assert str(path.relative_to(TOOLS.parent)) in words
    monkeypatch.chdir(TOOLS.parent)
    monkeypatch.setattr(sweep, "load_finetune", lambda: finetune)
    sweep.main([*words, "--dry-run", "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if not line.startswith("#")]
    total = int(re.search(r"# (\d+) runs in all", "\n".join(lines))[1])
    assert len(commands) == total
    assert all(seeds in "\n".join(commands) for seeds in ("--trial-seed 0 ", "--trial-seed 1 ", "--trial-seed 2 "))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", RECIPES, ids=names)
def test_a_header_states_the_papers_figures(path):
    options = {"steps": 15_001, "model_kwargs": {}, "algorithm": "ERM", **yaml.safe_load(path.read_text())}
    algorithm = options["algorithm"] + (f" + {options['averaging']}" if "averaging" in options else "")
    single = "single_source" in path.stem
    stated = header(path)
    found = 0
    for figure in FIGURES:
        if (figure.trained_on is not None) != single or figure.dataset not in {options.get("dataset"), *FIVE}:
            continue
        of = (figure.dataset, figure.rule, options, algorithm, figure.column, figure.trained_on)
        if figure in figures_for(*of) and options.get("dataset", figure.dataset) == figure.dataset:
            where = figure.column if single else figure.dataset
            error = "" if figure.error is None else f" ± {figure.error}"
            assert f"{where} {figure.value}{error}" in stated
            assert figure.source.partition(",")[2].strip() in stated
            found += 1
    assert found >= (36 if single else 1 if "dataset" in options else 5)


def test_one_seed_of_all_five_data_sets_has_as_many_runs_as_the_paper_counts(sweep):
    """GMoE, appendix D.3: 61 experiments for leave-one-domain-out cross-validation on the five data sets."""
    words = ["--datasets", *FIVE, "--protocol", "leave_one_domain_out_cv", "--trial-seeds", "0"]
    assert len(plan_runs(sweep.read_sweep(sweep.build_parser().parse_args(words)))) == 61
