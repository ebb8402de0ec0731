"""One fault in eight set-ups: the head is left out of the optimizer, and each set-up finds it."""

from __future__ import annotations

import textwrap

import pytest

HEAD = """
import torch
from torch import nn

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 2)

    def forward(self, x, labels=None):
        out = self.head(self.body(x))
        return out if labels is None else {"loss": nn.functional.cross_entropy(out, labels)}

data = [{"x": torch.randn(4), "labels": torch.tensor(n % 2)} for n in range(64)]
loader = torch.utils.data.DataLoader(data, batch_size=8)
model = Net()
optimizer = torch.optim.Adam(model.body.parameters(), lr=0.01)
"""
LOOP = """
for batch in loader:
    optimizer.zero_grad()
    loss = model(**batch)["loss"]
    {backward}
    {step}
"""
ACCELERATOR = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""
TRACKED = """
import tensortap as tap
tap.init("runs")
with tap.track(model, optimizer, alerts=True) as tracker:
"""
TRAINER = """
import transformers
arguments = transformers.TrainingArguments(
    "out", per_device_train_batch_size=8, max_steps=8, report_to=[], use_cpu=True,
    disable_tqdm=True, save_strategy="no", logging_strategy="no",
)
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
trainer = transformers.Trainer(
    model, arguments, train_dataset=data, optimizers=(optimizer, schedule), callbacks={callbacks},
)
"""
LIGHTNING = """
import lightning

class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model

    def training_step(self, batch, number):
        return self.net(**batch)["loss"]

    def configure_optimizers(self):
        return optimizer

lightning.Trainer(
    max_steps=8, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
).fit(Lit(), loader)
"""
CLOSURE = """
def closure():
    optimizer.zero_grad()
    loss = model(**batch)["loss"]
    loss.backward()
    return loss

for batch in loader:
    optimizer.step(closure)
"""
WRAPPER = """
class Wrapper:
    def __init__(self, inner):
        self.inner = inner

    def step(self):
        self.inner.step()
        model.zero_grad()

    def __getattr__(self, name):
        return getattr(self.inner, name)

optimizer = Wrapper(optimizer)
"""
PLAIN = LOOP.format(backward="loss.backward()", step="optimizer.step()")
ACCELERATED = LOOP.format(backward="accelerator.backward(loss)", step="optimizer.step()")
STEPPED = LOOP.format(
    backward="accelerator.backward(loss)", step="optimizer.step(); tracker.step()"
)
SET_UPS = {
    "plain": PLAIN,
    "wrapped": WRAPPER + PLAIN,
    "closure": CLOSURE,
    "accelerate": ACCELERATOR + ACCELERATED,
    "accelerate with track": ACCELERATOR + TRACKED + textwrap.indent(STEPPED, "    "),
    "Lightning": LIGHTNING,
    "Trainer": TRAINER.format(callbacks="[]") + "trainer.train()\n",
    "Trainer with the callback": "import tensortap as tap\n"
    "from tensortap.rooms.integrations.transformers import Track\n"
    "tap.init('runs')\n" + TRAINER.format(callbacks="[Track(alerts=True)]")
    + "trainer.train()\ntap.finish()\n",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SET_UPS)
def test_a_head_that_no_optimizer_has(tmp_path, name, run_program, typed):
    text = HEAD + SET_UPS[name]
    if "tensortap" in text:
        run_program(tmp_path, text)
        (run,) = (tmp_path / "runs").iterdir()
        code, *printed = typed(tmp_path, "check", run)
        assert code == 1
    else:
        (tmp_path / "train.py").write_text(text)
        code, *printed = typed(tmp_path, "run", "train.py")
        assert code == 0, printed
    said = "".join(printed)
    assert "● no_optimizer: " in said
    assert "head.weight" in said
    assert "could not look: no_optimizer" not in said
