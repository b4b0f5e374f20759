"""Arguments that Hugging Face users know build the config that a run file would hold."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import yaml
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from raypo.checks.input_checks import check_inputs
from raypo.config import ConfigError, PPOConfig, PPOSection, parse_run_config
from raypo.custom.loader import load_function
from raypo.data.prompts import load_prompts
from raypo.inputs import inputs_of
from raypo.rewards.scoring import RewardError, WeightedSum, parts_of, score, texts_of
from raypo.rewards.wire import from_request, to_request
from raypo.trainer import DPOTrainer, GRPOTrainer, PPOTrainer, RewardModelTrainer, SFTTrainer
from raypo.types import Rollout
from tests.tiny import tiny_policy
from tests.unit.rewards.test_remote import rollout

ROWS = [{"prompt": f"{n}+1=", "answer": n + 1, "level": "easy"} for n in range(4)]


def exact(completions: list[str], answer: list[int], **columns: Any) -> list[float]:
    return [float(text == str(right)) for text, right in zip(completions, answer, strict=True)]


def short(rollouts: list[Rollout]) -> list[float]:
    return [-float(len(each.response)) for each in rollouts]


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    return str(tiny_policy(tmp_path / "policy"))


def grpo(policy: str, **arguments: Any) -> GRPOTrainer:
    given = {"model": policy, "train_dataset": ROWS, "reward_funcs": exact}
    return GRPOTrainer(**given | arguments)


def refusal(make: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as error:
        make()
    return str(error.value)


def test_arguments_become_the_config_of_a_run_file(policy: str, tmp_path: Path):
    args = {"num_steps": 3, "ppo.kl.coef": 0.1, "rollout": {"samples_per_prompt": 8}}
    made = grpo(policy, args=args, eval_dataset=ROWS[:2]).config
    assert (made.name, made.num_steps, made.model.policy) == ("policy-ppo", 3, policy)
    assert (made.ppo.preset, made.ppo.advantage, made.ppo.kl.coef) == ("grpo", "grpo", 0.1)
    assert made.rollout.samples_per_prompt == 8
    files = [made.data.prompts, made.eval.prompts or ()]
    assert [len(Path(str(f[0])).read_text().splitlines()) for f in files] == [4, 2]


def test_grpo_has_its_preset_unless_another_is_given(policy: str):
    assert grpo(policy).config.ppo.advantage == "grpo"
    assert grpo(policy, args={"ppo.preset": "dr_grpo"}).config.ppo.advantage == "dr_grpo"
    ppo = PPOTrainer(model=policy, train_dataset=ROWS, reward_funcs=exact)
    assert ppo.config.ppo.advantage == "gae"


def test_grpo_has_its_preset_with_a_config_object_too(policy: str):
    def config(**ppo: Any) -> PPOConfig:
        return PPOConfig(name="x", model={"policy": policy}, data={"prompts": "x"}, ppo=ppo)  # type: ignore[arg-type]

    def made(args: PPOConfig) -> Any:
        return grpo(policy, args=args).config.ppo

    assert made(config()) == config(preset="grpo").ppo
    assert made(config(clip_high=0.3)) == config(preset="grpo", clip_high=0.3).ppo
    assert made(config(advantage="gae")) == config(advantage="gae").ppo
    assert made(config(preset="rloo")) == config(preset="rloo").ppo


def test_the_shown_config_is_a_run_file_that_makes_the_same_config(policy: str, tmp_path: Path):
    made = grpo(policy, args={"ppo.preset": "grpo", "ppo.kl.coef": 0.01}, peft_config={"rank": 4})
    text = made.config.to_yaml()
    assert yaml.safe_load(text)["ppo"] == {"preset": "grpo", "kl": {"coef": 0.01}}
    (tmp_path / "same.yaml").write_text(text)
    assert PPOConfig.load(tmp_path / "same.yaml") == made.config


def test_the_shown_config_names_its_recipe(policy: str):
    rows = [{"prompt": "a", "response": "b"}]
    made = SFTTrainer(model=policy, train_dataset=rows, args={"num_steps": 3}).config
    assert parse_run_config(yaml.safe_load(made.to_yaml()), origin="shown") == made


def test_a_file_or_a_config_takes_the_arguments_too(policy: str, tmp_path: Path):
    (tmp_path / "run.yaml").write_text("name: mine\nppo: {preset: rloo}\n")
    assert grpo(policy, args=tmp_path / "run.yaml").config.ppo.advantage == "rloo"
    whole = PPOConfig.parse({"name": "own", "model": {"policy": "p"}, "data": {"prompts": "x"}})
    made = PPOTrainer(whole, model=policy, train_dataset=ROWS, reward_funcs=exact).config
    assert (made.name, made.model.policy) == ("own", policy)
    assert "args (PosixPath): the first argument is a config" in refusal(
        lambda: PPOTrainer(whole, args=tmp_path / "run.yaml")
    )


def test_columns_of_other_recipes_data(policy: str):
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    chats = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    assert "as TRL's extract_prompt does" in refusal(
        lambda: DPOTrainer(model=policy, train_dataset=[{"chosen": chats, "rejected": chats}])
    )
    dpo = DPOTrainer(model=policy, ref_model=policy, train_dataset=pairs, eval_dataset=pairs)
    assert dpo.config.model.reference == policy
    assert dpo.config.eval.pairs
    assert dpo.config.name == "policy-dpo"
    reward = RewardModelTrainer(model=policy, train_dataset=pairs, eval_dataset=pairs)
    assert reward.config.eval.prompts
    sft = SFTTrainer(
        model=policy,
        train_dataset=[{"prompt": "a", "completion": "b"}],
        args={"data.response_key": "completion", "learner.batch_size": 1},
    )
    assert sft.config.data.response_key == "completion"
    assert "reward_funcs (" in refusal(lambda: SFTTrainer(model=policy, reward_funcs=exact))
    chats = [{"messages": [{"role": "user", "content": "a"}]}]
    assert "It has messages. Set data.messages_key to messages" in refusal(
        lambda: SFTTrainer(model=policy, train_dataset=chats)
    )
    assert "Set data.prompt_key to one of them" in refusal(
        lambda: grpo(policy, train_dataset=chats)
    )
    assert "ref_model: this recipe has no model.reference" in refusal(
        lambda: SFTTrainer(model=policy, ref_model=policy)
    )


def test_a_model_object_is_saved_into_the_runs_folder(policy: str):
    model = AutoModelForCausalLM.from_pretrained(policy)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    made = grpo(policy, model=model, processing_class=tokenizer)
    saved = Path(made.config.model.policy)
    assert saved.parent == Path("runs/policy-ppo/given_models").absolute()
    assert (saved / "tokenizer.json").is_file()
    assert AutoModelForCausalLM.from_pretrained(saved).num_parameters() == model.num_parameters()
    again = grpo(policy, model=model, processing_class=tokenizer)
    assert again.config.model.policy == made.config.model.policy
    next(model.parameters()).data += 1
    other = grpo(policy, model=model, processing_class=tokenizer)
    assert other.config.model.policy != made.config.model.policy
    assert "storage_path (s3://b/c) is a URI" in refusal(
        lambda: grpo(
            policy,
            model=model,
            processing_class=tokenizer,
            args={"storage_path": "s3://b/c"},
            train_dataset="x.jsonl",
        )
    )


def test_a_saved_model_may_have_folders_below_it(policy: str):
    """Transformers saves a tokenizer's second chat template into a folder of its own."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    model = AutoModelForCausalLM.from_pretrained(policy)
    made = [grpo(policy, model=model, processing_class=tokenizer).config.model.policy]
    assert any(each.is_dir() for each in Path(made[0]).iterdir())
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}!"}
    made.append(grpo(policy, model=model, processing_class=tokenizer).config.model.policy)
    assert made[0] != made[1]


def test_models_and_tokenizers_that_could_not_be_used_are_refused(policy: str, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(policy)
    assert "Give processing_class" in refusal(lambda: grpo(policy, model=model))
    adapted = SimpleNamespace(peft_config={}, save_pretrained=print)
    assert "merge_and_unload" in refusal(lambda: grpo(policy, model=adapted))
    assert "is not a transformers model" in refusal(lambda: grpo(policy, model=object()))
    own = AutoTokenizer.from_pretrained(policy)
    assert grpo(policy, processing_class=own).config.model.policy == policy
    assert "processing_class ('x')" in refusal(lambda: grpo(policy, processing_class="x"))
    other = AutoTokenizer.from_pretrained(tiny_policy(tmp_path / "other"))
    assert "processing_class (" in refusal(
        lambda: grpo(policy, ref_model=model, processing_class=other)
    )
    said = refusal(lambda: grpo(policy, processing_class=other))
    assert f"loads the tokenizer from model.policy ({policy})" in said


def test_a_tokenizer_that_was_changed_after_it_was_loaded_is_refused(policy: str):
    padded = AutoTokenizer.from_pretrained(policy)
    padded.pad_token = padded.eos_token  # as many scripts do; raypo pads with no token of its own
    assert grpo(policy, processing_class=padded).config.model.policy == policy
    padded.add_special_tokens({"pad_token": "[PAD]"})
    assert grpo(policy, processing_class=padded).config.model.policy == policy
    processor = SimpleNamespace(tokenizer=padded, save_pretrained=print)
    assert grpo(policy, processing_class=processor).config.model.policy == policy
    other = AutoTokenizer.from_pretrained(policy)
    other.chat_template = "{{ messages }}"
    assert "chat_template" in refusal(lambda: grpo(policy, processing_class=other))
    longer = AutoTokenizer.from_pretrained(policy)
    longer.add_tokens(["<think>"])
    assert "added_tokens_decoder" in refusal(lambda: grpo(policy, processing_class=longer))


def test_a_model_object_is_no_reward_function(policy: str):
    model = AutoModelForCausalLM.from_pretrained(policy)
    said = refusal(lambda: grpo(policy, reward_funcs=model))
    assert "reward_funcs (LlamaForCausalLM)" in said
    assert "folder or hub id" in said


def test_a_section_is_taken_for_its_keys(policy: str):
    made = grpo(policy, args={"ppo": PPOSection(num_epochs=2)}).config
    assert (made.ppo.num_epochs, made.ppo.advantage) == (2, "grpo")


def test_a_name_that_comes_from_the_models_folder_is_valid(tmp_path: Path):
    folder = str(tiny_policy(tmp_path / "_my model"))
    assert grpo(folder).config.name == "my-model-ppo"


def test_a_lora_config_of_peft(policy: str):
    given = LoraConfig(
        r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM"
    )
    lora = grpo(policy, peft_config=given).config.model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.target_modules) == (4, 8.0, ("q_proj", "v_proj"))
    dropout = LoraConfig(target_modules="all-linear", lora_dropout=0.1)
    assert "peft_config.lora_dropout (0.1)" in refusal(lambda: grpo(policy, peft_config=dropout))
    random = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    assert "peft_config.init_lora_weights (False)" in refusal(
        lambda: grpo(policy, peft_config=random)
    )
    assert "target_modules (None)" in refusal(lambda: grpo(policy, peft_config=LoraConfig()))
    assert "peft_config (int)" in refusal(lambda: grpo(policy, peft_config=3))


def test_reward_functions_of_both_forms_and_models_are_added(policy: str):
    one = grpo(policy, reward_funcs=[exact])
    assert one._reward_fn is exact
    both = grpo(policy, reward_funcs=[exact, short], reward_weights=[2.0, 0.5])
    assert isinstance(both._reward_fn, WeightedSum)
    assert "reward_weights ([1.0])" in refusal(
        lambda: grpo(policy, reward_funcs=[exact, short], reward_weights=[1.0])
    )
    parts = {"ppo.advantage": "gdpo", "ppo.part_weights": {"exact": 1.0}, "ppo.kl.coef": 0.0}
    weighted = {"reward_funcs": [exact, short], "reward_weights": [1.0, -1.0]}
    assert "reward_weights ([1.0, -1.0])" in refusal(lambda: grpo(policy, args=parts, **weighted))
    said = refusal(lambda: grpo(policy, reward_funcs=[exact, "some/model"]))
    assert "model.reward (some/model)" in said, "a text is a reward model"
    assert "one argument, a list of rollouts" in refusal(
        lambda: grpo(policy, reward_funcs=lambda a, b: [])
    )


def test_reward_functions_by_import_path_are_imported_by_each_process(policy: str, tmp_path: Path):
    """Their module exists only where the file was loaded, so no pickle may refer to them."""
    (tmp_path / "mine.py").write_text(
        "def exact(completions, answer, **columns): return [1.0] * len(answer)\n"
        "def long(rollouts): return [2.0] * len(rollouts)\n"
    )
    one = grpo(policy, reward_funcs="mine.py:exact")
    assert one._reward_fn is None
    assert one.config.reward.function == f"{tmp_path}/mine.py:exact"
    both = grpo(policy, reward_funcs=["mine.py:exact", "mine.py:long", short])
    given = cloudpickle.dumps(both._reward_fn)
    code = (
        "import os, pickle, sys; os.chdir('/'); sum_of = pickle.load(sys.stdin.buffer)\n"
        "from tests.unit.rewards.test_remote import rollout\n"
        "from dataclasses import replace\n"
        "from raypo.rewards.scoring import score\n"
        "print(score(sum_of, [replace(rollout(1), row={'answer': 1})])[0].parts)"
    )
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], input=given, capture_output=True, env={**os.environ, **path}
    )
    assert done.stdout.decode().strip() == "{'exact': 1.0, 'long': 2.0, 'short': -1.0}", done.stderr
    assert "reward_funcs (mine.py:gone)" in refusal(
        lambda: grpo(policy, reward_funcs=["mine.py:gone", short])
    ).replace(f"{tmp_path}/", "")


def test_other_weights_of_the_same_functions_are_noticed(policy: str):
    def recorded(weights: list[float]) -> Any:
        made = grpo(policy, reward_funcs=[exact, short], reward_weights=weights)
        return inputs_of(made.config, made.given_functions)["reward.function"]

    assert recorded([1, 1]) == recorded([1.0, 1.0])
    assert recorded([1, 1]) != recorded([1, 2])


def test_rows_and_a_path_for_the_same_key_are_refused(policy: str):
    said = refusal(lambda: grpo(policy, train_dataset="x.jsonl", datasets={"data.prompts": ROWS}))
    assert "train_dataset: datasets has data.prompts too" in said


def test_arguments_of_trl_without_a_counterpart_say_what_to_do(policy: str):
    assert refusal(lambda: grpo(policy, tokenizer=None)).endswith("it is called processing_class.")
    assert "in reward_funcs" in refusal(lambda: PPOTrainer(model=policy, reward_model=policy))
    said = refusal(lambda: GRPOTrainer(policy, reward_funcs=exact))
    assert said == (
        f"config ({policy}): this is a model's folder. Give the path of a run file, or pass the "
        f"model as model={policy!r}."
    )
    for weights in ([1.0, None], [1.0, "2"], [float("nan"), 1.0]):
        assert "weights must be finite numbers" in refusal(
            partial(grpo, policy, reward_funcs=[exact, short], reward_weights=weights)
        )


def test_one_callback_needs_no_list(policy: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text("def view(step): ...\n")
    assert grpo(policy, callbacks=print)._input.callbacks == (print,)
    assert grpo(policy, callbacks="mine.py:view").config.callbacks == ("mine.py:view",)


def test_a_label_is_one_column(policy: str):
    said = refusal(lambda: grpo(policy, args={"data.label_key": ["answer", "level"]}))
    assert "args: data.label_key (['answer', 'level']): must be one column. Name one" in said
    assert "rollout.row" in said


def test_callbacks_are_functions_or_import_paths(policy: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text("def view(step): ...\n")
    made = grpo(policy, callbacks=[print, f"{tmp_path}/mine.py:view"])
    assert made.config.callbacks == (f"{tmp_path}/mine.py:view",)
    assert made._input.callbacks == (print,)
    said = refusal(lambda: grpo(policy, callbacks=[SimpleNamespace(on_step_end=print)]))
    assert said.startswith("callbacks (")
    assert "Give a function" in said


def test_a_refused_run_leaves_nothing_behind(policy: str, monkeypatch: pytest.MonkeyPatch):
    refused = {"rollout.max_new_tokens": 10**6}
    assert "positions" in refusal(lambda: grpo(policy, args=refused))
    assert "no rows" in refusal(lambda: grpo(policy, train_dataset=[]))
    assert not Path("runs/policy-ppo").exists()
    kept = grpo(policy)
    refusal(lambda: grpo(policy, args=refused))
    refusal(lambda: grpo(policy, args=refused, train_dataset=ROWS[:2]))
    (file,) = kept.config.data.prompts
    assert list(Path("runs/policy-ppo/given_rows").resolve().iterdir()) == [Path(str(file))]

    def refuse(config: Any) -> None:
        raise ConfigError("refused")

    monkeypatch.setattr("raypo.trainer.trainer.check_models", refuse)
    assert refusal(kept.fit) == "refused"
    assert not Path("runs/policy-ppo").exists()


def test_fit_shows_the_config_that_the_arguments_make(
    policy: str, capsys: pytest.CaptureFixture[str]
):
    """Nothing listens at the address, so this is as far as it comes."""
    trainer = grpo(policy, args={"cluster.address": "127.0.0.1:1", "learner.use_gpu": False})
    with pytest.raises(ConfigError, match="nothing listens there"):
        trainer.fit()
    shown = capsys.readouterr().out.partition("only this script can start the run:\n\n")[2]
    values = yaml.safe_load(shown.partition("Note:")[0])
    assert values["learner"] == {"use_gpu": False}
    assert values["ppo"] == {"preset": "grpo"}


def test_rows_of_python_count_as_given_before_the_config_is_checked(policy: str):
    from ray.train import CheckpointConfig, RunConfig

    best = CheckpointConfig(checkpoint_score_attribute="eval/score_mean")
    made = grpo(policy, eval_dataset=ROWS, run_config=RunConfig(checkpoint_config=best))
    assert made.config.checkpoint.best_by == "eval/score_mean"


def test_habits_of_hugging_face_get_the_counterpart(policy: str):
    trainer = grpo(policy)
    with pytest.raises(AttributeError, match=r"GRPOTrainer.train: Call fit\(\)"):
        trainer.train()  # type: ignore[attr-defined]
    assert not hasattr(trainer, "quux")
    said = refusal(lambda: GRPOTrainer(policy, [exact], {}, ROWS))
    assert said == (
        "GRPOTrainer (4 positional arguments): only the config may be positional. Write "
        "model=..., reward_funcs=..., args=..., train_dataset=..."
    )


def test_a_model_and_data_are_asked_for_by_the_names_of_the_arguments(policy: str):
    said = refusal(lambda: GRPOTrainer(model=policy, reward_funcs=exact))
    assert said == "train_dataset (None): is required. Give train_dataset, or data.prompts in args."
    assert refusal(lambda: SFTTrainer({"data.prompts": "x"})).startswith(
        "model (None): is required"
    )


def test_a_config_class_explains_wrong_values_itself():
    said = refusal(lambda: PPOConfig(name="x", num_generations=8))  # type: ignore[call-arg]
    assert "config: num_generations: there is no such key. Set rollout.samples_per_prompt" in said
    assert "config: model: this key is required" in said


def test_every_column_reaches_a_reward_function(policy: str, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    values = {"name": "x", "model": {"policy": policy}, "data": {"prompts": "rows.jsonl"}}
    config = PPOConfig.parse(values)
    loaded = load_prompts(config.data, AutoTokenizer.from_pretrained(policy))
    assert [prompt.row for prompt in loaded.prompts] == ROWS


def test_a_function_of_trls_form_gets_lists_of_columns():
    seen: dict[str, Any] = {}

    def judge(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [1.0, 0.0]

    rows = [{"prompt": "1+0=", "answer": 1}, {"prompt": "2+0=", "level": "easy"}]
    given = [replace(rollout(n + 1), row=row) for n, row in enumerate(rows)]
    assert score(judge, given) == [1.0, 0.0]
    assert seen == {
        "prompts": ["1+0=", "2+0="],
        "completions": ["1", "2"],
        "completion_ids": [[1], [2]],
        "answer": [1, None],
        "level": [None, "easy"],
    }
    chat = [{"role": "user", "content": "1+0="}]
    score(judge, [replace(each, messages=chat) for each in given])
    assert seen["prompts"] == [chat, chat]
    assert seen["completions"][0] == [{"role": "assistant", "content": "1"}]
    with pytest.raises(RewardError, match=r"missing 1 required .* 'solution'"):
        score(lambda completions, solution: [0.0] * 2, given)


def test_a_function_of_verls_form_is_called_for_each_response_with_the_values_of_its_row():
    calls: list[dict[str, Any]] = []

    def compute_score(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = 0):
        calls.append(locals() | {"calls": None})
        is_right = solution_str == ground_truth
        return {"score": float(is_right), "acc": is_right, "pred": solution_str}

    rows = [
        {"data_source": "gsm8k", "reward_model": {"ground_truth": "1"}, "extra_info": {"index": 7}},
        {"reward_model": {"style": "model"}},
    ]
    given = [
        replace(rollout(n + 1), row=row, label="5", data_source="file")
        for n, row in enumerate(rows)
    ]
    scores = score(compute_score, given)
    assert scores == [1.0, 0.0]
    assert (parts_of(scores[0]), texts_of(scores[0])) == ({"acc": 1.0}, {"pred": "1"})
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    assert [[call[name] for name in names] for call in calls] == [
        ["gsm8k", "1", "1", {"index": 7}],
        ["file", "2", "5", {}],
    ]

    async def later(solution_str: str, ground_truth: str, data_source: str, **others: Any) -> float:
        return len(others["extra_info"])

    assert score(later, given) == [1.0, 0.0]


def test_a_function_of_verls_form_is_checked_before_the_start(policy: str, tmp_path: Path):
    needed = "data_source, solution_str, ground_truth"
    (tmp_path / "mine.py").write_text(
        f"def score({needed}, extra_info=None, strict=True): return 1.0\n"
        f"def more({needed}, url, extra_info=None): return 1.0\n"
    )
    for path in ("mine.py:score", "mine.py:more"):
        values = {"reward": {"function": path}, "data": {"prompts": "rows.jsonl"}}
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+0="}) + "\n")
        config = PPOConfig.parse({"name": "x", "model": {"policy": policy}, **values})
        said = refusal(lambda config=config: check_inputs(config))
        if path == "mine.py:more":
            assert f"it has the parameters ({needed}, url, extra_info=None)" in said
            continue
        assert "data.label_key (None): mine.py:score takes a ground_truth" in said
        row = {"prompt": "1+0=", "reward_model": {"ground_truth": "1"}}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        check_inputs(config)


def test_columns_with_the_names_of_arguments_do_not_replace_them():
    def judge(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        assert (prompts, completions, completion_ids) == (["1+0="], ["1"], [[1]])
        assert columns == {"answer": [1]}
        return [1.0]

    row = {"prompt": "a", "prompts": "b", "completions": "c", "completion_ids": [9], "answer": 1}
    assert score(judge, [replace(rollout(1), row=row)]) == [1.0]


def test_a_sum_is_recorded_as_known_to_its_script_only(policy: str):
    """`raypo status` then advises to start the script again, and not `raypo train RUN`."""
    made = grpo(policy, reward_funcs=[exact, short]).config
    assert made.reward.function == "__main__:exact + short"
    weighted = grpo(policy, reward_funcs=[exact, short], reward_weights=[1.0, 0.2]).config
    assert weighted.reward.function == "__main__:exact + 0.2 * short"
    said = refusal(lambda: load_function(made.reward.function or ""))
    assert said.endswith("Start the script again, or set reward.function to file.py:name.")


def test_an_argument_without_a_column_is_refused_before_the_start(policy: str, tmp_path: Path):
    def judge(completions: list[str], solution: list[str], hint: Any = None) -> list[float]:
        return [0.0] * len(solution)

    said = refusal(lambda: grpo(policy, reward_funcs=[exact, judge]))
    assert said.startswith("reward_funcs (")
    assert "judge): has the argument solution, but data.prompts has no such column" in said
    assert "It has answer, level. Add the column" in said
    assert grpo(policy, reward_funcs=judge, train_dataset=[*ROWS, {"prompt": "a", "solution": "b"}])
    (tmp_path / "mine.py").write_text("def judge(prompts, completions, solution): ...\n")
    said = refusal(lambda: grpo(policy, reward_funcs="mine.py:judge"))
    assert said.startswith(f"reward.function ({tmp_path}/mine.py:judge): has the argument solution")


def test_a_sum_has_named_parts_and_skips_samples_without_a_score():
    def some(completions: list[str]) -> list[float | None]:
        return [None if text == "1" else 3.0 for text in completions]

    first, second = score(WeightedSum([short, some], [2.0, 1.0]), [rollout(1), rollout(2)])
    assert (first, first.parts) == (-2.0, {"short": -1.0})  # type: ignore[attr-defined]
    assert (second, second.parts) == (1.0, {"short": -1.0, "some": 3.0})  # type: ignore[attr-defined]
    (failed,) = score(WeightedSum([some], [1.0]), [rollout(1)])
    assert np.isnan(failed)


def test_a_part_never_takes_the_place_of_the_sum():
    def other(rollouts: list[Rollout]) -> list[float]:
        return [5.0] * len(rollouts)

    other.__name__ = "score"
    (total,) = score(WeightedSum([short, other], [1.0, 1.0]), [rollout(1)])
    assert (total, total.parts) == (4.0, {"short": -1.0, "score_2": 5.0})  # type: ignore[attr-defined]
    (total,) = score(WeightedSum([short, short], [1.0, 2.0]), [rollout(1)])
    assert (total, total.parts) == (-3.0, {"short_1": -1.0, "short_2": -1.0})  # type: ignore[attr-defined]


def test_a_reward_server_gets_the_columns_that_json_can_hold():
    given = replace(rollout(1), row={"answer": 1, "image": b"png"})
    (received,) = from_request(json.dumps(to_request([given])).encode())
    assert received.row == {"answer": 1}
