"""Config keys of TRL, verl, OpenRLHF and peft, and the keys of raypo with the same meaning.

Messages about unknown keys and docs/migrating.md are generated from these tables. Names and
defaults are those of TRL 1.16, verl 0.9, OpenRLHF 0.11 (and its older, flat names) and peft 0.18.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple


class Counterpart(NamedTuple):
    """A key of another project, and its counterpart in raypo."""

    project: str
    names: tuple[str, ...]
    """Current name of the key, then its older names."""
    default: str
    """Default in the other project. It is empty if the key is required, or if its default follows
    from other keys."""
    keys: tuple[tuple[str, ...], ...]
    """Alternative groups of raypo keys for it. A recipe uses the first group whose keys it has."""
    note: str
    """Unit or difference. If `keys` is empty, it says why raypo has no counterpart."""
    is_same: bool
    """True if raypo's keys take the value unchanged."""
    is_automatic: bool
    """True if nothing needs to be set, whatever the value."""

    def keys_in(self, known: Sequence[str]) -> tuple[str, ...]:
        """Return the first group of `keys` whose keys are all in `known`, or () if there is none."""
        return next((keys for keys in self.keys if set(keys) <= set(known)), ())

    def matches(self, key: str) -> int:
        """Return how well a key matches a name of the counterpart.

        3 means that the whole name matches, 2 that two or more of its last components match, 1 that
        only its last component matches, and 0 that nothing matches.
        """
        return max(self._match(name, key) for name in self.names)

    def _match(self, name: str, key: str) -> int:
        last = name.rpartition(".")[2]
        is_telling = "." not in name or "_" in last  # the `n` of rollout.n says too little
        if key == name:
            return 3
        if "." in key and name.endswith(f".{key}"):
            return 2
        return int(is_telling and key.rpartition(".")[2] == last)


# Columns: names, newest first | default there | keys here | unit or difference.
# `a + b`: both keys take its place; `a, b`: the second one in recipes that lack the first;
# `= a`: a takes the value unchanged; `~` and `~ a`: nothing needs to be set.
_TABLES = {
    "TRL": """
model_name_or_path | | = model.policy | A Hugging Face folder or a hub id.
ref_model | | = model.reference |
reward_model_path | | = model.reward | A model that scores. For a function use `reward.function`.
train_dataset, dataset_name | | data.prompts | Files or a hub id. Rows from Python: `train_dataset=` of the trainers.
eval_dataset | | eval.pairs, eval.prompts |
reward_funcs | | reward.function | `file.py:name`. Several: one function that returns their sum and parts (docs/rewards.md, Several at once), or `reward_funcs=` of the trainers.
peft_config, use_peft | | model.lora | `{rank: 16, alpha: 32}`.
num_generations | 8 | = rollout.samples_per_prompt | Responses per prompt.
generation_batch_size | | rollout.prompts_per_step | TRL counts responses, raypo counts prompts: divide by `num_generations`.
steps_per_generation | | rollout.prompts_per_step | A step of raypo samples `prompts_per_step` x `samples_per_prompt` responses and makes one update per `ppo.minibatch_size` of them.
per_device_train_batch_size | 8 | ppo.minibatch_size, learner.batch_size | TRL counts responses (in SFT, DPO and reward models: examples) per device, raypo over all workers: multiply by the number of processes and `gradient_accumulation_steps`.
gradient_accumulation_steps | 1 | ppo.minibatch_size, learner.batch_size | Part of the minibatch, which raypo splits by `learner.max_tokens_per_microbatch`; the split does not change results.
max_prompt_length | | = data.max_prompt_tokens | Tokens. Longer prompts are skipped, not cut.
chat_template_kwargs | | = data.chat_template_kwargs |
max_completion_length, response_length | 512 | = data.max_response_tokens, rollout.max_new_tokens | Tokens.
max_length | 1024 | data.max_prompt_tokens + data.max_response_tokens | Tokens. TRL cuts the sum of both; raypo skips longer rows.
beta | 0.0 | ppo.kl.coef, dpo.beta | For GRPO's KL also `ppo.preset: grpo`, which puts it into the loss. DPO: 0.1 in both.
epsilon, cliprange | 0.2 | = ppo.clip_low + ppo.clip_high | Clip range below and above 1.
epsilon_high | | = ppo.clip_high |
delta | | = ppo.dual_clip | Bound on the ratio of tokens with a negative advantage.
num_iterations, num_ppo_epochs | 1 | = ppo.num_epochs | Passes over the responses of a step.
num_mini_batches | 1 | ppo.minibatch_size | TRL counts minibatches; raypo counts the responses of one.
loss_type | dapo | ppo.aggregation, dpo.loss | With `ppo.preset: grpo`: `dapo`, `bnpo`: token_mean; `grpo`: sequence_mean; `dr_grpo`: constant; `cispo`, `sapo`, `vespo` are values of `ppo.policy_loss`. The preset dapo also filters groups, shapes lengths and raises the clip, which TRL's loss_type does not.
scale_rewards | group | ppo.advantage | `group`: grpo; `none`: dr_grpo.
importance_sampling_level | token | ppo.policy_loss | `sequence`: gspo, with its own clip range.
mask_truncated_completions | false | = ppo.mask_truncated |
entropy_coef_delta | 0.005 | = ppo.entropy_delta |
use_adaptive_entropy | false | ppo.entropy_target | A target turns the controller on.
kl_coef | 0.05 | = ppo.kl.coef |
cliprange_value | 0.2 | = ppo.value_clip |
lam | 0.95 | = ppo.gae_lambda |
vf_coef | 0.1 | | The critic is a separate model with its own learning rate, `learner.critic_lr`.
repetition_penalty | 1.0 | | Tokens would no longer come from the policy's distribution, which the ratios assume.
use_vllm | false | ~ | Responses are always sampled by vLLM.
vllm_mode | colocate | placement.mode | `server`: dedicated.
vllm_gpu_memory_utilization | 0.3 | = rollout.engine.gpu_memory_fraction |
vllm_tensor_parallel_size | 1 | = rollout.engine.tensor_parallel |
vllm_enable_sleep_mode | false | rollout.engine.sleep |
vllm_importance_sampling_correction | true | ppo.correction.kind | raypo's default is none.
vllm_importance_sampling_mode | sequence_mask | ppo.correction.kind | `token_truncate`: tis; `sequence_truncate`: sequence_tis; `token_mask`: icepop with `low: 0`; `sequence_mask`: sequence_tis. TRL drops responses above the bound; raypo gives them the weight of the bound.
vllm_importance_sampling_clip_max, vllm_importance_sampling_cap | 3.0 | = ppo.correction.cap |
reward_weights | 1 each | reward.weights | TRL weights each function; raypo weights the sum of functions, of models and of servers. Weights of functions: factors in the function that adds them, or `reward_weights=` of the trainers.
learning_rate | 1e-6 | = learner.policy_lr, learner.lr | TRL's default for SFT is 2e-5, and for reward models 1e-4.
lr_scheduler_type | linear | = learner.lr_schedule | constant is the default; linear and cosine too.
warmup_steps, warmup_ratio | 0 | learner.lr_warmup_steps | Steps of raypo: of recipes that sample, rollout batches and not optimizer steps. Hugging Face's first update has learning rate 0; raypo's has the peak rate / (warm-up + 1).
adam_beta1, adam_beta2 | 0.9, 0.999 | learner.adam_betas | `[0.9, 0.999]`.
adam_epsilon | 1e-8 | = learner.adam_eps |
gradient_checkpointing | true | = learner.activation_checkpointing |
bf16 | | model.dtype | true: `bfloat16`, false: `float32`. `auto` is bfloat16 on GPUs and float32 on CPUs.
temperature | 1.0 | = rollout.temperature |
top_p | 1.0 | = rollout.top_p |
weight_decay | 0.0 | = learner.weight_decay |
max_grad_norm | 1.0 | = learner.max_grad_norm |
seed | 42 | = seed |
max_steps | -1 | num_steps | TRL counts optimizer steps; a step of PPO is a rollout batch with all of its updates.
num_train_epochs | 3 | num_epochs, num_steps | PPO and the other recipes that sample have `num_steps` only: rows / `rollout.prompts_per_step` are an epoch.
label_smoothing | 0.0 | = dpo.label_smoothing |
center_rewards_coefficient | | = reward_model.centering_coef |
output_dir, run_name | | storage_path + name | The run's folder is storage_path/name.
save_steps | 500 | checkpoint.every | Steps of raypo.
save_total_limit | | = checkpoint.keep |
metric_for_best_model | | checkpoint.best_by |
eval_steps | as logging_steps | eval.every | Steps of raypo. TRL evaluates only with `eval_strategy`.
report_to | | logging.wandb | `logging.wandb: {}`, `logging.mlflow: {}`, `logging.tensorboard`.
logging_steps, logging_strategy | 10 | ~ | Every step is logged.
log_completions, num_completions_to_print | false | ~ | Responses are always kept in the run's folder, and `raypo show` prints them.
eval_strategy | no | | Set `eval.prompts`, and `eval.every` to steps.
per_device_eval_batch_size | 8 | ~ | Held-out prompts need no batch size.
resume_from_checkpoint | | from_checkpoint | A run resumes automatically; `from_checkpoint` starts from another run.
""",
    "peft": """
r, lora_r, lora_rank | 8 | = model.lora.rank | TRL's command line has `lora_r`, 16.
lora_alpha | 8 | = model.lora.alpha | The scale is alpha / rank in both.
lora_dropout | 0.0 | | raypo has no dropout: old and new log-probs must come from the same function.
target_modules, lora_target_modules | | = model.lora.target_modules | `all-linear` or names.
""",
    "verl": """
actor_rollout_ref.model.path | | = model.policy |
critic.model.path | | = model.critic |
reward.reward_model.model_path, reward_model.model.path | | = model.reward |
actor_rollout_ref.model.lora_rank | 0 | model.lora.rank | 0 there: leave out `model.lora`.
actor_rollout_ref.model.lora_alpha | 16 | model.lora.alpha |
actor_rollout_ref.model.enable_gradient_checkpointing | true | = learner.activation_checkpointing |
data.train_files | | = data.prompts |
data.val_files | | = eval.prompts |
data.train_batch_size | 1024 | = rollout.prompts_per_step, learner.batch_size | Prompts, in both.
data.max_prompt_length | 512 | = data.max_prompt_tokens | Tokens. Longer prompts are skipped; `data.too_long: error` stops as verl's `truncation: error`.
data.max_response_length | 512 | = rollout.max_new_tokens, data.max_response_tokens | Tokens.
data.filter_overlong_prompts | false | data.too_long | true: `skip`.
data.apply_chat_template_kwargs | | = data.chat_template_kwargs |
data.truncation | error | data.too_long | `error`. raypo never cuts a prompt: in place of left, right or middle it skips a prompt that is too long.
data.prompt_key | prompt | = data.prompt_key |
data.seed | | = seed |
data.shuffle | true | | Prompts are shuffled in each epoch, by `seed`.
data.reward_fn_key | data_source | | A function of verl's form gets `row["data_source"]`.
reward.custom_reward_function.path, custom_reward_function.path | | reward.function | `file.py:compute_score`, as it is.
reward.custom_reward_function.name, custom_reward_function.name | compute_score | reward.function | `file.py:name`.
actor_rollout_ref.model.use_remove_padding | false | ~ | Rows are always packed.
actor_rollout_ref.rollout.name | | ~ | Responses are always sampled by vLLM.
actor_rollout_ref.rollout.n | 1 | = rollout.samples_per_prompt | Responses per prompt.
actor_rollout_ref.rollout.temperature | 1.0 | = rollout.temperature |
actor_rollout_ref.rollout.top_p | 1 | = rollout.top_p |
actor_rollout_ref.rollout.top_k | -1 | rollout.top_k | -1: null.
actor_rollout_ref.rollout.gpu_memory_utilization | 0.5 | = rollout.engine.gpu_memory_fraction |
actor_rollout_ref.rollout.tensor_model_parallel_size | 2 | = rollout.engine.tensor_parallel |
actor_rollout_ref.rollout.free_cache_engine | true | ~ rollout.engine.sleep | `auto` decides by the available memory.
actor_rollout_ref.rollout.multi_turn.max_assistant_turns | | = rollout.max_turns |
actor_rollout_ref.rollout.val_kwargs.n | 1 | = eval.samples_per_prompt |
actor_rollout_ref.rollout.val_kwargs.temperature | 0 | = eval.temperature |
actor_rollout_ref.rollout.val_kwargs.do_sample | false | ~ eval.temperature | 0 is greedy.
actor_rollout_ref.actor.ppo_mini_batch_size | 256 | ppo.minibatch_size | verl counts prompts, raypo counts responses: multiply by `rollout.samples_per_prompt`.
actor_rollout_ref.actor.use_dynamic_bsz | false | ~ learner.max_tokens_per_microbatch | Passes are always split by tokens.
actor_rollout_ref.actor.fsdp_config.param_offload, actor_rollout_ref.actor.fsdp_config.optimizer_offload, critic.model.fsdp_config.param_offload, critic.model.fsdp_config.optimizer_offload | false | | true: `learner.deepspeed: {zero_optimization: {offload_optimizer: {device: cpu}}}`, or `offload_param` with `learner.zero_stage: 3`.
actor_rollout_ref.ref.fsdp_config.param_offload | false | ~ rollout.engine.sleep | The reference leaves the GPU while it has no work, if memory is short.
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu, actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu, actor_rollout_ref.ref.log_prob_micro_batch_size, actor_rollout_ref.rollout.log_prob_micro_batch_size, critic.ppo_micro_batch_size_per_gpu | | ~ learner.max_tokens_per_microbatch | raypo counts tokens. The split does not change results.
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, actor_rollout_ref.actor.ppo_micro_batch_size | | ~ learner.max_tokens_per_microbatch | raypo counts tokens. The split does not change results.
actor_rollout_ref.actor.ppo_max_token_len_per_gpu | 16384 | = learner.max_tokens_per_microbatch | Tokens.
actor_rollout_ref.actor.ppo_epochs | 1 | = ppo.num_epochs | Passes over the responses of a step.
actor_rollout_ref.actor.clip_ratio | 0.2 | ppo.clip_low + ppo.clip_high | verl uses it only for a bound (`clip_ratio_low`, `clip_ratio_high`) that is null; each is 0.2 by default.
actor_rollout_ref.actor.clip_ratio_low | 0.2 | ppo.clip_low | The same number, but of `geo_mean`, which clips the log-ratio, 1 - exp(-low). `cispo`: `ppo.cispo_low`.
actor_rollout_ref.actor.clip_ratio_high | 0.2 | ppo.clip_high | The same number, but of `geo_mean` exp(high) - 1.
actor_rollout_ref.actor.clip_ratio_c | 3.0 | = ppo.dual_clip | raypo's default is null, no bound. verl's gspo, sapo and geo_mean have no such bound.
actor_rollout_ref.actor.loss_agg_mode | token-mean | ppo.aggregation | `seq-mean-token-mean`: sequence_mean; `seq-mean-token-sum-norm`: constant. gspo, sapo and geo_mean are always sequence_mean.
actor_rollout_ref.actor.policy_loss.loss_mode | vanilla | ppo.policy_loss | `vanilla`: ppo; `geo_mean`: gmpo; gspo, cispo, sapo, clip_cov, kl_cov, dppo_tv and dppo_kl have the same names.
actor_rollout_ref.actor.entropy_coeff | 0 | = ppo.entropy_coef |
actor_rollout_ref.actor.use_kl_loss | false | ppo.kl.placement | true: `loss`, with `ppo.kl.estimator` k2 or k3.
actor_rollout_ref.actor.kl_loss_coef | 0.001 | ppo.kl.coef | With `ppo.kl.placement: loss`.
actor_rollout_ref.actor.kl_loss_type | low_var_kl | ppo.kl.estimator | `low_var_kl`: k3; `mse`: k2; `low_var_kl+`, `k3+`: k3_st; `kl`: k1, in the reward only.
actor_rollout_ref.actor.optim.lr | 1e-6 | = learner.policy_lr, learner.lr |
actor_rollout_ref.actor.optim.lr_warmup_steps | -1 | = learner.lr_warmup_steps | Steps of raypo, rollout batches.
actor_rollout_ref.actor.optim.weight_decay | 0.01 | = learner.weight_decay |
actor_rollout_ref.actor.grad_clip | 1.0 | = learner.max_grad_norm |
critic.optim.lr | 1e-5 | = learner.critic_lr |
critic.cliprange_value | 0.5 | = ppo.value_clip |
trainer.critic_warmup | 0 | = ppo.critic_warmup_steps |
algorithm.adv_estimator | gae | ppo.advantage | `reinforce_plus_plus`: reinforce; `reinforce_plus_plus_baseline`: reinforce_baseline; gae, grpo, rloo, opo, gdpo have the same names.
algorithm.norm_adv_by_std_in_grpo | true | ppo.advantage | false: dr_grpo.
algorithm.lam | 1.0 | = ppo.gae_lambda |
algorithm.gamma | 1.0 | = ppo.gamma |
algorithm.use_kl_in_reward | false | ppo.kl.placement | true: `reward`. Without a KL anywhere: `ppo.kl.coef: 0`.
algorithm.kl_ctrl.kl_coef | 0.001 | ppo.kl.coef | With `ppo.kl.placement: reward`.
algorithm.kl_ctrl.target_kl | 0.1 | ppo.kl.target | Nats per response.
algorithm.filter_groups.enable | false | = ppo.filter.enabled |
algorithm.filter_groups.max_num_gen_batches | 0 | = ppo.filter.max_refills |
trainer.total_training_steps | | = num_steps | Rollout batches, in both.
trainer.total_epochs | 30 | num_epochs, num_steps | PPO and the other recipes that sample have `num_steps` only: rows / `rollout.prompts_per_step` are an epoch.
trainer.experiment_name | gsm8k | = name |
trainer.project_name | verl_examples | logging.wandb.project |
trainer.default_local_dir | | = storage_path |
trainer.save_freq | -1 | = checkpoint.every |
trainer.max_actor_ckpt_to_keep | | = checkpoint.keep |
trainer.test_freq | -1 | = eval.every |
trainer.nnodes | 1 | learner.num_workers | GPUs of all nodes; Ray finds the nodes.
trainer.n_gpus_per_node | 8 | learner.num_workers | GPUs of all nodes; Ray finds the nodes.
trainer.logger | console, wandb | logging.wandb | `logging.wandb: {project}`, `logging.mlflow: {experiment}`; TensorBoard is on by default.
""",
    "OpenRLHF": """
actor.model_name_or_path, pretrain | | = model.policy |
critic.model_name_or_path, critic_pretrain | | = model.critic |
reward.model_name_or_path, reward_pretrain | | = model.reward |
reward.remote_url, remote_rm_url | | reward.url | A server. OpenRLHF posts `query`, `prompts` and `labels` and reads `rewards`; raypo posts `samples` and reads `scores`, one per sample: the server must be adapted (docs/rewards.md). A Python file with `reward_func` is `reward.function: file.py:name`.
train.agent_func_path, agent_func_path | | rollout.agent |
ds.lora.rank, lora_rank | 0 | model.lora.rank | 0 there: leave out `model.lora`.
ds.lora.alpha, lora_alpha | 16 | model.lora.alpha | The scale is alpha / rank in both.
ds.lora.target_modules, target_modules | all-linear | model.lora.target_modules |
ds.lora.dropout, lora_dropout | 0 | | raypo has no dropout: old and new log-probs must come from the same function.
ds.load_in_4bit, load_in_4bit | false | | raypo does not train policies with quantized weights.
data.prompt_dataset, prompt_data | | = data.prompts |
data.dataset | | = data.prompts |
data.prompt_split, prompt_split | train | data.prompts | `{path, split}`, for a hub id.
data.prompt_probs, prompt_data_probs | | data.prompts | A source has a `weight`: `{path, weight}`.
data.max_samples, max_samples | | data.prompts | Rows. For a hub id `{path, split: "train[:1000]"}`; shorten a file by hand.
eval.dataset, eval_dataset | | = eval.prompts |
eval.split, eval_split | train | eval.prompts | `{path, split}`, for a hub id.
eval.temperature, eval_temperature | 0.6 | = eval.temperature |
eval.n_samples_per_prompt, eval_n_samples_per_prompt | 4 | = eval.samples_per_prompt |
data.input_key, input_key | input | = data.prompt_key |
data.label_key, label_key | | = data.label_key |
data.input_template, input_template | | | Put the template into the texts.
data.apply_chat_template, apply_chat_template | false | = data.as_chat | Chat messages are always rendered with the chat template, texts with `data.as_chat: true`.
data.prompt_max_len, prompt_max_len | | = data.max_prompt_tokens | Tokens.
data.max_len, max_len | 2048 | data.max_prompt_tokens + rollout.max_new_tokens, data.max_prompt_tokens + data.max_response_tokens | OpenRLHF limits the sum of both.
rollout.max_new_tokens, max_new_tokens, generate_max_len | | = rollout.max_new_tokens | Tokens.
rollout.temperature, temperature | 1.0 | = rollout.temperature |
rollout.top_p, top_p | 1.0 | = rollout.top_p |
rollout.batch_size, rollout_batch_size | 1024 | = rollout.prompts_per_step | Prompts, in both.
rollout.n_samples_per_prompt, n_samples_per_prompt | 1 | = rollout.samples_per_prompt | Responses per prompt.
rollout.vllm_generate_batch_size, vllm_generate_batch_size | | ~ | All prompts of a step are sampled at once.
train.batch_size, train_batch_size | 128 | = ppo.minibatch_size, learner.batch_size | Responses (examples) per optimizer step over all workers, in both.
train.micro_batch_size, rollout.micro_batch_size, micro_train_batch_size, micro_rollout_batch_size | 1 | ~ learner.max_tokens_per_microbatch | raypo counts tokens. The split does not change results.
train.dynamic_batch_enable, use_dynamic_batch | false | ~ learner.max_tokens_per_microbatch | Passes are always split by tokens.
train.max_tokens_per_gpu, train_max_tokens_per_gpu | 16192 | = learner.max_tokens_per_microbatch | Tokens.
rollout.max_tokens_per_gpu, rollout_max_tokens_per_gpu | | ~ learner.max_tokens_per_microbatch | One limit for all passes.
train.max_epochs, max_epochs | 1 | = ppo.num_epochs, num_epochs | Passes over the responses of a step.
train.num_episodes, num_episodes | 1 | num_steps | OpenRLHF counts passes over the prompts; rows / `rollout.prompts_per_step` are one.
train.async_enable, async_train | false | rollout.mode | `async`, with dedicated engines (`placement.mode: dedicated`).
train.async_queue_size, async_queue_size | 1 | = rollout.max_staleness | Weight versions.
train.colocate_all, colocate_all_models, train.colocate_actor_ref, train.colocate_critic_reward, colocate_actor_ref, colocate_critic_reward | false | ~ placement.mode | `colocated`, raypo's default.
train.seed, seed | 42 | = seed |
train.enable_ema, enable_ema | false | | raypo keeps no average of the weights.
actor.eps_clip, eps_clip | 0.2 | = ppo.clip_low + ppo.clip_high |
actor.eps_clip_low_high, eps_clip_low_high | | ppo.clip_low + ppo.clip_high |
actor.dual_clip, dual_clip | | = ppo.dual_clip |
actor.policy_loss_type, policy_loss_type | ppo | = ppo.policy_loss |
actor.entropy_coef, entropy_loss_coef | | = ppo.entropy_coef |
critic.value_clip, value_clip | 0.5 | = ppo.value_clip |
critic.freezing_steps, freezing_actor_steps | -1 | ppo.critic_warmup_steps | Rollout batches that train only the critic. OpenRLHF 0.11 counts from 0, and so has one more.
actor.adam.lr, actor_learning_rate | 1e-6 | = learner.policy_lr |
critic.adam.lr, critic_learning_rate | 9e-6 | = learner.critic_lr |
adam.lr, learning_rate | | = learner.lr |
actor.adam.betas, adam_betas | [0.9, 0.95] | = learner.adam_betas | raypo's default is 0.9, 0.999.
actor.adam.eps | 1e-8 | = learner.adam_eps |
actor.adam.weight_decay, l2 | 0.0 | = learner.weight_decay |
actor.lr_scheduler, lr_scheduler | cosine_with_min_lr | learner.lr_schedule | `cosine`, with `learner.lr_floor: 0.1`; raypo's PPO has constant.
actor.min_lr_ratio | 0.1 | learner.lr_floor | With `learner.lr_schedule: cosine`.
actor.lr_warmup_ratio, lr_warmup_ratio | 0.03 | learner.lr_warmup_steps | A share of num_steps.
actor.max_norm, max_norm | 1.0 | = learner.max_grad_norm |
actor.gradient_checkpointing_enable, gradient_checkpointing | false | = learner.activation_checkpointing |
actor.gradient_checkpointing_reentrant, gradient_checkpointing_use_reentrant | false | ~ learner.activation_checkpointing | It does not change results.
ds.zero_stage, zero_stage | 2 | = learner.zero_stage |
ds.adam_offload, adam_offload | false | learner.deepspeed | `{zero_optimization: {offload_optimizer: {device: cpu}}}`.
ds.param_dtype, param_dtype, data_type, bf16 | bf16 | model.dtype | `bfloat16`; float16 has no counterpart.
ds.packing_samples, packing_samples | false | ~ | Rows are always packed.
ds.attn_implementation, attn_implementation, flash_attn | flash_attention_2 | ~ model.attention | `auto` chooses by the device.
ds.use_liger_kernel, use_liger_kernel | false | ~ | Log-probs are always computed in chunks.
ds.overlap_comm, overlap_comm | false | ~ learner.deepspeed | On for workers with GPUs, but not for a single one below stage 3.
ds.enable_sleep, deepspeed_enable_sleep | false | ~ rollout.engine.sleep | `auto` decides by the available memory.
ref.offload, reward.offload, ref_reward_offload | false | ~ rollout.engine.sleep | Frozen models leave the GPU while they have no work, if memory is short.
actor.num_nodes, actor_num_nodes | 1 | learner.num_workers | GPUs of all nodes; Ray finds the nodes.
actor.num_gpus_per_node, actor_num_gpus_per_node | 8 | learner.num_workers | GPUs of all nodes; Ray finds the nodes.
ref.num_nodes, ref.num_gpus_per_node, reward.num_nodes, reward.num_gpus_per_node, critic.num_nodes, critic.num_gpus_per_node, ref_num_nodes, ref_num_gpus_per_node, reward_num_nodes, reward_num_gpus_per_node, critic_num_nodes, critic_num_gpus_per_node | | ~ placement.mode | All models are on the GPUs of `learner.num_workers`; `placement.mode: dedicated` gives engines their own.
vllm.num_engines, vllm_num_engines | | = rollout.engine.count |
vllm.tensor_parallel_size, vllm_tensor_parallel_size | 1 | = rollout.engine.tensor_parallel |
vllm.gpu_memory_utilization, vllm_gpu_memory_utilization | 0.95 | = rollout.engine.gpu_memory_fraction |
vllm.enable_prefix_caching, enable_prefix_caching | false | ~ rollout.engine.prefix_caching | On by default.
vllm.enforce_eager, enforce_eager | false | ~ rollout.engine.extra | It changes only the speed: `{enforce_eager: true}`.
vllm.enable_sleep, vllm_enable_sleep | false | ~ rollout.engine.sleep | `auto` decides by the available memory.
vllm.sync_backend, vllm_sync_backend | nccl | rollout.engine.transport | `auto`: nccl for engines on their own GPUs, ipc for colocated engines.
vllm.sync_with_ray, vllm_sync_with_ray | false | ~ rollout.engine.transport | `auto` chooses by the placement.
algo.advantage.estimator, advantage_estimator | gae | ppo.advantage | `group_norm`: grpo; the others have the same names.
algo.advantage.lambd, lambd | 1 | = ppo.gae_lambda |
algo.advantage.gamma, gamma | 1 | = ppo.gamma |
algo.advantage.is_correction_enable, enable_vllm_is_correction | false | ppo.correction.kind | `tis`.
algo.kl.init_coef, init_kl_coef | 0.01 | = ppo.kl.coef | Score per nat.
algo.kl.target, kl_target | | = ppo.kl.target | Nats per response, with `ppo.kl.controller: adaptive`.
algo.kl.horizon, kl_horizon | 10000 | = ppo.kl.horizon | Responses.
algo.kl.estimator, kl_estimator | k1 | = ppo.kl.estimator |
algo.kl.use_loss, use_kl_loss | false | ppo.kl.placement | true: `loss`.
algo.dynamic_filtering_enable, dynamic_filtering | false | = ppo.filter.enabled |
reward.normalize_enable, normalize_reward | false | = ppo.shaping.normalize | OpenRLHF subtracts the fixed `mean`, and divides by the fixed `std`, of the reward model's config.json (0 and 1 if it has none; its reward training writes them), and shifts the critic's values in the same way. raypo uses the running mean and std of the run's scores.
reward.clip_range, reward_clip_range | [-10, 10] | ppo.shaping.clip_low + ppo.shaping.clip_high | raypo's default is no clip. raypo clips scores; OpenRLHF clips what rloo, group_norm, dr_grpo and reinforce_baseline make of them.
reward.overlong_buffer_len, overlong_buffer_len | | = ppo.shaping.overlong_buffer_tokens | Tokens.
reward.overlong_penalty_factor, overlong_penalty_factor | 1 | = ppo.shaping.overlong_factor |
reward.stop_properly_penalty_coef, stop_properly_penalty_coef | | ppo.shaping.truncated_score, ppo.shaping.truncated_scale | Below 0: `ppo.shaping.truncated_score`; else a factor as `ppo.shaping.truncated_scale`.
model.beta | 0.1 | = dpo.beta |
critic.save_value_network, save_value_network | false | = learner.save_critic |
ckpt.output_dir, save_path | ./ckpt | storage_path + name | The run's folder is storage_path/name.
ckpt.path, ckpt_path | ./ckpt/checkpoints_ppo_ray | ~ storage_path | Checkpoints are in the run's folder.
ckpt.save_hf, save_hf_ckpt | false | ~ | The policy is always saved as Hugging Face files.
ckpt.disable_ds, disable_ds_ckpt | false | ~ checkpoint.every | The last step always has a checkpoint.
ckpt.load_enable, load_checkpoint | false | ~ | A run resumes automatically.
ckpt.save_steps, save_steps | -1 | = checkpoint.every | Steps of raypo.
ckpt.max_num, max_ckpt_num | 3 | = checkpoint.keep |
eval.steps, eval_steps | -1 | = eval.every |
logger.logging_steps, logging_steps | 1 | ~ | Every step is logged.
logger.tensorboard_dir, use_tensorboard | | ~ logging.tensorboard | On by default, in the run's folder.
logger.wandb.key, use_wandb | | logging.wandb | `{project}`. The key is wandb's own: `wandb login`, or WANDB_API_KEY.
logger.wandb.org, wandb_org | | logging.wandb.entity |
logger.wandb.project, wandb_project | openrlhf_train_ppo | logging.wandb.project |
logger.wandb.run_name, wandb_run_name | | name | The run's name, with which its folder ends.
""",
}
PROJECTS = tuple(_TABLES)


@cache
def counterparts() -> tuple[Counterpart, ...]:
    """Return all rows of the tables."""
    rows = []
    for project, table in _TABLES.items():
        for line in table.strip().splitlines():
            names, default, keys, note = (cell.strip() for cell in line.split("|"))
            mark, keys = keys[:1], keys.lstrip("=~ ")
            alternatives = tuple(
                tuple(each.strip().split(" + ")) for each in keys.split(",") if keys
            )
            named = tuple(names.split(", "))
            rows.append(
                Counterpart(project, named, default, alternatives, note, mark == "=", mark == "~")
            )
    return tuple(rows)


def remedy_for_foreign(key: str, known: Sequence[str]) -> str | None:
    """Return the remedy for a key of another project. None means that no project has such a key.

    Args:
        key: An unknown dotted key of a run file.
        known: The keys that the run file may have.
    """
    last = key.rpartition(".")[2]
    # If a key matches only by its last part, and raypo's keys end in it too, the general hint of
    # `remedy_for_unknown` is better.
    fitting = [
        row
        for row in counterparts()
        if row.matches(key) > (last in _own_names(row)) and _applies(row, known)
    ]
    if not fitting:
        return None
    best = max(fitting, key=lambda row: row.matches(key))
    if keys := best.keys_in(known):
        words = f"Set {' and '.join(keys)} instead ({best.names[0]} of {best.project})."
        return f"{words} {best.note}".rstrip()
    return f"Remove it ({best.names[0]} of {best.project}). {best.note}"


def _own_names(row: Counterpart) -> set[str]:
    """Return the last parts of the row's raypo keys."""
    return {key.rpartition(".")[2] for keys in row.keys for key in keys}


def _applies(row: Counterpart, known: Sequence[str]) -> bool:
    return not row.keys or bool(row.keys_in(known))


def rows_of(project: str) -> Iterator[Counterpart]:
    """Yield the rows of a project in the order of its table."""
    return (row for row in counterparts() if row.project == project)
