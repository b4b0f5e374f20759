"""Predicted seconds of a step on GPUs: a roofline model of each phase. Pure arithmetic.

Some parts of a phase run concurrently (arithmetic, memory, links); the slowest of them counts. The
times of the parts that follow are added. Rates are data-sheet values times the shares that were
reached by the runs of docs/performance.md, which the predictions met within a factor of 1.5; all of
these had one GPU. Trust comparisons of two configs more than absolute times. All responses are
assumed to have maximum length. On CPUs nothing is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from raypo.cluster.placement import LEARNER, served_roles
from raypo.config import PPOConfig
from raypo.config.auto_values import with_value
from raypo.models.flops import Groups
from raypo.models.model_shape import ITEMSIZE, ModelShape
from raypo.plan.estimate import adapter_weights, engine_weight_bytes, sequences_at_once
from raypo.plan.fit import Plan, tried, worker_counts
from raypo.serving.engine_sizes import engine_sequences

COMPUTED, READ, SENT = 0.45, 0.7, 0.7
"""Reached shares of a data sheet's FLOP/s (in the products of wide layers), memory bandwidth and
link bandwidth: values commonly reported for training and sampling with these libraries."""
HALF_WIDTH = 1200
"""Hidden size at which products take half of a pass. Their FLOPs grow with its square; norms,
activations and attention's memory traffic grow in proportion to it. Fits the passes of a model of
896 on one H200 (19 to 20 % of the data sheet's FLOP/s)."""
ENGINE_KERNELS_S, ENGINE_LAUNCHES_S = 0.002, 0.001
"""Seconds of a vLLM step in addition to its products and reads: on the GPU (norms, sampling), and
in the Python thread that launches them."""
TOKEN_S = 8e-6
"""Seconds of that thread for each token: scheduling it and keeping its log-prob. It works beside
the GPU. 24e-6 with vLLM's own scheduler (docs/performance.md)."""
PROCESSES_S = 0.001
"""Seconds of a step for which an engine with several processes pickles it for them (an estimate).
"""
REDUCE_S = 15e-6
"""Latency of an all-reduce between the GPUs of an engine; two for each layer and step. Typical of
NVLink with vLLM's own kernel, not measured by raypo."""
OPTIMIZER_BYTES = 30
"""Bytes that AdamW reads and writes per weight: gradient, master weight, moments, the weight."""
IPC_COPIES = 3
"""Number of copies of each pushed byte within a GPU: into the bucket, out of it, into the model."""
STORE_BYTES_S = 2e9
"""Bytes a second through Ray's object store, with checksums and copies."""
PUSH_S = 0.2
"""Seconds of a push beside the transfer: vLLM's loader and the probe, as measured with 0.5B."""
WORTH = 0.03
"""Share of a step's time that a change must save to be proposed."""
MAX_CHANGES = 3


@dataclass(frozen=True)
class Rates:
    """Reached rates of a device: FLOP/s, bytes a second, and seconds of an engine's overheads."""

    flops: float
    """FLOP/s of the products of wide layers."""
    memory: float
    link: float
    """Bytes a second between learner workers, over the slowest link."""
    host: float
    """Bytes a second between a GPU and its node's RAM."""
    half_width: int = HALF_WIDTH
    engine_kernels_s: float = ENGINE_KERNELS_S
    engine_launches_s: float = ENGINE_LAUNCHES_S
    token_s: float = TOKEN_S
    store: float = STORE_BYTES_S
    push_s: float = PUSH_S

    @classmethod
    def of(cls, plan: Plan) -> Rates | None:
        """Return the rates of the slowest GPU in use, for a ppo run.

        Returns:
            The rates. They are None if a GPU is unknown, on CPUs, and for recipes other than ppo.
        """
        used = [plan.nodes[bundle.node] for bundle in plan.bundles]
        gpus = [node.gpu for node in used if node.gpu is not None]
        if plan.device == "cpu" or len(gpus) < len(used) or not isinstance(plan.config, PPOConfig):
            return None
        dtype = plan.config.model.dtype
        link = min(gpu.link_gbs for gpu in gpus)
        if len({bundle.node for bundle in plan.bundles if bundle.group == "workers"}) > 1:
            parts = [n.network_gbs / n.gpus if n.network_gbs else None for n in used]
            limits = [part or gpu.network_gbs for part, gpu in zip(parts, gpus, strict=True)]
            link = min(link, *limits)
        return cls(
            flops=COMPUTED * min(gpu.tflops(dtype) for gpu in gpus) * 1e12,
            memory=READ * min(gpu.memory_gbs for gpu in gpus) * 1e9,
            link=SENT * link * 1e9,
            host=SENT * min(gpu.host_gbs for gpu in gpus) * 1e9,
        )

    def pass_flops(self, shape: ModelShape) -> float:
        """Return the FLOP/s that passes of a model reach."""
        return self.flops * shape.hidden / (shape.hidden + self.half_width)


@dataclass(frozen=True)
class PhaseTime:
    """Time of a phase on each of the devices that take part in it."""

    phase: str
    beside: dict[str, float] = field(default_factory=dict)
    """Seconds of each part that runs concurrently: arithmetic, memory, links."""
    after: dict[str, float] = field(default_factory=dict)
    """Seconds of each part that follows the concurrent parts."""
    moved: float = 0.0
    """Bytes that each device sends and receives over links and PCIe."""

    @property
    def seconds(self) -> float:
        """Duration of the phase."""
        return max(self.beside.values(), default=0.0) + sum(self.after.values())

    @property
    def limit(self) -> str:
        """Name of the part that takes the longest."""
        parts = self.beside | self.after
        return max(parts, key=lambda name: parts[name]) if parts else ""


@dataclass(frozen=True)
class StepTime:
    """Predicted time of a step and its phases."""

    phases: list[PhaseTime]
    responses: int
    """Number of responses sampled in a step."""
    is_ahead: bool
    """True if rollouts are collected while the learner updates."""

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        by_name = {phase.phase: phase.seconds for phase in self.phases}
        rollout = by_name["generate"] + by_name["score"]
        rest = sum(by_name.values()) - rollout
        return max(rollout, rest) if self.is_ahead else rollout + rest

    @property
    def longest(self) -> PhaseTime:
        """The longest phase."""
        return max(self.phases, key=lambda phase: phase.seconds)


def groups_of(config: PPOConfig) -> Groups:
    """Return the groups that are sampled in a step."""
    rollout = config.rollout
    lengths = config.data.max_prompt_tokens, rollout.max_response_tokens
    return Groups(rollout.prompts_per_step, rollout.samples_per_prompt, *lengths)


def sampled_of(plan: Plan) -> tuple[int, int]:
    """Return an engine's number of responses in a step, and the number it samples at a time."""
    config = plan.config
    assert isinstance(config, PPOConfig), "rates are of ppo runs only"
    engines = {
        g.index for bundle in plan.bundles for g in bundle.bundle.occupants if g.role == "engine"
    }
    share = -(-config.responses_per_step // len(engines))
    section = config.rollout.engine
    a_token = plan.models.policy.kv_bytes_per_token(
        section.kv_dtype(config.model.dtype), tensor_parallel=section.tensor_parallel
    )
    held = next(role.memory.held for role in plan.roles if role.name == "engine")
    groups = groups_of(config)
    tokens = groups.prompt_tokens / groups.samples + groups.response_tokens
    fitting = int(held["KV cache"] / a_token / tokens) if held.get("KV cache") else share
    at_once = sequences_at_once(config, plan.device, plan.gpu_bytes)
    return share, max(1, min(share, at_once, fitting))


def step_time(plan: Plan, rates: Rates) -> StepTime:
    """Predict the phases of a step of a ppo run."""
    work = _Work(plan, rates)
    phases = [
        work.generate(),
        work.score(),
        work.log_probs(),
        work.update(),
        work.push(),
        work.take_turns(),
    ]
    shown = [phase for phase in phases if phase.seconds or phase.phase in ("generate", "score")]
    config = work.config
    return StepTime(shown, config.responses_per_step, is_ahead=config.rollout.mode != "sync")


def updates_note(plan: Plan, rates: Rates) -> Iterator[str]:
    """Yield a sentence that says what several updates of a step cost, or nothing for one update."""
    config = plan.config
    assert isinstance(config, PPOConfig), "rates are of ppo runs only"
    responses, size = config.responses_per_step, config.ppo.minibatch_size
    if responses <= size:
        return
    once = replace(plan, config=with_value(config, "ppo.minibatch_size", responses))
    now, less = _Work(plan, rates), _Work(once, rates)
    old = now.log_probs().seconds - less.log_probs().seconds
    more = now.update().seconds - less.update().seconds
    yield (
        f"ppo.minibatch_size ({size}): a step has {config.ppo.num_epochs * now._minibatches} "
        f"optimizer steps, and computes old log-probs in {old:.2g} s; with {responses}, which "
        f"trains otherwise, it has {config.ppo.num_epochs} and takes {old + more:.2g} s less"
    )


def faster(plan: Plan) -> list[tuple[str, float]]:
    """Return the changes of a single key that shorten the step most, best first.

    Returns:
        Text of each change, like `learner.zero_stage=1`, and predicted seconds of the changed step.
        The changed run fits its devices.
    """
    rates = Rates.of(plan)
    if rates is None or not isinstance(plan.config, PPOConfig):
        return []
    now, shorter = step_time(plan, rates).seconds, []
    for key, value in _changes(plan, plan.config):
        changed = tried(plan, {key: value})
        changed_rates = None if changed is None else Rates.of(changed)
        if changed is None or changed_rates is None or not (changed.holds and changed.fits):
            continue
        seconds = step_time(changed, changed_rates).seconds
        if seconds < (1 - WORTH) * now:
            shorter.append((f"{key}={str(value).lower()}", seconds))
    best: dict[str, tuple[str, float]] = {}
    for text, seconds in sorted(shorter, key=lambda change: change[1]):
        best.setdefault(text.partition("=")[0], (text, seconds))
    return list(best.values())[:MAX_CHANGES]


def _changes(plan: Plan, config: PPOConfig) -> Iterator[tuple[str, Any]]:
    learner, engine = config.learner, config.rollout.engine
    yield from (("learner.num_workers", count) for count in worker_counts(plan))
    yield "rollout.engine.sleep", False
    yield from (("learner.zero_stage", stage) for stage in range(1, learner.zero_stage))
    yield from (
        ("learner.max_tokens_per_microbatch", learner.microbatch_tokens * 2**n) for n in (1, 2, 3)
    )
    yield from (
        ("rollout.engine.gpu_memory_fraction", f)
        for f in (0.6, 0.7, 0.8, 0.9)
        if f > engine.gpu_memory_fraction
    )
    yield from (
        ("rollout.engine.tensor_parallel", size)
        for size in (1, 2, 4, 8)
        if plan.models.policy.does_not_divide(size) is None
    )
    if learner.activation_checkpointing:
        yield "learner.activation_checkpointing", False
    if "offload_optimizer" in learner.deepspeed.get("zero_optimization", {}):
        yield "learner.deepspeed", {}
    for role in ("reference", "reward", "judge"):
        yield f"placement.frozen.{role}.num_replicas", "auto"


class _Work:
    """Work of each phase of a planned step."""

    def __init__(self, plan: Plan, rates: Rates) -> None:
        assert isinstance(plan.config, PPOConfig), "rates are of ppo runs only"
        self._plan, self._rates, self.config = plan, rates, plan.config
        self._sharding = plan.sharding
        self._itemsize = ITEMSIZE[plan.config.model.dtype]
        self._workers = plan.config.learner.num_workers
        self._ring = (self._workers - 1) / self._workers
        self._groups = groups_of(plan.config)
        occupants = {
            (occupant.role, occupant.index)
            for each in plan.bundles
            for occupant in each.bundle.occupants
        }
        self._replicas = {role: sum(r == role for r, _ in occupants) for role, _ in occupants}
        self._devices = {
            role.name: role.num_devices
            for role in served_roles(
                plan.config, num_workers=self._workers, use_gpu=plan.device == "cuda"
            )
        }
        self._memory = {role.name: role.memory for role in plan.roles}

    def generate(self) -> PhaseTime:
        """Predict sampling. An engine step reads all weights, and the KV cache of its sequences."""
        config, rates, shape = self.config, self._rates, self._plan.models.policy
        size, engines = self._devices["engine"], self._replicas["engine"]
        prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
        share, at_once = sampled_of(self._plan)
        kv_dtype = config.rollout.engine.kv_dtype(config.model.dtype)
        a_token = shape.kv_bytes_per_token(kv_dtype, tensor_parallel=size)
        steps = response * max(1.0, share / at_once)
        weights = engine_weight_bytes(config, shape) / size
        read = steps * (weights + at_once * (prompt + response / 2) * a_token)
        arithmetic = self._pass_s(shape) / engines / size
        kernels = steps * rates.engine_kernels_s
        reduced = 4 * shape.layers * shape.hidden * self._itemsize * share * response
        moved = reduced * (size - 1) / size
        return PhaseTime(
            "generate",
            {
                "memory": read / rates.memory + kernels,
                "arithmetic": arithmetic + kernels,
                "the engine's Python": steps * rates.engine_launches_s
                + (size > 1) * steps * PROCESSES_S
                + share * response * rates.token_s,
            },
            {"links": moved / rates.link + (size > 1) * 2 * shape.layers * steps * REDUCE_S},
            moved,
        )

    def score(self) -> PhaseTime:
        """Predict scoring. Frozen models run one after the other, each once over all samples."""
        models = self._plan.models
        seconds = sum(
            self._pass_s(shape, with_logits=role in models.references)
            / (self._replicas[role] * self._devices[role])
            for role, shape in models.frozen.items()
            if role not in models.judges
        )
        answers = sum(self._answers(role, shape) for role, shape in models.judges.items())
        after = {"the judge's answers": answers} if answers else {}
        return PhaseTime("score", {"arithmetic": seconds}, after)

    def _answers(self, role: str, shape: ModelShape) -> float:
        """Return the seconds of a judge's answers, each as long as `max_tokens` allows.

        The text of its template is not counted.
        """
        config, rates, size = self.config, self._rates, self._devices[role]
        judge = config.reward.judge
        assert judge is not None, "the model is the judge's"
        graded, replicas = max(1, len(judge.criteria)), self._replicas[role]
        share = -(-graded * config.responses_per_step // replicas)
        at_once = min(share, engine_sequences(self._plan.gpu_bytes))
        steps = judge.merged_sampling.get("max_tokens", 1) * max(1.0, share / at_once)
        read = steps * shape.parameters * self._itemsize / size / rates.memory
        tokens = share * judge.merged_sampling.get("max_tokens", 1)
        flops = graded * self._pass(shape) / replicas + 2 * shape.parameters * tokens
        on_gpu = max(read, flops / size / rates.pass_flops(shape)) + steps * rates.engine_kernels_s
        return max(on_gpu, steps * rates.engine_launches_s + tokens * rates.token_s)

    def log_probs(self) -> PhaseTime:
        """Predict the passes before the update: old log-probs (if needed) and values."""
        config, models = self.config, self._plan.models
        is_one_update = config.responses_per_step <= config.ppo.minibatch_size
        computes = config.ppo.computes_old_log_probs(is_one_update=is_one_update)
        passes = [models.policy] if computes else []
        if config.ppo.needs_reference and config.model.is_own_reference:
            passes.append(models.policy)
        seconds = self._slowest(sum(self._pass_s(shape) for shape in passes))
        if models.critic:
            passes.append(models.critic)
        moved = 0.0
        if self._sharding.stage == 3:
            moved = self._microbatches(self._workers) * sum(map(self._whole, passes)) * self._ring
        beside = {"arithmetic": seconds}
        return PhaseTime("log_probs", beside | self._links(moved), moved=moved)

    def update(self) -> PhaseTime:
        """Predict the update of policy and critic.

        If the critic has its own workers, both run at the same time, and the longer update counts.
        """
        models, apart = self._plan.models, self.config.learner.critic_workers
        critic = [models.critic] if models.critic else []
        if not apart:
            return self._updated([models.policy], critic, self._workers)
        sides = (
            self._updated([models.policy], [], self._workers),
            self._updated([], critic, apart),
        )
        return max(sides, key=lambda side: side.seconds)

    def _updated(
        self, policy: list[ModelShape], critic: list[ModelShape], workers: int
    ) -> PhaseTime:
        """Predict forward and backward passes, gradient reduction and optimizer steps."""
        config, rates, stage = self.config, self._rates, self._sharding.stage
        epochs, ring = config.ppo.num_epochs, (workers - 1) / workers
        steps = epochs * self._minibatches
        pass_s = sum(map(self._pass_s, policy))
        pass_s += sum(self._pass_s(shape, with_logits=False) for shape in critic)
        passes = 2 if config.model.lora else 3  # no gradients of frozen weights
        passes += 1 if config.learner.activation_checkpointing else 0
        counted = policy if config.learner.router_aux_coef else []  # another forward pass
        whole = sum(map(self._whole, [*policy, *critic]))
        trained = whole if not config.model.lora else 0.0
        again = sum(map(self._whole, counted))
        a_pass = {0: 2 * trained, 1: 0.0, 2: trained, 3: 2 * whole + trained + again}[stage]
        a_step = {0: 0.0, 1: (8 / self._itemsize + 1) * trained, 2: trained, 3: 0.0}[stage]
        moved = ring * (epochs * self._microbatches(workers) * a_pass + steps * a_step)
        share = trained / self._itemsize / (1 if stage == 0 else workers)
        after = {"optimizer": steps * OPTIMIZER_BYTES * share / rates.memory}
        if self._sharding.offload_optimizer:
            after = {"PCIe and the processors' AdamW": steps * OPTIMIZER_BYTES * share / rates.host}
        arithmetic = passes * pass_s + sum(map(self._pass_s, counted))
        beside = {"arithmetic": epochs * arithmetic / workers}
        return PhaseTime("update", beside | self._links(moved), after, moved)

    def push(self) -> PhaseTime:
        """Predict the weight sync to every engine: of all weights, or of an adapter only."""
        shape, rates, lora = self._plan.models.policy, self._rates, self.config.model.lora
        if lora is not None and lora.push == "adapter":
            size = float(adapter_weights(lora, shape) * self._itemsize)
            return PhaseTime("push", after={"object": size / rates.store, "probe": rates.push_s})
        whole = self._whole(shape)
        gathered = whole * self._ring if self._sharding.stage == 3 else 0.0
        engine = self.config.rollout.engine
        way = engine.resolved_transport(
            colocated=self.config.placement.group_of("engine") == "colocated",
            use_gpu=self._plan.device == "cuda",
            share_gpus=self.config.engines_share_gpus,
        )
        a_byte = {
            "ipc": IPC_COPIES / rates.memory,
            "nccl": 1 / rates.link,
            "object": 1 / rates.store,
        }
        after = {way: whole * a_byte[way], "loader and probe": rates.push_s}
        if gathered:
            after["links"] = gathered / rates.link
        return PhaseTime("push", after=after, moved=gathered + (whole if way == "nccl" else 0.0))

    def take_turns(self) -> PhaseTime:
        """Predict the moves of idle models to RAM and back.

        Frozen models never change, so they are only copied back to the GPU.
        """
        config = self.config
        sleeps = config.placement.group_of("engine") == "colocated" and config.rollout.engine.sleeps
        if self._plan.device == "cpu" or not sleeps:
            return PhaseTime("take turns")
        learner = sum(
            size
            for what, size in self._memory[LEARNER].held.items()
            if what.endswith(("weights", "optimizer"))
        )
        held = {name: memory.held.get("weights", 0) for name, memory in self._memory.items()}
        frozen = sum(size for name, size in held.items() if name not in (LEARNER, "engine"))
        # An engine usually sleeps before a push of all weights, so it discards its own weights. It
        # moves them to RAM if only an adapter is pushed, if the same step may sample again, or if
        # it has a draft model, which no push brings back.
        drafts = config.rollout.engine.speculation.model is not None
        is_kept = config.pushes_adapter or config.is_refilled or drafts
        moved = 2.0 * learner + 2.0 * is_kept * held["engine"] + frozen
        return PhaseTime("take turns", after={"PCIe": moved / self._rates.host}, moved=moved)

    @property
    def _minibatches(self) -> int:
        """Optimizer steps in an epoch."""
        return max(1, self.config.responses_per_step // self.config.ppo.minibatch_size)

    def _microbatches(self, workers: int) -> int:
        """Return a worker's number of micro-batches in a pass over the step's experience."""
        config = self.config
        tokens = self._groups.tokens / self._minibatches / workers
        of_one = max(1, -(-int(tokens) // config.learner.microbatch_tokens))
        return self._minibatches * of_one

    def _slowest(self, policy: float) -> float:
        """Return a worker's seconds: its share of the policy's passes and of one critic pass.

        If the critic has its own workers, return the larger of the two shares.

        Args:
            policy: Seconds of the policy's passes on one worker.
        """
        critic = self._plan.models.critic
        values = self._pass_s(critic, with_logits=False) if critic else 0.0
        if apart := self.config.learner.critic_workers:
            return max(policy / self._workers, values / apart)
        return (policy + values) / self._workers

    def _links(self, moved: float) -> dict[str, float]:
        return {"links": moved / self._rates.link} if moved else {}

    def _whole(self, shape: ModelShape) -> float:
        return float(shape.parameters * self._itemsize)

    def _pass_s(self, shape: ModelShape, *, with_logits: bool = True) -> float:
        """Return the seconds of a forward pass over the step's samples on one device."""
        return self._pass(shape, with_logits=with_logits) / self._rates.pass_flops(shape)

    def _pass(self, shape: ModelShape, *, with_logits: bool = True) -> float:
        """Return the FLOPs of a forward pass over the step's samples. Shared prompts count once."""
        return self._groups.forward_flops(shape, with_logits=with_logits)
