// Copies of boxes between global and shared memory (PTX ISA, cp.async.bulk.tensor), as a TensorMap describes
// them: what lies outside of the tensor is read as zeros and not written.
//
// A load takes place as late as it can, when no thread can go on without it; until then what it fills is
// poison, which nobody may touch. A store reads shared memory when its thread waits for that, and writes global
// memory when that is waited for, or the thread ends.
#pragma once

#include "barriers.h"
#include "numbers.h"

namespace shim {

// The words of a TensorMap, which tests make: 128 bytes that the driver would make otherwise.
struct Map {
  unsigned long address, element, sizes[4], strides[3], box[4], swizzle, magic, rounds;
  unsigned long row() const { return box[0] * element; }
  unsigned long bytes() const { return row() * box[1] * box[2] * box[3]; }
};
constexpr unsigned long MAGIC = 0x504d5f4d4150, IMAGES = 0x504d5f494d47;

// The words of a TensorMap of images, for windows: pairs have that of x, then that of y, or channels and pixels.
struct Images {
  unsigned long address, element, sizes[4], strides[3];
  int box[2], lower[2], upper[2], step[2];
  unsigned long swizzle, magic, rounds;
};

struct Load {
  Map map;
  size_t at;
  int x, y, z, w, line, phase;
  Barrier *barrier;
  Thread *by;
  std::vector<const unsigned char *> pixels;  // of windows: where each has its channels, or null for zeros
  long channels;                              // from there to the last one
};

static std::vector<Load> loads;  // in flight
static unsigned seed_of_loads;

// CUDA Driver API, cuTensorMapEncodeTiled: what it refuses.
inline const char *wrong_in(const Map &map) {
  if (map.magic != MAGIC) return "no TensorMap";
  if (map.element != 1 && map.element != 2 && map.element != 4 && map.element != 8) return "elements of no known size";
  if (map.address % 16) return "a global address that is no multiple of 16";
  for (const unsigned long size : map.sizes)
    if (size < 1 || size > 1ul << 32) return "a size that is not from 1 to 2^32";
  for (const unsigned long stride : map.strides)
    if (stride % 16 || stride >= 1ul << 40) return "a stride that is no multiple of 16 below 2^40";
  for (const unsigned long size : map.box)
    if (size < 1 || size > 256) return "a box that is not from 1 to 256 elements long";
  if (map.rounds && map.element != 4) return "elements to round that are not f32";
  if (map.box[3] != 1) return "a box that is longer than one item along the last axis";
  if (map.row() % 16) return "rows of a box that are no multiple of 16 bytes";
  if (map.swizzle != 0 && map.swizzle != 32 && map.swizzle != 64 && map.swizzle != 128) return "an unknown swizzle";
  if (map.swizzle && map.row() > map.swizzle) return "rows of a box that are longer than the swizzle";
  return nullptr;
}

inline Map checked_map(const char *what, const void *words) {
  Map map;
  static_assert(sizeof map == 128, "a TensorMap has 128 bytes");
  memcpy(&map, words, sizeof map);
  if (const char *wrong = wrong_in(map)) die("%s on line %d: the TensorMap has %s", what, self->line, wrong);
  // Where such rows lie the manual does not say.
  if (map.swizzle && map.row() != map.swizzle)
    die("%s on line %d: rows of a box are shorter than the swizzle", what, self->line);
  return map;
}

// Pieces of 16 bytes change places with others of the same 128, 64 or 32 bytes, as bits from 7 up say.
inline size_t swizzled(size_t address, unsigned long swizzle) {
  const size_t pieces = swizzle ? swizzle / 16 - 1 : 0;
  return address ^ (address >> 7 & pieces) << 4;
}

// The byte of shared memory, by its cell, at which a piece of 16 bytes of a box lies.
inline size_t place_in_box(const Map &map, size_t at, size_t offset) {
  const size_t begin = at < MOST_STATIC ? reinterpret_cast<uintptr_t>(__start_shim_shared) : MOST_STATIC;
  return at < MOST_STATIC ? swizzled(begin + at + offset, map.swizzle) - begin
                          : swizzled(at + offset - begin, map.swizzle) + begin;
}

inline size_t place_of_box(const char *what, const Map &map, const void *box) {
  const size_t align = map.swizzle ? 8 * map.swizzle : 128, bytes = map.bytes();
  if (reinterpret_cast<uintptr_t>(box) % align)
    die("%s on line %d: the shared address is no multiple of %zu%s", what, self->line, align,
        map.swizzle ? ", after which the swizzle repeats" : "");
  const size_t at = cell_of(box, int(bytes), nullptr);
  if (at == NOT_SHARED) die("%s on line %d: a box is not in shared memory", what, self->line);
  return at;
}

// Calls visit(cell, global address, elements of the piece that are in the tensor, and how many come before).
template <class Visit>
void each_piece(const Map &map, size_t at, int x, int y, int z, int w, Visit visit) {
  size_t offset = 0;
  const long per = 16 / long(map.element);
  const auto in = [&](int axis, long i) { return i >= 0 && i < long(map.sizes[axis]); };
  // Boxes are one item long along the last axis.
  for (long k = z; k < z + long(map.box[2]); k++)
    for (long j = y; j < y + long(map.box[1]); j++)
      for (long i = x; i < x + long(map.box[0]); i += per, offset += 16) {
        const bool inside = in(1, j) && in(2, k) && in(3, w);
        const long first = std::max(0l, -i), last = inside ? std::min(per, long(map.sizes[0]) - i) : 0;
        const long from = (i + first) * long(map.element) + j * long(map.strides[0]) + k * long(map.strides[1]) +
                          w * long(map.strides[2]);
        visit(place_in_box(map, at, offset), reinterpret_cast<unsigned char *>(map.address + size_t(from)),
              size_t(std::max(0l, last - first)) * map.element, size_t(first) * map.element);
      }
}

// CU_TENSOR_MAP_DATA_TYPE_TFLOAT32.
inline void round_to_tf32(unsigned char *at) {
  float x;
  memcpy(&x, at, sizeof x);
  const unsigned y = tf32_of_f32(x);
  memcpy(at, &y, sizeof y);
}

inline void issue_load(const char *what, const Map &map, size_t at, Barrier &barrier, int x, int y, int z, int w) {
  unsigned last = 0;
  for (size_t i = at; i < at + map.bytes(); i++) {
    if (written[i] != last && written[i] < LASTING) check_fenced(i, written[i], self->fenced, "loads into");
    last = written[i];
  }
  check_writable(at, map.bytes(), what, nullptr);
  for (size_t i = at; i < at + map.bytes(); i++) written[i] = LASTING | LOADING;
  memset(memory_at(at), 0xff, map.bytes());
  loads.push_back({map, at, x, y, z, w, self->line, barrier.phase, &barrier, self, {}, 0});
}

template <class Visit>
void each_piece_of_pixels(const Load &load, Visit visit) {
  const long per = 16 / long(load.map.element);
  size_t offset = 0;
  for (const unsigned char *const pixel : load.pixels)
    for (long i = 0; i < long(load.map.box[0]); i += per, offset += 16) {
      const long count = pixel ? std::max(0l, std::min(per, load.channels - i)) : 0;
      visit(place_in_box(load.map, load.at, offset), pixel + size_t(i) * load.map.element,
            size_t(count) * load.map.element, size_t(0));
    }
}

inline void land(const Load &load) {
  const int line = load.by->line;
  self = load.by, self->line = load.line;  // whom a signal names
  const auto copy = [&](size_t to, const unsigned char *from, size_t bytes, size_t skip) {
    unsigned char *const piece = memory_at(to);
    memset(piece, 0, 16);
    if (bytes) memcpy(piece + skip, from, bytes);
    for (size_t i = 0; load.map.rounds && i < 16; i += 4) round_to_tf32(piece + i);
  };
  if (load.pixels.empty()) each_piece(load.map, load.at, load.x, load.y, load.z, load.w, copy);
  else each_piece_of_pixels(load, copy);
  self->line = line, self = nullptr;
  for (size_t i = load.at; i < load.at + load.map.bytes(); i++)
    written[i] = stamp << WHO | (LOADED + load.barrier->number);
  complete_bytes(*load.barrier, long(load.map.bytes()), load.phase, load.line);
}

// One load in flight ends: the first, the last, or any.
inline bool land_one() {
  if (loads.empty()) return false;
  size_t which = 0;
  if (seed_of_loads == 1) which = loads.size() - 1;
  if (seed_of_loads > 1) which = (stamp * 1664525u + seed_of_loads * 1013904223u) % loads.size();
  const Load load = loads[which];
  loads.erase(loads.begin() + long(which));
  land(load);
  return true;
}

// -- stores ----------------------------------------------------------------------------------------
inline void issue_store(const Map &map, const void *from, int x, int y, int z) {
  const size_t at = place_of_box("tma_store", map, from);
  begin_reading(at, map.bytes(), view_of(self, 1), "stores", self);
  reader_word = "a tma_store may still read: tma_store_read comes first";
  Store store = {{}, at, x, y, z, self->line, self->store_group, false, false, {}};
  memcpy(store.map, &map, sizeof map);
  self->stores.push_back(store);
}

inline Map map_of(const Store &store) {
  Map map;
  memcpy(&map, store.map, sizeof map);
  return map;
}

inline void read_stores(unsigned pending) {
  for (Store &store : self->stores) {
    if (!store.committed || store.read || store.group + pending >= self->store_group) continue;
    const Map map = map_of(store);
    store.bytes.assign(memory_at(store.from), memory_at(store.from) + map.bytes());
    end_reading(store.from, map.bytes(), unsigned(self->number / WARP), unsigned(self->number % WARP));
    store.read = true;
  }
}

inline void write_stores() {
  for (const Store &store : self->stores) {
    if (!store.read) continue;
    self->line = store.line;
    each_piece(map_of(store), store.from, store.x, store.y, store.z, 0,
               [&](size_t from, unsigned char *to, size_t bytes, size_t skip) {
                 memcpy(to, store.bytes.data() + (from - store.from) + skip, bytes);
               });
    self->line = 0;
  }
  auto &stores = self->stores;
  stores.erase(std::remove_if(stores.begin(), stores.end(), [](const Store &x) { return x.read; }), stores.end());
}

// A block's shared memory may be another's when its threads have ended.
inline void end_stores() {
  write_stores();
  for (const Store &store : self->stores)
    die("thread %d ends while the tma_store on line %d may still read shared memory%s", self->number, store.line,
        store.committed ? ": tma_store_read comes first" : ", and tma_store_commit did not follow");
}

// PTX ISA, "Im2col mode": from a pixel on as many as a copy has, along x, y and images within the box of those at which
// windows begin; of each, the channels of the pixel that is a tap further.
inline void issue_load_of_windows(const Images &images, size_t at, Barrier &barrier, const int *first, const int *tap) {
  const Map map = {images.address, images.element, {1, 1, 1, 1}, {0, 0, 0},
                   {(unsigned long)images.box[0], (unsigned long)images.box[1], 1, 1}, images.swizzle, MAGIC,
                   images.rounds};
  issue_load("loads into", map, at, barrier, 0, 0, 0, 0);
  Load &load = loads.back();
  load.channels = long(images.sizes[0]) - first[0];
  long x = first[1], y = first[2], z = first[3];
  const auto last = [&](int i) { return long(images.sizes[i + 1]) - 1 + images.upper[i]; };
  const auto begins = [&](long v, int i) {
    return v >= images.lower[i] && v <= last(i) && (v - images.lower[i]) % images.step[i] == 0;
  };
  if (!begins(x, 0) || !begins(y, 1))
    die("tma_load_im2col on line %d: no window begins at pixel (%ld, %ld)", self->line, x, y);
  for (int i = 0; i < images.box[1]; i++) {
    const long u = x + tap[0], v = y + tap[1];
    const bool inside = u >= 0 && u < long(images.sizes[1]) && v >= 0 && v < long(images.sizes[2]) && z >= 0 &&
                        z < long(images.sizes[3]);
    const long from = first[0] * long(images.element) + u * long(images.strides[0]) + v * long(images.strides[1]) +
                      z * long(images.strides[2]);
    load.pixels.push_back(inside ? reinterpret_cast<const unsigned char *>(images.address + size_t(from)) : nullptr);
    if ((x += images.step[0]) <= last(0)) continue;
    x = images.lower[0];
    if ((y += images.step[1]) <= last(1)) continue;
    y = images.lower[1], z++;
  }
}

inline Images checked_images(const char *what, const void *words) {
  Images images;
  static_assert(sizeof images == 128, "a TensorMap has 128 bytes");
  memcpy(&images, words, sizeof images);
  if (images.magic != IMAGES) die("%s on line %d: the TensorMap is not of images", what, self->line);
  if ((unsigned long)images.box[0] * images.element != images.swizzle)
    die("%s on line %d: channels are shorter than the swizzle", what, self->line);
  return images;
}

// The offset of an address in its block is the same in each block of the mask.
inline void load_in_blocks(const char *what, const void *words, void *to, unsigned long *bar, int x, int y, int z,
                           int w, unsigned mask) {
  const Map map = checked_map(what, words);
  const size_t at = place_of_box(what, map, to), bar_at = place_of_barrier(what, bar);
  const unsigned mine = self->block->rank;
  for (unsigned rank = 0; rank < MOST_CLUSTER; rank++) {
    if (!(mask >> rank & 1)) continue;
    if (rank >= blocks.size()) die("%s on line %d: the cluster has no block %u", what, self->line, rank);
    const size_t move = (size_t(rank) - mine) * MOST_SHARED;
    if (rank != mine && at < MOST_STATIC)
      die("%s on line %d: only dynamic shared memory is in other blocks", what, self->line);
    issue_load(rank == mine ? "loads into" : "loads into another block's", map, at + move,
               barrier_at(what, bar_at + move, true), x, y, z, w);
  }
}

}  // namespace shim

void tma_load(void *to, const TensorMap *map, unsigned long *bar, int x, int y, int z, int line) {
  const shim::On on(line);
  shim::load_in_blocks("tma_load", map, to, bar, x, y, z, 0, 1u << shim::self->block->rank);
}

void tma_load_4d(void *to, const TensorMap *map, unsigned long *bar, int x, int y, int z, int w, int line) {
  const shim::On on(line);
  shim::load_in_blocks("tma_load_4d", map, to, bar, x, y, z, w, 1u << shim::self->block->rank);
}

void tma_load_multicast(void *to, const TensorMap *map, unsigned long *bar, int x, int y, int z, int mask, int line) {
  const shim::On on(line);
  if (mask <= 0 || mask >= 1 << 16) shim::die("tma_load_multicast on line %d: %#x is no mask of blocks", line, mask);
  shim::load_in_blocks("tma_load_multicast", map, to, bar, x, y, z, 0, unsigned(mask));
}

void tma_load_im2col(void *to, const TensorMap *words, unsigned long *bar, int c, int x, int y, int z, int dx, int dy,
                     int line) {
  const shim::On on(line);
  const shim::Images images = shim::checked_images("tma_load_im2col", words);
  shim::Map map = {};
  map.element = images.element, map.swizzle = images.swizzle;
  map.box[0] = (unsigned long)images.box[0], map.box[1] = (unsigned long)images.box[1];
  map.box[2] = map.box[3] = 1;
  const size_t at = shim::place_of_box("tma_load_im2col", map, to);
  const size_t bar_at = shim::place_of_barrier("tma_load_im2col", bar);
  const int first[4] = {c, x, y, z}, tap[2] = {dx, dy};
  if (dx < 0 || dx > 255 || dy < 0 || dy > 255) shim::die("tma_load_im2col on line %d: a tap is 0 to 255 further", line);
  shim::issue_load_of_windows(images, at, shim::barrier_at("tma_load_im2col", bar_at, true), first, tap);
}

void tma_store(const TensorMap *map, const void *from, int x, int y, int z, int line) {
  const shim::On on(line);
  shim::issue_store(shim::checked_map("tma_store", map), from, x, y, z);
}

void tma_store_commit() {
  for (shim::Store &store : shim::self->stores) store.committed = true;
  shim::self->store_group++;
}

void tma_store_read_0() { shim::read_stores(0); }
void tma_store_read_1() { shim::read_stores(1); }

void tma_store_wait_0() {
  shim::read_stores(0);
  shim::write_stores();
}

void tma_prefetch(const TensorMap *map, int line) {
  const shim::On on(line);
  shim::Images images;
  memcpy(&images, map, sizeof images);
  if (images.magic == shim::IMAGES) shim::checked_images("tma_prefetch", map);
  else shim::checked_map("tma_prefetch", map);
}
