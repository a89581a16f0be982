"""How far each layer of a family sees, by its config.json. None is unlimited."""

from __future__ import annotations

from octavo.weights.model_config import ModelConfig

GLOBAL, LOCAL = "full_attention", "sliding_attention"


def mistral_windows(config: ModelConfig, num_layers: int) -> list[int | None]:
    """All layers have one window."""
    window = config.optional_integer("sliding_window")
    if "sliding_window" not in config.values:  # transformers' default; null is "no window"
        window = 4096
    return [window] * num_layers


def qwen_windows(config: ModelConfig, num_layers: int) -> list[int | None]:
    """Off unless use_sliding_window, then as `layer_types` says, or in the layers from
    max_window_layers on.
    """
    if not config.flag("use_sliding_window", False):
        return [None] * num_layers
    window = config.integer("sliding_window", 4096)
    types = config.layer_types(num_layers)
    if types is None:
        first = config.integer("max_window_layers", 28, low=0)
        types = [LOCAL if i >= first else GLOBAL for i in range(num_layers)]
    return [window if t == LOCAL else None for t in types]


def gemma3_layer_types(config: ModelConfig, num_layers: int) -> list[str]:
    """As `layer_types` says, or every sliding_window_pattern-th layer is global."""
    types = config.layer_types(num_layers)
    if types is None:
        every = config.integer("sliding_window_pattern", 6)
        types = [LOCAL if (index + 1) % every else GLOBAL for index in range(num_layers)]
    return types


def gemma3_windows(config: ModelConfig, num_layers: int) -> list[int | None]:
    window = config.integer("sliding_window", 4096)
    types = gemma3_layer_types(config, num_layers)
    return [window if t == LOCAL else None for t in types]


def gemma2_windows(config: ModelConfig, num_layers: int) -> list[int | None]:
    """As `layer_types` says, or in every other layer from the first on."""
    window = config.integer("sliding_window", 4096)
    return _local(config, num_layers, window, every=2)


def cohere2_windows(config: ModelConfig, num_layers: int) -> list[int | None]:
    """As `layer_types` says, or every sliding_window_pattern-th layer is global."""
    window = config.integer("sliding_window", 4096)
    return _local(config, num_layers, window, every=config.integer("sliding_window_pattern", 4))


def phi3_windows(config: ModelConfig, num_layers: int) -> list[int | None]:
    """All layers have one window, or none."""
    return [config.optional_integer("sliding_window")] * num_layers


def smollm3_rotates(config: ModelConfig, num_layers: int) -> list[bool]:
    """Whether each layer has rotary embedding: all but every no_rope_layer_interval-th, or those
    with a 1 in `no_rope_layers`.
    """
    flags = config.values.get("no_rope_layers")
    if flags is None:
        every = config.integer("no_rope_layer_interval", 4)
        return [(index + 1) % every != 0 for index in range(num_layers)]
    if (
        not isinstance(flags, list)
        or len(flags) != num_layers
        or any(f not in (0, 1) for f in flags)
    ):
        raise config.error("no_rope_layers", f"{num_layers} times 0 or 1")
    return [bool(flag) for flag in flags]


def smollm3_windows(config: ModelConfig, num_layers: int) -> list[int | None]:
    """Off unless use_sliding_window, then as `layer_types` says, or in layers without rotary
    embedding.
    """
    window = config.optional_integer("sliding_window")
    if not config.flag("use_sliding_window", False) or window is None:
        return [None] * num_layers
    types = config.layer_types(num_layers)
    if types is None:
        rotates = smollm3_rotates(config, num_layers)
        types = [GLOBAL if one else LOCAL for one in rotates]
    return [window if t == LOCAL else None for t in types]


def _local(config: ModelConfig, num_layers: int, window: int, *, every: int) -> list[int | None]:
    types = config.layer_types(num_layers)
    if types is None:
        types = [LOCAL if (index + 1) % every else GLOBAL for index in range(num_layers)]
    return [window if t == LOCAL else None for t in types]


def gpt_oss_windows(config: ModelConfig, num_layers: int) -> list[int | None]:
    """As `layer_types` says; without it, every other layer is local, the first one too."""
    window = config.integer("sliding_window", 128)
    types = config.layer_types(num_layers)
    if types is None:
        types = [GLOBAL if index % 2 else LOCAL for index in range(num_layers)]
    return [window if one == LOCAL else None for one in types]


def llama4_rotates(config: ModelConfig, num_layers: int) -> list[bool]:
    """Which layers have rotary embeddings: as `no_rope_layers` says, or all but every
    no_rope_layer_interval-th.
    """
    rotates = config.values.get("no_rope_layers")  # 1 where there is one
    if not isinstance(rotates, list) or len(rotates) != num_layers:
        every = config.integer("no_rope_layer_interval", 4)
        return [(index + 1) % every != 0 for index in range(num_layers)]
    return [bool(one) for one in rotates]


def llama4_windows(config: ModelConfig, num_layers: int) -> list[int | None]:
    """Chunks, which are at most as much as windows of that size: as `layer_types` says, or in
    layers with rotary embeddings.
    """
    chunk = config.optional_integer("attention_chunk_size")
    if "attention_chunk_size" not in config.values:  # transformers' default; null is "no chunks"
        chunk = 8192
    types = config.layer_types(num_layers, (GLOBAL, "chunked_attention"))
    if types is None:
        return [chunk if rotates else None for rotates in llama4_rotates(config, num_layers)]
    return [None if one == GLOBAL else chunk for one in types]
