"""Copies of networks that do what the networks do: hooks go along, which `copy.deepcopy` leaves with the original."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

from torch import Tensor, nn

from fl_lightning.errors import ConfigError, require

Module = TypeVar("Module", bound=nn.Module)
_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def copied(module: Module, key: str = "model") -> Module:
    """A deep copy of a network that is to be trained, with the hooks of its parameters' gradients.

    Args:
        module: the network; bound methods of its modules that are hooks become those of the copy's.
        key: of the network, for the error.

    Raises:
        ConfigError: if a hook is a function that holds on to the network's own modules or tensors: that of the copy
            would go on reading those of the original, which nobody trains; or if a part of it cannot be copied.
    """
    own = {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}
    for place, hook in _hooks(module):
        if any(id(held) in own for held in _held(hook)):
            rule = (
                f"the hook {_name(hook)} of {place} holds on to parts of {type(module).__name__}, which is copied, and "
                "would stay with the original; make it a method of the module (self.mask), which goes along"
            )
            raise ConfigError(key, rule)
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


def hook_tables(module: nn.Module) -> Iterator[tuple[str, MutableMapping[int, Callable[..., Any]]]]:
    """The hooks of a network and of its parameters' gradients, as torch keeps them by number, with where they are."""
    for prefix, part in module.named_modules():
        yield from ((prefix or type(part).__name__, getattr(part, name)) for name in _OF_MODULES)
    for place, parameter in module.named_parameters():
        tables = (getattr(parameter, name, None) for name in _OF_PARAMETERS)
        yield from ((place, table) for table in tables if table is not None)


def _hooks(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """All hooks of a network, with where they are."""
    return ((place, hook) for place, table in hook_tables(module) for hook in table.values())


def _held(hook: Any) -> Iterator[Any]:
    """What a function holds on to: what it closes over, its defaults, and what stands in containers of these."""
    cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or () if _is_full(cell)]
    given = getattr(hook, "__kwdefaults__", None) or {}
    waiting = [*cells, *(getattr(hook, "__defaults__", None) or ()), *given.values()]
    seen: set[int] = set()
    while waiting:
        held = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, (nn.Module, Tensor)):
            yield held
        elif isinstance(held, Mapping):
            waiting += held.values()
        elif isinstance(held, (list, tuple, set, frozenset)):
            waiting += held


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # of a function that refers to itself, before it is there
        return False


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))
