"""The command line of tools/finetune.py, with the names that its options may have: known without what they stand for.

Who plans runs checks their options with it, and loads no torch. That these are the names of the rooms where the
methods, schedules and so on are made is held by `tests/protocols/test_command_line.py`.
"""

import argparse

from .options import add_run_options

SCHEDULES = ("cosine", "tanh", "poly")
NAMES = {
    "algorithm": (
        *("ERM", "IRM", "VREx", "GroupDRO", "Mixup", "MLDG", "CORAL", "MMD", "DANN", "CDANN"),
        *("Fish", "Fishr", "RDM", "SD", "MIRO"),
    ),
    "averaging": ("ema", "moving", "swad", "swad_released"),
    "freeze": ("backbone", "routers", "all-but-routers", "all-but-gating"),
    "aux_form": ("vmoe", "tutel"),
    "sched": SCHEDULES,
    "amp_dtype": ("bfloat16", "float16"),
}


def run_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Builds the command line of tools/finetune.py."""
    parser = argparse.ArgumentParser(
        prog="finetune.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_options(parser, NAMES)
    return parser
