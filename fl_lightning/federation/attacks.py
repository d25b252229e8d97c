"""Hostile clients, for experiments: who they are, and what they send instead of what their method would send."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.core.message import Artifact, Message, accumulation_dtype, tensors_in
from fl_lightning.data.population import LazyClients
from fl_lightning.errors import require, require_choices
from fl_lightning.seeding import numpy_generator, torch_generator

if TYPE_CHECKING:
    from fl_lightning.data.module import FederatedData
    from fl_lightning.data.store import ClientData

KEY = "federation.attack"
Kind = Literal["noise", "sign_flip", "scale", "label_flip", "same_value", "inner_product"]
STRENGTHS = {"noise": 10.0, "sign_flip": 4.0, "scale": 10.0, "same_value": 1.0, "inner_product": 0.5}


@dataclass(frozen=True)
class Attack:
    """Clients that send something else than they should, in every round that they take part in.

    A client that started a round from r and should send x sends, with s the strength and r = 0 for an artifact of which
    it has received none of that name and shape:

    - ``noise``: r + s · RMS(x − r) · N(0, 1), tensor by tensor (Blanchard et al. send pure noise; this one is of the
      update's own size, whatever the model).
    - ``sign_flip``: r − s (x − r) (Li et al., RSA, with 4: a fifth of such clients makes the mean stand still).
    - ``scale``: r + s (x − r), a boosted update (Bagdasaryan et al., the step of model replacement).
    - ``same_value``: s in every entry (Li et al., RSA).
    - ``inner_product``: r − s · the unweighted mean of the honest clients' x − r in this round (its own where no honest
      one sends any), which all attackers know: they collude and are omniscient (Xie et al., their ε). It is put in
      between the clients and the exchange once all honest messages have passed the wire. Small s evades rules that go
      by distance; the mean is turned around above honest/attackers.
    - ``label_flip``: x after training on C − 1 − y instead of y, in all that the client does with its training and
      validation part (Fang et al.). Tests keep their labels.

    Of weights the trained parameters are attacked; running statistics and counters stay what they were, so that
    variances are not negative. Artifacts are attacked, too: rows of class means (prototypes, soft labels, Gaussians),
    tensors, and floating fields of registered kinds, only where values really cross. Rows that are distributions stay
    such (cut off at 0, divided by their sum; uniform where nothing is left): a server would refuse others at a glance.
    Counts, masks, and tensors of one number (steps, push-sum's mass) stay.

    The message is made before the wire, so that clipping and compression work on it (``inner_product``: after). An
    attacker's own state, and its tests, are those of its honest fit (under ``label_flip`` on flipped labels); it
    counts in no mean over clients, and ``attacker`` marks it in `clients.csv`. Its message is looked at like every
    other one: a strength that takes a parameter beyond `federation.max_growth` makes it sick
    (`federation.on_client_error`); of ``inner_product`` the round's result is looked at.

    Without a server a client's own message has a share in what it receives (where the method's rule takes it), and an
    attacker's is the one that it has sent: its next round begins with its own lie in it, beside its neighbours'
    messages. Only one message of a client passes the wire, so that nobody knows what would have arrived of the honest
    one.

    Args:
        clients: who attacks.
        share: or how many of all clients, in (0, 1), rounded, at least one; drawn from the run's seed.
        kind: ``noise``, ``sign_flip``, ``scale``, ``label_flip``, ``same_value`` or ``inner_product``.
        strength: s; > 0, and any number for ``same_value``. null takes 10 for ``noise`` and ``scale``, 4 for
            ``sign_flip``, 1 for ``same_value``, 0.5 for ``inner_product``; ``label_flip`` has none.

    References: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries", NeurIPS 2017; Li, Xu,
    Chen, Giannakis, Ling, "RSA: Byzantine-Robust Stochastic Aggregation Methods", AAAI 2019; Bagdasaryan, Veit, Hua,
    Estrin, Shmatikov, "How To Backdoor Federated Learning", AISTATS 2020; Fang, Cao, Jia, Gong, "Local Model Poisoning
    Attacks to Byzantine-Robust Federated Learning", USENIX Security 2020; Xie, Koyejo, Gupta, "Fall of Empires:
    Breaking Byzantine-tolerant SGD by Inner Product Manipulation", UAI 2019 (PMLR 115, 2020).
    """

    clients: list[int] | None = None
    share: float | None = None
    kind: Kind = "sign_flip"
    strength: float | None = None

    def __post_init__(self) -> None:
        require_choices(KEY, kind=(self.kind, Kind))
        one = (self.clients is None) != (self.share is None)
        given = f"clients: {self.clients}, share: {self.share}"
        require(one, KEY, "needs either clients or share, and not both", given)
        require(self.share is None or 0 < self.share < 1, f"{KEY}.share", "must be in (0, 1)", self.share)
        allowed = "must be null for label_flip, which has none"
        require(self.strength is None or self.kind != "label_flip", f"{KEY}.strength", allowed, self.strength)
        s, free = self.strength, self.kind == "same_value"
        fits = s is None or (math.isfinite(s) and (free or s > 0))
        require(fits, f"{KEY}.strength", "must be finite" if free else "must be > 0 and finite", s)

    @property
    def s(self) -> float:
        """The strength, or its default."""
        return STRENGTHS.get(self.kind, 0.0) if self.strength is None else self.strength

    def attackers(self, num_clients: int, seed: int, num_founders: int | None = None) -> frozenset[int]:
        """Who attacks; depends on the settings, the seed and the number of clients alone.

        Args:
            num_clients: N.
            seed: the run's.
            num_founders: clients that are there from the start, the first ones; None for all.

        Raises:
            ConfigError: for clients that do not exist, or if none of the founders is honest.
        """
        if self.share is None:
            key, named = f"{KEY}.clients", self.clients or []
            require(bool(named), key, "must name at least one client", named)
            for client in named:
                require(0 <= client < num_clients, key, f"must be clients from 0 to {num_clients - 1}", client)
            given: object = named
        else:
            key, given = f"{KEY}.share", self.share
            count = min(num_clients, max(1, round(self.share * num_clients)))
            named = numpy_generator(seed, "attackers").choice(num_clients, count, replace=False).tolist()
        founders = range(num_clients if num_founders is None else num_founders)
        honest = not set(founders) <= set(named)
        require(honest, key, f"must leave at least one of the {len(founders)} clients honest", given)
        return frozenset(named)


class Entry(NamedTuple):
    """One tensor of a message that an attack may change.

    Args:
        key: ``("weight", name, "")`` or ``("artifact", name, field)``; the field is empty for a plain tensor.
        value: what the client should send.
        start: what it started from, of the same shape.
        crosses: bool, broadcasts over `value`: what is really sent of it; None for all.
    """

    key: tuple[str, str, str]
    value: Tensor
    start: Tensor
    crosses: Tensor | None

    def changed(self, forged: Tensor) -> Tensor:
        """`forged` where values are sent, in the honest type; rows of a distribution stay such."""
        if self.key[0] == "artifact" and _are_distributions(self.value, self.crosses):
            forged = _as_distributions(forged)
        forged = forged.to(self.value.dtype)
        return forged if self.crosses is None else torch.where(self.crosses, forged, self.value)


def attacked(
    message: Message,
    start: Mapping[str, Tensor],
    received: Message,
    parameters: Container[str],
    increments: Container[str] = (),
) -> Iterator[Entry]:
    """What of a message an attack changes.

    Args:
        message: as the method sends it.
        start: the weights that the client started its round from.
        received: what it was sent.
        parameters: names of the weights that are trained.
        increments: names of the artifacts that are updates themselves.
    """
    for name, tensor in message.weights.items():
        if name in parameters and tensor.is_floating_point():
            base = start.get(name)
            yield Entry(("weight", name, ""), tensor, torch.zeros_like(tensor) if base is None else base, None)
    for name, artifact in message.artifacts.items():
        before = None if name in increments else received.artifacts.get(name)
        for field, tensor in tensors_in(artifact).items():
            if not tensor.is_floating_point() or tensor.numel() < 2:
                continue
            crosses = None if isinstance(artifact, Tensor) else artifact.crossing(field)
            if crosses is not None:
                crosses = crosses.reshape(*crosses.shape, *(1,) * (tensor.ndim - crosses.ndim))
            yield Entry(("artifact", name, field), tensor, _before(before, field, tensor), crosses)


def rebuilt(message: Message, changed: Mapping[tuple[str, str, str], Tensor]) -> Message:
    """A message with other tensors in the places of `Entry.key`."""
    weights = {name: changed.get(("weight", name, ""), tensor) for name, tensor in message.weights.items()}
    artifacts: dict[str, Artifact] = {}
    for name, artifact in message.artifacts.items():
        if isinstance(artifact, Tensor):
            artifacts[name] = changed.get(("artifact", name, ""), artifact)
        else:
            own = {field: tensor for (_, of, field), tensor in changed.items() if of == name and field}
            artifacts[name] = replace(artifact, **own)  # type: ignore[type-var]
    return replace(message, weights=weights, artifacts=artifacts)


class Attackers:
    """The hostile clients of a run, and what they do.

    Args:
        attack: `federation.attack`.
        data: the federation's data, served already.
        seed: the run's.
        num_newcomers: how many of the clients, the last ones, join later.

    Raises:
        ConfigError: if the attack does not fit the clients.
    """

    def __init__(self, attack: Attack | None, data: FederatedData, seed: int, num_newcomers: int = 0) -> None:
        self.attack = attack
        self.increments: frozenset[str] = frozenset()
        """Names of the artifacts that the server adds to what clients have received."""
        self.seed = seed
        num_clients = len(data.clients)
        founders = num_clients - num_newcomers
        self.clients = frozenset[int]() if attack is None else attack.attackers(num_clients, seed, founders)
        self.samples = self._samples(data)
        """[N] what every client trains on."""

    @property
    def collude(self) -> bool:
        """Whether what they send depends on what the others send (`federation/collusion.py`)."""
        return self.attack is not None and self.attack.kind == "inner_product"

    def _samples(self, data: FederatedData) -> Sequence[ClientData]:
        if self.attack is None or self.attack.kind != "label_flip":
            return data.clients
        store = copy.copy(data.store)  # shares the inputs
        store.y = data.clients[0].num_classes - 1 - data.store.y

        def seen(client: int) -> ClientData:
            own = data.clients[client]
            return _flipped(own, store) if client in self.clients else own

        number = len(data.clients)
        return LazyClients(seen, number) if data.overlaps else [seen(client) for client in range(number)]

    def forge(
        self,
        message: Message,
        start: Mapping[str, Tensor],
        received: Message,
        parameters: Container[str],
        round: int,
        client: int,
    ) -> Message:
        """What a client sends: an honest one, and one whose attack is elsewhere, what its method does.

        Args:
            message: as the method sends it; stays as it is.
            start: the weights that the client started its round from.
            received: what it was sent.
            parameters: names of the weights that are trained.
            round: 1-based.
            client: 0-based.
        """
        attack = self.attack
        if attack is None or client not in self.clients or attack.kind not in FORGERIES:
            return message
        make, generator = FORGERIES[attack.kind], torch_generator(self.seed, "attack", round, client)
        entries = attacked(message, start, received, parameters, self.increments)
        return rebuilt(message, {entry.key: entry.changed(make(entry, attack.s, generator)) for entry in entries})


def _noise(entry: Entry, s: float, generator: torch.Generator) -> Tensor:
    update = entry.value - entry.start
    squares = update.to(accumulation_dtype(update.device)).square()
    sent = squares if entry.crosses is None else squares[entry.crosses.expand_as(squares)]
    size = sent.mean().sqrt() if sent.numel() else squares.new_zeros(())
    return entry.start + (s * size).to(update.dtype) * torch.randn(update.shape, generator=generator).to(update)


def _sign_flip(entry: Entry, s: float, generator: torch.Generator) -> Tensor:
    return entry.start - s * (entry.value - entry.start)


def _scale(entry: Entry, s: float, generator: torch.Generator) -> Tensor:
    return entry.start + s * (entry.value - entry.start)


def _same_value(entry: Entry, s: float, generator: torch.Generator) -> Tensor:
    return torch.full_like(entry.value, s)


FORGERIES: dict[str, Callable[[Entry, float, torch.Generator], Tensor]] = {
    "noise": _noise,
    "sign_flip": _sign_flip,
    "scale": _scale,
    "same_value": _same_value,
}
"""What of an attack is made of one client's message alone."""


def _flipped(own: ClientData, store: object) -> ClientData:
    """A client's samples with the labels of another store."""
    flipped = copy.copy(own)
    flipped.store = store  # type: ignore[assignment]
    flipped.class_counts = own.class_counts.flip(0)
    return flipped


def _before(artifact: Artifact | None, field: str, like: Tensor) -> Tensor:
    """The same tensor of what was received; zeros where there is none of that shape."""
    found = None if artifact is None else tensors_in(artifact).get(field)
    return torch.zeros_like(like) if found is None or found.shape != like.shape else found.to(like)


def _are_distributions(rows: Tensor, crosses: Tensor | None) -> bool:
    """Whether every row [.., K] that crosses holds K >= 2 chances that sum to 1."""
    if rows.ndim < 2 or rows.shape[-1] < 2:
        return False
    good = (rows >= 0).all(-1, keepdim=True) & ((rows.sum(-1, keepdim=True) - 1).abs() < 1e-3)
    return bool((good if crosses is None else good | ~crosses).all())


def _as_distributions(rows: Tensor) -> Tensor:
    kept = rows.clamp(min=0)
    total = kept.sum(-1, keepdim=True)
    return torch.where(total > 0, kept / total.clamp(min=torch.finfo(rows.dtype).tiny), 1 / rows.shape[-1])
