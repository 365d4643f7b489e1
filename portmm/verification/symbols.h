/* The element type of a kernel that is verified: a number of an expression in the place of a float or an int.
   Vectors are arrays of these. Operators add expressions to a table, which is written out with the results. */
extern "C" {
void *calloc(unsigned long, unsigned long);
void *realloc(void *, unsigned long);
void free(void *);
void exit(int);
struct _IO_FILE;
extern struct _IO_FILE *stdout;
unsigned long fwrite(const void *, unsigned long, unsigned long, struct _IO_FILE *);
int fflush(struct _IO_FILE *);
void *mmap(void *, unsigned long, int, int, int, long);
int mprotect(void *, unsigned long, int);
int getpagesize(void);
void *memset(void *, int, unsigned long);
}

/* Memory that holds nothing, after a page that does so too, and before one that cannot be touched. */
static void *placed(unsigned long bytes) {
  const unsigned long page = getpagesize(), whole = page + (bytes + page - 1) / page * page;
  char *const x = (char *)mmap(0, whole + page, 3 /* read, write */, 0x22 /* private, anonymous */, -1, 0);
  if ((long)x == -1 || mprotect(x + whole, page, 0)) exit(1);
  memset(x, 0xff, whole);
  return x + whole - bytes;
}

typedef unsigned H;
static const H POISON = 0xffffffffu;
struct Node { H op, a, b, c; };
static Node *nodes;
static H *table, count, room;

static H &slot(const Node &x) {
  unsigned long h = x.op * 0x9e3779b97f4a7c15ul;
  h = (h ^ x.a) * 0x9e3779b97f4a7c15ul, h = (h ^ x.b) * 0x9e3779b97f4a7c15ul, h = (h ^ x.c) * 0x9e3779b97f4a7c15ul;
  for (H at = (H)(h >> 32) & (2 * room - 1);; at = (at + 1) & (2 * room - 1)) {
    const H i = table[at];
    if (!i) return table[at];
    const Node &y = nodes[i - 1];
    if (y.op == x.op && y.a == x.a && y.b == x.b && y.c == x.c) return table[at];
  }
}

static H make(H op, H a = 0, H b = 0, H c = 0) {
  if (count == room) {
    room = room ? 2 * room : 1 << 12;
    nodes = (Node *)realloc(nodes, room * sizeof(Node));
    free(table);
    table = (H *)calloc(2 * room, sizeof(H));
    for (H i = 0; i < count; ++i) slot(nodes[i]) = i + 1;
  }
  const Node x = {op, a, b, c};
  H &at = slot(x);
  if (!at) nodes[count] = x, at = ++count;
  return at - 1;
}

static H number(int op, int x) { return make(op, (H)x); }
static H real(float x) { union { float f; H h; } bits = {x}; return make(REAL, bits.h); }
static bool is(H x, H op) { return x != POISON && nodes[x].op == op; }
static int value(H x) { return (int)nodes[x].a; }
static bool holds(H x, bool y) { return is(x, MASK) && value(x) == y; }

static H operation(H op, H a) {
  if (a == POISON) return a;
  if (op == NEG && is(a, REAL)) return make(REAL, (H)value(a) ^ 0x80000000u);
  if (op == NOT && is(a, MASK)) return number(MASK, !value(a));
  if (op == BITS && is(a, FROM_BITS)) return nodes[a].a;
  if (op == FROM_BITS && is(a, PAIR) && !nodes[a].a) return nodes[a].b;
  if (op == FROM_BITS) {
    if (is(a, BITS)) return nodes[a].a;
    if (is(a, INTEGER)) return make(REAL, (H)value(a));
    if (is(a, AND) && is(nodes[a].a, BITS) && is(nodes[a].b, INTEGER) && value(nodes[a].b) == 0x7fffffff)
      return make(ABS, nodes[nodes[a].a].a);
    if (is(a, SELECT)) return make(SELECT, nodes[a].a, operation(FROM_BITS, nodes[a].b), operation(FROM_BITS, nodes[a].c));
  }
  return make(op, a);
}

/* Bits of one of two vectors are a selection, and maxima and minima are selections by certain comparisons. */
static H selected(H mask, H x, H y) {
  if (is(mask, MASK)) return value(mask) ? x : y;
  if (x == POISON || y == POISON || mask == POISON) return POISON;
  const H a = operation(FROM_BITS, x), b = operation(FROM_BITS, y);
  if (is(mask, MORE) && nodes[mask].a == a && nodes[mask].b == b) return operation(BITS, make(GREATER, a, b));
  if (is(mask, OR) && is(nodes[mask].b, NE)) {
    const Node &by = nodes[nodes[mask].a], &nan = nodes[nodes[mask].b];
    const bool same = nan.a == a && nan.b == a && by.a == a && by.b == b;
    if (same && by.op == MORE) return operation(BITS, make(MAX, b, a));
    if (same && by.op == LT) return operation(BITS, make(MIN, b, a));
  }
  if (is(mask, NE) && nodes[mask].a == a && nodes[mask].b == a && is(b, GREATER) && nodes[b].a == a)
    return operation(BITS, make(MAX, nodes[b].b, a));
  return make(SELECT, mask, x, y);
}

/* Of a pair of elements of 16 bits, each a float that has these as its upper half: the first number, 0, is zero. */
static H of_pair(H op, H a, H b) {
  if ((op == SHL || op == SHR) && is(a, PAIR) && is(b, INTEGER) && value(b) == 16)
    return op == SHL ? make(PAIR, 0, nodes[a].a) : make(PAIR, nodes[a].b, 0);
  if (op == OR && is(a, PAIR) && is(b, PAIR) && !nodes[a].b && !nodes[b].a) return make(PAIR, nodes[a].a, nodes[b].b);
  if (op == OR && is(a, PAIR) && is(b, PAIR) && !nodes[a].a && !nodes[b].b) return make(PAIR, nodes[b].a, nodes[a].b);
  return POISON;
}

/* A float that is rounded to its upper half, the nearest one, to even: its NaN stays one. */
static H rounded(H x) {
  const H u = operation(BITS, x), nan = make(NE, x, x), odd = make(AND, make(SHR, u, number(INTEGER, 16)), number(INTEGER, 1));
  const H up = make(ADD, make(ADD, u, number(INTEGER, 0x7fff)), odd), quiet = make(OR, u, number(INTEGER, 0x400000));
  return make(OR, make(AND, up, make(NOT, nan)), make(AND, quiet, nan));
}

/* The upper half of a float as one: a function of it, but for a float that has no other bits. Of its 24 bits a float
   less its upper half has 16, and that less its own upper half has 8. */
static bool less_upper(H x) { return is(x, SUB) && is(nodes[x].b, UPPER) && nodes[nodes[x].b].a == nodes[x].a; }
static H upper(H x) {
  if (is(x, REAL) && !(value(x) & 0xffff)) return x;
  return less_upper(x) && less_upper(nodes[x].a) ? x : make(UPPER, x);
}
static bool whole(H x, int n) { return is(x, INTEGER) && value(x) == n; }

static H operation(H op, H a, H b) {
  if (op == AND && is(a, BITS) && whole(b, -65536)) return make(PAIR, 0, upper(nodes[a].a));
  if (op == AND && is(a, SHR) && whole(b, 0xffff) && is(nodes[a].a, BITS) && whole(nodes[a].b, 16))
    return make(PAIR, upper(nodes[nodes[a].a].a), 0);
  if (op == AND && (holds(a, 0) || holds(b, 0))) return number(INTEGER, 0);
  if (op == AND && (holds(a, 1) || holds(b, 1))) return holds(a, 1) ? b : a;
  if (a == POISON || b == POISON) return POISON;
  const bool ints = is(a, INTEGER) && is(b, INTEGER);
  const H pair = of_pair(op, a, b);
  if (pair != POISON) return pair;
  if (op == SHR && is(a, OR) && is(b, INTEGER) && value(b) == 16 && is(nodes[a].b, AND)) {
    const H nan = nodes[nodes[a].b].b, x = is(nan, NE) ? nodes[nan].a : POISON;
    if (x != POISON && rounded(x) == a) return make(PAIR, x, 0);
  }
  if (op == ADD && is(a, INTEGER) && !value(a)) return b;
  if (op == ADD && ints) return number(INTEGER, (int)((H)value(a) + (H)value(b)));
  if (op == SUB && ints) return number(INTEGER, (int)((H)value(a) - (H)value(b)));
  if (op == LT && ints) return number(MASK, value(a) < value(b));
  if (op == LE && ints) return number(MASK, value(a) <= value(b));
  if (op == EQ && ints) return number(MASK, value(a) == value(b));
  if ((op == ADD || op == SUB) && is(b, REAL) && !value(b)) return a;
  if (op == ADD && is(a, REAL) && !value(a)) return b;
  if (op == OR) {
    if (is(a, INTEGER) && !value(a)) return b;
    if (is(b, INTEGER) && !value(b)) return a;
    if (holds(a, 0) || holds(b, 1)) return b;
    if (holds(b, 0) || holds(a, 1)) return a;
    if (is(a, AND) && is(b, AND) && is(nodes[b].b, NOT) && nodes[nodes[b].b].a == nodes[a].b)
      return selected(nodes[a].b, nodes[a].a, nodes[b].a);
  }
  return make(op, a, b);
}

static bool zero(H x) { return is(x, REAL) && !value(x); }
static H fused(H a, H b, H c) {
  if (a == POISON || b == POISON || c == POISON) return POISON;
  return zero(a) || zero(b) ? c : make(FMA, a, b, c);
}

/* A product is not computed before it is known whether something is added to it, as contraction does. */
template <class V> struct Product {
  V a, b;
  operator V() const { return V::apply(MUL, a, b); }
};

#define OPERATIONS(S, V)                                                                                             \
  friend Product<S> operator*(const V &a, const V &b) { return {S(a), S(b)}; }                                       \
  friend S operator+(const V &a, const V &b) { return S::apply(ADD, a, b); }                                         \
  friend S operator-(const V &a, const V &b) { return S::apply(SUB, a, b); }                                         \
  friend S operator/(const V &a, const V &b) { return S::apply(DIV, a, b); }                                         \
  friend S operator+(const Product<V> &p, const V &c) { return S::fused(p.a, p.b, c); }                              \
  friend S operator+(const V &c, const Product<V> &p) { return S::fused(p.a, p.b, c); }                              \
  friend S operator-(const V &a) { return S::negative(a); }                                                          \
  S &operator+=(const Product<V> &p) { return *this = S::fused(p.a, p.b, *this); }                                   \
  S &operator+=(const V &x) { return *this = S::apply(ADD, *this, x); }

struct I {
  H h;
  I() : h(POISON) {}
  I(int x) : h(number(INTEGER, x)) {}
  static I of(H h) { I x; x.h = h; return x; }
  static I apply(H op, I a, I b) { return of(operation(op, a.h, b.h)); }
  static I fused(I a, I b, I c) { return apply(ADD, apply(MUL, a, b), c); }
  static I negative(I a) { return of(operation(NEG, a.h)); }
  OPERATIONS(I, I)
  friend I operator&(const I &a, const I &b) { return apply(AND, a, b); }
  friend I operator|(const I &a, const I &b) { return apply(OR, a, b); }
  friend I operator^(const I &a, const I &b) { return apply(XOR, a, b); }
  friend I operator<(const I &a, const I &b) { return apply(LT, a, b); }
  friend I operator>(const I &a, const I &b) { return apply(LT, b, a); }
  friend I operator<=(const I &a, const I &b) { return apply(LE, a, b); }
  friend I operator==(const I &a, const I &b) { return apply(EQ, a, b); }
  friend I operator!=(const I &a, const I &b) { return apply(NE, a, b); }
  friend I operator>>(const I &a, int n) { return apply(SHR, a, I(n)); }
  friend I operator~(const I &a) { return of(operation(NOT, a.h)); }
};

struct F {
  H h;
  F() : h(POISON) {}
  F(int x) : h(real((float)x)) {}
  F(float x) : h(real(x)) {}
  F(double x) : h(real((float)x)) {}
  explicit F(I x) : h(operation(FLOAT, x.h)) {}
  static F of(H h) { F x; x.h = h; return x; }
  static F apply(H op, F a, F b) { return of(operation(op, a.h, b.h)); }
  static F fused(F a, F b, F c) { return of(::fused(a.h, b.h, c.h)); }
  static F negative(F a) { return of(operation(NEG, a.h)); }
  OPERATIONS(F, F)
  friend I operator<(const F &a, const F &b) { return I::of(operation(LT, a.h, b.h)); }
  friend I operator>(const F &a, const F &b) { return I::of(operation(MORE, a.h, b.h)); }
  friend I operator<=(const F &a, const F &b) { return I::of(operation(LE, a.h, b.h)); }
  friend I operator==(const F &a, const F &b) { return I::of(operation(EQ, a.h, b.h)); }
  friend I operator!=(const F &a, const F &b) { return I::of(operation(NE, a.h, b.h)); }
};

static inline void cast(F &to, F x) { to = x; }
static inline void cast(I &to, I x) { to = x; }
static inline void cast(I &to, F x) { to = I::of(operation(BITS, x.h)); }
static inline void cast(F &to, I x) { to = F::of(operation(FROM_BITS, x.h)); }
static inline void convert(F &to, I x) { to = F::of(operation(FLOAT, x.h)); }
static inline void convert(I &to, F x) { to = I::of(operation(INT, x.h)); }

template <class T, int N> struct Vec {
  T v[N];
  T &operator[](long i) { return v[i]; }
  const T &operator[](long i) const { return v[i]; }
  static Vec all(T x) { Vec r; for (int i = 0; i < N; ++i) r.v[i] = x; return r; }
  static Vec apply(H op, const Vec &a, const Vec &b) {
    Vec r;
    for (int i = 0; i < N; ++i) r.v[i] = T::apply(op, a.v[i], b.v[i]);
    return r;
  }
  static Vec fused(const Vec &a, const Vec &b, const Vec &c) {
    Vec r;
    for (int i = 0; i < N; ++i) r.v[i] = T::fused(a.v[i], b.v[i], c.v[i]);
    return r;
  }
  static Vec negative(const Vec &a) { Vec r; for (int i = 0; i < N; ++i) r.v[i] = T::negative(a.v[i]); return r; }
  template <class U> operator Vec<U, N>() const {
    Vec<U, N> r;
    for (int i = 0; i < N; ++i) cast(r.v[i], v[i]);
    return r;
  }
  OPERATIONS(Vec, Vec)
  friend Product<Vec> operator*(const T &a, const Vec &b) { return {all(a), b}; }
  friend Product<Vec> operator*(const Vec &a, const T &b) { return {a, all(b)}; }
  friend Vec operator+(const Vec &a, const T &b) { return apply(ADD, a, all(b)); }
  friend Vec operator-(const Vec &a, const T &b) { return apply(SUB, a, all(b)); }
  friend Vec operator-(const T &a, const Vec &b) { return apply(SUB, all(a), b); }
  friend Vec operator+(const Product<Vec> &p, const T &c) { return fused(p.a, p.b, all(c)); }
#define EACH(op, S) \
  friend S operator op(const Vec &a, const Vec &b) { \
    S r; \
    for (int i = 0; i < N; ++i) cast(r.v[i], a.v[i] op b.v[i]); \
    return r; \
  }
  typedef Vec<I, N> Mask;
  EACH(<, Mask) EACH(>, Mask) EACH(<=, Mask) EACH(==, Mask) EACH(!=, Mask)
  EACH(&, Mask) EACH(|, Mask) EACH(^, Mask)
  friend Vec operator&(const Vec &a, const T &b) { return a & all(b); }
  friend Vec operator|(const Vec &a, const T &b) { return a | all(b); }
  friend Vec operator~(const Vec &a) { Vec r; for (int i = 0; i < N; ++i) r.v[i] = ~a.v[i]; return r; }
  friend Vec operator<<(const Vec &a, int n) { return apply(SHL, a, all(T(n))); }
  friend Vec operator>>(const Vec &a, int n) { return apply(SHR, a, all(T(n))); }
  friend Vec operator>>(const Vec &a, const Vec &n) { return apply(SHR, a, n); }
};

static bool lane(unsigned mask, int i) { return mask >> i & 1; }
template <int N> static bool lane(const Vec<I, N> &mask, int i) {
  if (!is(mask.v[i].h, MASK)) exit(3);
  return value(mask.v[i].h);
}
/* Instructions that texts name: loads and stores of some lanes, roots and maxima. */
template <class V, class M> static void load_lanes(V &to, const V &from, const M &mask) {
  V r;
  for (int i = 0; i < (int)(sizeof(V) / 4); ++i) {
    if (lane(mask, i)) r.v[i] = from.v[i];
    else r.v[i] = 0;
  }
  to = r;
}
template <class V, class M> static void store_lanes(V &to, const V &from, const M &mask) {
  for (int i = 0; i < (int)(sizeof(V) / 4); ++i)
    if (lane(mask, i)) to.v[i] = from.v[i];
}
template <class V> static void root(V &to, const V &x) {
  for (int i = 0; i < (int)(sizeof(V) / 4); ++i) to.v[i].h = operation(SQRT, x.v[i].h);
}
template <class V> static void greater(V &to, const V &a, const V &b) {
  for (int i = 0; i < (int)(sizeof(V) / 4); ++i) to.v[i].h = operation(GREATER, a.v[i].h, b.v[i].h);
}
template <class R, class V> static R converted(const V &x) {
  R r;
  for (int i = 0; i < (int)(sizeof(R) / 4); ++i) convert(r.v[i], x.v[i]);
  return r;
}
template <class V> static V shuffled(const V &a, const V &b, const int *pick) {
  const int n = sizeof(V) / 4;
  V r;
  for (int i = 0; i < n; ++i) r.v[i] = pick[i] < n ? a.v[pick[i]] : b.v[pick[i] - n];
  return r;
}
template <class V> static V repeated(const F *p) {
  V r;
  for (int i = 0; i < (int)(sizeof(V) / 4); ++i) r.v[i] = p[i % 2];
  return r;
}
#define __builtin_convertvector(x, R) converted<R>(x)
#define shuffled(a, b, ...) ({ const int pick[] = {__VA_ARGS__}; shuffled(a, b, pick); })
#define float F
