import pytest

from fullshard.planning.hardware import ACCELERATORS, GIB, find_accelerator, parse_devices, read_host


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
    assert found.flops.get("bf16", 0.0) == teraflops * 1e12


@pytest.mark.parametrize("name", ["NVIDIA L40", "AMD EPYC", "", "NVIDIA GeForce GTX 4090"])
def test_unknown_devices_have_no_facts(name):
    assert find_accelerator(name) is None


REQUIRED = (
    "a100-40g a100-80g h100-sxm-80g h100-pcie h200 b200 3090 4090 5090 4090d l4 l40s l20 a10g a800 h800 h20 v100 t4 "
    "910a 910b1 910b2 910b3 910b4 910c"
)


@pytest.mark.parametrize("name", REQUIRED.split())
def test_facts_of_every_card_are_complete_and_possible(name):
    card = parse_devices(f"8x{name}")[1]
    assert card.flops["fp16"] >= 65e12 and 0.5 <= card.reachable <= 1
    assert card.flops.get("bf16", card.flops["fp16"]) == card.flops["fp16"]
    for low, high in (("fp32", "tf32"), ("tf32", "bf16"), ("bf16", "fp8")):
        if low in card.flops and high in card.flops:
            assert card.flops[low] <= card.flops[high]
    assert 0.25e12 <= card.memory_bytes_per_second <= 8e12
    assert card.node_bytes_per_second <= card.link_bytes_per_second <= 0.9e12
    assert 50 < card.flops["fp16"] / card.memory_bytes_per_second < 500 or name == "h20"


def test_known_figures():
    card = find_accelerator("NVIDIA H100 80GB HBM3")
    assert card.flops == {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12, "fp8": 1979e12}
    assert (card.memory_bytes_per_second, card.link_bytes_per_second) == (3.35e12, 450e9)
    a800, a100 = find_accelerator("NVIDIA A800-SXM4-80GB"), find_accelerator("NVIDIA A100-SXM4-80GB")
    assert a800.flops == a100.flops and a800.link_bytes_per_second == 200e9 < a100.link_bytes_per_second == 300e9
    assert find_accelerator("Tesla V100-SXM2-32GB").flops == {"fp16": 125e12, "fp32": 15.7e12}


def test_every_entry_can_be_found():
    for accelerator in ACCELERATORS:
        assert find_accelerator(" ".join(accelerator.matched)) is not None


def test_host_figures_are_possible():
    host = read_host()
    assert host.cores >= 1
    assert 0 < host.available_bytes <= host.total_bytes
    assert host.processor
