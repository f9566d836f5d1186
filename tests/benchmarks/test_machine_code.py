"""Descriptors of matrix instructions, followed through made-up machine code."""

from __future__ import annotations

import pytest

from benchmarks.gpu.machine_code import descriptor_faults

GOOD = """
S2R R0, SR_TID.X
S2R R3, SR_CgaCtaId
LEA R8, R3, R8, 0x18
LDG.E.128 R20, desc[UR4][R74.64]
SHF.R.U32.HI R15, RZ, 0x4, R8
SGXT.U32 R6, R15, 0xe
IADD3 R14, P2, R6, 0x40, RZ
CS2R R22, SRZ
IADD3.X R22, R22, -0x7fffffe0, RZ, P2, !PT
R2UR UR42, R14
R2UR UR43, R22
R2UR UR40, R6
UMOV UR41, 0x40000040
HGMMA.64x32x16.F32 R24, gdesc[UR40].tnspB, R24
"""


def faults(code: str, num_warps: int = 4) -> list[str]:
    lines = [x for x in code.splitlines() if x]
    text = "\n".join(f"        /*{16 * i:04x}*/    {line} ;" for i, line in enumerate(lines))
    count, found = descriptor_faults(text, num_warps=num_warps)
    assert count == sum("HGMMA" in line for line in lines)
    return [lines[int(address, 16) // 16] for address in found]


def test_descriptors_of_constants_are_right() -> None:
    assert not faults(GOOD)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("CS2R R22, SRZ\n", ""),  # what was loaded still stands there
        ("CS2R R22, SRZ", "@P0 LDG.E.128 R20, desc[UR4][R74.64]"),
        ("CS2R R22, SRZ", "STL.64 [R1+0x8], R20\nLDL.64 R22, [R1+0x8]"),
        ("IADD3 R14, P2, R6, 0x40, RZ", "IADD3 R14, P2, R0, 0x40, RZ"),  # of the thread
        ("UMOV UR41, 0x40000040", "R2UR UR41, R21"),
        ("R2UR UR40, R6", "IMAD.MOV.U32 R6, RZ, RZ, R21\nR2UR UR40, R6"),
        ("UMOV UR41, 0x40000040", "ISETP.NE.U32.AND P1, PT, R20, RZ, PT\n@P1 R2UR UR41, R6"),
    ],
)
def test_a_register_that_holds_something_else(old: str, new: str) -> None:
    assert old in GOOD
    (found,) = faults(GOOD.replace(old, new))
    assert found.startswith("HGMMA")


def test_an_operand_in_registers_has_no_descriptor() -> None:
    code = GOOD.replace("R24, gdesc[UR40].tnspB, R24", "R24, R60, gdesc[UR40].tnspB, R24")
    code = code.replace("R2UR UR40, R6", "R2UR UR40, R21")
    assert not faults(code)
    assert faults(code.replace("R2UR UR42, R14", "R2UR UR42, R21"))


def test_with_more_warp_groups_descriptors_depend_on_the_warp() -> None:
    of_thread = GOOD.replace("IADD3 R14, P2, R6", "IADD3 R14, P2, R0")
    assert faults(of_thread)
    assert not faults(of_thread, num_warps=8)
    assert faults(GOOD.replace("CS2R R22, SRZ\n", ""), num_warps=8)
    shared = of_thread.replace(
        "S2R R0, SR_TID.X", "S2R R0, SR_TID.X\nSHFL.IDX PT, R0, R0, RZ, 0x1f"
    )
    assert not faults(shared), "a number of the whole warp"


def test_what_the_end_of_a_loop_leaves_is_seen_at_its_begin() -> None:
    assert faults("R2UR UR42, R50" + GOOD.replace("R2UR UR42, R14\n", "") + "MOV R50, R21\n")
