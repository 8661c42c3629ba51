"""The functions in a Jupyter kernel, as a notebook calls them: train, interrupt, go on, predict, two processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

pytestmark = pytest.mark.slow  # kernels

SETUP = """
import os, signal, threading, time
from pathlib import Path
import numpy as np
from PIL import Image
import timm_moe_dg

SIZE = {"embed_dim": 24, "depth": 2, "num_heads": 2, "patch_size": 8, "moe_layers": (1,), "num_experts": 3}
RUN = dict(model="gmoe_tiny_patch16", model_kwargs=SIZE, img_size=16, batch_size=2, workers=0, cpu_threads=1)
RUN |= dict(output="runs", steps=80, eval_freq=40)
HANDLERS = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
"""
INTERRUPT = """
def interrupt():
    while not Path("runs/a").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)  # as the stop button does

threading.Thread(target=interrupt).start()
"""
PREDICT = """
Image.fromarray(np.zeros((16, 16), dtype=np.uint8)).save("image.png")
len(timm_moe_dg.predict(run, "image.png", workers=0))
"""
LAUNCH = """
import accelerate
os.environ["ACCELERATE_USE_CPU"] = "true"
accelerate.notebook_launcher(lambda: timm_moe_dg.finetune(**{**RUN, "steps": 3}, experiment="two"), num_processes=2)
timm_moe_dg.Run("runs/two").is_finished
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Any]:
    """Runs cells in one kernel, and returns their texts."""
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=300, resources={"metadata": {"path": str(tmp_path)}})

    def cell(source: str) -> str:
        client.nb.cells.append(nbformat.v4.new_code_cell(source))
        done = client.execute_cell(client.nb.cells[-1], len(client.nb.cells) - 1)
        return "".join(str(output.get("text", output.get("data"))) for output in done.outputs)

    with client.setup_kernel():
        yield cell


def test_a_kernel_trains_is_interrupted_goes_on_and_predicts(kernel, tmp_path):
    kernel(SETUP)
    kernel(INTERRUPT)
    with pytest.raises(CellExecutionError, match=r"asked to end; checkpoint: .*finetune\(resume='runs/a'\)"):
        kernel("timm_moe_dg.finetune(**RUN, experiment='a')")
    assert list((tmp_path / "runs" / "a" / "checkpoints").glob("*.pt"))
    assert "True" in kernel("[signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == HANDLERS")
    shown = kernel("run = timm_moe_dg.finetune(resume='runs/a')")
    assert "resumed runs/a after step" in shown
    assert "application/vnd.jupyter.widget-view+json" in shown  # the notebook's progress bar
    assert "True" in kernel("run.is_finished")
    assert "1" in kernel(PREDICT)


def test_two_processes_of_the_notebook_launcher_train_one_run(kernel, tmp_path):
    kernel(SETUP)
    assert "True" in kernel(LAUNCH)
    assert "processes 2, device cpu" in (tmp_path / "runs" / "two" / "log.txt").read_text()
