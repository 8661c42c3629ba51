"""A run of a few steps on digits, and a sweep of such runs: which of its seconds are training steps, and which are not.

    python -m tests.scale.short_run
    python -m tests.scale.short_run --against ../older --rounds 5
    python -m tests.scale.short_run --launch --rounds 3
    python -m tests.scale.short_run --sweep 20 --against ../older

Another checkout takes turns with this one, A B A B; what is shown are medians, with quartiles for the sums. Parts of a
run are those of tools/finetune.py, told apart by wrapping its functions once they are imported. Each has wall-clock
seconds and processor seconds of the main process; those of the loaders' workers are in the last line alone.
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parents[2]
RUN = ("--dataset", "rotated_digits", "--model", "deit_tiny_patch16_224")
PARTS = ("start-up", "data", "network", "steps", "evaluation", "records", "picture", "end")
# Functions of the loop, and methods of the run -> the part that their time belongs to, without that of parts within
LOOP = {
    "make_plan": "data",
    "join_processes": "network",
    "build_model": "network",
    "start": "network",
    "train": "steps",
    "draw_learning_curves": "picture",
}
LAUNCH = ("-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1", "--dynamo_backend", "no")
INSIDE = "--inside"  # first word of the process that is timed
METHODS = {"evaluate": "evaluation", "_record_evaluation": "records", "save_checkpoint": "records", "close": "records"}
Seconds = dict[str, tuple[float, float]]


class Clock:
    """Adds up wall and processor seconds by part; time within an inner part is the inner part's alone."""

    def __init__(self, began: float) -> None:
        self.parts = dict.fromkeys(PARTS, (0.0, 0.0))
        self._running = ["start-up"]
        self._since = (began, 0.0)

    def _settle(self) -> None:
        now = (time.monotonic(), time.process_time())
        wall, cpu = self.parts[self._running[-1]]
        self.parts[self._running[-1]] = (wall + now[0] - self._since[0], cpu + now[1] - self._since[1])
        self._since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what is done within as this part."""
        self._settle()
        self._running.append(name)
        try:
            yield
        finally:
            self._settle()
            self._running.pop()

    def wrap(self, owner: ModuleType | type, name: str, part: str) -> None:
        """Counts a function's time as this part."""
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> object:
            with self.part(part):
                return function(*args, **kwargs)

        setattr(owner, name, timed)


def inside(root: str, began: str, report: str, *words: str) -> None:
    """Is the process of a run: tools/finetune.py of a checkout, timed; `words` are its command line."""
    clock = Clock(float(began))
    spec = importlib.util.spec_from_file_location("finetune", Path(root, "tools", "finetune.py"))
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    loop = sys.modules["timm_moe_dg.finetuning.loop"]
    for name, part in LOOP.items():
        clock.wrap(loop, name, part)
    for name, part in METHODS.items():
        clock.wrap(loop.FineTuning, name, part)
    sys.argv = ["finetune.py", *words]
    with clock.part("end"):
        tool.main()
    Path(report).write_text(json.dumps([clock.parts, time.monotonic()]))


def one_run(root: Path, steps: int, launch: bool) -> Seconds:
    """Runs tools/finetune.py of a checkout once; the end of the process and of the launcher are its "end"."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        words = [*RUN, "--steps", str(steps), "--output", folder, "--experiment", "run"]
        start = [*LAUNCH, __file__] if launch else [__file__]
        began, before = time.monotonic(), processor()
        command = [sys.executable, *start, INSIDE, str(root), str(began), str(report), *words]
        _run(command, root)
        parts, left = json.loads(report.read_text())
        ended = time.monotonic()
        seconds = {name: (wall, cpu) for name, (wall, cpu) in parts.items()}
        seconds["end"] = (seconds["end"][0] + ended - left, seconds["end"][1])
        inner = seconds["steps"]
        seconds["all"] = (ended - began, processor() - before)
        seconds["no steps"] = (ended - began - inner[0], seconds["all"][1] - inner[1])
    return seconds


def one_sweep(root: Path, steps: int, runs: int) -> Seconds:
    """Runs as many runs with tools/sweep.py of a checkout, one after the other; steps are those that they record."""
    with tempfile.TemporaryDirectory() as folder:
        seeds = map(str, range(runs))
        axes = ["--datasets", RUN[1], "--models", RUN[3], "--domains", "0", "--trial-seeds", *seeds]
        began, before = time.monotonic(), processor()
        command = [sys.executable, str(root / "tools" / "sweep.py"), *axes, "--output", folder]
        _run([*command, "--", "--steps", str(steps)], root)
        took, cpu = time.monotonic() - began, processor() - before
        in_steps = sum(map(seconds_in_steps, Path(folder).glob("*/results.jsonl")))
    return {"steps": (in_steps, math.nan), "all": (took, cpu), "no steps": (took - in_steps, math.nan)}


def seconds_in_steps(results: Path) -> float:
    """From each record's mean over the steps since the one before it."""
    records = [json.loads(line) for line in results.read_text().splitlines()]
    last = [-1, *(record["step"] for record in records)]
    return sum(record["step_time"] * (record["step"] - before) for record, before in zip(records, last, strict=False))


def processor() -> float:
    """Processor seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(command: Sequence[str], root: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(root), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{root}: {done.stderr[-2000:]}")


def show(found: dict[str, list[Seconds]]) -> None:
    """Prints a row for each part, with two columns for each checkout."""
    sys.stdout.write(f"| seconds | {' | '.join(f'{name}: wall | processor' for name in found)} |\n")
    sys.stdout.write(f"|{'---|' * (1 + 2 * len(found))}\n")
    for part in next(iter(found.values()))[0]:
        cells = [_cell([run[part][kind] for run in runs]) for runs in found.values() for kind in (0, 1)]
        sys.stdout.write(f"| {part} | {' | '.join(cells)} |\n")


def _cell(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}"
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="tests.scale.short_run", description=__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="runs of each checkout")
    add("--steps", type=int, default=20)
    add("--against", type=Path, metavar="DIR", help="another checkout, which takes turns with this one")
    add("--launch", action="store_true", help="start the run by accelerate launch")
    add("--sweep", type=int, metavar="N", help="time a sweep of so many runs instead")
    args = parser.parse_args()
    roots = {"older": args.against.resolve()} if args.against else {}
    found: dict[str, list[Seconds]] = {name: [] for name in (*roots, "this")}
    for _ in range(args.rounds):
        for name, root in {**roots, "this": HERE}.items():
            one = one_sweep(root, args.steps, args.sweep) if args.sweep else one_run(root, args.steps, args.launch)
            found[name].append(one)
    show(found)


if __name__ == "__main__":
    if sys.argv[1:2] == [INSIDE]:
        inside(*sys.argv[2:])
    else:
        main()
