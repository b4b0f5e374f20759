"""The mathematics of PPO and its family: functions of torch tensors, each formula in one place.

In the order of a step: `groups` (dynamic sampling), `shaping` (raw to trained scores), `kl`,
`advantages` and the `estimators` made of them, `corrections` (engine-learner mismatch),
`covariance` and `entropy`, `surrogates` and `losses`. `custom_functions` calls a user's functions
in place of some of them. `preferences` and `divergences` are losses of other recipes. `masked` has
the masked sums that all of them use.
"""
