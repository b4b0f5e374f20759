"""Models that a run could not use, refused before Ray starts or a weight is read."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AddedToken,
    AutoConfig,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    MambaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen3NextConfig,
)

from raypo.checks.image_checks import check_images
from raypo.checks.input_checks import check_evaluation, check_inputs
from raypo.checks.model_checks import (
    check_kernels,
    check_model,
    check_models,
    check_rotations,
    check_shared_rows,
    check_tiles,
)
from raypo.collectives import Workers
from raypo.config import ConfigError, FrozenSection, parse_run_config
from raypo.data.examples import load_examples, load_pairs
from raypo.data.item_store import ItemStore
from raypo.models.loading import Limits, check_tokens, load_tokenizer, reads_tokens, same_vocabulary
from raypo.models.model_files import VISION, VISION_OF_ENGINES
from raypo.recipes.dpo import load_preferences
from raypo.recipes.on_examples import Examples
from raypo.recipes.reward_model import make_task
from raypo.run import online_inputs
from raypo.run.online_inputs import OnlineInputs
from raypo.run.run import Run
from raypo.run.setup import Runtime
from raypo.serving.frozen import ReferenceModel, RewardModel
from raypo.serving.vllm_frozen import VllmReference, VllmRewardModel
from raypo.storage.run_files import RunFiles
from tests.tiny import tiny_experts, tiny_policy
from tests.tiny_vision import tiny_qwen_vl
from tests.vision_models import tiny_vision_model

RECIPES = {
    "ppo": {"reward": {"function": "reward.py:score"}},
    "sft": {},
    "dpo": {},
    "reward_model": {},
    "distillation": {"model": {"teacher": "policy"}},
    "rejection_sampling": {"reward": {"function": "reward.py:score"}},
    "iterative_dpo": {"reward": {"function": "reward.py:score"}},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy, another one, and a reward model."""
    folder = tmp_path_factory.mktemp("models")
    tiny_policy(folder / "policy")
    tiny_policy(folder / "other", seed=1)
    shutil.copytree(folder / "policy", folder / "reward")
    config = LlamaConfig.from_pretrained(folder / "policy", num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    return folder


@pytest.fixture
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of these, in the current folder."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    (tmp_path / "reward.py").write_text("def score(rollouts):\n    return []\n")
    row = {"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


def config_of(recipe: str, **values: Any) -> Any:
    model = {"policy": "policy", **RECIPES[recipe].get("model", {}), **values.pop("model", {})}
    rest = {name: value for name, value in RECIPES[recipe].items() if name != "model"}
    base = {"name": "run", "recipe": recipe, "data": {"prompts": "rows.jsonl"}}
    return parse_run_config({**base, **rest, **values, "model": model}, origin="test")


def check(config: Any) -> None:
    check_inputs(config, on_this_machine=False)
    check_models(config)


def refusal(config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config)
    return str(caught.value)


def with_values(folder: Path, name: str = "config.json", **values: Any) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def with_prefix(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({f"module.{name}": each for name, each in load_file(file).items()}, file)


@pytest.mark.parametrize("recipe", RECIPES)
def test_models_that_are_whole_pass(here: Path, recipe: str):
    check(config_of(recipe))


def test_what_an_export_would_lack_is_told_and_what_would_end_it_refused(here: Path):
    config = config_of("ppo")
    with_values(here / "policy", "generation_config.json", early_stopping=True)
    with pytest.warns(UserWarning, match=r"model\.policy \(policy\): exports leave out early_stop"):
        check(config)
    with_values(here / "policy", "generation_config.json", early_stopping="x")
    assert "cannot read its generation_config.json: `early_stopping` must be" in refusal(config)


@pytest.mark.parametrize("recipe", ["ppo", "sft"])
def test_a_loss_for_routers_that_raypo_does_not_know_is_refused(here: Path, recipe: str):
    config = config_of(recipe, learner={"router_aux_coef": 0.01})
    assert refusal(config) == (
        "learner.router_aux_coef (0.01): raypo knows no routers of model.policy (policy), whose "
        "architecture is llama, but only of flex_olmo, gpt_oss, mixtral, olmoe, qwen2_moe, "
        "qwen3_5_moe_text, qwen3_moe, qwen3_next. Set it to 0."
    )
    tiny_experts(here / "policy", "olmoe")
    check(config)


def test_prompts_with_images_that_a_model_could_not_read_are_refused(here: Path):
    """Tests of the unit tier make the models with a vision tower on the spot."""
    config = config_of("ppo")
    with pytest.raises(ConfigError, match=r"^model.policy \(policy\): .* the architecture llama"):
        check_images(config)
    for name in ("policy", "other"):
        tiny_vision_model("qwen2_5_vl").save_pretrained(here / name)
    check_images(config)
    refused = {
        "model.attention (sdpa)": {"model": {"attention": "sdpa"}},
        "model.freeze ([])": {"model": {"freeze": []}},
        "model.reward (reward)": {"model": {"reward": "reward"}},
        "learner.sequence_parallel (2)": {"learner": {"num_workers": 2, "sequence_parallel": 2}},
        "placement.frozen.reference.backend (vllm)": {
            "ppo": {"kl": {"coef": 0.1}},
            "placement": {"frozen": {"reference": {"backend": "vllm"}}},
        },
    }
    for key, changes in refused.items():
        with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: "):
            check_images(config_of("ppo", **changes))
    with pytest.raises(ConfigError, match="as a classifier or a teacher"):
        check_images(config_of("reward_model"))


@pytest.mark.parametrize("kind", VISION)
def test_engines_read_images_of_compared_architectures_alone(here: Path, kind: str):
    tiny_vision_model(kind).save_pretrained(here / "policy")
    check_images(config_of("sft"))
    check_images(config_of("dpo"))
    evaluation = {"eval": {"every": 1, "prompts": "rows.jsonl", "function": "reward.py:score"}}
    for config in (config_of("ppo"), config_of("sft", **evaluation)):
        if kind in VISION_OF_ENGINES:
            check_images(config)
            continue
        with pytest.raises(ConfigError, match=rf"^model.policy \(policy\): .* architecture {kind}"):
            check_images(config)


def test_a_vision_tower_is_trained_without_an_engine_by_one_worker(here: Path):
    """Engines keep the vectors of an image across pushes, and a worker may have no images."""
    tiny_vision_model("qwen2_5_vl").save_pretrained(here / "policy")
    trained: dict[str, Any] = {"model": {"freeze": []}}
    evaluation = {"eval": {"every": 1, "prompts": "rows.jsonl", "function": "reward.py:score"}}
    check_images(config_of("sft", **trained))
    for refused in (
        config_of("ppo", **trained),
        config_of("sft", **trained, **evaluation),
        config_of("sft", **trained, learner={"num_workers": 2}),
    ):
        with pytest.raises(ConfigError, match=r"^model.freeze \(\[\]\): "):
            check_images(refused)


def test_speculation_with_a_model_that_reads_images_is_refused(here: Path):
    """Its engines exclude the placeholder of images from all responses, also to texts."""
    config = config_of("ppo", rollout={"engine": {"speculation": {"kind": "ngram"}}})
    check_models(config)
    shutil.rmtree(here / "policy")
    tiny_qwen_vl(here / "policy")
    check_models(config_of("ppo"))
    with pytest.raises(ConfigError, match=r"^rollout.engine.speculation.kind \(ngram\): "):
        check_models(config)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        (
            None,
            "architecture is llama, not one of mixtral, olmoe, qwen2_moe, qwen3_moe.",
        ),
        ("windows", "attention has sliding windows, so the KV cache does not keep all tokens."),
    ],
)
def test_experts_that_cannot_be_replayed_are_refused(
    here: Path, architecture: str | None, reason: str
):
    config = config_of("ppo", rollout={"router_replay": "engine"})
    if architecture is not None:
        tiny_experts(here / "policy", "mixtral")
        check(config)
        with_values(here / "policy", "config.json", sliding_window=64)
    assert refusal(config) == (
        "rollout.router_replay (engine): the experts of model.policy (policy) cannot be replayed, "
        f"because its {reason} Set it to off."
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            Qwen3NextConfig(num_hidden_layers=4, num_experts=4),
            "not all of its layers have full or sliding attention over earlier tokens",
        ),
        (MambaConfig(), "not all of its layers have full or sliding attention over earlier tokens"),
        (Gemma3Config(), "it reads images"),
    ],
)
def test_models_whose_rows_cannot_be_shared_are_refused(here: Path, config: Any, reason: str):
    """Linear attention and recurrence pass a state on; peers train on wrong gradients there."""
    config.save_pretrained(here / "policy")
    run = config_of("sft", learner={"sequence_parallel": 2, "num_workers": 2})
    with pytest.raises(ConfigError) as caught:
        check_shared_rows(run)
    assert str(caught.value) == (
        "learner.sequence_parallel (2): workers cannot share the rows of model.policy (policy, "
        f"{config.model_type}): {reason}. Set learner.sequence_parallel to 1, or give another "
        "model."
    )


@pytest.mark.parametrize("config", [OPTConfig(num_hidden_layers=1), MixtralConfig()])
def test_models_without_dense_mlps_are_not_tiled(here: Path, config: Any):
    config.save_pretrained(here / "policy")
    check_tiles(config_of("sft"))
    with pytest.raises(ConfigError) as caught:
        check_tiles(config_of("sft", learner={"mlp_tile_tokens": 8}))
    assert str(caught.value) == (
        f"learner.mlp_tile_tokens (8): model.policy (policy, {config.model_type}) has no dense "
        "MLPs that raypo can tile. Set learner.mlp_tile_tokens to null."
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_models_with_dense_mlps_are_tiled(here: Path, recipe: str):
    check(config_of(recipe, learner={"mlp_tile_tokens": 8}))


@pytest.mark.parametrize("recipe", RECIPES)
def test_models_with_attention_share_their_rows(here: Path, recipe: str):
    check(config_of(recipe, learner={"sequence_parallel": 2, "num_workers": 2}))


def test_a_loss_for_the_routers_of_a_reward_model_is_refused(here: Path):
    with pytest.raises(ConfigError, match=r"router_aux_coef \(0.01\): is not supported for reward"):
        config_of("reward_model", learner={"router_aux_coef": 0.01})


def test_a_deployed_judge_may_have_another_tokenizer_but_must_be_whole(here: Path):
    def judged(**keys: Any) -> Any:
        judge = {"path": "judge", "template": "{prompt}{response}", **keys}
        reward = {"judge": {**judge, "sampling": {"max_tokens": 4}}}
        return config_of("ppo", reward=reward, rollout={"max_new_tokens": 256})

    shutil.copytree("other", "judge")
    tokenizer = AutoTokenizer.from_pretrained("judge")
    tokenizer.add_tokens(["<grade>"])
    tokenizer.save_pretrained("judge")
    with_values(here / "judge", vocab_size=101, max_position_embeddings=516)
    weights = load_file("judge/model.safetensors")
    rows = torch.cat([weights["model.embed_tokens.weight"], torch.zeros(1, 64)])
    save_file(weights | {"model.embed_tokens.weight": rows}, "judge/model.safetensors")
    check(judged())
    with_values(here / "judge", max_position_embeddings=515)
    told = refusal(judged())
    assert told.startswith("reward.judge.path (judge): has positions for 515 tokens, and the judge")
    assert "read and write 516" in told
    with_values(here / "judge", max_position_embeddings=516)
    (here / "judge" / "chat_template.jinja").unlink()
    assert refusal(judged()).startswith("reward.judge.chat (True): the tokenizer of reward.judge")
    check(judged(chat=False))
    with_prefix(here / "judge")
    assert refusal(judged(chat=False)).startswith("reward.judge.path (judge), read as Llama")
    assert "reward.judge.path (./gone): there is no such folder" in refusal(judged(path="./gone"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_policy_of_every_recipe_has_all_its_weights(here: Path, recipe: str):
    with_prefix(here / "policy")
    assert refusal(config_of(recipe)).startswith("model.policy (policy), read as Llama")


@pytest.mark.parametrize(
    ("recipe", "key", "value"),
    [
        ("ppo", "critic", "other"),
        ("ppo", "reference", "other"),
        ("ppo", "reward", [{"path": "other"}]),
        ("dpo", "reference", "other"),
        ("distillation", "teacher", "other"),
    ],
)
def test_every_other_role_has_all_its_weights(here: Path, recipe: str, key: str, value: Any):
    with_prefix(here / "other")
    told = refusal(config_of(recipe, model={key: value}))
    assert told.startswith(f"model.{key}")
    assert "(other), read as Llama" in told
    assert 'take "module." off the names' in told


def test_a_causal_language_model_is_no_reward_model(here: Path):
    told = refusal(config_of("ppo", model={"reward": "other"}))
    assert told.startswith(
        "model.reward (other), read as LlamaForSequenceClassification: its files"
    )
    check_models(config_of("ppo", model={"reward": "reward"}))


@pytest.mark.parametrize(
    ("recipe", "key"),
    [("ppo", "reference"), ("ppo", "critic"), ("dpo", "reference"), ("distillation", "teacher")],
)
def test_ids_mean_the_same_tokens_to_all_who_read_them(here: Path, recipe: str, key: str):
    file = here / "other" / "tokenizer.json"
    values = json.loads(file.read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    file.write_text(json.dumps(values))
    told = refusal(config_of(recipe, model={key: "other"}))
    assert told.startswith(f"model.{key}")
    assert "its vocabulary is not that of model.policy (policy)" in told
    for file in (here / "other").glob("tokenizer*"):
        file.unlink()
    config = config_of(recipe, model={key: "other"})
    if key == "teacher":
        assert refusal(config).startswith("model.teacher (other): transformers finds no")
    else:
        check(config)  # as many ids; nothing says that they mean something else


def test_a_draft_model_needs_the_tokens_of_the_policy(here: Path):
    engine = {"speculation": {"kind": "model", "model": "other"}}
    check(config_of("ppo", rollout={"engine": engine}))
    with_token("policy", pad_token="<spare>")
    told = refusal(config_of("ppo", rollout={"engine": engine}))
    assert told.startswith(
        "rollout.engine.speculation.model (other): its vocabulary is not that of"
    )
    missing = {"speculation": {"kind": "model", "model": "./none"}}
    told = refusal(config_of("ppo", rollout={"engine": missing}))
    assert told.startswith("rollout.engine.speculation.model (./none): there is no such folder")


def with_token(path: str, *, special: bool = True, rows: int = 0, **named: str) -> None:
    """Add a token to a folder's tokenizer, and rows to the embedding that its config tells."""
    tokenizer = load_tokenizer(path)
    tokenizer.add_tokens([AddedToken("<spare>", special=special)], special_tokens=special)
    if named:
        tokenizer.add_special_tokens(named)
    tokenizer.save_pretrained(path)
    size = json.loads(Path(path, "config.json").read_text())["vocab_size"]
    with_values(Path(path), vocab_size=size + rows)


def test_a_pad_token_that_one_of_two_tokenizers_has_does_not_matter(here: Path):
    for reader, policy in (("other", "policy"), ("policy", "other")):
        assert reads_tokens(reader, policy, key="model.reference")
    with_token("policy", pad_token="<spare>")
    check(config_of("ppo", model={"reference": "other", "critic": "other"}))
    assert reads_tokens("policy", "other", key="model.reference")
    told = refusal(config_of("distillation", model={"teacher": "other"}))
    assert "its vocabulary is not that of model.policy (policy)" in told
    with_values(here / "policy", vocab_size=200)  # it may sample what the reference cannot read
    assert not reads_tokens("other", "policy", key="model.reference")
    with_values(here / "other", vocab_size=101, max_position_embeddings=516)
    assert reads_tokens("other", "policy", key="model.reference")


@pytest.mark.parametrize("used", ["text", "stop", "eos", "template", "other"])
def test_an_added_token_that_rows_are_made_of_matters(here: Path, used: str):
    with_token("policy", special=used != "text", rows=1)
    with_values(here / "other", vocab_size=200)
    tokenizer = load_tokenizer("policy")
    if used == "stop":
        with_values(here / "policy", "generation_config.json", eos_token_id=[2, len(tokenizer) - 1])
    elif used == "eos":
        tokenizer.eos_token = "<spare>"
    elif used == "template":
        tokenizer.chat_template = "<spare>{{ messages }}"
    elif used == "other":
        reference = load_tokenizer("other")
        reference.add_special_tokens({"pad_token": "<more>"})
        reference.save_pretrained("other")
    tokenizer.save_pretrained("policy")
    assert not reads_tokens("other", "policy", key="model.reference")


@pytest.mark.parametrize(("policy", "other"), [(120, 140), (140, 120)])
def test_embeddings_that_are_padded_to_other_sizes_pass(here: Path, policy: int, other: int):
    """Qwen2.5 has 151,936 rows up to 3B and 152,064 from 7B, and one tokenizer."""
    for name, size in (("policy", policy), ("other", other)):
        with_values(here / name, vocab_size=size)
    assert same_vocabulary("other", "policy")
    assert reads_tokens("other", "policy", key="model.reference")


def test_a_folder_without_a_tokenizer_is_told_by_key(here: Path):
    for file in (here / "policy").glob("tokenizer*"):
        file.unlink()
    told = refusal(config_of("ppo"))
    assert told.startswith("model.policy (policy): transformers finds no tokenizer there")
    assert "Save one beside the model" in told


def test_an_adapter_is_no_model_and_not_beside_one(here: Path):
    (here / "policy" / "adapter_config.json").write_text("{}")
    told = refusal(config_of("ppo"))
    assert told.startswith("model.policy (policy): the folder has an adapter_config.json beside")
    (here / "policy" / "config.json").unlink()
    told = refusal(config_of("ppo"))
    assert "has no config.json, only a LoRA adapter. Merge the adapter into its base model" in told


def test_quantised_weights_are_not_trained(here: Path):
    with_values(here / "policy", quantization_config={"quant_method": "fp8"})
    told = refusal(config_of("ppo"))
    assert told.startswith("model.policy (policy): its weights are quantised (fp8), but gradients")
    check_model("model.reference", "policy")


@pytest.mark.parametrize("head_dim", [32, 48])
def test_heads_that_an_8_bit_cache_cannot_hold_on_cpus_are_refused(here: Path, head_dim: int):
    with_values(here / "policy", head_dim=head_dim)
    config = config_of(
        "ppo",
        model={"dtype": "bfloat16"},
        rollout={"engine": {"kv_cache_dtype": "fp8"}},
        ppo={"correction": {"kind": "tis"}},
    )
    if head_dim % 32 == 0:
        check_kernels(config)
        return
    with pytest.raises(ConfigError, match=r"of model\.policy .* have 48"):
        check_kernels(config)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_config_that_is_no_object_is_told(here: Path, text: str):
    (here / "policy" / "config.json").write_text(text)
    assert "config.json" in (told := refusal(config_of("ppo")))
    assert told.startswith("model.policy (policy): its config.json")


def test_what_is_longer_than_the_positions_is_refused(here: Path):
    rollout = {"max_new_tokens": 257}
    told = refusal(config_of("ppo", rollout=rollout))
    assert told == (
        "data.max_prompt_tokens + rollout.max_new_tokens (513): model.policy (policy) has "
        "positions for 512 tokens. Lower their sum by 1."
    )
    check_inputs(config_of("ppo", rollout={"max_new_tokens": 256}), on_this_machine=False)
    with_values(here / "policy", rope_scaling={"rope_type": "linear", "factor": 2.0})
    check_inputs(config_of("ppo", rollout=rollout), on_this_machine=False)
    with_values(here / "other", max_position_embeddings=300)
    told = refusal(config_of("ppo", model={"reference": "other"}))
    assert "model.reference (other) has positions for 300 tokens. Lower their sum by 20" in told


LONG_ROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "limit"),
    [(LONG_ROPE, "original_max_position_embeddings"), (DYNAMIC, "max_position_embeddings")],
)
@pytest.mark.parametrize("recipe", ["ppo", "sft", "dpo", "reward_model"])
def test_rows_whose_rotation_depends_on_the_rows_beside_them_are_refused(
    here: Path, recipe: str, rope: dict[str, Any], limit: str
):
    """Phi-3, InternLM2: transformers looks at the longest row of a pass, vLLM does not."""
    config: Any = config_of(recipe)
    key, length = "rollout.max_new_tokens", getattr(config, "max_model_len", 0)
    if recipe != "ppo":
        key = "data.max_response_tokens"
        length = config.data.max_prompt_tokens + config.data.max_response_tokens
    below: dict[str, Any] = {limit: length - 1}
    with_values(here / "policy", rope_scaling=rope, **below)
    told = refusal(config)
    assert told == (
        f"data.max_prompt_tokens + {key} ({length}): model.policy (policy) rotates all rows of a "
        f"pass by other factors if one of them has more than {length - 1} tokens. Lower their sum "
        "by 1, or remove rope_scaling from its config.json."
    )
    enough: dict[str, Any] = {limit: length}
    with_values(here / "policy", **enough)
    check_rotations(config, on_hub=False)
    with_values(here / "policy", rope_scaling=LONG_ROPE | {"short_factor": [2.0]})
    check_rotations(config, on_hub=False)


def test_rotations_of_a_model_from_the_hub_are_checked_too(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    config = config_of("sft", model={"policy": "org/policy"})
    with_values(here / "policy", rope_scaling=DYNAMIC, max_position_embeddings=8)
    monkeypatch.setattr(
        "raypo.models.checkpoint.read_config",
        lambda path, **_: AutoConfig.from_pretrained(here / "policy"),
    )
    with pytest.raises(ConfigError, match=r"model.policy \(org/policy\) rotates all rows"):
        check_rotations(config, on_hub=True)


@pytest.mark.parametrize("teacher", ["other", None])
def test_a_teachers_prompt_is_within_the_positions_of_who_reads_it(here: Path, teacher: Any):
    shown = {"teacher_prompt": "solution", "max_teacher_prompt_tokens": 449}
    data = {"prompts": "rows.jsonl", "label_key": "response"}
    keys: dict[str, Any] = {"data": data, "distillation": shown}
    told = refusal(config_of("distillation", model={"teacher": teacher}, **keys))
    name = "model.teacher (other)" if teacher else "model.policy (policy)"
    assert told == (
        f"distillation.max_teacher_prompt_tokens + rollout.max_new_tokens (513): {name} has "
        f"positions for 512 tokens. Lower their sum by 1."
    )
    shown["max_teacher_prompt_tokens"] = 448
    check_inputs(
        config_of("distillation", model={"teacher": teacher}, **keys), on_this_machine=False
    )


def test_a_success_that_a_teacher_is_shown_is_judged(here: Path):
    shown = {"teacher_prompt": "success", "max_teacher_prompt_tokens": 100}
    told = refusal(config_of("distillation", distillation=shown))
    assert told.startswith(
        "distillation.teacher_prompt (success): shows the teacher a sample that passed"
    )


def test_a_reward_model_that_reads_the_policys_ids_has_positions_for_them(here: Path):
    with_values(here / "reward", max_position_embeddings=300)
    told = refusal(config_of("ppo", model={"reward": "reward"}))
    assert "model.reward (reward) has positions for 300 tokens. Lower their sum by 20" in told


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_stop_token_without_an_embedding_is_refused(here: Path, name: str):
    if name == "generation_config.json":
        with_values(here / "policy", name, eos_token_id=[2, 9999])
        assert "eos_token_id of its generation_config.json names 9999" in refusal(config_of("ppo"))
        return
    tokenizer = AutoTokenizer.from_pretrained("policy")
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.save_pretrained("policy")
    (here / "policy" / "generation_config.json").unlink()
    assert f"has the id {len(tokenizer) - 1}, but the model has" in refusal(config_of("sft"))


def test_rows_that_the_model_cannot_read_are_shown(here: Path):
    tokenizer = load_tokenizer("policy")
    limits = Limits.of("policy")
    good = np.array(tokenizer("1+1=")["input_ids"])
    limits.check([(good, good)], tokenizer, key="data.prompts")
    with pytest.raises(ConfigError, match=r"data\.prompts: the row .* '1\+1=1.* 514 tokens"):
        limits.check([(good, np.resize(good, 510))], tokenizer, key="data.prompts")
    tokenizer.add_tokens(["<|think|>"])
    foreign = np.array(tokenizer("2<|think|>")["input_ids"])
    with pytest.raises(ConfigError, match=r"has the token '<\|think\|>' \(\d+\), but model"):
        limits.check([(good, foreign)], tokenizer, key="data.prompts")


def test_adapters_are_tried_before_weights_are_read(here: Path):
    told = refusal(config_of("sft", model={"lora": {"target_modules": ["nope"]}}))
    assert told.startswith("model.lora.target_modules (nope): ")
    for recipe in ("ppo", "sft", "reward_model"):
        check_models(config_of(recipe, model={"lora": {}}))
    assert not torch.cuda.is_initialized()


def test_served_models_are_checked_before_they_start(here: Path):
    """Engines and hub ids do not pass the checks of the start."""
    for make in (
        lambda: RewardModel("other", policy="policy", dtype="float32", max_batch_tokens=64),
        lambda: VllmRewardModel(
            "other", policy="policy", section=FrozenSection(), dtype="float32", max_model_len=64
        ),
    ):
        with pytest.raises(ConfigError, match=r"\(other\), read as Llama.* lack score\.weight"):
            make()
    with_prefix(here / "other")
    for make in (
        lambda: ReferenceModel("other", dtype="float32", temperature=1.0, max_batch_tokens=64),
        lambda: VllmReference("other", section=FrozenSection(), dtype="float32", max_model_len=64),
    ):
        with pytest.raises(ConfigError, match=r"\(other\), read as LlamaForCausalLM: its fi"):
            make()


@pytest.mark.parametrize("recipe", ["sft", "dpo", "reward_model"])
def test_examples_that_the_policy_cannot_read_end_the_run_before_it_is_loaded(
    here: Path, recipe: str
):
    row = {"prompt": "1+1=", "response": "2" * 600, "chosen": "2" * 600, "rejected": "3"}
    (here / "rows.jsonl").write_text(json.dumps(row) + "\n")
    load: dict[str, Any] = {
        "sft": partial(Examples.load, load_kind=load_examples),
        "dpo": load_preferences,
        "reward_model": partial(Examples.load, load_kind=load_pairs),
    }
    told: Any = SimpleNamespace(message=print)
    nothing: Any = None
    with pytest.raises(ConfigError, match=r"data\.prompts: the row .*'1\+1=222.* 605 tokens, but"):
        load[recipe](Run(config_of(recipe), nothing, Workers(), nothing, told))


def test_prompts_that_the_policy_cannot_read_end_the_run_and_are_read_once(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    with_token("policy")  # has no row in the embedding, like Gemma 3's image token
    monkeypatch.setattr(ItemStore, "__getitem__", lambda *_: pytest.fail("read once more"))
    monkeypatch.setattr(online_inputs, "first_of_each", lambda _: [])  # it reads some on purpose
    monkeypatch.setattr(online_inputs, "NUM_PROBES", 0)  # so does the probe of a push
    runtime = Runtime(name="run", storage_path=str(here), working_dir=str(here))
    told: Any = SimpleNamespace(message=print)
    files = RunFiles(str(here), "run")
    data = {"prompts": "rows.jsonl", "special_tokens_in_text": "tokens"}
    config = config_of("ppo", data=data, eval={"prompts": "rows.jsonl"})
    run = Run(config, runtime, Workers(), files, told)
    OnlineInputs.load(run)
    with Path("rows.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "2<spare>"}) + "\n")
    with pytest.raises(ConfigError, match=r"data\.prompts: the row .* token '<spare>' \(100\)"):
        OnlineInputs.load(run)


def test_eval_refuses_the_model_that_it_cannot_sample_from(here: Path):
    config = config_of("ppo")
    check_tokens("policy", key="MODEL")
    check_evaluation("policy", config)
    with_values(here / "other", max_position_embeddings=300)
    with pytest.raises(ConfigError, match=r"MODEL \(other\) has positions for 300 tokens"):
        check_evaluation("other", config)
    with_values(here / "policy", "generation_config.json", eos_token_id=9999)
    with pytest.raises(ConfigError, match=r"^MODEL \(policy\): eos_token_id of its generation"):
        check_tokens("policy", key="MODEL")


def test_padding_of_a_composite_reward_model_is_known_to_its_head(here: Path):
    """The head of transformers asks the text's config (huggingface/trl#7318)."""
    tokenizer = load_tokenizer("policy")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    text = {**sizes, **heads, "vocab_size": len(tokenizer), "pad_token_id": 3}
    vision = {**sizes, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    one_label: Any = {"num_labels": 1}
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, **one_label
    )
    Gemma3ForSequenceClassification(config).save_pretrained("composite")
    tokenizer.save_pretrained("composite")
    made = config_of("reward_model", model={"policy": "composite"}).with_dtype(use_gpu=False)
    network: Any = make_task(made, tokenizer).network  # type: ignore[arg-type]
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[1] for name in trained} == {"language_model", "weight"}
    network.model.save_pretrained("trained")
    model: Any = Gemma3ForSequenceClassification.from_pretrained("trained").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    padded = torch.tensor([[5, 6, 7, 8, tokenizer.pad_token_id, tokenizer.pad_token_id]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    with torch.no_grad():
        alone = model(ids).logits
        torch.testing.assert_close(model(padded, attention_mask=mask).logits, alone)


@pytest.mark.parametrize("recipe", ["ppo", "sft"])
def test_variables_that_the_chat_template_does_not_read_are_refused(here: Path, recipe: str):
    data = {"prompts": "rows.jsonl", "chat_template_kwargs": {"enable_thinking": False}}
    assert refusal(config_of(recipe, data=data)) == (
        "data.chat_template_kwargs.enable_thinking: the chat template does not read this variable. "
        "It reads none that can be set. Remove it (data.chat_template_kwargs)."
    )
