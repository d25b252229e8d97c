"""Which entries of a method's state travel, which stay with the client, and which every receive makes anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fl_lightning.core.moving import copies, copy_all, moved
from fl_lightning.core.nobody import asked_once
from fl_lightning.core.walking import parts_of
from fl_lightning.errors import ConfigError, require
from fl_lightning.models.split import SplitModel
from fl_lightning.own_methods import overrides

Place = tuple[str, dict[str, Any], str]
"""An entry's name, the dict that has it, and its key there."""
_SAVING = ("state_dict", "_save_to_state_dict", "get_extra_state")


class LooseBuffers:
    """The non-persistent buffers of a method, its terms and its models as they are now, which no state dict holds.

    Every receive makes those of the method and its terms anew; what one leaves as it is must not be another client's.

    Args:
        places: the dicts that have them, and their keys there.
    """

    def __init__(self, places: Sequence[tuple[dict[str, Any], str]]) -> None:
        self._taken = [(home, key, None if home[key] is None else home[key].detach().clone()) for home, key in places]

    @torch.no_grad()
    def put_back(self) -> None:
        """Let them be what they were; one that a model has made, or grown, since is again what it was before."""
        for home, key, value in self._taken:
            own = home[key]
            if own is not None and value is not None and own.shape == value.shape and not own.is_inference():
                own.copy_(value)
            else:
                home[key] = None if value is None else value.clone()


class Division:
    """The division of a method's state dict.

    Args:
        method: a module that says what it shares and keeps.
        share_buffers: whether batch norm's running statistics travel with their layers; otherwise they are kept.

    Raises:
        ConfigError: naming an entry that is no tensor or lasts no longer than a state dict, or that is exchanged and
            complex.
    """

    def __init__(self, method: nn.Module, share_buffers: bool = True) -> None:
        self._method = method
        self._share_buffers = share_buffers
        self._places = _places(method)
        self._loose = _loose_places(method)
        owners = {
            f"{prefix}.{name}" if prefix else name: module
            for prefix, module in method.named_modules()
            for name in (*module._parameters, *module._buffers)
        }
        state = method.state_dict()
        _check_tensors(state)
        tied = _tied(method)  # one tensor travels once, by the first of its names
        entries = [(name, owners.get(name, method)) for name in state if name not in tied]
        shared = self._select(entries, method.is_shared, stays=False)  # type: ignore[arg-type]
        self.fixed = _fixed(method, shared)
        """Names of the parameters that would be exchanged, had they not come frozen with the model: all have them."""
        entries = [(name, owner) for name, owner in entries if name not in self.fixed]
        self.shared = tuple(name for name in shared if name not in self.fixed)
        """Names of the entries that are exchanged."""
        self.kept = self._select(entries, method.is_kept, stays=True)  # type: ignore[arg-type]
        """Names of the entries that are kept between rounds."""
        odd = next((name for name in self.shared if state[name].is_complex()), None)
        rule = f"{odd} is complex, and what is exchanged must be real; keep torch.view_as_real of it"
        require(odd is None, "model", rule)
        if self._places is None:
            _check_live(state, method.state_dict())
        self._names, self._count = frozenset(state), _count(method)
        self._owners = {name.rpartition(".")[0]: owners[name] for name in state if name in owners}
        self._forms = {name: (own.shape, own.dtype) for name, own in state.items()}
        there = {*self.shared, *self.kept}
        self.anew = tuple(name for name, _ in entries if name not in there)
        """Names of the entries that every receive makes anew, the same for all clients."""

    def _select(
        self, entries: Sequence[tuple[str, nn.Module]], rule: Callable[[str, nn.Module], bool], stays: bool
    ) -> tuple[str, ...]:
        def chosen(name: str, owner: nn.Module) -> bool:
            statistic = isinstance(owner, _NormBase) and name.rpartition(".")[2] in owner._buffers
            return stays if statistic and not self._share_buffers else rule(name, owner)

        what = f"{'is_kept' if stays else 'is_shared'}()"
        with asked_once(self._method, what):
            said = [chosen(name, owner) for name, owner in entries]
        returns = not said or any(own is not None for own in said)
        require(
            returns, "method", f"{type(self._method).__name__}.{what} gives nothing for any entry: return True or False"
        )
        return tuple(name for (name, _), own in zip(entries, said, strict=True) if own)

    def __contains__(self, name: str) -> bool:
        """Whether the state has an entry of that name."""
        return name in self._names

    def entries(self) -> dict[str, Tensor]:
        """The method's state dict as it is now, without copies: its places are found once, their tensors every time."""
        if self._places is None:
            return self._method.state_dict()
        return {name: home[key].detach() for name, home, key in self._places if home[key] is not None}

    def check_whole(self) -> None:
        """Refuse a state that has other entries, or places, than it had: no receive puts the next client's there.

        Raises:
            ConfigError: naming one that a fit has made, or taken away, or whose module is another one.
        """
        runs_on = "or it would run on from client to client"
        if _count(self._method) != self._count:
            odd = sorted(self._names ^ self._method.state_dict().keys())[0]
            came = "gone" if odd in self._names else "new"
            rule = f"{odd} of its state is {came} after a fit; make it, with its shape, where the module is made"
            raise ConfigError("model", f"{rule}, {runs_on}")
        there = set(parts_of(self._method))
        other = next((name for name, owner in self._owners.items() if owner not in there), None)
        rule = f"{other} is another module after a fit; copy into its entries (load_state_dict) instead, {runs_on}"
        require(other is None, "model", rule)

    def check_form(self, name: str, tensor: Tensor) -> None:
        """Refuse an entry of another shape, or kind of numbers, than it had: a client's own state does not go into it.

        Raises:
            ConfigError: naming it.
        """
        shape, dtype = self._forms.get(name, (tensor.shape, tensor.dtype))
        was, now = tuple(shape), tuple(tensor.shape)
        rule = f"{name} of its state has gone from {was} to {now}: a state has one shape for all clients and rounds"
        require(now == was, "model", f"{rule}; make it, as large as the largest needs, where the module is made")
        types = " to ".join(str(own).removeprefix("torch.") for own in (dtype, tensor.dtype))
        rule = f"{name} of its state has gone from {types}: a state has one type for all clients and rounds"
        rule = f"{rule}; make it, of the type that it comes to, where the module is made"
        require(_kind(dtype) == _kind(tensor.dtype), "model", rule)

    def state(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Entries of the method as it is now, without copies, that a client's later state is to be put into.

        Raises:
            ConfigError: naming the first that has another shape, or kind of numbers, than it had.
        """
        entries = self.entries()
        for name in names:
            if (entries[name].shape, entries[name].dtype) != self._forms[name]:
                self.check_form(name, entries[name])
        return {name: entries[name] for name in names}

    def fixed_entries(self) -> dict[str, Tensor]:
        """What is frozen and the same for all, without copies."""
        entries = self.entries() if self.fixed else {}
        return {name: entries[name] for name in self.fixed}

    def loose(self) -> LooseBuffers:
        """What no entry holds of the method's models."""
        return LooseBuffers(self._loose)

    def weights(self) -> dict[str, Tensor]:
        """Copies of the entries that are exchanged, those of one type in one block."""
        entries = self.entries()
        return copies({name: entries[name] for name in self.shared})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the entries that are exchanged."""
        entries = self.entries()
        return {name: tuple(entries[name].shape) for name in self.shared}

    def parameter_counts(self) -> tuple[int, int]:
        """Trainable parameters that stay, and those that travel."""
        shared = set(self.shared)
        sizes = {name: p.numel() for name, p in self._method.named_parameters() if p.requires_grad}
        travels = sum(size for name, size in sizes.items() if name in shared)
        return sum(sizes.values()) - travels, travels


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """What of a type a state must have for another to take it: how wide its numbers are may differ."""
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _count(module: nn.Module) -> int:
    """How many parameters and persistent buffers it has, tied ones each time."""
    count = 0
    for part in parts_of(module):
        for tensor in part._parameters.values():
            count += tensor is not None
        for name, buffer in part._buffers.items():
            count += buffer is not None and name not in part._non_persistent_buffers_set
    return count


def _fixed(method: nn.Module, shared: Sequence[str]) -> tuple[str, ...]:
    """Those of the shared entries that the model's maker froze, and nobody has thawed since."""
    frozen = {id(parameter) for parameter in getattr(method, "_given_frozen", ()) if not parameter.requires_grad}
    parameters = dict(method.named_parameters(remove_duplicate=False)) if frozen else {}
    return tuple(name for name in shared if id(parameters.get(name)) in frozen)


def _tied(module: nn.Module) -> set[str]:
    """Names of a module's entries whose tensors have a name before."""
    known: set[int] = set()
    found: set[str] = set()
    for prefix, part in module.named_modules(remove_duplicate=False):
        for home in (part._parameters, part._buffers):
            for key, tensor in home.items():
                if id(tensor) in known:
                    found.add(f"{prefix}.{key}" if prefix else key)
                elif tensor is not None:
                    known.add(id(tensor))
    return found


def _check_tensors(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        rule = f"{name} of its state must be a tensor: what get_extra_state gives is swapped and sent, too"
        require(isinstance(value, Tensor), "model", rule, type(value).__name__)


def _check_live(state: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    """Refuse entries that are tensors of a moment, in which no client's own state can be put.

    Args:
        state: a state dict.
        again: the same once more, asked for while `state` holds its tensors.
    """
    fleeting = (name for name, own in state.items() if own.numel() and own.data_ptr() != again[name].data_ptr())
    made = next(fleeting, None)
    rule = f"{made} of its state is made anew whenever it is asked for (get_extra_state); keep it in a buffer"
    require(made is None, "model", f"{rule}, or it would run on from client to client")


def _places(module: nn.Module) -> list[Place] | None:
    """Where a module's state dict finds its entries; None where one of its parts makes them by itself."""
    found: list[Place] = []
    for prefix, part in module.named_modules(remove_duplicate=False):
        own = part._state_dict_hooks or part._state_dict_pre_hooks
        if own or any(overrides(type(part), nn.Module, name) for name in _SAVING):
            return None
        start = f"{prefix}." if prefix else ""
        for home in (part._parameters, part._buffers):
            found += [(start + key, home, key) for key in home if key not in part._non_persistent_buffers_set]
    there = [name for name, home, key in found if home[key] is not None]
    return found if there == list(module.state_dict()) else None


def _loose_places(method: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where the non-persistent buffers of a method, its terms, its models and copies of their layers stand."""
    own = (part for name, part in method.named_children() if name != "terms")
    models = {id(part): part for each in own for part in each.modules() if isinstance(part, SplitModel)}
    kinds = {type(layer) for model in models.values() for layer in model.modules() if layer._non_persistent_buffers_set}
    itself = [part for name, part in method.named_modules() if name == "" or name.rpartition(".")[0] == "terms"]
    layers = [part for part in method.modules() if type(part) in kinds or any(part is own for own in itself)]
    return [(layer._buffers, key) for layer in layers for key in sorted(layer._non_persistent_buffers_set)]


def division_of(method: nn.Module, share_buffers: bool | None = None) -> Division:
    """A method's division, made once; `share_buffers` makes it anew."""
    if share_buffers is not None or "_division" not in method.__dict__:
        method.__dict__["_division"] = Division(method, share_buffers is not False)
    return method.__dict__["_division"]


@torch.no_grad()
def load_entries(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy entries of the state dict into a module.

    Raises:
        ValueError: naming the first entry that the module lacks or whose shape differs.
        ConfigError: naming it where the module's own has grown, or shrunk, since it was made.
    """
    division = module.__dict__.get("_division")
    entries = module.state_dict() if division is None else division.entries()
    device = next((own.device for own in entries.values()), None)
    if device is not None and device.type != "cpu":
        weights = moved(weights, device)
    homes = []
    for name, tensor in weights.items():
        own = entries.get(name)
        if own is None or own.shape != tensor.shape:
            if own is not None and division is not None:
                division.check_form(name, own)
            has = "does not have it" if own is None else f"has {tuple(own.shape)}"
            raise ValueError(f"received {name!r} of shape {tuple(tensor.shape)}, but this client {has}")
        homes.append(own)
    if homes:
        copy_all(homes, list(weights.values()))


def keeps_all(method: Any, name: str, module: nn.Module) -> bool:
    """Every entry stays: ``is_kept = keeps_all``, for methods that go on from a client's own last state."""
    return True


def matches(name: str, prefixes: Sequence[str]) -> bool:
    """Whether a dotted name is one of the prefixes or lies inside one; ``""`` is everything."""
    return any(prefix == "" or name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def overlap(one: str, other: str) -> bool:
    """Whether one dotted name is the other or lies inside it."""
    return matches(one, (other,)) or matches(other, (one,))
