"""What a CPU is told once and does again at one call: a tape of torch's operations, made into a function.

A small step is mostly overhead: modules, autograd and `vmap` decide in Python what its forty operations are. Taken down
below all of that, only the operations themselves are left, on the same memory: the same kernels, so the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fl_lightning.core.reads import Reads, Unrecordable, address, tensors_in
from fl_lightning.errors import shortened

Key = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""A view: the name of whose memory it shows, sizes, strides, offset."""
Run = Callable[[], tuple[Tensor, ...]]

aten = torch.ops.aten
STEADY = frozenset({aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.arange.default})
STEADY |= {aten.ones.default, aten.zeros.default, aten.full.default, aten.scalar_tensor.default, aten.eye.default}
STEADY |= {aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.arange.start}
STEADY |= {aten.lift_fresh.default}
"""Operations whose result rests on shapes and numbers alone."""
WRITING: dict[Any, slice] = {aten.native_batch_norm.default: slice(3, 5)}
"""Operations that write to arguments of theirs without saying so: which."""
MOVING = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_"})
"""Operations that give a tensor other memory."""
SHOWING = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
SPLITTING = frozenset({torch.tensor_split, Tensor.tensor_split})
"""What looks at a CPU's numbers without an operation; where it splits, if it is a tensor that says where."""
READS = "its step reads a number off a tensor"


class Tape:
    """Operations that were taken down.

    Args:
        run: does all of them, and returns what is read after a replay.
        results: the tensors that are read; they are filled then.
        grads: whether it is done as where gradients are made: recurrent layers leave what their backward pass needs
            out else.
    """

    def __init__(self, run: Run, results: Sequence[Tensor], grads: bool = False) -> None:
        self._run = run
        self._grads = grads
        self._results = [tensor.detach() for tensor in results]

    @torch.no_grad()
    def replay(self) -> None:
        """Do all of it again."""
        with torch.set_grad_enabled(self._grads):
            if torch.is_autocast_enabled("cpu"):  # it is on the tape already, and would do what was done without it
                with torch.autocast("cpu", enabled=False):
                    made = self._run()
            else:
                made = self._run()
        for own, new in zip(self._results, made, strict=True):
            own.copy_(new)


def taped(work: Callable[[], Sequence[Tensor]], known: Sequence[Tensor]) -> Tape:
    """As `fl_lightning.core.recording.record`."""
    taker, looks, stream = Taker(known), Looks(), torch.get_rng_state()
    try:
        with _kept(known):
            with taker, looks:
                results = work()
            expected = _copies([*known, *results])
    except Exception as error:
        raise Unrecordable(shortened(str(error) or type(error).__name__, 120)) from error
    finally:
        torch.set_rng_state(stream)
    taker.check()
    looks.check()
    program = Program(taker.calls, results)
    for grads, swift in ((False, True), (False, False), (True, True), (True, False)):
        run, again = program.function(swift), Taker(())
        try:
            with _kept(known), torch.set_grad_enabled(grads), torch.autocast("cpu", enabled=False):
                with again:
                    made = run()
                does = program.is_done_by(again.calls) if swift else True
                if does and all(map(_alike, [*known, *made], expected)):
                    return Tape(run, results, grads)
        except Exception:  # a function of torch's that takes other arguments
            continue
        finally:
            torch.set_rng_state(stream)
    raise Unrecordable("done again, its operations come to something else")


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers, but for the order in which a kernel adds up."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if other.is_floating_point():
        length = other.norm()  # where it is finite, all numbers are
        if torch.isfinite(length) or torch.isfinite(other).all():
            return bool((one - other).norm() <= 64 * torch.finfo(other.dtype).eps * length)
    return torch.equal(one.nan_to_num(), other.nan_to_num())


@contextmanager
def _kept(known: Sequence[Tensor]) -> Iterator[None]:
    """Leave tensors as they are."""
    before = _copies(known)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, own in zip(known, before, strict=True):
                if not _equal(tensor, own):  # else it would count as changed
                    tensor.copy_(own)


def _equal(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    return bool(one.isnan().any()) and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


class Call(NamedTuple):
    """An operation.

    Args:
        func: an overload of torch's.
        args: what it was given.
        kwargs: the same, by name.
        made: what it came to.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Any


class Taker(Reads):
    """Takes operations down as they are done.

    Args:
        known: tensors that they may read and write.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__(known)
        self.calls: list[Call] = []
        self._refusal = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._refusal = self._refusal or _refusal(func, args)
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if func is aten.lift_fresh.default:  # which makes nothing; what Python has made may be changed later on
            args = (args[0].clone(),)
        self.calls.append(Call(func, *_as_they_are((args, kwargs or {}, made))))
        return made

    def check(self) -> None:
        """Refuse what cannot be done again.

        Raises:
            Unrecordable: saying why.
        """
        super().check()
        if self._refusal:
            raise Unrecordable(self._refusal)


class Looks(TorchFunctionMode):
    """Sees where Python looks at numbers without an operation.

    Vectors of classes are made without looking at the classes first, as on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.one_hot:
            return _one_hot(*args, **kwargs)
        where = [*args[1:], *kwargs.values()] if func in SPLITTING else ()
        self._found = self._found or func in SHOWING or any(isinstance(own, Tensor) for own in where)
        return func(*args, **kwargs)

    def check(self) -> None:
        """Refuse a step that has looked.

        Raises:
            Unrecordable: saying so.
        """
        if self._found:
            raise Unrecordable(READS)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 1:  # as many as there are, which is in the tensor
        return torch.nn.functional.one_hot(tensor, num_classes)
    return (tensor[..., None] == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


def _refusal(func: Any, args: Sequence[Any]) -> str:
    """Why an operation may be another one with other numbers; empty where it may not."""
    if torch.Tag.data_dependent_output in func.tags:
        return READS
    if torch.Tag.dynamic_output_shape in func.tags and not (
        func is aten.index.Tensor and not any(own.dtype in (torch.bool, torch.uint8) for own in tensors_in(args[1]))
    ):
        return "shapes in its step rest on what is in a tensor"
    if func._schema.name in MOVING:
        return "its step moves a tensor to other memory"
    return ""


class Program:
    """Operations made into Python, each of which does nothing but call torch.

    What shows memory that stands still is kept, views of it among that; what shows memory made on the way is one
    `as_strided`, or nothing where two show the same; what nobody reads is left out.
    """

    def __init__(self, calls: Sequence[Call], results: Sequence[Tensor]) -> None:
        changed = {address(own) for call in calls for own in _changed(call)}
        self.calls = [call._replace(func=aten.clone.default) if _lifts(call, changed) else call for call in calls]
        self.results = list(results)
        self.roots: dict[int, tuple[str, Tensor]] = {}
        """Address -> the name of the tensor that was made there, and the tensor."""
        self.steady: set[int] = set()
        """Addresses of what comes to the same every time, and stands still, too."""
        self.constants: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._views: dict[Key, str] = {}
        self._lines: list[tuple[list[str], str, list[str]]] = []
        for call in self.calls:
            self._made_by(call, changed)
        self.needed = self._needed()

    def function(self, swift: bool = False) -> Run:
        """All of it as one function, which returns the results.

        Args:
            swift: call the functions that torch has for Python, where there are, and not the overloads themselves.

        Raises:
            Unrecordable: if memory is shown in a way that this does not know.
        """
        self.constants, self._names, self._views, self._lines = {}, {}, {}, []
        for call in self.needed:
            self._line(call, swift)
        returned = [self._name(tensor) for tensor in self.results]
        return self._compiled(returned)

    def is_done_by(self, calls: Sequence[Call]) -> bool:
        """Whether operations are these, with the same numbers."""
        theirs = [call for call in calls if call.func is not aten.as_strided.default]
        same = (_told(own) == _told(other) for own, other in zip(self.needed, theirs, strict=False))
        return len(theirs) == len(self.needed) and all(same)

    def _made_by(self, call: Call, changed: set[int]) -> None:
        """Take down where new tensors are."""
        given = {address(tensor) for tensor in _inputs(call)}
        for tensor in tensors_in(call.made):
            at = address(tensor)
            if at and at not in self.roots and at not in given:
                self.roots[at] = f"v{len(self.roots)}", tensor
                if call.func in STEADY and at not in changed:
                    self.steady.add(at)

    def _needed(self) -> list[Call]:
        """Operations without which something would be missing, in order."""
        wanted, kept = {address(tensor) for tensor in self.results}, []
        for call in reversed(self.calls):
            made = {address(tensor) for tensor in tensors_in(call.made)}
            given = {address(tensor) for tensor in _inputs(call)}
            random = torch.Tag.nondeterministic_seeded in call.func.tags
            if random or _changed(call) or (made - given - self.steady) & wanted:
                kept.append(call)
                wanted |= given
        return kept[::-1]

    # --- lines --------------------------------------------------------------------------------------------------------

    def _line(self, call: Call, swift: bool) -> None:
        read: list[str] = []
        given = [self._text(own, read) for own in call.args]
        given += [f"{name}={self._text(own, read)}" for name, own in call.kwargs.items()]
        function = (_swift(call.func) if swift else None) or call.func._op
        text = f"{self._constant(function)}({', '.join(given)})"
        made = list(call.made) if isinstance(call.made, (list, tuple)) else [call.made]
        names = [self._new(own) for own in made]
        if not any(names):
            self._lines.append(([], text, read))
            return
        left = ", ".join(name or "_" for name in names) + ("," if isinstance(call.made, (list, tuple)) else "")
        self._lines.append(([name for name in names if name], f"{left} = {text}", read))

    def _new(self, made: Any) -> str:
        """The name of a tensor that an operation makes; none of what was there."""
        at = address(made) if isinstance(made, Tensor) else 0
        name, root = self.roots.get(at, ("", None))
        return name if root is made and at not in self.steady else ""

    def _text(self, value: Any, read: list[str]) -> str:
        if isinstance(value, Tensor):
            name = self._name(value)
            read.append(name)
            return name
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._text(own, read) for own in value)}]"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self._constant(value)

    def _name(self, tensor: Tensor) -> str:
        """What shows this memory."""
        at = address(tensor)
        if at not in self.roots or at in self.steady:  # a number stays what it is: it says less about types
            return self._constant(tensor)
        name, root = self.roots[at]
        if tensor.dtype != root.dtype or tensor.is_conj() or tensor.is_neg():
            raise Unrecordable(f"its step shows {root.dtype} memory as something else")
        shown = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        if shown == (tuple(root.shape), root.stride(), root.storage_offset()):
            return name
        view = name, *shown
        if view not in self._views:
            made = self._views[view] = f"w{len(self._views)}"
            text = f"{made} = {self._constant(torch.as_strided)}({', '.join(map(str, view))})"
            self._lines.append(([made], text, [name]))
        return self._views[view]

    def _constant(self, value: Any) -> str:
        key = id(value)
        if key not in self._names:
            self._names[key] = f"c{len(self._names)}"
            self.constants[self._names[key]] = value
        return self._names[key]

    def _compiled(self, returned: Sequence[str]) -> Run:
        """The lines as a function; a name is given up after the last that reads it, so that memory is used again."""
        last = {name: number for number, (made, _, read) in enumerate(self._lines) for name in (*made, *read)}
        text = [f"def run({', '.join(f'{name}={name}' for name in self.constants)}):"]
        for number, (made, line, read) in enumerate(self._lines):
            text.append(f"    {line}")
            over = [name for name in dict.fromkeys((*made, *read)) if last[name] == number]
            over = [name for name in over if name not in returned and name not in self.constants]
            if over:
                text.append(f"    {' = '.join(over)} = None")
        text.append(f"    return ({', '.join([*returned, ''])})")
        space = dict(self.constants)
        exec("\n".join(text), space)  # names and numbers alone are in it
        return space.pop("run")


def _lifts(call: Call, changed: set[int]) -> bool:
    """Whether an operation takes over a tensor that Python has made, and that is changed later on."""
    return call.func is aten.lift_fresh.default and address(call.made) in changed


def _swift(func: Any) -> Any:
    """The function of torch's that Python calls an operation by, which reads its arguments faster; None for none."""
    if func._overloadname == "Scalar":  # Python makes a tensor of a number
        return None
    name = func._schema.name.removeprefix("aten::")
    function = getattr(Tensor if name.endswith("_") and not name.startswith("_") else torch, name, None)
    return function if isinstance(function, (BuiltinFunctionType, MethodDescriptorType)) else None


def _told(call: Call) -> tuple[Any, ...]:
    """An operation, and what it is given, of tensors what they look like."""

    def told(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.shape, value.stride(), value.dtype
        if isinstance(value, (list, tuple)):
            return [told(own) for own in value]
        return value

    return call.func, told(call.args), {name: told(own) for name, own in call.kwargs.items()}


def _as_they_are(value: Any) -> Any:
    """The same with tensors of their own, which go on to show what these show now.

    A number stays the tensor that it is: another one would say more about types.
    """
    if isinstance(value, Tensor):
        return value.detach() if value.dim() or value.requires_grad else value
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_they_are, value))
    if isinstance(value, dict):
        return {name: _as_they_are(own) for name, own in value.items()}
    return value


def _inputs(call: Call) -> Iterator[Tensor]:
    yield from tensors_in((call.args, call.kwargs))


def _changed(call: Call) -> list[Tensor]:
    """The tensors that an operation writes to."""
    schema = call.func._schema
    if call.func in WRITING:
        return list(tensors_in(call.args[WRITING[call.func]]))
    if not schema.is_mutable or torch.Tag.inplace_view in call.func.tags:  # which changes what a tensor shows alone
        return []
    given = [own for own, said in zip(call.args, schema.arguments, strict=False) if _writes(said)]
    given += [call.kwargs[said.name] for said in schema.arguments if said.name in call.kwargs and _writes(said)]
    return list(tensors_in(given))


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
