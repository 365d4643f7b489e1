// Shared memory: its limits, where it lies, and what is known of each byte of it.
//
// For each byte cells remember the last write and the reads, each a stamp and who did it. Stamps grow when
// threads meet. Who may touch which byte when is for shared.h and clocks.h to say.
#pragma once

#include <algorithm>
#include <cstring>

#include "state.h"

extern "C" {
// The linker makes these for the section. `runtime.cpp` is linked last, so the guard ends it.
extern unsigned char __start_shim_shared[] __attribute__((visibility("hidden")));
extern unsigned char shim_guard[];
extern unsigned char *shim_dynamic;
}

namespace shim {

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": what a block has without
// asking, and what the largest devices (9.0) give one that asks.
constexpr size_t MOST_STATIC = 48 << 10, MOST_SHARED = 227 << 10, GUARD = 1024;
constexpr size_t CELLS = MOST_STATIC + MOST_CLUSTER * MOST_SHARED;

alignas(1024) static unsigned char dynamic_memory[MOST_CLUSTER * MOST_SHARED];
static size_t dynamic_bytes;

inline size_t static_bytes() { return size_t(shim_guard - __start_shim_shared); }

// A cell is a stamp and, in its low bits, a thread, several of a warp, or several of several warps. Of
// writes there are others: by loads that ended at a barrier, and three that last, with the largest stamp.
constexpr unsigned WHO = 11, WHO_MASK = (1 << WHO) - 1, OF_WARP = MOST_THREADS, OF_BLOCK = 2047;
constexpr unsigned LOADED = MOST_THREADS, IS_BARRIER = 2044, LOADING = 2045, COPYING = 2046;
constexpr unsigned MOST_STAMPS = 1u << (32 - WHO), LASTING = (MOST_STAMPS - 1) << WHO;

static unsigned written[CELLS], readers[CELLS];
static unsigned stamp, limit;  // cells below `limit` are from before the last barrier
static unsigned warp_stamp[MOST_THREADS / WARP];
static bool tracked;  // whether threads may meet in other ways than barriers of the block and warps

void forget_clocks();

// All that was is forgotten when stamps are used up: a race may be missed then, and none is made up.
inline void next_stamp() {
  if (++stamp < MOST_STAMPS - 1) return;
  for (unsigned &cell : written) cell = cell >= LASTING ? cell : 0;
  memset(readers, 0, sizeof readers);
  memset(warp_stamp, 0, sizeof warp_stamp);
  stamp = 1, limit = 1 << WHO;
  if (tracked) forget_clocks();
}

// -- places ----------------------------------------------------------------------------
inline unsigned rank_of(size_t at) { return at < MOST_STATIC ? 0 : unsigned((at - MOST_STATIC) / MOST_SHARED); }

inline unsigned char *memory_at(size_t at) {
  return at < MOST_STATIC ? __start_shim_shared + at : dynamic_memory + (at - MOST_STATIC);
}

struct Where {
  char text[64];
  explicit Where(size_t at) {
    if (at < MOST_STATIC) snprintf(text, sizeof text, "byte %zu of static shared memory", at);
    else snprintf(text, sizeof text, "byte %zu of dynamic shared memory", (at - MOST_STATIC) % MOST_SHARED);
  }
};

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
  return MOST_STATIC + size_t(p - dynamic_memory);
}

// -- failures ----------------------------------------------------------------------------
struct Name {
  char text[40];
  explicit Name(unsigned who) {
    if (who < OF_WARP) snprintf(text, sizeof text, "thread %u", who);
    else if (who == OF_BLOCK) snprintf(text, sizeof text, "threads of several warps");
    else snprintf(text, sizeof text, "threads of warp %u", who - OF_WARP);
  }
};

[[noreturn]] inline void die_of_race(size_t at, const char *does, const char *end, const void *code) {
  note_place(code);
  die("race in shared memory: thread %d %s %s, which %s", self->number, does, Where(at).text, end);
}

// An access is named by the first byte that is wrong.
[[noreturn]] inline void die_of_race(size_t at, const char *does, const char *did, unsigned who, const void *code) {
  if (who == COPYING) die_of_race(at, does, "a copy_async still fills", code);
  char end[100];
  snprintf(end, sizeof end, "%s %s with no barrier between", Name(who).text, did);
  die_of_race(at, does, end, code);
}

}  // namespace shim
