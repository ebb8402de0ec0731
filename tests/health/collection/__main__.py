"""Run `tensortap run` on the collection and print the table of what it found and missed.

    python -m tests.health.collection [--every N] [--half NAME] [--to FOLDER] [PATTERN]

It runs within the default budget, as users do, unless --every says which steps are looked at.
Programs that import tensortap track themselves: they run as they are, and `tensortap check` gives
the verdict. The table is saved as collection.md and collection.json in FOLDER. Programs of one
process are forked from one that has imported torch, which takes longer than most of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.forks import Starter

FOLDER = Path(__file__).parent
SET_UPS = ("plain", "trainer", "lightning", "accelerate", "compiled", "ddp", "jax")
IMPORTS = """
import accelerate, lightning, torch, torch._dynamo, transformers
from transformers import BertForMaskedLM, GPT2LMHeadModel, Trainer
import tensortap.__main__, tensortap.rooms.program.command, tensortap.rooms.program.torch.finding
"""


def programs() -> list[dict[str, Any]]:
    """Return the rows of collection.toml, with the kind and half that the path of each says."""
    rows = tomllib.loads((FOLDER / "collection.toml").read_text())["program"]
    for row in rows:
        row["kind"], row["half"], _ = row["file"].split("/")
    return rows


def verdict_of(text: str) -> tuple[list[str], list[str]]:
    """Split what the command printed into alerts and hints; the head says how many there are."""
    heads = re.findall(r"of \d+ rules, (.*)", text)
    text = re.sub(r"^(○|tensortap:) .*", "", text, flags=re.M)  # no findings
    blocks = re.split(r"^● ", text, flags=re.M)[1:]
    if len(heads) != 1:  # several runs, or nothing was tracked
        return [block for block in blocks if not block.startswith("fine:")], []
    counts = {
        word: int(n) for n, word in re.findall(r"(\d+) (found a problem|gave a hint)", heads[0])
    }
    alerts = counts.get("found a problem", 0)
    return blocks[:alerts], blocks[alerts : alerts + counts.get("gave a hint", 0)]


def judge(row: dict[str, Any], plain: bool, every: int, starter: Starter) -> dict[str, Any]:
    """Run one program plainly and under tensortap, in a folder of its own, and read the verdict."""
    tracks_itself = "tensortap" in (FOLDER / row["file"]).read_text()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}

        def run(*arguments: str) -> tuple[int | None, str, str]:
            try:
                if row["set-up"] in ("ddp", "jax"):
                    command = [sys.executable, *arguments]
                    done = subprocess.run(
                        command, cwd=folder, capture_output=True, text=True, timeout=600,
                        env=environment,
                    )  # fmt: skip
                    return done.returncode, done.stdout, done.stderr
                is_module = arguments[0] == "-m"
                code = f"import runpy, sys\nsys.argv = {list(arguments[is_module:])!r}\n"
                how = "run_module" if is_module else "run_path"
                code += f"runpy.{how}(sys.argv[0], run_name='__main__')"
                process = starter.start(code, dict(environment), folder, quick=True)
                out, err = process.communicate(600)
            except subprocess.TimeoutExpired:
                return None, "", "timeout"
            return process.returncode, out, err

        # the name of the program would tell the cause
        shutil.copy(FOLDER / row["file"], Path(folder, "train.py"))
        if tracks_itself:
            code, out, text = run("train.py")
            for path in sorted(Path(folder, "runs").glob("*")):
                text += "".join(run("-m", "tensortap", "check", str(path))[1:])
            same = code == 0
        else:
            before = run("train.py") if plain else None
            every_n = ("--every", str(every)) if every else ()
            code, out, text = run("-m", "tensortap", "run", *every_n, "train.py")
            same = before[:2] == (code, out) if before else code == 0
    alerts, hints = verdict_of(text)
    said = "\n".join([*alerts, *hints])
    found = [cause for cause in row.get("cause", ()) if re.search(cause, said, re.I)]
    unseen = re.findall(r"^tensortap: .*?: ((?:tracking failed|no |the program).*)", text, re.M)
    if row["kind"] == "bugs":
        outcome = "found" if found else "missed"
    else:
        outcome = "false alert" if alerts else "false hint" if hints else "quiet"
    return row | {
        "outcome": outcome, "alerts": alerts, "hints": hints, "could_not_look": unseen,
        "same": same, "exit": code, "matched": found, "stdout": out, "stderr": text[-20_000:],
    }  # fmt: skip


def table_of(results: list[dict[str, Any]]) -> str:
    """Return the Markdown table per set-up, and a line for each program that went wrong."""
    columns = ("found", "missed", "quiet", "false alert", "false hint")
    lines = [
        "| set-up | bugs | found | missed | healthy | false alerts | false hints | disturbed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for set_up in (*SET_UPS, "all"):
        part = [r for r in results if set_up in (r["set-up"], "all")]
        n = Counter(r["outcome"] for r in part)
        found, missed, quiet, alerts, hints = (n[column] for column in columns)
        disturbed = sum(not r["same"] for r in part)
        cells = (found + missed, found, missed, quiet + alerts + hints, alerts, hints, disturbed)
        lines.append(f"| {set_up} | {' | '.join(map(str, cells))} |")
    lines.append("")
    for r in sorted(results, key=lambda r: (r["outcome"], r["file"])):
        if r["outcome"] not in ("found", "quiet") or not r["same"]:
            said = [block.splitlines()[0] for block in (*r["alerts"], *r["hints"])]
            said = said or r["could_not_look"] or ["nothing"]
            lines.append(
                f"- {r['outcome']}: `{r['file']}` ({r['set-up']}): {'; '.join(said)[:300]}"
            )
            lines[-1] += "" if r["same"] else f" (disturbed: exit {r['exit']})"
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the chosen programs, two at a time."""
    parser = argparse.ArgumentParser(prog="python -m tests.health.collection")
    parser.add_argument("pattern", nargs="?", default="", help="part of a file's path")
    parser.add_argument("--half", choices=("tuned", "held", "later"))
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--set-up", choices=SET_UPS)
    parser.add_argument("--to", type=Path, default=Path())
    parser.add_argument("--no-plain", action="store_true", help="skip the comparison of stdout")
    chosen = parser.parse_args()
    rows = [
        row for row in programs()
        if chosen.pattern in row["file"]
        and chosen.half in (None, row["half"]) and chosen.set_up in (None, row["set-up"])
    ]  # fmt: skip
    results: list[dict[str, Any]] = []
    chosen.to.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(Starter(IMPORTS)) as starter, ThreadPoolExecutor(2) as pool:
        for result in pool.map(
            lambda row: judge(row, not chosen.no_plain, chosen.every, starter), rows
        ):
            results.append(result)
            print(
                f"{len(results)}/{len(rows)} {result['outcome']}: {result['file']}", file=sys.stderr
            )
            (chosen.to / "collection.json").write_text(json.dumps(results, indent=1))
            (chosen.to / "collection.md").write_text(table_of(results))
    print(table_of(results))


if __name__ == "__main__":
    main()
