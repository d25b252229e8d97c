"""Every data set by name, the base class for a data set of your own, and how they are loaded."""

from fl_lightning.data.cache import default_cache_dir, load
from fl_lightning.data.dataset import Dataset, default_data_dir
from fl_lightning.data.text import IMDB
from fl_lightning.data.vision import CIFAR10, CIFAR100, EMNIST, MNIST, SVHN, Digits, FashionMNIST, ImageFolder

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "IMDB",
    "MNIST",
    "SVHN",
    "Dataset",
    "Digits",
    "FashionMNIST",
    "ImageFolder",
    "default_cache_dir",
    "default_data_dir",
    "load",
]
