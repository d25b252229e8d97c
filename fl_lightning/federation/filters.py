"""Filters that make messages smaller: fewer bits a value, and fewer values."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.message import accumulation_dtype
from fl_lightning.errors import require, require_choices
from fl_lightning.federation.packing import Packed, Packet
from fl_lightning.federation.wire import KEY, Ways, WireFilter


class Codes(NamedTuple):
    """A quantised tensor; `decoded` is what arrives.

    Args:
        codes: [k] int32, in [0, 2^bits − 1].
        scale: what one step is worth, >= 0, float32 or float64; 0 for a constant tensor.
        offset: what code 0 stands for, of the same type.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor

    def decoded(self) -> Tensor:
        """[k] offset + scale · codes, rounded once to the type of the scale."""
        wide = accumulation_dtype(self.codes.device)
        return (self.offset.to(wide) + self.scale.to(wide) * self.codes.to(wide)).to(self.scale.dtype)


def quantised(values: Tensor, bits: int) -> Codes | None:
    """The nearest of 2^bits equally spaced values between a tensor's least and its largest.

    s = (max − min) / (2^bits − 1),  code = round((x − min) / s),  x̂ = min + s · code,  |x̂ − x| <= s/2.

    Halves are rounded to even codes.

    Args:
        values: [k] float, k >= 1.
        bits: a code's, in 1..16.

    Returns:
        None where there is no such scale, because a value is NaN or infinite.

    >>> codes, scale, offset = quantised(torch.tensor([-1., 0., 0.25, 2.]), bits=2)
    >>> codes.tolist(), float(scale), float(offset)
    ([0, 1, 1, 3], 1.0, -1.0)
    """
    wide = accumulation_dtype(values.device)
    least, most = torch.aminmax(values)
    levels = 2**bits - 1
    offset = least.to(_wide(values))
    scale = ((most.to(wide) - least.to(wide)) / levels).to(_wide(values))
    if not bool(torch.isfinite(scale) & torch.isfinite(offset)):
        return None
    step = torch.where(scale > 0, scale, torch.ones_like(scale)).to(wide)
    codes = ((values.to(wide) - offset.to(wide)) / step).round().clamp(0, levels)
    return Codes(codes.to(torch.int32), scale, offset)


def largest(magnitudes: Tensor, count: int) -> Tensor:
    """[n] bool, where the `count` largest of n magnitudes are; of equal ones the first, NaN before all.

    >>> largest(torch.tensor([1., 3., 2., 3., 2.]), 3).tolist()
    [False, True, True, True, False]
    """
    sizes = magnitudes.nan_to_num(nan=torch.inf, posinf=torch.inf)
    threshold = torch.topk(sizes, count, sorted=True).values[-1]
    above, equal = sizes > threshold, sizes == threshold
    return above | (equal & (equal.cumsum(0) <= count - above.sum()))


class Quantize(WireFilter):
    """Uniform quantisation: every tensor as codes of 8 or 16 bits on a grid between its least and its largest value.

    s = (max − min) / (2^bits − 1),  code = round((x − min) / s),  x̂ = min + s · code.

    Rounding is deterministic, so that an entry is off by s/2 at most; QSGD's is random and without bias. With error
    feedback, on the way up, a client adds to a trained weight what its last message left out of it, x ← x + e, and
    keeps e ← x − x̂, so that messages add up to what was meant; so it does to what the server adds up (SCAFFOLD's
    control variates). Running statistics and other artifacts have none: they are no sums over rounds.

    With `updates`, on the way up, a client's codes are of x − r, what a trained weight has changed by since it was
    received, whose range is a fraction of the weight's own (FedPAQ): x̂ = r + (min + s · code). What r is, the server
    knows; of what the client did not receive, of artifacts and of running statistics, among them variances that must
    not fall below 0, the values themselves are quantised.

    A code counts as one value of 1 or 2 bytes; scale and offset are 8 bytes a tensor (16 for float64), and no values. A
    tensor that this makes no smaller crosses as it is, among them scalars and empty ones, and so does one that holds
    NaN or infinity. Constant tensors arrive exactly (with `updates`, constant changes do, but for rounding). Of
    structured artifacts the lossy fields are quantised; counts, masks and integer entries never are.

    Args:
        bits: of a code, 8 or 16.
        error_feedback: add what the message before left out; needs the way up.
        ways: ``up``, ``down`` or ``both``. Down, every client hears the server's one message quantised; the server
            keeps the exact one, and takes their updates from what they have heard.
        updates: quantise what a client's weights changed by; needs the way up. None is false.

    Reference: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding", NeurIPS 2017; error feedback: Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its
    Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014; updates: Reisizadeh, Mokhtari,
    Hassani, Jadbabaie, Pedarsani, "FedPAQ: A Communication-Efficient Federated Learning Method with Periodic Averaging
    and Quantization", AISTATS 2020.
    """

    paper = "Alistarh et al., NeurIPS 2017; Seide et al., Interspeech 2014; Reisizadeh et al., AISTATS 2020"

    def __init__(
        self,
        bits: Literal[8, 16] = 8,
        error_feedback: bool = False,
        ways: Ways = "both",
        updates: bool | None = None,
    ) -> None:
        require(bits in (8, 16), f"{KEY}.bits", "must be 8 or 16", bits)
        require_choices(KEY, ways=(ways, Ways))
        up = ways != "down" or not error_feedback
        require(up, f"{KEY}.error_feedback", "must be false where ways is down: only clients remember", error_feedback)
        require(ways != "down" or not updates, f"{KEY}.updates", "must be false where ways is down", updates)
        self.bits = bits
        self.error_feedback = error_feedback
        self.ways = ways
        self.updates = bool(updates)
        self.needs_server = "updates: true" if updates else False

    @override
    def apply(self, packet: Packet, memory: dict[str, Tensor]) -> Packet:
        return Packet(
            {name: self._fed_back(name, own, memory) for name, own in packet.weights.items()},
            {
                key: self._fed_back(" ".join(("artifact", *key)).strip(), own, memory)
                for key, own in packet.artifacts.items()
            },
        )

    def _fed_back(self, name: str, packed: Packed, memory: dict[str, Tensor]) -> Packed:
        if not (self.error_feedback and packed.adds_up):
            return self._narrowed(packed, packed.values)
        wanted = owed(name, packed, memory)
        sent = self._narrowed(packed, wanted)
        settle(name, packed, wanted - sent.values, memory)
        return sent

    def _narrowed(self, packed: Packed, wanted: Tensor) -> Packed:
        """The values in codes where that is smaller, else as they are."""
        whole, extra = packed.carrying(wanted), 2 * _wide(wanted).itemsize
        if wanted.numel() * self.bits // 8 + extra < -(-wanted.numel() * packed.bits // 8) + packed.extra:
            changes = self.updates and packed.adds_up and packed.known is not None
            known = packed.known_there.to(_wide(wanted)) if changes else 0
            codes = quantised(wanted - known, self.bits)
            return whole if codes is None else packed.carrying(codes.decoded() + known, self.bits, extra)
        return packed if packed.num_bytes < whole.num_bytes else whole


class TopK(WireFilter):
    """Sparse updates: of all weights together, a client sends those that changed the most in its round.

    Of the n floating-point entries that the client received, running statistics among them, the k = max(1, round(share
    · n)) of the largest |x − r| are sent, x being what the client would send and r what it received; elsewhere the
    server, which knows r, goes on with r. A client sends the value x and not the difference, so what is sent arrives
    exactly. Of equal ones the first are sent, NaN before all. At share 1 nothing changes.

    With error feedback x ← x + e, and e keeps what was not sent: e ← x − x̂. It grows until it is the largest. Running
    statistics have none, nor have weights that the client's fit does not begin from as they came (all of FedAMP's, the
    ones that FedALA mixes): what they lack of a client's own is the same in every round, and would be added up.

    Costs k values, and for every tensor their places: 4 bytes each, or one bit for each of its entries, whichever is
    less. Entries that the client did not receive, integers and artifacts cross as they are. Before `Quantize` the k
    values are quantised; after it, with error feedback, they would take their full size again.

    Args:
        share: of the entries that are sent, in (0, 1]; 1 is all.
        error_feedback: add what the messages before left out.

    Reference: Aji, Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; Stich, Cordonnier,
    Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, Algorithm 1.
    """

    paper = "Aji & Heafield, EMNLP 2017; Stich et al., NeurIPS 2018"
    ways = "up"
    needs_server = True

    def __init__(self, share: float = 0.1, error_feedback: bool = True) -> None:
        require(0 < share <= 1, f"{KEY}.share", "must be in (0, 1] (1 sends all)", share)
        self.share = share
        self.error_feedback = error_feedback

    @override
    def apply(self, packet: Packet, memory: dict[str, Tensor]) -> Packet:
        told = {name: own for name, own in packet.weights.items() if own.known is not None and own.num_params}
        if self.share == 1 or not told:
            return packet
        feeds_back = {name: self.error_feedback and own.adds_up for name, own in told.items()}
        wanted = {name: owed(name, own, memory) if feeds_back[name] else own.values for name, own in told.items()}
        changes = {name: (wanted[name] - own.known_there.to(wanted[name].dtype)).abs() for name, own in told.items()}
        everything = torch.cat(list(changes.values()))
        kept = largest(everything, max(1, round(self.share * len(everything))))
        by_tensor = kept.split([own.num_params for own in told.values()])
        sent = {}
        for (name, own), chosen in zip(told.items(), by_tensor, strict=True):
            whole = own.carrying(wanted[name]) if feeds_back[name] else own
            sent[name] = whole.only(chosen)
            if feeds_back[name]:
                settle(name, own, wanted[name] - torch.where(chosen, whole.values, own.known_there), memory)
        return replace(packet, weights={**packet.weights, **sent})


# --- error feedback ---------------------------------------------------------------------------------------------------


def owed(name: str, packed: Packed, memory: dict[str, Tensor]) -> Tensor:
    """[k] what a client would send of a weight: its values and what earlier messages left out of them.

    Args:
        name: the weight's.
        packed: the weight.
        memory: the filter's, of the client.

    Returns:
        Float32 at least, because what is left out of a narrow type has no place in it.
    """
    values = packed.values.to(_wide(packed.values))
    residual = memory.get(name)
    if residual is None:
        return values
    there = residual.to(values.device)
    return values + (there if packed.places is None else there[packed.places])


def settle(name: str, packed: Packed, left_out: Tensor, memory: dict[str, Tensor]) -> None:
    """Remember what a message leaves out of a weight; of what is not finite there is no such thing.

    Args:
        name: the weight's.
        packed: the weight, as it came in; where it has no values, what is remembered stays.
        left_out: [k] what is meant without what is sent.
        memory: the filter's, of the client.
    """
    rest = left_out.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if packed.places is not None:
        before = memory.get(name, rest.new_zeros(packed.size)).to(rest.device)
        rest = before.index_copy(0, packed.places, rest)
    memory[name] = rest


def _wide(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
