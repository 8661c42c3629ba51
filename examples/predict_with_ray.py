"""Predicts a list of images on a Ray cluster.

    python examples/predict_with_ray.py --run output/RUN --images list.parquet --output parts

The list has the columns path, lon and lat. All machines have to see the run, the images and the output.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import ray

import timm_moe_dg


class Predict:
    """An actor that holds the network."""

    def __init__(self, run: str, options: dict[str, Any]) -> None:
        self.network, self.options = timm_moe_dg.Run(run).model(), options

    def __call__(self, rows: Any) -> Any:
        """Predicts a batch of the list, a data frame."""
        return timm_moe_dg.predict_part(self.network, rows, workers=0, **self.options)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--run", "--images", "--output"):
        parser.add_argument(name, required=True)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="of each actor")
    args = parser.parse_args(argv)
    options = {"batch_size": 64, "device": "cuda" if args.gpus else "cpu"}
    read = ray.data.read_csv if args.images.endswith(".csv") else ray.data.read_parquet
    actors = ray.data.ActorPoolStrategy(size=args.actors)
    batches = {"batch_size": 1024, "batch_format": "pandas", "compute": actors, "num_gpus": args.gpus or None}
    rows = read(args.images).map_batches(Predict, fn_constructor_args=(args.run, options), **batches)
    rows.write_parquet(args.output)


if __name__ == "__main__":
    main()
