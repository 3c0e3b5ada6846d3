"""The table of device bindings: what Ray assigned, what the process sees, what it must use."""

import pytest

from raycrew.cluster_core import DeviceBinding, accelerators_of, bind_device, visible_devices

pytestmark = pytest.mark.smoke

FLAG = "RAY_EXPERIMENTAL_NOSET_"
ALL_8 = "0,1,2,3,4,5,6,7"
A, B = "GPU-aaaa1111-0000", "GPU-bbbb2222-0000"
MIG = "MIG-5c6f7d8e-0000"
OLD_MIG = f"MIG-{B}/1/0"

# assigned, environ, inventory -> kind, device_index, local_index, environment
TABLE = {
    "nothing": ({}, {}, (), "cpu", None, None, {}),
    "empty lists": ({"GPU": [], "NPU": []}, {"CUDA_VISIBLE_DEVICES": ""}, (), "cpu", None, None, {}),
    "masked": ({"GPU": ["3"]}, {"CUDA_VISIBLE_DEVICES": "3"}, (), "cuda", 3, 0, {}),
    "mask lost": ({"GPU": ["3"]}, {}, (), "cuda", 3, 0, {"CUDA_VISIBLE_DEVICES": "3"}),
    "mask of the driver": (
        {"GPU": ["3"]}, {"CUDA_VISIBLE_DEVICES": ALL_8}, (), "cuda", 3, 0, {"CUDA_VISIBLE_DEVICES": "3"},
    ),
    "mask of another device": (
        {"GPU": ["3"]}, {"CUDA_VISIBLE_DEVICES": "0"}, (), "cuda", 3, 0, {"CUDA_VISIBLE_DEVICES": "3"},
    ),
    "unmasked": ({"GPU": ["3"]}, {f"{FLAG}CUDA_VISIBLE_DEVICES": "1"}, (), "cuda", 3, 3, {}),
    "flag off": (
        {"GPU": ["3"]}, {f"{FLAG}CUDA_VISIBLE_DEVICES": "0"}, (), "cuda", 3, 0, {"CUDA_VISIBLE_DEVICES": "3"},
    ),
    "unmasked, part of a node": (
        {"GPU": ["6"]},
        {f"{FLAG}CUDA_VISIBLE_DEVICES": "true", "CUDA_VISIBLE_DEVICES": "4,5,6,7"},
        (), "cuda", 6, 2, {},
    ),
    "unmasked, but the device is hidden": (
        {"GPU": ["1"]},
        {f"{FLAG}CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "4,5"},
        (), "cuda", 1, 0, {"CUDA_VISIBLE_DEVICES": "1"},
    ),
    "two devices, in the order of a set": (
        {"GPU": ["10", "9"]}, {"CUDA_VISIBLE_DEVICES": "9,10"}, (), "cuda", 9, 0, {},
    ),
    "uuid, no inventory": ({"GPU": [A]}, {"CUDA_VISIBLE_DEVICES": A}, (), "cuda", None, 0, {}),
    "uuid, inventory": ({"GPU": [B]}, {"CUDA_VISIBLE_DEVICES": B}, (A, B), "cuda", 1, 0, {}),
    "uuid, abbreviated": ({"GPU": ["GPU-bbbb"]}, {"CUDA_VISIBLE_DEVICES": B}, (A, B), "cuda", 1, 0, {}),
    "uuid, unmasked, no list": ({"GPU": [B]}, {f"{FLAG}CUDA_VISIBLE_DEVICES": "1"}, (A, B), "cuda", 1, 1, {}),
    "uuid, unmasked, unknown": (
        {"GPU": [B]}, {f"{FLAG}CUDA_VISIBLE_DEVICES": "1"}, (), "cuda", None, 0, {"CUDA_VISIBLE_DEVICES": B},
    ),
    "uuid, unmasked, list": (
        {"GPU": [A]},
        {f"{FLAG}CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": f"{B},{A}"},
        (), "cuda", None, 1, {},
    ),
    "index in Ray, uuids in the list": (
        {"GPU": ["1"]},
        {f"{FLAG}CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": f"{B},{A}"},
        (A, B), "cuda", 1, 0, {},
    ),
    "index in Ray, uuids in the list, in order": (
        {"GPU": ["1"]},
        {f"{FLAG}CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": f"{A},{B}"},
        (A, B), "cuda", 1, 1, {},
    ),
    "the first index in Ray, uuids in the list": (
        {"GPU": ["0"]},
        {f"{FLAG}CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": f"{B},{A}"},
        (A, B), "cuda", 0, 1, {},
    ),
    "an id that is cut before it says anything": (
        {"GPU": ["GPU-"]}, {"CUDA_VISIBLE_DEVICES": "GPU-"}, (A, B), "cuda", None, 0, {},
    ),
    "mig": ({"GPU": [MIG]}, {"CUDA_VISIBLE_DEVICES": MIG}, (A, B), "cuda", None, 0, {}),
    "mig of a known device": (
        {"GPU": [OLD_MIG]}, {"CUDA_VISIBLE_DEVICES": OLD_MIG}, (A, B), "cuda", 1, 0, {},
    ),
    "mig is masked even when unmasked": (
        {"GPU": [MIG]},
        {f"{FLAG}CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": f"MIG-other,{MIG}"},
        (), "cuda", None, 0, {"CUDA_VISIBLE_DEVICES": MIG},
    ),
    "rocm": ({"GPU": ["5"]}, {"HIP_VISIBLE_DEVICES": "5"}, (), "rocm", 5, 0, {}),
    "rocm, both masks agree": (
        {"GPU": ["5"]}, {"HIP_VISIBLE_DEVICES": "5", "CUDA_VISIBLE_DEVICES": "5"}, (), "rocm", 5, 0, {},
    ),
    "rocm, the alias disagrees": (
        {"GPU": ["5"]}, {"HIP_VISIBLE_DEVICES": "5", "CUDA_VISIBLE_DEVICES": ALL_8}, (),
        "rocm", 5, 0, {"CUDA_VISIBLE_DEVICES": "5"},
    ),
    "rocm, the alias is of a later device": (
        {"GPU": ["5"]}, {"HIP_VISIBLE_DEVICES": "5", "CUDA_VISIBLE_DEVICES": "7"}, (),
        "rocm", 5, 0, {"CUDA_VISIBLE_DEVICES": "5"},
    ),
    "rocm, unmasked": ({"GPU": ["5"]}, {f"{FLAG}HIP_VISIBLE_DEVICES": "1"}, (), "rocm", 5, 5, {}),
    "all flags at once": (
        {"GPU": ["5"]}, {f"{FLAG}HIP_VISIBLE_DEVICES": "1", f"{FLAG}CUDA_VISIBLE_DEVICES": "1"},
        (), "cuda", 5, 5, {},
    ),
    "cuda with a stray hip list": (
        {"GPU": ["5"]}, {"HIP_VISIBLE_DEVICES": ALL_8, "CUDA_VISIBLE_DEVICES": "5"}, (), "cuda", 5, 0, {},
    ),
    "xpu": ({"GPU": ["2"]}, {"ZE_AFFINITY_MASK": "2"}, (), "xpu", 2, 0, {}),
    "xpu, selector": ({"GPU": ["2"]}, {"ONEAPI_DEVICE_SELECTOR": "level_zero:2"}, (), "xpu", 2, 0, {}),
    "xpu, selector of the driver": (
        {"GPU": ["2"]}, {"ONEAPI_DEVICE_SELECTOR": "level_zero:0,1,2"}, (),
        "xpu", 2, 0, {"ONEAPI_DEVICE_SELECTOR": "level_zero:2"},
    ),
    "npu": ({"NPU": ["6"]}, {"ASCEND_RT_VISIBLE_DEVICES": "6"}, (), "npu", 6, 0, {}),
    "npu, unmasked": ({"NPU": ["6"]}, {f"{FLAG}ASCEND_RT_VISIBLE_DEVICES": "1"}, (), "npu", 6, 6, {}),
    "npu with a cuda list": (
        {"NPU": ["6"]}, {"CUDA_VISIBLE_DEVICES": "0", "ASCEND_RT_VISIBLE_DEVICES": "6"}, (), "npu", 6, 0, {},
    ),
    "tpu": ({"TPU": ["1", "0"]}, {"TPU_VISIBLE_CHIPS": "0,1"}, (), "tpu", 0, 0, {}),
    "hpu": ({"HPU": ["4"]}, {"HABANA_VISIBLE_MODULES": "4"}, (), "hpu", 4, 0, {}),
    "neuron": ({"neuron_cores": ["7"]}, {"NEURON_RT_VISIBLE_CORES": "7"}, (), "neuron", 7, 0, {}),
    "a mask of fewer than are assigned": (
        {"GPU": ["0", "1"]}, {"CUDA_VISIBLE_DEVICES": "0"}, (), "cuda", 0, 0, {"CUDA_VISIBLE_DEVICES": "0,1"},
    ),
    "a mask that abbreviates": (
        {"GPU": [A]}, {"CUDA_VISIBLE_DEVICES": A[:8]}, (), "cuda", None, 0, {},
    ),
    "an id that is abbreviated": (
        {"GPU": [B[:8]]}, {f"{FLAG}CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": f"{A},{B}"}, (),
        "cuda", None, 1, {},
    ),
    "an accelerator outside the table": ({"MBLT": ["2"]}, {}, (), "mblt", 2, 2, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_binding(case):
    assigned, environ, inventory, kind, device_index, local_index, environment = TABLE[case]
    before = dict(environ)
    binding = bind_device(assigned, environ, inventory)
    assert (binding.kind, binding.device_index, binding.local_index) == (kind, device_index, local_index)
    assert dict(binding.environment) == environment
    assert environ == before


@pytest.mark.parametrize("case", [name for name, row in TABLE.items() if row[3] != "cpu"])
def test_a_corrected_binding_is_stable(case):
    """The corrected environment leads to the same binding, with nothing left to correct."""
    assigned, environ, inventory, *_ = TABLE[case]
    first = bind_device(assigned, environ, inventory)
    second = bind_device(assigned, {**environ, **first.environment}, inventory)
    assert second == DeviceBinding(first.kind, first.device_index, first.local_index, {}, first.device_ids)


def test_two_kinds_at_once_are_refused():
    with pytest.raises(ValueError, match=r"\['GPU', 'NPU'\]"):
        bind_device({"GPU": ["0"], "NPU": ["1"]}, {})


def test_several_devices_come_in_physical_order_or_in_that_of_the_mask():
    known = bind_device({"GPU": ["10", "9"]}, {"CUDA_VISIBLE_DEVICES": "10,9"})
    assert (known.device_ids, known.device_index, known.local_index) == (("9", "10"), 9, 1)
    first = bind_device({"GPU": ["1", "0"]}, {"CUDA_VISIBLE_DEVICES": "1,0"})
    assert (first.device_ids, first.device_index, first.local_index) == (("0", "1"), 0, 1)
    unknown = bind_device({"GPU": [A, B]}, {"CUDA_VISIBLE_DEVICES": f"{B},{A}"})
    assert (unknown.device_ids, unknown.device_index, unknown.local_index) == ((B, A), None, 0)
    mixed = bind_device({"GPU": [A, "3"]}, {"CUDA_VISIBLE_DEVICES": f"{A},3"})
    assert mixed.device_ids == ("3", A)
    by_inventory = bind_device({"GPU": [A, B]}, {"CUDA_VISIBLE_DEVICES": f"{A},{B}"}, (B, A))
    assert (by_inventory.device_ids, by_inventory.device_index, by_inventory.local_index) == ((B, A), 0, 1)


def test_accelerators_are_found_among_resources():
    assert accelerators_of({"CPU": 8.0, "memory": 1e9, "GPU": 0.0}) == ()
    assert accelerators_of({"CPU": 8.0, "NPU": 4.0, "my_npu": 1.0, "GPU": 1.0}) == ("GPU", "NPU")


def test_visible_devices_are_what_an_environment_says_of_them():
    masks = {"CUDA_VISIBLE_DEVICES": "3", "ASCEND_RT_VISIBLE_DEVICES": ""}
    assert visible_devices({**masks, "PATH": "/bin", f"{FLAG}CUDA_VISIBLE_DEVICES": "1"}) == masks
