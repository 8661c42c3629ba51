"""The papers' figures: read from a table, and matched with runs of the same setting and of every recipe."""

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import timm

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.invented import FIVE, make_record
from tests.load_tool import TOOLS, load_tool
from timm_moe_dg.algorithms import ALGORITHMS
from timm_moe_dg.cli.arguments import from_parsed, option_words, parse_arguments
from timm_moe_dg.comparisons.sweep import SweepOptions, options_for_all, read_sweep
from timm_moe_dg.data import BENCHMARKS, get_benchmark
from timm_moe_dg.data.domains import FileDomain
from timm_moe_dg.finetuning import plan as planning
from timm_moe_dg.finetuning.resume import parse_resumable
from timm_moe_dg.protocols.options import run_parser
from timm_moe_dg.protocols.planner import plan_runs
from timm_moe_dg.protocols.records import Record
from timm_moe_dg.results.papers import FIGURES, figures_for, paper_columns, read_figures, rows_without_figures, with_tag
from timm_moe_dg.results.runs import FinishedRun
from timm_moe_dg.results.tables import AVERAGE, OFFICIAL_SCORES, RULES, make_tables

GMOE, VIT = "gmoe_small_patch16", "deit_small_patch16_224"
HEADER = "source,dataset,rule,algorithm,model,column,trained_on,value,error,recipe,settings"
RESNET = {"dataset": "PACS", "steps": 5001, "lr": 5e-5, "weight_decay": 0.0, "drop_path": 0.0, "filled_in": []}
FMOW = {"dataset": "FMoW", "model": "moge_tiny", "steps": 60_001, "rule": "official", "column": "ood worst group"}
FMOW["filled_in"] = []


def run_of(dataset="DomainNet", **args):
    args = {"dataset": dataset, "algorithm": "ERM", "model": GMOE, "pretrained": True, "model_kwargs": {}, **args}
    return FinishedRun("run", [make_record(args={"test_envs": [0], "trial_seed": 0, "hparams_seed": 0, **args})])


def paper(rule="training_domain_validation", dataset="DomainNet", column="average", trained_on=None, **args):
    run = run_of(dataset, **{"steps": 15_001, **args})
    return [(f.source, f.value, f.error) for f in figures_for(run, rule, column, trained_on)]


TABLE_1 = [("GMoE, Table 1", 48.7, 0.2), ("GMoE, Table 9", 48.7, 0.2), ("GMoE, Table 15", 48.7, None)]
WORST = [("MoGE, Table 1", 40.56, 2.35)]
KWARGS = {"num_experts": 6, "top_k": 2, "router": "cosine"}
MATCHED = [  # settings in effect decide which figure it is
    ({}, TABLE_1),
    ({"steps": 5001}, [("GMoE, Table 9", 44.6, 0.3)]),
    ({"model": f"{GMOE}.deit_in1k"}, TABLE_1),
    ({"averaging": "swad"}, [("GMoE, Table 11", 49.6, None)]),
    ({"rule": "leave_one_domain_out_cv", "dataset": "PACS", "steps": 5001}, [("GMoE, Table 10", 87.1, 0.3)]),
    ({"column": "painting", "trained_on": "painting", "rule": "single_source"}, [("GMoE, Table 12", 69.3, None)]),
    ({"column": "quickdraw", "trained_on": "painting", "rule": "single_source"}, [("GMoE, Table 12", 5.3, None)]),
    # Spelled out or not
    ({"model_kwargs": KWARGS, "label_smoothing": 0.0, "lr": 5e-5, "filled_in": []}, TABLE_1),
    *(({"model_kwargs": {"moe_layers": layers}}, TABLE_1) for layers in ([8, 10], (10, 8), "last_two", "FFFFFFFFSFSF")),
    ({"model_kwargs": {"moe_layers": [0, 2, 4, 6, 8, 10]}}, [("GMoE, Table 13", 46.4, 0.2)]),
    ({"model_kwargs": {"moe_layers": "every_two", "router": "linear"}}, [("GMoE, Table 13", 46.3, 0.3)]),
    # Computed otherwise, and nevertheless the same experiment
    ({"amp_dtype": "bfloat16", "grad_accum_steps": 4, "eval_freq": 77, "data": "ab"}, TABLE_1),
    ({"lr": 1e-3, "filled_in": ["lr"]}, TABLE_1),  # drawn, as hyper-parameters were in the papers
    (FMOW, WORST),
    ({**FMOW, "supcon_coef": 0.1}, WORST),
    ({**FMOW, "supcon_coef": 0.03, "filled_in": ["supcon_coef"]}, WORST),
    # Not trained as in a paper
    ({**FMOW, "supcon_coef": 0.0}, []),
    ({"pretrained": False}, []),
    ({"model_kwargs": {"num_experts": 4}}, []),
    ({"rule": "oracle"}, []),
    ({"steps": 300}, []),
    ({"dataset": "PACS", "steps": 300}, []),
    ({"dataset": "PACS", "steps": 5001, "model": "local-dir:runs/a.b/best"}, []),
    ({"lr": 1e-3, "filled_in": []}, []),
    # Other weights, and another rate, which PACS has by default
    ({**RESNET, "model": "resnet50.tv2_in1k"}, [("GMoE, Table 15", 87.2, None)]),
    *(({**RESNET, "model": model}, []) for model in ("resnet50", "resnet50.a1_in1k", "resnet50.nonsense")),
    ({**RESNET, "model": "resnet50.tv_in1k", "lr": 3e-5}, []),
]


@pytest.mark.parametrize(("options", "figures"), MATCHED, ids=str)
def test_runs_have_the_figures_of_their_settings_in_effect(options, figures):
    assert paper(**options) == figures


def test_a_run_without_a_tag_has_timms_default():
    cell = {"dataset": "PACS", "steps": 5001}
    assert paper(**cell, model=f"{VIT}.fb_in1k") == paper(**cell, model=VIT) != []
    assert paper(**RESNET, model="resnet50.tv_in1k")[0] == ("GMoE, Table 1", 85.7, 0.5)
    assert timm.get_pretrained_cfg("resnet50").tag == "a1_in1k"  # so that a run without a tag is another network


def test_rows_of_no_recipe_are_named_and_every_run_of_a_row_has_to_be_the_recipes():
    runs = [run_of(steps=15_001, hparams_seed=draw, test_envs=[test]) for draw in (0, 1) for test in range(3)]
    assert paper_columns(make_tables(runs[:3])[0])
    assert not paper_columns(make_tables(runs[:1])[0])  # an average over one of three domains
    assert rows_without_figures(make_tables(runs[:3])) == []
    tables = make_tables(runs, ["training_domain_validation"])
    assert not paper_columns(tables[0])
    assert rows_without_figures(tables) == [f"DomainNet, ERM, {GMOE}"]


def test_the_older_paper_s_baselines_are_the_newer_one_s_but_for_a_cell():
    """SF-MoE, Table 1, states MMD on TerraIncognita as 49.3, and all else of the ResNets as GMoE does."""
    new, old = (
        {(f.algorithm, f.dataset, f.settings.get("steps")): (f.value, f.error) for f in FIGURES
         if f.source == f"{paper}, Table 1" and f.model == "resnet50.tv_in1k" and f.dataset in FIVE}
        for paper in ("GMoE", "SF-MoE")
    )  # fmt: skip
    assert len(old) == 45
    assert {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)} == {("MMD", "TerraIncognita", None)}
    assert old["MMD", "TerraIncognita", None] == (49.3, 1.4)


def test_figures_are_percentages_of_models_methods_and_columns_that_tables_have():
    assert {figure.rule for figure in FIGURES} <= set(RULES)
    assert {with_tag(figure.model) for figure in FIGURES} <= set(timm.list_models(pretrained=True))
    assert {figure.source for figure in FIGURES if figure.model == "resnet50.tv2_in1k"} == {"GMoE, Table 15"}
    assert {figure.algorithm.partition(" + ")[0] for figure in FIGURES} <= ALGORITHMS.keys()
    assert {figure.rule for figure in FIGURES if not figure.recipe} == {"per_region"}
    keys = [repr(replace(figure, value=0.0, error=None)) for figure in FIGURES]
    assert len(set(keys)) == len(keys)
    roles = {f"{role} {score}" for role in ("id", "ood") for score in OFFICIAL_SCORES.values()}
    for figure in FIGURES:
        assert re.fullmatch(r"(GMoE|SF-MoE|MoGE), Table \d+", figure.source)
        assert 0 < figure.value < 100
        assert figure.error is None or figure.error < 10
        domains = set(BENCHMARKS[figure.dataset].domains)
        columns = {"official": roles, "per_region": roles, "single_source": domains}
        assert figure.column in columns.get(figure.rule, domains if figure.dataset == "CUB_DG" else {AVERAGE})
        assert (figure.trained_on is not None) == (figure.rule == "single_source")


TABLE_11 = [
    *(("ERM + swad", VIT, 67.4), ("ERM + swad", GMOE, 68.5), ("Fish", VIT, 65.5)),
    ("Fish", GMOE, 67.3),  # 67.1 in print, by mistake
    *(("Fishr", "resnet50.tv_in1k", 64.2), ("Fishr", VIT, 65.6), ("Fishr", GMOE, 66.7)),
]


@pytest.mark.parametrize(("algorithm", "model", "average"), TABLE_11)
def test_rows_agree_with_the_averages_that_the_paper_prints_beside_them(algorithm, model, average):
    """GMoE, Table 11's last column, which is not stored."""
    cells = [f.value for f in FIGURES if (f.source, f.algorithm, f.model) == ("GMoE, Table 11", algorithm, model)]
    assert len(cells) == len(FIVE)
    assert np.mean(cells) == pytest.approx(average, abs=0.06)


def test_a_line_becomes_a_figure_with_what_it_leaves_out():
    line = '"X, Table 1",PACS,oracle,ERM,vit,average,,50.5,,,'
    (figure,) = read_figures(f"{HEADER}\n{line}\n")
    assert (figure.source, figure.value, figure.error, figure.recipe) == ("X, Table 1", 50.5, None, "")
    assert (figure.trained_on, figure.settings) == (None, {})
    other = '"X, Table 1",PACS,oracle,ERM,vit,average,photo,50.5,0.25,vit_small,"{""router"": ""linear""}"'
    (figure,) = read_figures(f"{HEADER}\n{other}\n")
    assert (figure.trained_on, figure.error, figure.recipe) == ("photo", 0.25, "vit_small")
    assert figure.settings == {"router": "linear"}


PLACES = {"train Africa": "train", "train Asia": "train", "id Africa": "id", "ood Asia": "ood"}


def stand_in(name):
    """A benchmark with ten images in each of its domains, or in each of four places."""
    benchmark = get_benchmark(name)
    targets, images = np.arange(10) % 2, np.zeros((10, 28, 28, 3), np.uint8)
    roles = dict.fromkeys(benchmark.domains, "train") or PLACES
    domains = [FileDomain(domain, ("a", "b"), targets, images, role=role) for domain, role in roles.items()]
    changed = {"classes": (), "num_classes": None, "images": {}, "published": {}, "aliases": ()}
    return replace(benchmark, reader=lambda data_dir: domains, **changed)


def planned(path, *further):
    """The planned runs of the sweep command in a recipe's header."""
    lines = " ".join(line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
    command = re.search(r"python tools/sweep\.py (.*?)(?= python tools/collect_results\.py)", lines.replace("\\ ", ""))
    words = command[1].split()
    end = words.index("--") if "--" in words else len(words)
    args = parse_arguments(load_tool("sweep").build_parser(), [*words[:end], *further])
    given, _ = options_for_all(words[end + 1 :])
    return [run.options for run in plan_runs(read_sweep(from_parsed(SweepOptions, vars(args)), given))]


def recorded(options, tmp_path):
    """The run that finetune would record with these options."""
    command = [word for entry in options.items() for word in option_words(*entry)]
    plan = planning.make_plan(parse_resumable(run_parser(), [*command, "--output", str(tmp_path)]))
    accuracies = (0.5,) * len(plan.domains)
    record = make_record(args=plan.record_args, hparams=plan.hparams, in_acc=accuracies, out_acc=accuracies)
    return FinishedRun(tmp_path, [Record.from_json(record.to_json())])


@pytest.mark.parametrize("recipe", sorted({figure.recipe for figure in FIGURES} - {""}))
def test_a_run_of_every_recipe_finds_its_figures(recipe, monkeypatch, tmp_path):
    monkeypatch.chdir(TOOLS.parent)
    monkeypatch.setattr(planning, "get_benchmark", stand_in)
    path = TOOLS / "recipes" / f"{recipe}.yaml"

    @cache
    def run_of(dataset, algorithm, model):
        runs = planned(path)
        if dataset not in {options["dataset"] for options in runs}:
            runs = planned(path, "--datasets", dataset)
        name, *averaging = algorithm.split(" + ")
        key = (dataset, name, with_tag(model), averaging)
        for options in runs:
            of = [options["averaging"]] if options.get("averaging") else []
            if key == (options["dataset"], options["algorithm"], with_tag(options["model"]), of):
                return recorded(options, tmp_path)
        raise AssertionError(key)

    figures = [figure for figure in FIGURES if figure.recipe == recipe]
    for figure in figures:
        run = run_of(figure.dataset, figure.algorithm, figure.model)
        assert figure in figures_for(run, figure.rule, figure.column, figure.trained_on)
    # The same run with drawn hyper-parameters, or another loss, is no run of the recipe
    for changed in ({"hparams_seed": 1}, {"label_smoothing": 0.1}):
        other = FinishedRun(tmp_path, [replace(run.records[0], args=run.args | changed)])
        assert figures_for(other, figure.rule, figure.column, figure.trained_on) == []
