"""vLLM under the pushed weights of every causal architecture that transformers can build.

`python -m tests.every_engine [ARCHITECTURE ...]` prints a line for each: the model is loaded as a
learner loads it, pushed to an engine, changed and pushed again, and the log-probs of sampled tokens
are compared with the learner's. With --write it rewrites its rows in docs/models.md.

vLLM takes 10 s to import, so one process imports it and forks for each architecture. A fork has an
engine of its own, and may crash or hang alone.
"""

from __future__ import annotations

import contextlib
import importlib
import logging as logging_of_python
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raypo.config import EngineSection
from raypo.models.checkpoint import stored_tensors
from raypo.models.loading import load_causal_lm
from raypo.serving.engine import Engine
from raypo.serving.requests import SamplingRequest
from raypo.serving.vllm_settings import import_vllm, prepare_environment
from raypo.weights.messages import WeightPush
from tests.every_model import (
    CAUSAL,
    HOLDS,
    LATENT,
    NAMES,
    SIZES,
    SPECIAL,
    CannotBuildError,
    build,
    rewrite,
    shown,
    table,
)
from tests.stand_ins import generate, local_push, pack

KIND = "engine"
HEADS: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "n_embed", "embed_dim"], 128),
    **dict.fromkeys(["emb_dim", "embedding_size", "d_embed", "decoder_hidden_size"], 128),
    **dict.fromkeys(["word_embed_proj_dim", "lru_width", "hidden_dim"], 128),
    **dict.fromkeys(["head_dim", "global_head_dim", "attention_head_size", "swa_head_dim"], 32),
    **dict.fromkeys(["rotary_dim", "kv_channels", "attention_key_channels"], 32),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 32),
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    **dict.fromkeys(["qk_nope_head_dim", "v_head_dim"], 128),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 32),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"], 128),
    "max_sequence_length": 128,
}
"""Sizes that vLLM's kernels for CPUs support."""
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}
LATENT_64 = LATENT | {"head_dim": 64}
OF_ENGINES: dict[str, dict[str, Any]] = SPECIAL | {
    **dict.fromkeys(["axk1", "deepseek_v3", "longcat_flash"], LATENT_64),
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"] * 2},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 256},
    "glm4_moe": {"head_dim": 32},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32, "num_experts": 4, "moe_topk": 2},
    "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1},
    "llama4_text": {"num_experts_per_tok": 1},
    "ministral": {"head_dim": 32},
}
PROMPTS = [np.arange(3, 40, dtype=np.int32), np.array([5], dtype=np.int32)]
LENGTH = 16
CLOSE = 1e-3
"""Nats; all in float32 on a CPU."""
LIMIT_S = 120.0
IMPORTED = (
    *("deepspeed", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"),
    *("vllm.v1.attention.backends.cpu_attn", "vllm.model_executor.models.transformers"),
    *("vllm.model_executor.models.llama", "vllm.model_executor.models.deepseek_v2"),
)
"""Modules that engines and learners import late."""


class CannotRunError(Exception):
    """vLLM alone cannot run this architecture as transformers does."""


Sampled = list[tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Prompt, sampled token ids and their log-probs of each request."""


def gap(learner: Any, sampled: Sampled) -> float:
    """Return the largest difference of the log-probs of sampled tokens, in nats."""
    largest = 0.0
    for prompt, token_ids, log_probs in sampled:
        ids = torch.from_numpy(np.concatenate([prompt, token_ids])).long()
        with torch.no_grad():
            log_p = learner(ids[None, :-1]).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
        own = log_p.gather(-1, ids[len(prompt) :, None])[:, 0].numpy()
        largest = max(largest, float(np.nan_to_num(np.abs(own - log_probs).max(), nan=np.inf)))
    return largest


def start(folder: Path, *, reads_weights: bool, prefix_caching: bool = True) -> Engine:
    """Start an engine of a tiny model, without prefix caching if vLLM refuses that."""
    try:
        return Engine(
            str(folder),
            section=EngineSection(kv_cache_gb=0.05, prefix_caching=prefix_caching),
            dtype="float32",
            max_model_len=64,
            reads_weights=reads_weights,
        )
    except Exception as error:
        if not prefix_caching or "mamba cache mode" not in str(error):
            raise
    return start(folder, reads_weights=reads_weights, prefix_caching=False)


def sample(folder: Path, pushes: Sequence[WeightPush]) -> list[Sampled]:
    """Start an engine, and sample after each push, or from the folder's weights without pushes."""
    try:
        engine = start(folder, reads_weights=not pushes)
    except Exception as error:
        raise CannotRunError(shown(error)) from error
    requests = [SamplingRequest(ids, LENGTH, temperature=1.0, seed=0) for ids in PROMPTS]
    versions = []
    for push in pushes or [None]:
        if push is not None:
            engine.load_weights(push)
        completions = generate(engine, requests)
        versions.append(
            [(ids, c.token_ids, c.log_probs) for ids, c in zip(PROMPTS, completions, strict=True)]
        )
    return versions


def check(architecture: str, folder: Path) -> str:
    """Build, load, push, change and push again; return what was seen in one line.

    Raises:
        CannotBuildError: transformers alone fails.
        CannotRunError: vLLM does not run the model, or not as transformers does.
        Exception: raypo's push fails, or the engine's log-probs then differ.
    """
    build(CAUSAL, architecture, folder, sizes=SIZES | HEADS, special=OF_ENGINES)
    learners = [load_causal_lm(str(folder), dtype="float32").eval() for _ in range(2)]
    with torch.no_grad():
        for _, tensor in stored_tensors(learners[1]):  # buffers, too
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) * 0.02 - 0.01)
    pushes = [
        local_push(pack(stored_tensors(learner), bucket_bytes=1 << 18), version=version)
        for version, learner in enumerate(learners, 1)
    ]
    try:
        versions = in_fork(sample, folder, pushes)
        gaps = [gap(learner, sampled) for learner, sampled in zip(learners, versions, strict=True)]
        assert max(gaps) < CLOSE, f"{max(gaps):.2g} off after a push"
    except CannotRunError:
        raise
    except Exception:
        try:
            alone = gap(learners[0], in_fork(sample, folder, [])[0])
        except Exception as error:
            raise CannotRunError(f"vLLM with the model's own files: {shown(error)}") from error
        if not alone < CLOSE:
            raise CannotRunError(
                f"vLLM with the model's own files is {alone:.2g} off transformers"
            ) from None
        raise
    return f"equal within {max(gaps):.0e}"


def _answer(function: Any, arguments: tuple[Any, ...], answers: Any) -> None:
    """Send a function's result or exception; runs in a fork."""
    os.setsid()  # so that it ends with its own forks
    try:
        answer = function(*arguments)
    except Exception as error:
        answer = error
    try:
        answers.send(answer)
    except Exception:  # an exception that cannot be pickled
        answers.send(RuntimeError(shown(answer)))
    os._exit(0)  # vLLM's threads need not end


def in_fork(function: Any, *arguments: Any) -> Any:
    """Call a function in a fork of this process, and return its result or raise its exception.

    vLLM changes some of transformers' classes, so engine and learner are in different processes.
    """
    forks: Any = multiprocessing.get_context("fork")
    answers, sender = forks.Pipe(duplex=False)
    process = forks.Process(target=_answer, args=(function, arguments, sender))
    process.start()
    sender.close()
    try:
        if not answers.poll(LIMIT_S):
            raise CannotRunError(f"no answer within {LIMIT_S:g} s")
        answer = answers.recv()
    except EOFError:
        process.join(5)
        raise CannotRunError(f"its process ended with status {process.exitcode}") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _outcome(architecture: str) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return HOLDS, check(architecture, Path(folder))
        except CannotBuildError as error:
            return "cannot be built", str(error)
        except CannotRunError as error:
            return "not run by vLLM", str(error)
        except Exception as error:
            return "FAILS", shown(error)


def outcome(architecture: str) -> tuple[str, str]:
    """Return (holds | cannot be built | not run by vLLM | FAILS, detail) of an architecture."""
    try:
        return in_fork(_outcome, architecture)
    except CannotRunError as error:
        return "not run by vLLM", str(error)


def prepare() -> None:
    """Import vLLM in this process, for its forks."""
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging_of_python.disable()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    prepare_environment(eager=True)
    import_vllm()
    for module in IMPORTED:
        importlib.import_module(module)
    # vLLM looks at each class of models in a process of its own, to keep this one free of CUDA.
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()
    torch.set_num_threads(1)


def main() -> None:
    """Print a line for each architecture, and with --write rewrite docs/models.md."""
    prepare()
    architectures = [name for name in sys.argv[1:] if name != "--write"]
    outcomes = {}
    for architecture in architectures or NAMES[CAUSAL]:
        begin = time.monotonic()
        outcomes[architecture] = state, detail = outcome(architecture)
        took = time.monotonic() - begin
        print(f"{architecture}\t{state}\t{detail}\t{took:.1f}", flush=True)
    if "--write" in sys.argv:
        rewrite(KIND, table(KIND, outcomes))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
