/* The cost model's operations on columns of doubles: see portmm/schedule/cost_tape.py, which makes the code.
 * Follows matmul.c in one translation unit. Each operation is a loop of its own, so that no two are contracted. */

enum { ADD, SUBTRACT, MULTIPLY, DIVIDE, MINIMUM, MAXIMUM, CEIL, FLOOR, REMAINDER, LESS, LESS_EQUAL, EQUAL, NOT_EQUAL, WHERE };
enum { STEP = 5 }; /* integers of an operation: what it does, the column made, three that are read */
#define EXACT 4503599627370496.0 /* 2**52: doubles from here on are integers */

/* A new class of M waits for these loops; the compiler of all else is told to be quick. */
#pragma GCC push_options
#pragma GCC optimize("O2", "tree-vectorize")
/* Without branches, so that it becomes vectors: a number below 2**52 plus 2**52 is rounded to an integer. Zeros keep
 * their sign, as in NumPy: they may be divided by. */
INLINE double rounded_down(double x) {
  const double size = __builtin_fabs(x), near = __builtin_copysign((size + EXACT) - EXACT, x);
  const double whole = __builtin_copysign(near > x ? near - 1 : near, x);
  return size < EXACT ? whole : x;
}

/* Of integers that are not negative, and below 2**63. */
static double remainder_of(double x, double y) {
  const long by = (long)y;
  return by ? (double)((long)x % by) : 0;
}

#define EACH(value)                             \
  for (Py_ssize_t i = 0; i < n; i++) d[i] = (value); \
  break

static void operate(int what, double *d, const double *a, const double *b, const double *c, Py_ssize_t n) {
  switch (what) {
    case ADD: EACH(a[i] + b[i]);
    case SUBTRACT: EACH(a[i] - b[i]);
    case MULTIPLY: EACH(a[i] * b[i]);
    case DIVIDE: EACH(a[i] / b[i]);
    case MINIMUM: EACH(a[i] < b[i] ? a[i] : b[i]);
    case MAXIMUM: EACH(a[i] > b[i] ? a[i] : b[i]);
    case CEIL: EACH(-rounded_down(-a[i]));
    case FLOOR: EACH(rounded_down(a[i]));
    case REMAINDER: EACH(remainder_of(a[i], b[i]));
    case LESS: EACH(a[i] < b[i]);
    case LESS_EQUAL: EACH(a[i] <= b[i]);
    case EQUAL: EACH(a[i] == b[i]);
    case NOT_EQUAL: EACH(a[i] != b[i]);
    case WHERE: EACH(a[i] != 0 ? b[i] : c[i]);
  }
}
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC optimize("O0")
/* A dense matrix of some type; NULL with an exception. */
static const array_object *dense_matrix(PyObject *x, int element) {
  const array_object *a = (const array_object *)x;
  if (Py_TYPE(x) == array_type && a->nd == 2 && element_of(a) == element && a->flags & NUMPY_ALIGNED &&
      a->strides[1] == elements[element].bytes && a->strides[0] == a->shape[1] * a->strides[1])
    return a;
  return PyErr_Format(PyExc_TypeError, "need a dense 2-D array of %s", elements[element].numpy), NULL;
}
#pragma GCC pop_options

/* tape(code, constants, sizes, shared): the last column that the code makes. `sizes` has an element for each number
 * of rows, `shared` has whole columns, or is None. */
static PyObject *py_tape(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  const array_object *code, *constants, *sizes, *shared = NULL;
  (void)module;
  if (count != 4) return PyErr_Format(PyExc_TypeError, "tape takes four arguments; got %zd", count);
  if (!(code = dense_matrix(args[0], S32)) || !(constants = dense_matrix(args[1], F64)) ||
      !(sizes = dense_matrix(args[2], F64)) || (args[3] != Py_None && !(shared = dense_matrix(args[3], F64))))
    return NULL;
  const Py_ssize_t n = constants->shape[1], rows = sizes->shape[1], steps = code->shape[0];
  const Py_ssize_t held = constants->shape[0], among = shared ? shared->shape[0] : 0, given = held + among;
  const Py_ssize_t first = given + sizes->shape[0];
  const int *at = (const int *)code->data;
  Py_ssize_t most = first;
  int good = code->shape[1] == STEP && steps > 0 && rows > 0 && n % rows == 0 && (!shared || shared->shape[1] == n);
  for (Py_ssize_t i = 0; good && i < steps; i++) {
    const int *x = at + i * STEP;
    good = x[0] >= ADD && x[0] <= WHERE && x[1] >= first && x[1] <= most;
    for (int j = 2; j < STEP; j++) good &= x[j] >= 0 && x[j] < most;
    if (good && x[1] == most) most++;
  }
  if (!good) return PyErr_Format(PyExc_ValueError, "the code of a tape does not fit its columns");
  double *work = PyMem_Malloc((size_t)((most - given) * n) * sizeof *work);
  PyObject *result = work ? empty_array(F64, 1, &n) : PyErr_NoMemory();
  if (result) {
    for (Py_ssize_t i = 0; i < first - given; i++)
      for (Py_ssize_t j = 0; j < n; j++) work[i * n + j] = ((const double *)sizes->data)[i * rows + j / (n / rows)];
#define COLUMN(k) ((k) < held ? (double *)constants->data + (k) * n : (k) < given ? (double *)shared->data + ((k) - held) * n : work + ((k) - given) * n)
    for (Py_ssize_t i = 0; i < steps; i++, at += STEP)
      operate(at[0], i == steps - 1 ? (double *)((array_object *)result)->data : COLUMN(at[1]), COLUMN(at[2]), COLUMN(at[3]),
              COLUMN(at[4]), n);
  }
  PyMem_Free(work);
  return result;
}
