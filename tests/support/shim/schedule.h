// Which thread runs when: one until it waits, then another, in an order that a seed gives. What nobody can go
// on without takes place when nobody can go on: barriers of the block and the cluster, then loads. If there is
// nothing of that, threads wait for ever.
#pragma once

#include <numeric>

#include "cluster.h"
#include "tensor_map.h"
#include "warpgroup.h"

extern "C" void shim_call(void **arguments);

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
  if (tracked) end_products(), end_stores();
  self->state = State::done;
  for (;;) switch_to(self->context, scheduler);
}

static void go_on(Thread &thread) {
  self = &thread;
  thread.line = 0;
  threadIdx = {unsigned(thread.number), 0, 0};
  blockIdx = thread.block->index;
  shim_dynamic = dynamic_memory + thread.block->rank * MOST_SHARED;
  switch_to(scheduler, thread.context);
  self = nullptr;
}

// -- threads that wait for ever -----------------------------------------------------------------
static std::string told(const Thread &thread) {
  char text[300];
  const int size = int(sizeof text);
  if (thread.state == State::done) {
    snprintf(text, sizeof text, "thread %d has ended", thread.number);
    return text;
  }
  int used = snprintf(text, sizeof text, "thread %d waits in %s on line %d", thread.number, thread.what, thread.line);
  if (thread.at == At::barrier) {
    const Barrier &barrier = *thread.barrier;
    snprintf(text + used, size_t(size - used),
             " for parity %d of the mbarrier at %s, whose phase %d lacks %d arrivals and %ld bytes", thread.parity,
             Where(barrier.at).text, barrier.phase, barrier.pending, barrier.bytes);
  } else if (thread.at == At::named) {
    const Named &named = thread.block->named[thread.parity];
    snprintf(text + used, size_t(size - used), " for named barrier %d, to which %d of %d threads have come",
             thread.parity, named.come, named.want);
  }
  return text;
}

static bool waits(const Thread &thread, At at) { return thread.state == State::waits && thread.at == at; }

// Who waits where, once for each place: those at mbarriers and named ones first.
static void note_deadlock() {
  std::string text;
  std::vector<const Thread *> shown;
  const auto alike = [](const Thread &a, const Thread &b) {
    if (a.state != b.state || a.state == State::done) return a.state == b.state;
    return a.at == b.at && a.line == b.line && (a.at != At::barrier || a.barrier == b.barrier);
  };
  const auto show = [&](const Thread &thread) {
    for (const Thread *other : shown)
      if (alike(*other, thread)) return;
    if (shown.size() == 4) return;
    shown.push_back(&thread);
    text += (text.empty() ? "" : "; ") + told(thread);
    if (blocks.size() > 1) text += " in block " + std::to_string(thread.block->rank) + " of the cluster";
  };
  for (const At at : {At::barrier, At::named, At::team, At::cluster, At::block})
    for (const Block &block : blocks)
      for (const Thread &thread : block.threads)
        if (waits(thread, at)) show(thread);
  for (const Block &block : blocks)
    for (const Thread &thread : block.threads)
      if (thread.state == State::done) show(thread);
  note("deadlock: %s", text.c_str());
}

// Threads that should meet and do not: `some` waits, and an other of those from `begin` is not with it.
static void note_apart(const Thread &some, size_t begin, size_t end) {
  for (size_t i = begin; i < end; i++) {
    const Thread &other = some.block->threads[i];
    if (other.state == State::done || other.at != some.at || other.line != some.line)
      return note("%s, and %s", told(some).c_str(),
                  other.state == State::done ? told(other).c_str()
                                             : told(other).replace(told(other).find(" waits"), 6, "").c_str());
  }
  note_deadlock();
}

static void note_stuck() {
  const Thread *in_team = nullptr, *in_block = nullptr;
  for (const Block &block : blocks)
    for (const Thread &thread : block.threads) {
      if (waits(thread, At::barrier) || waits(thread, At::named) || waits(thread, At::cluster)) return note_deadlock();
      if (!in_team && waits(thread, At::team)) in_team = &thread;
      if (!in_block && waits(thread, At::block)) in_block = &thread;
    }
  // A lane that waits for its warp is named before one that waits for the block.
  if (!in_team) return note_apart(*in_block, 0, in_block->block->threads.size());
  const size_t size = size_t(in_team->team->size), begin = size_t(in_team->number) / size * size;
  note_apart(*in_team, begin, begin + size);
}

// -- going on ---------------------------------------------------------------------------------------
static bool all_in(const Block &block, At at) {
  // Barriers of a cluster are not said to be aligned: warps may come to them from several places.
  const Thread &first = block.threads[0];
  return std::all_of(block.threads.begin(), block.threads.end(), [&](const Thread &t) {
    return waits(t, at) && (at == At::cluster || t.line == first.line);
  });
}

static void free_all(Block &block) {
  for (Thread &thread : block.threads) thread.state = State::ready;
}

static bool pass_cluster_barrier() {
  for (const Block &block : blocks)
    if (!all_in(block, At::cluster)) return false;
  std::vector<Thread *> all;
  for (Block &block : blocks) {
    for (Thread &thread : block.threads) all.push_back(&thread);
    free_all(block);
  }
  meet(all);
  return true;
}

static bool run_ready(Block &block, const Order &order) {
  bool moved = false;
  for (unsigned i : order) {
    if (block.threads[i].state != State::ready) continue;
    moved = true;
    go_on(block.threads[i]);
    if (failed()) return true;
  }
  return moved;
}

static bool all_done() {
  for (const Block &block : blocks)
    for (const Thread &thread : block.threads)
      if (thread.state != State::done) return false;
  return true;
}

// One round. Whether anything happened.
static bool step(const Order &of_threads, const Order &of_blocks) {
  bool moved = false;
  for (unsigned i : of_blocks) {
    Block &block = blocks[i];
    if (run_ready(block, of_threads)) {
      moved = true;
    } else if (all_in(block, At::block)) {
      order_block(block), free_all(block);
      moved = true;
    }
    if (failed()) return true;
  }
  return moved || pass_cluster_barrier() || land_one();
}

// -- blocks that run together --------------------------------------------------------------------
static void begin_threads() {
  int stack = 0;
  for (Block &block : blocks) {
    const int count = int(block.threads.size());
    for (int i = 0; i < count; i++) {
      Thread &thread = block.threads[size_t(i)];
      thread.state = State::ready, thread.block = &block, thread.number = i;
      thread.line = 0, thread.group = 0, thread.store_group = 0;
      thread.stores.clear(), thread.busy.clear();
      thread.fence = thread.commit = thread.touched = 0;
      begin_at(thread.context, stacks.stack(stack++), Stacks::BYTES, run_thread);
    }
    const auto begin_teams = [&](std::vector<Team> &teams, int size) {
      for (int i = 0; i < int(teams.size()); i++)
        teams[size_t(i)] = {size, std::min(size, count - size * i), 0, nullptr, {}};
    };
    begin_teams(block.warps, WARP), begin_teams(block.groups, GROUP);
    for (Named &named : block.named) named = {};
  }
  barriers.clear(), loads.clear(), begin_products();
}

// Copies that nobody waited for are of no use to anyone.
static void forget_copies() {
  for (Block &block : blocks)
    for (Thread &thread : block.threads) {
      self = &thread, shim_dynamic = dynamic_memory + block.rank * MOST_SHARED;
      for (const Copy &copy : thread.copies) set_copying(copy.to, copy.size, false);
      thread.copies.clear();
    }
  self = nullptr;
}

static void run_blocks(const Order &of_threads, const Order &of_blocks) {
  begin_threads();
  begin_memory();
  while (!failed() && !all_done())
    if (!step(of_threads, of_blocks) && !failed()) note_stuck();
  if (!failed() && !loads.empty())
    note("the kernel ends while the tma_load on line %d is in flight", loads[0].line);
  forget_copies();
}

static void run_grid(unsigned seed, unsigned cluster) {
  const Order of_threads = order_of(blockDim.x, seed), of_blocks = order_of(cluster, seed);
  seed_of_loads = seed;
  for (unsigned some : order_of(gridDim.x / cluster * gridDim.y * gridDim.z, seed)) {
    for (unsigned i = 0; i < cluster; i++) {
      const unsigned block = some * cluster + i;
      blocks[i].index = {block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y};
    }
    blockIdx = blocks[0].index;
    run_blocks(of_threads, of_blocks);
    if (failed()) return;
  }
}

}  // namespace shim
