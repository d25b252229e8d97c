"""New samples are read as the run's data set reads its own: the same file gives the same numbers."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset
from torchvision import datasets, transforms

from fl_lightning.data.cache import load, streams
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.image_folder import ImageFolder
from fl_lightning.data.normalising import arrays_of
from fl_lightning.data.own_files import ArrayFile, CSVTable, PFLlibFolder
from fl_lightning.data.own_objects import HuggingFace, TorchDataset
from fl_lightning.data.sample import Sample
from fl_lightning.data.text import IMDB
from fl_lightning.data.tokens import TextFile
from fl_lightning.data.unlabelled import read_unlabelled
from fl_lightning.errors import ConfigError

TEXTS = ["a good film", "bad, bad acting", "good", "nothing but noise"]


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for label in ("cat", "dog"):
            folder = tmp_path / "images" / part / label
            folder.mkdir(parents=True)
            for number in range(3):
                Image.fromarray(rng.integers(0, 255, (6, 5, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return ImageFolder(str(tmp_path / "images"))


@pytest.fixture
def table(tmp_path):
    rows = [["age", "city", "label"], ["30", "Oslo", "no"], ["50", "Rome", "yes"], ["70", "Oslo", "yes"]]
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return CSVTable(str(tmp_path / "table.csv"), "label")


def test_images_in_folders(images, tmp_path):
    arrays = images.arrays()
    found = read_unlabelled(tmp_path / "images" / "test", images, arrays)
    assert torch.equal(found.x, arrays.x[arrays.num_train :])
    assert found.names[0] == "cat/0.png"
    one = read_unlabelled(tmp_path / "images" / "test" / "dog" / "2.png", images, arrays)
    assert torch.equal(one.x, arrays.x[-1:])
    assert one.names == ["2.png"]


def test_hidden_files_are_no_images(images, tmp_path):
    """A system's own notes beside the images, which a fit leaves out, ended the command."""
    folder = tmp_path / "images" / "test"
    (folder / "cat" / "._0.png").write_bytes(b"note")
    (folder / ".thumbnails").mkdir()
    (folder / ".thumbnails" / "0.png").write_bytes((folder / "cat" / "0.png").read_bytes())
    arrays = images.arrays()
    found = read_unlabelled(folder, images, arrays)
    assert torch.equal(found.x, arrays.x[arrays.num_train :])


def test_images_of_another_size_are_scaled_to_the_runs(images, tmp_path):
    Image.fromarray(np.zeros((40, 30), dtype=np.uint8)).save(tmp_path / "large.jpg")
    assert read_unlabelled(tmp_path / "large.jpg", images, images.arrays()).x.shape == (1, 3, 6, 5)


@pytest.mark.parametrize("ending", [".npz", ".pt"])
def test_features_in_arrays_are_scaled_as_in_training(ending, tmp_path):
    x = np.random.default_rng(0).normal(3, 2, (10, 4)).astype(np.float32)
    np.savez(tmp_path / "own.npz", x_train=x[:6], y_train=np.arange(6) % 2, x_test=x[6:], y_test=np.arange(4) % 2)
    dataset = ArrayFile(str(tmp_path / "own.npz"))
    new = tmp_path / f"new{ending}"
    if ending == ".npz":
        np.savez(new, x=x[6:])
    else:
        torch.save({"x": torch.from_numpy(x[6:])}, new)
    arrays = dataset.arrays()
    assert torch.equal(read_unlabelled(new, dataset, arrays).x, arrays.x[6:])


def test_a_sample_scales_as_the_whole_set(tmp_path):
    x = np.random.default_rng(0).normal(3, 2, (10, 4)).astype(np.float32)
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(10) % 2)
    np.savez(tmp_path / "new.npz", x=x)
    whole = ArrayFile(str(tmp_path / "own.npz"))
    part = Sample(whole, 6)
    found = read_unlabelled(tmp_path / "new.npz", part, part.arrays()).x
    assert torch.equal(found, whole.arrays().x)


def test_lines_of_a_text_file_are_those_that_editors_count(tmp_path):
    (tmp_path / "own.jsonl").write_text(
        '{"text": "a b", "label": 0}\n{"text": "c\u2028d", "label": 1}\n', encoding="utf-8"
    )
    (tmp_path / "new.txt").write_text("a\u2028b\nc\x0cd\r\n", encoding="utf-8")
    dataset = TextFile(str(tmp_path / "own.jsonl"), length=3)
    assert read_unlabelled(tmp_path / "new.txt", dataset, dataset.arrays()).names == ["0", "1"]


def test_a_table_is_encoded_as_in_training(table, tmp_path):
    (tmp_path / "new.csv").write_text("city,age\nRome,50\nOslo,70\n")  # columns in any order, without labels
    assert torch.equal(read_unlabelled(tmp_path / "new.csv", table, table.arrays()).x, table.arrays().x[1:])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("age\n50\n", "DATA: must have the column 'city'"),
        ("age,city\n50,Paris\n", r"DATA: 'city' of sample 0 \(from 0\) must be one of the names .* there, got 'Paris'"),
        ("age,city\nold,Oslo\n", r"DATA: 'age' of sample 0 \(from 0\) must be a number, got 'old'"),
    ],
)
def test_a_table_that_does_not_fit(table, tmp_path, text, said):
    (tmp_path / "new.csv").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_unlabelled(tmp_path / "new.csv", table, table.arrays())


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".txt"])
def test_texts_have_the_numbers_of_the_training_parts_words(ending, tmp_path):
    lines = "".join(json.dumps({"text": text, "label": n % 2}) + "\n" for n, text in enumerate(TEXTS))
    (tmp_path / "own.jsonl").write_text(lines)
    dataset = TextFile(str(tmp_path / "own.jsonl"), length=3)
    new = tmp_path / f"new{ending}"
    if ending == ".csv":
        new.write_text("text\n" + "".join(f'"{text}"\n' for text in TEXTS[:2]))
    elif ending == ".jsonl":
        new.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:2]))
    else:
        new.write_text("".join(f"{text}\n" for text in TEXTS[:2]))
    arrays = dataset.arrays()
    assert torch.equal(read_unlabelled(new, dataset, arrays).x, arrays.x[:2])


@pytest.mark.parametrize("head", ["text\n", "\ntext\n"])
def test_a_blank_line_of_a_table_of_one_column_is_a_sample(head, tmp_path):
    (tmp_path / "own.csv").write_text("text,label\na,0\n\nb,1\n")
    (tmp_path / "new.csv").write_text(f"{head}a\n\nb\n\n")
    dataset = TextFile(str(tmp_path / "own.csv"), length=1)
    found = read_unlabelled(tmp_path / "new.csv", dataset, dataset.arrays())
    assert found.x.tolist() == [[2], [1], [3]]
    assert found.names == ["0", "1", "2"]


def test_reviews_have_imdbs_numbers(tmp_path):
    for number, text in enumerate(TEXTS):
        for part in ("train", "test"):
            folder = tmp_path / "aclImdb" / part / ("pos" if number % 2 else "neg")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.txt").write_text(text)
    dataset = IMDB(str(tmp_path), vocabulary=6, length=4)
    (tmp_path / "new.txt").write_text(TEXTS[0] + "\n" + TEXTS[2] + "\n")
    arrays = dataset.arrays()
    assert torch.equal(read_unlabelled(tmp_path / "new.txt", dataset, arrays).x, arrays.x[arrays.num_train :][:2])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("new.npz", {"x": np.zeros((2, 6, 5, 3), np.float32)}, r"DATA: must be bytes \(uint8\)"),
        ("new.npz", {"x": np.zeros((2, 9, 5, 3), np.uint8)}, r"DATA: must be bytes .* \[N, \*\[3, 6, 5\]\]"),
        ("new.npz", {"a": np.zeros(2), "b": np.zeros(2)}, "DATA: .* must hold x, x_test or one array, got 'a, b'"),
        ("new.csv", "text\nhello\n", "DATA: ImageFolder is no data set of tables or texts"),
        ("new.xls", "", "DATA: must be an image or a folder of them"),
        ("new.png", "no image", "broken or not an image"),
        ("", None, "DATA: there is no such file or folder"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(images, tmp_path, name, content, said):
    path = tmp_path / (name or "nowhere")
    if isinstance(content, dict):
        np.savez(path, **content)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_unlabelled(path, images, images.arrays())
    assert len(str(caught.value)) < 300


def test_nothing_in_an_array_file_is_run(images, tmp_path):
    np.save(tmp_path / "x.npy", np.array([print], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "new.npz", x=np.array([print], dtype=object))
    with pytest.raises(ConfigError, match=r"DATA: .* cannot be read"):
        read_unlabelled(tmp_path / "new.npz", images, images.arrays())


@pytest.mark.parametrize("kind", ["table", "arrays"])
def test_new_samples_of_large_numbers_are_scaled_as_those_of_training(tmp_path, kind):
    seconds = 1.7e9 + np.arange(60.0)
    if kind == "table":
        known, new = tmp_path / "known.csv", tmp_path / "new.csv"
        known.write_text("time,y\n" + "".join(f"{s:.0f},{i % 2}\n" for i, s in enumerate(seconds)))
        new.write_text("time\n" + "".join(f"{s:.0f}\n" for s in seconds[:5]))
        dataset = CSVTable(str(known), "y")
    else:
        known, new = tmp_path / "known.npz", tmp_path / "new.npz"
        np.savez(known, x=seconds[:, None], y=np.arange(60) % 2)
        np.savez(new, x=seconds[:5, None])
        dataset = ArrayFile(str(known))
    arrays = dataset.arrays()
    assert torch.equal(read_unlabelled(new, dataset, arrays).x, arrays.x[:5])


# --- data sets that other libraries hold ------------------------------------------------------------------------------


@pytest.fixture
def turned(tmp_path):
    """Pictures that lie on their side by EXIF, bright above or below, with alpha."""
    upside_down = Image.Exif()
    upside_down[0x112] = 3
    for label in ("above", "below"):
        folder = tmp_path / "turned" / label
        folder.mkdir(parents=True)
        for number in range(3):
            pixels = np.full((6, 5, 4), 20 + number, dtype=np.uint8)
            pixels[:3] = 200 if label == "above" else pixels[:3]
            pixels[3:] = 200 if label == "below" else pixels[3:]
            Image.fromarray(pixels).save(folder / f"{number}.png", exif=upside_down)
    return tmp_path / "turned"


@pytest.mark.parametrize(
    "ways", [[], [transforms.RandomInvert(1.0), transforms.CenterCrop(4)], [transforms.ToTensor()]]
)
def test_pictures_are_read_as_torchvision_read_those_of_training(turned, ways):
    """Ours are upright and on white; a folder of torchvision's had neither, and its own transform besides."""
    part = datasets.ImageFolder(str(turned), transforms.Compose(ways) if ways else None)
    for dataset in (TorchDataset(part), Sample(TorchDataset(Subset(part, range(6))), 6)):
        arrays = load(dataset)
        assert torch.equal(read_unlabelled(turned, dataset, arrays).x, arrays.x)
    if not ways:
        Image.fromarray(np.zeros((40, 30, 3), dtype=np.uint8)).save(turned / "large.png")
        assert read_unlabelled(turned / "large.png", dataset, arrays).x.shape == (1, 3, 6, 5)


class Pairs(torch.utils.data.Dataset):
    """Draws with every sample, images or features."""

    def __init__(self, image=False):
        self.image = image

    def __len__(self):
        return 8

    def __getitem__(self, index):
        drawn = torch.randn(3) + 5
        return (torch.full((3, 6, 5), 30 * index, dtype=torch.uint8) if self.image else drawn), index % 2


def test_pictures_that_only_a_data_set_itself_can_read_are_refused(turned):
    cropped = datasets.FakeData(8, (3, 6, 5), 2, transforms.PILToTensor())
    for part in (Pairs(image=True), cropped):
        dataset = TorchDataset(part)
        with pytest.raises(ConfigError, match=rf"^DATA: only {type(part).__name__} itself can read its pictures; give"):
            read_unlabelled(turned, dataset, load(dataset))
    plain = TorchDataset(datasets.FakeData(8, (3, 6, 5), 2))
    assert read_unlabelled(turned, plain, load(plain)).x.shape == (6, 3, 6, 5)
    folder = TorchDataset(datasets.ImageFolder(str(turned)))
    arrays = load(folder)
    (turned / "above" / "0.png").write_bytes(b"no picture")
    with pytest.raises(ConfigError, match=r"^DATA: \S+0\.png cannot be read \(UnidentifiedImageError: "):
        read_unlabelled(turned, folder, arrays)


def test_features_that_are_drawn_are_scaled_by_those_of_training(tmp_path):
    """They were scaled by other draws, so that two calls gave two answers."""
    dataset = TorchDataset(Pairs())
    arrays = load(dataset)
    with streams():
        new = torch.stack([dataset.train[index][0] for index in range(8)])
    np.savez(tmp_path / "new.npz", x=new.numpy())
    for _ in range(2):
        torch.testing.assert_close(read_unlabelled(tmp_path / "new.npz", dataset, arrays).x, arrays.x)


class Own(Dataset):
    """Scales, and does not say so."""

    def arrays(self):
        x = torch.arange(12.0).view(6, 2)
        return arrays_of(x, torch.arange(6) % 2, 6, ("a", "b"))


class Says(Own):
    """The same, and says so."""

    normalize = "none"


@pytest.mark.parametrize(("dataset", "said"), [(Own(), True), (Says(), False), (PFLlibFolder("nowhere"), False)])
def test_a_line_says_that_features_are_taken_as_they_are(tmp_path, capsys, dataset, said):
    np.savez(tmp_path / "new.npz", x=np.ones((2, 2)))
    assert torch.equal(read_unlabelled(tmp_path / "new.npz", dataset, Own().arrays()).x, torch.ones(2, 2))
    line = "features are taken as they are: Own has no attribute `normalize` that says how it scales"
    assert capsys.readouterr().err == (f"fl-lightning: DATA: {line}\n" if said else "")


def test_pictures_are_read_as_hugging_face_reads_them(tmp_path):
    hugging_face = pytest.importorskip("datasets")
    (tmp_path / "new").mkdir()
    files = []
    for number in range(4):
        grey = Image.fromarray(np.full((5, 4), 60 * number, dtype=np.uint8))
        files.append(tmp_path / "new" / f"{number}.png")
        grey.save(files[-1], transparency=60)
    features = hugging_face.Features({"image": hugging_face.Image(), "label": hugging_face.Value("int64")})
    rows = {"image": [str(file) for file in files], "label": [0, 1, 0, 1]}
    hugging_face.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "set"))
    dataset = HuggingFace(str(tmp_path / "set"))
    arrays = dataset.arrays()
    assert arrays.x[1].eq(60).all()  # transparent, and white to viewers
    assert torch.equal(read_unlabelled(tmp_path / "new", dataset, arrays).x, arrays.x)
    Image.fromarray(np.full((10, 8, 3), 90, dtype=np.uint8)).save(tmp_path / "large.png")
    assert torch.equal(read_unlabelled(tmp_path / "large.png", dataset, arrays).x, torch.full((1, 1, 5, 4), 90).byte())
