"""What the fine-tuning loop costs beyond model and optimizer, and how much of a step waits for data; by hand.

    python -m tests.tools.loop_overhead                                  # gmoe_small_patch16, 224 pixels, 8 images
    python -m tests.tools.loop_overhead --rounds 20 --steps 5 --workers 2

Three loops take turns in one process, on one thread, and medians of seconds per step are compared: a bare one (forward,
loss, backward, optimizer) on batches that lie ready, the tool's own on the same batches, and the tool's own on its
loader.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any

import torch.nn.functional as F

from tests.load_tool import load_tool
from timm_moe_dg.finetuning.assembly import build_model
from timm_moe_dg.finetuning.launch import join_processes
from timm_moe_dg.finetuning.loop import train
from timm_moe_dg.finetuning.plan import make_plan
from timm_moe_dg.finetuning.resume import parse_resumable
from timm_moe_dg.finetuning.run import find_resume_point, start
from timm_moe_dg.finetuning.stopping import Interruption
from timm_moe_dg.losses import auxiliary_loss

RUN = ("--dataset", "rotated_digits", "--test-domains", *"12345", "--checkpoint-freq", "1000000", "--steps", "1000000")


def bare(run: Any, batches: list) -> None:
    """What any training loop has to do."""
    model, optimizer = run.model.training.model, run.model.training.optimizer
    for ((images, targets),) in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets) + 0.01 * auxiliary_loss(model)
        loss.backward()
        optimizer.step()


def seconds(call: Callable[[], None], steps: int) -> float:
    """Seconds per step."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) / steps


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gmoe_small_patch16")
    parser.add_argument("--img-size", default="224")
    parser.add_argument("--batch-size", default="8")
    parser.add_argument("--workers", default="1")
    parser.add_argument("--steps", type=int, default=3, help="of a loop's turn")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    tool = load_tool("finetune")
    words = ["--model", options.model, "--img-size", options.img_size, "-b", options.batch_size, "--cpu-threads", "1"]
    with tempfile.TemporaryDirectory() as folder:
        words += ["--workers", options.workers, "--output", folder]
        plan = make_plan(parse_resumable(tool.build_parser(), [*RUN, *words]))
        accelerator = join_processes(plan.options)
        resume_point = find_resume_point(plan, accelerator)
        run = start(plan, accelerator, build_model(plan, accelerator), resume_point)
        later = replace(resume_point, first_step=2)
        ready = list(islice(run.batches, options.steps))
        endless = iter(run.batches)
        with Interruption() as stop:
            loops = {
                "bare": lambda: bare(run, ready),
                "tool": lambda: train(replace(run, batches=ready, resume_point=later), stop),
                "tool and loader": lambda: train(
                    replace(run, batches=islice(endless, options.steps), resume_point=later), stop
                ),
            }
            for loop in loops.values():
                loop()
            rounds = [
                {name: seconds(loop, options.steps) for name, loop in loops.items()} for _ in range(options.rounds)
            ]
    for name in loops:
        per_step = median(times[name] for times in rounds)
        ratio = median(times[name] / times["bare"] for times in rounds)
        sys.stdout.write(f"{name}: {per_step:.3f} s per step, {ratio:.3f} of bare (median of {len(rounds)} rounds)\n")


if __name__ == "__main__":
    main()
