"""Kills a run at random moments with SIGKILL, resumes each, and compares with the run that was left alone; by hand.

    python -m tests.tools.kill_and_resume                      # 20 kills, one process
    python -m tests.tools.kill_and_resume --kills 3 --processes 2 --signal TERM

The run has worker processes, augmentation, dropout, router noise, stochastic depth and gradient accumulation. Identical
means: weights of the last evaluation and of the selected one bit for bit, and every record but for its times.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.load_tool import TOOLS

ROOT = TOOLS.parent
MODEL = ["--model", "gmoe_tiny_patch16", "--model-kwargs", "embed_dim=48", "depth=3", "num_heads=3", "moe_layers=(1,)"]
RUN = [
    *(*MODEL, "num_experts=3", "drop_rate=0.1", "expert_drop=0.1", "router_noise=1.0", "--drop-path", "0.2"),
    *("--steps", "120", "--checkpoint-freq", "30", "--save-freq", "4", "--batch-size", "4", "--lr", "0.001"),
    *("--grad-accum-steps", "2", "--workers", "2", "--cpu-threads", "1", "--sched", "cosine"),
]


def start(processes: int, *words: str) -> list[subprocess.Popen]:
    """Starts the script, once for each of its processes, as a process group of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        world = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    started: list[subprocess.Popen] = []
    for rank in map(str, range(processes)):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": str(processes), **world}
        process = subprocess.Popen(
            [sys.executable, str(TOOLS / "finetune.py"), *RUN, *words],
            env={**environment, **(ranks if processes > 1 else {})},
            process_group=started[0].pid if started else 0,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
    return started


def ended(started: list[subprocess.Popen], name: str) -> str:
    """Waits for a run that is to finish; returns what its first process printed."""
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{name} ended with status {started[0].returncode}:\n{outputs[0][-2000:]}")
    return outputs[0]


def wait_for(folder: Path, started: list[subprocess.Popen]) -> None:
    """Waits until a run has its folder, and so its first evaluation."""
    while not folder.exists() and started[0].poll() is None:
        time.sleep(0.02)


def outcome(run: Path) -> tuple[bytes, bytes, list[dict]]:
    """What has to be identical."""
    rows = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    for row in rows:
        for name in ("step_time", "mem_gb", "args"):
            del row[name]
    best, last = ((run / name / "model.safetensors").read_bytes() for name in ("best", "best_oracle"))
    return best, last, rows


def killed_and_resumed(folder: Path, name: str, delay: float, processes: int, sent: signal.Signals) -> str:
    """Ends a run some seconds after its first evaluation and goes on with it; returns what happened."""
    options = ("--output", str(folder), "--experiment", name)
    started = start(processes, *options)
    wait_for(folder / name, started)
    time.sleep(delay)
    os.killpg(started[0].pid, sent)
    for process in started:
        process.communicate()
    if (folder / name / "done").exists():  # it was faster than the first run
        shutil.rmtree(folder / name)
        return killed_and_resumed(folder, name, delay / 2, processes, sent)
    output = ended(start(processes, *options, "--resume", "auto"), name)
    lines = [line for line in output.splitlines() if "resumed" in line or "afresh" in line]
    return f"status {started[0].returncode}; {lines[0].replace(str(folder), '...') if lines else 'started anew'}"


def say(line: str) -> None:
    """Prints at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Runs all of it and says how many were identical."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--signal", default="KILL", choices=("KILL", "TERM"))
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    moments = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        started = start(args.processes, "--output", folder, "--experiment", "whole")
        wait_for(Path(folder, "whole"), started)
        begin = time.perf_counter()
        ended(started, "the whole run")
        length = time.perf_counter() - begin
        whole = outcome(Path(folder, "whole"))
        identical = 0
        for number in range(args.kills):
            delay = moments.uniform(0, length)
            name, sent = f"run{number}", signal.Signals[f"SIG{args.signal}"]
            what = killed_and_resumed(Path(folder), name, delay, args.processes, sent)
            same = outcome(Path(folder, name)) == whole
            identical += same
            say(f"{name}: {sent.name} after {delay:.1f} of {length:.1f} s of training, {what}; identical: {same}")
        say(f"{identical} of {args.kills} identical")


if __name__ == "__main__":
    main()
