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
