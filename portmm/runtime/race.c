/* Races: the first calls of a route run some other kernels with the same results in turn, and the fastest one stays.
 * Follows extension.c in one translation unit.
 *
 * A route that may race adds up the time of its calls. When that is worth the work that rivals take, Python is asked for
 * them, and they come when they are built. In each round every kernel that is left runs one of the caller's calls, timed
 * by the cycle counter and divided by the work of the call, since calls of a class differ in M. A rival that has lost
 * too much is out; so is one that does not win by the median of its ratios to the route's own kernel, and in most
 * rounds. All state is shared; while one thread runs a timed call, others run the route's own kernel. A race
 * lives as long as its route, since threads come back to it from calls that they began earlier. */
enum { RACERS = 4, ROUNDS = 10 };
#define MOST_LOST 1.0 /* calls of the route's own kernel that a rival may lose before it is out */
#define LEAST_WON 0.97 /* median of a winner's ratios */

struct race {
  PyObject *task; /* called with the route to bring rivals, and with the route, a winner and its ratio at the end */
  route_object *rivals[RACERS]; /* the first is the route's own kernel, and NULL */
  enum { COUNTING, WAITING, RUNNING, DONE } state;
  double spent, after; /* seconds of calls, and of how many before rivals are asked for */
  int round, turn, count, busy, winner;
  double took[ROUNDS + 1][RACERS], lost[RACERS]; /* the first round warms caches, and does not count */
};

#pragma GCC push_options
#pragma GCC optimize("O0")
static void drop_rivals(struct race *x, int kept) {
  for (int i = 1; i < RACERS; i++)
    if (i != kept) Py_CLEAR(x->rivals[i]);
}

static void free_race(route_object *r) {
  if (!r->race) return;
  drop_rivals(r->race, 0);
  Py_XDECREF(r->race->task);
  PyMem_Free(r->race);
}

/* An error of the task is reported, and no error of the call that it follows. */
static void call_task(PyObject *task, PyObject *arguments) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject *done = arguments ? PyObject_CallObject(task, arguments) : NULL;
  if (!done) PyErr_WriteUnraisable(task);
  Py_XDECREF(done);
  Py_XDECREF(arguments);
  PyErr_Restore(type, value, trace);
}

/* The median ratio of a rival to the route's own kernel, or 2 if it does not win three rounds of four. */
static double ratio_of(const struct race *x, int i) {
  double sorted[ROUNDS];
  int won = 0;
  for (int j = 0; j < ROUNDS; j++) {
    const double ratio = x->took[j + 1][i] / x->took[j + 1][0];
    int at = j;
    for (; at > 0 && sorted[at - 1] > ratio; at--) sorted[at] = sorted[at - 1];
    sorted[at] = ratio;
    won += ratio < 1;
  }
  return 4 * won >= 3 * ROUNDS ? (sorted[(ROUNDS - 1) / 2] + sorted[ROUNDS / 2]) / 2 : 2;
}

static void end_race(route_object *r) {
  struct race *x = r->race;
  double best = LEAST_WON;
  for (int i = 1; i < x->count; i++)
    if (x->rivals[i] && ratio_of(x, i) < best) best = ratio_of(x, x->winner = i);
  x->state = DONE;
  drop_rivals(x, x->winner);
  PyObject *task = x->task;
  x->task = NULL;
  PyObject *winner = x->winner ? (PyObject *)x->rivals[x->winner] : (PyObject *)r;
  call_task(task, Py_BuildValue("OOd", r, winner, x->winner ? best : 1.0));
  Py_DECREF(task);
}

/* After a round: rivals that have lost too much are out. No round alone takes one out, since a call may be interrupted;
 * the first one runs code that no cache has. */
static void end_round(route_object *r) {
  struct race *x = r->race;
  int left = 0;
  for (int i = 1; i < x->count; i++) {
    if (!x->rivals[i]) continue;
    const double more = x->took[x->round][i] / x->took[x->round][0] - 1;
    const double most = x->round ? 0.9 * MOST_LOST : 0.5 * MOST_LOST;
    x->lost[i] += more < most ? more : most;
    if (x->lost[i] > MOST_LOST) Py_CLEAR(x->rivals[i]);
    left += x->rivals[i] != NULL;
  }
  if (x->round++ == ROUNDS || !left) end_race(r);
}
#pragma GCC pop_options

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

INLINE uint64_t cycles(void) {
#if defined __x86_64__
  return __builtin_ia32_rdtsc();
#elif defined __aarch64__
  uint64_t now;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#else
  return (uint64_t)(1e9 * seconds());
#endif
}

/* The kernel whose turn it is: every other round is in reverse order. */
INLINE int racer(const struct race *x) {
  return x->round & 1 ? x->count - 1 - x->turn : x->turn;
}

/* The next turn of one that is left; 0 after the last of a round. */
static int next_turn(struct race *x) {
  do x->turn++;
  while (x->turn < x->count && racer(x) && !x->rivals[racer(x)]);
  return x->turn < x->count;
}

static int run_in_race(route_object *r, portmm_args *p, const long *offsets, long count) {
  struct race *x = r->race;
  if (x->state == COUNTING) {
    const double start = seconds();
    const int failed = run_kernel(r, p, offsets, count);
    x->spent += seconds() - start;
    if (x->spent < x->after || x->state != COUNTING) return failed;
    x->state = WAITING;
    call_task(x->task, Py_BuildValue("(O)", r));
    return failed;
  }
  const double work = (double)p->m * (double)p->n * (double)p->k * (double)p->batch * (double)count;
  if (x->state != RUNNING || x->busy || work <= 0) return run_kernel(r, p, offsets, count);
  const int i = racer(x);
  route_object *chosen = (route_object *)Py_NewRef(i ? x->rivals[i] : r);
  x->busy = 1;
  const uint64_t start = cycles();
  const int failed = run_kernel(chosen, p, offsets, count);
  x->took[x->round][i] = (double)(cycles() - start) / work;
  x->busy = 0;
  Py_DECREF(chosen);
  if (!next_turn(x)) {
    end_round(r);
    x->turn = -1;
    next_turn(x);
  }
  return failed;
}

static int run_racing(route_object *r, portmm_args *p, const long *offsets, long count) {
  const route_object *winner = NULL; /* it stays as long as the route */
  int failed = 0;
  BEGIN_SHARED
  const struct race *x = r->race;
  if (x->state == DONE) winner = x->winner ? x->rivals[x->winner] : r;
  else failed = run_in_race(r, p, offsets, count);
  END_SHARED
  return winner ? run_kernel(winner, p, offsets, count) : failed;
}

#pragma GCC push_options
#pragma GCC optimize("O0")
/* Let a route race, once, after calls that took some seconds together. */
static PyObject *py_race(PyObject *module, PyObject *args) {
  PyObject *route, *task;
  double after;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!Od:race", &route_type, &route, &task, &after)) return NULL;
  route_object *r = (route_object *)route;
  if (!r->race) {
    if (!(r->race = PyMem_Calloc(1, sizeof *r->race))) return PyErr_NoMemory();
    r->race->task = Py_NewRef(task);
    r->race->after = after;
  }
  return Py_NewRef(Py_None);
}

/* Begin the rounds of a route that waits for rivals; without any its own kernel has won. With None for rivals it counts
 * again, and asks once more. */
static PyObject *py_start_race(PyObject *module, PyObject *args) {
  PyObject *route, *rivals;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!O:start_race", &route_type, &route, &rivals)) return NULL;
  route_object *r = (route_object *)route;
  if (rivals == Py_None) {
    if (r->race && r->race->state == WAITING) {
      r->race->spent = 0;
      r->race->state = COUNTING;
    }
    return Py_NewRef(Py_None);
  }
  if (!PyTuple_Check(rivals)) return PyErr_Format(PyExc_TypeError, "rivals are %R; need a tuple of routes, or None", rivals);
  const Py_ssize_t n = PyTuple_GET_SIZE(rivals);
  if (n >= RACERS) return PyErr_Format(PyExc_ValueError, "%zd rivals; at most %d", n, RACERS - 1);
  for (Py_ssize_t i = 0; i < n; i++) {
    route_object *rival = (route_object *)PyTuple_GET_ITEM(rivals, i);
    if (Py_TYPE(rival) != &route_type || memcmp(rival->elements, r->elements, sizeof r->elements))
      return PyErr_Format(PyExc_TypeError, "%R is no route for %U", rival, r->dtype);
  }
  if (!r->race || r->race->state != WAITING) return Py_NewRef(Py_None);
  if (!n) {
    r->race->state = DONE;
    Py_CLEAR(r->race->task);
    return Py_NewRef(Py_None);
  }
  for (Py_ssize_t i = 0; i < n; i++) r->race->rivals[i + 1] = (route_object *)Py_NewRef(PyTuple_GET_ITEM(rivals, i));
  r->race->count = (int)n + 1;
  r->race->state = RUNNING;
  return Py_NewRef(Py_None);
}

/* What a route does: "counting", "waiting", "running", or "done"; "" if it does not race. */
static PyObject *py_racing(PyObject *module, PyObject *route) {
  static const char *const names[] = {"counting", "waiting", "running", "done"};
  (void)module;
  if (Py_TYPE(route) != &route_type) return PyErr_Format(PyExc_TypeError, "%R is no route", route);
  const struct race *x = ((route_object *)route)->race;
  return PyUnicode_FromString(x ? names[x->state] : "");
}
#pragma GCC pop_options
