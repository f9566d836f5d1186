"""Finds matrix instructions of sm_90 whose operands in shared memory are not where they were put.

``HGMMA`` takes its operands by descriptors: where in shared memory they begin, and their strides.
In a kernel of one warp group these follow from the kernel alone. ptxas of Triton 3.6 makes some of
them of a register that holds something else by then (seen in a kernel with 84 such instructions,
255 registers and 208 bytes of spills): results are wrong, or an access is illegal, depending on
what was loaded. So: follow every register through the machine code, once around each loop, and tell
the instructions whose descriptors depend on a number that was loaded or on the thread.

Owns: the text of ``nvdisasm``. Does not know: Triton, kernels. Read next: ``../triton_offline.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

DATA, THREAD = "data", "thread"
Origins = frozenset[str]
NONE: Origins = frozenset()
_LINE = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(?:@!?(U?P\w+)\s+)?(\S+)\s*(.*?) ;")
_REGISTER = re.compile(r"\b(UR|UP|R|P)(\d+)\b")
_GIVES_NOTHING = (
    "ACQBULK", "ATOM", "BAR", "BRA", "BSSY", "BSYNC", "CCTL", "DEPBAR", "ERRBAR", "EXIT", "FENCE",
    "LDGDEPBAR", "LDGSTS", "MEMBAR", "NOP", "RED", "RET", "STG", "STS", "STSM", "SYNCS", "UTMA",
    "WARPGROUP", "WARPSYNC",
)  # fmt: skip
_LOADS = ("LDG", "LDS", "LDSM", "LD.", "ATOMG", "ATOMS")
_DOUBLES = ("CS2R", "UIADD3.64", "DADD", "DMUL", "DFMA", "DSETP", "F2F.F64", "I2F.F64")


@dataclass
class _Machine:
    """What registers, predicates and local memory are made of, by name or offset."""

    known: dict[str, Origins] = field(default_factory=dict)
    local: dict[int, Origins] = field(default_factory=dict)
    faults: dict[str, Origins] = field(default_factory=dict)

    def of(self, operands: Sequence[str]) -> Origins:
        """Of all registers in these operands."""
        found: set[str] = set()
        for operand in operands:
            for kind, number in _REGISTER.findall(operand):
                found |= self.known.get(kind + number, NONE)
        return frozenset(found)

    def put(self, first: str, count: int, origins: Origins, *, is_certain: bool) -> None:
        """Into ``count`` registers from ``first`` on; not certain: or they keep what they have."""
        kind, number = _REGISTER.fullmatch(first).groups()  # type: ignore[union-attr]
        for i in range(count):
            name = f"{kind}{int(number) + i}"
            self.known[name] = origins if is_certain else origins | self.known.get(name, NONE)

    def multiply(self, address: str, operation: str, operands: list[str]) -> None:
        """An HGMMA: of an operand in registers there is no descriptor."""
        text = ", ".join(operands)
        first = int(re.search(r"gdesc\[UR(\d+)\]", text)[1])  # type: ignore[index]
        begin = 2 if re.match(r"R\d+, R\d+,", text) else 0
        self.faults.pop(address, None)
        origins = self.of([f"UR{first + i}" for i in range(begin, 4)])
        if origins:
            self.faults[address] = origins
        columns = int(re.search(r"64x(\d+)x", operation)[1])  # type: ignore[index]
        self.put(operands[0], columns // 2, frozenset({DATA}), is_certain=True)


def descriptor_faults(code: str, *, num_warps: int) -> tuple[int, list[str]]:
    """How many ``HGMMA`` there are, and the addresses of those that are wrong.

    code: of ``nvdisasm -c``. num_warps: with more than 4, descriptors depend on the warp.
    """
    machine = _Machine()
    lines = list(_instructions(code))
    for _ in range(2):
        for address, guard, operation, operands in lines:
            _step(machine, address, guard, operation, operands)
    wrong = {DATA} if num_warps > 4 else {DATA, THREAD}
    faults = [address for address, origins in machine.faults.items() if origins & wrong]
    return sum(operation.startswith("HGMMA") for _, _, operation, _ in lines), faults


def _instructions(code: str) -> Iterator[tuple[str, str | None, str, list[str]]]:
    for line in code.splitlines():
        found = _LINE.match(line)
        if found is not None:
            address, guard, operation, rest = found.groups()
            yield address, guard, operation, [x.strip() for x in rest.split(",")] if rest else []


def _step(
    machine: _Machine, address: str, guard: str | None, operation: str, operands: list[str]
) -> None:
    if operation.startswith("HGMMA"):
        machine.multiply(address, operation, operands)
    elif operation.startswith("STL"):
        place = _local(operands[0])
        for i in range(_width(operation)):
            origins = machine.of([_next(operands[1], i)])
            machine.local[place + 4 * i] = origins
    elif operands and not operation.startswith(_GIVES_NOTHING):
        _assign(machine, guard, operation, operands)


def _assign(machine: _Machine, guard: str | None, operation: str, operands: list[str]) -> None:
    """Results come first: a register, then predicates; of a shuffle the other way round."""
    num_results = 2 if operation.startswith("SHFL") else 1
    while num_results < len(operands) and re.fullmatch(r"U?P(\d+|T)", operands[num_results]):
        if operation.startswith(("SEL", "USEL", "FSEL", "VOTE", "PLOP3", "UPLOP3")):
            break
        num_results += 1
    results = [x for x in operands[:num_results] if _REGISTER.fullmatch(x)]
    sources = operands[num_results:]
    if operation.startswith("LDL"):
        place = _local(sources[0])
        for i in range(_width(operation)):
            origins = machine.local.get(place + 4 * i, NONE)
            machine.put(_next(operands[0], i), 1, origins, is_certain=guard is None)
        return
    origins = machine.of(sources)
    if operation.startswith(("S2R", "S2UR")):
        origins = frozenset({THREAD}) if re.search("TID|LANE", operands[-1]) else NONE
    elif operation.startswith(_LOADS):
        origins = frozenset({DATA})
    elif operation.startswith("SHFL"):  # how a number that a warp shares is made uniform
        origins -= {THREAD}
    if guard is not None:
        origins |= machine.of([guard])
    for result in results:
        count = _width(operation) if "P" not in result else 1
        machine.put(result, count, origins, is_certain=guard is None)


def _width(operation: str) -> int:
    """Registers that it gives or takes."""
    if ".128" in operation or operation.endswith(".M88.4") or ".M88.4." in operation:
        return 4
    is_wide = ".64" in operation or ".WIDE" in operation or operation.startswith(_DOUBLES)
    return 2 if is_wide or operation.endswith((".M88.2", ".MT88.2")) else 1


def _local(operand: str) -> int:
    found = re.search(r"\[R1\+?(0x[0-9a-f]+)?\]", operand)
    return int(found[1], 16) if found and found[1] else 0


def _next(register: str, count: int) -> str:
    found = _REGISTER.match(register)
    return f"{found[1]}{int(found[2]) + count}" if found else register
