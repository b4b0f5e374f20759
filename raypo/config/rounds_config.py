"""Run files of the recipes that proceed in rounds: sample, score, select, train, push weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from raypo.config.base import Config, ImportPath
from raypo.config.dpo_config import DPOSection
from raypo.config.fields import PATH
from raypo.config.only_if import SET, below, only_if, unless
from raypo.config.run_config import OnlineConfig
from raypo.config.sections import DataSection, ReferenceModelSection, SampledModelSection
from raypo.config.sources import source_name
from raypo.config.supervised_config import ExamplesLearnerSection


class RoundsLearnerSection(ExamplesLearnerSection):
    """Learner workers that train on the examples that a round has selected."""

    num_epochs: int = Field(default=1, ge=1)
    """Passes over a round's examples. The learning-rate schedule continues from round to round."""


class RoundsConfig(OnlineConfig):
    """Base class of the run files of recipes that proceed in `num_steps` rounds."""

    learner: RoundsLearnerSection = RoundsLearnerSection()  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def rows_per_update(self) -> int:
        """Examples in a batch."""
        return self.learner.batch_size

    @property
    def trained_temperature(self) -> float:
        """Temperature 1: training is untempered, whatever the sampling temperature."""
        return 1.0

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        recipe, lora, rollout = self.recipe, self.model.lora, self.rollout
        if rollout.mode != "sync":
            yield (
                f"rollout.mode ({rollout.mode}): a round of {recipe} samples with the weights "
                "that the previous round has trained. Set rollout.mode to sync."
            )
        if rollout.is_episodic:
            key = "agent" if rollout.agent else "environment"
            yield (
                f"rollout.{key} ({getattr(rollout, key)}): {recipe} learns from single-turn "
                "responses. Remove it, or use the recipe ppo."
            )
        if rollout.router_replay == "engine":
            yield (
                f"rollout.router_replay ({rollout.router_replay}): {recipe} does not compare the "
                "learner's log-probs with the engine's. Set it to off, or use the recipe ppo."
            )
        if lora is not None and lora.push == "adapter":
            yield f"model.lora.push (adapter): {recipe} pushes whole weights. Set it to merged."
        yield from self._idle_workers({"rollout.prompts_per_step": rollout.prompts_per_step})


class TeacherModelSection(SampledModelSection):
    """The models of a distillation."""

    teacher: Annotated[str | dict[str, str] | None, PATH] = None
    """Teacher model with the policy's vocabulary, or one teacher per source of data.prompts by
    name: {sums: PATH, products: PATH}. Teachers are deployed like a reference model, as set by
    placement.frozen.reference, placement.gpus.reference and placement.mode.reference. null means
    the policy itself, with its weights at the start of each round; distillation.teacher_prompt is
    then required."""


class DistilledDataSection(DataSection):
    """Prompts, and responses written by a teacher."""

    response_key: Annotated[str | None, only_if("distillation.on_policy_fraction", below(1))] = None
    """Column of the responses for off-policy distillation: a string, or one chat message of the
    assistant. null means no such responses."""
    max_response_tokens: Annotated[int, only_if("response_key", SET)] = Field(default=1024, ge=1)
    """Maximum length in tokens of a response of `response_key`, including its end of sequence.
    `too_long` applies to longer responses."""


class DistillationSection(Config):
    """Distillation loss, at temperature 1."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "reverse_kl"
    """Divergence that is minimised at every token (arXiv:2306.13649). forward_kl: KL(teacher ||
    policy), which makes the policy cover all modes of the teacher; reverse_kl: KL(policy ||
    teacher), which keeps the policy to the teacher's main modes; jsd: generalized Jensen-Shannon
    divergence, which lies between these two."""
    beta: Annotated[float, only_if("divergence", "jsd")] = Field(default=0.5, gt=0.0, lt=1.0)
    """The teacher's weight in the mixture. Near 0 the gradient of jsd is that of forward_kl,
    near 1 that of reverse_kl."""
    top_k: Annotated[int, Field(ge=1)] | None = 64
    """Number of most likely tokens per position for which the teacher returns probabilities. All
    other tokens count as one event, so the loss is a lower bound of the divergence. null means the
    whole vocabulary."""
    on_policy_fraction: float = Field(default=1.0, ge=0.0, le=1.0)
    """Fraction of a round's prompts for which the policy samples the responses. The other prompts
    use the responses in data.response_key."""
    teacher_prompt: Literal["solution", "success"] | ImportPath | None = None
    """Prompt that the teacher reads before each response, to tell the teacher more than the policy
    knows. solution: it contains the row's label as the solution (OPSD, arXiv:2601.18734; SDFT,
    arXiv:2601.19897); success: it contains another sample of the same prompt with a score of 1 or
    more (SDPO, arXiv:2601.20802). Or a function of your own, `file.py:name`, that takes the samples
    of a prompt (list[Rollout]) and returns the teacher's prompt for each sample: a string,
    chat messages, or None for a sample that is not trained on. null means the policy's prompt."""
    max_teacher_prompt_tokens: Annotated[int, only_if("teacher_prompt", SET)] = Field(
        default=1024, ge=1
    )
    """Maximum length of the teacher's prompt in tokens. Samples with a longer teacher prompt are
    not trained on, and are counted in selection/prompts_too_long."""


class DistillationConfig(RoundsConfig):
    """Run file of the `distillation` recipe: a policy learns the distributions of a teacher.

    For self-distillation, with a teacher that is shown the solution, see
    `distillation.teacher_prompt`.

    Paper: Agarwal et al. 2023 (GKD), arXiv:2306.13649.
    """

    recipe: Literal["distillation"] = "distillation"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: TeacherModelSection  # pyright: ignore[reportIncompatibleVariableOverride]
    data: DistilledDataSection  # pyright: ignore[reportIncompatibleVariableOverride]
    distillation: DistillationSection = DistillationSection()

    @property
    def teacher_of(self) -> dict[str, str]:
        """Path of each source's teacher, by the source's name.

        The mapping is empty if the policy is its own teacher.
        """
        teacher = self.model.teacher
        if teacher is None:
            return {}
        names = [source_name(source) for source in self.data.prompts]
        return dict.fromkeys(names, teacher) if isinstance(teacher, str) else teacher

    @property
    def references(self) -> dict[str, str]:
        """Path of each teacher, by the role of its deployment as a reference model.

        A teacher of several sources appears once.
        """
        models = list(dict.fromkeys(self.teacher_of.values()))
        if len(models) == 1:
            return {"reference": models[0]}
        return {f"reference_{number}": model for number, model in enumerate(models)}

    @property
    def max_teacher_len(self) -> int:
        """Maximum number of tokens that a teacher with `teacher_prompt` reads."""
        return self.distillation.max_teacher_prompt_tokens + self.rollout.max_response_tokens

    @property
    def max_reference_len(self) -> int:
        """Maximum sequence length of a teacher, in tokens."""
        return self.max_teacher_len if self.distillation.teacher_prompt else self.max_model_len

    @property
    def prompts_answered(self) -> int:
        """Number of prompts in a round for which the policy samples responses."""
        return round(self.distillation.on_policy_fraction * self.rollout.prompts_per_step)

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.model.teacher is not None:
            yield from self._problems_of_teachers()
        yield from self._problems_of_teacher_prompts()
        yield from self._problems_of_texts()

    def _problems_of_teachers(self) -> Iterator[str]:
        names = [source_name(source) for source in self.data.prompts]
        for name in [name for name in self.teacher_of if name not in names]:
            yield (
                f"model.teacher ({name}): no source of data.prompts has this name; their names "
                f"are {', '.join(names)}. Correct the name, or remove it."
            )
        for name in names:
            if name not in self.teacher_of:
                yield (
                    f"model.teacher ({', '.join(self.teacher_of)}): the source {name} of "
                    "data.prompts has no teacher. Add one, or give one path for all."
                )

    def _problems_of_teacher_prompts(self) -> Iterator[str]:
        section, tools = self.distillation, self.data.tools_key
        shown, fraction = section.teacher_prompt, section.on_policy_fraction
        if shown is None:
            if self.model.teacher is None:
                yield (
                    "model.teacher (None): a policy learns nothing from itself if it reads the "
                    "same prompt as its teacher. Name a teacher, or set "
                    "distillation.teacher_prompt to solution, success or file.py:name."
                )
            return
        if shown == "solution" and self.data.label_key is None:
            yield (
                "distillation.teacher_prompt (solution): shows the label of a row, but "
                "data.label_key is null. Set data.label_key to the column of the solutions."
            )
        if shown == "success" and self.rollout.samples_per_prompt < 2:
            yield (
                "distillation.teacher_prompt (success): shows another sample of the prompt, but "
                "rollout.samples_per_prompt is 1. Set rollout.samples_per_prompt to 2 or more."
            )
        if fraction < 1.0:
            yield (
                f"distillation.on_policy_fraction ({fraction:g}): distillation.teacher_prompt "
                f"({shown}) works only with samples of the policy. Set "
                "distillation.on_policy_fraction to 1."
            )
        if tools is not None:
            yield (
                f"data.tools_key ({tools}): the prompts of distillation.teacher_prompt ({shown}) "
                "describe no tools. Remove one of the two."
            )
        if self.model.teacher is None:
            keys = "distillation.max_teacher_prompt_tokens + rollout.max_new_tokens"
            yield from self.learner.no_room_for(self.max_teacher_len, keys)

    def _problems_of_texts(self) -> Iterator[str]:
        fraction, prompts = self.distillation.on_policy_fraction, self.rollout.prompts_per_step
        column, answered = self.data.response_key, self.prompts_answered
        if 0.0 < fraction < 1.0 and answered in (0, prompts):
            yield (
                f"distillation.on_policy_fraction ({fraction:g}): of {prompts} prompts "
                f"(rollout.prompts_per_step) that is {answered}. Set "
                f"distillation.on_policy_fraction to {answered / prompts:g}, or raise "
                "rollout.prompts_per_step."
            )
        for key, value in self.judges.items() if not (answered or self.eval.prompts) else ():
            yield (
                f"{key} ({value}): scores responses of the policy, but with "
                "distillation.on_policy_fraction 0 the policy samples none. Remove it, or set "
                "eval.prompts or a larger distillation.on_policy_fraction."
            )
        if fraction < 1.0 and column is None:
            yield (
                f"distillation.on_policy_fraction ({fraction:g}): the other prompts of a round "
                "need a teacher's texts. Set data.response_key to the column of these texts, or "
                "distillation.on_policy_fraction to 1."
            )
        if column is not None:
            longest = self.data.max_prompt_tokens + self.data.max_response_tokens
            keys = "data.max_prompt_tokens + data.max_response_tokens"
            yield from self.learner.no_room_for(longest, keys)


class SelectionSection(Config):
    """Selection of the responses to train on."""

    top_k: Annotated[int, Field(ge=1)] | None = 1
    """Maximum number of responses per prompt, best first. null means all with at least `min_score`.
    """
    min_score: float | None = None
    """Minimum score of a response. null means no minimum."""
    distinct: bool = True
    """Keep only one of several responses to a prompt that have the same tokens."""
    train: bool = True
    """Train on the selected responses. false: only write them, to `selected/`."""

    def _problems(self) -> Iterator[str]:
        if self.top_k is None and self.min_score is None:
            yield (
                "rejection_sampling.top_k (null): nothing is rejected if top_k and min_score "
                "are both null. Set one of them."
            )


class RejectionSamplingConfig(RoundsConfig):
    """Run file of the `rejection_sampling` recipe: train on the best of several samples.

    Papers: Touvron et al. 2023, arXiv:2307.09288, section 3.2.3; Dong et al. 2023 (RAFT),
    arXiv:2304.06767.
    """

    recipe: Literal["rejection_sampling"] = "rejection_sampling"  # pyright: ignore[reportIncompatibleVariableOverride]
    rejection_sampling: SelectionSection = SelectionSection()

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        num_samples, top_k = self.rollout.samples_per_prompt, self.rejection_sampling.top_k
        if self.rejection_sampling.min_score is None and top_k is not None and num_samples <= top_k:
            yield (
                f"rollout.samples_per_prompt ({num_samples}): the best {top_k} "
                "(rejection_sampling.top_k) of so many samples are all of them. Set "
                f"rollout.samples_per_prompt to {top_k + 1} or more, or "
                "rejection_sampling.min_score."
            )


class PairingSection(Config):
    """Pairing of the best response to a prompt with the worst."""

    min_gap: float = Field(default=0.0, ge=0.0)
    """Minimum score difference of a pair. Equal scores are a tie and are always skipped."""
    reference: Annotated[Literal["round", "start"], unless("dpo.loss", "simpo")] = "round"
    """Reference model of the DPO loss. round: the policy at the start of the round; start:
    model.reference, which is deployed as in PPO; if model.reference is null, the policy at the
    start of the run."""


class IterativeDPOConfig(RoundsConfig):
    """Run file of the `iterative_dpo` recipe: repeat sampling, scoring, pairing and DPO.

    Paper: Xiong et al. 2023, arXiv:2312.11456, algorithm 2.
    """

    recipe: Literal["iterative_dpo"] = "iterative_dpo"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: ReferenceModelSection  # pyright: ignore[reportIncompatibleVariableOverride]
    dpo: DPOSection = DPOSection()
    iterative_dpo: PairingSection = PairingSection()

    @property
    def reference(self) -> str | None:
        """Path of the reference model to deploy, or None if no deployment is needed.

        With `model.lora` and no model.reference, the policy with its adapter off is the reference.
        """
        if self.iterative_dpo.reference == "round" or not self.dpo.needs_reference:
            return None
        return None if self.model.is_own_reference else self.model.reference or self.model.policy

    @property
    def rows_per_update(self) -> int:
        """Responses in a batch of pairs, two per pair."""
        return 2 * self.learner.batch_size

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        samples, loss = self.rollout.samples_per_prompt, self.dpo.loss
        if samples < 2:
            yield (
                f"rollout.samples_per_prompt ({samples}): a pair needs two samples of a prompt. "
                f"Set rollout.samples_per_prompt to 2 or more."
            )
        if loss == "kto":
            yield (
                "dpo.loss (kto): learns from single verdicts, but iterative_dpo makes pairs. "
                "Set dpo.loss to sigmoid or another loss of pairs."
            )
        longest = self.data.max_prompt_tokens + 2 * self.rollout.max_new_tokens
        keys = "data.max_prompt_tokens + 2 x rollout.max_new_tokens"
        yield from self.learner.no_room_for(longest, keys)
