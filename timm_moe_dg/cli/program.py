"""The names of the tools as users type them, and the recipes' folder."""

from pathlib import Path

from timm_moe_dg_command import COMMANDS, PROGRAM, TOOLS

RECIPES = TOOLS / "recipes"
by_command = TOOLS.parent.name == "timm_moe_dg"  # an installed package has no other way to start a tool
_NAMES = {file: name for name, (file, _) in COMMANDS.items()}


def program(file: str) -> str:
    """Returns a tool's name for messages, such as finetune.py, or timm-moe-dg finetune if it was started so."""
    return f"{PROGRAM} {_NAMES[file]}" if by_command and file in _NAMES else file


def command(name: str, launcher: str = "python") -> str:
    """Returns a tool's command line as users type it here, such as `python tools/report.py` or `timm-moe-dg report`."""
    if not by_command:
        return f"{launcher} tools/{COMMANDS[name][0]}"
    return f"{PROGRAM} {name}" if launcher == "python" else f"{launcher} -m timm_moe_dg {name}"


def recipe_file(text: str) -> str:
    """Returns the path of a YAML file, or of the recipe of that name, such as gmoe_small."""
    recipe = RECIPES / f"{text}.yaml"
    return str(recipe) if recipe.is_file() and not Path(text).is_file() else text
