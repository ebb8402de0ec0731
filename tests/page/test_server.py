"""The server over real runs: its responses, its errors, how it starts and ends."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tensortap as tap
from tensortap.api import session as live
from tensortap.core.errors import NotFound, TensortapError
from tensortap.page import view as view_module
from tensortap.page.catalog import Catalog
from tensortap.page.server import PORT, Page, listen
from tensortap.rooms.dump.files import load_file
from tests.page.conftest import HOSTILE, LAYERS, STEPS, Writer, get, logged_in, serving
from tests.processes import wait_for

ROOT = Path(__file__).parents[2]


def good(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()


# -- responses -----------------------------------------------------------------------------


def test_catalog_and_run(client):
    shown = good(client.get("/api/catalog"))["entries"]
    states = {entry["id"]: entry["state"] for entry in shown}
    assert [*states] == ["raw", "killed", "empty", "b", "a"]
    assert states.pop("killed") == "crashed"
    assert {*states.values()} == {"ended"}
    assert [entry["title"] for entry in shown][-2:] == ["try b", "try a"]
    run = good(client.get("/api/run?run=a"))
    assert run["names"] == LAYERS
    assert run["kinds"] == ["Activation", "Gradient"]


def test_a_program_that_raises_has_crashed(tmp_path):
    program = "import tensortap as tap; tap.init('runs', name='x'); tap.catch(1.0, 'loss'); 1 / 0"
    env = dict(os.environ, PYTHONPATH=str(ROOT / "src"))
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, check=False)
    catalog = Catalog()
    entry = catalog.get(catalog.add(tmp_path / "runs"))
    assert (entry.state, entry.facts()["crashed"]) == ("crashed", "ZeroDivisionError")
    assert entry.title == "x"


def test_figures_are_those_of_viz(client, runs):
    from tensortap.rooms.figures.figures.heatmap import heatmap_figure
    from tensortap.rooms.figures.figures.lines import lines_figure
    from tensortap.table.table import table_of

    table = table_of(tap.open(runs / "a"))
    wanted = heatmap_figure(table, kind="Gradient", metric="rm2", relative=True)
    found = good(client.get("/api/overview?run=a&kind=Gradient&metric=rm2&theme=dark"))
    assert found["data"][0]["z"] == wanted["data"][0]["z"]
    assert found["layout"]["meta"]["layers"] == LAYERS
    wanted = lines_figure(table, names=["head"], kind="Gradient", metrics=["std"], panels="metric")
    asked = {"run": "a", "kind": "Gradient", "name": "head", "stat": "std", "by": "stat"}
    assert good(client.get("/api/lines", params=asked))["data"][0]["y"] == wanted["data"][0]["y"]
    lines = good(
        client.get("/api/sparklines", params={"run": "a", "kind": "Gradient", "name": LAYERS})
    )
    assert lines["lines"]["blocks.1.mlp"]["bad"] is True
    assert lines["lines"][HOSTILE]["d"].startswith("M")


def test_exponents_of_the_nearest_step(client):
    asked = {"run": "a", "kind": "Gradient", "name": "head", "step": 999, "dtype": "float8_e4m3fn"}
    assert good(client.get("/api/exponents", params=asked))["step"] == STEPS - 1


def test_responds_not_modified_for_the_same_version(client):
    first = client.get("/api/run?run=a")
    again = client.get("/api/run?run=a", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""


def test_alerts_provenance_receipt(client):
    (alert,) = good(client.get("/api/alerts?run=a"))["alerts"]
    assert (alert["name"], alert["step"], alert["rule"]) == ("blocks.1.mlp", 20, "nan")
    assert "tensortap reproduce" in good(client.get("/api/provenance?run=a"))["reproduce"]
    receipt = good(client.get("/api/receipt?run=a"))
    assert (receipt["records"], receipt["dropped"]) == (STEPS * (2 * len(LAYERS) + 1) + 1, 0)


# -- tensors -------------------------------------------------------------------------------


def tensor(client, **asked):
    return client.get("/api/tensor", params={"run": "raw", "kind": "Value", **asked})


def test_draws_the_requested_slice(client):
    from tensortap.rooms.figures.figures.theme import untyped

    found = good(tensor(client, name="cube", step=1, axes="0,2", at="0,2,0"))
    wanted = (np.arange(24).reshape(2, 3, 4) + 100)[:, 2, :]
    z = found["figure"]["data"][0]["z"]
    assert (untyped(z) if isinstance(z, dict) else np.array(z)).tolist() == wanted.tolist()
    assert found["axes"] == [0, 2]


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "no elements"), ("words", "holds no tensor"), ("gone", "no 'gone'")],
)
def test_explains_what_cannot_be_drawn(client, name, message):
    answer = tensor(client, name=name)
    body = answer.json()
    assert message in body.get("empty", body.get("error", ""))


@pytest.mark.slow
def test_seven_axes_a_scalar_and_parts_of_a_value(client):
    found = good(tensor(client, name="seven", at="1,1,1,1,1,1,1"))
    assert found["shape"] == [2] * 7
    assert found["statistics"]["max"] == 127
    assert good(tensor(client, name="number"))["statistics"]["max"] == 2.5
    assert good(tensor(client, name="pair", leaf="['k']"))["shape"] == [3]


def test_explains_how_to_keep_a_tensor(client):
    answer = client.get("/api/tensor?run=a&name=embed&kind=Activation")
    assert answer.status_code == 404
    assert "tap.track(model, tensors=" in answer.json()["error"]


@pytest.mark.slow
def test_download(client, tmp_path):
    answer = client.get("/api/tensor.npy?run=raw&name=cube&kind=Value&step=2")
    assert "cube_step2_rank0.npy" in answer.headers["content-disposition"]
    assert (np.load(io.BytesIO(answer.content)) == np.arange(24).reshape(2, 3, 4) + 200).all()
    run = Writer(tmp_path, "half")
    values = np.arange(6, dtype=ml_dtypes.bfloat16)
    run.put("x", "Value", 0, values)
    run.close()
    with serving(run.run) as page, logged_in(page) as own:
        (tmp_path / "x.npy").write_bytes(own.get("/api/tensor.npy?run=half&name=x").content)
    assert (load_file(tmp_path / "x.npy") == values).all()


@pytest.mark.slow
def test_shows_caught_and_dumped_values(tmp_path):
    run = tap.init(tmp_path)
    tap.dump(np.arange(6.0).reshape(2, 3), "dumped")
    for step in range(3):
        tap.catch(1.0 / (step + 1), "my_loss")
    tap.finish()
    with serving(run) as page, logged_in(page) as client:
        (held,) = good(client.get("/api/tensor_steps", params={"run": run.name}))["tensors"]
        assert held["name"] == "dumped"
        asked = {"run": run.name, "name": "dumped", "kind": "Value"}
        assert good(client.get("/api/tensor", params=asked))["statistics"]["max"] == 5
        curve = good(client.get("/api/training", params={"run": run.name}))["data"][0]
        assert (curve["name"], curve["y"]) == ("my_loss", [1.0, 0.5, 1 / 3])


# -- comparing -----------------------------------------------------------------------------


def finish(client, job):
    said = {}

    def ended():
        said.update(good(client.get(f"/api/compare?job={job}")))
        return said["state"] != "running"

    wait_for(ended, "the comparison did not end")
    return said


def test_compares_two_runs(client):
    job = good(client.post("/api/compare/start?run=a&other=b"))["job"]
    said = finish(client, job)
    assert said["agree"] is False
    assert (said["first"]["name"], said["first"]["step"]) == ("embed", 12)
    report = client.get(f"/api/compare/report?job={job}")
    assert "The runs differ" in report.text or "sha256" in report.headers["content-security-policy"]
    assert "unsafe-inline" not in report.headers["content-security-policy"].split("style-src")[0]
    again = good(client.post("/api/compare/start?run=a&other=b"))
    assert (again["job"], again["state"]) == (job, "done")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("rtol=much", "a tolerance"),
        ("steps=x", "steps must be like"),
        ("names=(", "regular expression"),
    ],
)
def test_rejects_invalid_options_of_a_comparison(client, query, message):
    answer = client.post(f"/api/compare/start?run=a&other=b&{query}")
    assert answer.status_code == 422
    assert message in answer.json()["error"]


def test_cancels_a_job():
    from tensortap.page.jobs import Jobs

    said, started = [], threading.Event()

    def work(progress):
        while True:
            started.set()
            progress(1, 2)

    jobs = Jobs(lambda _, state: said.append(state))
    job = jobs.start("endless", work)
    assert started.wait(60)
    assert jobs.start("endless", work) is job
    job.cancelled.set()
    wait_for(lambda: job.state["state"] != "running")
    assert said[-1] == {"state": "cancelled"}


# -- bad input -----------------------------------------------------------------------------


@pytest.mark.attack("pattern that backtracks")
def test_a_pattern_does_not_stop_training(tmp_path):
    """The engine of Python would take years for this pattern, and hold the interpreter lock."""
    for name in ("a", "b"):
        run = Writer(tmp_path, name)
        run.step(0, layers=["x" * 64])
        run.close()
    pattern = "(x+x+)+y"
    with serving(tmp_path) as page, logged_in(page) as client:
        good(client.get("/api/overview", params={"run": "a"}))
        figure = good(client.get("/api/overview", params={"run": "a", "q": pattern}))
        asked = {"run": "a", "other": "b", "names": pattern}
        job = good(client.post("/api/compare/start", params=asked))["job"]
        assert finish(client, job)["agree"] is True  # nothing matches
        assert figure["layout"]["meta"]["empty"] is True
        asked["names"] = "(?=x)x"
        answer = client.post("/api/compare/start", params=asked)
        assert answer.status_code == 422
        assert "lookaround, backreferences" in answer.json()["error"]


@pytest.mark.parametrize(
    "path",
    [
        "run?run=nobody", "overview?run=a&kind=Nonsense", "lines?run=a&stat=nonsense",
        "exponents?run=a", "exponents?run=a&name=head&dtype=float3",
        "tensor?run=raw&name=cube&step=x",
        "tensor?run=raw&name=cube&axes=1,2,x", "run?run=../../etc", "compare?job=job999",
        "tensor?run=a",
        "overview?run=a&metric=nonsense&kind=Gradient",
    ],
)  # fmt: skip
def test_reports_every_error_as_a_message(client, path):
    answer = client.get(f"/api/{path}")
    assert answer.status_code < 500
    assert "Traceback" not in answer.text
    assert answer.status_code == 200 or answer.json()["error"]


def test_empty_run(client):
    for what in ("run", "tensor_steps", "training", "overview", "alerts", "provenance", "receipt"):
        good(client.get(f"/api/{what}?run=empty"))
    figure = good(client.get("/api/lines?run=empty&name=x"))
    assert figure["layout"]["meta"]["empty"] is True


@pytest.mark.slow
@pytest.mark.attack("path outside a folder")
def test_serves_nothing_outside_the_folder(tmp_path, runs):
    folder = tmp_path / "shown"
    folder.mkdir()
    shutil.copytree(runs / "empty", folder / "mine")
    (folder / "theirs").symlink_to(runs / "a")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (folder / "mine" / "project.patch").symlink_to(secret)
    with serving(folder) as page, logged_in(page) as client:
        assert [s["id"] for s in good(client.get("/api/catalog"))["entries"]] == ["mine"]
        assert client.get("/api/run?run=theirs").status_code == 404
        (patch,) = good(client.get("/api/provenance?run=mine"))["patches"]
        assert "leads out of" in patch["text"]
        assert "secret" not in patch["text"]
        for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd"):
            assert client.get(path).status_code == 404


@pytest.mark.slow
def test_run_that_is_deleted_while_it_is_shown(tmp_path, runs):
    shutil.copytree(runs / "raw", tmp_path / "raw")
    with serving(tmp_path / "raw") as page, logged_in(page) as client:
        assert good(client.get("/api/run?run=raw"))["state"] == "ended"
        shutil.rmtree(tmp_path / "raw")
        (entry,) = page.catalog.recently_used()
        assert entry.refresh() is True
        assert good(client.get("/api/run?run=raw"))["state"] == "deleted"
        for what in ("tensor_steps", "provenance", "receipt", "tensor?name=cube", "overview"):
            mark = "&" if "?" in what else "?"
            answer = client.get(f"/api/{what}{mark}run=raw")
            assert answer.status_code < 500, answer.text
            assert "Traceback" not in answer.text
            assert answer.status_code == 200 or "the run was deleted" in answer.json()["error"]


def test_run_that_grows_and_is_replaced(tmp_path):
    run = Writer(tmp_path, "grows")
    run.step(0)
    run.flush()
    with serving(tmp_path) as page, logged_in(page) as client:
        assert good(client.get("/api/run?run=grows"))["steps"] == [0]
        (entry,) = page.catalog.recently_used()
        run.step(1)
        run.flush()
        assert entry.refresh() is True
        assert entry.refresh() is False
        assert good(client.get("/api/run?run=grows"))["steps"] == [0, 1]
        run.close()
        shutil.rmtree(tmp_path / "grows")
        other = Writer(tmp_path, "grows")
        other.step(7)
        other.close()
        entry.refresh()
        found = good(client.get("/api/run?run=grows"))
        assert (found["steps"], found["state"]) == ([7], "ended")


@pytest.mark.slow
def test_two_ranks(tmp_path):
    for rank in (0, 1):
        run = Writer(tmp_path, "ranks", rank=rank, world_size=2)
        for step in range(3):
            run.step(step, scale=1.0 + rank)
        run.close(end=rank == 1)
    with serving(tmp_path) as page, logged_in(page) as client:
        assert good(client.get("/api/run?run=ranks"))["ranks"] == [0, 1]
        asked = {"run": "ranks", "kind": "Activation", "name": "head", "stat": "max_abs"}
        # without a choice, the whole tensor of both ranks
        for rank, curves in ({}, 1), ({"rank": "all"}, 2), ({"rank": 1}, 1):
            assert len(good(client.get("/api/lines", params=asked | rank))["data"]) == curves
        x = good(client.get("/api/tensor", params={**asked, "step": 1, "rank": 0}))
        y = good(client.get("/api/tensor", params={**asked, "step": 1, "rank": 1}))
        assert y["statistics"]["max_abs"] == 2 * x["statistics"]["max_abs"]
        assert good(client.get("/api/receipt?run=ranks"))["ranks"] == 2
        curve = good(client.get("/api/training?run=ranks"))["data"][0]
        assert curve["name"] == "loss (mean of 2 ranks)"
        assert good(client.get("/api/training?run=ranks&rank=1"))["data"][0]["name"] == "loss"


# -- live sessions -------------------------------------------------------------------------


@pytest.mark.slow
def test_live_sessions_of_this_and_another_process(tmp_path):
    server = live.start("127.0.0.1", 0, "64MB")
    try:
        from tensortap.core.record import Kind, Record
        from tensortap.stats import summarize_array
        from tensortap.values.snapshot import borrow

        x = np.ones((3, 4), "f4")
        records = [
            Record("h", Kind.ACTIVATION, s, 0, s, 0, 1, s, "", "float32", (3, 4), None, None, None,
                   summarize_array(x * s)) for s in range(5)
        ]  # fmt: skip
        records.append(Record("loss", Kind.METRIC, 4, 0, 9, 0, 1, 9, value=0.5))
        # a tracked tensor has statistics and values
        whole = [
            Record("kept", Kind.ACTIVATION, s, 0, s + 10, 0, 1, s + 10, "", "float32", (3, 4), None,
                   None, borrow(x * s), summarize_array(x * s)) for s in range(3)
        ]  # fmt: skip
        server.history.write(records + whole[:2])
        with serving(server, str(server.address)) as page, logged_in(page) as client:
            shown = good(client.get("/api/catalog"))["entries"]
            assert [s["what"] for s in shown] == ["live", "live"]
            for each in shown:
                run = good(client.get("/api/run", params={"run": each["id"]}))
                assert (run["names"], run["state"]) == (["h", "kept"], "live")
                asked = {"run": each["id"], "name": "h", "kind": "Activation", "stat": "max"}
                assert good(client.get("/api/lines", params=asked))["data"]
                for what in ("alerts", "provenance", "receipt", "tensor_steps"):
                    good(client.get(f"/api/{what}", params={"run": each["id"]}))
                tensor_steps = page.catalog.get(each["id"]).tensor_steps
                assert tensor_steps() == {("kept", "Activation"): {0, 1}}
                there = {"run": each["id"], "name": "kept", "kind": "Activation", "step": 1}
                assert good(client.get("/api/tensor", params=there))["statistics"]["max"] == 1
            server.history.write(whole[2:])
            assert tensor_steps() == {("kept", "Activation"): {0, 1, 2}}
            server.history.bound = 1  # evicts all others
            server.history.write(records[:1])
            assert tensor_steps() == {}
            server.close()
            here, far = (page.catalog.get(each["id"]) for each in shown)
            assert here.state == "closed"
            assert far.refresh() is True
            assert far.refresh() is False  # closed, and what it had sent stays
            run = good(client.get("/api/run", params={"run": far.id}))
            assert (run["names"], run["state"]) == (["h", "kept"], "closed")
            answer = client.get("/api/receipt", params={"run": far.id})
            assert answer.status_code == 404
            assert "no live session" in answer.json()["error"]
    finally:
        server.close()


# -- starting and ending -------------------------------------------------------------------


def test_takes_the_next_free_port(runs, capsys):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", PORT))
            taken.listen()
        except OSError:
            pass  # already in use, which is just as good
        catalog = Catalog()
        catalog.add(runs)
        page = Page(catalog)
        try:
            assert page.port > PORT
            view_module._announce(page, None)
            assert f"port {PORT} is in use" in capsys.readouterr().out
            with pytest.raises(TensortapError, match=f"port {page.port} is in use"):
                listen("127.0.0.1", page.port)
        finally:
            page.close()


def test_warns_beyond_this_machine(runs, capsys):
    catalog = Catalog()
    catalog.add(runs)
    page = Page(catalog, host="0.0.0.0", port=0)
    try:
        view_module._announce(page, 0)
        printed = capsys.readouterr().out
        assert "other machines can reach the page" in printed
        assert "token=" in printed
        assert get(f"http://127.0.0.1:{page.port}/").status_code == 401
    finally:
        page.close()


@pytest.mark.parametrize("port", [70000, -1])
def test_rejects_an_invalid_port(port):
    with pytest.raises(TensortapError, match="port must be a number from 0 to 65535"):
        listen("127.0.0.1", port)


@pytest.mark.slow
def test_view_shows_the_session_and_run_of_this_process(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(view_module, "_page", None)
    monkeypatch.setattr("tensortap.api.session._session", None)  # another test has served here
    tap.finish()
    with pytest.raises(NotFound, match="nothing to show"):
        tap.view(browser=False, port=0)
    run = tap.init("runs")
    errors = tap.receipt().reasons.get("error", 0)
    page = tap.view(browser=False, port=0)
    try:
        assert [s.where for s in page.catalog.entries()] == [str(run.resolve())]
        server = live.start("127.0.0.1", 0, "64MB")
        assert tap.view(server, browser=False) is page
        assert len(page.catalog.entries()) == 2
        with logged_in(page) as client:
            cost = good(client.get("/api/receipt", params={"run": run.name}))["cost"]
            assert cost["reasons"].get("error", 0) == errors
        server.close()
    finally:
        page.close()
        tap.finish()
    assert "closed" in repr(page)
    assert capsys.readouterr().out.count("the page is on") == 2


@pytest.mark.slow
def test_command(runs, tmp_path):
    env = dict(os.environ, PYTHONPATH=str(ROOT / "src"), PYTHONUNBUFFERED="1")
    command = [sys.executable, "-m", "tensortap", "view"]
    wrong = subprocess.run(
        [*command, str(tmp_path / "none"), "--no-browser"], env=env, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert wrong.returncode == 2
    assert "no folder" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    served = subprocess.Popen(
        [*command, str(runs), "--no-browser", "--port", "0"], env=env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        url = served.stdout.readline().split()[-1]
        assert get(url).status_code == 200
        said, another = served.stdout.readline().rsplit(maxsplit=1)
        assert said == "tensortap: for another browser:"
        assert get(another).status_code == 200
        assert get(url).status_code == 401
        served.send_signal(signal.SIGINT)
        assert served.wait(60) == 0
        assert "Traceback" not in served.stderr.read()
    finally:
        served.kill()
        served.communicate()


def test_files_are_compressed_and_cached(client):
    index = client.get("/").text
    plotly = re.search(r'href="(/plotly.js[^"]*)"', index)[1]
    for address in (plotly, "/static/main.js"):
        answer = client.get(address)
        sent = int(answer.headers["content-length"])
        assert answer.headers["content-encoding"] == "gzip"
        assert sent < 0.4 * len(answer.content)
        plain = client.get(address, headers={"accept-encoding": "identity"})
        assert plain.content == answer.content
        again = client.get(address, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert "immutable" in client.get(plotly).headers["cache-control"]


def test_what_could_not_be_seen_is_no_problem(tmp_path):
    run = Writer(tmp_path, "a")
    run.step(0)
    run.alert("attention", "Activation", 0, "attention is not analyzed", rule="unseen")
    run.close()
    with serving(tmp_path) as page, logged_in(page) as client:
        summary, alerts = (
            client.get(f"/api/{what}", params={"run": "a"}).json() for what in ("summary", "alerts")
        )
    assert (summary["problems"], summary["hints"], summary["unseen_total"]) == (0, 0, 1)
    assert [row["message"] for row in summary["unseen"]] == ["attention is not analyzed"]
    assert (alerts["total"], alerts["problems"]) == (1, 0)
