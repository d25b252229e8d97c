"""`audit` from the command line."""

import json


def test_audit_of_a_run(workplace):
    workplace.draws = False
    workplace.fit("--quiet", "--name=a", "--federation.rounds=1")
    code, out, err = workplace.call("audit", "runs/a", "--steps=12", "--images=2", "--output=seen")
    assert code == 0, err
    said = json.loads((workplace.path / "seen" / "audit.json").read_text())
    assert [own["label"] for own in said["inversion"]] == ["FedRep (a)", "FedRep (a) + noise 1"]
    assert "written to seen" in out


def test_no_run_is_said_in_one_line(workplace):
    code, out, err = workplace.call("audit", "nowhere")
    assert (code, out) == (2, "")
    assert err.strip().count("\n") == 0
    assert "there is no run in that folder, got 'nowhere'" in err


def test_folder_of_the_audit_that_is_a_link_is_not_written_into(workplace):
    workplace.write("run/config.yaml", "method: FedAvg\n")
    (workplace.path / "run" / "audit").symlink_to(workplace.path)
    code, _, err = workplace.call("audit", "run")
    assert (code, "leads out of the run's folder" in err, err.count("\n")) == (2, True, 1)
