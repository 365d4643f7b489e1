"""Fragments are what the vendors' manuals say, element by element, and bijections but for broadcasts."""

from __future__ import annotations

import copy
import re
import tomllib

import pytest

from portmm.errors import TargetError
from portmm.target import target
from portmm.target.fragment import Fragment, check_fragment

HELD = [
    (isa, name) for isa in target.names_of("device", "isa") for name in target.load_isa(isa).fragments
]  # those of a base too, as they are looked up
MATRIX = ("mma_sm75", "mma_sm80", "mma_sm89", "mfma_cdna2", "mfma_cdna3", "wmma_rdna3", "dpas_xehpg", "dpas_xehpc",
          "simdgroup_apple")  # fmt: skip


def held(isa: str, name: str) -> Fragment:
    return target.load_isa(isa).fragments[name]


# -- as published ------------------------------------------------------------
#
# Of a lane and element i of it, the row and the column, in the notation of each manual; nothing here is computed
# from the rows of a file. PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and its neighbours:
# groupID is lane >> 2, threadID_in_group lane % 4.


def _ptx_a(m: int, bits: int):
    """A of mma.m16n8k* and m8n8k16: 32 bits of a row, first eight rows further down, then along k."""
    per = 32 // bits  # elements of a register

    def place(lane: int, i: int) -> tuple[int, int]:
        register, within = divmod(i, per)
        group, thread = lane >> 2, lane % 4
        row = group + (8 if m == 16 and register in (1, 3) else 0)
        return row, thread * per + within + (4 * per if m == 16 and register >= 2 else 0)

    return place


def _ptx_b(bits: int):
    """B of mma.m*n8k*: 32 bits of a column, the second register further along k."""
    per = 32 // bits

    def place(lane: int, i: int) -> tuple[int, int]:
        register, within = divmod(i, per)
        return lane % 4 * per + within + register * 4 * per, lane >> 2

    return place


def _ptx_c(lane: int, i: int) -> tuple[int, int]:
    """C and D of mma.m16n8k* (c0 to c3) and of m8n8k16 (c0, c1)."""
    return (lane >> 2) + (0 if i < 2 else 8), lane % 4 * 2 + (i & 1)


def _wgmma_d(lane: int, i: int) -> tuple[int, int]:
    """D of wgmma.m64nN: row by the warp of the warpgroup, lane / 32."""
    warp, own = divmod(lane, 32)
    return 16 * warp + own // 4 + 8 * (i // 2 % 2), own % 4 * 2 + i % 2


def _ldmatrix(lane: int, i: int) -> tuple[int, int]:
    """Row j of matrix x is at the address of lane 8 x + j; a lane receives two elements of row lane / 4 of each."""
    matrix, half = divmod(i, 2)
    return 8 * matrix + lane // 4, lane % 4 * 2 + half


def _ldmatrix_trans(lane: int, i: int) -> tuple[int, int]:
    """With .trans a lane receives of column lane / 4 the elements of two rows."""
    matrix, half = divmod(i, 2)
    return 8 * matrix + lane % 4 * 2 + half, lane // 4


def _mfma_a(m: int, per: int):
    """AMD Matrix Instruction Calculator: A i is lane % m, A k is per * floor(lane / m) + its number."""
    return lambda lane, i: (lane % m, per * (lane // m) + i)


def _mfma_b(m: int, per: int):
    return lambda lane, i: (per * (lane // m) + i, lane % m)


def _mfma_d16(lane: int, i: int) -> tuple[int, int]:
    """i: 4 * floor(lane / 16) + GPR % 4, j: lane % 16."""
    return 4 * (lane // 16) + i % 4, lane % 16


def _mfma_d32(lane: int, i: int) -> tuple[int, int]:
    """i: 8 * floor(GPR / 4) % 32 + 4 * floor(lane / 32) + GPR % 4, j: lane % 32."""
    return 8 * (i // 4) % 32 + 4 * (lane // 32) + i % 4, lane % 32


def _simdgroup(lane: int, i: int) -> tuple[int, int]:
    """As kernels of MLX compute it from a lane's quad."""
    quad = lane // 4
    return (quad & 4) + lane // 2 % 4, (quad & 2) * 2 + lane % 2 * 2 + i


PUBLISHED = {
    ("mma_sm75", "a_16x8_b16"): _ptx_a(16, 16), ("mma_sm75", "b_8x8_b16"): _ptx_b(16),
    ("mma_sm75", "a_8x16_b8"): _ptx_a(8, 8), ("mma_sm75", "b_16x8_b8"): _ptx_b(8),
    ("mma_sm75", "sums_16x8"): _ptx_c, ("mma_sm75", "sums_8x8"): _ptx_c,
    ("mma_sm80", "a_16x16_b16"): _ptx_a(16, 16), ("mma_sm80", "b_16x8_b16"): _ptx_b(16),
    ("mma_sm80", "a_16x32_b8"): _ptx_a(16, 8), ("mma_sm80", "b_32x8_b8"): _ptx_b(8),
    ("mma_sm80", "a_16x8_b32"): _ptx_a(16, 32), ("mma_sm80", "b_8x8_b32"): _ptx_b(32),
    ("wgmma", "sums_64x8"): _wgmma_d,
    **{("mma_sm75", f"ldmatrix_x{n}"): _ldmatrix for n in (1, 2, 4)},
    **{("mma_sm75", f"ldmatrix_trans_x{n}"): _ldmatrix_trans for n in (1, 2, 4)},
    **{(isa, name): place for isa in ("mfma_cdna2", "mfma_cdna3") for name, place in {
        "a_16x16_b16": _mfma_a(16, 4), "b_16x16_b16": _mfma_b(16, 4), "a_32x8_b16": _mfma_a(32, 4),
        "b_8x32_b16": _mfma_b(32, 4), "a_16x4_b32": _mfma_a(16, 1), "b_4x16_b32": _mfma_b(16, 1),
        "a_32x2_b32": _mfma_a(32, 1), "b_2x32_b32": _mfma_b(32, 1), "sums_16x16": _mfma_d16, "sums_32x32": _mfma_d32,
    }.items()},
    ("mfma_cdna2", "a_16x16_b8"): _mfma_a(16, 4), ("mfma_cdna2", "b_16x16_b8"): _mfma_b(16, 4),
    ("mfma_cdna2", "a_32x8_b8"): _mfma_a(32, 4), ("mfma_cdna2", "b_8x32_b8"): _mfma_b(32, 4),
    ("mfma_cdna3", "a_16x32_b8"): _mfma_a(16, 8), ("mfma_cdna3", "b_32x16_b8"): _mfma_b(16, 8),
    ("mfma_cdna3", "a_32x16_b8"): _mfma_a(32, 8), ("mfma_cdna3", "b_16x32_b8"): _mfma_b(32, 8),
    # RDNA 3, wavefronts of 32: A i and B j are lane % 16, whatever the half; D i is 2 * GPR + floor(lane / 16).
    ("wmma_rdna3", "a_16x16"): lambda lane, i: (lane % 16, i),
    ("wmma_rdna3", "b_16x16"): lambda lane, i: (i, lane % 16),
    ("wmma_rdna3", "sums_16x16"): lambda lane, i: (2 * i + lane // 16, lane % 16),
    # cl_intel_subgroup_matrix_multiply_accumulate: component i of A is row i, of which a work item has as many bytes
    # as the row has work items; component i of B is a word of neighbours along k of the work item's column.
    ("dpas_xehpg", "a_8x16_b16"): lambda lane, i: (i // 2, 2 * lane + i % 2),
    ("dpas_xehpg", "a_8x32_b8"): lambda lane, i: (i // 4, 4 * lane + i % 4),
    ("dpas_xehpg", "b_16x8_b16"): lambda lane, i: (i, lane), ("dpas_xehpg", "b_32x8_b8"): lambda lane, i: (i, lane),
    ("dpas_xehpc", "a_8x16_b16"): lambda lane, i: (i, lane),
    ("dpas_xehpc", "a_8x32_b8"): lambda lane, i: (i // 2, 2 * lane + i % 2),
    ("dpas_xehpc", "b_16x16_b16"): lambda lane, i: (i, lane), ("dpas_xehpc", "b_32x16_b8"): lambda lane, i: (i, lane),
    ("dpas_xehpg", "sums_8x8"): lambda lane, i: (i, lane), ("dpas_xehpc", "sums_8x16"): lambda lane, i: (i, lane),
    ("simdgroup_apple", "matrix_8x8"): _simdgroup,
}  # fmt: skip


@pytest.mark.parametrize("key", PUBLISHED, ids="-".join)
def test_as_published(key):
    fragment, place = held(*key), PUBLISHED[key]
    for lane in range(fragment.lanes):
        for i in range(fragment.elements):
            assert fragment.place(lane, i) == place(lane, i), (lane, i)


def test_every_fragment_is_published():
    own = {(isa, name) for isa, name in HELD if name not in getattr(target.load_isa(isa).base, "fragments", {})}
    assert own == set(PUBLISHED)


# -- properties ----------------------------------------------------------------


@pytest.mark.parametrize(("isa", "name"), HELD, ids="-".join)
def test_a_bijection_but_for_broadcasts(isa, name):
    fragment = held(isa, name)
    places = [fragment.place(lane, i) for lane in range(fragment.lanes) for i in range(fragment.elements)]
    every = [(row, column) for row in range(fragment.rows) for column in range(fragment.columns)]
    assert sorted(places) == sorted(every * fragment.copies)
    if name[-1].isdigit() and "x" in name and not name.startswith("ldmatrix"):
        rows, columns = re.search(r"(\d+)x(\d+)", name).groups()
        assert (fragment.rows, fragment.columns) == (int(rows), int(columns))
    assert fragment.copies == (2 if isa == "wmma_rdna3" and name != "sums_16x16" else 1)
    back = fragment.transposed
    assert [x[::-1] for x in places] == [
        back.place(lane, i) for lane in range(back.lanes) for i in range(back.elements)
    ]
    assert back.transposed == fragment
    # Lanes apart: those with one register's element of a column, or of a row.
    assert fragment.lane_rows == len({fragment.place(lane, 0)[0] for lane in range(fragment.lanes)})
    assert fragment.lane_columns == len({fragment.place(lane, 0)[1] for lane in range(fragment.lanes)})


@pytest.mark.parametrize("isa", MATRIX)
def test_atoms_have_fragments_of_their_shape(isa):
    for atom in target.load_isa(isa).atoms:
        a, b, sums = atom.a_fragment, atom.b_fragment, atom.acc_fragment
        assert (a.rows, b.columns, a.columns) == (sums.rows, sums.columns, b.rows) == (atom.m, atom.n, atom.k)
        assert {a.lanes, b.lanes, sums.lanes} == {target.load_isa(isa).warp}
        # Exactly as many multiply-adds as the instruction has: each element of a row meets those of a column once.
        assert a.elements * a.lanes == atom.m * atom.k * a.copies


def test_units_of_warpgroups():
    for atom in target.load_isa("wgmma").atoms:
        assert atom.a_fragment is atom.b_fragment is None
        assert atom.acc_fragment.lanes == 4 * target.load_isa("wgmma").warp
        assert atom.n % atom.acc_fragment.columns == 0


def test_ldmatrix_loads_what_mma_multiplies():
    """The matrices of ldmatrix, in order, are the words of a fragment: a lane holds of each the elements of a word."""
    for isa in ("mma_sm75", "mma_sm80"):
        for name, fragment in target.load_isa(isa).fragments.items():
            if fragment.load != "ldmatrix":
                continue
            per = 32 // int(name.rpartition("_b")[2])
            words = fragment.elements // per
            one, operand = held("mma_sm75", "ldmatrix_x1"), fragment if name[0] == "a" else fragment.transposed
            for word in range(words):
                at = [operand.place(lane, word * per) for lane in range(32)]
                row, column = at[0]
                # A lane's word is that of row lane / 4 of the matrix, which begins where lane 0 has its word.
                assert at == [(row + r, column + c // 2 * per) for r, c in (one.place(lane, 0) for lane in range(32))]


# -- malformed rows --------------------------------------------------------------

TABLE = """
[isa]
name = "invented"
title = "Invented"
base = "simt"
warp = 4
source = "a test"

[fragment.a_4x2]
lane = [[1, 0], [2, 0]]
register = [[0, 1]]

[fragment.b_2x4]
lane = [[0, 1], [0, 2]]
register = [[1, 0]]

[fragment.sums_4x4]
lane = [[0, 1], [0, 2]]
register = [[1, 0], [2, 0]]

[[atom]]
name = "invented_f16"
unit = "warp"
a = "f16"
b = "f16"
acc = "f32"
m = 4
n = 4
k = 2
a_fragment = "a_4x2"
b_fragment = "b_2x4"
acc_fragment = "sums_4x4"
a_type = "unsigned"
b_type = "unsigned"
acc_type = "float"
zero = ""
load_a = ""
load_b = ""
mac = ""
load_c = ""
store = ""
"""

WRONG = [
    (("fragment", "a_4x2", "lane"), [[1, 0], [3, 0]], r"a_4x2: bit 1 of lane adds \[3, 0\]; one of both is a power of"),
    (("fragment", "a_4x2", "lane"), [[1, 1], [2, 0]], r"bit 0 of lane adds \[1, 1\]"),
    (("fragment", "a_4x2", "lane"), [[1, 0], [-2, 0]], r"bit 1 of lane adds \[-2, 0\]"),
    (("fragment", "a_4x2", "lane"), [[1, 0], [1, 0]], r"bits add \[1, 1\] to the row; each of \[1, 2\] is added once"),
    (("fragment", "a_4x2", "register"), [[0, 2]], r"bits add \[2\] to the column; each of \[1\] is added once"),
    (("fragment", "a_4x2", "lane"), [[1, 0], [0, 0]], "a_fragment has 2 x 2 elements, of 4 x 2"),
    (("fragment", "a_4x2", "lane"), [[1, 0]], "a_fragment has 2 x 2 elements, of 4 x 2"),
    (("fragment", "a_4x2", "lane"), [1, 2], "field 'lane' must be"),
    (("fragment", "a_4x2", "lane"), [[1, 0, 0], [2, 0, 0]], "field 'lane' must be"),
    (("fragment", "a_4x2", "rows"), 4, "unknown field 'rows'; known are lane, load, register"),
    (("fragment", "a_4x2"), 7, "fragment a_4x2: expected a table, got 7"),
    (("fragment",), [], "fragment must be tables"),
    (("fragment", "sums_4x4", "register"), [[1, 0], [2, 0], [0, 4]], "acc_fragment has 4 x 8 elements, of 4 x 4"),
    (("atom", 0, "a_fragment"), "a_4x4", "a_fragment 'a_4x4' is no fragment; there are a_4x2, b_2x4, sums_4x4"),
    (("atom", 0, "a_fragment"), None, 'a unit of a "warp" has a_fragment, b_fragment, acc_fragment'),
    (("isa", "warp"), 8, "a_fragment has 4 lanes, a warp 8"),
    (("isa", "warp"), None, "a_fragment has 4 lanes, a warp 0"),
]


def changed(path, value):
    table = copy.deepcopy(tomllib.loads(TABLE))
    at = table
    for step in path[:-1]:
        at = at[step]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return table


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_malformed_rows_are_explained(path, value, message):
    with pytest.raises(TargetError, match=message):
        target.parse_isa(changed(path, value), "invented.toml")


def test_fragments_are_inherited():
    isa = target.parse_isa(tomllib.loads(TABLE), "invented.toml")
    assert isa.atoms[0].a_fragment == Fragment(((1, 0), (2, 0)), ((0, 1),))
    sm89 = target.load_isa("mma_sm89")
    assert sm89.fragments["sums_16x8"] is target.load_isa("mma_sm75").fragments["sums_16x8"]
    assert sm89.warp == 32


def test_an_isa_that_no_chip_lists_has_a_device_of_its_warps():
    found = target.described("mfma_cdna3")
    assert found.isas[0].name == "mfma_cdna3"
    assert found.device.warp == 64


def test_a_broadcast_is_a_bit_that_adds_nothing():
    fragment = check_fragment(Fragment(((1, 0), (0, 0)), ((0, 1),)), "here")
    assert (fragment.copies, fragment.rows, fragment.columns) == (2, 2, 2)
    assert fragment.place(0, 1) == fragment.place(2, 1) == (0, 1)
