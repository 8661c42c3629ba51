"""Prints accuracy by the distance to the nearest training tile, for docs/results/earth.md.

    python examples/earth/far.py output/earth_dinov2/*-trial0-*

Each run's network answers the tiles outside training, and so do the nearest neighbors, as the row `places`. Tiles are
"id" on continents that were trained on, and "ood" on the one that was held out.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.neighbors import BallTree

from timm_moe_dg.analysis.run_view import open_run
from timm_moe_dg.comparisons.zeros import places
from timm_moe_dg.data import EvaluationImages
from timm_moe_dg.finetuning.plan import make_plan
from timm_moe_dg.layers.encoders.coverage import EARTH_RADIUS
from timm_moe_dg.networks.trained import takes_metadata
from timm_moe_dg.protocols.evaluation import predict
from timm_moe_dg.protocols.options import RunOptions

BORDERS = {"id": (300, 400, 500), "ood": (1000, 2000, 4000)}  # km


def answers(folder: Path) -> pd.DataFrame:
    """A row for each tile outside training: role, km to the nearest training tile, and whether answers are right."""
    view = open_run(folder, batch_size=256)
    plan = make_plan(RunOptions(**{name: view.args[name] for name in ("dataset", "test_domains", "trial_seed")}))
    tested = [index for index in range(len(plan.domains)) if index not in plan.training]
    domains, splits = [plan.domains[index] for index in tested], [plan.splits[index] for index in tested]
    with_metadata = takes_metadata(view.model, domains)
    images = EvaluationImages(domains, splits, view.transform, with_metadata=with_metadata)
    predicted = predict(view.model, view.evaluation_batches(images))
    metadata = [np.asarray(domain.metadata) for domain in domains]
    points = np.array([metadata[group // 2][row] for group, row in zip(images.groups, images.positions, strict=True)])
    trained = [np.asarray(plan.domains[index].metadata)[plan.splits[index].inside] for index in plan.training]
    tree = BallTree(np.deg2rad(np.concatenate(trained)[:, ::-1]), metric="haversine")
    target, neighbors = predicted.target.numpy(), places(plan)
    return pd.DataFrame(
        {
            "role": [domains[group // 2].role for group in images.groups],
            "km": EARTH_RADIUS * tree.query(np.deg2rad(points[:, ::-1]))[0][:, 0],
            view.args["row"]: predicted.predicted.numpy() == target,
            "places": neighbors.predict(points) == target,
        }
    )


def main(folders: list[Path]) -> None:
    """Prints percents of right answers for each role and distance, over all held-out continents of the runs."""
    found = pd.concat([answers(folder) for folder in folders if (folder / "best/model.safetensors").is_file()])
    for role, borders in BORDERS.items():
        part = found[found.role == role]
        distance = pd.cut(part.km, [0, *borders, np.inf], right=False)
        rows = part.drop(columns=["role", "km"]).astype(float).groupby(distance, observed=True)
        print(f"{role}\n{(100 * rows.mean()).round(1).T.to_markdown()}\n")
        print(rows.count().places.rename("tiles, over all runs").to_markdown(), "\n")


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
