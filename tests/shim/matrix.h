// Products of fragments that a warp holds together (PTX ISA, mma), and moves of 8x8 matrices of 16-bit
// elements between their rows in shared memory and fragments (ldmatrix, stmatrix).
//
// A register holds 4 bytes of one row: 1, 2 or 4 elements. For each type the manual's tables of fragments come
// to this, with g = lane / 4 and t = lane % 4, where a register has E elements and 4 E of them are a "chunk" of k:
//   A, register r, element e: row g + 8 (r % 2), column (r / 2) 4E + t E + e   (matrices of 8 rows: r is 0)
//   B, register r, element e: row r 4E + t E + e, column g
//   D, register r:            row g + 8 (r / 2), column 2 t + r % 2
#pragma once

#include "collectives.h"
#include "elements.h"

namespace shim {

struct Fragments {
  void *d;
  const unsigned *a, *b;
};

// Registers have no address that others know.
inline void check_registers(const char *what, int line, const void *p) {
  if (cell_of(p, 4, nullptr) != NOT_SHARED) die("%s on line %d: takes registers, not shared memory", what, line);
}

template <int ROWS, int REGISTERS, class A, class B, class D>
void multiply(Lane *lanes) {
  using Sum = typename A::Sum;
  constexpr int E = 4 / A::bytes, COLUMNS = 8, K = 4 * E * REGISTERS / (ROWS / 8);
  Sum a[ROWS * K], b[K * COLUMNS];
  D d[ROWS * COLUMNS];
  const auto of = [&](int lane) { return *static_cast<const Fragments *>(lanes[lane].in); };
  const auto each_of_d = [&](auto visit) {
    for (int lane = 0; lane < WARP; lane++)
      for (int r = 0; r < ROWS / 4; r++)
        visit(static_cast<D *>(of(lane).d)[r], d[(lane / 4 + 8 * (r / 2)) * COLUMNS + 2 * (lane % 4) + r % 2]);
  };
  for (int lane = 0; lane < WARP; lane++) {
    const int g = lane / 4, t = lane % 4;
    const Fragments mine = of(lane);
    for (int r = 0; r < REGISTERS; r++) {
      const int row = ROWS == 8 ? g : g + 8 * (r % 2), chunk = ROWS == 8 ? r : r / 2;
      for (int e = 0; e < E; e++)
        a[row * K + chunk * 4 * E + t * E + e] = A::value(reinterpret_cast<const char *>(mine.a + r) + e * A::bytes);
    }
    for (int r = 0; r < K / (4 * E); r++)
      for (int e = 0; e < E; e++)
        b[(r * 4 * E + t * E + e) * COLUMNS + g] = B::value(reinterpret_cast<const char *>(mine.b + r) + e * B::bytes);
  }
  each_of_d([](const D &held, D &placed) { placed = held; });
  add_product(d, a, b, ROWS, COLUMNS, K);
  each_of_d([](D &held, const D &placed) { held = placed; });
}

template <int ROWS, int REGISTERS, class A, class B, class D>
void mma(const char *what, int line, D *d, const unsigned *a, const unsigned *b) {
  const Fragments mine = {d, a, b};
  check_registers(what, line, d), check_registers(what, line, a), check_registers(what, line, b);
  collect(what, line, multiply<ROWS, REGISTERS, A, B, D>, &mine, nullptr);
}

// A row of 16 bytes of shared memory and the registers of one lane.
struct Row {
  void *row;
  unsigned *registers;
};

// Lane 8 i + j gives row j of matrix i. Element (r, c) is in register i of lane 4 r + c / 2, in half c % 2;
// with .trans rows and columns change places.
template <int COUNT, bool TRANSPOSED, bool STORE>
void move_matrices(Lane *lanes) {
  const auto of = [&](int lane) { return *static_cast<const Row *>(lanes[lane].in); };
  Thread *const warp = self - self->number % WARP, *const last = self;
  for (int from = 0; from < 8 * COUNT; from++) {
    const int i = from / 8;
    unsigned char *const row = static_cast<unsigned char *>(of(from).row);
    self = warp + from;
    if (STORE) on_write(row, 16, nullptr);
    else on_read(row, 16, nullptr);
    for (int x = 0; x < 8; x++) {
      const int r = TRANSPOSED ? x : from % 8, c = TRANSPOSED ? from % 8 : x;
      unsigned char *const half = reinterpret_cast<unsigned char *>(of(4 * r + c / 2).registers + i) + 2 * (c % 2);
      if (STORE) memcpy(row + 2 * x, half, 2);
      else memcpy(half, row + 2 * x, 2);
    }
  }
  self = last;
}

template <int COUNT, bool TRANSPOSED, bool STORE>
void matrices(const char *what, int line, void *row, unsigned *registers) {
  self->line = line;
  check_registers(what, line, registers);
  if (self->number % WARP < 8 * COUNT) {
    if (reinterpret_cast<uintptr_t>(row) % 16) die("%s on line %d: the address of a row is misaligned", what, line);
    if (cell_of(row, 16, nullptr) == NOT_SHARED) die("%s on line %d: a row is not in shared memory", what, line);
  }
  const Row mine = {row, registers};
  collect(what, line, move_matrices<COUNT, TRANSPOSED, STORE>, &mine, nullptr);
}

}  // namespace shim

#define SHIM_DEFINE(name, rows, registers, A, B, D)                                       \
  void mma_##name(D *d, const unsigned *a, const unsigned *b, int line) {                 \
    shim::mma<rows, registers, shim::A, shim::B, D>("mma_" #name, line, d, a, b);         \
  }
SHIM_FRAGMENTS(SHIM_DEFINE)
#undef SHIM_DEFINE

#define SHIM_DEFINE(suffix, count, transposed)                                                                  \
  void ldmatrix_##suffix(unsigned *to, const void *row, int line) {                                             \
    shim::matrices<count, transposed, false>("ldmatrix_" #suffix, line, const_cast<void *>(row), to);           \
  }                                                                                                             \
  void stmatrix_##suffix(void *row, const unsigned *from, int line) {                                           \
    shim::matrices<count, transposed, true>("stmatrix_" #suffix, line, row, const_cast<unsigned *>(from));      \
  }
SHIM_MATRICES(SHIM_DEFINE)
#undef SHIM_DEFINE
