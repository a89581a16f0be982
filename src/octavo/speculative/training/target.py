"""The target by itself: what its forward makes of whole sequences, and its vocabulary's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from octavo.config import Config
from octavo.core.dtypes import plain_kv_dtype
from octavo.core.model_spec import KVFormat
from octavo.layers.layer import Weight
from octavo.models.kv_factors import factors_of_cache
from octavo.models.loader import load_weights, make_rope_tables, plan_weights
from octavo.models.registry import build_model
from octavo.ops.backend import load_backend
from octavo.runner.batch import in_passes, whole_sequences
from octavo.weights import Checkpoint

# Half the bytes of float32, and whatever a norm has made of them fits in.
FEATURE_DTYPE = np.dtype(ml_dtypes.bfloat16)
_PASS_TOKENS = 1024


class Target:
    """A model without an engine, but on the backend and in the formats that an engine would choose:
    its hidden states are those that a head will see.
    """

    def __init__(self, checkpoint: Checkpoint, config: Config) -> None:
        """Reads no weights yet. Raises ConfigError as an engine does."""
        self._checkpoint = checkpoint
        self._config = config
        self._model = build_model(checkpoint.config)
        self.spec = self._model.spec
        self.config = checkpoint.config

    def embeddings(self) -> np.ndarray:
        """What token ids become, (V, D) float32."""
        factor = self._model.embedding.factor
        table = self._read(self._model.embedding.table)
        return table if factor is None else table * np.float32(factor)

    def head(self) -> np.ndarray:
        """By which hidden states become logits, (V, D) float32."""
        return self._read(self._model.head.weight)

    def write_features(
        self, path: Path, sequences: Sequence[Sequence[int]], show: Callable[[int], None]
    ) -> None:
        """The hidden states after the final norm of all tokens, sequence after sequence, (T, D)
        bfloat16. A file that has some of them is gone on with. show: told the tokens done.
        """
        row_bytes = self.spec.hidden_size * FEATURE_DTYPE.itemsize
        ends = np.cumsum([0, *map(len, sequences)])
        stored = path.stat().st_size // row_bytes if path.exists() else 0
        first = int(np.searchsorted(ends, stored, side="right")) - 1
        show(int(ends[first]))
        if first == len(sequences):
            return
        forward = self._forward(sequences[first:])
        with path.open("r+b" if stored else "wb") as file:
            file.truncate(int(ends[first]) * row_bytes)
            file.seek(0, 2)
            for hidden in forward:
                file.write(hidden.astype(FEATURE_DTYPE).tobytes())
                file.flush()
                show(file.tell() // row_bytes)

    def _forward(self, sequences: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
        """Hidden states, some whole sequences at a time."""
        settings = self._config
        backend = load_backend(
            settings.backend.backend,
            device=settings.backend.device,
            threads=settings.backend.threads,
        )
        stored = self._checkpoint.config.get("torch_dtype") or self._checkpoint.config.get("dtype")
        dtype, _ = backend.resolve_dtype(settings.model.dtype, str(stored or ""))
        backend.choose(dtype, settings.backend.kernels)
        plan = plan_weights(
            self._model, self._checkpoint, backend, dtype, settings.model.quantization
        )
        load_weights(self._model, plan)
        make_rope_tables(self._model, backend, max(map(len, sequences)))
        asked = settings.cache.kv_cache_dtype
        kv_format = KVFormat(backend.resolve_kv_dtype(plain_kv_dtype(asked), dtype, plan)[0])
        passes = list(in_passes(sequences, _PASS_TOKENS))
        block_size = settings.cache.block_size
        kv_layers = backend.allocate_kv(
            max(sum(_num_blocks(tokens, block_size) for tokens in chosen) for chosen in passes),
            block_size,
            self.spec.kv_heads,
            kv_format,
            factors_of_cache(self._checkpoint, self.spec.kv_shapes, kv_format),
        )
        forward = backend.compile(self._model.forward)
        for chosen in passes:
            batch = whole_sequences(chosen, block_size)
            yield backend.to_host(forward(backend.batch_context(batch, kv_layers)))

    def _read(self, weight: Weight) -> np.ndarray:
        parts = [self._checkpoint.read(name) for name, _ in weight.parts()]
        return np.concatenate(parts).astype(np.float32)


def _num_blocks(tokens: Sequence[int], block_size: int) -> int:
    return -(-len(tokens) // block_size)
