// Runs the blocks of a launch one after the other, with a fiber for each thread of a block.
#include <dlfcn.h>

#include <numeric>

#include "collectives.h"
#include "copies.h"
#include "faults.h"
#include "matrix.h"

extern "C" {
__attribute__((used, section("shim_shared"), aligned(1))) unsigned char shim_guard[shim::GUARD] = {1};
alignas(1024) unsigned char shim_dynamic[shim::MOST_SHARED];
void shim_call(void **arguments);
}

namespace shim {

using Order = std::vector<unsigned>;

static void **arguments_of_launch;

// 0: forwards, 1: backwards, others: shuffled.
static Order order_of(unsigned count, unsigned seed) {
  Order order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (seed == 0) return order;
  std::reverse(order.begin(), order.end());
  if (seed == 1) return order;
  for (unsigned i = count; i > 1; i--) {
    seed = seed * 1664525u + 1013904223u;  // Numerical Recipes, section 7.1
    std::swap(order[i - 1], order[(seed >> 8) % i]);
  }
  return order;
}

static void run_thread() {
  shim_call(arguments_of_launch);
  self->state = State::done;
  for (;;) switch_to(self->context, scheduler);
}

static void begin_threads() {
  const int count = int(threads.size());
  for (int i = 0; i < count; i++) {
    Thread &thread = threads[size_t(i)];
    thread.number = i, thread.state = State::ready, thread.line = 0, thread.group = 0;
    begin_at(thread.context, stacks.stack(i), Stacks::BYTES, run_thread);
  }
  for (int i = 0; i < int(warps.size()); i++) {
    warps[size_t(i)].lanes = std::min(WARP, count - WARP * i);
    warps[size_t(i)].arrived = 0;
  }
}

static void go_on(Thread &thread) {
  self = &thread;
  thread.line = 0;
  threadIdx = {unsigned(thread.number), 0, 0};
  switch_to(scheduler, thread.context);
  self = nullptr;
}

// Nobody can go on: all wait at one barrier, or it is an error.
static void pass_barrier() {
  const auto waits = [](const Thread &t) { return t.state == State::waits; };
  const auto in_barrier = [&](const Thread &t) { return waits(t) && t.in_barrier; };
  // A lane that waits for its warp is named before one that waits for the block.
  auto some = std::find_if(threads.begin(), threads.end(), [&](const Thread &t) { return waits(t) && !t.in_barrier; });
  if (some == threads.end()) some = std::find_if(threads.begin(), threads.end(), waits);
  const bool block = some->in_barrier;
  const size_t warp = size_t(some->number / WARP * WARP);
  for (size_t i = block ? 0 : warp; i < (block ? threads.size() : warp + WARP); i++) {
    const Thread &other = threads[i];
    if (other.state == State::done)
      return note("thread %d waits in %s on line %d, and thread %d has ended", some->number, some->what, some->line,
                  other.number);
    if (in_barrier(other) != block || other.line != some->line)
      return note("thread %d waits in %s on line %d, and thread %d in %s on line %d", some->number, some->what,
                  some->line, other.number, other.what, other.line);
  }
  for (Thread &thread : threads) thread.state = State::ready;
  order_block();
}

static bool all_done() {
  return std::all_of(threads.begin(), threads.end(), [](const Thread &t) { return t.state == State::done; });
}

// Copies that nobody waited for are of no use to anyone.
static void forget_copies() {
  for (Thread &thread : threads) {
    self = &thread;
    for (const Copy &copy : thread.copies) set_copying(copy.to, copy.size, false);
    thread.copies.clear();
  }
  self = nullptr;
}

static void run_block(const Order &order) {
  begin_block();
  begin_threads();
  while (!failed() && !all_done()) {
    bool moved = false;
    for (unsigned i : order) {
      if (threads[i].state != State::ready) continue;
      moved = true;
      go_on(threads[i]);
      if (failed()) return;
    }
    if (!moved) pass_barrier();
  }
  forget_copies();
}

static void run_grid(unsigned seed) {
  const Order order = order_of(blockDim.x, seed);
  for (unsigned block : order_of(gridDim.x * gridDim.y * gridDim.z, seed)) {
    blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y};
    run_block(order);
    if (failed()) return;
  }
}

static bool legal(unsigned block, size_t dynamic) {
  if (block < 1 || block > MOST_THREADS) note("a block has 1 to %d threads, not %u", MOST_THREADS, block);
  if (static_bytes() > MOST_STATIC)
    note("a block has at most %zu bytes of static shared memory, not %zu", MOST_STATIC, static_bytes());
  if (static_bytes() + dynamic > MOST_SHARED)
    note("a block has at most %zu bytes of shared memory, not %zu", MOST_SHARED, static_bytes() + dynamic);
  return !failed();
}

}  // namespace shim

// Runs a kernel. Returns the failure or nullptr; `where` gets the address of what was touched, that after
// the instruction that did, relative to this library, and the line; each may be 0.
extern "C" __attribute__((visibility("default"))) const char *shim_launch(
    const unsigned *grid, unsigned block, size_t dynamic, unsigned seed, void **arguments, uintptr_t *where) {
  using namespace shim;
  failure = {};
  blockIdx = {};
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block, 1, 1};
  dynamic_bytes = dynamic;
  arguments_of_launch = arguments;
  if (legal(block, dynamic)) {
    threads = std::vector<Thread>(block);
    warps = std::vector<Warp>((block + WARP - 1) / WARP);
    if (stacks.take(int(block))) caught([&] { run_grid(seed); });
    else note("no memory for %u stacks", block);
    forget_copies();
    stacks.release();
  }
  Dl_info library = {};
  dladdr(reinterpret_cast<void *>(shim_call), &library);
  where[0] = uintptr_t(failure.address);
  where[1] = failure.code ? uintptr_t(failure.code) - uintptr_t(library.dli_fbase) : 0;
  where[2] = uintptr_t(failure.line);
  return failed() ? failure.text : nullptr;
}
