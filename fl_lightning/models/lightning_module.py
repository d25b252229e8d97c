"""A LightningModule of a user's own, federated as it is: its training step, its optimizers, its forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import lightning as L
import torch
from torch import Tensor, nn
from typing_extensions import Self, override

from fl_lightning.errors import require
from fl_lightning.models.checks import require_size
from fl_lightning.models.copying import copied
from fl_lightning.models.head_cut import CutBody, Joined, are_same, head_of, reached
from fl_lightning.models.module_hooks import build, hooks_of
from fl_lightning.models.module_optimizers import KEY
from fl_lightning.models.module_rehearsal import rehearse
from fl_lightning.models.module_training import ModuleTraining
from fl_lightning.models.split import SplitModel
from fl_lightning.models.wrapped import fill_lazy, require_nothing_shared, require_submodule, shape_of, try_out


class WrappedLightningModule(SplitModel):
    """Your own LightningModule: its `training_step` computes the loss, its `configure_optimizers` the optimizer.

    What the method adds (a proximal term, phases that train head or body alone) is added to that. Optimizers,
    schedulers and momentum begin anew in every local fit; `self.trainer` stands for one fit, and predictions, which are
    the module's `forward`, have none. Parts that the module puts into eval mode before its first fit stay in it;
    `validation_step` and `test_step` are not called, the run tests by itself. `training_step` is given ``[x, y]``.
    `setup("fit")` and `configure_model` are called once, here; hooks that would change the training, and that no local
    fit calls, are refused.

    The module is split at its head, the layer that gives the logits: what the layer takes is z [B, D]. Behind it there
    may be a softmax or its logarithm, and nothing else. This is tried out once, on two made-up samples.

    Args:
        input_shape: shape of one sample.
        num_classes: number of classes C.
        module: the module, from a batch of samples to logits, or to their (log-)softmax, [B, C].
        head: name of the submodule that gives the logits, e.g. "fc" or "model.classifier"; null takes the last linear
            layer of C outputs.
        optimizer: ``own`` for `configure_optimizers`, ``configured`` for the section ``optimizer``.

    Raises:
        ConfigError: if the module does not take such samples, gives no logits, cannot be split there, or its training
            step fails, or it overrides a hook that is not called.
    """

    own: ModuleTraining
    _resting: Sequence[nn.Module] = ()
    """Parts that stay in eval mode."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        module: L.LightningModule,
        head: str | None = None,
        optimizer: Literal["own", "configured"] = "own",
    ) -> None:
        require_size("num_classes", num_classes)
        fill_lazy(module, lambda: input_shape, KEY)
        module = copied(module, KEY)
        name = type(module).__name__
        hooks_of(module)
        build(module)
        resting = [part for part in module.modules() if not part.training]
        x, out = try_out(module, input_shape, KEY)
        fits = isinstance(out, Tensor) and out.shape == (len(x), num_classes)
        rule = f"{name}'s forward must return logits of shape [B, {num_classes}] for {num_classes} classes"
        require(fits, KEY, rule, shape_of(out))
        head = head_of(module, num_classes, x, out) if head is None else head
        require_submodule(module, "model.head", head)
        z, logits = reached(module, head, x)
        rule = f'"{head}" must give {name}\'s logits; behind it there may be a softmax or its logarithm only'
        require(are_same(logits, out), "model.head", rule)
        require(z is not None and z.dim() == 2, "model.head", f'"{head}" must take one tensor z of shape [B, D]')
        joined = Joined(module, head)
        require_nothing_shared(joined.module, joined.head, head)
        super().__init__(CutBody(joined), joined.head, z.shape[1], num_classes, input_shape)  # type: ignore[union-attr]
        self._resting = resting
        self.own = ModuleTraining(joined, optimizer == "configured")
        self.train()
        rehearse(self.own, x, torch.arange(len(x)) % num_classes)

    @property
    @override
    def trains_its_parts(self) -> bool:
        joined = self.own.joined
        return self.head is joined.head and isinstance(self.body, CutBody) and self.body.neck is joined.module

    @override
    def train(self, mode: bool = True) -> Self:
        """Parts that the module has put into eval mode stay in it, as in Lightning's fit."""
        super().train(mode)
        for part in self._resting:
            part.training = False
        return self
