"""config.json of a folder to publish, as timm writes and reads it."""

import json
from pathlib import Path
from typing import Any

from ..networks.trained import CONFIG

WEIGHTS = "model.safetensors"
Config = dict[str, Any]  # JSON of timm's


def read_config(folder: Path) -> Config:
    """Reads the configuration of the model in a folder."""
    return json.loads((folder / CONFIG).read_text())


def write_config(folder: Path, config: Config) -> None:
    """Writes the configuration of the model in a folder."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2))
