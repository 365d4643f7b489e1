/* A device for kernels that are verified: threads of a block are contexts of one thread of the host, which meet at
   barriers and exchanges of warps, in one order and in the other. Shared memory holds nothing when a block begins. */
#define __device__
#define __forceinline__
#define __global__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __kernel
#define __local
#define restrict
#define reqd_work_group_size(...)
#define SHARED_BYTES(name) unsigned char *const name = shared_area
#define CLK_LOCAL_MEM_FENCE 0

typedef unsigned char uchar;
struct uchar2 { uchar v[2]; uchar2() {} uchar2(int) : v() {} };
struct ushort2 { unsigned short v[2]; ushort2() {} ushort2(int) : v() {} };
struct uint2 { unsigned v[2]; uint2() {} uint2(int) : v() {} };
struct uint4 { unsigned v[4]; uint4() {} uint4(int) : v() {} };

enum Wait { RUNS, AT_BARRIER, IN_WARP, ENDED };
struct Copy { char *to; const char *from; int size, bytes, group; };
struct Fiber {
  ucontext_t context;
  Wait wait;
  int shuffles, group, copies;
  F posted[2];
  unsigned words[2][8];
  Copy queue[1 << 12];
};
static const int STACK = 1 << 18, WARP = 32, STUCK = 5;
static struct { unsigned x, y, z; } threadIdx, blockIdx;
static Fiber *fibers;
static ucontext_t home;
static char *stacks;
static void (*kernel_call)();
static unsigned char *const shared_area = (unsigned char *)placed((SHARED + 1023) / 1024 * 1024);
static struct { void *at; unsigned long bytes; } shared_arrays[64];
static int shared_count;

/* An array of shared memory, which ends at a page of its own that cannot be touched. */
static void *shared_array(unsigned long bytes) {
  if (shared_count == 64) exit(STUCK);
  return (shared_arrays[shared_count++] = {placed(bytes), bytes}).at;
}

static Fiber &self() { return fibers[threadIdx.x]; }
static void meet(Wait wait) {
  self().wait = wait;
  swapcontext(&self().context, &home);
}
static void begun() {
  kernel_call();
  meet(ENDED);
}

/* Threads that wait for others go on when all of these wait as well. */
static bool release(int first, int last, Wait wait) {
  for (int i = first; i < last; ++i)
    if (fibers[i].wait != wait) return false;
  for (int i = first; i < last; ++i) fibers[i].wait = RUNS;
  return true;
}

static void run_block(int threads, bool backwards) {
  memset(shared_area, 0xff, SHARED);
  for (int i = 0; i < shared_count; ++i) memset(shared_arrays[i].at, 0xff, shared_arrays[i].bytes);
  for (int i = 0; i < threads; ++i) {
    Fiber &x = fibers[i];
    x.wait = RUNS, x.shuffles = x.group = x.copies = 0;
    getcontext(&x.context);
    x.context.uc_stack.ss_sp = stacks + (long)i * STACK;
    x.context.uc_stack.ss_size = STACK;
    makecontext(&x.context, begun, 0);
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (int i = 0; i < threads; ++i) {
      const int at = backwards ? threads - 1 - i : i;
      if (fibers[at].wait != RUNS) continue;
      threadIdx.x = at, moved = true;
      swapcontext(&home, &fibers[at].context);
    }
    for (int i = 0; i < threads; i += WARP) moved |= release(i, i + WARP < threads ? i + WARP : threads, IN_WARP);
    moved |= release(0, threads, AT_BARRIER);
  }
  for (int i = 0; i < threads; ++i)
    if (fibers[i].wait != ENDED) exit(STUCK);
}

static void launch(void (*call)(), int blocks, int slices, int threads, bool backwards) {
  static int most;
  if (threads > most) {
    free(fibers), free(stacks);
    fibers = (Fiber *)calloc(threads, sizeof(Fiber)), stacks = (char *)calloc(threads, STACK), most = threads;
  }
  kernel_call = call;
  for (int i = 0; i < blocks * slices; ++i) {
    const int at = backwards ? blocks * slices - 1 - i : i;
    blockIdx.x = at % blocks, blockIdx.y = at / blocks;
    run_block(threads, backwards);
  }
}

static void __syncthreads() { meet(AT_BARRIER); }
static void barrier(int) { meet(AT_BARRIER); }
static unsigned get_local_id(int) { return threadIdx.x; }
static unsigned get_group_id(int i) { return i ? blockIdx.y : blockIdx.x; }
static F shuffle_xor_f32(F x, int mask) {
  const int side = self().shuffles++ & 1, other = threadIdx.x ^ mask;
  self().posted[side] = x;
  meet(IN_WARP);
  return fibers[other].posted[side];
}

/* A copy arrives when its thread waits for it, not before. */
static void copy_async(int size, void *to, const void *from, int bytes) {
  if (self().copies == 1 << 12) exit(STUCK);
  self().queue[self().copies++] = {(char *)to, (const char *)from, size, bytes, self().group};
}
static void arrive(int pending) {
  int left = 0;
  for (int i = 0; i < self().copies; ++i) {
    const Copy &x = self().queue[i];
    if (x.group + pending < self().group)
      for (int j = 0; j < x.size; ++j) x.to[j] = j < x.bytes ? x.from[j] : 0;
    else
      self().queue[left++] = x;
  }
  self().copies = left;
}
static void copy_async_4(void *to, const void *from, int bytes) { copy_async(4, to, from, bytes); }
static void copy_async_8(void *to, const void *from, int bytes) { copy_async(8, to, from, bytes); }
static void copy_async_16(void *to, const void *from, int bytes) { copy_async(16, to, from, bytes); }
static void copy_async_commit() { ++self().group; }
static void copy_async_wait_0() { arrive(0); }
static void copy_async_wait_1() { arrive(1); }
static void copy_async_wait_2() { arrive(2); }
static void copy_async_wait_3() { arrive(3); }

/* An array of registers: elements that it lacks are told, by an index or by what lies around it. */
template <int n> struct Held {
  F before[4], at[n], behind[4];
  ~Held() {
    for (int i = 0; i < 4; ++i)
      if ((before[i].h & behind[i].h) != POISON) __builtin_trap();
  }
  template <class T> F &operator[](T i) {
    if (i < 0 || i >= n) __builtin_trap();
    return at[i];
  }
  operator F *() { return at; }
  template <class T> explicit operator T *() { return (T *)at; }
};

static I __float_as_int(F x) { return I::of(operation(BITS, x.h)); }
static F __int_as_float(I x) { return F::of(operation(FROM_BITS, x.h)); }
static I as_int(F x) { return __float_as_int(x); }
static F as_float(I x) { return __int_as_float(x); }
static F fmaf(F a, F b, F c) { return F::fused(a, b, c); }
static F fma(F a, F b, F c) { return F::fused(a, b, c); }
static F sqrtf(F x) { return F::of(operation(SQRT, x.h)); }
static F sqrt(F x) { return sqrtf(x); }
static F fabsf(F x) { return F::of(operation(ABS, x.h)); }
static F fabs(F x) { return fabsf(x); }
static I shifted(I x, int n) { return I::apply(SHL, x, I(n)); }
static I operator||(I a, I b) { return I::apply(OR, a, b); }
static I operator&&(I a, I b) { return I::apply(AND, a, b); }
static F choose(I mask, F a, F b) {
  return F::of(operation(FROM_BITS, selected(mask.h, operation(BITS, a.h), operation(BITS, b.h))));
}
static I choose(I mask, I a, I b) { return I::of(selected(mask.h, a.h, b.h)); }
static I choose(I mask, int a, int b) { return choose(mask, I(a), I(b)); }
/* Of numbers: which one of two is a NaN is not told apart here. */
static F fmaxf(F a, F b) { return F::of(operation(GREATER, a.h, b.h)); }
static F exp2_f32(F x) { return F::of(operation(EXP2, x.h)); }
static F exp2(F x) { return exp2_f32(x); }
static F least_f32(F a, F b) { return F::of(operation(MIN, a.h, b.h)); }
static F most_f32(F a, F b) { return F::of(operation(MAX, a.h, b.h)); }
