"""Jobs that are steered from a session while they train: ranks, stopped and killed processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import typer

import tensortap as tap
from tensortap.cli import main as command_line
from tensortap.core.errors import NotFound, PatternError
from tensortap.core.record import Kind
from tests.commands import type_in
from tests.processes import wait_for

pytestmark = pytest.mark.slow

# writes a digest of its weights after each step, until a file says that it is enough
JOB = """
import contextlib, hashlib, time
tracked, end, most = os.environ["TRACKED"], os.environ["END"], int(os.environ["MOST"])
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters())
noise = torch.Generator().manual_seed(rank)
digests = []
with tap.track(model, optimizer, every=0) if tracked else contextlib.nullcontext() as tracker:
    while True:
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=noise)).square().mean().backward()
        optimizer.step()
        bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
        digests.append(hashlib.sha256(bits).hexdigest())
        if tracked:
            tracker.step()
            time.sleep(0.003)
        enough = torch.tensor(float(os.path.exists(end) or len(digests) == most))
        dist.all_reduce(enough)
        if enough:
            break
result = digests
"""


def test_two_ranks_switch_at_the_same_step_and_train_on_bit_by_bit(session, gloo, tmp_path):
    end = tmp_path / "end"
    env = {"TENSORTAP_SERVER": str(session.address), "END": str(end), "MOST": "1000000"}
    results = []
    job = threading.Thread(target=lambda: results.extend(gloo(JOB, 2, TRACKED="1", **env)))
    job.start()
    try:
        wait_for(lambda: sum(p.step > 2 for p in session.probes("^$")) == 2)
        assert {p.name for p in session.probes("")[0].probes} >= {"0", "2", "0.weight"}
        change = session.probe("^2$", every=2, tensors=True, steps=4, timeout=100)
        assert change.complete, change
        wait_for(lambda: len(session.reader.records("2", kind=Kind.ACTIVATION)) == 4)
        off = session.probe(off=True, timeout=100)
        assert off.complete, off
    finally:
        end.touch()
        job.join()
    records = session.reader.records("2", kind=Kind.ACTIVATION)
    assert {(r.rank, r.step) for r in records} == {
        (rank, change.at + more) for rank in (0, 1) for more in (0, 2)
    }
    assert all(r.value is not None for r in records)
    steps = len(results[0])
    assert steps > change.at + 4
    plain = gloo(JOB, 2, TRACKED="", **{**env, "END": "none", "MOST": str(steps)})
    assert plain == results


# a program that catches, without torch: many of them are started at once
LOOP = """
import os, time
import tensortap as tap
while True:
    tap.catch(1.0, "x", every=10)
    tap.step()
    time.sleep(0.02)
"""


def test_32_ranks_of_which_one_is_stopped_and_one_killed(session, tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(LOOP)
    env = {**os.environ, "TENSORTAP_SERVER": str(session.address), "WORLD_SIZE": "32"}
    ranks = [
        subprocess.Popen([sys.executable, program], env={**env, "RANK": str(rank)})
        for rank in range(32)
    ]
    try:
        wait_for(lambda: sum(p.step > 2 for p in session.probes("^x$")) == 32)
        ranks[5].send_signal(signal.SIGSTOP)
        ranks[9].kill()
        ranks[9].wait()
        wait_for(lambda: sum(client.connected for client in session.server.clients.values()) == 31)
        change = session.probe("^x$", off=True, timeout=100)
        told = {int(rank.split()[1]): text for rank, text in change.ranks.items()}
        assert not change.complete
        assert "does not answer" in told.pop(5)
        assert told.pop(9, "it has gone") == "it has gone"
        assert len(told) == 30
        # a rank that this machine has starved says so
        assert all("1 catch sites" in text for text in told.values()), told
        at = {r.step for r in session.reader.records("tensortap.probe")}
        late = [text for text in told.values() if text.startswith("too late")]
        assert late or at == {change.at}
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def documented(command):
    commands = typer.main.get_command(command_line.app).commands
    (option,) = (each for each in commands[command].params if "--json" in each.opts)
    words = option.help.removeprefix("Print JSON: ").removeprefix("a list of ").rstrip(".")
    return words.partition(";")[0].split(", ")


def test_commands(session, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(LOOP)
    env = {**os.environ, "TENSORTAP_SERVER": str(session.address)}
    job = subprocess.Popen([sys.executable, program], env=env)
    try:
        wait_for(lambda: any(p.step > 2 for p in session.probes("^x$")))
        where = "--session", str(session.address)
        code, out, _ = type_in("probes", "x", *where)
        assert code == 0
        assert "x Value: on" in out
        (found,) = json.loads(type_in("probes", "x", "--json", *where)[1])
        assert found["probes"][0][:3] == ["x", "Value", 1]
        assert set(found) == set(documented("probes"))
        code, out, _ = type_in("probe", "x", "--off", "--json", *where)
        assert code == 0
        assert json.loads(out)["complete"]
        assert set(json.loads(out)) == set(documented("probe"))
        code, out, _ = type_in("probe", "--stop", *where)
        assert code == 1
        assert "TENSORTAP_CONTROL=stop" in out
        code, _, err = type_in("probe", "(", *where)
        assert code
        assert "not a regular expression" in err
    finally:
        job.kill()
        job.wait()


def test_a_session_without_programs(session):
    assert session.probes() == []
    with pytest.raises(NotFound, match="no program is connected"):
        session.probe("x")
    with pytest.raises(PatternError):
        session.probes("(")
    with pytest.raises(ValueError, match="choose one of"):
        session.probe(ops=True, stop=True)


def test_another_process_steers_through_the_same_session(session, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(LOOP.replace("x", "x\\x1b[2J"))
    env = {**os.environ, "TENSORTAP_SERVER": str(session.address), "TENSORTAP_CONTROL": "0"}
    job = subprocess.Popen([sys.executable, program], env=env)
    try:
        wait_for(lambda: any(p.step > 2 and p.probes for p in session.probes("^x")))
        with tap.open(str(session.address)) as remote:
            change = remote.probe("x", off=True)
        assert not change.complete
        code, out, _ = type_in("probes", "--session", session.address)
        assert not code
        assert "x\N{REPLACEMENT CHARACTER}[2J" in out  # names are not trusted
        assert "TENSORTAP_CONTROL=0" in next(iter(change.ranks.values()))
    finally:
        job.kill()
        job.wait()
