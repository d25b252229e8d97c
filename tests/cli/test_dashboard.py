"""`fl-lightning dashboard`; W&B's own packages talk to a server on this machine that answers what they ask for."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

NO_KEY = {"WANDB_API_KEY": None, "WANDB_IDENTITY_TOKEN_FILE": None, "NETRC": "no-such-file"}
KEY = {"WANDB_API_KEY": "0" * 40}


class Server(BaseHTTPRequestHandler):
    """Keeps the views that it is asked to save; answers everything else with who is asking."""

    saved: list[dict]
    refuses = False

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if b"upsertView" not in body:
            viewer = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}, "email": "x"}
            return self.answer({"data": {"viewer": viewer}})
        if self.refuses:
            return self.answer({"errors": [{"message": "permission denied"}]})
        self.saved.append(json.loads(body)["variables"])
        return self.answer({"data": {"upsertView": {"view": {"id": "1", "name": "nw-abc-v"}, "inserted": True}}})

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    handler = type("Handler", (Server,), {"saved": []})
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    handler.address = f"http://127.0.0.1:{running.server_port}"
    yield handler
    running.shutdown()
    thread.join()
    running.server_close()


def test_dashboard_is_saved_as_a_workspace(workplace, server):
    pytest.importorskip("wandb_workspaces")
    env = {**NO_KEY, **KEY, "WANDB_BASE_URL": server.address}
    code, out, err = workplace.call("dashboard", "--project", "p", env=env)
    assert code == 0, err
    assert "me/p" in out
    (view,) = server.saved
    assert (view["entityName"], view["projectName"]) == ("me", "p")
    for metric in ("Local-T_received", "Global-T", "Local-T_min", "loss/", "uplink_bytes", "clients/table"):
        assert metric in view["spec"]


def test_dashboard_that_wandb_refuses_is_one_line(workplace, server):
    pytest.importorskip("wandb_workspaces")
    server.refuses = True
    env = {**NO_KEY, **KEY, "WANDB_BASE_URL": server.address}
    code, _, err = workplace.call("dashboard", "--project", "p", "--entity", "me", env=env)
    assert code == 2
    assert err.count("\n") == 1
    assert "permission denied" in err


@pytest.mark.parametrize(
    ("argv", "env", "said"),
    [
        (["--project", "p"], {}, "wandb login"),
        (["--project", "p"], {**KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}, "cannot be reached"),
        ([], {}, "--project P, --json FILE"),
        (["--picture", "p.png"], {}, "name the folders"),
        (["--picture", "p.png", "nowhere"], {}, "no run with at least one round"),
        (["--json", "d.json", "runs/a"], {}, "--picture FILE"),
        (["--projet", "p"], {}, "did you mean project?"),
        (
            ["--json", "d.json", "--entity", "me"],
            {},
            "--entity: is for --project P, whose user or team it is, got 'me'",
        ),
    ],
)
def test_mistake_is_one_line(workplace, argv, env, said):
    if argv[:1] == ["--project"]:
        pytest.importorskip("wandb_workspaces")
    before = workplace.files()
    code, out, err = workplace.call("dashboard", *argv, env={**NO_KEY, **env})
    assert (code, out) == (2, "")
    assert err.startswith("fl-lightning: error: ")
    assert err.count("\n") == 1
    assert said in err
    assert workplace.files() == before


def test_dashboard_of_real_runs_as_a_picture_and_as_json(finished, workplace):
    picture, panels = workplace.path / "d.png", workplace.path / "d.json"
    code, _, err = workplace.call("dashboard", "--picture", picture, "--json", panels, finished.run)
    assert code == 0, err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(panels.read_text())["sections"]


def test_help_is_given(workplace):
    code, out, err = workplace.call("dashboard", "--help")
    assert (code, err) == (0, "")
    assert "--project" in out
