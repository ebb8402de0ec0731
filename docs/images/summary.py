"""Draw docs/images/summary.svg: the output of `tap.summary()` for a small training job with NaN."""

from __future__ import annotations

import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from rich.console import Console

from tensortap.api import session as live
from tensortap.api import tables
from tensortap.live import answers

TRAINING = """
import numpy as np, torch, tensortap as tap
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(41):
    x = torch.randn(128, 64)
    hidden = model[1](model[0](x))
    loss = torch.nn.functional.cross_entropy(model[2](hidden), x[:, :10].argmax(1))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    scores = (hidden @ hidden.T / 2).to(torch.bfloat16)
    if step == 40:
        scores[3, 17:29] = float("nan"); scores[5, 5] = float("inf")
    tap.catch(loss, "loss", every=10)
    tap.catch(model[0].weight, every=10)
    tap.catch(model[0].weight.grad, every=10)
    tap.catch(hidden.relu().to(torch.float8_e4m3fn), "hidden.fp8", every=10)
    tap.catch(scores, every=10)
    tap.catch(x[:, :10].argmax(1), "labels", every=10)
    tap.catch({"lr": 1e-3, "mask": np.tri(8, dtype=bool)}, "batch", every=10)
tap.flush(10)
print("ready", flush=True)
input()
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        os.environ["XDG_CONFIG_HOME"] = home
        server = live.start("127.0.0.1", 0, "1GB")
        script = pathlib.Path(home, "train.py")
        script.write_text(TRAINING)
        env = dict(os.environ, TENSORTAP_SERVER=str(server.address))
        pipe = subprocess.PIPE
        program = subprocess.Popen([sys.executable, str(script)], env=env, stdin=pipe, stdout=pipe)
        program.stdout.readline()
        console = Console(record=True, width=132, file=io.StringIO(), force_terminal=True)
        console.print("[bold green]>>>[/] tap.summary()")
        overview = answers.overview(server)
        console.print(tables.header(overview))
        console.print()
        console.print(tables.names_table(overview.names))
        program.communicate(b"\n")
        server.close()
    target = pathlib.Path(__file__).with_name("summary.svg")
    # without the web font, which a reader would load from a network
    svg = console.export_svg(title="a live session")
    start = svg.index("@font-face")
    end = svg.rindex("}", start, svg.index(".terminal", start)) if "@font-face" in svg else start
    svg = svg[:start] + svg[end + 1 :]
    target.write_text(re.sub(r"<!--.*?-->", "", svg))


if __name__ == "__main__":
    main()
