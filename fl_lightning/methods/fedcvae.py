"""FedCVAE: private classifiers that also learn from images imagined at home; what gives these a prior is shared.

Guo, Lv, Geng, "Harmonizing Generalization and Personalization in Ring-topology Decentralized Federated Learning"
(DRDFL), 2025, appendix VII-B3: a baseline of that paper, which says what its networks are for and that the pretrained
one, g, is what clients exchange. It gives neither equations nor sizes: losses, networks and order here are a
reconstruction. FedCVAE of Gu and Yang (2021) and of Heinbaugh et al. (2023) are other methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.forward import Forward
from fl_lightning.core.freezing import keeping_statistics
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method, Phase
from fl_lightning.core.precision import widened
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.losses.conditional_vae import class_moments, kl_to_normal
from fl_lightning.losses.variational import clamped, reconstruction_loss
from fl_lightning.models.checks import require_image
from fl_lightning.models.cvae import ConditionalDecoder, ConditionalEncoder, PriorNetwork
from fl_lightning.models.split import SplitModel
from fl_lightning.models.vae import reparametrised

if TYPE_CHECKING:
    from fl_lightning.core.host import OwnData
    from fl_lightning.core.step import Step

GeneratedClasses = Literal["present", "all"]


@dataclass(frozen=True)
class Epochs:
    """Epochs of a local fit's three parts, each >= 0; null takes `federation.local_epochs`.

    Args:
        prior_epochs: of g.
        cvae_epochs: of E and D.
        classifier_epochs: of C.
    """

    prior_epochs: int | None = None
    cvae_epochs: int | None = None
    classifier_epochs: int | None = None

    def __post_init__(self) -> None:
        for name, count in vars(self).items():
            require(count is None or count >= 0, f"method.epochs.{name}", "must be >= 0 or null", count)


class FedCVAE(Method):
    """A shared network g gives every class a Gaussian prior, under which a private autoencoder makes more images.

    A local fit is three, one after another, with feature a(x) the last hidden layer of g, and N(m_k, s²_k) the moments
    of the own features of class k once g is fitted:

        g: CE(g(x), y) + ρ ‖a(x)‖²
        encoder E and decoder D: ‖x − D(z, y)‖² + β KL( E(x, y) ‖ N(m_y, s²_y) ), z drawn from E(x, y)
        the classifier C: CE(C(x), y) + γ CE(C(D(z', y')), y'), z' drawn from N(m_y', s²_y'), as many y' as y

    g alone travels around the ring, batch norm's statistics with it, and is averaged with the predecessor's: 2,636,430
    values on 3x32x32 images (the paper's figure implies 3.3 million, of which it does not say what they are). Nothing
    that predicts is shared.

    E and D see images in [0, 1], as `ConditionalDecoder` paints them; inputs that come as floats and exceed that are
    brought there by the least and the largest value of the client's training part. D imagines in eval mode, and the
    classifier's running statistics are those of real images alone.

    Args:
        model: the private classifier C, on images of 8x8 or more; ResNet18 in the paper.
        kl_weight: β, >= 0, beside a reconstruction that is summed over pixels.
        generated_weight: γ, >= 0; with 0 the classifier has Local's loss.
        penalty_weight: ρ, >= 0.
        latent_size: size of a and z, >= 1.
        width: channels of g's first layer, >= 1; what travels grows with its square.
        variance_floor: least s², > 0.
        generated_classes: y' uniform over the classes ``present`` in the client's training part, or over ``all``; the
            prior of an absent class is N(0, 1).
        epochs: epochs of a local fit's three parts.
        extra_terms: terms added to the classifier's loss, on the client's own images.
    """

    shared = ("prior",)
    exchange = "Ring"
    paper = "Guo et al., DRDFL (2025)"

    def __init__(
        self,
        model: SplitModel,
        kl_weight: float = 1.0,
        generated_weight: float = 1.0,
        penalty_weight: float = 1e-3,
        latent_size: int = 64,
        width: int = 64,
        variance_floor: float = 1e-2,
        generated_classes: GeneratedClasses = "present",
        epochs: Epochs = Epochs(),
        extra_terms: list[Term] | None = None,
    ) -> None:
        for key, value, least in (
            ("kl_weight", kl_weight, 0),
            ("generated_weight", generated_weight, 0),
            ("penalty_weight", penalty_weight, 0),
            ("latent_size", latent_size, 1),
            ("width", width, 1),
        ):
            require(value >= least, f"method.{key}", f"must be >= {least}", value)
        require(variance_floor > 0, "method.variance_floor", "must be > 0", variance_floor)
        require_choices("method", generated_classes=(generated_classes, GeneratedClasses))
        require_image("FedCVAE", model.input_shape)
        super().__init__(model, extra_terms=extra_terms)
        self.prior = PriorNetwork(model.input_shape, model.num_classes, latent_size, width)  # g
        self.encoder = ConditionalEncoder(model.input_shape, model.num_classes, latent_size)  # E
        self.decoder = ConditionalDecoder(model.input_shape, model.num_classes, latent_size)  # D; C is the model
        self.register_buffer("class_mean", torch.zeros(model.num_classes, latent_size))
        self.register_buffer("class_variance", torch.ones(model.num_classes, latent_size))
        self.register_buffer("pixel_range", torch.tensor([0.0, 1.0]))
        self.register_buffer("pixel_mean", torch.zeros(1, 1, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.ones(1, 1, 1, 1), persistent=False)
        self.weights = {
            "prior_cross_entropy": 1.0,
            "prior_penalty": penalty_weight,
            "reconstruction": 1.0,
            "kl": kl_weight,
            "cross_entropy_generated": generated_weight,
        }
        self.epochs = epochs
        self.variance_floor = variance_floor
        self.generated_classes = generated_classes
        self.own_data: OwnData | None = None

    class_mean: Tensor  # [C, D] m
    class_variance: Tensor  # [C, D] s²
    pixel_range: Tensor  # [2], what the decoder's 0 and 1 stand for
    pixel_mean: Tensor  # [1, 1 or C_in, 1, 1], which normalise the images
    pixel_std: Tensor

    def receive(self, message: Message, data: OwnData) -> None:
        """Load g, which was averaged on the way; all of the client that is not in a state dict is set anew here."""
        super().receive(message, data)
        self.pixel_mean, self.pixel_std = (t.to(self.pixel_mean) for t in data.pixel_mean_and_std())
        self.own_data = data

    # --- the local fit ------------------------------------------------------------------------------------------------

    @override
    def phases(self) -> list[Phase]:
        own = self.epochs
        return [
            Phase("prior", ("prior",), own.prior_epochs, terms=(), resting=("encoder", "decoder")),
            Phase("cvae", ("encoder", "decoder"), own.cvae_epochs, terms=(), resting=("prior",)),
            Phase("classifier", ("model", "terms"), own.classifier_epochs, resting=("prior", "encoder", "decoder")),
        ]

    def _enter_phase(self, phase: Phase) -> None:
        """Once g is fitted, take its moments."""
        if phase.name != "prior" and self.own_data is not None:
            self.know_classes(self.own_data)
            self.own_data = None

    @torch.no_grad()
    def know_classes(self, data: OwnData) -> None:
        """Take the moments of the features of the client's training part, and the range of its pixels."""
        features, labels = [], []
        least, largest = 0.0, 1.0
        for x, y in data.batches("train"):
            features.append(widened(self.prior(self._pixels(x).to(x.dtype))[0]))
            labels.append(y)
            if data.are_floats:  # no bytes, whose range is [0, 1] by itself
                least, largest = min(least, float(x.min())), max(largest, float(x.max()))
        y = torch.cat(labels)
        mean, variance = class_moments(torch.cat(features), y, self.model.num_classes, self.variance_floor)
        self.class_mean.copy_(mean)
        self.class_variance.copy_(variance)
        self.pixel_range.copy_(torch.tensor([least, largest], dtype=torch.float32), non_blocking=True)
        drawn = data.held_classes if self.generated_classes == "present" else torch.ones(self.model.num_classes)
        self.drawn_classes = drawn.nonzero().flatten().to(y.device, non_blocking=True)

    @override
    def losses(self) -> dict[str, float]:
        off = "cross_entropy_generated" if not self.weights["cross_entropy_generated"] else ""
        return {name: weight for name, weight in self.weights.items() if name != off}

    def local_step(self, step: Step) -> None:
        """One mini-batch of the phase that it belongs to."""
        if step.is_first:
            self._enter_phase(step.phase)
        if step.phase.name == "prior":
            step.descend(step.through(self.prior_losses, step.x, step.y))
        elif step.phase.name == "cvae":
            step.descend(step.through(self.cvae_losses, step.x, step.y))
        else:
            out = step.forward()
            with keeping_statistics(self):  # until after the step: the backward pass must find them as they were
                step.descend(self.classifier_losses(step, out))
            step.observe(out)

    def prior_losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """L_g of images [B, C_in, H, W] of classes [B]."""
        feature, logits = self.prior(self._pixels(x).to(x.dtype))
        penalty = widened(feature).square().sum(1).mean()
        return {"prior_cross_entropy": F.cross_entropy(widened(logits), y), "prior_penalty": penalty}

    def cvae_losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """L_cvae of images [B, C_in, H, W] of classes [B]; the class moments are constants."""
        images = self._in_unit_range(x)
        mean, log_variance = self.encoder(images.to(x.dtype), y)
        decoded = self.decoder(reparametrised(mean, clamped(log_variance)), y)
        kl = kl_to_normal(mean, log_variance, self.class_mean[y], self.class_variance[y])
        return {"reconstruction": reconstruction_loss(images, decoded), "kl": kl}

    def classifier_losses(self, step: Step, out: Forward) -> dict[str, Tensor]:
        """L_C and the extra terms, of a forward pass of the client's images and of as many imagined ones."""
        values = step.values(out)
        if self.weights["cross_entropy_generated"] > 0:
            imagined = step.forward(*step.through(self.imagine, len(out.y), out.x.dtype))
            generated = step.values(imagined, [self.terms.cross_entropy])
            values["cross_entropy_generated"] = generated["cross_entropy"]
        return values

    @torch.no_grad()
    def imagine(self, count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Images [count, C_in, H, W], normalised like the client's, and their classes [count]; from global streams."""
        classes = self.drawn_classes
        y = classes[torch.randint(len(classes), (count,), device=classes.device)]
        z = reparametrised(self.class_mean[y], self.class_variance[y].log()).to(dtype)
        least, largest = self.pixel_range
        pixels = widened(self.decoder(z, y)) * (largest - least) + least
        return ((pixels - self.pixel_mean) / self.pixel_std).to(dtype), y

    def _pixels(self, x: Tensor) -> Tensor:
        """Images as they were before they were normalised, in float32: bytes in [0, 1], floats as they are."""
        return widened(x) * self.pixel_std + self.pixel_mean

    def _in_unit_range(self, x: Tensor) -> Tensor:
        """Images in the decoder's [0, 1], in float32."""
        least, largest = self.pixel_range
        return (self._pixels(x) - least) / (largest - least)
