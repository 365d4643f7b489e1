/* Products of more than two ordinary matrices: batches, vectors, any strides.
 * Follows plan.c in one translation unit.
 *
 * Stacks of as many matrices each, at even steps, have routes as two matrices do. For the rest
 * the planner, a Python function, is asked once for each signature: element
 * type, shapes and strides of all operands. What it made is run for every later
 * call of that signature without running any Python. */

enum { SIGNATURE_MOST = 3 * (2 + 2 * MAX_ND) }; /* an array takes most, a packed weight 7 + MAX_ND */
typedef struct {
  long words[SIGNATURE_MOST];
  size_t count;
  PyObject *family;
} signature;

/* Extents and strides of an array that kernels can read; 0 if it is not one. */
static inline int sign_array(signature *s, PyObject *object) {
  if (Py_TYPE(object) != array_type) return 0;
  const array_object *a = (const array_object *)object;
  if (a->nd > MAX_ND || !(a->flags & NUMPY_ALIGNED)) return 0;
  long *w = s->words + s->count;
  if ((*w++ = element_of(a)) < 0) return 0;
  *w++ = a->nd;
  for (int i = 0; i < a->nd; i++) {
    const long extent = a->shape[i];
    if (extent <= 0) return 0;
    *w++ = extent;
    *w++ = extent == 1 ? 0 : a->strides[i]; /* which means nothing */
  }
  s->count = (size_t)(w - s->words);
  return 1;
}

/* All that a plan depends on, but not which weight it is. */
static inline int sign_packed(signature *s, const packed_object *p) {
  const Py_ssize_t nd = PyTuple_GET_SIZE(p->shape);
  if (nd > MAX_ND) return 0;
  long *w = s->words + s->count;
  *w++ = p->element;
  *w++ = -1 - nd;
  *w++ = (long)p->family;
  *w++ = p->owner->shape[0];
  *w++ = p->b_k;
  *w++ = p->b_n;
  *w++ = p->b_batch;
  for (Py_ssize_t i = 0; i < nd; i++)
    if ((*w++ = PyLong_AsLong(PyTuple_GET_ITEM(p->shape, i))) <= 0) return PyErr_Clear(), 0;
  s->count = (size_t)(w - s->words);
  s->family = p->family;
  return 1;
}

static inline int sign(signature *s, PyObject *a, PyObject *b, PyObject *out) {
  s->family = no_family;
  s->count = 0;
  if (!sign_array(s, a)) return 0;
  if (Py_TYPE(b) != array_type && PyObject_TypeCheck(b, &packed_type)) {
    if (!sign_packed(s, (packed_object *)b)) return 0;
  } else if (!sign_array(s, b)) {
    return 0;
  }
  return out == Py_None || ((((array_object *)out)->flags & NUMPY_WRITEABLE) && sign_array(s, out));
}

/* A plan for just these operands, or an exception: a wrong one would write anywhere. */
static int plan_fits(const plan_object *p, PyObject *a, PyObject *b, PyObject *out) {
  if (Py_TYPE(p) != &plan_type || p->packed || (out == Py_None && !p->c_order))
    return PyErr_Format(PyExc_TypeError, "the planner returned %R; need a Plan for these operands, or None", p), 0;
  return check_operand(a, &p->a, "a") && check_operand(b, &p->b, "b") && (out == Py_None || check_operand(out, &p->c, "out"));
}

/* A new reference to the plan for a signature, or to None for the slow path,
 * which is remembered as well: it would be the answer every time. */
static PyObject *ask_planner(const signature *s, PyObject *a, PyObject *b, PyObject *b_data, PyObject *out) {
  unsigned long epoch;
  PyObject *function;
  BEGIN_SHARED
  epoch = memo_epoch;
  function = Py_NewRef(planner); /* never unset */
  END_SHARED
  PyObject *plan = PyObject_CallFunctionObjArgs(function, a, b, out, NULL);
  Py_DECREF(function);
  if (plan && plan != Py_None && !plan_fits((plan_object *)plan, a, b_data, out)) Py_CLEAR(plan);
  BEGIN_SHARED
  if (plan && memo_epoch == epoch) memo_insert(&plans, s->words, s->count, plan, s->family);
  END_SHARED
  return plan;
}

/* A stack of `count` > 1 matrices, `step` elements from one to the next; 0 if it is none, or they overlap. */
static int get_stack(PyObject *object, matrix *v, long *count, long *step) {
  if (Py_TYPE(object) != array_type) return 0;
  const array_object *a = (const array_object *)object;
  long bytes;
  if (!is_readable(a, &v->element) || !join_rows(a, a->nd - 3, count, &bytes) || *count < 2) return 0;
  if (!as_matrix(a, a->shape[a->nd - 2], a->strides[a->nd - 2], 1, v)) return 0;
  if (bytes % elements[v->element].bytes || bytes < v->end - v->data) return 0;
  *step = bytes / elements[v->element].bytes;
  v->end += (*count - 1) * bytes;
  return 1;
}

/* Whether all extents but the last two are equal. */
static inline int same_batch(const array_object *x, const array_object *y) {
  int same = x->nd == y->nd;
  for (int i = 0; same && i < x->nd - 2; i++) same = x->shape[i] == y->shape[i];
  return same;
}

/* Two stacks of as many matrices: as `multiply`. */
static PyObject *multiply_stacks(PyObject *a_object, PyObject *b_object, PyObject *out) {
  const array_object *const a_array = (array_object *)a_object, *const b_array = (array_object *)b_object;
  matrix a, b, c;
  long a_step, b_step, c_step;
  route_key key;
  if (override || !resolver_wants_density || Py_TYPE(b_object) != array_type || b_array->nd < 3 ||
      !get_stack(a_object, &a, &key.batch, &a_step) || !same_batch(a_array, b_array) ||
      !get_stack(b_object, &b, &key.batch, &b_step) || (c.element = product_of(a.element, b.element)) < 0 ||
      a.cols != b.rows)
    return Py_NotImplemented;
  if (out == Py_None) {
    c.s_row = b.cols;
    c.s_col = 1;
    c.col = 0;
    c.dense = 1;
    c_step = a.rows * b.cols;
  } else if (!get_stack(out, &c, &key.batch, &c_step) || c.element != product_of(a.element, b.element) ||
             c.rows != a.rows || c.cols != b.cols || !same_batch(a_array, (array_object *)out) ||
             !(((array_object *)out)->flags & NUMPY_WRITEABLE) || overlap(c.data, c.end, a.data, a.end) ||
             overlap(c.data, c.end, b.data, b.end)) {
    return Py_NotImplemented;
  }
  key.n = b.cols;
  key.k = a.cols;
  key.family = (long)no_family;
  PyObject *route = route_for(&key, STACK_WORDS, &a, &b, &c);
  if (!route) return NULL;
  PyObject *result = Py_NotImplemented;
  if (route != Py_None) {
    result = out == Py_None ? result_of(a_array, b.cols, c.element) : Py_NewRef(out);
    if (result) {
      portmm_args p;
      c.data = ((array_object *)result)->data;
      set_product(&p, &a, &b, &c, key.batch);
      p.a_batch = a_step;
      p.b_batch = b_step;
      p.c_batch = c_step;
      if (run_route((route_object *)route, &p, origin, 1)) Py_CLEAR(result);
    }
  }
  Py_DECREF(route);
  return result;
}

/* As `multiply`. */
static PyObject *multiply_as_planned(PyObject *a, PyObject *b, PyObject *out) {
  signature s;
  if (override || !planner || (out != Py_None && Py_TYPE(out) != array_type) || !sign(&s, a, b, out))
    return Py_NotImplemented;
  PyObject *b_data = Py_TYPE(b) == array_type ? b : (PyObject *)((packed_object *)b)->owner;
  PyObject *plan;
  BEGIN_SHARED
  plan = Py_XNewRef(memo_get(&plans, s.words, s.count));
  END_SHARED
  plan = plan ? plan : ask_planner(&s, a, b, b_data, out);
  if (!plan) return NULL;
  const plan_object *p = (plan_object *)plan;
  PyObject *result = Py_NotImplemented;
  if (plan != Py_None) {
    const char *from_a = ((array_object *)a)->data, *from_b = ((array_object *)b_data)->data;
    const char *to = out == Py_None ? NULL : ((array_object *)out)->data;
    if (!to || !(overlap(to + p->c.low, to + p->c.high, from_a + p->a.low, from_a + p->a.high) ||
                 overlap(to + p->c.low, to + p->c.high, from_b + p->b.low, from_b + p->b.high)))
      result = run_plan(p, from_a, from_b, to ? Py_NewRef(out) : empty_array(p->c.element, p->c.nd, p->c.shape), !to);
  }
  Py_DECREF(plan);
  return result;
}
