"""How long every tool takes to say what it does: its imports, beside those of another checkout.

    python -m tests.scale.starting
    python -m tests.scale.starting --against ../older --rounds 5

Processor seconds of `--help`, medians; the checkouts take turns.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[2]


def seconds(root: Path, tool: str) -> float:
    """Processor seconds of one start of a tool of a checkout."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, str(root / "tools" / tool), "--help"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(root)}, cwd=root)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="tests.scale.starting", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each tool")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout")
    parser.add_argument("--tools", nargs="+", default=sorted(path.name for path in (HERE / "tools").glob("*.py")))
    args = parser.parse_args()
    roots = {**({"older": args.against.resolve()} if args.against else {}), "this": HERE}
    sys.stdout.write(f"| tool | {' | '.join(roots)} |\n|{'---|' * (1 + len(roots))}\n")
    for tool in args.tools:
        rounds = [[seconds(root, tool) for root in roots.values()] for _ in range(args.rounds)]
        medians = [f"{statistics.median(values):.2f}" for values in zip(*rounds, strict=True)]
        sys.stdout.write(f"| {tool} | {' | '.join(medians)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
