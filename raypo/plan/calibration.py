"""Benchmark of this machine's CPU on a few layers of a run's model, for time estimates.

The time of a model is the time of its layers plus the time of its head. Models with one layer and
with two layers are timed on a packed micro-batch with the run's lengths. The difference of the two
times is the time of a layer. The head is timed on a chunk of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from raypo.config import ModelSection, PPOConfig
from raypo.learner.peak import READ_BYTES, measured_flops, measured_memory
from raypo.models.chunk_sizes import CHUNK_ELEMENTS
from raypo.models.flops import Groups
from raypo.models.linear import use_fastest_linear
from raypo.models.model_shape import ModelShape
from raypo.models.packed_attention import can_read_packed, hidden_states, use_packed_attention
from raypo.models.packing import Packed, pack
from raypo.models.token_log_probs import head_log_probs
from raypo.plan.fit import Plan
from raypo.plan.times import Rates, Reached, microbatch_of, sampled_of

BUDGET_S = 1.0
"""Time budget of a layer's forward and backward pass, in seconds. The timed micro-batch is cut to
fit this budget."""
VOCABULARY = 1 << 15
"""Largest vocabulary of the timed head. Its time is scaled up to the model's vocabulary."""
REPEATS = 2
"""Timed calls of each function, after one warm-up call."""


def rates_here(plan: Plan) -> Callable[[Plan], Rates | None]:
    """Measure the rates of this machine's cores on the model of a ppo plan.

    Returns:
        Function that computes the rates of this plan, or of a variant of it with other settings.
    """
    config, learner = plan.config, plan.config.learner
    assert isinstance(config, PPOConfig)
    threads = min(plan.nodes[0].cpus or 1, learner.total_workers * learner.cpus_per_worker)
    torch.set_num_threads(threads)
    reached = measure(
        config.model,
        plan.models.policy,
        microbatch_of(config),
        sequences=sampled_of(plan)[1],
    )
    return partial(Rates.of_cores, core=reached.times(1 / threads))


def measure(section: ModelSection, shape: ModelShape, groups: Groups, *, sequences: int) -> Reached:
    """Time a policy's layers and head on all threads of this process, with random weights.

    Args:
        section: The model section.
        shape: Shape of the policy.
        groups: A microbatch of the run.
        sequences: Number of sequences that an engine samples at a time.
    """
    flops = measured_flops(section.dtype, "cpu")
    groups = groups.within(int(BUDGET_S * flops / (6 * shape.layer_weights)))
    packed = _packed(groups, shape.vocabulary)
    one, two = (_cut(section, layers) for layers in (1, 2))
    head, num_states = one.get_output_embeddings(), len(packed.states)
    rows = max(1, min(num_states, CHUNK_ELEMENTS["cpu"] // shape.vocabulary))

    def of_pass(*, learns: bool) -> float:
        first, second = (_seconds(partial(_read, m, packed, learns=learns)) for m in (one, two))
        layer = max(second - first, 0.1 * second)  # stays positive if the timings are noisy
        chunk = _seconds(partial(_predict, head, rows, learns=learns))
        of_head = chunk / rows * num_states * shape.vocabulary / head.weight.shape[0]
        return max(first - layer, 0.0) + shape.layers * layer + of_head

    counted = groups.forward_flops(shape)
    return Reached(
        forward=counted / of_pass(learns=False),
        update=3 * counted / of_pass(learns=True),
        decode=_decode_flops(shape, sequences, head.weight.dtype),
        memory=measured_memory(),
    )


def _packed(groups: Groups, vocabulary: int) -> Packed:
    random, few = np.random.default_rng(0), min(vocabulary, VOCABULARY)
    prompts, responses = [], []
    for _ in range(int(groups.prompts)):
        prompt = random.integers(few, size=groups.prompt_tokens)
        prompts += [prompt] * groups.samples
        responses += [random.integers(few, size=groups.response_tokens)] * groups.samples
    return pack(prompts, responses)


def _cut(section: ModelSection, layers: int) -> Any:
    """Create the policy with random weights, `layers` layers and a small vocabulary."""
    config = AutoConfig.from_pretrained(section.policy)
    text = config.get_text_config()
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:  # one per layer
            setattr(text, name, value[:layers])
    text.num_hidden_layers, text.vocab_size = layers, min(text.vocab_size, VOCABULARY)
    text.pad_token_id = None  # it may lie beyond the small vocabulary
    is_auto, dtype = section.attention == "auto", getattr(torch, section.dtype)
    chosen = {} if is_auto else {"attn_implementation": section.attention}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **chosen).eval()
    use_fastest_linear(model)
    if is_auto and can_read_packed(model):
        use_packed_attention(model)
    return model


def _read(model: Any, packed: Packed, *, learns: bool) -> None:
    """Run a forward pass through the layers. If `learns`, run a backward pass too."""
    with torch.set_grad_enabled(learns):
        states = hidden_states(model.base_model, packed)
    if learns:
        states.sum().backward()


def _predict(head: Any, rows: int, *, learns: bool) -> None:
    """Run the head on `rows` states to get log-probs. If `learns`, run a backward pass too."""
    states = torch.ones(rows, head.weight.shape[1], dtype=head.weight.dtype, requires_grad=learns)
    ids = torch.zeros(rows, dtype=torch.int64)
    with torch.set_grad_enabled(learns):
        log_probs, _ = head_log_probs(head, states, ids, 1.0, learns)
    if learns:
        log_probs.sum().backward()


def _decode_flops(shape: ModelShape, sequences: int, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a layer's matmuls for one token per sequence, as in decoding.

    Enough copies of the layer are timed that its weights are read from RAM, not from CPU caches.
    """
    count = max(1, READ_BYTES // (shape.layer_weights * dtype.itemsize))
    sizes = list(shape.linears.values()) * count
    layers = nn.ModuleList(nn.Linear(*size, bias=False, dtype=dtype) for size in sizes)
    use_fastest_linear(layers)
    tokens = {inputs: torch.ones(sequences, inputs, dtype=dtype) for inputs, _ in sizes}

    @torch.no_grad()
    def step() -> None:
        for layer, (inputs, _) in zip(layers, sizes, strict=True):
            layer(tokens[inputs])

    return 2 * shape.layer_weights * count * sequences / _seconds(step)


def _seconds(work: Callable[[], None]) -> float:
    """Return the mean duration of a call in seconds, after a warm-up call."""
    work()
    begin = time.perf_counter()
    for _ in range(REPEATS):
        work()
    return (time.perf_counter() - begin) / REPEATS
