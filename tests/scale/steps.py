"""A long run, watched from outside: memory and open descriptors of all its processes at every evaluation.

    python -m tests.scale.steps
    python -m tests.scale.steps --steps 200 --eval-freq 50

A small mixture on two domains of the digits, batches of 8 of each, two loader processes. Nothing may grow: a run of
20,000 steps has to end with the memory and the descriptors that it has after its first evaluations.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .processes import Usage, family, total

FINETUNE = Path(__file__).parents[2] / "tools" / "finetune.py"
NETWORK = ("depth=1", "embed_dim=48", "num_heads=2", "moe_layers=(0,)")
COLUMNS = ("step", "processes", "RSS main", "PSS of all", "descriptors main", "of all", "seconds")


def command(folder: Path, steps: int, eval_freq: int) -> list[str]:
    """The run's command line."""
    words = f"--dataset rotated_digits --test-domains 0 1 2 3 --img-size 32 --batch-size 8 --workers 2 --cpu-threads 1 \
        --model gmoe_tiny_patch16 --output {folder.parent} --experiment {folder.name} \
        --steps {steps} --eval-freq {eval_freq} --model-kwargs".split()
    return [sys.executable, str(FINETUNE), *words, *NETWORK]


def watch(folder: Path, steps: int, eval_freq: int, *, seconds: float = 0.2) -> Iterator[tuple[int, list[Usage]]]:
    """Starts a run and looks at its processes whenever a record was written.

    Args:
        folder: Of the run; it must not exist.
        steps: How many.
        eval_freq: Steps between two evaluations.
        seconds: How often records are looked for.

    Yields:
        The number of records, and the processes, the main one first.

    Raises:
        CalledProcessError: The run failed.
    """
    words, seen = command(folder, steps, eval_freq), 0
    with (folder.parent / "steps.log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        while process.poll() is None:
            records = folder / "results.jsonl"
            count = len(records.read_text().splitlines()) if records.exists() else 0
            if count > seen:
                seen = count
                yield count, family(process.pid)
            time.sleep(seconds)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="tests.scale.steps", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--eval-freq", type=int, default=2_000)
    args = parser.parse_args()
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for count, found in watch(Path(folder, "run"), args.steps, args.eval_freq):
            step = min((count - 1) * args.eval_freq, args.steps - 1)
            descriptors = sum(one.descriptors for one in found)
            row = (step, len(found), f"{found[0].rss:.0f}", f"{total(found):.0f}", found[0].descriptors, descriptors)
            cells = (*map(str, row), f"{time.perf_counter() - began:.0f}")
            sys.stdout.write(f"| {' | '.join(cells)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
