/* The thread pool: runs tasks 0..tasks-1 of one job at a time.
 *
 * The calling thread is worker 0 and does not depend on the others: a worker
 * joins an open job if it is awake in time, and the caller closes the job when
 * the tasks have run out. So a sleeping, late or missing worker costs speed,
 * never progress. All coordination is one 64-bit word, the gate:
 *     job number (32 bits) | workers allowed (16) | closed (1) | inside (15)
 * There is no lock: a fork can find the pool in any state and the child only
 * has to zero it.
 *
 * Idle workers spin for longer than a program's steps of one thread last
 * between two products (a decoder's norms and attention, 40 to 150 us), then
 * sleep on a word each, by what the file of the system has for that. One that
 * sleeps comes 50 to 80 us late on virtual machines: with 40 us of spinning, a
 * token of a decoder took 1.13 times as long. Sleepers are woken along a binary tree,
 * so that the caller pays for two wake-ups, whatever the number of workers. */
/* For what a call passes through: -Og inlines nothing by itself. */
#define INLINE static inline __attribute__((always_inline))

enum { POOL_MAX = 1024, LINE = 64, SPIN_NS = 200000, SPIN_BATCH = 32 };
enum { APART_NS = 1000000 }; /* see keep_apart */
#define GATE_INSIDE 0x7fffu
#define GATE_CLOSED 0x8000u
#define GATE_JOB(g) ((uint32_t)((g) >> 32))
#define GATE_WORKERS(g) ((long)(((g) >> 16) & 0xffff))

typedef void (*task_body)(const long *ctx, long task, long worker);

static struct {
  _Alignas(LINE) _Atomic uint64_t gate;
  _Alignas(LINE) _Atomic long open;        /* shares with tasks that are not yet handed out */
  _Alignas(LINE) _Atomic uint32_t waiting; /* the caller sleeps until nobody is inside */
  _Atomic uint32_t busy;                  /* some thread owns the pool */
  _Atomic long limit;                     /* threads per job, set_num_threads */
  /* written by the owner of the pool while the gate is closed: */
  task_body body;
  const long *ctx;
  long tasks, workers;
  long home;        /* the processor of the caller that workers are kept off, -1 for none */
  int64_t home_set; /* when they were told */
  _Atomic long spawned; /* workers 1..spawned exist */
  _Atomic long spin_ns; /* 0 when there are more threads than processors */
} pool = {.home = -1};

/* Of each worker: whether it sleeps, and how many tasks of its share are handed out, below the number of their job.
 * Shares of a job are all handed out before it ends, so that only those of workers that the last job lacked have other
 * numbers. */
static struct {
  _Alignas(LINE) _Atomic uint32_t asleep;
  pthread_t thread;
  _Alignas(LINE) _Atomic uint64_t taken;
} sleepers[POOL_MAX];

/* What one operating-system thread owns. */
typedef struct {
  char *work;
  size_t bytes;
  int inside; /* runs tasks of a job: a nested job is serial */
  long slot;  /* where its larger workspaces wait, counted from 1; 0 before the first */
} thread_state;
static pthread_key_t state_key;

/* Larger workspaces. One belongs to the call that runs; between calls it waits in the slot of its thread, from where a
 * thread takes it that would otherwise exceed what all may have: threads that rest keep nothing from others. */
enum { SLOTS = 256 };
typedef struct {
  char *data;
  size_t bytes;
} space;
static struct {
  _Atomic(space *) waiting[SLOTS];
  _Atomic long next, kept, limit; /* the next thread's slot; bytes of all spaces; how many there may be between calls */
} spaces = {.limit = 160l << 20};

static void drop_space(space *x) {
  if (!x) return;
  atomic_fetch_sub(&spaces.kept, (long)x->bytes);
  free(x->data);
  free(x);
}

static thread_state *own_state(void) {
  thread_state *s = pthread_getspecific(state_key);
  if (s) return s;
  s = calloc(1, sizeof *s);
  if (s && pthread_setspecific(state_key, s)) { free(s); s = NULL; }
  return s;
}

static void drop_state(void *p) {
  thread_state *s = p;
  if (s->slot) drop_space(atomic_exchange(&spaces.waiting[s->slot % SLOTS], NULL));
  free(s->work);
  free(s);
}

static inline void relax(void) {
#if defined(__x86_64__)
  __asm__ volatile("pause");
#elif defined(__aarch64__)
  __asm__ volatile("isb"); /* `yield` retires at once on most cores */
#endif
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Spin, for a bounded time, until ((gate & mask) == value) is `equal`. */
static void spin_until(uint64_t mask, uint64_t value, int equal) {
  long budget = atomic_load_explicit(&pool.spin_ns, memory_order_relaxed);
  int64_t start = 0;
  while (budget) {
    for (int i = 0; i < SPIN_BATCH; i++) {
      uint64_t gate = atomic_load_explicit(&pool.gate, memory_order_acquire);
      if (((gate & mask) == value) == equal) return;
      relax();
    }
    int64_t now = now_ns();
    if (!start) start = now;
    if (now - start > budget) return;
  }
}

static void wake_children(long me, long workers) {
  for (long child = 2 * me + 1; child <= 2 * me + 2 && child < workers; child++)
    if (atomic_load(&sleepers[child].asleep) && atomic_exchange(&sleepers[child].asleep, 0))
      wake(&sleepers[child].asleep);
}

/* The next task of a worker's share, of tasks first..last-1, or -1. */
static long take_task(long worker, uint32_t job, long first, long last) {
  _Atomic uint64_t *taken = &sleepers[worker].taken;
  uint64_t old = atomic_load_explicit(taken, memory_order_relaxed);
  for (;;) {
    long task = first + (GATE_JOB(old) == job ? (long)(uint32_t)old : 0);
    if (task >= last) return -1;
    uint64_t next = (uint64_t)job << 32 | (uint64_t)(task + 1 - first);
    if (!atomic_compare_exchange_weak_explicit(taken, &old, next, memory_order_relaxed, memory_order_relaxed)) continue;
    if (task + 1 == last) atomic_fetch_sub_explicit(&pool.open, 1, memory_order_relaxed);
    return task;
  }
}

/* A worker's share is neighbouring tasks, mostly those whose rows it had in the job before: they are in its L2. Then it
 * takes tasks of the shares that follow, whose workers are late or slow. */
static void run_tasks(long me, uint32_t job) {
  task_body body = pool.body;
  const long *ctx = pool.ctx;
  const long tasks = pool.tasks, workers = pool.workers;
  long task;
  for (long i = 0; i < workers && atomic_load_explicit(&pool.open, memory_order_relaxed) > 0; i++) {
    long w = (me + i) % workers;
    while ((task = take_task(w, job, tasks * w / workers, tasks * (w + 1) / workers)) >= 0) body(ctx, task, me);
  }
}

/* The gate of a job other than `seen`. The flag is raised before the gate is
 * read again, and a waker publishes the gate before it reads the flag, so one
 * of the two sees the other. Wherever such a pair meets, the first step is an
 * exchange: emulators of weakly ordered processors are seen to let a plain
 * store, sequentially consistent or not, be passed by the load behind it. */
static uint64_t await_job(long me, uint32_t seen, int spin) {
  const uint64_t job_bits = 0xffffffffull << 32;
  if (spin) spin_until(job_bits, (uint64_t)seen << 32, 0);
  uint64_t gate = atomic_load(&pool.gate);
  while (GATE_JOB(gate) == seen) {
    atomic_exchange(&sleepers[me].asleep, 1);
    gate = atomic_load(&pool.gate);
    if (GATE_JOB(gate) != seen) break;
    sleep_while(&sleepers[me].asleep, 1);
    gate = atomic_load(&pool.gate);
  }
  atomic_store(&sleepers[me].asleep, 0);
  return gate;
}

static void leave_job(void) {
  uint64_t gate = atomic_fetch_sub(&pool.gate, 1) - 1;
  if ((gate & GATE_CLOSED) && !(gate & GATE_INSIDE) && atomic_load(&pool.waiting) && atomic_exchange(&pool.waiting, 0))
    wake(&pool.waiting);
}

static void *worker_main(void *arg) {
  long me = (long)(intptr_t)arg;
  uint32_t seen = 0;
  int wanted = 1;
  thread_state *own = own_state();
  if (own) own->inside = 1;
  for (;;) {
    uint64_t gate = await_job(me, seen, wanted);
    int joined = 0;
    for (;;) {
      seen = GATE_JOB(gate);
      wanted = me < GATE_WORKERS(gate);
      if (!wanted || (gate & GATE_CLOSED)) break;
      if (atomic_compare_exchange_weak(&pool.gate, &gate, gate + 1)) { joined = 1; break; }
    }
    if (!joined) continue;
    wake_children(me, GATE_WORKERS(gate));
    run_tasks(me, seen);
    leave_job();
  }
  return NULL;
}

/* Make workers 1..workers-1 exist; with fewer, the job still gets done. */
static void spawn(long workers) {
  long have = atomic_load_explicit(&pool.spawned, memory_order_relaxed);
  if (have >= workers - 1) return;
  pthread_attr_t attr;
  sigset_t all, old;
  if (pthread_attr_init(&attr)) return;
  pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
  sigfillset(&all); /* signals are the interpreter's business */
  pthread_sigmask(SIG_SETMASK, &all, &old);
  for (; have < workers - 1; have++) {
    if (pthread_create(&sleepers[have + 1].thread, &attr, worker_main, (void *)(intptr_t)(have + 1))) break;
  }
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  pthread_attr_destroy(&attr);
  atomic_store(&pool.spawned, have);
  pool.home = -1;
  atomic_store(&pool.spin_ns, have + 1 <= processors() ? SPIN_NS : 0);
}

/* A system may wake a sleeper at the processor of the thread that wakes it, although others are idle, and let it wait
 * there until the job is done (Linux, two processors: a third of all jobs of a millisecond). So the few workers of a
 * small machine are kept off the processor of the caller. It moves seldom; several callers in turns do it often. */
static void keep_apart(void) {
  const long here = processor(), workers = atomic_load_explicit(&pool.spawned, memory_order_relaxed);
  if (here == pool.home || here < 0 || workers > APART_MAX) return;
  const int64_t now = now_ns();
  if (pool.home >= 0 && now - pool.home_set < APART_NS) return;
  pool.home = here;
  pool.home_set = now;
  for (long i = 1; i <= workers; i++) keep_off(i, sleepers[i].thread, here);
}

static void await_empty(void) {
  spin_until(GATE_INSIDE, 0, 1);
  while (atomic_load(&pool.gate) & GATE_INSIDE) {
    atomic_exchange(&pool.waiting, 1);
    if (!(atomic_load(&pool.gate) & GATE_INSIDE)) break;
    sleep_while(&pool.waiting, 1);
  }
  atomic_store(&pool.waiting, 0);
}

/* portmm_args.parallel */
static void pool_parallel(void *unused, task_body body, const long *ctx, long tasks, long workers) {
  (void)unused;
  thread_state *s = NULL;
  if (workers > tasks) workers = tasks;
  if (workers > POOL_MAX) workers = POOL_MAX;
  if (workers < 2 || !(s = own_state()) || s->inside || atomic_exchange(&pool.busy, 1)) {
    for (long task = 0; task < tasks; task++) body(ctx, task, 0);
    return;
  }
  s->inside = 1;
  spawn(workers);
  keep_apart();
  pool.body = body;
  pool.ctx = ctx;
  pool.tasks = tasks;
  for (long i = pool.workers; i < workers; i++) atomic_store_explicit(&sleepers[i].taken, 0, memory_order_relaxed);
  pool.workers = workers;
  atomic_store_explicit(&pool.open, workers, memory_order_relaxed);
  uint64_t job = (uint64_t)(GATE_JOB(atomic_load_explicit(&pool.gate, memory_order_relaxed)) + 1u);
  atomic_exchange(&pool.gate, job << 32 | (uint64_t)workers << 16);
  wake_children(0, workers);
  run_tasks(0, (uint32_t)job);
  if (atomic_fetch_or(&pool.gate, GATE_CLOSED) & GATE_INSIDE) await_empty();
  s->inside = 0;
  atomic_store_explicit(&pool.busy, 0, memory_order_release);
}

/* The child has one thread and none of the workers. */
static void after_fork(void) {
  for (long i = atomic_load(&pool.spawned); i > 0; i--) atomic_store(&sleepers[i].asleep, 0);
  atomic_store(&pool.gate, 0);
  pool.workers = 0; /* numbers of jobs begin again */
  atomic_store(&pool.waiting, 0);
  atomic_store(&pool.spawned, 0);
  pool.home = -1;
  forget_kept_off();
  atomic_store(&pool.busy, 0);
  renew_sleep();
  /* spaces that other threads' calls had are lost, and their memory is shared with the parent */
  long kept = 0;
  for (long i = 0; i < SLOTS; i++) {
    space *x = atomic_load(&spaces.waiting[i]);
    kept += x ? (long)x->bytes : 0;
  }
  atomic_store(&spaces.kept, kept);
}

/* Once per process, before anything else here; non-zero on failure. */
static int host_start(void) {
  if (atomic_load(&pool.limit)) return 0;
  if (pthread_key_create(&state_key, drop_state) || pthread_atfork(NULL, NULL, after_fork)) return -1;
  atomic_store(&pool.limit, processors());
  return 0;
}
