// Runs the blocks of a launch one after the other, or those of a cluster together, with a fiber for each thread.
#include <dlfcn.h>

#include <string>

#include "copies.h"
#include "faults.h"
#include "matrix.h"
#include "schedule.h"

extern "C" {
__attribute__((used, section("shim_shared"), aligned(1))) unsigned char shim_guard[shim::GUARD] = {1};
unsigned char *shim_dynamic;
}

namespace shim {

static bool legal(unsigned block, size_t dynamic, unsigned cluster) {
  if (block < 1 || block > MOST_THREADS) note("a block has 1 to %d threads, not %u", MOST_THREADS, block);
  if (static_bytes() > MOST_STATIC)
    note("a block has at most %zu bytes of static shared memory, not %zu", MOST_STATIC, static_bytes());
  if (static_bytes() + dynamic > MOST_SHARED)
    note("a block has at most %zu bytes of shared memory, not %zu", MOST_SHARED, static_bytes() + dynamic);
  if (cluster < 1 || cluster > MOST_CLUSTER) note("a cluster has 1 to %d blocks, not %u", MOST_CLUSTER, cluster);
  else if (gridDim.x % cluster) note("%u blocks along x are no whole clusters of %u", gridDim.x, cluster);
  if (cluster > 1 && static_bytes()) note("blocks of a cluster have dynamic shared memory only, here");
  return !failed();
}

static bool make_blocks(unsigned cluster, unsigned threads) {
  blocks.clear(), blocks.resize(cluster);
  for (unsigned i = 0; i < cluster; i++) {
    blocks[i].rank = i;
    blocks[i].threads.resize(threads);
    blocks[i].warps.resize((threads + WARP - 1) / WARP);
    blocks[i].groups.resize((threads + GROUP - 1) / GROUP);
  }
  if (tracked) begin_clocks(cluster, threads);
  if (stacks.take(int(cluster * threads))) return true;
  note("no memory for %u stacks", cluster * threads);
  return false;
}

}  // namespace shim

// Runs a kernel. `watched`: its threads may meet in other ways than barriers of the block and warps. Returns
// the failure or nullptr; `where` gets the address of what was touched, that after the instruction that did,
// relative to this library, and the line; each may be 0.
extern "C" __attribute__((visibility("default"))) const char *shim_launch(
    const unsigned *grid, unsigned block, size_t dynamic, unsigned cluster, int watched, unsigned seed,
    void **arguments, uintptr_t *where) {
  using namespace shim;
  failure = {};
  blockIdx = {};
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block, 1, 1};
  dynamic_bytes = dynamic;
  shim_dynamic = dynamic_memory;
  arguments_of_launch = arguments;
  tracked = watched || cluster > 1;
  if (legal(block, dynamic, cluster)) {
    if (make_blocks(cluster, block)) caught([&] { run_grid(seed, cluster); });
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
