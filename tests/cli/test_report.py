"""`fl-lightning report` on real runs."""

import pytest

pytest.importorskip("vl_convert")


def test_report_of_a_real_run(finished, workplace):
    page, pictures = workplace.path / "page.html", workplace.path / "pictures"
    code, out, err = workplace.call("report", finished.run, "--output", page, "--figures", pictures)
    assert (code, err) == (0, "")
    assert "1 runs" in out
    text = page.read_text(encoding="utf-8")
    for said in (
        "Local-T against communication",
        "Norm of weights against share",
        "fl-lightning fit --config",
        "FedRep",
    ):
        assert said in text
    assert (pictures / "norms.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "name runs' folders or a table"),
        (["nowhere"], "there is no such folder or file"),
        (["empty"], "neither a run nor a table"),
        (["exp.yaml"], "there is no such key"),
        (["damaged"], "there is no run with at least one round"),
        (["--figure", "x"], "did you mean"),
    ],
)
def test_mistake_is_one_line(workplace, argv, said):
    (workplace.path / "empty").mkdir(exist_ok=True)
    workplace.write("damaged/metrics.csv", b"\x00\xff\n1,2")
    before = workplace.files()
    code, out, err = workplace.call("report", *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err
    assert len(err) <= 330
    assert workplace.files() == before
