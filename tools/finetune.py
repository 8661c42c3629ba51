r"""Fine-tunes any timm model, with some domains held out for testing.

    timm-moe-dg finetune --dataset rotated_digits --model gmoe_tiny_patch16
    timm-moe-dg finetune --dataset folder --data-dir DATA --pretrained \
        --model gmoe_small_patch16 --test-domains sketch
    timm-moe-dg finetune --resume output/RUN

The first command needs no download. DATA holds DOMAIN/CLASS/IMAGE.
The run folder gets settings, results, learning curves and best/, the network
with the best validation accuracy. Ctrl-C writes a checkpoint.
Several processes: accelerate launch -m timm_moe_dg finetune ...
"""

from collections.abc import Sequence

from timm_moe_dg.cli.tool import ToolParser, tool
from timm_moe_dg.finetuning.loop import finetune
from timm_moe_dg.finetuning.messages import RunLog
from timm_moe_dg.finetuning.resume import nothing_to_do, parse_resumable
from timm_moe_dg.protocols.options import run_parser


def build_parser() -> ToolParser:
    """Builds the command line."""
    return run_parser(__doc__)


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    options = parse_resumable(build_parser(), argv)
    if line := nothing_to_do(options):
        print(line)
        return
    with RunLog(argv) as log:
        finetune(options, log)


if __name__ == "__main__":
    main()
