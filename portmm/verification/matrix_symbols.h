/* Matrix units of a device for kernels that are verified, as PTX's manual has them: with g a lane over 4 and t the rest,
   register r of A has row g + 8 (r % 2) and columns 8 (r / 2) + 2 t and the next, register r of B rows 8 r + 2 t and the
   next and column g, and register r of sums row g + 8 (r / 2) and column 2 t + r % 2. */
static const int MISALIGNED = 1;

/* Words of all lanes, once each has its own there. */
static int exchanged(const void *words, int bytes) {
  const int side = self().shuffles++ & 1;
  __builtin_memcpy(self().words[side], words, bytes);
  meet(IN_WARP);
  return side;
}
static unsigned *of_lane(int lane, int side) { return fibers[threadIdx.x / WARP * WARP + lane].words[side]; }
static half_t part(unsigned word, int i) { return (half_t)(word >> 16 * i); }

/* Lane 8 i + j has the address of row j of matrix i. */
static void matrices(unsigned *to, const void *row, int n, bool transposed) {
  const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const bool reads = lane < 8 * n;
  if (reads && ((unsigned long)row & 15 || row < shared_area || row >= shared_area + SHARED)) exit(MISALIGNED);
  const int side = exchanged(reads ? row : (const void *)shared_area, 16);
  for (int i = 0; i < n; ++i) {
    const unsigned *low = of_lane(8 * i + 2 * t, side), *high = of_lane(8 * i + 2 * t + 1, side);
    const unsigned turned = part(low[g / 2], g & 1) | (unsigned)part(high[g / 2], g & 1) << 16;
    to[i] = transposed ? turned : of_lane(8 * i + g, side)[t];
  }
}
static void ldmatrix_x1(unsigned *to, const void *row) { matrices(to, row, 1, false); }
static void ldmatrix_x2(unsigned *to, const void *row) { matrices(to, row, 2, false); }
static void ldmatrix_x4(unsigned *to, const void *row) { matrices(to, row, 4, false); }
static void ldmatrix_trans_x1(unsigned *to, const void *row) { matrices(to, row, 1, true); }
static void ldmatrix_trans_x2(unsigned *to, const void *row) { matrices(to, row, 2, true); }
static void ldmatrix_trans_x4(unsigned *to, const void *row) { matrices(to, row, 4, true); }

static void multiplied(F *d, const unsigned *a, const unsigned *b, int depth) {
  const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, left = depth / 4;
  unsigned own[6];
  for (int i = 0; i < left; ++i) own[i] = a[i];
  for (int i = 0; i < left / 2; ++i) own[left + i] = b[i];
  const int side = exchanged(own, sizeof own);
  for (int r = 0; r < 4; ++r)
    for (int p = 0; p < depth; ++p) {
      const int at = p % 8 / 2, column = 2 * t + r % 2;
      const unsigned x = of_lane(4 * g + at, side)[r / 2 + 2 * (p / 8)], y = of_lane(4 * column + at, side)[left + p / 8];
      d[r] = F::fused(widened(part(x, p & 1)), widened(part(y, p & 1)), d[r]);
    }
}
static void mma_m16n8k8_f16(F *d, const unsigned *a, const unsigned *b) { multiplied(d, a, b, 8); }
static void mma_m16n8k16_f16(F *d, const unsigned *a, const unsigned *b) { multiplied(d, a, b, 16); }
static void mma_m16n8k16_bf16(F *d, const unsigned *a, const unsigned *b) { multiplied(d, a, b, 16); }
static unsigned pack_f16(F low, F high) { return narrowed(low) | (unsigned)narrowed(high) << 16; }
static unsigned pack_bf16(F low, F high) { return pack_f16(low, high); }
static half_t f16_of_f32(F x) { return narrowed(x); }
