"""Runs that take the steps of tools/finetune.py with a run folder, without a network, and processes that are killed."""

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import tensor

from tests.invented import ARGS, make_record
from timm_moe_dg.protocols.options import FURTHER_RULES
from timm_moe_dg.storage.files import owned
from timm_moe_dg.storage.run_folder import RunFolder, RunState

STEPS, EVERY = 7, 2
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "shutil.rmtree")
ROLES = {0: (0.4, 0.1), 2: (0.2, 0.3), 4: (0.3, 0.2), 6: (0.1, 0.1)}  # worst group and F1-macro on "ood_val"


def network(step: int) -> Callable[[Path], None]:
    """A function that writes the network of a step."""

    def save(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        save_file({"weight": tensor([float(step)])}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")

    return save


def evaluate(folder: RunFolder, step: int) -> None:
    """Adds the evaluation of a step; that of step 4 is the best."""
    worst, f1 = ROLES[step]
    accuracy = {4: 0.9}.get(step, step / 10)
    roles = {"ood_val": {"accuracy": 0.5, "worst_accuracy": worst, "f1_macro": f1}}
    record = make_record(step=step, out_acc=(accuracy, 0.0, accuracy), roles=roles, args=folder.args)
    folder.add(record, network(step))


def run(path: Path, *, resume: bool = False, can_go_on: bool = False, upto: int = STEPS) -> RunFolder:
    """Takes steps up to one, like the tool. A run that reaches the last step is finished."""
    with owned(path):
        folder = RunFolder(path, {**ARGS, "steps": STEPS, "save_rules": FURTHER_RULES}, resume=resume)
        checkpoint = folder.newest_checkpoint() if resume else None
        last = -1 if checkpoint is None else restore(folder, checkpoint)
        for step in range(last + 1, upto):
            if folder.records:
                state = {"network": {"weight": tensor([float(step)])}}
                folder.checkpoints.save(step, {"step": step, "identity": {}, "shared": state, "per_process": []})
            if step % EVERY == 0:
                evaluate(folder, step)
        if upto == STEPS:
            folder.finish(can_go_on=can_go_on)
    return folder


def restore(folder: RunFolder, checkpoint: RunState) -> int:
    """Returns a folder to a checkpoint, completes the checkpoint's step, and returns that step."""
    step = checkpoint["step"]
    folder.read_back(step)
    folder.cut_back()
    if step % EVERY == 0 and step not in [record.step for record in folder.records]:
        evaluate(folder, step)
    return step


def content(path: Path) -> dict[str, bytes]:
    """Every file of a folder, by name."""
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def killed_at(number: int | None, folder: Path, action: Callable[[], object]) -> int:
    """Does something in another process, which is killed before a file-system event in a folder; None counts them."""
    context = get_context("fork")
    count = context.Value("i", 0, lock=False)
    child = context.Process(target=_act_until, args=(folder, number, count, action))
    child.start()
    child.join()
    if child.exitcode != (0 if number is None else -signal.SIGKILL):
        raise SystemExit(f"event {number}: ended with {child.exitcode}")
    return int(count.value)


def _act_until(folder: Path, number: int | None, count: Any, action: Callable[[], object]) -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and arguments and str(arguments[0]).startswith(str(folder)):
            count.value += 1
            if count.value == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    action()
