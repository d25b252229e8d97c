"""Six rounds of every method on Digits, as numbers that a change of the code must leave as they are."""

import hashlib
import json
import math
import os
import platform
from pathlib import Path

import torch

from fl_lightning import catalog
from fl_lightning.core.message import Message
from fl_lightning.data.digits import Digits
from fl_lightning.data.module import FederatedData
from fl_lightning.data.partitions import Dirichlet
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.settings import Federation
from fl_lightning.losses.class_relation import Relation, SoftLabels
from fl_lightning.losses.distillation import Distillation
from fl_lightning.losses.gaussian_mixture import Mixture
from fl_lightning.losses.prototype import Prototypes
from fl_lightning.methods.drdfl import Latents, Updates
from fl_lightning.methods.fedcpd import Reading
from fl_lightning.trust import import_name

FOLDER = Path(__file__).parent / "recorded"
ROUNDS = 6
SHORT = (
    "FML",
    "FedFomo",
    "FedKD",
    "FedGen",
    "FedAS",
    "APPLE",
    "FedCP",
    "GPFL",
    "FedETF",
    "FedAMP",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedDBE",
    "FedLC",
    "FedNTD",
    "FedPHP",
    "FedYogi",
)
FEWER = dict.fromkeys(("APFL", "FedDyn", "FedPAC", "FedRoD", "LGFedAvg", "pFedMe"), 3)
FEWER |= dict.fromkeys(SHORT, 2)
"""Cases of which fewer rounds tell as much as six."""
# Cases that take long: of the six rounds that are recorded so many are made again.
BEGUN = {"DRDFL": 2, "DRDFL: joint": 3, "DRDFL: full": 2, "FedCVAE": 2, "FedFed": 3, "FedFed: 2 rounds": 3}
CLIENTS = 4
# Beside a method's defaults: what takes another way through the code. A name of the form `Method: what`.
OPTIONS = {
    "FedProc": {"anneal_rounds": 100},
    "DisPFL": {"anneal_rounds": 500},
    "DisPFL: random": {"anneal_rounds": 5, "regrow": "random", "density": 0.3},
    "DRDFL: joint": {
        "updates": Updates(update_order="joint"),
        "mixture": Mixture(ema_when="step", posterior_classes="present"),
    },
    "DRDFL: full": {
        "updates": Updates(grad_flow="full"),
        "mixture": Mixture(class_prior="local"),
        "latents": Latents(adversary_classes="present"),
    },
    "FedALA: two layers": {"layers": 2, "share": 0.5},
    "FedCPD: batch": {"reading": Reading(alternation="batch"), "distillation": Distillation(mid_channels=16)},
    "FedCPD: inline": {"distillation": Distillation(attention="inline", parameters="shared", mid_channels=8)},
    "FedCPD: raw": {
        "distillation": Distillation(feature_target="raw", mid_channels=8),
        "reading": Reading(align_reduction="sum"),
        "prototypes": Prototypes(weighting="uniform"),
    },
    "FedDW: public code": {
        "soft_labels": SoftLabels("identity", momentum=0.5, history="all", missing="one_hot", source="running"),
        "decay_rounds": [3],
        "relation": Relation(bias="keep"),
    },
    "FedDistill: running": {"averages": "running", "stale": "drop"},
    "FedNova: mu, momentum": {"mu": 0.1, "server_momentum": 0.5},
    "FedPA: running": {"collection": "running", "generated_batch": 8},
    "FedPer: two layers": {"head_layers": 2},
    "FedProto: running": {
        "prototypes": Prototypes(collection="running", weighting="uniform"),
        "distance": "batch_proto_l2",
    },
    "FedProto: local": {"download": "local", "candidates": "local", "inference": "classifier"},
    "FeSEM: random": {"start": "random", "mu": 0.1, "weighting": "samples"},
    "MOON: projection": {"projection": 8, "previous_models": 2},
    "PerFedAvg: HF": {"approximation": "HF", "beta": 0.05},
    "FedBABU: head": {"finetune": "head", "finetune_lr": 0.01},
    "FedFed: 2 rounds": {"feature_rounds": 2, "feature_epochs": 2},
}
LOOP = {
    "DRDFL: joint": {"exchange": "Ring"},
    "FedPer: two layers": {"exchange": "RandomPeers"},
    "FedALA: two layers": {"participation": 0.5},
    "FedProto: local": {"participation": 0.5},
    "FedNova: mu, momentum": {"lr_decay": 0.9},
    "FedAvg: terms": {"lr_decay": 0.9, "local_epochs": 2},
    "FedRep: Ring in turn": {"exchange": "Ring", "participation": 0.75},
    "FeSEM: random": {"participation": 0.75},
    "FedCRL: half": {"participation": 0.5},
    "FedBN: plain": {"share_buffers": False},
}
TERMS = {
    "FedAvg: terms": ["ClassRelation", "PrototypeAlignment", "FeatureDistillation", "ModelContrast", "Uniformity"],
    "FedProto: running": ["PredictionVariance"],
}
SGD = {"FedNova: mu, momentum", "DFedPGP", "PerFedAvg: HF", "FedAvg: terms"}
CONV = {"FedCPD: raw", "FedCPD: inline", "FedBN", "FedBN: plain", "PerFedAvg", "FedAvg: conv", "FedALA: two layers"}
# Dropout's masks, or Bernoulli draws of their own: another version of torch may draw them otherwise.
DRAWN = {*CONV, "FedCP"}
# What is sorted by size turns over with a last bit: on another processor only the first round is compared.
DISCRETE = {"DisPFL", "DisPFL: random"}
METHODS = {entry.name: entry.class_path for entry in catalog.entries("methods")}
MORE = ("FedAvg: terms", "FedAvg: conv", "FedRep: Ring in turn", "FedCRL: half", "FedBN: plain")
CASES = sorted({*METHODS, *OPTIONS, *MORE})


class Watch(FederationCallback):
    """Takes down every round: its row, and what was sent."""

    def __init__(self):
        self.rounds, self._hash, self._squares = [], hashlib.sha256(), 0.0
        self._sent = {}

    def on_client_fit_end(self, loop, report):
        self._sent[report.client] = report.message

    def on_round_end(self, loop, row):
        digest, squares = hashlib.sha256(), 0.0
        for client in sorted(self._sent):
            for name, tensor in tensors_of(self._sent[client]):
                digest.update(f"{client} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
                squares += float(tensor.double().square().sum())
        self._sent = {}
        numbers = {
            k: v
            for k, v in row.items()
            if k != "round" and not k.startswith("seconds") and not k.endswith(("_worst10", "_min"))
        }
        self.rounds.append({**numbers, "sent": digest.hexdigest()[:16], "norm": math.sqrt(squares)})


def tensors_of(message: Message):
    """Names and tensors of all that a message holds, in the order of names."""
    found = {f"weights/{name}": tensor for name, tensor in message.weights.items()}
    for name, artifact in message.artifacts.items():
        fields = {"": artifact} if isinstance(artifact, torch.Tensor) else vars(artifact)
        found |= {f"artifacts/{name}/{key}": value for key, value in fields.items() if isinstance(value, torch.Tensor)}
    return [(name, found[name].detach().cpu().reshape(-1)) for name in sorted(found)]


def make_method(case):
    """A factory of one case's clients."""
    name = case.partition(":")[0]
    kinds = {entry.name: entry.class_path for entry in catalog.entries("terms")}

    def make(_=0):
        model_class = import_name("fl_lightning.models.mlp.MLP")
        model = model_class((1, 8, 8), 10, [24, 12])
        if case in CONV:
            from tiny_models import TinyConvNet

            model = TinyConvNet((1, 8, 8), 10)
        terms = [import_name(kinds[term])() for term in TERMS.get(case, ())]
        return import_name(METHODS[name])(model, **OPTIONS.get(case, {}), extra_terms=terms or None)

    return make


def make_loop(case, precision, watch):
    """The federation of one case, set up."""
    data = FederatedData(Digits(), Dirichlet(0.5, min_samples=20), CLIENTS, batch_size=64)
    data.setup(0)
    options = dict(LOOP.get(case, {}))
    if "exchange" in options:
        kinds = {entry.name: entry.class_path for entry in catalog.entries("exchanges")}
        in_turn = {"schedule": "sequential"} if "in turn" in case else {}
        options["exchange"] = import_name(kinds[options["exchange"]])(**in_turn)
    loop = FederatedLoop(Federation(rounds=FEWER.get(case, ROUNDS), callbacks=[watch], **options))
    step = (
        (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        if case in SGD
        else (lambda parameters: torch.optim.Adam(parameters, lr=0.003))
    )
    loop.setup(make_method(case), data, step, 0, trainer={"accelerator": "cpu", "precision": precision})
    return loop


def replay(case, precision, begun=None):
    """The trajectory of one case: a list of rounds, and the last receive's figures; None of a run that is only begun.

    Args:
        case: which.
        precision: the trainer's.
        begun: rounds after which to stop; None makes the whole run.
    """
    watch = Watch()
    loop = make_loop(case, precision, watch)
    if begun is None:
        return {"final_received": loop.run(), "rounds": watch.rounds}
    for _ in range(begun):
        loop.advance()
    return {"final_received": None, "rounds": watch.rounds}


def machine():
    """What decides the bits: torch, the processor, and the kernels that torch takes there."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile")
    return {
        "torch": torch.__version__,
        "processor": [platform.machine(), *(about.get(key, "") for key in ("vendor_id", "cpu family", "model"))],
        "kernels": [flag for flag in wanted if flag in about.get("flags", "").split()],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "limits": [os.environ.get(name, "") for name in ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")],
    }


def path_of(case):
    """Where a case is recorded."""
    return FOLDER / (case.lower().replace(": ", "-").replace(", ", "-").replace(" ", "-") + ".json")


def write(case, content):
    """Record a case: one line a round."""

    def lines(trajectory):
        rounds = ",\n   ".join(map(json.dumps, trajectory["rounds"]))
        return f'{{"rounds": [\n   {rounds}],\n  "final_received": {json.dumps(trajectory["final_received"])}}}'

    FOLDER.mkdir(exist_ok=True)
    parts = [f' "machine": {json.dumps(content["machine"])}']
    parts += [f' "{precision}": {lines(content[precision])}' for precision in ("32-true", "64-true")]
    path_of(case).write_text("{\n" + ",\n".join(parts) + "\n}\n")
