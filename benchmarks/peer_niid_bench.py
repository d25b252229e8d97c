r"""Flower's baseline niid_bench as it comes, without its simulation: accuracy of the server's model, round by round.

Started with the interpreter for which Flower is installed; nothing of this package is imported. The baseline's own
functions split the data, train every client in turn and aggregate, all clients taking part; only the simulation (Ray)
and decoding each image anew are left out. Its option dataset_seed, which nothing there reads, is not ours either:
SEED is of initial weights and batches.

    python benchmarks/peer_niid_bench.py --baseline flower/baselines/niid_bench --data DIR --output FILE.csv \
      [--method fedavg|fedprox|fednova|scaffold] [--mu 0.01] [--dataset fmnist|mnist|cifar10]
      [--partition label_quantity|dirichlet] [--seed 0] [--rounds 50]

A run that was cut goes on after its last whole round, with the same draws, from FILE.csv.state; one of other options,
or of scaffold, whose clients keep files of their own, begins anew.

  --data DIR   the folder in which torchvision's data set lies; for cifar10 one with folders of images, train and
               test, a folder a class. Its crops of a reflected border and flips are drawn as the baseline draws them.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from torchvision.datasets import MNIST, FashionMNIST, ImageFolder
from torchvision.transforms import Compose, RandomCrop, RandomHorizontalFlip
from torchvision.transforms.functional import pad, pil_to_tensor

Arrays = list[Any]  # float32 arrays, one a tensor of the model
GREYS = {"fmnist": FashionMNIST, "mnist": MNIST}
CLIENTS, BATCH, EPOCHS = 10, 64, 10
OPTIMIZER = {"learning_rate": 0.01, "momentum": 0.9, "weight_decay": 1e-5}
CPU = torch.device("cpu")


class Decoded(Dataset[tuple[torch.Tensor, int]]):
    """Images as `ToTensor` makes them, all at once."""

    def __init__(self, dataset: MNIST) -> None:
        self.images = dataset.data.unsqueeze(1).float().div(255)
        self.targets = dataset.targets

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.targets[index])


class DecodedColours(Dataset[tuple[torch.Tensor, int]]):
    """Images of folders, decoded and padded once; cropped and flipped one by one where they are to train on."""

    def __init__(self, folder: Path, train: bool) -> None:
        files = ImageFolder(str(folder))
        images = torch.stack([pil_to_tensor(image) for image, _ in files]).float().div(255)
        self.images = pad(images, [4], padding_mode="reflect") if train else images
        self.targets = files.targets
        self.augment = Compose([RandomCrop(32), RandomHorizontalFlip()] if train else [])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.augment(self.images[index]), self.targets[index]


class Baseline:
    """The baseline's clients and its server's steps.

    Args:
        options: the command line's.
        controls: folder for clients' control variates.
    """

    def __init__(self, options: argparse.Namespace, controls: str) -> None:
        from niid_bench import dataset, dataset_preparation, models
        from omegaconf import OmegaConf

        parts: tuple[Dataset[Any], ...]
        if options.dataset in GREYS:
            parts = tuple(Decoded(GREYS[options.dataset](options.data, train=train)) for train in (True, False))
        else:
            parts = tuple(DecodedColours(Path(options.data) / part, part == "train") for part in ("train", "test"))
        dataset_preparation._download_data = lambda name: parts
        said = {"name": options.dataset, "partitioning": options.partition, "alpha": 0.5, "labels_per_client": 2}
        config = OmegaConf.create({**said, "batch_size": BATCH, "val_split": 0.0})
        self.train, self.val, self.test = dataset.load_datasets(config, CLIENTS, val_ratio=0.0)
        self.options, self.models, self.controls = options, models, controls
        torch.manual_seed(options.seed)
        self.weights: Arrays = [tensor.numpy().copy() for tensor in self.network().state_dict().values()]
        self.control: Arrays = copy.deepcopy(self.weights)  # as its server begins; its clients begin there, too

    def network(self) -> Any:
        if self.options.dataset in GREYS:
            return self.models.CNNMnist(256, [120, 84], 10)
        return self.models.CNN(400, [120, 84], 10)

    def accuracy(self) -> float:
        """Of the server's model on the official test part."""
        model = self.network()
        names = model.state_dict().keys()
        model.load_state_dict({name: torch.tensor(array) for name, array in zip(names, self.weights, strict=True)})
        return float(self.models.test(model, self.test, CPU)[1])

    def client(self, index: int) -> Any:
        from niid_bench import client_fedavg, client_fednova, client_fedprox, client_scaffold

        own = {"net": self.network(), "trainloader": self.train[index], "valloader": self.val[index]}
        own |= {"device": CPU, "num_epochs": EPOCHS, **OPTIMIZER}
        if self.options.method == "scaffold":
            return client_scaffold.FlowerClientScaffold(cid=index, save_dir=self.controls, **own)
        if self.options.method == "fedprox":
            return client_fedprox.FlowerClientFedProx(proximal_mu=self.options.mu, **own)
        kinds = {"fedavg": client_fedavg.FlowerClientFedAvg, "fednova": client_fednova.FlowerClientFedNova}
        return kinds[self.options.method](**own)

    def round(self, number: int) -> None:
        """Every client's fit, and the server's step."""
        from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
        from flwr.server.strategy import FedAvg
        from niid_bench.strategy import FedNovaStrategy, ScaffoldStrategy

        method = self.options.method
        results: list[Any] = []
        for index in range(CLIENTS):
            sent = [*self.weights, *(self.control if method == "scaffold" else [])]
            arrays, samples, said = self.client(index).fit(copy.deepcopy(sent), {})
            message = ndarrays_to_parameters(arrays)
            results.append((None, FitRes(Status(Code.OK, ""), message, samples, said)))
        if method == "fednova":
            mean, _ = FedNovaStrategy().aggregate_fit_custom(number, self.weights, results, [])
        else:
            mean, _ = (ScaffoldStrategy if method == "scaffold" else FedAvg)().aggregate_fit(number, results, [])
        new = [array.copy() for array in parameters_to_ndarrays(mean)]
        if method == "scaffold":  # the means of both changes, which its server adds
            moved, changed = new[: len(new) // 2], new[len(new) // 2 :]
            self.control = [old + change for old, change in zip(self.control, changed, strict=True)]
            new = [old + move for old, move in zip(self.weights, moved, strict=True)]
        self.weights = new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--method", default="fedavg", choices=("fedavg", "fedprox", "fednova", "scaffold"))
    parser.add_argument("--dataset", default="fmnist", choices=(*GREYS, "cifar10"))
    parser.add_argument("--partition", default="label_quantity", choices=("label_quantity", "dirichlet"))
    parser.add_argument("--mu", type=float, default=0.01, help="of FedProx")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(options.baseline).resolve()))
    torch.set_num_threads(1)
    output, state = Path(options.output), Path(f"{options.output}.state")
    asked = {name: getattr(options, name) for name in ("method", "mu", "dataset", "partition", "seed")}
    with tempfile.TemporaryDirectory() as controls:
        baseline = Baseline(options, controls)
        rows, start = ["round,Server-T"], 0
        saved = torch.load(state, weights_only=False) if state.exists() else {}  # written below, by this script
        if saved.get("asked") == asked and options.method != "scaffold":
            rows, start = saved["rows"], len(saved["rows"]) - 1
            baseline.weights = saved["weights"]
            torch.set_rng_state(saved["draws"])
        for number in range(start, options.rounds + 1):
            if number:
                baseline.round(number)
            rows.append(f"{number},{baseline.accuracy():.6f}")
            now = {"asked": asked, "rows": rows, "weights": baseline.weights, "draws": torch.get_rng_state()}
            torch.save(now, f"{state}.part")
            os.replace(f"{state}.part", state)
            output.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
