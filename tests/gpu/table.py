"""Prints what the rehearsal measures: `python -m tests.gpu.table`.

A line for each model, way and type: the largest difference of logits and of gradients from the CPU's, and the waits.
"""

import sys
import warnings
from copy import deepcopy
from itertools import product

import torch

from tests.gpu.device import pretended_cuda
from tests.gpu.test_rehearsal import CUDA, MODELS, SHORT, TYPES, WAYS, difference, training_step
from timm_moe_dg.layers import set_expert_implementation


def main() -> None:
    """Prints the table."""
    warnings.simplefilter("ignore")
    sys.stdout.write("| model | way | type | logits and loss | gradients | waits |\n|---|---|---|---|---|---|\n")
    for case, way, dtype in product(MODELS, WAYS, TYPES):
        torch.manual_seed(0)
        model = case.small(**{**SHORT, **case.without_chance})
        set_expert_implementation(model, way)
        twin, inputs = deepcopy(model), case.inputs()
        expected = training_step(twin, inputs, dtype, "cpu")
        with pretended_cuda() as waits:
            model.to(CUDA)
            columns = [column.to(CUDA) for column in inputs]
            waits.clear()
            results = training_step(model, columns, dtype, CUDA)
        values, gradients = difference(results[:2], expected[:2]), difference(results[2], expected[2])
        places = ", ".join(f"{place} {count}" for place, count in waits.items()) or "none"
        cells = (case.name, way, str(dtype or "float32"), f"{values:.1e}", f"{gradients:.1e}", places)
        sys.stdout.write(f"| {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
