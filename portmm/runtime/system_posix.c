/* The functions of system_linux.c by POSIX alone, as for macOS, where programs have no futex that stays as it is: a few
 * queues, each of a lock and a condition, for all words that threads sleep on. */
enum { QUEUES = 64, QUEUE_BYTES = 128 };

static struct queue {
  _Alignas(QUEUE_BYTES) pthread_mutex_t lock;
  pthread_cond_t changed;
} queues[QUEUES] = {[0 ... QUEUES - 1] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER}};

/* Neighbouring lines have neighbouring queues. */
static struct queue *queue_of(const void *word) { return queues + (uintptr_t)word / 64 % QUEUES; }

/* Sleep while a word has a value. A thread holds the lock from its look at the word until it sleeps. */
static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
  struct queue *q = queue_of(word);
  pthread_mutex_lock(&q->lock);
  while (atomic_load(word) == value) pthread_cond_wait(&q->changed, &q->lock);
  pthread_mutex_unlock(&q->lock);
}

/* Wake the thread that sleeps on a word, after its value has changed; others of its queue look at theirs. */
static void wake(_Atomic uint32_t *word) {
  struct queue *q = queue_of(word);
  pthread_mutex_lock(&q->lock);
  pthread_cond_broadcast(&q->changed);
  pthread_mutex_unlock(&q->lock);
}

/* In a forked child, which has none of the sleepers, nor of the threads that held a lock. */
static void renew_sleep(void) {
  for (int i = 0; i < QUEUES; i++) {
    pthread_mutex_init(&queues[i].lock, NULL);
    pthread_cond_init(&queues[i].changed, NULL);
  }
}

/* The processors of the machine; no thread is bound to some of them. */
static long processors(void) { return sysconf(_SC_NPROCESSORS_ONLN); }

/* Threads are left where the system puts them. */
enum { APART_MAX = 0 };
static long processor(void) { return -1; }
static void keep_off(long worker, pthread_t thread, long one) {
  (void)worker;
  (void)thread;
  (void)one;
}
static void forget_kept_off(void) {}
