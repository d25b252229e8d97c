"""DRDFL: a small shared encoder and class Gaussians travel around a ring; everything else stays at home.

Guo, Lv, Geng, "Harmonizing Generalization and Personalization in Ring-topology Decentralized Federated Learning", 2025,
Algorithm 1. ψ (PersonaNet) encodes what tells the client's classes apart, φ (Learngene) what is common to all classes;
θ decodes both, ω classifies inputs and their noisy reconstructions. Where the paper is silent or contradicts itself,
the choice is a switch; not so L_adv, which trains the adversary ϑ alone (line 13 has it train φ, too, and no line ϑ).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.division import keeps_all
from fl_lightning.core.facts import Facts
from fl_lightning.core.forward import Forward
from fl_lightning.core.freezing import frozen
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method, Phase, Predictor, Seen
from fl_lightning.core.mixing import MeanMixer
from fl_lightning.core.precision import widened
from fl_lightning.core.server import Server
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.losses.adversarial import Adversarial, UniformAdversarial
from fl_lightning.losses.gaussian_mixture import GaussianMixture, Mixture
from fl_lightning.losses.variational import (
    KLToStandardNormal,
    Latent,
    LatentForward,
    Reconstruction,
    Reduction,
    clamped,
)
from fl_lightning.models.checks import require_image
from fl_lightning.models.split import SplitModel
from fl_lightning.models.vae import ConvDecoder, ConvEncoder, LatentClassifier, VariationalEncoder, reparametrised
from fl_lightning.seeding import torch_generator

if TYPE_CHECKING:
    from fl_lightning.core.host import OwnData
    from fl_lightning.core.step import Step

AdversaryClasses = Literal["all", "present"]
GradFlow = Literal["elbo", "literal", "full"]
UpdateOrder = Literal["sequential", "joint"]
Moments = Literal["own", "shared"]
PredictFrom = Literal["reconstruction", "input", "both"]


@dataclass(frozen=True)
class Weights:
    """The losses' weights.

    Args:
        mixture_weight: factor of L_PR = L_cls + λ L_log, >= 0; 0 is the ablation without it, which sends no Gaussians.
        kl_weight: factor of L_kl, >= 0; with the two adversarial weights 0, too, the ablation without L_GL.
        adversarial_weight: factor of L_adv (adversary), >= 0.
        uniform_weight: factor of L_adv^u (Learngene), >= 0.
        reconstruction_weight: factor of L_rec, >= 0.
    """

    mixture_weight: float = 1.0
    kl_weight: float = 1.0
    adversarial_weight: float = 1.0
    uniform_weight: float = 1.0
    reconstruction_weight: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value >= 0, f"method.weights.{name}", "must be >= 0", value)


@dataclass(frozen=True)
class Latents:
    """The two latents, and what must not be read off the shared one.

    Args:
        personal_size: size of PersonaNet's embedding z_p, >= 1.
        shared_size: size of the Learngene's latent z_l, >= 1.
        adversary_classes: classes among which the adversary chooses: ``all``, or those ``present`` locally.
    """

    personal_size: int = 64
    shared_size: int = 16
    adversary_classes: AdversaryClasses = "all"

    def __post_init__(self) -> None:
        require(self.personal_size >= 1, "method.latents.personal_size", "must be >= 1", self.personal_size)
        require(self.shared_size >= 1, "method.latents.shared_size", "must be >= 1", self.shared_size)
        require_choices("method.latents", adversary_classes=(self.adversary_classes, AdversaryClasses))


@dataclass(frozen=True)
class Decoding:
    """Reconstructions: their loss, their noise, and whether they are what is classified.

    Args:
        reconstruction_reduction: ``sum`` of squares over an image's values, or their ``mean``.
        noise_std: standard deviation of the noise on reconstructions, >= 0.
        predict_from: what the classifier sees in the headline accuracy; all three are logged. ``both`` is the mean of
            the probabilities from reconstruction and input.
        test_noise: whether reconstructions get noise in predictions, too.
    """

    reconstruction_reduction: Reduction = "sum"
    noise_std: float = 0.1
    predict_from: PredictFrom = "reconstruction"
    test_noise: bool = False

    def __post_init__(self) -> None:
        require(self.noise_std >= 0, "method.decoding.noise_std", "must be >= 0", self.noise_std)
        require_choices(
            "method.decoding",
            reconstruction_reduction=(self.reconstruction_reduction, Reduction),
            predict_from=(self.predict_from, PredictFrom),
        )


@dataclass(frozen=True)
class Updates:
    """Which loss trains what, and in which order.

    Args:
        grad_flow: what L_rec reaches: decoder and both encoders (``elbo``: equation 3), or the decoder alone
            (``literal``: line 17 of Algorithm 1, under which the Learngene learns nothing of the images); ``full`` is
            ``elbo`` with the cross-entropy of the noisy reconstruction reaching decoder and encoders, too.
        update_order: one step a loss in Algorithm 1's order (``sequential``), or one forward and backward pass for all
            (``joint``), which is cheaper and not the same.
        personanet_moments: whether PersonaNet's L_rec step has optimizer moments of its ``own`` or ``shared`` ones with
            its L_PR step, which the larger L_rec then decides; `update_order` ``joint`` has one step and one set.
    """

    grad_flow: GradFlow = "elbo"
    update_order: UpdateOrder = "sequential"
    personanet_moments: Moments = "own"

    def __post_init__(self) -> None:
        require_choices(
            "method.updates",
            grad_flow=(self.grad_flow, GradFlow),
            update_order=(self.update_order, UpdateOrder),
            personanet_moments=(self.personanet_moments, Moments),
        )


class DRDFL(Method):
    """A private class-discriminative encoder and a shared class-invariant one, merged by a private decoder.

        ψ: L_PR + L_rec,  adversary: L_adv,  φ: L_adv^u + L_kl + L_rec,  θ: L_rec,  ω: CE(ω(x), y) + CE(ω(x̂ + noise), y)

    The successor in the ring hears the shared encoder (the Learngene: 29,240 values on 3x32x32 images) and the classes'
    Gaussians (2·K·64). It takes the mean with its own encoder, and moves its own Gaussians a little; a
    newcomer (`federation.newcomers`) copies both, and one that is first drawn later takes the mean, like all.

    Args:
        model: the private local classifier ω, on images of 8x8 or more; ResNet18 in the paper.
        weights: the losses' weights.
        mixture: what the class Gaussians are trained for, and how they are merged.
        latents: the two latents, and what must not be read off the shared one.
        decoding: reconstructions: their loss, their noise, and whether they are what is classified.
        updates: which loss trains what, and in which order.
        extra_terms: terms added to the classifier's loss.
    """

    shared = ("learngene",)
    exchange = "Ring"
    paper = "Guo et al., DRDFL (2025)"
    gives_latent: ClassVar[bool] = True
    is_kept = keeps_all  # the Learngene, too: line 7 averages with the client's own

    def __init__(
        self,
        model: SplitModel,
        weights: Weights = Weights(),
        mixture: Mixture = Mixture(),
        latents: Latents = Latents(),
        decoding: Decoding = Decoding(),
        updates: Updates = Updates(),
        extra_terms: list[Term] | None = None,
    ) -> None:
        require_image("DRDFL", model.input_shape)
        gaussians = GaussianMixture(weights.mixture_weight, mixture, latents.personal_size)
        own = [
            gaussians,
            KLToStandardNormal(weights.kl_weight),
            Adversarial(weights.adversarial_weight),
            UniformAdversarial(weights.uniform_weight),
            Reconstruction(weights.reconstruction_weight, decoding.reconstruction_reduction),
        ]
        super().__init__(model, terms=own, extra_terms=extra_terms)
        taken = {term.name for term in own}
        for term in self.terms.extra:  # it would get the classifier's pass, which has no latents
            rule = f"{term.name} is DRDFL's own, with its weight under method.weights: leave it out"
            require(term.name not in taken, "method.extra_terms", rule, type(term).__name__)
        self.personanet = ConvEncoder(model.input_shape, latents.personal_size)  # ψ
        self.learngene = VariationalEncoder(model.input_shape, latents.shared_size)  # φ
        self.decoder = ConvDecoder(latents.personal_size + latents.shared_size, model.input_shape)  # θ; ω is the model
        self.adversary = LatentClassifier(latents.shared_size, model.num_classes)
        self.register_buffer("held", torch.zeros(model.num_classes, dtype=torch.bool), persistent=False)
        self.register_buffer("finished_fits", torch.zeros((), dtype=torch.long))
        self.mixture = [gaussians]  # in a list, so that it is not registered a second time
        self.adversary_classes = latents.adversary_classes
        self.decoding = decoding
        self.grad_flow = updates.grad_flow
        self.sequential = updates.update_order == "sequential"
        self.own_moments = updates.personanet_moments == "own" and self.sequential

    held: Tensor  # [C] bool, classes of the client's training part
    finished_fits: Tensor  # int64; 0 marks a client that never took part

    # --- what comes in: lines 5 to 7 ----------------------------------------------------------------------------------

    def receive(self, message: Message, data: OwnData) -> None:
        """Average the Learngene with the neighbour's, and move the class Gaussians; who joins later copies both."""
        self.held.copy_(data.held_classes)
        joins = self.finished_fits == 0 and self.facts.is_newcomer
        weights = message.weights if joins else self._averaged(message.weights)
        super().receive(Message(weights, message.artifacts, message.num_samples), data)

    @torch.no_grad()
    def _averaged(self, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Line 7: the mean of own and received entries; what does not fit is left for the loader to refuse."""
        own = self.state_dict()
        fits = {name for name, tensor in received.items() if name in own and own[name].shape == tensor.shape}
        return {
            n: (widened(own[n]) + widened(t).to(own[n].device)) / 2 if n in fits else t for n, t in received.items()
        }

    def make_server(self, initial: Message, facts: Facts) -> Server:
        """Without a server, the neighbour's message as it is: `receive` merges it."""
        return Server(initial, mixer=partial(MeanMixer, own=False))

    def parameter_counts(self) -> tuple[int, int]:
        """The class Gaussians travel, too, as artifacts."""
        personal, shared = super().parameter_counts()
        gaussians = sum(p.numel() for p in self.mixture[0].parameters())
        return personal - gaussians, shared + gaussians

    # --- the local fit: lines 8 to 18 ---------------------------------------------------------------------------------

    def _weight(self, name: str) -> float:
        return next(term.weight for term in self.terms if term.name == name)

    @property
    def _reaches_encoders(self) -> bool:
        """Whether the decoder's loss trains the encoders."""
        return self.grad_flow == "full" or (self.grad_flow == "elbo" and self._weight("reconstruction") > 0)

    def phases(self) -> list[Phase]:
        """One, in which every loss has an optimizer; PersonaNet's two steps have one each, unless told to share.

        Parts stand in the order of their steps; what no loss reaches is left out.
        """
        reached, mixture = self._reaches_encoders, self._weight("gaussian_mixture") > 0
        learngene = self._weight("kl") + self._weight("uniform_adversarial") > 0
        decodes = self._weight("reconstruction") > 0 or self.grad_flow == "full"
        extra = [f"terms.{index}" for index in range(self.terms.num_own, len(self.terms))]
        parts = {
            "personanet": ("personanet",) if mixture or (reached and not self.own_moments) else (),
            "statistics": ("terms.1",) if mixture else (),
            "adversary": ("adversary",) if self._weight("adversarial") > 0 else (),
            "learngene": ("learngene",) if learngene or reached else (),
            "decoder": ("decoder",) if decodes else (),
            "personanet_reconstruction": ("personanet",) if reached and self.own_moments else (),
            "classifier": ("model", *extra),
        }
        return [Phase("all", parts={name: own for name, own in parts.items() if own})]

    def losses(self) -> dict[str, float]:
        """The noisy reconstruction's cross-entropy; the parts of L_PR are for the log alone."""
        parts = ("gaussian_classification", "gaussian_likelihood") if self._weight("gaussian_mixture") > 0 else ()
        return {**dict.fromkeys(parts, 0.0), "cross_entropy_reconstruction": 1.0}

    @override
    def on_fit_start(self) -> None:
        self._trains_decoder = "decoder" in (self.phases()[0].parts or {})

    def on_fit_end(self) -> None:
        """Count the fit: the next receive of a newcomer averages."""
        self.finished_fits += 1

    def local_step(self, step: Step) -> None:
        """One mini-batch of Algorithm 1."""
        step.observe(self._sequential_step(step) if self.sequential else self._joint_step(step))

    def _sequential_step(self, step: Step) -> Forward:
        """One step a loss, each on latents of the weights as they then are."""
        x, y = step.x, step.y
        if self._weight("gaussian_mixture") > 0:
            step.descend(
                self._mixture_losses(x, y, step.through(self.personanet, x)), "personanet", "statistics"
            )  # lines 9 and 10
        with torch.set_grad_enabled(self._reaches_encoders):
            z_p = step.through(self.personanet, x)  # line 11
        self._learngene_steps(step)  # line 13
        with torch.set_grad_enabled(self._reaches_encoders):
            latent = step.through(self._encode, x)  # line 14
        with torch.set_grad_enabled(self._trains_decoder):
            latent.reconstruction = step.through(self._decode, z_p, latent.sample)  # line 16
        decoding = self._values(step, LatentForward.of(x, y, latent), "reconstruction")
        out, classifying = self._classify(step, latent.reconstruction)
        own = "personanet_reconstruction" if self.own_moments else "personanet"
        encoders = ("learngene", own) if self._reaches_encoders else ()
        if self.grad_flow == "full":  # one backward pass, because the classifier's loss goes through the old decoder
            step.descend(decoding | classifying, "decoder", *encoders, "classifier")
        else:
            step.descend(decoding, "decoder", *encoders)  # line 17
            step.descend(classifying, "classifier")  # line 18
        return out

    def _learngene_steps(self, step: Step) -> None:
        """The adversary's step, then the Learngene's against it, on one draw of the latent."""
        if self._weight("kl") + self._weight("adversarial") + self._weight("uniform_adversarial") == 0:
            return
        latent = step.through(self._encode, step.x)
        out = LatentForward.of(step.x, step.y, latent)
        latent.adversary_logits = step.through(self.adversary, latent.sample.detach())
        step.descend(self._values(step, out, "adversarial"), "adversary")
        with frozen(self.adversary):
            latent.uniform_logits = step.through(self.adversary, latent.sample)
        step.descend(self._values(step, out, "kl", "uniform_adversarial"), "learngene")

    def _joint_step(self, step: Step) -> Forward:
        """One forward and one backward pass for all losses."""
        x, y = step.x, step.y
        z_p, latent = step.through(self.personanet, x), step.through(self._encode, x)
        values = self._mixture_losses(x, y, z_p) if self._weight("gaussian_mixture") > 0 else {}
        latent.adversary_logits = step.through(self.adversary, latent.sample.detach())
        with frozen(self.adversary):
            latent.uniform_logits = step.through(self.adversary, latent.sample)
        constant = not self._reaches_encoders
        inputs = (z_p.detach(), latent.sample.detach()) if constant else (z_p, latent.sample)
        latent.reconstruction = step.through(self._decode, *inputs)
        names = ("kl", "adversarial", "uniform_adversarial", "reconstruction")
        values |= self._values(step, LatentForward.of(x, y, latent), *names)
        out, classifying = self._classify(step, latent.reconstruction)
        step.descend(values | classifying, *(step.phase.parts or {}))
        return out

    def _mixture_losses(self, x: Tensor, y: Tensor, z_p: Tensor) -> dict[str, Tensor]:
        classification, likelihood = self.mixture[0].parts(Forward(x, y, [], z_p, z_p))
        return {
            "gaussian_mixture": self.mixture[0].combined(classification, likelihood),
            "gaussian_classification": classification,
            "gaussian_likelihood": likelihood,
        }

    def _encode(self, x: Tensor) -> Latent:
        """The Learngene's posterior and a fresh draw from it."""
        mean, log_variance = self.learngene(x)
        classes = self.held if self.adversary_classes == "present" else None
        sample = reparametrised(mean, clamped(log_variance))
        return Latent(mean, log_variance, sample, adversary_classes=classes)

    def _decode(self, z_p: Tensor, z_l: Tensor) -> Tensor:
        return self.decoder(torch.cat([z_p, z_l], 1))

    def _classify(self, step: Step, reconstruction: Tensor) -> tuple[Forward, dict[str, Tensor]]:
        """L_ce (Eq. 12) on inputs and noisy reconstructions, and the extra terms on the inputs."""
        out = step.forward()
        noisy = reconstruction + self.decoding.noise_std * torch.randn_like(reconstruction)
        noisy_out = step.forward(noisy if self.grad_flow == "full" else noisy.detach())
        extra = {id(term) for term in self.terms.extra}
        values = step.values(out, [self.terms.cross_entropy, *(term for term in step.terms if id(term) in extra)])
        of_noisy = step.values(noisy_out, [self.terms.cross_entropy])
        return out, {**values, "cross_entropy_reconstruction": of_noisy["cross_entropy"]}

    def _values(self, step: Step, out: Forward, *names: str) -> dict[str, Tensor]:
        """The values of those of the named terms that have a weight."""
        return step.values(out, [term for term in self.terms if term.name in names and term.weight > 0])

    # --- prediction ---------------------------------------------------------------------------------------------------

    def predictors(self) -> dict[str, Predictor]:
        """From the reconstruction (of the latents' means), from the input, and from both."""
        ways: dict[str, Callable[[Seen], Tensor]] = {
            "reconstruction": lambda seen: seen.once("reconstruction", lambda: self._from_reconstruction(seen.x)),
            "input": lambda seen: seen.logits(self.model),
        }
        ways["both"] = lambda seen: _mean_of_shares(ways["reconstruction"](seen), ways["input"](seen))
        headline = self.decoding.predict_from
        others = {name: Predictor(way, ()) for name, way in ways.items() if name != headline}
        return {headline: Predictor(ways[headline]), **others}

    def _from_reconstruction(self, x: Tensor) -> Tensor:
        reconstruction = self._decode(self.personanet(x), self.learngene(x)[0])
        if self.decoding.test_noise:  # from a stream of its own: an evaluation must not change what is trained
            noise = torch.randn(reconstruction.shape, generator=torch_generator(0, "test noise"), dtype=torch.float32)
            reconstruction = reconstruction + self.decoding.noise_std * noise.to(reconstruction)
        return self.model(reconstruction)


def _mean_of_shares(one: Tensor, other: Tensor) -> Tensor:
    """The logarithm of the mean of two networks' probabilities: scores are taken for logits."""
    both = torch.stack([widened(one), widened(other)]).log_softmax(2)
    return both.logsumexp(0) - math.log(2)
