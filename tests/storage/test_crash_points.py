"""A run that is killed at a file-system event resumes to the same folder; TIMM_MOE_DG_KILLS=1 tries all events."""

import os
from contextlib import suppress
from functools import partial

import pytest

from tests.storage.toy_runs import content, killed_at, run
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.inference.evaluate import EvaluateOptions, _output_places
from timm_moe_dg.inference.evaluated import FILES
from timm_moe_dg.storage.files import all_or_nothing

pytestmark = pytest.mark.slow  # each kill is a process


# A run that is killed from its start; one whose checkpoint stays; one that is killed while it goes on from step 5
PLANS = {"plain": {}, "extendable": {"can_go_on": True}, "resumed": {"resume": True}}


def lasting(path, can_go_on):
    """The files that have to be the same. Checkpoints that a kill after `done` leaves go at the next start."""
    return {name: text for name, text in content(path).items() if can_go_on or not name.startswith("checkpoints/")}


@pytest.mark.parametrize("plan", PLANS)
def test_a_killed_run_resumes_to_the_same_folder(tmp_path, plan):
    options = {"can_go_on": False, **PLANS[plan]}
    can_go_on = options["can_go_on"]
    run(tmp_path / "whole" / "a", can_go_on=can_go_on)
    expected = lasting(tmp_path / "whole" / "a", can_go_on)

    def killed(number):
        path = tmp_path / str(number) / "a"
        if options.get("resume"):
            run(path, upto=6)
        return path, killed_at(number, path.parent, partial(run, path, **options))

    _, events = killed(None)
    for number in range(1, events + 1, int(os.environ.get("TIMM_MOE_DG_KILLS", "23"))):
        path, _ = killed(number)
        if not (path / "done").exists():
            run(path, resume=True, can_go_on=can_go_on)
        assert lasting(path, can_go_on) == expected, number


@pytest.mark.parametrize("place", ["scores/features.npz", "features.npz"])
def test_a_kill_leaves_no_features_without_their_scores(place, tmp_path):
    def write(root):
        with _output_places(
            EvaluateOptions(model="", output=str(root / "scores"), save_features=str(root / place))
        ) as (
            folder,
            features,
        ):
            for path in (*(folder / name for name in FILES), features):
                path.write_text("new")

    events = killed_at(None, tmp_path / "counted", partial(write, tmp_path / "counted"))
    for number in range(1, events + 1, 2):
        root = tmp_path / str(number)
        killed_at(number, root, partial(write, root))
        with suppress(ArgumentError), all_or_nothing(root / "scores", FILES):  # the next call completes the move
            raise ArgumentError
        scores = [(root / "scores" / name).exists() for name in FILES]
        assert all(scores) or not any(scores)
        assert all(scores) or not (root / place).exists()
        assert (root / place).exists() or not (all(scores) and place.startswith("scores"))
