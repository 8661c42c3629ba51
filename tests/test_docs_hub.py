"""Both launchers of docs/guides/hub.md register the models in scripts that import timm alone."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
BASH = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "guides" / "hub.md").read_text(), re.DOTALL)

# What timm's train.py does, through the same parts of timm, for two steps
SCRIPT = """
import argparse, importlib, torch
from timm import create_model
from timm.data import create_dataset, create_loader
from timm.data.model_config import resolve_input_data_config
from timm.optim import create_optimizer_v2

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir")
parser.add_argument("--model")
parser.add_argument("--pretrained", action="store_true")
parser.add_argument("--num-classes", type=int)
parser.add_argument("--device-modules", nargs="+")
args = parser.parse_args()
for module in args.device_modules or ():
    importlib.import_module(module)
small = {"img_size": 32, "embed_dim": 32, "depth": 4, "num_heads": 2}
model = create_model(args.model, pretrained=args.pretrained, num_classes=args.num_classes, **small).train()
config = resolve_input_data_config(model)
dataset = create_dataset("", root=args.data_dir, is_training=True)
options = {"use_prefetcher": False, "num_workers": 0, "device": torch.device("cpu"), "is_training": True}
loader = create_loader(dataset, config["input_size"], 2, mean=config["mean"], std=config["std"], **options)
optimizer = create_optimizer_v2(model, "adamw", lr=1e-3)
for images, target in loader:
    loss = torch.nn.functional.cross_entropy(model(images), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(tuple(images.shape), loss.item() > 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("block", [3, 4])
def test_a_registered_model_is_trained_in_a_script_that_imports_timm_alone(block, tmp_path, fresh_python):
    for index in range(4):
        path = tmp_path / "IMAGES" / f"class_{index % 2}" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((40, 40), 80).save(path)
    (tmp_path / "train.py").write_text(SCRIPT)
    words = shlex.split(BASH[block].replace("\\\n", " ").replace("--pretrained", ""))
    result = subprocess.run(
        [fresh_python, *words[1:]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["(2, 3, 32, 32) True"] * 2
