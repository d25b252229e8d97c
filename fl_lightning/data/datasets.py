"""Every data set by name, the base class for a data set of your own, and how they are loaded."""

from fl_lightning.data.cache import default_cache_dir, load
from fl_lightning.data.colour import CIFAR10, CIFAR100, SVHN
from fl_lightning.data.dataset import Dataset, default_data_dir
from fl_lightning.data.digits import Digits
from fl_lightning.data.idx import EMNIST, MNIST, FashionMNIST
from fl_lightning.data.image_folder import ImageFolder
from fl_lightning.data.own_files import LEAF, ArrayFile, CSVTable, PFLlibFolder
from fl_lightning.data.own_objects import HuggingFace, TorchDataset
from fl_lightning.data.sample import Sample
from fl_lightning.data.text import IMDB
from fl_lightning.data.tokens import TextFile

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "IMDB",
    "LEAF",
    "MNIST",
    "SVHN",
    "ArrayFile",
    "CSVTable",
    "Dataset",
    "Digits",
    "FashionMNIST",
    "HuggingFace",
    "ImageFolder",
    "PFLlibFolder",
    "Sample",
    "TextFile",
    "TorchDataset",
    "default_cache_dir",
    "default_data_dir",
    "load",
]
