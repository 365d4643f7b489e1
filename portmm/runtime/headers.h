/* What all files of the run time include; the file of the system follows, and then pool.c. */
#ifdef PORTMM_PYTHON
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#endif
#include <dlfcn.h>
#include <float.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
