"""Tiny models with random weights: of transformers and diffusers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

Made = tuple[torch.nn.Module, dict[str, Any]]  # a model, and the arguments of a call
Maker = Callable[[], Made]


class NotBuilt(Exception):
    """A model that cannot be built, or called, with a tiny configuration."""


MOST_PARAMETERS = 20_000_000
VOCABULARY = 64

# -- transformers --------------------------------------------------------------------------

_SIZES: dict[str, Any] = {
    "vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size decoder_vocab_size": 64,
    "num_hidden_layers n_layer n_layers num_layers layers depth num_blocks encoder_layers "
    "decoder_layers num_decoder_layers num_encoder_layers encoder_num_hidden_layers "
    "decoder_num_hidden_layers": 2,
    "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
    "decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads "
    "cross_num_attention_heads swa_num_attention_heads num_v_heads": 4,
    "num_key_value_heads num_kv_heads n_kv_heads swa_num_key_value_heads "
    "encoder_num_key_value_heads decoder_num_key_value_heads": 4,
    "hidden_size d_model n_embd dim embed_dim embedding_dim embedding_size model_dim emb_dim "
    "word_embed_proj_dim projection_dim hidden_dim d_embed residual_size lru_width "
    "cross_attention_hidden_size decoder_hidden_size encoder_hidden_size": 32,
    "head_dim d_kv attention_head_size qk_nope_head_dim v_head_dim d_head linear_key_head_dim "
    "linear_value_head_dim mamba_d_head mamba_head_dim swa_head_dim global_head_dim "
    "qk_rope_head_dim rotary_dim index_head_dim": 8,
    "intermediate_size ffn_dim ffn_hidden_size d_ff n_inner inner_dim d_inner dim_feedforward "
    "block_ff_dim mlp_dim encoder_ffn_dim decoder_ffn_dim moe_intermediate_size "
    "shared_expert_intermediate_size moe_shared_expert_intermediate_size": 64,
    "q_lora_rank kv_lora_rank o_lora_rank state_size d_state mamba_d_state time_step_rank": 8,
    "max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length seq_length "
    "context_size": 64,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "num_experts n_experts n_routed_experts num_local_experts num_routed_experts": 4,
    "num_experts_per_tok moe_topk moe_k num_selected_experts moe_top_k top_k_experts": 2,
    "n_shared_experts num_shared_experts n_group topk_group first_k_dense_replace": 1,
    "image_size input_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "index_topk index_n_heads linear_num_key_heads linear_num_value_heads n_groups": 4,
    "sliding_window local_attention attention_window_size window_size": 4,
}
_LISTS: dict[str, list[int]] = {
    "depths": [1, 1, 1, 1],
    "conv_dim": [16] * 7,
    "num_heads num_attention_heads": [2, 2, 4, 4],
    "hidden_sizes neck_hidden_sizes embed_dims encoder_hidden_sizes": [16, 16, 32, 32],
}
_SMALL = {key: size for keys, size in _SIZES.items() for key in keys.split()}
_SMALL_LISTS = {key: sizes for keys, sizes in _LISTS.items() for key in keys.split()}


def small(config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a configuration that make it small."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and ("hidden_size" in value or "d_model" in value):
            found[key] = small(value)
        elif key.endswith("_token_id") and isinstance(value, int):
            found[key] = 0 if key == "pad_token_id" else min(value, 2)
        elif key == "vocab_size" and value is None:  # taken from the tokenizer
            found[key] = VOCABULARY
        elif isinstance(value, (list, tuple)):
            if len(_SMALL_LISTS.get(key, ())) == len(value) > 0:
                found[key] = _SMALL_LISTS[key]
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and key in _SMALL:
            found[key] = _SMALL[key]
    return found


def of_transformers(name: str) -> Made:
    """Return a tiny model of a class of transformers, with inputs that it takes."""
    import transformers

    torch.manual_seed(0)
    try:
        cls = getattr(transformers, name)
        config = cls.config_class(**small(cls.config_class().to_dict()))
        model = _built(lambda: cls(config))
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {error}") from error
    problem: Exception | None = None
    for inputs in inputs_for(model, config):
        try:
            torch.manual_seed(0)
            copy.deepcopy(model)(**copy.deepcopy(inputs))
            return model, inputs
        except Exception as error:
            problem = problem or error
    raise NotBuilt(f"no inputs found: {type(problem).__name__}: {problem}")


def _built(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return a model, unless it is too large."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make().parameters())
    if size > MOST_PARAMETERS:
        raise NotBuilt(f"{size:,} parameters: too large for a sweep")
    return make()


def inputs_for(model: Any, config: Any) -> Iterator[dict[str, Any]]:
    """Yield inputs that a model may take."""
    ids = torch.randint(3, VOCABULARY, (2, 8))
    main = model.main_input_name
    if main == "input_ids":
        yield {"input_ids": ids, "use_cache": False}
        yield {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}
        yield {"input_ids": ids}
        yield {"input_ids": ids, "decoder_input_ids": ids}
    elif main == "pixel_values":
        side = getattr(config, "image_size", 32)
        side = side if isinstance(side, int) else 32
        for size in dict.fromkeys((side, 32, 64, 128, 224)):
            yield {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), size, size)}
    else:
        decoder = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
        mel = getattr(config, "num_mel_bins", 16)
        frames = 2 * getattr(config, "max_source_positions", 16)
        widths = "feature_projection_input_dim", "input_feat_per_channel"
        features = next((getattr(config, key) for key in widths if hasattr(config, key)), mel)
        for shape in (
            (2, 8000),
            (2, 80_000),
            (2, mel, frames),
            (2, frames, mel),
            (2, 64, features),
            (2, getattr(config, "max_length", None) or 64, mel),
            (2, 1, 8000),
        ):
            yield {main: torch.randn(shape), **decoder}


def transformers_models() -> Iterator[tuple[str, Maker]]:
    """Yield every causal, encoder, sequence-to-sequence, vision and audio model."""
    from transformers.models.auto import modeling_auto as auto

    tasks = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "CTC",
             "AUDIO_CLASSIFICATION", "SPEECH_SEQ_2_SEQ")  # fmt: skip
    names: dict[str, None] = {}
    for task in tasks:
        for found in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            names.update(dict.fromkeys([found] if isinstance(found, str) else found))
    for name in names:
        yield f"transformers {name}", lambda name=name: of_transformers(name)


# -- diffusers -----------------------------------------------------------------------------

_UNET = {
    "sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4,
}  # fmt: skip
_VAE = {"block_out_channels": (16, 32), "norm_num_groups": 4, "latent_channels": 4}
_DIT = {"num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2}
_IMAGE = (2, 3, 16, 16)
_LATENT = (2, 4, 8, 8)
_TIME = torch.tensor([1, 5])


def _text(length: int = 5, width: int = 16) -> torch.Tensor:
    return torch.randn(2, length, width)


DIFFUSERS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "UNet2DModel": (
        {**_UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8},
        lambda: {"sample": torch.randn(_IMAGE), "timestep": _TIME},
    ),
    "UNet2DConditionModel": (
        {**_UNET, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 16,
         "attention_head_dim": 4},
        lambda: {"sample": torch.randn(_LATENT), "timestep": _TIME,
                 "encoder_hidden_states": _text()},
    ),
    "UNet3DConditionModel": (
        {**_UNET, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
         "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "cross_attention_dim": 16,
         "attention_head_dim": 4},
        lambda: {"sample": torch.randn(2, 4, 2, 8, 8), "timestep": _TIME,
                 "encoder_hidden_states": _text()},
    ),
    "UNet1DModel": (
        {"block_out_channels": (32, 32, 64), "in_channels": 14, "out_channels": 14,
         "time_embedding_type": "positional", "use_timestep_embedding": True, "act_fn": "mish",
         "flip_sin_to_cos": False, "freq_shift": 1.0, "out_block_type": "OutConv1DBlock",
         "mid_block_type": "MidResTemporalBlock1D", "layers_per_block": 1,
         "down_block_types": ("DownResnetBlock1D",) * 3,
         "up_block_types": ("UpResnetBlock1D",) * 2},
        lambda: {"sample": torch.randn(2, 14, 16), "timestep": _TIME},
    ),
    "ControlNetModel": (
        {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4,
         "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 16,
         "attention_head_dim": 4, "conditioning_embedding_out_channels": (16, 32)},
        lambda: {"sample": torch.randn(_LATENT), "timestep": _TIME,
                 "encoder_hidden_states": _text(), "controlnet_cond": torch.randn(2, 3, 16, 16)},
    ),
    "AutoencoderKL": (
        {**_VAE, "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2},
        lambda: {"sample": torch.randn(_IMAGE)},
    ),
    "VQModel": (
        {**_VAE, "down_block_types": ("DownEncoderBlock2D",) * 2, "num_vq_embeddings": 16,
         "up_block_types": ("UpDecoderBlock2D",) * 2},
        lambda: {"sample": torch.randn(_IMAGE)},
    ),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16),
         "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)},
        lambda: {"sample": torch.randn(_IMAGE)},
    ),
    "DiTTransformer2DModel": (
        {**_DIT, "in_channels": 4, "out_channels": 8, "sample_size": 8, "patch_size": 2,
         "norm_num_groups": 4, "num_embeds_ada_norm": 10},
        lambda: {"hidden_states": torch.randn(_LATENT), "timestep": _TIME,
                 "class_labels": torch.tensor([1, 2])},
    ),
    "PixArtTransformer2DModel": (
        {**_DIT, "in_channels": 4, "out_channels": 8, "sample_size": 8, "patch_size": 2,
         "cross_attention_dim": 16, "caption_channels": 16, "use_additional_conditions": False},
        lambda: {"hidden_states": torch.randn(_LATENT), "timestep": _TIME,
                 "encoder_hidden_states": _text(),
                 "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "SD3Transformer2DModel": (
        {**_DIT, "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4,
         "joint_attention_dim": 16, "caption_projection_dim": 16, "pooled_projection_dim": 8,
         "pos_embed_max_size": 8},
        lambda: {"hidden_states": torch.randn(_LATENT), "timestep": _TIME,
                 "encoder_hidden_states": _text(), "pooled_projections": torch.randn(2, 8)},
    ),
    "FluxTransformer2DModel": (
        {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1,
         "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 16,
         "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8)},
        lambda: {"hidden_states": torch.randn(2, 16, 4), "timestep": _TIME.float(),
                 "encoder_hidden_states": _text(), "pooled_projections": torch.randn(2, 8),
                 "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)},
    ),
    "PriorTransformer": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "embedding_dim": 16,
         "num_embeddings": 7, "additional_embeddings": 4},
        lambda: {"hidden_states": torch.randn(2, 16), "timestep": _TIME,
                 "proj_embedding": torch.randn(2, 16), "encoder_hidden_states": _text(7)},
    ),
}  # fmt: skip


def of_diffusers(name: str) -> Made:
    """Return a tiny model of diffusers, with its inputs."""
    import diffusers

    config, inputs = DIFFUSERS[name]
    torch.manual_seed(0)
    return getattr(diffusers, name)(**config), inputs()


def diffusers_models() -> Iterator[tuple[str, Maker]]:
    for name in DIFFUSERS:
        yield f"diffusers {name}", lambda name=name: of_diffusers(name)
