"""The names of the tools as users type them, and the recipes' folder."""

from pathlib import Path

from ..errors import did_you_mean

_PACKAGE = Path(__file__).parent.parent
_IN_CLONE = not (_PACKAGE / "tools").is_dir()
TOOLS = (_PACKAGE.parent if _IN_CLONE else _PACKAGE) / "tools"
RECIPES = TOOLS / "recipes"
# Modules that tools import at their start, and that come with an extra
_TRAIN = ("accelerate", "psutil", "sklearn", "scipy", "pandas", "tabulate", "tqdm", "matplotlib")
EXTRAS = dict.fromkeys(_TRAIN, "train")
started_as = ""  # such as "timm-moe-dg finetune", if the tool was started so


def program(file: str) -> str:
    """Returns the name of the running tool for messages, such as timm-moe-dg finetune, or its file finetune.py."""
    return started_as or file


def command(name: str, launcher: str = "python") -> str:
    """Returns a tool's command line as users type it here, such as `python tools/report.py` or `timm-moe-dg report`."""
    if _IN_CLONE and not started_as:
        return f"{launcher} tools/{name}.py"
    return f"timm-moe-dg {name}" if launcher == "python" else f"{launcher} -m timm_moe_dg {name}"


def recipe_file(text: str) -> str:
    """Returns the path of a YAML file, or of the recipe of that name, such as gmoe_small."""
    recipe = RECIPES / f"{text}.yaml"
    return str(recipe) if recipe.is_file() and not Path(text).is_file() else text


def nearest_recipe(text: str) -> str:
    """Returns a hint at the recipe whose name looks most like the one of a file that does not exist, or nothing."""
    if Path(text).exists():
        return ""
    question = did_you_mean(Path(text).stem, [path.stem for path in RECIPES.glob("*.yaml")])
    return question and f"; {question}"
