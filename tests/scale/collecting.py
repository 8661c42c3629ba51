"""A table of thousands of runs: how long tools/collect_results.py takes to make it, and its memory.

    python -m tests.scale.collecting
    python -m tests.scale.collecting --runs 400

Half of the runs are written with this package's keys, half as DomainBed writes them; each has the 18 evaluations of
5,001 steps on PACS. Accuracies are invented.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from timm_moe_dg.protocols.options import DEFAULTS
from timm_moe_dg.protocols.records import Record
from timm_moe_dg.protocols.run_identity import stamp

from ..invented import invented_records
from .processes import peak

TOOL = Path(__file__).parents[2] / "tools" / "collect_results.py"
MODELS = ("deit_small_patch16_224", "gmoe_small_patch16", "moge_small", "resnet50", "vit_tiny_patch16_224")
ALGORITHMS = ("ERM", "CORAL")
DOMAINBED = ("ERM", "IRM", "GroupDRO", "Mixup", "MLDG", "CORAL", "MMD", "DANN", "CDANN", "VREx")
DOMAINS = ["art_painting", "cartoon", "photo", "sketch"]
STEPS = (*range(0, 5001, 300), 5000)


def invented_run(number: int) -> list[Record]:
    """The records of one run of a grid of 10 rows, 4 held-out domains, 5 trial seeds and 25 draws, twice."""
    rest, row = divmod(number // 2, 10)
    rest, domain = divmod(rest, len(DOMAINS))
    draw, trial = divmod(rest, 5)
    own = {"algorithm": ALGORITHMS[row % 2], "model": MODELS[row // 2], "domains": DOMAINS}
    theirs = {"algorithm": DOMAINBED[row], "output_dir": f"sweep/{number:032x}", "task": "domain_generalization"}
    words = {**DEFAULTS, **stamp(), **own, "experiment": str(number)} if number % 2 else theirs
    common = {"dataset": "PACS", "holdout_fraction": 0.2, "steps": 5001, "seed": number}
    given = {**words, **common, "trial_seed": trial, "hparams_seed": draw}
    return invented_records([domain], num_domains=4, at=STEPS, levels=1024, **given)


def write_runs(root: Path, count: int) -> None:
    """Writes finished runs: args.yaml where this package writes one, results.jsonl and done."""
    for number in range(count):
        folder = root / f"{number:05}"
        folder.mkdir()
        records = invented_run(number)
        if number % 2:
            (folder / "args.yaml").write_text(json.dumps(dict(records[0].args)))
            records = [replace(record, out_loss=(0.5,) * len(DOMAINS)) for record in records]
        (folder / "results.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
        (folder / "done").write_text("done")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="tests.scale.collecting", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_runs(Path(folder), args.runs)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.jsonl"))
        report = peak([sys.executable, str(TOOL), folder])
        sys.stdout.write(f"{args.runs} runs, {size / 2**20:.0f} MiB of records: {report}\n")


if __name__ == "__main__":
    main()
