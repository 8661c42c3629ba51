"""A run of the tool that is stopped and resumed ends where one left alone ends, whatever its method carries along.

test_state.py shows of every method and average that its state is all it needs; here the tool keeps that state: a new
optimizer on the way (VREx), random numbers (MLDG), layers and moments of its own (DANN), buffers (Fishr), averages.
"""

import json
import signal

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.load_tool import load_tool
from timm_moe_dg.algorithms import ALGORITHMS, AVERAGING
from timm_moe_dg.finetuning import loop

pytestmark = pytest.mark.slow  # whole runs

STEPS, STOPPED_AFTER = 6, 3
# Penalties set in, and the first window of SWAD ends, on the far side of the stop
HPARAMS = {
    "VREx": {"vrex_penalty_anneal_iters": 4},
    "MLDG": {"n_meta_test": 1},
    "DANN": {"mlp_width": 8},
    "Fishr": {"penalty_anneal_iters": 4},
    "ema": {},
    "swad": {"swad_n_converge": 2},
}


@pytest.fixture(scope="module")
def tool():
    return load_tool("finetune")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Three domains of two classes, dark and light."""
    root = tmp_path_factory.mktemp("images")
    for domain in range(3):
        for label in range(2):
            folder = root / f"domain{domain}" / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (16, 16), (150 * label + 10 * number, 40 * domain, 80)).save(folder / f"{number}.png")
    return root


def run(tool, images, output, name, *words):
    size = ["patch_size=8", "embed_dim=24", "depth=2", "num_heads=2", "moe_layers=(1,)", "num_experts=2"]
    words = [
        *("--dataset", "folder", "--data-dir", str(images), "--model", "gmoe_tiny_patch16", "--model-kwargs", *size),
        *("--img-size", "16", "--steps", str(STEPS), "--checkpoint-freq", "2", "--batch-size", "2", "--lr", "0.01"),
        *("--workers", "0", "--cpu-threads", "1", "--hparams", json.dumps(HPARAMS[name])),
        *("--output", str(output), "--experiment", name, "--resume", "auto", "--holdout-fraction", "0.4", *words),
    ]
    tool.main(words)


def outcome(folder):
    """Records but for their times, and the weights that were kept."""
    records = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for record in records:
        for name in ("step_time", "mem_gb", "args"):
            record.pop(name, None)
    best = next(folder.glob("best*/model.safetensors"))
    return records, load_file(best)


@pytest.mark.parametrize("name", HPARAMS)
def test_a_stopped_run_ends_where_one_that_was_left_alone_ends(name, tool, images, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "draw_learning_curves", lambda *_: None)  # slow, and of no interest here
    method = name if name in ALGORITHMS else "ERM"
    words = ["--algorithm", method, *(["--averaging", name] if name in AVERAGING else [])]
    run(tool, images, tmp_path / "alone", name, *words)

    update, taken = ALGORITHMS[method].update, []

    def stopping(self, context, minibatches):
        taken.append(1)
        if len(taken) == STOPPED_AFTER:
            signal.raise_signal(signal.SIGTERM)
        return update(self, context, minibatches)

    with monkeypatch.context() as patch:
        patch.setattr(ALGORITHMS[method], "update", stopping)
        with pytest.raises(SystemExit):
            run(tool, images, tmp_path / "stopped", name, *words)
        assert len(taken) == STOPPED_AFTER
        run(tool, images, tmp_path / "stopped", name, *words)
        assert len(taken) == STEPS  # it went on, and did not start afresh

    (alone, weights), (stopped, others) = (outcome(tmp_path / kind / name) for kind in ("alone", "stopped"))
    assert stopped == alone
    assert weights.keys() == others.keys()
    assert all(torch.equal(value, others[key]) for key, value in weights.items())
