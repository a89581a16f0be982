"""A simulated engine that takes the time that it says: for a server whose clients are real."""

from __future__ import annotations

import math

from octavo.config import Config
from octavo.core.errors import ConfigError
from octavo.core.model_spec import ModelSpec
from octavo.core.step import SlotBinding
from octavo.core.weight_format import WeightFormat, quantized_formats, weight_format
from octavo.simulator.clock import RealClock
from octavo.simulator.executor import SimulatedExecutor, uniform
from octavo.simulator.hardware import parse_hardware
from octavo.simulator.model_configs import spec_from_config
from octavo.simulator.roofline import Deployment, Roofline
from octavo.simulator.sizing import Sized, drafter_of, kv_format, size_engine
from octavo.weights import Checkpoint, open_checkpoint

_BETWEEN_STEPS_S = 0.002
_MEAN_ANSWER = 128
_ACCEPTANCE = 0.7


def real_time_executor(
    config: Config, checkpoint: Checkpoint, vocab_size: int
) -> tuple[SimulatedExecutor, Sized]:
    """An executor with the pace of the hardware that config.backend.simulate names, all of whose
    devices share each layer. Of the checkpoint, no weights are read. Raises ConfigError.

    Where a request leaves its end to the model, answers have exponentially distributed lengths.
    """
    hardware = parse_hardware(config.backend.simulate or "")
    spec = spec_from_config(checkpoint.config)
    stored = stored_format(checkpoint, spec)
    matrices = rest = stored
    if config.model.quantization is not None:
        matrices, rest = quantized_formats(config.model.quantization)
    deployment = Deployment(
        tensor_parallel=hardware.count,
        matrices=matrices,
        rest=rest,
        kv=kv_format(config.cache, hardware.device, matrices, rest),
        drafter=drafter_of(
            config, spec, lambda name: spec_from_config(open_checkpoint(name).config)
        ),
    )
    costs = Roofline(spec, hardware, deployment)
    weight_bytes = spec.weight_bytes(matrices, rest)
    sized = size_engine(config, spec, hardware, deployment, costs, weight_bytes)
    executor = SimulatedExecutor(
        costs,
        RealClock(),
        num_blocks=sized.settings.num_blocks,
        slack_s=_BETWEEN_STEPS_S,
        answer_length=_answer_length,
        acceptance=[_ACCEPTANCE] * len(sized.settings.draft_lengths),
        # Vocabularies have what is special at their ends, and words in the middle.
        token_ids=range(vocab_size // 4, max(vocab_size // 4 + 1, vocab_size // 2)),
    )
    return executor, sized


def stored_format(checkpoint: Checkpoint, spec: ModelSpec) -> WeightFormat:
    """Of all the checkpoint's weights on average, under the name of most of them. Raises
    ConfigError for one without tensors.
    """
    bits: dict[str, float] = {}
    for tensor in checkpoint.tensors.values():
        of_tensor = weight_format(tensor.dtype).bits * math.prod(tensor.shape)
        bits[tensor.dtype] = bits.get(tensor.dtype, 0.0) + of_tensor
    if not bits:
        raise ConfigError(
            "the checkpoint has no tensors, so nothing says in which format its weights are; use "
            "the whole model's files"
        )
    most = weight_format(max(bits, key=lambda name: bits[name]))
    return most._replace(bits=sum(bits.values()) / spec.num_parameters)


def _answer_length(binding: SlotBinding) -> int:
    return 1 + int(-_MEAN_ANSWER * math.log(uniform(binding.seed, 0)))
