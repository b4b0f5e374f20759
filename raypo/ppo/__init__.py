"""The mathematics of PPO and its family: torch in, torch out, every formula in one place.

In the order of a step: `sampling` (which groups teach something), `shaping` (from raw to trained
scores), `kl`, `advantages` and the `estimators` made of them, `corrections` (engine against
learner), `surrogates` and `losses`. `masked` is what they all sum with.
"""
