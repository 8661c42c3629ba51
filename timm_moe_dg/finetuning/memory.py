"""A training step, and the largest batch that fits into memory where its own does not."""

from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor

from ..algorithms import Algorithm, Minibatches, StepContext
from ..errors import ArgumentError
from .run import FineTuning


def take_step(run: FineTuning, step: int, minibatches: Minibatches) -> dict[str, Tensor]:
    """Takes a training step and returns its scalars.

    Raises:
        ArgumentError: The memory is full. In a run of one process, the message names a batch that fits.
    """
    algorithm, context = run.model.algorithm, run.context(step)
    try:
        return algorithm.update(context, minibatches)
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
    # Outside of the except clause, since the error's traceback keeps the step's tensors
    options, accelerator = run.plan.options, run.accelerator
    remedy = "give a smaller --batch-size, or see --grad-checkpointing"
    # One of several processes would wait for the others, in which the step may have fitted
    if accelerator.num_processes == 1 and (size := fitting_batch_size(algorithm, context, minibatches)):
        remedy = f"--batch-size {size} fits"
        if algorithm.ACCUMULATES:
            parts = options.grad_accum_steps * -(-options.batch_size // size)
            remedy += f"; to keep the batch, compute it in parts by --grad-accum-steps {parts}"
    raise ArgumentError.of("batch_size", options.batch_size, f"the memory of {accelerator.device} is full; {remedy}")


def fitting_batch_size(algorithm: Algorithm, context: StepContext, minibatches: Minibatches) -> int:
    """Returns the first of 1/2, 1/4, ... of the images per domain with which a step succeeds; 0 if none does.

    The steps change the network, so the run cannot go on.
    """
    size = len(minibatches[0][0])
    while size := size // 2:
        clear_device_cache(garbage_collection=True)
        try:
            algorithm.update(context, [tuple(column[:size] for column in batch) for batch in minibatches])
            return size
        except (RuntimeError, ValueError):  # full again, or too few images for the method
            pass
    return 0
