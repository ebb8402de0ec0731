"""llama.cpp computes the log-probabilities that its trainer does; `make engines` runs it."""

from __future__ import annotations

import gguf
import llama_cpp
import numpy as np
import pytest
import torch

import tensortap as tap
from tests.align.engines import PROMPTS, Engine, llama, logprobs, record, sequences
from tests.align.test_reasons import Version, at

FLOAT32, FLOAT16 = 0, 1  # of ggml
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def converted(path, scores=FLOAT32):
    """Write the model as llama.cpp reads it, without a vocabulary: ids come in, logits go out."""
    model, config = llama(), llama().config
    file = gguf.GGUFWriter(path, "llama")
    file.add_vocab_size(config.vocab_size)
    file.add_tokenizer_model("no_vocab")
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_rope_dimension_count(config.head_dim)
    file.add_rope_freq_base(config.rope_parameters["rope_theta"])
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name, weight in model.state_dict().items():
        path = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        block = f"blk.{path[1]}." if path[0] == "layers" else ""
        value = weight.numpy().copy()
        if path[-1] in ("self_attn.q_proj", "self_attn.k_proj"):  # pairs that rotate are neighbors
            halves = value.reshape(-1, 2, config.head_dim // 2, value.shape[1])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        file.add_tensor(f"{block}{NAMES[path[-1]]}.weight", np.ascontiguousarray(value))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


class LlamaCpp(Engine):
    """Runs the model in llama.cpp, with a cache of float32 unless `options` say otherwise."""

    def __init__(self, folder, score=logprobs, **options):
        super().__init__(score=score)
        converted(path := folder / "model.gguf")
        options = {"type_k": FLOAT32, "type_v": FLOAT32, "flash_attn": False, **options}
        self.engine = llama_cpp.Llama(
            str(path), n_ctx=256, n_threads=1, logits_all=True, verbose=False, **options
        )

    def run(self, layout):
        """Read all of a sequence at once, or go on token by token after the prompt."""
        for number, ids in enumerate(sequences()):
            self.engine.reset()
            prompt = PROMPTS[number] if layout == "decoded" else len(ids)
            for part in (ids[:prompt], *ids[prompt:].split(1)):
                if len(part):
                    begin = self.engine.n_tokens
                    self.engine.eval(part.tolist())
                    end = self.engine.n_tokens
                    logits = torch.tensor(self.engine.scores[max(begin - 1, 0) : end - 1])
                    scores = self.score(logits[None], part[None, -len(logits) :])
                    tap.catch(scores, "logprobs", tokens=part[None], sequence=f"request {number}")


@pytest.mark.parametrize("layout", ["whole", "decoded"])
@pytest.mark.parametrize("trainer", ["right", "packed"])
def test_both_compute_the_same(tmp_path, trainer, layout):
    first = record(tmp_path / "a", trainer)
    found = tap.align(first, record(tmp_path / "b", layout, LlamaCpp(tmp_path)), model=llama())
    assert found.verdict in ("agree", "rounding only"), found
    assert found.logprobs.rows == 80


def test_a_temperature_is_named(tmp_path):
    first = record(tmp_path / "a", "left")
    found = tap.align(
        first, record(tmp_path / "b", "decoded", LlamaCpp(tmp_path, at(0.7))), model=llama()
    )
    assert (found.verdict, found.reason) == ("differ", "temperature not applied"), found


def test_weights_that_did_not_arrive_are_named(tmp_path):
    """The trainer makes a new version per step; the engine has read the first one."""
    first = record(tmp_path / "a", "right", *map(Version, range(3)))
    second = record(tmp_path / "b", "decoded", *3 * [LlamaCpp(tmp_path)])
    found = tap.align(first, second)
    assert (found.verdict, found.reason) == ("differ", "weights of an earlier version"), found


def test_another_base_of_rotations_differs(tmp_path):
    """Nobody blames something else."""
    first = record(tmp_path / "a", "right")
    engine = LlamaCpp(tmp_path, rope_freq_base=200.0)
    found = tap.align(first, record(tmp_path / "b", "decoded", engine), model=llama())
    assert (found.verdict, found.reason) == ("differ", ""), found
