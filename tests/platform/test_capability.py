"""The capability table, against what NVIDIA documents for each architecture."""

import pytest

from mla_ref.platform import REFERENCE, arch_names, features, toolkit_gap

FLAGS = ("fp8_conversion", "fp8_mma", "wgmma", "tcgen05", "block_scaled_mma")


@pytest.mark.parametrize(
    "capability, flags, shared_memory",
    [
        ((8, 6), "", 101_376),
        ((8, 9), "fp8_conversion fp8_mma", 101_376),
        ((9, 0), "fp8_conversion fp8_mma wgmma", 232_448),
        ((10, 0), "fp8_conversion fp8_mma tcgen05 block_scaled_mma", 232_448),
        ((10, 3), "fp8_conversion fp8_mma tcgen05 block_scaled_mma", 232_448),
        ((12, 0), "fp8_conversion fp8_mma block_scaled_mma", 101_376),
        ((12, 1), "fp8_conversion fp8_mma block_scaled_mma", 101_376),
        (None, "", 49_152),
    ],
)
def test_B086_B087_each_architecture_has_its_own_features(capability, flags, shared_memory):
    found = features(capability)
    assert found.instructions == tuple(flags.split())
    assert [getattr(found, flag) for flag in FLAGS] == [flag in flags.split() for flag in FLAGS]
    assert found.shared_memory_per_block == shared_memory


@pytest.mark.parametrize("capability", [None, (7, 5), (10, 9), (12, 2), (13, 0)])
def test_B087_an_unknown_architecture_gets_the_reference(capability):
    """A minor number that is not in the table is not taken for its neighbour."""
    assert features(capability) is REFERENCE
    assert not REFERENCE.instructions


def test_B127_fp8_is_converted_in_hardware_from_8_9_on():
    assert not features((8, 0)).fp8_conversion
    assert not features((8, 6)).fp8_conversion
    assert features((8, 9)).fp8_conversion


def test_B132_arch_names():
    assert arch_names((12, 0)) == ("compute_120", "sm_120")
    assert arch_names((9, 0)) == ("compute_90", "sm_90")


@pytest.mark.parametrize(
    "version, capability, needed",
    [
        ((12, 0), (12, 0), "12.8"),
        ((12, 7), (12, 0), "12.8"),
        ((12, 8), (12, 1), "12.9"),
        ((11, 7), (9, 0), "11.8"),
    ],
)
def test_B132_an_old_compiler_is_told_which_cuda_it_needs(version, capability, needed):
    message = toolkit_gap("NVRTC", version, capability)
    assert message is not None
    assert f"NVRTC {version[0]}.{version[1]} does not know {arch_names(capability)[1]}" in message
    assert f"needs CUDA >= {needed}" in message


@pytest.mark.parametrize(
    "version, capability",
    [((12, 8), (12, 0)), ((12, 9), (12, 1)), ((13, 0), (12, 1)), ((11, 8), (9, 0))],
)
def test_B132_a_new_enough_compiler_has_no_gap(version, capability):
    assert toolkit_gap("NVRTC", version, capability) is None


def test_B132_an_architecture_outside_the_table_is_not_judged():
    assert toolkit_gap("NVRTC", (12, 0), (13, 0)) is None
