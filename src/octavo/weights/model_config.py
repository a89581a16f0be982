"""Reading a config.json: checked access, and the numbers that all decoder families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import ConfigError
from octavo.core.model_spec import LayerSpec, ModelSpec

_MAX_INTEGER = 1 << 31
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_WIDTH = 1 << 20
"""Of any vector between matrices. Far beyond all models: what is built by layer, head or row of a
config that lies stays small.
"""


class ModelConfig:
    """A config.json. Every reader raises ConfigError with the key, its value and what is allowed;
    a key that is missing or null takes the default, if there is one.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = _MAX_INTEGER
    ) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self.error(key, "a positive number")
        return float(value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """None where the config says null; the default where it says nothing."""
        if key not in self.values:
            return default
        return None if self.values[key] is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def refuse(self, *keys: str) -> None:
        """For features that would change the output and are not built: they must be off."""
        for key in keys:
            if self.values.get(key):
                raise ConfigError(
                    f"config.json: {key} = {self.values[key]!r} is not built yet; use a model"
                    " without it"
                )

    def layer_types(
        self, num_layers: int, known: tuple[str, ...] = ("full_attention", "sliding_attention")
    ) -> list[str] | None:
        """One of `known` for each layer, if the config has any."""
        types = self.values.get("layer_types")
        if types is None:
            return None
        if (
            not isinstance(types, list)
            or len(types) != num_layers
            or any(t not in known for t in types)
        ):
            raise self.error("layer_types", f"{num_layers} of {' and '.join(known)}")
        return types

    def under(self, names: Mapping[str, str], **defaults: Any) -> ModelConfig:
        """The same with keys renamed, from old to new, where the old ones are there. defaults: of
        what is missing or null then.
        """
        values = dict(self.values)
        for old, new in names.items():
            if values.get(old) is not None:
                values[new] = values[old]
        missing = {key: value for key, value in defaults.items() if values.get(key) is None}
        return ModelConfig(values | missing)

    def rope(
        self,
        layer_type: str | None = None,
        *,
        theta_key: str = "rope_theta",
        default_theta: float = 10000.0,
        share: float | None = None,
    ) -> dict[str, Any]:
        """Rope parameters, rope_theta among them: of transformers 5 ("rope_parameters", perhaps by
        layer type) or older ("rope_scaling", with theta outside, at `theta_key`). share: of a head
        that turns where the config says nothing; None refuses a config that says less than 1.
        """
        parameters = self.mapping("rope_parameters")
        if layer_type is not None:
            parameters = ModelConfig(parameters).mapping(layer_type)
        else:
            parameters = self.mapping("rope_scaling") or parameters
        if parameters.get("rope_theta") is None:
            parameters["rope_theta"] = self.number(theta_key, default_theta)
        key = "partial_rotary_factor"
        given = parameters.get(key) or self.values.get(key) or self.values.get("rotary_pct")
        if share is None and given not in (None, 1):
            raise ConfigError(
                f"config.json: {key} = {given!r}: heads of this family turn as a whole; is this the"
                " config of another model?"
            )
        parameters[key] = given or share or 1.0
        return parameters

    def mapping(self, key: str) -> dict[str, Any]:
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return dict(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def error(self, key: str, allowed: str) -> ConfigError:
        shown = repr(self.values.get(key))[:200]
        return ConfigError(
            f"config.json: {key} must be {allowed}, got {shown}; is this a complete model folder?"
        )


GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
"""What configs of Gemma 3 leave out where it is transformers' default."""
BLOOM_KEYS = {
    "n_embed": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "seq_length": "max_position_embeddings",
}
"""How these families call what others call otherwise."""


def falcon_keys(config: ModelConfig) -> ModelConfig:
    """A Falcon's config with the keys of others. In the older architecture with multi_query there
    is one key head, whatever num_kv_heads says.
    """
    config = config.under(
        {"ffn_hidden_size": "intermediate_size", "num_kv_heads": "num_key_value_heads"},
        max_position_embeddings=2048,
    )
    config = config.under({}, intermediate_size=4 * config.integer("hidden_size"))
    is_new = config.flag("new_decoder_architecture", False)
    if not is_new and config.flag("multi_query", True):
        return ModelConfig({**config.values, "num_key_value_heads": 1})
    return config


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a decoder: hidden D, inner F, heads H, kv_heads G, head_dim E, vocab V."""

    hidden: int
    inner: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    eps: float
    ties_embeddings: bool

    @classmethod
    def read(
        cls,
        config: ModelConfig,
        *,
        head_dim: int | None = None,
        ties_embeddings: bool = False,
        eps_key: str = "rms_norm_eps",
        eps: float = 1e-6,
    ) -> DecoderShape:
        """head_dim, ties_embeddings, eps: the family's defaults; None is hidden / heads. eps_key:
        where its configs have what norms add to the variance.
        """
        hidden = config.integer("hidden_size", high=MAX_WIDTH)
        heads = config.integer("num_attention_heads", high=MAX_HEADS)
        kv_heads = config.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise config.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
        size = config.integer("head_dim", head_dim or hidden // heads, high=MAX_WIDTH)
        if size % 2 or size < 4:
            raise config.error("head_dim", f"an even number from 4 on (it comes to {size})")
        return cls(
            hidden=hidden,
            inner=config.integer("intermediate_size", high=MAX_WIDTH),
            num_layers=config.integer("num_hidden_layers", high=MAX_LAYERS),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=size,
            vocab=config.integer("vocab_size"),
            context=config.integer("max_position_embeddings"),
            eps=config.number(eps_key, eps),
            ties_embeddings=config.flag("tie_word_embeddings", ties_embeddings),
        )

    def model_spec(
        self, family: str, layers: Sequence[LayerSpec], num_vectors: int | None = None
    ) -> ModelSpec:
        """Of a model with these layers. num_vectors: parameters outside of them that are no
        matrices; None is a norm behind the last one.
        """
        return ModelSpec(
            family=family,
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            max_position=self.context,
            layers=tuple(layers),
            ties_embeddings=self.ties_embeddings,
            num_vector_parameters=self.hidden if num_vectors is None else num_vectors,
        )
