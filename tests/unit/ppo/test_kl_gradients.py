"""The expected gradient of each placement of the KL, exactly: every response is enumerated.

A vocabulary of 5 tokens, the last of which ends a response; a second token ends it too. So there
are one response of one token and 20 of two, and expectations are sums over them, in float64.
"""

import pytest
import torch
from torch import Tensor

from raypo.ppo.advantages import discounted_returns, generalized_advantages, token_rewards
from raypo.ppo.kl import kl_loss_terms, kl_reward_terms
from raypo.ppo.losses import aggregate
from raypo.ppo.objective import StepCounts
from tests.unit.ppo.steps import NAN, estimate, policy_loss

V, END = 5, 4
RESPONSES = [(END, END)] + [(first, second) for first in range(END) for second in range(V)]
MASK = torch.tensor([[True, first != END] for first, _ in RESPONSES])  # [21, 2]


def logits(seed: int) -> Tensor:
    """[1 + V, V]: of the first token, then of the second after each first one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + V, V, generator=generator, dtype=torch.float64)


def log_probs_of(table: Tensor) -> Tensor:
    """[21, 2] log-probs of the tokens of each response, NaN behind its end."""
    log_p = table.log_softmax(-1)
    rows = [torch.stack([log_p[0, first], log_p[1 + first, second]]) for first, second in RESPONSES]
    return torch.stack(rows).masked_fill(~MASK, NAN)


def probability(log_probs: Tensor) -> Tensor:
    """[21], detached."""
    return log_probs.detach().nan_to_num(0.0).sum(1).exp()


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) over the last dimension."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def kl_gradient(policy: Tensor, reference: Tensor) -> Tensor:
    """Of KL(policy || reference) between distributions of whole responses, by autograd."""
    ours, theirs = log_probs_of(policy).nan_to_num(0.0).sum(1), log_probs_of(reference)
    kl = divergence(ours, theirs.nan_to_num(0.0).sum(1))
    return torch.autograd.grad(kl, policy)[0]


def next_token_kl_gradient(policy: Tensor, reference: Tensor, *, reverse: bool = False) -> Tensor:
    """Of the KL between distributions of the next token, summed over the states of a response.

    How likely a state is is held fixed. `reverse` is KL(reference || policy).
    """
    p, q = policy.log_softmax(-1), reference.log_softmax(-1)
    by_state = divergence(q, p) if reverse else divergence(p, q)  # [1 + V]
    visits = torch.cat([torch.ones(1).double(), p[0].exp() * (torch.arange(V) != END)]).detach()
    return torch.autograd.grad((visits * by_state).sum(), policy)[0]


@pytest.fixture
def policy() -> Tensor:
    return logits(0).requires_grad_()


@pytest.fixture
def reference() -> Tensor:
    return logits(1)


def expected_gradient(policy: Tensor, advantages: Tensor, *, rows: Tensor, odds: Tensor) -> Tensor:
    """Of `policy_loss` over rows that come with the given odds; tokens are summed."""
    log_probs = log_probs_of(policy)[rows]
    loss, _ = policy_loss(
        log_probs,
        log_probs.detach(),
        advantages,
        MASK[rows],
        weights=odds.unsqueeze(1).expand(MASK[rows].shape),
        aggregation="constant",
        max_new_tokens=1,
        counts=StepCounts(tokens=1, sequences=1, responses=1),
    )
    return torch.autograd.grad(loss, policy)[0]


@pytest.mark.parametrize("kind", ["gae", "reinforce"])
def test_k1_in_the_reward_has_the_gradient_of_the_kl_of_responses(kind, policy, reference):
    log_probs = log_probs_of(policy.detach())
    kl = kl_reward_terms(log_probs, log_probs_of(reference), MASK)
    rewards = token_rewards(torch.zeros(len(MASK)).double(), kl, MASK, kl_coef=0.3)
    values = 0.1 * logits(2)[:1, :2].expand(MASK.shape)  # any baseline of the state
    advantages = (
        discounted_returns(rewards, MASK, gamma=1.0)
        if kind == "reinforce"
        else generalized_advantages(rewards, values, MASK, gamma=1.0, gae_lambda=1.0)[0]
    )

    gradient = expected_gradient(
        policy, advantages, rows=torch.arange(len(MASK)), odds=probability(log_probs)
    )

    torch.testing.assert_close(gradient, 0.3 * kl_gradient(policy, reference))


@pytest.mark.parametrize(("kind", "share"), [("rloo", 1.0), ("dr_grpo", 0.5)])
def test_k1_folded_into_the_scores_of_a_group_has_it_too(kind, share, policy, reference):
    """All pairs of responses; a mean with the sample itself in it leaves (n - 1) / n of it."""
    pairs = torch.cartesian_prod(torch.arange(len(MASK)), torch.arange(len(MASK)))
    rows = pairs.flatten()
    log_probs = log_probs_of(policy.detach())
    kl = kl_reward_terms(log_probs, log_probs_of(reference), MASK)

    advantages, _ = estimate(
        torch.zeros(len(rows)).double(),
        MASK[rows],
        kind=kind,
        kl=kl[rows],
        kl_coef=0.3,
        group_index=torch.arange(len(pairs)).repeat_interleave(2),
    )

    # a pair's gradient is the mean over its two responses
    odds = probability(log_probs)[pairs].prod(1).repeat_interleave(2) / 2
    gradient = expected_gradient(policy, advantages, rows=rows, odds=odds)
    torch.testing.assert_close(gradient, 0.3 * share * kl_gradient(policy, reference))


def loss_gradient(policy: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Expected gradient of `kl_loss_terms`, tokens summed."""
    log_probs = log_probs_of(policy)
    terms = kl_loss_terms(log_probs, log_probs_of(reference), MASK, kind=kind)
    terms = terms * probability(log_probs).unsqueeze(1)
    loss = aggregate(terms, MASK, aggregation="constant", max_new_tokens=1, normalizer=1)
    return torch.autograd.grad(loss, policy)[0]


@pytest.mark.parametrize("kind", ["k2", "k3_st"])
def test_k2_and_k3_st_in_the_loss_have_the_gradient_of_the_kl_of_each_next_token(
    kind, policy, reference
):
    gradient = loss_gradient(policy, reference, kind)

    torch.testing.assert_close(gradient, next_token_kl_gradient(policy, reference))
    # of the second token, where no later state hangs on the choice, that is the KL of responses
    torch.testing.assert_close(gradient[1:], kl_gradient(policy, reference)[1:])


def test_k3_in_the_loss_has_the_gradient_of_the_reverse_kl_of_each_next_token(policy, reference):
    gradient = loss_gradient(policy, reference, "k3")

    torch.testing.assert_close(gradient, next_token_kl_gradient(policy, reference, reverse=True))


@pytest.mark.parametrize("kind", ["k2", "k3", "k3_st"])
def test_with_its_ratio_each_kind_has_the_gradient_of_the_kl_where_an_older_policy_sampled(
    kind, policy, reference
):
    """States come as often as the older policy goes through them; tokens count as the new one's."""
    older, log_probs = logits(3), log_probs_of(policy)
    old = log_probs_of(older)

    terms = kl_loss_terms(log_probs, log_probs_of(reference), MASK, kind=kind, old_log_probs=old)
    terms = terms * probability(old).unsqueeze(1)
    loss = aggregate(terms, MASK, aggregation="constant", max_new_tokens=1, normalizer=1)
    (gradient,) = torch.autograd.grad(loss, policy)

    p, q = policy.log_softmax(-1), reference.log_softmax(-1)
    visits = older.log_softmax(-1)[0].exp() * (torch.arange(V) != END)
    visits = torch.cat([torch.ones(1).double(), visits])
    (expected,) = torch.autograd.grad((visits * divergence(p, q)).sum(), policy)
    torch.testing.assert_close(gradient, expected)
