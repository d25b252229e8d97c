"""User-level differential privacy: clipped messages, noise, and what the two are worth after so many rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.client import ClientModule
from fl_lightning.core.coding import Coding, clipped, deviations
from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.core.private_mean import CLIPPED, Clipped, PrivateMean
from fl_lightning.core.private_steps import check_noise
from fl_lightning.errors import ConfigError, require, require_choices
from fl_lightning.federation.accounting import Accountant, Mechanism, epsilon
from fl_lightning.federation.calendar import Calendar
from fl_lightning.federation.exchange import Exchange
from fl_lightning.federation.wire import KEY, MessageFilter, WireFilter
from fl_lightning.seeding import torch_generator

Where = Literal["server", "client"]


class ClipAndNoise(MessageFilter):
    """User-level differential privacy: each client's message is clipped as a whole, and noise hides any one of them.

    What is private is the update x − r of the weights, r being what the client received, and the artifacts as they
    are; each of the two is scaled down to a norm of at most its C. All clients count alike, whatever their samples.
    Sample counts, batch norm's counters and which classes a client holds do not leave it in the clear: class means
    travel with a coordinate a class that says whether it is held, clipped and blurred with the rest. Artifacts of which
    no such vector can be made are refused.

    At the ``server`` (central): the server is trusted with the clipped messages; what leaves it is r + (Σ clip(v) +
    N(0, z²C²))/m, one draw a round, m the number of clients that a round expects, whoever comes; of messages with
    weights and artifacts, which are clipped apart, 2 z²C² for either. ε is for what all
    rounds' means say of one client that is there or not. With `federation.sampling` ``poisson`` taking part by chance
    makes it smaller; otherwise who takes part counts as known.
    At the ``client`` (local): each message gets noise of standard deviation z C of its own before anybody sees it, and
    the server's mean is over those who came. ε is for what all messages of one client say of its data, against any
    other data: two clipped messages are up to 2 C apart, so that the same z is worth less. Works without a server, too.

    Covered is what crosses the wire as weights and artifacts. Not covered: the run's own files (accuracies, losses,
    who took part, the partition, clients' models), and a client's personal model, which stays with it. Noise is
    drawn from the run's seed, so that a run repeats and resumes: for experiments; a deployment needs a
    cryptographic source, and noise that floating point does not betray. A client's single samples
    are another matter: `federation.record_privacy`.

    Args:
        clip: C of the weights' update, > 0.
        noise_multiplier: z, 0 or from 0.001 to 1e6; 0 only clips, and ε is infinite.
        where: who adds the noise: ``server`` or ``client``.
        clip_artifacts: C of the artifacts together, > 0; null takes `clip`.
        delta: δ of the (ε, δ) in `metrics.csv`, in (0, 1); well below 1 over the number of clients.
        accountant: ``rdp`` (Rényi, fast) or ``prv`` (privacy loss, tighter by about a tenth, seconds a round).

    Reference: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018,
    Algorithm 1; accountants: Mironov, Talwar, Zhang, "Rényi Differential Privacy of the Sampled Gaussian Mechanism",
    2019; Gopi, Lee, Wutschitz, "Numerical Composition of Differential Privacy", NeurIPS 2021.
    """

    paper = "McMahan et al., ICLR 2018"

    def __init__(
        self,
        clip: float = 1.0,
        noise_multiplier: float = 1.0,
        where: Where = "server",
        clip_artifacts: float | None = None,
        delta: float = 1e-5,
        accountant: Accountant = "rdp",
    ) -> None:
        require(0 < clip < math.inf, f"{KEY}.clip", "must be > 0 and finite", clip)
        allowed = clip_artifacts is None or 0 < clip_artifacts < math.inf
        require(allowed, f"{KEY}.clip_artifacts", "must be > 0 and finite", clip_artifacts)
        check_noise(KEY, noise_multiplier)
        require(0 < delta < 1, f"{KEY}.delta", "must be in (0, 1)", delta)
        require_choices(KEY, where=(where, Where), accountant=(accountant, Accountant))
        self.norms = clip, clip if clip_artifacts is None else clip_artifacts
        self.noise_multiplier = noise_multiplier
        self.where = where
        self.delta = delta
        self.accountant: Accountant = accountant
        self.last = where == "server"
        self.initial = Message()
        """The common first weights, from which a client's update counts that has received none."""
        self.coding: Coding | None = None
        """How the last message was laid out."""

    def begin(self, exchange: Exchange, template: ClientModule, facts: Facts, calendar: Calendar) -> None:
        """Get ready for a federation.

        Args:
            exchange: set up.
            template: a client.
            facts: of the federation.
            calendar: who takes part.

        Raises:
            ConfigError: if the method's messages or its server allow no such privacy, or the accountant is missing.
        """
        epsilon(Mechanism(1.0, 1.0, 1), 0.1, self.accountant)  # here, so that a missing package is said before training
        server, name = template.make_server(facts), type(template.method).__name__
        masked = [key for key, rule in server.rules.items() if not rule().takes_noise]
        alone = "its server weighs clients by what each says, or hands on what each sends"
        lost = f"what it sends as {''.join(masked[:1])} has no known bound, or would not mean the same any more"
        why = lost if masked else alone
        require(server.takes_noise and not masked, KEY, f"{name} allows no ClipAndNoise: {why}")
        self.initial = template.initial_message()
        if self.where == "server":
            mean = PrivateMean(self.norms, self.noise_multiplier, calendar.expected, facts.seed)
            exchange.protect(mean, template)

    @override
    def change(self, message: Message, received: Message) -> Message:
        reference = {**self.initial.weights, **received.weights}
        try:
            coding = Coding.of(message)
        except TypeError as error:
            raise ConfigError(KEY, f"ClipAndNoise: {error}") from error
        self.coding = coding
        vector = clipped(coding.encoded(message, reference), coding, self.norms)
        if self.where == "server":
            return Message({}, {CLIPPED: Clipped.of(vector, coding)}, 1)
        noise = deviations(coding, self.norms, self.noise_multiplier)
        vector = vector + (noise * torch.randn(coding.size, dtype=noise.dtype)).to(vector)
        sent = {name: reference[name] for name in message.weights if name in reference}
        return coding.decoded(vector, sent, noise)

    def alone(self, packed: Clipped, reference: dict[str, Tensor], seed: int) -> Message:
        """One client's message as the mean gives it away to who knows all the others': under the round's whole noise.

        Args:
            packed: as it crosses to the server.
            reference: weights that all ends know.
            seed: of the noise.
        """
        coding = packed.coding
        noise = deviations(coding, self.norms, self.noise_multiplier)
        drawn = torch.randn(coding.size, generator=torch_generator(seed, "privacy/alone"), dtype=noise.dtype)
        names = {entry.name for entry in coding.entries}
        known = {name: tensor for name, tensor in reference.items() if name in names}
        return coding.decoded(packed.vector.cpu().to(noise.dtype) + noise * drawn, known, noise)


class Account:
    """What a federation's rounds have spent so far: a function of its settings, its seed and the round alone.

    Args:
        settings: what is done to messages.
        calendar: who takes part.
    """

    def __init__(self, settings: ClipAndNoise, calendar: Calendar) -> None:
        self.settings = settings
        self.calendar = calendar
        self._round = 0
        self._taken: Counter[int] = Counter()

    @property
    def sensitivity(self) -> int:
        """How many C neighbours are apart: a client more or less is one, two messages of a client may be two."""
        return 1 if self.settings.where == "server" else 2

    def mechanism(self, round: int) -> Mechanism:
        """What the client that is worst off has been through after so many rounds.

        Where taking part is no secret it is the client that took part the most often.
        """
        own = self.settings
        sampled = self.calendar.samples_independently and own.where == "server"
        return Mechanism(
            own.noise_multiplier / self.sensitivity,
            self.calendar.settings.participation if sampled else 1.0,
            round if sampled else self._most_often(round),
        )

    def _most_often(self, round: int) -> int:
        if round < self._round:
            self._round, self._taken = 0, Counter()
        while self._round < round:
            self._round += 1
            self._taken.update(self.calendar.participants(self._round))
        return max(self._taken.values(), default=0)

    def epsilon(self, round: int) -> float:
        """ε at the settings' δ after so many rounds; infinite without noise."""
        return epsilon(self.mechanism(round), self.settings.delta, self.settings.accountant)

    def summary(self, round: int) -> dict[str, Any]:
        """What `summary.json` says of privacy."""
        own, spent = self.settings, self.epsilon(round)
        mechanism = self.mechanism(round)
        return {
            "epsilon": spent if math.isfinite(spent) else None,
            "delta": own.delta,
            "where": own.where,
            "neighbours": "one client more or less" if own.where == "server" else "any other data of one client",
            "noise_multiplier": own.noise_multiplier,
            "sensitivity": self.sensitivity,
            "sampling_rate": mechanism.sampling_rate,
            "times": mechanism.times,
            "accountant": own.accountant,
            "noise": "drawn from the run's seed: for experiments",
        }


def start_account(
    filters: Sequence[WireFilter], exchange: Exchange, template: ClientModule, facts: Facts, calendar: Calendar
) -> Account | None:
    """Get the one filter that gives privacy ready, and open its account; None where there is no such filter.

    Args:
        filters: of the wire.
        exchange: set up.
        template: a client.
        facts: of the federation.
        calendar: who takes part.
    """
    for own in filters:
        if isinstance(own, ClipAndNoise):
            own.begin(exchange, template, facts, calendar)
            return Account(own, calendar)
    return None
