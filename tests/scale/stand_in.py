"""A network of almost no cost for images of 4 x 4 pixels, and tar files of such images; `--import` registers it."""

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from timm_moe_dg.networks.build import data_config, save_network

SIDE, CLASSES = 4, ("ash", "beech", "oak")
KINDS = 64  # different images

default_cfgs = generate_default_cfgs({"stand_in": {"input_size": (3, SIDE, SIDE), "classifier": "head"}})


class StandIn(nn.Module):
    """One linear layer on the pixels."""

    def __init__(self, num_classes: int = len(CLASSES), in_chans: int = 3, **_: object) -> None:
        super().__init__()
        self.num_classes, self.num_features = num_classes, in_chans * SIDE**2
        self.head = nn.Linear(self.num_features, num_classes)

    def get_classifier(self) -> nn.Module:
        """Returns the layer."""
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 4, 4) -> (B, C)."""
        return self.head(x.flatten(1))


@register_model
def stand_in(pretrained: bool = False, **kwargs: Any) -> StandIn:
    """Builds the network."""
    return build_model_with_cfg(StandIn, "stand_in", pretrained, **kwargs)


def save_stand_in(folder: Path, seed: int = 0) -> str:
    """Writes a network with random weights, and returns its name for --model."""
    torch.manual_seed(seed)
    network = timm.create_model("stand_in").eval()
    save_network(network, folder, CLASSES, data_config(network))
    return f"local-dir:{folder}"


def picture(number: int) -> bytes:
    """One of `KINDS` PNG files."""
    pixels = np.random.default_rng(number % KINDS).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_tars(folder: Path, images: int, per_file: int = 100_000) -> Sequence[Path]:
    """Writes images with coordinates, KEY.png and KEY.json, as WebDataset's files."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures, paths = [picture(kind) for kind in range(KINDS)], list[Path]()
    for first in range(0, images, per_file):
        paths.append(folder / f"{first // per_file:05}.tar")
        with tarfile.open(paths[-1], "w") as tar:
            for number in range(first, min(first + per_file, images)):
                note = f'{{"lon": {number % 360 - 180}, "lat": {number % 180 - 90}}}'.encode()
                for suffix, content in (("png", pictures[number % KINDS]), ("json", note)):
                    info = tarfile.TarInfo(f"{number:09}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return paths
