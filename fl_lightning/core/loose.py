"""What a method's modules hold beside parameters and buffers: attributes that may differ from client to client.

Whether it is the same is asked, and answered, in several ways:

- `Attributes.mark`: are two clients alike, and has a step set an attribute? By value, or by which object it is.
- `Attributes.objects`: has a step changed what is in an object? By its numbers and words.
- `Attributes.contents`: has a client written into what others hold, too? By sums over memory.
- `held`, in a file of its own, and `Attributes.layers`: are steps that were recorded those of this fit, too? By values,
  and by what tensors look like.

Each looks into other containers: a mark into every list, tuple and mapping; `held` into those that it can make anew
with other tensors; `contents` names what `taken` has not copied; `leaves` and `sums` look into whatever they can.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from fl_lightning.core.leaves import MOST_LEAVES, OF_LAYERS, OF_MODULES, PLAIN, SIMPLE, leaves, sums, tensors_of
from fl_lightning.core.mark import Mark, stand_in, without_tensors, written_to
from fl_lightning.core.of_classes import OfClass, of_classes
from fl_lightning.core.reads import address, flat
from fl_lightning.core.rows import Alias, Layout
from fl_lightning.core.telling import told_in
from fl_lightning.core.written import Contents, Filled, beneath, is_constant, of_layer

OF_METHODS = frozenset({"facts", "fit", "_division"})
"""What the machine sets; a stacked step is told of it otherwise."""
_SET = OF_MODULES | OF_METHODS
_BESIDE_FIT = ("receive", "on_fit_end", "after_fit", "send", "predictors", "adapt")
"""Where methods and terms may read what steps have left."""


class Attributes:
    """The loose attributes of a method, its terms and its networks.

    Torch's own layers are left out but for their mode: what they have is mostly set by their constructor alone.

    Args:
        method: the resident one.
        layout: where its tensors stand.
    """

    def __init__(self, method: nn.Module, layout: Layout) -> None:
        self._layout = layout
        self._modules = list(method.modules())
        self._parameters = list(method.parameters())
        self._constant: dict[int, Any] = {}
        self.own = frozenset(id(module) for module in self._modules)
        """Ids of the method's modules, which are asked by themselves."""
        self._named: list[tuple[str, nn.Module]] = [
            (name or type(method).__name__, module)
            for name, module in method.named_modules()
            if not type(module).__module__.startswith("torch.nn")
        ]
        own = {id(module) for _, module in self._named}
        self._layers = [module for module in self._modules if id(module) not in own]

    def _own(self) -> Iterator[tuple[str, str, Any]]:
        """Module, attribute and value of what neither torch nor the machine sets."""
        for name, module in self._named:
            for key, value in vars(module).items():
                if key not in _SET:
                    yield name, key, value

    def mark(self) -> Mark:
        """What stands for the present attributes.

        Raises:
            Unstackable: for an attribute that draws random numbers, or shows memory of a parameter or buffer.
        """
        numbers, memory = self._layout.numbers(), functools.cache(self._memory)
        found = [
            (name, key, value if type(value) in SIMPLE else stand_in(value, f"{name}.{key}", numbers, memory))
            for name, key, value in self._own()
        ]
        return Mark(self.modes(), tuple(found), self.free())

    def _memory(self) -> set[int]:
        """Addresses of parameters and buffers."""
        tensors = [home[key] for place in self._layout.places for home, key in place.homes]
        return {address(tensor) for tensor in tensors if tensor is not None and tensor.numel()}

    def modes(self) -> tuple[bool, ...]:
        """Of every module, whether it trains."""
        return tuple(module.training for module in self._modules)

    def free(self) -> tuple[bool, ...]:
        """Of every parameter, whether it is not frozen."""
        return tuple(parameter.requires_grad for parameter in self._parameters)

    def layers(self) -> Hashable:
        """What torch's own layers have beside their tensors, and what hooks passes run through."""
        found: list[Hashable] = []
        for module in self._layers:
            for key, value in vars(module).items():
                if key not in OF_LAYERS:
                    found.append((key, value if type(value) in SIMPLE else tuple(leaves(value, self.own).items())))
        for module in self._modules:
            if module._forward_pre_hooks or module._forward_hooks:
                hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
                found += [tuple(leaves(hook, self.own).items()) for hook in hooks]
        return tuple(found)

    def objects(self) -> dict[tuple[str, str], tuple[dict[str, Hashable], dict[str, tuple[Tensor, int]]]]:
        """What attributes that are objects of somebody's own come to, and their tensors, by module and attribute.

        How often a tensor was written to is left out where it is the model's, which holds one client and another.
        """
        memory = functools.cache(self._memory)
        return {
            (name, key): (
                leaves(value, self.own),
                {way: (own, written_to(own, memory)) for way, own in tensors_of(value).items()},
            )
            for name, key, value in self._own()
            if type(value) not in SIMPLE and not isinstance(value, (Tensor, *PLAIN))
        }

    def of_layers(self) -> list[tuple[str, Any]]:
        """What torch's own layers have beside their tensors, by its names there, which steps may set or write into."""
        own = ((key, value) for layer in self._layers for key, value in vars(layer).items() if key not in OF_LAYERS)
        return [
            (key, value if type(value) in SIMPLE else without_tensors(leaves(value, self.own)))
            for key, value in own
            if not isinstance(value, (Tensor, tuple))
        ]

    def of_classes(self) -> list[OfClass]:
        """What the modules' classes hold for all clients alike, which steps may write into."""
        return of_classes(self._named, self._layout.numbers())

    def contents(self) -> Contents:
        """What the attributes hold that can be written into; of torch's own layers, what they have."""
        passed = self._layout.numbers().keys() | self.own
        objects = {
            f"{name}.{key}{way}": (own, tuple(sums(own, passed).items()))
            for name, key, value in self._own()
            if type(value) not in SIMPLE and not self._is_constant(value)
            for way, own in beneath(value)
        }
        return Contents(objects, [of_layer(vars(layer), passed) for layer in self._layers])

    def _is_constant(self, value: Any) -> bool:
        """Whether nothing can be written into a value, now or when it was seen before."""
        if id(value) in self._constant:
            return True
        if not is_constant(value):
            return False
        if len(self._constant) < MOST_LEAVES:  # a receive may make one of its own for every client
            self._constant[id(value)] = value  # which keeps its address
        return True

    def is_read(self, module: str, name: str) -> bool:
        """Whether an attribute that steps make may be read after them: the class has it, or code beside the fit."""
        return hasattr(type(dict(self._named)[module]), name) or name in self._told

    @functools.cached_property
    def _told(self) -> frozenset[str]:
        """The names that code speaks of which a method and its terms run beside the fit."""
        return told_in(map(type, self._modules), _BESIDE_FIT)

    def aliases(self) -> list[Alias]:
        """The attributes that hold parameters or buffers."""
        numbers, found = self._layout.numbers(), []
        for _, module in self._named:
            for key, value in vars(module).items():
                held = list(flat(value)) if key not in OF_MODULES else []
                if held and all(id(own) in numbers for own in held):
                    found.append(Alias(vars(module), key, value, numbers))
        return found

    def thaw(self, free: Sequence[bool]) -> None:
        """Let parameters be free, or frozen, as `free` said."""
        for parameter, own in zip(self._parameters, free, strict=True):
            if parameter.requires_grad != own:
                parameter.requires_grad_(own)

    def taken(self) -> list[dict[str, Any]]:
        """The attributes, so that `restore` can bring them back; of containers what they hold, too."""
        return [
            {key: _filled(value) for key, value in vars(module).items() if key not in OF_MODULES}
            for _, module in self._named
        ]

    def restore(self, taken: list[dict[str, Any]], mark: Mark | None = None) -> None:
        """Bring attributes back; those that are new go.

        Args:
            taken: what `taken` gave.
            mark: of the same moment: modules train, and parameters are free, as they did; None leaves them.
        """
        if mark is not None:
            self.thaw(mark.free)
            for module, trains in zip(self._modules, mark.modes, strict=True):
                if module.training != trains:
                    module.training = trains
        for (_, module), own in zip(self._named, taken, strict=True):
            there = vars(module)
            for key in [key for key in there if key not in OF_MODULES and key not in own]:
                del there[key]
            there.update((key, value.again() if isinstance(value, Filled) else value) for key, value in own.items())


def _filled(value: Any) -> Any:
    return Filled(value, copy.copy(value)) if isinstance(value, (list, dict, set)) else value
