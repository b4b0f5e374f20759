"""How responses are sampled, and by which engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from raypo.config.base import Config, ConfigError
from raypo.config.sources import one_or_many

Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(one_or_many)]

InFlight = Literal["keep", "recompute", "restart"]
"""What becomes of requests that are being sampled when new weights arrive. keep: they go on with
the keys and values of the old weights; recompute: these are computed again, the tokens stay;
restart: they wait for their turn again, and are sampled from their first token."""

_OF_EPISODES = "max_turns max_episode_tokens step_timeout_s max_concurrent_steps turns"
_OF_ENVIRONMENTS = "environment_args environment_processes"
_OF_AGENTS = "agent_args limit_score endpoint_host"


class EngineSection(Config):
    """The vLLM engines that sample."""

    count: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Engines; auto: one on CPU, one for each `tensor_parallel` workers on GPU."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one node that share an engine: of as many workers, or of one dedicated bundle. On
    CPU as many processes share it."""
    gpu_memory_fraction: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share of a GPU's memory that an engine may take."""
    kv_cache_gb: float | None = Field(default=None, gt=0.0)
    """KV cache in GB of each device; null: a fitting size on CPU, what `gpu_memory_fraction`
    leaves on GPU."""
    transport: Literal["auto", "object", "ipc", "nccl"] = "auto"
    """How new weights reach the engines. object: through Ray's object store, anywhere; ipc: CUDA
    IPC, for engines on the learner workers' GPUs; nccl: broadcast, for engines on GPUs of their
    own; auto: the one of these that fits."""
    push_timeout_s: float = Field(default=300.0, gt=0.0)
    """nccl: seconds that the broadcast of one bucket (256 MB) may take."""
    sleep: bool | Literal["auto"] = "auto"
    """GPU, colocated: engine, frozen models and learner take turns in the GPU's memory; what
    does not work is off-loaded to the host. false: all stay, which is faster where they fit.
    auto: false where all of them fit side by side with a margin (`raypo plan` says so)."""
    prefix_caching: bool = True
    """Keep the keys and values of shared prompt prefixes between requests of one weight version."""
    seeds: Literal["request", "engine"] = "request"
    """Random numbers of training samples. request: each sample has its own seed, so it does not
    depend on its batch, and a run repeats and resumes to the same samples. engine: one random state
    for the whole engine; samples then depend on what is sampled beside them, and a run that is
    repeated or resumed draws others. That is faster only with vLLM's model runner V1 on GPUs (vLLM
    0.23 with all models but Llama, Mistral and Qwen3), which launches one kernel for each seed and
    step. Held-out samples have seeds in any case."""
    max_waiting: int = Field(default=4096, ge=1)
    """Requests that wait in an engine to join those that it samples; beyond, they wait at their
    callers. A batch of a synchronous run enters as a whole and does not count."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Any other argument of vLLM's EngineArgs; it wins over raypo's choice. What another key says
    is refused here."""

    @property
    def sleeps(self) -> bool:
        """Whether models take turns in a GPU's memory; False where `sleep` is not decided."""
        return self.sleep is True

    def resolved_count(self, *, num_workers: int, use_gpu: bool) -> int:
        """Engines that are started."""
        if self.count != "auto":
            return self.count
        return max(1, num_workers // self.tensor_parallel) if use_gpu else 1

    def resolved_transport(
        self, *, colocated: bool, use_gpu: bool, share_gpus: bool = False
    ) -> Literal["object", "ipc", "nccl"]:
        """The transport that is used.

        Args:
            colocated: The engines live on the learner workers' devices.
            use_gpu: These devices are GPUs.
            share_gpus: Several engines live on one of them.

        Raises:
            ConfigError: the one that is set cannot work here.
        """
        if self.transport == "object" or (self.transport == "auto" and not use_gpu):
            return "object"
        if share_gpus and not colocated and self.transport in ("auto", "nccl"):
            if self.transport == "auto":
                return "object"
            raise ConfigError(
                "rollout.engine.transport (nccl): NCCL needs another GPU for every member, and "
                "several engines share one (placement.gpus.engine). Set placement.gpus.engine to "
                "1, or rollout.engine.transport to auto or object."
            )
        fitting = "ipc" if colocated else "nccl"
        if self.transport not in ("auto", fitting):
            where = "on the learner workers' own GPUs" if colocated else "on GPUs of their own"
            rule = {
                "ipc": "CUDA IPC needs engine and learner worker on one GPU",
                "nccl": "NCCL needs another GPU for every member",
            }[self.transport]
            raise ConfigError(
                f"rollout.engine.transport ({self.transport}): {rule}, and the engines are "
                f"{where}. Set rollout.engine.transport to auto, {fitting} or object."
            )
        if not use_gpu:
            raise ConfigError(
                f"rollout.engine.transport ({self.transport}): needs GPUs, and the learner workers "
                "have none (learner.use_gpu). Set rollout.engine.transport to auto or object."
            )
        return fitting


class SamplingSection(Config):
    """How held-out prompts are answered, where `eval.function` judges the answers."""

    max_new_tokens: int = Field(default=64, ge=1)
    """Longest response in tokens."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature; log-probs everywhere are of the tempered distribution."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling. Below 1, as with `top_k` and `min_p`, the engine's log-probs are of what is
    left of the distribution, and the learner's of all of it, so that they cannot be compared:
    ppo.correction is refused, and the metrics of mismatch contain the truncation too."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample among the likeliest so many tokens; null: among all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Sample among tokens that are at least so likely, as a share of the likeliest one's
    probability (arXiv:2407.01082); 0: among all."""
    stop: Texts = ()
    """Strings that end a response, which is trained up to and with the token that completes one: no
    log-prob changes. Texts of special tokens are not seen; the model's own end of sequence ends a
    response in any case."""
    engine: EngineSection = EngineSection()

    @property
    def reads_text(self) -> bool:
        """Whether an engine must know the texts of tokens, to end a response at strings."""
        return bool(self.stop)

    @property
    def max_response_tokens(self) -> int:
        """Longest response in tokens, all turns of an episode together."""
        return self.max_new_tokens

    @property
    def length_key(self) -> str:
        """The key that `max_response_tokens` is from."""
        return "rollout.max_new_tokens"

    @property
    def truncation(self) -> tuple[str, float] | None:
        """The first key that cuts the distribution off, with its value; None: nothing does."""
        usual = {"top_p": 1.0, "top_k": None, "min_p": 0.0}
        values = ((f"rollout.{key}", getattr(self, key), off) for key, off in usual.items())
        return next(((key, value) for key, value, off in values if value != off), None)


class RolloutSection(SamplingSection):
    """How responses are sampled."""

    section = "rollout."

    prompts_per_step: int = Field(default=32, ge=1)
    """Prompts of one step, over all workers."""
    samples_per_prompt: int = Field(default=4, ge=1)
    """Responses sampled for each prompt."""
    mode: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: sample, then update. one_step_off: sample the next step's batch while the learner
    updates, one weight version behind; runs repeat bit for bit. async: as far ahead as
    the learner needs, within `max_staleness`. The last two need engines with resources of their own
    (placement.mode)."""
    max_staleness: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """async: most weight versions between the first token of a response and the update that trains
    it; auto: 1. In the other modes it is what the mode says: 0 or 1."""
    in_flight: InFlight = "recompute"
    """async: what becomes of responses that are being sampled when new weights arrive. recompute:
    they go on, with the keys and values of their tokens computed again; keep: with those of the
    older weights, which costs nothing (arXiv:2509.19128); restart: they are sampled again from
    their first token, under one version."""

    environment: str | None = None
    """`file.py:Class` or `package.module:Class` of an environment that answers each turn of the
    policy: a response is then an episode of several turns (docs/environments.md)."""
    environment_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that each episode's environment is made with."""
    environment_processes: int = Field(default=0, ge=0)
    """Processes of each learner worker that environments run in; what hangs there is ended. An
    environment is pickled between its turns. 0: they run in the worker itself, those with plain
    (blocking) methods in threads."""
    agent: str | None = None
    """`file.py:Class` or `package.module:Class` of an agent, which asks the policy as it likes and
    gives the episode its score; instead of an environment."""
    agent_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that each episode's agent is made with."""
    limit_score: float | None = Field(default=None, allow_inf_nan=False)
    """Score of an agent's episode that ends because it wants more than `max_turns` or
    `max_episode_tokens` admit; it counts as truncated. null: it counts as failed. An environment's
    episode keeps its rewards."""
    endpoint_host: str = "127.0.0.1"
    """Address that the endpoint for agents listens on, and that `policy.base_url` names; 0.0.0.0:
    all of the node's, and `policy.base_url` names the one by which others reach it. For agents in
    containers or on other machines."""
    turns: Literal["auto", "in_step", "continuous"] = "auto"
    """When the turns of episodes are sampled. in_step: those of all that go on together, when the
    last of them has asked; such runs can repeat bit for bit. continuous: each as soon as it is
    asked for, by one engine for all of an episode, so that no episode waits for another. auto:
    continuous where requests are in flight when weights are pushed (mode async), else in_step."""
    max_turns: int = Field(default=8, ge=1)
    """Most turns of the policy in an episode; `max_new_tokens` is then of a single turn."""
    max_episode_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an episode after its prompt: all turns of the policy, and what the environment
    writes between them."""
    step_timeout_s: float | None = Field(default=60.0, gt=0.0)
    """Seconds that an environment may take for a turn, or an agent between two calls of the policy,
    before the episode counts as failed; null: any. A coroutine that blocks all episodes for so long
    ends the run."""
    max_concurrent_steps: int = Field(default=256, ge=1)
    """Most calls of environments that are under way at a time, of each learner worker; of agents
    those that work, and do not wait for the policy."""

    @property
    def reads_text(self) -> bool:
        """Also for agents: their own requests may have such strings."""
        return bool(self.stop) or self.agent is not None

    @property
    def is_episodic(self) -> bool:
        """Whether responses are episodes."""
        return self.environment is not None or self.agent is not None

    @property
    def max_response_tokens(self) -> int:
        """Longest response in tokens, all turns of an episode together."""
        return self.max_episode_tokens or self.max_new_tokens

    @property
    def length_key(self) -> str:
        """The key that `max_response_tokens` is from."""
        return f"rollout.{'max_episode_tokens' if self.max_episode_tokens else 'max_new_tokens'}"

    @property
    def staleness(self) -> int:
        """The bound on staleness, in weight versions."""
        usual = 0 if self.mode == "sync" else 1
        return usual if self.max_staleness == "auto" else self.max_staleness

    @property
    def goes_in_step(self) -> bool:
        """Whether the turns of all episodes are sampled together."""
        return self.turns == "in_step" or (self.turns == "auto" and not self.has_requests_in_flight)

    @property
    def has_requests_in_flight(self) -> bool:
        """Whether requests may be under way when weights are pushed."""
        return self.mode == "async" and self.staleness > 0

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._problems_of_episodes()
        usual = {"sync": 0, "one_step_off": 1}.get(self.mode, self.staleness)
        if self.staleness != usual:
            yield (
                f"rollout.max_staleness ({self.max_staleness}): mode {self.mode} has {usual}. Set "
                f"max_staleness to auto, or mode to async."
            )
        if self.in_flight != "recompute" and not self.has_requests_in_flight:
            yield (
                f"rollout.in_flight ({self.in_flight}): mode {self.mode} with a staleness of "
                f"{self.staleness} has no request under way when weights arrive. Remove in_flight, "
                f"or set mode to async and max_staleness to 1 or more."
            )

    def _problems_of_episodes(self) -> Iterator[str]:
        if self.environment is not None and self.agent is not None:
            yield (
                f"rollout.agent ({self.agent}): takes the place of rollout.environment "
                f"({self.environment}). Remove one of the two."
            )
        for missing, keys in (
            ("agent", _OF_AGENTS if self.agent is None else ""),
            ("environment", _OF_ENVIRONMENTS if self.environment is None else ""),
            ("environment", _OF_EPISODES if not self.is_episodic else ""),
        ):
            yield from self._idle(keys, f"rollout.{missing} is null", f"set rollout.{missing}")
        if self.is_episodic and self.max_episode_tokens is None:
            yield (
                "rollout.max_episode_tokens (None): an episode needs a limit, for engine and "
                "learner make room for it. Set it to what all turns and the environment's "
                f"texts may take, like {2 * self.max_turns * self.max_new_tokens}."
            )
        if self.is_episodic and self.max_response_tokens < self.max_new_tokens:
            yield (
                f"rollout.max_episode_tokens ({self.max_episode_tokens}): must not be below "
                f"rollout.max_new_tokens ({self.max_new_tokens}), that of a single turn. Set "
                f"it to {self.max_new_tokens} or more."
            )
