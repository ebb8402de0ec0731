"""A dozen families of models; `make sweep` checks all of them."""

import pytest

import tensortap as tap
from tests.sweep import models
from tests.sweep.checks import problems

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of other libraries

FAMILIES = [
    "LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM", "MambaForCausalLM",
    "BertForMaskedLM", "T5ForConditionalGeneration", "ViTForImageClassification",
    "SwinForImageClassification", "Wav2Vec2ForCTC", "WhisperForConditionalGeneration",
]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_family_of_transformers(name):
    assert problems(lambda: models.of_transformers(name)) == []


@pytest.mark.parametrize("name", ["UNet2DConditionModel", "AutoencoderKL", "SD3Transformer2DModel"])
def test_family_of_diffusers(name):
    assert problems(lambda: models.of_diffusers(name)) == []


def test_attention_processor_that_all_layers_share(caplog):
    from diffusers.models.attention_processor import AttnProcessor2_0

    model, inputs = models.of_diffusers("UNet2DConditionModel")
    layer = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
    path = f"{layer}.processor.__call__.query"

    def traced():
        with tap.trace(model.eval(), path) as tracer:
            model(**inputs)
        return tracer.results[path].values

    assert len(traced()) > 0  # each layer has its own
    model.set_attn_processor(AttnProcessor2_0())
    with pytest.raises(KeyError, match="nothing was traced"):
        traced()
    assert "objects share" in caplog.text
