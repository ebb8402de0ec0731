"""Real engines compute the log-probabilities that their trainer does."""

from __future__ import annotations

import ctranslate2
import numpy as np
import pytest
import torch
from ctranslate2.converters import TransformersConverter
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import tensortap as tap
from tests.align.engines import VOCABULARY, llama, logprobs, padded, record, sequences

pytestmark = pytest.mark.slow  # they import engines
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}


def tokenizer():
    words = ["<pad>", "<s>", "<unk>", *(f"w{i}" for i in range(3, VOCABULARY))]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="<s>",
        unk_token="<unk>",
    )  # fmt: skip


def trained(folder, answers, **options):
    """What the trainer computes for prompts and their answers."""
    run = tap.init(folder)
    for ids in answers:
        ids = torch.as_tensor(ids)[None]
        with torch.no_grad():
            logits = llama()(ids).logits
        tap.catch(logprobs(logits[:, :-1], ids[:, 1:]), "logprobs", tokens=ids, **options)
    tap.finish()
    return run


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(tmp_path, cache):
    ids, mask, _ = padded("left")
    model = llama()
    run = tap.init(tmp_path / "b")
    with tap.track(model, tokens="input_ids", only_training=False, include="layers|lm_head"):
        model.generate(ids, attention_mask=mask, cache_implementation=cache, **GREEDY)
    tap.finish()
    first = record(tmp_path / "a", "right", track="input_ids")
    found = tap.align(first, run)
    assert found.verdict == "rounding only"
    assert found.matched == found.tokens_a == 85  # the rest was generated
    assert found.tokens_b == 85 + 5 * (len(sequences()))
    assert found.names[-1].name == "lm_head"


def test_continuous_batching(tmp_path):
    run = tap.init(tmp_path / "b")
    found = llama().generate_batch(
        inputs=[each[:8].tolist() for each in sequences()],
        generation_config=GenerationConfig(**GREEDY), warmup=False,
        continuous_batching_config=ContinuousBatchingConfig(return_logprobs=True),
    )  # fmt: skip
    answers = [[*each.prompt_ids, *each.generated_tokens] for each in found.values()]
    for ids, each in zip(answers, found.values(), strict=True):
        tap.catch(np.array(each.logprobs), "logprobs", tokens=ids)
    tap.finish()
    found = tap.align(trained(tmp_path / "a", answers), run)
    assert found.verdict == "rounding only", found
    assert found.logprobs.rows == 6 * len(answers)


def test_ctranslate2(tmp_path):
    llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    TransformersConverter(str(tmp_path / "model")).convert(str(tmp_path / "converted"))
    engine = ctranslate2.Generator(str(tmp_path / "converted"), intra_threads=1)
    run = tap.init(tmp_path / "b")
    words = [tokenizer().convert_ids_to_tokens(each.tolist()) for each in sequences()]
    for ids, score in zip(sequences(), engine.score_batch(words), strict=True):
        tap.catch(np.array(score.log_probs), "logprobs", tokens=ids)
    tap.finish()
    found = tap.align(record(tmp_path / "a", "packed"), run)
    assert found.verdict == "rounding only", found
    assert found.logprobs.rows == 80


@pytest.mark.filterwarnings("ignore::FutureWarning")  # those of trl about transformers
def test_grpo(tmp_path):
    """The log-probabilities that GRPO trains on, beside those of what it has generated."""

    class Caught(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, ids, mask, keep, *args, **options):
            found = super()._get_per_token_logps_and_entropies(
                model, ids, mask, keep, *args, **options
            )
            tap.catch(found[0], "logprobs", tokens=ids, mask=mask)
            answers.extend(row[seen.bool()] for row, seen in zip(ids, mask, strict=True))
            return found

    answers = []
    words = tokenizer()
    prompts = [{"prompt": words.decode(each[:6])} for each in sequences()[:4]]
    options = GRPOConfig(
        output_dir=str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=4,
        num_generations=2, max_completion_length=5, report_to=[], use_cpu=True, bf16=False,
        learning_rate=0.0, save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = llama(seed=1)
    run = tap.init(tmp_path / "a")
    trainer = Caught(
        model, reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
        args=options, train_dataset=Dataset.from_list(prompts), processing_class=words,
    )  # fmt: skip
    trainer.train()
    tap.finish()
    second = tap.init(tmp_path / "b")
    for ids in answers:
        with torch.no_grad():
            logits = model(ids[None].to(model.device)).logits
        tap.catch(logprobs(logits[:, :-1], ids[None, 1:]), "logprobs", tokens=ids)
    tap.finish()
    found = tap.align(run, second)
    assert found.verdict in ("agree", "rounding only"), found
    assert found.logprobs.rows > 0
