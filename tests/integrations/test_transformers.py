"""The callback in real trainings of the Hugging Face Trainer."""

from __future__ import annotations

import pytest
import torch

import tensortap as tap
from tensortap.core.record import Kind

pytestmark = pytest.mark.slow
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Import what takes seconds where a test needs it: every worker collects all files."""
    global transformers, Track
    import transformers

    from tensortap.rooms.integrations.transformers import Track


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = torch.arange(i, i + 8) % 32
        return {"input_ids": ids, "labels": ids}


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def train(folder, *callbacks, model=None, resume=None, **options):
    options = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True,
        "logging_steps": 2, "save_strategy": "no", "disable_tqdm": True, "seed": 7,
        "eval_strategy": "steps", "eval_steps": 3, **options,
    }  # fmt: skip
    args = transformers.TrainingArguments(output_dir=str(folder), **options)
    trainer = transformers.Trainer(
        model=model or gpt2(), args=args, train_dataset=Data(), eval_dataset=Data(),
        callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def steps(tracker, kind, name):
    records = (r for r in tracker.records if "initial" not in r.tags)
    return [r.step for r in records if r.kind is kind and r.name == name]


def test_records_have_the_step_of_the_optimizer(tmp_path):
    track = Track()
    trainer = train(tmp_path, track)
    for kind, name in [
        (Kind.ACTIVATION, "transformer.h.0.mlp"),
        (Kind.GRADIENT, "transformer.h.0.mlp"),
        (Kind.WEIGHT, "transformer.h.0.attn.c_attn.weight"),
        (Kind.WEIGHT_GRADIENT, "transformer.h.0.attn.c_attn.weight"),
        (Kind.OPTIMISER_STATE, "transformer.h.0.attn.c_attn.weight.exp_avg"),
    ]:
        assert steps(track.tracker, kind, name) == list(range(STEPS)), (kind, name)
    # global_step is 2 after the second step, which is step 1
    metrics = track.tracker.metrics().set_index("step")
    expected = {row["step"] - 1: row["loss"] for row in trainer.state.log_history if "loss" in row}
    assert metrics["loss"].dropna().to_dict() == expected
    assert list(expected) == [1, 3, 5]
    assert metrics["eval_loss"].dropna().index.tolist() == [2, 5]
    assert not any(module._forward_hooks for module in trainer.model.modules())


def test_training_is_bit_identical(tmp_path):
    train(tmp_path)
    without = train(tmp_path).model.state_dict()
    tracked = train(tmp_path, Track(alerts=True)).model.state_dict()
    for name, parameter in without.items():
        assert torch.equal(parameter, tracked[name]), name


def test_resumed_training_opens_a_run_and_continues_the_steps(tmp_path):
    train(tmp_path, max_steps=4, save_strategy="steps", save_steps=4)
    track = Track(run=tmp_path / "runs", every=2)
    train(tmp_path, track, resume=str(tmp_path / "checkpoint-4"), max_steps=8)
    run = tap.open(track.path)
    assert run.reader.info.ended is not None
    assert sorted(run.logframe().metadata.step.unique()) == [4, 6]
    logged = run.metrics()[["step", "loss"]].dropna()
    assert logged["step"].tolist() == [5, 7]


def test_exception_passes_and_hooks_are_removed(tmp_path):
    class Fails(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise ZeroDivisionError("raised by the user")

    model = gpt2()
    with pytest.raises(ZeroDivisionError), Track(run=tmp_path / "runs") as track:
        train(tmp_path, track, Fails(), model=model)
    assert not any(module._forward_hooks for module in model.modules())
    assert tap.open(track.path).reader.info.ended is not None

    # without `with`, the next training removes them
    other = Track()
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, other, Fails(), model=model)
    train(tmp_path, other)
    assert not any(module._forward_hooks for module in model.modules())
    assert steps(other.tracker, Kind.WEIGHT, "transformer.ln_f.weight") == list(range(STEPS))


def test_alert_stops_the_training(tmp_path):
    def always(record, memory):
        return "enough" if record.kind is Kind.WEIGHT and record.step == 2 else None

    track = Track(alerts=[always], on_alert="stop")
    assert train(tmp_path, track).state.global_step == 3
    assert track.tracker.alerts
