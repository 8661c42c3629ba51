"""Plans of runs, and folders of small images."""

from pathlib import Path

import numpy as np
from PIL import Image

from timm_moe_dg.finetuning.plan import RunPlan, make_plan
from timm_moe_dg.finetuning.resume import parse_resumable
from timm_moe_dg.protocols.options import run_parser


def plan_of(tmp_path: Path, *words: str) -> RunPlan:
    """Plans the run of a command line, with its output below a folder."""
    return make_plan(parse_resumable(run_parser(), ["--output", str(tmp_path / "output"), *words]))


def image_folder(root: Path, *files: str, side: int = 4) -> list[str]:
    """Writes small images of noise, and returns the words for their folder."""
    random = np.random.default_rng(0)
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (side, side, 3), dtype=np.uint8)).save(root / file)
    return ["--dataset", "folder", "--data-dir", str(root), "--model", "test_vit"]
