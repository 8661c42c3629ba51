"""Runs the commands of a page and writes what they print into its ```text blocks, so that no output is typed.

    python -m tests.write_outputs docs/start/own_photos.md  # shortened runs, as the test makes them
    python -m tests.write_outputs --full README.md          # the commands as printed

A ```text block holds the output of the ```bash or ```python block before it. Begin with an empty ```text block, which
the script fills. Then put a line of `...` for lines that nobody needs, and end a long line early with ` ...`. Later
calls keep this form and refresh the rest. tests/test_docs_outputs.py (slow) runs the same commands and compares.
Numbers, times and widths of columns may differ. Text that is no output stands in fences of another name, or of none.

Blocks without a ```text block are not run. Comments above a block, each in lines of its own, change this:

    <!-- before: COMMAND -->            runs COMMAND first, unseen, such as `python -m tests.page_data hospitals photos`
                                        for images, or a short training whose run the page reads
    <!-- shared: COMMAND -->            likewise in an empty folder, once for all pages, which get copies of its files
    <!-- run -->                        runs the block below, which has no ```text block
    <!-- file: NAME -->                 writes the block below to a file
    <!-- short: finetune --steps 3 -->  adds options to `timm-moe-dg finetune` from here on, except with --full; say so
                                        on the page wherever its output shows them
    <!-- alike: benign malignant -->    these words may stand for each other on the page, such as predicted classes

The commands of a page run in one bash and an empty folder, where `tools` and `examples` lead to the clone. `pip` does
nothing. The Hub is offline, with random weights of DeiT-Ti and DeiT-S in its cache, so that accuracies from
`--pretrained` are no results. Commands that need a GPU, Slurm or a download have no ```text block.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory

import timm

from tests.hub_server import fill_cache
from tests.quick_python import quick_python

ROOT = Path(__file__).parent.parent
IMPORTED = ("timm_moe_dg.*", "accelerate", "matplotlib.pyplot", "pandas", "scipy.stats", "sklearn.manifold")
DENSE = ("deit_tiny_patch16_224.fb_in1k", "deit_small_patch16_224.fb_in1k")
BLOCK = re.compile(r"^((?:<!-- .*? -->\n+)*)```([^`\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!-- (before|shared|run|file|short|alike)(?:: (.*?))? -->", re.DOTALL)
# Digests and numbers, then rules and widths of columns
MASKS = ((r"\b(?=\w*\d)[0-9a-f]{7,}\b|[-+]?\d+(?:[.,:-]\d+)*(?:e[+-]\d+)?", "0"), (r"--+", "--"), (r"\s+", " "))
PROGRESS = re.compile(r"^\S+: \d+/\d+ steps.*\n", re.MULTILINE)  # terminals show a bar
SEPARATOR = "\x1e"
BEGIN = f"""exec 2>&1
declare -A short
timm-moe-dg() {{
  PYTHONPATH=$PYTHONPATH:{ROOT} $PAGE_PYTHON -m timm_moe_dg "$@" ${{short[${{1:-none}}]}}
}}
pip() {{ :; }}
shared() {{
  local folder=$SHARED/$(md5sum <<< "$1 ${{short[finetune]}}" | cut -c 1-32)
  [ -d $folder ] || (mkdir -p $folder && cd $folder && eval "$1")
  cp -a $folder/. .
}}
"""


def script_of(page: str, full: bool = False) -> tuple[str, list[re.Match[str]]]:
    """Returns the bash commands of a page, with separators around each output to compare, and the blocks for these."""
    parts, shown = [BEGIN], []
    blocks = list(BLOCK.finditer(page))
    for block, following in zip_longest(blocks, blocks[1:]):
        marks, language, body = block.groups()
        for kind, value in MARK.findall(marks):
            if kind == "before":
                parts.append(value)
            elif kind == "shared":
                parts.append(f"shared {quote(value)}")
            elif kind == "short" and not full:
                tool, _, options = value.partition(" ")
                parts.append(f"short[{tool}]={quote(options)}")
            elif kind == "file":
                parts.append(f"cat > {value} <<'END_OF_FILE'\n{body}END_OF_FILE")
        command = body if language == "bash" else f"python - <<'END_OF_FILE'\n{body}END_OF_FILE"
        if language in ("bash", "python") and following and following[2] == "text":
            parts.append(f"printf '{SEPARATOR}'\n{command}\nprintf '{SEPARATOR}'")
            shown.append(following)
        elif "<!-- run -->" in marks:
            parts.append(command)
    return "\n".join(parts), shown


@contextmanager
def page_environment() -> Iterator[dict[str, str]]:
    """Yields the environment of pages' commands, with a Python that has imported the package and a cache of weights."""
    with TemporaryDirectory() as folder:
        for name in DENSE:
            fill_cache(Path(folder, "hub"), f"timm/{name}", timm.create_model(name).state_dict())
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "100"}
        environment["PYTHONWARNINGS"] = "ignore:Creating legend"  # matplotlib's, if the machine is busy
        environment.setdefault("OMP_NUM_THREADS", "1")  # pages are tested beside other tests
        environment |= {"HF_HUB_CACHE": f"{folder}/hub", "HF_HUB_OFFLINE": "1", "SHARED": f"{folder}/shared"}
        with quick_python(*IMPORTED, **environment) as environment["PAGE_PYTHON"]:
            yield environment


def outputs_of(script: str, environment: dict[str, str]) -> list[str]:
    """Runs a page's commands; returns what is printed outside (even positions) and inside (odd) of the separators."""
    with TemporaryDirectory() as folder:
        for name in ("tools", "examples"):
            Path(folder, name).symlink_to(ROOT / name)
        done = subprocess.run(["bash", "-c", script], env=environment, cwd=folder, capture_output=True, text=True)
        text = done.stdout.replace(f"{folder}/", "").replace(f"{ROOT}/", "")
        text = text.replace(environment.get("PAGE_PYTHON", sys.executable), "python")
        return [PROGRESS.sub("", part) for part in text.split(SEPARATOR)]


def alike_words(page: str) -> list[str]:
    """Returns the words of a page that may stand for each other."""
    return [word for kind, words in MARK.findall(page) if kind == "alike" for word in words.split()]


def mask(line: str, alike: Sequence[str] = ()) -> str:
    """Returns a line without what may differ between two runs."""
    for pattern, replacement in (*MASKS, *((rf"\b{re.escape(word)}\b", "WORD") for word in alike)):
        line = re.sub(pattern, replacement, line)
    return line.rstrip()


def refreshed(block: str, output: str, alike: Sequence[str] = ()) -> str | None:
    """Returns a block with the numbers of an output, or None where its lines are not the output's."""
    lines, actual = block.splitlines(), output.splitlines()
    pattern = ""
    for line in lines:
        if line.strip() == "...":
            pattern += r"((?:.*\n)*)"
        else:
            start, cut, _ = line.partition(" ...") if line.endswith(" ...") else (line, "", "")
            pattern += re.escape(mask(start, alike)) + (".*\n" if cut else "\n")
    match = re.fullmatch(pattern, "".join(f"{mask(line, alike)}\n" for line in actual))
    if match is None:
        return None
    position, gaps, result = 0, iter(match.groups()), []
    for line in lines:
        if line.strip() == "...":
            position += next(gaps).count("\n")
            result.append(line)
            continue
        fresh = actual[position].rstrip()
        if line.endswith(" ..."):
            start = mask(line.removesuffix(" ..."), alike)
            ends = [end for end in range(len(fresh) + 1) if mask(fresh[:end], alike) == start]
            fresh = f"{fresh[: ends[-1]].rstrip()} ..."
        result.append(fresh)
        position += 1
    return "".join(f"{line}\n" for line in result)


def write_outputs(page: Path, environment: dict[str, str], full: bool) -> None:
    """Rewrites the blocks of a page; an output that has lost its form is written whole."""
    text = page.read_text()
    script, shown = script_of(text, full)
    outputs = outputs_of(script, environment)
    for block, output in reversed(list(zip(shown, outputs[1::2], strict=True))):
        fresh = refreshed(block[3], output, alike_words(text))
        if fresh is None:
            sys.stdout.write(f"{page}: written whole:\n{output}\n")
        start, end = block.span(3)
        text = text[:start] + (output if fresh is None else fresh) + text[end:]
    page.write_text(text)
    sys.stdout.write("".join(outputs[::2]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--full", action="store_true", help="leave out the options of `short` comments")
    arguments = parser.parse_args()
    with page_environment() as environment:
        for page in arguments.pages:
            write_outputs(page, environment, arguments.full)
