"""`make bench-gpu` with tiny sizes on this CPU: all but the GPU, TRL where it is installed."""

from pathlib import Path

import pytest

from tests.benchmarks.bench_gpu import ROWS, main


def test_every_row_but_those_of_a_gpu_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    main(["--tiny", "--repeats", "1", "--runs", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "failed:" not in printed
    lines = [line.strip("|").split("|") for line in printed.splitlines() if line.startswith("| ")]
    cells = {name.strip(): first.strip() for name, _, first, *_ in lines}
    needs_more = ("GPU memory", "TRL", "plan")
    for row in ROWS:
        if not any(word in row.name for word in needs_more):
            assert cells[row.name], row.name
