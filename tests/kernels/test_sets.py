"""One module of kernels per instruction set: which are built, which is loaded, that all compute the same."""

from __future__ import annotations

import platform
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from compiling import KERNELS, setup

from mpipipe import native
from mpipipe.ops.native import KERNELS_VERSION

# of some processors, as far as the choice depends on them
AVX2 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])  # Haswell, Zen 1 to 3
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}  # Skylake-X, Ice Lake
AVX512_BF16 = AVX512 | {"avx512_bf16"}  # Cooper Lake, Sapphire Rapids, Zen 4
KNIGHTS_LANDING = AVX2 | {"avx512f", "avx512cd", "avx512er", "avx512pf"}  # has AVX-512, but not that of v4


# -- which is loaded ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "flags", "best"),
    [
        ("x86_64", AVX512_BF16, "v4_bf16"),
        ("x86_64", AVX512, "v4"),
        ("x86_64", KNIGHTS_LANDING, "v3"),
        ("x86_64", AVX2, "v3"),
        ("x86_64", AVX2 - {"fma"}, "base"),
        ("x86_64", frozenset(), "base"),
        ("aarch64", frozenset({"asimd", "sve", "sve2"}), "sve"),
        ("aarch64", frozenset({"asimd"}), "base"),
        ("riscv64", frozenset({"v"}), "base"),
    ],
)
def test_the_best_set_of_a_processor(machine: str, flags: frozenset[str], best: str) -> None:
    assert native.best_set(machine, flags) == best


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor : 0\nflags\t\t: fpu avx2\nbugs : x\n\nprocessor : 1\nflags : other\n", {"fpu", "avx2"}),
        ("processor : 0\nFeatures\t: fp asimd sve\n", {"fp", "asimd", "sve"}),
        ("processor : 0\n", set()),
    ],
)
def test_flags_are_those_of_the_first_processor(
    text: str, flags: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "CPU_INFO", tmp_path / "cpuinfo")
    assert native.flags() == frozenset()  # where there is no such file
    native.CPU_INFO.write_text(text)
    assert native.flags() == flags


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An AVX2 processor on which nobody has asked for its set yet."""
    monkeypatch.setattr(native, "flags", lambda: AVX2)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native, "instruction_set", native.instruction_set.__wrapped__)
    return monkeypatch


@pytest.mark.parametrize(("forced", "taken"), [("base", "base"), ("v3", "v3"), ("", "v3")])
def test_a_forced_set_is_taken(asked: pytest.MonkeyPatch, forced: str, taken: str) -> None:
    asked.setenv(native.FORCED, forced)
    assert native.instruction_set() == taken


BUILT = "the kernels are built for v4_bf16, v4, v3, base on x86_64; take one"


@pytest.mark.parametrize(
    ("forced", "said"),
    [
        ("avx2", f"MPIPIPE_INSTRUCTION_SET=avx2: {BUILT}"),
        ("sve", f"MPIPIPE_INSTRUCTION_SET=sve: {BUILT}"),
        ("v4", "MPIPIPE_INSTRUCTION_SET=v4: this processor has no avx512bw, .*; its best set is v3"),
    ],
)
def test_a_forced_set_that_cannot_run_is_refused(asked: pytest.MonkeyPatch, forced: str, said: str) -> None:
    asked.setenv(native.FORCED, forced)
    with pytest.raises(SystemExit, match=f"^error: {said}"):
        native.instruction_set()


# -- which are built ---------------------------------------------------------------------------


def test_setup_builds_the_sets_that_the_package_looks_for() -> None:
    assert {m: set(sets) for m, sets in setup()["SETS"].items()} == {
        m: set(sets) for m, sets in native.SETS.items()
    }


def test_each_set_is_a_module_of_its_own_with_its_own_flags() -> None:
    built = {extension.name: extension for extension in setup()["given"]["ext_modules"]}
    flags = setup()["SETS"].get(platform.machine(), {"base": []})
    assert set(built) == {"mpipipe._planner", *(f"mpipipe._kernels_{name}" for name in flags)}
    for name, given in flags.items():
        arguments = built[f"mpipipe._kernels_{name}"].extra_compile_args
        assert [a for a in arguments if a.startswith("-march=")] == [a for a in given if "march" in a]
        assert f'-DMPIPIPE_SET="{name}"' in arguments
    # NaN and infinities are values, and a sum has an order
    assert not {"-ffast-math", "-Ofast", "-march=native"} & {
        a for e in built.values() for a in e.extra_compile_args
    }


def test_the_sources_of_a_set_are_the_kernels_and_their_references() -> None:
    sources = {
        Path(source)
        for extension in setup()["given"]["ext_modules"]
        if extension.name == "mpipipe._kernels_base"
        for source in extension.sources
    }
    on_disk = [*KERNELS.glob("*.cpp"), *KERNELS.glob("cpu/*.cpp"), *KERNELS.glob("reference/*.cpp")]
    assert sources == {path.relative_to(KERNELS.parent) for path in on_disk}


# -- what they compute -------------------------------------------------------------------------


def loaded() -> list[ModuleType]:
    """The modules that this processor runs."""
    sets = native.SETS.get(platform.machine(), {"base": frozenset()})
    names = [name for name, needs in sets.items() if needs <= native.flags()]
    found = [native.load(f"_kernels_{name}", KERNELS_VERSION) for name in names]
    assert [module and module.instruction_set for module in found] == names
    return [module for module in found if module is not None]


def test_every_set_has_the_same_functions() -> None:
    public = [{name for name in dir(module) if not name.startswith("_")} for module in loaded()]
    assert all(names == public[0] for names in public)


def test_every_set_draws_the_same_words() -> None:
    """The other kernels are compared by their own tests, and with their references by kernels/check."""
    drawn = []
    for module in loaded():
        out = np.empty(1001, np.uint32)
        module.words(5, 6, 7, 8, out.ctypes.data, len(out), 2)
        drawn.append(out)
    for words in drawn[1:]:
        np.testing.assert_array_equal(words, drawn[0])
