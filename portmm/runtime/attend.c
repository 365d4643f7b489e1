/* Attention without functions, of kinds that Python has prepared.
 * Follows repeat.c in one translation unit.
 *
 * Numbers of queries and keys of dense operands stand for their classes: strides follow from them. */
enum { ATTENTION_ARRAYS = 5, STRIDES = 4 };

typedef struct {
  PyObject_HEAD
  route_object *route;
  PyObject *settings;
  portmm_args args; /* what all calls have in common */
  portmm_operand table[ATTENTION_ARRAYS];
  long steps[ATTENTION_ARRAYS][STRIDES][3]; /* strides along items, rows, columns, heads: times 1, queries and keys */
  long window, align;                       /* -1: none; bytes that addresses of keys are multiples of */
  int dense, lse, count;
  float numbers[CALL_OPERANDS];
} attention_object;

/* A flag of Python, or -1. */
INLINE long flag_of(PyObject *x) {
  return x == Py_True ? 1 : x == Py_False ? 0 : -1;
}

/* The words of a call: q, k, v, scale, causal, window, return_lse, settings, limit of threads; 0 if it needs Python. */
static int see_attention(seen_call *s, PyObject *const *v, double fork) {
  const array_object *x[3] = {(array_object *)v[0], (array_object *)v[1], (array_object *)v[2]};
  const long causal = flag_of(v[4]), lse = flag_of(v[6]);
  s->count = 0;
  s->n_arrays = s->n_fixed = 0;
  s->rows = 0;
  int dense = 1, alike = 1;
  for (int i = 0; i < 3; i++) {
    if (Py_TYPE(v[i]) != array_type || x[i]->nd < 3 || x[i]->nd > MAX_ND || x[i]->nd != x[0]->nd) return 0;
    dense &= (x[i]->flags & C_ORDER) != 0;
  }
  if (causal < 0 || lse < 0 || !(v[3] == Py_None || PyFloat_CheckExact(v[3])) || !(v[5] == Py_None || PyLong_CheckExact(v[5])))
    return 0;
  const int nd = x[0]->nd;
  for (int i = 0; i < nd - 1; i++) alike &= x[1]->shape[i] == x[2]->shape[i];
  dense &= alike;
  double scale = v[3] == Py_None ? 0 : PyFloat_AS_DOUBLE(v[3]);
  long *w = s->words;
  *w++ = -3;
  *w++ = (long)v[7];
  if ((*w++ = PyLong_AsLong(v[8])) == -1) return PyErr_Clear(), 0;
  *w++ = causal << 3 | lse << 2 | (v[3] == Py_None) << 1 | (v[5] == Py_None);
  if ((*w++ = v[5] == Py_None ? -1 : PyLong_AsLong(v[5])) == -1 && v[5] != Py_None) return PyErr_Clear(), 0;
  memcpy(w++, &scale, sizeof scale);
  *w++ = dense << 8 | nd;
  double heads = 1;
  for (int i = 0; i < nd - 2; i++) heads *= (double)x[0]->shape[i];
  const long m = x[0]->shape[nd - 2], n = x[1]->shape[nd - 2];
  *w++ = heads * (double)m * (double)n * (double)(x[0]->shape[nd - 1] + x[2]->shape[nd - 1]) > fork;
  for (int i = 0; i < 3; i++) {
    const int element = element_of(x[i]);
    if (element < 0 || !(x[i]->flags & NUMPY_ALIGNED)) return 0;
    *w++ = element;
    for (int j = 0; j < nd; j++) {
      if (x[i]->shape[j] <= 0) return 0;
      /* Strides of others are words, so that those of a cache are the same for any number of its keys. */
      *w++ = (i ? alike : dense) && j == nd - 2 ? -last_of_class(x[i]->shape[j]) : x[i]->shape[j];
      if (!dense) *w++ = x[i]->strides[j];
    }
    s->arrays[s->n_arrays++] = x[i];
  }
  s->count = (size_t)(w - s->words);
  return 1;
}

static PyObject *run_attention(const attention_object *r, const seen_call *s) {
  const array_object *q = s->arrays[0];
  Py_ssize_t shape[MAX_ND];
  portmm_operand table[ATTENTION_ARRAYS];
  portmm_args p = r->args;
  const int nd = q->nd;
  const long m = q->shape[nd - 2], n = s->arrays[1]->shape[nd - 2];
  memcpy(shape, q->shape, (size_t)nd * sizeof *shape);
  shape[nd - 1] = r->args.c_n;
  PyObject *result = empty_array(element_of(q), nd, shape), *lse = r->lse ? empty_array(F32, nd - 1, shape) : NULL;
  if (!result || (r->lse && !lse)) {
    Py_XDECREF(result);
    Py_XDECREF(lse);
    return NULL;
  }
  const array_object *const arrays[] = {q, s->arrays[1], s->arrays[2], (array_object *)result, (array_object *)lse};
  for (int i = 0; i < r->count; i++) {
    table[i] = r->table[i];
    table[i].p = arrays[i]->data;
    if (!r->dense) continue;
    long *const to[STRIDES] = {&table[i].b, &table[i].m, &table[i].n, &table[i].h};
    for (int j = 0; j < STRIDES; j++) *to[j] = r->steps[i][j][0] + r->steps[i][j][1] * m + r->steps[i][j][2] * n;
  }
  p.m = m;
  p.n = n;
  p.b_k = r->window < 0 ? n : r->window < m + n ? r->window : m + n;
  p.c_m = n - m;
  p.operands = table;
  p.numbers = r->numbers;
  if (run_route(r->route, &p, origin, 1)) {
    Py_CLEAR(result);
    Py_CLEAR(lse);
  }
  if (!result || !lse) return result;
  PyObject *both = PyTuple_Pack(2, result, lse);
  Py_DECREF(result);
  Py_DECREF(lse);
  return both;
}

static double attention_fork;

/* attend(q, k, v, scale, causal, window, return_lse, settings, limit): the results of a call of a known kind, else
 * NotImplemented. */
static PyObject *py_attend(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  seen_call s;
  PyObject *x = NULL;
  (void)module;
  if (n != 9) return PyErr_Format(PyExc_TypeError, "attend takes 9 arguments; got %zd", n);
  if (see_attention(&s, args, attention_fork)) {
    BEGIN_SHARED
    x = Py_XNewRef(memo_get(&calls, s.words, s.count));
    END_SHARED
  }
  const int known = x && (size_t)s.arrays[1]->data % (size_t)((attention_object *)x)->align == 0;
  PyObject *result = known ? run_attention((attention_object *)x, &s) : Py_NewRef(Py_NotImplemented);
  Py_XDECREF(x);
  return result;
}

#pragma GCC push_options
#pragma GCC optimize("O0")
static void attention_dealloc(attention_object *r) {
  Py_XDECREF(r->route);
  Py_XDECREF(r->settings);
  Py_TYPE(r)->tp_free((PyObject *)r);
}

static PyTypeObject attention_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "portmm.runtime.Attention",
    .tp_basicsize = sizeof(attention_object),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)attention_dealloc,
};

/* keep_attention(call, route, numbers, template, steps, constants, window, align, fork): prepare further calls of a kind.
 * `call` has the arguments of `attend`, `numbers` those of `make_plan`; the template has the strides of operands, steps
 * how those of dense ones follow from the numbers of queries and keys, and `fork` is `attention_kernel.FORK`. */
static PyObject *py_keep_attention(PyObject *module, PyObject *args) {
  PyObject *call, *route, *numbers, *template, *steps, *constants;
  long window, align, v[NUMBERS];
  double fork;
  seen_call s;
  Py_buffer view;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!O!O!OOOlld:keep_attention", &PyTuple_Type, &call, &route_type, &route, &PyTuple_Type,
                        &numbers, &template, &steps, &constants, &window, &align, &fork))
    return NULL;
  if (PyTuple_GET_SIZE(call) != 9 || PyTuple_GET_SIZE(numbers) != NUMBERS || align < 1)
    return PyErr_Format(PyExc_ValueError, "keep_attention got %R and %R", call, numbers);
  for (int i = 0; i < NUMBERS; i++)
    if ((v[i] = PyLong_AsLong(PyTuple_GET_ITEM(numbers, i))) == -1 && PyErr_Occurred()) return NULL;
  attention_fork = fork;
  if (!see_attention(&s, ((PyTupleObject *)call)->ob_item, fork)) return Py_NewRef(Py_False);
  attention_object *r = PyObject_New(attention_object, &attention_type);
  if (!r) return NULL;
  memset((char *)r + sizeof(PyObject), 0, sizeof *r - sizeof(PyObject));
  r->route = (route_object *)Py_NewRef(route);
  r->settings = Py_NewRef(PyTuple_GET_ITEM(call, 7));
  set_numbers(&r->args, v);
  r->window = window;
  r->align = align;
  r->lse = PyTuple_GET_ITEM(call, 6) == Py_True;
  r->count = ATTENTION_ARRAYS - !r->lse;
  r->dense = s.words[6] >> 8 & 1;
  int fits = get_table(template, r->count, r->table);
  const struct { PyObject *from; void *to; size_t size; } copied[] = {
      {steps, r->steps, (size_t)r->count * sizeof *r->steps}, {constants, r->numbers, sizeof r->numbers}};
  for (int i = 0; i < 2; i++) {
    if (PyObject_GetBuffer(copied[i].from, &view, PyBUF_C_CONTIGUOUS)) {
      Py_DECREF(r);
      return NULL;
    }
    fits &= i ? (size_t)view.len <= copied[i].size : (size_t)view.len == copied[i].size;
    if (fits) memcpy(copied[i].to, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
  }
  if (fits) memo_insert(&calls, s.words, s.count, (PyObject *)r, r->settings);
  Py_DECREF(r);
  return PyBool_FromLong(fits);
}
#pragma GCC pop_options
