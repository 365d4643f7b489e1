/* `matmul`, the settings, and the module.
 * Follows attend.c in one translation unit. */

static PyObject *py_matmul(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *kwnames) {
  static const char *const names[] = {"a", "b", "out"};
  PyObject *v[3];
  (void)module;
  if (!bind_arguments("matmul", names, 3, 2, args, n, kwnames, v)) return NULL;
  if (!v[2]) v[2] = Py_None;
  PyObject *result = multiply(v[0], v[1], v[2]);
  if (result == Py_NotImplemented) result = multiply_stacks(v[0], v[1], v[2]);
  if (result == Py_NotImplemented) result = multiply_as_planned(v[0], v[1], v[2]);
  if (result != Py_NotImplemented) return result;
  PyObject *function;
  BEGIN_SHARED
  function = Py_XNewRef(slow_path);
  END_SHARED
  if (!function) return PyErr_Format(PyExc_RuntimeError, "no slow path is registered; call set_slow first");
  result = PyObject_CallFunctionObjArgs(function, v[0], v[1], v[2], NULL);
  Py_DECREF(function);
  return result;
}

#pragma GCC push_options
#pragma GCC optimize("O0")
static PyObject *set_callable(PyObject **place, PyObject *value) {
  if (!PyCallable_Check(value)) return PyErr_Format(PyExc_TypeError, "%R is not callable", value);
  PyObject *old = *place;
  *place = Py_NewRef(value);
  Py_XDECREF(old);
  return Py_NewRef(Py_None);
}

static PyObject *py_set_slow(PyObject *module, PyObject *function) {
  (void)module;
  return set_callable(&slow_path, function);
}

static PyObject *py_set_resolver(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"function", "density", NULL};
  PyObject *function;
  int density = 0;
  (void)module;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p:set_resolver", names, &function, &density)) return NULL;
  PyObject *done = set_callable(&resolver, function);
  if (done) {
    resolver_wants_density = density;
    memo_clear();
  }
  return done;
}

static PyObject *py_set_planner(PyObject *module, PyObject *function) {
  (void)module;
  PyObject *done = set_callable(&planner, function);
  if (done) memo_clear();
  return done;
}

static PyObject *py_set_override(PyObject *module, PyObject *value) {
  (void)module;
  int flag = PyObject_IsTrue(value);
  if (flag < 0) return NULL;
  override = flag;
  return Py_NewRef(Py_None);
}

static PyObject *py_clear_memo(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  memo_clear();
  memo_drop(&calls);
  memo_drop(&read_names);
  return Py_NewRef(Py_None);
}

static PyObject *py_memo_size(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  return PyLong_FromSize_t(routes.used + plans.used);
}

static PyObject *py_set_num_threads(PyObject *module, PyObject *value) {
  (void)module;
  long threads = PyLong_AsLong(value);
  if (threads == -1 && PyErr_Occurred()) return NULL;
  if (threads < 1) return PyErr_Format(PyExc_ValueError, "the number of threads is %ld; it must be at least 1", threads);
  if (atomic_exchange(&pool.limit, threads) != threads) memo_clear();
  return Py_NewRef(Py_None);
}

static PyObject *py_get_num_threads(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  return PyLong_FromLong(atomic_load(&pool.limit));
}

static PyObject *py_set_scratch(PyObject *module, PyObject *value) {
  (void)module;
  long bytes = PyLong_AsLong(value);
  if (bytes == -1 && PyErr_Occurred()) return NULL;
  if (bytes < 0) return PyErr_Format(PyExc_ValueError, "the limit of workspaces is %ld bytes; it must be at least 0", bytes);
  set_scratch(bytes);
  return Py_NewRef(Py_None);
}

static PyObject *py_scratch(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  return PyLong_FromLong(atomic_load(&spaces.kept));
}

static PyObject *py_features(PyObject *module, PyObject *unused) {
  char text[1 << 12];
  (void)module, (void)unused;
  read_features(text, sizeof text);
  return PyUnicode_FromString(text);
}

static PyObject *py_pool_threads(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  return PyLong_FromLong(atomic_load(&pool.spawned));
}

#define KEYWORDS METH_VARARGS | METH_KEYWORDS
#define FUNCTION(f) (PyCFunction)(void (*)(void))f
/* What kernels see of a tuple of arrays and packed weights, but for their addresses, and integers, as bytes; None
 * for others. Extents that are as many as `rows`, if there are more than make a class alone, stand for their class. */
static PyObject *py_describe(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  enum { MOST = 32, WORDS = 2 + 2 * MAX_ND };
  long words[MOST * WORDS];
  size_t used = 0;
  (void)module;
  if (count != 1 && count != 2) return PyErr_Format(PyExc_TypeError, "describe takes a tuple, and a number of rows");
  PyObject *x = args[0];
  const long rows = count == 2 ? PyLong_AsLong(args[1]) : 0;
  if (rows == -1 && PyErr_Occurred()) return NULL;
  if (!PyTuple_CheckExact(x) || PyTuple_GET_SIZE(x) > MOST) return Py_NewRef(Py_None);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(x); i++) {
    const array_object *a = (const array_object *)PyTuple_GET_ITEM(x, i);
    if (PyObject_TypeCheck((PyObject *)a, &packed_type)) {
      words[used++] = -1;
      words[used++] = (long)a;
      continue;
    }
    if (PyLong_CheckExact((PyObject *)a)) {
      int over;
      words[used++] = -2;
      words[used++] = PyLong_AsLongAndOverflow((PyObject *)a, &over);
      if (over) return Py_NewRef(Py_None);
      continue;
    }
    if (Py_TYPE((PyObject *)a) != array_type || a->nd > MAX_ND || element_of(a) < 0) return Py_NewRef(Py_None);
    words[used++] = a->nd;
    words[used++] = element_of(a) * 2 + !!(a->flags & NUMPY_ALIGNED);
    for (int j = 0; j < a->nd; j++) {
      words[used++] = a->shape[j] == rows && rows > 2 * CLASSES ? -last_of_class(rows) : a->shape[j];
      words[used++] = a->strides[j];
    }
  }
  return PyBytes_FromStringAndSize((const char *)words, (Py_ssize_t)(used * sizeof *words));
}

/* Functions that change what calls share. */
#ifdef Py_GIL_DISABLED
#define ALONE(f) f##_alone
#define DEFINE_ALONE(f)                                              \
  static PyObject *f##_alone(PyObject *module, PyObject *arguments) { \
    PyObject *result;                                                \
    BEGIN_SHARED                                                     \
    result = f(module, arguments);                                   \
    END_SHARED                                                       \
    return result;                                                   \
  }
DEFINE_ALONE(py_race)
DEFINE_ALONE(py_start_race)
DEFINE_ALONE(py_racing)
DEFINE_ALONE(py_register_dtype)
DEFINE_ALONE(py_keep_call)
DEFINE_ALONE(py_keep_attention)
DEFINE_ALONE(py_set_slow)
DEFINE_ALONE(py_set_planner)
DEFINE_ALONE(py_clear_memo)
DEFINE_ALONE(py_memo_size)
DEFINE_ALONE(py_set_num_threads)
static PyObject *py_set_resolver_alone(PyObject *module, PyObject *args, PyObject *kwargs) {
  PyObject *result;
  BEGIN_SHARED
  result = py_set_resolver(module, args, kwargs);
  END_SHARED
  return result;
}
#else
#define ALONE(f) f
#endif

static PyMethodDef functions[] = {
    {"load", py_load, METH_VARARGS, "load(path, symbol, file=path) -> Kernel"},
    {"make_route", py_make_route, METH_VARARGS, "make_route(kernel, work_bytes, workers, dtype, unit=1) -> Route"},
    {"race", ALONE(py_race), METH_VARARGS, "race(route, task, after): let a route race after calls of some seconds"},
    {"start_race", ALONE(py_start_race), METH_VARARGS, "start_race(route, rivals): begin its rounds"},
    {"racing", ALONE(py_racing), METH_O, "racing(route) -> its state, or an empty string"},
    {"register_dtype", ALONE(py_register_dtype), METH_VARARGS, "register_dtype(name, dtype): arrays of a type from elsewhere"},
    {"execute", FUNCTION(py_execute), METH_FASTCALL, "execute(route, m, n, k, batch, a, ..., c_batch, outer=None)"},
    {"execute_all", FUNCTION(py_execute_all), METH_FASTCALL, "execute_all(routes, words): kernels in a row"},
    {"describe", FUNCTION(py_describe), METH_FASTCALL, "describe(arrays, rows=0) -> bytes, or None"},
    {"features", py_features, METH_NOARGS, "features() -> those of the processor, as words"},
    {"address", py_address, METH_O, "address(array) -> where its first element lies"},
    {"largest_scale", py_largest_scale, METH_O, "largest_scale(vector) -> the largest; -1 if any is negative or not finite"},
    {"tape", FUNCTION(py_tape), METH_FASTCALL, "tape(code, constants, sizes, shared) -> what the cost model predicts"},
    {"join_codes", FUNCTION(py_join_codes), METH_FASTCALL, "join_codes(values, to): values of four bits, two in a byte"},
    {"matmul", FUNCTION(py_matmul), METH_FASTCALL | METH_KEYWORDS,
     "matmul($module, /, a, b, out=None)\n--\n\nMatrix product of two arrays."},
    {"make_plan", FUNCTION(py_make_plan), KEYWORDS, "make_plan(route, a, b, c, numbers, outer=None, *, detail=None) -> Plan"},
    {"repeat", FUNCTION(py_repeat), METH_FASTCALL, "repeat(function, a, b, out, dtype, settings) -> results, or NotImplemented"},
    {"keep_call", ALONE(py_keep_call), METH_VARARGS, "keep_call(call, ...): prepare further calls of a kind"},
    {"attend", FUNCTION(py_attend), METH_FASTCALL, "attend(q, k, v, ..., settings, limit) -> results, or NotImplemented"},
    {"keep_attention", ALONE(py_keep_attention), METH_VARARGS, "keep_attention(call, ...): prepare further calls of a kind"},
    {"set_slow", ALONE(py_set_slow), METH_O, "set_slow(function): called as function(a, b, out)"},
    {"set_resolver", FUNCTION(ALONE(py_set_resolver)), KEYWORDS, "set_resolver(function, density=False)"},
    {"set_planner", ALONE(py_set_planner), METH_O, "set_planner(function): called as function(a, b, out)"},
    {"set_override", py_set_override, METH_O, "set_override(flag): every matmul takes the slow path"},
    {"clear_memo", ALONE(py_clear_memo), METH_NOARGS, "clear_memo(): forget every route and plan"},
    {"memo_size", ALONE(py_memo_size), METH_NOARGS, "memo_size() -> routes and plans remembered"},
    {"set_num_threads", ALONE(py_set_num_threads), METH_O, "set_num_threads(n)"},
    {"get_num_threads", py_get_num_threads, METH_NOARGS, "get_num_threads() -> n"},
    {"set_scratch", py_set_scratch, METH_O, "set_scratch(bytes): bound the workspaces that are kept between calls"},
    {"scratch", py_scratch, METH_NOARGS, "scratch() -> bytes of workspaces, without those of a MiB or less"},
    {"pool_threads", py_pool_threads, METH_NOARGS, "pool_threads() -> threads started, without the callers"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_portmm_run", .m_size = -1,
                                        .m_methods = functions};

PyMODINIT_FUNC PyInit__portmm_run(void) {
  PyTypeObject *types[] = {&kernel_type, &route_type, &packed_type, &plan_type, &repeat_type, &attention_type};
  if (host_start()) return PyErr_Format(PyExc_RuntimeError, "the thread pool cannot be started");
  if (start_numpy() || !(no_family = PyUnicode_InternFromString(""))) return NULL;
  PyObject *module = PyModule_Create(&definition);
  for (size_t i = 0; module && i < sizeof types / sizeof *types; i++)
    if (PyModule_AddType(module, types[i])) Py_CLEAR(module);
#ifdef Py_GIL_DISABLED
  shared = module;
  if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED)) Py_CLEAR(module);
#endif
  return module;
}
#pragma GCC pop_options
#endif
