"""The `rollout` section: sampling of responses, and the engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from raypo.config.base import Config, ConfigError
from raypo.config.fields import FUNCTION, PATH
from raypo.config.only_if import SET, above, only_if, prefixed, unless
from raypo.config.paths import VERIFIERS
from raypo.config.sources import one_or_many

Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(one_or_many)]

InFlight = Literal["keep", "recompute", "restart"]
"""Treatment of requests in flight when new weights arrive. keep: they continue with the KV cache of
the old weights; recompute: their tokens stay and the KV cache is recomputed; restart: they return
to the queue and are sampled again from their first token."""

EPISODES = only_if("environment", SET) | only_if("agent", SET)
"""Declaration of keys that apply to episodes only."""


class SpeculationSection(Config):
    """Speculative decoding: the policy checks several drafted tokens in one forward pass, and
    accepts or replaces them so that samples and log-probs are those of its own distribution
    (arXiv:2211.17192)."""

    kind: Literal["none", "ngram", "model"] = "none"
    """Source of the drafted tokens. none: no speculation; ngram: the tokens after an earlier
    occurrence of the last 2 to 4 tokens, in prompt or response; model: a smaller model, which the
    run does not train, so acceptance (`perf/draft_acceptance`) falls as the policy moves. The same
    seed draws other samples than without speculation. Speculation pays off when an engine samples
    few responses at a time."""
    num_tokens: Annotated[int, unless("kind", "none")] = Field(default=4, ge=1, le=32)
    """Number of tokens drafted for each forward pass of the policy."""
    model: Annotated[str | None, PATH, only_if("kind", "model")] = None
    """Folder or hub id of the draft model. It needs the policy's vocabulary."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.kind == "model" and self.model is None:
            yield (
                "rollout.engine.speculation.model (None): kind is model, but no draft model is "
                "set. Set it to a folder or hub id, or rollout.engine.speculation.kind to ngram."
            )


class EngineSection(Config):
    """vLLM engines that sample responses."""

    count: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Number of engines. auto: one on CPUs; on GPUs one per `tensor_parallel` workers."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of GPUs of one node that an engine is sharded over. A colocated engine takes the GPUs
    of this many learner workers. A dedicated engine takes the GPUs of one bundle. On CPUs: number
    of processes."""
    gpu_memory_fraction: float = Field(default=0.5, gt=0.0, le=1.0)
    """Fraction of a GPU's memory that an engine may use."""
    kv_cache_gb: float | None = Field(default=None, gt=0.0)
    """Size of the KV cache on each device, in GB. null means a suitable size on CPUs, and on GPUs
    the rest of the memory that `gpu_memory_fraction` allows: as predicted if nothing sleeps and
    everything fits with a margin, else as vLLM measures it. A given size overrides
    `gpu_memory_fraction`."""
    transport: Literal["auto", "object", "ipc", "nccl"] = "auto"
    """Transport of new weights to the engines. object: Ray's object store, which works anywhere;
    ipc: CUDA IPC, for engines on the learner workers' GPUs; nccl: broadcast, for engines on
    dedicated GPUs; auto: ipc or nccl if possible, else object."""
    push_timeout_s: Annotated[float, only_if("transport", "auto", "nccl")] = Field(
        default=300.0, gt=0.0
    )
    """Timeout of the broadcast of one bucket (256 MB) over NCCL, in seconds."""
    sleep: bool | Literal["auto"] = "auto"
    """Free the GPU memory of colocated models while they are idle. true: engine, frozen models and
    learner use the memory in turns, and idle models are offloaded to the host. false: all stay on
    the GPU, which is faster if they fit. auto: false if they all fit with a margin, else true
    (`raypo plan` shows the choice)."""
    prefix_caching: bool = True
    """Reuse the KV cache of shared prompt prefixes across requests of one weight version."""
    quantization: Literal["fp8"] | None = None
    """Precision of the engines' linear layers, except the output head. fp8: 8-bit floating point,
    with a scale for each output channel on CPUs and for each block of 128 x 128 weights on GPUs.
    Every push is quantised anew. The learner keeps `model.dtype`, which has to be bfloat16, so
    PPO requires `ppo.correction.kind`, or `ppo.old_log_probs: engine`. null: `model.dtype`."""
    kv_cache_dtype: Literal["fp8"] | None = None
    """Precision of keys and values in the engines' cache. fp8: 8-bit floating point (e4m3) without
    scales, so that a cache of the same size holds twice as many tokens. It has the same
    requirements as `quantization`. null: `model.dtype`."""
    speculation: SpeculationSection = SpeculationSection()
    seeds: Literal["request", "engine"] = "request"
    """Random seeds of training samples. request: one seed per sample. A sample then does not depend
    on its batch, and a run that is repeated or resumed draws the same samples. engine: one random
    state per engine. A sample then depends on its batch, and a run that is repeated or resumed
    draws different samples. engine is faster only with vLLM's model runner V1 on GPUs, which
    launches one kernel per seed and step. vLLM 0.23 uses that runner for all models but Llama,
    Mistral and Qwen3. Held-out samples always have one seed per sample."""
    max_waiting: int = Field(default=4096, ge=1)
    """Maximum number of requests in an engine's queue. If it is full, callers with further requests
    block. The batch of a synchronous run enters the queue as a whole and does not count towards
    this maximum."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs, which override raypo's choice. Arguments that another
    config key sets are refused."""

    @property
    def sleeps(self) -> bool:
        """True if models share a GPU's memory in turns; False while `sleep` is auto."""
        return self.sleep is True

    @property
    def low_precision(self) -> tuple[str, str] | None:
        """First key that makes engines less precise than the learner, and its value, or None."""
        values = {name: getattr(self, name) for name in ("quantization", "kv_cache_dtype")}
        return next(((f"rollout.engine.{k}", v) for k, v in values.items() if v), None)

    def kv_dtype(self, dtype: str) -> str:
        """Return the precision of the KV cache, for models of this `model.dtype`."""
        return self.kv_cache_dtype or dtype

    def problems_of_dtype(self, dtype: str) -> Iterator[str]:
        """Yield what is wrong with 8-bit weights or keys for a model of this `model.dtype`."""
        if self.low_precision and dtype != "bfloat16":
            key, value = self.low_precision
            yield (
                f"{key} ({value}): vLLM quantises bfloat16 weights and keys, but model.dtype is "
                f"{dtype}. Set model.dtype to bfloat16."
            )

    def resolved_count(self, *, num_workers: int, use_gpu: bool) -> int:
        """Return the number of engines to start."""
        if self.count != "auto":
            return self.count
        return max(1, num_workers // self.tensor_parallel) if use_gpu else 1

    def resolved_transport(
        self, *, colocated: bool, use_gpu: bool, share_gpus: bool = False
    ) -> Literal["object", "ipc", "nccl"]:
        """Return the transport to use.

        Args:
            colocated: True if the engines are on the learner workers' devices.
            use_gpu: True if these devices are GPUs.
            share_gpus: True if several engines share a GPU.

        Raises:
            ConfigError: the configured transport cannot work here.
        """
        if self.transport == "object" or (self.transport == "auto" and not use_gpu):
            return "object"
        if share_gpus and not colocated and self.transport in ("auto", "nccl"):
            if self.transport == "auto":
                return "object"
            raise ConfigError(
                "rollout.engine.transport (nccl): NCCL needs a separate GPU for every member, "
                "but several engines share one (placement.gpus.engine). Set "
                "placement.gpus.engine to 1, or rollout.engine.transport to auto or object."
            )
        fitting = "ipc" if colocated else "nccl"
        if self.transport not in ("auto", fitting):
            where = "on the learner workers' own GPUs" if colocated else "on their own GPUs"
            rule = {
                "ipc": "CUDA IPC needs engine and learner worker on one GPU",
                "nccl": "NCCL needs a separate GPU for every member",
            }[self.transport]
            raise ConfigError(
                f"rollout.engine.transport ({self.transport}): {rule}, but the engines are "
                f"{where}. Set rollout.engine.transport to auto, {fitting} or object."
            )
        if not use_gpu:
            raise ConfigError(
                f"rollout.engine.transport ({self.transport}): needs GPUs, but the learner "
                "workers have none (learner.use_gpu). Set rollout.engine.transport to auto or "
                "object."
            )
        return fitting


class SamplingSection(Config):
    """Sampling of responses to held-out prompts, for `eval.function` to score."""

    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum response length in tokens."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature. All log-probs are those of the tempered distribution."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Probability mass of nucleus sampling; 1 means off. With a value below 1, with `top_k` or with
    `min_p`, the engine's log-probs are those of the truncated distribution. The learner's log-probs
    are those of the full distribution, so the two cannot be compared. ppo.correction is then
    refused, and the mismatch metrics include the truncation."""
    top_k: int | None = Field(default=None, ge=1)
    """Number of most likely tokens to sample from. null means all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Minimum probability of a token, as a fraction of the most likely token's probability
    (arXiv:2407.01082). 0 means no minimum."""
    stop: Texts = ()
    """Stop strings. A response ends with the token that completes a stop string, and that token is
    trained too. Log-probs do not change. A stop string does not match the text of a special token.
    The model's own end of sequence always ends a response."""
    engine: EngineSection = EngineSection()

    @property
    def reads_text(self) -> bool:
        """True if engines load the tokenizer, which they need to match stop strings."""
        return bool(self.stop)

    @property
    def max_response_tokens(self) -> int:
        """Maximum response length in tokens, over all turns of an episode."""
        return self.max_new_tokens

    @property
    def length_key(self) -> str:
        """Config key that sets `max_response_tokens`."""
        return "rollout.max_new_tokens"

    @property
    def truncation(self) -> tuple[str, float] | None:
        """First key that truncates the distribution, and its value, or None if no key does."""
        usual = {"top_p": 1.0, "top_k": None, "min_p": 0.0}
        values = ((f"rollout.{key}", getattr(self, key), off) for key, off in usual.items())
        return next(((key, value) for key, value, off in values if value != off), None)

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        speculation, truncation = self.engine.speculation.kind, self.truncation
        if speculation != "none" and truncation:
            key, value = truncation
            yield (
                f"{key} ({value:g}): vLLM does not truncate with rollout.engine.speculation.kind "
                f"({speculation}): it fails or ignores the key. Remove one of the two."
            )


class RolloutSection(SamplingSection):
    """Sampling of responses."""

    prompts_per_step: int = Field(default=32, ge=1)
    """Prompts per step, over all workers."""
    samples_per_prompt: int = Field(default=4, ge=1)
    """Responses sampled for each prompt."""
    mode: Literal["sync", "one_step_off", "async"] = "sync"
    """Schedule of sampling and updates. sync: sample, then update. one_step_off: sample the next
    step's batch while the learner updates, one weight version behind; runs repeat bit for bit.
    async: sample as far ahead as the learner needs, within `max_staleness`. one_step_off and async
    need dedicated engines (placement.mode)."""
    max_staleness: Annotated[
        Annotated[int, Field(ge=0)] | Literal["auto"], only_if("mode", "async")
    ] = "auto"
    """Maximum number of weight versions between the first token of a response and the update
    that trains it. auto: 1. The other modes have a fixed staleness: sync 0, one_step_off 1."""
    in_flight: Annotated[
        InFlight, only_if("mode", "async"), only_if("max_staleness", "auto", above(0))
    ] = "recompute"
    """Treatment of responses in flight when new weights arrive. recompute: they continue,
    with the KV cache of their tokens recomputed; keep: they continue with the KV cache of the older
    weights, at no cost (arXiv:2509.19128); restart: they are sampled again from their first token,
    under one version."""
    router_replay: Annotated[
        Literal["off", "engine"],
        BeforeValidator(lambda value: "off" if value is False else value),  # off without quotes
    ] = "off"
    """Experts of a policy that is a mixture of experts, in the learner's passes. off: the learner's
    routers choose them. engine: each token has the experts that the engine chose for it
    (R3, arXiv:2510.11370), in old log-probs and in all updates, so that rounding cannot lead engine
    and learner to different experts. The routers' probabilities of these experts are the learner's
    own, so the routers are trained too. Reference models and the critic use their own experts.
    Engines on GPUs then run without CUDA graphs, which is slower."""

    environment: Annotated[str | None, FUNCTION] = None
    """Environment that answers each turn of the policy: a class, `file.py:Class` or
    `package.module:Class`; or `verifiers:NAME`, an environment of the package verifiers. A response
    is then an episode of several turns (docs/environments.md). null means responses of a single
    turn."""
    environment_args: Annotated[dict[str, Any], only_if("environment", SET)] = Field(
        default_factory=dict
    )
    """Keyword arguments for the environment of each episode."""
    environment_processes: Annotated[
        int, only_if("environment", SET), unless("environment", prefixed(VERIFIERS))
    ] = Field(default=0, ge=0)
    """Number of processes for environments, beside the first learner worker. If a call hangs, its
    process is killed. Environments are pickled between their turns. 0 runs environments in the
    first learner worker itself; environments with blocking methods then run in threads."""
    agent: Annotated[str | None, FUNCTION] = None
    """Agent class, `file.py:Class` or `package.module:Class`, as an alternative to an environment.
    An agent calls the policy as often as it likes, and returns the score of the episode. null means
    no agent."""
    agent_args: Annotated[dict[str, Any], only_if("agent", SET)] = Field(default_factory=dict)
    """Keyword arguments for the agent of each episode."""
    limit_score: Annotated[float | None, only_if("agent", SET)] = Field(
        default=None, allow_inf_nan=False
    )
    """Score of an agent's episode that ends because it would exceed `max_turns` or
    `max_episode_tokens`. The episode then counts as truncated. null means that it counts as failed
    instead. An environment's episode keeps its rewards."""
    endpoint_host: Annotated[
        str, only_if("agent", SET) | only_if("environment", prefixed(VERIFIERS))
    ] = "127.0.0.1"
    """Address that the endpoint for agents listens on, and the host in `policy.base_url`. 0.0.0.0
    is for agents in containers or on other machines: the endpoint listens on all addresses of the
    node, and `policy.base_url` has the address that other machines can reach."""
    turns: Annotated[Literal["auto", "in_step", "continuous"], EPISODES] = "auto"
    """Scheduling of the turns of episodes. in_step: the next turns of all unfinished episodes are
    sampled as one batch, once all of these turns are ready; such runs can repeat bit for bit.
    continuous: each turn is sampled as soon as it is requested, by one engine per episode, so that
    no episode waits for another. auto: continuous if requests are in flight when weights are pushed
    (mode async), else in_step."""
    max_turns: Annotated[int, EPISODES] = Field(default=8, ge=1)
    """Maximum number of policy turns in an episode. `max_new_tokens` is then the limit of a single
    turn."""
    max_episode_tokens: Annotated[int | None, EPISODES] = Field(default=None, ge=1)
    """Maximum number of tokens of an episode after its prompt: all turns of the policy and the
    environment's observations between them. Episodes require it."""
    step_timeout_s: Annotated[float | None, EPISODES] = Field(default=60.0, gt=0.0)
    """Time limit, in seconds, of one turn of an environment, or of an agent between two calls of
    the policy. An episode that exceeds it counts as failed. null means no limit. A coroutine that
    blocks the event loop of all episodes for this long ends the run."""
    max_concurrent_steps: Annotated[int, EPISODES] = Field(default=256, ge=1)
    """Maximum number of environment calls in flight. For agents: maximum number of agents that run
    at the same time, not counting agents that wait for the policy's response."""

    @property
    def reads_text(self) -> bool:
        """True if engines load the tokenizer to match stop strings, which agents may send too."""
        return bool(self.stop) or self.has_agent

    @property
    def verifiers(self) -> str | None:
        """Name of the environment if it is from the package verifiers, else None."""
        spec = self.environment or ""
        return spec.removeprefix(VERIFIERS) if spec.startswith(VERIFIERS) else None

    @property
    def has_agent(self) -> bool:
        """True if user code calls the policy itself and scores whole episodes."""
        return self.agent is not None or self.verifiers is not None

    @property
    def is_episodic(self) -> bool:
        """True if responses are episodes."""
        return self.environment is not None or self.agent is not None

    @property
    def max_response_tokens(self) -> int:
        """Maximum response length in tokens, over all turns of an episode."""
        return self.max_episode_tokens or self.max_new_tokens

    @property
    def length_key(self) -> str:
        """Config key that sets `max_response_tokens`."""
        return f"rollout.{'max_episode_tokens' if self.max_episode_tokens else 'max_new_tokens'}"

    @property
    def staleness(self) -> int:
        """Maximum staleness, in weight versions."""
        usual = 0 if self.mode == "sync" else 1
        return usual if self.max_staleness == "auto" else self.max_staleness

    @property
    def goes_in_step(self) -> bool:
        """True if the turns of all episodes are sampled together."""
        return self.turns == "in_step" or (self.turns == "auto" and not self.has_requests_in_flight)

    @property
    def has_requests_in_flight(self) -> bool:
        """True if requests may be in flight when weights are pushed."""
        return self.mode == "async" and self.staleness > 0

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._problems_of_replay()
        yield from self._problems_of_episodes()

    def _problems_of_replay(self) -> Iterator[str]:
        eager = self.engine.extra.get("enforce_eager", True)
        drafts = self.engine.speculation.kind
        if self.router_replay == "engine" and drafts != "none":
            yield (
                f"rollout.router_replay ({self.router_replay}): is untested, and so refused, with "
                f"rollout.engine.speculation.kind ({drafts}). Remove one of the two."
            )
        if self.router_replay == "engine" and not eager:
            yield (
                f"rollout.router_replay ({self.router_replay}): CUDA graphs would skip the "
                f"recording of experts (rollout.engine.extra.enforce_eager is {eager}). Remove "
                "enforce_eager, or set rollout.router_replay to off."
            )

    def _problems_of_episodes(self) -> Iterator[str]:
        if self.environment is not None and self.agent is not None:
            yield (
                f"rollout.agent ({self.agent}): replaces rollout.environment "
                f"({self.environment}). Remove one of the two."
            )
        if self.is_episodic and self.max_episode_tokens is None:
            yield (
                "rollout.max_episode_tokens (None): an episode needs a limit, because engine "
                "and learner reserve memory for it. Set it to the total length that all turns "
                "and the environment's texts may have, like "
                f"{2 * self.max_turns * self.max_new_tokens}."
            )
        if self.is_episodic and self.max_response_tokens < self.max_new_tokens:
            yield (
                f"rollout.max_episode_tokens ({self.max_episode_tokens}): must not be below "
                f"rollout.max_new_tokens ({self.max_new_tokens}), the limit of a single turn. "
                f"Set it to {self.max_new_tokens} or more."
            )
