"""Every declaration that a key has no effect unless another key has certain values."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from raypo.config import RECIPES, ConfigError
from raypo.config.base import nested
from raypo.config.key_reference import explain, find_section
from raypo.config.only_if import OnlyIf, declarations
from raypo.config.sweep_config import SweepConfig

ROOTS: dict[str, Any] = {**RECIPES, "sweep": SweepConfig}
DECLARATIONS = {
    (key, declaration): name
    for name, root in reversed(ROOTS.items())
    for key, declared in declarations(root).items()
    if not key.startswith("placement.frozen.judge.")  # its backend is always vllm
    for declaration in declared
}
"""Name of the first kind of file with this declaration, by key and declaration."""
RUN = {"name": "r", "model.policy": "p", "data.prompts": "p.jsonl"}
SWEEP = {"name": "s", "base": "b", "space": {"x": {"choice": [1]}}, "searcher": "random"}
MINIMAL = {"sweep": SWEEP, "distillation": RUN | {"model.teacher": "t"}}
TEXT, FUNCTION, FRACTION = "http://a", "f.py:f", 0.3
VALUES = (True, False, None, 2, 1, 0, FRACTION, 0.75, {"a": 1.0}, TEXT, FUNCTION, "verifiers:a")
NEEDS: dict[tuple[str, Any], dict[str, Any]] = {
    ("stop.at", 2): {"eval.prompts": "e.jsonl"},
    ("stop.patience", 2): {"eval.prompts": "e.jsonl"},
    ("rollout.mode", "async"): {"placement.mode": "dedicated"},
    ("rollout.environment", TEXT): {"rollout.max_episode_tokens": 999},
    ("rollout.agent", TEXT): {"rollout.max_episode_tokens": 999},
    ("rollout.max_episode_tokens", 2): {"rollout.max_new_tokens": 2},
    ("rollout.environment", "verifiers:a"): {"rollout.max_episode_tokens": 999},
    ("reward.judge.max_model_len", 2): {
        "rollout.max_new_tokens": 1,
        "reward.judge.sampling": {"max_tokens": 1},
    },
    ("reward.judge.path", None): {"reward.judge.url": TEXT, "reward.judge.model": "m"},
    ("ppo.advantage", "gdpo"): {"ppo.part_weights": {"a": 1.0}, "ppo.kl.coef": 0.0},
    ("ppo.advantage", "gigpo"): {"ppo.kl.coef": 0.0},
    ("ppo.kl.placement", "loss"): {"ppo.kl.estimator": "k3"},
    ("ppo.kl.controller", "adaptive"): {"ppo.kl.target": 1.0, "ppo.kl.horizon": 999.0},
    ("ppo.kl.horizon", 2): {"rollout.prompts_per_step": 2, "ppo.minibatch_size": 2},
    ("ppo.discount_by", "turn"): {"ppo.gamma": 0.9},
    ("data.ref_chosen_key", TEXT): {"data.ref_rejected_key": "r"},
    ("distillation.teacher_prompt", "solution"): {"data.label_key": "l"},
    ("distillation.on_policy_fraction", FRACTION): {"data.response_key": "r"},
    ("placement.frozen.reference.tensor_parallel", 2): {"learner.num_workers": 2},
    ("placement.frozen.reward.tensor_parallel", 2): {"learner.num_workers": 2},
}
"""Other keys that a key with this value needs."""


def field_of(root: Any, key: str) -> FieldInfo:
    above, _, name = key.rpartition(".")
    section = find_section(root, above)
    assert section is not None
    return section.model_fields[name]


def values_of(field: FieldInfo) -> Iterator[Any]:
    """Yield values that a field accepts."""
    typed: Any = Annotated
    accepted = TypeAdapter(typed[field.annotation, Field(), *field.metadata])
    for value in (*literals(field.annotation), *VALUES):
        try:
            result = accepted.validate_python(value)
        except ValidationError:
            continue
        if isinstance(result, bool) or not isinstance(value, bool):
            yield value


def literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in literals(part)]


def file_with(name: str, key: str, violated: OnlyIf | None = None) -> dict[str, Any]:
    """Return a file that sets a key, in which all declarations hold except the violated one."""
    root, values = ROOTS[name], dict(MINIMAL.get(name, RUN))
    meet_declarations(root, key, values, violated)
    field = field_of(root, key)
    default = field.get_default(call_default_factory=True)
    values[key] = next(v for v in values_of(field) if v is not None and v != default)
    if key.startswith("reward.judge."):
        values["reward.judge.template"] = "{response}"
    for other, value in [*values.items()]:
        more = NEEDS.get((other, value), {}) if not isinstance(value, dict) else {}
        values = more | values
    return nested(values)


def meet_declarations(
    root: Any, key: str, values: dict[str, Any], violated: OnlyIf | None = None
) -> None:
    """Set the other keys so that the declarations of a key hold, except the violated one."""
    declared = declarations(root).get(key, ())
    for declaration in sorted(declared, key=lambda declaration: declaration != violated):
        holds = declaration != violated
        for condition in declaration.conditions[: 1 if holds else None]:
            candidates = values_of(field_of(root, condition.key))
            fitting = (v for v in candidates if condition.holds(v) is holds)
            meet_declarations(root, condition.key, values)
            values.setdefault(condition.key, next(fitting))


@pytest.mark.parametrize(
    ("name", "key", "declaration"),
    [
        pytest.param(name, key, declaration, id=f"{key} if {declaration.text}")
        for (key, declaration), name in DECLARATIONS.items()
    ],
)
def test_a_key_without_effect_is_refused_and_taken_where_it_has_one(
    name: str, key: str, declaration: OnlyIf
):
    root = ROOTS[name]
    with pytest.raises(ConfigError) as error:
        root.parse(file_with(name, key, declaration))
    (line,) = [line for line in str(error.value).splitlines() if f": {key} (" in line]
    rule, _, remedy = line.partition(f". Remove {key}, or ")
    assert line.startswith(f"config: {key} (")
    assert "): has no effect, because " in rule
    assert all(f"{condition.key} is " in rule for condition in declaration.conditions)
    assert all(f"set {condition.key}" in remedy for condition in declaration.conditions)

    root.parse(file_with(name, key))

    (entry,) = explain(key, root)
    assert declaration.text in entry.meaning
