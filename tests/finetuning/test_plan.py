"""What a run is planned from: hyper-parameters by precedence, and what follows from seeds and data."""

from dataclasses import replace
from types import SimpleNamespace

from timm_moe_dg.data import get_benchmark
from timm_moe_dg.finetuning.plan import config_hparams, fill_in, wanted_trackers
from timm_moe_dg.protocols.options import RunOptions

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
