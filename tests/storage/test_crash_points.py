"""A run that is killed at a file-system event resumes to the same folder; `crash_points.py` tries all events."""

from contextlib import suppress
from functools import partial

import pytest

from tests.storage.crash_points import PLANS, differences, killed_at
from timm_moe_dg.analysis.evaluation_files import FILES
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.inference.evaluate import EvaluateOptions, _output_places
from timm_moe_dg.storage.files import all_or_nothing

pytestmark = pytest.mark.slow  # each kill is a process


@pytest.mark.parametrize("plan", PLANS)
def test_a_killed_run_resumes_to_the_same_folder(tmp_path, plan):
    kills, differing = differences(tmp_path, 23, **PLANS[plan])
    assert kills > 2
    assert differing == []


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
    for number in range(1, events + 1):
        root = tmp_path / str(number)
        killed_at(number, root, partial(write, root))
        with suppress(ArgumentError), all_or_nothing(root / "scores", FILES):  # the next call completes the move
            raise ArgumentError
        scores = [(root / "scores" / name).exists() for name in FILES]
        assert all(scores) or not any(scores)
        assert all(scores) or not (root / place).exists()
        assert (root / place).exists() or not (all(scores) and place.startswith("scores"))
