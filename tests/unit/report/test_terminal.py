import io
from pathlib import Path

from typer.testing import CliRunner

from raypo.cli import app
from raypo.report.page import Section, Table, Words
from raypo.report.samples import before_and_after_texts, by_sample, run_samples
from raypo.report.terminal import chosen, print_samples
from raypo.storage.rollout_table import rollout_table
from raypo.storage.run_files import RunFiles
from tests.recorded_run import WORDS, conversations, episode, held_out, rollout, write_run


def test_samples_of_the_last_step_in_the_order_that_is_asked_for(tmp_path: Path):
    run = write_run(tmp_path, steps=3)
    done = CliRunner().invoke(app, ["show", str(run), "--best", "-n", "1"])
    assert done.exit_code == 0
    assert "recorded, step 3: 9 samples, mean score 0.530; best first" in done.output
    assert "score 1.03  advantage +0.10  KL 0.20  3 tokens" in done.output
    assert "label: a" in done.output
    assert done.output.count("score 1.03") == 1


def test_parts_of_the_score_and_other_columns_of_the_row_are_shown(tmp_path: Path):
    """With a function of TRL's form the right answer is in a column and not the label."""
    files = RunFiles(str(tmp_path), "r")
    row = {"answer": "0135", "prompt": "prompt 0 </script>", "level": 3, "long": "x" * 900}
    parts = {"reward/format": 1.0, "reward/right_answer": 0.25}
    files.write_rollouts(1, rollout_table([rollout(1, 0, 0) | parts | {"label": None, "row": row}]))
    stream = io.StringIO()
    print_samples(files, 1, None, 1, stream)
    out = stream.getvalue()
    assert "format 1  right_answer 0.25" in out
    assert "answer: 0135" in out
    assert "level: 3" in out
    assert "prompt: prompt 0 </script>" in out
    assert out.count("prompt 0") == 1
    assert out.count("x") < 600


def test_a_step_that_was_never_finished_is_not_shown(tmp_path: Path):
    run = write_run(tmp_path, steps=3)
    unfinished = rollout_table([rollout(4, 0, 0)])  # its update was stopped
    RunFiles.at(str(run)).write_rollouts(4, unfinished)
    done = CliRunner().invoke(app, ["show", str(run)])
    assert "recorded, step 3: 9 samples" in done.output


def test_orders():
    rows = [rollout(1, group, sample) for group in range(3) for sample in range(3)]
    rows[4]["score"] = None
    rows[5]["response_ids"] = [1] * 9
    samples = by_sample(rows)
    assert [row["score"] for (row,) in chosen(samples, "worst", 3)] == [0.01, 0.01, 0.01]
    assert chosen(samples, "best", 9)[-1][0]["score"] is None
    assert chosen(samples, "longest", 1) == [[rows[5]]]
    assert chosen(samples, None, 3) == [[rows[0]], [rows[4]], [rows[8]]]
    assert len(chosen(samples, None, 50)) == 9


def test_text_that_looks_like_markup_is_shown_as_it_is(tmp_path: Path):
    files = RunFiles(str(tmp_path), "r")
    files.write_rollouts(1, rollout_table([rollout(1, 0, 0) | {"response": "[bold]x[/nothing]"}]))
    stream = io.StringIO()
    print_samples(files, 1, None, 1, stream)
    assert "[bold]x[/nothing]" in stream.getvalue()


def test_samples_cannot_command_the_terminal(tmp_path: Path):
    hostile = "\x1b]0;title\x07\x1b[2J\x9b31m\r\u202etext\u00a0\u3042\u200d"
    files = RunFiles(str(tmp_path), "r")
    texts = {"prompt": hostile, "response": hostile, "label": hostile, "row": {"level": hostile}}
    files.write_rollouts(1, rollout_table([rollout(1, 0, 0) | texts]))
    stream = io.StringIO()
    print_samples(files, 1, None, 1, stream)
    out = stream.getvalue()
    assert not set(out) & set("\x1b\x07\x9b\r\u202e")
    assert out.count("\\x1b]0;title\\x07\\x1b[2J\\x9b31m\\r\\u202etext\u00a0\u3042\u200d") == 3


def test_wrong_input_is_told(tmp_path: Path):
    run = str(write_run(tmp_path, steps=2))
    for arguments, words in (
        ([run, "--step", "9"], "--step (9)"),
        ([run, "--best", "--worst"], "one order is possible. Omit"),
        ([str(tmp_path / "nothing")], "no rollouts"),
    ):
        done = CliRunner().invoke(app, ["show", *arguments])
        assert done.exit_code == 2
        assert words in done.output


def test_episodes_are_shown_turn_by_turn_with_rewards_and_errors(tmp_path: Path):
    run = write_run(tmp_path, steps=1)
    files = RunFiles.at(str(run))
    files.write_rollouts(1, rollout_table([episode()]))
    stream = io.StringIO()
    print_samples(files, 1, None, 1, stream)
    lines = [line.strip("│ \n") for line in stream.getvalue().splitlines()]
    assert "2 turns" in stream.getvalue()
    first, between, last = (WORDS[each] for each in (1, 4, 2))
    at = lines.index(f"policy: {first}  +0.5")
    assert lines[at - 1].startswith("prompt: ")
    assert lines[at : at + 4] == [
        f"policy: {first}  +0.5",
        "calculator (0.25 s)",
        f"environment: {between}",
        f"policy: {last}  -1",
    ]
    assert lines[at + 4 : at + 6] == [
        "a call failed: not JSON (0 s)",
        "failed: KeyError: x",
    ]
    assert "hits 3" in stream.getvalue()


def test_the_report_tells_what_the_environment_wrote(tmp_path: Path):
    run = write_run(tmp_path, steps=1)
    files = RunFiles.at(str(run))
    files.write_rollouts(1, rollout_table([episode()]))
    (sample,) = (
        each for each in run_samples(files, files.config() or {}) if "held_out" not in each
    )
    assert (sample["others"], sample["rewards"]) == ([1], {0: 0.5, 2: -1.0})
    assert (sample["turns"], sample["error"]) == (2, "KeyError: x")
    assert sample["changes"][1] == 0.0
    assert sample["tools"] == {0: ["calculator (0.25 s)"], 2: ["a call failed: not JSON (0 s)"]}
    assert sample["metrics"] == {"hits": 3.0}


def test_the_conversations_of_an_agents_episode_are_one_sample(tmp_path: Path):
    run = write_run(tmp_path, steps=1)
    files = RunFiles.at(str(run))
    rows = conversations()
    files.write_rollouts(1, rollout_table([*rows[::-1], rollout(1, 1, 0) | {"score": -5.0}]))
    stream = io.StringIO()
    print_samples(files, 1, "best", 1, stream)
    told = stream.getvalue()
    assert "2 samples, mean score -2.750; best first" in told
    assert "2 turns  6 tokens" in told
    assert told.index("first prompt") < told.index("conversation 2 of 2") < told.index("second")
    assert told.count("calculator (0.25 s)") == 1
    trained = [s for s in run_samples(files, files.config() or {}) if "held_out" not in s]
    assert [each["prompt"] for each in trained] == ["first prompt", "prompt 1 </script>"]
    assert [each["prompt"] for each in trained[0]["more"]] == ["second prompt"]
    assert "tools" not in trained[0]["more"][0]


def test_samples_before_and_after_show_changed_ones_first_and_turns_apart(tmp_path: Path):
    files = RunFiles.at(str(write_run(tmp_path, steps=4)))
    rows = [held_out(0, group) for group in range(8)]
    files.write_rollouts(0, rollout_table(rows), held_out=True)
    later = [dict(row) for row in rows]
    later[7] |= {"response": "other"}
    later[6] |= {"response": "better", "score": rows[6]["score"] + 1}
    later[5] |= {"response": "abc", "episode": episode()["episode"], "turn_index": [0, -1, 1]}
    later[5] |= {"response_ids": [1, 4, 2], "response_mask": [True, False, True]}
    files.write_rollouts(4, rollout_table(later), held_out=True)
    section = Section("")
    before_and_after_texts(section, files)
    (table,) = (part for part in section.blocks if isinstance(part, Table))
    assert [row[0] for row in table.rows[:3]] == [f"held out {n}" for n in (6, 5, 7)]
    assert table.rows[1][4] == f"{WORDS[1]}\n< {WORDS[4]}\n{WORDS[2]}"
    assert len(table.rows) == 6


def test_samples_before_and_after_show_losses_beside_wins(tmp_path: Path):
    files = RunFiles.at(str(write_run(tmp_path, steps=4)))
    rows = [held_out(0, group) | {"score": float(group >= 20)} for group in range(24)]
    files.write_rollouts(0, rollout_table(rows), held_out=True)
    later = [row | {"response": "other", "score": 1.0 - row["score"]} for row in rows]
    files.write_rollouts(4, rollout_table(later), held_out=True)
    section = Section("")
    before_and_after_texts(section, files)
    heading, _, table = section.blocks
    assert isinstance(heading, Words)
    assert isinstance(table, Table)
    assert heading.text.endswith("20 prompts better, 4 worse, of 24.")
    assert [row[5] - row[3] for row in table.rows] == [1, 1, 1, 1, -1, -1]
