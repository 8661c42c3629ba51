"""Runs a training program as it is, and writes down when its steps and evaluations were and what they were of.

    python -m tests.scale.timed_program REPORT KIND PROGRAM WORDS...

KIND is "finetune" or "timm", then PROGRAM is the script, or "domainbed", then it is the checkout. The program's
functions are looked at from outside; with FEATURIZER in the environment DomainBed trains that network of timm's.
"""

import importlib.util
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

FEATURIZER = "FEATURIZER"


@dataclass
class Seen:
    """What a program did; times are of the machine's monotonic clock, in seconds.

    Attributes:
        steps: The end of each step.
        evaluations: Beginning and end of each evaluation, or of each part of one.
        trained: Images in steps.
        evaluated: Images in evaluations.
        parameters: That are trained.
    """

    steps: list[float] = field(default_factory=list)
    evaluations: list[tuple[float, float]] = field(default_factory=list)
    trained: int = 0
    evaluated: int = 0
    parameters: int = 0

    def step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Counts a step of any optimizer."""
        self.steps.append(time.monotonic())
        self.parameters = sum(one.numel() for group in optimizer.param_groups for one in group["params"])

    def timed(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps what evaluates."""

        def wrapped(*args: object, **kwargs: object) -> object:
            began = time.monotonic()
            found = evaluate(*args, **kwargs)
            self.evaluations.append((began, time.monotonic()))
            return found

        return wrapped

    def counted(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wraps the loss, which steps compute with gradients and evaluations without."""

        def wrapped(logits: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if torch.is_grad_enabled():
                self.trained += len(target)
            else:
                self.evaluated += len(target)
            return loss(logits, target, *args, **kwargs)

        return wrapped

    def passed(self, batches: Any) -> Iterator[Any]:
        """Counts the images of an evaluation that computes no loss."""
        for batch in batches:
            self.evaluated += len(batch[1])
            yield batch


def run_finetune(seen: Seen, script: str) -> None:
    """Runs tools/finetune.py."""
    sys.path.insert(0, str(Path(script).resolve().parents[1]))
    from timm_moe_dg.finetuning.run import FineTuning

    FineTuning.evaluate = seen.timed(FineTuning.evaluate)  # type: ignore[method-assign]
    runpy.run_path(script, run_name="__main__")


def run_timm(seen: Seen, script: str) -> None:
    """Runs timm's train.py."""
    spec = importlib.util.spec_from_file_location("timm_train", script)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.validate = seen.timed(module.validate)
    module.main()


def run_domainbed(seen: Seen, checkout: str) -> None:
    """Runs domainbed/scripts/train.py; the WILDS package, of which no data are read here, may be missing."""
    sys.path.insert(0, checkout)
    for module in ("camelyon17_dataset", "fmow_dataset"):
        stub: Any = ModuleType(f"wilds.datasets.{module}")
        stub.Camelyon17Dataset = stub.FMoWDataset = None
        for part in ("wilds", "wilds.datasets"):
            sys.modules.setdefault(part, ModuleType(part))
        sys.modules.setdefault(stub.__name__, stub)
    misc: Any = importlib.import_module("domainbed.lib.misc")
    networks: Any = importlib.import_module("domainbed.networks")
    accuracy = seen.timed(misc.accuracy)
    misc.accuracy = lambda network, loader, *others: accuracy(network, seen.passed(loader), *others)
    if name := os.environ.get(FEATURIZER):
        networks.Featurizer = lambda *_: featurizer(name)
    runpy.run_module("domainbed.scripts.train", run_name="__main__", alter_sys=True)


def featurizer(name: str) -> nn.Module:
    """Builds a network of timm's as DomainBed takes one: without classifier, with the number of its outputs."""
    import timm  # others need not wait for it

    network: Any = timm.create_model(name, num_classes=0)
    network.n_outputs = network.num_features
    return network


RUNNERS = {"finetune": run_finetune, "timm": run_timm, "domainbed": run_domainbed}


def main() -> None:
    """Runs the command line."""
    report, kind, program, *words = sys.argv[1:]
    sys.argv = [program, *words]
    seen = Seen()
    register_optimizer_step_post_hook(seen.step)
    F.cross_entropy = seen.counted(F.cross_entropy)
    try:
        RUNNERS[kind](seen, program)
    finally:
        Path(report).write_text(json.dumps(asdict(seen)))


if __name__ == "__main__":
    main()
