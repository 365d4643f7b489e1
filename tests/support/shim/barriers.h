// Barriers in shared memory (PTX ISA, mbarrier) and named ones (bar.sync, bar.arrive).
//
// A phase of an mbarrier ends when no arrivals and no bytes are pending; parities of phases alternate, and the
// first is 0. A wait for a parity ends when the phase in progress has the other one. See clocks.h for what
// arrivals and waits order.
#pragma once

#include <memory>

#include "collectives.h"
#include "copies.h"

namespace shim {

struct Barrier {
  size_t at;
  unsigned number;  // among those of the blocks that run together
  int count, pending, phase;
  long bytes;  // that are expected and have not come
  unsigned by, made;  // the thread that made it, and when
  bool fenced;        // made known to other blocks and to loads
  Clock now, done;    // of arrivals in this phase; of those in phases that ended
};

static std::vector<std::unique_ptr<Barrier>> barriers;

// The line that a call is on, while it lasts: shared.h names it where it fails.
struct On {
  explicit On(int line) { self->line = line; }
  ~On() { self->line = 0; }
};

inline size_t place_of_barrier(const char *what, const unsigned long *bar) {
  if (reinterpret_cast<uintptr_t>(bar) % 8)
    die("%s on line %d: the address of an mbarrier is misaligned", what, self->line);
  const size_t at = cell_of(bar, 8, nullptr);
  if (at == NOT_SHARED) die("%s on line %d: an mbarrier is not in shared memory", what, self->line);
  return at;
}

// The mbarrier at a place, which the thread must have been told of.
inline Barrier &barrier_at(const char *what, size_t at, bool by_others = false) {
  for (const auto &found : barriers) {
    if (found->at != at) continue;
    const unsigned rank = rank_of(at);
    const bool mine = rank == self->block->rank && found->by == unsigned(self->number);
    if (!mine && found->made >= self->seen[entry_of(found->by, rank)])
      die("%s on line %d: thread %u made the mbarrier at %s, with no barrier between", what, self->line, found->by,
          Where(at).text);
    if (by_others && !found->fenced)
      die("%s on line %d: no mbarrier_init_fence follows mbarrier_init of the mbarrier at %s", what, self->line,
          Where(at).text);
    return *found;
  }
  die("%s on line %d: %s holds no mbarrier: mbarrier_init comes first", what, self->line, Where(at).text);
}

inline void wake(const Barrier &barrier) {
  for (Block &block : blocks)
    for (Thread &thread : block.threads)
      if (thread.state == State::waits && thread.at == At::barrier && thread.barrier == &barrier)
        thread.state = State::ready;
}

inline void end_phase_if_complete(Barrier &barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.phase++, barrier.pending = barrier.count;
  if (barrier.done.empty()) barrier.done.assign(entries, 0);
  if (!barrier.now.empty()) join(barrier.done.data(), barrier.now.data());
  wake(barrier);
}

inline void arrive(const char *what, Barrier &barrier, long bytes) {
  if (barrier.pending == 0)
    die("%s on line %d: more than %d arrivals at the mbarrier at %s in phase %d", what, self->line, barrier.count,
        Where(barrier.at).text, barrier.phase);
  release(barrier.now);
  barrier.pending--, barrier.bytes += bytes;
  if (barrier.pending == 0 && barrier.bytes < 0)
    die("%s on line %d: %ld bytes more than expected have come to the mbarrier at %s in phase %d", what, self->line,
        -barrier.bytes, Where(barrier.at).text, barrier.phase);
  end_phase_if_complete(barrier);
}

// Bytes of a load that was issued in a phase come, and with them what the load wrote.
inline void complete_bytes(Barrier &barrier, long bytes, int phase, int line) {
  if (barrier.phase != phase)
    return note(
        "the mbarrier at %s expected too few bytes: its phase %d ended before the %ld bytes of the tma_load on line %d "
        "came",
        Where(barrier.at).text, phase, bytes, line);
  if (barrier.now.empty()) barrier.now.assign(entries, 0);
  barrier.now[entry_of(LOADED + barrier.number, 0)] = stamp + 1;
  next_stamp();
  barrier.bytes -= bytes;
  if (barrier.pending == 0 && barrier.bytes < 0)
    return note("%ld bytes more than expected have come to the mbarrier at %s in phase %d, with the tma_load on line "
                "%d", -barrier.bytes, Where(barrier.at).text, phase, line);
  end_phase_if_complete(barrier);
}

inline void make_barrier(const unsigned long *bar, int count) {
  const size_t at = place_of_barrier("mbarrier_init", bar);
  if (count < 1 || count >= 1 << 20) die("mbarrier_init on line %d: cannot count %d arrivals", self->line, count);
  if (barriers.size() == MOST_BARRIERS)
    die("mbarrier_init on line %d: more than %u mbarriers", self->line, MOST_BARRIERS);
  for (const auto &found : barriers)
    if (found->at == at) die("mbarrier_init on line %d: %s holds an mbarrier already", self->line, Where(at).text);
  on_write(bar, 8, nullptr);
  for (size_t i = at; i < at + 8; i++) written[i] = LASTING | IS_BARRIER;
  barriers.emplace_back(
      new Barrier{at, unsigned(barriers.size()), count, count, 0, 0, unsigned(self->number), stamp, false, {}, {}});
}

inline void wait_for_parity(const unsigned long *bar, int parity, int line) {
  if (parity != 0 && parity != 1) die("mbarrier_wait on line %d: %d is no parity", line, parity);
  Barrier &barrier = barrier_at("mbarrier_wait", place_of_barrier("mbarrier_wait", bar));
  while (barrier.phase % 2 == parity) {
    self->what = "mbarrier_wait", self->line = line, self->barrier = &barrier, self->parity = parity;
    wait(At::barrier);
  }
  acquire(barrier.done);
}

// -- named barriers ------------------------------------------------------------------------------
inline void end_named(int id, Named &named) {
  for (const int come : named.of_warp)
    if (come % WARP) die("named barrier %d: %d threads of a warp have come, not all", id, come);
  for (Thread *thread : named.waiting) {
    Thread *const me = self;
    self = thread, acquire(named.clock), self = me;
    thread->state = State::ready;
  }
  named = {};
}

inline void come_to_named(const char *what, int id, int count, bool stays, int line) {
  if (id < 1 || id > 15) die("%s on line %d: %d is no named barrier from 1 to 15", what, line, id);
  if (count < WARP || count % WARP || size_t(count) > self->block->threads.size())
    die("%s on line %d: %d threads are no whole warps of this block, which has %zu threads", what, line, count,
        self->block->threads.size());
  Named &named = self->block->named[id];
  if (named.come == 0) named.want = count, named.first = self;
  if (named.want != count)
    die("%s on line %d: named barrier %d waits for %d threads in thread %d, and for %d in thread %d", what, line, id,
        count, self->number, named.want, named.first->number);
  release(named.clock);
  named.come++, named.of_warp[self->number / WARP]++;
  if (stays) {
    named.waiting.push_back(self);
    self->what = what, self->line = line, self->parity = id;
    self->state = State::waits, self->at = At::named;
  }
  if (named.come == named.want) end_named(id, named);
  if (self->state == State::waits) switch_to(self->context, scheduler);
}

}  // namespace shim

void mbarrier_init(unsigned long *bar, int count, int line) {
  const shim::On on(line);
  shim::make_barrier(bar, count);
}

// fence.mbarrier_init: what this thread has made is known to other blocks and to loads after the next barrier.
void mbarrier_init_fence() {
  for (const auto &found : shim::barriers)
    if (shim::rank_of(found->at) == shim::self->block->rank && found->by == unsigned(shim::self->number))
      found->fenced = true;
}

void mbarrier_expect(unsigned long *bar, int bytes, int line) {
  const shim::On on(line);
  if (bytes < 0 || bytes >= 1 << 20) shim::die("mbarrier_expect on line %d: cannot expect %d bytes", line, bytes);
  shim::arrive("mbarrier_expect", shim::barrier_at("mbarrier_expect", shim::place_of_barrier("mbarrier_expect", bar)),
               bytes);
}

void mbarrier_arrive(unsigned long *bar, int line) {
  const shim::On on(line);
  const char *const what = "mbarrier_arrive";
  shim::arrive(what, shim::barrier_at(what, shim::place_of_barrier(what, bar)), 0);
}

// An arrival once this thread's copies have landed: here at once.
void mbarrier_arrive_copied(unsigned long *bar, int line) {
  const shim::On on(line);
  const char *const what = "mbarrier_arrive_copied";
  shim::self->group++;
  shim::copy_async_wait(0);
  shim::arrive(what, shim::barrier_at(what, shim::place_of_barrier(what, bar)), 0);
}

void mbarrier_wait(unsigned long *bar, int parity, int line) {
  const shim::On on(line);
  shim::wait_for_parity(bar, parity, line);
}

// What this thread wrote, and what it knows of, may be read asynchronously.
void fence_async_shared() {
  shim::self->fenced = shim::stamp + 1;
  shim::next_stamp();
}

void block_barrier_sync(int id, int threads, int line) {
  shim::come_to_named("block_barrier_sync", id, threads, true, line);
}

void block_barrier_arrive(int id, int threads, int line) {
  shim::come_to_named("block_barrier_arrive", id, threads, false, line);
}
