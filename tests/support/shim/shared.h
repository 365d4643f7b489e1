// Who may touch which byte of shared memory when, and the poison that it begins with.
//
// The compiler calls a hook before each access to memory (-fsanitize=thread, with hooks of our own). Two
// accesses, one of them a write, are ordered if one thread makes both, if a barrier lies between, or, within a
// warp, a __syncwarp(); others are a race, in whatever order they come here. (Shuffles order no memory: CUDA
// C++ Programming Guide, "Warp Shuffle Functions".) Kernels whose threads meet in other ways are for clocks.h.
#pragma once

#include "clocks.h"

namespace shim {

inline void order_block(Block &block) {
  if (tracked) return meet(block);
  next_stamp();
  limit = stamp << WHO;
}

inline void order_warp() {
  const size_t warp = size_t(self->number / WARP);
  if (tracked) {
    std::vector<Thread *> lanes;
    for (size_t i = 0; i < WARP; i++) lanes.push_back(&self->block->threads[warp * WARP + i]);
    return meet(lanes);
  }
  next_stamp();
  warp_stamp[warp] = stamp;
}

inline int warp_of(unsigned who) { return who < OF_WARP ? int(who / WARP) : who < COPYING ? int(who - OF_WARP) : -1; }

inline bool ordered(unsigned cell) {
  const unsigned who = cell & WHO_MASK, me = unsigned(self->number);
  if (cell < limit || who == me) return true;
  return warp_of(who) == int(me / WARP) && cell >> WHO < warp_stamp[me / WARP];
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
  if (at == NOT_SHARED) return tracked ? track_local(address, bytes, "reads", code) : void();
  if (tracked) return track_read(at, bytes, code);
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
  if (at == NOT_SHARED) return tracked ? track_local(address, bytes, "writes", code) : void();
  if (tracked) return track_write(at, bytes, code);
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
  const unsigned cell = copying ? LASTING | COPYING : stamp << WHO | unsigned(self->number);
  for (int i = 0; i < bytes; i++) written[at + i] = cell;
}

// Shared memory as blocks find it: of every byte pattern the one that is a NaN in all floats.
inline void begin_memory() {
  memset(__start_shim_shared, 0xff, static_bytes());
  for (size_t i = 0; i < blocks.size(); i++) memset(dynamic_memory + i * MOST_SHARED, 0xff, dynamic_bytes);
  next_stamp();
  limit = stamp << WHO;
  if (tracked) begin_tracking();
}

}  // namespace shim
