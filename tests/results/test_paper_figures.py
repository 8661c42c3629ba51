"""The papers' figures: read from a table, and matched with runs of the same setting."""

import re
from dataclasses import replace

import numpy as np
import pytest
import timm

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.invented import FIVE, make_record
from timm_moe_dg.algorithms import ALGORITHMS
from timm_moe_dg.data import BENCHMARKS
from timm_moe_dg.layers import SatClipEncoder
from timm_moe_dg.models import metadata_options
from timm_moe_dg.results.papers import (
    FIGURES,
    figures_for,
    paper_columns,
    read_figures,
    why_no_figures,
    with_tag,
)
from timm_moe_dg.results.runs import FinishedRun
from timm_moe_dg.results.tables import AVERAGE, OFFICIAL_SCORES, RULES, make_tables

GMOE, VIT = "gmoe_small_patch16", "deit_small_patch16_224"
HEADER = "source,dataset,rule,algorithm,model,column,trained_on,value,error,recipe,settings"
RESNET = {"lr": 5e-5, "weight_decay": 0.0, "drop_path": 0.0, "filled_in": []}  # given, as in the recipes


def run_of(dataset="DomainNet", **args):
    args = {"dataset": dataset, "algorithm": "ERM", "model": GMOE, "pretrained": True, "model_kwargs": {}, **args}
    return FinishedRun("run", [make_record(args={"test_envs": [0], "trial_seed": 0, "hparams_seed": 0, **args})])


def paper(rule="training_domain_validation", dataset="DomainNet", column="average", **args):
    run = run_of(dataset, **{"steps": 15_001, **args})
    return [(f.source, f.value, f.error) for f in figures_for(run, rule, column)]


def test_steps_and_options_decide_which_figure_it_is():
    assert paper(steps=5001) == [("GMoE, Table 9", 44.6, 0.3)]
    assert paper() == [("GMoE, Table 1", 48.7, 0.2), ("GMoE, Table 9", 48.7, 0.2), ("GMoE, Table 15", 48.7, None)]
    assert paper(model=f"{GMOE}.deit_in1k") == paper()
    assert paper(model_kwargs={"moe_layers": "every_two", "router": "linear"}) == [("GMoE, Table 13", 46.3, 0.3)]
    assert paper("leave_one_domain_out_cv", "PACS", steps=5001) == [("GMoE, Table 10", 87.1, 0.3)]
    assert paper(averaging="swad") == [("GMoE, Table 11", 49.6, None)]


def test_what_was_not_trained_as_in_a_paper_has_no_figure():
    assert paper(pretrained=False) == []
    assert paper(model_kwargs={"num_experts": 4}) == []
    assert paper("oracle") == []
    assert paper(steps=300) == []
    assert paper(dataset="PACS", steps=300) == []
    assert paper(lr=1e-3, filled_in=[]) == []
    assert paper(lr=1e-3, filled_in=["lr"]) == paper()  # drawn, as hyper-parameters were in the papers


def test_settings_count_by_their_values_spelled_out_or_not():
    kwargs = {"num_experts": 6, "top_k": 2, "router": "cosine"}
    assert paper(model_kwargs=kwargs, label_smoothing=0.0, lr=5e-5, filled_in=[]) == paper() != []
    for moe_layers in ([8, 10], (10, 8), "last_two", "FFFFFFFFSFSF"):
        assert paper(model_kwargs={"moe_layers": moe_layers}) == paper()
    assert paper(model_kwargs={"moe_layers": [0, 2, 4, 6, 8, 10]}) == [("GMoE, Table 13", 46.4, 0.2)]
    fmow = {"dataset": "FMoW", "model": "moge_tiny", "steps": 60_001, "rule": "official", "column": "ood worst group"}
    fmow["filled_in"] = []
    assert paper(**fmow) == paper(**fmow, supcon_coef=0.1) == [("MoGE, Table 1", 40.56, 2.35)]
    assert paper(**fmow, supcon_coef=0.0) == []
    assert paper(**{**fmow, "filled_in": ["supcon_coef"]}, supcon_coef=0.03) == paper(**fmow)  # drawn
    # Computed otherwise, and nevertheless the same experiment
    assert paper(amp_dtype="bfloat16", grad_accum_steps=4, eval_freq=77, data="ab") == paper()


def test_a_row_of_no_recipe_is_told_what_differs_from_which():
    def lines(**args):
        runs = [run_of(**{**args, "trial_seed": seed}) for seed in range(2)]
        runs = [FinishedRun(f"{n}", [replace(r, in_acc=(0.5,) * 6, out_acc=(0.5,) * 6) for r in run.records])
                for n, run in enumerate(runs)]  # fmt: skip
        return why_no_figures(make_tables(runs))

    assert lines(steps=15_001) == []
    (line,) = lines(steps=300, model_kwargs={"num_experts": 4})
    assert line.startswith(f"papers: DomainNet, ERM, {GMOE}: differs from gmoe_small")
    assert line.endswith("in num_experts=4 (there 6), steps=300 (there 15001)")
    assert lines(steps=15_001, pretrained=False)[0].endswith("in pretrained=False (there True)")
    # Of a row, every run has to be the recipe's
    runs = [run_of(steps=15_001, hparams_seed=draw) for draw in (0, 1)]
    assert paper_columns(make_tables(runs[:1])[0])
    (table,) = make_tables(runs, ["training_domain_validation"])
    assert not paper_columns(table)
    assert why_no_figures([table])[0].endswith("in hparams_seed=1 (there 0)")
    assert lines(dataset="sprites")[0].endswith(
        "sprites, ERM, gmoe_small_patch16: no paper has figures on this data set"
    )


@pytest.mark.parametrize("model", ["resnet50", "resnet50.a1_in1k", "resnet50.nonsense"])
def test_other_weights_than_the_papers_have_no_figure(model):
    cell = {"dataset": "PACS", "steps": 5001, **RESNET}
    assert paper(**{**cell, "lr": 3e-5}, model="resnet50.tv_in1k") == []  # GMoE's rate, which PACS has by default
    assert paper(**cell, model="resnet50.tv_in1k")[0] == ("GMoE, Table 1", 85.7, 0.5)
    assert timm.get_pretrained_cfg("resnet50").tag == "a1_in1k"  # so that a run without a tag is another network
    assert paper(**cell, model=model) == []
    assert paper(**cell, model="resnet50.tv2_in1k") == [("GMoE, Table 15", 87.2, None)]  # a table of its own


def test_methods_that_compare_domains_are_set_beside_runs_by_region_or_trap():
    """MoGE, Table 1: its ERM pools the training images, and the methods for domain generalization know the domains."""
    algorithms = {}
    for figure in FIGURES:
        if figure.source == "MoGE, Table 1" and figure.rule == "official":
            algorithms.setdefault(figure.dataset, set()).add(figure.algorithm)
    assert algorithms == {
        "FMoW": {"ERM"},
        "FMoW_LAO": {"ERM"},
        "iWildCam": {"ERM"},
        "FMoW_regions": {"ERM", "GroupDRO", "IRM", "Fish", "Mixup", "VREx", "RDM"},
        "FMoW_LAO_regions": {"Fish", "VREx"},
        "iWildCam_locations": {"GroupDRO", "IRM", "CORAL"},
    }


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


def test_a_run_without_a_tag_has_timms_default():
    cell = {"dataset": "PACS", "steps": 5001}
    assert paper(**cell, model=f"{VIT}.fb_in1k") == paper(**cell, model=VIT) != []
    assert paper(**cell, model="local-dir:runs/a.b/best") == []


def test_weights_of_every_figure_are_known_to_timm():
    assert {with_tag(figure.model) for figure in FIGURES} <= set(timm.list_models(pretrained=True))
    assert {figure.model for figure in FIGURES if figure.model.startswith("resnet")} == {
        "resnet50.tv_in1k",
        "resnet50.tv2_in1k",
        "resnet101.tv_in1k",
    }
    assert {figure.source for figure in FIGURES if figure.model == "resnet50.tv2_in1k"} == {"GMoE, Table 15"}


def test_every_figure_is_a_percentage_for_a_rule_that_tables_know():
    assert {figure.rule for figure in FIGURES} <= set(RULES)
    assert all(re.fullmatch(r"(GMoE|SF-MoE|MoGE), Table \d+", figure.source) for figure in FIGURES)
    assert all(0 < figure.value < 100 and (figure.error is None or figure.error < 10) for figure in FIGURES)
    keys = [repr(replace(figure, value=0.0, error=None)) for figure in FIGURES]
    assert len(set(keys)) == len(keys)


TABLE_11_AVERAGES = {
    ("ERM + swad", VIT): 67.4,
    ("ERM + swad", GMOE): 68.5,
    ("Fish", VIT): 65.5,
    ("Fish", GMOE): 67.3,  # 67.1 in print, by mistake
    ("Fishr", "resnet50.tv_in1k"): 64.2,
    ("Fishr", VIT): 65.6,
    ("Fishr", GMOE): 66.7,
}


@pytest.mark.parametrize(("algorithm", "model"), TABLE_11_AVERAGES)
def test_rows_agree_with_the_averages_that_the_paper_prints_beside_them(algorithm, model):
    """GMoE, Table 11's last column, which is not stored."""
    cells = [f.value for f in FIGURES if (f.source, f.algorithm, f.model) == ("GMoE, Table 11", algorithm, model)]
    assert len(cells) == len(FIVE)
    assert np.mean(cells) == pytest.approx(TABLE_11_AVERAGES[algorithm, model], abs=0.06)


def test_every_model_is_one_of_timms_and_takes_the_arguments_that_tell_figures_apart(monkeypatch):
    models = {figure.model for figure in FIGURES}
    assert [name for name in models if not timm.is_model(name)] == []
    small = {"img_size": 32, "embed_dim": 24, "depth": 4, "num_heads": 3, "num_classes": 2}
    names = ("moe_layers", "router", "metadata_encoder")
    changed = [(f.model, {name: f.settings[name] for name in names if name in f.settings}) for f in FIGURES]
    assert sum(bool(kwargs) for _, kwargs in changed) == 16
    # The released one comes from the Hub
    monkeypatch.setattr(metadata_options, "load_satclip", lambda source: SatClipEncoder(10, 8, 8))
    for model, kwargs in {(model, tuple(kwargs.items())) for model, kwargs in changed if kwargs}:
        timm.create_model(model, **small, **dict(kwargs))


def test_algorithms_data_sets_and_columns_are_those_of_the_tables():
    papers_alone = {"MIRO"}  # a method that the papers compare with and the package lacks
    assert {figure.algorithm.partition(" + ")[0] for figure in FIGURES} <= ALGORITHMS.keys() | papers_alone
    for figure in FIGURES:
        benchmark = BENCHMARKS[figure.dataset]
        roles = {f"{role} {score}" for role in ("id", "ood") for score in OFFICIAL_SCORES.values()}
        by_domain = set(benchmark.domains) if figure.dataset == "CUB_DG" else {AVERAGE}
        columns = {"official": roles, "per_region": roles, "single_source": set(benchmark.domains)}
        assert figure.column in columns.get(figure.rule, by_domain)
        assert (figure.trained_on is not None) == (figure.rule == "single_source")


def test_a_line_becomes_a_figure_with_what_it_leaves_out():
    line = '"X, Table 1",PACS,oracle,ERM,vit,average,,50.5,,,'
    (figure,) = read_figures(f"{HEADER}\n{line}\n")
    assert (figure.source, figure.value, figure.error, figure.recipe) == ("X, Table 1", 50.5, None, "")
    assert (figure.trained_on, figure.settings) == (None, {})
    other = '"X, Table 1",PACS,oracle,ERM,vit,average,photo,50.5,0.25,vit_small,"{""router"": ""linear""}"'
    (figure,) = read_figures(f"{HEADER}\n{other}\n")
    assert (figure.trained_on, figure.error, figure.recipe) == ("photo", 0.25, "vit_small")
    assert figure.settings == {"router": "linear"}


@pytest.mark.parametrize(("line", "error"), [("a,b,c,d,e,f,,high,,,", ValueError), ("a,b,c,d,e,f,,1,,,{", ValueError)])
def test_a_line_that_is_no_figure_is_refused(line, error):
    with pytest.raises(error):
        read_figures(f"{HEADER}\n{line}\n")
