from raypo.metrics.catalogue import HEADLINES, MEANINGS, METRICS, PLOTS, Plot, label_of


def test_a_plot_takes_names_and_patterns_and_calls_lines_by_what_tells_them_apart():
    known = ["eval/pass_at_1", "eval/initial_pass_at_1", "eval/pass_at_4", "eval/loss"]
    assert Plot("", ["eval/pass_at_*"]).lines(known) == {
        "eval/pass_at_1": "1",
        "eval/pass_at_4": "4",
    }
    known = ["time/wait_for_rollouts_s", "perf/engine_idle_s"]
    assert Plot("", known).lines(known) == {
        "time/wait_for_rollouts_s": "wait for rollouts",
        "perf/engine_idle_s": "engine idle",
    }
    assert Plot("", ["eval/loss"]).lines(["eval/loss"]) == {"eval/loss": ""}
    assert Plot("", ["eval/loss"]).lines([]) == {}


def test_no_two_plots_have_one_title():
    titles = [plot.title for plots in PLOTS.values() for plot in plots]
    assert len(set(titles)) == len(titles)


def test_a_metric_without_words_is_called_by_its_name():
    assert label_of("time/push_weights_s") == "push weights"
    assert label_of("time/log_probs_s") == "old log-probs and values"


def test_what_a_run_is_judged_by_is_documented():
    assert HEADLINES[0].name == "eval/score_mean"
    shown = {name for name, metric in METRICS.items() if metric.sign or metric.line}
    assert shown - {"time/step_s"} <= MEANINGS.keys()


def test_the_pass_rates_of_a_curriculum_are_one_plot_with_short_labels():
    (plot,) = [plot for plot in PLOTS["Learning"] if plot.title == "Pass rates of the prompts"]
    names = [f"curriculum/pass_rate_p{share}" for share in (10, 50, 90)]
    known = [*names, "curriculum/step_pass_rate", "curriculum/seen_fraction", "eval/score_mean"]
    assert list(plot.lines(known).values()) == ["p10", "p50", "p90", "step"]
