// Who may touch which byte of shared memory when threads meet in other ways than barriers of the block and
// warps: at mbarriers and named barriers, in clusters, and with asynchronous readers and writers.
//
// Each thread has a clock: for each warp, each mbarrier's loads and each warpgroup's products, the stamp up
// to which what those did comes before what the thread does next. What a thread knows is released when it
// arrives at a barrier, and acquired by those that wait there. A thread's own accesses are known by its warp: a
// lane that arrives speaks for what its warp did until then. Threads run in several orders, so that this hides
// a missing __syncwarp() from one of them at most.
#pragma once

#include <cstdlib>
#include <memory>

#include "memory.h"

namespace shim {

constexpr unsigned MOST_BARRIERS = 256;

using Clock = std::vector<unsigned>;

static unsigned of_block, of_loads, entries;  // what a block has in a clock; where loads begin; all
static unsigned rows;                         // who reads a block's memory: its warps, then its warpgroups
static Clock clocks;                          // of all threads that run together
static std::unique_ptr<unsigned, decltype(&free)> reads(nullptr, free);  // reads by each row of each byte
static std::vector<unsigned short> being_read;                           // by how many asynchronous readers
static unsigned began;                                                   // the stamp with which blocks began
static const char *reader_word;                                          // the last asynchronous reader to begin

constexpr unsigned LANE = 6, SEVERAL = 63;  // a cell of reads is a stamp and a lane, or several

static size_t row_size;
inline unsigned *reads_of(unsigned row) { return reads.get() + row * row_size; }
inline void forget_reads() { reads.reset(static_cast<unsigned *>(calloc(rows * row_size, sizeof(unsigned)))); }

// The entry of who is in a cell of writes of memory of a block.
inline unsigned entry_of(unsigned who, unsigned rank) {
  return who < LOADED ? rank * of_block + who / WARP : of_loads + who - LOADED;
}
inline unsigned my_entry() { return self->block->rank * of_block + unsigned(self->number / WARP); }

// -- meeting -------------------------------------------------------------------------------
inline void join(unsigned *into, const unsigned *from) {
  for (unsigned i = 0; i < entries; i++) into[i] = std::max(into[i], from[i]);
}

// What this thread and its warp did until now comes before what those do who acquire the clock.
inline void release(Clock &clock) {
  if (clock.empty()) clock.assign(entries, 0);
  join(clock.data(), self->seen);
  clock[my_entry()] = stamp + 1;
  next_stamp();
}

inline void acquire(const Clock &clock) {
  if (!clock.empty()) join(self->seen, clock.data());
}

// Threads meet: what each did comes before what all do next.
inline void meet(const std::vector<Thread *> &who) {
  Clock all(entries, 0);
  for (const Thread *thread : who) {
    join(all.data(), thread->seen);
    all[thread->block->rank * of_block + unsigned(thread->number / WARP)] = stamp + 1;
  }
  for (Thread *thread : who) std::copy(all.begin(), all.end(), thread->seen);
  next_stamp();
}

inline void meet(Block &block) {
  std::vector<Thread *> who;
  for (Thread &thread : block.threads) who.push_back(&thread);
  meet(who);
}

// -- accesses ---------------------------------------------------------------------------------
inline bool known(const unsigned *seen, unsigned cell, unsigned rank) {
  return cell < LASTING && cell >> WHO < seen[entry_of(cell & WHO_MASK, rank)];
}

inline bool ordered_for_me(unsigned cell) {
  return (cell < LASTING && (cell & WHO_MASK) == unsigned(self->number)) ||
         known(self->seen, cell, self->block->rank);
}

[[noreturn]] inline void die_of_write(size_t at, const char *does, unsigned who, const void *code) {
  if (who == LOADING) die_of_race(at, does, "a tma_load still fills", code);
  if (who == IS_BARRIER) die_of_race(at, does, "belongs to an mbarrier", code);
  if (who >= LOADED && who < LOADED + MOST_BARRIERS)
    die_of_race(at, does, "a tma_load filled, with no wait for its mbarrier between", code);
  die_of_race(at, does, "wrote", who, code);
}

[[noreturn]] inline void die_of_read(size_t at, const char *does, unsigned row, unsigned cell, const void *code) {
  if (row >= self->block->warps.size())
    die_of_race(at, does, "a wgmma read, with no barrier between that its warpgroup reached after wgmma_wait", code);
  const unsigned lane = cell & SEVERAL, warp = row;
  die_of_race(at, does, "read", lane == SEVERAL ? OF_WARP + warp : warp * WARP + lane, code);
}

inline void track_local(const void *address, int bytes, const char *does, const void *code) {
  const char *const p = static_cast<const char *>(address);
  for (const Busy &busy : self->busy) {
    if (p >= busy.end || p + bytes <= busy.begin) continue;
    note_place(code);
    die("thread %d %s an accumulator of a wgmma before wgmma_wait", self->number, does);
  }
}

inline void track_read(size_t at, int bytes, const void *code) {
  const unsigned me = unsigned(self->number), lane = me % WARP, *const seen = self->seen;
  unsigned *const mine = reads_of(me / WARP);
  const unsigned first = written[at];
  unsigned differ = 0;
  for (int i = 1; i < bytes; i++) differ |= written[at + size_t(i)] ^ first;
  for (size_t i = at; i < at + size_t(differ ? bytes : 1); i++)
    if (!ordered_for_me(written[i])) die_of_write(i, "reads", written[i] & WHO_MASK, code);
  for (size_t i = at; i < at + size_t(bytes); i++) {
    const unsigned cell = mine[i], who = cell & SEVERAL;
    const bool alone = who == lane || cell >> LANE < seen[my_entry()];
    mine[i] = stamp << LANE | (alone ? lane : SEVERAL);
  }
}

// Whether this thread may write: all that others did with the bytes comes before. `rank` is whose they are.
inline void check_writable(size_t at, size_t bytes, const char *does, const void *code) {
  const unsigned rank = rank_of(at), *const seen = self->seen;
  const bool own = rank == self->block->rank;
  unsigned last = ~written[at];
  for (size_t i = at; i < at + bytes; i++) {
    if (being_read[i]) die_of_race(i, does, reader_word, code);
    if (written[i] == last) continue;
    last = written[i];
    if (!(own ? ordered_for_me(last) : known(seen, last, rank))) die_of_write(i, does, last & WHO_MASK, code);
  }
  for (unsigned row = 0; row < rows; row++) {
    const unsigned *const cells = reads_of(row), until = seen[rank * of_block + row] << LANE;
    const bool warp_is_mine = own && row == unsigned(self->number / WARP);
    unsigned most = 0;
    for (size_t i = at; i < at + bytes; i++) most = std::max(most, cells[i]);
    for (size_t i = at; most >= until && i < at + bytes; i++) {
      const bool by_me = warp_is_mine && (cells[i] & SEVERAL) == unsigned(self->number % WARP);
      if (cells[i] >= until && cells[i] && !by_me) die_of_read(i, does, row, cells[i], code);
    }
  }
}

inline void track_write(size_t at, int bytes, const void *code) {
  check_writable(at, size_t(bytes), "writes", code);
  for (size_t i = at; i < at + size_t(bytes); i++) written[i] = stamp << WHO | unsigned(self->number);
}

// -- asynchronous readers and writers: what they may touch is checked when they are issued ----------------
// A reader goes by what all of some threads have seen; ordinary writes need a fence after them as well.
struct View {
  Clock seen;
  unsigned fenced;  // since when each of the threads fenced
};

inline View view_of(const Thread *first, int count) {
  View view = {Clock(first->seen, first->seen + entries), first->fenced};
  for (const Thread *thread = first + 1; thread < first + count; thread++) {
    for (unsigned i = 0; i < entries; i++) view.seen[i] = std::min(view.seen[i], thread->seen[i]);
    view.fenced = std::min(view.fenced, thread->fenced);
  }
  return view;
}

inline void check_fenced(size_t at, unsigned cell, unsigned fenced, const char *does) {
  const unsigned who = cell & WHO_MASK, when = cell >> WHO;
  if (when < began || who >= LOADED || when < fenced) return;
  const Thread &writer = blocks[rank_of(at)].threads[who];
  if (when >= writer.fenced) {
    note_place(nullptr);
    die("thread %d %s %s, which thread %u wrote with no fence_async_shared between", self->number, does,
        Where(at).text, who);
  }
}

// `alone`: the thread whose own writes need no meeting, or nobody.
inline void begin_reading(size_t at, size_t bytes, const View &view, const char *does, const Thread *alone) {
  unsigned last = ~written[at];
  for (size_t i = at; i < at + bytes; i++) {
    being_read[i]++;
    if (written[i] == last) continue;
    last = written[i];
    const bool mine = alone && last < LASTING && (last & WHO_MASK) == unsigned(alone->number);
    if (!mine && !known(view.seen.data(), last, rank_of(at))) die_of_write(i, does, last & WHO_MASK, nullptr);
    check_fenced(i, last, view.fenced, does);
  }
}

inline void end_reading(size_t at, size_t bytes, unsigned row, unsigned lane) {
  unsigned *const cells = reads_of(row);
  for (size_t i = at; i < at + bytes; i++) being_read[i]--, cells[i] = stamp << LANE | lane;
}

inline void forget_clocks() {
  std::fill(clocks.begin(), clocks.end(), 1);
  forget_reads();
}

// -- a launch, and blocks that begin ---------------------------------------------------------------
inline void begin_clocks(unsigned count, unsigned threads) {
  const unsigned warps = (threads + WARP - 1) / WARP, groups = (threads + GROUP - 1) / GROUP;
  rows = of_block = warps + groups, of_loads = count * of_block, entries = of_loads + MOST_BARRIERS;
  clocks.assign(size_t(count) * threads * entries, 1);
  row_size = MOST_STATIC + count * MOST_SHARED;
  being_read.assign(row_size, 0);
  forget_reads();
}

inline void begin_tracking() {
  next_stamp();
  began = stamp;
  std::fill(clocks.begin(), clocks.end(), stamp);
  memset(written, 0, static_bytes() * sizeof *written);
  for (size_t i = 0; i < blocks.size(); i++)
    memset(written + MOST_STATIC + i * MOST_SHARED, 0, dynamic_bytes * sizeof *written);
  unsigned *seen = clocks.data();
  for (Block &block : blocks)
    for (Thread &thread : block.threads) thread.seen = seen, thread.fenced = 0, seen += entries;
}

}  // namespace shim
