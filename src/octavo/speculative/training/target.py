"""The target by itself: what its forward makes of whole sequences, and its vocabulary's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from octavo.config import Config
from octavo.core.dtypes import KV_DTYPE_ALIASES
from octavo.core.model_spec import KVFormat
from octavo.layers.layer import Weight
from octavo.models.loader import load_weights, make_rope_tables, plan_weights
from octavo.models.registry import build_model
from octavo.ops.backend import load_backend
from octavo.ops.batch import HostBatch
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
        kv_dtype, _ = backend.resolve_kv_dtype(KV_DTYPE_ALIASES.get(asked, asked), dtype, plan)
        passes = list(_passes(sequences))
        block_size = settings.cache.block_size
        kv_layers = backend.allocate_kv(
            max(sum(_num_blocks(tokens, block_size) for tokens in chosen) for chosen in passes),
            block_size,
            self.spec.kv_heads,
            KVFormat(kv_dtype),
        )
        forward = backend.compile(self._model.forward)
        for chosen in passes:
            batch = _batch(chosen, block_size)
            yield backend.to_host(forward(backend.batch_context(batch, kv_layers)))

    def _read(self, weight: Weight) -> np.ndarray:
        parts = [self._checkpoint.read(name) for name, _ in weight.parts()]
        return np.concatenate(parts).astype(np.float32)


def _passes(sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Sequences in order, so many at once that they have about _PASS_TOKENS tokens."""
    chosen: list[Sequence[int]] = []
    num_tokens = 0
    for tokens in sequences:
        if chosen and num_tokens + len(tokens) > _PASS_TOKENS:
            yield chosen
            chosen, num_tokens = [], 0
        chosen.append(tokens)
        num_tokens += len(tokens)
    yield chosen


def _num_blocks(tokens: Sequence[int], block_size: int) -> int:
    return -(-len(tokens) // block_size)


def _batch(sequences: Sequence[Sequence[int]], block_size: int) -> HostBatch:
    """All tokens of the sequences, in blocks that follow one another."""
    lengths = np.array([len(tokens) for tokens in sequences])
    counts = -(-lengths // block_size)
    firsts = np.cumsum(counts) - counts
    positions = np.concatenate([np.arange(length) for length in lengths])
    tables = firsts[:, None] + np.arange(counts.max())
    tables[np.arange(counts.max()) >= counts[:, None]] = 0
    return HostBatch(
        token_ids=np.concatenate([np.asarray(tokens, np.int64) for tokens in sequences]),
        positions=positions,
        kv_slots=np.repeat(firsts * block_size, lengths) + positions,
        query_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        context_lens=lengths.astype(np.int32),
        block_tables=tables.astype(np.int32),
    )
