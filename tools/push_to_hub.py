r"""Publishes a model on the Hugging Face Hub, with a card made from its records.

    timm-moe-dg push output/RUN --repo-id OWNER/NAME --dry-run
    timm-moe-dg push output/RUN --repo-id OWNER/NAME
    timm-moe-dg push --upcycled gmoe_small_patch16 --repo-id OWNER/NAME

The token comes from HF_TOKEN or `hf auth login`. All files go into one
commit. The folder that is sent stays in output/hub/OWNER--NAME.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from timm_moe_dg.cli.text import code, one_line
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.cli.values import key_value, model_source, positive_int, run_folder, seed_number
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.hub.card import write_card
from timm_moe_dg.hub.folder import Origin, fill_from_network, fill_from_run, hub_link, load_folder, published_source
from timm_moe_dg.hub.push import push_folder, push_space, write_checksums, write_space
from timm_moe_dg.networks.calibration import find_calibration
from timm_moe_dg.networks.trained import load_trained
from timm_moe_dg.storage.files import replaced
from timm_moe_dg.storage.run_folder import save_calibration

CARDS = Path(__file__).parent.parent / "hub_cards"


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("push_to_hub.py", __doc__, "[RUN] --repo-id OWNER/NAME [options]")
    group = parser.add_argument_group("what to publish (one of RUN, --model, --upcycled)")
    add = group.add_mutually_exclusive_group(required=True).add_argument
    run = "folder of a finished run, whose best/ is published"
    add("run", nargs="?", type=run_folder, metavar="RUN", help=run)
    source = "local-dir:FOLDER, hf-hub:OWNER/NAME, or a timm model whose weights are in --initial-checkpoint"
    add("--model", type=model_source, metavar="NAME", help=source)
    add("--upcycled", metavar="NAME", help="registered model to publish with the weights of its dense source")
    add = group.add_argument
    add("--initial-checkpoint", metavar="FILE", help="weights of --model with classifier; dense weights are upcycled")
    add("--img-size", type=positive_int, metavar="PIXELS", help="side of the input (default: that of the model)")
    pairs = "model arguments, such as num_experts=4 'moe_layers=(8,10)'"
    add("--model-kwargs", type=key_value, nargs="*", default=[], metavar="KEY=VALUE", help=pairs)
    seed = "random seed of --upcycled, for its routers (default: %(default)s)"
    add("--seed", type=seed_number, default=0, metavar="N", help=seed)
    name = "license of the weights, as a Hub identifier (default: as the initial weights, or unknown)"
    add("--license", metavar="ID", help=name)
    group = parser.add_argument_group("destination")
    add = group.add_mutually_exclusive_group().add_argument
    add("--revision", metavar="BRANCH", help="branch, created if needed (default: main)")
    add("--create-pr", action="store_true", help="open a pull request instead of changing the main branch")
    add = group.add_argument
    add("--repo-id", required=True, metavar="OWNER/NAME", help="repository, created if needed")
    add("--private", action="store_true", help="create a private repository")
    add("--replace-model", action="store_true", help="replace another architecture, other classes or edited files")
    report = "also publish the run's report.html, which shows some of its images"
    add("--with-report", action="store_true", help=report)
    space = "also publish a Space of this name, a page on which people try the model"
    add("--with-space", action="store_true", help=space)
    add("--dry-run", action="store_true", help="write and list the folder, and send nothing")
    add("--output", default="output", metavar="DIR", help="write the folder to DIR/hub (default: %(default)s)")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Refuses contradictory arguments before anything is loaded."""
    if args.initial_checkpoint and not args.model:
        raise ArgumentError.of("initial_checkpoint", args.initial_checkpoint, "needs --model NAME")
    if args.with_space and (args.create_pr or args.revision):
        remedy = "needs the model on its main branch; leave out --revision, --create-pr"
        raise ArgumentError.of("with_space", True, remedy)
    try:
        validate_repo_id(args.repo_id)
    except HFValidationError as error:
        raise ArgumentError.of("repo_id", args.repo_id, str(error)) from error
    if args.repo_id.count("/") != 1:
        raise ArgumentError.of("repo_id", args.repo_id, "give OWNER/NAME")


def fill(folder: Path, args: argparse.Namespace) -> Origin:
    """Writes weights, configuration and records, and returns the origin of the weights."""
    if args.run:
        return fill_from_run(folder, args.run, args.with_report)
    torch.manual_seed(args.seed)
    options = {"img_size": args.img_size, "model_kwargs": dict(args.model_kwargs)}
    name, weights = args.upcycled or args.model, args.initial_checkpoint
    network = load_trained(name, pretrained=bool(args.upcycled), initial_checkpoint=weights, **options)
    fill_from_network(folder, network)
    if calibration := find_calibration(name, network):
        save_calibration(calibration, folder)
    base_model = None if weights else published_source(name, options["model_kwargs"])
    start = hub_link(base_model) if base_model else "a local model"
    start = f"the file {code(Path(weights).name)}" if weights else start
    return Origin(start, base_model, upcycled=bool(args.upcycled))


def prepare(args: argparse.Namespace) -> Path:
    """Writes the folder to send, in place of an earlier one, and returns its path."""
    target = Path(args.output, "hub", args.repo_id.replace("/", "--"))
    with replaced(target) as folder:
        origin = fill(folder, args)
        network = load_folder(args.run / "best" if args.run else folder)
        write_card(folder, network, args.repo_id, origin, CARDS, args.license)
        write_checksums(folder)
    return target


def describe(folder: Path, args: argparse.Namespace, kind: str = "") -> str:
    """Lists the files with their sizes in bytes, and the destination."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"  {path.stat().st_size:>13,}  {path.relative_to(folder)}" for path in files]
    target = f"{constants.ENDPOINT}/{kind}{args.repo_id}, branch {args.revision or 'main'}"
    notes = ["as a pull request"] if args.create_pr else []
    notes += ["private, if it is new"] if args.private else []
    return "\n".join(map(one_line, [f"{folder} -> {', '.join([target, *notes])}", *lines]))


@tool
def main(argv: Sequence[str]) -> None:
    """Prepares the folder, and sends it unless this is a dry run."""
    args = build_parser().parse_args(argv)
    check_arguments(args)
    folder = prepare(args)
    print(describe(folder, args))
    if args.with_space:
        space = write_space(folder, args.repo_id)
        print(describe(space, args, "spaces/"))
    if args.dry_run:
        print("dry run: nothing was sent")
        return
    options = {"private": args.private, "revision": args.revision, "create_pr": args.create_pr}
    commit = push_folder(folder, args.repo_id, replace_model=args.replace_model, **options)
    print(f"published: {commit.pr_url or commit.commit_url}")
    if args.with_space:
        print(f"space: {push_space(space, args.repo_id, private=args.private).commit_url}")
    print(f"model: timm.create_model('hf-hub:{args.repo_id}', pretrained=True), after import timm_moe_dg")


if __name__ == "__main__":
    main()
