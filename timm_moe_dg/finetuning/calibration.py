"""The calibration of a run's selected network, once the run has ended."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch.utils.data import DataLoader

from ..cli.values import LOCAL
from ..errors import ArgumentError, MoeDgError
from ..networks.averages import load_predictor
from ..networks.calibration import CALIBRATION, Calibration, calibrate, calibration_command
from ..protocols.evaluation import unseen_domains
from ..protocols.run_identity import method_of
from ..storage.atomic import explained, replaced_file
from .plan import RunPlan
from .sharding import is_sharded

_logger = logging.getLogger(__name__)


def calibrate_run(plan: RunPlan, device: torch.device, watched: Callable[[DataLoader], Any] = iter) -> None:
    """Calibrates the selected network of a run, or logs why it cannot."""
    folder = plan.folder.path / "best"
    options = plan.options
    tested = [index for index in range(len(plan.domains)) if index not in plan.training]
    data = (plan.domains, plan.splits, plan.training, unseen_domains(plan.domains, tested))
    settings: dict[str, Any] = {"method": method_of(plan.folder.args), "metadata_columns": options.metadata_columns}
    settings |= {"batch_size": options.validation_batch_size, "workers": options.workers}
    level = logging.root.manager.disable
    try:
        if is_sharded():
            command = calibration_command(str(plan.folder.path))
            raise ArgumentError.of("use_fsdp", True, f"calibrate on one device: {command}")
        logging.disable(logging.INFO)  # a second description of the network
        network = load_predictor(f"{LOCAL}{folder}").to(device)
        calibration = calibrate(network, *data, **settings, watched=watched)
    except (MoeDgError, torch.OutOfMemoryError) as error:  # the run itself is complete
        _logger.warning(f"no temperature was fitted: {error}")
        return
    finally:
        logging.disable(level)
    save_calibration(calibration, folder)


def save_calibration(calibration: Calibration, folder: Path) -> None:
    """Writes the file of a calibration into the folder of its network, as a whole or not at all."""
    path = folder / CALIBRATION
    with explained(path), replaced_file(path) as fresh:
        fresh.write_bytes(save(calibration.tensors(), calibration.header()))
    scores = calibration.validation
    _logger.info(f"temperature {calibration.temperature:.3f}, fitted on {len(scores.confidence)} validation images")
