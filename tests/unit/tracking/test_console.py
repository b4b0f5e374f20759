import io
import math
import re

import pytest

from raypo.tracking.console import Console, curve_line, step_line
from tests.recorded_run import metrics

METRICS = {
    "step": 3,
    "rollout/score_mean": 0.4125,
    "kl/ref_response_mean": 0.0214,
    "rollout/truncated_fraction": 0.041,
    "rollout/response_tokens_mean": 57.34,
    "time/step_s": 6.21,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def run(stream, **options):
    console = Console(stream, **options)
    console.phase("connecting to Ray")
    console.start("quickstart", 40, "http://127.0.0.1:8265", "runs/quickstart")
    console.phase("starting engines")
    console.resume(3)
    console.step(METRICS)
    console.phase("generate")
    console.step(METRICS | {"step": 4, "rollout/score_mean": 0.5, "eval/score_mean": 0.75})
    console.message("saved [bold]policy[/bold]")
    console.close("finished", 83.0)
    return stream.getvalue()


def test_staleness_is_shown_where_there_is_some():
    assert step_line(1, 1, {"rollout/staleness_mean": 0.0}) == "step 1/1"
    assert step_line(1, 1, {"rollout/staleness_mean": 1.25}) == "step 1/1  staleness 1.2"


def test_without_a_terminal_there_are_plain_lines_and_phases_only_before_the_first_step():
    lines = run(io.StringIO()).splitlines()

    assert lines[:5] == [
        "connecting to Ray",
        "raypo: quickstart, 40 steps, files in runs/quickstart",
        "Ray dashboard: http://127.0.0.1:8265 (actors: raypo:quickstart:*)",
        "starting engines",
        "Resuming after step 2.",
    ]
    assert [line[:10] for line in lines[5:7]] == ["step  3/40", "step  4/40"]
    assert lines[7] == "saved [bold]policy[/bold]"
    assert lines[8] == (
        "raypo: finished after 4 steps in 1 min 23 s (held-out score +0.750 -> +0.750), "
        "files in runs/quickstart"
    )
    assert lines[9] == "  its page: raypo report runs/quickstart"
    assert len(lines) == 10


def test_ci_gets_plain_lines_even_where_it_has_a_terminal(monkeypatch):
    monkeypatch.setenv("CI", "true")
    assert "\x1b" not in run(Terminal())


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_what_user_code_prints_cannot_command_the_terminal(kind: type[io.StringIO]):
    stream = kind()
    console = Console(stream)
    console.start("r", 4, None, "runs/r")
    console.message("printed: \x1b]52;c;cm0=\x07")
    console.close("finished")
    assert "printed: \\x1b]52;c;cm0=\\x07" in stream.getvalue()
    assert "\x1b]52" not in stream.getvalue()


def test_a_terminal_gets_a_bar_above_which_the_same_lines_stand():
    text = run(Terminal())

    assert "\x1b" in text
    assert "━" in text
    assert "step  3/40  score +0.412  kl 0.0214  length 57.3  cut off 4%  6.2 s" in text
    assert "saved [bold]policy[/bold]" in text
    assert text.splitlines()[-1].endswith("raypo report runs/quickstart")


def test_a_terminal_sees_how_the_run_stands_and_where_the_time_goes():
    stream = Terminal()
    console = Console(stream)
    console.start("r", 40, None, "runs/r")
    for step in range(1, 6):
        console.step({"step": step, **metrics(step)})
    console.close("finished")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "█  eval +0.493  score +0.539  kl 0.283  length 5.0" in text
    assert "generate 30%  score 10%  update 50%  report 10%" in text
    assert "left, step 6" in text


def test_a_wide_terminal_sees_the_parts_of_the_score(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    console = Console(stream)
    console.start("r", 40, None, "runs/r")
    console.step(METRICS | {"reward/format": 0.25})
    console.close("finished")
    line = "\nscore +0.412  kl 0.0214  length 57.3  cut off 4%  6.2 s  format 0.25"
    assert line in stream.getvalue()


def test_a_warning_is_told_once_with_its_remedy():
    stream = io.StringIO()
    console = Console(stream)
    console.start("r", 40, None, "runs/r")
    for step in range(1, 9):
        console.step({"step": step, **metrics(step, **{"ppo/clip_fraction": 0.5})})
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("warning: ")]
    assert len(lines) == 1
    assert "Lower learner.policy_lr" in lines[0]


def resumed(**options):
    """A run of 8 steps whose second command redoes steps 5 and 6."""
    stream = io.StringIO()
    console = Console(stream)
    rows = [{"step": n, **metrics(n, **options)} for n in range(1, 7)]
    console.start("r", 8, None, "runs/r", rows=rows)
    console.resume(5)
    for step in range(5, 9):
        console.step({"step": step, **metrics(step, **options), "rollout/score_mean": step / 10})
    console.close("finished")
    return stream.getvalue()


def test_a_resumed_run_that_ends_before_its_first_step_has_the_steps_of_the_command_before():
    stream = io.StringIO()
    console = Console(stream)
    console.start("r", 8, None, "runs/r", rows=[{"step": 1}, {"step": 2}])
    console.close("interrupted")
    assert "interrupted after 2 steps" in stream.getvalue()


def test_the_verdict_stands_below_the_last_line_in_place_of_two_scores():
    stream = io.StringIO()
    console = Console(stream)
    console.start("r", 1, None, "runs/r")
    console.step({"step": 1, "eval/initial_score_mean": 0.1, "eval/score_mean": 0.5})
    console.close("finished", learned="It learned.")
    last = stream.getvalue().splitlines()[-3:]
    assert last[:2] == ["raypo: finished after 1 step, files in runs/r", "  It learned."]


def test_a_resumed_run_ends_with_what_it_gained_since_its_own_first_step():
    first = metrics(1)["eval/initial_score_mean"]
    assert f"finished after 8 steps (held-out score {first:+.3f} -> " in resumed()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"eval/score_mean": 0.5, "rollout/score_mean": 0.2}, "held-out score +0.100 -> +0.500"),
        ({"train/loss": 1.0}, "loss +1.000 -> +1.000"),
    ],
)
def test_the_last_line_prefers_what_was_measured_on_held_out_prompts(row: dict, said: str):
    stream = io.StringIO()
    console = Console(stream)
    console.start("r", 1, None, "runs/r")
    console.step({"step": 1, "eval/initial_score_mean": 0.1, **row})
    console.close("interrupted")
    assert f"raypo: interrupted after 1 step ({said}), files in runs/r\n" in stream.getvalue()


def test_a_resumed_run_does_not_repeat_the_warnings_of_its_first_command():
    assert "warning: " not in resumed(**{"ppo/clip_fraction": 0.5})


def test_a_run_that_loses_its_worker_is_judged_by_each_step_once():
    stream = io.StringIO()
    console = Console(stream)
    console.start("r", 8, None, "runs/r")
    for step in (1, 2, 3):
        console.step({"step": step, "rollout/score_mean": 0.9})
    console.resume(2)  # Ray Train began again, from the checkpoint of step 1
    assert [row["step"] for row in console._rows] == [1]


def test_other_recipes_have_their_own_metrics():
    row = {"train/loss": 1.5, "eval/accuracy": 0.75, "perf/samples_per_s": 12.0, "time/step_s": 2.0}
    assert step_line(2, 9, row) == ("step 2/9  loss 1.5000  2.0 s  eval accuracy 75.0%")
    stream = io.StringIO()
    console = Console(stream)
    console.start("r", 9, None, "runs/r")
    console.step({"step": 2, **row})
    console.close("finished")
    assert "nan" not in stream.getvalue()


def test_a_curve_of_blocks():
    assert curve_line([0.0, math.nan, 0.5, 1.0]) == "▁ ▅█"
    assert curve_line([1.0]) == ""
    assert curve_line([1.0, 1.0]) == "▁▁"


def test_a_new_run_resumes_nothing_and_has_no_dashboard_line_without_one():
    stream = io.StringIO()
    Console(stream).start("r", 1, None, "runs/r")
    assert stream.getvalue() == "raypo: r, 1 step, files in runs/r\n"


def test_the_token_is_shown_in_a_terminal_and_kept_out_of_what_is_logged():
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        Console(stream).start("r", 1, "http://127.0.0.1:8265", "runs/r", "s3cret")
    assert "the token that it requires: s3cret" in terminal.getvalue()
    assert "s3cret" not in log.getvalue()
    assert log.getvalue().endswith("requires: what `ray get-auth-token` prints\n")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_closing_twice_says_it_once(stream):
    console = Console(stream)
    console.start("r", 2, None, "runs/r")
    console.close("interrupted")
    console.close("finished")
    assert stream.getvalue().count("files in") == 2  # one from start, one from the first close
    assert "interrupted after 0 steps" in stream.getvalue()


def test_a_step_line_ends_with_the_parts_of_the_score():
    parts = {f"reward/{name}": 0.25 for name in ("b", "a", "e", "d", "c")}
    line = step_line(1, 2, {"rollout/score_mean": 0.5, **parts})
    assert line == "step 1/2  score +0.500  a 0.25  b 0.25  c 0.25  d 0.25"
