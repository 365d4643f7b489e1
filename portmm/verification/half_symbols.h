/* Elements of 16 bits of a kernel that is verified: numbers of expressions in a table of their own. To round to 16 bits
   is no operation of a field. What moves elements, in pairs or in vectors, moves their numbers. */
typedef unsigned short half_t;
static const half_t UNSET = 0xffff;
static const int FULL = 7;
static H half_values[1 << 16];
static unsigned half_count, half_room, *half_of;

/* The number of a value; 0 is zero, as the bits are. */
static half_t narrowed(F x) {
  if (x.h == POISON) return UNSET;
  if (x.h >= half_room) {
    half_of = (unsigned *)realloc(half_of, room * sizeof(unsigned));
    for (; half_room < room; ++half_room) half_of[half_room] = 0;
  }
  if (!half_of[x.h]) {
    if (half_count == UNSET) exit(FULL);
    half_values[half_count] = x.h, half_of[x.h] = ++half_count;
  }
  return (half_t)(half_of[x.h] - 1);
}
static F widened(half_t x) { return F::of(x == UNSET ? POISON : half_values[x]); }

/* Words of memory are two elements. */
static I pair(half_t low, half_t high) { return I::of(make(PAIR, widened(low).h, widened(high).h)); }
static half_t low_half(I x) {
  if (is(x.h, INTEGER) && !value(x.h)) return 0;
  return is(x.h, PAIR) ? narrowed(F::of(nodes[x.h].a)) : UNSET;
}
struct Word {
  half_t low = UNSET, high = UNSET;
  operator I() const { return pair(low, high); }
};
template <int N> struct Words {
  Word v[N];
  operator Vec<I, N>() const {
    Vec<I, N> r;
    for (int i = 0; i < N; ++i) r.v[i] = v[i];
    return r;
  }
  Words &operator=(const Vec<I, N> &x) {
    for (int i = 0; i < N; ++i) v[i] = {low_half(x.v[i]), low_half(x.v[i] >> 16)};
    return *this;
  }
};
template <class V> static void moved(void *to, const V *from, int bytes) { __builtin_memcpy(to, from, bytes); }
template <int N> static void moved(Word *to, const Vec<I, N> *from, int) {
  for (int i = 0; i < N; ++i) to[i] = {low_half(from->v[i]), low_half(from->v[i] >> 16)};
}
template <class R, class V> static R low_halves(const V &x) {
  R r;
  for (int i = 0; i < (int)(sizeof(R) / 2); ++i) r[i] = low_half(x.v[i]);
  return r;
}
template <class V, class S, class M> static void widen_some(V &to, const S &from, const M &mask) {
  for (int i = 0; i < (int)(sizeof(V) / 4); ++i) cast(to.v[i], pair(lane(mask, i) ? ((const half_t *)&from)[i] : 0, 0));
}
template <class V, class S> static void widen(V &to, const S &from) { widen_some(to, from, 0xffffffffu); }
template <class S, class V, class M> static void narrow_some(S &to, const V &from, const M &mask) {
  for (int i = 0; i < (int)(sizeof(V) / 4); ++i)
    if (lane(mask, i)) ((half_t *)&to)[i] = low_half(from.v[i]);
}
template <class R, class V> static void narrow(R &to, const V &from) {
  for (int i = 0; i < (int)(sizeof(R) / 2); ++i) to[i] = narrowed(from.v[i]);
}
template <class S, class R, class M> static void store_halves(S &to, const R &from, const M &mask) {
  for (int i = 0; i < (int)(sizeof(R) / 2); ++i)
    if (lane(mask, i)) ((half_t *)&to)[i] = from[i];
}
/* Two products of bfloat16, added to a float. */
template <class V, int N> static void dot_pairs(V &to, const Vec<I, N> &a, const Vec<I, N> &b) {
  for (int i = 0; i < N; ++i)
    for (int e = 0; e < 2; ++e) {
      const half_t x = low_half(e ? a.v[i] >> 16 : a.v[i]), y = low_half(e ? b.v[i] >> 16 : b.v[i]);
      to.v[i] = F::fused(widened(x), widened(y), to.v[i]);
    }
}
/* Two vectors of floats as one of elements of 16 bits, and these by their indices in another. */
template <int N> static void join_pairs(Vec<I, N> &to, const Vec<F, N> &high, const Vec<F, N> &low) {
  for (int i = 0; i < N; ++i) {
    const Vec<F, N> &from = 2 * i < N ? low : high;
    to.v[i] = I::of(make(PAIR, from.v[2 * i % N].h, from.v[2 * i % N + 1].h));
  }
}
template <int N> static H half_at(const Vec<I, N> &x, int i) {
  const H word = x.v[i / 2 % N].h;
  return is(word, PAIR) ? i & 1 ? nodes[word].b : nodes[word].a : POISON;
}
template <int N> static void permute_pairs(Vec<I, N> &to, const Vec<I, N> &x, const Vec<I, N> &at) {
  for (int i = 0; i < N; ++i) {
    if (!is(at.v[i].h, INTEGER)) exit(3);
    to.v[i] = I::of(make(PAIR, half_at(x, value(at.v[i].h) & 0xffff), half_at(x, value(at.v[i].h) >> 16)));
  }
}
/* One bit for each lane of a mask. */
template <int N> static int signs(const Vec<F, N> &x) {
  int bits = 0;
  for (int i = 0; i < N; ++i) {
    const H mask = operation(BITS, x.v[i].h);
    if (!is(mask, MASK)) exit(3);
    bits |= value(mask) << i;
  }
  return bits;
}
/* Tiles, in the place of instructions: rows of 64 bytes, of floats or of elements of 16 bits. */
static struct {
  unsigned char rows[8], bytes[8][16][64];
} tile_registers;

static int tile_rows(int d) {
  if (!tile_registers.rows[d]) exit(4);
  return tile_registers.rows[d];
}
static void tile_configure(const unsigned char *rows, int n) {
  memset(&tile_registers, 0xff, sizeof tile_registers);
  for (int d = 0; d < 8; ++d) tile_registers.rows[d] = d < n ? rows[d] : 0;
}
static void tile_zero(int d) {
  for (int r = 0; r < tile_rows(d); ++r)
    for (int i = 0; i < 16; ++i) ((F *)tile_registers.bytes[d][r])[i] = F::of(real(0));
}
static void tile_load(int d, const void *p, long step) {
  for (int r = 0; r < tile_rows(d); ++r) __builtin_memcpy(tile_registers.bytes[d][r], (const char *)p + r * step, 64);
}
static void tile_store(int d, void *p, long step) {
  for (int r = 0; r < tile_rows(d); ++r) __builtin_memcpy((char *)p + r * step, tile_registers.bytes[d][r], 64);
}
static void tile_tdpbf16ps(int d, int a, int b) {
  if (tile_rows(d) != tile_rows(a) || tile_rows(b) != 16) exit(4);
  for (int r = 0; r < tile_registers.rows[d]; ++r)
    for (int n = 0; n < 16; ++n) {
      F &sum = ((F *)tile_registers.bytes[d][r])[n];
      for (int k = 0; k < 32; ++k) {
        const half_t x = ((half_t *)tile_registers.bytes[a][r])[k], y = ((half_t *)tile_registers.bytes[b][k / 2])[2 * n + k % 2];
        if (x || y) sum = F::fused(widened(x), widened(y), sum);  /* not of zeros behind the last element */
      }
    }
}
#define TILE_CONFIGURE(...) \
  do { \
    const unsigned char rows[] = {__VA_ARGS__}; \
    tile_configure(rows, sizeof(rows)); \
  } while (0)
#define TILE_KEEP() (void)0
#define TILE_RELEASE() tile_configure(0, 0)
#define TILE_ZERO(d) tile_zero(d)
#define TILE_LOAD(d, p, step) tile_load(d, p, (step) * (long)sizeof(*(p)))
#define TILE_STREAM(d, p, step) TILE_LOAD(d, p, step)
#define TILE_STORE(d, p, step) tile_store(d, p, (step) * (long)sizeof(*(p)))
#define TILE_MAC(op, d, a, b) tile_##op(d, a, b)
