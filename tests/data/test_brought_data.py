"""What users bring: arrays, tables, texts, other libraries' data sets and other benchmarks' folders."""

import csv
import json
import pickle
import random
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from fl_lightning.data import cells
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.cache import load
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.delimited import read_columns
from fl_lightning.data.image_folder import ImageFolder
from fl_lightning.data.listed import FromFile
from fl_lightning.data.module import FederatedData
from fl_lightning.data.normalising import as_groups, as_inputs, as_labels, scaled
from fl_lightning.data.own_files import LEAF, ArrayFile, CSVTable, PFLlibFolder
from fl_lightning.data.own_objects import HuggingFace, TorchDataset
from fl_lightning.data.partitions import IID
from fl_lightning.data.sample import Sample
from fl_lightning.data.skews import ByGroup
from fl_lightning.data.splits import from_file, matched
from fl_lightning.data.tokens import TextFile, Words
from fl_lightning.data.unlabelled import read_unlabelled
from fl_lightning.errors import ConfigError
from fl_lightning.seeding import seed_global_streams


def checked(dataset):
    arrays = dataset.arrays()
    arrays.validate("Test")
    return arrays


# --- arrays ---------------------------------------------------------------------------------------------------------
def test_files_of_arrays_whose_endings_are_capitals_are_what_they_are(tmp_path):
    """They were read as torch's, and were damaged."""
    with (tmp_path / "A.NPZ").open("wb") as file:
        np.savez(file, x=np.zeros((4, 3)), y=np.array([0, 1, 0, 1]))
    assert checked(ArrayFile(str(tmp_path / "A.NPZ"))).y.tolist() == [0, 1, 0, 1]
    with (tmp_path / "P.NPZ").open("wb") as file:
        np.savez(file, **{"0": np.array([0, 1]), "1": np.array([2, 3])})
    assert [own[0].tolist() for own in FromFile(str(tmp_path / "P.NPZ")).listed(2)] == [[0, 1], [2, 3]]


def test_images_in_npz_with_channels_last(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.array([0, 1, 2, 0, 1, 2]), groups=np.array(["b", "a", "b", "a", "b", "a"]))
    arrays = checked(ArrayFile(str(tmp_path / "a.npz"), num_train=4))
    assert arrays.x.shape == (6, 3, 8, 8)
    assert torch.equal(arrays.x[0, 2], torch.from_numpy(x[0, :, :, 2].copy()))
    assert (arrays.num_train, arrays.classes, arrays.groups.tolist()) == (4, ("0", "1", "2"), [1, 0, 1, 0, 1, 0])
    assert arrays.mean[0] == pytest.approx(x[:4, :, :, 0].mean() / 255)


@pytest.mark.parametrize(
    ("y", "labels"),
    [([3, 8, 3], [3, 8, 3]), (["ship", "cat", "ship"], [8, 3, 8])],
    ids=["numbers", "names"],
)
def test_a_class_keeps_its_name_where_few_of_those_that_are_named_occur(tmp_path, y, labels):
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 8, 8, 3), np.uint8), y=np.array(y), classes=np.array(names))
    arrays = checked(ArrayFile(str(tmp_path / "a.npz")))
    assert (arrays.y.tolist(), arrays.classes) == (labels, tuple(names))


def test_numbers_that_are_names_of_classes_and_places_of_others_are_refused():
    """Samples of class "1" were called "2"."""
    said = "Set: the label 1 is the name of class 0, and the place of class '2'; give labels as texts"
    with pytest.raises(ConfigError, match=f"^data.dataset: {said}"):
        as_labels([1, 2, 3], "Set", ["1", "2", "3", "4"])
    with pytest.raises(ConfigError, match="the label 0 is the name of class 2, and the place of class '2'"):
        as_labels([0, 1, 2, 0], "Set", ["2", "1", "0"])
    assert as_labels([1, 2, 3], "Set", ["1", "2", "3", "4"], are_places=True)[0].tolist() == [1, 2, 3]


def test_names_of_other_classes_are_refused_and_those_of_as_many_numbers_taken(tmp_path):
    x = np.zeros((3, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.array([10, 30, 20]), classes=np.array(["a", "b", "c"]))
    assert checked(ArrayFile(str(tmp_path / "a.npz"))).y.tolist() == [0, 2, 1]
    np.savez(tmp_path / "a.npz", x=x, y=np.array([-1, 0, 1]), classes=np.array(["a", "b"]))
    with pytest.raises(
        ConfigError, match=r"data.dataset: ArrayFile: names 2 classes, but y holds 3 others \(-1 to 1\)"
    ):
        ArrayFile(str(tmp_path / "a.npz")).arrays()


def test_label_that_names_two_classes_is_refused():
    """All were the first of them; ImageNet has two cranes."""
    with pytest.raises(ConfigError, match=r"^data\.dataset: Set: two classes are called 'crane': which one a label is"):
        as_labels(["cat", "crane"], "Set", ["cat", "crane", "crane"])
    assert as_labels([0, 2], "Set", ["cat", "crane", "crane"])[0].tolist() == [0, 2]


def test_other_names_than_those_of_the_classes_are_refused_and_names_in_bytes_are_names():
    """In sorted order "hund" was called cat, and "katze" dog."""
    with pytest.raises(ConfigError, match=r"Set: names 2 classes, but y holds 2 others \(hund to katze\)"):
        as_labels(["katze", "hund"], "Set", ["cat", "dog"])
    labels, classes = as_labels(np.array([b"dog", b"cat"]), "Set", ["dog", "cat"])
    assert (labels.tolist(), classes) == ([0, 1], ("dog", "cat"))
    assert as_labels(np.array([b"dog", b"cat"]), "Set")[1] == ("cat", "dog")


@pytest.mark.parametrize(
    ("classes", "labels", "places"),
    [
        ([20, 10, 0], [0, 10, 20, 0], [2, 1, 0, 2]),  # samples of 20 were called "0"
        ([b"a", b"b", b"c"], [2, 1, 0, 2], [2, 1, 0, 2]),
        ([0, 1, 2], [0, 1, 2, 0], [0, 1, 2, 0]),
        ([2, 1, 7], [0, 1, 2, 0], [0, 1, 2, 0]),  # places, as 0 is no name
        (["1", "2", "3", "4"], ["1", "3", "2", "1"], [0, 2, 1, 0]),  # names, as texts are
        ([3, 2, 1], [1, 2, 3, 1], [2, 1, 0, 2]),
    ],
)
def test_numbers_and_bytes_that_name_classes_are_names(tmp_path, classes, labels, places):
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2)), y=np.array(labels), classes=np.array(classes))
    arrays = checked(ArrayFile(str(tmp_path / "a.npz")))
    names = tuple(each.decode() if isinstance(each, bytes) else str(each) for each in classes)
    assert (arrays.y.tolist(), arrays.classes) == (places, names)


RAGGED = [[3.0, 1.0], [4.0]]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"x": RAGGED, "y": [0, 1]}, r"^data\.dataset: ArrayFile: x must be numbers \[N, …\], is object \[2\]"),
        ({"x": torch.zeros(2, 2), "y": RAGGED}, r"^data\.dataset: ArrayFile: y must be names or whole numbers"),
        ({"x": torch.zeros(2, 2), "y": [0, 1], "classes": RAGGED}, r"ArrayFile: classes must be a flat list of names"),
        ({"x": torch.zeros(2, 2), "y": [0, 1], "classes": "ab"}, r"ArrayFile: classes must be a flat list of names"),
        ({0: torch.zeros(2, 2)}, r"^data\.dataset\.path: .*a\.pt must hold a dict of tensors by their names"),
        (
            {"x": [torch.zeros(3, 8), torch.zeros(3, 9)], "y": [0, 1]},  # was a traceback of NumPy's
            r"^data\.dataset: ArrayFile: inputs must have one shape, padded or cut: sample 1 is \[3, 9\], sample 0 \[",
        ),
        (
            {"x": torch.zeros(2, 2), "y": [0, 1], "groups": [torch.zeros(1), torch.zeros(2)]},
            r"^data\.dataset: ArrayFile: groups must be names or numbers",
        ),
    ],
)
def test_what_is_no_array_is_one_line(tmp_path, content, said):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=said):
        ArrayFile(str(tmp_path / "a.pt")).arrays()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_a_list_of_tensors_is_read_as_one_tensor_of_them(tmp_path, kind):
    samples = torch.randn(4, 3, 8).to(kind).requires_grad_()
    torch.save({"x": list(samples), "y": [0, 1, 0, 1]}, tmp_path / "a.pt")
    assert torch.equal(checked(ArrayFile(str(tmp_path / "a.pt"), normalize="none")).x, samples.detach().float())


def test_classes_that_are_none_are_absent(tmp_path):
    torch.save({"x": torch.zeros(2, 2), "y": [0, 1], "classes": None, "groups": None}, tmp_path / "a.pt")
    assert ArrayFile(str(tmp_path / "a.pt")).arrays().classes == ("0", "1")


def test_features_in_pt_are_scaled_by_the_training_part(tmp_path):
    x = torch.randn(50, 3) * torch.tensor([1.0, 100.0, 0.0]) + torch.tensor([0.0, 5.0, 7.0])
    content = {"x_train": x[:40], "y_train": torch.arange(40) % 2, "x_test": x[40:], "y_test": torch.arange(10) % 2}
    torch.save(content, tmp_path / "a.pt")
    arrays = checked(ArrayFile(str(tmp_path / "a.pt")))
    assert arrays.num_train == 40
    assert torch.allclose(arrays.x[:40].mean(0), torch.zeros(3), atol=1e-6)
    assert torch.allclose(arrays.x[:40].std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-6)
    plain = checked(ArrayFile(str(tmp_path / "a.pt"), normalize="none"))
    assert torch.equal(plain.x, x)


@pytest.mark.parametrize(
    ("names", "num_train", "said"),
    [
        (("x", "y", "x_test", "y_test"), None, r"path: \S+ must hold x, y and groups, or these with _train and _test"),
        (
            ("x_train", "y_train", "x_test", "y_test", "groups"),
            None,
            r"path: \S+ must hold x, y and groups, or these w",
        ),
        (
            ("x_train", "y_train", "x_test", "y_test", "y"),
            None,
            r"path: \S+ must hold x, y and groups, or these with _",
        ),
        (("x_train", "y_train"), 4, r"num_train: must be null where the file has parts of its own, x_train and x_tes"),
    ],
)
def test_arrays_that_would_be_left_out_are_refused(tmp_path, names, num_train, said):
    """A test part beside x and y was, in silence."""
    np.savez(tmp_path / "a.npz", **{name: np.arange(6)[:, None] if name[0] == "x" else np.arange(6) for name in names})
    with pytest.raises(ConfigError, match=rf"^data\.dataset\.{said}"):
        ArrayFile(str(tmp_path / "a.npz"), num_train).arrays()


@pytest.mark.parametrize("name", ["y", "groups"])
def test_parts_of_other_lengths_are_refused(tmp_path, name):
    """Where only the sums agreed, samples had others' classes and owners, in silence."""
    found = {
        f"{own}_{part}": np.arange(size) for own in ("x", "y", "groups") for part, size in (("train", 4), ("test", 2))
    }
    found |= {name: own[:, None].astype(float) for name, own in found.items() if name[0] == "x"}
    np.savez(tmp_path / "a.npz", **found)
    assert checked(ArrayFile(str(tmp_path / "a.npz"))).num_train == 4
    found[f"{name}_train"], found[f"{name}_test"] = found[f"{name}_test"], found[f"{name}_train"]
    np.savez(tmp_path / "a.npz", **found)
    with pytest.raises(
        ConfigError, match=r"^data\.dataset\.path: .* must have as many of x_train, y_train, groups_train: "
    ):
        ArrayFile(str(tmp_path / "a.npz")).arrays()


def test_nothing_to_scale_by_is_no_large_number(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=np.zeros((0, 3)), y_train=[], x_test=np.ones((2, 3)), y_test=[0, 1])
    with pytest.raises(ConfigError):
        ArrayFile(str(tmp_path / "a.npz")).arrays()
    with pytest.raises(ConfigError, match="there is no training sample to scale by"):
        scaled(torch.ones(2, 3), torch.ones(0, 3))


def test_grey_images_and_tokens(tmp_path):
    np.savez(tmp_path / "g.npz", x=np.zeros((3, 5, 5), dtype=np.uint8), y=[5, 900, 5])
    arrays = checked(ArrayFile(str(tmp_path / "g.npz")))
    assert arrays.x.shape == (3, 1, 5, 5)
    assert (arrays.y.tolist(), arrays.classes) == ([0, 1, 0], ("5", "900"))
    np.savez(tmp_path / "t.npz", x=np.array([[1, 2, 0], [9, 0, 0]]), y=["no", "yes"])
    arrays = checked(ArrayFile(str(tmp_path / "t.npz")))
    assert (arrays.x.dtype, arrays.vocabulary_size, arrays.classes) == (torch.int64, 10, ("no", "yes"))


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["a.pt", "a.npy"])
def test_numpys_arrays_in_a_file_of_torchs_are_told_where_they_belong(tmp_path, name):
    """Torch's words were of how to load such a file with all that it may run."""
    torch.save({"x": np.zeros((4, 3)), "y": np.arange(4) % 2}, tmp_path / "a.pt")
    np.save(tmp_path / "a.npy", np.zeros((4, 3)))
    said = (
        r" cannot be read \(it is no \.pt file of tensors alone; NumPy's arrays belong in an \.npz, by numpy\.savez\)$"
    )
    with pytest.raises(ConfigError, match=said):
        ArrayFile(str(tmp_path / name)).arrays()


def test_nothing_in_a_file_is_run(tmp_path):
    mark = tmp_path / "mark"
    np.savez(tmp_path / "b.npz", x=np.array([Bomb(mark)], dtype=object), y=[0])
    torch.save({"x": Bomb(mark), "y": torch.zeros(1)}, tmp_path / "b.pt")
    with (tmp_path / "b.pkl").open("wb") as file:
        pickle.dump({"data_indices": [Bomb(mark)]}, file)
    (tmp_path / "train").mkdir()
    np.savez(tmp_path / "train" / "0.npz", data={"x": Bomb(mark), "y": [0]})
    for read in (
        ArrayFile(str(tmp_path / "b.npz")).arrays,
        ArrayFile(str(tmp_path / "b.pt")).arrays,
        PFLlibFolder(str(tmp_path)).arrays,
        lambda: FromFile(str(tmp_path / "b.pkl")).listed(1),
    ):
        with pytest.raises(ConfigError):
            read()
    assert not mark.exists()


# --- tables ---------------------------------------------------------------------------------------------------------
TABLE = """age,city,site,grade
20,Bonn,a,good
30,Rome,a,bad
40,Bonn,b,good
50,Rome,b,bad
"""


def test_a_table_of_numbers_and_names(tmp_path):
    (tmp_path / "t.csv").write_text(TABLE)
    arrays = checked(CSVTable(str(tmp_path / "t.csv"), "grade", group="site", normalize="none"))
    assert arrays.x.tolist() == [[20, 1, 0], [30, 0, 1], [40, 1, 0], [50, 0, 1]]
    assert (arrays.classes, arrays.y.tolist()) == (("bad", "good"), [1, 0, 1, 0])
    assert arrays.groups.tolist() == [0, 0, 1, 1]
    (tmp_path / "u.csv").write_text(TABLE.replace("20,Bonn", "90,Bonn"))
    both = CSVTable(str(tmp_path / "t.csv"), "grade", str(tmp_path / "u.csv"), leave_out=["city", "site"])
    arrays = checked(both)
    assert (arrays.num_train, arrays.x.shape) == (4, (8, 1))
    assert arrays.x[4, 0].item() == pytest.approx((90 - 35) / np.std([20, 30, 40, 50]))


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (TABLE, {"label": "grad"}, "data.dataset.label: must be one of age, city, site, grade"),
        (TABLE, {"label": "grade", "group": "user"}, "data.dataset.group: must be one of"),
        (TABLE.replace("30", ""), {"label": "grade"}, "line 3 has nothing under 'age'"),
        (
            TABLE.replace("bad", "", 1),
            {"label": "grade"},
            "has nothing under 'grade'; fill it in, or take the line out",
        ),
        ("a,site,y\n1,x,0\n2,,1\n", {"label": "y", "group": "site"}, "line 3 has nothing under 'site'"),
        ('a,y\n"1,0\n2,1\n"3,0\n4,1\n', {"label": "y"}, "is no CSV file"),
        (TABLE.replace("30,", ""), {"label": "grade"}, "line 3 has 3 cells, and there are 4 columns"),
        ("age\n", {"label": "age"}, "samples below it"),
        (TABLE, {"label": "grade", "leave_out": ["age", "city", "site"]}, "leaves no feature"),
        (TABLE, {"label": "grade", "normalize": "fast"}, "data.dataset.normalize"),
    ],
)
def test_tables_that_are_none(tmp_path, text, arguments, said):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ConfigError, match=said):
        CSVTable(str(tmp_path / "t.csv"), **arguments).arrays()


def test_decimal_commas_are_no_names(tmp_path):
    """Of 120 weights, each was a feature of its own."""
    rows = [f"{50 + n},5\t{n % 2}" for n in range(6)]
    (tmp_path / "table.tsv").write_text("\n".join(["weight\tlabel", "7\t0", *rows, ""]))
    with pytest.raises(ConfigError, match=r"line 3 has '50,5' under 'weight'; write a decimal point, or say .*names:"):
        CSVTable(str(tmp_path / "table.tsv"), label="label").arrays()
    assert CSVTable(str(tmp_path / "table.tsv"), label="label", names=["weight"]).arrays().x.shape == (7, 7)


def test_a_name_among_numbers_is_a_slip_unless_all_are_names(tmp_path):
    """One cell of 40 made a column of numbers one of 40 features, a feature each of its values, in silence."""
    path = tmp_path / "t.csv"
    path.write_text("age,zip,y\n20,53,a\n3O,A1,b\n40,53,a\n50,77,b\n")
    said = (
        r"line 3 has '3O' under 'age', where most are numbers; mend it, leave the column out, or say .*names: \[age\]"
    )
    with pytest.raises(ConfigError, match=said):
        CSVTable(str(path), "y", names=["zip"]).arrays()
    path.write_text(path.read_text().replace("3O", "30"))
    with pytest.raises(ConfigError, match=r"line 3 has 'A1' under 'zip'"):
        CSVTable(str(path), "y").arrays()
    table = CSVTable(str(path), "y", names=["zip"], normalize="none")
    assert checked(table).x.tolist() == [[20, 1, 0, 0], [30, 0, 0, 1], [40, 1, 0, 0], [50, 0, 1, 0]]
    assert table.encode({"age": ["25"], "zip": ["A1"]}).tolist() == [[25, 0, 0, 1]]
    path.write_text(path.read_text().replace("A1", "99"))
    numbers = CSVTable(str(path), "y", names=["zip"], normalize="none")
    assert numbers.arrays().x.shape == (4, 4)
    with pytest.raises(ConfigError, match=r"'zip' of sample 0 .*must be one of the names"):
        numbers.encode({"age": ["25"], "zip": ["54"]})
    with pytest.raises(ConfigError, match=r"data\.dataset\.names: columns that are features are age, zip, got 'y'"):
        CSVTable(str(path), "y", names=["y"]).arrays()


def test_what_stands_for_nothing_among_numbers_is_no_class_and_no_group(tmp_path):
    """``nan`` was a class, and the lines without a clinic were a clinic."""
    path = tmp_path / "t.csv"
    for column in ("y", "who"):
        path.write_text("age,who,y\n1,3,0\n2,4,1\n".replace("4,1", "nan,1" if column == "who" else "4,nan"))
        with pytest.raises(
            ConfigError, match=rf"line 3 has nothing under '{column}'; fill it in, or take the line out"
        ):
            CSVTable(str(path), "y", group="who").arrays()
    path.write_text("age,who,y\n1,3,a\n2,4,NA\n")
    assert CSVTable(str(path), "y", group="who").arrays().classes == ("NA", "a")  # among names it is one


def test_groups_of_a_table_are_in_the_order_of_their_numbers_and_keep_their_names(tmp_path):
    """Clinic 10 was the third client, between 1 and 2, and nothing said so."""
    path = tmp_path / "t.csv"
    path.write_text("age,clinic,y\n" + "".join(f"{n},{n % 12},{n % 2}\n" for n in range(48)))
    data = FederatedData(CSVTable(str(path), "y", group="clinic"), ByGroup(), 12, cache=str(tmp_path / "cache"))
    for _ in range(2):  # the second time from the cache
        data.setup(0)
        record = data.partition_record()
        assert record["groups"] == [[str(n)] for n in range(12)]
        assert all({n % 12 for own in part.values() for n in own} == {c} for c, part in enumerate(record["clients"]))
        data = FederatedData(CSVTable(str(path), "y", group="clinic"), ByGroup(), 12, cache=str(tmp_path / "cache"))
    torn = FederatedData(CSVTable(str(path), "y", group="clinic"), IID(), 2)
    torn.setup(0)
    assert "groups" not in torn.partition_record()


@pytest.mark.parametrize(
    ("labels", "is_measured"),
    [
        ([n / 10 for n in range(-25, 25)] * 6, True),
        ([n * n for n in range(30)], True),
        ([1.0, 1.3, 1.7, 2.0] * 9, False),
        ([0.5, 1.0, 1.5], True),
        (list(range(15)), False),
        (list(range(30)) * 2, False),
    ],
)
def test_what_is_measured_is_no_class(labels, is_measured):
    given = [str(label) for label in labels] if any(label % 1 for label in labels) else labels
    if is_measured:
        with pytest.raises(ConfigError, match=r"different numbers in \d+ samples; cut what is measured into classes"):
            as_labels(given, "Set")
    else:
        assert len(as_labels(given, "Set")[1]) == len(set(labels))


# --- texts ----------------------------------------------------------------------------------------------------------
def test_words_are_numbered_by_the_training_part():
    tokens = Words(vocabulary=4, length=3).tokens(["b a b", "a b c c c", "", "z"], num_train=2)
    assert tokens.tolist() == [[2, 1, 2], [1, 2, 3], [1, 0, 0], [1, 0, 0]]


def test_texts_in_csv_and_json_lines(tmp_path):
    (tmp_path / "t.csv").write_text('text,label\n"good, good",pos\nbad,neg\n')
    arrays = checked(TextFile(str(tmp_path / "t.csv"), length=4, vocabulary=10))
    assert arrays.x.tolist() == [[2, 2, 0, 0], [3, 0, 0, 0]]
    assert (arrays.classes, arrays.vocabulary_size) == (("neg", "pos"), 10)
    rows = [{"said": "good", "stars": 1, "who": "x"}, {"said": "bad bad", "stars": 0, "who": "y"}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arrays = checked(TextFile(str(tmp_path / "t.jsonl"), "said", "stars", group="who", length=3))
    assert (arrays.y.tolist(), arrays.groups.tolist()) == ([1, 0], [0, 1])
    (tmp_path / "t.jsonl").write_text('{"said": 1}\n{')
    with pytest.raises(ConfigError, match="line 2 is no JSON"):
        TextFile(str(tmp_path / "t.jsonl")).arrays()
    (tmp_path / "t.jsonl").write_text('{"text": "good", "label": 1, "text": "bad"}')  # the last one was taken
    with pytest.raises(ConfigError, match=r"line 1 is no JSON \(it says \"text\" twice\)"):
        TextFile(str(tmp_path / "t.jsonl")).arrays()


def test_a_tokenizer_of_somebody_elses(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "good": 1, "bad": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.csv").write_text("text,label\ngood bad,1\nugly,0\n")
    arrays = checked(TextFile(str(tmp_path / "t.csv"), tokenizer=str(tmp_path / "tokenizer.json"), length=3))
    assert arrays.x.tolist() == [[1, 2, 0], [0, 0, 0]]
    assert arrays.vocabulary_size == 3
    # One that pads and cuts by itself did so to the longest text of all: "ugly" was padding alone.
    made.add_special_tokens(["[PAD]"])
    made.enable_padding(direction="left", pad_id=3, pad_token="[PAD]")
    made.enable_truncation(2)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.csv").write_text("text,label\ngood bad bad bad,1\nugly,0\n")
    dataset = TextFile(str(tmp_path / "t.csv"), tokenizer=str(tmp_path / "tokenizer.json"), length=3)
    assert checked(dataset).x.tolist() == [[1, 2, 2], [0, 3, 3]]
    assert dataset.encode({"text": ["ugly"]}).tolist() == [[0, 3, 3]]
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))  # which knows no word
    assert checked(dataset).x.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_what_a_tokenizer_has_no_number_for(tmp_path):
    """An empty text was its word 1; a word that it does not know a traceback; numbers with gaps out of range."""
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "t.csv").write_text('text,label\ngood bad,1\n"",0\n')
    words = {"[PAD]": 0, "good": 1, "bad": 2, "[UNK]": 40}
    gaps = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    pieces = tokenizers.models.Unigram([("[PAD]", 0.0), ("good", -1.0), ("bad", -1.0), ("?", -9.0)], unk_id=3)
    known = tokenizers.models.WordLevel({"[PAD]": 0, "good": 1, "bad": 2}, unk_token="[UNK]")
    for model, empty, size in ((gaps, 40, 41), (pieces, 3, 4), (known, 0, 3)):
        made = tokenizers.Tokenizer(model)
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.save(str(tmp_path / "tokenizer.json"))
        dataset = TextFile(str(tmp_path / "t.csv"), tokenizer=str(tmp_path / "tokenizer.json"), length=2)
        arrays = checked(dataset)
        assert (arrays.x.tolist(), arrays.vocabulary_size) == ([[1, 2], [empty, 0]], size)
        assert dataset.encode({"text": ["", "bad"]}).tolist() == [[empty, 0], [2, 0]]
    with pytest.raises(
        ConfigError, match=r"^data\.dataset\.tokenizer: \S+ does not encode the texts \(WordLevel error: "
    ):
        dataset.encode({"text": ["ugly"]})


# --- other libraries ------------------------------------------------------------------------------------------------
def test_a_torch_data_set():
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    arrays = checked(TorchDataset(TensorDataset(x[:8], y[:8]), TensorDataset(x[8:], y[8:]), normalize="none"))
    assert (arrays.num_train, arrays.classes) == (8, ("0", "1", "2"))
    assert torch.equal(arrays.x, x)
    with pytest.raises(ConfigError, match="sample 0 of TensorDataset must be"):
        TorchDataset(TensorDataset(x)).arrays()


@pytest.mark.parametrize("sample", [{"pixels": torch.zeros(4), "label": 1}, "ab"])
def test_two_names_are_no_input_and_label(sample):
    """Of a mapping Python unpacks the keys: the line was that the inputs are no numbers."""
    with pytest.raises(ConfigError, match=rf"sample 0 of list must be \(input, label\), got '{type(sample).__name__}'"):
        TorchDataset([sample]).arrays()


class Jitters(TensorDataset):
    """Adds noise of one of the global streams to every sample that it gives."""

    def __init__(self, draw):
        super().__init__(torch.ones(12, 4), torch.arange(12) % 3)
        self.draw = draw

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + float(self.draw()), y


DRAWS = {"torch": lambda: torch.rand(()), "numpy": np.random.rand, "python": random.random, "none": float}


@pytest.mark.parametrize("stream", DRAWS)
def test_transforms_that_draw_are_frozen_with_a_line(stream, capsys):
    seed_global_streams(3, "test")
    arrays = TorchDataset(Jitters(DRAWS[stream]), normalize="none").arrays()
    following = DRAWS[stream]()
    said = "data.dataset.train: Jitters gives a sample otherwise when it is asked again, and is asked once"
    assert capsys.readouterr().err.count(said) == (stream != "none")
    seed_global_streams(3, "test")
    assert [float(DRAWS[stream]()) for _ in range(12)] == pytest.approx((arrays.x[:, 0] - 1).tolist(), abs=1e-6)
    assert DRAWS[stream]() == following  # asking again moves no stream


def test_a_torch_data_set_that_cannot_give_a_sample_names_it():
    class Torn(TensorDataset):
        def __getitem__(self, index):
            if index == 5:
                raise OSError("cannot read 5.png")
            return super().__getitem__(index)

    said = r"^data\.dataset\.train: sample 5 of Torn raises OSError: cannot read 5\.png$"
    with pytest.raises(ConfigError, match=said):
        TorchDataset(Torn(torch.randn(12, 4), torch.arange(12) % 3)).arrays()


@pytest.mark.parametrize(
    ("length", "said"), [(3.0, "TypeError: 'float' "), (None, "NotImplementedError: nobody knows")]
)
def test_a_torch_data_set_without_a_length_is_refused(length, said):
    """What its `__len__` raises was a traceback."""

    class Endless(TensorDataset):
        def __len__(self):
            if length is None:
                raise NotImplementedError("nobody knows")
            return length

    said = rf"^data\.dataset\.train: must have a length; a stream has none \({said}.*, got 'Endless'$"
    with pytest.raises(ConfigError, match=said):
        TorchDataset(Endless(torch.randn(3, 4), torch.arange(3))).arrays()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_sample_is_named_that_holds_what_is_no_number(tmp_path, value):
    """It is looked for before features are scaled: one of them makes all of its column NaN."""
    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 2
    x[7, 2] = value
    np.savez(tmp_path / "a.npz", x=x, y=y)
    inputs = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    for dataset in (ArrayFile(str(tmp_path / "a.npz")), ArrayFile(str(tmp_path / "a.npz"), 5), TorchDataset(inputs)):
        with pytest.raises(ConfigError, match=rf"^data\.dataset: sample 7 holds {value}; inputs must be finite$"):
            dataset.arrays()


def test_parts_of_a_torch_data_set_that_do_not_go_together():
    """An empty training part leaves the test part where it is."""
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    none, some = TensorDataset(x[:0], y[:0]), TensorDataset(x, y)
    for name, parts in (("train", (none, some)), ("test", (some, none))):
        with pytest.raises(ConfigError, match=rf"data\.dataset\.{name}: is empty"):
            TorchDataset(*parts).arrays()
    with pytest.raises(ConfigError, match=r"those of train, \[4\], got \[3\]"):
        TorchDataset(some, TensorDataset(x[:, :3], y)).arrays()


@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        (torch.uint8, torch.float32, r"test: inputs must be of the type of those of train, uint8, .*got 'float32'"),
        (torch.float32, torch.int64, r"test: inputs must be of the type of those of train, float32, .*got 'int64'"),
    ],
)
def test_bytes_and_shares_of_one_are_not_mixed(train, test, said):
    """Together they would be floats, and pixels of 0 to 1 all black beside those of 0 to 255."""
    parts = [TensorDataset(torch.ones(4, 3, 4, 4, dtype=dtype), torch.arange(4) % 2) for dtype in (train, test)]
    with pytest.raises(ConfigError, match=said):
        TorchDataset(*parts).arrays()
    with pytest.raises(ConfigError, match=r"train: inputs must be of one type: sample 4 is"):
        TorchDataset(parts[0] + parts[1]).arrays()
    assert len(checked(TorchDataset(parts[0], ConcatDataset(parts[:1]))).y) == 8


def test_parts_of_a_torch_data_set_whose_classes_have_other_places_are_refused():
    """torchvision's ImageFolder numbers the folders that it finds: without one of them, all that follow move up."""
    parts = [TensorDataset(torch.zeros(6, 4), torch.arange(6) % size) for size in (3, 2, 3)]
    for part, names in zip(parts, (["ant", "bee", "cow"], ["ant", "cow"], ("ant", "bee", "cow")), strict=True):
        part.classes = names
    with pytest.raises(ConfigError, match=r"test: must have the classes of train, ant, bee, cow, .*got 'ant, cow'"):
        TorchDataset(parts[0], parts[1]).arrays()
    assert checked(TorchDataset(parts[0], parts[2])).classes == ("ant", "bee", "cow")


def named(labels, classes=("ant", "bee", "cow"), **attributes):
    """A data set of torch's that says what its classes are called."""
    part = TensorDataset(torch.arange(4.0 * len(labels)).reshape(-1, 4), torch.tensor(labels))
    vars(part).update(attributes, classes=list(classes))
    return part


@pytest.mark.parametrize(
    ("parts", "classes"),
    [
        ([named([0, 1, 2]), named([1, 1])], ("ant", "bee", "cow")),
        ([Subset(named([2, 0, 1, 1]), [0, 1, 2])], ("ant", "bee", "cow")),
        ([ConcatDataset([named([0, 1]), named([2])])], ("ant", "bee", "cow")),
        ([named([0, 1, 2]), TensorDataset(torch.zeros(2, 4), torch.tensor([0, 1]))], ("0", "1", "2")),
        ([named([0, 1, 2], target_transform=lambda label: 2 - label)], ("0", "1", "2")),
        ([named([0, 1, 2], transform=None, transforms=lambda x, label: (x, 2 - label))], ("0", "1", "2")),
        ([named([0, 1])], ("0", "1")),
        ([named([0, 1, 2], ["ant", "ant", "bee"])], ("0", "1", "2")),
        ([named([0, 1], [["ant", "bee"], ["cow"]])], ("0", "1")),
    ],
    ids=["two parts", "subset", "a row", "one is silent", "target transform", "of both", "fewer", "twice", "no names"],
)
def test_classes_of_a_torch_data_set_go_by_its_names_where_they_are_those_of_its_labels(parts, classes):
    assert checked(TorchDataset(*parts)).classes == classes


def test_names_under_a_data_set_of_ones_own_are_not_those_of_its_labels():
    """It may have made other classes of them."""

    class Turned(torch.utils.data.Dataset):
        dataset = named([0, 1, 2])

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return self.dataset[index][0], 2 - self.dataset[index][1]

    assert checked(TorchDataset(Turned())).classes == ("0", "1", "2")


def test_torchvisions_data_sets_of_pil_images():
    from torchvision.datasets import FakeData

    arrays = checked(TorchDataset(FakeData(10, (3, 8, 8), num_classes=2, random_offset=1)))
    assert (arrays.x.dtype, arrays.x.shape) == (torch.uint8, (10, 3, 8, 8))


@pytest.mark.parametrize(
    ("size", "channels"), [((8, 8), 2), ((5, 3), 3), ((6, 4), 3)], ids=["grey with alpha", "3", "4"]
)
@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
def test_channels_of_pil_images_are_their_last_axis(size, channels):
    """By the numbers alone two channels, and three of as many rows, were taken for columns."""
    Image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (2, size[1], size[0], channels), dtype=np.uint8)
    images = [Image.fromarray(own, {2: "LA", 3: "RGB"}[channels]) for own in pixels]
    arrays = checked(TorchDataset([(image, n) for n, image in enumerate(images)]))
    assert np.array_equal(arrays.x, pixels.transpose(0, 3, 1, 2))


@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_data_set_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "who": datasets.Value("int64"),
        }
    )
    rows = {"text": ["a b", "b", "c"], "label": [1, 0, 1], "who": [7, 7, 9]}
    whole = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(str(tmp_path / "set"))
    arrays = checked(HuggingFace(str(tmp_path / "set"), input="text", group="who", length=2))
    assert (arrays.num_train, arrays.classes, arrays.y.tolist()[:3]) == (3, ("no", "yes"), [1, 0, 1])
    assert arrays.groups.tolist() == [0, 0, 1] * 2
    vectors = datasets.Dataset.from_dict({"v": [[1.0, 2.0], [3.0, 4.0]], "label": [0, 1]})
    vectors.save_to_disk(str(tmp_path / "vectors"))
    arrays = checked(HuggingFace(str(tmp_path / "vectors"), input="v", test=None, normalize="none"))
    assert arrays.x.tolist() == [[1, 2], [3, 4]]
    missing = datasets.Dataset.from_dict({"text": [None, "none", "a"], "label": [0, 1, 0]})
    missing.save_to_disk(str(tmp_path / "missing"))
    dataset = HuggingFace(str(tmp_path / "missing"), input="text", test=None, length=2)
    assert checked(dataset).x.tolist() == [[1, 0], [3, 0], [2, 0]]
    assert dataset.encode({"text": [None, "a"]}).tolist() == [[1, 0], [2, 0]]
    with pytest.raises(ConfigError, match=r"data.dataset.test: splits are train, .*got 'tests'"):
        HuggingFace(str(tmp_path / "set"), input="text", test="tests").arrays()
    datasets.Dataset.from_dict({"v": [{"a": 1}, {"a": 2}], "label": [0, 1]}).save_to_disk(str(tmp_path / "odd"))
    with pytest.raises(ConfigError, match=r"data.dataset.input: must be images, texts or lists of numbers, got 'dict'"):
        HuggingFace(str(tmp_path / "odd"), input="v", test=None).arrays()
    with pytest.raises(ConfigError, match=r"data.dataset.input: columns are v, label"):
        HuggingFace(str(tmp_path / "vectors"), input="image").arrays()
    turned = whole.cast_column("label", datasets.ClassLabel(names=["yes", "no"]))  # what was no is yes
    renamed = whole.rename_column("label", "answer")
    for name, other, said in (
        ("turned", turned, "no, yes, .*got 'yes, no'"),
        ("renamed", renamed, "columns are text, "),
    ):
        datasets.DatasetDict({"train": whole, "test": other}).save_to_disk(str(tmp_path / name))
        with pytest.raises(ConfigError, match=rf"^data\.dataset\.(test|label): .*{said}"):
            HuggingFace(str(tmp_path / name), input="text").arrays()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shown", ["torch", "numpy", "pandas", "arrow"])
def test_what_a_hugging_face_data_set_is_shown_as_changes_nothing(shown, tmp_path):
    """Float64 came as float32 before it was scaled, None as the word nan, and columns not shown were missing."""
    datasets = pytest.importorskip("datasets")
    large = [[1.7e9 + step / 7, float(step)] for step in range(12)]
    made = {"v": large, "text": ["good film", None, "bad"] * 4, "label": [0, 1, 0] * 4}
    whole = datasets.Dataset.from_dict(made)
    whole.save_to_disk(str(tmp_path / "plain"))
    whole.with_format(shown, columns=["v"]).save_to_disk(str(tmp_path / "shown"))
    for options in ({"input": "v"}, {"input": "text", "length": 2}):
        plain, other = (checked(HuggingFace(str(tmp_path / n), test=None, **options)) for n in ("plain", "shown"))
        assert torch.equal(plain.x, other.x)
        assert torch.equal(plain.y, other.y)


@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_data_set_that_grew_on_the_hub_is_decoded_anew(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    texts = ["a", "b", "a b"]
    made = [datasets.Dataset.from_dict({"text": texts[:size], "label": [0, 1, 1][:size]}) for size in (2, 3)]

    def loaded():
        return load(HuggingFace("who/what", input="text", test=None), tmp_path / "cache")

    for revision, own in enumerate(made):
        folder = str(tmp_path / str(revision))
        datasets.DatasetDict({"train": own}).save_to_disk(folder)
        monkeypatch.setattr(datasets, "load_dataset", lambda path, name, kept=folder: datasets.load_from_disk(kept))
        for _ in range(2):
            assert len(loaded().y) == len(own)
        assert len(list((tmp_path / "cache").iterdir())) == revision + 1
    for own in made:  # of one that lies in memory alone nothing tells the revision
        monkeypatch.setattr(datasets, "load_dataset", lambda path, name, kept=own: datasets.DatasetDict(train=kept))
        assert len(loaded().y) == len(own)


@pytest.mark.parametrize(("mode", "shape"), [("P", (3, 8, 8)), ("1", (1, 8, 8)), ("I;16", (1, 8, 8))])
def test_pictures_of_other_depths(mode, shape):
    """A palette gives its colours, not their places in it; 16 bits are scaled to 8."""
    Image = pytest.importorskip("PIL.Image")
    if mode == "I;16":
        image = Image.fromarray((np.arange(64, dtype=np.uint16) * 1040).reshape(8, 8))
        expected = (np.arange(64) * 1040 / 257).round().reshape(1, 8, 8)
    else:
        colours = Image.new("RGB", (8, 8), (255, 0, 0))
        image = colours.quantize(4) if mode == "P" else Image.new("1", (8, 8), 1)
        expected = np.stack([np.full((8, 8), own) for own in ((255, 0, 0) if mode == "P" else (255,))])
    assert image.mode == mode
    arrays = checked(TorchDataset([(image, 0), (image, 1)]))
    assert arrays.x.shape == (2, *shape)
    assert np.array_equal(arrays.x[0].numpy(), expected)
    with pytest.raises(ConfigError, match=r"data\.dataset\.train: sample 0: its pixels are 32-bit"):
        TorchDataset([(Image.new("F", (8, 8)), 0)]).arrays()


def test_16_bits_in_folders_of_images(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        Image.fromarray((np.arange(64, dtype=np.uint16) * 1040).reshape(8, 8)).save(tmp_path / label / "0.png")
    arrays = checked(ImageFolder(str(tmp_path), grayscale=True))
    assert np.array_equal(arrays.x[0, 0].numpy(), (np.arange(64) * 1040 / 257).round().reshape(8, 8))


def test_images_of_numbers_are_scaled_by_the_channel():
    """A pixel that is nearly always 0 is no feature of its own."""
    x = torch.rand(50, 2, 4, 4)
    x[1:, :, 0, 0] = 0
    arrays = checked(TorchDataset(TensorDataset(x, torch.arange(50) % 2)))
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), correction=0, keepdim=True)
    assert torch.allclose(arrays.x, (x - mean) / std, atol=1e-5)
    with pytest.raises(ConfigError, match=r"data\.dataset\.normalize: is for images of bytes"):
        TorchDataset(TensorDataset(x, torch.arange(50) % 2), normalize="half").arrays()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,a,y\n1,2,0\n3,4,1\n", "has two columns of one name, got 'a'"),
        ("a,b,y\n1,?,0\n3,4,1\n", "line 2 has nothing under 'b'"),
        ("a,b,y\n1,2,0\nNA,4,1\n", "line 3 has nothing under 'a'"),
        ('a,b,y\n\n1,2,0\n"3",,1\n', "t.csv: line 4 has nothing under 'b'"),  # lines as editors count them
        ('a,b,y\n"x\ny",2,0\nz,3\n', "t.csv: line 4 has 2 cells"),
    ],
)
def test_tables_that_lack_something(tmp_path, text, said):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ConfigError, match=said):
        CSVTable(str(tmp_path / "t.csv"), "y").arrays()


def test_a_mark_for_nothing_is_a_name_among_names(tmp_path):
    (tmp_path / "t.csv").write_text("a,y\nx,0\n?,1\n")
    assert checked(CSVTable(str(tmp_path / "t.csv"), "y", normalize="none")).x.shape == (2, 2)


def test_parts_of_arrays_that_do_not_go_together(tmp_path):
    y, bytes_, floats = np.arange(4) % 2, np.ones((4, 1, 2, 2), dtype=np.uint8), np.ones((4, 1, 2, 2), dtype=np.float32)
    np.savez(tmp_path / "a.npz", x_train=floats, y_train=y, x_test=bytes_, y_test=y)
    with pytest.raises(ConfigError, match="must be of one type, got 'float32, uint8'"):
        ArrayFile(str(tmp_path / "a.npz")).arrays()
    np.savez(tmp_path / "b.npz", x=floats, y=y)
    with pytest.raises(ConfigError, match=r"data\.dataset"):
        checked(ArrayFile(str(tmp_path / "b.npz"), num_train=0))


@pytest.mark.parametrize("name", ["x", "y"])
def test_parts_of_arrays_of_other_shapes_are_refused(tmp_path, name):
    parts = {"x_train": np.ones((4, 3)), "y_train": np.arange(4), "x_test": np.ones((2, 3)), "y_test": np.arange(2)}
    np.savez(tmp_path / "a.npz", **{**parts, f"{name}_test": np.ones((2, 5))})
    with pytest.raises(ConfigError, match=rf"path: {name}_train and {name}_test must have samples of one shape"):
        ArrayFile(str(tmp_path / "a.npz")).arrays()


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (["a", None, "b"], r"sample 1 \(from 0\) is of no group"),
        ([0.0, 1.0, np.nan], r"sample 2 \(from 0\) is of no group"),
        ([{"a": 1}, 2, 3], "all of one type; are dict, int"),
    ],
)
def test_samples_without_a_group_are_refused(groups, said):
    """Those of no number were one group, and those of None ended in a traceback."""
    with pytest.raises(ConfigError, match=rf"data\.dataset: Set: .*{said}"):
        as_groups(groups, "Set")
    numbers, names = as_groups(["b", "a", "b"], "Set")
    assert (numbers.tolist(), names) == ([1, 0, 1], ("a", "b"))


@pytest.mark.parametrize("made", [lambda x: x.to_sparse(), lambda x: torch.quantize_per_tensor(x, 1, 0, torch.qint8)])
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_no_plain_numbers_are_refused(made):
    with pytest.raises(ConfigError, match=r"^data\.dataset: a tensor must hold its numbers one by one"):
        as_inputs(made(torch.eye(3)), "Set")
    assert as_labels(torch.tensor([2, 1]), "Set")[0].tolist() == [2, 1]


def test_a_column_that_is_not_there_cannot_be_left_out(tmp_path):
    """A name of a patient that was misspelt here stayed a feature."""
    (tmp_path / "t.csv").write_text("id,age,y\n1,20,0\n2,30,1\n")
    assert checked(CSVTable(str(tmp_path / "t.csv"), "y", leave_out=["id"])).x.shape == (2, 1)
    with pytest.raises(ConfigError, match=r"data\.dataset\.leave_out: columns are id, age, y, got 'idd'"):
        CSVTable(str(tmp_path / "t.csv"), "y", leave_out=["idd"]).arrays()


def test_a_column_of_more_names_than_fit_into_memory_is_refused(tmp_path, monkeypatch):
    """60,000 different numbers of patients were 60,000 features, which took all memory and ended the process."""
    (tmp_path / "t.csv").write_text("who,age,y\n" + "".join(f"p{n},{n},{n % 2}\n" for n in range(50)))
    assert checked(CSVTable(str(tmp_path / "t.csv"), "y", normalize="none")).x.sum(0).tolist() == [1] * 50 + [1225]
    monkeypatch.setattr(cells, "free_memory", lambda: 50_000)
    with pytest.raises(ConfigError, match=r"data\.dataset\.leave_out: 'who' has 50 different values, and a feature"):
        CSVTable(str(tmp_path / "t.csv"), "y").arrays()
    assert checked(CSVTable(str(tmp_path / "t.csv"), "y", leave_out=["who"])).x.shape == (50, 1)


@pytest.mark.parametrize("wraps", ["one", "both", "row"])
def test_classes_of_a_part_of_a_data_set_are_those_of_the_whole(wraps):
    """Behind a Subset, bee of the test part was ant of the training part."""

    class Animals(torch.utils.data.Dataset):
        def __init__(self, classes):
            self.classes = classes

        def __len__(self):
            return 6

        def __getitem__(self, index):
            return np.full(2, index, dtype=np.float32), index % 3

    def wrapped(classes, wraps):
        made = Animals(classes)
        made = torch.utils.data.ConcatDataset([made, made]) if wraps == "row" else made
        return torch.utils.data.Subset(made, range(6)) if wraps else made

    train, test = ["ant", "bee", "cat"], ["bee", "cat", "dog"]
    with pytest.raises(ConfigError, match=r"test: must have the classes of train, ant, bee, cat, in their order"):
        TorchDataset(wrapped(train, wraps), wrapped(test, "" if wraps == "one" else wraps)).arrays()
    assert TorchDataset(wrapped(train, wraps), wrapped(train, wraps)).arrays().num_train == 6
    with pytest.raises(ConfigError, match=r"train: data sets in a row must have the same classes"):
        TorchDataset(torch.utils.data.ConcatDataset([Animals(train), Animals(test)])).arrays()


def test_a_label_that_marks_samples_without_one_is_refused(tmp_path):
    """Of three names and labels 0, 1 and -1, all were shifted by one, and those without a label trained as class 0."""
    datasets = pytest.importorskip("datasets")
    labels = datasets.ClassLabel(names=["yes", "perhaps", "no"])
    features = datasets.Features({"v": datasets.Sequence(datasets.Value("float32")), "label": labels})
    rows = {"v": [[float(n), 0.0] for n in range(4)], "label": [0, 1, -1, 0]}
    made = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(ConfigError, match=r"HuggingFace: sample 2 \(from 0\) has -1, which stands for no class"):
        HuggingFace(str(tmp_path / "set"), input="v", test=None).arrays()
    assert as_labels([-1, 0, 1], "Set", ["bad", "so so", "good"])[0].tolist() == [0, 1, 2]  # a scale of one's own


def test_a_scale_in_a_data_set_of_hugging_faces_is_one(tmp_path):
    """Labels of -1 and 1 were refused where no name says that a number is a place, and taken from arrays and tables."""
    datasets = pytest.importorskip("datasets")
    rows = {"v": [[float(n), 0.0] for n in range(4)], "label": [1, -1, -1, 1]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "set"))
    arrays = checked(HuggingFace(str(tmp_path / "set"), input="v", test=None))
    assert (arrays.y.tolist(), arrays.classes) == ([1, 0, 0, 1], ("-1", "1"))


@pytest.mark.parametrize(
    ("labels", "refused"),
    [
        ([2, 0, -100, 1], True),  # torch's ignore_index
        ([-100, 0], True),
        ([2, 0, -1, 1], True),
        ([0, 1, -1], False),  # a scale
        ([-1, 1], False),
        ([-2, -1, 0, 1, 2], False),
    ],
)
def test_labels_that_mark_samples_without_a_class_are_no_class(labels, refused):
    """They were one, which moved all others by one."""
    if refused:
        with pytest.raises(ConfigError, match=r"Set: sample \d \(from 0\) has -1(00)?, which marks samples"):
            as_labels(labels, "Set")
    else:
        assert as_labels(labels, "Set")[1] == tuple(map(str, sorted(labels)))


def test_arrays_of_hugging_face_are_of_their_declared_type(tmp_path):
    """Bytes came as whole numbers of 64 bits, and rows of an image that is no square were its channels."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Array3D((8, 10, 3), "uint8"), "label": datasets.Value("int64")})
    rows = {"image": [np.full((8, 10, 3), n, dtype=np.uint8) for n in range(4)], "label": [0, 1, 0, 1]}
    made = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "set"))
    arrays = checked(HuggingFace(str(tmp_path / "set"), test=None))
    assert (arrays.x.dtype, tuple(arrays.x.shape)) == (torch.uint8, (4, 3, 8, 10))


@pytest.mark.parametrize("broken", ["image", "array"])
def test_a_sample_of_hugging_face_that_cannot_be_read_is_named(tmp_path, broken):
    """It was a traceback of the library's, of PIL's or of NumPy's."""
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    good = (tmp_path / "a.png").read_bytes()
    whole, cut = {"bytes": good, "path": None}, {"bytes": good[:40], "path": None}
    rows_of = {"image": (whole, cut), "array": ([[1, 2], [3, 4]], None)}
    kind = datasets.Array2D((2, 2), "uint8") if broken == "array" else datasets.Image()
    good, odd = rows_of[broken]
    features = datasets.Features({"image": kind, "label": datasets.Value("int64")})
    rows = {"image": [good, good, good, odd], "label": [0, 1, 0, 1]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "set"))
    said = {"image": r"UnidentifiedImageError: cannot identify image file\)$", "array": "TypeError: "}[broken]
    said = rf"^data\.dataset\.input: sample 3 \(from 0\) cannot be read \({said}"
    with pytest.raises(ConfigError, match=said):
        HuggingFace(str(tmp_path / "set"), test=None).arrays()


@pytest.mark.parametrize(("folders", "num_train", "unread"), [(("valid",), 2, ""), (("test", "val"), 2, "val")])
def test_folders_of_images_beside_the_parts_are_told_of(tmp_path, capsys, folders, num_train, unread):
    from PIL import Image

    for part in ("train", *folders):
        for label in ("cat", "dog"):
            (tmp_path / part / label).mkdir(parents=True)
            Image.new("L", (4, 4)).save(tmp_path / part / label / "1.png")
    arrays = checked(ImageFolder(str(tmp_path)))
    assert (len(arrays.y), arrays.num_train) == (4, num_train)
    said = capsys.readouterr()
    assert (f"{tmp_path / 'val'} is not read; move its images" in said.out + said.err) == bool(unread)


def test_images_that_are_in_no_class_and_classes_without_images_are_told_of(tmp_path, capsys):
    from PIL import Image

    for part in ("train", "test"):
        for label in ("cat", "dog", "owl"):
            (tmp_path / part / label).mkdir(parents=True)
            if label != "owl":
                Image.new("L", (4, 4)).save(tmp_path / part / label / "1.png")
    assert checked(ImageFolder(str(tmp_path))).classes == ("cat", "dog")
    said = capsys.readouterr().err
    assert said.count("without an image of its own: owl; put images there if they are to count") == 2
    assert "beside" not in said
    Image.new("L", (4, 4)).save(tmp_path / "test" / "1.png")
    checked(ImageFolder(str(tmp_path)))
    assert f"images beside the classes' folders in {tmp_path / 'test'} are not read; move" in capsys.readouterr().err


# --- other benchmarks -----------------------------------------------------------------------------------------------
def test_leafs_users_are_groups(tmp_path):
    for part, sizes in (("train", (3, 2)), ("test", (1, 1))):
        (tmp_path / part).mkdir()
        data = {u: {"x": [[float(n)] * 4] * n, "y": [n % 2] * n} for u, n in zip(("u1", "u2"), sizes, strict=True)}
        content = {"users": list(data), "num_samples": list(sizes), "user_data": data}
        (tmp_path / part / "all.json").write_text(json.dumps(content))
        (tmp_path / part / "._all.json").write_bytes(b"\0\5\x16\7")  # what macOS puts beside
    arrays = checked(LEAF(str(tmp_path), shape=[1, 2, 2]))
    assert (arrays.x.shape, arrays.num_train) == ((7, 1, 2, 2), 5)
    clients = matched(ByGroup(), arrays, 2, seed=0)
    assert [(len(own.train), len(own.test)) for own in clients] == [(3, 1), (2, 1)]
    with pytest.raises(ConfigError, match=r"data\.dataset\.shape"):
        LEAF(str(tmp_path), shape=[3]).arrays()
    with pytest.raises(ConfigError, match=r"data\.dataset\.root"):
        LEAF(str(tmp_path / "train")).arrays()
    (tmp_path / "train" / "all.json").write_text(json.dumps({"users": [], "num_samples": [], "user_data": {}}))
    with pytest.raises(ConfigError, match=r"data\.dataset\.root: must hold samples in train"):
        LEAF(str(tmp_path)).arrays()


USER = {"x": [[1.0], [2.0]], "y": [0, 1]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"users": ["a", "a"], "user_data": {"a": USER}},
            "user a is listed twice",
        ),  # half of its tests were trained on
        ({"users": ["a"], "user_data": {"a": USER, "b": USER}}, "user b is in one of users and user_data alone"),
        ({"users": ["a", "b"], "user_data": {"a": USER}}, "user b is in one of users and user_data alone"),
        (
            {"users": ["a"], "num_samples": [7], "user_data": {"a": USER}},
            "user a has 2 samples, and num_samples says 7",
        ),
        ({"users": ["a"], "num_samples": [2, 2], "user_data": {"a": USER}}, "is no file of LEAF's"),
        (
            {"users": ["a"], "user_data": {"a": {**USER, "y": {"0": 1, "1": 0}}}},
            "must have lists of as many samples as",
        ),
        ({"users": ["a"], "user_data": {"a": {**USER, "y": [0]}}}, "must have lists of as many samples as labels"),
    ],
)
def test_leafs_files_that_do_not_hold_together_are_refused(tmp_path, content, said):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"^data\.dataset\.root: .*a\.json.*{said}"):
        LEAF(str(tmp_path)).arrays()
    (tmp_path / "train" / "a.json").write_text(
        '{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": [0]}, "a": {"x": [], "y": []}}}'
    )
    with pytest.raises(ConfigError, match=r'a\.json.*it says "a" twice'):
        LEAF(str(tmp_path)).arrays()


@pytest.mark.parametrize(
    "data",
    [
        {"x": 3, "y": 3},
        {"x": None, "y": None},
        {"x": np.zeros((2, 4)), "y": np.zeros((2, 3))},
        {"x": RAGGED, "y": [0, 1]},
        {"x": np.zeros((2, 4)), "y": RAGGED},
        {"x": np.array(["a", "b"]), "y": [0, 1]},
    ],
)
def test_pfllibs_files_that_hold_something_else_are_refused(tmp_path, data):
    (tmp_path / "train").mkdir()
    np.savez(tmp_path / "train" / "0.npz", data=data)
    np.savez(tmp_path / "train" / "²", data=data)  # a digit, and no number
    with pytest.raises(ConfigError, match=r"^data\.dataset"):
        PFLlibFolder(str(tmp_path)).arrays()


def test_pfllibs_clients_have_what_they_have_there(tmp_path):
    rng = np.random.default_rng(0)
    content = {}
    for part, size in (("train", 6), ("test", 2)):
        (tmp_path / part).mkdir()
        for client in range(11):
            x = rng.standard_normal((size, 1, 4, 4)).astype(np.float32)
            content[part, client] = x
            np.savez_compressed(tmp_path / part / f"{client}.npz", data={"x": x, "y": np.full(size, client % 3)})
    arrays = checked(PFLlibFolder(str(tmp_path)))
    assert arrays.classes == ("0", "1", "2")
    clients = matched(ByGroup(), arrays, 11, seed=3)
    for client, own in enumerate(clients):
        assert np.array_equal(arrays.x[own.train].numpy(), content["train", client])
        assert np.array_equal(arrays.x[own.test].numpy(), content["test", client])
    np.savez_compressed(tmp_path / "test" / "0.npz", data={"x": np.array([]), "y": np.array([])})
    assert [len(own.test) for own in matched(ByGroup(), checked(PFLlibFolder(str(tmp_path))), 11, seed=3)][:2] == [0, 2]
    np.savez_compressed(tmp_path / "test" / "5.npz", data={"x": np.zeros((1, 3, 4, 4)), "y": np.zeros(1)})
    with pytest.raises(ConfigError, match=r"5\.npz: samples must have the shape of the others, \[1, 4, 4\]"):
        PFLlibFolder(str(tmp_path)).arrays()


def test_fl_benchs_partition(tmp_path, make_arrays):
    indices = [
        {"train": np.array([0, 2]), "val": np.array([], dtype=int), "test": np.array([4])},
        {"train": [1], "test": [3]},
    ]
    with (tmp_path / "partition.pkl").open("wb") as file:
        pickle.dump({"separation": {"train": [0, 1], "total": 2}, "data_indices": indices}, file)
    clients = from_file(FromFile(str(tmp_path / "partition.pkl")), make_arrays([4, 4]), 2, seed=0)
    assert [[own.train.tolist(), own.test.tolist()] for own in clients] == [[[0, 2], [4]], [[1], [3]]]


# --- less of a data set ---------------------------------------------------------------------------------------------
class Uneven(Dataset):
    """Classes of 30, 20 and 10 training samples and of 6, 4 and 2 test samples; x tells which one each is."""

    def arrays(self):
        y = torch.arange(3).repeat_interleave(torch.tensor([30, 20, 10]))
        y = torch.cat([y, torch.arange(3).repeat_interleave(torch.tensor([6, 4, 2]))])
        x = torch.arange(72.0)[:, None]
        return Arrays(x, y, 60, ("a", "b", "c"), groups=torch.arange(72))


def test_a_sample_has_every_class_of_both_parts_in_its_share():
    arrays = checked(Sample(Uneven(), 36))
    train, test = arrays.y[: arrays.num_train], arrays.y[arrays.num_train :]
    assert train.bincount().tolist() == [15, 10, 5]
    assert test.bincount().tolist() == [3, 2, 1]
    taken = arrays.x[:, 0].long()
    assert taken.diff().min() > 0  # in the whole set's order, none twice
    assert torch.equal(arrays.groups, taken)
    assert torch.equal(Uneven().arrays().y[taken], arrays.y)
    assert torch.equal(checked(Sample(Uneven(), 36)).x, arrays.x)
    assert not torch.equal(checked(Sample(Uneven(), 36, draw=1)).x, arrays.x)
    assert torch.equal(checked(Sample(Uneven(), 72)).x, Uneven().arrays().x)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"samples": 0}, "^data.dataset.samples: must be >= 1, got 0"),
        ({"samples": 73}, "^data.dataset.samples: must be at most 72, all that there are, got 73"),
        ({"samples": 5, "draw": -1}, "^data.dataset.draw: must be >= 0, got -1"),
    ],
)
def test_samples_that_cannot_be_drawn_are_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        Sample(Uneven(), **arguments).arrays()


# --- what must not be lost in silence -------------------------------------------------------------------------------
def test_large_numbers_keep_their_differences_until_they_are_scaled(tmp_path):
    """Times in seconds since 1970 differ in float64 by what float32 rounds away."""
    seconds = 1.7e9 + np.arange(60.0)
    expected = (seconds - seconds.mean()) / seconds.std()
    (tmp_path / "t.csv").write_text("time,y\n" + "".join(f"{s:.0f},{i % 2}\n" for i, s in enumerate(seconds)))
    np.savez(tmp_path / "a.npz", x=seconds[:, None], y=np.arange(60) % 2)
    torch.save({"x": torch.from_numpy(seconds)[:, None], "y": torch.arange(60) % 2}, tmp_path / "a.pt")
    for dataset in (
        CSVTable(str(tmp_path / "t.csv"), "y"),
        *(ArrayFile(str(tmp_path / f"a.{e}")) for e in ("npz", "pt")),
    ):
        assert checked(dataset).x.flatten().numpy() == pytest.approx(expected, abs=1e-5)
    assert checked(CSVTable(str(tmp_path / "t.csv"), "y", normalize="none")).x.dtype == torch.float32


@pytest.mark.parametrize("made", ["bfloat16", "with a gradient"])
def test_tensors_that_numpy_does_not_take_are_taken(tmp_path, made):
    x = torch.linspace(-1, 1, 12).view(6, 2)
    x = x.bfloat16() if made == "bfloat16" else x.requires_grad_()
    torch.save({"x": x, "y": torch.arange(6) % 2}, tmp_path / "a.pt")
    parts = {"x_train": x[:4], "x_test": x[4:], "y_train": torch.arange(4) % 2, "y_test": torch.arange(2) % 2}
    torch.save(parts, tmp_path / "b.pt")
    expected = x.detach().float()
    for name in ("a.pt", "b.pt"):
        assert torch.equal(checked(ArrayFile(str(tmp_path / name), normalize="none")).x, expected)
    both = TorchDataset(TensorDataset(x, torch.arange(6) % 2), normalize="none")
    assert torch.equal(checked(both).x, expected)


def test_labels_of_several_numbers_are_refused():
    one_hot = TensorDataset(torch.zeros(4, 2), torch.eye(2).repeat(2, 1))
    with pytest.raises(
        ConfigError, match=r"data.dataset.train: label of sample 0 must be one class, is of shape.*\[2\]"
    ):
        TorchDataset(one_hot).arrays()


def test_a_class_without_a_known_image_is_refused(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / label / "0.png")
    (tmp_path / "owl").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "labels.xml").write_text("<a/>")
    assert checked(ImageFolder(str(tmp_path))).classes == ("cat", "dog")  # neither is a folder of images
    (tmp_path / "owl" / "0.jfif").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"those of this one cannot be read; convert them \(.bmp, .*owl"):
        ImageFolder(str(tmp_path)).arrays()


def test_words_are_of_any_alphabet(tmp_path):
    texts = ["очень хорошо", "очень плохо", "très naïf", "it's 很好"]
    tokens = Words(vocabulary=20, length=2).tokens(texts, 4)
    assert len({tuple(row) for row in tokens.tolist()}) == 4
    assert tokens.min() >= 2  # nobody's word is unknown
    signs = Words(vocabulary=20, length=2).tokens(["दिन", "दान", "देन", "दीन", "cafe\u0301", "café", "cafe"], 7)
    assert (signs[:, 1] == 0).all()  # one word each
    assert len(set(signs[:, 0].tolist())) == 6


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("t.csv", "good,\n"),
        ("t.jsonl", '{"text": "good", "label": null}\n'),
        ("t.jsonl", '{"text": "good", "label": NaN}\n'),  # as pandas' missing cells are written
    ],
)
def test_a_text_without_a_class_is_refused(tmp_path, name, line):
    head = "text,label\nbad,neg\n" if name == "t.csv" else '{"text": "bad", "label": "neg"}\n'
    (tmp_path / name).write_text(head + line)
    with pytest.raises(ConfigError, match="sample 1 \\(from 0\\) has nothing under 'label'"):
        TextFile(str(tmp_path / name)).arrays()


def test_quotation_marks_in_a_tsv_file_are_letters_where_they_enclose_no_cell(tmp_path):
    lines = ['"Great" he said\tpos', '"never again\tneg', "fine\tpos", '"bad\tneg']
    (tmp_path / "t.tsv").write_text("text\tlabel\n" + "\n".join(lines) + "\n")
    columns = read_columns(tmp_path / "t.tsv", "key")
    assert columns["text"] == ['"Great" he said', '"never again', "fine", '"bad']
    (tmp_path / "t.tsv").write_text('text\tlabel\n"two\nlines"\tpos\n')
    assert read_columns(tmp_path / "t.tsv", "key")["text"] == ["two\nlines"]


def test_two_lone_quotation_marks_in_a_tsv_file_swallow_no_sample(tmp_path):
    (tmp_path / "t.tsv").write_text('text\tlabel\n"Great film\t1\nbad one"\t0\nmeh\t0\n')
    columns = read_columns(tmp_path / "t.tsv", "key")
    assert columns == {"text": ['"Great film', 'bad one"', "meh"], "label": ["1", "0", "0"]}
    (tmp_path / "t.tsv").write_text('text\n"Great film\nbad one"\n')
    with pytest.raises(ConfigError, match=r"key: .*t.tsv is no CSV file .in a file of one column, quotation marks"):
        read_columns(tmp_path / "t.tsv", "key")


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl"])
def test_texts_of_another_encoding_are_refused_and_a_byte_order_mark_is_none(tmp_path, name):
    """Labels that differ in a letter of another encoding were one class."""
    separator = "\t" if name == "t.tsv" else ","
    lines = [("text", "label"), ("a", "caf\xe9"), ("b", "caf\xe8")]
    text = "".join(separator.join(line) + "\n" for line in lines)
    if name == "t.jsonl":
        text = "".join(json.dumps({"text": t, "label": y}, ensure_ascii=False) + "\n" for t, y in lines)
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=rf"data.dataset.path: .*{name}: line 2 is no UTF-8 .byte 0xe9.; save"):
        TextFile(str(tmp_path / name)).arrays()
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert checked(TextFile(str(tmp_path / name))).classes[:2] == ("caf\xe8", "caf\xe9")


def test_what_is_missing_is_no_class_and_nobody():
    """NaN among names was the class ``nan``, and a client of its own."""
    nan = float("nan")
    with pytest.raises(ConfigError, match=r"LEAF: sample 1 \(from 0\) has no class"):
        as_labels(["a", nan, "b"], "LEAF")
    with pytest.raises(ConfigError, match=r"sample 2 \(from 0\) is of no group"):
        as_groups(["a", "b", nan], "Set")
    with pytest.raises(ConfigError, match=r"sample 1 \(from 0\) is of no group"):
        as_groups(torch.tensor([1.0, nan]), "Set")


def test_a_text_in_parts_is_refused(tmp_path):
    """The signs of a list were taken for words."""
    rows = [{"text": ["the", "film"], "label": 0}, {"text": ["a"], "label": 1}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"data\.dataset: a text must be a text; join what is in parts, got \['the'"):
        TextFile(str(tmp_path / "t.jsonl")).arrays()
    (tmp_path / "t.jsonl").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"data\.dataset\.path: .*t.jsonl: line 1 is no JSON"):
        TextFile(str(tmp_path / "t.jsonl")).arrays()


def test_no_text_is_one_without_a_word(tmp_path):
    """It had the place of the word "none"."""
    assert Words(10, 2).tokens(["a", None, "none a"], 2).tolist() == [[2, 0], [1, 0], [1, 2]]
    rows = [{"text": text, "label": n % 2} for n, text in enumerate((None, "none of it", ""))]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = TextFile(str(tmp_path / "t.jsonl"), length=2)
    assert checked(dataset).x.tolist() == [[1, 0], [3, 4], [1, 0]]
    assert dataset.encode({"text": [None, float("nan"), "none"]}).tolist() == [[1, 0], [1, 0], [3, 0]]


def test_an_empty_cell_of_the_test_part_is_said_to_be_there(tmp_path):
    (tmp_path / "t.csv").write_text("a,y\n1,0\n2,1\n")
    (tmp_path / "u.csv").write_text("a,y\n1,0\n,1\n")
    with pytest.raises(ConfigError, match=r"u.csv: line 3 has nothing under 'a'"):
        CSVTable(str(tmp_path / "t.csv"), "y", str(tmp_path / "u.csv")).arrays()


def test_one_number_in_two_writings_is_two_classes(tmp_path):
    (tmp_path / "t.csv").write_text("a,y\n1,01\n2,1\n3,2\n")
    arrays = checked(CSVTable(str(tmp_path / "t.csv"), "y"))
    assert (arrays.classes, arrays.y.tolist()) == (("01", "1", "2"), [0, 1, 2])
    (tmp_path / "t.csv").write_text("a,y\n1,02\n2, 10\n3,10\n")
    assert checked(CSVTable(str(tmp_path / "t.csv"), "y")).classes == ("2", "10")


def test_samples_are_scaled_as_they_were_rounded_in_training(tmp_path):
    """A data set of somebody's own may give float32."""

    class Narrow(CSVTable):
        def arrays(self):
            arrays = super().arrays()
            return arrays if self.normalize == "standard" else replace(arrays, x=arrays.x.float())

    seconds = 1e5 + np.linspace(0, 0.05, 20)
    (tmp_path / "t.csv").write_text("time,y\n" + "".join(f"{s:.6f},{i % 2}\n" for i, s in enumerate(seconds)))
    np.savez(tmp_path / "new.npz", x=seconds[:, None])
    dataset = Narrow(str(tmp_path / "t.csv"), "y")
    new = read_unlabelled(tmp_path / "new.npz", dataset, dataset.arrays()).x
    assert len(new.unique()) == len(torch.from_numpy(seconds).float().unique())


def test_measured_targets_are_no_classes(tmp_path):
    (tmp_path / "t.csv").write_text("\n".join(["x,y,stars", *(f"{n},{n / 7:.3f},{n % 9 / 2}" for n in range(40))]))
    with pytest.raises(ConfigError, match="the labels are 40 different numbers in 40 samples; cut what is measured"):
        CSVTable(str(tmp_path / "t.csv"), "y").arrays()
    assert len(CSVTable(str(tmp_path / "t.csv"), "stars").arrays().classes) == 9  # half stars are classes


@pytest.mark.parametrize("unit", [1.0, 1e-12, 1e-30, 1e30, 1e100])
def test_features_are_scaled_in_whatever_unit_they_are(unit):
    """Of picofarads all were zeros."""
    x = torch.randn(50, 3, dtype=torch.float64) + 2
    constant = torch.full((50, 1), 0.1, dtype=torch.float64)
    expected = (x - x.mean(0)) / x.std(0, correction=0)
    found = scaled(torch.cat([x, constant], 1) * unit, torch.cat([x, constant], 1) * unit)
    torch.testing.assert_close(found[:, :3].double(), expected, rtol=0, atol=1e-6)
    assert found[:, 3].abs().max() < 1e-6 * max(unit, 1)


def test_numbers_whose_squares_are_none_are_refused():
    x = torch.randn(50, 3, dtype=torch.float64) * 1e200
    with pytest.raises(ConfigError, match=r"^data\.dataset: its numbers are too large to be scaled"):
        scaled(x, x)


def test_pythons_own_writing_of_numbers_is_a_name(tmp_path):
    """Age bands `10_20` were the number 1020."""
    (tmp_path / "t.csv").write_text("age,y\n" + "".join(f"{i % 3}0_{i % 3 + 1}0,{i % 2}\n" for i in range(12)))
    assert CSVTable(str(tmp_path / "t.csv"), "y").arrays().x.shape[1] == 3


@pytest.mark.parametrize(
    ("cells", "classes", "y"),
    [
        (("0_1", "0_2"), ("0_1", "0_2"), [0, 1]),  # were 1 and 2, with a class 0 that nobody has
        (("1_2", "12"), ("12", "1_2"), [1, 0]),
        (("1_2", "3"), ("1_2", "3"), [0, 1]),
        (("-1", "+1"), ("-1", "1"), [0, 1]),
        (("1", "2"), ("0", "1", "2"), [1, 2]),
    ],
)
def test_pythons_own_writing_of_numbers_is_a_class_and_a_group_of_that_name(tmp_path, cells, classes, y):
    (tmp_path / "t.csv").write_text("a,y,who\n" + "".join(f"{i},{cells[i % 2]},{cells[i % 2]}\n" for i in range(4)))
    arrays = checked(CSVTable(str(tmp_path / "t.csv"), "y", group="who"))
    assert (arrays.classes, arrays.y.tolist()) == (classes, y * 2)
    assert arrays.group_names == tuple(name for name in classes if name != "0")


@pytest.mark.parametrize("mark", ["#N/A", "nan", "unknown"])
def test_marks_of_no_number_are_found_in_their_line(tmp_path, mark):
    (tmp_path / "t.csv").write_text("age,y\n" + "".join(f"{mark if i == 7 else i},{i % 2}\n" for i in range(12)))
    with pytest.raises(ConfigError, match=r"line 9 has nothing under 'age'"):
        CSVTable(str(tmp_path / "t.csv"), "y").arrays()


def test_a_text_of_any_length_is_cut(tmp_path):
    """Above 131,072 letters the whole file was no CSV file."""
    lines = ["text,label", f"{'good ' * 40_000},yes", "bad,no"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    arrays = checked(TextFile(str(tmp_path / "t.csv"), text="text", label="label", length=3, vocabulary=10))
    assert arrays.x.shape == (2, 3)
    assert csv.field_size_limit() == 131_072


def test_whole_numbers_of_more_than_64_bits_are_names(tmp_path):
    """As floats, two of these users were one."""
    users = [2**63, 2**63 + 1, -1]
    lines = ["a,user,y", *(f"{n},{user},{n % 2}" for n, user in enumerate(users * 2))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    arrays = checked(CSVTable(str(tmp_path / "t.csv"), label="y", group="user"))
    assert sorted(arrays.group_names) == sorted(map(str, users))


def test_labels_of_both_parts_are_of_one_kind(tmp_path):
    """Names in one and numbers in the other were classes that never meet."""
    np.savez(
        tmp_path / "a.npz", x_train=np.ones((4, 2)), y_train=list("abab"), x_test=np.ones((2, 2)), y_test=np.arange(2)
    )
    with pytest.raises(ConfigError, match=r"y_train and y_test must be of one type, got 'str32, int64'"):
        ArrayFile(str(tmp_path / "a.npz")).arrays()


def test_whole_numbers_of_both_parts_stay_whole(tmp_path):
    """Of int64 beside uint64 NumPy made floats: tokens were features, in silence."""
    own = {"x_train": np.ones((4, 2), np.int64), "y_train": [0, 1, 0, 1], "y_test": [0, 1]}
    np.savez(tmp_path / "a.npz", **own, x_test=np.ones((2, 2), np.uint64))
    with pytest.raises(ConfigError, match=r"x_train and x_test must be of one type, got 'int64, uint64'"):
        ArrayFile(str(tmp_path / "a.npz")).arrays()
    np.savez(tmp_path / "a.npz", **own, x_test=np.ones((2, 2), np.uint32))
    assert ArrayFile(str(tmp_path / "a.npz")).arrays().x.dtype == torch.int64


def test_half_a_letter_is_no_label(tmp_path):
    """JSON may hold one; no picture can show it."""
    rows = [{"text": "good", "label": "\\ud800"}, {"text": "bad", "label": "b"}]
    (tmp_path / "t.jsonl").write_text("\n".join(f'{{"text": "{r["text"]}", "label": "{r["label"]}"}}' for r in rows))
    with pytest.raises(ConfigError, match=r"the label '\\ud800' is no text, but half of a letter of UTF-16"):
        TextFile(str(tmp_path / "t.jsonl")).arrays()


@pytest.mark.parametrize(("one", "other"), [("0", "0.0"), ("10", "1e1"), ("1.5", "1.50")])
def test_one_number_is_not_two_classes_and_not_two_groups(one, other):
    """A column of whole numbers in which one was missing is written with points: the test part had other classes."""
    rule = rf"^data\.dataset: Set: the {{}} '{re.escape(one)}' and '{re.escape(other)}' are one number; write it in one"
    with pytest.raises(ConfigError, match=rule.format("classes")):
        as_labels(np.array([one, other] * 10), "Set")
    with pytest.raises(ConfigError, match=rule.format("groups")):
        as_groups(np.array([one, other] * 10), "Set")
    assert as_labels(np.array(["01", "1", "nan"] * 10), "Set")[1] == ("01", "1", "nan")


@pytest.mark.parametrize("read", [as_labels, as_groups])
def test_names_that_differ_in_the_spaces_around_them_are_refused(read):
    """They were two classes, and two clients: behind the commas of a table's lines some programs write a space."""
    with pytest.raises(ConfigError, match=r"^data\.dataset: Set: the \w+ ' no' and 'no' are one but for spaces"):
        read(np.array([" no", "no", "yes"] * 10), "Set")
    with pytest.raises(ConfigError, match=r"the \w+ 'cafe\\u0301' and 'caf\\xe9' are one but for their Unicode form"):
        read(np.array(["caf\u00e9", "cafe\u0301", "tea"] * 10), "Set")
    assert set(read(np.array([" no", " yes", " ", "\n"] * 10), "Set")[1]) == {" no", " yes", " ", "\n"}


def test_two_spellings_of_a_name_are_no_two_features(tmp_path):
    """`Bonn` and, behind a comma and a space, ` Bonn` were; all with a space, as in UCI's tables, are one each."""
    path = tmp_path / "t.csv"
    path.write_text("age,city,y\n20,Bonn,a\n30, Bonn,b\n40,Rome,a\n50,Rome,b\n")
    said = r"CSVTable: the names under 'city', ' Bonn' and 'Bonn' are one but for spaces; write it in one way"
    with pytest.raises(ConfigError, match=said):
        CSVTable(str(path), "y").arrays()
    path.write_text("age,city,y\n20, Bonn,a\n30, Bonn,b\n40, Rome,a\n50, Rome,b\n")
    assert CSVTable(str(path), "y").arrays().x.shape == (4, 3)


def test_groups_of_bytes_are_called_what_the_bytes_say():
    assert as_groups(np.array([b"eve", b"bob", b"eve"]), "Set").names == ("bob", "eve")


def test_a_name_with_an_underscore_is_no_number():
    """Python and NumPy read 1_2 as 12."""
    assert as_labels(np.array(["1_2", "12.0"] * 10), "Set")[1] == ("12.0", "1_2")
    assert as_groups(np.array(["1_2", "12.0"] * 10), "Set").names == ("12.0", "1_2")
    versions = [f"{number}.{number}_0" for number in range(30)]
    assert as_labels(np.array(versions), "Set")[1] == tuple(sorted(versions))


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("raise ModuleNotFoundError(name='datasets')", r"HuggingFace needs the package `datasets`: pip install"),
        ("import missing_pack", r"datasets is installed, but .* \(No module named 'missing_pack'\)"),
        ("raise ImportError('No C') from ImportError('NumPy 1.26 is too old')", r".* \(NumPy 1.26 is too old\): "),
        ("raise ValueError('numpy.dtype size changed')", r"datasets is installed, but .* \(numpy.dtype size changed\)"),
    ],
)
def test_a_package_that_cannot_be_imported_is_not_called_missing(tmp_path, monkeypatch, written, told):
    """Packages that were built for another NumPy are there, and installing them again brings nothing."""
    (tmp_path / "datasets.py").write_text(written)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    with pytest.raises(ConfigError, match=rf"^data\.dataset: {told}"):
        HuggingFace(str(tmp_path), input="text").arrays()


def test_training_part_is_not_its_own_test_part(tmp_path):
    """All were tested on what they were trained on, without a word."""
    path = str(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text("text,label\na,0\nb,1\n")
    pairs = TensorDataset(torch.zeros(2, 1), torch.tensor([0, 1]))
    for dataset in (CSVTable(path, "label", path), TextFile(path, test_path=path), TorchDataset(pairs, pairs)):
        with pytest.raises(ConfigError, match=r"^data\.dataset\.test(_path)?: must be another"):
            dataset.arrays()
    with pytest.raises(ConfigError, match=r"^data\.dataset\.test: must be another one than train"):
        HuggingFace(path, test="train").arrays()
    assert checked(TorchDataset(pairs)).num_train == 2
