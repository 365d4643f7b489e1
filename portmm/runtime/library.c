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
  /* The machine most like this one of those whose kernels need no feature that is not here. */
  for (int i = 0, most = 0; i < MACHINES; i++) {
    const char *const *word = machines[i].needs;
    int alike = 0;
    while (*word && has_word(text, *word)) word++;
    if (*word) continue;
    for (word = machines[i].features; *word; word++) alike += has_word(text, *word) ? 1 : -2;
    if (machine < 0 || alike > most) machine = i, most = alike;
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
  if (!types || m < 0 || n < 0 || k < 0) return PORTMM_INVALID;
  if (!m || !n) return PORTMM_OK;
  if (!a || !b || !c || (m > 1 && c_m < n)) return PORTMM_INVALID;
  long threads = portmm_get_num_threads();
  char a_layout = a_k == 1 || k == 1 ? 'r' : a_m == 1 ? 'c' : 0;
  const struct row *r = a_layout ? find(types, a_layout, b_layout, m, n, k, threads) : NULL;
  if (!r && a_layout == 'c' && m == 1) r = find(types, 'r', b_layout, m, n, k, threads);
  if (!r) return PORTMM_MISSING;
  const struct kernel *x = kernels + r->kernel;
  long workers = r->one ? 1 : threads;
  portmm_args args = {.m = m, .n = n, .k = k, .batch = 1, .a = a, .a_m = a_m, .a_k = a_k, .b = b, .b_k = b_k,
                      .b_n = b_n, .c = c, .c_m = c_m, .c_n = 1};
  long work = x->workspace(&args, x->swap ? n : m, x->swap ? m : n, workers) * x->size;
  return portmm_run((void *)x->function, work, workers, r->bytes, &args, once, 1) ? PORTMM_MEMORY : PORTMM_OK;
}

EXPORT int portmm_matmul(const char *types, long m, long n, long k, const void *a, long a_m, long a_k, const void *b,
                         long b_k, long b_n, void *c, long c_m) {
  if (!types) return PORTMM_INVALID;
  char layout = b_n == 1 || n == 1 ? 'r' : b_k == 1 ? 'c' : 0;
  return layout ? run(types, layout, m, n, k, a, a_m, a_k, b, b_k, b_n, c, c_m) : PORTMM_MISSING;
}

static const struct packing *packing_of(const char *types) {
  for (long i = 0; types && i < PACKINGS; i++)
    if (packings[i].machine == machine && !strcmp(packings[i].types, types)) return packings + i;
  return NULL;
}

/* Units of a panel of k rows; sums of columns follow, where the layout has them, and scales and offsets of groups are
 * among those of four bits: see `Family.panel`. */
static long panel(const struct packing *x, long k) {
  if (x->group) return ((k + x->group - 1) / x->group * 2 + (k + x->kr - 1) / x->kr) * x->nr;
  long units = (k + x->kr - 1) / x->kr * x->nr, size = x->bytes * x->kr, each = size < 4 ? 4 / size : 1;
  return x->sums ? (units + each - 1) / each * each + x->nr * 4 / size : units;
}

/* Bytes of a unit: eight of four bits are a word. */
static long unit_bytes(const struct packing *x) { return x->group ? 4 : x->kr * x->bytes; }

EXPORT long portmm_packed_bytes(const char *types, long k, long n) {
  const struct packing *x = packing_of(types);
  return x && k > 0 && n > 0 ? (n + x->nr - 1) / x->nr * panel(x, k) * unit_bytes(x) : x ? 0 : -1;
}

EXPORT long portmm_group(const char *types) {
  const struct packing *x = packing_of(types);
  return x ? x->group : -1;
}

static int run_packing(const struct packing *x, int kernel, portmm_args *args) {
  long bytes[3] = {x->bytes, x->bytes, unit_bytes(x)}, threads = portmm_get_num_threads();
  return portmm_run((void *)kernels[kernel].function, 1024, threads, bytes, args, once, 1) ? PORTMM_MEMORY : PORTMM_OK;
}

EXPORT int portmm_pack(const char *types, long k, long n, const void *b, long b_k, long b_n, void *packed) {
  const struct packing *x = packing_of(types);
  if (!x || x->group || (b_n != 1 && b_k != 1)) return PORTMM_MISSING;
  if (k < 0 || n < 0) return PORTMM_INVALID;
  if (!k || !n) return PORTMM_OK;
  if (!b || !packed || (unsigned long)packed % 64) return PORTMM_INVALID;
  portmm_args args = {.m = 1, .n = n, .k = k, .batch = 1, .a = b, .b = b, .b_k = b_k, .b_n = b_n, .c = packed};
  return run_packing(x, b_n == 1 ? x->by_rows : x->by_columns, &args);
}

EXPORT int portmm_pack_int4(const char *types, long k, long n, const unsigned char *codes, const float *scales,
                            const float *offsets, void *packed) {
  const struct packing *x = packing_of(types);
  if (!x || !x->group) return PORTMM_MISSING;
  if (k < 0 || n < 0) return PORTMM_INVALID;
  if (!k || !n) return PORTMM_OK;
  if (!codes || !scales || !offsets || !packed || (unsigned long)packed % 64) return PORTMM_INVALID;
  const portmm_operand of_groups[] = {{.p = (void *)scales}, {.p = (void *)offsets}};
  portmm_args args = {.m = 1, .n = n, .k = k, .batch = 1, .a = codes, .b = codes, .b_k = n, .b_n = 1, .c = packed,
                      .operands = of_groups};
  return run_packing(x, x->by_rows, &args);
}

EXPORT int portmm_matmul_packed(const char *types, long m, long n, long k, const void *a, long a_m, long a_k,
                                const void *packed, void *c, long c_m) {
  const struct packing *x = packing_of(types);
  if (!x) return types ? PORTMM_MISSING : PORTMM_INVALID;
  return run(types, x->group ? '4' : 'p', m, n, k, a, a_m, a_k, packed, x->nr, panel(x, k), c, c_m);
}

static const struct attention *find_attention(const char *type, long queries, long keys, long d, long dv, int flags) {
  const struct attention *best = NULL;
  const long threads = portmm_get_num_threads();
  double least = 0;
  for (long i = 0; i < ATTENTIONS; i++) {
    const struct attention *x = attentions + i;
    if (x->machine != machine || strcmp(x->type, type) || (x->causal | x->window << 1 | x->lse << 2) != flags) continue;
    if (queries < x->least || d % x->d_unit || dv % x->dv_unit) continue;
    double far = distance(queries, x->queries) + 0.5 * distance(keys, x->keys) + distance(d, x->d) +
                 0.25 * distance(threads, x->threads);
    if (!best || far < least) best = x, least = far;
  }
  return best;
}

EXPORT int portmm_attention(const char *type, long items, long heads, long kv_heads, long queries, long keys, long d,
                            long dv, const void *q, const void *k, const void *v, float scale, int causal, long window,
                            void *out, float *lse) {
  if (!type || items < 0 || heads < 0 || kv_heads < 1 || heads % kv_heads || queries < 0 || keys < 1 || d < 1 || dv < 1)
    return PORTMM_INVALID;
  if (!items || !heads || !queries) return PORTMM_OK;
  const struct attention *x = find_attention(type, queries, keys, d, dv, !!causal | (window > 0) << 1 | !!lse << 2);
  if (!x) return PORTMM_MISSING;
  const unsigned long at = (unsigned long)q | (unsigned long)v | (unsigned long)out;
  if (!q || !k || !v || !out || at % (unsigned long)x->bytes || (unsigned long)k % (unsigned long)x->align ||
      (unsigned long)lse % sizeof *lse)
    return PORTMM_INVALID;
  const portmm_operand table[] = {
      {(void *)q, heads * queries * d, d, 1, queries * d}, {(void *)k, kv_heads * keys * d, d, 1, keys * d},
      {(void *)v, kv_heads * keys * dv, dv, 1, keys * dv}, {out, heads * queries * dv, dv, 1, queries * dv},
      {lse, heads * queries, 1, 0, queries}};
  const long bytes[3] = {x->bytes, x->bytes, x->bytes};
  const long workers = (double)(items * heads) * (double)queries * (double)keys * (double)(d + dv) > 1e6 ? x->threads : 1;
  const portmm_args args = {.m = queries, .n = keys, .k = d, .batch = items * heads, .a_m = heads,
                            .a_k = heads / kv_heads, .b_k = window > 0 && window < queries + keys ? window : window > 0
                            ? queries + keys : keys, .b_n = x->step, .c_m = keys - queries, .c_n = dv, .c_batch = x->run,
                            .operands = table, .numbers = &scale};
  const long work = x->workspace(&args, queries, keys, workers);
  return portmm_run((void *)kernels[x->kernel].function, work, workers, bytes, &args, once, 1) ? PORTMM_MEMORY : PORTMM_OK;
}

/* Run the program of a function that is for the least number of threads that is not below the limit, or the largest.
 * Of `arrays` addresses the last `results` are written; they are not NULL, multiples of 4 bytes, and apart. */
__attribute__((unused)) static int call(const struct variant *x, char *const *at, const long *bytes, int arrays,
                                        int results, const float *numbers) {
  const long threads = portmm_get_num_threads();
  const struct variant *best = NULL;
  for (int i = 0; i < arrays; i++) {
    if (!at[i] || (unsigned long)at[i] % (bytes[i] % 4 ? 1 : 4)) return PORTMM_INVALID;
    for (int j = i + 1 > arrays - results ? i + 1 : arrays - results; j < arrays; j++)
      if (at[i] < at[j] + bytes[j] && at[j] < at[i] + bytes[i]) return PORTMM_INVALID;
  }
  for (; x->machine >= 0; x++)
    if (x->machine == machine && (!best || best->threads < threads)) best = x;
  if (!best) return PORTMM_MISSING;
  if (!best->arena) return best->run(at, numbers, NULL);
  thread_state *s = own_state();
  space *arena = s ? take_space(s, (size_t)best->arena) : NULL;
  int status = arena ? best->run(at, numbers, arena->data) : PORTMM_MEMORY;
  if (s) leave_space(s, arena);
  return status;
}
