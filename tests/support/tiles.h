/* Tiles in plain C, for machines without AMX: put before an emitted kernel, it takes the place of the
   instructions. Stricter than they are: what they would only get wrong is a trap here. */
static __thread struct {
  unsigned char rows[8];
  unsigned char bytes[8][16][64];
} tiles;

static int tile_rows(int d) {
  if (!tiles.rows[d]) __builtin_trap();
  return tiles.rows[d];
}

static void tile_configure(const unsigned char *rows, int count) {
  for (int d = 0; d < 8; ++d) {
    tiles.rows[d] = d < count ? rows[d] : 0;
    if (tiles.rows[d] > 16) __builtin_trap();
    for (int r = 0; r < 16; ++r)
      for (int i = 0; i < 64; ++i) tiles.bytes[d][r][i] = 0;
  }
}

static void tile_zero(int d) {
  for (int r = 0; r < tile_rows(d); ++r)
    for (int i = 0; i < 64; ++i) tiles.bytes[d][r][i] = 0;
}

static void tile_load(int d, const unsigned char *p, long step) {
  for (int r = 0; r < tile_rows(d); ++r)
    for (int i = 0; i < 64; ++i) tiles.bytes[d][r][i] = p[r * step + i];
}

static void tile_store(int d, unsigned char *p, long step) {
  for (int r = 0; r < tile_rows(d); ++r)
    for (int i = 0; i < 64; ++i) p[r * step + i] = tiles.bytes[d][r][i];
}

static void tile_shapes_agree(int d, int a, int b) {
  if (tile_rows(d) != tile_rows(a) || tile_rows(b) != 16) __builtin_trap();
}

#define INTEGERS(name, left) \
  static inline void name(int d, int a, int b) { \
    tile_shapes_agree(d, a, b); \
    for (int r = 0; r < tiles.rows[d]; ++r) \
      for (int n = 0; n < 16; ++n) { \
        unsigned sum; \
        __builtin_memcpy(&sum, &tiles.bytes[d][r][4 * n], 4); \
        for (int k = 0; k < 64; ++k) \
          sum += (unsigned)((left)tiles.bytes[a][r][k] * (signed char)tiles.bytes[b][k / 4][4 * n + k % 4]); \
        __builtin_memcpy(&tiles.bytes[d][r][4 * n], &sum, 4); \
      } \
  }
INTEGERS(tile_tdpbssd, signed char)
INTEGERS(tile_tdpbusd, unsigned char)

static inline float tile_bf16(const unsigned char *p) {
  union { unsigned u; float f; } x = {(unsigned)p[0] << 16 | (unsigned)p[1] << 24};
  return x.f;
}

static inline float tile_f16(const unsigned char *p) {
  const unsigned half = p[0] | (unsigned)p[1] << 8, rest = (half & 0x7fff) << 13;
  union { unsigned u; float f; } x = {.f = (float)(half & 0x3ff) * 0x1p-24f};
  if (half & 0x7c00) x.u = rest + (rest < 0x0f800000 ? 0x38000000 : 0x70000000);
  x.u |= (half & 0x8000) << 16;
  return x.f;
}

#define FLOATS(name, number) \
  static inline void name(int d, int a, int b) { \
    tile_shapes_agree(d, a, b); \
    for (int r = 0; r < tiles.rows[d]; ++r) \
      for (int n = 0; n < 16; ++n) { \
        float sum; \
        __builtin_memcpy(&sum, &tiles.bytes[d][r][4 * n], 4); \
        for (int k = 0; k < 32; ++k) \
          sum += number(&tiles.bytes[a][r][2 * k]) * number(&tiles.bytes[b][k / 2][4 * n + k % 2 * 2]); \
        __builtin_memcpy(&tiles.bytes[d][r][4 * n], &sum, 4); \
      } \
  }
FLOATS(tile_tdpbf16ps, tile_bf16)
FLOATS(tile_tdpfp16ps, tile_f16)

#define TILE_CONFIGURE(...) \
  do { \
    const unsigned char rows[] = {__VA_ARGS__}; \
    tile_configure(rows, sizeof(rows)); \
  } while (0)
#define TILE_KEEP() (void)0
#define TILE_RELEASE() tile_configure(0, 0)
#define TILE_ZERO(d) tile_zero(d)
#define TILE_LOAD(d, p, step) tile_load(d, (const unsigned char *)(p), (step) * (long)sizeof(*(p)))
#define TILE_STREAM(d, p, step) TILE_LOAD(d, p, step)
#define TILE_STORE(d, p, step) tile_store(d, (unsigned char *)(p), (step) * (long)sizeof(*(p)))
#define TILE_MAC(op, d, a, b) tile_##op(d, a, b)
