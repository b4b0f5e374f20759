"""The mathematics of PPO and its family: functions of torch tensors, each formula in one place.

`raypo.recipes.ppo.ppo_step` shows the order in which a step uses these modules:

- `shaping`: from raw scores to the scores to train on;
- `estimators`: advantages, composed of the parts in `advantages`, `turn_advantages` and `kl`;
- `corrections`: mismatch between engine and learner;
- `covariance`: tokens that clip_cov and kl_cov restrict;
- `high_entropy`: tokens that keep their gradient under `ppo.top_entropy_fraction`;
- `objective`: the loss of a microbatch, composed of `surrogates` and `losses`;
- `controllers`: coefficients of the next step.

`groups` has the filter of dynamic sampling, group baselines and pass@k. `custom_functions` calls a
user's functions in place of some of these. `preferences` and `divergences` are losses of other
recipes. `masked` has the masked sums that all of them use.

Functions of an `Experience` take the section of the config whose settings they apply, so a new
config key needs no new arguments. Functions of a single formula take tensors and numbers.
"""
