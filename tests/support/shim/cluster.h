// Blocks of a cluster, which run together: PTX ISA, %cluster_ctarank, barrier.cluster and mapa.
#pragma once

#include "barriers.h"

namespace shim {

// A barrier of another block must outlast what comes to it.
inline void check_running(const char *what, unsigned rank) {
  const auto ended = [](const Thread &thread) { return thread.state == State::done; };
  const Block &block = blocks[rank];
  if (std::all_of(block.threads.begin(), block.threads.end(), ended))
    die("%s on line %d: block %u of the cluster has ended", what, self->line, rank);
}

inline void arrive_at(unsigned long *bar, int rank) {
  const char *const what = "mbarrier_arrive_at";
  if (rank < 0 || size_t(rank) >= blocks.size())
    die("%s on line %d: the cluster has no block %d", what, self->line, rank);
  check_running(what, unsigned(rank));
  const size_t at = place_of_barrier(what, bar), mine = self->block->rank;
  if (at < MOST_STATIC) die("%s on line %d: only dynamic shared memory is in other blocks", what, self->line);
  arrive(what, barrier_at(what, at + (size_t(rank) - mine) * MOST_SHARED, size_t(rank) != mine), 0);
}

inline void store_far(float *to, const float *from, int rank) {
  const char *const what = "store_far_f32";
  if (rank < 0 || size_t(rank) >= blocks.size())
    die("%s on line %d: the cluster has no block %d", what, self->line, rank);
  check_running(what, unsigned(rank));
  const size_t at = cell_of(to, 4, nullptr);
  if (at == NOT_SHARED || at < MOST_STATIC)
    die("%s on line %d: only dynamic shared memory is in other blocks", what, self->line);
  const size_t there = at + (size_t(rank) - self->block->rank) * MOST_SHARED;
  track_write(there, 4, nullptr);
  memcpy(memory_at(there), from, 4);
}

}  // namespace shim

int cluster_rank() { return int(shim::self->block->rank); }

void cluster_sync(int line) {
  shim::self->what = "cluster_sync", shim::self->line = line;
  shim::wait(shim::At::cluster);
}

void mbarrier_arrive_at(unsigned long *bar, int rank, int line) {
  const shim::On on(line);
  shim::arrive_at(bar, rank);
}

void store_far_f32(float *to, const float *from, int rank, int line) {
  const shim::On on(line);
  shim::store_far(to, from, rank);
}

// -- one launch that is split ------------------------------------------------------------------------
// Blocks run one after the other, so that an addition is atomic as it is.
int atomic_ticket(int *counter, int line) {
  const shim::On on(line);
  if (shim::cell_of(counter, 4, nullptr) != shim::NOT_SHARED)
    shim::die("atomic_ticket on line %d: the counter is not in global memory", line);
  return (*counter)++;
}
void memory_fence() {}
