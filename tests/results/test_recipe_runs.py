"""Runs of every recipe, planned as finetune plans them, have the figures of the papers beside them."""

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.invented import make_record
from tests.load_tool import TOOLS, load_tool
from timm_moe_dg.cli.arguments import option_words, parse_arguments
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.data.readers.digits import DigitsDomain
from timm_moe_dg.finetuning import plan as planning
from timm_moe_dg.finetuning.resume import parse_resumable
from timm_moe_dg.protocols.options import run_parser
from timm_moe_dg.protocols.planner import plan_runs
from timm_moe_dg.protocols.records import Record
from timm_moe_dg.results.papers import FIGURES, figures_for, with_tag
from timm_moe_dg.results.runs import FinishedRun

PLACES = {"train Africa": "train", "train Asia": "train", "id Africa": "id", "ood Asia": "ood"}


def stand_in(name):
    """A benchmark with ten images in each of its domains, or in each of four places."""
    benchmark = get_benchmark(name)
    targets, images = np.arange(10) % 2, np.zeros((10, 28, 28, 3), np.uint8)
    roles = dict.fromkeys(benchmark.domains, "train") or PLACES
    domains = [DigitsDomain(domain, ("a", "b"), targets, images, role=role) for domain, role in roles.items()]
    changed = {"classes": (), "num_classes": None, "images": {}, "published": {}, "aliases": ()}
    return replace(benchmark, reader=lambda data_dir: domains, **changed)


def planned(path, *further):
    """The planned runs of the sweep command in a recipe's header."""
    lines = " ".join(line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
    command = re.search(r"python tools/sweep\.py (.*?)(?= python tools/collect_results\.py)", lines.replace("\\ ", ""))
    words = command[1].split()
    end = words.index("--") if "--" in words else len(words)
    tool = load_tool("sweep")
    sweep = tool.read_sweep(parse_arguments(tool.build_parser(), [*words[:end], *further]))
    return [(run.options, words[end + 1 :]) for run in plan_runs(sweep)]


def recorded(options, words, tmp_path):
    """The run that finetune would record with these options."""
    command = [word for entry in options.items() for word in option_words(*entry)]
    plan = planning.make_plan(parse_resumable(run_parser(), [*command, *words, "--output", str(tmp_path)]))
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
        if dataset not in {options["dataset"] for options, _ in runs}:
            runs = planned(path, "--datasets", dataset)
        name, *averaging = algorithm.split(" + ")
        key = (dataset, name, with_tag(model), averaging)
        for options, words in runs:
            of = [options["averaging"]] if options.get("averaging") else []
            if key == (options["dataset"], options["algorithm"], with_tag(options["model"]), of):
                return recorded(options, words, tmp_path)
        raise AssertionError(key)

    figures = [figure for figure in FIGURES if figure.recipe == recipe]
    for figure in figures:
        run = run_of(figure.dataset, figure.algorithm, figure.model)
        assert figure in figures_for(run, figure.rule, figure.column, figure.trained_on)
    # The same run with drawn hyper-parameters, or another loss, is no run of the recipe
    for changed in ({"hparams_seed": 1}, {"label_smoothing": 0.1}):
        other = FinishedRun(tmp_path, [replace(run.records[0], args=run.args | changed)])
        assert figures_for(other, figure.rule, figure.column, figure.trained_on) == []


def test_figures_without_a_recipe_are_those_of_regions():
    assert {figure.rule for figure in FIGURES if not figure.recipe} == {"per_region"}
