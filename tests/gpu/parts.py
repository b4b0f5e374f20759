"""The acceptance on GPUs, part by part; each part is a script that runs by itself.

    python -m tests.gpu.parts driver        # or packages, off_load, ipc, group, attention, ...

Each prints what it measured as its last line, JSON; it fails by raising. None has run on a GPU yet.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

REPOSITORY = Path(__file__).parents[2]
SIZES: dict[str, Any] = {"hidden_size": 896, "intermediate_size": 4864, "vocab_size": 151_936}
"""Of Qwen2.5-0.5B, whose attention and vocabulary are those of models that people train."""
SPREAD = 2.0
"""What the weights of a random model are multiplied by: each layer then changes what comes out."""
GAP = 0.15
"""Nats of a token on average. Rounding in bfloat16 stays below; one layer with other weights does
not, wherever it is (tests/integration/test_gpu_parts.py)."""
OVER_PLAN = 1.3
"""By how much a peak may be above the plan's."""
Figures = dict[str, Any]
"""`planned_gb`, `measured_gb`, `planned_s` and `measured_s` have columns in the report."""


def driver() -> Figures:
    """torch sees the GPU, and the driver is new enough for its CUDA."""
    import torch

    from raypo.cluster.devices import check_driver
    from raypo.plan.gpus import gpu_of
    from raypo.plan.hardware import this_machine

    (node,) = this_machine()
    check_driver(gpus=node.gpus)
    assert torch.cuda.is_available(), f"torch {torch.__version__} finds no GPU"
    name = torch.cuda.get_device_name()
    assert torch.ones(8, device="cuda").sum().item() == 8.0
    known = gpu_of(name)
    return {
        "gpu": name,
        "known_as": known.name if known else None,
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
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


def off_load() -> Figures:
    """A learner leaves the GPU and comes back at every stage in both dtypes, bit for bit."""
    return _pytest("test_transports.py", only="off_loaded_leaves_the_gpu")


def ipc() -> Figures:
    """20 buckets through CUDA IPC to another process.

    With expandable segments torch hands file descriptors over by pidfd_getfd, which containers may
    forbid: whether it works is told, and no reason to fail.
    """
    found: Figures = {}
    for name, value in (("plain", ""), ("expandable", "expandable_segments:True")):
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": value}
        if not value:
            environment.pop("PYTORCH_CUDA_ALLOC_CONF")
        command = [sys.executable, "-m", "tests.gpu.ipc_probe"]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            told = json.loads(done.stdout.splitlines()[-1])
            found |= {f"{name}_{key}": value for key, value in told.items()}
            continue
        assert value, f"{name}: {done.stderr[-2000:]}"
        found[name] = f"does not work here: {done.stderr.strip().splitlines()[-1]}"
    return found


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
    member.broadcast(flat, is_in_vain=lambda: False)
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
    assert max(value for name, value in found.items() if name != "graphs") < 0.05, found
    assert found["graphs"] <= 12, found
    return found


def engine(dtype: str = "bfloat16", *, layers: int = 24, device: Any = "cuda") -> Figures:
    """An engine sleeps, takes other weights, wakes and agrees; so it does while it samples."""
    found, gaps = _engine(dtype, layers=layers, device=device)
    wrong = {name: value for name, value in gaps.items() if not value < GAP}
    assert not wrong, f"other weights than the learner's: {wrong}"
    assert found["keep_after_the_push"] > GAP, f"nothing was sampled after the push: {found}"
    return found


def engine_in_float32() -> Figures:
    """The same in float32, in which attention computes in TF32: the gaps say by how much."""
    return _engine("float32", layers=24, device="cuda")[0]


def microbatch(dtype: str = "bfloat16", *, layers: int = 24, device: str = "cuda") -> Figures:
    """The worst micro-batch of the run below, beside what the plan says of it."""
    import torch

    from raypo.models.networks import Policy
    from raypo.models.packed_attention import NAME
    from raypo.plan import memory
    from raypo.plan.model_shape import ITEMSIZE, ModelShape

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
    found = {"tokens": batch.tokens, "planned_gb": planned / 1e9, "measured_gb": measured / 1e9}
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
    """PPO at stage 3 with critic, reference, reward model and sleep; killed, and gone on with.

    What the GPU held at most, and what a step took, beside the plan.
    """
    from raypo import PPOConfig
    from raypo.plan.fit import make_plan
    from raypo.plan.hardware import this_machine
    from raypo.plan.times import Rates, step_time
    from tests.integration.task import read_metrics

    with _model(layers=layers, dtype=dtype) as policy, _reward(policy) as reward:
        folder = Path(policy).parent
        config = _write_run(folder, policy, reward, dtype=dtype, use_gpu=device == "cuda")
        metrics = folder / "runs" / "acceptance"
        with _most_of_the_gpu(device) as peak:
            others = _used() if device == "cuda" else 0
            _kill_after(KILLED_AFTER, metrics, _train(config))
            _wait_for_memory(device, others + 10**9)
            again = _train(config)
            output = again.communicate()[0]
        assert again.returncode == 0, output[-3000:]
        rows = read_metrics(metrics)
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "a step is missing"
        assert json.loads((metrics / "summary.json").read_text())["status"] == "finished"
        assert all(row["mismatch/probe_gap_mean"] < GAP for row in rows)
        assert all(row["ppo/skipped_updates"] == 0 for row in rows)
        plan = make_plan(PPOConfig.load(config), this_machine())
    roles = {role.name: role.memory.peak / 1e9 for role in plan.roles}
    found: Figures = {"measured_s": sorted(row["time/step_s"] for row in rows)[STEPS // 2]}
    for name, planned in roles.items():
        kind = "gpu_memory" if device == "cuda" else "memory"
        measured = [row[key] for row in rows if (key := f"perf/{kind}_{name}_gb") in row]
        if measured:
            found[f"{name}_gb"] = f"{max(measured):.3g} of {planned:.3g}"
    if device == "cuda":
        rates = Rates.of(plan)
        found |= {"planned_s": step_time(plan, rates).seconds} if rates else {}
        found |= {"planned_gb": plan.loads[0].needed / 1e9, "measured_gb": peak[0] / 1e9}
        assert found["measured_gb"] < OVER_PLAN * found["planned_gb"], found
    return found


def several() -> Figures:
    """On several GPUs: stages 2 and 3, IPC, an engine over two of them, NCCL to dedicated ones."""
    return _pytest("test_several_gpus.py")


def more() -> Figures:
    """Whole runs by each transport, asleep and awake, at both stages."""
    return _pytest("test_transports.py", but="off_loaded")


ALWAYS = (
    driver,
    packages,
    off_load,
    ipc,
    group,
    attention,
    microbatch,
    engine,
    engine_in_float32,
    run,
)
PARTS: dict[str, Callable[[], Figures]] = {p.__name__: p for p in (*ALWAYS, several, more)}


@contextmanager
def _model(*, layers: int, dtype: str) -> Iterator[str]:
    """A random Qwen2 of real widths on disk, with a tokenizer beside it."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    from tests.tiny import tiny_tokenizer

    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    values: dict[str, Any] = {**SIZES, **ids, "num_hidden_layers": layers}
    config = Qwen2Config(
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True, **values
    )
    with tempfile.TemporaryDirectory() as parent:
        folder = str(Path(parent) / "policy")
        tiny_tokenizer(folder)
        model: Any = Qwen2ForCausalLM(config)
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

    config = Qwen2Config.from_pretrained(policy, num_labels=1, num_hidden_layers=2)
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


def _engine(dtype: str, *, layers: int, device: Any) -> tuple[Figures, dict[str, float]]:
    """What was found, and of it the gaps that other weights would show in, in nats of a token."""
    import torch

    from raypo.config import EngineSection
    from raypo.plan.sizes import BUCKET_BYTES
    from raypo.serving.engine import Engine
    from tests.integration.test_engine import PROMPTS, Pair, disturb, gaps, probes

    found: Figures = {}
    told: dict[str, float] = {}
    with _model(layers=layers, dtype=dtype) as folder:
        learner = _loaded(folder, dtype, device)
        section = EngineSection(gpu_memory_fraction=0.5, kv_cache_gb=1.0)
        sampler = Engine(folder, section=section, dtype=dtype, max_model_len=400, device=device)
        pair = Pair(folder, sampler, learner, bucket_bytes=BUCKET_BYTES)
        for _ in range(2):  # the second time what it holds is not what a file has
            begin = time.perf_counter()
            sampler.sleep()
            found["sleep_s"] = time.perf_counter() - begin
            sampler.wake_up("weights")
            disturb(learner)
            begin = time.perf_counter()
            sampler.load_weights(pair.push())
            found["push_s"] = time.perf_counter() - begin
            sampler.wake_up("kv_cache")
            told["gap"] = float(gaps(learner, sampler.generate(probes(PROMPTS, 40))).mean())
        for how in ("keep", "recompute"):
            told |= _pushed_in_between(pair, how, found)
        sampler.shutdown()
    if device == "cuda":
        found["gpu_gb"] = torch.cuda.max_memory_reserved() / 1e9
    return found | told, told


def _pushed_in_between(pair: Any, how: Any, found: Figures) -> dict[str, float]:
    """Gaps of tokens to the version that they say sampled them, where weights come meanwhile."""
    import numpy as np

    from tests.integration.test_engine import PROMPTS, disturb, learner_log_probs, probes
    from tests.integration.test_engine_joins import results, runs, until
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
            "engine": {"gpu_memory_fraction": 0.5, "sleep": True},
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


def _train(config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "raypo.cli", "train", str(config)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _kill_after(steps: int, folder: Path, process: subprocess.Popen[str]) -> None:
    """SIGKILL for the command as soon as so many steps are on disk."""
    from tests.integration.task import read_metrics

    while len(read_metrics(folder)) < steps:
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@contextmanager
def _most_of_the_gpu(device: str) -> Iterator[list[int]]:
    """The most bytes that all processes together have held of the first GPU."""
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


def _wait_for_memory(device: str, most: int, timeout_s: float = 60.0) -> None:
    """Until what was killed has left the GPU."""
    end = time.monotonic() + timeout_s
    while device == "cuda" and _used() > most:
        assert time.monotonic() < end, f"{_used() / 1e9:.3g} GB are still held after SIGKILL"
        time.sleep(0.5)


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
    assert done.returncode == 0, f"{last}\n{done.stdout[-3000:]}"
    assert "passed" in last, f"nothing was run: {last}"
    return {"pytest": last}


if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]]()))
