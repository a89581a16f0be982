"""Whether a division of columns leaves a checkpoint's quantized groups whole."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core.errors import ConfigError
from octavo.layers.layer import Piece, Weight
from octavo.models.stored_piece import Checkpoint, block_columns
from octavo.parallel.division import INNER_UNIT


def column_unit(checkpoint: Checkpoint) -> int:
    """For `Share.inner_unit`: the columns in the largest block of any matrix of the checkpoint."""
    blocks = (
        block_columns(spec.dtype) for spec in checkpoint.tensors.values() if len(spec.shape) > 1
    )
    return max(INNER_UNIT, *blocks) if checkpoint.tensors else INNER_UNIT


def check_groups(weights: Iterable[Weight], checkpoint: Checkpoint, size: int) -> None:
    """Of a rank of `size`. Raises ConfigError if one of its weights has a part of a group of
    columns that share a scale: it could not be held in the bits that it is stored in.

    Longer groups than those of the neutral form are no obstacle: there they are short ones with
    one scale.
    """
    cut = {
        piece: None
        for weight in weights
        for piece in weight.pieces
        if piece.columns is not None and not piece.is_transposed
    }
    for piece in cut:
        if reason := _reason(piece, checkpoint):
            raise ConfigError(
                f"--tensor-parallel-size {size}: {piece.name} has {piece.shape[-1]} columns in "
                f"{reason}. Use a smaller size, data or pipeline parallelism, or a checkpoint in "
                "another format"
            )


def _reason(piece: Piece, checkpoint: Checkpoint) -> str:
    columns = piece.columns
    if columns is None:
        return ""
    group = block_columns(checkpoint.tensors[piece.name].dtype)
    tensor = checkpoint.grouped(piece.name)
    if tensor is not None:
        group = tensor.layout.group_size
        if tensor.input_order is not None:
            return "groups that lie scattered over its rows (desc_act), of which no rank has whole"
    edges = [edge for edge in (columns.start, columns.stop) if edge != piece.shape[-1]]
    if all(edge % group == 0 for edge in edges):
        return ""
    return (
        f"groups of {group}, of which columns {columns.start} to {columns.stop - 1}, one rank's, "
        "are not whole ones"
    )
