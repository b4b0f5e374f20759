"""The mathematics of PPO and its family: functions of torch tensors, each formula in one place.

`raypo.recipes.ppo.ppo_step` shows the order of a step: `shaping` (raw to trained scores),
`estimators` (advantages, composed of the parts in `advantages` and `kl`), `corrections`
(engine-learner mismatch), `covariance`, `objective` (the loss of a microbatch, composed of
`surrogates` and `losses`) and `controllers` (coefficients of the next step). `groups` has the
filter of dynamic sampling and pass@k. `custom_functions` calls a user's functions in place of some
of these. `preferences` and `divergences` are losses of other recipes. `masked` has the masked sums
that all of them use.

Functions over an `Experience` take the frozen section of the config that they follow, so a new key
is a field of its section and its use. Functions of a single formula take tensors and numbers.
"""
