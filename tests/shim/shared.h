// Shared memory: its limits, its poison, and who may touch which byte when.
//
// The compiler calls a hook before each access to memory (-fsanitize=thread, with hooks of our own). For
// each byte of shared memory two cells remember the last write and the reads, each a stamp and who did it.
// Stamps grow at barriers. Two accesses, one of them a write, are ordered if one thread makes both, if a
// barrier lies between, or, within a warp, a __syncwarp(); others are a race, in whatever order they come
// here. (Shuffles order no memory: CUDA C++ Programming Guide, "Warp Shuffle Functions".)
#pragma once

#include <algorithm>
#include <cstring>

#include "state.h"

extern "C" {
// The linker makes these for the section. `runtime.cpp` is linked last, so the guard ends it.
extern unsigned char __start_shim_shared[] __attribute__((visibility("hidden")));
extern unsigned char shim_guard[];
extern unsigned char shim_dynamic[];
}

namespace shim {

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": what a block has without
// asking, and what the largest devices (9.0) give one that asks.
constexpr size_t MOST_STATIC = 48 << 10, MOST_SHARED = 227 << 10, GUARD = 1024;

static size_t dynamic_bytes;

inline size_t static_bytes() { return size_t(shim_guard - __start_shim_shared); }

// A cell is a stamp and, in its low bits, a thread, several of a warp, or several of several warps.
constexpr unsigned WHO = 11, WHO_MASK = (1 << WHO) - 1, OF_WARP = MOST_THREADS, COPYING = 2046, OF_BLOCK = 2047;
constexpr unsigned MOST_STAMPS = 1u << (32 - WHO);

static unsigned written[MOST_STATIC + MOST_SHARED], readers[MOST_STATIC + MOST_SHARED];
static unsigned stamp, limit;  // cells below `limit` are from before the last barrier
static unsigned warp_stamp[MOST_THREADS / WARP];

inline void next_stamp() {
  if (++stamp < MOST_STAMPS - 1) return;
  memset(written, 0, sizeof written);
  memset(readers, 0, sizeof readers);
  memset(warp_stamp, 0, sizeof warp_stamp);
  stamp = 1;
}

inline void order_block() {
  next_stamp();
  limit = stamp << WHO;
}

inline void order_warp(int warp) {
  next_stamp();
  warp_stamp[warp] = stamp;
}

inline int warp_of(unsigned who) { return who < OF_WARP ? int(who / WARP) : who < COPYING ? int(who - OF_WARP) : -1; }

inline bool ordered(unsigned cell) {
  const unsigned who = cell & WHO_MASK, me = unsigned(self->number);
  if (cell < limit || who == me) return true;
  return warp_of(who) == int(me / WARP) && cell >> WHO < warp_stamp[me / WARP];
}

struct Name {
  char text[40];
  explicit Name(unsigned who) {
    if (who < OF_WARP) snprintf(text, sizeof text, "thread %u", who);
    else if (who == OF_BLOCK) snprintf(text, sizeof text, "threads of several warps");
    else snprintf(text, sizeof text, "threads of warp %u", who - OF_WARP);
  }
};

// An access is named by the first byte that is wrong.
[[noreturn]] inline void die_of_race(size_t at, const char *does, const char *did, unsigned who, const void *code) {
  const bool is_static = at < MOST_STATIC;
  char which[64], ends[100];
  snprintf(which, sizeof which, "byte %zu of %s shared memory", is_static ? at : at - MOST_STATIC,
           is_static ? "static" : "dynamic");
  if (who == COPYING) snprintf(ends, sizeof ends, "a copy_async still fills");
  else snprintf(ends, sizeof ends, "%s %s with no barrier between", Name(who).text, did);
  note_place(code);
  die("race in shared memory: thread %d %s %s, which %s", self->number, does, which, ends);
}

[[noreturn]] inline void die_of_bounds(const char *kind, size_t at, int bytes, size_t most, const void *code) {
  note_place(code);
  die("thread %d touches %d bytes at byte %zu of %s shared memory, which has %zu", self->number, bytes, at, kind, most);
}

constexpr size_t NOT_SHARED = ~size_t(0);

// The first cell of an access, or NOT_SHARED.
inline size_t cell_of(const void *address, int bytes, const void *code) {
  const unsigned char *p = static_cast<const unsigned char *>(address);
  const size_t fixed = size_t(p - __start_shim_shared), loose = size_t(p - shim_dynamic);
  if (fixed < static_bytes() + GUARD) {
    if (fixed + size_t(bytes) > static_bytes()) die_of_bounds("static", fixed, bytes, static_bytes(), code);
    return fixed;
  }
  if (loose >= MOST_SHARED) return NOT_SHARED;
  if (loose + size_t(bytes) > dynamic_bytes) die_of_bounds("dynamic", loose, bytes, dynamic_bytes, code);
  return MOST_STATIC + loose;
}

// What becomes of the readers of a byte when this thread reads it as well.
inline unsigned with_me(unsigned cell) {
  const unsigned me = unsigned(self->number), now = stamp << WHO;
  if (cell >= limit && (cell & WHO_MASK) == OF_BLOCK) return cell;
  if (ordered(cell)) return now | me;
  return now | (warp_of(cell & WHO_MASK) == int(me / WARP) ? OF_WARP + me / WARP : OF_BLOCK);
}

__attribute__((noinline)) inline void read_each(size_t at, int bytes, const void *code) {
  for (size_t i = at; i < at + size_t(bytes); i++) {
    if (!ordered(written[i])) die_of_race(i, "reads", "wrote", written[i] & WHO_MASK, code);
    readers[i] = with_me(readers[i]);
  }
}

// Notes a read. The bytes of one access mostly share their history, which then is looked at once.
inline void on_read(const void *address, int bytes, const void *code) {
  const size_t at = cell_of(address, bytes, code);
  if (at == NOT_SHARED) return;
  unsigned latest = 0, differ = 0;
  const unsigned first = readers[at];
  for (int i = 0; i < bytes; i++) {
    latest = std::max(latest, written[at + i]);
    differ |= readers[at + i] ^ first;
  }
  if (latest >= limit || differ) return read_each(at, bytes, code);
  const unsigned cell = with_me(first);
  for (int i = 0; cell != first && i < bytes; i++) readers[at + i] = cell;
}

inline void on_write(const void *address, int bytes, const void *code) {
  const size_t at = cell_of(address, bytes, code);
  if (at == NOT_SHARED) return;
  unsigned latest = 0;
  for (int i = 0; i < bytes; i++) latest = std::max(latest, std::max(written[at + i], readers[at + i]));
  for (size_t i = at; latest >= limit && i < at + size_t(bytes); i++) {
    if (!ordered(written[i])) die_of_race(i, "writes", "wrote", written[i] & WHO_MASK, code);
    if (!ordered(readers[i])) die_of_race(i, "writes", "read", readers[i] & WHO_MASK, code);
  }
  for (int i = 0; i < bytes; i++) written[at + i] = stamp << WHO | unsigned(self->number);
}

// From its issue until a wait, nobody may touch the bytes that a copy fills, on no side of a barrier.
inline void set_copying(const void *address, int bytes, bool copying) {
  const size_t at = cell_of(address, bytes, nullptr);
  const unsigned cell = copying ? (MOST_STAMPS - 1) << WHO | COPYING : stamp << WHO | unsigned(self->number);
  for (int i = 0; i < bytes; i++) written[at + i] = cell;
}

// Shared memory as a block finds it: of every byte pattern the one that is a NaN in all floats.
inline void begin_block() {
  memset(__start_shim_shared, 0xff, static_bytes());
  memset(shim_dynamic, 0xff, dynamic_bytes);
  order_block();
}

}  // namespace shim
