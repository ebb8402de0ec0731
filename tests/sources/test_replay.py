"""Replays of steps of a run: values that were never recorded, bit by bit."""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tensortap as tap
from tensortap.errors import NotFound, TensortapError
from tensortap.files import CorruptFile
from tensortap.frameworks.snapshot import borrow
from tensortap.runs.journal import JournalFile, JournalReader
from tensortap.runs.replayable import SegmentHead, StepHead, split

STEPS, EVERY = 40, 20
VOCABULARY, LENGTH, WIDTH = 31, 12, 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / WIDTH**0.5
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        weights = self.drop(weights)
        return self.out(weights @ v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        hidden = torch.nn.functional.gelu(self.up(x))
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.embed.requires_grad_(False)  # stored once
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Program:
    """A tiny GPT with dropout, Adam, a scheduler and random numbers of three kinds."""

    def __init__(self):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  the state that programs share
        self.model = Model()
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=1e-2
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 7)
        self.step = self.train_step

    def train_step(self, tokens, targets):
        self.optimizer.zero_grad()
        logits = self.model(tokens)
        noise = 1 + 1e-3 * (random.random() + np.random.rand())  # noqa: NPY002
        loss = noise * nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def run(self, steps=STEPS, each=lambda number: None):
        for number in range(steps):
            tokens = torch.randint(VOCABULARY, (16, LENGTH))
            self.step(tokens, tokens.roll(-1, 1))
            each(number)
        return self


def recorded(folder, steps=STEPS, every=EVERY, options=True):
    """Train with a black box that writes into a run; return the run and the program."""
    path = tap.init(folder, blackbox=options)
    program = Program()
    program.step = tap.blackbox(
        program.train_step, program.model, program.optimizer, program.schedule, every=every
    )
    program.run(steps)
    tap.finish()
    return tap.open(path), program


PATHS = [
    "blocks.{}.attn.forward.scores", "blocks.{}.attn.forward.weights", "blocks.{}.attn",
    "blocks.{}.forward.hidden", "blocks.{}.attn:gradient", "blocks.{}.up.weight:gradient",
    "blocks.{}.attn.forward.q", "blocks.{}.down", "blocks.{}.norm:gradient", "blocks.{}",
]  # fmt: skip
LOCALS = ["forward.h", "blocks.*.forward.*", "blocks.*.attn.forward.*"]


class Dump:
    """Everything that a program computes in forward and backward, by step and path."""

    def __init__(self):
        self.program = Program()
        self.steps: list[dict[str, list[torch.Tensor]]] = []
        self.now: dict[str, list[torch.Tensor]] = {}
        for name, module in self.program.model.named_modules():
            if name and not isinstance(module, nn.ModuleList):
                module.register_forward_hook(self.on_output(name))
        with tap.trace(self.program.model, LOCALS, changed=False) as self.tracer:
            self.program.run(each=self.end_step)
        for path, traced in self.tracer.results.items():
            for iteration, value in zip(traced.iterations, traced.values, strict=True):
                if isinstance(value, torch.Tensor):
                    self.steps[iteration].setdefault(path, []).append(value)

    def on_output(self, name):
        def hook(module, inputs, output):
            self.now.setdefault(name, []).append(output.detach().clone())
            if output.requires_grad:
                output.register_hook(
                    lambda g: self.now.setdefault(f"{name}:gradient", []).append(g.clone())
                )

        return hook

    def end_step(self, number):
        for name, parameter in self.program.model.named_parameters():
            if parameter.grad is not None:
                self.now[f"{name}:gradient"] = [parameter.grad.clone()]
        self.steps.append(self.now)
        self.now = {}

    @property
    def nbytes(self):
        return sum(x.nbytes for step in self.steps for values in step.values() for x in values)


def bits(value):
    return value.dtype, value.shape, value.contiguous().numpy().tobytes()


def nbytes_on_disk(folder):
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


def state(program):
    tensors = [*program.model.state_dict().values(), torch.get_rng_state()]
    tensors += [p.grad for p in program.model.parameters() if p.grad is not None]
    for each in program.optimizer.state.values():
        tensors += each.values()
    numbers = program.schedule.state_dict(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    return [bits(x) for x in tensors], numbers


@pytest.fixture(scope="module")
def boxed(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("boxed"))


@pytest.mark.slow
def test_a_hundred_questions_about_the_past(boxed):
    run, program = boxed
    dump, before = Dump(), state(program)
    asked = 0
    for number in range(10):
        step = number * 37 % STEPS
        paths = [path.format((number + i) % 2) for i, path in enumerate(PATHS)]
        found = run.replay(step, paths, step_fn=program.step)
        assert found.same, found.text
        for path in paths:
            expected = [bits(x) for x in dump.steps[step][path]]
            assert [bits(x) for x in found.values[path]] == expected, (step, path)
            asked += 1
    assert asked == 100
    assert state(program) == before
    assert nbytes_on_disk(run.path / "blackbox") < 0.05 * dump.nbytes
    assert not run.names()  # nothing of this was recorded


def test_operations_and_locals_of_the_step_function(boxed):
    run, program = boxed
    paths = ["train_step.noise", "train_step.loss", "blocks.1.attn:*:softmax"]
    found = run.replay(3, paths, step_fn=program.step)
    assert found.same
    assert (found.snapshot, found.replayed) == (0, 5)  # and the step that shows its update
    assert isinstance(found.values["train_step.noise"][0], float)
    (name,) = [name for name in found.values if "softmax" in name]
    rows = found.values[name][0].sum(-1)
    assert np.allclose(rows, 1)


def test_tensors_that_do_not_change_are_stored_once(boxed):
    run, program = boxed
    stored = sorted((run.path / "blackbox/00000").glob("*.safetensors"))
    embedding = bits(program.model.embed.weight.detach())
    assert len(stored) == STEPS // EVERY
    assert [any(bits(x) == embedding for x in load_file(f).values()) for f in stored] == [
        True, False,
    ]  # fmt: skip


def test_unknown_paths_steps_and_programs(boxed, caplog):
    run, program = boxed
    with pytest.raises(NotFound, match="no value of 'blocks"):
        run.replay(3, "blocks.0.attn.forward.score", step_fn=program.step)
    assert "'scores'" in caplog.text  # what there is instead
    with pytest.raises(NotFound, match=rf"step 999 .* can replay steps 0 to {STEPS - 1}"):
        run.replay(999, "blocks.0", step_fn=program.step)
    with pytest.raises(NotFound, match="no module or parameter"):
        run.replay(3, "block:gradient", step_fn=program.step)
    with pytest.raises(TypeError, match="step_fn must come from"):
        run.replay(3, "blocks.0", step_fn=print)
    with pytest.raises(ValueError, match="paths must not be empty"):
        run.replay(3, [], step_fn=program.step)
    other = nn.Linear(2, 2)
    box = tap.blackbox(lambda: None, other, torch.optim.Adam(other.parameters()))
    with pytest.raises(TensortapError, match="does not fit this program"):
        run.replay(3, "forward.x", step_fn=box)


def test_a_changed_program_is_not_called_the_same(boxed):
    run, _ = boxed
    program = Program()
    program.model.blocks[0].attn.drop.p = 0.2  # restored: it belongs to the state
    box = tap.blackbox(
        lambda *batch: program.train_step(*batch) * 2,
        program.model, program.optimizer, program.schedule,
    )  # fmt: skip
    found = run.replay(EVERY + 2, "blocks.0", step_fn=box)
    assert not found.same
    assert f"digest of the result of step {EVERY} is the first that differs" in found.text


def test_limit_on_disk(tmp_path):
    run, program = recorded(tmp_path, steps=60, every=5, options={"disk": "600 KiB"})
    assert nbytes_on_disk(run.path / "blackbox") <= 600 << 10
    ((first, last),) = run.replayable()
    assert 0 < first < last == 59
    found = run.replay(first, "blocks.0", step_fn=program.step)
    assert found.same  # with an embedding that the first snapshot brought
    with pytest.raises(NotFound, match=rf"can replay steps {first} to 59; \d+ older snapshots"):
        run.replay(1, "blocks.0", step_fn=program.step)


def test_options_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"blackbox\['every'\] must be at least 1"):
        tap.init(tmp_path, blackbox={"every": 0})
    with pytest.raises(ValueError, match="blackbox takes 'every' and 'disk', got 'evry'"):
        tap.init(tmp_path, blackbox={"evry": 3})
    run, _ = recorded(tmp_path, steps=14, every=2, options={"every": 5})
    assert len(list((run.path / "blackbox/00000").glob("*.steps"))) == 3  # at 0, 6 and 12


# -- damage and hostility -------------------------------------------------------------------------


@pytest.fixture
def copied(boxed, tmp_path):
    """A copy of a run, its folder of snapshots, and a program that can replay it."""
    run, program = boxed
    path = tmp_path / "run"
    shutil.copytree(run.path, path)
    return path, path / "blackbox/00000", program


def ask(path, program, step=EVERY + 2):
    return tap.open(path).replay(step, "blocks.0", step_fn=program.step)


@pytest.mark.fault("damaged snapshots")
def test_damaged_snapshots_are_one_sentence(copied):
    path, folder, program = copied
    before = state(program)
    (stored,) = folder.glob("000001.safetensors")
    data = bytearray(stored.read_bytes())
    data[-1000] ^= 1
    stored.write_bytes(data)
    with pytest.raises(CorruptFile, match=f"snapshot of step {EVERY} is damaged: its digest"):
        ask(path, program)
    stored.write_bytes(data[:-2000])
    with pytest.raises(CorruptFile, match="truncated"):
        ask(path, program)
    stored.unlink()
    with pytest.raises(CorruptFile, match="missing"):
        ask(path, program)
    assert ask(path, program, step=2).same  # of another snapshot
    assert state(program) == before


@pytest.mark.fault("damaged snapshots")
def test_random_damage_never_gives_other_values(copied, record_property):
    path, folder, program = copied
    expected = bits(ask(path, program).values["blocks.0"][0])
    files = [file for file in sorted(folder.iterdir()) if file.name.startswith("000001")]
    draw = random.Random(0)
    for _ in range(24):
        file = draw.choice(files)
        data = file.read_bytes()
        damaged = bytearray(data)
        for _ in range(draw.choice([1, 9])):
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged[: draw.choice([None, draw.randrange(len(damaged))])])
        with contextlib.suppress(TensortapError):
            found = ask(path, program)
            assert not found.same or bits(found.values["blocks.0"][0]) == expected
        file.write_bytes(data)
    record_property("tried", 24)


def forge(folder, **changes):
    """Rewrite the second journal with other fields in its frames, and right checksums."""
    reader = JournalReader(folder / "000001.steps")
    frames = [(frame.kind, reader.read(frame)) for frame in reader.frames()]
    journal = JournalFile(folder / "000001.steps")
    for kind, data in frames:
        if kind == b"h":
            head = msgspec.msgpack.decode(data, type=SegmentHead)
            own = {key: value for key, value in changes.items() if hasattr(head, key)}
            data = msgspec.msgpack.encode(msgspec.structs.replace(head, **own))
        elif kind == b"s":
            step = msgspec.msgpack.decode(data, type=StepHead)
            own = {k: v for k, v in changes.items() if hasattr(step, k) and k != "value"}
            data = msgspec.msgpack.encode(msgspec.structs.replace(step, **own))
        journal.append(kind, data)
    journal.close()


def cell(value):
    return split(borrow(value))[0]


PLACES = {"layouts": [], "others": [{}]}
FORGED = {
    "a path out of the run": {"payloads": (("../../../run.json", "0"),)},
    "another format": {"format": 99},
    "no snapshot": {"value": b""},
    "not a state": {"value": cell({"places": 3})},
    "a method": {"value": cell({"places": [(("module", "", "forward"), "x")], **PLACES})},
    "a module": {"value": cell({"places": [(("module", "evil", "x"), 1)], **PLACES})},
    "an optimizer": {"value": cell({"places": [(("optimizer", "9", "9"), {})], **PLACES})},
    "other tensors": {"tensors": (10**9,)},
}


@pytest.mark.attack("hostile snapshots of a black box")
@pytest.mark.parametrize("name", FORGED)
def test_hostile_snapshots_are_one_sentence(copied, name):
    path, folder, program = copied
    before = state(program)
    forge(folder, **FORGED[name])
    with pytest.raises(TensortapError) as error:
        ask(path, program)
    assert len(str(error.value).splitlines()) == 1
    assert state(program) == before


def test_batches_that_a_run_cannot_hold(tmp_path):
    program = Program()
    box = tap.blackbox(
        lambda tokens, extra: program.train_step(tokens, tokens),
        program.model, program.optimizer, program.schedule, every=4,
    )  # fmt: skip
    path = tap.init(tmp_path, blackbox=True)
    for number in range(6):
        extra = program if number == 2 else {"name": "x", "pair": (1, None), "array": np.ones(3)}
        box(torch.zeros(2, LENGTH, dtype=torch.long), extra)
    tap.finish()
    run = tap.open(path)
    assert run.replayable() == [(0, 1), (4, 5)]
    assert run.replay(5, "blocks.0", step_fn=box).same
    with pytest.raises(NotFound, match=r"batch of step 2 is not in the run: a .*Program cannot"):
        run.replay(3, "blocks.0", step_fn=box)
