"""Plans: the runs of a protocol, counted by hand, and their names."""

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from PIL import Image

from timm_moe_dg.data import get_benchmark, seed_hash
from timm_moe_dg.errors import ArgumentError, ProtocolError
from timm_moe_dg.protocols import planner
from timm_moe_dg.protocols.planner import Row, Sweep, plan_runs, read_rows


def sweep(datasets=("rotated_digits",), protocols=("leave_one_domain_out",), rows=("a",), trial_seeds=(0,), **options):
    named = isinstance(rows, dict)
    rows = read_rows([rows], {"model": "m"}) if named else [Row(name, {"model": name}) for name in rows]
    return Sweep(datasets, rows, protocols, trial_seeds, **options)


def held_out(*args, **options):
    return [run.options["test_domains"] for run in plan_runs(sweep(*args, **options))]


@pytest.fixture
def folder(tmp_path):
    """The options of a plan for a folder with as many domains as the function is given."""

    def write(names):
        for domain in names:
            (tmp_path / domain / "class").mkdir(parents=True)
            Image.new("RGB", (4, 4)).save(tmp_path / domain / "class" / "image.png")
        return {"datasets": ["folder"], "options": {"data_dir": str(tmp_path)}}

    return write


LODO, CV, SINGLE = "leave_one_domain_out", "leave_one_domain_out_cv", "single_source"
ONES, PAIRS = [[domain] for domain in range(6)], [list(pair) for pair in combinations(range(6), 2)]
PLANS = [  # data set, protocols, domains of interest, held-out domains
    ("rotated_digits", [LODO], None, ONES),
    ("rotated_digits", [CV], None, [*ONES, *PAIRS]),
    ("colored_digits", [SINGLE], None, [[1, 2], [0, 2], [0, 1]]),
    # With three domains, training on one means holding out a pair; runs that protocols share are planned once
    ("colored_digits", [CV, SINGLE], None, [[0], [1], [2], [0, 1], [0, 2], [1, 2]]),
    ("rotated_digits", [LODO], [2], [[2]]),
    ("rotated_digits", [CV], [2], [[2], [0, 2], [1, 2], [2, 3], [2, 4], [2, 5]]),
    ("rotated_digits", [SINGLE], [2], [[0, 1, 3, 4, 5]]),
    ("rotated_digits", [LODO], ["rot_30", "rot_0"], [[0], [2]]),
    # Data with test domains of its own: groups of the training domains in turn, or these test domains alone
    ("geo_digits", [LODO], None, ONES[:5]),
    ("geo_digits", [LODO], ["Europe"], [[2]]),
    ("geo_digits", ["official"], None, [None]),
    ("geo_digits", ["per_region"], [0], [list(range(1, 11))]),
    ("geo_digits", ["per_region"], ["train Asia"], [[0, *range(2, 11)]]),
]


@pytest.mark.parametrize(("dataset", "protocols", "domains", "expected"), PLANS)
def test_held_out_domains(dataset, protocols, domains, expected):
    assert held_out([dataset], protocols, domains=domains) == expected


def test_every_combination_has_a_run_and_a_name_of_its_own():
    plan = sweep(["rotated_digits", "colored_digits"], rows=["a", "b/c:d"], trial_seeds=(0, 2), hparams_seeds=(0, 1, 5))
    runs = plan_runs(plan)
    assert len(runs) == len({run.name for run in runs}) == (6 + 3) * 2 * 2 * 3
    assert Counter(run.options["trial_seed"] for run in runs) == {0: 54, 2: 54}
    assert runs[0].name == "rotated_digits-a-ERM-test0-trial0-hparams0"
    assert all("/" not in run.name and ":" not in run.name for run in runs)
    assert [run.options["trial_seed"] for run in runs] == sorted(run.options["trial_seed"] for run in runs)


def test_a_row_has_its_options_those_of_the_plan_and_those_given_for_all():
    row = {"model": "a", "model_kwargs": {"depth": 2, "num_experts": 4}, "lr": "1e-1"}
    plan = sweep(rows={"small": row, "b": {"model": "b"}}, options={"model_kwargs": {"depth": 3, "width": 8}})
    runs = plan_runs(replace(plan, given={"model_kwargs": {"width": 9, "num_experts": 4}, "steps": 5}))
    first, second = runs[0], runs[6]
    # The order of images is that of ERM without a row, whatever the method
    other = plan_runs(sweep(rows={"b": {"algorithm": "CORAL"}}))[1]
    assert runs[1].options["seed"] == other.options["seed"] == seed_hash("rotated_digits", "ERM", [1], 0, 0)
    assert first.options["model_kwargs"] == {"depth": 2, "num_experts": 4, "width": 9}
    assert second.options["model_kwargs"] == {"depth": 3, "width": 9, "num_experts": 4}
    assert (first.options["lr"], "lr" in second.options, first.options["steps"]) == (0.1, False, 5)
    assert first.name.startswith("rotated_digits-small-")


def test_the_number_of_domains_is_read_from_the_folder(folder):
    assert held_out(**folder("abcd")) == [[0], [1], [2], [3]]


def test_pooled_training_domains_cannot_be_held_out(monkeypatch):
    benchmark = get_benchmark("geo_digits")
    pooled = [replace(domain, group="all") for domain in benchmark.read(None) if domain.role != "id"][-2:]
    monkeypatch.setattr(planner, "get_benchmark", lambda name: replace(benchmark, reader=lambda data_dir: pooled))
    planner.read_domains.cache_clear()
    with pytest.raises(ProtocolError, match=r"^dataset='geo_digits': .*'official'"):
        plan_runs(sweep(["geo_digits"]))
    planner.read_domains.cache_clear()


MISTAKES = [
    (r"protocols='loo'", {"protocols": ["loo"]}),
    (r"protocols='per_region'", {"protocols": ["per_region"]}),  # rotated digits have no regions
    (r"domains=\[0, 6\]", {"domains": [0, 6]}),
    (r"domains=\['art'\]", {"domains": ["art"]}),
    (r"domains=\['ood_test'\]", {"datasets": ["geo_digits"], "protocols": ["official"], "domains": ["ood_test"]}),
    (r"domains=\[9\]", {"datasets": ["geo_digits"], "protocols": ["per_region"], "domains": [9]}),
    (r"rows='a-ERM'", {"rows": ["a", "a"]}),
    (r"dataset='PASC'", {"datasets": ["PASC"]}),
    (r"trial_seeds=\[0, 1, 0\]", {"trial_seeds": [0, 1, 0]}),
    (r"hparams_seeds=\[1, 1\]", {"hparams_seeds": [1, 1]}),
    ("modell='a'", {"rows": {"x": {"modell": "a"}}}),
    (r"rows=\{'x': 5\}", {"rows": {"x": 5}}),
    (r"rows=\{None: .*\}", {"rows": {None: {"model": "a"}}}),
    (r"rows=\['x', 'y'\]", {"rows": {"x": {"lr": 1}, "y": {"lr": 1.0}}}),
    (r"rows=\['x', 'y'\]", {"rows": {"x": {"model": "m"}, "y": {}}}),  # the model of all rows
    ("holdout_fraction=0.5", {"rows": {"x": {"holdout_fraction": 0.5}}}),
    ("steps=7", {"rows": {"x": {"steps": 7}, "y": {}}}),
    ("lr=0.1", {"rows": {"x": {"lr": 1}}, "given": {"lr": 0.1}}),
    ("top_k=1", {"rows": {"x": {"model_kwargs": {"top_k": 2}}}, "given": {"model_kwargs": {"top_k": 1}}}),
    ("trial_seed=1", {"given": {"trial_seed": 1}}),
]


@pytest.mark.parametrize(("message", "options"), MISTAKES)
def test_mistakes_are_refused_by_the_name_of_the_argument(message, options):
    with pytest.raises(ArgumentError, match=f"^{message}: "):
        plan_runs(sweep(**options))


def test_too_few_domains_are_refused(folder):
    with pytest.raises(ProtocolError, match=f"^protocols='{CV}': "):
        plan_runs(sweep(protocols=[CV], **folder("ab")))
