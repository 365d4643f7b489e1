/* Loading a kernel and running it: workspace, thread count, shifted operands.
 * Follows portmm_args and pool.c in one translation unit. */
#define WORK_OWN (1l << 20) /* smaller workspaces stay with their thread, and do not count */
#define HUGE_PAGE (2l << 20)

typedef void (*kernel_function)(const portmm_args *args);

/* A kernel with what it needs around it. */
typedef struct {
  kernel_function function;
  size_t work;  /* bytes of workspace */
  long workers; /* most threads it was scheduled for */
  long bytes[3]; /* of an element of A, of B, or of a unit of a packed B, and of C */
} launch;

/* Memory of at least `*bytes`, and how much, or NULL. Panels that span many
 * pages are walked with large strides, hence the huge pages. */
static char *new_work(size_t *bytes) {
  size_t unit = *bytes >= 2 * (size_t)HUGE_PAGE ? (size_t)HUGE_PAGE : LINE;
  if (*bytes > PTRDIFF_MAX - unit) return NULL;
  *bytes = (*bytes + unit - 1) / unit * unit;
  char *work = aligned_alloc(unit, *bytes);
#ifdef MADV_HUGEPAGE
  if (work && unit != LINE) madvise(work, *bytes, MADV_HUGEPAGE);
#endif
  return work;
}

/* This thread's own workspace of at least `bytes`, or NULL. */
static char *own_work(thread_state *s, size_t bytes) {
  if (s->bytes >= bytes) return s->work;
  free(s->work);
  s->bytes = 0;
  if ((s->work = new_work(&bytes))) s->bytes = bytes;
  return s->work;
}

/* Free workspaces that wait until all others and `bytes` more are within `limit`, or none waits. */
static void make_room(long bytes, long limit) {
  for (long i = 0; i < SLOTS && atomic_load(&spaces.kept) > limit - bytes; i++)
    if (atomic_load_explicit(&spaces.waiting[i], memory_order_relaxed))
      drop_space(atomic_exchange(&spaces.waiting[i], NULL));
}

/* Bound the workspaces that are kept between calls; those that wait beyond the bound are freed. */
static void set_scratch(long bytes) {
  atomic_store(&spaces.limit, bytes);
  make_room(0, bytes);
}

/* A workspace of at least `bytes` for one call: that of the thread if it is large enough, or a new one, for which
 * others that wait are given up where there is no room for all. */
static space *take_space(thread_state *s, size_t bytes) {
  if (!s->slot) s->slot = 1 + atomic_fetch_add(&spaces.next, 1) % SLOTS;
  space *x = atomic_exchange(&spaces.waiting[s->slot % SLOTS], NULL);
  if (x && x->bytes >= bytes) return x;
  drop_space(x);
  const long limit = atomic_load(&spaces.limit);
  if ((long)bytes <= limit) make_room((long)bytes, limit);
  if (!(x = malloc(sizeof *x))) return NULL;
  x->bytes = bytes;
  if (!(x->data = new_work(&x->bytes))) return free(x), NULL;
  atomic_fetch_add(&spaces.kept, (long)x->bytes);
  return x;
}

/* After the call: it waits for the thread's next one if there is room. */
static void leave_space(thread_state *s, space *x) {
  if (!x) return;
  if (atomic_load(&spaces.kept) > atomic_load(&spaces.limit)) drop_space(x);
  else drop_space(atomic_exchange(&spaces.waiting[s->slot % SLOTS], x)); /* threads may share a slot */
}

static void clear_result(const portmm_args *p, long element) {
  for (long b = 0; b < p->batch; b++)
    for (long i = 0; i < p->m; i++)
      for (long j = 0; j < p->n; j++)
        memset((char *)p->c + (b * p->c_batch + i * p->c_m + j * p->c_n) * element, 0, (size_t)element);
}

/* Run the kernel once for each of `count` triples of element offsets (a, b, c). It uses the caller's argument block,
 * and restores its addresses; -1 when there is no memory for the workspace. A sum over nothing is zero. */
static int run_launch(const launch *r, portmm_args *p, const long *offsets, long count) {
  const char *const a = p->a, *const b = p->b;
  char *const c = p->c;
  space *large = NULL;
  thread_state *s = NULL;
  long limit = atomic_load_explicit(&pool.limit, memory_order_relaxed);
  /* A sum over no columns is still one for each row. */
  if (p->m <= 0 || (p->n <= 0 && !p->operands) || p->batch <= 0) return 0;
  p->workers = r->workers < limit ? r->workers : limit;
  p->pool = NULL;
  p->parallel = pool_parallel;
  if (r->work && p->k > 0) {
    if (!(s = own_state())) return -1;
    if (r->work <= WORK_OWN) p->work = own_work(s, r->work);
    else p->work = (large = take_space(s, r->work)) ? large->data : NULL;
    if (!p->work) return -1;
  }
  for (long i = 0; i < count; i++, offsets += 3) {
    p->a = a + offsets[0] * r->bytes[0];
    p->b = b + offsets[1] * r->bytes[1];
    p->c = c + offsets[2] * r->bytes[2];
    if (p->k > 0) r->function(p);
    else clear_result(p, r->bytes[2]);
  }
  p->a = a;
  p->b = b;
  p->c = c;
  leave_space(s, large);
  return 0;
}

/* A launch that lacks only addresses: what a plan is to code without Python. */
typedef struct {
  launch launch;
  portmm_args args;
  const long *offsets;
  long count;
  int direct; /* one call of the kernel by the calling thread, without a workspace */
} bound_launch;

/* A launch with its arguments; `workers` and `parallel` are for a direct call; `run_launch` sets both. */
static bound_launch bind_launch(launch r, portmm_args args, const long *offsets, long count) {
  args.workers = 1;
  args.parallel = pool_parallel;
  const int origin = count == 1 && !offsets[0] && !offsets[1] && !offsets[2];
  const int full = args.m > 0 && args.n > 0 && args.k > 0 && args.batch > 0;
  return (bound_launch){r, args, offsets, count, origin && full && r.workers <= 1 && !r.work};
}

/* Run a bound launch: 0, or -1 when there is no memory for the workspace. A `b` of NULL is the one that is bound. */
static int run_bound(const void *bound, const void *a, const void *b, void *c) {
  const bound_launch *x = bound;
  portmm_args p = x->args;
  p.a = a;
  p.b = b ? b : p.b;
  p.c = c;
  if (!x->direct) return run_launch(&x->launch, &p, x->offsets, x->count);
  x->launch.function(&p);
  return 0;
}

#ifndef PORTMM_PYTHON
/* The same services without Python, for a foreign function interface. */
#define EXPORT __attribute__((visibility("default")))
EXPORT int portmm_start(void) { return host_start(); }
EXPORT long portmm_get_num_threads(void) { return atomic_load(&pool.limit); }
EXPORT long portmm_pool_threads(void) { return atomic_load(&pool.spawned); }
EXPORT void portmm_set_num_threads(long threads) { atomic_store(&pool.limit, threads); }
EXPORT void portmm_set_scratch(long bytes) { set_scratch(bytes); }
EXPORT long portmm_scratch(void) { return atomic_load(&spaces.kept); }

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
  portmm_args own = *args;
  return run_launch(&r, &own, offsets, count);
}

/* A bound launch for `portmm_run_bound`, or NULL without memory; free() it. */
EXPORT void *portmm_bind(void *function, long work, long workers, const long *bytes, const portmm_args *args,
                         const long *offsets, long count) {
  bound_launch *x = malloc(sizeof *x + (size_t)count * 3 * sizeof *offsets);
  if (!x) return NULL;
  const launch r = {(kernel_function)function, (size_t)work, workers, {bytes[0], bytes[1], bytes[2]}};
  *x = bind_launch(r, *args, memcpy(x + 1, offsets, (size_t)count * 3 * sizeof *offsets), count);
  return x;
}

EXPORT int portmm_run_bound(const void *bound, const void *a, const void *b, void *c) { return run_bound(bound, a, b, c); }
EXPORT void portmm_unbind(void *bound) { free(bound); }
#endif
