"""Trains an MLP and a convolutional network on two features that both give the label; shows which one each follows.

    python examples/theorems/theorem1.py noiseless --output output/theorem1
    python examples/theorems/theorem1.py noisy --output output/theorem1
    python examples/theorems/theorem1.py noiseless --quick --output output/theorem1_quick

The experiment of GMoE, appendix B.2. The label is encoded twice: by a pixel of the first patch, and by the pattern
that another patch holds. `noiseless` trains both networks, `noisy` trains the MLP at nine pairs of probabilities. The
test set `pixel_spurious` has the pixel of the next class and the true pattern, `patch_spurious` the reverse. The output
folder receives theorem1_FORM.json and theorem1_FORM.png.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from fit import fit, predict
from plots import plot_seed_curves
from torch import Tensor, nn

CLASSES, PATCHES = 4, 10  # K, also the width of a patch, and P
SAMPLES = 100_000  # to train with
HELD_OUT = 2000  # samples of the validation set and of each test set
EPOCHS = {"noiseless": 50, "noisy": 200}
PROBABILITIES = [(0.9, 0.9), (0.8, 0.8), (0.7, 0.7), (0.9, 0.95), (0.8, 0.85), (0.7, 0.75), (0.9, 1.0), (0.8, 0.9),
                 (0.7, 0.8)]  # fmt: skip
LABELS = {
    "validation": "validation: as in training",
    "pixel_spurious": "test: pixel spurious, patch true",
    "patch_spurious": "test: patch spurious, pixel true",
}
Samples = tuple[Tensor, Tensor]
Setting = tuple[str, float, float]  # network, and probabilities that the pixel and the patch show the label


class PatchNetwork(nn.Module):
    """Two convolutions of width 1, which are linear maps of each patch, and log-sum-exp over the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Sequential(nn.Linear(CLASSES, 20), nn.ReLU(), nn.Linear(20, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """(B, P, K) -> (B, K)."""
        # A soft maximum. The paper does not name its pooling; this one reproduces its figure, a maximum does not
        return self.maps(x).logsumexp(1)


def perceptron() -> nn.Module:
    """The three-layer MLP on all pixels, (B, P, K) -> (B, K)."""
    layers = [nn.Linear(PATCHES * CLASSES, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(100, CLASSES))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"MLP": perceptron, "FCN": PatchNetwork}


def pair(text: str) -> tuple[float, float]:
    """Reads two probabilities."""
    pixel, patch = map(float, text.split(","))
    return pixel, patch


def orthonormal_codes(generator: torch.Generator) -> Tensor:
    """(K, K): a random orthonormal basis, one pattern a row."""
    return torch.linalg.qr(torch.randn(CLASSES, CLASSES, generator=generator)).Q.T.contiguous()


def draw_patches(pixels: Tensor, patches: Tensor, codes: Tensor, generator: torch.Generator) -> Tensor:
    """Writes labels into noise, N as pixels and N as patterns -> (N, P, K)."""
    x = torch.randn(len(pixels), PATCHES, CLASSES, generator=generator)
    rows = torch.arange(len(pixels))
    x[rows, 0, pixels] = 1.0
    x[rows, torch.randint(1, PATCHES, (len(rows),), generator=generator)] = codes[patches]
    return x


def corrupt(labels: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Keeps each label with a probability; otherwise replaces it by one of the others, chosen uniformly."""
    others = labels + torch.randint(1, CLASSES, labels.shape, generator=generator)
    return torch.where(torch.rand(labels.shape, generator=generator) < probability, labels, others % CLASSES)


def make_sets(samples: int, held_out: int, p_pixel: float, p_patch: float, seed: int) -> dict[str, Samples]:
    """Draws the training set, the validation set and the test sets.

    The spurious feature of a test set always shows the next class, and the other feature always shows the label. The
    paper's "above 90% accuracy" at p = 0.7 needs this: a true feature with noise would cap the accuracy at p.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = orthonormal_codes(generator)

    def draw(number: int, pixel: float | None, patch: float | None) -> Samples:
        targets = torch.randint(CLASSES, (number,), generator=generator)
        labels = [
            (targets + 1) % CLASSES if probability is None else corrupt(targets, probability, generator)
            for probability in (pixel, patch)
        ]
        return draw_patches(labels[0], labels[1], codes, generator), targets

    return {
        "train": draw(samples, p_pixel, p_patch),
        "validation": draw(held_out, p_pixel, p_patch),
        "pixel_spurious": draw(held_out, None, 1.0),
        "patch_spurious": draw(held_out, 1.0, None),
    }


def train(setting: Setting, seed: int, samples: int, epochs: int) -> dict[str, Any]:
    """Trains one network; returns its settings and its accuracy in percent on each held-out set after each epoch."""
    network, p_pixel, p_patch = setting
    sets = make_sets(samples, HELD_OUT, p_pixel, p_patch, seed)
    inputs, targets = sets.pop("train")
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    curves: dict[str, list[float]] = {name: [] for name in sets}
    order = torch.Generator().manual_seed(seed)
    for _ in fit(model, inputs, targets, nn.functional.cross_entropy, epochs=epochs, generator=order):
        for name, (x, y) in sets.items():
            curves[name].append(100 * (predict(model, x).argmax(1) == y).double().mean().item())
    finals = {name: values[-1] for name, values in curves.items()}
    print(f"{network} p1={p_pixel} p2={p_patch} seed {seed}: {finals}", flush=True)
    panel = network if p_pixel == p_patch == 1 else f"p1 {p_pixel:g}, p2 {p_patch:g}"
    return {"panel": panel, "seed": seed, "final": finals, "curves": curves}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", choices=EPOCHS)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results; files there are replaced")
    parser.add_argument("--pairs", type=pair, nargs="+", default=PROBABILITIES, metavar="P1,P2", help="of noisy")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="repetitions (default: 0 1 2)")
    parser.add_argument("--quick", action="store_true", help="noiseless: a fifth of the samples and of the epochs")
    args = parser.parse_args(argv)
    if args.quick and args.form == "noisy":
        # The change from one feature to the other takes all samples and epochs
        parser.error("--quick: the noisy form does not show its change then; leave it out, or give fewer --pairs")
    share = 5 if args.quick else 1
    args.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the matrices are small
    noiseless: list[Setting] = [(name, 1.0, 1.0) for name in NETWORKS]
    settings = noiseless if args.form == "noiseless" else [("MLP", *probabilities) for probabilities in args.pairs]
    runs = []
    for seed, setting in product(args.seeds, settings):
        runs.append(train(setting, seed, SAMPLES // share, EPOCHS[args.form] // share))
        (args.output / f"theorem1_{args.form}.json").write_text(json.dumps(runs) + "\n")
    panels: dict[str, list[dict[str, list[float]]]] = {}
    for run in runs:
        panels.setdefault(run["panel"], []).append(run["curves"])
    plot_seed_curves(panels, args.output / f"theorem1_{args.form}.png", LABELS)


if __name__ == "__main__":
    main()
