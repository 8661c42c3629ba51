"""Two machines of accelerate's launcher on 127.0.0.1: one is killed, the other ends, both go on; see run.sh.

A machine is a launcher and what it has started; killed means SIGKILL for all of it. "Same bits" are the weights of both
saved networks and every record but for its times, against a run of two machines that were left alone.
"""

import os
import re
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.checks import ROOT, Checks, outcome, shown_command, wait_until

SIZE = ["embed_dim=24", "depth=2", "num_heads=2", "moe_layers=(1,)", "num_experts=2", "drop_rate=0.1"]
TRAINED = ["--model-kwargs", *SIZE, "--img-size", "16", "--batch-size", "4", "--lr", "0.001", "--save-freq", "10"]
TRAINED += ["--eval-freq", "60", "--workers", "0", "--cpu-threads", "1", "--steps", "121"]
ENVIRONMENT = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
WITHIN = 30.0  # seconds


class Machine:
    """One of two.

    Args:
        rank: 0 for the one that both connect to.
        port: Of that one.
        output: Folder of all runs.
    """

    def __init__(self, rank: int, port: int, output: Path) -> None:
        places = {"RANK": rank, "ADDRESS": "127.0.0.1", "29500": port}
        words = shown_command("accelerate launch --multi_gpu --num_machines 2", **places)
        self._said = (output.parent / f"machine{rank}-{port}.log").open("w+")
        self._launcher = subprocess.Popen(
            [*words, *TRAINED, "--output", str(output)],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=self._said,
            stderr=subprocess.STDOUT,
        )

    def workers(self) -> list[psutil.Process]:
        """What the launcher has started."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._launcher.pid).children(recursive=True)
        return []

    def kill(self) -> None:
        """Ends the machine without a word."""
        workers = self.workers()
        self._launcher.kill()
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()

    def status(self, seconds: float = 300.0) -> int | None:
        """The launcher's status; None if it does not end in time."""
        try:
            return self._launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def lines(self) -> list[str]:
        """What the tool said about its end; the launcher adds what it has to say."""
        self._said.seek(0)
        return re.findall(r"^finetune\.py: .*$|^Traceback.*finetune.*$", self._said.read(), re.MULTILINE)


def two(output: Path) -> tuple[Machine, Machine]:
    """Starts both machines on a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return Machine(0, port, output), Machine(1, port, output)


def whole(output: Path) -> bool:
    """Runs both to their end; whether they got there."""
    statuses = [machine.status() for machine in two(output)]
    return statuses == [0, 0]


def killed_and_resumed(output: Path, rank: int, checks: Checks) -> None:
    """Kills one machine in the middle, looks at the other, and goes on with both."""
    run = output / "two"
    machines = two(output)
    checks.say(wait_until(lambda: len(list(run.glob("checkpoints/*.pt"))) > 1), f"machine {rank}: both train")
    other = machines[1 - rank]
    start = time.monotonic()
    machines[rank].kill()
    status = other.status(WITHIN)
    ended = f"machine {rank} killed: the other ended with status {status} after {time.monotonic() - start:.1f} s"
    checks.say(status not in (None, 0) and not (run / "done").exists(), ended)
    machines[rank].status(WITHIN)
    checks.say(
        len(other.lines()) == 1 and "num_processes=2: another process" in other.lines()[0], f"it said: {other.lines()}"
    )
    checks.say(whole(output), "the same two commands go on to the end")


def main() -> None:
    """Runs all of it; the status is the number of lines that say "not ok"."""
    checks = Checks()
    with tempfile.TemporaryDirectory() as work:
        checks.say(whole(Path(work, "whole")), "two machines train one run, left alone")
        expected = outcome(Path(work, "whole", "two"))
        for rank in (1, 0):
            output = Path(work, f"killed{rank}")
            killed_and_resumed(output, rank, checks)
            checks.say(outcome(output / "two") == expected, "same bits as the run that was left alone")
    raise SystemExit(checks.failed)


if __name__ == "__main__":
    main()
