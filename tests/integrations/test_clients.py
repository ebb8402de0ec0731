"""Real training libraries: steps under gradient accumulation, and after resuming.

The Trainer of transformers and Lightning have files of their own.
"""

from __future__ import annotations

import json

import pytest
import torch

import tensortap as tap
from tensortap.core.record import Kind

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of other libraries
ACT, GRAD, WEIGHT = Kind.ACTIVATION, Kind.GRADIENT, Kind.WEIGHT
WGRAD, STATE = Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE
ACCUMULATED = 2
WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(30))]


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Import what takes seconds where a test needs it: every worker collects all files."""
    global transformers, Track
    import transformers

    from tensortap.rooms.integrations.transformers import Track


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )


@pytest.fixture(scope="module")
def data():
    import datasets

    def text(i):
        return " ".join(f"w{(i + k) % 30}" for k in range(6))

    return datasets.Dataset.from_list([{"prompt": text(i), "text": text(i)} for i in range(16)])


def mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))


def check(tracker, module, weight, steps, calls=ACCUMULATED, unseen=()):
    """Check the steps and calls of every kind of record."""
    records = [r for r in tracker.records if r.step >= 0]  # without initial weights
    for kind, name, number in [
        (ACT, module, calls), (GRAD, module, calls), (WEIGHT, weight, 1), (WGRAD, weight, 1),
        (STATE, f"{weight}.exp_avg", 1),
    ]:  # fmt: skip
        found = [(r.step, r.call) for r in records
                 if r.kind is kind and r.name == name and "mode" not in r.tags]  # fmt: skip
        wanted = [(step, call) for step in steps for call in range(number)]
        if kind is GRAD:  # in the order of the backward passes
            found.sort()
        assert found == wanted, (kind, name)
    assert set(tracker.unseen) <= set(unseen)
    return records


# -- loops of the user ---------------------------------------------------------------------


def accelerated(first, folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model = mlp()
    model, opt = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    if first:
        accelerator.load_state(folder)

    def step(batch):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            gradient = tap.viz.summarize(model[0].weight.grad)
            opt.step()
            opt.zero_grad()
        return gradient if accelerator.sync_gradients else None

    return model, opt, step, lambda: accelerator.save_state(folder)


def fabricated(first, folder):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    inner = mlp()
    model, opt = fabric.setup(inner, torch.optim.AdamW(inner.parameters()))
    state = {"model": model, "optimizer": opt}
    if first:
        fabric.load(folder / "state", state)
    calls = []

    def step(batch):
        fabric.backward(model(batch).square().mean() / ACCUMULATED)
        calls.append(1)
        if len(calls) % ACCUMULATED:
            return None
        gradient = tap.viz.summarize(inner[0].weight.grad)
        opt.step()
        opt.zero_grad()
        return gradient

    return model, opt, step, lambda: fabric.save(folder / "state", state)


@pytest.mark.parametrize("prepare", [accelerated, fabricated])
def test_prepared_models_and_optimizers(prepare, tmp_path, found, no_errors):
    for first in (0, 2):  # the second training resumes the first
        model, opt, step, save = prepare(first, tmp_path)
        gradients = []
        with tap.track(model, optimizer=opt, init_step=first) as tracker:
            for n in range(2 * ACCUMULATED):
                gradient = step(torch.full((3, 4), n + 1.0))
                if gradient is not None:
                    gradients.append(gradient)
                    tracker.step()
        save()
        check(tracker, "0", "0.weight", range(first, first + 2))
        assert [r.stats for r in found(tracker).of(WGRAD, "0.weight")] == gradients
        assert found(tracker).of(ACT, "Sequential")


# -- trainers ------------------------------------------------------------------------------


def trainer_options(folder, **more):
    return {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATED, "report_to": [], "use_cpu": True, "bf16": False,
        "logging_steps": 1, "save_strategy": "steps", "save_steps": 2, "disable_tqdm": True,
        "gradient_checkpointing": False, **more,
    }  # fmt: skip


def resumed(train, folder):
    """Train two steps and resume for two more; return the trackers of both."""
    trackers = []
    for first in (0, 2):
        with Track() as track:
            train(track, first + 2, str(folder / "checkpoint-2") if first else None)
        trackers.append(track.tracker)
    return trackers


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "peft"])
def test_trl_sft(adapter, tmp_path, tokenizer, data, no_errors):
    import peft
    import trl

    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")

    def train(track, steps, checkpoint):
        options = trainer_options(tmp_path, max_steps=steps, max_length=16)
        trl.SFTTrainer(
            llama(), trl.SFTConfig(**options), train_dataset=data.select_columns(["text"]),
            processing_class=tokenizer, callbacks=[track], peft_config=lora if adapter else None,
        ).train(resume_from_checkpoint=checkpoint)  # fmt: skip

    prefix = "base_model.model." if adapter else ""
    layer = f"{prefix}model.layers.0.self_attn.q_proj"
    weight = f"{layer}.lora_A.default.weight" if adapter else f"{layer}.weight"
    for first, tracker in zip((0, 2), resumed(train, tmp_path), strict=True):
        # the loss of trl uses the weight of the head without calling it
        records = check(tracker, layer, weight, range(first, first + 2), unseen=["lm_head"])
        frozen = {r.name for r in records if r.kind is WGRAD and "lora" not in r.name}
        assert bool(frozen) is not adapter


def test_trl_grpo(tmp_path, tokenizer, data, no_errors):
    """The forward passes of the loss are told from those of the rollouts."""
    import trl

    def reward(completions, **kwargs):
        return [float(len(set(text.split()))) for text in completions]

    def train(track, steps, checkpoint):
        options = trainer_options(
            tmp_path, max_steps=steps, num_generations=2, max_completion_length=4
        )
        trl.GRPOTrainer(
            llama(), reward, trl.GRPOConfig(**options), data.select_columns(["prompt"]),
            processing_class=tokenizer, callbacks=[track],
        ).train(resume_from_checkpoint=checkpoint)  # fmt: skip

    layer = "model.layers.0.self_attn.q_proj"
    for first, tracker in zip((0, 2), resumed(train, tmp_path), strict=True):
        records = list(tracker.records)
        of_layer = [r for r in records if r.kind is ACT and r.name == layer]
        for step in range(first, first + 2):
            modes = [r.tags.get("mode") for r in of_layer if r.step == step]
            assert modes.count(None) == ACCUMULATED
            assert modes.count("generate") >= (4 if step == first else 0)
            assert set(modes) <= {None, "generate", "no_grad"}
        gradients = {(r.step, r.call) for r in records if r.kind is GRAD and r.name == layer}
        assert gradients == {(r.step, r.call) for r in of_layer if "mode" not in r.tags}
        steps = [r.step for r in records if r.kind is WGRAD and r.name == f"{layer}.weight"]
        assert steps == list(range(first, first + 2))


KERAS = """
import json, keras, torch
import tensortap as tap

class Block(keras.layers.Layer):
    def __init__(self):
        super().__init__(name="block")
        self.inner = keras.layers.Dense(8, name="registered")
        self.others = [keras.layers.Dense(8, name="listed")]

    def call(self, x):
        return self.others[0](self.inner(x))

keras.utils.set_random_seed(0)
layers = [keras.Input((4,)), Block(), keras.layers.Dense(2, name="head")]
model = keras.Sequential(layers)
opt = torch.optim.AdamW(model.parameters())
rows = []
for first in (0, 2):
    with tap.track(model, optimizer=opt, init_step=first) as tracker:
        for _ in range(2):
            for _ in range(2):
                model(torch.ones(3, 4)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            tracker.step()
    rows += [(r.name, r.kind, r.step, r.call) for r in tracker.records if r.step >= 0]
print(json.dumps([rows, tracker.unseen]))
"""


def test_keras_on_torch(tmp_path, run_program):
    """In a process of its own: the backend of Keras is chosen when it is imported."""
    printed = run_program(tmp_path, KERAS, env={"KERAS_BACKEND": "torch"})
    rows, unseen = json.loads(printed.splitlines()[-1])
    assert unseen == {}
    layers = ["block.inner", "block.listed", "block", "head", "Sequential"]
    weights = [f"{name}.{part}" for name in (*layers[:2], "head") for part in ("kernel", "bias")]
    for kind, names, calls in [
        (ACT, layers, ACCUMULATED), (GRAD, layers, ACCUMULATED), (WEIGHT, weights, 1),
        (WGRAD, weights, 1), (STATE, [f"{name}.exp_avg" for name in weights], 1),
    ]:  # fmt: skip
        for name in names:
            found = [tuple(row[2:]) for row in rows if row[:2] == [name, kind.value]]
            assert found == [(step, call) for step in range(4) for call in range(calls)], name
    assert {row[0] for row in rows if row[1] == WEIGHT.value} == set(weights)
