"""`tensortap run`: programs without a line of tensortap are tracked, and do what they did."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import textwrap

import httpx
import pytest
import torch

import tensortap as tap
from tensortap.core.record import Kind
from tests.commands import type_in
from tests.processes import wait_for

TRAIN = """
    import sys, torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model{bug}.parameters(), lr=0.1)
    criterion = nn.MSELoss()  # a module that is called, too
    with torch.no_grad():
        model(torch.ones(1, 4))
    for _ in range(5):
        optimizer.zero_grad()
        loss = criterion(model(torch.randn(3, 4)), torch.randn(3, 2))
        loss.backward()
        optimizer.step()
    print("loss", loss.item().hex(), *sys.argv[1:])
"""


@pytest.fixture
def program(tmp_path):
    def write(text, name="train.py", **words):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text).format(**words))
        return path

    return write


def run(tmp_path, *words):
    """Return exit code, both outputs, and the run."""
    code, out, err = type_in("run", "--every", 1, "--to", tmp_path / "runs", *words)
    return code, out, err, tap.open(max((tmp_path / "runs").iterdir()))


def recorded_steps(made, name):
    return {record.step for record in made.records(name) if record.kind is Kind.ACTIVATION}


def test_a_program_is_tracked_and_computes_the_same(tmp_path, program, capsys):
    path = program(TRAIN, bug="")
    code, out, err, made = run(tmp_path, path, "--lr", "-m")
    runpy.run_path(str(path))
    alone = capsys.readouterr().out.split()[:2]
    assert (code, out.split()) == (0, [*alone, "--lr", "-m"])
    assert "found a problem" not in err
    assert recorded_steps(made, "0") == recorded_steps(made, "2") == {0, 1, 2, 3, 4}
    assert torch.nn.Module.__call__.__name__ != "first_call"


def test_a_bug_that_raises_no_error_is_named(tmp_path, program):
    code, _, err, made = run(tmp_path, program(TRAIN, bug="[0]"))
    assert code == 0
    assert "● no_optimizer: 2.weight, 2.bias since step 2" in err
    assert {alert.rule for alert in made.alerts()} == {"no_optimizer"}


def test_two_models_of_one_program(tmp_path, program):
    text = """
        import torch
        from torch import nn

        torch.manual_seed(0)
        maker, judge = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (maker, judge)]
        for _ in range(3):
            for optimizer, sign in zip(optimizers, (1, -1)):
                optimizer.zero_grad()
                (sign * judge(maker(torch.randn(4, 2))).mean()).backward()
                optimizer.step()
    """
    code, _, err, made = run(tmp_path, program(text))
    assert code == 0
    assert err.startswith("tensortap: tracks Linear, Sequential in every step")
    assert {"weight", "judge.0.weight"} <= set(made.names())
    assert len(made.metrics()["judge.loss"].dropna()) == 3


def test_all_modules_of_an_optimizer_are_tracked_by_the_names_of_their_variables(tmp_path, program):
    text = """
        import torch
        from torch import nn

        encoder, decoder = nn.Sequential(nn.Linear(4, 2), nn.ReLU()), nn.Linear(2, 4)
        optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
        for _ in range(3):
            batch = torch.randn(8, 4)
            loss = (decoder(encoder(batch)) - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
    """
    _, out, err, made = run(tmp_path, program(text))
    assert {"encoder.0.weight", "decoder.weight", "decoder"} <= set(made.names())
    assert recorded_steps(made, "encoder.0") == {0, 1, 2}
    assert made.metrics()["loss"].tolist() == [float(line) for line in out.split()]
    assert made.metrics()["lr"].tolist() == [0.001] * 3
    assert "found a problem" not in err


def test_parts_of_a_module_that_is_never_called_have_its_names(tmp_path, program):
    text = """
        import copy, torch
        from torch import nn

        class Agent(nn.Module):
            def __init__(self):
                super().__init__()
                self.policy = nn.Linear(2, 2)
                self.target = copy.deepcopy(self.policy)

        agent = Agent()
        optimizer = torch.optim.SGD(agent.policy.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            agent.policy(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    """
    _, _, _, made = run(tmp_path, program(text))
    assert recorded_steps(made, "policy") == {0, 1, 2}
    assert "target.weight" in made.names()


def test_losses_are_those_whose_gradients_are_used(tmp_path, program):
    text = """
        import torch
        from torch import nn

        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        nn.init.ones_(model.weight)

        def step(*inputs):
            optimizer.zero_grad()
            for each in inputs:  # accumulated
                scaler.scale(model(torch.tensor([each])).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        step(2.0)
        step(3.0, 4.0)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)  # made anew

        def closure():
            optimizer.zero_grad()
            loss = model(torch.tensor([5.0])).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    """
    _, _, _, made = run(tmp_path, program(text))
    assert made.metrics()["loss"].tolist() == [2.0, 7.0, 5.0]


def test_a_skipped_step_has_its_own_loss_and_a_closure_that_of_its_last_evaluation(
    tmp_path, program
):
    text = """
        import torch
        from torch import nn

        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, backoff_factor=2.0**-60)
        for factor in (1e10, 1.0, 1.0):  # the first gradients are infinite
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean() * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            print(loss.item())
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure():
            global loss
            optimizer.zero_grad()
            loss = (model(torch.ones(2, 4)) - 3).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        print(loss.item())
    """
    _, out, _, made = run(tmp_path, program(text))
    assert made.metrics()["loss"].tolist() == [float(line) for line in out.split()]


def test_folds_are_tracked_one_by_one_and_their_models_let_go(tmp_path, program):
    text = """
        import gc, torch, weakref
        from torch import nn

        def fold():
            settings = locals()
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            assert settings == {{}}  # nobody looked at the variables
            return weakref.ref(model)

        gone = [fold() for _ in range(5)]
        gc.collect()
        print([each() is None for each in gone])
    """
    _, out, err, made = run(tmp_path, program(text))
    assert out == "[True, True, True, True, False]\n"
    assert "not tracked" not in err
    names = ["Linear", *(f"Linear{end}.Linear" for end in ("", "_1", "_2", "_3"))]
    assert [recorded_steps(made, name) for name in names] == [{n, n + 1} for n in range(0, 10, 2)]


def test_models_that_take_turns_are_tracked_again(tmp_path, program):
    text = """
        import torch
        from torch import nn

        def train(model, optimizer):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

        first = nn.Linear(2, 1)
        one = torch.optim.SGD(first.parameters(), lr=0.1)
        train(first, one)
        second = nn.Linear(2, 1)
        other = torch.optim.SGD(second.parameters(), lr=0.1)
        for _ in range(2):
            train(second, other)
            train(first, one)
    """
    _, _, err, made = run(tmp_path, program(text))
    frame = made.metrics()
    assert sum(frame[name].notna().sum() for name in frame if name.endswith("loss")) == 10
    assert "failed" not in err


def test_a_model_that_is_never_called_is_tracked_from_its_first_step(tmp_path, program):
    text = TRAIN.replace("model(torch.randn", "nn.Sequential.forward(model, torch.randn")
    code, _, err, made = run(tmp_path, program(text, bug=""))
    assert (code, len(made.metrics()["loss"])) == (0, 5)
    assert "failed" not in err


def test_an_optimizer_of_bare_tensors_is_named_and_costs_nothing(tmp_path, program):
    text = TRAIN.replace(
        "for _ in", "alone = torch.optim.SGD([torch.ones(1, requires_grad=True)])\n    for _ in"
    ).replace("optimizer.step()", "optimizer.step()\n        alone.step()")
    text += "    print(torch.nn.Module.__call__.__name__)\n"
    _, out, err, made = run(tmp_path, program(text, bug=""))
    assert "1 optimizers train tensors that belong to no module" in err
    assert "first_call" not in out
    assert recorded_steps(made, "0") == {0, 1, 2, 3, 4}


def test_no_all_clear_about_what_was_not_seen(tmp_path, program):
    text = TRAIN.replace("loss.backward()", "loss.backward(torch.ones(())); loss = loss.detach()")
    text = text.replace("optimizer.step()", "pass")
    _, _, err, _ = run(tmp_path, program(text, bug=""))
    assert "no step of an optimizer was seen" in err


ACCELERATE = """
    import torch
    from torch import nn
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, batch_size=4)
    )
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    print(loss.item())
"""
TRAINER = """
    import tempfile, torch, transformers

    torch.manual_seed(0)
    size = dict(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))
    data = [dict(input_ids=ids, labels=ids) for ids in torch.randint(0, 20, (16, 8))]
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=4, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )
    print(transformers.Trainer(model, arguments, train_dataset=data).train().training_loss)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("text", "module"), [(ACCELERATE, "0"), (TRAINER, "lm_head")], ids=["accelerate", "trainer"]
)
def test_trainers_of_others_are_tracked_step_by_step(tmp_path, program, capsys, text, module):
    path = program(text)
    _, out, err, made = run(tmp_path, path)
    runpy.run_path(str(path))
    assert out.split()[-1] == capsys.readouterr().out.split()[-1]
    assert recorded_steps(made, module) == {0, 1, 2, 3}
    assert len(made.metrics()["loss"].dropna()) == 4
    assert "not tracked" not in err


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('enough')", 1, "enough"),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
    ],
)
def test_the_exit_code_is_that_of_the_program(tmp_path, program, ends, code, says):
    found, _, err, made = run(tmp_path, program(TRAIN + f"    {ends}\n", bug=""))
    assert found == code
    assert says in err
    assert recorded_steps(made, "0") == {0, 1, 2, 3, 4}


def test_a_program_that_tracks_by_itself_is_left_alone(tmp_path, program):
    begin = "import tensortap as tap\n    own = tap.track(model).__enter__()\n    for _"
    text = TRAIN.replace("for _", begin) + "    own.__exit__(None, None, None)\n"
    _, _, err, _ = run(tmp_path, program(text, bug="[0]"))
    assert "no_optimizer" not in err


def test_a_program_without_a_model(tmp_path, program):
    code, out, err, _ = run(tmp_path, program("print(7)\n"))
    assert (code, out) == (0, "7\n")
    assert "so no rule could look" in err


def test_what_is_no_program(tmp_path):
    code, _, err = type_in("run", tmp_path / "missing.py")
    assert code == 2
    assert "no file" in err


@pytest.mark.slow
def test_a_module_in_a_process_of_its_own(tmp_path, program):
    program(TRAIN, name="training.py", bug="[0]")
    words = [sys.executable, "-m", "tensortap", "run", "-m", "training", "--fast"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("--fast\n")
    assert "● no_optimizer: 2.weight" in ended.stderr


@pytest.mark.slow
def test_torch_is_imported_when_the_program_imports_it(tmp_path, program):
    path = program("import sys; print('torch' in sys.modules)\n")
    words = [sys.executable, "-m", "tensortap", "run", path]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert (ended.returncode, ended.stdout) == (0, "False\n")
    assert "did not import torch, so nothing was tracked" in ended.stderr


REMOVE = """import shutil
    while os.path.exists("runs"):  # it is being written
        shutil.rmtree("runs", ignore_errors=True)
    sys.exit(3)"""
ENDS = {
    "exit": ("sys.exit(3)", 3),
    "stderr": ("os.close(2); sys.exit(3)", 3),
    "stdout": ("sys.stdout.flush(); os.close(1); sys.exit(3)", 3),
    "closed": ("sys.stderr.close(); sys.exit('enough')", 1),
    "none": ("sys.stderr = None; sys.exit('enough')", 1),
    "moved": ("os.mkdir('sub'); os.chdir('sub'); sys.exit(3)", 3),
    "removed": (REMOVE, 3),
    "hook": ("sys.excepthook = lambda *error: print('mine'); raise ValueError", 1),
    "fork": ("pid = os.fork(); sys.exit(os.waitpid(pid, 0)[1] if pid else 0)", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_without_tensortap(tmp_path, program, end, starter, monkeypatch):
    text, code = ENDS[end]
    path = program(TRAIN + f"    import os\n    {text}\n", bug="")
    monkeypatch.chdir(tmp_path)
    words = ["tensortap", "run", str(path)]
    called = f"import sys; sys.argv = {words}\nfrom tensortap.cli.main import main; main()"
    ended = starter.start(called, dict(os.environ))
    out, err = ended.communicate(timeout=110)
    assert ended.returncode == code, err
    assert "mine" in out or end != "hook"
    assert err.count("found nothing") == (end in ("exit", "stdout", "moved", "hook", "fork"))


@pytest.mark.slow
def test_the_page_opens_while_the_program_trains(tmp_path, program):
    waits = """
    import os, time
    deadline = time.monotonic() + 100
    while not os.path.exists("seen") and time.monotonic() < deadline:
        time.sleep(0.05)
    """
    path = program(TRAIN + waits, bug="[0]")
    browser = tmp_path / "browser"
    browser.write_text('#!/bin/sh\ncp "${1#file://}" opened.tmp && mv opened.tmp opened\n')
    browser.chmod(0o700)
    words = [sys.executable, "-m", "tensortap", "run", "--every", "1", "--view", path]
    started = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "BROWSER": f"{browser} %s"},
    )  # fmt: skip
    try:
        wait_for((tmp_path / "opened").exists)
        made = tap.open(next((tmp_path / "runs").iterdir()))  # before the page reads it
        wait_for(lambda: made.refresh().alerts() and len(recorded_steps(made, "0")) == 5)
        (url,) = re.findall(r'url=([^"#]+)', (tmp_path / "opened").read_text())[:1]
        with httpx.Client(timeout=60, verify=False) as client:
            answer = client.get(url)
            key = re.search(r'data-key="([^"]+)"', answer.text)[1]
            client.headers["x-tensortap-key"] = key
            page = url.partition("?")[0]
            (entry,) = client.get(f"{page}api/catalog").json()["entries"]
            found = client.get(f"{page}api/summary", params={"run": entry["id"]}).json()
    finally:
        (tmp_path / "seen").touch()
        out, err = started.communicate(timeout=60)
    assert (found["steps"], found["first"]["rule"]) == (5, "no_optimizer")
    assert started.returncode == 0, err
    assert out.startswith("loss")
    assert out.count("\n") == 1
    assert "the page is on http://127.0.0.1:" in err  # for those who have no browser here
    with pytest.raises(httpx.ConnectError):
        httpx.get(page, verify=False)


@pytest.mark.slow
def test_a_thread_that_still_trains(tmp_path, program):
    body = textwrap.indent(textwrap.dedent(TRAIN.format(bug="")), "    ")
    path = tmp_path / "train.py"
    path.write_text(
        f"import threading\ndef main():\n{body}\nthreading.Thread(target=main).start()\n"
    )
    _, out, _, made = run(tmp_path, path)
    assert "loss" in out
    assert recorded_steps(made, "0") == {0, 1, 2, 3, 4}


@pytest.mark.slow
def test_a_compiled_function_stays_one_graph(tmp_path, program):
    text = TRAIN.replace("criterion(model(torch.randn(3, 4)), ", "criterion(torch.randn(3, 4), ")
    text = text.replace(
        "with torch.no_grad",
        "mse = criterion\n    criterion = torch.compile(lambda x, y: mse(model(x), y), "
        "backend='eager', fullgraph=True)\n    with torch.no_grad",
    )
    code, _, err, made = run(tmp_path, program(text, bug=""))
    assert code == 0, err
    assert recorded_steps(made, "0") == {1, 2, 3, 4}


@pytest.mark.slow
def test_a_compiled_model_has_one_graph(tmp_path, program):
    text = TRAIN.replace(
        "optimizer = torch.optim",
        "net = model\n    model = torch.compile(model, "
        "backend='eager', fullgraph=True)\n    optimizer = torch.optim",
    )
    _, _, err, made = run(tmp_path, program(text, bug=""))
    assert "found a problem" not in err
    assert recorded_steps(made, "0") == {0, 1, 2, 3, 4}


MORE = """
    import copy, torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    target = copy.deepcopy(model).requires_grad_(False)
    other = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    prefix = "{prefix}"
    saved = {{prefix + key: value for key, value in model.state_dict().items()}}
    other.load_state_dict(saved, strict=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(45):
        optimizer.zero_grad()
        x = torch.randn(8, 4)
        loss = nn.functional.mse_loss(model(x), 0.9 * target(x) + x[:, :2])
        scaler.scale(loss).backward()
        {unscale}
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % {every} == 0:
            target.load_state_dict(model.state_dict())
"""


@pytest.mark.parametrize("bug", [True, False])
def test_what_only_a_whole_program_shows(tmp_path, program, bug):
    fixed = {"prefix": "", "unscale": "scaler.unscale_(optimizer)", "every": 10}
    wrong = {"prefix": "module.", "unscale": "pass", "every": "100 - 99 * (step < 0)"}
    text = MORE.replace(
        "target.load_state_dict", "if step:\n                target.load_state_dict"
    )
    _, _, err, made = run(tmp_path, program(text, **(wrong if bug else fixed)))
    rules = {alert.rule for alert in (*made.alerts(), *made.hints())}
    assert rules == ({"loss_scaling", "nothing_loaded", "stale_copy"} if bug else set()), err


ORDER = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    make = lambda: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = make()
    for step in range(12):
        {0}
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        {1}
        loss.backward()
        {2}
        optimizer.step()
"""


@pytest.mark.parametrize("bug", [True, False])
def test_an_optimizer_and_clipping_in_the_wrong_place(tmp_path, program, bug):
    clip = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    lines = ("optimizer = make()", clip, "") if bug else ("", "", clip)
    _, _, err, made = run(tmp_path, program(ORDER.format(*lines)))
    rules = [alert.rule for alert in (*made.alerts(), *made.hints())]
    assert sorted(rules) == (["clipping", "new_optimizer"] if bug else []), err


SPAWNED = """
    import tempfile, torch
    import torch.distributed as dist
    from torch import multiprocessing, nn

    def main(rank, store):
        place = f"file://{{store}}/store"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
        torch.manual_seed(rank)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
        dist.destroy_process_group()

    if __name__ == "__main__":
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(main, args=(folder,), nprocs=2)
"""


@pytest.mark.slow
def test_ranks_that_a_program_starts_are_tracked(tmp_path, program):
    path = program(SPAWNED)
    words = [sys.executable, "-m", "tensortap", "run", str(path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "runs").iterdir()
    assert tap.open(made).table().ranks() == [0, 1]
    assert "● replicas: weight since step -1" in done.stderr
