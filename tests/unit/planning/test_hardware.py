import pytest

from fullshard.planning.hardware import ACCELERATORS, GIB, find_accelerator, read_host


@pytest.mark.parametrize(
    ("name", "usable_gib", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.14, 312),
        ("NVIDIA A100-SXM4-40GB", 39.4, 312),
        ("NVIDIA A100 80GB PCIe", 79.2, 312),
        ("NVIDIA H100 80GB HBM3", 79.18, 989),
        ("NVIDIA H100 PCIe", 79.1, 756),
        ("NVIDIA H200", 139.7, 989),
        ("NVIDIA H20", 95.0, 148),
        ("NVIDIA GeForce RTX 4090", 23.64, 165.2),
        ("NVIDIA L4", 22.0, 121),
        ("Tesla T4", 14.7, 0),
        ("Ascend910B2", 60.96, 353.9),
        ("Ascend910_9392", 61.27, 353.9),
    ],
)
def test_device_names_find_their_facts(name, usable_gib, teraflops):
    found = find_accelerator(name)
    assert found is not None
    assert found.usable_bytes == int(usable_gib * GIB)
    assert found.bf16_flops == teraflops * 1e12


@pytest.mark.parametrize("name", ["NVIDIA L40", "AMD EPYC", "", "NVIDIA GeForce GTX 4090"])
def test_unknown_devices_have_no_facts(name):
    assert find_accelerator(name) is None


def test_every_entry_can_be_found():
    for accelerator in ACCELERATORS:
        assert find_accelerator(" ".join(accelerator.matched)) is not None


def test_host_figures_are_possible():
    host = read_host()
    assert host.cores >= 1
    assert 0 < host.available_bytes <= host.total_bytes
    assert host.processor
