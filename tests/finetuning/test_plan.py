"""Plans: domains by name, epochs, what is refused, and what is said before anything is trained."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from timm_moe_dg.data import get_benchmark
from timm_moe_dg.data.splits import domain_positions
from timm_moe_dg.errors import ArgumentError, ProtocolError
from timm_moe_dg.finetuning import describe, make_plan, parse_resumable, run_parser
from timm_moe_dg.finetuning.plan import config_hparams, fill_in
from timm_moe_dg.finetuning.progress import wanted_trackers
from timm_moe_dg.protocols.options import RunOptions

NAMES = ["art", "photo", "2019", "1"]


def plan_of(tmp_path, *words):
    return make_plan(parse_resumable(run_parser(), ["--output", str(tmp_path / "output"), *words]))


@pytest.mark.parametrize(
    ("given", "positions"),
    [
        (["photo"], [1]),
        (["photo", "art"], [1, 0]),
        ([3, 0], [3, 0]),
        ([2019], [2]),  # no position, but a name
        ([1], [1]),  # a position, though a name as well
        ([1, "art"], [3, 0]),  # names, all of them
    ],
)
def test_domains_are_found_by_name_and_by_position(given, positions):
    assert domain_positions(given, NAMES) == positions


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            ["sketch"],
            r"test_domains=\['sketch'\]: no domain is called sketch; choose from: 0 art, 1 photo, 2 2019, 3 1",
        ),
        ([0, "photo"], r"test_domains=\[0, 'photo'\]: give names or positions, not both, out of: 0 art"),
    ],
)
def test_unknown_names_and_mixtures_are_refused_with_the_list(given, complaint):
    with pytest.raises(ProtocolError, match=complaint):
        domain_positions(given, NAMES)


def test_a_name_gives_the_same_run_as_its_position(tmp_path):
    named, counted = (plan_of(tmp_path, "--test_domains", word, "--experiment", "a") for word in ("rot_30", "2"))
    assert named.identity() == counted.identity()
    assert named.options.test_domains == [2]


def test_epochs_are_passes_over_the_smallest_training_domain(tmp_path):
    plan = plan_of(tmp_path, "--epochs", "2.5", "--batch-size", "7")
    smallest = min(len(plan.splits[position].inside) for position in plan.training)
    assert plan.options.steps == round(2.5 * smallest / 7)
    with pytest.raises(ArgumentError, match=r"epochs=2.0: leave it out, or --steps 3"):
        plan_of(tmp_path, "--epochs", "2", "--steps", "3")


def test_what_is_said_beforehand_is_what_is_planned(tmp_path):
    plan = plan_of(tmp_path, "--dataset", "geo_digits", "--experiment", "a")
    text = describe(plan)
    rows = re.findall(r"^  (\w.*?)  +(train|held out|test \(\w+\)) +(\d+) +(\d+)$", text, re.MULTILINE)
    assert [name for name, *_ in rows] == plan.names
    for (_, role, inside, outside), split, domain in zip(rows, plan.splits, plan.domains, strict=True):
        assert (int(inside), int(outside)) == (len(split.inside), len(split.outside))
        assert role == {"train": "train", "id": "test (id)", "ood": "test (ood)"}[domain.role]
    assert f"{sum(map(len, plan.domains))} images, 10 classes" in text
    assert "ood Oceania" in re.findall("^held out: (.*)$", text, re.MULTILINE)[0]
    assert f"601 steps of {len(plan.training)} x 16 images, evaluated every 200" in text
    assert str(tmp_path / "output" / "a") in text


@pytest.mark.parametrize("words", [["--label-smoothing", "0.1"], ["--class-weights", "balanced"]])
def test_methods_with_a_task_loss_of_their_own_refuse_what_they_would_ignore(words, tmp_path):
    with pytest.raises(ArgumentError, match=r"is not defined for IRM; leave it out, or use ERM"):
        plan_of(tmp_path, "--algorithm", "IRM", *words)


DEFAULTS = {"lr": 1e-3, "weight_decay": 0.0, "batch_size": 8, "penalty": 1.0}


def test_defaults_give_way_to_the_draw_the_draw_to_hparams_and_these_to_options():
    def settle(**options):
        return config_hparams(RunOptions(**options), DEFAULTS, "digits", {"penalty": lambda random: 5.0})

    assert settle() == DEFAULTS
    drawn = settle(hparams_seed=1)
    assert drawn["penalty"] == 5.0
    assert drawn["lr"] != DEFAULTS["lr"]
    assert settle(hparams_seed=1, hparams={"penalty": 3.0})["penalty"] == 3.0
    assert settle(hparams_seed=1, hparams={"lr": 0.5}, lr=0.25)["lr"] == 0.25


def test_what_was_left_open_is_filled_in_and_named_and_nothing_else_changes():
    benchmark = get_benchmark("rotated_digits")
    domains = [SimpleNamespace(classes=tuple("0123456789"), role="train")] * 6
    given = RunOptions(steps=7)
    filled = fill_in(given, benchmark, DEFAULTS, domains)
    assert (filled.steps, filled.num_classes, filled.test_domains) == (7, 10, [0])
    assert "steps" not in filled.filled_in
    changed = {name for name, value in vars(given).items() if vars(filled)[name] != value}
    assert changed <= {"filled_in", *filled.filled_in}
    assert fill_in(given, benchmark, DEFAULTS, domains).seed == filled.seed
    assert fill_in(replace(given, trial_seed=1), benchmark, DEFAULTS, domains).seed != filled.seed


def test_trackers_are_those_switched_on():
    assert wanted_trackers(RunOptions()) == []
    assert wanted_trackers(RunOptions(log_wandb=True)) == ["wandb"]
