import pytest

from fl_lightning.data.datasets import IMDB
from fl_lightning.data.text import tokenise
from fl_lightning.errors import ConfigError


@pytest.fixture
def reviews(tmp_path):
    """Two training and two test reviews."""
    texts = {
        "train/neg/0_1.txt": "Bad, bad film.<br /><br />It's bad",
        "train/pos/0_9.txt": "A GOOD film",
        "test/neg/0_2.txt": "never seen",
        "test/pos/0_8.txt": "...",
    }
    for name, text in texts.items():
        path = tmp_path / "aclImdb" / name
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_imdb_numbers_the_most_frequent_training_words(reviews):
    """bad 3, film 2, then by alphabet a, good, it's 1 each: 2 = bad, 3 = film, 4 = a, 5 = good; it's does not fit."""
    arrays = IMDB(str(reviews), vocabulary=6, length=5).arrays()
    assert arrays.x.tolist() == [
        [2, 2, 3, 1, 2],  # bad bad film it's bad
        [4, 5, 3, 0, 0],  # a good film
        [1, 1, 0, 0, 0],  # never seen
        [1, 0, 0, 0, 0],  # no word at all
    ]
    assert arrays.y.tolist() == [0, 1, 0, 1]
    assert arrays.num_train == 2
    assert arrays.classes == ("neg", "pos")
    assert (arrays.spec.input_shape, arrays.spec.vocabulary_size) == ((5,), 6)
    arrays.validate("IMDB")


def test_imdb_cuts_long_reviews(reviews):
    assert IMDB(str(reviews), vocabulary=6, length=2).arrays().x.tolist() == [[2, 2], [4, 5], [1, 1], [1, 0]]


def test_hidden_files_are_no_reviews(reviews):
    """macOS puts one beside each on a disk of another kind: all reviews were there twice."""
    before = IMDB(str(reviews)).arrays().x.tolist()
    (reviews / "aclImdb" / "train" / "neg" / "._0_1.txt").write_text("Mac OS X")
    assert IMDB(str(reviews)).arrays().x.tolist() == before


def test_imdb_takes_the_folder_itself_as_root(reviews):
    a, b = IMDB(str(reviews)).arrays(), IMDB(str(reviews / "aclImdb")).arrays()
    assert a.x.tolist() == b.x.tolist()


def test_missing_imdb_says_where_it_looked_and_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a long path would push the end out of the line
    monkeypatch.setenv("FL_LIGHTNING_DATA", "default-data")
    with pytest.raises(
        ConfigError, match=r"data.dataset: IMDB: .*default-data/train/neg.*aclImdb_v1.tar.gz from https://"
    ):
        IMDB().arrays()


def test_imdb_names_a_file_that_is_no_text(reviews):
    (reviews / "aclImdb/test/pos/0_8.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"IMDB: .*test/pos/0_8.txt cannot be read as text"):
        IMDB(str(reviews)).arrays()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"vocabulary": 2}, r"data.dataset.vocabulary: must be at least 3"), ({"length": 0}, r"data.dataset.length")],
)
def test_imdb_refuses_bad_values(wrong, message):
    with pytest.raises(ConfigError, match=message):
        IMDB(**wrong)


def test_joiners_inside_words_part_no_words():
    """One Persian word was two, and two Sinhala words three."""
    assert tokenise("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645") == [
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    ]
    assert len(tokenise("\u0dc1\u0dca\u200d\u0dbb\u0dd3 \u0dbd\u0d82\u0d9a\u0dcf")) == 2
    assert tokenise("\u200cno\u00ebl\u200d \u200c") == ["no\u00ebl"]  # at its ends they are none of its letters
