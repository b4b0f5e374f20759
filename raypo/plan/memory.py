"""Predicted memory of one process of a run, by what it holds and by phase: pure arithmetic.

N weights of b bytes each, W learner workers, S tokens of a micro-batch, R of them responses, V
vocabulary, h hidden, a all query heads, i MLP width. Every formula names what it follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raypo.plan.deepspeed_config import Sharding
from raypo.plan.model_shape import ModelShape
from raypo.plan.sizes import (
    BUCKET_BYTES,
    CHUNK_ELEMENTS,
    SCRATCH_ELEMENTS,
    SHARED_SCORES,
    repeated_scores,
)

MASTER = 4
"""Bytes of a master weight, of each of AdamW's two moments and of an accumulated gradient: fp32."""
SCRATCH_COPIES = 3
"""Chunks of float32 logits that `_TokenLogProbs` holds at a time: z, exp(z) and a product."""

Bytes = dict[str, int]
"""What holds memory -> bytes."""


@dataclass(frozen=True)
class Batch:
    """The largest micro-batch that a phase may see: prompts, each with its responses."""

    prompts: int
    responses: int
    """Responses to each prompt."""
    prompt_tokens: int
    """Tokens of each prompt."""
    tokens: int
    """All of them; a prompt is read once."""


@dataclass
class Memory:
    """Bytes of one process: what it always holds, and what each phase adds."""

    held: Bytes = field(default_factory=dict)
    phases: dict[str, Bytes] = field(default_factory=dict)
    """Phase -> what it adds at its peak."""
    host: Bytes = field(default_factory=dict)
    """Off-loaded parts in the node's RAM, where the process works on a GPU."""

    @property
    def steady(self) -> int:
        """What it holds between phases."""
        return sum(self.held.values())

    def added(self, phase: str) -> int:
        """What a phase adds; 0 for one that it takes no part in."""
        return sum(self.phases.get(phase, {}).values())

    @property
    def peak(self) -> int:
        """The largest sum over its phases."""
        return self.steady + max((self.added(phase) for phase in self.phases), default=0)


def worst_batch(
    *, max_tokens: int, max_rows: int, samples: int, prompt_tokens: int, response_tokens: int
) -> Batch:
    """The micro-batch of most memory that a token budget allows.

    It is filled to its last token where the share has as many, with prompts and responses as long
    as they may be; of `batches_by_tokens`. Many short responses to a long prompt may hold more on
    CPU, where each has a copy of the prompt's keys and values.

    Args:
        max_rows: Responses of a worker's share.
        samples: Responses to each prompt.
    """
    whole = -(-max_rows // samples) * prompt_tokens + max_rows * response_tokens
    tokens = max(prompt_tokens + response_tokens, min(max_tokens, whole))
    responses = min(max_rows, samples, -(-max(1, tokens - prompt_tokens) // response_tokens))
    prompts = -(-tokens // (prompt_tokens + responses * response_tokens))
    return Batch(prompts, responses, prompt_tokens, tokens)


def activations(
    shape: ModelShape, batch: Batch, *, itemsize: int, device: str, checkpointing: bool = False
) -> int:
    """Bytes that a forward pass saves for the backward pass.

    With checkpointing (`learner.activation_checkpointing`) that is the input of each layer (bh) and
    all of one layer, which the backward pass computes anew.

    Of transformers' Llama with packed attention. A norm saves its input in float32, the normalised
    input and its output (4h + 2bh); attention saves queries, keys, values and its output (4ba), on
    CPUs where prompts are short those of whole rows, the prompt in each of them, and the outputs of
    each token (ba); an MLP with a gate saves gate, silu(gate), up and their product (4bi), one
    without two (2bi).
    Compare Korthikanti et al. 2022, arXiv:2205.05198, section 4.
    """
    norm = (4 + 2 * itemsize) * shape.hidden
    mlp = (4 if shape.gated else 2) * itemsize * shape.intermediate
    of_responses = max(0, batch.tokens - batch.prompts * batch.prompt_tokens)
    of_rows = batch.prompts * batch.responses * batch.prompt_tokens + of_responses
    repeated = repeated_scores(batch.prompt_tokens, batch.responses)
    is_shared = device == "cuda" or repeated > SHARED_SCORES
    attended = 4 * (batch.tokens if is_shared else of_rows)
    attention = (attended + batch.tokens) * itemsize * shape.attention
    layer, last = (2 * norm + mlp) * batch.tokens + attention, norm * batch.tokens
    if checkpointing:
        return shape.layers * itemsize * shape.hidden * batch.tokens + layer + last
    return shape.layers * layer + last


def layer_scratch(shape: ModelShape, batch: Batch, *, itemsize: int) -> int:
    """Bytes that one layer holds at a time without gradients: residual, norm and MLP."""
    return batch.tokens * itemsize * (3 * shape.hidden + 4 * shape.intermediate)


def logits(
    shape: ModelShape,
    batch: Batch,
    *,
    itemsize: int,
    device: str,
    learns: bool,
    of_divergence: bool = False,
) -> int:
    """Bytes of a chunk's logits and of what is worked out beside them.

    Of `raypo.models.token_log_probs`: the gradient of log-probs is written over the logits, and
    that of the head's weight, made in the weight's dtype, is added up in float32.

    Args:
        learns: The weight of the head has a gradient.
        of_divergence: All of a chunk is worked on at once in float32, with gradients of autograd.
    """
    elements = min(batch.tokens * shape.vocabulary, CHUNK_ELEMENTS[device])
    if of_divergence:
        return elements * ((1 + learns) * itemsize + SCRATCH_COPIES * 4)
    scratch = min(elements, SCRATCH_ELEMENTS[device]) * SCRATCH_COPIES * 4
    if not learns:
        return elements * itemsize + scratch
    weight = shape.vocabulary * shape.hidden
    return elements * itemsize + 4 * weight + max(scratch, itemsize * weight)  # a chunk's, to add


def trained(
    parameters: int, largest: int, sharding: Sharding, *, itemsize: int, frozen: int = 0
) -> tuple[Bytes, Bytes, Bytes]:
    """One model under DeepSpeed on one worker.

    Frozen weights have no gradients and no moments; stage 3 shards them like the others.

    Stage 0 (float32 only) keeps weights, gradients and AdamW's moments whole: 16 bytes a weight.
    Stages 1 and 2 hold all weights, and of master weights and moments one part in W; stage 2 of
    the summed gradients too, where stage 1 sums all of them on every worker, in bfloat16
    (BF16_Optimizer) beside those of the last micro-batch. Gradients pass a bucket of
    `reduce_bucket_size` elements. Stage 3 shards the weights too and gathers those in use, up to
    `stage3_max_live_parameters`. Rajbhandari et al. 2020, arXiv:1910.02054, section 5;
    deepspeed/runtime/bf16_optimizer.py, zero/stage_1_and_2.py and zero/stage3.py of 0.19.

    Args:
        parameters: Weights that are trained.
        largest: Elements of the largest tensor that is trained.
        frozen: Weights that are not.

    Returns:
        held: What is always there; weights, master weights, moments.
        update: What the update adds; gradients and buckets.
        host: What is off-loaded.
    """
    held: Bytes = {"weights": (parameters + frozen) * itemsize}
    host: Bytes = {}
    bucket = min(parameters, sharding.reduce_bucket)
    if sharding.stage == 0:
        kept = {"optimizer": 2 * MASTER * parameters, "gradients": itemsize * parameters}
        return held | kept, {"buckets": bucket * itemsize}, host
    share = -(-parameters // sharding.workers)
    optimizer = 3 * MASTER * share  # master weights and two moments
    gradients = (parameters if sharding.stage == 1 else share) * MASTER
    if sharding.stage == 1 and itemsize < MASTER:
        gradients += parameters * itemsize
    # Stage 2: the reduced part of a backward pass and its copy, before they join the sum. Else
    # the flat gradient of the step and AdamW's two intermediates.
    copies = 2 if sharding.stage == 2 else 3
    update = {"gradient copies": copies * MASTER * share}
    if sharding.stage == 3:
        live = min(parameters + frozen, sharding.max_live)
        weights = -(-(parameters + frozen) // sharding.workers) * itemsize
        update["gathered weights"] = live * itemsize
        (host if sharding.offload_param else held)["weights"] = weights
        if sharding.offload_param:
            held.pop("weights")
    if sharding.offload_optimizer:
        host["optimizer"] = optimizer
        host["gradients"] = gradients
        gradients = 2 * largest * itemsize  # one tensor on its way to the host
        host["gradient copies"] = update.pop("gradient copies")
    else:
        held["optimizer"] = optimizer
    held["gradients"] = gradients
    held["buckets"] = bucket * (4 if sharding.stage == 1 else itemsize)
    if sharding.overlaps and sharding.stage == 2:
        held["buckets"] *= 2
    return held, update, host


def push_bytes(shape: ModelShape, *, itemsize: int) -> int:
    """RAM of one bucket of `raypo.weights.buckets` whose tensors are made for the push."""
    largest = max(BUCKET_BYTES, shape.largest_tensor * itemsize)
    return min(largest, shape.parameters * itemsize)
