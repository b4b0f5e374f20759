"""The mathematics of PPO and related algorithms, as functions of torch tensors.

`raypo.recipes.ppo.ppo_step` shows the order in which a step uses these modules:

- `shaping`: from raw scores to the scores to train on;
- `estimators`: advantages, composed of the parts in `advantages`, `turn_advantages` and `kl`;
- `corrections`: mismatch between engine and learner;
- `covariance`: tokens that clip_cov and kl_cov restrict;
- `high_entropy`: tokens that keep their gradient under `ppo.top_entropy_fraction`;
- `objective`: the loss of a microbatch, composed of `surrogates` and `losses`;
- `controllers`: coefficients of the next step.

`groups` has the filter of dynamic sampling, group baselines and pass@k. `custom_functions` calls
user functions that replace some of these modules. `preferences` and `divergences` are losses of
other recipes. `masked` has the masked sums that all modules use.

Functions of an `Experience` take the config section that they apply, so that a new config key needs
no new argument. Functions of a single formula take tensors and numbers.
"""
