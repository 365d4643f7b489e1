// What the run time knows of the launch in progress: its threads, warps and place, and how it fails.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "fibers.h"

namespace shim {

constexpr int WARP = 32, GROUP = 128, MOST_THREADS = 1024, MOST_CLUSTER = 8;

struct Index {
  unsigned x, y, z;
};

struct Copy {
  unsigned char *to;
  int size;
  unsigned group;
  unsigned char bytes[16];
};

struct Block;
struct Team;
struct Barrier;

enum class State { ready, waits, done };
enum class At { nothing, team, block, cluster, barrier, named };

// Registers that an asynchronous product will write.
struct Busy {
  const char *begin, *end;
};

// A store of a box from shared memory, which reads it at the wait for that and then holds it until the other.
struct Store {
  unsigned long map[16];
  size_t from;
  int x, y, z, line;
  unsigned group;
  bool committed, read;
  std::vector<unsigned char> bytes;
};

struct Thread {
  Context context;
  State state;
  Block *block;
  int number;  // in its block
  At at;       // what it waits for
  const char *what;  // the call in which it waits or copies, and the line of that, or 0
  int line;
  const Team *team;        // with which it waits
  const Barrier *barrier;  // at which it waits for the end of a phase of this parity,
  int parity;              // or the number of a named barrier
  std::vector<Copy> copies;  // asynchronous ones in flight
  unsigned group;            // the group that the next copy belongs to
  unsigned *seen;            // clocks.h
  unsigned fenced;           // when it last made its writes known to asynchronous readers
  std::vector<Store> stores;
  unsigned store_group;
  std::vector<Busy> busy;
  unsigned fence, commit, touched;  // of products: when each last was, or when sums came back
};

struct Lane {
  const void *in;
  void *out;
};

// Threads that make some calls together: a warp or a warpgroup.
struct Team {
  int size, lanes, arrived;
  Thread *first;  // to arrive
  Lane lane[GROUP];
};

struct Named {
  int want, come;
  int of_warp[MOST_THREADS / WARP];
  Thread *first;
  std::vector<unsigned> clock;
  std::vector<Thread *> waiting;
};

struct Block {
  unsigned rank;  // in its cluster
  Index index;
  std::vector<Thread> threads;
  std::vector<Team> warps, groups;
  Named named[16];
};

static std::vector<Block> blocks;  // those that run together
static Stacks stacks;
static Context scheduler;
static Thread *self;  // nullptr while the scheduler runs

// The first failure ends a launch. Further: what was touched, and by which code or line, if the text is silent.
struct Failure {
  char text[1000];
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
