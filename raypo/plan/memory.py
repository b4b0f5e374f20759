"""Predicted memory of one process of a run, by content and phase. Pure arithmetic.

Notation: b bytes per weight, W learner workers, h hidden size, a width of all query heads, i MLP
width. Every formula names the code or paper that it follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raypo.learner.deepspeed_config import Sharding
from raypo.models.chunk_sizes import (
    SCRATCH_ELEMENTS,
    SHARED_SCORES,
    chunk_rows,
    repeated_scores,
)
from raypo.models.model_shape import ModelShape
from raypo.weights.bucket_size import BUCKET_BYTES

MASTER = 4
"""Bytes of a master weight, of each AdamW moment and of an accumulated gradient (float32)."""
SCRATCH_COPIES = 3
"""Number of float32 tensors that `_TokenLogProbs` holds at a time, each as large as a chunk of
logits: the logits z, exp(z), and a product."""

Bytes = dict[str, int]
"""Bytes by content, such as weights or buckets."""


@dataclass(frozen=True)
class Batch:
    """The largest micro-batch of a phase: prompts, each with its responses."""

    prompts: int
    responses: int
    """Number of responses to each prompt."""
    prompt_tokens: int
    """Tokens of each prompt."""
    tokens: int
    """Tokens of the micro-batch. A prompt counts once, not once for each of its responses."""
    shares: int = 1
    """Number of workers that share the tokens (`learner.sequence_parallel`)."""

    @property
    def own_tokens(self) -> int:
        """Tokens that one worker computes."""
        return -(-self.tokens // self.shares)


@dataclass
class Memory:
    """Memory of one process: the part that it always holds, and the part that each phase adds."""

    held: Bytes = field(default_factory=dict)
    phases: dict[str, Bytes] = field(default_factory=dict)
    """Memory that each phase adds at its peak, by phase."""
    host: Bytes = field(default_factory=dict)
    """Off-loaded parts in the node's RAM, if the process uses a GPU."""
    snapshot: int = 0
    """RAM of the copy from which checkpoints are written beside the steps."""

    @property
    def steady(self) -> int:
        """Bytes held between phases."""
        return sum(self.held.values())

    def added(self, phase: str) -> int:
        """Return the bytes that a phase adds, or 0 if the process takes no part in the phase."""
        return sum(self.phases.get(phase, {}).values())

    @property
    def peak(self) -> int:
        """Bytes held at the peak of the largest phase."""
        return self.steady + max((self.added(phase) for phase in self.phases), default=0)


def worst_batch(
    *,
    max_tokens: int,
    max_rows: int,
    samples: int,
    prompt_tokens: int,
    response_tokens: int,
    shares: int = 1,
) -> Batch:
    """Return the micro-batch with the most memory that a token budget allows.

    Its prompts and responses have maximum length, and it uses the whole budget if the worker has
    enough responses (compare `batches_by_tokens`). On CPU, a micro-batch with many short responses
    to a long prompt may take even more memory, because each response has a copy of the prompt's
    keys and values.

    Args:
        max_tokens: Token budget of each worker; one prompt with one response may exceed it.
        max_rows: Number of responses that the worker processes.
        samples: Responses to each prompt.
        prompt_tokens: Maximum tokens of a prompt.
        response_tokens: Maximum tokens of a response.
        shares: Number of workers that share the tokens.
    """
    whole = -(-max_rows // samples) * prompt_tokens + max_rows * response_tokens
    tokens = max(prompt_tokens + response_tokens, min(max_tokens * shares, whole))
    responses = min(max_rows, samples, -(-max(1, tokens - prompt_tokens) // response_tokens))
    prompts = -(-tokens // (prompt_tokens + responses * response_tokens))
    return Batch(prompts, responses, prompt_tokens, tokens, shares)


def activations(
    shape: ModelShape,
    batch: Batch,
    *,
    itemsize: int,
    device: str,
    checkpointing: bool | str = False,
    mlp_tile: int | None = None,
) -> int:
    """Return the bytes that a forward pass saves on the device for the backward pass.

    With checkpointing (`learner.activation_checkpointing`), these are the input of each layer (bh)
    and all activations of one layer. The backward pass recomputes the latter, layer by layer. On
    GPUs `offload` moves the inputs to the host (`layer_inputs`). With tiles
    (`learner.mlp_tile_tokens`), the activations of MLPs exist for one tile of one layer only.

    Bytes per token, for transformers' Llama with packed attention:
    - norm: input in float32, normalised input and output (4h + 2bh);
    - attention: queries, keys, values and outputs (4ba), and the outputs with one row per token
      (ba). On CPUs with short prompts, the 4ba count a prompt once for each of its responses;
    - MLP: gate, silu(gate), up and their product (4bi); 2bi without a gate.

    Paper: compare Korthikanti et al. 2022, arXiv:2205.05198, section 4.
    """
    norm = (4 + 2 * itemsize) * shape.hidden
    mlp = (4 if shape.gated else 2) * itemsize * shape.intermediate
    of_responses = max(0, batch.tokens - batch.prompts * batch.prompt_tokens)
    of_rows = batch.prompts * batch.responses * batch.prompt_tokens + of_responses
    repeated = repeated_scores(batch.prompt_tokens, batch.responses)
    is_shared = device == "cuda" or repeated > SHARED_SCORES
    attended = 4 * (batch.tokens if is_shared else of_rows)
    attention = (attended + batch.tokens) * itemsize * shape.attention
    layer, last = 2 * norm * batch.tokens + attention, norm * batch.tokens
    tile = 0
    if mlp_tile is None or mlp_tile >= batch.own_tokens or not shape.tiles_mlps:
        layer += mlp * batch.tokens
    else:
        tile = mlp * mlp_tile
    if not checkpointing:
        layers = shape.layers * layer
    elif checkpointing == "offload" and device == "cuda":
        layers = layer
    else:
        layers = layer + shape.layers * itemsize * shape.hidden * batch.tokens
    # Each worker has a slice of the tokens, or of the heads.
    return -(-(layers + last) // batch.shares) + tile


def layer_inputs(shape: ModelShape, batch: Batch, *, itemsize: int) -> int:
    """Return the bytes of pinned RAM for the inputs of all layers.

    torch's cache of pinned memory rounds the size of each up to a power of two.
    """
    one = itemsize * shape.hidden * batch.own_tokens
    return shape.layers * (1 << (one - 1).bit_length())


def layer_scratch(shape: ModelShape, batch: Batch, *, itemsize: int) -> int:
    """Return the peak bytes of one layer without gradients: residual, norm and MLP."""
    return batch.own_tokens * itemsize * (3 * shape.hidden + 4 * shape.intermediate)


def logits(
    shape: ModelShape,
    batch: Batch,
    *,
    itemsize: int,
    device: str,
    learns: bool,
    head_in_float32: bool = False,
    of_divergence: bool = False,
) -> int:
    """Return the bytes of a chunk of logits and of the temporaries that exist beside it.

    This follows `raypo.models.token_log_probs`: the gradient of the log-probs overwrites the
    logits. The gradient of the head's weight is computed in the weight's dtype and summed in
    float32.

    Args:
        learns: Whether the head's weight has a gradient.
        head_in_float32: Whether the logits are float32 (`model.head_dtype`) and their gradient has
            `itemsize`. CPUs then also hold a float32 copy of the head's weight.
        of_divergence: Whether the logits are used for a divergence from a teacher (distillation).
            The whole chunk is then processed in float32 in one piece, with autograd.
    """
    rows = chunk_rows(shape.vocabulary, device, is_fused=not of_divergence)
    elements = min(batch.own_tokens, rows) * shape.vocabulary
    weight = shape.vocabulary * shape.hidden
    made = elements * itemsize
    if head_in_float32 and itemsize < MASTER:
        made += elements * 4 + (4 * weight if device == "cpu" else 0)
    if of_divergence:
        return made + elements * (learns * itemsize + SCRATCH_COPIES * 4)
    scratch = min(elements, SCRATCH_ELEMENTS[device]) * SCRATCH_COPIES * 4
    if not learns:
        return made + scratch
    # The gradient of one chunk before it is added to the float32 sum. GPUs add it without a copy.
    product = 0 if device == "cuda" and itemsize < MASTER else itemsize * weight
    if device == "cpu" and head_in_float32:
        product = MASTER * weight
    return made + 4 * weight + max(scratch, product)


def trained(
    parameters: int,
    largest: int,
    sharding: Sharding,
    *,
    itemsize: int,
    frozen: int = 0,
    matrices: int = 0,
) -> tuple[Bytes, Bytes, Bytes]:
    """Return the memory of one model under DeepSpeed on one worker.

    - Stage 0 (float32 only) holds weights, gradients and AdamW's moments whole: 16 bytes a weight.
    - Stages 1 and 2 hold all weights, and shard master weights and moments over the W workers.
      Stage 1 sums all gradients on every worker; in bfloat16 (BF16_Optimizer), the gradients of the
      last micro-batch are held in addition. Stage 2 shards the summed gradients too. Gradients are
      reduced in buckets of `reduce_bucket_size` elements.
    - Stage 3 also shards the weights and gathers the weights in use, up to
      `stage3_max_live_parameters`.

    Frozen weights have no gradients and no moments. Stage 3 shards them like trained weights. Muon
    keeps one moment, from stage 2 in the dtype of the weights.

    This follows the code in deepspeed/runtime/bf16_optimizer.py, zero/stage_1_and_2.py and
    zero/stage3.py of DeepSpeed 0.19.

    Args:
        parameters: Number of trained weights.
        largest: Elements of the largest trained tensor.
        sharding: DeepSpeed's settings.
        itemsize: Bytes of a weight.
        frozen: Number of frozen weights.
        matrices: Number of trained weights that Muon updates.

    Returns:
        held: Bytes that are always held: weights, gradients, buckets and optimizer state.
        update: Bytes that an update adds: gradient copies, gathered weights, buckets of stage 0.
        host: Bytes that are off-loaded.

    Paper: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.
    """
    held: Bytes = {"weights": (parameters + frozen) * itemsize}
    host: Bytes = {}
    bucket = min(parameters, sharding.reduce_bucket)
    if sharding.stage == 0:
        moments = MASTER * (2 * parameters - matrices)
        kept = {"optimizer": moments, "gradients": itemsize * parameters}
        return held | kept, {"buckets": bucket * itemsize}, host
    share = -(-parameters // sharding.workers)
    of_muon = -(-matrices // sharding.workers)
    moments = 2 * MASTER * (share - of_muon)
    moments += (MASTER if sharding.stage == 1 else itemsize) * of_muon
    optimizer = MASTER * share + moments  # master weights and moments
    gradients = (parameters if sharding.stage == 1 else share) * MASTER
    if sharding.stage == 1 and itemsize < MASTER:
        gradients += parameters * itemsize
    # Stage 2 copies: the reduced shard of a backward pass and its copy, before the shard is added
    # to the sum. Other stages: the flat gradient of the step and AdamW's two intermediates.
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
        gradients = 2 * largest * itemsize  # one tensor in transfer to the host
        host["gradient copies"] = update.pop("gradient copies")
    else:
        held["optimizer"] = optimizer
    held["gradients"] = gradients
    held["buckets"] = bucket * (4 if sharding.stage == 1 else itemsize)
    if sharding.overlaps and sharding.stage == 2:
        held["buckets"] *= 2
    return held, update, host


def vllm_activations(shape: ModelShape, tokens: int, *, itemsize: int, tensor_parallel: int) -> int:
    """Return the bytes of the largest pass of vLLM, which it runs once while it starts.

    At the MLP these are the hidden state and the residual, and the MLP's input, gate and product.
    """
    mlp = (3 if shape.gated else 2) * shape.intermediate // tensor_parallel
    return tokens * (2 * shape.hidden + mlp) * itemsize


def snapshot(parameters: int, sharding: Sharding, *, matrices: int = 0, exported: int = 0) -> int:
    """Return the RAM of a copy of one model's checkpoint and export (`learner.host_copies`).

    Args:
        parameters: Number of trained weights, whose master weights and moments the workers share.
        sharding: DeepSpeed's settings.
        matrices: Number of trained weights that Muon updates.
        exported: Bytes of the exported model, which the first worker copies.
    """
    return MASTER * -(-(3 * parameters - matrices) // sharding.workers) + exported


def push_bytes(shape: ModelShape, *, itemsize: int) -> int:
    """Return the RAM of one bucket of a push (`raypo.weights.buckets`)."""
    largest = max(BUCKET_BYTES, shape.largest_tensor * itemsize)
    return min(largest, shape.parameters * itemsize)
