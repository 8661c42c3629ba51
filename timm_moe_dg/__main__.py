"""The command `timm-moe-dg`, which runs the tools by name; `python -m timm_moe_dg` is the same."""

import runpy
import sys
from collections.abc import Sequence

from . import __version__
from .cli import tool
from .errors import MissingDependencyError, did_you_mean

PROGRAM = "timm-moe-dg"
# Command -> file below tools/, and what it does
COMMANDS = {
    "finetune": ("finetune.py", "fine-tune a model with some domains held out"),
    "compare": ("compare.py", "compare rows on your data, and say which one to take"),
    "evaluate": ("evaluate.py", "score a model: accuracy, calibration and confusions by domain"),
    "predict": ("predict.py", "predict the classes of image files, as a CSV file"),
    "demo": ("demo.py", "serve a page on which people try a model"),
    "report": ("report.py", "write an HTML page about a run or a sweep"),
    "visualize": ("visualize.py", "draw experts, attention and learning curves of a run"),
    "export": ("export.py", "export a model to ONNX and torch.export"),
    "push": ("push_to_hub.py", "publish a model on the Hugging Face Hub"),
    "sweep": ("sweep.py", "run a protocol: all held-out domains, models, methods and seeds"),
    "average": ("average.py", "average the weights or the predictions of finished runs"),
    "tables": ("collect_results.py", "print tables of finished runs"),
    "benchmark": ("benchmark.py", "measure time and memory of models"),
    "tiles": ("tiles.py", "cut a georeferenced scene into labeled tiles"),
}


def listing() -> str:
    """Returns the list of commands, with a line for each."""
    lines = [f"  {name:<10} {words}" for name, (_, words) in COMMANDS.items()]
    usage = f"usage: {PROGRAM} COMMAND [options], for example {PROGRAM} finetune --help"
    return "\n".join([usage, "", "commands:", *lines])


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command, or lists the commands if there are no arguments."""
    command, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(listing())
        return
    if command == "--version":
        print(__version__)
        return
    if command not in COMMANDS:
        remedy = did_you_mean(command, COMMANDS) or f"choose one of {', '.join(COMMANDS)}"
        raise SystemExit(f"{PROGRAM}: {command!r} is not a command; {remedy}")
    tool.started_as = f"{PROGRAM} {command}"
    path = str(tool.TOOLS / COMMANDS[command][0])
    sys.argv = [path, *words]
    try:
        with tool.needs_train(f"{PROGRAM} {command}"):
            # As __main__, so that processes that a tool spawns import it again, and not this module
            runpy.run_path(path, run_name="__main__")
    except MissingDependencyError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
