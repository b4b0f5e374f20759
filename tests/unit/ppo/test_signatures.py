"""The functions that scripts outside the repository call; their arguments are a promise."""

import inspect

import pytest

from raypo.ppo import advantages, kl, masked

PROMISED = {
    masked.masked_whiten: "x, mask, *, moments=None",
    kl.kl_estimate: "log_probs, ref_log_probs, *, kind",
    advantages.token_rewards: "scores, kl, mask, *, kl_coef",
    advantages.generalized_advantages: (
        "rewards, values, mask, *, gamma, gae_lambda, last_values=None"
    ),
    advantages.discounted_returns: "rewards, mask, *, gamma",
    advantages.group_baseline: "scores, *, kind, valid=None",
}


@pytest.mark.parametrize("function", PROMISED, ids=lambda function: function.__name__)
def test_the_arguments_are_the_promised_ones_and_more_are_optional(function):
    promised = dict(inspect.signature(eval(f"lambda {PROMISED[function]}: 0")).parameters)
    bare = {
        name: argument.replace(annotation=inspect.Parameter.empty)
        for name, argument in inspect.signature(function).parameters.items()
    }

    assert {name: bare.get(name) for name in promised} == promised
    assert [name for name in bare if name in promised] == list(promised)
    more = [argument for name, argument in bare.items() if name not in promised]
    assert all(argument.kind is argument.KEYWORD_ONLY for argument in more)
    assert all(argument.default is not argument.empty for argument in more)
