/* The shared library for programs without Python: after the run time, features.c, and the tables of `ops.c_library`:
 * machines, kernels, rows and packings. */
#include <ctype.h>
#include <math.h>

static int machine = -1;
static const long once[3];

static int has_word(const char *text, const char *word) {
  size_t n = strlen(word);
  for (const char *p = text; (p = strstr(p, word)); p += n)
    if ((p == text || isspace((unsigned char)p[-1])) && (!p[n] || isspace((unsigned char)p[n]))) return 1;
  return 0;
}

/* Add those of the features in `unlisted`, which features.c does not read, that the system lists. */
static void read_unlisted(char *text, size_t size) {
  FILE *file = *unlisted ? fopen("/proc/cpuinfo", "r") : NULL;
  char *line = NULL;
  size_t room = 0, at = strlen(text);
  int found = 0;
  while (file && !found && getline(&line, &room, file) > 0) found = !strncmp(line, "flags", 5);
  for (const char *const *word = unlisted; found && *word; word++)
    if (has_word(line, *word)) at += (size_t)snprintf(text + at, size - at, "%s ", *word);
  free(line);
  if (file) fclose(file);
}

__attribute__((constructor)) static void detect(void) {
  static char text[1 << 12];
  read_features(text, sizeof text);
  read_unlisted(text, sizeof text);
#if defined(__x86_64__)
  /* Linux gives a process the state of AMX when it asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
  if (has_word(text, "amx_tile") && syscall(SYS_arch_prctl, 0x1023, 18))
    for (char *p = text; (p = strstr(p, "amx_"));) p[0] = '-';
#endif
  for (int i = 0; i < MACHINES && machine < 0; i++) {
    const char *const *word = machines[i].features;
    while (*word && has_word(text, *word)) word++;
    if (!*word) machine = i;
  }
  if (host_start()) machine = -1;
}

EXPORT const char *portmm_machine(void) { return machine < 0 ? "" : machines[machine].name; }

static double distance(long x, long y) { return fabs(log((double)x / (double)y)); }

/* The row for a product whose size is nearest, NULL if there is none of these types and layouts. */
static const struct row *find(const char *types, char a, char b, long m, long n, long k, long threads) {
  const struct row *best = NULL;
  double least = 0;
  for (long i = 0; i < ROWS; i++) {
    const struct row *r = rows + i;
    const struct kernel *x = kernels + r->kernel;
    long count = x->swap ? n : m;
    if (x->least == x->most ? count != x->most : count < x->least) continue; /* the rows of its register tiles */
    if (r->machine != machine || r->a != a || r->b != b || strcmp(r->types, types)) continue;
    double far = distance(n, r->n) + distance(k, r->k) + 0.25 * distance(threads, r->threads);
    far += m < r->least ? distance(m, r->least) : m > r->most ? distance(m, r->most) : 0;
    if (!best || far < least) best = r, least = far;
  }
  return best;
}

static int run(const char *types, char b_layout, long m, long n, long k, const void *a, long a_m, long a_k,
               const void *b, long b_k, long b_n, void *c, long c_m) {
  if (m < 0 || n < 0 || k < 0) return PORTMM_INVALID;
  if (!m || !n) return PORTMM_OK;
  long threads = portmm_get_num_threads();
  char a_layout = a_k == 1 || k == 1 ? 'r' : a_m == 1 ? 'c' : 0;
  const struct row *r = a_layout ? find(types, a_layout, b_layout, m, n, k, threads) : NULL;
  if (!r && a_layout == 'c' && m == 1) r = find(types, 'r', b_layout, m, n, k, threads);
  if (!r) return PORTMM_MISSING;
  const struct kernel *x = kernels + r->kernel;
  long workers = r->one ? 1 : threads;
  long work = x->workspace(x->swap ? n : m, x->swap ? m : n, k, 1, workers) * x->size;
  portmm_args args = {.m = m, .n = n, .k = k, .batch = 1, .a = a, .a_m = a_m, .a_k = a_k, .b = b, .b_k = b_k,
                      .b_n = b_n, .c = c, .c_m = c_m, .c_n = 1};
  return portmm_run((void *)x->function, work, workers, r->bytes, &args, once, 1) ? PORTMM_MEMORY : PORTMM_OK;
}

EXPORT int portmm_matmul(const char *types, long m, long n, long k, const void *a, long a_m, long a_k, const void *b,
                         long b_k, long b_n, void *c, long c_m) {
  char layout = b_n == 1 || n == 1 ? 'r' : b_k == 1 ? 'c' : 0;
  return layout ? run(types, layout, m, n, k, a, a_m, a_k, b, b_k, b_n, c, c_m) : PORTMM_MISSING;
}

static const struct packing *packing_of(const char *types) {
  for (long i = 0; i < PACKINGS; i++)
    if (packings[i].machine == machine && !strcmp(packings[i].types, types)) return packings + i;
  return NULL;
}

/* Units of a panel of k rows; sums of columns follow, where the layout has them: see `Family.panel`. */
static long panel(const struct packing *x, long k) {
  long units = (k + x->kr - 1) / x->kr * x->nr, size = x->bytes * x->kr, each = size < 4 ? 4 / size : 1;
  return x->sums ? (units + each - 1) / each * each + x->nr * 4 / size : units;
}

EXPORT long portmm_packed_bytes(const char *types, long k, long n) {
  const struct packing *x = packing_of(types);
  return x && k > 0 ? (n + x->nr - 1) / x->nr * panel(x, k) * x->kr * x->bytes : x ? 0 : -1;
}

EXPORT int portmm_pack(const char *types, long k, long n, const void *b, long b_k, long b_n, void *packed) {
  const struct packing *x = packing_of(types);
  if (!x || (b_n != 1 && b_k != 1)) return PORTMM_MISSING;
  long bytes[3] = {x->bytes, x->bytes, x->bytes * x->kr};
  portmm_args args = {.m = 1, .n = n, .k = k, .batch = 1, .a = b, .b = b, .b_k = b_k, .b_n = b_n, .c = packed};
  kernel_function pack = kernels[b_n == 1 ? x->by_rows : x->by_columns].function;
  return portmm_run((void *)pack, 1024, portmm_get_num_threads(), bytes, &args, once, 1) ? PORTMM_MEMORY : PORTMM_OK;
}

EXPORT int portmm_matmul_packed(const char *types, long m, long n, long k, const void *a, long a_m, long a_k,
                                const void *packed, void *c, long c_m) {
  const struct packing *x = packing_of(types);
  return x ? run(types, 'p', m, n, k, a, a_m, a_k, packed, x->nr, panel(x, k), c, c_m) : PORTMM_MISSING;
}
