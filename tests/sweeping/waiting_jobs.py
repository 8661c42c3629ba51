"""Jobs that wait, fail or save as they are told to."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from timm_moe_dg.sweeping.jobs import Job

# Owns its folder, as a run does. On SIGTERM it saves and exits.
SCRIPT = """
import filelock, pathlib, signal, sys, time
folder, seconds, status = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
lock = filelock.FileLock(folder.with_name(f".{folder.name}.lock"))
lock.acquire()
signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(143)))
folder.mkdir(parents=True, exist_ok=True)
print("begun", flush=True)
time.sleep(seconds)
if status:
    sys.exit(f"broken" if status == 1 else status)
(folder / "done").write_text("done")
"""


def make_job(tmp_path: Path, name: str = "a", seconds: float = 0.0, status: int = 0) -> Job:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = (sys.executable, str(script), str(tmp_path / name), str(seconds), str(status))
    return Job(name, command, tmp_path / name, tmp_path / "logs" / f"{name}.log")


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def begun(job: Job) -> bool:
    return job.log.exists() and "\nbegun\n" in job.log.read_text()
