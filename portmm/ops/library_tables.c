typedef long (*scratch)(const portmm_args *, long m, long n, long workers);
struct kernel { kernel_function function; scratch workspace;
  int swap, size; long least, most; };
struct row { const char *types; char a, b; int machine, kernel, one;
  long threads, least, most, n, k; long bytes[3]; };
struct packing { const char *types; int machine, by_rows, by_columns, sums; long group, nr, kr, bytes; };
struct attention { const char *type; int machine, kernel, causal, window, lse; scratch workspace;
  long threads, queries, keys, d, step, run, least, d_unit, dv_unit, align, bytes; };
struct variant { int machine; long threads, arena; int (*run)(char *const *, const float *, char *); };
{% for x in kernels %}
void portmm_kernel_{{ x.number }}(const portmm_args *args);
static long workspace_{{ x.number }}(const portmm_args *p, long m, long n, long workers) {
  (void)p, (void)m, (void)n, (void)workers;
  return {{ x.workspace }};
}
{% endfor %}
{% for x in scratches %}
static long scratch_{{ loop.index0 }}(const portmm_args *p, long m, long n, long workers) {
  (void)p, (void)m, (void)n, (void)workers;
  return {{ x }};
}
{% endfor %}
static const struct kernel kernels[] = {
{% for x in kernels %}
  {portmm_kernel_{{ x.number }}, workspace_{{ x.number }}, {{ x.swap }}, {{ x.size }}, {{ x.least }}, {{ x.most }}},
{% endfor %}
  {NULL, NULL, 0, 0, 0, 0},
};
enum { MACHINES = {{ machines | length }} };
/* Features of a machine, and those that its kernels need. */
static const struct { const char *name; const char *const *features, *const *needs; } machines[] = {
{% for name, features, needs in machines %}
  {"{{ name }}", (const char *const[]){ {%- for x in features %}"{{ x }}", {% endfor %}NULL},
   (const char *const[]){ {%- for x in needs %}"{{ x }}", {% endfor %}NULL}},
{% endfor %}
};
static const char *const unlisted[] = { {%- for x in unlisted %}"{{ x }}", {% endfor %}NULL};
static const struct row rows[] = {
{% for x in rows %}
  {{ x }},
{% endfor %}
  {.machine = -1},
};
enum { ROWS = sizeof rows / sizeof *rows - 1 };
static const struct packing packings[] = {
{% for x in packings %}
  {{ x }},
{% endfor %}
  {"", -1, 0, 0, 0, 0, 0, 0, 0},
};
enum { PACKINGS = sizeof packings / sizeof *packings - 1 };
static const struct attention attentions[] = {
{% for x in attentions %}
  {{ x }},
{% endfor %}
  {.machine = -1},
};
enum { ATTENTIONS = sizeof attentions / sizeof *attentions - 1 };
