"""A training step, and trials of smaller ones if the memory is too small for it."""

import logging
from dataclasses import replace

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor

from ..algorithms import Algorithm, Minibatches, StepContext
from ..algorithms.adversarial import cycle_length
from ..errors import ArgumentError
from .run import FineTuning

_logger = logging.getLogger(__name__)


def take_step(run: FineTuning, step: int, minibatches: Minibatches) -> dict[str, Tensor]:
    """Takes a training step and returns its scalars.

    If the memory is full, raises an `ArgumentError`. In a run of one process, it names values that fitted in a trial.
    """
    algorithm, context = run.model.algorithm, run.context(step)
    try:
        return algorithm.take_step(context, minibatches)
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        reason = str(error)
    # Outside of the except clause, since the error's traceback keeps the step's tensors
    device, batch_size = run.accelerator.device, run.plan.options.batch_size
    remedy = "give a smaller --batch-size, or see --grad-checkpointing"
    # One of several processes would wait for the others, in which the step may have fitted
    if run.accelerator.num_processes == 1:
        _logger.warning(f"the memory of {device} is full; trying smaller steps")
        if parts := fitting_parts(algorithm, context, minibatches):
            smaller = f"--batch-size {batch_size // parts}"
            remedy = f"{smaller} fitted in a trial"
            if algorithm.ACCUMULATES and not run.plan.options.class_weights:
                remedy = f"--grad-accum-steps {parts} fitted in a trial and keeps the batch; {smaller} needs less"
    raise ArgumentError.of("batch_size", batch_size, f"the memory of {device} is full; {remedy} ({reason})")


def fitting_parts(algorithm: Algorithm, context: StepContext, minibatches: Minibatches) -> int | None:
    """Returns the smallest number of equal parts of the minibatches with which a step fits, or None.

    A method that accumulates gradients computes all parts in turn, other methods the first part alone. The trials
    change the network, so the run cannot go on.
    """
    size = len(minibatches[0][0])
    # The second step has the moments that the optimizer makes in the first. Adversarial methods alternate as well.
    repeats = 2 * cycle_length(algorithm.hparams)
    for parts in range(context.grad_accum_steps + 1, size + 1):
        if size % parts:
            continue
        first_part = [tuple(column[: size // parts] for column in minibatch) for minibatch in minibatches]
        in_parts = (replace(context, grad_accum_steps=parts), minibatches)
        context.optimizer.state.clear()  # a failed step may have made half of the moments
        try:
            with torch.no_grad():  # replaces what the failed step has recorded in the network, with its graph
                algorithm.forward_domains(context.model, first_part)
            clear_device_cache(garbage_collection=True)
            for _ in range(repeats):
                algorithm.update(*(in_parts if algorithm.ACCUMULATES else (context, first_part)))
            return parts
        except (RuntimeError, ValueError) as error:
            if not should_reduce_batch_size(error):  # too few images for the method
                return None
    return None
