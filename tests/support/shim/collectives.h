// What threads of a block or a warp do together.
#pragma once

#include <cstring>

#include "device.h"
#include "shared.h"

namespace shim {

inline void wait(At at) {
  self->state = State::waits, self->at = at;
  switch_to(self->context, scheduler);
}

using Work = void (*)(Lane *lanes);

// Waits for all threads of a team; the last to come does the work for all.
inline void collect(const char *what, int line, Team &team, const char *word, Work work, const void *in, void *out) {
  const int number = self->number / team.size;
  self->what = what, self->line = line, self->team = &team;
  if (team.lanes != team.size) die("%s on line %d: %s %d has %d lanes", what, line, word, number, team.lanes);
  if (team.arrived == 0) team.first = self;
  const Thread &first = *team.first;
  if (first.line != line || strcmp(first.what, what) != 0)
    die("lanes of a %s are at different calls: thread %d at %s on line %d, thread %d at %s on line %d", word,
        first.number, first.what, first.line, self->number, what, line);
  team.lane[self->number % team.size] = {in, out};
  if (++team.arrived < team.size) return wait(At::team);
  team.arrived = 0;
  work(team.lane);
  self->line = 0;
  Thread *const lanes = &self->block->threads[size_t(number * team.size)];
  for (int i = 0; i < team.size; i++) lanes[i].state = State::ready;
}

inline void collect(const char *what, int line, Work work, const void *in, void *out) {
  collect(what, line, self->block->warps[size_t(self->number / WARP)], "warp", work, in, out);
}

template <class T>
struct Shuffled {
  T value;
  int from;  // the lane whose value is asked for
};

template <class T>
T shuffle(const char *what, int line, T value, int from) {
  const Shuffled<T> mine = {value, from};
  T result;
  const Work work = [](Lane *lanes) {
    const auto of = [&](int i) { return static_cast<const Shuffled<T> *>(lanes[i].in); };
    for (int i = 0; i < WARP; i++) *static_cast<T *>(lanes[i].out) = of(of(i)->from)->value;
  };
  collect(what, line, work, &mine, &result);
  return result;
}

inline int lane() { return self->number % WARP; }

inline int checked(const char *what, int line, int step) {
  if (step < 0 || step >= WARP) die("%s on line %d: %d is not a number from 0 to 31", what, line, step);
  return step;
}

}  // namespace shim

void __syncthreads(int line) {
  shim::self->what = "__syncthreads", shim::self->line = line;
  shim::wait(shim::At::block);
}

void __syncwarp(unsigned mask, int line) {
  if (mask != 0xffffffffu) shim::die("__syncwarp on line %d: the mask %#x leaves lanes out", line, mask);
  shim::collect(
      "__syncwarp", line, [](shim::Lane *) { shim::order_warp(); }, nullptr,
      nullptr);
}

float shuffle_xor_f32(float x, int mask, int line) {
  return shim::shuffle("shuffle_xor_f32", line, x, shim::lane() ^ shim::checked("shuffle_xor_f32", line, mask));
}

int shuffle_xor_s32(int x, int mask, int line) {
  return shim::shuffle("shuffle_xor_s32", line, x, shim::lane() ^ shim::checked("shuffle_xor_s32", line, mask));
}

// Lanes beyond the last keep their own value (PTX ISA, shfl.sync).
float shuffle_down_f32(float x, int delta, int line) {
  const int from = shim::lane() + shim::checked("shuffle_down_f32", line, delta);
  return shim::shuffle("shuffle_down_f32", line, x, from < shim::WARP ? from : shim::lane());
}

int shuffle_idx_s32(int x, int lane, int line) {
  return shim::shuffle("shuffle_idx_s32", line, x, shim::checked("shuffle_idx_s32", line, lane));
}
