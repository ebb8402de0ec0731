"""Every room can be deleted: the rest imports, helps, opens its page and catches a value."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest

import tensortap as tap
from tensortap.capture.pipeline import pipeline
from tensortap.core.errors import MissingRoom
from tensortap.core.rooms import GROUP, Room, load, offer, rooms
from tests import stranger

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/tensortap"
OURS = sorted(each.name for each in entry_points(group=GROUP) if "tensortap.rooms." in each.value)

# One process imports what takes long; a fork of it looks at each copy. The first copy is whole:
# from then on the process has all that tensortap imports.
CHECKS = """
import contextlib, gc, importlib, io, os, pathlib, pkgutil, sys, traceback
os.environ["KERAS_BACKEND"] = "torch"
import keras, torch, torch._dynamo

def check(copy):
    import starlette.testclient
    sys.path.insert(0, str(copy))
    import tensortap as tap
    assert pathlib.Path(tap.__file__).is_relative_to(copy), tap.__file__
    for module in pkgutil.walk_packages([str(copy / "tensortap")], "tensortap."):
        if not module.name.endswith(("__main__", ".demo_train")):  # programs
            importlib.import_module(module.name)
    from tensortap.cli.main import app
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        app(["--help"], standalone_mode=False)
    assert "serve" in printed.getvalue()
    from tensortap.page.access_control import AccessControl
    from tensortap.page.catalog import Catalog
    from tensortap.page.server import application
    access = AccessControl("127.0.0.1", 1, ["testserver"])
    client = starlette.testclient.TestClient(
        application(Catalog(), access), base_url="http://127.0.0.1:1"
    )
    page = client.get("/", params={"token": access.new_token()})
    assert page.status_code == 200 and "tensortap" in page.text, page.status_code
    path = tap.init(copy / "runs")
    tap.catch(torch.arange(3), "x")
    tap.finish()
    run = tap.open(path)
    assert run.get("x").tolist() == [0, 1, 2]
    assert run.alerts(rules=True) == []

for line in sys.stdin:
    copy = pathlib.Path(line.strip())
    child = os.fork()
    if not child:
        error = ""
        try:
            check(copy)
            others = [name for name in sys.modules if name.partition(".")[0] != "tensortap"]
            (copy / "modules.txt").write_text("\\n".join(others))
        except BaseException:
            error = traceback.format_exc()
        (copy / "error.txt").write_text(error)
        os._exit(0)
    os.waitpid(child, 0)
    if not gc.get_freeze_count():
        for name in (copy / "modules.txt").read_text().split("\\n"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        gc.freeze()
"""


def without(gone: set[str], copy: Path) -> None:
    """Make a package of links without some rooms, and without their lines in the registry."""
    (copy / "tensortap/rooms").mkdir(parents=True)
    for path in (*PACKAGE.iterdir(), *PACKAGE.glob("rooms/*")):
        if path.name not in gone | {"rooms"}:
            (copy / "tensortap" / path.relative_to(PACKAGE)).symlink_to(path)
    metadata = copy / "tensortap-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tensortap\nVersion: 0\n")
    kept = (name for name in OURS if name not in gone)
    lines = (f"{name} = tensortap.rooms.{name}.room:ROOM\n" for name in kept)
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{''.join(lines)}")


def needing(room: str) -> set[str]:
    """Return a room and all that need it."""
    found = {room}
    while more := {r.name for r in rooms().values() if found & set(r.needs)} - found:
        found |= more
    return found


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_every_room_can_be_deleted(tmp_path):
    """In one test: the imports take longer than the check of a room."""
    copies = {"nothing": set(), **{room: needing(room) for room in OURS}}
    for name, gone in copies.items():
        without(gone, tmp_path / name)
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHECKS], check=True, text=True, cwd="/",
        input="".join(f"{tmp_path / name}\n" for name in copies),
    )  # fmt: skip
    errors = {name: (tmp_path / name / "error.txt").read_text() for name in copies}
    assert not any(errors.values()), errors


def imports_of(folder: Path) -> set[str]:
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}.{each.name}" for each in node.names}
            elif isinstance(node, ast.Import):
                found |= {each.name for each in node.names}
    return found


@pytest.mark.parametrize("room", OURS)
def test_a_room_declares_the_rooms_that_it_imports(room):
    parts = (name.split(".") for name in imports_of(PACKAGE / "rooms" / room))
    used = {part[2] for part in parts if part[:2] == ["tensortap", "rooms"] and len(part) > 2}
    assert used - {room, "Room", "Tab"} <= needing_closure(room)


def needing_closure(room: str) -> set[str]:
    """Return all rooms that a room needs, directly or not."""
    found = set(rooms()[room].needs)
    while more := {need for each in found for need in rooms()[each].needs} - found:
        found |= more
    return found


def test_every_folder_is_a_room():
    folders = {path.parent.name for path in PACKAGE.glob("rooms/*/__init__.py")}
    assert folders == set(OURS)


@pytest.mark.parametrize("room", OURS)
def test_what_a_room_names_exists(room):
    found = rooms()[room]
    for address in (*found.commands.values(), *found.offers.values(), found.routes, found.rules):
        if address is not None:
            assert load(address) is not None
    for tab in found.tabs:
        assert (PACKAGE / "rooms" / room / "static" / tab.file).is_file()


def test_a_missing_room_is_named():
    with pytest.raises(MissingRoom, match=r"'nothing\.such'"):
        offer("nothing.such")


def test_frameworks_and_sinks_of_other_packages(monkeypatch, tmp_path):
    mine = Room(
        name="mine",
        offers={"frameworks": "tests.stranger:FRAMEWORK", "sinks": "tests.stranger:sink"},
    )
    everything = {**rooms(), "mine": mine}
    monkeypatch.setattr("tensortap.core.rooms.rooms", lambda: everything)
    path = tap.init(tmp_path)
    tap.catch(stranger.Quantity(np.arange(3.0)), "length")
    tap.finish()
    found = tap.open(path).get("length")
    assert type(found) is stranger.Quantity
    assert found.array.tolist() == [0, 1, 2]
    assert [record.name for record in stranger.sinks[-1].records] == ["length"]


def test_a_room_without_a_sink_for_this_run_leaves_the_fast_path_on(monkeypatch, tmp_path):
    mine = Room(name="mine", offers={"sinks": "tests.stranger:no_sink"})
    monkeypatch.setattr("tensortap.core.rooms.rooms", lambda: {"mine": mine})
    tap.init(tmp_path)
    tap.catch(1.5, "x")
    assert pipeline.fast is not None
    tap.finish()


def test_a_sink_of_another_package_that_fails_is_left_out(monkeypatch, tmp_path, caplog):
    mine = Room(name="mine", offers={"sinks": "tests.stranger:broken_sink"})
    monkeypatch.setattr("tensortap.core.rooms.rooms", lambda: {"mine": mine})
    path = tap.init(tmp_path)
    tap.catch(1.5, "x")
    tap.finish()
    assert tap.open(path).get("x") == 1.5
    assert "a sink of another package cannot be used: no disk" in caplog.text
