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
import signal
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


def command(processes: int, *words: str) -> list[str]:
    """The script on its own, or in several processes by torch's launcher."""
    launcher = [f"--nproc_per_node={processes}", "--standalone", "-m", "torch.distributed.run"]
    prefix = [] if processes == 1 else [*launcher[2:], *launcher[:2]]
    return [sys.executable, *prefix, str(TOOLS / "finetune.py"), *RUN, *words]


def start(processes: int, *words: str) -> subprocess.Popen:
    """Starts it as a process group of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command(processes, *words),
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen, name: str) -> str:
    """Waits for a run that is to finish; returns what it printed."""
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{name} ended with status {process.returncode}:\n{output[-2000:]}")
    return output


def outcome(run: Path) -> tuple[bytes, bytes, list[dict]]:
    """What has to be identical."""
    rows = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    for row in rows:
        for name in ("step_time", "mem_gb", "args"):
            del row[name]
    best, last = ((run / name / "model.safetensors").read_bytes() for name in ("best", "best_oracle"))
    return best, last, rows


def killed_and_resumed(folder: Path, name: str, delay: float, processes: int, sent: signal.Signals) -> tuple[str, str]:
    """Ends a run after `delay` seconds and goes on with it; returns how it ended and from where it went on."""
    options = ("--output", str(folder), "--experiment", name)
    process = start(processes, *options)
    try:
        process.communicate(timeout=delay)
        return "had finished", "-"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, sent)
        process.communicate()
    output = ended(start(processes, *options, "--resume", "auto"), name)
    found = [line for line in output.splitlines() if "resumed" in line or "afresh" in line]
    return f"status {process.returncode}", found[0] if found else "started afresh"


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
        begin = time.perf_counter()
        process = start(args.processes, "--output", folder, "--experiment", "whole")
        while not Path(folder, "whole").exists() and process.poll() is None:
            time.sleep(0.05)
        begun = time.perf_counter() - begin
        ended(process, "the whole run")
        length = time.perf_counter() - begin
        whole = outcome(Path(folder, "whole"))
        identical = 0
        for number in range(args.kills):
            delay = moments.uniform(begun, length)  # before that it loads its libraries
            name = f"run{number}"
            how, where = killed_and_resumed(
                Path(folder), name, delay, args.processes, signal.Signals[f"SIG{args.signal}"]
            )
            same = outcome(Path(folder, name)) == whole
            identical += same
            say(f"{name}: SIG{args.signal} after {delay:.1f} of {length:.1f} s, {how}; {where}; identical: {same}")
        say(f"{identical} of {args.kills} identical")


if __name__ == "__main__":
    main()
