"""Writes the text embeddings of classes, for `timm-moe-dg finetune --head text:FILE`.

    python examples/text_head.py --model ViT-B-16-quickgelu --pretrained openai --classes dog elephant giraffe \
        --output pacs.safetensors

MODEL and PRETRAINED are names of open_clip (extra `text`), of the same weights as timm's image tower:

    open_clip                          timm
    ViT-B-16-quickgelu openai          vit_base_patch16_clip_quickgelu_224.openai
    ViT-B-16-SigLIP2 webli             vit_base_patch16_siglip_224.v2_webli (its texts need `transformers`)

Give the classes as the data set names them, in its order. Underscores become spaces in the prompts. With several
templates, a class gets the mean of its normalized embeddings (Radford et al., 2021, section 3.1.4).
"""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence

import torch
from safetensors.torch import save_file


@torch.no_grad()
def main(argv: Sequence[str]) -> None:
    """Reads the command line, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="text tower, by open_clip's name")
    parser.add_argument("--pretrained", required=True, help="weights, by open_clip's name, or a file")
    parser.add_argument("--classes", nargs="+", required=True, metavar="NAME")
    parser.add_argument("--templates", nargs="+", default=["a photo of a {}."], metavar="TEXT")
    parser.add_argument("--output", required=True, metavar="FILE")
    args = parser.parse_args(argv)
    if wrong := [template for template in args.templates if template.count("{}") != 1]:
        sys.exit(f"text_head.py: templates={wrong[0]!r}: write {{}} once, where the class belongs")
    try:
        import open_clip

        tokenize = open_clip.get_tokenizer(args.model)
    except ImportError as error:
        remedy = "pip install 'timm_moe_dg[text]'; SigLIP needs transformers and sentencepiece too"
        sys.exit(f"text_head.py: the text tower needs open_clip ({error}): {remedy}")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "QuickGELU mismatch")  # another activation than the weights were trained with
        try:
            model = open_clip.create_model(args.model, pretrained=args.pretrained).eval()
        except UserWarning as mismatch:
            sys.exit(f"text_head.py: model={args.model!r}: {mismatch}; try {args.model}-quickgelu")
    embeddings = []
    for name in args.classes:
        prompts = [template.replace("{}", name.replace("_", " ")) for template in args.templates]
        embeddings.append(model.encode_text(tokenize(prompts), normalize=True).mean(0))
    tensors = {"weight": torch.stack(embeddings).contiguous(), "logit_scale": model.logit_scale.clone()}
    save_file(tensors, args.output, {"classes": json.dumps(args.classes)})


if __name__ == "__main__":
    main(sys.argv[1:])
