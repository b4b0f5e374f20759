"""The acceptance on GPUs, part by part; each part is a script that runs by itself.

    python -m tests.gpu.parts default_run   # or demo, run, driver, packages, off_load, ipc, ...

A part fails by raising. Its figures so far are printed as a line of JSON whenever there are more of
them (`note`), so that a part that fails or hangs has printed what it found before. docs/clusters.md
says what has run on a GPU.
"""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil

REPOSITORY = Path(__file__).parents[2]
SIZES: dict[str, Any] = {"hidden_size": 896, "intermediate_size": 4864, "vocab_size": 151_936}
"""Of Qwen2.5-0.5B, whose attention and vocabulary are those of models that people train."""
SPREAD = 2.0
"""Factor on the weights of a random model, so that each layer changes the model's output."""
GAP = 0.15
"""Nats of a token on average. Rounding in bfloat16 stays below; one layer with other weights does
not, wherever it is (tests/integration/test_gpu_parts.py)."""
OVER_PLAN = 1.3
"""By how much a peak may be above the plan's."""
Figures = dict[str, Any]
"""`planned_gb`, `measured_gb`, `planned_s` and `measured_s` have columns in the report."""
FIGURES: Figures = {}
"""Figures that this process's part has found so far."""
SIDE_BY_SIDE = "RAYPO_PARTS_SIDE_BY_SIDE"
"""Environment variable that is set where other parts run on the same GPU."""


def note(**more: Any) -> Figures:
    """Add figures, and print all of them so far as a line of JSON."""
    FIGURES.update(more)
    print(json.dumps(FIGURES), flush=True)
    return FIGURES


DEFAULT_STEPS = 8
"""More than end on a fast GPU between the first step and the kill."""
DEFAULT_RUN = f"""
name: first
num_steps: {DEFAULT_STEPS}
model: {{policy: policy}}
data: {{prompts: prompts.jsonl}}
reward: {{function: "reward.py:share_of_digits"}}
ppo: {{preset: grpo}}
checkpoint: {{every: 1}}
"""
"""The shortest run file of GRPO: no key about devices, memory or dtypes."""
REWARD = """
def share_of_digits(rollouts):
    return [sum(c.isdigit() for c in r.response) / max(len(r.response), 1) for r in rollouts]
"""


def default_run(*, device: str = "cuda") -> Figures:
    """GRPO as a user starts it for the first time: `raypo train`, killed, and resumed."""
    from tests.integration.task import read_metrics
    from tests.tiny import tiny_policy

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        tiny_policy(folder / "policy", hidden=256, head_dim=64)
        prompts = [{"prompt": f"{number}+{number}="} for number in range(64)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
        (folder / "reward.py").write_text(REWARD)
        (folder / "grpo.yaml").write_text(DEFAULT_RUN)
        run = folder / "runs" / "first"
        begin = time.perf_counter()
        killed = _train("grpo.yaml", cwd=folder)
        _kill_after(2, run, killed)  # a step's metrics are on disk before its checkpoint
        first, *rest = read_metrics(run)
        assert len(rest) < DEFAULT_STEPS - 1, "the run had finished before it was killed"
        note(until_killed_s=time.perf_counter() - begin, first_step_s=first["time/step_s"])
        begin = time.perf_counter()
        resumed = _train("grpo.yaml", cwd=folder)
        output = resumed.communicate()[0]
        rows = read_metrics(run)
        note(
            resumed_s=time.perf_counter() - begin,
            last_step_s=rows[-1]["time/step_s"],
            score=[row["rollout/score_mean"] for row in rows],
            probe_gap=max(row["mismatch/probe_gap_mean"] for row in rows),
        )
        assert resumed.returncode == 0, output[-3000:]
        assert rows[0] == first, "the second command did not resume from a checkpoint"
        _check_steps(run, DEFAULT_STEPS)
        if device == "cuda":
            assert "perf/gpu_memory_learner_gb" in rows[-1], "the learner was not on the GPU"
    return FIGURES


DEMO_STEPS = {"sft": 90, "reward_model": 600, "ppo": 6}
"""Steps of the demo's stages; SFT and the reward model as in the demo, PPO only a few."""
BESIDE_OTHERS = {
    "rollout.engine.gpu_memory_fraction": 0.2,
    "rollout.engine.kv_cache_gb": 1.0,
}
"""Keys of a run beside others on one GPU: vLLM then does not measure the memory that is free."""


def demo(steps: Mapping[str, int] = DEMO_STEPS, *, device: str = "cuda") -> Figures:
    """The pipeline of `make demo`, with a shorter PPO: SFT, pairs, a reward model, PPO."""
    from examples.quickstart.demo import Pipeline, fit, read_metrics
    from examples.quickstart.make_data import make_data
    from examples.quickstart.make_pairs import make_pairs
    from raypo import PPOTrainer, RewardModelTrainer, SFTTrainer

    with tempfile.TemporaryDirectory() as folder:
        pipeline = Pipeline(0, Path(folder) / "data", Path(folder) / "runs")
        make_data(pipeline.data, seed=0)
        begin = time.perf_counter()

        def done(stage: str, run: Path) -> None:
            nonlocal begin
            now = time.perf_counter()
            note(**{f"{stage}_s": now - begin})
            begin = now
            _check_steps(run, steps[stage])

        keys = BESIDE_OTHERS if device == "cuda" else {}
        fit(SFTTrainer(pipeline.sft_config(num_steps=steps["sft"], **keys)))
        done("sft", pipeline.sft)
        note(sft_score=read_metrics(pipeline.sft)[-1]["eval/score_mean"])
        make_pairs(pipeline.data, pipeline.sft / "policy", seed=0)
        begin = time.perf_counter()
        reward_model = pipeline.reward_model_config(num_steps=steps["reward_model"])
        fit(RewardModelTrainer(reward_model))
        done("reward_model", pipeline.reward_model)
        note(pair_accuracy=read_metrics(pipeline.reward_model)[-1]["eval/accuracy"])
        fit(PPOTrainer(pipeline.ppo_config(num_steps=steps["ppo"], **keys)))
        done("ppo", pipeline.ppo)
        rows = read_metrics(pipeline.ppo)
        note(ppo_step_s=rows[-1]["time/step_s"], ppo_score=[r["rollout/score_mean"] for r in rows])
    return FIGURES


def whole_demo() -> Figures:
    """`make demo` as it is, with its conditions: the policy has to have learned."""
    from examples.quickstart.demo import Pipeline, table

    with tempfile.TemporaryDirectory() as folder:
        pipeline = Pipeline(0, Path(folder) / "data", Path(folder) / "runs")
        begin = time.perf_counter()
        pipeline.run()
        results = pipeline.conditions()
        note(seconds=time.perf_counter() - begin, **{each.name: each.measured for each in results})
        assert all(each.is_met for each in results), table(results)
    return FIGURES


def driver() -> Figures:
    """torch sees the GPU, and the driver is new enough for its CUDA."""
    import torch

    from raypo.cluster.devices import check_driver
    from raypo.cluster.gpus import gpu_of
    from raypo.cluster.hardware import this_machine

    (node,) = this_machine()
    note(torch=torch.__version__, cuda=torch.version.cuda, nvidia_smi_finds=node.gpus)
    check_driver(gpus=node.gpus)
    assert torch.cuda.is_available(), f"torch {torch.__version__} finds no GPU"
    name = torch.cuda.get_device_name()
    assert torch.ones(8, device="cuda").sum().item() == 8.0
    known = gpu_of(name)
    return {
        "gpu": name,
        "known_as": known.name if known else None,
        "count": torch.cuda.device_count(),
    }


def packages() -> Figures:
    """What the pinned set brings can be imported together, NVML too."""
    import deepspeed
    import pynvml  # pyright: ignore[reportMissingImports]
    import ray
    import torch
    import vllm

    from raypo.serving.vllm_settings import check_version

    check_version(vllm.__version__)
    pynvml.nvmlInit()
    versions = {each.__name__: each.__version__ for each in (torch, ray, vllm, deepspeed)}
    return {**versions, "driver": pynvml.nvmlSystemGetDriverVersion()}


def gradients() -> Figures:
    """Run the tests of gradients whose kernels differ on a GPU: lookups of embeddings."""
    return _pytest("test_gradients.py")


def off_load() -> Figures:
    """A learner leaves the GPU and comes back at every stage in both dtypes with all its bytes.

    The figures are mean gaps after two updates: `moved` of the learner that was moved from one that
    stayed, `control` of two that stayed. The second is 0 where the GPU's kernels repeat.
    """
    import torch
    import torch.distributed as dist

    from tests.integration.off_load import comes_back
    from tests.tiny import tiny_policy

    found: Figures = {}
    torch.set_num_threads(1)  # threads that wait by spinning took 8 of 16 cores from other parts
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group("nccl", init_method=rendezvous, rank=0, world_size=1)
        model = str(tiny_policy(Path(folder) / "model", hidden=512, layers=8))
        for dtype in ("float32", "bfloat16"):
            for stage in range(4):
                gaps = comes_back(model, stage=stage, dtype=dtype)
                found |= {f"{dtype}_{stage}_{name}": gap for name, gap in gaps.items()}
        dist.destroy_process_group()
    return found


def ipc() -> Figures:
    """20 buckets through CUDA IPC to another process.

    With expandable segments torch hands file descriptors over by pidfd_getfd, which containers may
    forbid: whether it works is told, and no reason to fail.
    """
    for name, value in (("plain", ""), ("expandable", "expandable_segments:True")):
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": value}
        if not value:
            environment.pop("PYTORCH_CUDA_ALLOC_CONF")
        command = [sys.executable, "-m", "tests.gpu.ipc_probe"]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            printed = json.loads(done.stdout.splitlines()[-1])
            note(**{f"{name}_{key}": value for key, value in printed.items()})
            continue
        assert value, f"{name}: {done.stderr[-2000:]}"
        note(**{name: f"does not work here: {done.stderr.strip().splitlines()[-1]}"})
    return FIGURES


def group() -> Figures:
    """A broadcast group over NCCL, of this process alone, connects within its time-out."""
    import torch

    from raypo.weights.group import Group, group_store
    from raypo.weights.messages import Rendezvous

    store = group_store("127.0.0.1", 0, 60.0, is_host=True)
    rendezvous = Rendezvous(1, "127.0.0.1", store.port, 1, "nccl", 60.0)
    begin = time.perf_counter()
    member = Group(rendezvous, rank=0, store=store, device="cuda:0")
    connected_s = time.perf_counter() - begin
    flat = torch.arange(1 << 20, device="cuda").view(torch.uint8)
    member.broadcast(flat, has_failed=lambda: False)
    member.leave()
    return {"connected_s": connected_s}


def attention(dtype: str = "bfloat16", *, device: Any = "cuda", lengths: int = 20) -> Figures:
    """Packed rows of many lengths say what separate rows say, forward and backward.

    With windows and without, with gradients and without: a few kernels, however many lengths. Few
    tokens, like those of a probe, of heads that share keys and values too.
    """
    import torch
    from torch._dynamo.utils import counters

    from raypo.models.packed_attention import NAME, use_packed_attention
    from raypo.models.packing import pack

    found: Figures = {}
    before = counters["stats"]["unique_graphs"]
    kinds = (("whole", None, 7, 300), ("window", 64, 7, 300), ("few", None, 8, 16))
    for kind, window, heads, longest in kinds:
        apart = _attention_model(window, heads).to(device, getattr(torch, dtype))
        packed = copy.deepcopy(apart)
        use_packed_attention(packed)
        assert packed.config._attn_implementation == NAME, "the trial at load failed"
        states, gradients = [], []
        for seed in range(lengths):
            rows = pack(*_rows(seed, longest), device=device)
            states.append(_states_gap(packed, apart, rows))
            gradients.append(_gradients_gap(packed, apart, rows))
        found |= {f"{kind}_states": max(states), f"{kind}_gradients": max(gradients)}
        found["graphs"] = counters["stats"]["unique_graphs"] - before
        note(**found)
    assert max(value for name, value in found.items() if name != "graphs") < 0.05, found
    assert found["graphs"] <= 12, found
    return found


def engine(
    dtype: str = "bfloat16", *, kind: str = "qwen2", layers: int = 24, device: Any = "cuda"
) -> Figures:
    """An engine sleeps, takes other weights, wakes and agrees; so it does while it samples."""
    found, gaps = _engine(dtype, kind=kind, layers=layers, device=device)
    wrong = {name: value for name, value in gaps.items() if not value < GAP}
    assert not wrong, f"other weights than the learner's: {wrong}"
    # The old weights have to be told from the new ones by more than rounding.
    told_apart = found["keep_after_the_push"] > 3 * gaps["keep_old_tokens"]
    assert told_apart, f"nothing was sampled after the push: {found}"
    return found


def engine_llama(dtype: str = "bfloat16", *, layers: int = 24, device: Any = "cuda") -> Figures:
    """The same with a Llama, which vLLM gives to version 2 of its model runner; Qwen2 has 1."""
    return engine(dtype, kind="llama", layers=layers, device=device)


def engine_in_float32() -> Figures:
    """The same in float32, in which attention computes in TF32: the gaps say by how much."""
    return _engine("float32", kind="qwen2", layers=24, device="cuda")[0]


def microbatch(dtype: str = "bfloat16", *, layers: int = 24, device: str = "cuda") -> Figures:
    """The worst micro-batch of the run below, beside what the plan says of it."""
    import torch

    from raypo.models.model_shape import ITEMSIZE, ModelShape
    from raypo.models.networks import Policy
    from raypo.models.packed_attention import NAME
    from raypo.plan import memory

    itemsize = ITEMSIZE[dtype]
    batch = memory.worst_batch(
        max_tokens=TOKENS["max_tokens_per_microbatch"],
        max_rows=TOKENS["prompts"] * TOKENS["samples"],
        samples=TOKENS["samples"],
        prompt_tokens=TOKENS["prompt"],
        response_tokens=TOKENS["response"],
    )
    with _model(layers=layers, dtype=dtype) as folder:
        shape = ModelShape.read(folder)
        policy = Policy(_loaded(folder, dtype, device), temperature=1.0)
        assert policy.model.config._attn_implementation == NAME
        _backward(policy, batch, device)  # what is compiled and kept for good
        policy.zero_grad()
        held = _allocated(device)
        _backward(policy, batch, device)
        measured = _peak(device) - held
    saved = memory.activations(shape, batch, itemsize=itemsize, device=device)
    planned = saved + memory.logits(shape, batch, itemsize=itemsize, device=device, learns=True)
    planned += shape.parameters * itemsize  # the gradients of this one pass
    found = note(tokens=batch.tokens, planned_gb=planned / 1e9, measured_gb=measured / 1e9)
    if device == "cuda":
        torch.cuda.synchronize()
        assert measured < OVER_PLAN * planned, found
    return found


TOKENS = {
    "prompts": 16,
    "samples": 8,
    "prompt": 256,
    "response": 512,
    "max_tokens_per_microbatch": 8192,
}
"""Of a step of the run, and of the micro-batch."""
STEPS, KILLED_AFTER = 5, 3


def run(dtype: str = "bfloat16", *, layers: int = 24, device: str = "cuda") -> Figures:
    """PPO at stage 3 with critic, reference, reward model and sleep; killed, and resumed.

    Notes memory and seconds beside the plan. What the whole GPU held is compared only where nothing
    else runs on it.
    """
    from raypo import PPOConfig
    from raypo.cluster.hardware import this_machine
    from raypo.plan.fit import make_plan
    from raypo.plan.times import Rates, step_time
    from tests.integration.task import read_metrics

    with _model(layers=layers, dtype=dtype) as policy, _reward(policy) as reward:
        folder = Path(policy).parent
        config = _write_run(folder, policy, reward, dtype=dtype, use_gpu=device == "cuda")
        metrics = folder / "runs" / "acceptance"
        with most_of_the_gpu(device) as peak:
            _kill_after(KILLED_AFTER, metrics, _train(config))
            note(measured_s=_middle(read_metrics(metrics)))
            again = _train(config)
            output = again.communicate()[0]
        rows = read_metrics(metrics)
        plan = make_plan(PPOConfig.load(config), this_machine())
        note(measured_s=_middle(rows))
        # The metric of a "learner worker" is that of the learner.
        planned = {r.name.removesuffix(" worker"): r.memory.peak / 1e9 for r in plan.roles}
        for name, most in planned.items():
            key = f"perf/{'gpu_memory' if device == 'cuda' else 'memory'}_{name}_gb"
            if held := [row[key] for row in rows if key in row]:
                note(**{f"{name}_gb": f"{max(held):.3g} of {most:.3g}"})
        if device == "cuda":
            rates = Rates.of(plan)
            note(**({"planned_s": step_time(plan, rates).seconds} if rates else {}))
        assert again.returncode == 0, output[-3000:]
        _check_steps(metrics, STEPS)
    if device == "cuda" and SIDE_BY_SIDE not in os.environ:
        found = note(planned_gb=plan.loads[0].needed / 1e9, measured_gb=peak[0] / 1e9)
        assert found["measured_gb"] < OVER_PLAN * found["planned_gb"], found
    return FIGURES


def _middle(rows: list[Figures]) -> float:
    """Median seconds of a step."""
    return sorted(row["time/step_s"] for row in rows)[len(rows) // 2]


def several() -> Figures:
    """On several GPUs: stages 2 and 3, IPC, an engine over two of them, NCCL to dedicated ones."""
    return _pytest("test_several_gpus.py")


def more() -> Figures:
    """Whole runs by each transport, asleep and awake, at both stages."""
    return _pytest("test_transports.py", but="off_loaded")


@dataclass(frozen=True)
class Part:
    """A part of the acceptance, and what it needs of the GPU."""

    measure: Callable[[], Figures]
    gpu_gb: float = math.inf
    """GPU memory that it may take, in GB. Infinity means that nothing else may run beside it."""
    limit_s: float = 600.0
    """Seconds after which it counts as hung."""


PARTS: dict[str, Part] = {
    # Alone, because vLLM measures the memory that is free while it starts, as it does for a user.
    "default_run": Part(default_run, limit_s=420),
    "demo": Part(demo, gpu_gb=20),
    "run": Part(run, gpu_gb=48),
    "driver": Part(driver, gpu_gb=1),
    "packages": Part(packages, gpu_gb=1),
    "off_load": Part(off_load, gpu_gb=4),
    "gradients": Part(gradients, gpu_gb=2),
    "ipc": Part(ipc, gpu_gb=4),
    "group": Part(group, gpu_gb=1),
    "attention": Part(attention, gpu_gb=4),
    "microbatch": Part(microbatch, gpu_gb=16),
    "engine": Part(engine, gpu_gb=20),
    "engine_llama": Part(engine_llama, gpu_gb=20),
    "engine_in_float32": Part(engine_in_float32, gpu_gb=20),
    "several": Part(several, limit_s=1200),
    "more": Part(more, limit_s=3600),
    "whole_demo": Part(whole_demo, limit_s=1200),
}
"""By name, in the order in which they begin."""
ON_DEMAND = ("several", "more", "whole_demo")
"""Parts that run only where they are named; `several` also where there are several GPUs."""


@contextmanager
def _model(*, layers: int, dtype: str, kind: str = "qwen2") -> Iterator[str]:
    """Save a random model of real widths with a tokenizer, and yield its folder.

    Args:
        kind: Its `model_type`: qwen2 or llama.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from tests.tiny import tiny_tokenizer

    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    values: dict[str, Any] = {**SIZES, **ids, "num_hidden_layers": layers}
    config = AutoConfig.for_model(
        kind, num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True, **values
    )
    with tempfile.TemporaryDirectory() as parent:
        folder = str(Path(parent) / "policy")
        tiny_tokenizer(folder)
        model: Any = AutoModelForCausalLM.from_config(config)
        _spread(model)
        model.generation_config = GenerationConfig(**ids)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        del model
        yield folder


def _spread(model: Any) -> None:
    """A new model's layers hardly change what they get: other weights would pass unseen."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(SPREAD)


@contextmanager
def _reward(policy: str) -> Iterator[str]:
    """A reward model of the policy's widths, with fewer layers."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from tests.tiny import tiny_tokenizer

    # transformers 5.17 keeps the list of the policy's layer types, and refuses to save it so.
    layers: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    config = Qwen2Config.from_pretrained(policy, num_labels=1, **layers)
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer(folder)
        model: Any = Qwen2ForSequenceClassification(config)
        model.save_pretrained(folder)
        del model
        yield folder


def _loaded(folder: str, dtype: str, device: Any) -> Any:
    from raypo.models.loading import load_causal_lm

    return load_causal_lm(folder, dtype=dtype).to(device)


def _attention_model(window: int | None, heads: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, MistralConfig

    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=64 * heads,
        intermediate_size=512,
        vocab_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        head_dim=64,
        sliding_window=window,
    )
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    _spread(model)
    return model


def _rows(seed: int, longest: int) -> tuple[list[Any], list[Any]]:
    """Some prompts with four responses each, of other lengths for each seed."""
    import numpy as np

    generator = np.random.default_rng(seed)
    prompts, responses = [], []
    for _ in range(1 + seed % 5):
        prompt = generator.integers(4, 60, int(generator.integers(1, longest)))
        for _ in range(4):
            prompts.append(prompt)
            responses.append(generator.integers(4, 60, int(generator.integers(1, longest))))
    return prompts, responses


def _states_gap(packed: Any, apart: Any, rows: Any) -> float:
    """Norm of the difference by norm, without gradients."""
    import torch

    from raypo.models.packed_attention import hidden_states

    with torch.no_grad():
        found, expected = (hidden_states(m.base_model, rows) for m in (packed, apart))
    return float((found - expected).float().norm() / expected.float().norm())


def _gradients_gap(packed: Any, apart: Any, rows: Any) -> float:
    """The same of the gradients of all weights together."""
    import torch

    from raypo.models.packed_attention import hidden_states

    sums = []
    for model in (packed, apart):
        states = hidden_states(model.base_model, rows)
        weights = torch.linspace(-1.0, 2.0, states.numel(), device=states.device)
        model.zero_grad()
        (weights.view_as(states) * states.float()).sum().backward()
        sums.append([p.grad.float() for p in model.parameters() if p.grad is not None])
    pairs = list(zip(*sums, strict=True))
    off = sum(float((one - other).norm() ** 2) for one, other in pairs)
    return (off / sum(float(other.norm() ** 2) for _, other in pairs)) ** 0.5


def _engine(dtype: str, *, kind: str, layers: int, device: Any) -> tuple[Figures, dict[str, float]]:
    """Return all figures, and those gaps in nats a token that wrong weights would raise."""
    import torch

    from raypo.config import EngineSection
    from raypo.serving.engine import Engine
    from raypo.weights.bucket_size import BUCKET_BYTES
    from tests.integration.test_engine import PROMPTS, Pair, disturb, gaps, probes
    from tests.stand_ins import generate

    found: Figures = {}
    told: dict[str, float] = {}
    with _model(layers=layers, dtype=dtype, kind=kind) as folder:
        learner = _loaded(folder, dtype, device)
        section = EngineSection(gpu_memory_fraction=0.25, kv_cache_gb=1.0, sleep=True)
        sampler = Engine(folder, section=section, dtype=dtype, max_model_len=400, device=device)
        pair = Pair(folder, sampler, learner, bucket_bytes=BUCKET_BYTES)
        for _ in range(2):  # the second time what it holds is not what a file has
            free = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
            begin = time.perf_counter()
            sampler.sleep()
            found["sleep_s"] = time.perf_counter() - begin
            if device == "cuda":  # the KV cache alone has a GB; a part beside may take some
                found["freed_gb"] = (torch.cuda.mem_get_info()[0] - free) / 1e9
                note(**found)
            sampler.wake_up("weights")
            disturb(learner)
            begin = time.perf_counter()
            sampler.load_weights(pair.push())
            found["push_s"] = time.perf_counter() - begin
            sampler.wake_up("kv_cache")
            told["gap"] = float(gaps(learner, generate(sampler, probes(PROMPTS, 40))).mean())
            note(**found, **told)
        for how in ("keep", "recompute"):
            told |= _pushed_in_between(pair, how, found)
            note(**found, **told)
        sampler.shutdown()
    if device == "cuda":
        found["gpu_gb"] = torch.cuda.max_memory_reserved() / 1e9
    return found | told, told


def _pushed_in_between(pair: Any, how: Any, found: Figures) -> dict[str, float]:
    """Gaps of tokens to the version that they say sampled them, where weights come meanwhile."""
    import numpy as np

    from tests.engine_contract import results, runs, until
    from tests.integration.test_engine import PROMPTS, disturb, learner_log_probs, probes
    from tests.stand_ins import versions_of

    old, before = pair.version, copy.deepcopy(pair.learner)
    asked = probes(PROMPTS, 120)
    answers = pair.engine.submit(asked)
    until(runs(pair.engine, len(asked), 20))
    pair.engine.pause(how)
    disturb(pair.learner)
    pair.engine.load_weights(pair.push())
    pair.engine.resume()
    gaps: dict[str, list[np.ndarray]] = {}
    for request, done in zip(asked, results(answers), strict=True):
        versions = versions_of(done)
        count = int((versions == old).sum())
        assert versions.tolist() == [old] * count + [pair.version] * (len(versions) - count)
        assert 20 <= count < len(versions), "the push did not come in between"
        for name, model in (("old", before), ("new", pair.learner)):
            log_probs = learner_log_probs(model, request.prompt_ids, done.token_ids, 1.0)
            off = np.abs(done.log_probs - log_probs)
            for when, part in (("before", off[:count]), ("after", off[count:])):
                gaps.setdefault(f"{name}_{when}", []).append(part)
    mean = {name: float(np.concatenate(parts).mean()) for name, parts in gaps.items()}
    found[f"{how}_after_the_push"] = mean["old_after"]
    told = {f"{how}_old_tokens": mean["old_before"]}
    return told | ({"recompute_new_tokens": mean["new_after"]} if how == "recompute" else {})


def _backward(policy: Any, batch: Any, device: str) -> None:
    """One pass over that batch."""
    import torch

    from raypo.types import Experience

    count = batch.prompts * batch.responses
    length = batch.tokens // batch.prompts - batch.prompt_tokens
    response = length // batch.responses
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, 60, (batch.prompts, batch.prompt_tokens), generator=generator)
    ones = torch.ones(count, response, dtype=torch.bool)
    experience = Experience(
        prompt_ids=prompts.repeat_interleave(batch.responses, 0),
        prompt_mask=torch.ones(count, batch.prompt_tokens, dtype=torch.bool),
        response_ids=torch.randint(4, 60, (count, response), generator=generator),
        attention_mask=ones,
        response_mask=ones,
        rollout_log_probs=torch.zeros(count, response),
        scores=torch.zeros(count),
        group_index=torch.arange(count) // batch.responses,
        minibatch=torch.zeros(count, dtype=torch.int64),
        truncated=torch.zeros(count, dtype=torch.bool),
        weight_version=torch.zeros(count, dtype=torch.int64),
    )
    log_probs, _ = policy(experience.to(torch.device(device)))
    log_probs.sum().backward()


def _allocated(device: str) -> int:
    import torch

    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    import torch

    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def _write_run(folder: Path, policy: str, reward: str, *, dtype: str, use_gpu: bool) -> Path:
    """The run file and its prompts."""
    prompts = [{"prompt": f"{number} " * 20} for number in range(64)]
    lines = "".join(json.dumps(each) + "\n" for each in prompts)
    (folder / "prompts.jsonl").write_text(lines)
    values = {
        "name": "acceptance",
        "num_steps": STEPS,
        "storage_path": str(folder / "runs"),
        "model": {"policy": policy, "critic": policy, "reward": reward, "dtype": dtype},
        "data": {
            "prompts": str(folder / "prompts.jsonl"),
            "max_prompt_tokens": TOKENS["prompt"],
        },
        "rollout": {
            "prompts_per_step": TOKENS["prompts"],
            "samples_per_prompt": TOKENS["samples"],
            "max_new_tokens": TOKENS["response"],
            # The size of the cache is given: vLLM does not measure what others leave free.
            "engine": {"gpu_memory_fraction": 0.3, "kv_cache_gb": 4.0, "sleep": True},
        },
        "ppo": {"minibatch_size": TOKENS["prompts"] * TOKENS["samples"] // 2, "kl": {"coef": 0.05}},
        "learner": {
            "zero_stage": 3,
            "use_gpu": use_gpu,
            "max_tokens_per_microbatch": TOKENS["max_tokens_per_microbatch"],
        },
        "checkpoint": {"every": 2, "keep": 1},
    }
    config = folder / "acceptance.yaml"
    config.write_text(json.dumps(values))  # which is YAML too
    return config


def _train(config: Path | str, *, cwd: Path = REPOSITORY) -> subprocess.Popen[str]:
    """Start `raypo train`; raypo need not be installed."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", "raypo.cli", "train", str(config)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _kill_after(steps: int, folder: Path, process: subprocess.Popen[str]) -> None:
    """Kill the command and all that it started, once so many steps are on disk."""
    from tests.integration.task import read_metrics

    while len(read_metrics(folder)) < steps:
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.2)
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    for each in started:  # a worker that Ray has to end takes fast steps before
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.communicate()
    end = time.monotonic() + 60
    while left := [each for each in started if not _has_ended(each)]:
        assert time.monotonic() < end, f"{len(left)} processes still run a minute after SIGKILL"
        time.sleep(0.2)


def _has_ended(process: psutil.Process) -> bool:
    """Return whether a process is gone, or a zombie, as in a container without an init."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _check_steps(run: Path, count: int) -> None:
    """Check that a run is finished, has every step once, and that its engine had its weights."""
    from tests.integration.task import read_metrics

    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, count + 1)), "a step is missing"
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert all(row.get("mismatch/probe_gap_mean", 0.0) < GAP for row in rows)
    assert all(row.get("ppo/skipped_updates", 0) == 0 for row in rows)


@contextmanager
def most_of_the_gpu(device: str) -> Iterator[list[int]]:
    """Yield a list with the most bytes that all processes together have held of the first GPU."""
    most, done = [0], Event()

    def watch() -> None:
        while not done.wait(0.1):
            most[0] = max(most[0], _used())

    watcher = Thread(target=watch, daemon=True)
    if device == "cuda":
        watcher.start()
    try:
        yield most
    finally:
        done.set()


def _used() -> int:
    """Bytes of the first GPU that this process may use."""
    import pynvml  # pyright: ignore[reportMissingImports]

    pynvml.nvmlInit()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    by = pynvml.nvmlDeviceGetHandleByIndex if first.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
    return int(pynvml.nvmlDeviceGetMemoryInfo(by(int(first) if first.isdigit() else first)).used)


def _pytest(*files: str, only: str = "", but: str = "") -> Figures:
    """Some files of tests/gpu; of them those whose names have a word, or have not."""
    expression = only or (f"not ({but})" if but else "")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", expression]
    command += [f"tests/gpu/{name}" for name in files]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    note(pytest=last)
    assert done.returncode == 0, f"{last}\n{done.stdout[-3000:]}"
    assert "passed" in last, f"nothing was run: {last}"
    return {"pytest": last}


if __name__ == "__main__":
    note(**PARTS[sys.argv[1]].measure())
