"""Loaders: endless minibatches per training domain, and one finite pass over everything for evaluation.

Training draws are counted. Draw k of a domain is an image and an augmentation, and both are functions of (seed, domain,
k) alone: neither the number of worker processes nor that of training processes changes what is drawn, and a loader that
starts at step s gives what an uninterrupted one gives from step s on.
"""

import gc
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import ProtocolError
from .domains import Domain
from .pixels import Pixels, Transform
from .splits import Split

DrawIndex: TypeAlias = tuple[int, int]  # (domain, number of the draw)
TrainingSample: TypeAlias = tuple[Tensor, int, *tuple[Tensor, ...]]  # image (C, H, W), target, metadata if asked for
EvaluationSample: TypeAlias = tuple[Tensor, int, int, *tuple[Tensor, ...]]  # image, target, group, and metadata
Minibatch: TypeAlias = tuple[Tensor, ...]  # images (B, C, H, W), targets (B,), and the images' metadata if asked for


@dataclass(frozen=True)
class TrainingDraws(Dataset):
    """The training images of all domains, addressed by draw rather than by position.

    Attributes:
        domains: All domains of the benchmark.
        splits: One per domain; images are drawn from the inside part, with replacement.
        transform: Applied with torch's CPU generator seeded for the draw.
        seed: The run's seed.
        with_metadata: Draw each image's metadata too; the domains must have some.
        class_balanced: Draw a class first, each of those that the inside part has alike, and then one of its images.
    """

    domains: Sequence[Domain]
    splits: Sequence[Split]
    transform: Transform
    seed: int
    with_metadata: bool = False
    class_balanced: bool = False

    @cached_property
    def _pools(self) -> list[list[np.ndarray]]:
        """For each domain, the positions that are drawn alike; one pool, or one for each class."""
        if not self.class_balanced:
            return [[split.inside] for split in self.splits]
        pairs = zip(self.domains, self.splits, strict=True)
        return [_by_class(np.asarray(domain.targets), split.inside) for domain, split in pairs]

    def __getitem__(self, draw: DrawIndex) -> TrainingSample:
        domain, number = draw
        random = np.random.default_rng((self.seed, domain, number))
        pools = self._pools[domain]
        pool = pools[random.integers(len(pools))] if self.class_balanced else pools[0]
        index = int(random.choice(pool))
        with seeded_torch(int(random.integers(2**63))):
            image = self.transform(self.domains[domain].pixels(index))
        metadata = _metadata(self.domains[domain], index) if self.with_metadata else ()
        return image, int(self.domains[domain].targets[index]), *metadata


@dataclass(frozen=True)
class StepSampler(Sampler[list[DrawIndex]]):
    """Lists the draws of one step after the other, without end.

    Step s uses draws s * batch_size to (s + 1) * batch_size - 1 of each of its domains, dealt out to the processes in
    turn.

    Attributes:
        domains: Positions of the training domains.
        batch_size: Images per domain and step, over all processes.
        first_step: Where to start.
        process: This process's index.
        num_processes: How many processes share a step.
        domains_per_step: How many of the domains a step draws, all equally likely and none twice, as WILDS's group
            loader does; None takes all of them.
        seed: The run's, on which that draw depends, with the number of the step; of no use without it.
    """

    domains: Sequence[int]
    batch_size: int
    first_step: int = 0
    process: int = 0
    num_processes: int = 1
    domains_per_step: int | None = None
    seed: int = 0

    @property
    def width(self) -> int:
        """The number of domains, and so of minibatches, in a step."""
        return self.domains_per_step or len(self.domains)

    def drawn_at(self, step: int) -> list[int]:
        """Positions of a step's domains among the training domains, in the order of its minibatches."""
        if self.domains_per_step is None:
            return list(range(len(self.domains)))
        random = np.random.default_rng((self.seed, step, 0, 2))  # the 2 sets it apart from draws of images
        return random.choice(len(self.domains), self.domains_per_step, replace=False).tolist()

    def domains_at(self, step: int) -> list[int]:
        """Positions of the domains in a step, in the order of its minibatches; the same in every process."""
        return [self.domains[position] for position in self.drawn_at(step)]

    def __iter__(self) -> Iterator[list[DrawIndex]]:
        for step in itertools.count(self.first_step):
            draws = range(step * self.batch_size + self.process, (step + 1) * self.batch_size, self.num_processes)
            yield [(domain, number) for domain in self.domains_at(step) for number in draws]


def _by_class(targets: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
    own = targets[positions]
    return [positions[own == target] for target in np.unique(own)]


def training_loader(
    draws: TrainingDraws, sampler: StepSampler, *, workers: int, pin_memory: bool = False
) -> DataLoader:
    """Builds the endless training loader.

    Args:
        draws: What is drawn from.
        sampler: Which draws make up each step.
        workers: Worker processes; 0 reads in this one.
        pin_memory: Copies batches to page-locked memory, for a faster way to the accelerator.

    Returns:
        A loader that yields, for each step, a list of `Minibatch`, one per training domain of the step.

    Raises:
        ProtocolError: The processes cannot share the batch evenly, or a step asks for more domains than there are.
    """
    if sampler.batch_size < 1 or sampler.batch_size % sampler.num_processes:
        raise ProtocolError.of(
            "batch_size",
            sampler.batch_size,
            f"give a multiple of the number of processes ({sampler.num_processes}), which share each domain's batch",
        )
    if not 1 <= sampler.width <= len(sampler.domains):
        remedy = f"there are {len(sampler.domains)} training domains; draw as many or fewer"
        raise ProtocolError.of("domains_per_step", sampler.domains_per_step, remedy)
    return DataLoader(
        draws,
        batch_sampler=sampler,
        collate_fn=partial(_collate_by_domain, num_domains=sampler.width),
        **_worker_options(workers, pin_memory),
    )


@dataclass(frozen=True)
class AugmentedValidation:
    """Which images are evaluated augmented, as DomainBed does: those of the training domains' "out" parts.

    Each is augmented in one way, a function of (seed, domain, position), the same at every evaluation.

    Attributes:
        transform: Applied with torch's CPU generator seeded for the image.
        domains: Positions of the training domains.
        seed: The run's seed.
    """

    transform: Transform
    domains: Sequence[int]
    seed: int

    def covers(self, group: int) -> bool:
        """Whether a group of `EvaluationImages` is one of them."""
        return group % 2 == 1 and group // 2 in self.domains

    def __call__(self, image: Pixels, domain: int, position: int) -> Tensor:
        """Augments the image at a position of a domain."""
        entropy = np.random.default_rng((self.seed, domain, position, 1))  # the 1 sets it apart from training's draws
        with seeded_torch(int(entropy.integers(2**63))):
            return self.transform(image)


class EvaluationImages(Dataset):
    """Every image of every domain, once, with its group: 2 * domain for "in" images, 2 * domain + 1 for "out"."""

    def __init__(
        self,
        domains: Sequence[Domain],
        splits: Sequence[Split],
        transform: Transform,
        with_metadata: bool = False,
        augmented: AugmentedValidation | None = None,
    ) -> None:
        self.domains = domains
        self.transform = transform
        self.with_metadata = with_metadata
        self.augmented = augmented
        parts = [part for split in splits for part in (split.inside, split.outside)]
        self.positions = np.concatenate(parts)
        self.groups = np.repeat(np.arange(len(parts)), [len(part) for part in parts])

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> EvaluationSample:
        position, group = int(self.positions[index]), int(self.groups[index])
        domain = self.domains[group // 2]
        metadata = _metadata(domain, position) if self.with_metadata else ()
        image = domain.pixels(position)
        if self.augmented is not None and self.augmented.covers(group):
            view = self.augmented(image, group // 2, position)
        else:
            view = self.transform(image)
        return view, int(domain.targets[position]), group, *metadata


def evaluation_loader(
    images: EvaluationImages, *, batch_size: int, workers: int, pin_memory: bool = False
) -> DataLoader:
    """Builds the finite loader, in a fixed order; yields images (B, C, H, W), targets (B,), groups (B,), metadata."""
    return DataLoader(images, batch_size=batch_size, **_worker_options(workers, pin_memory))


@contextmanager
def seeded_torch(seed: int) -> Iterator[None]:
    """Seeds torch's CPU generator for a while and then restores it; generators of accelerators are left alone."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _metadata(domain: Domain, index: int) -> tuple[Tensor]:
    if domain.metadata is None:
        raise ProtocolError.of("with_metadata", True, f"domain {domain.name!r} has no metadata; leave it out")
    return (torch.as_tensor(domain.metadata[index]),)


def _collate_by_domain(samples: Sequence[TrainingSample], num_domains: int) -> list[Minibatch]:
    images, targets, *metadata = zip(*samples, strict=True)
    columns = [torch.stack(images), torch.tensor(targets), *map(torch.stack, metadata)]
    return list(zip(*(column.chunk(num_domains) for column in columns), strict=True))


class _WorkerOptions(TypedDict):
    num_workers: int
    pin_memory: bool
    persistent_workers: bool
    generator: torch.Generator
    worker_init_fn: Callable[[int], None]


def _worker_options(workers: int, pin_memory: bool) -> _WorkerOptions:
    """Common options; the generator of its own keeps a loader's start from advancing torch's global one."""
    return {
        "num_workers": workers,
        "pin_memory": pin_memory,
        "persistent_workers": workers > 0,
        "generator": torch.Generator(),
        "worker_init_fn": _begin,
    }


def _begin(worker: int) -> None:
    """Readies a worker: collecting garbage would write to the pages that it shares with its parent."""
    gc.freeze()
    _outlive_signals()


def _outlive_signals() -> None:
    """Workers ignore Ctrl-C, and SIGTERM unless their parent sends it.

    Terminals and schedulers send these to all processes of a job, and when to end is the main process's to say; its own
    SIGTERM still ends a worker. Where Python does not say who sent a signal (macOS), nothing is changed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)  # any other status would be an error to the main process, which looks at how its workers end
