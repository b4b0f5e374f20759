"""What an error says of the actor that was asked."""

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayTaskError,
)

from raypo.cluster.actors import is_lost_actor


def test_an_actor_is_lost_however_ray_words_its_end():
    for error in (
        ActorDiedError(),
        ActorUnavailableError("it may come back", None),
        OutOfMemoryError("killed by Ray's memory monitor"),
        ActorUnschedulableError("its node is gone"),
    ):
        assert is_lost_actor(error), error


def test_an_actor_whose_method_met_a_dead_actor_lives():
    met = RayTaskError("hold", "traceback", ActorDiedError()).as_instanceof_cause()
    assert isinstance(met, ActorDiedError)
    assert not is_lost_actor(met)
    assert not is_lost_actor(GetTimeoutError())
    assert not is_lost_actor(ValueError())
