"""The section `reward`: where scores come from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from raypo.config.base import Config
from raypo.config.fields import FUNCTION, PATH
from raypo.config.only_if import SET, only_if, unless
from raypo.config.sections import Paths


class RewardWeights(Config):
    """Weights of the kinds of reward. The score is the weighted sum."""

    function: float = 1.0
    """Weight of the score of `reward.function`."""
    model: float = 1.0
    """Weight of the sum of the scores of `model.reward`."""
    url: float = 1.0
    """Weight of the score of the servers of `reward.url`."""
    judge: float = 1.0
    """Weight of the score of `reward.judge`."""


class RewardRequestSection(Config):
    """Requests to reward servers and judges."""

    batch_size: int = Field(default=16, ge=1)
    """Maximum number of samples per request to `reward.url`. A request to a judge has one criterion
    of one sample."""
    max_concurrent: int = Field(default=8, ge=1)
    """Maximum number of requests in flight: to all servers of `reward.url` together, and to all
    servers of `reward.judge` together."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """Timeout of one attempt, in seconds."""
    max_attempts: int = Field(default=5, ge=1)
    """Maximum number of attempts per request, with increasing waits between them. After the last
    attempt the samples of the request count as failed."""


class Criterion(Config):
    """A criterion of a judge's rubric. A plain string is a criterion of weight 1."""

    text: str = Field(min_length=1)
    """Text that replaces `{criterion}` in `reward.judge.template`."""
    weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Weight of the criterion's grade in the score, which is the weighted mean of the grades."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"text": value} if isinstance(value, str) else value


class JudgeSection(Config):
    """A language model that grades responses: one that the run deploys (`path`), or one on a server
    with OpenAI's protocol (`url`, `model`).

    A rubric of weighted criteria is the explicit aggregation of arXiv:2507.17746.
    """

    path: Annotated[str | None, PATH] = None
    """Model that the run deploys in vLLM: a Hugging Face folder or a hub id. Where it runs:
    placement.mode.judge and placement.frozen.judge. null means that a server is asked."""
    max_model_len: Annotated[int, only_if("path", SET)] = Field(default=8192, ge=1)
    """Maximum number of tokens of the judge's prompt and answer together. The model's number
    of positions also limits them. A longer prompt gets no grade."""
    url: Annotated[Paths | None, only_if("path", None)] = None
    """Base address of a server with OpenAI's protocol, like `http://127.0.0.1:8000/v1`, or a list
    of servers that share the load. null means that the run deploys the judge."""
    model: Annotated[str | None, only_if("path", None)] = None
    """Name of the model at the server."""
    template: str
    """Prompt of the judge. `{prompt}`, `{response}`, `{label}`, `{criterion}` and names of columns
    in braces are replaced. Other braces are kept."""
    criteria: dict[str, Criterion] = Field(default_factory=dict)
    """Criteria by name. Each criterion is graded in a separate request, with its text in place of
    `{criterion}`. The score is the weighted mean of the grades, and each grade is a part of the
    score under its name. Empty means that the judge gives one grade."""
    grades: tuple[float, float] | dict[str, float] = (1.0, 10.0)
    """Grades that the judge may give. [lowest, highest]: numbers, which become scores from 0 to 1;
    a mapping like {CORRECT: 1, WRONG: 0}: words and their scores. The last number or word in the
    judge's answer counts. A number outside the range is no grade."""
    pattern: str | None = None
    """Regular expression that locates the grade in the judge's answer, like `Grade: (.*)`. The
    grade is read from the first group of the last match. null means that the grade may be anywhere
    in the answer."""
    chat: bool = True
    """Send the prompt as a chat message. false sends it as a text to complete, for base models; on
    a server, to its completions endpoint."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request (path: arguments of vLLM's SamplingParams), merged over
    {temperature: 0, max_tokens: 512}. null removes a field."""
    ungraded_score: float | None = Field(default=None, allow_inf_nan=False)
    """Score of a response if the judge's answer has no grade. With a temperature above 0, the
    request is first sent up to `reward.request.max_attempts` times. null means no score: the sample
    counts as failed (`reward.max_failed_fraction`), like a sample whose requests failed."""
    api_key_variable: Annotated[str, only_if("path", None)] = "RAYPO_API_KEY"
    """Environment variable with the API key of the server, which is read on every node. If the
    variable is unset or empty, no key is sent."""

    @property
    def name(self) -> str:
        """Name of the model at its server, or the path of the model that the run deploys."""
        return str(self.path or self.model)

    @property
    def merged_sampling(self) -> dict[str, Any]:
        """Sampling parameters of a request: the defaults and `sampling`, without nulls."""
        merged = {"temperature": 0.0, "max_tokens": 512} | self.sampling
        return {name: value for name, value in merged.items() if value is not None}

    @property
    def columns(self) -> list[str]:
        """Names of the columns that the template refers to."""
        names = re.findall(r"\{(\w+)\}", self.template)
        return [name for name in dict.fromkeys(names) if name not in _JUDGE_FIELDS]

    def _problems(self) -> Iterator[str]:
        key = "reward.judge"
        if self.path is None and (self.url is None or self.model is None):
            yield (
                f"{key}.path (None): no judge is named. Set it to a model that the run deploys,"
                f" or {key}.url and {key}.model to a server and its model."
            )
        yield from _url_problems(f"{key}.url", self.url or (), "http://127.0.0.1:8000/v1")
        yield from self._problems_of_grades(key)

    def _problems_of_grades(self, key: str) -> Iterator[str]:
        if "{response}" not in self.template:
            yield (
                f"{key}.template: does not contain {{response}}. Write it where the response "
                "belongs."
            )
        if bool(self.criteria) != ("{criterion}" in self.template):
            yield (
                f"{key}.criteria ({', '.join(self.criteria) or 'none'}): the template must "
                "contain {criterion} if there are criteria, and only then. Add the missing part."
            )
        for name in ("score", "judge_s", "judge_ungraded"):  # names in every score of `Judge`
            if name in self.criteria:
                yield (
                    f"{key}.criteria ({name}): every score has a part of this name already. "
                    "Choose another name."
                )
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                problem = f"is not a regular expression: {error}"
                yield f"{key}.pattern ({self.pattern}): {problem}. Correct it."
        if isinstance(self.grades, dict):
            if not self.grades or not all(map(str.strip, self.grades)):
                example = "{CORRECT: 1, WRONG: 0}"
                yield (
                    f"{key}.grades ({self.grades}): must contain words, and none may be "
                    f"empty. Write it like {example}."
                )
        elif self.grades[0] >= self.grades[1]:
            yield f"{key}.grades ({list(self.grades)}): must increase. Write it like [1, 10]."


_JUDGE_FIELDS = ("prompt", "response", "label", "criterion")
"""Names in a judge's template that do not refer to columns."""


def _url_problems(key: str, urls: Iterable[str], example: str) -> Iterator[str]:
    for url in urls:
        if not re.fullmatch(r"https?://[^/\s]+\S*", url):
            yield (
                f"{key} ({url}): must begin with http:// or https:// and name a host. "
                f"Write it like {example}."
            )


class RewardSection(Config):
    """Scoring of the responses."""

    function: Annotated[str | None, FUNCTION] = None
    """Reward function, `file.py:name` or `package.module:name`, with the signature (list[Rollout])
    -> list[float], or with that of TRL, f(prompts, completions, **columns). null means none."""
    processes: int = Field(default=0, ge=0)
    """Number of worker processes for a slow reward function, beside the first learner worker. Each
    call gets the rollouts of a few prompts. 0 means that the first learner worker calls the
    function itself, with all rollouts of a step at once."""
    timeout_s: float | None = Field(default=1800.0, gt=0.0)
    """Timeout of one call of the reward function, in seconds; null means no timeout. A call in a
    worker process is killed and its samples count as failed. A call in the learner worker cannot be
    killed, so the run stops."""
    url: Paths | None = None
    """Address of a reward server, to which `samples` are posted, or a list of servers that share
    the load. null means no server."""
    judge: JudgeSection | None = None
    """Language model that grades each response (docs/rewards.md). null means none."""
    request: Annotated[RewardRequestSection, only_if("url", SET) | only_if("judge", SET)] = (
        RewardRequestSection()
    )
    weights: Annotated[RewardWeights, unless("ppo.advantage", "gdpo")] = RewardWeights()
    max_failed_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Fraction of a step's samples that may have no score (None, NaN) before the run stops."""

    @field_validator("function", mode="before")
    @classmethod
    def _is_one_function(cls, value: Any) -> Any:
        if isinstance(value, list | tuple | Mapping):
            raise ValueError(
                'must be one function. Write one that calls the others and returns {"score": their '
                "weighted sum, name: part, ...} per response (docs/rewards.md, Several at once)."
            )
        return value

    def _problems(self) -> Iterator[str]:
        yield from _url_problems("reward.url", self.url or (), "http://127.0.0.1:8000/score")
