/* A few threads that share one job at a time with the caller. */
#define _GNU_SOURCE
#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#include "kernels.h"

enum { TM_MAX_THREADS = 1024 };

typedef struct {
  tm_range_fn function;
  void *context;
  size_t n;
  size_t chunk;
  atomic_size_t next; /* first element that nobody has taken */
} tm_job;

struct tm_pool {
  pid_t owner;                /* the process that has the threads */
  uint32_t num_workers;       /* threads besides the caller's */
  pthread_mutex_t one_caller; /* held for the whole of a job */
  pthread_mutex_t lock;       /* guards what follows */
  pthread_cond_t work, idle;
  tm_job *job;         /* NULL when there is nothing to join */
  uint64_t generation; /* of job: a worker joins each job once */
  uint32_t num_inside; /* workers that joined job and have not left it */
  bool stopping;
  pthread_t threads[];
};

/* [Note: floating-point environment]
 * torch.set_flush_denormal changes it for one thread, and threads inherit that of their creator;
 * results would then depend on which thread took a piece. */
static void tm_job_take_part(tm_job *job) {
  fenv_t saved;
  fegetenv(&saved);
  fesetenv(FE_DFL_ENV);
  for (;;) {
    size_t begin = atomic_fetch_add_explicit(&job->next, job->chunk, memory_order_relaxed);
    if (begin >= job->n) break;
    size_t left = job->n - begin;
    job->function(job->context, begin, begin + (left < job->chunk ? left : job->chunk));
  }
  fesetenv(&saved);
}

static void *tm_worker(void *argument) {
  tm_pool *pool = argument;
  uint64_t seen = 0;
  pthread_mutex_lock(&pool->lock);
  while (!pool->stopping) {
    if (pool->job == NULL || pool->generation == seen) {
      pthread_cond_wait(&pool->work, &pool->lock);
      continue;
    }
    tm_job *job = pool->job;
    seen = pool->generation;
    pool->num_inside++;
    pthread_mutex_unlock(&pool->lock);
    tm_job_take_part(job);
    pthread_mutex_lock(&pool->lock);
    if (--pool->num_inside == 0) pthread_cond_signal(&pool->idle);
  }
  pthread_mutex_unlock(&pool->lock);
  return NULL;
}

static void tm_pool_join(tm_pool *pool) {
  pthread_mutex_lock(&pool->lock);
  pool->stopping = true;
  pthread_cond_broadcast(&pool->work);
  pthread_mutex_unlock(&pool->lock);
  for (uint32_t i = 0; i < pool->num_workers; i++) pthread_join(pool->threads[i], NULL);
  pthread_cond_destroy(&pool->idle);
  pthread_cond_destroy(&pool->work);
  pthread_mutex_destroy(&pool->lock);
  pthread_mutex_destroy(&pool->one_caller);
}

int tm_pool_create(uint32_t num_threads, tm_pool **out) {
  int error = 0;
  tm_pool *pool = NULL;
  sigset_t all, saved;

  if (out == NULL || num_threads == 0 || num_threads > TM_MAX_THREADS) return -EINVAL;
  pool = calloc(1, sizeof *pool + (num_threads - 1) * sizeof pool->threads[0]);
  if (pool == NULL) return -ENOMEM;
  pool->owner = getpid();
  pthread_mutex_init(&pool->one_caller, NULL); /* default attributes: these cannot fail on Linux */
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->work, NULL);
  pthread_cond_init(&pool->idle, NULL);

  /* Signals belong to the threads of the program: a handler must not run on a worker's stack. */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &saved);
  while (error == 0 && pool->num_workers < num_threads - 1) {
    error = pthread_create(&pool->threads[pool->num_workers], NULL, tm_worker, pool);
    if (error == 0) pthread_setname_np(pool->threads[pool->num_workers++], "tm_kernel");
  }
  pthread_sigmask(SIG_SETMASK, &saved, NULL);

  if (error != 0) {
    tm_pool_join(pool);
    free(pool);
    pool = NULL;
  }
  *out = pool;
  return -error;
}

void tm_pool_free(tm_pool *pool) {
  if (pool == NULL) return;
  /* After fork the threads are not there, and the locks may be held by threads that are not. */
  if (pool->owner == getpid()) tm_pool_join(pool);
  free(pool);
}

void tm_pool_run(tm_pool *pool, size_t n, size_t chunk, tm_range_fn function, void *context) {
  tm_job job = {.function = function, .context = context, .n = n, .chunk = chunk};
  atomic_init(&job.next, 0);

  /* The process is compared before any lock is touched: see tm_pool_free. */
  if (pool == NULL || pool->num_workers == 0 || n <= chunk || pool->owner != getpid()) {
    tm_job_take_part(&job);
    return;
  }
  pthread_mutex_lock(&pool->one_caller);
  pthread_mutex_lock(&pool->lock);
  pool->job = &job;
  pool->generation++;
  pthread_cond_broadcast(&pool->work);
  pthread_mutex_unlock(&pool->lock);

  tm_job_take_part(&job);

  /* Only workers that joined are waited for; one that wakes later finds no job. */
  pthread_mutex_lock(&pool->lock);
  pool->job = NULL;
  while (pool->num_inside != 0) pthread_cond_wait(&pool->idle, &pool->lock);
  pthread_mutex_unlock(&pool->lock);
  pthread_mutex_unlock(&pool->one_caller);
}
