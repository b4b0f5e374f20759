"""Predicted seconds of a step on given hardware: a roofline model of each phase. Pure arithmetic.

Some parts of a phase run concurrently (arithmetic, memory, links); the slowest of them counts. The
times of the parts that follow are added. On GPUs, rates are data-sheet values times the share that
training and sampling typically reach. These rates are rough: trust comparisons of two configs more
than absolute times. On CPUs, rates are measured on the machine that makes the plan. All responses
are assumed to have maximum length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from raypo.cluster.placement import LEARNER, served_roles
from raypo.config import PPOConfig
from raypo.config.auto_values import with_value
from raypo.models.flops import Groups
from raypo.models.model_shape import ITEMSIZE, ModelShape
from raypo.plan.estimate import adapter_weights, sequences_at_once
from raypo.plan.fit import Plan, tried
from raypo.serving.engine_sizes import engine_sequences

COMPUTED, READ, SENT = 0.45, 0.7, 0.7
"""Reached shares of a data sheet's FLOP/s, memory bandwidth and link bandwidth: values commonly
reported for training and sampling with these libraries, not measured by raypo."""
ENGINE_STEP_S = 0.004
"""Seconds of scheduling and sampling in a vLLM step on a GPU, in addition to the GPU's work."""
OPTIMIZER_BYTES = 30
"""Bytes that AdamW reads and writes per weight: gradient, master weight, moments, the weight."""
IPC_COPIES = 3
"""Number of copies of each pushed byte within a GPU: into the bucket, out of it, into the model."""
STORE_BYTES_S = 2e9
"""Bytes a second through Ray's object store, with checksums and copies."""


@dataclass(frozen=True)
class Reached:
    """Measured rates of CPU cores: FLOP/s (counted as in `raypo.models.flops`), bytes a second."""

    forward: float
    """FLOP/s of a pass without gradients."""
    update: float
    """FLOP/s of a forward and a backward pass, which count as three forward passes."""
    decode: float
    """FLOP/s of the matmuls of an engine's step, with weights too large for the CPU caches."""
    memory: float
    """Memory bandwidth in bytes a second."""

    def times(self, factor: float) -> Reached:
        """Return the rates of `factor` times as many cores."""
        return Reached(*(factor * rate for rate in astuple(self)))


CPU_ENGINE_STEP_S = 0.005
CPU_STORE_BYTES_S = 4e8
"""`ENGINE_STEP_S` and `STORE_BYTES_S` for CPUs, measured with SmolLM2-135M on two cores
(docs/performance.md; docs/scale.md says how far they generalise)."""
WORTH = 0.03
"""Share of a step's time that a change must save to be proposed."""
MAX_CHANGES = 3


@dataclass(frozen=True)
class Rates:
    """Reached rates of a device: FLOP/s, bytes a second, and seconds per engine step."""

    flops: float
    memory: float
    link: float
    """Bytes a second between learner workers, over the slowest link."""
    host: float
    """Bytes a second between a GPU and its node's RAM."""
    engine_step_s: float = ENGINE_STEP_S
    store: float = STORE_BYTES_S
    update: float | None = None
    """FLOP/s of forward and backward passes together. None means `flops`."""
    sampled: float | None = None
    """FLOP/s of an engine while it samples. None means `flops`."""

    @classmethod
    def of(cls, plan: Plan) -> Rates | None:
        """Return the rates of the slowest GPU in use, for a ppo run.

        Returns:
            The rates. They are None if a GPU is unknown, on CPUs, and for recipes other than ppo.
        """
        used = [plan.nodes[each.node] for each in plan.bundles]
        gpus = [node.gpu for node in used if node.gpu is not None]
        if plan.device == "cpu" or len(gpus) < len(used) or not isinstance(plan.config, PPOConfig):
            return None
        dtype = plan.config.model.dtype
        link = min(gpu.link_gbs for gpu in gpus)
        if len({each.node for each in plan.bundles if each.group == "workers"}) > 1:
            parts = [n.network_gbs / n.gpus if n.network_gbs else None for n in used]
            own = [part or gpu.network_gbs for part, gpu in zip(parts, gpus, strict=True)]
            link = min(link, *own)
        return cls(
            flops=COMPUTED * min(gpu.tflops(dtype) for gpu in gpus) * 1e12,
            memory=READ * min(gpu.memory_gbs for gpu in gpus) * 1e9,
            link=SENT * link * 1e9,
            host=SENT * min(gpu.host_gbs for gpu in gpus) * 1e9,
        )

    @classmethod
    def of_cores(cls, plan: Plan, core: Reached) -> Rates:
        """Return the rates of a ppo run on the cores of one machine.

        Args:
            plan: The plan of the run.
            core: Rates of one core.
        """
        config = plan.config
        assert isinstance(config, PPOConfig), "rates are of ppo runs only"
        learner = config.learner
        engines = sum(
            occupant.role == "engine" for each in plan.bundles for occupant in each.bundle.occupants
        )
        cores = float(config.placement.cpus_per_bundle)
        if config.placement.group_of("engine") == "colocated":
            cores = learner.cpus_per_worker * learner.total_workers / engines
        worker = core.times(learner.cpus_per_worker)
        return cls(
            flops=worker.forward,
            memory=worker.memory,
            link=core.memory,
            host=core.memory,
            engine_step_s=CPU_ENGINE_STEP_S,
            store=CPU_STORE_BYTES_S,
            update=worker.update,
            sampled=core.times(cores).decode,
        )


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
        by_name = {each.phase: each.seconds for each in self.phases}
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


def microbatch_of(config: PPOConfig) -> Groups:
    """Return a learner worker's micro-batch in an update."""
    part = config.ppo.minibatch_size / config.responses_per_step / config.learner.num_workers
    whole = groups_of(config)
    share = replace(whole, prompts=max(1.0, part * whole.prompts))
    return share.within(config.learner.microbatch_tokens)


def sampled_of(plan: Plan) -> tuple[int, int]:
    """Return an engine's number of responses in a step, and the number it samples at a time."""
    config = plan.config
    assert isinstance(config, PPOConfig), "rates are of ppo runs only"
    engines = {
        g.index for each in plan.bundles for g in each.bundle.occupants if g.role == "engine"
    }
    share = -(-config.responses_per_step // len(engines))
    section = config.rollout.engine
    a_token = plan.models.policy.kv_bytes_per_token(
        config.model.dtype, tensor_parallel=section.tensor_parallel
    )
    held = next(role.memory.held for role in plan.roles if role.name == "engine")
    groups = groups_of(config)
    each = groups.prompt_tokens / groups.samples + groups.response_tokens
    fitting = int(held["KV cache"] / a_token / each) if held.get("KV cache") else share
    return share, max(1, min(share, sequences_at_once(section, plan.gpu_bytes), fitting))


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
    shown = [each for each in phases if each.seconds or each.phase in ("generate", "score")]
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


def faster(
    plan: Plan, rates_of: Callable[[Plan], Rates | None] = Rates.of
) -> list[tuple[str, float]]:
    """Return the changes of a single key that shorten the step most, best first.

    Returns:
        Text of each change, like `learner.zero_stage=1`, and predicted seconds of the changed step.
        The changed run fits its devices.
    """
    rates = rates_of(plan)
    if rates is None or not isinstance(plan.config, PPOConfig):
        return []
    now, found = step_time(plan, rates).seconds, []
    for key, value in _changes(plan.config, plan.models.policy):
        changed = tried(plan, {key: value})
        changed_rates = None if changed is None else rates_of(changed)
        if changed is None or changed_rates is None or not (changed.holds and changed.fits):
            continue
        seconds = step_time(changed, changed_rates).seconds
        if seconds < (1 - WORTH) * now:
            found.append((f"{key}={str(value).lower()}", seconds))
    best: dict[str, tuple[str, float]] = {}
    for text, seconds in sorted(found, key=lambda each: each[1]):
        best.setdefault(text.partition("=")[0], (text, seconds))
    return list(best.values())[:MAX_CHANGES]


def _changes(config: PPOConfig, policy: ModelShape) -> Iterator[tuple[str, Any]]:
    learner, engine = config.learner, config.rollout.engine
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
        if policy.does_not_divide(size) is None
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
        a_token = shape.kv_bytes_per_token(config.model.dtype, tensor_parallel=size)
        steps = response * max(1.0, share / at_once)
        weights = shape.parameters * self._itemsize / size
        read = steps * (weights + at_once * (prompt + response / 2) * a_token)
        prompts = replace(self._groups, samples=1, response_tokens=0)
        read_at_once = prompts.forward_flops(shape, with_logits=False)
        arithmetic = read_at_once / rates.flops
        arithmetic += (self._pass(shape) - read_at_once) / (rates.sampled or rates.flops)
        reduced = 4 * shape.layers * shape.hidden * self._itemsize * share * response
        moved = reduced * (size - 1) / size
        return PhaseTime(
            "generate",
            {"memory": read / rates.memory, "arithmetic": arithmetic / engines / size},
            {"steps of the engine": steps * rates.engine_step_s, "links": moved / rates.link},
            moved,
        )

    def score(self) -> PhaseTime:
        """Predict scoring. Frozen models run one after the other, each once over all samples."""
        models = self._plan.models
        seconds = sum(
            self._pass(shape, with_logits=role in models.references)
            / (self._replicas[role] * self._devices[role] * self._rates.flops)
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
        return max(read, flops / size / rates.flops) + steps * rates.engine_step_s

    def log_probs(self) -> PhaseTime:
        """Predict the passes before the update: old log-probs (if needed) and values."""
        config, models = self.config, self._plan.models
        is_one_update = config.responses_per_step <= config.ppo.minibatch_size
        computes = config.ppo.computes_old_log_probs(is_one_update=is_one_update)
        passes = [models.policy] if computes else []
        if config.ppo.needs_reference and config.model.is_own_reference:
            passes.append(models.policy)
        flops = self._slowest(sum(self._pass(shape) for shape in passes))
        if models.critic:
            passes.append(models.critic)
        moved = 0.0
        if self._sharding.stage == 3:
            moved = self._microbatches(self._workers) * sum(map(self._whole, passes)) * self._ring
        beside = {"arithmetic": flops / self._rates.flops}
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
        flops = sum(map(self._pass, policy))
        flops += sum(self._pass(shape, with_logits=False) for shape in critic)
        passes = 2 if config.model.lora else 3  # no gradients of frozen weights
        passes += 1 if config.learner.activation_checkpointing else 0
        whole = sum(map(self._whole, [*policy, *critic]))
        trained = whole if not config.model.lora else 0.0
        a_pass = {0: 2 * trained, 1: 0.0, 2: trained, 3: 2 * whole + trained}[stage]
        a_step = {0: 0.0, 1: (8 / self._itemsize + 1) * trained, 2: trained, 3: 0.0}[stage]
        moved = ring * (epochs * self._microbatches(workers) * a_pass + steps * a_step)
        share = trained / self._itemsize / (1 if stage == 0 else workers)
        after = {"optimizer": steps * OPTIMIZER_BYTES * share / rates.memory}
        if self._sharding.offload_optimizer:
            after = {"PCIe and the processors' AdamW": steps * OPTIMIZER_BYTES * share / rates.host}
        beside = {"arithmetic": passes * epochs * flops / workers / (rates.update or rates.flops)}
        return PhaseTime("update", beside | self._links(moved), after, moved)

    def push(self) -> PhaseTime:
        """Predict the weight sync to every engine: of all weights, or of an adapter only."""
        shape, rates, lora = self._plan.models.policy, self._rates, self.config.model.lora
        if lora is not None and lora.push == "adapter":
            size = float(adapter_weights(lora, shape) * self._itemsize)
            return PhaseTime("push", after={"object": size / rates.store})
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
        after = {way: whole * a_byte[way]}
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
        # moves them to RAM if only an adapter is pushed, or if the same step may sample again.
        is_kept = config.pushes_adapter or config.is_refilled
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
        """Return a worker's FLOPs: its share of the policy's passes and of one critic pass.

        If the critic has its own workers, return the larger of the two shares.

        Args:
            policy: FLOPs of the policy over all workers.
        """
        critic = self._plan.models.critic
        values = self._pass(critic, with_logits=False) if critic else 0.0
        if apart := self.config.learner.critic_workers:
            return max(policy / self._workers, values / apart)
        return (policy + values) / self._workers

    def _links(self, moved: float) -> dict[str, float]:
        return {"links": moved / self._rates.link} if moved else {}

    def _whole(self, shape: ModelShape) -> float:
        return float(shape.parameters * self._itemsize)

    def _pass(self, shape: ModelShape, *, with_logits: bool = True) -> float:
        """Return the FLOPs of a forward pass over the step's samples. Shared prompts count once."""
        return self._groups.forward_flops(shape, with_logits=with_logits)
