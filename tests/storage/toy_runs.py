"""Runs that take the steps of tools/finetune.py with a run folder, without a network."""

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file
from torch import tensor

from tests.invented import ARGS, make_record
from timm_moe_dg.storage.files import owned
from timm_moe_dg.storage.run_folder import RunFolder, RunState

STEPS, EVERY = 7, 2
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
        folder = RunFolder(path, {**ARGS, "steps": STEPS}, resume=resume)
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
