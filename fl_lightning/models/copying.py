"""Copies of networks that do what the networks do: hooks go along, which `copy.deepcopy` leaves with the original."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

from fl_lightning.errors import ConfigError, require

Module = TypeVar("Module", bound=nn.Module)
_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TORCH = frozenset(vars(nn.Module()))
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def copied(module: Module, key: str = "model") -> Module:
    """A deep copy of a network that is to be trained, with the hooks of its parameters' gradients.

    Args:
        module: the network; bound methods of its modules that are hooks become those of the copy's.
        key: of the network, for the error.

    Raises:
        ConfigError: as `require_whole` does, or if a part of it cannot be copied.
    """
    require_whole(module, key)
    memo: dict[int, Any] = {}
    kind = type(module).__name__
    try:
        made = copy.deepcopy(module, memo)
    except RuntimeError as error:
        if "graph leaves" not in str(error):
            raise
        rule = f"{kind} has an attribute that other tensors make, as torch.nn.utils.weight_norm does, and is copied"
        raise ConfigError(key, f"{rule}: take torch.nn.utils.parametrizations.weight_norm") from error
    scripted = any(id(parameter) not in memo for parameter in module.parameters())
    rule = f"{kind} has a part in TorchScript, of which no copy can be trained by itself: give what it was made of"
    require(not scripted, key, rule)
    for parameter in module.parameters():
        new = memo[id(parameter)]
        for hook in (getattr(parameter, "_backward_hooks", None) or {}).values():
            new.register_hook(copy.deepcopy(hook, memo))
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            new.register_post_accumulate_grad_hook(copy.deepcopy(hook, memo))
    return made


def require_whole(module: nn.Module, key: str = "model", learns: bool = True) -> None:
    """Refuse a network of which a copy would not be whole.

    Args:
        module: the network.
        key: of it, for the error.
        learns: whether the copy will: hooks of gradients are no matter to one that does not.

    Raises:
        ConfigError: if a hook, or an attribute, is a function that holds on to the network's own modules or tensors:
            that of the copy would go on reading those of the original.
    """
    own = {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}
    for place, function in (*_hooks(module, learns), *_functions(module)):
        if any(id(held) in own for held in _held(function)):
            rule = (
                f"the {place} holds on to parts of {type(module).__name__}, which is copied, and "
                "would stay with the original; make it a method of the module (self.mask), which goes along"
            )
            raise ConfigError(key, rule)


def hook_tables(
    module: nn.Module, learns: bool = True
) -> Iterator[tuple[str, MutableMapping[int, Callable[..., Any]]]]:
    """The hooks of a network and of its parameters' gradients, as torch keeps them by number, with where they are.

    Args:
        module: the network.
        learns: whether those on the way back count, too.
    """
    for prefix, part in module.named_modules():
        names = _OF_MODULES if learns else _OF_MODULES[:2]
        yield from ((prefix or type(part).__name__, getattr(part, name)) for name in names)
    for place, parameter in module.named_parameters() if learns else ():
        tables = (getattr(parameter, name, None) for name in _OF_PARAMETERS)
        yield from ((place, table) for table in tables if table is not None)


def _hooks(module: nn.Module, learns: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The hooks of a network, with what they are."""
    for place, table in hook_tables(module, learns):
        yield from ((f"hook {_name(hook)} of {place}", hook) for hook in table.values())


def _functions(module: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    """The functions in a network's attributes, and in containers there, with what they are."""
    for prefix, part in module.named_modules():
        for name, value in _attributes(part).items():
            for inner in () if name in _OF_TORCH else _taken_apart([value]):
                if isinstance(inner, FunctionType):
                    yield f"function {_name(inner)} in {prefix or type(part).__name__}.{name}", inner


def _attributes(part: nn.Module) -> Mapping[str, Any]:
    """Those that `copy.deepcopy` copies; a metric of torchmetrics' makes functions of its own anew."""
    if hasattr(part, "__deepcopy__"):
        return {}
    states: Any = part.__reduce_ex__(4)[2:3]
    return states[0] if states and isinstance(states[0], Mapping) else {}


def _held(function: Any) -> Iterator[Any]:
    """The modules and tensors that a function holds on to, by what it closes over or its defaults, or what these do."""
    for held in _taken_apart(_of_function(function), functions=True):
        if isinstance(held, (nn.Module, Tensor)):
            yield held


def _taken_apart(values: Iterable[Any], functions: bool = False) -> Iterator[Any]:
    """Some values, and what stands in containers among them; and what functions hold on to, if asked."""
    waiting, seen = list(values), set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif functions and isinstance(value, FunctionType):
            waiting += _of_function(value)
        elif functions and isinstance(value, MethodType):
            waiting.append(value.__self__)


def _of_function(function: Any) -> list[Any]:
    """What a function closes over, and its defaults."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_full(cell)]
    given = getattr(function, "__kwdefaults__", None) or {}
    return [*cells, *(getattr(function, "__defaults__", None) or ()), *given.values()]


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # of a function that refers to itself, before it is there
        return False


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))
