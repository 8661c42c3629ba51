"""What a run is about to do, said before it does it."""

from ..data.bands import RGB
from ..protocols.domain_roles import describe_role
from .plan import RunPlan


def describe(plan: RunPlan) -> str:
    """Writes the data and their roles as a table, then what is trained for how long, and where things go."""
    options, training = plan.options, set(plan.training)
    images = sum(len(domain) for domain in plan.domains)
    width = max(len("domain"), *map(len, plan.names))
    lines = [
        f"data: {options.dataset}, {len(plan.domains)} domains, {images} images, {len(plan.classes)} classes",
        f"  {'domain':<{width}}  {'role':<9}  in-split  out-split",
    ]
    for position, (domain, split) in enumerate(zip(plan.domains, plan.splits, strict=True)):
        role = describe_role(domain, position not in training)
        lines.append(f"  {domain.name:<{width}}  {role:<10} {len(split.inside):8}  {len(split.outside):9}")
    smallest = min(plan.training, key=lambda position: len(plan.splits[position].inside))
    per_epoch = len(plan.splits[smallest].inside) / options.batch_size
    return "\n".join(
        [
            *lines,
            *_bands(plan),
            f"held out: {', '.join(plan.names[position] for position in options.test_domains)}",
            f"training: {options.model}, {options.algorithm}; {options.steps} steps of {len(training)} x "
            f"{options.batch_size} images, evaluated every {options.eval_freq}; {per_epoch:.1f} steps are one pass "
            f"over {plan.names[smallest]}, the smallest training domain, so {options.steps / per_epoch:.1f} in all",
            f"output: {plan.folder.path}",
        ]
    )


def _bands(plan: RunPlan) -> list[str]:
    count = plan.options.in_chans
    shown = plan.benchmark.augmentation == "photograph" and count != RGB
    remark = "; augmented by crop and mirror alone, as color jitter and gray are of RGB images" if shown else ""
    return [] if count == RGB else [f"images: {count} bands, whole numbers scaled by their type's maximum{remark}"]
