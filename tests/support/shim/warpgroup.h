// Products that four warps issue together and that go on without them (PTX ISA, wgmma.mma_async).
//
// A product takes place at the wait for its group: until then its accumulators hold poison that nobody may
// touch, and what it reads in shared memory nobody may write. The warps of a warpgroup come together at fences,
// commits and waits as well, which is more than the hardware asks of them.
#pragma once

#include "operands.h"

namespace shim {

struct Call {
  float *d;
  const unsigned *a_registers;
  unsigned long a, b;
  int keep;
};

// Accumulators of a warpgroup while products that add to them are in flight.
struct Sums {
  char *d[GROUP];
  int count;  // of each thread
  std::vector<unsigned> values;
};

struct Product {
  const Wgmma *kind;
  int n, line;
  Operand a, b;
  std::vector<unsigned> a_registers;
  bool keep;
  Sums *sums;
  unsigned group;
};

struct Products {
  std::vector<Product> queue;
  std::vector<std::unique_ptr<Sums>> sums;
  unsigned group;
};
static std::vector<Products> products;  // of the warpgroups of all blocks

inline Products &products_of(const Thread &thread) {
  return products[thread.block->rank * thread.block->groups.size() + size_t(thread.number / GROUP)];
}
inline Thread *first_of_group() { return &self->block->threads[size_t(self->number / GROUP * GROUP)]; }

inline void collect_group(const char *what, int line, Work work, const void *in) {
  collect(what, line, self->block->groups[size_t(self->number / GROUP)], "warpgroup", work, in, nullptr);
}

// -- issue -----------------------------------------------------------------------------------------
inline Sums &sums_of(Products &mine, Lane *lanes, int count, const char *name) {
  const auto d_of = [&](int i) { return reinterpret_cast<char *>(static_cast<const Call *>(lanes[i].in)->d); };
  for (const auto &sums : mine.sums) {
    const bool same = sums->d[0] == d_of(0) && sums->count == count;
    const bool apart = sums->d[0] + 4 * sums->count <= d_of(0) || d_of(0) + 4 * count <= sums->d[0];
    if (same) return *sums;
    if (!apart) die("%s on line %d: its accumulators are in part those of a product in flight", name, self->line);
  }
  Thread *const threads = first_of_group();
  mine.sums.emplace_back(new Sums{{}, count, std::vector<unsigned>(size_t(GROUP) * size_t(count))});
  Sums &sums = *mine.sums.back();
  for (int i = 0; i < GROUP; i++) {
    if (threads[i].fence <= threads[i].touched)
      die("%s on line %d: no wgmma_fence since thread %d could touch the accumulators", name, self->line,
          threads[i].number);
    sums.d[i] = d_of(i);
    memcpy(&sums.values[size_t(i * count)], sums.d[i], size_t(4 * count));
    memset(sums.d[i], 0xff, size_t(4 * count));
    threads[i].busy.push_back({sums.d[i], sums.d[i] + 4 * count});
  }
  return sums;
}

// The operands as all warps see them, and A, of which each warp reads its own 16 rows, as that warp does.
inline void begin_reading_operands(const Product &product) {
  const Thread *const threads = first_of_group();
  View all = view_of(threads, GROUP);
  reader_word = "a wgmma may still read: wgmma_wait comes first";
  for (int warp = 0; product.a.used && warp < 4; warp++) {
    const View some = view_of(threads + warp * WARP, WARP);
    each_unit(product.a, 16 * warp, 16, [&](size_t at) { begin_reading(at, 16, some, "multiplies", nullptr); });
  }
  each_unit(product.b, 0, product.n, [&](size_t at) { begin_reading(at, 16, all, "multiplies", nullptr); });
}

inline void issue(const Wgmma &kind, int n, const char *name, Lane *lanes) {
  const auto call = [&](int i) -> const Call & { return *static_cast<const Call *>(lanes[i].in); };
  const Call &first = call(0);
  Products &mine = products_of(*self);
  const Thread *const threads = first_of_group();
  Product product = {&kind, n, self->line, {}, {}, {}, first.keep != 0, nullptr, mine.group};
  for (int i = 0; i < GROUP; i++) {
    if (call(i).a != first.a || call(i).b != first.b || (call(i).keep != 0) != product.keep)
      die("%s on line %d: threads %d and %d have other descriptors", name, self->line, threads[0].number,
          threads[i].number);
    if (!kind.from_registers) continue;
    if (threads[i].fence <= threads[i].commit)
      die("%s on line %d: no wgmma_fence since registers of A could change", name, self->line);
    product.a_registers.insert(product.a_registers.end(), call(i).a_registers, call(i).a_registers + 4);
  }
  if (!kind.from_registers) product.a = operand_of(first.a, kind.a.bytes, kind.a_along_m, 64, name, "A");
  product.b = operand_of(first.b, kind.b.bytes, kind.b_along_n, n, name, "B");
  product.sums = &sums_of(mine, lanes, n / 2, name);
  begin_reading_operands(product);
  mine.queue.push_back(product);
}

// -- the product ---------------------------------------------------------------------------------------
template <class Sum, class D>
void compute(const Product &product) {
  const Wgmma &kind = *product.kind;
  const int n = product.n, count = n / 2, depth = 32 / kind.a.bytes;
  std::vector<Sum> a(size_t(64 * depth)), b(size_t(depth * n));
  std::vector<D> d(size_t(64 * n));
  unsigned *const values = product.sums->values.data();
  // Thread i of 128: rows as those of mma.m16n8, 16 for each warp; two columns of each 8.
  const auto each_of_d = [&](auto visit) {
    for (int i = 0; i < GROUP; i++)
      for (int r = 0; r < count; r++) {
        const int row = 16 * (i / WARP) + i % WARP / 4 + 8 * (r / 2 % 2), column = 8 * (r / 4) + 2 * (i % 4) + r % 2;
        visit(values[i * count + r], d[size_t(row * n + column)]);
      }
  };
  const auto put_a = [&](int row, int k, Sum x) { a[size_t(row * depth + k)] = x; };
  if (!kind.from_registers) read_operand<Sum>(product.a, kind.a, 64, put_a);
  for (int i = 0; kind.from_registers && i < GROUP; i++)
    for (int e = 0; e < 8; e++) {
      const char *const registers = reinterpret_cast<const char *>(&product.a_registers[size_t(4 * i)]);
      put_a(16 * (i / WARP) + i % WARP / 4 + 8 * (e / 2 % 2), 2 * (i % 4) + e % 2 + 8 * (e / 4),
            value_of<Sum>(kind.a, registers + 2 * e));
    }
  read_operand<Sum>(product.b, kind.b, n, [&](int column, int k, Sum x) { b[size_t(k * n + column)] = x; });
  each_of_d([](unsigned &held, D &placed) { memcpy(&placed, &held, 4); });
  add_product(d.data(), a.data(), b.data(), 64, n, depth, product.keep);
  each_of_d([](unsigned &held, D &placed) { memcpy(&held, &placed, 4); });
}

inline void take_place(const Product &product) {
  product.kind->a.whole ? compute<unsigned, int>(product) : compute<double, float>(product);
  const unsigned group = unsigned(self->number / GROUP), row = unsigned(self->block->warps.size()) + group;
  if (product.a.used) each_unit(product.a, 0, 64, [&](size_t at) { end_reading(at, 16, row, SEVERAL); });
  each_unit(product.b, 0, product.n, [&](size_t at) { end_reading(at, 16, row, SEVERAL); });
}

// Sums to which no product in flight adds are the threads' own again.
inline void give_back(Products &mine) {
  Thread *const threads = first_of_group();
  const auto in_flight = [&](const std::unique_ptr<Sums> &sums) {
    return std::any_of(mine.queue.begin(), mine.queue.end(), [&](const Product &x) { return x.sums == sums.get(); });
  };
  for (const auto &sums : mine.sums) {
    if (in_flight(sums)) continue;
    for (int i = 0; i < GROUP; i++) {
      for (int j = 0; j < 4 * sums->count; j++)
        if (sums->d[i][j] != char(0xff))
          die("thread %d changed an accumulator of a wgmma before wgmma_wait", threads[i].number);
      memcpy(sums->d[i], &sums->values[size_t(i * sums->count)], size_t(4 * sums->count));
      auto &busy = threads[i].busy;
      const auto its = [&](const Busy &x) { return x.begin == sums->d[i]; };
      busy.erase(std::remove_if(busy.begin(), busy.end(), its), busy.end());
      threads[i].touched = stamp;
    }
  }
  mine.sums.erase(std::remove_if(mine.sums.begin(), mine.sums.end(), [&](const auto &x) { return !in_flight(x); }),
                  mine.sums.end());
}

// Products take place that are committed and not in the last `pending` groups.
inline void wait_for_products(unsigned pending) {
  Products &mine = products_of(*self);
  size_t done = 0;
  for (const Product &product : mine.queue) {
    if (product.group + pending >= mine.group) break;
    take_place(product), done++;
  }
  mine.queue.erase(mine.queue.begin(), mine.queue.begin() + long(done));
  const size_t group = self->block->warps.size() + size_t(self->number / GROUP);
  const size_t entry = self->block->rank * of_block + group;
  Thread *const threads = first_of_group();
  for (int i = 0; i < GROUP; i++) threads[i].seen[entry] = stamp + 1;
  next_stamp();
  give_back(mine);
}

inline void begin_products() {
  products.clear(), products.resize(blocks.size() * blocks[0].groups.size());
}

inline void end_products() {
  for (const Product &product : products_of(*self).queue)
    die("thread %d ends while the wgmma on line %d is in flight: wgmma_wait comes first", self->number, product.line);
}

}  // namespace shim

// -- calls ---------------------------------------------------------------------------------------------
namespace shim {

#define SHIM_KIND(word, A, B, a_along_m, b_along_n, from_registers) {A, B, a_along_m, b_along_n, from_registers},
static const Wgmma KINDS[] = {SHIM_WGMMAS(SHIM_KIND)};
#undef SHIM_KIND

struct Issue {
  Call call;
  Kind kind;
  int n;
  const char *name;
};

}  // namespace shim

void shim_wgmma(shim::Kind kind, const char *name, int n, void *d, const unsigned *a_registers, unsigned long a,
                unsigned long b, int keep, int line) {
  using namespace shim;
  self->line = line;
  check_registers(name, line, d);
  const Issue mine = {{static_cast<float *>(d), a_registers, a, b, keep}, kind, n, name};
  static_assert(offsetof(Issue, call) == 0, "lanes give calls");
  collect_group(name, line, [](Lane *lanes) {
    const Issue &first = *static_cast<const Issue *>(lanes[0].in);
    issue(KINDS[int(first.kind)], first.n, first.name, lanes);
  }, &mine);
}

void wgmma_fence(int line) {
  shim::collect_group("wgmma_fence", line, [](shim::Lane *) {
    shim::next_stamp();
    for (int i = 0; i < shim::GROUP; i++) shim::first_of_group()[i].fence = shim::stamp;
  }, nullptr);
}

void wgmma_commit(int line) {
  shim::collect_group("wgmma_commit", line, [](shim::Lane *) {
    shim::products_of(*shim::self).group++;
    for (int i = 0; i < shim::GROUP; i++) shim::first_of_group()[i].commit = shim::stamp;
  }, nullptr);
}

void wgmma_wait_0(int line) {
  shim::collect_group("wgmma_wait_0", line, [](shim::Lane *) { shim::wait_for_products(0); }, nullptr);
}
void wgmma_wait_1(int line) {
  shim::collect_group("wgmma_wait_1", line, [](shim::Lane *) { shim::wait_for_products(1); }, nullptr);
}
void wgmma_wait_2(int line) {
  shim::collect_group("wgmma_wait_2", line, [](shim::Lane *) { shim::wait_for_products(2); }, nullptr);
}

// setmaxnreg, which a whole warpgroup executes.
void shim_registers(const char *name, int line) {
  shim::collect_group(name, line, [](shim::Lane *) {}, nullptr);
}

// Dynamic shared memory begins at 1024, as if the system had the first part, and static memory follows it.
unsigned shared_address(const void *p, int line) {
  const shim::On on(line);
  const size_t at = shim::cell_of(p, 1, nullptr);
  if (at == shim::NOT_SHARED) shim::die("shared_address on line %d: the address is not in shared memory", line);
  return shim::shared_address_of(at);
}
