"""A model without an engine, but with the weights and the cache that an engine would give it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo.config import Config
from octavo.core.dtypes import plain_kv_dtype
from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat
from octavo.models.kv_factors import factors_of_cache
from octavo.models.registry import engine_model
from octavo.ops.backend import backend_name, load_backend
from octavo.runner.batch import whole_sequences
from octavo.weights import Checkpoint

# Bounds the logits that are there at a time: 256 rows of a vocabulary of 262144 are 256 MiB.
_LOGIT_ROWS = 256


class BareModel:
    """What a model predicts for windows of a text, each by itself from its first token on.

    A window is one step of the backend. On CPUs its rows have the same bits in every other batch,
    so that what is said of it holds for decoding too. weight_bytes: as computed with. kv_bytes: of
    a token, padding included.
    """

    def __init__(self, checkpoint: Checkpoint, config: Config, window: int) -> None:
        """window: tokens of the longest. Raises ConfigError as an engine does."""
        model = engine_model(checkpoint.config)
        backend = load_backend(
            backend_name(config.backend.backend, model.only_backend, model.family),
            device=config.backend.device,
            threads=config.backend.threads,
        )
        stored = checkpoint.config.get("torch_dtype") or checkpoint.config.get("dtype")
        dtype, _ = backend.resolve_dtype(config.model.dtype, str(stored or ""))
        backend.choose(dtype, config.backend.kernels)
        plan = model.plan_weights(checkpoint, backend, dtype, config.model.quantization)
        asked = plain_kv_dtype(config.cache.kv_cache_dtype)
        kv_format = KVFormat(backend.resolve_kv_dtype(asked, dtype, plan)[0])
        plan.load()
        checkpoint.release_pages()
        model.prepare(backend, window)
        self._block_size = block_size = config.cache.block_size
        shapes, num_blocks = model.kv_shapes, -(-window // block_size)
        factors = factors_of_cache(checkpoint, shapes, kv_format)
        self._kv_layers = backend.allocate_kv(num_blocks, block_size, shapes, kv_format, factors)
        self._backend = backend
        self._name = checkpoint.name
        self._forward = backend.compile(model.forward)
        self._logits = backend.compile(model.logits)
        self.machine = backend.describe()
        self.formats = plan.formats
        self.kv_dtype = kv_format.dtype
        self.num_parameters = model.num_parameters
        self.weight_bytes = sum(plan.num_bytes)
        block_bytes = backend.kv_block_bytes(block_size, shapes, kv_format)
        self.kv_bytes = block_bytes / block_size

    def logits(self, window: np.ndarray, first: int) -> Iterator[tuple[slice, np.ndarray]]:
        """For window (T,): positions from `first` to the last but one, whose successors are known,
        some at a time, with their logits (R, V) float32. Raises ConfigError for logits that are no
        numbers.
        """
        positions = np.arange(len(window), dtype=np.int64)
        batch = whole_sequences([window], self._block_size)
        hidden = self._forward(self._backend.batch_context(batch, self._kv_layers))
        for begin in range(first, len(window) - 1, _LOGIT_ROWS):
            rows = slice(begin, min(begin + _LOGIT_ROWS, len(window) - 1))
            logits = self._logits(hidden, self._backend.from_host(positions[rows]))
            values = self._backend.to_host(logits).astype(np.float32, copy=False)
            if not np.isfinite(values).all():
                raise ConfigError(
                    f"{self._name}: the model's logits are no finite numbers; use --dtype float32 "
                    "if it computes in float16, else fetch it again: its weights are damaged"
                )
            yield rows, values
