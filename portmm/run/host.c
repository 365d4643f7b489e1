/* Loading a kernel and running it: workspace, thread count, shifted operands.
 * Follows portmm_args and pool.c in one translation unit. */
#define WORK_KEEP (256l << 20) /* larger workspaces go back after the call */
#define HUGE_PAGE (2l << 20)

typedef void (*kernel_function)(const portmm_args *args);

/* A kernel with what it needs around it. */
typedef struct {
  kernel_function function;
  size_t work;  /* bytes of workspace */
  long workers; /* most threads it was scheduled for */
  long bytes[3]; /* of an element of A, of B, or of a unit of a packed B, and of C */
} launch;

/* This thread's workspace of at least `bytes`, or NULL. Panels that span many
 * pages are walked with large strides, hence the huge pages. */
static char *workspace(thread_state *s, size_t bytes) {
  if (s->bytes >= bytes) return s->work;
  free(s->work);
  size_t unit = bytes >= 2 * (size_t)HUGE_PAGE ? (size_t)HUGE_PAGE : LINE;
  s->bytes = 0;
  s->work = bytes > PTRDIFF_MAX - unit ? NULL : aligned_alloc(unit, (bytes + unit - 1) / unit * unit);
  if (!s->work) return NULL;
  s->bytes = (bytes + unit - 1) / unit * unit;
#ifdef MADV_HUGEPAGE
  if (unit != LINE) madvise(s->work, s->bytes, MADV_HUGEPAGE);
#endif
  return s->work;
}

static void clear_result(const portmm_args *p, long element) {
  for (long b = 0; b < p->batch; b++)
    for (long i = 0; i < p->m; i++)
      for (long j = 0; j < p->n; j++)
        memset((char *)p->c + (b * p->c_batch + i * p->c_m + j * p->c_n) * element, 0, (size_t)element);
}

/* Run the kernel once for each of `count` triples of element offsets (a, b, c);
 * -1 when there is no memory for the workspace. A sum over nothing is zero. */
static int run_launch(const launch *r, const portmm_args *given, const long *offsets, long count) {
  portmm_args p = *given;
  thread_state *s = NULL;
  long limit = atomic_load_explicit(&pool.limit, memory_order_relaxed);
  /* A sum over no columns is still one for each row. */
  if (p.m <= 0 || (p.n <= 0 && !p.operands) || p.batch <= 0) return 0;
  p.workers = r->workers < limit ? r->workers : limit;
  p.pool = NULL;
  p.parallel = pool_parallel;
  if (r->work && p.k > 0 && (!(s = own_state()) || !(p.work = workspace(s, r->work)))) return -1;
  for (long i = 0; i < count; i++, offsets += 3) {
    p.a = (const char *)given->a + offsets[0] * r->bytes[0];
    p.b = (const char *)given->b + offsets[1] * r->bytes[1];
    p.c = (char *)given->c + offsets[2] * r->bytes[2];
    if (p.k > 0) r->function(&p);
    else clear_result(&p, r->bytes[2]);
  }
  if (s && s->bytes > WORK_KEEP) {
    free(s->work);
    s->work = NULL;
    s->bytes = 0;
  }
  return 0;
}

#ifndef PORTMM_PYTHON
/* The same services without Python, for a foreign function interface. */
#define EXPORT __attribute__((visibility("default")))
EXPORT int portmm_start(void) { return host_start(); }
EXPORT long portmm_get_num_threads(void) { return atomic_load(&pool.limit); }
EXPORT long portmm_pool_threads(void) { return atomic_load(&pool.spawned); }
EXPORT void portmm_set_num_threads(long threads) { atomic_store(&pool.limit, threads); }

/* The address of `symbol` in `path`, or NULL with the loader's words in `error`. */
EXPORT void *portmm_open(const char *path, const char *symbol, char *error, long size) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void *found = library ? dlsym(library, symbol) : NULL;
  if (!found) snprintf(error, (size_t)size, "%s", dlerror());
  return found;
}

EXPORT int portmm_run(void *function, long work, long workers, const long *bytes, const portmm_args *args,
                      const long *offsets, long count) {
  launch r = {(kernel_function)function, (size_t)work, workers, {bytes[0], bytes[1], bytes[2]}};
  return run_launch(&r, args, offsets, count);
}
#endif
