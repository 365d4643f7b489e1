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
  int rows, registers;  // of D; of A
  const Element *of_a, *of_b;
  void *d;
  const unsigned *a, *b;
};

// Registers have no address that others know.
inline void check_registers(const char *what, int line, const void *p) {
  if (cell_of(p, 4, nullptr) != NOT_SHARED) die("%s on line %d: takes registers, not shared memory", what, line);
}

template <class Sum, class D>
void multiply(Lane *lanes) {
  const auto of = [&](int lane) { return *static_cast<const Fragments *>(lanes[lane].in); };
  const int rows = of(0).rows, registers = of(0).registers, columns = 8;
  const int per = 4 / of(0).of_a->bytes, depth = 4 * per * registers / (rows / 8);
  Sum a[16 * 32], b[32 * 8];
  D d[16 * 8];
  const auto each_of_d = [&](auto visit) {
    for (int lane = 0; lane < WARP; lane++)
      for (int r = 0; r < rows / 4; r++)
        visit(static_cast<D *>(of(lane).d)[r], d[(lane / 4 + 8 * (r / 2)) * columns + 2 * (lane % 4) + r % 2]);
  };
  for (int lane = 0; lane < WARP; lane++) {
    const int g = lane / 4, t = lane % 4;
    const Fragments mine = of(lane);
    const auto value = [&](const Element &element, const unsigned *from, int e) {
      return value_of<Sum>(element, reinterpret_cast<const char *>(from) + e * element.bytes);
    };
    for (int r = 0; r < registers; r++) {
      const int row = rows == 8 ? g : g + 8 * (r % 2), chunk = rows == 8 ? r : r / 2;
      for (int e = 0; e < per; e++) a[row * depth + chunk * 4 * per + t * per + e] = value(*mine.of_a, mine.a + r, e);
    }
    for (int r = 0; r < depth / (4 * per); r++)
      for (int e = 0; e < per; e++) b[(r * 4 * per + t * per + e) * columns + g] = value(*mine.of_b, mine.b + r, e);
  }
  each_of_d([](const D &held, D &placed) { placed = held; });
  add_product(d, a, b, rows, columns, depth);
  each_of_d([](D &held, const D &placed) { held = placed; });
}

inline void mma(const char *what, int line, const Fragments &mine) {
  check_registers(what, line, mine.d), check_registers(what, line, mine.a), check_registers(what, line, mine.b);
  collect(what, line, mine.of_a->whole ? multiply<unsigned, int> : multiply<double, float>, &mine, nullptr);
}

// A row of 16 bytes of shared memory and the registers of one lane.
struct Row {
  void *row;
  unsigned *registers;
  int count;
  bool transposed, store;
};

// Lane 8 i + j gives row j of matrix i. Element (r, c) is in register i of lane 4 r + c / 2, in half c % 2;
// with .trans rows and columns change places.
inline void move_matrices(Lane *lanes) {
  const auto of = [&](int lane) { return *static_cast<const Row *>(lanes[lane].in); };
  const Row first = of(0);
  Thread *const warp = self - self->number % WARP, *const last = self;
  for (int from = 0; from < 8 * first.count; from++) {
    const int i = from / 8;
    unsigned char *const row = static_cast<unsigned char *>(of(from).row);
    self = warp + from;
    if (first.store) on_write(row, 16, nullptr);
    else on_read(row, 16, nullptr);
    for (int x = 0; x < 8; x++) {
      const int r = first.transposed ? x : from % 8, c = first.transposed ? from % 8 : x;
      unsigned char *const half = reinterpret_cast<unsigned char *>(of(4 * r + c / 2).registers + i) + 2 * (c % 2);
      if (first.store) memcpy(row + 2 * x, half, 2);
      else memcpy(half, row + 2 * x, 2);
    }
  }
  self = last;
}

inline void matrices(const char *what, int line, const Row &mine) {
  self->line = line;
  check_registers(what, line, mine.registers);
  if (self->number % WARP < 8 * mine.count) {
    if (reinterpret_cast<uintptr_t>(mine.row) % 16)
      die("%s on line %d: the address of a row is misaligned", what, line);
    if (cell_of(mine.row, 16, nullptr) == NOT_SHARED) die("%s on line %d: a row is not in shared memory", what, line);
  }
  collect(what, line, move_matrices, &mine, nullptr);
}

}  // namespace shim

#define SHIM_DEFINE(name, rows, registers, A, B, D)                                                  \
  void mma_##name(D *d, const unsigned *a, const unsigned *b, int line) {                            \
    shim::mma("mma_" #name, line, {rows, registers, &shim::A, &shim::B, d, a, b});                   \
  }
SHIM_FRAGMENTS(SHIM_DEFINE)
#undef SHIM_DEFINE

#define SHIM_DEFINE(suffix, count, transposed)                                                                  \
  void ldmatrix_##suffix(unsigned *to, const void *row, int line) {                                             \
    shim::matrices("ldmatrix_" #suffix, line, {const_cast<void *>(row), to, count, transposed, false});         \
  }                                                                                                             \
  void stmatrix_##suffix(void *row, const unsigned *from, int line) {                                           \
    shim::matrices("stmatrix_" #suffix, line, {row, const_cast<unsigned *>(from), count, transposed, true});    \
  }
SHIM_MATRICES(SHIM_DEFINE)
#undef SHIM_DEFINE
