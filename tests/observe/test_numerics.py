from __future__ import annotations

import math

import pytest
import torch

from dist_train.observe import peak_bytes, peak_flops
from dist_train.observe.flops import PEAK_TFLOPS, peak_of_name
from dist_train.observe.numerics import Repeats, SpikeDetector


def spikes(values, **options):
    detector = SpikeDetector(**options)
    return [i for i, value in enumerate(values) if detector.update(value) is not None]


def test_a_spike_is_a_value_over_ten_times_the_mean_of_those_before():
    assert spikes([1.0] * 20 + [10.001] + [1.0] * 20) == [20]
    assert spikes([1.0] * 20 + [9.999] + [1.0] * 20) == []
    assert spikes([3.0] * 20 + [100.0], factor=50.0) == []


def test_the_mean_at_a_spike_is_reported_without_it():
    detector = SpikeDetector()
    for value in (2.0, 4.0, 2.0, 4.0, 3.0):
        detector.update(value)
    assert detector.mean == pytest.approx(3.0, rel=0.02)
    assert detector.update(500.0) == pytest.approx(3.0, rel=0.02)
    assert detector.mean < 10  # one spike hardly moves it
    assert detector.update(500.0) is not None


def test_the_running_mean_is_the_weighted_mean_of_its_definition():
    values, decay = [5.0, 1.0, 2.0, 8.0], 0.9
    detector = SpikeDetector(decay=decay)
    for value in values:
        detector.update(value)
    weights = [decay**k for k in range(len(values))][::-1]
    assert detector.mean == pytest.approx(sum(w * v for w, v in zip(weights, values)) / sum(weights))


def test_the_first_values_are_no_spikes():
    assert spikes([0.001, 1.0, 100.0, 1.0, 1.0]) == []
    assert spikes([1.0, 1.0, 1.0, 100.0], warmup=3) == [3]
    assert spikes([1.0, 1.0, 100.0], warmup=3) == []


def test_a_new_level_is_accepted_after_a_few_steps():
    found = spikes([1.0] * 50 + [50.0] * 100)
    assert found[0] == 50 and 3 < len(found) < 40


def test_values_that_are_not_finite_are_ignored():
    detector = SpikeDetector()
    for value in [1.0] * 10 + [math.nan, math.inf, -math.inf]:
        assert detector.update(value) is None
    assert detector.mean == pytest.approx(1.0)


def test_norms_of_zero_are_no_spikes_and_what_follows_is():
    assert spikes([0.0] * 10 + [0.0, 1e-9]) == [11]


def test_repeats_are_shown_at_powers_of_ten_in_a_row():
    repeats = Repeats()
    shown = [i for i in range(1, 1501) if repeats.update(True)]
    assert shown == [1, 10, 100, 1000] and repeats.in_a_row == " (1500 steps in a row)"
    assert not repeats.update(False)
    assert repeats.update(True) and repeats.in_a_row == ""


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_U02_known_devices_have_their_published_peak(name, tflops):
    assert peak_of_name(name) == tflops * 1e12


@pytest.mark.parametrize("name", ["NVIDIA H1000", "Some GPU", "", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce GTX 1080"])
def test_U02_an_unknown_device_has_no_peak(name):
    assert peak_of_name(name) is None


def test_U02_the_peak_of_a_cpu_is_unknown_unless_it_is_given():
    cpu = torch.device("cpu")
    assert peak_flops(cpu) is None and peak_flops(cpu, 0.5) == 5e11


def test_every_line_of_the_peak_table_can_be_reached():
    for name, tflops in PEAK_TFLOPS:
        assert peak_of_name(f"NVIDIA {name} 80GB") == tflops * 1e12


def test_peak_bytes_of_a_cpu_process_grow_with_what_it_touches():
    cpu = torch.device("cpu")
    before = peak_bytes(cpu)
    assert 20e6 < before < 100e9
    block = torch.ones((before + 64_000_000 - resident_bytes()) // 4)
    assert peak_bytes(cpu) > before and block.numel()


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
