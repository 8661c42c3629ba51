"""Data loaders: endless minibatches per training domain, and one finite pass over all images for evaluation.

Draw k of a domain is an image and an augmentation, both functions of (seed, domain, k) alone. The numbers of worker
processes and training processes therefore do not change the draws. A loader that starts at step s continues an
interrupted run exactly.
"""

import itertools
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import ProtocolError
from .domains import Domain, Split
from .readers.images import Pixels, Transform, warn_if_squeezed

DrawIndex: TypeAlias = tuple[int, int]  # (domain, number of the draw)
TrainingSample: TypeAlias = tuple[Tensor, int, *tuple[Tensor, ...]]  # image (C, H, W), target, optionally metadata
EvaluationSample: TypeAlias = tuple[Tensor, int, int, *tuple[Tensor, ...]]  # image, target, group, optionally metadata
Minibatch: TypeAlias = tuple[Tensor, ...]  # images (B, C, H, W), targets (B,), optionally metadata (B, ...)


@dataclass(frozen=True)
class TrainingDraws(Dataset):
    """The training images of all domains, indexed by draw instead of position."""

    domains: Sequence[Domain]  # all of the benchmark
    splits: Sequence[Split]  # one per domain. Images are drawn from the inside part, with replacement.
    transform: Transform  # applied with torch's CPU generator seeded for the draw
    _: KW_ONLY
    seed: int
    with_metadata: bool = False  # True needs domains with metadata
    class_balanced: bool = False  # draw a class first, uniformly from those in the inside part, then one of its images

    @cached_property
    def _pools(self) -> list[list[np.ndarray]]:
        """For each domain, positions with equal probability: one array, or one for each class."""
        if not self.class_balanced:
            return [[split.inside] for split in self.splits]
        pools = []
        for domain, split in zip(self.domains, self.splits, strict=True):
            classes = np.asarray(domain.targets)[split.inside]
            pools.append([split.inside[classes == target] for target in np.unique(classes)])
        return pools

    def __getitem__(self, draw: DrawIndex) -> TrainingSample:
        domain, number = draw
        # The kinds of random numbers and their order must stay, or a resumed run would not repeat its draws.
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
    """An endless sampler: step s lists draws s * batch_size to (s + 1) * batch_size - 1 of each of its domains."""

    domains: Sequence[int]  # positions of the training domains
    batch_size: int  # images per domain and step, over all processes
    _: KW_ONLY
    first_step: int = 0
    process: int = 0  # this process's index
    num_processes: int = 1
    domains_per_step: int | None = None  # drawn without replacement, as WILDS's group loader does. None means all.
    seed: int = 0  # needed only with `domains_per_step`

    @property
    def width(self) -> int:
        """The number of domains, and so of minibatches, in a step."""
        return self.domains_per_step or len(self.domains)

    def domain_indices(self, step: int) -> list[int]:
        """Returns a step's domains as indices into `domains`, in the order of its minibatches."""
        if self.domains_per_step is None:
            return list(range(len(self.domains)))
        random = np.random.default_rng((self.seed, step, 0, 2))  # the 2 separates this stream from draws of images
        return random.choice(len(self.domains), self.domains_per_step, replace=False).tolist()

    def domains_at(self, step: int) -> list[int]:
        """Returns a step's domains, in the order of its minibatches, the same in every process."""
        return [self.domains[position] for position in self.domain_indices(step)]

    def __iter__(self) -> Iterator[list[DrawIndex]]:
        for step in itertools.count(self.first_step):
            draws = range(step * self.batch_size + self.process, (step + 1) * self.batch_size, self.num_processes)
            yield [(domain, number) for domain in self.domains_at(step) for number in draws]


def training_loader(
    draws: TrainingDraws, sampler: StepSampler, *, workers: int, pin_memory: bool = False
) -> DataLoader:
    """Builds the endless training loader. Each step is a list of `Minibatch`, one per training domain of the step."""
    processes = sampler.num_processes
    if sampler.batch_size < 1 or sampler.batch_size % processes:
        remedy = f"give a multiple of the number of processes ({processes}), which share each domain's batch"
        raise ProtocolError.of("batch_size", sampler.batch_size, remedy)
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
    """DomainBed's augmentation of training domains' "out" parts, a function of (seed, domain, position)."""

    transform: Transform  # applied with torch's CPU generator seeded for the image
    domains: Sequence[int]  # positions of the training domains
    seed: int

    def covers(self, group: int) -> bool:
        """Whether a group of `EvaluationImages` is augmented."""
        return group % 2 == 1 and group // 2 in self.domains

    def __call__(self, image: Pixels, domain: int, position: int) -> Tensor:
        """Augments the image at a position of a domain."""
        random = np.random.default_rng((self.seed, domain, position, 1))  # the 1 separates this stream from training's
        with seeded_torch(int(random.integers(2**63))):
            return self.transform(image)


@dataclass(eq=False)
class EvaluationImages(Dataset):
    """Every image of every domain, once, with its group: 2 * domain for "in" images, 2 * domain + 1 for "out"."""

    domains: Sequence[Domain]
    splits: Sequence[Split]
    transform: Transform
    _: KW_ONLY
    with_metadata: bool = False
    augmented: AugmentedValidation | None = None

    def __post_init__(self) -> None:
        # Arrays rather than lists, so that loader workers share their memory.
        parts = [part for split in self.splits for part in (split.inside, split.outside)]
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
            tensor = self.augmented(image, group // 2, position)
        else:
            tensor = self.transform(image)
        warn_if_squeezed(domain.file(position), image, tensor)
        return tensor, int(domain.targets[position]), group, *metadata


def evaluation_loader(
    images: EvaluationImages, *, batch_size: int, workers: int, pin_memory: bool = False
) -> DataLoader:
    """Builds the finite loader, which yields images (B, C, H, W), targets (B,), groups (B,), metadata in order."""
    return DataLoader(images, batch_size=batch_size, **_worker_options(workers, pin_memory))


@contextmanager
def seeded_torch(seed: int) -> Iterator[None]:
    """Seeds torch's CPU generator within the block and restores it afterwards. Accelerators keep their states."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed accelerators too.
        torch.default_generator.manual_seed(seed)
        yield


def _metadata(domain: Domain, index: int) -> tuple[Tensor]:
    if domain.metadata is None:
        raise ProtocolError.of("with_metadata", True, f"domain {domain.name!r} has no metadata; leave it out")
    return (torch.as_tensor(domain.metadata[index]),)


def _collate_by_domain(samples: Sequence[TrainingSample], num_domains: int) -> list[Minibatch]:
    # The sampler lists the draws of one domain after the other, equally many of each.
    images, targets, *metadata = zip(*samples, strict=True)
    columns = [torch.stack(images), torch.tensor(targets), *map(torch.stack, metadata)]
    return list(zip(*(column.chunk(num_domains) for column in columns), strict=True))


def _worker_options(workers: int, pin_memory: bool) -> dict[str, Any]:
    return {
        "num_workers": workers,
        "pin_memory": pin_memory,
        "persistent_workers": workers > 0,
        # Starting a loader without a generator would advance torch's global one.
        "generator": torch.Generator(),
        "worker_init_fn": _ignore_group_signals,
    }


def _ignore_group_signals(worker: int) -> None:
    """Lets a worker ignore Ctrl-C, and SIGTERM unless its parent sent it."""
    # Terminals, torchrun and Slurm signal all processes of a job. A worker that ended at once would make the main
    # process fail before it writes its checkpoint. macOS does not tell the sender, so SIGTERM keeps its effect there.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_exit_with_parents_signal, args=(os.getppid(),), daemon=True).start()


def _exit_with_parents_signal(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)  # the main process reports workers that exit with another status
