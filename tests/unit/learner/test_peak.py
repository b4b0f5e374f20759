import pytest
import torch

from raypo.learner import peak


def test_what_is_declared_wins():
    assert peak.peak_flops("float32", 2.5) == 2.5e12


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.0),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("NVIDIA L40S", "bfloat16", 362.0),
    ],
)
def test_a_known_gpu_has_its_data_sheet(
    name: str, dtype: str, tflops: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert peak.peak_flops(dtype) == tflops * 1e12


def test_a_product_on_this_machine_takes_the_time_that_its_rate_says(
    monkeypatch: pytest.MonkeyPatch,
):
    now = iter([0.0, 0.0, 0.5, 0.6, 0.7, 0.9])  # start; begin and end; is it late; begin and end
    monkeypatch.setattr(peak.time, "perf_counter", lambda: next(now, 1.0))
    monkeypatch.setitem(peak.SIZES, "cpu", 10)
    assert peak.peak_flops("float32") == pytest.approx(2 * 10**3 / 0.5)
