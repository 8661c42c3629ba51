"""config.json of a folder to publish, as timm writes and reads it."""

import json
from pathlib import Path

from ..networks import build
from ..networks.build import CONFIG, Config

WEIGHTS = "model.safetensors"


def read_config(folder: Path) -> Config:
    """Reads the configuration of the model in a folder.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    return build.read_config(folder / CONFIG)


def write_config(folder: Path, config: Config) -> None:
    """Writes the configuration of the model in a folder."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2))
