"""The fine-tuning script where each step draws some of the training domains: what a method keeps by domain follows."""

from pathlib import Path

import pytest

from tests.data.files import write_csv, write_image
from tests.load_tool import run_tool
from timm_moe_dg.data import StepSampler
from timm_moe_dg.storage.run_folder import Checkpoints

pytestmark = pytest.mark.slow

TRAPS, STEPS = 5, 3
MODEL = ["--model", "gmoe_tiny_patch16", "--img-size", "32"]
SIZE = ["--model-kwargs", "embed_dim=24", "depth=2", "num_heads=2", "moe_layers=(1,)", "num_experts=2"]
QUICK = ["--steps", str(STEPS), "--checkpoint-freq", "100", "-b", "2", "-j", "0", "--cpu-threads", "1"]


@pytest.fixture(scope="module")
def traps(tmp_path_factory) -> Path:
    """A miniature of iWildCam: four images of each of five traps to train on, and others to validate and test on."""
    root = tmp_path_factory.mktemp("iwildcam")
    parts = [("train", trap) for trap in range(TRAPS) for _ in range(4)]
    parts += [(part, trap) for part in ("id_val", "id_test", "val", "test") for trap in range(2)]
    rows = [
        {"split": part, "y": row % 3, "filename": f"image{row}.jpg", "location_remapped": trap}
        for row, (part, trap) in enumerate(parts)
    ]
    write_csv(root / "metadata.csv", rows)
    write_csv(root / "categories.csv", [{"y": y, "name": f"animal {y}"} for y in range(3)])
    for row in range(len(rows)):
        write_image(root / "train" / f"image{row}.jpg", gray=6 * row)
    return root


def test_group_dro_s_weights_rise_for_the_traps_that_the_sampler_drew(traps, tmp_path):
    words = ["--dataset", "iWildCam_locations", "--data-dir", traps, *MODEL, *SIZE, *QUICK]
    words += ["--algorithm", "GroupDRO", "--hparams", '{"groupdro_eta": 0.5}', "--seed", 7]
    run_tool("finetune", *words, "--output", tmp_path, "--experiment", "a")
    sampler = StepSampler(range(TRAPS), 2, domains_per_step=2, seed=7)
    drawn = {trap for step in range(STEPS) for trap in sampler.domain_indices(step)}
    checkpoint = Checkpoints(tmp_path / "a" / "checkpoints").newest()
    weights = checkpoint["per_process"][0]["algorithm"]["weights"]
    lowest = weights.min()
    assert {trap for trap in range(TRAPS) if weights[trap] > lowest} == drawn
    assert 0 < len(drawn) < TRAPS  # the seed leaves at least one undrawn
