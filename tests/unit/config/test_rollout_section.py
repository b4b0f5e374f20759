import pytest

from raypo.config import PPOConfig
from tests.unit.config.test_run_config import refused, with_keys

DEDICATED = {"placement__mode": {"engine": "dedicated"}}


@pytest.mark.parametrize(
    ("mode", "given", "staleness"),
    [("sync", "auto", 0), ("one_step_off", "auto", 1), ("async", "auto", 1), ("async", 4, 4)],
)
def test_the_mode_says_how_stale_a_response_may_be(mode, given, staleness):
    keys = {"rollout__mode": mode, "rollout__max_staleness": given}
    assert PPOConfig.parse(with_keys(**keys, **DEDICATED)).rollout.staleness == staleness


def test_engines_that_take_turns_with_the_learner_cannot_sample_beside_it():
    assert refused(rollout__mode="one_step_off") == (
        "run.yaml: rollout.mode (one_step_off): samples while the learner updates, and colocated "
        "engines take turns with it. Set placement.mode to dedicated (or to {engine: dedicated}), "
        "or rollout.mode to sync."
    )


def test_a_staleness_that_the_mode_cannot_have():
    assert "max_staleness (2): mode sync has 0. Set max_staleness to auto, or mode to async." in (
        refused(rollout__max_staleness=2)
    )
    told = refused(rollout__mode="one_step_off", rollout__max_staleness=0, **DEDICATED)
    assert "max_staleness (0): mode one_step_off has 1." in told


def test_an_episode_needs_a_limit():
    assert "rollout.max_episode_tokens (None): an episode needs a limit" in refused(
        rollout__environment="guess.py:Guess"
    )
    told = refused(rollout__environment="guess.py:Guess", rollout__max_episode_tokens=3)
    assert "rollout.max_episode_tokens (3): must not be below rollout.max_new_tokens" in told


def test_episodes_name_their_own_tools():
    environment = {"rollout__environment": "guess.py:Guess", "rollout__max_episode_tokens": 200}
    assert "data.tools_key (tools): has no effect" in refused(
        **environment, data__tools_key="tools"
    )
    assert PPOConfig.parse(with_keys(data__tools_key="tools")).data.tools_key == "tools"


def test_keys_of_episodes_act_only_where_there_are_any():
    assert (
        "rollout.max_turns (3): has no effect, rollout.environment is null. Remove "
        "rollout.max_turns, or set rollout.environment."
    ) in refused(rollout__max_turns=3)
    agent = {"rollout__agent": "solve.py:Solve", "rollout__max_episode_tokens": 200}
    assert "rollout.environment_processes (2): has no effect, rollout.environment is null" in (
        refused(**agent, rollout__environment_processes=2)
    )
    assert "rollout.agent_args ({'n': 2}): has no effect, rollout.agent is null" in (
        refused(rollout__agent_args={"n": 2})
    )

    told = refused(rollout__turns="continuous")
    assert "rollout.turns (continuous): has no effect, rollout.environment is null" in told
    environment = {"rollout__environment": "guess.py:Guess", "rollout__max_episode_tokens": 200}
    for key, value in (("limit_score", 0.5), ("endpoint_host", "0.0.0.0")):
        told = refused(**environment, **{f"rollout__{key}": value})
        assert f"rollout.{key} ({value}): has no effect, rollout.agent is null" in told


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
    keys = {"rollout__environment": "guess.py:Guess", "rollout__max_episode_tokens": 200}
    section = PPOConfig.parse(with_keys(**keys, **mode, rollout__turns=turns)).rollout
    assert section.goes_in_step == in_step


def test_an_agent_has_no_environment_and_gives_the_score_itself():
    agent = {"rollout__agent": "solve.py:Solve", "rollout__max_episode_tokens": 200}
    assert "takes the place of rollout.environment (guess.py:Guess). Remove one of the two." in (
        refused(**agent, rollout__environment="guess.py:Guess")
    )
    assert "reward.function (judge.py:score): judges single responses" in (
        refused(**agent, reward__function="judge.py:score")
    )
    of_a_source = {"data__prompts": [{"path": "a.jsonl", "function": "judge.py:score"}]}
    assert "data.prompts.function (judge.py:score): judges single responses" in (
        refused(**agent, **of_a_source)
    )
    grpo = {"ppo__preset": "grpo", "ppo__shaping__truncated_score": -1.0}
    told = refused(**agent, **grpo)
    assert "ppo.shaping.truncated_score (-1.0): changes the score of a single response" in told


def test_an_agents_own_requests_may_end_at_texts():
    agent = {"rollout__agent": "solve.py:Solve", "rollout__max_episode_tokens": 200}
    assert PPOConfig.parse(with_keys(**agent)).rollout.reads_text
    assert not PPOConfig.parse(with_keys()).rollout.reads_text
    assert PPOConfig.parse(with_keys(rollout__stop=["Q:"])).rollout.reads_text


def test_what_is_credited_by_turns_is_not_shaped_as_a_whole():
    keys = {"rollout__environment": "guess.py:Guess", "rollout__max_episode_tokens": 200}
    told = refused(**keys, ppo__shaping__clip_high=1.0)
    assert "ppo.shaping.clip_high (1.0): changes the score of a whole episode" in told
    grpo = with_keys(**keys, ppo__advantage="grpo", ppo__shaping__clip_high=1.0)
    assert PPOConfig.parse(grpo).ppo.shaping.clip_high == 1.0
    assert "ppo.discount_by (turn): a response is one turn" in refused(ppo__discount_by="turn")


@pytest.mark.parametrize("player", ["environment", "agent"])
def test_an_episode_is_not_overlong_by_what_the_policy_samples_alone(player):
    keys = {f"rollout__{player}": "guess.py:Guess", "rollout__max_episode_tokens": 200}
    told = refused(**keys, ppo__shaping__overlong_buffer_tokens=20)
    assert (
        "ppo.shaping.overlong_buffer_tokens (20): counts what the policy samples, and "
        "rollout.max_episode_tokens (200) limits what others write too. Set "
        "ppo.shaping.overlong_buffer_tokens to null"
    ) in told


def test_an_episode_must_fit_a_microbatch():
    keys = {
        "rollout__environment": "guess.py:Guess",
        "rollout__max_episode_tokens": 100_000,
        "learner__max_tokens_per_microbatch": 4096,
    }
    assert "data.max_prompt_tokens + rollout.max_episode_tokens" in refused(**keys)


def test_nothing_is_in_flight_when_weights_arrive_where_every_batch_is_waited_for():
    told = refused(rollout__in_flight="keep", rollout__mode="one_step_off", **DEDICATED)
    assert "in_flight (keep): mode one_step_off with a staleness of 1 has no request" in told
    keys = {"rollout__in_flight": "keep", "rollout__mode": "async", **DEDICATED}
    assert PPOConfig.parse(with_keys(**keys)).rollout.has_requests_in_flight
    assert "in_flight (keep)" in refused(**keys, rollout__max_staleness=0)


def test_a_mask_of_stale_tokens_that_none_can_meet():
    keys = {"rollout__mode": "async", "rollout__max_staleness": 2, **DEDICATED}
    told = refused(ppo__correction__max_staleness=2, **keys)
    assert "ppo.correction.max_staleness (2): no token is staler than 2" in told
    PPOConfig.parse(with_keys(ppo__correction__max_staleness=1, **keys))
