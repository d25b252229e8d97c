import hashlib
import os
import pickle
import shutil
import struct
import tarfile
import zlib
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning.data.cache import load
from fl_lightning.data.datasets import CIFAR10, CIFAR100, EMNIST, MNIST, SVHN, Digits, FashionMNIST, ImageFolder
from fl_lightning.errors import ConfigError

TRAIN_X = np.arange(3 * 2 * 2).reshape(3, 2, 2)
TEST_X = 100 + np.arange(2 * 2 * 2).reshape(2, 2, 2)


def file_names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []


# --- Digits


def test_digits_have_their_constants_and_every_fifth_sample_of_a_class_as_test():
    arrays = Digits().arrays()
    arrays.validate("Digits")
    assert (len(arrays.y), arrays.num_train) == (1797, 1442)
    assert (arrays.x.dtype, arrays.spec.input_shape) == (torch.uint8, (1, 8, 8))
    assert (int(arrays.x.min()), int(arrays.x.max())) == (0, 255)
    counts = torch.bincount(arrays.y)
    assert torch.equal(torch.bincount(arrays.y[1442:]), counts // 5)
    train = arrays.x[:1442].double() / 255
    assert arrays.mean[0] == pytest.approx(train.mean().item(), abs=5e-5)
    assert arrays.std[0] == pytest.approx(train.std(correction=0).item(), abs=5e-5)


# --- idx files


@pytest.fixture
def mnist(tmp_path, write_idx):
    """A tiny MNIST: 3 training and 2 test images of 2x2."""

    def write(name="MNIST", prefixes=("train", "t10k"), suffix="", train_y=(3, 1, 9), test_y=(0, 5)):
        raw = tmp_path / name / "raw"
        for prefix, x, y in zip(prefixes, (TRAIN_X, TEST_X), (train_y, test_y), strict=True):
            write_idx(raw / f"{prefix}-images-idx3-ubyte{suffix}", x)
            write_idx(raw / f"{prefix}-labels-idx1-ubyte{suffix}", y)
        return raw

    return write


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("kind", [MNIST, FashionMNIST])
def test_idx_files_are_read_training_part_first(mnist, tmp_path, kind, suffix):
    mnist(kind.__name__, suffix=suffix)
    arrays = load(kind(str(tmp_path), download=False), tmp_path / "cache")
    assert torch.equal(arrays.x[:, 0], torch.from_numpy(np.concatenate([TRAIN_X, TEST_X])).byte())
    assert arrays.y.tolist() == [3, 1, 9, 0, 5]
    assert arrays.num_train == 3
    assert len(arrays.classes) == 10
    assert (arrays.mean, arrays.std) == kind.standard


def test_half_normalisation_is_a_half(mnist, tmp_path):
    mnist()
    arrays = MNIST(str(tmp_path), normalize="half").arrays()
    assert (arrays.mean, arrays.std) == ((0.5,), (0.5,))
    plain = MNIST(str(tmp_path), normalize="none").arrays()
    assert (plain.mean, plain.std) == ((), ())
    with pytest.raises(ConfigError, match=r"data.dataset.normalize: must be standard, half or none, got 'full'"):
        MNIST(normalize="full")


def test_emnist_is_upright_and_its_letters_start_at_zero(mnist, tmp_path):
    mnist("EMNIST", ("emnist-letters-train", "emnist-letters-test"), train_y=(1, 26, 2), test_y=(1, 3))
    arrays = EMNIST("letters", str(tmp_path)).arrays()
    assert arrays.y.tolist() == [0, 25, 1, 0, 2]
    assert arrays.x[0, 0].tolist() == [[0, 2], [1, 3]]
    assert len(arrays.classes) == 26


@pytest.mark.parametrize(("split", "classes"), [("byclass", 62), ("balanced", 47), ("digits", 10), ("mnist", 10)])
def test_emnist_splits_have_their_classes(mnist, tmp_path, split, classes):
    mnist("EMNIST", (f"emnist-{split}-train", f"emnist-{split}-test"))
    arrays = EMNIST(split, str(tmp_path)).arrays()
    assert len(arrays.classes) == classes
    assert arrays.y.tolist() == [3, 1, 9, 0, 5]
    with pytest.raises(ConfigError, match=r"data.dataset.split: must be one of byclass"):
        EMNIST("bymerge")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"cut": 1}, r"train-images-idx3-ubyte is cut short: 27 bytes where its header says 28; delete it"),
        ({"cut": 20}, r"train-images-idx3-ubyte is cut short"),
        ({"cut": 26}, r"magic number must be 2051, got None"),
        ({"magic": 2049}, r"train-images-idx3-ubyte is not the idx file .* must be 2051, got 2049"),
    ],
)
def test_broken_idx_file_is_named(mnist, write_idx, tmp_path, damage, message):
    write_idx(mnist() / "train-images-idx3-ubyte", TRAIN_X, **damage)
    with pytest.raises(ConfigError, match=message):
        MNIST(str(tmp_path)).arrays()


def test_idx_file_with_bytes_too_many_is_named(mnist, tmp_path):
    with (mnist() / "t10k-labels-idx1-ubyte").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ConfigError, match=r"t10k-labels-idx1-ubyte is too long"):
        MNIST(str(tmp_path)).arrays()


def test_broken_gz_file_is_named(mnist, tmp_path):
    (mnist(suffix=".gz") / "t10k-images-idx3-ubyte.gz").write_bytes(b"<html>not found</html>")
    with pytest.raises(ConfigError, match=r"t10k-images-idx3-ubyte.gz cannot be read"):
        MNIST(str(tmp_path)).arrays()


def test_images_without_labels_are_refused(mnist, tmp_path):
    mnist(test_y=(0,))
    with pytest.raises(ConfigError, match=r"MNIST: .*t10k-images.* has 2 images but its labels file has 1 labels"):
        MNIST(str(tmp_path)).arrays()


def test_label_out_of_range_is_refused(mnist, tmp_path):
    mnist(train_y=(3, 12, 9))
    with pytest.raises(ConfigError, match=r"MNIST: label 12 of sample 1 is out of range; allowed are 0 to 9"):
        load(MNIST(str(tmp_path)), tmp_path / "cache")


def test_missing_files_without_download_say_where_they_belong(tmp_path):
    with pytest.raises(
        ConfigError, match=r"MNIST: .*MNIST/raw/train-images-idx3-ubyte is not there, and `download` is false"
    ):
        MNIST(str(tmp_path / "nowhere"), download=False).arrays()
    with pytest.raises(
        ConfigError, match=r"CIFAR10: .*default-data/cifar-10-batches-py.* set `root` or FL_LIGHTNING_DATA"
    ):
        CIFAR10(download=False).arrays()


@pytest.mark.parametrize("existing", [True, False])
def test_failed_download_leaves_nothing_behind(tmp_path, monkeypatch, existing):
    import torchvision

    def cut_off(self):
        folder = self.raw_folder
        torchvision.datasets.utils.os.makedirs(folder)
        with open(f"{folder}/train-images-idx3-ubyte", "wb") as file:
            file.write(b"half")
        raise URLError("no network")

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", cut_off)
    root = tmp_path / "new" / "root"
    if existing:
        root.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"the download failed \(URLError: .*no network.*put it there"):
        MNIST(str(root)).arrays()
    assert root.exists() == existing
    assert file_names(tmp_path / "new") == (["root"] if existing else [])


def test_download_arrives_whole_and_is_used(mnist, tmp_path, monkeypatch):
    import torchvision

    source = tmp_path / "source"
    shutil.move(mnist(), source)
    monkeypatch.setattr(torchvision.datasets.MNIST, "download", lambda self: shutil.copytree(source, self.raw_folder))
    root = tmp_path / "root"
    arrays = load(MNIST(str(root)), tmp_path / "cache")
    assert arrays.y.tolist() == [3, 1, 9, 0, 5]
    assert [name for name in file_names(root) if "ubyte" not in name] == ["MNIST", "MNIST/raw"]
    monkeypatch.setattr(MNIST, "arrays", None)
    assert len(load(MNIST(str(root), download=False), tmp_path / "cache").y) == 5


# --- CIFAR and SVHN, with torchvision's readers


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """A tiny CIFAR-10 or CIFAR-100: two training images, one test image."""
    import torchvision

    def write(kind):
        source = getattr(torchvision.datasets, kind.__name__)
        folder = tmp_path / source.base_folder
        folder.mkdir()
        names, labels = ("label_names", "labels") if kind is CIFAR10 else ("fine_label_names", "fine_labels")
        contents = {
            "one": {"data": np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072), labels: [1, 0]},
            "two": {"data": np.full((1, 3072), 7, dtype=np.uint8), labels: [1]},
            "names": {names: ["cat", "dog"]},
        }
        for file, content in contents.items():
            (folder / file).write_bytes(pickle.dumps(content))
        meta = {"filename": "names", "key": names, "md5": md5(folder / "names")}
        monkeypatch.setattr(source, "train_list", [["one", md5(folder / "one")]])
        monkeypatch.setattr(source, "test_list", [["two", md5(folder / "two")]])
        monkeypatch.setattr(source, "meta", meta)
        return folder

    return write


@pytest.mark.parametrize("kind", [CIFAR10, CIFAR100])
def test_cifar_is_read_channels_first(cifar, tmp_path, kind):
    cifar(kind)
    arrays = load(kind(str(tmp_path), download=False), tmp_path / "cache")
    assert arrays.x.shape == (3, 3, 32, 32)
    assert arrays.x[0, 0, 0, :3].tolist() == [0, 1, 2]
    assert arrays.x[0, 1, 0, 0] == 1024 % 256
    assert arrays.y.tolist() == [1, 0, 1]
    assert (arrays.num_train, arrays.classes) == (2, ("cat", "dog"))
    assert (arrays.mean, arrays.std) == kind.standard


def test_cifar_file_with_another_md5_is_named(cifar, tmp_path):
    with (cifar(CIFAR10) / "two").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ConfigError, match=r"CIFAR10: .*two is cut short or not the published file"):
        CIFAR10(str(tmp_path)).arrays()


def test_cifar_with_a_bad_pickle_is_named(cifar, tmp_path, monkeypatch):
    import torchvision

    folder = cifar(CIFAR10)
    (folder / "one").write_bytes(b"no pickle")
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "train_list", [["one", md5(folder / "one")]])
    with pytest.raises(ConfigError, match=r"CIFAR10: the files in .* cannot be read"):
        CIFAR10(str(tmp_path)).arrays()


def test_cifar_archive_beside_the_missing_files_is_unpacked(cifar, tmp_path):
    folder = cifar(CIFAR10)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.add(folder, folder.name)
    shutil.rmtree(folder)
    assert CIFAR10(str(tmp_path), download=False).arrays().y.tolist() == [1, 0, 1]
    assert file_names(tmp_path) == [
        "cifar-10-batches-py",
        *(f"cifar-10-batches-py/{name}" for name in ("names", "one", "two")),
        "cifar-10-python.tar.gz",
    ]


def test_cifar_archive_cut_short_is_named(cifar, tmp_path):
    shutil.rmtree(cifar(CIFAR10))
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"\x1f\x8b\x08half")
    with pytest.raises(ConfigError, match=r"CIFAR10: .*cifar-10-python.tar.gz cannot be unpacked"):
        CIFAR10(str(tmp_path), download=False).arrays()


def test_svhn_is_read_with_its_tens_as_zeros(tmp_path, monkeypatch):
    import torchvision
    from scipy.io import savemat

    split_list = dict(torchvision.datasets.SVHN.split_list)
    for part, labels in (("train", [10, 1]), ("test", [9, 2])):
        path = tmp_path / f"{part}_32x32.mat"
        x = np.zeros((32, 32, 3, len(labels)), dtype=np.uint8)
        x[0, 1, 2, 0] = 5
        savemat(path, {"X": x, "y": np.array(labels, dtype=np.uint8)[:, None]})
        split_list[part] = ["", path.name, md5(path)]
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", split_list)
    arrays = load(SVHN(str(tmp_path), download=False), tmp_path / "cache")
    assert arrays.y.tolist() == [0, 1, 9, 2]
    assert arrays.x.shape == (4, 3, 32, 32)
    assert arrays.x[0, 2, 0, 1] == 5
    assert arrays.num_train == 2
    fewer = SVHN(str(tmp_path), download=False, train_samples=1).arrays()
    assert (fewer.num_train, len(fewer.y)) == (1, 3)
    assert fewer.y[0] in (0, 1)
    assert fewer.y[1:].tolist() == [9, 2]
    assert torch.equal(fewer.x, SVHN(str(tmp_path), download=False, train_samples=1).arrays().x)
    with pytest.raises(ConfigError, match=r"^data.dataset.test_samples: must be from 1 to 26032, or null, got 0"):
        SVHN(test_samples=0)


# --- ImageFolder


@pytest.fixture
def images(tmp_path):
    """Write images: {name: (grey value, (width, height))}."""

    def write(files):
        for name, (value, size) in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", size, (value, value, 10)).save(path)
        return str(tmp_path)

    return write


SQUARE = (2, 2)


@pytest.mark.parametrize("test", ["test", "val"])
def test_image_folder_with_official_parts(images, test):
    root = images(
        {
            "train/dog/1.png": (30, SQUARE),
            "train/cat/2.png": (20, SQUARE),
            "train/cat/1.png": (10, SQUARE),
            f"{test}/dog/1.png": (50, SQUARE),
            f"{test}/cat/1.png": (40, SQUARE),
        }
    )
    arrays = ImageFolder(root).arrays()
    arrays.validate("ImageFolder")
    assert arrays.x[:, 0, 0, 0].tolist() == [10, 20, 30, 40, 50]
    assert arrays.y.tolist() == [0, 0, 1, 0, 1]
    assert (arrays.num_train, arrays.classes) == (3, ("cat", "dog"))
    assert arrays.mean == pytest.approx((20 / 255, 20 / 255, 10 / 255))
    assert arrays.std == pytest.approx(((200 / 3) ** 0.5 / 255,) * 2 + (1.0,))


def test_image_folder_without_parts_has_no_test_part(images, tmp_path):
    root = images({"cat/1.png": (10, SQUARE), "dog/1.png": (20, SQUARE)})
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    arrays = load(ImageFolder(root, normalize="half"), tmp_path / ".cache")
    assert (arrays.num_train, len(arrays.y)) == (2, 2)
    assert (arrays.mean, arrays.std) == ((0.5,) * 3, (0.5,) * 3)


def test_images_that_lie_deeper_than_their_class_are_refused(images, tmp_path):
    """They were left out, and with them a class that has folders alone, without a word."""
    root = images({"cat/1.png": (10, SQUARE), "dog/1.png": (20, SQUARE), "bird/site 0/a/1.png": (30, SQUARE)})
    with pytest.raises(ConfigError, match=r"^data\.dataset: ImageFolder: images belong at .*bird/site 0/a'?$"):
        ImageFolder(root).arrays()
    (tmp_path / "bird/site 0/a/1.png").rename(tmp_path / "bird/site 0/a/1.txt")
    assert ImageFolder(root).arrays().classes == ("cat", "dog")


@pytest.mark.parametrize(("size", "shape"), [(3, (3, 3)), ([2, 4], (2, 4)), (None, (1, 5))])
def test_image_folder_sizes_are_height_and_width(images, size, shape):
    root = images({"cat/1.png": (10, (5, 1))})
    assert ImageFolder(root, size).arrays().spec.input_shape == (3, *shape)


def test_image_folder_in_grey_has_one_channel(images):
    arrays = ImageFolder(images({"cat/1.jpg": (10, SQUARE)}), grayscale=True).arrays()
    assert arrays.spec.input_shape == (1, 2, 2)
    assert len(arrays.mean) == 1


def test_image_folder_names_the_first_image_of_another_size(images):
    root = images({"cat/1.png": (10, SQUARE), "cat/2.png": (10, (5, 1)), "cat/3.png": (10, (7, 1))})
    with pytest.raises(ConfigError, match=r"cat/2.png is 1x5 \(height x width\), .*cat/1.png is 2x2; give `size`"):
        ImageFolder(root).arrays()


@pytest.mark.parametrize("content", [b"", b"not an image"])
@pytest.mark.parametrize("name", ["1.png", "2.jpg"])
def test_image_folder_names_a_broken_image(images, tmp_path, name, content):
    root = images({"cat/1.png": (10, SQUARE), "cat/2.jpg": (10, SQUARE)})
    (tmp_path / "cat" / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"ImageFolder: .*cat/{name} is broken or not an image \([^<]*\)$"):
        ImageFolder(root).arrays()


@pytest.mark.parametrize("name", ["1.png", "1.jpg"])
def test_image_folder_names_an_image_cut_short(images, tmp_path, name):
    root = images({f"cat/{name}": (10, (64, 64))})
    path = tmp_path / "cat" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ConfigError, match=rf"cat/{name} is broken or not an image"):
        ImageFolder(root).arrays()


def test_image_folder_names_classes_that_only_one_part_has(images):
    root = images({"train/cat/1.png": (10, SQUARE), "train/dog/1.png": (10, SQUARE), "test/cat/1.png": (10, SQUARE)})
    with pytest.raises(ConfigError, match=r"must have images of the same classes; only one of them has dog"):
        ImageFolder(root).arrays()


def test_image_folder_says_where_names_differ_in_their_unicode_form_alone(images):
    """ "only one of them has café, café"."""
    names = ("train/caf\u00e9/1.png", "train/dog/1.png", "test/cafe\u0301/1.png", "test/dog/1.png")
    root = images(dict.fromkeys(names, (10, SQUARE)))
    said = r"the classes 'cafe\\u0301', 'caf\\xe9' of .* are one but for their Unicode form; rename the folders"
    with pytest.raises(ConfigError, match=said):
        ImageFolder(root).arrays()


def test_image_folder_that_is_not_there_or_empty_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"there is no such folder; put images at <root>/train/<class>/.* got .*nowhere"
    ):
        ImageFolder(str(tmp_path / "nowhere")).arrays()
    (tmp_path / "cat").mkdir()
    with pytest.raises(ConfigError, match=r"there are no images"):
        ImageFolder(str(tmp_path)).arrays()


def test_image_folder_refuses_bad_sizes():
    for size in (0, [1], [1, 0]):
        with pytest.raises(ConfigError, match=r"data.dataset.size"):
            ImageFolder("x", size)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tiff"])
def test_image_folder_turns_images_by_their_exif(tmp_path, suffix):
    """Orientation 6: what is stored to the left is shown above."""
    (tmp_path / "cat").mkdir()
    image = Image.new("L", (16, 8), 0)
    image.paste(255, (0, 0, 8, 8))
    exif = Image.Exif()
    exif[0x112] = 6
    image.save(tmp_path / "cat" / f"1.{suffix}", exif=exif)
    x = ImageFolder(str(tmp_path), grayscale=True).arrays().x
    assert x.shape == (1, 1, 16, 8)
    assert (x[0, 0, :7] > 250).all()
    assert (x[0, 0, 9:] < 5).all()


def test_image_folder_takes_an_image_as_it_lies_where_its_exif_is_damaged(tmp_path):
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (3, 2)).save(tmp_path / "cat" / "1.jpg", exif=b"Exif\x00\x00no TIFF")
    assert ImageFolder(str(tmp_path)).arrays().x.shape == (1, 3, 2, 3)


def test_image_folder_shows_what_is_transparent_on_white(tmp_path):
    """As do palettes, in which one colour is; half of it lets half of the white through, and none changes nothing."""
    (tmp_path / "cat").mkdir()
    for name, alpha in (("1", 0), ("2", 51), ("3", 255)):
        Image.new("RGBA", (1, 1), (200, 100, 5, alpha)).save(tmp_path / "cat" / f"{name}.png")
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([255, 0, 0] + [0] * 765)
    palette.save(tmp_path / "cat" / "4.png", transparency=0)
    Image.new("LA", (1, 1), (7, 0)).save(tmp_path / "cat" / "5.png")
    x = ImageFolder(str(tmp_path)).arrays().x[:, :, 0, 0].tolist()
    assert x == [[255] * 3, [244, 224, 205], [200, 100, 5], [255] * 3, [255] * 3]
    assert ImageFolder(str(tmp_path), grayscale=True).arrays().x.flatten().tolist()[::4] == [255, 255]


def _png(depth, colours, transparent, packed, width):
    """A PNG of one row, written by hand: Pillow writes neither grey of 2 and 4 bits nor colours of 16."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, 1, depth, colours, 0, 0, 0)
    row = zlib.compress(b"\0" + packed)
    parts = (b"IHDR", header), (b"tRNS", transparent), (b"IDAT", row), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize(
    ("depth", "colours", "transparent", "packed", "seen"),
    [
        (2, 0, b"\0\2", bytes([0b00_01_10_11]), [0, 85, 255, 255]),
        (4, 0, b"\0\5", bytes([0x05, 0x7F]), [0, 255, 119, 255]),
        (8, 0, b"\0\5", bytes([0, 5, 119, 255]), [0, 255, 119, 255]),
        (16, 0, b"\x0a\x0a", b"\0\0" + b"\x0a\x0a" + b"\x0a\x0b" + b"\xff\xff", [0, 255, 10, 255]),
        (16, 2, b"\x0a\x55" * 3, b"\x55\0" * 3 + b"\x0a\x55" * 3 + b"\x0b\0" * 3 + b"\0\0" * 3, [85, 255, 11, 0]),
    ],
)
def test_image_folder_shows_the_colour_that_a_png_makes_transparent_on_white(
    tmp_path, depth, colours, transparent, packed, seen
):
    """At 16 bits grey stayed as it was; at 2 and 4, and in 16 bits of colour, another value became white, or none."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(_png(depth, colours, transparent, packed, 4))
    assert ImageFolder(str(tmp_path), grayscale=True).arrays().x.flatten().tolist() == seen


def test_image_folder_reads_grey_maps_of_16_bits(tmp_path):
    (tmp_path / "cat").mkdir()
    grey = np.array([[0, 65535], [32896, 100]], dtype=">u2")
    (tmp_path / "cat" / "1.pgm").write_bytes(b"P5\n2 2\n65535\n" + grey.tobytes())
    x = ImageFolder(str(tmp_path), grayscale=True).arrays().x
    assert x[0, 0].tolist() == [[0, 255], [128, 0]]


@pytest.mark.skipif(os.name == "nt", reason="names are texts there")
def test_names_that_are_no_text_and_pipes(images, tmp_path):
    """The first ended in a traceback; at the second one waited for ever."""
    root = Path(images({"a/1.png": (10, SQUARE), "b/1.png": (10, SQUARE)}))
    try:
        (root / "b").rename(os.fsdecode(os.fsencode(root) + b"/b\xe9"))
        (root / "a" / "1.png").rename(os.fsdecode(os.fsencode(root) + b"/a/\xff.png"))
    except OSError:
        pytest.skip("this file system takes texts alone")
    arrays = load(ImageFolder(str(root)), tmp_path / ".cache")
    assert (arrays.classes, arrays.y.tolist()) == (("a", "b\\xe9"), [0, 1])
    os.mkfifo(root / "a" / "2.png")
    with pytest.raises(ConfigError, match=r"2\.png is broken or not an image \(.*it is a pipe or a device, no file"):
        ImageFolder(str(root)).arrays()
