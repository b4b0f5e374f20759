"""The mathematics of PPO and its family: torch in, torch out, every formula in one place.

In the order of a step: `groups` (which ones teach something), `shaping` (from raw to trained
scores), `kl`, `advantages` and the `estimators` made of them, `corrections` (engine against
learner), `covariance` and `entropy`, `surrogates` and `losses`; `custom_functions` is what a user's
functions are given in their place. `preferences` and `divergences` are the losses of other recipes.
`masked` is what they all sum with.
"""
