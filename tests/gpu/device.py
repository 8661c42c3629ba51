"""A pretended CUDA device: tensors that say "cuda", compute on the CPU, and refuse to meet CPU tensors.

Inside `pretended_cuda()`, `.to("cuda")` and `device="cuda"` make such tensors, no CUDA is started, and each place where
the host of a real device would wait for its results is counted. Values are those of a CPU.

torch's engine for backward passes asks for a real device. `backward` walks over the graph instead.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from timm_moe_dg.layers.experts import StackedExperts

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
PACKAGE = Path(__file__).parents[2] / "timm_moe_dg"
# Results whose shapes depend on values, which a host has to read
_SHAPES_FROM_VALUES = {
    *(aten.nonzero.default, aten.masked_select.default, aten.repeat_interleave.Tensor),
    *(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default, aten.bincount.default),
}
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten._is_all_true.default}
_TRANSFERS = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}


class MixedDevicesError(RuntimeError):
    """An operation on a tensor of the pretended device and one of the CPU."""


class PretendedTensor(Tensor):
    """A tensor of the pretended device around one of the CPU, `inner`."""

    inner: Any

    @staticmethod
    def __new__(cls, inner: Tensor) -> "PretendedTensor":
        options: dict[str, Any] = {"dtype": inner.dtype, "device": DEVICE, "storage_offset": inner.storage_offset()}
        size = (inner.size(), inner.stride())
        tensor = Tensor._make_wrapper_subclass(cls, size[0], strides=size[1], **options)
        tensor.inner = inner
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"PretendedTensor({self.inner!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _Mode.current().run(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Reads all values."""
        _Mode.current().wait("tolist")
        return self.inner.tolist()


class _Mode(TorchDispatchMode):
    """Sees every operation. In the place of torch's fake mode, in which torch starts no CUDA."""

    _mode_key = torch._C._TorchDispatchModeKey.FAKE
    active: "list[_Mode]" = []  # noqa: RUF012 (a stack)

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    @classmethod
    def current(cls) -> "_Mode":
        return cls.active[-1]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def wait(self, what: str) -> None:
        """Counts a wait in the innermost file of the package."""
        frame: Any = sys._getframe(1)
        while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            frame = frame.f_back
        file = "elsewhere" if frame is None else Path(frame.f_code.co_filename).relative_to(PACKAGE)
        self.waits[f"{file} {what}"] += 1

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes on the CPU what a device would compute."""
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        pretended = [tensor for tensor in tensors if isinstance(tensor, PretendedTensor)]
        target = kwargs.get("device")
        wraps = bool(pretended) if target is None else torch.device(target).type == "cuda"
        if func in _TRANSFERS:
            if func is not aten._to_copy.default:
                wraps = isinstance(args[0], PretendedTensor)
            if pretended and not wraps:
                self.wait("copy to the host")
        elif pretended:
            _refuse_mixture(func, tensors)
        if func in _READS and pretended:
            self.wait(func.overloadpacket.__name__)
            wraps = False
        if _shape_depends_on_values(func, args, kwargs) and pretended:
            self.wait(func.overloadpacket.__name__)
        inner_args, inner_kwargs = tree_map(_unwrap, (args, kwargs))
        if target is not None:
            inner_kwargs["device"] = torch.device("cpu")
        if inner_kwargs.get("pin_memory"):
            inner_kwargs["pin_memory"] = False
        results = func(*inner_args, **inner_kwargs)
        return _rewrap(results, tree_flatten((args, kwargs))[0], wraps)


def _unwrap(value: Any) -> Any:
    return value.inner if isinstance(value, PretendedTensor) else value


def _rewrap(results: Any, inputs: Sequence[Any], wraps: bool) -> Any:
    """Wraps results, and returns the given tensor where an operation returns one."""
    given = {id(_unwrap(value)): value for value in inputs if isinstance(value, Tensor)}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, PretendedTensor):
            return value
        return given.get(id(value)) if id(value) in given else PretendedTensor(value) if wraps else value

    return tree_map(wrap, results)


def _refuse_mixture(func: Any, tensors: Sequence[Tensor]) -> None:
    if func.namespace == "timm_moe_dg":  # its counts may be on the host
        return
    # Scalars of the CPU are allowed, as on a real device
    strangers = [tensor for tensor in tensors if not isinstance(tensor, PretendedTensor) and tensor.ndim > 0]
    if strangers:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in strangers)
        raise MixedDevicesError(f"{func}: tensors of cuda and of the CPU ({shapes})")


def _shape_depends_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return func in _SHAPES_FROM_VALUES


@contextmanager
def pretended_cuda(capability: tuple[int, int] = (8, 0)) -> Iterator[Counter[str]]:
    """Pretends that there is a CUDA device of a capability, and yields the counts of waits by file and operation."""
    torch._C._ensureCUDADeviceGuardSet()  # without a GPU: one that does nothing, as torch has it for fake tensors
    mode, generator = _Mode(), torch.Generator

    class CpuGenerator(generator):  # type: ignore[misc, valid-type]
        def __new__(cls, device: object = "cpu") -> Any:
            return generator("cpu")

    patches: list[Any] = [
        # Weights of another class than a parameter's count as quantized
        mock.patch.object(StackedExperts, "_is_quantized", return_value=False),
        mock.patch.object(torch, "Generator", CpuGenerator),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
        mock.patch.object(Tensor, "backward", backward),
        mock.patch("torch.autograd.grad", grad),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(mode)
        _Mode.active.append(mode)
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes its values on the CPU, then moves them
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        torch.__future__.set_swap_module_params_on_conversion(True)  # `.to` keeps parameters, whose class changes
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, False)
        stack.callback(_Mode.active.pop)
        yield mode.waits


def to_host(value: Any) -> Any:
    """Values of the pretended device as tensors of the CPU, without counting it."""
    return tree_map(lambda item: item.inner if isinstance(item, PretendedTensor) else item, value)


def gradients(outputs: Sequence[Tensor], wanted: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """As `torch.autograd.grad`, node by node of the graph, without its engine."""
    roots = [(output.grad_fn, output.output_nr, grad) for output, grad in zip(outputs, grads, strict=True)]
    order = _topological([node for node, _, _ in roots if node is not None])
    pending: dict[Any, list[Tensor | None]] = {node: [] for node in order}
    for node, number, value in roots:
        _add(pending, node, number, value)
    places = {_accumulator(tensor): position for position, tensor in enumerate(wanted)}
    found: list[Tensor | None] = [None] * len(wanted)
    for node in order:
        received = pending.pop(node)
        if node in places:
            found[places[node]] = received[0] if received else None
        if not any(grad is not None for grad in received) or type(node).__name__ == "AccumulateGrad":
            continue
        apply: Callable[..., Any] = getattr(node, "apply", node)
        results = apply(*_filled(node, received))
        edges, results = node.next_functions, results if isinstance(results, tuple) else (results,)
        if isinstance(node, torch.autograd.function.BackwardCFunction):  # no edges for inputs that are no tensors
            edges = [edge for edge in edges if edge[0] is not None]
            results = [grad for grad, needed in zip(results, node.needs_input_grad, strict=True) if needed]
        for (following, number), grad in zip(edges, results, strict=False):
            if following is not None and grad is not None:
                _add(pending, following, number, grad)
    return found


def _filled(node: Any, received: list[Tensor | None]) -> list[Tensor | None]:
    """One gradient for each output of a node."""
    metadata = node._input_metadata
    missing = [None] * (len(metadata) - len(received))
    grads = [*received, *missing]
    if not isinstance(node, torch.autograd.function.BackwardCFunction) or not getattr(node, "materialize_grads", True):
        return grads
    return [
        PretendedTensor(torch.zeros(tuple(item.shape), dtype=item.dtype)) if grad is None else grad
        for grad, item in zip(grads, metadata, strict=True)
    ]


def _accumulator(tensor: Tensor) -> Any:
    """The node at which a tensor's gradient arrives."""
    with torch.enable_grad():
        node: Any = tensor.view_as(tensor).grad_fn
    return node.next_functions[0][0] if tensor.grad_fn is None else tensor.grad_fn


def _add(pending: dict[Any, list[Tensor | None]], node: Any, number: int, grad: Tensor) -> None:
    received, expected = pending[node], node._input_metadata[number]
    received += [None] * (number + 1 - len(received))
    grad = grad.sum_to_size(tuple(expected.shape)).to(expected.dtype)  # as torch's engine does between two nodes
    before = received[number]
    received[number] = grad if before is None else before + grad


def _topological(roots: Sequence[Any]) -> list[Any]:
    """Nodes of a graph, each before those that its gradients go to."""
    order: list[Any] = []
    done: set[Any] = set()
    stack = [(node, False) for node in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in done:
            done.add(node)
            stack.append((node, True))
            stack += [(following, False) for following, _ in node.next_functions if following is not None]
    return order[::-1]


def backward(loss: Tensor, **_: object) -> None:
    """As `loss.backward()`: adds to the gradients of the leaves."""
    leaves = [node.variable for node in _topological([loss.grad_fn]) if type(node).__name__ == "AccumulateGrad"]
    with torch.no_grad():
        for leaf, value in zip(leaves, gradients([loss], leaves, [torch.ones_like(loss)]), strict=True):
            if value is not None:
                leaf.grad = value.detach() if leaf.grad is None else leaf.grad + value


def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, create_graph: bool = False, **_: object) -> Any:
    """As `torch.autograd.grad`."""
    outputs, inputs = (list(value) if isinstance(value, tuple | list) else [value] for value in (outputs, inputs))
    given = [torch.ones_like(output) for output in outputs] if grad_outputs is None else [grad_outputs]
    with torch.set_grad_enabled(create_graph):
        return tuple(gradients(outputs, inputs, given))
