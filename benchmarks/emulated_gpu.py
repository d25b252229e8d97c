"""A GPU that is not there: tensors that pass for ones on it, computed by the CPU, under a GPU's rules.

Within `emulated_gpu()` PyTorch and Lightning see one CUDA device. What is moved or made there stays in the CPU's
memory, so that a run must come to the very bits of the CPU's; but tensors here and there do not mix, and what would
make the CPU wait for the device is counted. What it cannot know: kernels, half precision, memory, the order of streams,
several devices, graphs, and what happens inside one of torch's own functions.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap
from torch.overrides import TorchFunctionMode

from fl_lightning.core import recording
from fl_lightning.core.reads import tensors_in

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
WAITS = "called a synchronizing CUDA operation"  # torch's own words under `set_sync_debug_mode`


class DeviceTensor(Tensor):
    """A tensor that passes for one on the GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with _as_it_is(self):
                made = type(self).__deepcopy__(self, {})
            memo[id(self)] = _place(made, True)
        return memo[id(self)]

    def __format__(self, spec: str) -> str:
        with _as_it_is(self):
            return format(self.detach().clone(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """On the CPU, as `map_location` would have it when it is read."""
        with _as_it_is(self):
            return type(self).__reduce_ex__(self, protocol)


class DeviceParameter(DeviceTensor, nn.Parameter):
    """A parameter that passes for one on the GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class DeviceGenerator(torch.Generator):
    """A generator that passes for one of the GPU."""

    device = CUDA


def is_there(value: Any) -> bool:
    """Whether a tensor passes for one on the GPU."""
    return isinstance(value, DeviceTensor)


def _place(tensor: Tensor, there: bool) -> Tensor:
    """The very tensor, as one on the GPU or on the CPU."""
    if is_there(tensor) != there:
        parameter = isinstance(tensor, nn.Parameter)
        kinds = (DeviceParameter, DeviceTensor) if there else (nn.Parameter, Tensor)
        tensor.__class__ = kinds[0] if parameter else kinds[1]
    return tensor


@contextmanager
def _as_it_is(tensor: Tensor) -> Iterator[None]:
    """On the CPU, for the length of a block."""
    _place(tensor, False)
    try:
        yield
    finally:
        _place(tensor, True)


def _changes(name: str) -> bool:
    """Whether a function writes into its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _is_gpu(device: Any) -> bool:
    return isinstance(device, int) or torch.device(device).type == "cuda"


T: Any = Tensor
_ABOUT = {T.device.__get__: CUDA, T.is_cuda.__get__: True, T.is_cpu.__get__: False, T.get_device: 0}
_MOVES = (T.to, T.cpu, T.cuda)
_READS = {"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__repr__", "__format__", "__contains__"}
_READS |= {"nonzero", "argwhere", "bincount", "equal", "allclose", "unique", "unique_consecutive", "masked_select"}
_READS |= {"repeat_interleave", "_local_scalar_dense", "is_nonzero"}
_BOTH = {"copy_", "_foreach_copy_", "_has_compatible_shallow_copy_type", "is_same_size", "size"}
"""What takes tensors of both kinds."""
_ARITHMETIC = "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power mod "
_ARITHMETIC += "floordiv truediv and or xor logical_and logical_or logical_xor maximum minimum max min fmax fmin atan2 "
_ARITHMETIC += "hypot xlogy copysign eq ne lt le gt ge where masked_fill fill"
_PAIRED = set(_ARITHMETIC.split())
_PAIRED |= {side + name for side in ("r", "i") for name in _PAIRED}
"""What takes a number on the CPU beside tensors on the GPU, without the underscores around the name."""


class EmulatedGPU(TorchFunctionMode):
    """Sees every call of torch in the block, and counts what waits, by name, in `waits`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._debug: Any = "default"

    def set_debug(self, mode: Any) -> None:
        """What `torch.cuda.set_sync_debug_mode` sets."""
        self._debug = mode

    def _wait(self, what: str) -> None:
        self.waits[what] += 1
        if self._debug == "warn":
            warnings.warn(f"{WAITS}: {what}", stacklevel=3)

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", str(func))
        if func in _MOVES:
            return self._move(func, args, kwargs)
        kwargs.pop("pin_memory", None)
        tensors = list(tensors_in((args, kwargs)))
        device = kwargs.get("device")
        if name == "__format__" and is_there(args[0]):
            self._wait(name)
            return DeviceTensor.__format__(*args)
        if name == "__deepcopy__" or (device is None and not any(map(is_there, tensors))):  # its memo holds all kinds
            return func(*args, **kwargs)
        if func in _ABOUT:
            return _ABOUT[func]
        if name in ("numpy", "__array__"):
            raise TypeError(f"{name}: can't convert a tensor on cuda:0 to numpy; use Tensor.cpu() first")
        if func == T.data.__set__:
            func(*args)
            _place(args[0], is_there(args[1]))
            return None
        if device is not None:
            return self._make(func, name, args, kwargs, tensors)
        self._check(name, args, kwargs, tensors)
        self._count(name, args, kwargs)
        out = func(*args, **kwargs)
        known = {id(own) for own in tensors}
        for own in tensors_in(out):
            if id(own) not in known:
                _place(own, True)
        return out

    def _make(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """A call that says where its result is to be."""
        there, generator = _is_gpu(kwargs.pop("device")), kwargs.get("generator")
        if there and generator is not None and generator.device.type == "cpu":
            raise RuntimeError(f"{name}: expected a 'cuda' device type for generator but found 'cpu'")
        if there and name in ("tensor", "as_tensor", "asarray") and not (tensors and all(map(is_there, tensors))):
            self._wait(f"{name}(device=)")
        made = func(*args, **kwargs)
        return _place(made, there) if isinstance(made, Tensor) else made

    def _move(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """`Tensor.to`, `cpu` and `cuda`."""
        source, rest = args[0], list(args[1:])
        target = {T.cpu: CPU, T.cuda: CUDA}.get(func, kwargs.get("device"))
        if rest and isinstance(rest[0], Tensor):
            target = CUDA if is_there(rest[0]) else CPU
            rest[0] = rest[0].dtype
        elif rest and isinstance(rest[0], (str, int, torch.device)) and not isinstance(rest[0], bool):
            target = rest.pop(0)
        if target is not None and torch.device(target).type == "meta":
            return T.to(source, *rest, device="meta")
        flags = [own for own in rest if isinstance(own, bool)]
        dtype = kwargs.get("dtype") or next((own for own in rest if isinstance(own, torch.dtype)), source.dtype)
        copies = kwargs.get("copy", len(flags) > 1 and flags[1])
        there, goes_there = is_there(source), is_there(source) if target is None else _is_gpu(target)
        if there != goes_there and not kwargs.get("non_blocking", bool(flags and flags[0])):
            self._wait("to the CPU" if there else "to the device")
        layout = {"memory_format": kwargs["memory_format"]} if kwargs.get("memory_format") else {}
        made = T.to(source, dtype, copy=copies or there != goes_there, **layout)
        return made if made is source else _place(made, goes_there)

    def _check(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        """Refuse tensors here and there in one call.

        An index on the CPU may go along, and a number where values are taken pair by pair, unless it is to be changed.
        """
        if name in _BOTH or (name in ("__getitem__", "__setitem__", "index_put_") and is_there(args[0])):
            return
        changed = [kwargs.get("out"), args[0] if args and _changes(name) else None]
        paired = name.strip("_") in _PAIRED and all(map(is_there, tensors_in(changed)))
        here = [own for own in tensors if not is_there(own) and (own.dim() > 0 or not paired)]
        if here:
            shapes = ", ".join(str(list(own.shape)) for own in here[:3])
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but {shapes} is on the CPU")

    def _count(self, name: str, args: Any, kwargs: Any) -> None:
        """Count what waits for the device: whose result the CPU must know, and copies between the two."""
        if name in _READS or (name == "where" and len(args) + len(kwargs) == 1):
            self._wait(name)
        elif name in ("__getitem__", "__setitem__"):
            index = list(tensors_in(args[1]))
            if any(own.dtype in (torch.bool, torch.uint8) for own in index):
                self._wait(f"{name} by a mask")
            elif any(not is_there(own) for own in [*index, *tensors_in(args[2:])] if own.dim()):
                self._wait(f"{name} from the CPU")
        elif name == "copy_" and is_there(args[0]) != is_there(args[1]):
            if not kwargs.get("non_blocking", len(args) > 2 and args[2]):
                self._wait("copy_ between devices")
        elif name == "_foreach_copy_" and any(is_there(a) != is_there(b) for a, b in zip(*args[:2], strict=True)):
            self._wait("_foreach_copy_ between devices")


def _hooked(gpu: EmulatedGPU, register: Callable[..., Any]) -> Callable[..., Any]:
    """Modules' backward hooks, which autograd calls outside the block, with gradients that say they are on the CPU."""

    def registered(module: nn.Module, hook: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        def call(own: nn.Module, *gradients: Any) -> Any:
            there = any(map(is_there, own.parameters()))
            for tensor in tensors_in(gradients):
                _place(tensor, there)
            with gpu:
                return hook(own, *gradients)

        return register(module, call, *arguments, **options)

    return registered


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch.func whose result is where its first argument is."""

    def kept(tensor: Any, *arguments: Any) -> Any:
        made = function(tensor, *arguments)
        return _place(made, is_there(tensor)) if isinstance(made, Tensor) and made is not tensor else made

    return kept


def _generator(device: Any = "cpu") -> torch.Generator:
    return DeviceGenerator() if _is_gpu(device) else torch._C.Generator()


def _grouped(group: Callable[..., Any]) -> Callable[..., Any]:
    """What gradient clipping groups its tensors with: torch asks them in C++, where they say that they are here."""

    def grouped(lists: Any, *arguments: Any) -> Any:
        there = any(map(is_there, tensors_in(lists)))
        return {(CUDA if there else key[0], *key[1:]): own for key, own in group(lists, *arguments).items()}

    return grouped


class _Properties:
    """Of the device."""

    name, major, minor, total_memory, multi_processor_count = "emulated", 7, 0, 16 << 30, 1


def _of_cuda(gpu: EmulatedGPU) -> dict[str, Any]:
    """What `torch.cuda` answers."""
    nothing: Any = lambda *_, **__: None  # noqa: E731
    silent = ("set_device", "empty_cache", "manual_seed_all", "manual_seed", "set_rng_state", "init", "_lazy_init")
    return {
        **dict.fromkeys((*silent, "reset_peak_memory_stats"), nothing),
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: gpu._wait("synchronize"),
        "get_rng_state": lambda device=0: torch.zeros(16, dtype=torch.uint8),
        "get_device_capability": lambda device=None: (7, 0),
        "get_device_name": lambda device=None: _Properties.name,
        "get_device_properties": lambda device=None: _Properties(),
        "mem_get_info": lambda device=None: (8 << 30, 16 << 30),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "set_sync_debug_mode": gpu.set_debug,
        "is_current_stream_capturing": lambda: False,
    }


@contextmanager
def emulated_gpu() -> Iterator[EmulatedGPU]:
    """One GPU, for the length of a block, in this thread."""
    gpu = EmulatedGPU()
    patches = [(torch.cuda, name, value) for name, value in _of_cuda(gpu).items()]
    patches += [(vmap, name, _kept(getattr(vmap, name))) for name in ("_add_batch_dim", "_remove_batch_dim")]
    wrapping = ("_wrap_for_grad", "_unwrap_for_grad")
    patches += [(eager_transforms, name, _kept(getattr(eager_transforms, name))) for name in wrapping]
    clipping = inspect.getmodule(inspect.unwrap(nn.utils.clip_grad_norm_))
    patches += [(clipping, "_group_tensors_by_device_and_dtype", _grouped(clipping._group_tensors_by_device_and_dtype))]  # type: ignore[union-attr]
    patches += [(torch, "Generator", _generator), (recording, "can_record", lambda device: False)]
    hooks = ("register_full_backward_hook", "register_backward_hook")
    patches += [(nn.Module, name, _hooked(gpu, getattr(nn.Module, name))) for name in hooks]
    health = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
    of_optimizers = [name for name in health if hasattr(torch.optim.Optimizer, name)]
    patches += [(torch.optim.Optimizer, name, lambda self: None) for name in of_optimizers]
    with ExitStack() as stack:
        for home, name, value in patches:
            stack.enter_context(mock.patch.object(home, name, value))
        stack.enter_context(gpu)
        yield gpu
