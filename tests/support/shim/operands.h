// Operands of wgmma in shared memory, as their descriptors say (PTX ISA, "Asynchronous warpgroup level matrix
// shared memory layout" and "Matrix descriptor format").
//
// A descriptor has, from bit 0, 16 and 32, 14 bits of a start address, a leading and a stride byte offset, each
// without its low 4 bits; a base offset in bits 49 to 51 and a swizzle in bits 62 and 63. With pieces of 16
// bytes, rows of S bytes (S the swizzle, 16 for none), LBO and SBO the offsets:
//   along k:      row r, piece p: r % 8 rows, r / 8 times SBO, and p pieces (without swizzle p times LBO)
//   along m or n: piece p of 8 elements, row k: k % 8 rows, k / 8 times SBO, p % (S / 16) pieces and
//                 p / (S / 16) times LBO (without swizzle k / 8 times LBO, p times SBO)
#pragma once

#include "barriers.h"
#include "elements.h"
#include "matrix.h"
#include "tensor_map.h"

namespace shim {

struct Wgmma {
  Element a, b;
  bool a_along_m, b_along_n, from_registers;
};

struct Operand {
  bool used;
  size_t start, leading, stride;  // addresses in the window of shared memory
  unsigned long swizzle;
  bool along_k;
  int bytes;  // of an element
};

// -- the window of 32-bit addresses ----------------------------------------------------------------
constexpr size_t WINDOW = 1024;

inline size_t static_window() { return WINDOW + (dynamic_bytes + 1023) / 1024 * 1024; }

inline unsigned shared_address_of(size_t at) {
  if (at < MOST_STATIC) return unsigned(static_window() + at);
  return unsigned(WINDOW + (at - MOST_STATIC) % MOST_SHARED);
}

inline size_t cell_of_address(size_t address) {
  if (address >= static_window() && address - static_window() < static_bytes()) return address - static_window();
  if (address < WINDOW || address - WINDOW >= MOST_SHARED)
    die("thread %d multiplies what lies at %#zx, which is beyond shared memory", self->number, address);
  return cell_of(shim_dynamic + address - WINDOW, 16, nullptr);
}

// -- descriptors ------------------------------------------------------------------------------------
inline Operand operand_of(unsigned long descriptor, int bytes, bool along_mn, int rows, const char *name,
                          const char *which) {
  static constexpr unsigned long SWIZZLES[] = {0, 128, 64, 32};
  const auto field = [&](int bit) { return size_t(descriptor >> bit & 0x3fff) << 4; };
  const Operand found = {true, field(0), field(16), field(32), SWIZZLES[descriptor >> 62], !along_mn, bytes};
  const auto refuse = [&](const char *why) {
    die("%s on line %d: the descriptor of %s %s", name, self->line, which, why);
  };
  if (descriptor >> 49 & 7) refuse("has a base offset, which is 0 where patterns begin at multiples of their size");
  if ((descriptor & ~0xc00e3fff3fff3ffful) != 0) refuse("has bits that mean nothing");
  if (found.swizzle && found.start >> 7 & (found.swizzle / 16 - 1))
    refuse(found.swizzle == 128 ? "starts in the middle of a pattern of 1024 bytes"
                                : "starts in the middle of a pattern");
  if (found.start < WINDOW) refuse("starts below shared memory");
  if (rows > 8 && found.stride == 0 && found.along_k) refuse("has a stride of 0");
  return found;
}

// The address of a piece of 16 bytes: of row r, piece p along k, or of row k, piece p along m or n.
inline size_t address_of_piece(const Operand &x, int row, int piece) {
  const size_t r = size_t(row), p = size_t(piece), line = x.swizzle ? x.swizzle : 16, pieces = line / 16;
  size_t at = x.start + r % 8 * line;
  if (x.along_k) at += r / 8 * x.stride + p * (x.swizzle ? 16 : x.leading);
  else if (x.swizzle) at += r / 8 * x.stride + p % pieces * 16 + p / pieces * x.leading;
  else at += r / 8 * x.leading + p * x.stride;
  return swizzled(at, x.swizzle);
}

// Visits each piece of rows from `first`, by its cell: rows of m or n, whichever way they lie.
template <class Visit>
void each_unit(const Operand &x, int first, int count, Visit visit) {
  if (x.along_k) {
    for (int row = first; row < first + count; row++)
      for (int piece = 0; piece < 2; piece++) visit(cell_of_address(address_of_piece(x, row, piece)));
  } else {
    for (int k = 0; k < 32 / x.bytes; k++)
      for (int piece = first / 8; piece < (first + count) / 8; piece++)
        visit(cell_of_address(address_of_piece(x, k, piece)));
  }
}

// Calls put(row of m or n, place along k, value) for each element.
template <class Sum, class Put>
void read_operand(const Operand &x, const Element &element, int rows, Put put) {
  const int per = 16 / x.bytes;
  const int lines = x.along_k ? rows : 32 / x.bytes, pieces = x.along_k ? 2 : rows / per;
  for (int line = 0; line < lines; line++)
    for (int piece = 0; piece < pieces; piece++) {
      const unsigned char *const from = memory_at(cell_of_address(address_of_piece(x, line, piece)));
      for (int i = 0; i < per; i++) {
        const Sum value = value_of<Sum>(element, from + i * x.bytes);
        if (x.along_k) put(line, piece * per + i, value);
        else put(piece * per + i, line, value);
      }
    }
}

}  // namespace shim
