"""FedFed: clients share, once, noisy copies of what a classifier needs of their images.

Yang, Zhang, Zheng, Tian, Peng, Liu, Han, "FedFed: Feature Distillation against Data Heterogeneity in Federated
Learning", NeurIPS 2023. Checked against the authors' code, from which this differs where the code contradicts the
paper: there a whole batch carries one noise image, clients are weighted by their test samples, and the autoencoder of
clients with few classes is never trained. Left out: its reweighting of losses for such clients (off by default there,
too), and its augmentations other than mixup and mosaic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.facts import Facts
from fl_lightning.core.forward import Forward
from fl_lightning.core.freezing import training
from fl_lightning.core.message import Artifact, Message, Structured, artifact
from fl_lightning.core.method import Method, Phase
from fl_lightning.core.precision import widened
from fl_lightning.core.server import Server
from fl_lightning.core.term import Term
from fl_lightning.errors import require
from fl_lightning.losses.feature_split import mixup_cross_entropy, mosaic, protected_copies
from fl_lightning.losses.variational import kl_to_standard_normal, reconstruction_loss
from fl_lightning.models.residual_vae import ResidualVAE
from fl_lightning.models.split import SplitModel

if TYPE_CHECKING:
    from fl_lightning.core.host import OwnData
    from fl_lightning.core.step import Step

PASSES = 3  # of one epoch of the first phase: mixup, reconstruction, the split


@dataclass(frozen=True)
class Weights:
    """Weights of the first phase's losses.

    Args:
        reconstruction_weight: c_re, >= 0.
        protected_weight: c_ce, >= 0.
        kl_weight: c_kl, >= 0.
        classification_weight: c_x, >= 0.
    """

    reconstruction_weight: float = 5.0
    protected_weight: float = 2.0
    kl_weight: float = 0.005
    classification_weight: float = 0.4

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value >= 0, f"method.weights.{name}", "must be >= 0", value)


@artifact
@dataclass(frozen=True)
class KeptRows(Structured):
    """Rows that a receiver keeps for good, of which only the new ones cross the wire now.

    For what is handed out once and used ever after (a pool of shared samples): a federation of N clients stores it
    once, not N times, and still counts what every client was sent.

    Args:
        rows: [M, …] all that the receiver holds once it has this message.
        num_new: how many of them it did not hold before, in [0, M]; these are counted.
    """

    rows: Tensor
    num_new: int

    @property
    def num_params(self) -> int:
        """Values really sent: those of the new rows."""
        return self.num_new * self.rows[:1].numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the values counted by `num_params`."""
        return self.num_params * self.rows.element_size()


class FedFed(Method):
    """FedAvg on own and shared images, after learning together what of the images to share.

    The first `feature_rounds` rounds average classifier w and autoencoder q. An epoch trains w on mixed-up images, then
    q on mosaics (c_re L_re + c_kl L_kl), then both on

        L = c_re MSE(q(x), x) + c_kl KL / (channels · D) + c_ce CE(w([x_p¹; x_p²]), [y; y]) + c_x CE(w(x), y)

    with x_p = x − q(x) + noise. Then w starts anew; in its first round after that a client sends both copies of its
    whole training part, made with the final q, and the server hands them to all. From then on every epoch draws as many
    shared samples of either copy as the client has of its own, classes in equal parts, and trains
    CE(w([x; x_p¹; x_p²])), each source a third. While nothing was shared a round is FedAvg's; with `feature_rounds` 0
    all are. Tests see images as they are.
    q gives [0, 1]: images that come as floats must lie there, for what does not is no part of it.

    Message: w and q; then w, with n_i (2·pixels + 1) values up once (q comes down once more for these) and those of the
    other clients down once.

    Args:
        feature_rounds: rounds of the first phase, >= 0. The paper's are 15, before its 1,000; here they count among
            `federation.rounds`.
        feature_epochs: epochs of a local fit in the first phase, >= 1; each is three passes.
        feature_lr: learning rate of the first phase's AdamW, >= 0; the second has the configured optimizer.
        feature_weight_decay: its weight decay, >= 0.
        weights: weights of the first phase's losses.
        noise_stds: standard deviations of the noise on the two copies, on the [0, 1] scale of pixels, >= 0.
        mixup: both parameters of the Beta distribution of mixup's λ, > 0.
        latent_size: D of the autoencoder, >= 1; null takes as many as its maps have values.
        extra_terms: terms added to the loss, on the client's own images.
    """

    shared: tuple[str, ...] = ("model", "vae")  # vae in the first phase only
    paper = "Yang et al., NeurIPS 2023"

    def __init__(
        self,
        model: SplitModel,
        feature_rounds: int = 5,
        feature_epochs: int = 1,
        feature_lr: float = 1e-3,
        feature_weight_decay: float = 1e-6,
        weights: Weights = Weights(),
        noise_stds: tuple[float, float] = (0.15, 0.25),
        mixup: float = 2.0,
        latent_size: int | None = None,
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(feature_rounds >= 0, "method.feature_rounds", "must be >= 0", feature_rounds)
        require(feature_epochs >= 1, "method.feature_epochs", "must be >= 1", feature_epochs)
        require(mixup > 0, "method.mixup", "must be > 0", mixup)
        require(feature_lr >= 0, "method.feature_lr", "must be >= 0", feature_lr)
        require(feature_weight_decay >= 0, "method.feature_weight_decay", "must be >= 0", feature_weight_decay)
        noise_stds = tuple(noise_stds)  # type: ignore[assignment]
        two = len(noise_stds) == 2 and min(noise_stds) >= 0
        require(two, "method.noise_stds", "must be two numbers >= 0", list(noise_stds))
        require(latent_size is None or latent_size >= 1, "method.latent_size", "must be >= 1 or null", latent_size)
        super().__init__(model, extra_terms=extra_terms)
        if feature_rounds:
            self.vae = ResidualVAE(model.input_shape, latent_size)  # q
        else:
            self.shared = ("model",)
        self.feature_rounds = feature_rounds
        self.feature_epochs = feature_epochs
        self.feature_lr = feature_lr
        self.feature_weight_decay = feature_weight_decay
        self.weights = {
            "reconstruction": weights.reconstruction_weight,
            "kl": weights.kl_weight,
            "cross_entropy_protected": weights.protected_weight,
            "cross_entropy": weights.classification_weight,
        }
        self.noise_stds = noise_stds
        self.mixup = mixup
        self.register_buffer("pixel_mean", torch.zeros(1, 1, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.ones(1, 1, 1, 1), persistent=False)

    pixel_mean: Tensor  # [1, 1 or C_in, 1, 1], which normalise the images
    pixel_std: Tensor

    @property
    def splits(self) -> bool:
        """Whether the present round belongs to the first phase."""
        return 1 <= self.facts.round <= self.feature_rounds

    # --- what comes in, what goes out ---------------------------------------------------------------------------------

    def receive(self, message: Message, data: OwnData) -> None:
        """Load w and q, keep hold of the pool; all of the client that is not in a state dict is set anew here."""
        super().receive(message, data)
        self.pixel_mean, self.pixel_std = (t.to(self.pixel_mean) for t in data.pixel_mean_and_std())
        self.num_own = data.num_train
        pool, labels = (message.artifacts.get(name) for name in ("protected", "protected_labels"))
        self.pool = (pool.rows, labels.rows) if isinstance(pool, KeptRows) and isinstance(labels, KeptRows) else None
        self.owes_copies = not self.splits and any(name.startswith("vae.") for name in message.weights)

    def send(self, data: OwnData) -> Message:
        """First w and q; then w alone, and once the protected copies."""
        message = super().send(data)
        if self.splits:
            return message
        weights = {name: tensor for name, tensor in message.weights.items() if not name.startswith("vae.")}
        copies: Mapping[str, Artifact] = self._copies(data) if self.owes_copies else {}
        return Message(weights, {**message.artifacts, **copies}, message.num_samples)

    @torch.no_grad()
    def _copies(self, data: OwnData) -> dict[str, Artifact]:
        """Both copies of the whole training part, [n_i, 2, C_in, H, W], and its labels [n_i]."""
        rows, labels = [], []
        with training(self, False):
            for x, y in data.batches("train"):
                rows.append(torch.stack(self._protected(x, self._robust(x)[0]), 1).float())
                labels.append(y)
        return {"protected": torch.cat(rows).contiguous(), "protected_labels": torch.cat(labels)}

    def _robust(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of normalised images: the reconstruction in [0, 1], the posterior's mean and log-variance."""
        return self.vae((x * self.pixel_std + self.pixel_mean).to(x.dtype))

    def _protected(self, x: Tensor, robust: Tensor) -> list[Tensor]:
        return protected_copies(x, robust, self.noise_stds, self.pixel_std)

    # --- the local fit ------------------------------------------------------------------------------------------------

    def phases(self) -> list[Phase]:
        """First one optimizer for classifier and autoencoder, then the configured one for the classifier."""
        if not self.splits:
            return super().phases()
        adam_w = partial(torch.optim.AdamW, lr=self.feature_lr, weight_decay=self.feature_weight_decay)
        return [Phase("features", epochs=PASSES * self.feature_epochs, optimizer=adam_w)]

    @override
    def losses(self) -> dict[str, float]:
        own = {name: weight for name, weight in self.weights.items() if name != "cross_entropy"}
        return {"mixup": 1.0, **own} if self.feature_rounds else {}

    def term_weights(self) -> dict[str, float]:
        """c_x for the cross-entropy in the first phase."""
        weights = super().term_weights()
        return {**weights, "cross_entropy": self.weights["cross_entropy"]} if self.splits else weights

    def _draw(self, step: Step) -> None:
        """Draw the epoch's shared samples, for either copy apart."""
        self.num_taken = 0
        if self.pool is not None and not self.splits:
            labels, classes = self.pool[1], self.model.num_classes
            self.draws = [step.agreed(class_balanced_draw(labels, classes, self.num_own)) for _ in self.noise_stds]

    def local_step(self, step: Step) -> None:
        """One mini-batch of the pass or phase that it belongs to."""
        if step.is_first:
            self._draw(step)
        if not self.splits and self.pool is None:
            super().local_step(step)
            return
        steps = (self._mixup_step, self._reconstruction_step, self._split_step)
        take = steps[step.epoch % PASSES] if self.splits else self._shared_step
        out, values = take(step)
        step.descend(values)
        if out is not None:
            step.observe(out)

    def _mixup_step(self, step: Step) -> tuple[None, dict[str, Tensor]]:
        """The classifier on images mixed with those of a shuffled batch."""
        x, y = step.x, step.y
        both = torch.full((2,), self.mixup, dtype=torch.float32)  # Beta draws exist in no narrower type
        share = float(torch.distributions.Beta(*both).sample())
        other = torch.randperm(len(y)).to(y.device, non_blocking=True)
        logits = step.through(self.model, share * x + (1 - share) * x[other])
        return None, {"mixup": mixup_cross_entropy(logits, y, y[other], share)}

    def _reconstruction_step(self, step: Step) -> tuple[None, dict[str, Tensor]]:
        """The autoencoder on mosaics."""
        return None, step.through(self._autoencoder_losses, mosaic(step.x))[0]

    def _split_step(self, step: Step) -> tuple[Forward, dict[str, Tensor]]:
        """Both, through the sensitive part: one pass of the classifier over the images and their copies."""
        x, y = step.x, step.y
        values, robust = step.through(self._autoencoder_losses, x)
        copies = [copy.to(x.dtype) for copy in self._protected(x, robust)]
        own, everything = self._own_and_all(step, copies, [y, y])
        own_values = step.values(own)
        protected = F.cross_entropy(widened(everything.logits[len(y) :]), everything.y[len(y) :])
        return own, {**own_values, **values, "cross_entropy_protected": protected}

    def _autoencoder_losses(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        robust, mean, log_variance = self._robust(x)
        pixels = widened(x) * self.pixel_std + self.pixel_mean
        kl = kl_to_standard_normal(mean, log_variance) / (x.shape[1] * mean.shape[1])
        return {"reconstruction": reconstruction_loss(pixels, robust, "mean"), "kl": kl}, robust

    def _shared_step(self, step: Step) -> tuple[Forward, dict[str, Tensor]]:
        """Second phase: own images and as many of either copy, one mean over all."""
        assert self.pool is not None
        images, labels = self.pool
        rows = self._next_draws(step)
        copies = [images[row, copy].to(step.x.dtype) for copy, row in enumerate(rows)]
        own, everything = self._own_and_all(step, copies, [labels[row] for row in rows])
        first, *others = step.terms
        return own, {**step.values(everything, [first]), **step.values(own, others)}

    def _next_draws(self, step: Step) -> list[Tensor]:
        """Rows of the pool, of either copy, beside so many own samples: this device's part of the mini-batch's."""
        taken = slice(self.num_taken, self.num_taken + step.part.batch_size)
        self.num_taken += step.part.batch_size
        return [draw[taken][step.part.own] for draw in self.draws]

    def _own_and_all(self, step: Step, copies: list[Tensor], labels: list[Tensor]) -> tuple[Forward, Forward]:
        """One forward pass over own images and copies: the part of it that is the own images', and the whole.

        A loss that the model computes by itself is of the whole; that of the part is the cross-entropy of its logits.
        """
        out = step.forward(torch.cat([step.x, *copies]), torch.cat([step.y, *labels]))
        n = len(step.y)
        features = [feature[:n] for feature in out.features]
        own = replace(out, x=step.x, y=step.y, features=features, z=out.z[:n])
        return own.predicting(out.logits[:n]), out

    @override
    def make_server(self, initial: Message, facts: Facts) -> Server:
        return PoolServer(initial, self.feature_rounds) if self.feature_rounds else super().make_server(initial, facts)


def class_balanced_draw(labels: Tensor, num_classes: int, size: int) -> Tensor:
    """Positions of `size` samples, ⌊size/C⌋ of each class and the rest from all, in random order; from global streams.

    A class with fewer samples gives some of them more than once; the share of one with none goes to the rest.

    Args:
        labels: [M] int64 classes to draw from, M >= 1.
        num_classes: C.
        size: samples to draw.

    >>> labels = torch.tensor([0, 0, 0, 1, 1, 1])
    >>> labels[class_balanced_draw(labels, num_classes=2, size=4)].sort().values.tolist()
    [0, 0, 1, 1]
    """
    by_class = labels.argsort(stable=True).split(torch.bincount(labels, minlength=num_classes).tolist())
    share = size // num_classes
    picked = [_some(rows, share) for rows in by_class if len(rows)]
    rest = size - sum(map(len, picked))
    drawn = torch.cat([*picked, _some(torch.arange(len(labels), device=labels.device), rest)])
    return drawn[torch.randperm(size).to(labels.device, non_blocking=True)]


def _some(rows: Tensor, size: int) -> Tensor:
    """Draw from rows, without replacement where there are enough."""
    enough = size <= len(rows)
    order = torch.randperm(len(rows))[:size] if enough else torch.randint(len(rows), (size,))
    return rows[order.to(rows.device)]


class PoolServer(Server):
    """FedAvg in both phases; between them the classifier starts anew, and protected copies are pooled as they come.

    Until a client has sent its copies it is given the final autoencoder to make them with. What a client has been sent
    is known from its messages: who answered in a round had received the pool as it was when the round began.
    """

    sees_messages = True
    takes_noise = False  # copies of single images are handed on

    def __init__(self, initial: Message, feature_rounds: int) -> None:
        self.feature_rounds = feature_rounds
        super().__init__(initial)
        self.fresh = {name: tensor for name, tensor in initial.weights.items() if not name.startswith("vae.")}
        self.vae: dict[str, Tensor] = {}  # the final q
        self.owners = torch.zeros(0, dtype=torch.long)  # [M] whose copy each row of the pool is
        self.known: dict[int, int] = {}  # client -> rows of the pool that it holds

    def open_round(self) -> None:
        """Start a round: nothing has come in. The second phase's first one starts from a fresh classifier.

        Only now: until then the first phase's average is the global model.
        """
        super().open_round()
        weights = self.message.weights
        own = {name: tensor for name, tensor in weights.items() if name.startswith("vae.")}
        if own and self.round > self.feature_rounds:
            self.vae = own
            self.message = replace(self.message, weights=self.fresh)
        self._heard: list[int] = []
        self._arrived: dict[int, tuple[Tensor, Tensor]] = {}

    def see(self, client: int, message: Message) -> Message:
        """Lay a client's copies aside."""
        artifacts = dict(message.artifacts)
        copies, labels = artifacts.pop("protected", None), artifacts.pop("protected_labels", None)
        if isinstance(copies, Tensor) and isinstance(labels, Tensor):
            self._arrived[client] = copies, labels
        self._heard.append(client)
        return replace(message, artifacts=artifacts)

    def close_round(self) -> None:
        """Average; in the second phase add to the pool what came in."""
        arrived, heard, before = dict(sorted(self._arrived.items())), self._heard, len(self.owners)
        super().close_round()
        if self.round > self.feature_rounds:
            self.known.update(dict.fromkeys(heard, before))
        if arrived:
            self._pool(arrived)

    def _pool(self, arrived: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Add copies and labels behind those that are there."""
        artifacts = dict(self.message.artifacts)
        for index, name in enumerate(("protected", "protected_labels")):
            new = [parts[index] for parts in arrived.values()]
            there = artifacts.get(name)
            rows = torch.cat([there.rows, *new] if isinstance(there, KeptRows) else new)
            artifacts[name] = KeptRows(rows, 0)
        owners = [torch.full((len(labels),), client) for client, (_, labels) in arrived.items()]
        self.owners = torch.cat([self.owners, *owners])
        self.message = replace(self.message, artifacts=artifacts)

    def message_for(self, client: int) -> Message:
        """w, the final q for who has sent no copies yet, and of the pool what is new to the client and not its own."""
        if not self.vae:
            return self.message
        new = int((self.owners[self.known.get(client, 0) :] != client).sum())
        owes = not (self.owners == client).any()
        if not new and not owes:
            return self.message
        artifacts = {
            n: replace(a, num_new=new) if isinstance(a, KeptRows) else a for n, a in self.message.artifacts.items()
        }
        return replace(self.message, weights=self.message.weights | (self.vae if owes else {}), artifacts=artifacts)

    def state_dict(self) -> dict[str, Any]:
        """The base's state, the final autoencoder, and who sent and holds what of the pool."""
        own = {"vae": dict(self.vae), "owners": self.owners, "known": dict(self.known)}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        super().load_state_dict(state)
        self.vae, self.owners, self.known = dict(state["vae"]), state["owners"].cpu(), dict(state["known"])
