"""Attention over packed rows (`raypo.models.packing`), which replaces a model's own attention.

N packed tokens, H heads, D head size, n responses of a group.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from raypo.models.chunk_sizes import FLEX_BLOCK as BLOCK
from raypo.models.compiled import compiled
from raypo.models.model_files import ATTENTION_LAYERS
from raypo.models.packing import Layout, Packed, in_whole_blocks, pack
from raypo.models.router_replay import replay
from raypo.models.routers import about_to_pass
from raypo.models.sequence_parallel import SlicedLayout
from raypo.models.shared_prompts import SharedPrompts
from raypo.models.shares import whole_as_it_computes
from raypo.models.vision import image_inputs, modules_of_decoder
from raypo.types import to_device

NAME = "raypo_packed"
"""Name of the attention in transformers' registry."""
BY_ROWS = "raypo_by_rows"
"""Name of the variant without flex attention, used by the float32 trial."""
WINDOW_IN_MASK = {"qwen2_moe", "phimoe", "moshi"}
"""Model types that pass their sliding window only to the mask, not to the attention function."""
_TRIAL = (
    [np.arange(1, 6), np.arange(1, 6), np.arange(4, 6)],
    [np.arange(6, 10), np.arange(3, 6), np.arange(7, 9)],
)
EXACT = 1e-4
MAX_GAP = {torch.float32: EXACT, torch.bfloat16: 0.1}
"""Largest relative error that the trial accepts. In float32 it is the error of the worst state, in
bfloat16 that of all states together. Rounding causes about 1e-6 in float32 and 0.01 in bfloat16. A
wrong attention causes 0.3 or more. A recurrent state that leaks from row to row may cause only
0.01, so every model is also tried in float32."""
KERNEL_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}
"""Options of flex attention. For few tokens torch would choose a decoding kernel. If several heads
share keys and values, its blocks do not match blocks of size `BLOCK` (pytorch/pytorch#185349)."""
LARGE_HEAD, LARGE_HEAD_SHARED_BYTES = 128, 160 << 10
"""Largest head size for which the GPU's shared memory is not checked. With larger heads, the
backward pass of flex attention needs `LARGE_HEAD_SHARED_BYTES` of it per thread block
(pytorch/pytorch#198224)."""
QUERIES = 1024
"""Number of queries that attention with a window or a cap computes at a time on CPUs."""
MAX_COMPILED = 64
"""Maximum number of compiled variants of flex attention in a process. Each combination of
dtype, heads, window and use of gradients is a variant; lengths make no variants. Further variants
raise an error, because by default torch would silently run uncompiled and materialise all
scores."""


def can_read_packed(model: Any) -> bool:
    """Return True if `packed_attention` can replace a Hugging Face model's attention."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ()) or {"full_attention"}
    modules = modules_of_decoder(model)
    has_sinks = any(hasattr(module, "sinks") for module in modules)
    causal = [module.is_causal for module in modules if hasattr(module, "is_causal")]
    is_decoder = bool(causal) and all(causal) and model._supports_attention_backend
    has_window = bool(getattr(config, "sliding_window", None)) and (
        getattr(config, "use_sliding_window", True) is not False
    )
    tells_window = not has_window or config.model_type not in WINDOW_IN_MASK
    is_understood = is_decoder and layers <= ATTENTION_LAYERS and not has_sinks and tells_window
    return bool(is_understood and _has_room_for_heads(model))


def _has_room_for_heads(model: Any) -> bool:
    # The modules say it and not the config, because layers of a model may differ (Gemma 4).
    sizes = (getattr(module, "head_dim", None) for module in model.modules())
    size = max((size for size in sizes if isinstance(size, int)), default=0)
    if size <= LARGE_HEAD or not torch.cuda.is_available():
        return True
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.shared_memory_per_block_optin >= LARGE_HEAD_SHARED_BYTES


def use_packed_attention(model: Any) -> None:
    """Make a model read packed rows. It reads other inputs as before.

    A trial on three short rows comes first. If its results differ from those of separate rows, the
    model keeps its own attention, and a warning is issued. This happens if the model does not pass
    the layout to its attention, or is recurrent.
    """
    AttentionInterface.register(NAME, packed_attention)
    AttentionInterface.register(BY_ROWS, attention_by_rows)
    for name in (NAME, BY_ROWS):
        AttentionMaskInterface.register(name, sdpa_mask)
    before = model.config._attn_implementation
    with first_layers(model):
        problem = _problem(model, BY_ROWS, torch.float32)
    problem = problem or _problem(model, NAME, model.dtype)
    _set_attention(model, before if problem else NAME)
    if problem:
        warnings.warn(
            f"{type(model).__name__} cannot read packed rows ({problem}). Each response is "
            "instead computed in its own padded row, together with its prompt, which takes "
            f"longer. Set model.attention to {before} to accept that.",
            stacklevel=2,
        )


def _problem(model: Any, name: str, dtype: torch.dtype) -> str | None:
    """Compare packed rows under an attention with separate rows. Return the problem, or None.

    At ZeRO stage 3 all workers call this together, and all return a problem if one of them has it.

    Args:
        model: A Hugging Face model. Its own attention is restored.
        name: Registered name of the attention to try.
        dtype: The dtype that the model computes in.
    """
    before = model.config._attn_implementation
    backbone, packed = model.base_model, pack(*_TRIAL, device=model.device)
    widened = as_float32(model) if dtype == torch.float32 else nullcontext()
    with torch.no_grad():
        try:
            with whole_as_it_computes(model), widened:
                apart = hidden_states(backbone, packed).float()
                _set_attention(model, name)
                states = _packed_states(backbone, packed).float()
                # In bfloat16 a single state may be off by more than 0.1, so the norm is over all
                # states. That could hide a leak in a single state, which the float32 trial finds.
                dim = None if dtype == torch.bfloat16 else -1
                gap = float(((states - apart).norm(dim=dim) / apart.norm(dim=dim)).max())
                if not gap <= MAX_GAP.get(dtype, EXACT):
                    raise ValueError(f"its outputs have a relative error of {gap:.2g}")
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            _set_attention(model, before)
    return None


def _set_attention(model: Any, name: str) -> None:
    """Set the attention of a model's decoder. A vision tower keeps its own."""
    config = model.config
    text = config.get_text_config()
    keys = [key for key in config.sub_configs if getattr(config, key, None) is text]
    model.set_attn_implementation({"": name, **dict.fromkeys(keys, name)} if keys else name)


@contextmanager
def first_layers(model: Any, most: int = 8) -> Iterator[None]:
    """Shorten a deep model to its first layers, which include every kind of layer.

    A float32 pass over all weights of a large model would take minutes on a CPU.
    """
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    left_out = [
        (parent, name, child)
        for parent in model.base_model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == depth > most
    ]
    for parent, name, child in left_out:
        setattr(parent, name, child[:most])
    try:
        yield
    finally:
        for parent, name, child in left_out:
            setattr(parent, name, child)


@contextmanager
def as_float32(model: nn.Module) -> Iterator[None]:
    """Compute in float32: convert each module's weights during its forward pass only.

    The stored weights do not change.
    """
    originals: list[list[tuple[nn.Parameter, Tensor]]] = []

    def widen(module: nn.Module, _: Any) -> None:
        own = [
            parameter
            for parameter in module.parameters(recurse=False)
            if parameter.is_floating_point()
        ]
        originals.append([(parameter, parameter.data) for parameter in own])
        for parameter in own:
            parameter.data = parameter.data.float()

    def give_back(*_: Any) -> None:
        for parameter, data in originals.pop():
            parameter.data = data

    hooks: list[Any] = []
    for module in model.modules():
        own = module.parameters(recurse=False)
        if any(
            parameter.is_floating_point() and parameter.dtype != torch.float32 for parameter in own
        ):
            hooks.append(module.register_forward_pre_hook(widen))
            hooks.append(module.register_forward_hook(give_back, prepend=True, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def reads_packed(model: Any) -> bool:
    """Return True if a Hugging Face model reads packed rows, not one padded row per response."""
    return model.config._attn_implementation == NAME


def hidden_states(backbone: Any, packed: Packed) -> Tensor:
    """Return the hidden states [M, H] at `packed.states`.

    Args:
        backbone: A Hugging Face model without a head. If it cannot read packed rows, it reads one
            padded row for each response.
        packed: The packed rows.
    """
    if reads_packed(backbone):
        return _packed_states(backbone, packed)
    assert not any(packed.images), "only models that read packed rows may have images"
    return _by_rows(
        backbone, lambda ids: backbone(input_ids=ids, use_cache=False).last_hidden_state, packed
    )


def _packed_states(backbone: Any, packed: Packed) -> Tensor:
    packed = _for_attention(packed)
    about_to_pass(packed.states)
    replay(backbone, packed.experts)
    inputs = packed_inputs(packed) | image_inputs(backbone, packed)
    hidden = backbone(**inputs).last_hidden_state[0]  # [N, H]
    return _at(hidden, packed.states)


def state_size(backbone: Any) -> int:
    """Return the width H of a backbone's hidden states."""
    # Measure it on a short row: configs have different names for it, and it may differ from the
    # width of the embedding.
    ids = pack([np.arange(1, 3)], [np.arange(1, 2)], device=backbone.device)
    with torch.no_grad(), whole_as_it_computes(backbone):
        return hidden_states(backbone, ids).shape[-1]


def own_logits(model: Any, packed: Packed) -> Tensor:
    """Return the logits [M, V] at `packed.states` from a causal language model's own forward."""
    if reads_packed(model):
        packed = _for_attention(packed)
        about_to_pass(packed.states)
        replay(model, packed.experts)
        states, places = packed.states, None
        # The model selects states by plain indexing, whose backward pass on CPU is deterministic
        # only for unique indices (see `_at`).
        if states.device.type == "cpu":
            states, places = states.unique(return_inverse=True)
        inputs = packed_inputs(packed) | image_inputs(model.base_model, packed)
        logits = model(**inputs, logits_to_keep=states).logits[0]
        return logits if places is None else _at(logits, places)
    return _by_rows(model, lambda ids: model(input_ids=ids, use_cache=False).logits, packed)


def _for_attention(packed: Packed) -> Packed:
    """Return packed rows as the attention of their device reads them fastest."""
    if isinstance(packed.layout, SlicedLayout):  # `sliced` has done it
        return packed
    return in_whole_blocks(packed) if packed.layout.device.type == "cuda" else packed


def packed_inputs(packed: Packed) -> dict[str, Any]:
    """Return the arguments of a packed forward pass, for a model with packed attention."""
    return {
        "input_ids": packed.input_ids,
        "position_ids": packed.position_ids,
        "attention_mask": torch.ones(1, 1, 1, 1, device=packed.input_ids.device),  # 4D: used as is
        "layout": packed.layout,
        "use_cache": False,
    }


def _by_rows(model: Any, read: Callable[[Tensor], Tensor], packed: Packed) -> Tensor:
    """Evaluate a function on one row per response, and return its results at `packed.states`.

    Rows are padded on the right. In a causal model no token attends to that padding.

    Args:
        model: The model that reads the rows.
        read: Function of token ids [n, L] that returns [n, L, ...].
        packed: The packed rows.

    Returns:
        results: [M, ...].
    """
    gather_index, scatter_index = packed.layout.rows
    states = scatter_index[packed.states]
    about_to_pass(states)
    experts = packed.experts
    replay(model, None if experts is None else experts[gather_index].flatten(0, 1))
    return _at(read(packed.input_ids[0][gather_index]).flatten(0, 1), states)


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, H_kv, N, D]
    value: Tensor,  # [1, H_kv, N, D]
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention, [1, N, H, D]. Without a layout, use transformers' SDPA.

    On a GPU, flex attention computes only the blocks that the layout allows. On a CPU, long prompts
    are shared (`SharedPrompts`). With short prompts, attention uses one row per response, padded on
    the right; the rest of the model still processes each token once. If workers share the tokens,
    this is [1, N / n, H, D] of a worker's own tokens.
    """
    if isinstance(layout, SlicedLayout):
        more |= {"layout": layout.whole, "scaling": scaling}
        more |= {"sliding_window": sliding_window, "softcap": softcap}

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return packed_attention(module, query, key, value, attention_mask, **more)[0]

        return layout.attend(attention, query, key, value), None
    if layout is not None and query.is_cuda:
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        attend = partial(_flex_attention(), scale=scale, kernel_options=KERNEL_OPTIONS)
        mixed = flex(query, key, value, layout, attend, window=sliding_window, softcap=softcap)
        return mixed.transpose(1, 2), None
    more |= {"layout": layout, "scaling": scaling}
    more |= {"sliding_window": sliding_window, "softcap": softcap}
    return attention_by_rows(module, query, key, value, attention_mask, **more)


def attention_by_rows(
    module: nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, H_kv, N, D]
    value: Tensor,  # [1, H_kv, N, D]
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute `packed_attention` without flex attention: [1, N, H, D]."""
    if layout is None:
        if attention_mask is not None and attention_mask.shape[-1] == 1 < query.shape[2]:
            raise ValueError(f"{type(module).__name__} did not receive the layout of packed rows.")
        more |= {"scaling": scaling, "dropout": dropout}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    assert dropout == 0.0, "models are loaded with their dropout off"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    heads = query.shape[1] // key.shape[1]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [N, H, D]
    if heads > 1:
        k, v = (tensor.repeat_interleave(heads, dim=1) for tensor in (k, v))
    sees_all = sliding_window is None or layout.rows[0].shape[1] <= sliding_window
    is_usual = softcap is None and q.shape == v.shape and q.device.type == "cpu"
    if sees_all and is_usual and layout.shares_scores:
        return SharedPrompts.apply(q, k, v, layout, scale)[None], None
    gather_index, scatter_index = layout.rows
    kind: dict[str, Any] = {"scale": scale, "window": sliding_window, "softcap": softcap}
    # [rows, longest, H, D]
    rows = _attend(*(_at(tensor, gather_index) for tensor in (q, k, v)), **kind)
    return _at(rows.flatten(0, 1), scatter_index)[None], None


def _at(tokens: Tensor, places: Tensor) -> Tensor:
    """Return `tokens[places]`, [N, ...] -> [..., ...], with a deterministic backward pass."""
    if tokens.device.type != "cpu":
        # The backward pass of indexing sorts. That of an embedding has a race
        # (`raypo.models.embedding`).
        return tokens[places]
    # On CPU, the backward pass of indexing adds in the order in which threads arrive, so the last
    # bits would vary. The backward pass of an embedding is parallel and deterministic.
    return embedding(places, tokens.flatten(1)).unflatten(-1, tokens.shape[1:])


def _attend(
    q: Tensor,  # [n, L, H, D]
    k: Tensor,  # [n, L, H, D]
    v: Tensor,  # [n, L, H, D]
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Compute causal attention of n rows, [n, L, H, D]."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    length = q.shape[2]
    if length <= (window or length) and softcap is None:
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return mixed.transpose(1, 2)
    position, pieces = torch.arange(length, device=q.device), []
    # A few queries at a time: a mask of the whole length would grow with its square.
    for first in range(0, length, QUERIES):
        last = min(first + QUERIES, length)
        oldest = max(0, first - (window or length) + 1)
        before = position[first:last, None] - position[oldest:last]
        mask = (before >= 0) & (before < (window or length))
        own, keys, values = q[:, :, first:last], k[:, :, oldest:last], v[:, :, oldest:last]
        if softcap is None:
            pieces.append(
                scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=scale)
            )
            continue
        scores = softcap * torch.tanh(own @ keys.transpose(-1, -2) * scale / softcap)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        pieces.append(scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ values)
    return torch.cat(pieces, dim=2).transpose(1, 2)


def flex(
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, H_kv, N, D]
    value: Tensor,  # [1, H_kv, N, D]
    layout: Layout,
    attend: Any,  # torch's flex_attention, compiled or not
    *,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Compute attention by flex attention, which skips masked blocks: [1, H, N, D]."""

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    return attend(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped,
        block_mask=_block_mask(layout, window),
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _flex_attention() -> Any:
    # These settings are per thread, and activation checkpointing recomputes in a backward thread.
    torch._dynamo.config.recompile_limit = MAX_COMPILED
    torch._dynamo.config.specialize_float = True  # with gradients a score cap must be a constant
    return _compiled()


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return compiled(flex_attention, fullgraph=True)


def _block_mask(layout: Layout, window: int | None) -> Any:
    """Return the block mask. The layout caches it for each window, so all layers share it.

    torch's `create_block_mask` would evaluate all pairs of tokens.
    """
    from torch.nn.attention.flex_attention import BlockMask

    made: dict[int | None, Any] = layout.__dict__.setdefault("_block_masks", {})
    if window not in made:
        group, part, position = layout.segments

        def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            same = (part[q] == part[k]) | (part[k] == 0)
            seen = (group[q] == group[k]) & same & (position[k] <= position[q])
            return seen if window is None else seen & (position[q] - position[k] < window)

        pairs = seen_pairs(layout, window)
        whole = to_device(torch.from_numpy(pairs == BLOCK**2), layout.device)
        partly = to_device(torch.from_numpy((pairs > 0) & (pairs < BLOCK**2)), layout.device)
        made[window] = BlockMask.from_kv_blocks(
            *_indices(partly),
            *_indices(whole),
            BLOCK_SIZE=BLOCK,
            mask_mod=sees,
            seq_lengths=(len(position), len(position)),
        )
    return made[window]


def seen_pairs(layout: Layout, window: int | None) -> np.ndarray:
    """Count, for each block of queries and each block of keys, the pairs that attend.

    A token attends to two spans: one in its prompt, and one in its own response up to itself.

    Returns:
        pairs: [query blocks, key blocks] int.
    """
    groups = np.array([(g.first, g.prompt, g.tokens) for g in layout.groups], np.int32)
    first, prompt = np.repeat(groups[:, :2], groups[:, 2], axis=0).T  # [N] each
    position = layout.segments_on_host[2].numpy()  # [N] int32
    token = np.arange(len(position), dtype=np.int32)
    oldest = np.maximum(position - (window or len(position)) + 1, 0)
    stretches = (
        (first + oldest, np.minimum(first + prompt, token + 1)),
        (token - position + np.maximum(oldest, prompt), token + 1),
    )
    count = -(-len(token) // BLOCK)

    def pairs_from(positions: np.ndarray) -> np.ndarray:
        """Count the (query, key) pairs whose key is at or after the query's position.

        Args:
            positions: Key position for each query, [N].

        Returns:
            The count for each query block and key block, [query blocks, key blocks + 1]. The last
            column counts queries whose position is after the last key.
        """
        block, offset = np.divmod(positions, BLOCK)
        at, cells = token // BLOCK * (count + 1) + block, count * (count + 1)
        begun = np.bincount(at, minlength=cells).reshape(count, -1)
        of_first = np.bincount(at, BLOCK - offset, minlength=cells).reshape(count, -1)
        return of_first + BLOCK * (begun.cumsum(1) - begun)

    seen = sum(pairs_from(begin) - pairs_from(np.maximum(begin, end)) for begin, end in stretches)
    return np.asarray(seen)[:, :-1]


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of set blocks in each row, and all block indices, set blocks first."""
    which = torch.argsort(blocks, dim=-1, descending=True, stable=True)
    return blocks.sum(-1)[None, None].int(), which[None, None].int()
