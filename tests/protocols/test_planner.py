"""Plans: the runs of a protocol, counted by hand, and their names."""

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from PIL import Image

from timm_moe_dg.data import get_benchmark
from timm_moe_dg.errors import ArgumentError, ProtocolError
from timm_moe_dg.protocols import planner
from timm_moe_dg.protocols.planner import OFFICIAL, PROTOCOLS, Choice, Sweep, describe_plan, plan_runs


def sweep(datasets=("rotated_digits",), protocols=("leave_one_domain_out",), models=("a",), **options):
    return Sweep(
        datasets=[Choice.of("dataset", entry) for entry in datasets],
        algorithms=[Choice.of("algorithm", "ERM")],
        models=[Choice.of("model", entry) for entry in models],
        protocols=protocols,
        **options,
    )


def held_out(plan):
    return [run.options["test_domains"] for run in plan_runs(plan)]


def test_each_domain_once():
    assert held_out(sweep(trial_seeds=(0,))) == [[0], [1], [2], [3], [4], [5]]


def test_cross_validation_adds_every_pair():
    domain_sets = held_out(sweep(protocols=["leave_one_domain_out_cv"], trial_seeds=(0,)))
    assert sorted(domain_sets) == sorted([[domain] for domain in range(6)] + list(map(list, combinations(range(6), 2))))
    assert len(domain_sets) == 6 + 6 * 5 // 2


def test_one_source_holds_out_all_others():
    plan = sweep(["colored_digits"], ["single_source"], trial_seeds=(0,))
    assert sorted(held_out(plan)) == [[0, 1], [0, 2], [1, 2]]


def test_runs_that_two_protocols_share_are_planned_once():
    """With three domains, training on one domain means holding out a pair."""
    plan = sweep(["colored_digits"], ["leave_one_domain_out_cv", "single_source"], trial_seeds=(0,))
    assert len(held_out(plan)) == 3 + 3


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        ("leave_one_domain_out", [[2]]),
        ("leave_one_domain_out_cv", [[2], [0, 2], [1, 2], [2, 3], [2, 4], [2, 5]]),
        ("single_source", [[0, 1, 3, 4, 5]]),
    ],
)
def test_domains_of_interest(protocol, expected):
    assert held_out(sweep(protocols=[protocol], trial_seeds=(0,), domains=[2])) == expected


def test_domains_of_interest_have_names_which_are_positions_in_each_data_set():
    plan = sweep(["rotated_digits"], trial_seeds=(0,), domains=["rot_30", "rot_0"])
    assert held_out(plan) == [[0], [2]]
    regions = sweep(["geo_digits"], ["per_region"], trial_seeds=(0,), domains=["train Asia"])
    assert held_out(regions) == held_out(sweep(["geo_digits"], ["per_region"], trial_seeds=(0,), domains=[1]))
    with pytest.raises(ProtocolError, match=r"domains=\['art'\]: no domain is called art; choose from: 0 rot_0"):
        plan_runs(sweep(["rotated_digits"], domains=["art"]))


def test_every_combination_has_a_run_and_a_name_of_its_own():
    plan = sweep(
        ["rotated_digits", "colored_digits"], models=["a", "b/c:d"], trial_seeds=(0, 2), hparams_seeds=(0, 1, 5)
    )
    runs = plan_runs(plan)
    assert len(runs) == len({run.name for run in runs}) == (6 + 3) * 2 * 2 * 3
    assert Counter(run.options["trial_seed"] for run in runs) == {0: 54, 2: 54}
    assert runs[0].name == "rotated_digits-a-ERM-test0-trial0-hparams0"
    assert all("/" not in run.name and ":" not in run.name for run in runs)
    assert [run.options["trial_seed"] for run in runs] == sorted(run.options["trial_seed"] for run in runs)


def test_the_count_is_announced_with_its_formula():
    plan = sweep(["rotated_digits", "colored_digits"], ["leave_one_domain_out_cv"], models=["a", "b"])
    text = describe_plan(plan)
    assert "6 + 6*5/2 = 21;" in text
    assert "3 + 3*2/2 = 6;" in text
    assert "x 3 trial seeds x 1 hparams seed x 2 models x 1 algorithm = 126 runs" in text
    assert text.endswith("162 runs in all")
    assert len(plan_runs(plan)) == 162


def test_options_of_an_entry_are_its_own_and_tables_are_joined():
    entry = {"model": "a", "label": "small", "model_kwargs": {"depth": 2, "num_experts": 4}, "lr": 0.1}
    plan = sweep(models=[entry, "b"], options={"model_kwargs": {"depth": 3, "width": 8}, "steps": 5}, trial_seeds=(0,))
    runs = plan_runs(plan)
    first, second = runs[0], runs[6]
    assert first.options["model_kwargs"] == {"depth": 2, "num_experts": 4, "width": 8}
    assert second.options["model_kwargs"] == {"depth": 3, "width": 8}
    assert (first.options["lr"], "lr" in second.options, first.options["steps"]) == (0.1, False, 5)
    assert first.name.startswith("rotated_digits-small-")


def test_the_number_of_domains_is_read_from_the_folder(tmp_path):
    for domain in "abcd":
        (tmp_path / domain / "class").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / domain / "class" / "image.png")
    plan = sweep([{"dataset": "folder", "data_dir": str(tmp_path)}], trial_seeds=(0,))
    assert held_out(plan) == [[0], [1], [2], [3]]


def test_the_official_test_domains_are_left_to_the_data():
    assert held_out(sweep(["geo_digits"], [OFFICIAL], trial_seeds=(0, 1))) == [None, None]
    with pytest.raises(ProtocolError, match=r"domains=\['ood_test'\]: the protocol 'official' has the test domains"):
        held_out(sweep(["geo_digits"], [OFFICIAL], domains=["ood_test"]))


def test_regions_are_held_out_in_turn_beside_the_official_test_domains(monkeypatch):
    assert held_out(sweep(["geo_digits"], trial_seeds=(0,))) == [[0], [1], [2], [3], [4]]
    assert held_out(sweep(["geo_digits"], trial_seeds=(0,), domains=["Europe"])) == [[2]]
    benchmark = get_benchmark("geo_digits")
    pooled = [replace(domain, group="all") for domain in benchmark.read(None) if domain.role != "id"][-2:]
    monkeypatch.setattr(planner, "get_benchmark", lambda name: replace(benchmark, reader=lambda data_dir: pooled))
    planner._read_domains.cache_clear()
    with pytest.raises(ProtocolError, match=r"dataset='geo_digits': has one training domain beside.*'official'"):
        plan_runs(sweep(["geo_digits"]))
    planner._read_domains.cache_clear()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_formulas_count_what_is_planned(protocol):
    hold_out, formula, fewest = PROTOCOLS[protocol]
    for number in range(fewest, 8):
        sets = hold_out(number)
        assert len(sets) == len(set(sets)) == eval(formula.format(n=number, m=number - 1))
        assert all(0 < len(held_out) < number for held_out in sets)


def test_mistakes_are_named(tmp_path):
    for domain in "ab":
        (tmp_path / domain / "class").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / domain / "class" / "image.png")
    two = {"dataset": "folder", "data_dir": str(tmp_path)}
    mistakes = {
        r"protocols='leave_one_domain_out_cv': folder has 2 domains; it takes 3": sweep(
            [two], ["leave_one_domain_out_cv"]
        ),
        r"protocols='loo': choose from leave_one_domain_out, .*official": sweep(protocols=["loo"]),
        r"domains=\[0, 6\]: name domains out of: 0 rot_0, 1 rot_15": sweep(domains=[0, 6]),
        r"label='a': names two entries of the plan": sweep(models=["a", {"model": "a", "lr": 1}]),
        r"dataset='PASC': choose from ": sweep(["PASC"]),
        r"trial_seeds=\[0, 1, 0\]: has a seed twice, which would be one run": sweep(trial_seeds=[0, 1, 0]),
        r"hparams_seeds=\[1, 1\]: has a seed twice": sweep(hparams_seeds=[1, 1]),
    }
    for message, plan in mistakes.items():
        with pytest.raises(ArgumentError, match=message):
            plan_runs(plan)
    with pytest.raises(ArgumentError, match=r"models=\{'modell': 'a'\}: lacks 'model'"):
        sweep(models=[{"modell": "a"}])


def test_each_region_alone_on_data_with_test_domains_of_its_own():
    plan = sweep(["geo_digits"], ["per_region"], trial_seeds=(0,))
    names = [domain.name for domain in get_benchmark("geo_digits").read(None)]
    trained = [set(range(len(names))) - set(test) for test in held_out(plan)]
    assert trained == [{position} for position, name in enumerate(names) if name.startswith("train ")]
    assert len(trained) == 5
    assert "per_region 5" in describe_plan(plan)
    first = sweep(["geo_digits"], ["per_region"], trial_seeds=(0,), domains=[0])
    assert held_out(first) == [list(range(1, len(names)))]
    with pytest.raises(ProtocolError, match="protocols='per_region': rotated_digits has 0 training regions"):
        plan_runs(sweep(["rotated_digits"], ["per_region"]))
    with pytest.raises(ProtocolError, match=r"domains=\[9\]: the regions are \[0, 1, 2, 3, 4\]"):
        plan_runs(sweep(["geo_digits"], ["per_region"], domains=[9]))
