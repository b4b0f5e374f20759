import pytest

from raypo.config import PPOConfig
from tests.unit.config.test_run_config import assert_refused, with_keys

DEDICATED = {"placement__mode": {"engine": "dedicated"}}
ENVIRONMENT = {"rollout__environment": "guess.py:Guess", "rollout__max_episode_tokens": 200}
AGENT = {"rollout__agent": "solve.py:Solve", "rollout__max_episode_tokens": 200}


@pytest.mark.parametrize(
    ("mode", "max_staleness", "staleness"),
    [("sync", "auto", 0), ("one_step_off", "auto", 1), ("async", "auto", 1), ("async", 4, 4)],
)
def test_the_mode_says_how_stale_a_response_may_be(mode, max_staleness, staleness):
    keys = {"rollout__mode": mode, "rollout__max_staleness": max_staleness}
    assert PPOConfig.parse(with_keys(**keys, **DEDICATED)).rollout.staleness == staleness


def test_engines_that_take_turns_with_the_learner_cannot_sample_beside_it():
    assert_refused("rollout.mode", "one_step_off")


def test_an_episode_needs_a_limit():
    keys = {"rollout__environment": "guess.py:Guess"}
    assert_refused("rollout.max_episode_tokens", None, **keys)
    assert_refused("rollout.max_episode_tokens", 3, **keys, rollout__max_episode_tokens=3)


VERIFIERS = ENVIRONMENT | {"rollout__environment": "verifiers:my-env"}


def test_an_environment_of_verifiers_is_an_agent_that_keeps_its_arguments():
    keys = {"rollout__environment_args": {"most": 2}, "rollout__endpoint_host": "0.0.0.0"}
    section = PPOConfig.parse(with_keys(**VERIFIERS, **keys)).rollout
    assert (section.verifiers, section.has_agent, section.reads_text) == ("my-env", True, True)
    plain = PPOConfig.parse(with_keys(**ENVIRONMENT)).rollout
    assert (plain.verifiers, plain.has_agent, plain.reads_text) == (None, False, False)
    function = "judge.py:score"
    assert_refused("reward.function", function, **VERIFIERS, reward__function=function)
    kl = {"ppo__kl__placement": "loss", "ppo__kl__estimator": "k3"}
    assert_refused("ppo.advantage", "gigpo", **VERIFIERS, ppo__advantage="gigpo", **kl)


@pytest.mark.parametrize(
    ("mode", "turns", "in_step"),
    [
        ({}, "auto", True),
        ({}, "continuous", False),
        ({"rollout__mode": "one_step_off", **DEDICATED}, "auto", True),
        ({"rollout__mode": "async", **DEDICATED}, "auto", False),
        ({"rollout__mode": "async", **DEDICATED}, "in_step", True),
        ({"rollout__mode": "async", "rollout__max_staleness": 0, **DEDICATED}, "auto", True),
    ],
)
def test_episodes_go_on_by_themselves_where_requests_meet_new_weights_or_it_is_asked_for(
    mode, turns, in_step
):
    section = PPOConfig.parse(with_keys(**ENVIRONMENT, **mode, rollout__turns=turns)).rollout
    assert section.goes_in_step == in_step


def test_an_agent_has_no_environment_and_gives_the_score_itself():
    function, source = "judge.py:score", {"path": "a.jsonl", "function": "judge.py:score"}
    shaping = {"ppo__preset": "grpo", "ppo__shaping__truncated_score": -1.0}
    assert_refused("rollout.agent", "solve.py:Solve", **ENVIRONMENT | AGENT)
    assert_refused("reward.function", function, **AGENT, reward__function=function)
    assert_refused("data.prompts.function", function, **AGENT, data__prompts=[source])
    assert_refused("eval.function", function, **AGENT, eval__function=function)
    assert_refused("eval.prompts.function", function, **AGENT, eval__prompts=[source])
    assert_refused("ppo.shaping.truncated_score", -1.0, **AGENT, **shaping)


def test_an_agents_own_requests_may_end_at_texts():
    assert PPOConfig.parse(with_keys(**AGENT)).rollout.reads_text
    assert not PPOConfig.parse(with_keys()).rollout.reads_text
    assert PPOConfig.parse(with_keys(rollout__stop=["Q:"])).rollout.reads_text


def test_what_is_credited_by_turns_is_not_shaped_as_a_whole():
    shaping = {"ppo__shaping__clip_high": 1.0}
    assert_refused("ppo.shaping.clip_high", 1.0, **ENVIRONMENT, **shaping)
    gigpo = {"ppo__advantage": "gigpo", "ppo__kl__coef": 0.0}
    assert_refused("ppo.shaping.clip_high", 1.0, **ENVIRONMENT, **shaping, **gigpo)
    grpo = with_keys(**ENVIRONMENT, ppo__advantage="grpo", **shaping)
    assert PPOConfig.parse(grpo).ppo.shaping.clip_high == 1.0


@pytest.mark.parametrize("player", [ENVIRONMENT, AGENT])
def test_an_episode_is_not_overlong_by_what_the_policy_samples_alone(player):
    key = "ppo.shaping.overlong_buffer_tokens"
    assert_refused(key, 20, **player, ppo__shaping__overlong_buffer_tokens=20)


def test_an_episode_must_fit_a_microbatch():
    keys = ENVIRONMENT | {"rollout__max_episode_tokens": 100_000}
    key = "learner.max_tokens_per_microbatch"
    assert_refused(key, 4096, **keys, learner__max_tokens_per_microbatch=4096)


def test_a_mask_of_stale_tokens_that_none_can_meet():
    keys = {"rollout__mode": "async", "rollout__max_staleness": 2, **DEDICATED}
    assert_refused("ppo.correction.max_staleness", 2, ppo__correction__max_staleness=2, **keys)
    PPOConfig.parse(with_keys(ppo__correction__max_staleness=1, **keys))


def test_off_may_be_written_without_quotes():
    for value in ("off", False):
        section = PPOConfig.parse(with_keys(rollout__router_replay=value)).rollout
        assert section.router_replay == "off"


def test_experts_cannot_be_recorded_inside_cuda_graphs():
    replay = {"rollout__router_replay": "engine"}
    graphs = {"rollout__engine__extra": {"enforce_eager": False}}
    assert_refused("rollout.router_replay", "engine", **replay, **graphs)
    PPOConfig.parse(with_keys(**replay))
    PPOConfig.parse(with_keys(**graphs))
