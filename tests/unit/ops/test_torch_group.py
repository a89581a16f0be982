"""Groups of ranks through torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch

from octavo.core.errors import ConfigError
from octavo.ops.torch.group import CPU, join
from octavo.parallel.host import listening_socket
from support.ranks import gathered, rank_processes, reduced


def test_processes_add_up_and_gather() -> None:
    """Whatever else they sum at a time: a row's bits are its own."""
    rng = np.random.default_rng(0)
    given = [rng.normal(size=(9, 40)).astype(np.float32) for _ in range(2)]
    columns = (40, 3)
    with rank_processes("torch", 2) as ranks:
        for rank, x in zip(ranks, given, strict=True):
            rank.begin(reduced, x)
        sums = [rank.result() for rank in ranks]
        for rank, x in zip(ranks, given, strict=True):
            rank.begin(reduced, x[4:5])
        alone = [rank.result() for rank in ranks]
        for rank, x, count in zip(ranks, given, columns, strict=True):
            rank.begin(gathered, x[:, :count], columns)
        together = [rank.result() for rank in ranks]
    parts = [x[:, :count] for x, count in zip(given, columns, strict=True)]
    for total, one, wide in zip(sums, alone, together, strict=True):
        np.testing.assert_array_equal(total, given[0] + given[1])
        np.testing.assert_array_equal(one, total[4:5])
        np.testing.assert_array_equal(wide, np.concatenate(parts, axis=1))


def test_halves_are_added_in_float32() -> None:
    from octavo.ops.torch.collectives import all_reduce
    from octavo.ops.torch.group import TorchGroup

    class Others:
        """Ranks that bring what this one does."""

        def name(self) -> str:
            return "gloo"

        def allgather(self, parts: list[list[torch.Tensor]], x: list[torch.Tensor]) -> Others:
            for part in parts[0]:
                part.copy_(x[0])
            return self

        def wait(self) -> None:
            pass

    x = torch.tensor([[1.0078125]], dtype=torch.bfloat16)  # 3 x is halfway above 3.015625
    group = TorchGroup(0, 3, Others())
    total = all_reduce(x, group)
    assert group.seconds > 0
    assert total.dtype == torch.bfloat16
    assert total.item() == torch.tensor(3 * 1.0078125).bfloat16().item()


def test_a_rank_that_is_not_there() -> None:
    with listening_socket("127.0.0.1") as taken:
        port = taken.getsockname()[1]
    offers = [{"address": "127.0.0.1", "port": port}, {"address": "127.0.0.1"}]
    with pytest.raises(ConfigError, match=rf"rank 1 of 2 finds no way .*127\.0\.0\.1:{port}"):
        join(1, 2, offers, CPU, None, timedelta(seconds=1))
