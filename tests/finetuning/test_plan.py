"""Plans: domains by name, epochs, what is refused, and what is said before anything is trained."""

import re
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from PIL import Image

from tests.finetuning.plans import image_folder, plan_of
from timm_moe_dg.algorithms.hparams import loss_coefficients
from timm_moe_dg.cli.arguments import option_words
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.errors import ArgumentError, MissingDependencyError, MoeDgError
from timm_moe_dg.finetuning import plan as planning
from timm_moe_dg.finetuning.messages import describe
from timm_moe_dg.finetuning.plan import check_trackers, config_hparams, fill_in
from timm_moe_dg.finetuning.resume import parse_resumable
from timm_moe_dg.protocols.options import RunOptions, run_parser
from timm_moe_dg.protocols.run_identity import differences, settings


def test_classes_are_counted_by_role_and_untrained_ones_warned_of(tmp_path, caplog):
    counts = (("a", "cat", 5), ("a", "dog", 5), ("b", "cat", 2), ("b", "owl", 3))
    data = image_folder(
        tmp_path, *(f"{domain}/{label}/{n}.png" for domain, label, count in counts for n in range(count))
    )
    for domain, label in product("ab", ("cat", "dog", "owl")):
        (tmp_path / domain / label).mkdir(exist_ok=True)
    text = describe(plan_of(tmp_path, *data, "--test-domains", "b", "--dry-run"))
    rows = [line.split() for line in text.splitlines() if line.split()[0] in ("class", "cat", "dog", "owl")]
    assert rows[0] == ["class", "training", "validation", "held", "out"]
    assert [sum(map(int, row[1:4])) for row in rows[1:]] == [7, 5, 3]
    assert rows[3] == ["owl", "0", "0", "3"]
    (tmp_path / "a" / "dog" / "more.png").write_bytes((tmp_path / "a" / "dog" / "0.png").read_bytes())
    args = plan_of(tmp_path, *data, "--test-domains", "b", "--dry-run").record_args
    assert args["most_frequent_class"] == "dog"
    assert [sum(images) for images in args["most_frequent"]] == [6, 0]
    assert "\noptimizer: adam, learning rate " in text
    assert "no training image is of the classes 'owl'" in caplog.text
    assert not {"class", "optimizer:"} & set(describe(plan_of(tmp_path, *data)).split())


@pytest.mark.parametrize(
    ("words", "argument"),
    [
        (["--metric", "f1_macro"], "metric"),
        (["--group-column", r"(\w/\w+/\d)\.png"], "group_column"),
        (["--mean", "0.5", "0.5"], "mean"),
        (["--std", "0.5"], "std"),
    ],
)
def test_scores_and_groups_that_the_data_cannot_have_are_refused(words, argument, tmp_path):
    files = [f"a/cat/{n}.png" for n in range(5)] + [f"{d}/{c}/{n}.png" for d in "bc" for c in "xy" for n in range(5)]
    data = image_folder(tmp_path, *files)
    for domain, label in product("abc", ("cat", "x", "y")):
        (tmp_path / domain / label).mkdir(parents=True, exist_ok=True)
    with pytest.raises(ArgumentError, match=f"^{argument}="):
        plan_of(tmp_path, *data, "--test-domains", "b", *words)


def test_facts_of_own_data_are_recorded(tmp_path):
    data = image_folder(tmp_path, *(f"{d}/{c}/g{n // 3}_{n}.png" for d in "ab" for c in "xy" for n in range(9)))
    args = plan_of(tmp_path, *data, "--test-domains", "b", "--group-column", r"(\w/\w/g\d)_").record_args
    assert args["reported_split"] == "whole"
    # Groups of three images
    assert args["group_squares"] == [[3 * number for number in sizes] for sizes in args["split_sizes"]]
    assert [whole for *_, whole in args["classes_present"]] == [2, 2]
    benchmark = plan_of(tmp_path, "--dataset", "rotated_digits", "--model", "test_vit").record_args
    assert benchmark["reported_split"] == "in"
    assert "group_squares" not in benchmark


def test_weights_that_were_trained_on_what_this_run_tests_or_validates_with_are_warned_of(tmp_path, caplog):
    words = ["--dataset", "rotated_digits", "--model", "test_vit", "--test-domains"]
    first, weights = plan_of(tmp_path, *words, "rot_75"), tmp_path / "first" / "best" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.touch()
    (tmp_path / "first" / "args.yaml").write_text(yaml.safe_dump(first.folder.args))
    for held_out, further, said in [
        ("rot_75", [], []),
        ("rot_0", [], ["trained on rot_0, which this run holds out"]),
        ("rot_75", ["--trial-seed", "1"], ["rot_0, rot_15, rot_30 and 2 more that validate here (trial_seed differs)"]),
    ]:
        caplog.clear()
        plan_of(tmp_path, *words, held_out, "--initial-checkpoint", str(weights), *further)
        assert len(caplog.messages) == len(said)
        assert all(text in caplog.text for text in said)
    (tmp_path / "first" / "args.yaml").write_text("format: 99")  # of something else
    plan_of(tmp_path, *words, "rot_75", "--initial-checkpoint", str(weights))


def test_a_benchmark_of_shared_photographs_decides_how_they_are_split(tmp_path):
    row = get_benchmark("emoji_styles")
    for domain, label, number in product(row.domains, row.classes, range(5)):
        (tmp_path / domain / label).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / domain / label / f"{label}-{number}.png")
    words = ["--dataset", "emoji_styles", "--data-dir", str(tmp_path), "--model", "test_vit"]
    for option, by_photograph in (([], True), (["--no-split-by-photograph"], False)):
        plan = plan_of(tmp_path, *words, *option)
        assert plan.options.split_by_photograph is by_photograph
        validated = [
            {Path(domain.paths[index]).stem for index in split.outside}
            for domain, split in zip(plan.domains, plan.splits, strict=True)
        ]
        assert all(names == validated[0] for names in validated) is by_photograph
        planned = vars(parse_resumable(run_parser(), [*words, *option]))
        assert not differences(planned, plan.folder.args, row)
    assert "split_by_photograph: False there, True planned" in differences(
        vars(parse_resumable(run_parser(), words)), plan.folder.args, row
    )


def test_positions_of_a_run_are_repeated_as_positions(tmp_path):
    data = image_folder(tmp_path, *(f"{name}/a/{number}.png" for name in "123" for number in range(5)))
    data += ["--experiment", "a"]
    assert [plan_of(tmp_path, *data, "--test-domains", word).options.test_domains for word in ("3", "@1")] == [[2], [1]]
    for domains in ([2], [1], []):
        words = option_words("test_domains", domains)
        assert plan_of(tmp_path, *data, *words).options.test_domains == domains


def test_a_run_may_hold_out_nothing(tmp_path):
    plan = plan_of(tmp_path, "--test-domains", "none")
    assert (plan.options.test_domains, plan.training) == ([], [0, 1, 2, 3, 4, 5])
    assert "\nheld out: none\n" in describe(plan)
    reserved = plan_of(tmp_path, "--dataset", "geo_digits", "--test-domains", "none")
    assert (reserved.options.test_domains, reserved.training) == ([5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4])


def test_a_held_out_region_is_out_of_distribution_with_all_its_domains(tmp_path):
    plan = plan_of(tmp_path, "--dataset", "geo_digits", "--test-domains", "Asia", "--experiment", "a")
    assert plan.options.test_domains == [1, 5, 6, 7, 8, 9, 10]
    assert {domain.name for domain in plan.domains if domain.role == "ood"} == {"train Asia", "id Asia", "ood Oceania"}
    assert {domain.name for domain in plan.domains if domain.role == "train"} == {
        *("train Africa", "train Europe", "train North America", "train South America")
    }
    for words in (["train Asia"], ["1"], ["Asia", "id Europe"]):
        same = plan_of(tmp_path, "--dataset", "geo_digits", "--test-domains", *words, "--experiment", "a")
        assert same.identity() == plan.identity()


def test_epochs_are_passes_over_the_smallest_training_domain(tmp_path):
    plan = plan_of(tmp_path, "--epochs", "2.5", "--batch-size", "7")
    smallest = min(len(plan.splits[position].inside) for position in plan.training)
    assert plan.options.steps == round(2.5 * smallest / 7)


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


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("epochs", ["--epochs", "2", "--steps", "3"]),
        ("label_smoothing", ["--algorithm", "IRM", "--label-smoothing", "0.1"]),
        ("class_weights", ["--class-weights", "balanced", "--algorithm", "IRM"]),
        ("sched", ["--algorithm", "RDM", "--sched", "cosine"]),
        ("layer_decay", ["--algorithm", "RDM", "--layer-decay", "0.7"]),
        ("min_lr", ["--min-lr", "1e-5"]),
        ("momentum", ["--momentum", "0.5"]),
        ("band_init", ["--band-init", "zero"]),
        ("linear_lr", ["--linear-lr", "0.1"]),
        ("linear_steps", ["--linear-steps", "4", "--algorithm", "MLDG"]),
        ("linear_steps", ["--linear-steps", "4", "--steps", "3"]),
        ("linear_steps", ["--linear-steps", "4", "--freeze", "backbone"]),
        ("test_domains", ["--test-domains", *"012345"]),
        ("test_domains", ["--test-domains", "6"]),
        ("dataset", ["--dataset", "PASC"]),
        ("algorithm", ["--algorithm", "ERMM"]),
        ("hparams", ["--hparams", '{"rate": 1}']),
        ("num_classes", ["--num-classes", "3"]),
    ],
)
def test_options_that_do_nothing_or_contradict_the_data_are_refused(argument, words, tmp_path):
    with pytest.raises(MoeDgError, match=f"^{argument}="):
        plan_of(tmp_path, *words)


def test_penalties_and_averages_that_begin_after_the_last_step_are_warned_of(tmp_path, caplog):
    words = ["--algorithm", "Fishr", "--averaging", "moving", "--steps"]
    describe(plan_of(tmp_path, *words, "1501"))
    assert "begins at this step" not in caplog.text
    describe(plan_of(tmp_path, *words, "100"))
    for name in ("penalty_anneal_iters=1500", "sma_start_iter=100"):
        assert f"{name}: the full penalty or the average begins at this step, and the run ends after 100" in caplog.text


DEFAULTS = {"lr": 1e-3, "weight_decay": 0.0, "batch_size": 8, "penalty": 1.0}


def test_defaults_give_way_to_the_draw_the_draw_to_hparams_and_these_to_options():
    benchmark = SimpleNamespace(hparams=DEFAULTS, search_space="digits")
    method = SimpleNamespace(HPARAMS={}, SEARCH={"penalty": lambda random: 5.0}, SEARCH_ALIASES={})

    def settle(**options):
        return config_hparams(RunOptions(**options), benchmark, method, None)

    assert settle() == DEFAULTS
    drawn = settle(hparams_seed=1)
    assert drawn["penalty"] == 5.0
    assert drawn["lr"] != DEFAULTS["lr"]
    assert settle(hparams_seed=1, hparams={"penalty": 3.0})["penalty"] == 3.0
    assert settle(hparams_seed=1, hparams={"lr": 0.5}, lr=0.25)["lr"] == 0.25


def test_a_hyper_parameter_seed_draws_the_losses_of_mixtures_unless_they_are_given(tmp_path):
    plan = plan_of(tmp_path, "--hparams-seed", "3", "--supcon-coef", "0.25")
    drawn = loss_coefficients(3, 0)
    assert plan.options.supcon_coef == plan.record_args["supcon_coef"] == 0.25
    assert (plan.options.aux_coef, plan.options.cka_coef) == (drawn["aux_coef"], drawn["cka_coef"])
    assert settings(plan.record_args).keys() & drawn.keys() == {"supcon_coef"}  # draws share a table's row
    assert plan_of(tmp_path).options.aux_coef == 0.01


def test_what_was_left_open_is_filled_in_and_named_and_nothing_else_changes():
    benchmark = get_benchmark("rotated_digits")
    domains = [SimpleNamespace(classes=tuple("0123456789"), role="train")] * 6
    given = RunOptions(steps=7)
    rates = {**DEFAULTS, **loss_coefficients(0, 0)}

    def fill(options):
        return fill_in(options, benchmark, rates, domains, [0])

    filled = fill(given)
    assert (filled.steps, filled.num_classes, filled.test_domains) == (7, 10, [0])
    assert "steps" not in filled.filled_in
    changed = {name for name, value in vars(given).items() if vars(filled)[name] != value}
    assert changed <= {"filled_in", *filled.filled_in}
    assert fill(given).seed == filled.seed
    assert fill(replace(given, trial_seed=1)).seed != filled.seed


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_named(name, monkeypatch):
    monkeypatch.setattr(planning, "find_spec", lambda other: None if other == name else True)
    with pytest.raises(MissingDependencyError, match=f"--log-{name} needs {name}"):
        check_trackers([name])


def test_weights_and_biases_needs_a_key_or_is_offline(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(api=SimpleNamespace(api_key=None)))
    monkeypatch.setattr(planning, "find_spec", lambda name: True)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ArgumentError, match="log_wandb=True"):
        check_trackers(["wandb"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(["wandb"])
