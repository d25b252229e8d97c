"""Steps of torch's SGD and Adam in few operations, over all parameters of a group at once, with torch's own bits.

On a CPU torch calls each operation for each parameter from Python, which takes a small model longer than what they do.
Here the same operations go over lists; state stands where torch's own step keeps it, so that this can take over at any
step where parameters of a group are not alike.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as optimizers_of_torch
from typing_extensions import override

from fl_lightning.models.own_training import Counter

if TYPE_CHECKING:
    from fl_lightning.core.facts import Fit


def bare_step(optimizer: Optimizer, fit: Fit, changes: bool = False) -> Callable[[], None] | None:
    """A step of an optimizer and the clearing of its gradients; None for one that is not stepped here.

    Args:
        optimizer: of a fit, with the one hook that counts its steps; a `Counter` may stand beside it.
        fit: whose steps are counted.
        changes: whether somebody may change its groups in the fit otherwise than a schedule does: add one, say.
    """
    after: Any = optimizer._optimizer_step_post_hooks.values()
    also = [hook for hook in after if isinstance(hook, Counter)]
    hooks = len(optimizer._optimizer_step_pre_hooks) + len(after) - len(also)
    hooks += len(optimizers_of_torch._global_optimizer_pre_hooks)
    hooks += len(optimizers_of_torch._global_optimizer_post_hooks)
    kind, options = _KINDS.get(type(optimizer)), optimizer.param_groups
    if kind is None or hooks != 1 or "step" in vars(optimizer) or not all(map(kind.takes, options)):
        return None
    if kind is _SGD and not any(own["momentum"] for own in options):
        return _without_state(optimizer, fit, changes, also)
    groups = [kind(optimizer, own) for own in options]

    @torch.no_grad()
    def step() -> None:
        other = changes and not (len(options) == len(groups) and all(map(kind.takes, options)))
        if not all([group.ready() for group in groups]) or other or optimizer.param_groups is not options:
            for group in groups:
                group.settle()
            _as_ever(optimizer)
            return
        for group in groups:
            if group.there:
                group.step()
            for parameter in group.there:
                parameter.grad = None
        fit.num_steps += 1
        for hook in also:
            hook(optimizer)

    return step


def _as_ever(optimizer: Optimizer) -> None:
    optimizer.step(closure=None)
    optimizer.zero_grad()


def _without_state(optimizer: Optimizer, fit: Fit, changes: bool, also: Sequence[Counter]) -> Callable[[], None]:
    """SGD without momentum, for which no two parameters are unlike, and which keeps no state.

    As a `_Group` it would step to the same bits, but take a small model a tenth longer, and leave empty state behind.
    """

    @torch.no_grad()
    def step() -> None:
        if changes and any(own["momentum"] or not _SGD.takes(own) for own in optimizer.param_groups):
            _as_ever(optimizer)
            return
        for group in optimizer.param_groups:
            there = [p for p in group["params"] if p.grad is not None]
            gradients: Any = [p.grad for p in there]
            if there:
                if group["weight_decay"]:
                    gradients = torch._foreach_add(gradients, there, alpha=group["weight_decay"])
                torch._foreach_add_(there, gradients, alpha=-group["lr"])
            for parameter in there:
                parameter.grad = None
        fit.num_steps += 1
        for hook in also:
            hook(optimizer)

    return step


class _Group:
    """One group of an optimizer's parameters.

    Args:
        optimizer: whose.
        options: what `Optimizer.param_groups` says of it, now and later: schedules change it.
    """

    def __init__(self, optimizer: Optimizer, options: dict[str, Any]) -> None:
        self.optimizer: Any = optimizer
        self.options = options
        self.there: list[Any] = []
        """The parameters that have a gradient."""
        self.gradients: list[Any] = []
        self.known: list[dict[str, Any]] = []
        """The optimizer's state of each."""

    @classmethod
    def takes(cls, options: Mapping[str, Any]) -> bool:
        """Whether a group has nothing unusual."""
        unusual = any(options.get(name) for name in ("maximize", "differentiable", "fused", "capturable", "amsgrad"))
        return not unusual and all(isinstance(options[name], (float, int)) for name in ("lr", "weight_decay"))

    def ready(self) -> bool:
        """Look who has a gradient, and whether all of them stand at the same step."""
        there = [parameter for parameter in self.options["params"] if parameter.grad is not None]
        self.gradients = [parameter.grad for parameter in there]
        same = len(there) == len(self.there) and all(map(operator.is_, there, self.there))
        if same and (not there or self.optimizer.state.get(there[0]) is self.known[0]):
            return True
        self.settle()
        self.known = [self.optimizer.state[parameter] for parameter in there]
        if all(gradient.layout == torch.strided for gradient in self.gradients) and self.begin(there):
            self.there = there
            return True
        return False

    def begin(self, there: list[Any]) -> bool:
        """Take up the state of some parameters; false where they are not alike."""
        raise NotImplementedError

    def settle(self) -> None:
        """Leave all state as torch's own step would find it."""
        self.there = []

    def step(self) -> None:
        """Step on `gradients`."""
        raise NotImplementedError


class _SGD(_Group):
    """SGD with momentum."""

    def __init__(self, optimizer: Optimizer, options: dict[str, Any]) -> None:
        super().__init__(optimizer, options)
        self.buffers: list[Any] = []

    @override
    @classmethod
    def takes(cls, options: Mapping[str, Any]) -> bool:
        return super().takes(options) and (not options["momentum"] or _on_cpu(options["params"]))

    @override
    def begin(self, there: list[Any]) -> bool:
        self.buffers = [own.get("momentum_buffer") for own in self.known]
        begun = [buffer is not None for buffer in self.buffers]
        return all(begun) or not any(begun)

    @override
    def step(self) -> None:
        gradients: Any = self.gradients
        decay, momentum = self.options["weight_decay"], self.options["momentum"]
        if decay:
            gradients = torch._foreach_add(gradients, self.there, alpha=decay)
        if momentum:
            if self.buffers[0] is None:
                self.buffers = [gradient.detach().clone() for gradient in gradients]
                for own, buffer in zip(self.known, self.buffers, strict=True):
                    own["momentum_buffer"] = buffer
            else:
                torch._foreach_mul_(self.buffers, momentum)
                torch._foreach_add_(self.buffers, gradients, alpha=1 - self.options["dampening"])
            nesterov = self.options["nesterov"]
            gradients = torch._foreach_add(gradients, self.buffers, alpha=momentum) if nesterov else self.buffers
        torch._foreach_add_(self.there, gradients, alpha=-self.options["lr"])


class _Adam(_Group):
    """Adam and AdamW (Kingma, Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1)."""

    def __init__(self, optimizer: Optimizer, options: dict[str, Any]) -> None:
        super().__init__(optimizer, options)
        self.decouples = isinstance(optimizer, AdamW) or bool(options.get("decoupled_weight_decay"))
        self.count = 0
        self.means: list[Tensor] = []
        self.squares: list[Tensor] = []

    @override
    @classmethod
    def takes(cls, options: Mapping[str, Any]) -> bool:
        plain = not options.get("foreach") and all(isinstance(beta, (float, int)) for beta in options["betas"])
        return plain and super().takes(options) and _on_cpu(options["params"])

    @override
    def begin(self, there: list[Any]) -> bool:
        for parameter, own in zip(there, self.known, strict=True):
            if not own:
                own["step"] = torch.tensor(0.0, dtype=optimizers_of_torch._get_scalar_dtype())
                own |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        counts = {int(own["step"]) for own in self.known}
        self.count = max(counts, default=0)
        self.means, self.squares = ([own[name] for own in self.known] for name in ("exp_avg", "exp_avg_sq"))
        return len(counts) <= 1

    @override
    def settle(self) -> None:
        for own in self.known if self.there else ():
            own["step"].fill_(self.count)
        super().settle()

    @override
    def step(self) -> None:
        (beta1, beta2), lr, decay = self.options["betas"], self.options["lr"], self.options["weight_decay"]
        gradients: Any = self.gradients
        self.count += 1
        if decay and self.decouples:
            torch._foreach_mul_(self.there, 1 - lr * decay)
        elif decay:
            gradients = torch._foreach_add(gradients, self.there, alpha=decay)
        torch._foreach_lerp_(self.means, gradients, 1 - beta1)
        torch._foreach_mul_(self.squares, beta2)
        torch._foreach_addcmul_(self.squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(self.squares)
        torch._foreach_div_(roots, (1 - beta2**self.count) ** 0.5)
        torch._foreach_add_(roots, self.options["eps"])
        torch._foreach_addcdiv_(self.there, self.means, roots, -(lr / (1 - beta1**self.count)))


_KINDS: Mapping[type[Optimizer], type[_Group]] = {SGD: _SGD, Adam: _Adam, AdamW: _Adam}


def _on_cpu(parameters: list[Tensor]) -> bool:
    """Whether parameters are numbers on a CPU: elsewhere torch goes over lists by itself."""
    return all(own.device.type == "cpu" and own.is_floating_point() for own in parameters)
