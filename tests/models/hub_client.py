"""Builds pretrained models in a process of its own, since the Hub's client reads its environment at import.

Standard input: a JSON list of {"case": registered name, "model": what create_model is given, "options": its arguments}.
Standard output: a JSON list of {"features", "logits", "log"}, or {"error"} where create_model raised.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import timm
import torch

from tests.models.cases import BY_NAME, SMALL


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run_request(case: str, model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Builds one model and runs it on the case's images."""
    logger, handler = logging.getLogger("timm_moe_dg"), _Lines()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        network: Any = timm.create_model(model, pretrained=True, **options).eval()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        logger.removeHandler(handler)
    with torch.no_grad():
        tokens = network.forward_features(BY_NAME[case].images())
        features, logits = network.forward_head(tokens, pre_logits=True), network.forward_head(tokens)
    return {"features": features.tolist(), "logits": logits.tolist(), "log": handler.lines}


def small_request(case: str, model: str | None = None, **options: Any) -> dict[str, Any]:
    """A request for a case's small variant with 1000 classes, as its source has them."""
    size = {"img_size": BY_NAME[case].small_size}
    return {"case": case, "model": model or case, "options": {**SMALL, **size, "num_classes": 1000, **options}}


def ask(requests: list[dict[str, Any]], cache: Path, **environment: str) -> list[dict[str, Any]]:
    """Runs this file with a Hub cache and other settings of the Hub's client; answers in the order of the requests."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    hub = {
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        **environment,
    }
    process = subprocess.run(
        [sys.executable, "-m", "tests.models.hub_client"],
        input=json.dumps(requests),
        env={**inherited, **hub},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


if __name__ == "__main__":
    json.dump([run_request(**request) for request in json.load(sys.stdin)], sys.stdout)
