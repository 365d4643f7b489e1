/* Calls of a kind that Python has prepared: products with an epilogue, and attention without functions.
 * Follows general.c in one translation unit.
 *
 * A kind is described by words, as for plans: types, extents and strides of all arrays, those that the epilogue captures
 * too, and addresses of objects that are the same in each call, which the entry keeps alive. Extents that equal the
 * number of rows may stand for a class of them. Captured arrays and floats are read anew in each call. */
enum { CALL_WORDS = 192, CALL_OPERANDS = 16, CALL_RESULTS = 4, C_ORDER = 1 };

typedef struct {
  long words[CALL_WORDS];
  size_t count;
  long rows; /* of a product of matrices, or 0 */
  const array_object *arrays[CALL_OPERANDS]; /* A, B or its panels, out, and those captured */
  PyObject *fixed[CALL_OPERANDS];            /* objects whose addresses are words */
  float numbers[CALL_OPERANDS];
  PyObject *held[3 * CALL_OPERANDS]; /* captured objects: another thread may capture others meanwhile */
  int n_arrays, n_fixed, n_numbers, n_held;
} seen_call;

typedef struct {
  PyObject_HEAD
  route_object *route;
  PyObject *fixed;
  portmm_args args; /* sizes and strides */
  portmm_operand table[CALL_OPERANDS];
  int by_rows, several, has_out, n_results, n_sources, n_numbers;
  int sources[CALL_OPERANDS], numbers[CALL_OPERANDS];
  int element[CALL_RESULTS], nd[CALL_RESULTS];
  Py_ssize_t shape[CALL_RESULTS][MAX_ND];
} repeat_object;

static int see_array(seen_call *s, PyObject *x) {
  const array_object *a = (const array_object *)x;
  if (Py_TYPE(x) != array_type || a->nd < 1 || a->nd > MAX_ND || !(a->flags & NUMPY_ALIGNED)) return 0;
  const int element = element_of(a);
  if (element < 0 || s->n_arrays == CALL_OPERANDS || s->count + 2 + 2 * MAX_ND > CALL_WORDS) return 0;
  s->arrays[s->n_arrays++] = a;
  long *w = s->words + s->count;
  *w++ = a->nd << 8 | element;
  for (int i = 0; i < a->nd; i++) {
    *w++ = a->shape[i] == s->rows && s->rows > 2 * CLASSES ? -last_of_class(s->rows) : a->shape[i];
    *w++ = a->strides[i];
  }
  s->count = (size_t)(w - s->words);
  return 1;
}

static int see_object(seen_call *s, PyObject *x) {
  if (s->n_fixed == CALL_OPERANDS || s->count + 2 > CALL_WORDS) return 0;
  s->fixed[s->n_fixed++] = x;
  s->words[s->count++] = (long)x;
  return 1;
}

static int see_packed(seen_call *s, PyObject *x) {
  const packed_object *p = (const packed_object *)x;
  if (!PyObject_TypeCheck(x, &packed_type) || PyTuple_GET_SIZE(p->shape) != 2) return 0;
  if (!see_object(s, (PyObject *)Py_TYPE(x)) || !see_object(s, p->family)) return 0;
  s->words[s->count++] = p->k;
  s->words[s->count++] = p->n;
  return see_array(s, (PyObject *)p->owner);
}

/* What a function captures in a variable, a new reference: an array, a number, or what is the same in each call. */
static int see_captured(seen_call *s, PyObject *x) {
  if (!x) return 0;
  if (s->n_held == 3 * CALL_OPERANDS) return Py_DECREF(x), 0;
  s->held[s->n_held++] = x;
  if (PyFloat_CheckExact(x)) {
    if (s->n_numbers == CALL_OPERANDS || s->count + 1 > CALL_WORDS) return 0;
    s->words[s->count++] = -1;
    s->numbers[s->n_numbers++] = (float)PyFloat_AS_DOUBLE(x);
    return 1;
  }
  if (Py_TYPE(x) == array_type) return see_array(s, x);
  return see_object(s, x);
}

/* After a call. */
static void forget_seen(seen_call *s) {
  while (s->n_held) Py_DECREF(s->held[--s->n_held]);
}

/* A new reference to a value of a dictionary, or NULL, maybe with an exception. */
INLINE PyObject *value_of(PyObject *dictionary, PyObject *key) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject *x = NULL;
  (void)PyDict_GetItemRef(dictionary, key, &x);
  return x;
#else
  return Py_XNewRef(PyDict_GetItemWithError(dictionary, key));
#endif
}

/* A call of a product with an epilogue whose names of globals are known; 0 if it needs Python. `forget_seen` follows. */
static int see_product(seen_call *s, PyObject *function, PyObject *names, PyObject *const *v) {
  s->count = 0;
  s->n_arrays = s->n_fixed = s->n_numbers = s->n_held = 0;
  if (Py_TYPE(v[0]) != array_type) return 0;
  const array_object *a = (const array_object *)v[0];
  const int is_array = Py_TYPE(v[1]) == array_type;
  s->rows = a->nd == 2 && (!is_array || ((const array_object *)v[1])->nd == 2) ? a->shape[0] : 0;
  PyObject *closure = PyFunction_GET_CLOSURE(function), *globals = PyFunction_GET_GLOBALS(function);
  if (!see_object(s, PyFunction_GET_CODE(function)) || !see_object(s, v[3]) || !see_object(s, v[4])) return 0;
  if (!see_array(s, v[0]) || !(is_array ? see_array(s, v[1]) : see_packed(s, v[1]))) return 0;
  if (v[2] != Py_None && !see_array(s, v[2])) return 0;
  for (Py_ssize_t i = 0; closure && i < PyTuple_GET_SIZE(closure); i++)
    if (!see_captured(s, PyCell_Get(PyTuple_GET_ITEM(closure, i)))) return 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
    PyObject *x = value_of(globals, PyTuple_GET_ITEM(names, i));
    if (!x && PyErr_Occurred()) return PyErr_Clear(), 0;
    if (!(x ? see_captured(s, x) : see_object(s, Py_None))) return 0;
  }
  return 1;
}

/* The names of globals that a function reads, as they were registered with its code; NULL without. */
static PyObject *names_of(PyObject *function) {
  if (!PyFunction_Check(function) || PyFunction_GET_DEFAULTS(function) || PyFunction_GET_KW_DEFAULTS(function)) return NULL;
  const long code = (long)PyFunction_GET_CODE(function);
  return memo_get(&read_names, &code, 1);
}

/* The bytes that an array spans. */
INLINE void span(const array_object *a, const char **low, const char **high) {
  *low = *high = a->data;
  int empty = 0;
  for (int i = 0; i < a->nd; i++) {
    const Py_ssize_t reach = (a->shape[i] - 1) * a->strides[i];
    *(reach < 0 ? low : high) += reach;
    empty |= a->shape[i] == 0;
  }
  *high += elements[element_of(a)].bytes;
  if (empty) *low = *high = a->data;
}

/* Whether kernels may write to `out`, the array after A and B: it overlaps none of the others. */
static int is_apart(const seen_call *s) {
  const char *low, *high, *from, *to;
  if (!(s->arrays[2]->flags & NUMPY_WRITEABLE)) return 0;
  span(s->arrays[2], &low, &high);
  for (int i = 0; i < s->n_arrays; i++) {
    span(s->arrays[i], &from, &to);
    if (i != 2 && overlap(low, high, from, to)) return 0;
  }
  return 1;
}

/* The results of a call, or NULL with an exception. */
static PyObject *run_repeat(const repeat_object *r, const seen_call *s, PyObject *out) {
  PyObject *results[CALL_RESULTS] = {NULL};
  portmm_operand table[CALL_OPERANDS];
  float numbers[CALL_OPERANDS];
  portmm_args p = r->args;
  int failed = 0;
  if (r->by_rows) p.m = s->rows;
  for (int i = 0; i < r->n_results; i++) {
    Py_ssize_t shape[MAX_ND];
    memcpy(shape, r->shape[i], sizeof shape);
    if (r->by_rows) shape[0] = s->rows;
    results[i] = !i && r->has_out ? Py_NewRef(out) : empty_array(r->element[i], r->nd[i], shape);
    failed |= !results[i];
  }
  if (!failed) {
    p.a = s->arrays[0]->data;
    p.b = s->arrays[1]->data;
    p.c = ((array_object *)results[0])->data;
    for (int i = 0; i < r->n_sources + r->n_results - 1; i++) {
      const array_object *x = i < r->n_sources ? s->arrays[r->sources[i]] : (array_object *)results[i - r->n_sources + 1];
      table[i] = r->table[i];
      table[i].p = x->data + (long)r->table[i].p;
    }
    for (int i = 0; i < r->n_numbers; i++) numbers[i] = s->numbers[r->numbers[i]];
    p.operands = table;
    p.numbers = numbers;
    failed = run_route(r->route, &p, origin, 1);
  }
  PyObject *result = NULL;
  if (!failed && r->several) result = PyTuple_New(r->n_results);
  for (int i = 0; i < r->n_results; i++)
    if (result) PyTuple_SET_ITEM(result, i, results[i]);
    else if (failed || r->several || i) Py_XDECREF(results[i]);
  return result || failed || r->several ? result : results[0];
}

/* repeat(function, a, b, out, dtype, settings): the results of a call of a known kind, else NotImplemented. */
static PyObject *py_repeat(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  seen_call s;
  (void)module;
  if (n != 6) return PyErr_Format(PyExc_TypeError, "repeat takes 6 arguments; got %zd", n);
  PyObject *names, *x = NULL;
  BEGIN_SHARED
  names = Py_XNewRef(names_of(args[0]));
  END_SHARED
  s.n_held = 0;
  if (names && see_product(&s, args[0], names, args + 1)) {
    BEGIN_SHARED
    x = memo_get(&calls, s.words, s.count);
    if (!x && s.count < CALL_WORDS) {
      s.words[s.count] = s.rows;
      x = memo_get(&calls, s.words, s.count + 1);
    }
    Py_XINCREF(x);
    END_SHARED
  }
  Py_XDECREF(names);
  const int known = x && !(((repeat_object *)x)->has_out && !is_apart(&s));
  PyObject *result = known ? run_repeat((repeat_object *)x, &s, args[3]) : Py_NewRef(Py_NotImplemented);
  Py_XDECREF(x);
  forget_seen(&s);
  return result;
}

#pragma GCC push_options
#pragma GCC optimize("O0")
static void repeat_dealloc(repeat_object *r) {
  Py_XDECREF(r->route);
  Py_XDECREF(r->fixed);
  Py_TYPE(r)->tp_free((PyObject *)r);
}

static PyTypeObject repeat_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "portmm.runtime.Repeat",
    .tp_basicsize = sizeof(repeat_object),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)repeat_dealloc,
};

/* A tuple of at most CALL_OPERANDS numbers below `bound`; their count, or -1. */
static int get_indices(PyObject *tuple, int bound, int *to) {
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) > CALL_OPERANDS) return -1;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
    const long x = PyLong_AsLong(PyTuple_GET_ITEM(tuple, i));
    if (x < 0 || x >= bound) return -1;
    to[i] = (int)x;
  }
  return (int)PyTuple_GET_SIZE(tuple);
}

/* The rows of a table of operands, without addresses; 0 if they are not `count`. */
static int get_table(PyObject *x, int count, portmm_operand *to) {
  const array_object *a = (const array_object *)x;
  if (count > CALL_OPERANDS || Py_TYPE(x) != array_type || a->nd != 2 || a->shape[0] < count || a->strides[0] != sizeof *to)
    return 0;
  memcpy(to, a->data, (size_t)count * sizeof *to);
  return 1;
}

static PyObject *fixed_of(const seen_call *s) {
  PyObject *fixed = PyTuple_New(s->n_fixed);
  for (int i = 0; fixed && i < s->n_fixed; i++) PyTuple_SET_ITEM(fixed, i, Py_NewRef(s->fixed[i]));
  return fixed;
}

/* Shapes and types of results; 0 if they are too many. */
static int get_results(PyObject *x, repeat_object *r) {
  PyObject *shape, *name;
  if (!PyTuple_Check(x) || PyTuple_GET_SIZE(x) < 1 || PyTuple_GET_SIZE(x) > CALL_RESULTS) return 0;
  for (r->n_results = 0; r->n_results < PyTuple_GET_SIZE(x); r->n_results++) {
    const int i = r->n_results;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(x, i), "OO", &shape, &name)) return 0;
    r->element[i] = element_named(name);
    r->nd[i] = get_sizes(shape, r->shape[i], "shape");
    if (r->element[i] < 0 || r->nd[i] < 1) return 0;
  }
  return 1;
}

/* keep_call(call, names, route, numbers, template, sources, constants, results, several, by_class): prepare further
 * calls of a kind. `call` has the arguments of `repeat`, `numbers` those of `make_plan`, with an M of 0 for that of the
 * call; the others are those of `call_fastpath.FastPath`. False if there are more of something than fit. */
static PyObject *py_keep_call(PyObject *module, PyObject *args) {
  PyObject *call, *names, *route, *numbers, *template, *sources, *constants, *results;
  int several, by_class;
  long v[NUMBERS];
  seen_call s;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!O!O!O!OOOOpp:keep_call", &PyTuple_Type, &call, &PyTuple_Type, &names, &route_type, &route,
                        &PyTuple_Type, &numbers, &template, &sources, &constants, &results, &several, &by_class))
    return NULL;
  if (PyTuple_GET_SIZE(call) != 6 || PyTuple_GET_SIZE(numbers) != NUMBERS)
    return PyErr_Format(PyExc_ValueError, "keep_call got %R and %R", call, numbers);
  for (int i = 0; i < NUMBERS; i++)
    if ((v[i] = PyLong_AsLong(PyTuple_GET_ITEM(numbers, i))) == -1 && PyErr_Occurred()) return NULL;
  PyObject **given = ((PyTupleObject *)call)->ob_item;
  repeat_object *r = PyObject_New(repeat_object, &repeat_type);
  if (!r) return NULL;
  memset((char *)r + sizeof(PyObject), 0, sizeof *r - sizeof(PyObject));
  r->route = (route_object *)Py_NewRef(route);
  set_numbers(&r->args, v);
  r->by_rows = !v[0];
  r->several = several;
  r->has_out = given[3] != Py_None;
  s.n_held = 0;
  int fits = PyFunction_Check(given[0]) && see_product(&s, given[0], names, given + 1) && get_results(results, r);
  fits = fits && (r->n_sources = get_indices(sources, s.n_arrays, r->sources)) >= 0 &&
         (r->n_numbers = get_indices(constants, s.n_numbers, r->numbers)) >= 0 &&
         get_table(template, r->n_sources + r->n_results - 1, r->table) && s.count < CALL_WORDS &&
         (r->fixed = fixed_of(&s));
  if (fits) {
    const long code = (long)PyFunction_GET_CODE(given[0]);
    if (!by_class) s.words[s.count++] = s.rows;
    memo_insert(&read_names, &code, 1, names, (PyObject *)PyFunction_GET_CODE(given[0]));
    memo_insert(&calls, s.words, s.count, (PyObject *)r, names);
  }
  Py_DECREF(r);
  forget_seen(&s);
  return PyErr_Occurred() ? NULL : PyBool_FromLong(fits);
}
#pragma GCC pop_options
