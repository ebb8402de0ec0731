"""`tensortap resume-check`: real programs that resume rightly, or forget a part of their state."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tensortap.core.errors import TensortapError
from tensortap.rooms.resume.command import compared

PROGRAM = """
import copy, os, random, sys
import numpy as np
import torch
from torch import nn

random.seed(1); np.random.seed(1); torch.manual_seed(1)
data = torch.randn(24, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
ema = copy.deepcopy(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": ema}
for name in LOST:  # each a part of the state that the checkpoint lacks
    parts.pop(name, None)
step, order = 0, torch.randperm(24)
if os.path.exists("checkpoint.pt") and "checkpoint" not in LOST:
    saved = torch.load("checkpoint.pt", weights_only=False)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    step = saved["step"]
    if "order" not in LOST:
        order = saved["order"]
    else:
        order = order.roll(1)
    if "random" not in LOST:
        torch.set_rng_state(saved["torch"]); np.random.set_state(saved["numpy"])
        random.setstate(saved["python"])
while step < 24:
    if step % 6 == 0:
        order = torch.randperm(24)
    batch = data[order[step % 6 * 4:][:4]] * random.random() * np.random.rand()
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    scheduler.step()
    for one, two in zip(ema.parameters(), model.parameters()):
        one.data.lerp_(two.data, 0.1)
    step += 1
    if step % 4 == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()} | {
            "step": step, "order": order, "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(), "python": random.getstate()}, "checkpoint.pt")
print("done")
"""


def check(tmp_path, text, *options, resume=None):
    (tmp_path / "train.py").write_text(text)
    words = ["--resume", resume] if resume else []
    done = subprocess.run(
        [sys.executable, "-m", "tensortap", "resume-check", *options, *words, "--",
         sys.executable, "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert sorted(each.name for each in tmp_path.iterdir()) == ["train.py"]  # it works in copies
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "found"),
    [
        ("", []),
        ("checkpoint", ["it begins with the weights of its first step: no checkpoint was loaded"]),
        ("random", ["random state of torch", "batch 0 (.input[0])"]),
        ("optimizer scheduler order ema", [
            "weight Sequential_1.0.weight", "batch 0 (.input[0])",
            "optimizer state Sequential.0.weight.step, which is missing",
            "scheduler ExponentialLR 0.last_epoch: 0 instead of 4",
        ]),
    ],
)  # fmt: skip
def test_a_part_of_the_state_that_is_lost(tmp_path, lost, found):
    code, said, errors = check(tmp_path, PROGRAM.replace("LOST", repr(lost.split())))
    assert code == int(bool(lost)), errors
    assert "interrupted after step 4" in errors
    assert [each for each in found if each not in said] == [], said
    if not lost:
        assert said == ""
        assert "5 steps after the checkpoint are the same" in errors
    elif lost != "checkpoint":
        assert said.startswith("● step 5, the first after the checkpoint: ")
    if lost == "random":
        assert "weight" not in said


TRAINER = """
import sys
import torch
from torch import nn
import transformers

transformers.set_seed(3)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)

    def forward(self, x, labels):
        out = self.head(self.drop(self.body(x).relu()))
        return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}

generator = torch.Generator().manual_seed(0)
data = [{"x": torch.randn(4, generator=generator), "labels": torch.tensor(n % 2)}
        for n in range(32)]
arguments = transformers.TrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=20, report_to=[], use_cpu=True,
    disable_tqdm=True, save_steps=3, logging_strategy="no", SAVES
)
trainer = transformers.Trainer(Net(), arguments, train_dataset=data)
trainer.train(resume_from_checkpoint="resume" in sys.argv)
"""


@pytest.mark.slow
@pytest.mark.parametrize("saves", ["", "save_only_model=True"])
def test_a_trainer_that_resumes(tmp_path, saves):
    resume = f"{sys.executable} train.py resume"
    code, said, errors = check(tmp_path, TRAINER.replace("SAVES", saves), "--steps", "2",
                               resume=resume)  # fmt: skip
    assert "interrupted after step 3" in errors
    assert code == int(bool(saves)), said + errors
    if saves:
        assert "optimizer state Net.body.weight.step, which is missing" in said


def test_what_cannot_be_judged():
    one, two, three = {"weight a": "1"}, {"weight a": "2"}, {"weight a": "3"}
    with pytest.raises(TensortapError, match="two runs from the start differ at step 1"):
        compared([one], [two], [two, three])
    with pytest.raises(TensortapError, match="no step came after step 1"):
        compared([one], [], [one, two])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("print(1)", "has made no step with a torch optimizer"),
        (PROGRAM.replace("LOST", "[]").replace("step % 4 == 0", "step == 24"),
         "it has ended after 24 steps, and no step came after a checkpoint"),
    ],
)  # fmt: skip
def test_programs_without_a_checkpoint(tmp_path, text, says):
    (code, _, errors) = check(tmp_path, text)
    assert code == 2, errors
    assert says in errors
