"""Which layers each stage of a pipeline has: cut so that the costliest stage costs least, since all
stages work at once and wait for that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from octavo.core.errors import ConfigError
from octavo.core.model_spec import ModelSpec

_STEP_TOKENS = 64
"""Of a step whose cost counts: a busy one that decodes. It decides how many experts are read, and
nothing else that matters."""


def divide_layers(spec: ModelSpec, num_stages: int) -> list[range]:
    """The layers of each stage, at least one each. A layer costs the weights that a step reads of
    it; the first stage reads rows of the embedding besides, the last the whole head.

    Raises ConfigError for more stages than layers.
    """
    num_layers, size = len(spec.layers), spec.hidden_size
    if num_stages > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages}: the model has {num_layers} layers, and each "
            f"stage needs one; use at most {num_layers}, and --tensor-parallel-size or "
            "--data-parallel-size for what is left"
        )
    costs = [
        layer.num_touched_parameters(size, _STEP_TOKENS) + layer.num_vector_parameters
        for layer in spec.layers
    ]
    costs[0] += _STEP_TOKENS * size
    costs[-1] += spec.num_embedding_parameters
    return cheapest_cut(costs, num_stages)


def cheapest_cut(costs: Sequence[float], num_parts: int) -> list[range]:
    """Neighbours among `costs` in `num_parts` parts, none of them empty, so that the greatest sum
    of a part is the least that can be. num_parts: from 1 to as many as there are costs.
    """
    sums = [0.0, *accumulate(costs)]
    num_costs = len(costs)
    # greatest[end]: of the best cut of the first `end` into so many parts as there are `begins`;
    # each of these has where the last part then begins.
    greatest = sums
    begins: list[list[int]] = []
    for part in range(2, num_parts + 1):
        found = [0.0] * (num_costs + 1)
        chosen = [0] * (num_costs + 1)
        for end in range(part, num_costs + 1):
            found[end], chosen[end] = min(
                (max(greatest[begin], sums[end] - sums[begin]), begin)
                for begin in range(part - 1, end)
            )
        greatest = found
        begins.append(chosen)
    cuts = [num_costs]
    for chosen in reversed(begins):
        cuts.append(chosen[cuts[-1]])
    return [range(first, last) for first, last in pairwise([0, *reversed(cuts)])]
