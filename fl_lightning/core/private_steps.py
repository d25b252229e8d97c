"""Record-level privacy of a local fit: per-sample gradients, clipped and blurred by Opacus, around a phase's optimizer.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, "Deep Learning with Differential Privacy", CCS 2016, Algorithm
1. Per-sample gradients, clipping and noise are those of Opacus (Yousefpour et al., 2021).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.descent import Descent
from fl_lightning.core.devices import Part
from fl_lightning.core.step import Step
from fl_lightning.errors import importing, require
from fl_lightning.models.own_training import trained_by

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fl_lightning.core.method import Method

KEY = "federation.record_privacy"
Hook = TypeVar("Hook", bound=Callable[..., Any])


def check_noise(owner: str, multiplier: float) -> None:
    """Refuse noise that drowns everything, or so little that no accountant can tell it from none.

    Raises:
        ConfigError: with the key of `owner`.
    """
    counts = multiplier == 0 or 1e-3 <= multiplier <= 1e6
    require(counts, f"{owner}.noise_multiplier", "must be 0 (no noise), or from 0.001 to 1e6", multiplier)


@dataclass(frozen=True)
class RecordPrivacy:
    """Record-level differential privacy: DP-SGD in every local fit.

    A mini-batch takes each training sample with chance batch_size / n by itself; each sample's gradient is scaled down
    to a norm of at most C, their sum gets noise of standard deviation z C, and all is divided by the expected number
    of samples. Whatever a client sends of its fits, and the weights that it keeps, are then private against one sample
    more or less, for a server that is not trusted. Needs `pip install 'fl-lightning[privacy]'`.

    Not covered: running statistics that stay with the client (`share_buffers: false`), sample counts and class counts
    (they are known to all and weigh clients), accuracies and losses, the partition and the run's other files. Noise and
    mini-batches are drawn from the run's seed, so that a run repeats and resumes: for experiments; a deployment needs a
    cryptographic source.

    Args:
        noise_multiplier: z, 0 or from 0.001 to 1e6; 0 only clips, and ε is infinite.
        max_grad_norm: C, > 0.
        delta: δ of the (ε, δ) in `metrics.csv`, in (0, 1); well below 1 over a client's number of samples.

    Reference: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.
    """

    noise_multiplier: float = 1.0
    max_grad_norm: float = 1.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        check_noise(KEY, self.noise_multiplier)
        allowed = 0 < self.max_grad_norm < math.inf
        require(allowed, f"{KEY}.max_grad_norm", "must be > 0 and finite", self.max_grad_norm)
        require(0 < self.delta < 1, f"{KEY}.delta", "must be in (0, 1)", self.delta)


def record_safe(*of_weights: str) -> Callable[[Hook], Hook]:
    """Say of a method's own `receive`, `local_step` or `send` that it allows record-level privacy.

    It reads no training sample but those of the step that it is given, and those only by `step.forward()` and
    `step.values(…)`, once a step. Who overrides it anew has to say so anew.

    Args:
        of_weights: the method's own losses that depend on weights alone, not on samples: their gradient is added after
            the noise.
    """

    def mark(hook: Hook) -> Hook:
        hook.record_safe = frozenset(of_weights)  # type: ignore[attr-defined]
        return hook

    return mark


class PrivateFit:
    """One local fit's hooks on layers, and its noise.

    Args:
        settings: clipping and noise.
        expected: samples that a mini-batch holds in the mean, > 0.
        generator: of the noise, on the device of the parameters.
        of_weights: losses that depend on weights alone, by name.
    """

    def __init__(
        self, settings: RecordPrivacy, expected: float, generator: torch.Generator, of_weights: Collection[str] = ()
    ) -> None:
        self.settings = settings
        self.expected = expected
        self.generator = generator
        self.of_weights = frozenset(of_weights)
        self._hooks: Any = None

    def wrap(self, optimizer: Optimizer) -> Optimizer:
        """An optimizer that clips and blurs before it steps."""
        return opacus().DPOptimizer(
            optimizer,
            noise_multiplier=self.settings.noise_multiplier,
            max_grad_norm=self.settings.max_grad_norm,
            expected_batch_size=self.expected,
            generator=self.generator,
        )

    def enter(self, method: Method) -> None:
        """Let the layers whose parameters need a gradient now note that of every sample."""
        self.leave()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._hooks = opacus().GradSampleModule(method)

    def leave(self) -> None:
        """Take the hooks off, and what they noted, also of a pass that was broken off before it went back."""
        hooks, self._hooks = self._hooks, None
        if hooks is None:
            return
        hooks.to_standard_module()
        for noted in (*hooks._module.modules(), *hooks._module.parameters()):
            for name in _NOTED & vars(noted).keys():
                delattr(noted, name)

    @staticmethod
    def part(x: Tensor, y: Tensor) -> Part:
        """The mini-batch; in place of an empty one a sample of zeros that does not count: noise must come all the same.

        Args:
            x: [B, …] inputs.
            y: [B] int64 classes.
        """
        if len(y):
            return Part.whole(x, y)
        return Part(x.new_zeros(1, *x.shape[1:]), y.new_zeros(1), slice(0, 1), 0, counts=False, factor=0.0)


_NOTED = frozenset({"activations", "max_batch_len", "_forward_counter", "_current_grad_sample", "grad_sample"})
"""What Opacus sets on layers and parameters in a pass."""


class PrivateStep(Step):
    """A step whose descent tells losses of samples from those of weights alone."""

    @override
    def descend(self, values: Mapping[str, Tensor], *parts: str) -> None:
        self._bench.note_descent(values)
        self._logged.update(values)
        self._total, self._descents = self.total(values), self._descents + 1
        descent = self._bench.descent
        assert isinstance(descent, PrivateDescent)
        free = descent.private.of_weights
        samples = self._sum({name: value for name, value in values.items() if name not in free})
        weights = self._sum({name: value for name, value in values.items() if name in free})
        descent.descend_privately(samples, weights, self.part.factor)


class PrivateDescent(Descent):
    """The one private optimizer of a phase.

    Args:
        private: the fit's hooks and noise.
        given: what a `Descent` is made of.
    """

    def __init__(self, private: PrivateFit, *given: Any) -> None:
        super().__init__(*given)
        self.private = private

    def descend_privately(self, samples: Tensor, weights: Tensor, factor: float) -> None:
        """One step on clipped and blurred gradients of samples, and the gradient of what depends on weights alone.

        Args:
            samples: mean loss over the mini-batch's samples.
            weights: loss of weights alone.
            factor: 0 where the mini-batch is empty, else 1.
        """
        (optimizer,) = self.optimizers.values()
        parameters = trained_by(optimizer)
        extra = self.machine.gradients(weights, parameters) if weights.requires_grad else []
        assert self.machine.backward is not None, "a step outside a fit cannot descend"
        self.machine.backward(samples if factor == 1 else samples * factor)

        def add(_: Any) -> None:
            for parameter, gradient in zip(parameters, extra, strict=False):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

        optimizer.optimizer.attach_step_hook(add)  # it is called after the noise, before the step
        optimizer.step()
        optimizer.zero_grad()

    @override
    def step(self, optimizers: Sequence[Any]) -> NoReturn:
        raise TypeError("record-level privacy takes one private step a mini-batch: gradients found by hand are not")


class _Opacus:
    """The two classes of Opacus' that are used."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from opacus.grad_sample import GradSampleModule
            from opacus.optimizers import DPOptimizer
            from opacus.validators import ModuleValidator
        self.GradSampleModule: Any = GradSampleModule
        self.DPOptimizer: Any = DPOptimizer
        self.ModuleValidator: Any = ModuleValidator


def opacus() -> _Opacus:
    """Opacus, which is imported here alone.

    Raises:
        ConfigError: if it is not installed.
    """
    with importing("opacus", KEY, "DP-SGD is Opacus', which is not installed: pip install 'fl-lightning[privacy]'"):
        return _Opacus()
