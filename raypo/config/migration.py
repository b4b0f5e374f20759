"""Config keys of TRL, verl, OpenRLHF and peft, and the keys of raypo with the same meaning.

Messages about unknown keys and docs/migrating.md are generated from these tables. Names are those
of TRL 1.16, verl 0.9, OpenRLHF 0.11 (and its older, flat names) and peft 0.18; their defaults are
in raypo/translation/defaults.json.
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
    keys: tuple[tuple[str, ...], ...]
    """Alternative groups of raypo keys. A recipe uses the first group whose keys it has."""
    note: str
    """Unit or difference. If `keys` is empty, the reason why raypo has no counterpart."""
    is_same: bool
    """True if raypo's keys take the value unchanged."""
    is_automatic: bool
    """True if no raypo key must be set, regardless of the value."""
    is_minor: bool
    """True if the key concerns memory, speed or files, and not what is learned."""

    def keys_in(self, accepted: Sequence[str]) -> tuple[str, ...]:
        """Return the first group of `keys` whose keys are all in `accepted`, or () if there is none."""
        return next((keys for keys in self.keys if set(keys) <= set(accepted)), ())

    @property
    def last_parts(self) -> set[str]:
        """Last parts of `keys`."""
        return {key.rpartition(".")[2] for keys in self.keys for key in keys}

    def matches(self, key: str) -> int:
        """Return how well a key matches a name of the counterpart.

        3 means that the whole name matches, 2 that two or more of its last components match, 1 that
        only its last component matches, and 0 that nothing matches.
        """
        return max(self._match(name, key) for name in self.names)

    def _match(self, name: str, key: str) -> int:
        last_part = name.rpartition(".")[2]
        is_distinctive = "." not in name or "_" in last_part  # the `n` of rollout.n is ambiguous
        if key == name:
            return 3
        if "." in key and name.endswith(f".{key}"):
            return 2
        return int(is_distinctive and key.rpartition(".")[2] == last_part)


# Columns: names, newest first | keys here | unit or difference. Signs (a key in [] is optional):
# `a + b`: set both keys
# `a, b`: b in recipes without a
# `= a`: same value
# `~ [a]`: nothing to set
# `- [a]`: affects only memory, speed or files
# `*` in a name: wildcard
_TABLES = {
    "TRL": """
model_name_or_path | = model.policy | A Hugging Face folder or a hub id.
ref_model | = model.reference |
reward_model_path | = model.reward | A model that scores. For a function use `reward.function`.
train_dataset, dataset_name | data.prompts | Files or a hub id. Rows from Python: `train_dataset=` of the trainers.
eval_dataset | eval.pairs, eval.prompts |
reward_funcs | reward.function | `file.py:name`. Several: one function that returns their sum and parts (docs/rewards.md, Several at once), or `reward_funcs=` of the trainers.
peft_config, use_peft | model.lora | `{rank: 16, alpha: 32}`.
num_generations | = rollout.samples_per_prompt | Responses per prompt.
generation_batch_size | rollout.prompts_per_step | TRL counts responses, raypo counts prompts: divide by `num_generations`.
steps_per_generation | rollout.prompts_per_step | A step of raypo samples `prompts_per_step` x `samples_per_prompt` responses and makes one update per `ppo.minibatch_size` of them.
per_device_train_batch_size | ppo.minibatch_size, learner.batch_size | TRL counts responses (in SFT, DPO and reward models: examples) per device, raypo over all workers: multiply by the number of processes and `gradient_accumulation_steps`.
gradient_accumulation_steps | ppo.minibatch_size, learner.batch_size | Part of the minibatch, which raypo splits by `learner.max_tokens_per_microbatch`; the split does not change results.
max_prompt_length | data.max_prompt_tokens | Tokens. It is in older versions, which cut longer prompts; later ones have no limit. raypo stops at a longer prompt (`data.too_long: error`) or skips it.
max_completion_length, response_length | = data.max_response_tokens, rollout.max_new_tokens | Tokens.
max_length | data.max_prompt_tokens + data.max_response_tokens | Tokens. TRL cuts the sum of both; raypo skips longer rows.
beta | ppo.kl.coef, dpo.beta | For GRPO's KL also `ppo.preset: grpo`, which puts it into the loss. DPO: 0.1 in both.
epsilon, cliprange | = ppo.clip_low + ppo.clip_high | Clip range below and above 1.
epsilon_high | = ppo.clip_high |
delta | = ppo.dual_clip | Bound on the ratio of tokens with a negative advantage.
num_iterations, num_ppo_epochs | = ppo.num_epochs | Passes over the responses of a step.
num_mini_batches | ppo.minibatch_size | TRL counts minibatches; raypo counts the responses of one.
loss_type | ppo.aggregation, dpo.loss | With `ppo.preset: grpo`: `dapo`, `bnpo`: token_mean; `grpo`: sequence_mean; `dr_grpo`: constant; `cispo`, `sapo`, `vespo` are values of `ppo.policy_loss`. The preset dapo also filters groups, shapes lengths and raises the clip, which TRL's loss_type does not.
scale_rewards | ppo.advantage | `group`: grpo; `none`: dr_grpo.
normalize_advantages | ppo.advantage | raypo's rloo does not divide by the batch's deviation.
reward_clip_range | ppo.shaping.clip_low + ppo.shaping.clip_high |
importance_sampling_level | ppo.policy_loss | `sequence`: gspo, whose clip bounds are narrower by default.
mask_truncated_completions | = ppo.mask_truncated |
entropy_coef_delta | = ppo.entropy_delta |
use_adaptive_entropy, entropy_target | ppo.entropy_target | A target turns the controller on.
kl_coef | = ppo.kl.coef |
cliprange_value | = ppo.value_clip |
lam | = ppo.gae_lambda |
vf_coef | | The critic is a separate model with its own learning rate, `learner.critic_lr`.
repetition_penalty | | Tokens would no longer come from the policy's distribution, which the ratios assume.
use_vllm | ~ | Responses are always sampled by vLLM.
vllm_mode | placement.mode | `server`: dedicated.
vllm_gpu_memory_utilization | = rollout.engine.gpu_memory_fraction |
vllm_tensor_parallel_size | = rollout.engine.tensor_parallel |
vllm_enable_sleep_mode | rollout.engine.sleep |
vllm_importance_sampling_correction | ppo.correction.kind | raypo's default is none.
vllm_importance_sampling_mode | ppo.correction.kind | `token_truncate`: tis; `sequence_truncate`: sequence_tis; `token_mask`: icepop with `low: 0`; `sequence_mask`: sequence_tis. TRL drops responses above the bound; raypo gives them the weight of the bound.
vllm_importance_sampling_clip_max, vllm_importance_sampling_cap | ppo.correction.cap, ppo.correction.high |
reward_weights | reward.weights | TRL weights each function; raypo weights the sum of functions, of models and of servers. Weights of functions: factors in the function that adds them, or `reward_weights=` of the trainers.
learning_rate | = learner.policy_lr, learner.lr | TRL's default for SFT is 2e-5, and for reward models 1e-4.
lr_scheduler_type | = learner.lr_schedule | constant is the default; linear and cosine too.
warmup_steps, warmup_ratio | learner.lr_warmup_steps | Steps of raypo: of recipes that sample, rollout batches and not optimizer steps. Hugging Face's first update has learning rate 0; raypo's has the peak rate / (warm-up + 1).
adam_beta1, adam_beta2 | learner.adam_betas | `[0.9, 0.999]`.
adam_epsilon | = learner.adam_eps |
gradient_checkpointing, activation_checkpointing | = learner.activation_checkpointing |
activation_offloading | - learner.activation_checkpointing | true: `offload`, which raypo does with checkpoints alone.
bf16 | model.dtype | true: `bfloat16`, false: `float32`. `auto` is bfloat16 on GPUs and float32 on CPUs.
temperature | = rollout.temperature |
top_p | = rollout.top_p |
weight_decay | = learner.weight_decay |
max_grad_norm | = learner.max_grad_norm |
seed | = seed |
max_steps | num_steps | TRL counts optimizer steps; a step of PPO is a rollout batch with all of its updates.
num_train_epochs | num_epochs, num_steps | PPO and the other recipes that sample have `num_steps` only: rows / `rollout.prompts_per_step` are an epoch.
label_smoothing | = dpo.label_smoothing |
center_rewards_coefficient | = reward_model.centering_coef |
output_dir | storage_path + name | The run's folder is storage_path/name.
run_name | = name | The run's folder is storage_path/name.
vllm_max_model_length | data.max_prompt_tokens | Tokens of a prompt and its response.
save_steps | checkpoint.every | Steps of raypo.
save_total_limit | = checkpoint.keep |
metric_for_best_model | checkpoint.best_by |
eval_steps | eval.every | Steps of raypo. TRL evaluates only with `eval_strategy`.
report_to | logging.wandb | `logging.wandb: {}`, `logging.mlflow: {}`, `logging.tensorboard`.
logging_steps, logging_strategy | ~ | Every step is logged.
log_completions, num_completions_to_print | ~ | Responses are always kept in the run's folder, and `raypo show` prints them.
eval_strategy | | Set `eval.prompts`, and `eval.every` to steps.
per_device_eval_batch_size | ~ | Held-out prompts need no batch size.
resume_from_checkpoint | from_checkpoint | A run resumes automatically; `from_checkpoint` starts from another run.
entropy_coef | = ppo.entropy_coef |
entropy_coef_min, entropy_coef_max | ppo.entropy_target | raypo's coefficient has no such bounds.
top_k | rollout.top_k | 0: null.
min_p | = rollout.min_p |
num_generations_eval | = eval.samples_per_prompt |
max_tool_calling_iterations | rollout.max_turns | A turn is a response of the policy, so one more than the calls.
vllm_importance_sampling_clip_min | ppo.correction.low |
use_bias_correction_kl | ppo.kl.importance_weights |
multi_objective_aggregation | ppo.advantage | `normalize_then_sum`: gdpo, with `ppo.part_weights`.
top_entropy_quantile | = ppo.top_entropy_fraction | TRL compares the tokens of a microbatch, raypo those of a step.
off_policy_mask_threshold | = ppo.correction.off_policy_mask |
sync_ref_model, ref_model_mixup_alpha, ref_model_sync_steps | | raypo's reference does not change.
sapo_temperature_neg, sapo_temperature_pos | | raypo's `sapo` has the paper's temperatures, 1.05 and 1.0.
vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg | | raypo's `vespo` has the constants of its paper.
router_aux_loss_coef | learner.router_aux_coef | raypo: 0 unless it is set. The loss is a mean over the layers' own loads.
generation_kwargs | rollout.stop | raypo's sampling has temperature, top_p, top_k, min_p and stop.
vllm_structured_outputs_regex | | Tokens would no longer come from the policy's distribution, which the ratios assume.
chat_template_kwargs | = data.chat_template_kwargs |
chat_template_path | | Save the tokenizer with this template into the model's folder.
shuffle_dataset | | Prompts and examples are shuffled in each epoch, by `seed`.
disable_dropout | ~ | There is no dropout.
cast_lm_head_to_fp32 | model.head_dtype | true: `float32`, in the engine too.
optim | learner.optimizer | `adamw` or `muon`.
optim_args, optim_target_modules | learner.optimizer | raypo's optimizers have no such options.
lr_scheduler_kwargs | learner.lr_floor | `min_lr_rate`: `learner.lr_floor`, with cosine.
average_tokens_across_devices | ~ | Means are always over all workers.
label_smoothing_factor | | raypo's loss of examples is the plain log-likelihood.
neftune_noise_alpha | | raypo adds no noise to embeddings.
fp16 | model.dtype | float16 has no counterpart.
model_init_kwargs | model.dtype, model.attention | raypo's `auto` chooses both by the device.
train_sampling_strategy | | Rows are shuffled in each epoch.
data_seed | seed | raypo has one seed.
auto_find_batch_size | | A batch is split by `learner.max_tokens_per_microbatch`, and its size does not change.
accelerator_config, dataloader_drop_last | - | The last rows of an epoch and the first of the next make one batch.
load_best_model_at_end, greater_is_better | checkpoint.best_by | With `checkpoint.best_mode`.
save_strategy | checkpoint.every | Steps of raypo.
dataset_text_field | data.response_key | A text without a prompt is a response.
completion_only_loss, assistant_only_loss | data.messages_key | The loss of raypo covers responses, or the assistant's messages of a conversation.
packing | ~ | Rows are always packed, without seeing each other. TRL counts a packed row as one example of a batch, raypo counts the examples in it.
padding_free, eval_packing, packing_strategy | ~ | Rows are always packed.
truncation_mode | | raypo never cuts a row.
eos_token, pad_token | | Those of the tokenizer in the model's folder.
loss_weights, ld_alpha, f_divergence_type, f_alpha_divergence_coef, use_weighting, discopop_tau | | No loss of raypo's DPO has it.
precompute_ref_log_probs, precompute_ref_batch_size | - | The reference's log-probs are computed in each step.
bf16_full_eval, fp16_full_eval, tf32, torch_compile*, use_liger_kernel, liger_kernel_config, use_cache, torch_empty_cache_steps, activation_checkpointing_kwargs, gradient_checkpointing_kwargs, cache_implementation, vllm_model_impl, vllm_server_*, vllm_group_port, use_transformers_*, transformers_continuous_*, ds3_gather_for_generation, pad_to_multiple_of, ddp_*, fsdp*, deepspeed, parallelism_config, dataloader_*, dataset_num_proc, dataset_kwargs, trust_remote_code, full_determinism, use_cpu, local_rank, include_*, batch_eval_metrics, eval_accumulation_steps, eval_do_concat_batches, eval_use_gather_object, prediction_loss_only, remove_unused_columns, length_column_name, label_names | - | It concerns memory, speed or the layout of files.
logging_*, log_*, disable_tqdm, project, trackio_*, push_to_hub*, hub_*, save_only_model, save_on_each_node, enable_jit_checkpoint, eval_delay, eval_on_start, ignore_data_skip, restore_callback_states_from_checkpoint, debug, skip_memory_metrics, do_train, do_eval, do_predict | - | It concerns logs and files.
""",
    "peft": """
r, lora_r, lora_rank | = model.lora.rank | TRL's command line has `lora_r`, 16.
lora_alpha | = model.lora.alpha | The scale is alpha / rank in both.
lora_dropout | | raypo has no dropout: old and new log-probs must come from the same function.
target_modules, lora_target_modules | = model.lora.target_modules | `all-linear` or names.
""",
    "verl": """
actor_rollout_ref.model.path | = model.policy |
critic.model.path | = model.critic |
reward.reward_model.model_path, reward_model.model.path | = model.reward |
actor_rollout_ref.model.lora_rank | model.lora.rank | 0 there: leave out `model.lora`.
actor_rollout_ref.model.lora.rank | model.lora.rank | 0 there: leave out `model.lora`.
actor_rollout_ref.model.lora_alpha | model.lora.alpha |
actor_rollout_ref.model.lora.alpha | model.lora.alpha |
actor_rollout_ref.model.enable_gradient_checkpointing | = learner.activation_checkpointing |
actor_rollout_ref.model.enable_activation_offload, critic.model.enable_activation_offload | - learner.activation_checkpointing | true: `offload`, which raypo does with checkpoints alone.
actor_rollout_ref.model.tiled_mlp.enabled, critic.model.tiled_mlp.enabled | - learner.mlp_tile_tokens | true: 4096. raypo has one value for policy and critic.
actor_rollout_ref.model.tiled_mlp.num_shards, critic.model.tiled_mlp.num_shards | - learner.mlp_tile_tokens | verl counts tiles of a pass, raypo counts tokens of a tile.
actor_rollout_ref.actor.ulysses_sequence_parallel_size, critic.ulysses_sequence_parallel_size, *.ulysses_sequence_parallel_size | - learner.sequence_parallel | Workers that share a row; the same number for policy and critic.
data.train_files | = data.prompts |
data.val_files | eval.prompts | Only with `trainer.test_freq` above 0.
data.train_batch_size | = rollout.prompts_per_step, learner.batch_size | Prompts, in both.
data.max_prompt_length | = data.max_prompt_tokens | Tokens. Longer prompts are skipped; `data.too_long: error` stops as verl's `truncation: error`.
data.max_response_length | = rollout.max_new_tokens, data.max_response_tokens | Tokens.
data.filter_overlong_prompts | data.too_long | true: `skip`.
data.truncation | data.too_long | `error`. raypo never cuts a prompt: in place of left, right or middle it skips a prompt that is too long.
data.prompt_key | = data.prompt_key |
data.seed | = seed |
data.shuffle | | Prompts are shuffled in each epoch, by `seed`.
data.reward_fn_key | | A function of verl's form gets `row["data_source"]`.
reward.custom_reward_function.path, custom_reward_function.path | reward.function | `file.py:compute_score`, as it is.
reward.custom_reward_function.name, custom_reward_function.name | reward.function | `file.py:name`.
*.use_remove_padding | ~ | Rows are always packed.
*.rollout.name | ~ | Responses are always sampled by vLLM.
actor_rollout_ref.rollout.n | = rollout.samples_per_prompt | Responses per prompt.
actor_rollout_ref.rollout.temperature | = rollout.temperature |
actor_rollout_ref.rollout.top_p | = rollout.top_p |
actor_rollout_ref.rollout.top_k | rollout.top_k | -1: null.
actor_rollout_ref.rollout.gpu_memory_utilization | = rollout.engine.gpu_memory_fraction |
actor_rollout_ref.rollout.tensor_model_parallel_size | = rollout.engine.tensor_parallel |
actor_rollout_ref.rollout.free_cache_engine | ~ rollout.engine.sleep | `auto` decides by the available memory.
actor_rollout_ref.rollout.multi_turn.max_assistant_turns, actor_rollout_ref.rollout.multi_turn.max_turns | = rollout.max_turns |
actor_rollout_ref.rollout.val_kwargs.n | = eval.samples_per_prompt |
actor_rollout_ref.rollout.val_kwargs.temperature | = eval.temperature |
actor_rollout_ref.rollout.val_kwargs.do_sample | ~ eval.temperature | 0 is greedy.
actor_rollout_ref.actor.ppo_mini_batch_size | ppo.minibatch_size | verl counts prompts, raypo counts responses: multiply by `rollout.samples_per_prompt`.
*.use_dynamic_bsz, *.log_prob_use_dynamic_bsz | ~ learner.max_tokens_per_microbatch | Passes are always split by tokens.
actor_rollout_ref.actor.fsdp_config.param_offload, actor_rollout_ref.actor.fsdp_config.optimizer_offload, critic.fsdp.param_offload, critic.fsdp.optimizer_offload, critic.model.fsdp_config.param_offload, critic.model.fsdp_config.optimizer_offload | - learner.deepspeed | true: `{zero_optimization: {offload_optimizer: {device: cpu}}}`, or `offload_param` with `learner.zero_stage: 3`.
actor_rollout_ref.ref.fsdp_config.param_offload | ~ rollout.engine.sleep | The reference leaves the GPU while it has no work, if memory is short.
*.log_prob_micro_batch_size_per_gpu, *.log_prob_micro_batch_size, *.forward_micro_batch_size*, critic.ppo_micro_batch_size* | ~ learner.max_tokens_per_microbatch | raypo counts tokens. The split does not change results.
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, actor_rollout_ref.actor.ppo_micro_batch_size | ~ learner.max_tokens_per_microbatch | raypo counts tokens. The split does not change results.
actor_rollout_ref.actor.ppo_max_token_len_per_gpu | - learner.max_tokens_per_microbatch | Tokens. The split does not change results; `auto` fits the memory.
actor_rollout_ref.actor.ppo_epochs | = ppo.num_epochs | Passes over the responses of a step.
actor_rollout_ref.actor.clip_ratio | ppo.clip_low + ppo.clip_high | verl uses it only for a bound (`clip_ratio_low`, `clip_ratio_high`) that is null; each is 0.2 by default.
actor_rollout_ref.actor.clip_ratio_low | ppo.clip_low | The same number, but of `geo_mean`, which clips the log-ratio, 1 - exp(-low). `cispo`: `ppo.cispo_low`.
actor_rollout_ref.actor.clip_ratio_high | ppo.clip_high | The same number, but of `geo_mean` exp(high) - 1.
actor_rollout_ref.actor.clip_ratio_c | = ppo.dual_clip | raypo's default is null, no bound. verl's gspo, sapo and geo_mean have no such bound.
actor_rollout_ref.actor.loss_agg_mode | ppo.aggregation | `seq-mean-token-mean`: sequence_mean; `seq-mean-token-sum-norm`: constant. gspo, sapo and geo_mean are always sequence_mean.
actor_rollout_ref.actor.policy_loss.loss_mode | ppo.policy_loss | `vanilla`: ppo; `geo_mean`: gmpo; gspo, cispo, sapo, clip_cov, kl_cov, dppo_tv and dppo_kl have the same names.
actor_rollout_ref.actor.entropy_coeff | = ppo.entropy_coef |
actor_rollout_ref.actor.use_kl_loss | ppo.kl.placement | true: `loss`, with `ppo.kl.estimator` k2 or k3.
actor_rollout_ref.actor.kl_loss_coef | ppo.kl.coef | With `ppo.kl.placement: loss`.
actor_rollout_ref.actor.kl_loss_type | ppo.kl.estimator | `low_var_kl`: k3; `mse`: k2; `low_var_kl+`, `k3+`: k3_st; `kl`: k1, in the reward only.
actor_rollout_ref.actor.optim.lr | = learner.policy_lr, learner.lr |
actor_rollout_ref.actor.optim.lr_warmup_steps | learner.lr_warmup_steps | Steps of raypo, rollout batches. -1: by `lr_warmup_steps_ratio`.
actor_rollout_ref.actor.optim.weight_decay | = learner.weight_decay |
actor_rollout_ref.actor.grad_clip | = learner.max_grad_norm |
critic.optim.lr | = learner.critic_lr |
critic.cliprange_value | = ppo.value_clip |
trainer.critic_warmup | = ppo.critic_warmup_steps |
algorithm.adv_estimator | ppo.advantage | `reinforce_plus_plus`: reinforce; `reinforce_plus_plus_baseline`: reinforce_baseline; gae, grpo, rloo, opo, gdpo have the same names.
algorithm.norm_adv_by_std_in_grpo | ppo.advantage | false: dr_grpo.
algorithm.lam | = ppo.gae_lambda |
algorithm.gamma | = ppo.gamma |
algorithm.use_kl_in_reward | ppo.kl.placement | true: `reward`. Without a KL anywhere: `ppo.kl.coef: 0`.
algorithm.kl_ctrl.kl_coef | ppo.kl.coef | With `ppo.kl.placement: reward`.
algorithm.kl_ctrl.target_kl | ppo.kl.target | Nats per response, with `ppo.kl.controller: adaptive`.
algorithm.filter_groups.enable | = ppo.filter.enabled |
algorithm.filter_groups.max_num_gen_batches | ppo.filter.max_refills | 0 there: no limit, which raypo does not have. Else it counts the first batch too.
trainer.total_training_steps | num_steps | Rollout batches, in both. verl stops at the smaller of these and `trainer.total_epochs`.
trainer.total_epochs | num_epochs, num_steps | PPO and the other recipes that sample have `num_steps` only: rows / `rollout.prompts_per_step` are an epoch.
trainer.experiment_name | = name |
trainer.project_name | logging.wandb.project |
trainer.default_local_dir | = storage_path |
trainer.save_freq | checkpoint.every | Steps of raypo. -1: only at the end, as always here.
trainer.max_actor_ckpt_to_keep | = checkpoint.keep |
trainer.test_freq | eval.every | Steps of raypo. -1: leave out `eval.prompts`.
trainer.nnodes | learner.num_workers | GPUs of all nodes; Ray finds the nodes.
trainer.n_gpus_per_node | learner.num_workers | GPUs of all nodes; Ray finds the nodes.
trainer.logger | logging.wandb | `logging.wandb: {project}`, `logging.mlflow: {experiment}`; TensorBoard is on by default.
actor_rollout_ref.model.target_modules | model.lora.target_modules | `all-linear` or names.
actor_rollout_ref.model.lora.target_modules | model.lora.target_modules | `all-linear` or names.
actor_rollout_ref.model.exclude_modules, actor_rollout_ref.model.lora_adapter_path, actor_rollout_ref.model.lora.* | model.lora | raypo's adapters have rank, alpha and target_modules, and start anew.
actor_rollout_ref.model.override_config, actor_rollout_ref.model.override_config.* | | The model's own config.json counts.
actor_rollout_ref.model.custom_chat_template, actor_rollout_ref.model.tokenizer_path, critic.model.custom_chat_template, data.tokenizer | | Save the tokenizer with its template into the model's folder.
data.apply_chat_template_kwargs | = data.chat_template_kwargs |
data.apply_chat_template_kwargs.* | data.chat_template_kwargs | A mapping, like `{enable_thinking: false}`.
*.mtp.*, *.qat.*, distillation.* | | raypo has no multi-token prediction, no quantization in training, and distillation as a recipe of its own.
actor_rollout_ref.actor.optim.betas, critic.optim.betas | = learner.adam_betas |
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio | learner.lr_warmup_steps | A share of num_steps.
actor_rollout_ref.actor.optim.lr_scheduler_type, actor_rollout_ref.actor.optim.warmup_style, actor_rollout_ref.actor.optim.lr_decay_style | learner.lr_schedule | `constant` or `cosine`.
actor_rollout_ref.actor.optim.min_lr_ratio, actor_rollout_ref.actor.optim.num_cycles | learner.lr_floor | With `learner.lr_schedule: cosine`, half a cosine.
*.override_optimizer_config.*offload*, *.override_optimizer_config.overlap_*, *.override_optimizer_config.use_precision_aware_optimizer | - learner.deepspeed | It concerns memory and speed.
actor_rollout_ref.actor.optim.optimizer, actor_rollout_ref.actor.optim.*, actor_rollout_ref.actor.optim.optimizer_impl, actor_rollout_ref.actor.optim.override_optimizer_config, actor_rollout_ref.actor.optim.override_optimizer_config.* | learner.optimizer | `adamw` or `muon`.
critic.optim.lr_warmup_steps, critic.optim.lr_warmup_steps_ratio, critic.optim.lr_scheduler_type, critic.optim.warmup_style, critic.optim.min_lr_ratio, critic.optim.num_cycles, critic.optim.optimizer, critic.optim.weight_decay, critic.grad_clip, critic.optim.clip_grad, critic.optim.override_optimizer_config, critic.optim.* | learner.lr_schedule | Policy and critic share the schedule, the decay and the clip.
*.optim.total_training_steps, *.optim.zero_indexed_step, actor_rollout_ref.actor.optim.clip_grad | ~ | verl sets or ignores it.
critic.ppo_epochs, critic.ppo_mini_batch_size, critic.shuffle, critic.loss_agg_mode, critic.loss_scale_factor | ppo.num_epochs, ppo.minibatch_size | The critic is updated with the policy, on the same minibatches.
critic.enable | ppo.advantage | A critic is trained with gae alone.
actor_rollout_ref.actor.policy_loss.clip_cov_ratio, actor_rollout_ref.actor.policy_loss.kl_cov_ratio | = ppo.covariance.fraction |
actor_rollout_ref.actor.policy_loss.clip_cov_lb | = ppo.covariance.low |
actor_rollout_ref.actor.policy_loss.clip_cov_ub | = ppo.covariance.high |
actor_rollout_ref.actor.policy_loss.ppo_kl_coef | = ppo.covariance.penalty |
actor_rollout_ref.actor.policy_loss.dro_beta | | raypo has no such loss.
actor_rollout_ref.actor.tau_pos, actor_rollout_ref.actor.tau_neg | | raypo's `sapo` has the paper's temperatures, 1.0 and 1.05.
actor_rollout_ref.actor.loss_scale_factor | ppo.aggregation | `constant` divides by the number of responses times `rollout.max_new_tokens`.
actor_rollout_ref.actor.shuffle, actor_rollout_ref.actor.data_loader_seed | ~ | Responses are shuffled in each pass, by `seed`.
actor_rollout_ref.actor.freeze_vision_tower | model.freeze | true: `[vision]`, the default; false: `[]`, which only runs without an engine can have.
algorithm.kl_penalty | ppo.kl.estimator | In the reward: `kl`, k1.
algorithm.kl_ctrl.type | = ppo.kl.controller |
algorithm.kl_ctrl.horizon | = ppo.kl.horizon | Responses.
algorithm.use_pf_ppo, algorithm.pf_ppo.* | | raypo does not sample responses by their score.
algorithm.filter_groups.metric | ppo.filter | raypo compares the scores of a group.
algorithm.filter_groups.max_inflight_gen_batches | - ppo.filter.max_refills | It limits what is sampled at once.
algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights | ppo.part_weights | `{name: weight}`.
algorithm.rollout_correction.rollout_is | ppo.correction.kind | `token`: tis, `sequence`: sequence_tis.
algorithm.rollout_correction.rollout_is_threshold | ppo.correction.cap |
algorithm.rollout_correction.*, algorithm.rollout_is* | ppo.correction | `mis` drops responses, `icepop` tokens; docs/methods.md, Rollout correction.
actor_rollout_ref.rollout.max_model_len, actor_rollout_ref.rollout.prompt_length, actor_rollout_ref.rollout.response_length | ~ | The longest prompt plus the longest response.
actor_rollout_ref.rollout.do_sample | rollout.temperature | false: 0, which training does not allow.
actor_rollout_ref.rollout.ignore_eos | | A response ends at the end-of-sequence token.
actor_rollout_ref.rollout.val_kwargs.top_k, actor_rollout_ref.rollout.val_kwargs.top_p | eval.temperature | Held-out prompts have the sampling of `rollout`, with a temperature of their own.
actor_rollout_ref.rollout.multi_turn.enable | rollout.environment | Turns are an environment (docs/environments.md) or `rollout.agent`.
actor_rollout_ref.rollout.agent.default_agent_loop | rollout.environment | Another loop than single_turn_agent is an environment (docs/environments.md) or `rollout.agent`.
actor_rollout_ref.rollout.multi_turn.tool_config_path, actor_rollout_ref.rollout.multi_turn.interaction_config_path, actor_rollout_ref.rollout.multi_turn.function_tool_path, actor_rollout_ref.rollout.multi_turn.max_*, actor_rollout_ref.rollout.multi_turn.format, actor_rollout_ref.rollout.multi_turn.*, actor_rollout_ref.rollout.agent.agent_loop_config_path, data.tool_config_path, data.function_tool_path | rollout.environment | Tools and turns are an environment (docs/environments.md) or `rollout.agent`.
actor_rollout_ref.rollout.quantization | rollout.engine.quantization | fp8 only. Engine and learner then differ: `ppo.correction.kind`.
actor_rollout_ref.rollout.quantization_config_file | ppo.correction | Engine and learner then differ; raypo has no other quantisation than `rollout.engine.quantization`.
actor_rollout_ref.rollout.enable_rollout_routing_replay, *.router_replay.* | rollout.router_replay | R3: `engine`.
actor_rollout_ref.rollout.logprobs_mode | ppo.correction | The engine's log-probs are those of the full distribution.
actor_rollout_ref.hybrid_engine | placement.mode | false: `dedicated`.
actor_rollout_ref.rollout.mode, actor_rollout_ref.rollout.calculate_log_probs | ~ | Responses are always sampled by asynchronous engines, with their log-probs.
actor_rollout_ref.actor.calculate_entropy, actor_rollout_ref.actor.calculate_sum_pi_squared | ~ | The entropy is always logged.
data.train_max_samples, data.val_max_samples | data.prompts, eval.prompts | Rows. -1: all. Shorten a file by hand.
data.gen_batch_size | rollout.prompts_per_step | With a filter of groups: prompts that are sampled at once.
data.image_key | data.image_key | For a policy that reads images.
actor_rollout_ref.rollout.limit_images | data.max_images |
data.video_key, data.audio_key, data.image_patch_size, data.mm_processor_kwargs, data.return_multi_modal_inputs | | The model's own processor reads images, and nothing else.
data.custom_cls.path, data.custom_cls.name, data.custom_cls.* | data.prompts | Write the rows to a file, or give them to a trainer (`train_dataset=`).
data.sampler.*, data.datagen.*, trainer.v1.sampler.* | data.curriculum | raypo draws prompts at random, or by their pass rate.
reward.reward_manager.name, reward_model.reward_manager | ppo.shaping | `naive`: nothing. `dapo` adds a penalty for overlong responses: `ppo.shaping.overlong_buffer_tokens`.
reward.reward_model.enable, reward_model.enable | model.reward |
reward_model.overlong_buffer.enable, reward.reward_kwargs.overlong_buffer_cfg.enable, reward_model.reward_kwargs.overlong_buffer_cfg.enable | ppo.shaping.overlong_buffer_tokens |
reward_model.overlong_buffer.len, reward.reward_kwargs.overlong_buffer_cfg.len, reward_model.reward_kwargs.overlong_buffer_cfg.len | ppo.shaping.overlong_buffer_tokens | Tokens.
reward_model.overlong_buffer.penalty_factor, reward.reward_kwargs.overlong_buffer_cfg.penalty_factor, reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor | ppo.shaping.overlong_factor |
reward_model.overlong_buffer.log, reward.reward_kwargs.overlong_buffer_cfg.log, reward_model.reward_kwargs.overlong_buffer_cfg.log, reward.reward_kwargs.max_resp_len, reward_model.reward_kwargs.max_resp_len | ~ | It is logged, and the longest response is `rollout.max_new_tokens`.
reward.reward_kwargs.*, reward_model.reward_kwargs.*, reward.custom_reward_function.reward_kwargs.*, custom_reward_function.reward_kwargs.*, reward.reward_manager.*, reward_model.reward_loop_* | reward.function | Arguments of a reward function: write them into the function.
sandbox_fusion.url, reward.sandbox_fusion.url, reward_model.sandbox_fusion.url, *sandbox_fusion.* | reward.function | raypo runs programs in a sandbox of its own: docs/rewards.md.
trainer.val_before_train, trainer.val_only | - eval.every | A run measures before its first step.
trainer.val_generations_to_log_to_wandb, trainer.log_val_generations, trainer.rollout_data_dir, trainer.validation_data_dir | ~ | Responses are always kept in the run's folder.
trainer.resume_mode, trainer.resume_from_path | - from_checkpoint | A run resumes automatically.
trainer.use_v1, trainer.v1.* | rollout.mode | `sync`; asynchronous trainers are `rollout.mode: async`.
trainer.rollout_correction.* | ppo.correction |
actor_rollout_ref.actor.tis_imp_ratio_cap | ppo.correction.cap | With `ppo.correction.kind: tis`.
trainer.use_legacy_worker_impl | - | It chooses between two implementations of the same.
actor_rollout_ref.model.torch_dtype | model.dtype | `float32` or `bfloat16`.
critic.model.tokenizer_path, critic.model.lora*, critic.model.lora.*, critic.model.override_config* | model.lora.critic | The critic has the policy's tokenizer and adapter.
actor_rollout_ref.rollout.seed, *.fsdp_config.seed, critic.fsdp.seed, *.full_determinism | ~ seed | One seed.
*.fsdp_config.dtype, critic.fsdp.dtype, actor_rollout_ref.rollout.dtype | model.dtype | `auto` is bfloat16 on GPUs.
*profiler*, *.fsdp_config.*, *.fsdp_config, critic.fsdp.*, *.turbo_config.*, *.megatron.*, *.veomni.*, *.checkpoint.*, *.engine_kwargs.*, *.disaggregation.*, *.checkpoint_engine.*, *.trace.*, *.prometheus.*, *.wrap_policy.*, transfer_queue.*, skip.*, ray_kwargs.*, ray_init.*, reward.reward_model.rollout.*, reward_model.rollout.*, *max_token_len_per_gpu, *.strategy, *.use_torch_compile, *.entropy_*chunk*, *.entropy_checkpointing, *.pad_to_length*, *.use_fused_kernels, *.fused_kernel_options.*, *.use_liger, *.use_shm, *.enable_gradient_checkpointing, *.trust_remote_code, *.external_lib, *.hf_config_path, *.nccl_timeout, *.rollout_n, *.max_num_batched_tokens, *.max_num_seqs, *.enforce_eager, *.cudagraph_capture_sizes, *.enable_chunked_prefill, *.enable_prefix_caching, *.disable_log_stats, *.load_format, *.layered_summon, *.skip_tokenizer_init, *.scheduling_policy, *.multi_stage_wake_up, *.over_sample_rate, *.router_config_path, *.moe_load_balance_metrics_interval, *.data_parallel_size, *.expert_parallel_size, *.pipeline_model_parallel_size, *.agent.num_workers, *.agent.custom_async_server.*, *.rollout.nnodes, *.rollout.n_gpus_per_node, *.use_prefix_grouper, model_engine | - | It concerns memory, speed or the layout of files.
reward.num_workers, reward.reward_model.*, reward_model.*, data.use_shm, data.trust_remote_code, data.val_batch_size, data.dataloader_num_workers, data.validation_shuffle, data.filter_overlong_prompts_workers, data.return_*, trainer.balance_batch, trainer.device, trainer.esi_redundant_time, trainer.default_hdfs_dir, trainer.del_local_ckpt_after_load, trainer.max_critic_ckpt_to_keep, trainer.ray_wait_register_center_timeout, trainer.checkpoint_callback_class, trainer.runtime_env, hydra.* | - | It concerns memory, speed or the layout of files.
""",
    "OpenRLHF": """
actor.model_name_or_path, pretrain | = model.policy |
critic.model_name_or_path, critic_pretrain | = model.critic |
reward.model_name_or_path, reward_pretrain | = model.reward |
reward.remote_url, remote_rm_url | reward.url | A server. OpenRLHF posts `query`, `prompts` and `labels` and reads `rewards`; raypo posts `samples` and reads `scores`, one per sample: the server must be adapted (docs/rewards.md). A Python file with `reward_func` is `reward.function: file.py:name`.
train.agent_func_path, agent_func_path | rollout.agent |
ds.lora.rank, lora_rank | model.lora.rank | 0 there: leave out `model.lora`.
ds.lora.alpha, lora_alpha | model.lora.alpha | The scale is alpha / rank in both.
ds.lora.target_modules, target_modules | model.lora.target_modules |
ds.lora.dropout, lora_dropout | | raypo has no dropout: old and new log-probs must come from the same function.
ds.load_in_4bit, load_in_4bit | | raypo does not train policies with quantized weights.
data.prompt_dataset, prompt_data | = data.prompts |
data.dataset | = data.prompts |
data.prompt_split, prompt_split | data.prompts | `{path, split}`, for a hub id.
data.prompt_probs, prompt_data_probs | data.prompts | A source has a `weight`: `{path, weight}`.
data.max_samples, max_samples | data.prompts | Rows, at most. For a hub id `{path, split: "train[:1000]"}`; shorten a file by hand.
eval.dataset, eval_dataset | eval.prompts | Only with `eval.steps` above 0.
eval.split, eval_split | eval.prompts | `{path, split}`, for a hub id.
eval.temperature, eval_temperature | = eval.temperature |
eval.n_samples_per_prompt, eval_n_samples_per_prompt | = eval.samples_per_prompt |
data.input_key, input_key | = data.prompt_key |
data.label_key, label_key | = data.label_key |
data.input_template, input_template | | Put the template into the texts.
data.apply_chat_template, apply_chat_template | = data.as_chat | Chat messages are always rendered with the chat template, texts with `data.as_chat: true`.
data.prompt_max_len, prompt_max_len | = data.max_prompt_tokens | Tokens.
data.max_len, max_len | data.max_prompt_tokens + rollout.max_new_tokens, data.max_prompt_tokens + data.max_response_tokens | OpenRLHF limits the sum of both.
rollout.max_new_tokens, max_new_tokens, generate_max_len | = rollout.max_new_tokens | Tokens.
rollout.temperature, temperature | = rollout.temperature |
rollout.top_p, top_p | = rollout.top_p |
rollout.batch_size, rollout_batch_size | = rollout.prompts_per_step | Prompts, in both.
rollout.n_samples_per_prompt, n_samples_per_prompt | = rollout.samples_per_prompt | Responses per prompt.
rollout.vllm_generate_batch_size, vllm_generate_batch_size | ~ | All prompts of a step are sampled at once.
train.batch_size, train_batch_size | = ppo.minibatch_size, learner.batch_size | Responses (examples) per optimizer step over all workers, in both.
train.micro_batch_size, rollout.micro_batch_size, micro_train_batch_size, micro_rollout_batch_size | ~ learner.max_tokens_per_microbatch | raypo counts tokens. The split does not change results.
train.dynamic_batch_enable, use_dynamic_batch | ~ learner.max_tokens_per_microbatch | Passes are always split by tokens.
train.max_tokens_per_gpu, train_max_tokens_per_gpu | = learner.max_tokens_per_microbatch | Tokens.
rollout.max_tokens_per_gpu, rollout_max_tokens_per_gpu | ~ learner.max_tokens_per_microbatch | One limit for all passes.
train.max_epochs, max_epochs | = ppo.num_epochs, num_epochs | Passes over the responses of a step.
train.num_episodes, num_episodes | num_steps | OpenRLHF counts passes over the prompts; rows / `rollout.prompts_per_step` are one.
train.async_enable, async_train | rollout.mode | `async`, with dedicated engines (`placement.mode: dedicated`).
train.async_queue_size, async_queue_size | rollout.max_staleness | Weight versions.
train.colocate_all, colocate_all_models, train.colocate_actor_ref, train.colocate_critic_reward, colocate_actor_ref, colocate_critic_reward | ~ placement.mode | `colocated`, raypo's default.
train.seed, seed | = seed |
train.enable_ema, enable_ema | | raypo keeps no average of the weights.
actor.eps_clip, eps_clip | = ppo.clip_low + ppo.clip_high |
actor.eps_clip_low_high, eps_clip_low_high | ppo.clip_low + ppo.clip_high |
actor.dual_clip, dual_clip | = ppo.dual_clip |
actor.policy_loss_type, policy_loss_type | = ppo.policy_loss |
actor.loss_agg_mode | ppo.aggregation | `token-mean`: token_mean; `seq-mean-token-mean`: sequence_mean, which every version before 0.7 has.
actor.entropy_coef, entropy_loss_coef | = ppo.entropy_coef |
critic.value_clip, value_clip | = ppo.value_clip |
critic.freezing_steps, freezing_actor_steps | ppo.critic_warmup_steps | Rollout batches that train only the critic. OpenRLHF 0.11 counts from 0, and so has one more.
actor.adam.lr, actor_learning_rate | = learner.policy_lr |
critic.adam.lr, critic_learning_rate | = learner.critic_lr |
adam.lr, learning_rate | = learner.lr |
actor.adam.betas, adam_betas | = learner.adam_betas | raypo's default is 0.9, 0.999.
actor.adam.eps | = learner.adam_eps |
actor.adam.weight_decay, l2 | = learner.weight_decay |
actor.lr_scheduler, lr_scheduler | learner.lr_schedule | `cosine`, with `learner.lr_floor: 0.1`; raypo's PPO has constant.
actor.min_lr_ratio | learner.lr_floor | With `learner.lr_schedule: cosine`.
actor.lr_warmup_ratio, lr_warmup_ratio | learner.lr_warmup_steps | A share of num_steps.
actor.max_norm, max_norm | = learner.max_grad_norm |
actor.gradient_checkpointing_enable, gradient_checkpointing | = learner.activation_checkpointing |
ds.ring_attn_size, ring_attn_size | - learner.sequence_parallel | Workers that share a row. raypo exchanges heads (Ulysses), not keys and values.
actor.gradient_checkpointing_reentrant, gradient_checkpointing_use_reentrant | ~ learner.activation_checkpointing | It does not change results.
ds.zero_stage, zero_stage | = learner.zero_stage |
ds.adam_offload, adam_offload | learner.deepspeed | `{zero_optimization: {offload_optimizer: {device: cpu}}}`.
ds.param_dtype, param_dtype, data_type, bf16 | model.dtype | `bfloat16`; float16 has no counterpart.
ds.packing_samples, packing_samples | ~ | Rows are always packed.
ds.attn_implementation, attn_implementation, flash_attn | ~ model.attention | `auto` chooses by the device.
ds.use_liger_kernel, use_liger_kernel | ~ | Log-probs are always computed in chunks.
ds.overlap_comm, overlap_comm | ~ learner.deepspeed | On for workers with GPUs, but not for a single one below stage 3.
ds.enable_sleep, deepspeed_enable_sleep | ~ rollout.engine.sleep | `auto` decides by the available memory.
ref.offload, reward.offload, ref_reward_offload | ~ rollout.engine.sleep | Frozen models leave the GPU while they have no work, if memory is short.
actor.num_nodes, actor_num_nodes | learner.num_workers | GPUs of all nodes; Ray finds the nodes.
actor.num_gpus_per_node, actor_num_gpus_per_node | learner.num_workers | GPUs of all nodes; Ray finds the nodes.
ref.num_nodes, ref.num_gpus_per_node, reward.num_nodes, reward.num_gpus_per_node, critic.num_nodes, critic.num_gpus_per_node, ref_num_nodes, ref_num_gpus_per_node, reward_num_nodes, reward_num_gpus_per_node, critic_num_nodes, critic_num_gpus_per_node | ~ placement.mode | All models are on the GPUs of `learner.num_workers`; `placement.mode: dedicated` gives engines their own.
vllm.num_engines, vllm_num_engines | = rollout.engine.count |
vllm.tensor_parallel_size, vllm_tensor_parallel_size | = rollout.engine.tensor_parallel |
vllm.gpu_memory_utilization, vllm_gpu_memory_utilization | = rollout.engine.gpu_memory_fraction |
vllm.enable_prefix_caching, enable_prefix_caching | ~ rollout.engine.prefix_caching | On by default.
vllm.enforce_eager, enforce_eager | ~ rollout.engine.extra | It changes only the speed: `{enforce_eager: true}`.
vllm.enable_sleep, vllm_enable_sleep | ~ rollout.engine.sleep | `auto` decides by the available memory.
vllm.sync_backend, vllm_sync_backend | rollout.engine.transport | `auto`: nccl for engines on their own GPUs, ipc for colocated engines.
vllm.sync_with_ray, vllm_sync_with_ray | ~ rollout.engine.transport | `auto` chooses by the placement.
algo.advantage.estimator, advantage_estimator | ppo.advantage | `group_norm`: grpo; the others have the same names.
algo.advantage.lambd, lambd | = ppo.gae_lambda |
algo.advantage.gamma, gamma | = ppo.gamma |
algo.advantage.is_correction_enable, enable_vllm_is_correction | ppo.correction.kind | By `algo.advantage.is_correction_type`.
algo.kl.init_coef, init_kl_coef | = ppo.kl.coef | Score per nat.
algo.kl.target, kl_target | = ppo.kl.target | Nats per response, with `ppo.kl.controller: adaptive`.
algo.kl.horizon, kl_horizon | = ppo.kl.horizon | Responses.
algo.kl.estimator, kl_estimator | = ppo.kl.estimator |
algo.kl.use_loss, use_kl_loss | ppo.kl.placement | true: `loss`.
algo.kl.unbiased_gradient | ppo.kl.importance_weights | OpenRLHF weights the gradient of k2 by ratios of at most 10.
algo.dynamic_filtering_enable, dynamic_filtering | = ppo.filter.enabled |
reward.normalize_enable, normalize_reward | = ppo.shaping.normalize | OpenRLHF subtracts the fixed `mean`, and divides by the fixed `std`, of the reward model's config.json (0 and 1 if it has none; its reward training writes them), and shifts the critic's values in the same way. raypo uses the running mean and std of the run's scores.
reward.clip_range, reward_clip_range | ppo.shaping.clip_low + ppo.shaping.clip_high | raypo's default is no clip. raypo clips scores; OpenRLHF clips what rloo, group_norm, dr_grpo and reinforce_baseline make of them.
reward.overlong_buffer_len, overlong_buffer_len | = ppo.shaping.overlong_buffer_tokens | Tokens.
reward.overlong_penalty_factor, overlong_penalty_factor | = ppo.shaping.overlong_factor |
reward.stop_properly_penalty_coef, stop_properly_penalty_coef | ppo.shaping.truncated_score, ppo.shaping.truncated_scale | Below 0: `ppo.shaping.truncated_score`; else a factor as `ppo.shaping.truncated_scale`.
model.beta | = dpo.beta |
critic.save_value_network, save_value_network | = learner.save_critic |
ckpt.output_dir, save_path | storage_path + name | The run's folder is storage_path/name.
ckpt.path, ckpt_path | ~ storage_path | Checkpoints are in the run's folder.
ckpt.save_hf, save_hf_ckpt | ~ | The policy is always saved as Hugging Face files.
ckpt.disable_ds, disable_ds_ckpt | ~ checkpoint.every | The last step always has a checkpoint.
ckpt.load_enable, load_checkpoint | ~ | A run resumes automatically.
ckpt.save_steps, save_steps | = checkpoint.every | Steps of raypo.
ckpt.max_num, max_ckpt_num | = checkpoint.keep |
eval.steps, eval_steps | = eval.every |
logger.logging_steps, logging_steps | ~ | Every step is logged.
logger.tensorboard_dir, use_tensorboard | ~ logging.tensorboard | On by default, in the run's folder.
logger.wandb.key, use_wandb | logging.wandb | `{project}`. The key is wandb's own: `wandb login`, or WANDB_API_KEY.
logger.wandb.org, wandb_org | logging.wandb.entity |
logger.wandb.project, wandb_project | logging.wandb.project |
logger.wandb.run_name, wandb_run_name | name | The run's name, with which its folder ends.
algo.advantage.is_correction_type, vllm_is_correction_type | ppo.correction.kind | `tis`, `icepop`; `seq-mask-tis` drops responses: mis.
algo.advantage.is_correction_level, algo.advantage.is_correction_mode, algo.advantage.is_correction_gating | ppo.correction.kind | `token`, `mask` and `ratio`: icepop.
algo.advantage.is_correction_threshold, vllm_is_truncated_threshold | ppo.correction.low + ppo.correction.high, ppo.correction.cap | OpenRLHF's tis also has a lower bound.
algo.advantage.no_std_norm, no_advantage_std_norm | ppo.advantage | group_norm without it: dr_grpo. raypo's other estimators without a group's deviation whiten, or do not, by themselves.
algo.dynamic_filtering_range, dynamic_filtering_reward_range | ppo.filter.low + ppo.filter.high | Mean scores of a group.
train.partial_rollout_enable, partial_rollout | rollout.in_flight | `keep`, with `rollout.mode: async`.
train.ema_beta, ema_beta | | raypo keeps no average of the weights.
actor.optim, critic.optim | learner.optimizer | `adamw` (adam) or `muon`.
actor.muon.*, critic.muon.* | learner.optimizer | raypo's Muon has the learning rate of AdamW and a momentum of 0.95.
critic.adam.betas, critic.adam.eps, critic.adam.weight_decay, critic.lr_scheduler, critic.lr_warmup_ratio, critic.min_lr_ratio, critic.max_norm | learner.lr_schedule | Policy and critic share the schedule, the optimizer's constants and the clip.
actor.aux_loss_coef, aux_loss_coef | learner.router_aux_coef | The loss is a mean over the layers' own loads.
actor.freeze_visual_encoder, freeze_visual_encoder | model.freeze | true: `[vision]`, the default; false: `[]`, which only runs without an engine can have.
data.image_key, image_key | data.image_key | For a policy that reads images.
data.max_images_per_prompt, max_images_per_prompt | data.max_images |
ds.value_head_prefix, value_head_prefix | | A critic starts from the reward model, or from the policy with a head of zeros.
ckpt.best_metric_key, best_metric_key | checkpoint.best_by |
ptx_coef, pretrain_data, pretrain_split, pretrain_data_probs | ppo.nll_coef | raypo has no loss on texts beside PPO's.
logger.wandb.group, wandb_group, use_ms, ds.use_universal_ckpt, use_ds_universal_ckpt, local_rank, ds.deepcompile, deepcompile, ds.zpg, zpg, ds.experts_implementation, ds.grad_accum_dtype, grad_accum_dtype, ds.tensor_parallel_size, ds_tensor_parallel_size, ds.ring_attn_head_stride, ring_head_stride, ring_attn_head_stride, data.disable_fast_tokenizer, disable_fast_tokenizer, data.dataloader_num_workers, dataloader_num_workers, ckpt.max_mem, max_ckpt_mem, train.full_determinism_enable, full_determinism, perf, deterministic, disable_trace_cache, save_hf_ckpt_only, vllm.worker_extension_cls | - | It concerns memory, speed or the layout of files.
""",
}
PROJECTS = tuple(_TABLES)


@cache
def counterparts() -> tuple[Counterpart, ...]:
    """Return all rows of the tables."""
    rows = []
    for project, table in _TABLES.items():
        for line in table.strip().splitlines():
            names, keys, note = (cell.strip() for cell in line.split("|"))
            mark, keys = keys[:1], keys.lstrip("=~- ")
            groups = tuple(tuple(group.split(" + ")) for group in keys.split(", ") if group)
            marks = (mark == "=", mark == "~", mark == "-")
            rows.append(Counterpart(project, tuple(names.split(", ")), groups, note, *marks))
    return tuple(rows)


def remedy_for_foreign(key: str, accepted: Sequence[str]) -> str | None:
    """Return the remedy for a key of another project. None means that no project has such a key.

    Args:
        key: An unknown dotted key of a run file.
        accepted: The keys that the run file may have.
    """
    last_part = key.rpartition(".")[2]
    # If a key matches only by its last part, which raypo's keys also end in, the general hint of
    # `remedy_for_unknown` is better.
    matches = [
        row
        for row in counterparts()
        if row.matches(key) > (last_part in row.last_parts)
        and (not row.keys or row.keys_in(accepted))
    ]
    if not matches:
        return None
    best = max(matches, key=lambda row: row.matches(key))
    if keys := best.keys_in(accepted):
        remedy = f"Set {' and '.join(keys)} instead ({best.names[0]} of {best.project})."
        return f"{remedy} {best.note}".rstrip()
    return f"Remove it ({best.names[0]} of {best.project}). {best.note}"


def rows_of(project: str) -> Iterator[Counterpart]:
    """Yield the rows of a project in the order of its table."""
    return (row for row in counterparts() if row.project == project)
