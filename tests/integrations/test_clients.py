"""Real training libraries: steps under gradient accumulation, and after resuming.

The Trainer of transformers and Lightning have files of their own.
"""

from __future__ import annotations

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


def test_trl_sft_of_an_adapter(tmp_path, tokenizer, data, no_errors):
    import peft
    import trl

    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")

    def train(track, steps, checkpoint):
        options = trainer_options(tmp_path, max_steps=steps, max_length=16)
        trl.SFTTrainer(
            llama(), trl.SFTConfig(**options), train_dataset=data.select_columns(["text"]),
            processing_class=tokenizer, callbacks=[track], peft_config=lora,
        ).train(resume_from_checkpoint=checkpoint)  # fmt: skip

    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    weight = f"{layer}.lora_A.default.weight"
    for first, tracker in zip((0, 2), resumed(train, tmp_path), strict=True):
        # the loss of trl uses the weight of the head without calling it
        records = check(tracker, layer, weight, range(first, first + 2), unseen=["lm_head"])
        assert not any(r.kind is WGRAD and "lora" not in r.name for r in records)


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
