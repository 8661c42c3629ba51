"""Every recipe has options of finetune.py, can be planned, and states the papers' figures in its header."""

import re
from functools import cache
from pathlib import Path

import pytest
import timm
import yaml

from tests.invented import FIVE, make_record
from tests.load_tool import TOOLS, load_tool, run_tool
from timm_moe_dg.cli.arguments import parse_arguments
from timm_moe_dg.comparisons.sweep import SweepOptions, read_sweep
from timm_moe_dg.data import BENCHMARKS
from timm_moe_dg.protocols.planner import plan_runs
from timm_moe_dg.results.papers import FIGURES, is_of_recipe, with_tag
from timm_moe_dg.results.runs import FinishedRun

FILES = sorted((TOOLS / "recipes").glob("*.yaml"))
RECIPES = [path for path in FILES if "model" in yaml.safe_load(path.read_text())]


def names(path: Path) -> str:
    return path.stem


def header(path: Path) -> str:
    lines = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
    return " ".join(lines)


@pytest.mark.parametrize("path", RECIPES, ids=names)
def test_a_recipe_is_a_configuration_of_finetune(path):
    args = parse_arguments(load_tool("finetune").build_parser(), ["-c", str(path), "--dataset", "PACS"])
    assert args.pretrained or args.freeze  # frozen parts come from a network that was trained before
    assert vars(args)["model"] == yaml.safe_load(path.read_text())["model"]


@pytest.mark.parametrize("path", FILES, ids=names)
def test_a_file_dry_runs_as_its_header_says(path, monkeypatch, tmp_path, capsys):
    """Runs the command of the header from the root of the repository."""
    command = re.search(
        r"python tools/sweep\.py (.*?)(?= python tools/collect_results\.py)", header(path).replace("\\ ", "")
    )
    words = command[1].split()
    assert str(path.relative_to(TOOLS.parent)) in words
    monkeypatch.chdir(TOOLS.parent)
    end = words.index("--") if "--" in words else len(words)
    run_tool("sweep", *words[:end], "--dry-run", "--output", tmp_path, *words[end:])
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if not line.startswith("#")]
    total = int(re.search(r"# (\d+) runs in all", "\n".join(lines))[1])
    assert len(commands) == total
    seeds = (0,) if "--initial-checkpoint" in words else (0, 1, 2)  # a checkpoint belongs to one seed
    assert all(f"--trial-seed {seed} " in "\n".join(commands) for seed in seeds)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", RECIPES, ids=names)
def test_a_header_states_the_papers_figures(path):
    options = yaml.safe_load(path.read_text())
    algorithm = options.get("algorithm", "ERM") + (f" + {options['averaging']}" if "averaging" in options else "")
    single = "single_source" in path.stem
    stated = header(path)
    count = 0
    for figure in FIGURES:
        if (figure.trained_on is not None) != single or figure.dataset not in {options.get("dataset"), *FIVE}:
            continue
        if options.get("dataset", figure.dataset) != figure.dataset:
            continue
        run = run_of(path, figure.dataset, algorithm)
        if is_of_recipe(figure, run):
            by_domain = figure.column if single else f"{figure.dataset} {figure.column}"
            where = figure.dataset if figure.column == "average" else by_domain
            error = "" if figure.error is None else f" ± {figure.error}"
            assert f"{where} {figure.value}{error}" in stated
            assert figure.source.partition(",")[2].strip() in stated
            count += 1
    assert count >= (36 if single else 1 if "dataset" in options else 5)


@cache
def run_of(path: Path, dataset: str, algorithm: str) -> FinishedRun:
    """The arguments that a recipe's run on a data set is recorded with, as far as figures depend on them."""
    content = yaml.safe_load(path.read_text())
    tables = [content.get("options", content)]
    rows = [row for row in content.get("rows", {}).values() if row.get("algorithm", "ERM") == algorithm]
    tables += rows[:1] or [{"model": name} for name in content.get("models", ())[:1]]
    args = {"algorithm": algorithm.partition(" + ")[0], "steps": BENCHMARKS[dataset].steps, "filled_in": []}
    for table in tables:
        args |= table
    args |= {"initial_checkpoint": "trained before"} if "freeze" in args else {}
    seeds = {"test_envs": [0], "trial_seed": 0, "hparams_seed": 0}
    return FinishedRun(path, [make_record(args={**args, "dataset": dataset, **seeds})])


PLANS_WITH_FIGURES = {"fmow_regions": 12, "fmow_lao_regions": 2, "iwildcam_locations": 6, "resnet50_v2": 10}


@pytest.mark.parametrize("name", PLANS_WITH_FIGURES)
def test_a_plan_s_header_states_the_papers_figures_method_by_method(name):
    path = TOOLS / "recipes" / f"{name}.yaml"
    plan = yaml.safe_load(path.read_text())
    rows = plan.get("rows") or {method: {"model": plan["models"][0]} for method in plan["algorithms"]}
    methods, (model,) = list(rows), {row["model"] for row in rows.values()}
    stated = header(path).partition("Stated in the paper")[2].partition("python")[0]
    count = 0
    for method in methods:
        for figure in FIGURES:
            of = (with_tag(figure.model), figure.algorithm, figure.dataset in plan["datasets"])
            if of == (model, method, True) and figure.rule != "per_region":
                figures_of_method = re.search(rf"\b{method} (.*?)(?=[,;] (?:{'|'.join(methods)}) |$)", stated)[1]
                error = "" if figure.error is None else f" ± {figure.error}"
                assert f"{figure.value}{error}" in figures_of_method
                count += 1
    assert count == PLANS_WITH_FIGURES[name]


RESNETS = [path for path in FILES if path.stem.startswith("resnet")]


@pytest.mark.parametrize("path", RESNETS, ids=names)
def test_residual_networks_have_the_papers_weights_and_domainbeds_rates(path):
    """Torchvision's weights, no stochastic depth, and none of GMoE's own rates (Table 8); dropout is 0 by default."""
    assert len(RESNETS) == 7
    content = yaml.safe_load(path.read_text())
    (model,) = content.get("models", [content.get("model")])
    network, tag = model.split(".")
    assert (network, tag) == (path.stem.partition("_")[0], "tv2_in1k" if path.stem == "resnet50_v2" else "tv_in1k")
    options = content.get("options", content)
    assert (options["drop_path"], options["lr"], options["weight_decay"]) == (0.0, 5e-5, 0.0)
    assert not {"hparams", "batch_size"} & options.keys()
    assert {row.hparams["resnet_dropout"] for row in BENCHMARKS.values()} == {0.0}
    assert model in timm.list_pretrained(f"{network}*")


def test_one_seed_of_all_five_data_sets_has_as_many_runs_as_the_paper_counts():
    """GMoE, appendix D.3: 61 experiments for leave-one-domain-out cross-validation on the five data sets."""
    options = SweepOptions(datasets=FIVE, protocols=["leave_one_domain_out_cv"], trial_seeds=[0])
    assert len(plan_runs(read_sweep(options, {}))) == 61
