"""Kills a run at each of its file-system events, resumes it, and compares the folder with that of an undisturbed run.

python -m tests.storage.crash_points             # all of them
python -m tests.storage.crash_points --every 10
"""

import argparse
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.storage.toy_runs import content, run

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "shutil.rmtree")
# A run that is killed from its start; one whose checkpoint stays; one that is killed while it goes on from step 5
PLANS: dict[str, dict[str, Any]] = {"plain": {}, "extendable": {"can_go_on": True}, "resumed": {"resume": True}}


def differences(folder: Path, every: int, *, can_go_on: bool = False, resume: bool = False) -> tuple[int, list[int]]:
    """Kills a run before every so manieth event.

    Args:
        folder: For the runs.
        every: 1 for all events.
        can_go_on: Whether the finished run keeps a checkpoint.
        resume: Kill it while it goes on from step 5, instead of from its start.

    Returns:
        How many times it was killed, and the events after which the folder differs.
    """
    run(folder / "whole" / "a", can_go_on=can_go_on)
    expected = _lasting(folder / "whole" / "a", can_go_on)
    path = _started(folder / "counted" / "a", resume)
    events = killed_at(None, path.parent, partial(run, path, resume=resume, can_go_on=can_go_on))
    points = range(1, events + 1, every)
    differing = []
    for number in points:
        path = _started(folder / str(number) / "a", resume)
        killed_at(number, path.parent, partial(run, path, resume=resume, can_go_on=can_go_on))
        if not (path / "done").exists():
            run(path, resume=True, can_go_on=can_go_on)
        if _lasting(path, can_go_on) != expected:
            differing.append(number)
    return len(points), differing


def _started(path: Path, resume: bool) -> Path:
    if resume:
        run(path, upto=6)
    return path


def _lasting(path: Path, can_go_on: bool) -> dict[str, bytes]:
    """The files that have to be the same. Checkpoints that a kill after `done` leaves go at the next start."""
    return {name: text for name, text in content(path).items() if can_go_on or not name.startswith("checkpoints/")}


def killed_at(number: int | None, folder: Path, action: Callable[[], object]) -> int:
    """Does something in another process, which is killed before an event in a folder; None counts the events.

    Returns:
        How many events there were.
    """
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


def main(argv: Iterable[str] | None = None) -> None:
    """Runs all of it and prints how many differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1)
    args = parser.parse_args(argv if argv is None else list(argv))
    logging.disable(logging.WARNING)  # each run reports its damaged files
    os.fsync = lambda _: None  # type: ignore[assignment] # a killed process has written what it has
    for name, options in PLANS.items():
        with tempfile.TemporaryDirectory() as folder:
            kills, differing = differences(Path(folder), args.every, **options)
        sys.stdout.write(f"{name}: {kills} kills, {len(differing)} differences {differing or ''}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
