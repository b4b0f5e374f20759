from raypo.metrics.clock import Clock


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_lap_is_the_time_since_the_last_one():
    hands = Hands()
    clock = Clock(hands)

    hands.seconds = 103.0
    clock.lap("time/generate_s")
    hands.seconds = 104.5
    clock.lap("time/update_s")

    assert clock.laps == {"time/generate_s": 3.0, "time/update_s": 1.5}
