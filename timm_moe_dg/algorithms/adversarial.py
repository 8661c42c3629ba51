"""Adversarial methods, DANN and CDANN, which train features from which a discriminator cannot tell the domain."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from .base import ForwardPass, Minibatches, Setup, StepContext, classifier_of, detached, tap_features
from .hparams import SHARE, log_uniform
from .risks import Counting


def cycle_length(hparams: Mapping[str, float]) -> int:
    """Steps in which an adversarial method updates the network once and the discriminator d times; 1 for others."""
    return 1 + int(hparams.get("d_steps_per_g_step", 0))


class Adversarial(Counting):
    """Network: min CE - lambda * L. Discriminator: min L, its loss of classifying domains by features (B, D).

    With d = d_steps_per_g_step, step n = 1, 2, ... updates the network alone if n mod (1 + d) = d. All other steps
    update the discriminator alone, by its own Adam. With d = 1 they take turns and the network begins. L includes
    grad_penalty * the mean squared gradient, over images, of the summed cross-entropy with respect to the
    discriminator's input. The run's optimizer takes over the betas (beta1, 0.9) if it has betas. The paper instead
    reverses the gradient within one step.

    The discriminator distinguishes all training domains, even if a step has only some of them, as in WILDS.

    The network's learning rate and weight decay are the run's `lr` and `weight_decay`, which a search draws as the
    reference draws `lr_g` and `weight_decay_g`. `lr_d` is drawn from the range of `lr`, which differs between digits
    and photographs. Its default is the reference's for photographs; the reference's for digits is 1e-3.
    """

    MIN_DOMAINS = 2
    ACCUMULATES = False
    HPARAMS = MappingProxyType(
        {
            "lambda": 1.0,
            "lr_d": 5e-5,
            "weight_decay_d": 0.0,
            "d_steps_per_g_step": 1,
            "grad_penalty": 0.0,
            "beta1": 0.5,
            "mlp_width": 256,
            "mlp_depth": 3,
            "mlp_dropout": 0.0,
        }
    )
    RANGES = MappingProxyType({"beta1": SHARE, "mlp_dropout": SHARE})
    SEARCH = MappingProxyType(
        {
            "lambda": log_uniform(-2, 2),
            "lr_d": "lr",
            "weight_decay_d": log_uniform(-6, -2),
            "d_steps_per_g_step": lambda random: int(2 ** random.uniform(0, 3)),
            "grad_penalty": log_uniform(-2, 1),
            "beta1": lambda random: float(random.choice([0.0, 0.5])),
            "mlp_width": lambda random: int(2 ** random.uniform(6, 10)),
            "mlp_depth": lambda random: int(random.choice([3, 4, 5])),
            "mlp_dropout": lambda random: float(random.choice([0.0, 0.1, 0.5])),
        }
    )
    SEARCH_ALIASES = MappingProxyType({"lr": "lr_g", "weight_decay": "weight_decay_g"})

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._features = tap_features(setup.network, type(self).__name__)
        width = classifier_of(setup.network, type(self).__name__).in_features
        self.discriminator = discriminator(
            width,
            setup.num_domains,
            width=int(self.hparams["mlp_width"]),
            depth=int(self.hparams["mlp_depth"]),
            dropout=self.hparams["mlp_dropout"],
        )
        self.build(width)
        lr, weight_decay = self.hparams["lr_d"], self.hparams["weight_decay_d"]
        betas = (self.hparams["beta1"], 0.9)
        self._optimizer = Adam(self.parameters(), lr=lr, betas=betas, weight_decay=weight_decay)

    def build(self, width: int) -> None:
        """Makes further modules that the discriminator needs, given the width of the features."""

    def discriminator_input(self, features: Tensor, targets: Tensor) -> Tensor:
        """Returns the discriminator's input, given features (B, D) and classes (B,)."""
        return features

    def discriminator_loss(self, context: StepContext, logits: Tensor, domains: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of classifying domains (B,) by logits (B, M)."""
        return F.cross_entropy(logits, domains)

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns the network's "loss" and its parts "task_loss", "disc_loss" and those of the model."""
        return self._losses(context, self.forward_domains(context.model, minibatches))

    def _losses(self, context: StepContext, out: ForwardPass) -> dict[str, Tensor]:
        task_loss = F.cross_entropy(out.logits, out.targets)
        disc_loss = self._discriminate(context, self._features.take(), out)
        return out.scalars(task_loss - self.hparams["lambda"] * disc_loss, task_loss=task_loss, disc_loss=disc_loss)

    @property
    def trains_network(self) -> bool:
        """Whether the step that was counted last is one of the network."""
        cycle = cycle_length(self.hparams)
        return self.count % cycle == cycle - 1

    def update(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Updates the network or the discriminator."""
        self.chunk(minibatches, context.grad_accum_steps)  # refuses accumulation
        for group in context.optimizer.param_groups:
            if "betas" in group:  # Adan's are three
                group["betas"] = (self.hparams["beta1"], 0.9, *group["betas"][2:])
        self.count_step()
        if self.trains_network:
            self._optimizer.zero_grad()
            losses = super().update(context, minibatches)
            self._optimizer.zero_grad()  # the network's backward pass leaves gradients in the discriminator
            return losses
        return self._discriminator_step(context, minibatches)

    def _discriminator_step(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        with torch.no_grad():
            out = self.forward_domains(context.model, minibatches)
        losses = self._losses(context, out)
        self._optimizer.zero_grad()
        losses["disc_loss"].backward()
        self.share_gradients(context)
        self._optimizer.step()
        return detached(losses)

    def _discriminate(self, context: StepContext, features: Tensor, out: ForwardPass) -> Tensor:
        # Filled on the device: sizes that are sent there make the host wait
        positions = zip(out.sizes, context.domains or range(self.num_domains), strict=True)
        domains = torch.cat([torch.full((size,), position, device=features.device) for size, position in positions])
        inputs = self.discriminator_input(features, out.targets)
        if self.hparams["grad_penalty"] and not inputs.requires_grad:
            inputs.requires_grad_()  # features of a pass without gradients
        logits = self.discriminator(inputs)
        loss = self.discriminator_loss(context, logits, domains, out.targets)
        if self.hparams["grad_penalty"]:
            summed = F.cross_entropy(logits, domains, reduction="sum")
            (gradient,) = torch.autograd.grad(summed, inputs, create_graph=True)
            loss = loss + self.hparams["grad_penalty"] * gradient.square().sum(1).mean()
        return loss

    def get_extra_state(self) -> list[dict[str, Tensor]]:
        """Returns the moments of the discriminator's Adam by parameter; empty before its first step."""
        return [dict(state) for _, state in sorted(self._optimizer.state_dict()["state"].items())]

    def set_extra_state(self, state: Sequence[Mapping[str, Tensor]]) -> None:
        """Restores that state."""
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": dict(enumerate(state)), "param_groups": groups})


class DANN(Adversarial):
    """Adversarial features (Ganin et al., JMLR 2016, arXiv:1505.07818)."""


class CDANN(Adversarial):
    """Adversarial features given the class (Li et al., ECCV 2018).

    The discriminator's input is feature + a learned embedding of the class, and every class of the step weighs alike.
    The reference counts only classes up to the largest in the step. Here all classes count, so that the weights do not
    depend on which images were drawn. The paper has one discriminator per class beside a common one.
    """

    def build(self, width: int) -> None:
        """Makes the embeddings of the classes."""
        self.class_embeddings = nn.Embedding(self.num_classes, width)

    def discriminator_input(self, features: Tensor, targets: Tensor) -> Tensor:
        """Features plus the embedding of their class."""
        return features + self.class_embeddings(targets)

    def discriminator_loss(self, context: StepContext, logits: Tensor, domains: Tensor, targets: Tensor) -> Tensor:
        """Class-balanced cross-entropy, by the classes of all processes."""
        # `bincount` would wait for the device
        counts = context.mean_weight(torch.eye(self.num_classes, device=targets.device), targets)
        losses = F.cross_entropy(logits, domains, reduction="none")
        return (losses / (counts[targets] * self.num_classes)).sum()


def discriminator(in_features: int, out_features: int, *, width: int, depth: int, dropout: float) -> nn.Sequential:
    """Makes an MLP of `depth` linear layers with dropout and ReLU between them."""
    sizes = [in_features, *[width] * (depth - 1)]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Dropout(dropout), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], out_features))
