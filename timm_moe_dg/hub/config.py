"""config.json of a folder to publish, as timm writes and reads it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..networks.trained import CONFIG

WEIGHTS = "model.safetensors"


def read_config(folder: Path) -> dict[str, Any]:  # JSON of timm's
    """Reads the configuration of the model in a folder."""
    return json.loads((folder / CONFIG).read_text())


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes the configuration of the model in a folder."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2))
