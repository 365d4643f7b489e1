// What threads of a block or a warp do together.
#pragma once

#include <cstring>

#include "device.h"
#include "shared.h"

namespace shim {

inline void wait() {
  self->state = State::waits;
  switch_to(self->context, scheduler);
}

using Work = void (*)(Lane (&lanes)[WARP]);

// Waits for all lanes of the warp; the last to come does the work for all.
inline void collect(const char *what, int line, Work work, const void *in, void *out) {
  Warp &warp = warps[size_t(self->number / WARP)];
  self->what = what, self->line = line, self->in_barrier = false;
  if (warp.lanes != WARP) die("%s on line %d: warp %d has %d lanes", what, line, self->number / WARP, warp.lanes);
  if (warp.arrived == 0) warp.first = self;
  const Thread &first = *warp.first;
  if (first.line != line || strcmp(first.what, what) != 0)
    die("lanes of a warp are at different calls: thread %d at %s on line %d, thread %d at %s on line %d", first.number,
        first.what, first.line, self->number, what, line);
  warp.lane[self->number % WARP] = {in, out};
  if (++warp.arrived < WARP) return wait();
  warp.arrived = 0;
  work(warp.lane);
  self->line = 0;
  Thread *const lanes = &threads[size_t(self->number / WARP * WARP)];
  for (int i = 0; i < WARP; i++) lanes[i].state = State::ready;
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
  const Work work = [](Lane(&lanes)[WARP]) {
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
  shim::self->what = "__syncthreads", shim::self->line = line, shim::self->in_barrier = true;
  shim::wait();
}

void __syncwarp(unsigned mask, int line) {
  if (mask != 0xffffffffu) shim::die("__syncwarp on line %d: the mask %#x leaves lanes out", line, mask);
  shim::collect(
      "__syncwarp", line, [](shim::Lane(&)[shim::WARP]) { shim::order_warp(shim::self->number / shim::WARP); }, nullptr,
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
