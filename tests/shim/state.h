// What the run time knows of the launch in progress: its threads, warps and place, and how it fails.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "fibers.h"

namespace shim {

constexpr int WARP = 32, MOST_THREADS = 1024;

struct Index {
  unsigned x, y, z;
};

struct Copy {
  unsigned char *to;
  int size;
  unsigned group;
  unsigned char bytes[16];
};

enum class State { ready, waits, done };

struct Thread {
  Context context;
  State state;
  int number;
  bool in_barrier;   // what it waits for is the barrier of the block
  const char *what;  // the call in which it waits or copies, and the line of that, or 0
  int line;
  std::vector<Copy> copies;  // asynchronous ones in flight
  unsigned group;            // the group that the next copy belongs to
};

struct Lane {
  const void *in;
  void *out;
};

struct Warp {
  int lanes, arrived;
  Thread *first;  // to arrive
  Lane lane[WARP];
};

static std::vector<Thread> threads;
static std::vector<Warp> warps;
static Stacks stacks;
static Context scheduler;
static Thread *self;  // nullptr while the scheduler runs

// The first failure ends a launch. Further: what was touched, and by which code or line, if the text is silent.
struct Failure {
  char text[400];
  const void *address, *code;
  int line;
};
static Failure failure;

extern "C" Index threadIdx, blockIdx, blockDim, gridDim;
Index threadIdx, blockIdx, blockDim, gridDim;

inline bool failed() { return failure.text[0] != 0; }

// Notes who fails: code of the kernel, or, if null, the call that the thread is in.
inline void note_place(const void *code) {
  failure.code = code;
  if (!code && self) failure.line = self->line;
}

inline void note_arguments(const char *format, va_list arguments) {
  if (failed()) return;
  const int size = int(sizeof failure.text);
  int used = vsnprintf(failure.text, size, format, arguments);
  if (used >= size) used = size - 1;
  snprintf(failure.text + used, size - used, ", in block (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z);
}

// Notes a failure for the scheduler, which stops.
__attribute__((format(printf, 1, 2))) inline void note(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  note_arguments(format, arguments);
  va_end(arguments);
}

// Ends the launch from within a thread, whose stack is abandoned.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void die(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  note_arguments(format, arguments);
  va_end(arguments);
  for (;;) switch_to(self->context, scheduler);
}

}  // namespace shim
