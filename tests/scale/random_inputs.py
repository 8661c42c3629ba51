"""Random command lines of all tools, and edited records and configurations: each ends well or with one line.

    python -m tests.scale.random_inputs --lines 300 --edits 50

A traceback, several lines, a control character, or a time above the limit is a finding. `--first N` repeats number N.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import yaml
from accelerate.state import AcceleratorState
from PIL import Image

from tests.load_tool import load_tool
from timm_moe_dg.cli.ending import CTRL_C

MODEL = "--model gmoe_tiny_patch16 --img-size 16 --model-kwargs embed_dim=24 depth=2 num_heads=2 moe_layers=(1,)"
TRAIN = f"{MODEL} --dataset folder --data-dir data -b 2 --steps 2 --eval-freq 1 --output runs --test-domains c"
BEST = "--model local-dir:runs/a/best"
PUSH, RESUME = "push_to_hub {0} --repo-id a/b --dry-run", "finetune --resume {0} --steps 3 --dry-run"
# fmt: off
# Tool -> words before the random ones, and words after them that bound the work
TOOLS = {
    "finetune": (TRAIN, "-j 0 --cpu-threads 1 --dry-run"), "evaluate": (BEST, "-j 0"),
    "predict": (f"{BEST} data", "-j 0"), "report": ("runs/a --output page.html", "-j 0"),
    "collect_results": ("runs", ""), "sweep": ("--datasets folder --data-dir data", "--dry-run"),
    "export": (f"{BEST} --output exported", "--formats torchscript --rounds 2 --batch-size 1"),
    "push_to_hub": ("runs/a --repo-id owner/name", "--dry-run"), "convert_vmoe": ("options", "--output converted"),
    "visualize": ("experts runs/a", ""), "benchmark": ("methods --model test_vit", "--algorithm ERM --rounds 2"),
}
VALUES = [
    "", "0", "-1", "1", "2", "0.5", "nan", "inf", "1e400", "9" * 400, "x", "a", "@1", "@9", "None", "a=b", "a=((", "[1",
    "a" * 256, "../up", "/proc/version", "pipe", "data", "data/metadata.csv", "place_folder", "options.yaml",
    "{", "runs/a", "runs/a/best", "hf-hub:x", "hub:x", "local-dir:x", "\x1b[31m", "a\u202eb", '{"lr": "x"}',
]
CONTENT = [None, True, -1, 0, 7, 0.5, 10**30, float("inf"), "", "x", "a\n\x1b", "\0", [], [1], ["x"], {}, {"x": 1}]
# File of a run -> commands that read it
READERS = {
    "results.jsonl": ["report {0}", "collect_results {0}", "visualize curves {0}", PUSH, RESUME],
    "args.yaml": ["report {0}", "evaluate -j 0 --model {0}", "finetune -c {0}/args.yaml --dry-run", RESUME],
    "best/config.json": ["predict -j 0 data --model {0}", PUSH, "report {0}", "finetune --dry-run --model {0}"],
}
# fmt: on


def prepare() -> None:
    """Fills the working folder: images in folders and in a table, a finished run, a pipe and texts."""
    rows = ["path,label,lon,lat,split,group"]
    for number in range(18):
        label, part = "xy"[number // 3 % 2], ("train", "id_val", "id_test")[number % 3]
        folder = f"{'abc'[number % 3]}/{label}"
        os.makedirs(f"data/{folder}", exist_ok=True)
        Image.effect_noise((16, 16), 50).save(f"data/{folder}/{number}.png")
        rows.append(f"{folder}/{number}.png,{label},1,2,{part},north")
    Path("data", "metadata.csv").write_text("\n".join(rows))
    Path("options.yaml").write_text("steps: 1")
    os.mkfifo("pipe")
    load_tool("finetune").main([*TRAIN.split(), "-j", "0", "--cpu-threads", "1", "--experiment", "a"])


def run(tool: str, words: list[str], limit: int) -> str:
    """Runs a tool, and returns "done", "line" or a finding."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(limit)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            load_tool(tool).main([*words])
    except SystemExit as ended:
        return "line" if str(ended.code).isprintable() and ended.code != CTRL_C else f"FOUND {ended.code!r:.200}"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"FOUND {type(error).__name__} {place.filename}:{place.lineno} {error!s:.200}"
    finally:
        signal.alarm(0)
        AcceleratorState._reset_state(reset_partial_state=True)
    return "done"


def command_line(draw: random.Random) -> list[str]:
    """Draws a tool and up to four of its options, with values that may be of any kind."""
    tool = draw.choice([*TOOLS])
    before, after = (words.split() for words in TOOLS[tool])
    actions = load_tool(tool).build_parser()._actions
    if tool in ("visualize", "benchmark"):
        commands = next(action for action in actions if action.dest == "command")
        actions = commands.choices[before[0]]._actions
    words: list[str] = []
    for action in draw.sample(actions, draw.randint(1, min(4, len(actions)))):
        if action.option_strings and action.dest not in ("compile", "program", "help"):
            number = {0: 0, "?": 1, "*": 2, "+": 2, None: 1}.get(action.nargs, action.nargs)
            choices = [*(action.choices or VALUES), *(VALUES if draw.random() < 0.5 else [])]
            words += [draw.choice(action.option_strings), *map(str, draw.choices(choices, k=int(number or 0)))]
    return [tool, *before, *words, *after]


def edited(draw: random.Random, folder: str) -> list[list[str]]:
    """Copies the run, changes or removes a value of one file at any depth, and returns the commands that read it."""
    name = draw.choice([*READERS])
    path = Path(shutil.copytree("runs/a", folder), name)
    text = path.read_text()
    at = table = yaml.safe_load(text.splitlines()[-1] if name == "results.jsonl" else text)
    key = draw.choice([*table])
    while at[key] and isinstance(at[key], dict | list) and draw.random() < 0.7:
        at = at[key]
        key = draw.choice([*at] if isinstance(at, dict) else range(len(at)))
    at[key] = draw.choice(CONTENT)
    if draw.random() < 0.2:
        del at[key]
    path.write_text((yaml.safe_dump if name == "args.yaml" else json.dumps)(table) + "\n")
    return [line.format(folder).split() for line in READERS[name]]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("lines", 300), ("edits", 50), ("first", 0), ("seed", 0), ("limit", 60)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        os.makedirs(f"{folder}/a/b")
        os.chdir(f"{folder}/a/b")
        prepare()
        for kind, count in (("line", args.lines), ("edit", args.edits)):
            for number in range(args.first, args.first + count):
                draw = random.Random(f"{args.seed} {kind} {number}")
                for tool, *words in [command_line(draw)] if kind == "line" else edited(draw, f"edits/{number}"):
                    result = run(tool, words, args.limit)
                    counts[result[:5]] += 1
                    if result.startswith("FOUND"):
                        sys.stdout.write(f"{kind} {number} {result}: {tool} {shlex.join(words):.500}\n")
    sys.stdout.write(f"{dict(counts)}\n")
    sys.exit(bool(counts["FOUND"]))


if __name__ == "__main__":
    main()
