"""Tiny random Hugging Face checkpoints, the same for every run, saved by transformers itself.

`make_checkpoint("qwen3", folder)` writes config.json, generation_config.json, model.safetensors,
tokenizer.json and tokenizer_config.json. Widths are tens, so that a forward takes milliseconds;
weights are large, so that the top two logits lie well apart and greedy text doesn't hinge on
rounding.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "gpt2",
    "gpt_neox",
    "opt",
    "bloom",
    "falcon",
    "starcoder2",
    "stablelm",
    "olmo",
    "olmo2",
    "granite",
    "cohere",
    "cohere2",
    "smollm3",
    "glm",
    "glm4",
)
"""Those that transformers has a module for."""
EXPERT_FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "olmoe",
    "gpt_oss",
    "granitemoe",
    "llama4_text",
)
"""Of mixtures of experts."""
FOREIGN_FAMILIES = (
    "arcee",
    "ernie4_5_moe",
    "exaone4",
    "gptj",
    "helium",
    "minicpm3",
    "seed_oss",
    "vaultgemma",
)
"""That Octavo has no file for: they run as transformers' modules."""

VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# What sets a family apart; head_dim 24 is neither hidden_size / heads nor a power of two.
_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": 24},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 24},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 12,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
        "num_hidden_layers": 3,
    },
    "qwen3_moe": {
        "head_dim": 24,
        "num_experts": 10,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    "olmoe": {"intermediate_size": 32, "num_experts": 12, "num_experts_per_tok": 3},
    "gpt_oss": {
        "head_dim": 24,
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    "granitemoe": {
        "intermediate_size": 40,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    },
    "llama4_text": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
    },
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    },
    "gemma": {"head_dim": 24},
    "gemma2": {
        "head_dim": 24,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 20,
        "sliding_window": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
    },
    "phi": {"num_key_value_heads": 4},
    "phi3": {"sliding_window": 24},
    "gpt2": {"num_key_value_heads": 4, "n_inner": 96},
    "gpt_neox": {"num_key_value_heads": 4},
    "opt": {"num_key_value_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"num_key_value_heads": 4, "intermediate_size": 256},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
    "starcoder2": {"sliding_window": 24},
    "stablelm": {},
    "olmo": {"clip_qkv": 1.5},
    "olmo2": {},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    },
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 24, "logit_scale": 0.25},
    "smollm3": {"num_hidden_layers": 4},
    "glm": {"head_dim": 24},
    "glm4": {"head_dim": 24},
    "arcee": {"tie_word_embeddings": True},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "num_hidden_layers": 3,
    },
    "exaone4": {
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gptj": {"rotary_dim": 8, "n_inner": 96},
    "helium": {"head_dim": 16},
    "minicpm3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
    "seed_oss": {"head_dim": 24, "attention_bias": True, "attention_out_bias": True},
    "vaultgemma": {
        "head_dim": 24,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 20,
        "sliding_window": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "head_dim": 24,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 20,
        "sliding_window": 24,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
    },
}


def make_checkpoint(
    family: str,
    folder: Path,
    *,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    seed: int = 0,
    **config_overrides: Any,
) -> Path:
    """Writes a checkpoint of `family` (one of those above) into `folder` and returns the folder.

    `max_shard_size="60KB"` makes several shards with an index. `config_overrides` are keys of the
    family's transformers config. Vocabulary: `VOCAB_SIZE`, byte-level BPE, ids 0 to 2 special.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(_COMMON | _FAMILY[family] | config_overrides))
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    gemma = "gemma" in family
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if gemma and name == "model.embed_tokens.weight":
                # Gemma scales embeddings up by sqrt(hidden_size) and ties the head to them: with
                # large ones every token would predict itself. The final norm makes up for it in the
                # logits.
                parameter.copy_(0.05 * noise)
            elif gemma and name == "model.norm.weight":
                parameter.copy_(7.0 + 0.2 * noise)
            elif parameter.dim() > 1:
                parameter.copy_(0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                norm_mean = 0.0 if gemma else 1.0  # Gemma multiplies by 1 + weight
                parameter.copy_(norm_mean + 0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # of routers; a parameter in all but name
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def make_repeating_checkpoint(folder: Path) -> Path:
    """A llama whose attention says so little that a token follows from the last one: its greedy
    texts soon go round in circles, which n-grams guess.
    """
    from safetensors.numpy import load_file, save_file

    file = make_checkpoint("llama", folder) / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if name.endswith("o_proj.weight"):
            weights[name] *= 0.01
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path) -> Path:
    """Writes tokenizer.json and tokenizer_config.json (ChatML, no BOS added) into `folder`."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    return folder


@cache
def _tokenizer_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise AssertionError(f"the training text gives {tokenizer.get_vocab_size()} tokens only")
    return str(tokenizer.to_str(pretty=False))


_TRAINING_TEXT = """
The printer folds the sheet three times, and the sheet becomes eight leaves, and the leaves become
sixteen pages. The reader turns the pages one after the other; the writer thinks of the reader, the
printer thinks of the paper, and the binder thinks of the thread. What the writer said on the first
page, the reader remembers on the last page. User and assistant: what is the capital of France?
The answer is Paris. There was a time when the words were set by hand, letter after letter, line
after line, and there will be a time when the words are set by no one at all.
"""
