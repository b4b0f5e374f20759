"""The mathematics of PPO and its family: torch in, torch out, every formula in one place.

`masked` sums over kept tokens, `kl` measures divergence, `advantages` goes from scores to
advantages, `surrogates` and `losses` from advantages to one number.
"""
