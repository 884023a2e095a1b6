"""The reader of fatbins: against nvcc's own, against cuobjdump, and against bytes written here."""

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from powertrain.doctor.fatbin import Code, codes, fatbins

SOURCE = "__global__ void {name}(float* x) {{ x[threadIdx.x] += 1.f; }}\n"
MAGIC = 0xBA55ED50


def entry(kind: int, arch: int, flags: int, size: int = 32) -> bytes:
    return struct.pack("<HHIQ12xI8xQ16x", kind, 0x101, 64, size, arch, flags) + bytes(size)


def elf(*parts: list[bytes], section: bytes = b".nv_fatbin") -> bytes:
    """A 64-bit ELF file with a fatbin for each of `parts` in one section, written by hand."""
    body = b""
    for entries in parts:
        inside = b"".join(entries)
        body += struct.pack("<IHHQ", MAGIC, 1, 16, len(inside)) + inside + bytes(8)
    names = b"\0.shstrtab\0" + section + b"\0"
    table = 64 + len(body) + len(names)
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + bytes(24) + struct.pack("<Q10xHHH", table, 64, 3, 1)
    header = header.ljust(64, b"\0")

    def row(name: int, offset: int, size: int) -> bytes:
        return struct.pack("<II16xQQ", name, 1, offset, size).ljust(64, b"\0")

    sections = row(0, 0, 0) + row(1, 64 + len(body), len(names)) + row(11, 64, len(body))
    return header + body + names + sections


def test_reads_what_is_written(tmp_path: Path) -> None:
    file = tmp_path / "x.so"
    file.write_bytes(elf([entry(2, 75, 0x11), entry(1, 80, 0x8011)], [entry(2, 90, 0x100011), entry(2, 100, 0x200011)]))
    first, second = fatbins(file)
    assert first == {Code(75), Code(80, "", "ptx")}
    assert second == {Code(90, "a"), Code(100, "f")}
    assert sorted(map(str, codes(file))) == ["compute_80", "sm_100f", "sm_75", "sm_90a"]


def test_no_gpu_code(tmp_path: Path) -> None:
    text, other, cut = tmp_path / "a.so", tmp_path / "b.so", tmp_path / "c.so"
    text.write_text("INPUT(libtorch.so)")
    other.write_bytes(elf([entry(2, 75, 0x11)], section=b".text"))
    cut.write_bytes(elf([entry(2, 75, 0x11)])[:80])
    assert fatbins(text) == fatbins(other) == []
    with pytest.raises(ValueError, match=r"c\.so: must be a whole ELF file, is cut short at 80 bytes"):
        fatbins(cut)


@pytest.mark.parametrize(
    "code, runs, fails",
    [
        (Code(80), (80, 86, 89), (75, 90)),
        (Code(86), (86, 89), (80, 90)),
        (Code(90, "a"), (90,), (100, 89)),
        (Code(100, "f"), (100, 103), (90, 120)),
        (Code(75, "", "ptx"), (75, 80, 90, 120), (70,)),
        (Code(90, "a", "ptx"), (90,), (100,)),
        (Code(100, "f", "ptx"), (100, 103), (120,)),
    ],
    ids=str,
)
def test_where_code_runs(code: Code, runs: tuple[int, ...], fails: tuple[int, ...]) -> None:
    assert [arch for arch in (*runs, *fails) if code.runs_on(arch)] == list(runs)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("relocatable", [False, True], ids=["plain", "rdc"])
def test_reads_what_nvcc_wrote(tmp_path: Path, relocatable: bool) -> None:
    (tmp_path / "k.cu").write_text(SOURCE.format(name="add"))
    # linked device code is machine code only, as it is in the wheels that have it
    wanted = ["arch=compute_75,code=sm_75", "arch=compute_90a,code=sm_90a"]
    wanted += [] if relocatable else ["arch=compute_80,code=compute_80"]
    flags = [word for one in wanted for word in ("-gencode", one)]
    file = tmp_path / "k.so"
    subprocess.run(
        ["nvcc", "-shared", "-Xcompiler", "-fPIC", "--cudart", "none", *(["-rdc=true"] if relocatable else []), *flags,
         "-o", file, tmp_path / "k.cu"], check=True, capture_output=True,
    )  # fmt: skip
    assert set(map(str, codes(file))) == {"sm_75", "sm_90a", *(() if relocatable else ("compute_80",))}
    cuobjdump = _cuobjdump()
    if cuobjdump is None:
        return
    listed = subprocess.run([cuobjdump, "-lelf", "-lptx", file], check=True, capture_output=True, text=True).stdout
    assert sorted(re.findall(r"\.sm_(\d+)a?\.(cubin|ptx)", listed)) == sorted(
        (str(one.arch), "cubin" if one.kind == "sass" else "ptx") for unit in fatbins(file) for one in unit
    )


def _cuobjdump() -> str | None:
    """NVIDIA's own reader: the toolkit's, or the one in Triton's wheel."""
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return shutil.which("cuobjdump") or (str(bundled) if bundled.is_file() else None)
