"""The published update rules of the domain-generalization methods, step by step, slow and without any sharing.

Every function trains a network in place on a list of steps; a step is a list of (images, targets), one per domain.
Methods that keep something by domain are told which of `total` domains each step has drawn; all, unless told.
Every forward pass adds AUX times the routers' auxiliary loss. Gradients of single samples are taken one at a time.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.algorithms.networks import AUX, LR, WEIGHT_DECAY, embed
from timm_moe_dg import auxiliary_loss

Network: TypeAlias = Any  # a model; to mypy every attribute of an nn.Module may be a tensor
Steps = list[list[tuple[Tensor, Tensor]]]
Drawn = list[list[int]]


def adam(network: Network, lr: float = LR, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(network.parameters(), lr=lr, weight_decay=WEIGHT_DECAY, **options)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def pooled(step: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in step]), torch.cat([y for _, y in step])


def sliced(values: Tensor, step: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    slices, start = [], 0
    for x, _ in step:
        slices.append(values[start : start + len(x)])
        start += len(x)
    return slices


def erm(network: Network, steps: Steps, hparams: dict[str, Any]) -> None:
    optimizer = adam(network)
    for step in steps:
        x, y = pooled(step)
        descend(optimizer, F.cross_entropy(network(x), y) + AUX * auxiliary_loss(network))


def irm(network: Network, steps: Steps, hparams: dict[str, Any]) -> None:
    optimizer = adam(network)
    for number, step in enumerate(steps):
        if number == hparams["irm_penalty_anneal_iters"]:
            optimizer = adam(network)
        weight = hparams["irm_lambda"] if number >= hparams["irm_penalty_anneal_iters"] else 1.0
        logits = network(pooled(step)[0])
        risk, penalty = torch.tensor(0.0), torch.tensor(0.0)
        for part, (_, y) in zip(sliced(logits, step), step, strict=True):
            risk = risk + F.cross_entropy(part, y) / len(step)
            # d/dw CE(w * logits) at 1 = sum_c (p_c - y_c) * logit_c, averaged over samples
            slope = ((part.softmax(1) - F.one_hot(y, part.shape[1])) * part).sum(1)
            penalty = penalty + slope[0::2].mean() * slope[1::2].mean() / len(step)
        descend(optimizer, risk + weight * penalty + AUX * auxiliary_loss(network))


def vrex(network: Network, steps: Steps, hparams: dict[str, Any]) -> None:
    optimizer = adam(network)
    for number, step in enumerate(steps):
        if number == hparams["vrex_penalty_anneal_iters"]:
            optimizer = adam(network)
        weight = hparams["vrex_lambda"] if number >= hparams["vrex_penalty_anneal_iters"] else 1.0
        parts = zip(sliced(network(pooled(step)[0]), step), step, strict=True)
        risks = [F.cross_entropy(logits, y) for logits, (_, y) in parts]
        mean = sum(risks) / len(risks)
        variance = sum((risk - mean) ** 2 for risk in risks) / len(risks)
        descend(optimizer, mean + weight * variance + AUX * auxiliary_loss(network))


def everywhere(steps: Steps) -> Drawn:
    return [list(range(len(step))) for step in steps]


def group_dro(
    network: Network, steps: Steps, hparams: dict[str, Any], drawn: Drawn | None = None, total: int | None = None
) -> None:
    optimizer = adam(network)
    q = dict.fromkeys(range(total or len(steps[0])), 1.0)
    for step, present in zip(steps, drawn or everywhere(steps), strict=True):
        parts = zip(sliced(network(pooled(step)[0]), step), step, strict=True)
        risks = dict(zip(present, (F.cross_entropy(logits, y) for logits, (_, y) in parts), strict=True))
        for domain, risk in risks.items():
            q[domain] *= np.exp(hparams["groupdro_eta"] * risk.item())
        mass = sum(q.values())
        q = {domain: share / mass for domain, share in q.items()}
        loss = len(q) / len(risks) * sum(q[domain] * risk for domain, risk in risks.items())
        descend(optimizer, loss + AUX * auxiliary_loss(network))


def mixup(network: Network, steps: Steps, hparams: dict[str, Any]) -> None:
    optimizer = adam(network)
    for number, step in enumerate(steps):
        torch.manual_seed(number)
        order = torch.randperm(len(step)).tolist()
        loss = torch.tensor(0.0)
        for position, index in enumerate(order):
            (xi, yi), (xj, yj) = step[index], step[order[(position + 1) % len(order)]]
            share = torch.distributions.Beta(hparams["mixup_alpha"], hparams["mixup_alpha"]).sample().item()
            size = min(len(yi), len(yj))
            xi, yi, xj, yj = xi[:size], yi[:size], xj[:size], yj[:size]
            logits = network(share * xi + (1 - share) * xj)
            loss = loss + share * F.cross_entropy(logits, yi) + (1 - share) * F.cross_entropy(logits, yj)
            loss = loss + AUX * auxiliary_loss(network)
        descend(optimizer, loss / len(step))


def mldg(network: Network, steps: Steps, hparams: dict[str, Any]) -> None:
    optimizer = adam(network)
    for number, step in enumerate(steps):
        torch.manual_seed(number)
        order = torch.rand(len(step)).argsort().tolist()
        tests = order[-hparams["n_meta_test"] :]
        gradients = [torch.zeros_like(parameter) for parameter in network.parameters()]
        for position, index in enumerate(order[: -hparams["n_meta_test"]]):
            inner = deepcopy(network)
            partner = step[tests[position % len(tests)]]
            size = min(len(step[index][1]), len(partner[1]))
            for (x, y), weight in ((step[index], 1.0), (partner, hparams["mldg_beta"])):
                loss = F.cross_entropy(inner(x[:size]), y[:size]) + AUX * auxiliary_loss(inner)
                inner.zero_grad()
                loss.backward()
                for total, parameter in zip(gradients, inner.parameters(), strict=True):
                    total += weight * parameter.grad / len(step)
                adam(inner).step()  # matters after the first of the two only
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


def _aligned(network: Network, steps: Steps, gamma: float, distance: Callable[[Tensor, Tensor], Tensor]) -> None:
    optimizer = adam(network)
    for step in steps:
        loss, features = torch.tensor(0.0), []
        for x, y in step:
            features.append(embed(network, x))
            loss = loss + F.cross_entropy(network.get_classifier()(features[-1]), y) / len(step)
            loss = loss + AUX * auxiliary_loss(network) / len(step)
        pairs = [(i, j) for i in range(len(step)) for j in range(i + 1, len(step))]
        for i, j in pairs:
            loss = loss + gamma * distance(features[i], features[j]) / len(pairs)
        descend(optimizer, loss)


def coral_distance(x: Tensor, y: Tensor) -> Tensor:
    means = (x.mean(0) - y.mean(0)).pow(2).sum() / x.shape[1]
    return means + (torch.cov(x.T) - torch.cov(y.T)).pow(2).sum() / x.shape[1] ** 2


def mmd_distance(
    x: Tensor, y: Tensor, gammas: Sequence[float] = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)
) -> Tensor:
    total = torch.tensor(0.0)
    for a, b, sign in ((x, x, 1.0), (y, y, 1.0), (x, y, -2.0)):
        for u in a:
            for v in b:
                square = ((u - v) ** 2).sum()
                for gamma in gammas:
                    total = total + sign * torch.exp(-gamma * square) / (len(a) * len(b))
    return total


def coral(network: Network, steps: Steps, hparams: dict[str, Any]) -> None:
    _aligned(network, steps, hparams["mmd_gamma"], coral_distance)


def mmd(network: Network, steps: Steps, hparams: dict[str, Any]) -> None:
    _aligned(network, steps, hparams["mmd_gamma"], mmd_distance)


def _adversarial(
    network: Network,
    steps: Steps,
    hparams: dict[str, Any],
    discriminator: nn.Module,
    embeddings: nn.Embedding | None,
    drawn: Drawn | None,
) -> None:
    betas = (hparams["beta1"], 0.9)
    generator = adam(network, betas=betas)
    players = [*discriminator.parameters(), *(embeddings.parameters() if embeddings else [])]
    rates = {"lr": hparams["lr_d"], "weight_decay": hparams["weight_decay_d"]}
    opponent = torch.optim.Adam(players, betas=betas, **rates)
    for number, (step, present) in enumerate(zip(steps, drawn or everywhere(steps), strict=True), start=1):
        x, y = pooled(step)
        features = embed(network, x)
        seen = features + embeddings(y) if embeddings else features
        answer = discriminator(seen)
        domains = torch.cat([torch.full((len(x),), i) for i, (x, _) in zip(present, step, strict=True)])
        if embeddings:
            counts = [(y == c).sum() for c in range(embeddings.num_embeddings)]
            disc_loss = torch.tensor(0.0)
            for row, domain, c in zip(answer, domains, y, strict=True):
                weight = 1 / (counts[c] * embeddings.num_embeddings)
                disc_loss = disc_loss + weight * F.cross_entropy(row[None], domain[None])
        else:
            disc_loss = F.cross_entropy(answer, domains)
        summed = F.cross_entropy(answer, domains, reduction="sum")
        slope = torch.autograd.grad(summed, seen, create_graph=True)[0]
        disc_loss = disc_loss + hparams["grad_penalty"] * (slope**2).sum(1).mean()
        d = hparams["d_steps_per_g_step"]
        if number % (1 + d) < d:
            descend(opponent, disc_loss)
            generator.zero_grad()
        else:
            task = F.cross_entropy(network.get_classifier()(features), y)
            descend(generator, task - hparams["lambda"] * disc_loss + AUX * auxiliary_loss(network))


def dann(network: Network, steps: Steps, hparams: dict[str, Any], algorithm: Any, drawn: Drawn | None = None) -> None:
    _adversarial(network, steps, hparams, algorithm.discriminator, None, drawn)


def cdann(network: Network, steps: Steps, hparams: dict[str, Any], algorithm: Any, drawn: Drawn | None = None) -> None:
    _adversarial(network, steps, hparams, algorithm.discriminator, algorithm.class_embeddings, drawn)


def fish(network: Network, steps: Steps, hparams: dict[str, Any]) -> None:
    moments = None
    for step in steps:
        inner = deepcopy(network)
        optimizer = adam(inner)
        if moments:
            optimizer.load_state_dict(moments)
        for x, y in step:
            descend(optimizer, F.cross_entropy(inner(x), y) + AUX * auxiliary_loss(inner))
        moments = deepcopy(optimizer.state_dict())
        outer, new = network.state_dict(), inner.state_dict()
        network.load_state_dict({k: outer[k] + hparams["meta_lr"] * (new[k] - outer[k]) for k in outer})


def sample_gradients(classifier: nn.Linear, features: Tensor, targets: Tensor) -> Tensor:
    """(B, P) the cross-entropy's gradient of every sample, one after the other, by autograd."""
    rows = []
    for z, y in zip(features, targets, strict=True):
        loss = F.cross_entropy(classifier(z[None]), y[None])
        gradients = torch.autograd.grad(loss, list(classifier.parameters()), create_graph=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows)


def fishr(network: Network, steps: Steps, hparams: dict[str, Any], drawn: Drawn | None = None) -> None:
    optimizer = adam(network)
    averages: dict[int, Any] = {}
    ema = hparams["ema"]
    for number, (step, present) in enumerate(zip(steps, drawn or everywhere(steps), strict=True)):
        if number == hparams["penalty_anneal_iters"]:
            optimizer = adam(network)
        weight = hparams["lambda"] if number >= hparams["penalty_anneal_iters"] else 0.0
        x, y = pooled(step)
        features = embed(network, x)
        loss = F.cross_entropy(network.get_classifier()(features), y) + AUX * auxiliary_loss(network)
        corrected = []
        for domain, z, (_, targets) in zip(present, sliced(features, step), step, strict=True):
            gradients = sample_gradients(network.get_classifier(), z, targets)
            variance = ((gradients - gradients.mean(0)) ** 2).mean(0)
            smooth = ema * averages.get(domain, 0.0) + (1 - ema) * variance
            averages[domain] = smooth.detach()
            corrected.append(smooth / (1 - ema))
        center = sum(corrected) / len(corrected)
        penalty = sum(((variance - center) ** 2).mean() for variance in corrected) / len(corrected)
        descend(optimizer, loss + weight * penalty)


def rdm(network: Network, steps: Steps, hparams: dict[str, Any]) -> None:
    optimizer = adam(network)
    for number, step in enumerate(steps):
        started = number >= hparams["rdm_penalty_anneal_iters"]
        if number == hparams["rdm_penalty_anneal_iters"]:
            optimizer = adam(network, lr=hparams["rdm_lr"])
        x, y = pooled(step)
        risks = F.cross_entropy(network(x), y, reduction="none")
        domains = sliced(risks, step)
        loss = sum(domain.mean() for domain in domains) / len(domains) + AUX * auxiliary_loss(network)
        worst = domains[int(np.argmax([domain.mean().item() for domain in domains]))]
        gammas = [10.0**power for power in range(-4, 4)]
        if started:
            loss = loss + hparams["rdm_lambda"] * mmd_distance(worst[:, None], risks[:, None], gammas)
            loss = loss + hparams["variance_weight"] * (torch.var(risks) + torch.var(worst))
        descend(optimizer, loss)


def sd(network: Network, steps: Steps, hparams: dict[str, Any]) -> None:
    optimizer = adam(network)
    for step in steps:
        x, y = pooled(step)
        logits = network(x)
        size = sum(logit**2 for row in logits for logit in row) / logits.numel()
        descend(optimizer, F.cross_entropy(logits, y) + hparams["sd_reg"] * size + AUX * auxiliary_loss(network))


def miro(network: Network, steps: Steps, hparams: dict[str, Any]) -> list[Tensor]:
    """Returns the variances' parameters, which the optimizer decays as it does the network's."""
    twin = deepcopy(network).eval()
    names, channels = zip(*((info["module"], info["num_chs"]) for info in network.feature_info), strict=True)
    bias = float(np.log(np.exp(0.1 - 1e-5) - 1))  # the inverse of softplus
    bs = [torch.full((width,), bias, dtype=torch.float64, requires_grad=True) for width in channels]
    optimizer = adam(network)
    optimizer.add_param_group({"params": bs, "lr": LR * hparams["lr_mult"]})
    for step in steps:
        x, y = pooled(step)
        logits, features = _with_outputs(network, names, x)
        loss = F.cross_entropy(logits, y) + AUX * auxiliary_loss(network)
        with torch.no_grad():
            _, references = _with_outputs(twin, names, x)
        for f, f0, b in zip(features, references, bs, strict=True):
            variance = torch.log(1 + torch.exp(b)) + 1e-5
            loss = loss + hparams["ld"] * ((f - f0) ** 2 / variance + torch.log(variance)).mean() / 2
        descend(optimizer, loss)
    return bs


def _with_outputs(network: Network, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    outputs = []
    hooks = [
        network.get_submodule(name).register_forward_hook(lambda module, inputs, output: outputs.append(output))
        for name in names
    ]
    logits = network(x)
    for hook in hooks:
        hook.remove()
    return logits, outputs


REFERENCES = {
    "ERM": erm,
    "IRM": irm,
    "VREx": vrex,
    "GroupDRO": group_dro,
    "Mixup": mixup,
    "MLDG": mldg,
    "CORAL": coral,
    "MMD": mmd,
    "DANN": dann,
    "CDANN": cdann,
    "Fish": fish,
    "Fishr": fishr,
    "RDM": rdm,
    "SD": sd,
    "MIRO": miro,
}
