"""Lines of "ok" and "not ok" of scripts that are run by hand, with the commands that docs/guides/slurm.md shows."""

import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guides" / "slurm.md"


class Checks:
    """Says what holds, one line each, and counts what does not."""

    def __init__(self) -> None:
        self.failed = 0
        self._start = time.monotonic()

    def say(self, holds: bool, what: str) -> bool:
        """Prints one line at once, with the seconds since the start."""
        self.failed += not holds
        sys.stdout.write(f"{'ok' if holds else 'not ok'}  {what}  ({time.monotonic() - self._start:.0f} s)\n")
        sys.stdout.flush()
        return holds


def outcome(run: Path) -> tuple[bytes, bytes, list[dict]]:
    """The weights of both saved networks, and every record but for its times: what a resumed run has to repeat."""
    rows = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    for row in rows:
        for name in ("step_time", "mem_gb", "args"):
            del row[name]
    best, last = ((run / name / "model.safetensors").read_bytes() for name in ("best", "best_oracle"))
    return best, last, rows


def wait_until(condition: Callable[[], bool], seconds: float = 240.0) -> bool:
    """Whether something comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.3)
    return True


def page_lines(text: str) -> list[str]:
    """The command lines of a page's blocks of bash, continued lines joined."""
    blocks = [part.split("```")[0] for part in text.split("```bash\n")[1:]]
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line]


def shown_command(start: str, **places: object) -> list[str]:
    """The one command of docs/guides/slurm.md that starts with some words, its placeholders replaced.

    Args:
        start: The beginning of one line.
        places: Word in capitals -> what stands there; several words are split.
    """
    (line,) = [line for line in page_lines(PAGE.read_text()) if line.startswith(start)]
    for name, value in places.items():
        line = line.replace(name, str(value))
    return shlex.split(line)
