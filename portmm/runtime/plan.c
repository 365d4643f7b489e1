/* Plan, a product whose shapes and strides are settled beforehand.
 * Follows matmul.c in one translation unit. */

/* What an operand must look like, and the bytes it spans around its pointer. */
typedef struct {
  int nd, element;
  Py_ssize_t shape[MAX_ND], strides[MAX_ND];
  Py_ssize_t low, high;
} operand;

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  route_object *route;
  packed_object *packed; /* NULL: b is an argument */
  PyObject *detail;
  portmm_args args;
  operand a, b, c;
  int c_order; /* c is C-contiguous, so it can be allocated */
  long *offsets, count;
  bound_launch bound; /* for callers without Python */
} plan_object;

#pragma GCC push_options
#pragma GCC optimize("O0")
static int get_sizes(PyObject *tuple, Py_ssize_t *sizes, const char *what) {
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) > MAX_ND) {
    PyErr_Format(PyExc_ValueError, "%s must be a tuple of at most %d integers; got %R", what, MAX_ND, tuple);
    return -1;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++)
    if ((sizes[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple, i))) == -1 && PyErr_Occurred()) return -1;
  return (int)PyTuple_GET_SIZE(tuple);
}

/* From a tuple (shape, strides in bytes); 0 with an exception. */
static int get_operand(PyObject *pair, int element, operand *o) {
  PyObject *shape, *strides;
  if (!PyTuple_Check(pair)) return PyErr_Format(PyExc_TypeError, "need (shape, strides); got %R", pair), 0;
  if (!PyArg_ParseTuple(pair, "OO;need (shape, strides)", &shape, &strides)) return 0;
  if ((o->nd = get_sizes(shape, o->shape, "shape")) < 0) return 0;
  int count = get_sizes(strides, o->strides, "strides");
  if (count < 0) return 0;
  if (count != o->nd) return PyErr_Format(PyExc_ValueError, "%R has no stride for each dimension", pair), 0;
  o->element = element;
  o->low = 0;
  o->high = elements[element].bytes;
  int empty = 0;
  for (int i = 0; i < o->nd; i++) {
    if (o->shape[i] < 0) return PyErr_Format(PyExc_ValueError, "negative dimension in %R", shape), 0;
    Py_ssize_t reach = (o->shape[i] - 1) * o->strides[i];
    *(reach < 0 ? &o->low : &o->high) += reach;
    empty |= o->shape[i] == 0;
  }
  if (empty) o->low = o->high = 0; /* overlaps nothing */
  return 1;
}

static int is_c_order(const operand *o, Py_ssize_t bytes) {
  for (int i = 0; i < o->nd; i++)
    if (o->shape[i] == 0) return 1;
  for (int i = o->nd - 1; i >= 0; i--) {
    if (o->shape[i] > 1 && o->strides[i] != bytes) return 0;
    bytes *= o->shape[i];
  }
  return 1;
}

static PyObject *size_tuple(int nd, const Py_ssize_t *sizes) {
  PyObject *tuple = PyTuple_New(nd);
  for (int i = 0; tuple && i < nd; i++) {
    PyObject *size = PyLong_FromSsize_t(sizes[i]);
    if (!size) Py_CLEAR(tuple);
    else PyTuple_SET_ITEM(tuple, i, size);
  }
  return tuple;
}

static array_object *refuse(const char *name, const char *what, int nd, const Py_ssize_t *got, const operand *want,
                            const Py_ssize_t *sizes) {
  PyObject *have = size_tuple(nd, got), *need = size_tuple(want->nd, sizes);
  if (have && need) PyErr_Format(PyExc_ValueError, "%s has %s %R; this plan is for %R", name, what, have, need);
  Py_XDECREF(have);
  Py_XDECREF(need);
  return NULL;
}

#pragma GCC pop_options

/* 1, or an exception for an array whose class gives arithmetic another meaning. */
static int is_plain_class(PyObject *object, const char *name) {
  PyObject *module = PyImport_ImportModule("portmm.util.array_subclasses");
  PyObject *done = module ? PyObject_CallMethod(module, "refuse_class", "OsO", object, name, Py_False) : NULL;
  Py_XDECREF(module);
  Py_XDECREF(done);
  return done != NULL;
}

/* The array in `object` if it is what the plan was made for, or an exception. */
static array_object *check_operand(PyObject *object, const operand *want, const char *name) {
  if (Py_TYPE(object) != array_type && !PyObject_TypeCheck(object, array_type)) {
    PyErr_Format(PyExc_TypeError, "%s is %s; a plan takes numpy arrays", name, Py_TYPE(object)->tp_name);
    return NULL;
  }
  if (Py_TYPE(object) != array_type && !is_plain_class(object, name)) return NULL;
  array_object *a = (array_object *)object;
  if (element_of(a) != want->element) {
    PyErr_Format(PyExc_TypeError, "%s has dtype %S; this plan is for %s", name, a->descr, elements[want->element].numpy);
    return NULL;
  }
  int same = a->nd == want->nd;
  for (int i = 0; same && i < want->nd; i++) same = a->shape[i] == want->shape[i];
  if (!same) return refuse(name, "shape", a->nd, a->shape, want, want->shape);
  /* the stride of a dimension of extent 1 means nothing */
  for (int i = 0; i < want->nd; i++) same &= a->strides[i] == want->strides[i] || want->shape[i] <= 1;
  if (!same && want->high != want->low) return refuse(name, "strides", a->nd, a->strides, want, want->strides);
  if (!(a->flags & NUMPY_ALIGNED)) {
    PyErr_Format(PyExc_ValueError, "%s is not aligned to its elements; copy it first", name);
    return NULL;
  }
  return a;
}

static int apart(const char *c, const operand *spans, const char *x, Py_ssize_t low, Py_ssize_t high, const char *name) {
  if (!overlap(c + spans->low, c + spans->high, x + low, x + high)) return 1;
  PyErr_Format(PyExc_ValueError, "out overlaps %s in memory; give another array", name);
  return 0;
}

/* A new reference to the checked `out`, or to a new array. */
static PyObject *plan_result(const plan_object *p, PyObject *out, const char *a, const char *b) {
  if (!out || out == Py_None) {
    if (p->c_order) return empty_array(p->c.element, p->c.nd, p->c.shape);
    return PyErr_Format(PyExc_ValueError, "this plan is for an out that is not C-contiguous; give out=");
  }
  array_object *c = check_operand(out, &p->c, "out");
  if (!c) return NULL;
  if (!(c->flags & NUMPY_WRITEABLE)) return PyErr_Format(PyExc_ValueError, "out is read-only");
  const Py_ssize_t packed = p->packed ? p->packed->owner->shape[0] * elements[p->packed->element].bytes : 0;
  if (!apart(c->data, &p->c, a, p->a.low, p->a.high, "a") ||
      !apart(c->data, &p->c, b, p->packed ? 0 : p->b.low, p->packed ? packed : p->b.high, "b"))
    return NULL;
  return Py_NewRef(out);
}

/* Takes the reference to `result`. A product without dimensions that was
 * allocated here becomes a scalar, as in NumPy. */
static PyObject *run_plan(const plan_object *p, const char *a, const char *b, PyObject *result, int allocated) {
  if (!result) return NULL;
  portmm_args run = p->args;
  run.a = a;
  run.b = b;
  run.c = ((array_object *)result)->data;
  if (run_route(p->route, &run, p->offsets, p->count)) Py_CLEAR(result);
  return result && allocated && p->c.nd == 0 ? scalar_of(result) : result;
}

static PyObject *plan_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
  static const char *const both[] = {"a", "b", "out"}, *const one[] = {"a", "out"};
  const plan_object *p = (const plan_object *)self;
  const int inputs = p->packed ? 1 : 2;
  PyObject *v[3];
  if (!bind_arguments("a plan", p->packed ? one : both, inputs + 1, inputs, args, PyVectorcall_NARGS(nargsf), kwnames, v))
    return NULL;
  const array_object *a = check_operand(v[0], &p->a, "a");
  if (!a) return NULL;
  const array_object *b = p->packed ? p->packed->owner : check_operand(v[1], &p->b, "b");
  if (!b) return NULL;
  PyObject *result = plan_result(p, v[inputs], a->data, b->data);
  return run_plan(p, a->data, b->data, result, !v[inputs] || v[inputs] == Py_None);
}

#pragma GCC push_options
#pragma GCC optimize("O0")
static void plan_dealloc(plan_object *p) {
  Py_XDECREF(p->route);
  Py_XDECREF(p->packed);
  Py_XDECREF(p->detail);
  PyMem_Free(p->offsets);
  Py_TYPE(p)->tp_free((PyObject *)p);
}

static PyMemberDef plan_members[] = {
    {"route", T_OBJECT, offsetof(plan_object, route), READONLY, "what is launched"},
    {"packed", T_OBJECT, offsetof(plan_object, packed), READONLY, "the bound weight, or None"},
    {"detail", T_OBJECT, offsetof(plan_object, detail), READONLY, "whatever the maker attached"},
    {NULL, 0, 0, 0, NULL},
};

/* Addresses of run_bound and of its first argument. */
static PyObject *plan_pointer(PyObject *self, void *closure) {
  plan_object *p = (plan_object *)self;
  (void)closure;
  return Py_BuildValue("(NN)", PyLong_FromVoidPtr((void *)run_bound), PyLong_FromVoidPtr(&p->bound));
}

static PyGetSetDef plan_computed[] = {
    {"pointer", plan_pointer, NULL,
     "Addresses of a C function and of its first argument: int f(const void *plan, const void *a, const void *b, void *c)\n"
     "computes C, of operands as the plan takes them, without checks and without the interpreter's lock, on any thread,\n"
     "as long as the plan exists. It returns 0, or -1 without memory for a workspace. b is NULL for a packed weight.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject plan_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "portmm.runtime.Plan",
    .tp_doc = "A product whose shapes and strides are settled: plan(a, b, out=None), or plan(a, out=None) of a packed b.",
    .tp_basicsize = sizeof(plan_object),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_dealloc = (destructor)plan_dealloc,
    .tp_members = plan_members,
    .tp_getset = plan_computed,
    .tp_vectorcall_offset = offsetof(plan_object, call),
    .tp_call = PyVectorcall_Call,
};

/* The operands, numbers and offsets into a fresh plan; 0 with an exception. */
static int fill_plan(plan_object *p, PyObject *a, PyObject *b, PyObject *c, PyObject *numbers, PyObject *outer) {
  const int *types = p->route->elements;
  long v[NUMBERS];
  Py_buffer view;
  if (!get_operand(a, types[0], &p->a) || !get_operand(c, types[2], &p->c)) return 0;
  if (PyObject_TypeCheck(b, &packed_type)) p->packed = (packed_object *)Py_NewRef(b);
  else if (!get_operand(b, types[1], &p->b)) return 0;
  if (p->packed && p->packed->element != types[1])
    return PyErr_Format(PyExc_TypeError, "b is packed for another dtype than the route"), 0;
  if (!PyTuple_Check(numbers) || PyTuple_GET_SIZE(numbers) != NUMBERS)
    return PyErr_Format(PyExc_ValueError, "numbers must be a tuple of %d integers; got %R", NUMBERS, numbers), 0;
  for (int i = 0; i < NUMBERS; i++)
    if ((v[i] = PyLong_AsLong(PyTuple_GET_ITEM(numbers, i))) == -1 && PyErr_Occurred()) return 0;
  set_numbers(&p->args, v);
  p->c_order = is_c_order(&p->c, elements[types[2]].bytes);
  if (!get_offsets(outer, &view)) return 0;
  p->count = view.len / (Py_ssize_t)(3 * sizeof(long));
  p->offsets = PyMem_Malloc((size_t)view.len + 1);
  if (p->offsets) memcpy(p->offsets, view.buf, (size_t)view.len);
  else PyErr_NoMemory();
  if (view.obj) PyBuffer_Release(&view);
  if (!p->offsets) return 0;
  /* Once: other threads may run it, without the lock of the interpreter, while one asks for its address again. */
  p->bound = bind_launch(p->route->launch, p->args, p->offsets, p->count);
  if (p->packed) p->bound.args.b = p->packed->owner->data;
  return 1;
}

static PyObject *py_make_plan(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"route", "a", "b", "c", "numbers", "outer", "detail", NULL};
  PyObject *route, *a, *b, *c, *numbers, *outer = Py_None, *detail = Py_None;
  (void)module;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOO|O$O:make_plan", names, &route_type, &route, &a, &b, &c, &numbers,
                                   &outer, &detail))
    return NULL;
  plan_object *p = (plan_object *)plan_type.tp_alloc(&plan_type, 0);
  if (!p) return NULL;
  p->call = plan_call;
  p->route = (route_object *)Py_NewRef(route);
  p->detail = Py_NewRef(detail);
  if (!fill_plan(p, a, b, c, numbers, outer)) Py_CLEAR(p);
  return (PyObject *)p;
}
#pragma GCC pop_options
